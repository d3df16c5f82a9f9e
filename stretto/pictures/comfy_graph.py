"""ComfyUI graphs: a template of ComfyUI's editor is converted to the server's format, fitted to a request, and checked before it is sent.

The server's format maps node ids to ``{"class_type", "inputs"}``; an input is a value or a link ``[node id, output]``. Templates (of the package
comfyui-workflow-templates-json, MIT) are in the editor's format: values by position, links by number, groups of nodes as subgraphs.
``/object_info`` lists the inputs and outputs of every kind of node. All functions here depend on that list, a template and a request only.
Written from ComfyUI's documentation (docs.comfy.org); its code, under the GPL, is neither imported nor copied.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from importlib import resources
from pathlib import PurePosixPath
from typing import Any, Final

from stretto.base.errors import UserError, nearest
from stretto.pictures.backend import Control, Lora, PaintRequest

Graph = dict[str, dict[str, Any]]

TEMPLATES: Final = (
    "image_ernie_image",
    "image_ernie_image_turbo",
    "image_qwen_Image_2512",
    "image_z_image_turbo",
    "flux1_krea_dev",
    "flux_schnell_full_text_to_image",
    "hidream_i1_fast",
    "sd3.5_simple_example",
    "image_sdxl_simple",
)
"""Text-to-image templates in order of preference. The last one runs with any checkpoint that contains a text encoder."""
_PLAIN: Final = TEMPLATES[-1]

_WIDGETS: Final = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")
"""Types of inputs that take a value in the editor. All other types take links only."""
_ANY, _BY_OPTION, _REPEATED = "COMFY_MATCHTYPE_V3", "COMFY_DYNAMICCOMBO_V3", "COMFY_AUTOGROW_V3"
"""Dynamic types: any type that all such inputs of the node share; options that bring inputs of their own, named ``input.part``; and an input
that is repeated as ``input.name0``, ``input.name1`` …"""
_SEED_CONTROLS: Final = ("fixed", "increment", "decrement", "randomize")
"""Values that the editor stores after a seed and does not send to the server."""
_MUTED, _BYPASSED = 2, 4
_NOTES, _THROUGH = ("Note", "MarkdownNote"), "Reroute"
_CONSTANTS: Final = (
    "PrimitiveInt",
    "PrimitiveFloat",
    "PrimitiveBoolean",
    "PrimitiveString",
    "PrimitiveStringMultiline",
)
_SEEDS: Final = ("seed", "noise_seed")
_NO_PLACE: Final = "this template has no input for it; leave it out, or choose another template"


@dataclass(frozen=True, slots=True)
class Field:
    """An input of a kind of node. Written by `read_kinds`."""

    name: str
    kind: str
    """Type. ``COMBO``: one of ``options``; ``*``: any type; alternatives are joined by commas."""
    is_required: bool
    options: tuple[Any, ...] = ()
    least: float = -math.inf
    most: float = math.inf
    step: float | None = None
    default: Any = None
    is_upload: bool = False
    """Whether the value names an uploaded file, which need not be among ``options``."""
    has_control: bool = False
    is_socket: bool = False
    """Whether it takes a link only, although its type has a value in the editor."""
    parts: Mapping[Any, tuple[Field, ...]] = field(default_factory=dict)
    """Further inputs of the node by the option that brings them."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of node that a server has. Written by `read_kinds`."""

    fields: Mapping[str, Field]
    outputs: tuple[str, ...]
    is_output: bool


Kinds = Mapping[str, Kind]


def read_kinds(info: Any, where: str) -> dict[str, Kind]:
    """The kinds of node in an answer of ``/object_info``. Raises `UserError`: the answer has another form."""
    try:
        return {name: _kind(entry) for name, entry in info.items()}
    except (AttributeError, KeyError, TypeError, IndexError, ValueError) as error:
        problem = f"/object_info is not as ComfyUI documents it ({type(error).__name__}: {error})"
        raise UserError(f"{where}: {problem}; is this a ComfyUI server?") from None


def _kind(entry: Mapping[str, Any]) -> Kind:
    fields = {field.name: field for field in _fields(entry["input"])}
    outputs = ("COMBO" if isinstance(output, list) else "*" if output == _ANY else output for output in entry["output"])
    return Kind(fields, tuple(outputs), bool(entry.get("output_node")))


def _fields(inputs: Mapping[str, Mapping[str, Any]], prefix: str = "") -> Iterator[Field]:
    for part in ("required", "optional"):
        for key, spec in inputs.get(part, {}).items():
            if spec[0] != _REPEATED:
                yield _field(prefix + key, spec, part == "required")
                continue
            template = spec[1]["template"]
            names = template.get("names") or [f"{template['prefix']}{number}" for number in range(template["max"])]
            of, repeated = next((of, each) for of, specs in template["input"].items() for each in specs.values())
            for number, name in enumerate(names):
                yield _field(f"{prefix}{key}.{name}", repeated, of == "required" and number < template.get("min", 0))


def _active(fields: Iterable[Field], values: Mapping[str, Any]) -> Iterator[Field]:
    """``fields``, each followed by the inputs that its value brings. ``values`` may be filled meanwhile."""
    for entry in fields:
        yield entry
        value = values.get(entry.name)
        yield from _active(entry.parts.get(value, ()) if isinstance(value, str) else (), values)


def _field(name: str, spec: Sequence[Any], is_required: bool) -> Field:
    kind, config = spec[0], spec[1] if len(spec) > 1 else {}
    options = kind if isinstance(kind, list) else config.get("options", []) if kind in ("COMBO", _BY_OPTION) else []
    parts = {}
    if kind == _BY_OPTION:
        parts = {option["key"]: tuple(_fields(option["inputs"], f"{name}.")) for option in options}
        options = list(parts)
    return Field(
        name=name,
        kind="COMBO" if isinstance(kind, list) or parts else "*" if kind == _ANY else kind,
        is_socket=bool(config.get("forceInput")),
        parts=parts,
        is_required=is_required,
        options=tuple(options),
        least=float(config.get("min", -math.inf)),
        most=float(config.get("max", math.inf)),
        step=config.get("step") if kind == "INT" else None,
        default=config.get("default"),
        is_upload=bool(config.get("image_upload")),
        has_control=bool(config.get("control_after_generate")),
    )


# --- conversion from the editor's format ---------------------------------------------------------------------------------------------------


def read_template(name: str) -> dict[str, Any]:
    """A workflow of the templates' package. Raises `UserError`: the package or the template is missing."""
    try:
        folder = resources.files("comfyui_workflow_templates_json") / "templates"
    except ModuleNotFoundError:
        raise UserError("comfyui-workflow-templates-json is not installed; pip install 'stretto[pictures]'") from None
    known = {entry.name.removesuffix(".json"): entry for entry in folder.iterdir() if entry.name.endswith(".json")}
    if name not in known:
        raise UserError(f"template={name}: the templates' package has no template of that name{nearest(name, known)}")
    workflow = json.loads(known[name].read_text(encoding="utf-8"))
    if not isinstance(workflow, dict) or "nodes" not in workflow:
        raise UserError(f"template={name}: the file is not a workflow; choose another")
    return workflow


@dataclass(frozen=True, slots=True)
class _Value:
    """Origin of a link that is a constant of the editor, and no node for the server."""

    value: Any


@dataclass(frozen=True, slots=True)
class _Scope:
    """A workflow, or one instance of a subgraph inside it."""

    prefix: str
    nodes: Mapping[int, Mapping[str, Any]]
    links: Mapping[int, tuple[int, int]]
    """Link number → node and output where the link starts."""
    definition: Mapping[str, Any] | None = None
    around: _Scope | None = None
    node: Mapping[str, Any] = field(default_factory=dict)
    """The node in the scope ``around`` that this instance expands."""


def flatten(workflow: Mapping[str, Any], kinds: Kinds) -> Graph:
    """The graph of a workflow in the server's format, without notes, reroutes and other nodes of the editor. Nodes of subgraphs are named
    ``outer:inner``. Nodes of a kind that ``kinds`` lacks keep their links only."""
    subgraphs = {entry["id"]: entry for entry in workflow.get("definitions", {}).get("subgraphs", [])}
    links = {link[0]: (link[1], link[2]) for link in workflow["links"]}
    graph: Graph = {}
    _walk(_Scope("", {node["id"]: node for node in workflow["nodes"]}, links), subgraphs, kinds, graph)
    return graph


def _inside(scope: _Scope, node: Mapping[str, Any], definition: Mapping[str, Any]) -> _Scope:
    links = {link["id"]: (link["origin_id"], link["origin_slot"]) for link in definition["links"]}
    nodes = {inner["id"]: inner for inner in definition["nodes"]}
    return _Scope(f"{scope.prefix}{node['id']}:", nodes, links, definition, scope, node)


def _walk(scope: _Scope, subgraphs: Mapping[str, Any], kinds: Kinds, graph: Graph) -> None:
    for node in scope.nodes.values():
        if node["type"] in (*_NOTES, _THROUGH, "PrimitiveNode") or node.get("mode") in (_MUTED, _BYPASSED):
            continue
        if node["type"] in subgraphs:
            _walk(_inside(scope, node, subgraphs[node["type"]]), subgraphs, kinds, graph)
            continue
        inputs = _widget_values(node, kinds.get(node["type"]))
        for entry in node.get("inputs", []):
            if entry.get("link") is not None:
                source = _source(scope, entry["link"], subgraphs)
                if source is not None:
                    inputs[entry["name"]] = source.value if isinstance(source, _Value) else source
        graph[f"{scope.prefix}{node['id']}"] = {"class_type": node["type"], "inputs": inputs}


def _source(scope: _Scope, link: int, subgraphs: Mapping[str, Any]) -> list[Any] | _Value | None:
    """Origin of a link behind reroutes, bypassed nodes and subgraph borders. None: no origin, so that the node's own value applies."""
    if link not in scope.links:
        return None
    origin, slot = scope.links[link]
    if scope.definition is not None and origin == scope.definition["inputNode"]["id"]:
        assert scope.around is not None
        name = scope.definition["inputs"][slot]["name"]
        outer = [entry.get("link") for entry in scope.node.get("inputs", []) if entry["name"] == name]
        return None if not outer or outer[0] is None else _source(scope.around, outer[0], subgraphs)
    node = scope.nodes[origin]
    if node.get("mode") == _MUTED:
        return None
    if node["type"] == _THROUGH or node.get("mode") == _BYPASSED:
        wanted = node["outputs"][slot]["type"]
        same = [entry["link"] for entry in node.get("inputs", []) if entry.get("type") in (wanted, "*")]
        return None if not same or same[0] is None else _source(scope, same[0], subgraphs)
    if node["type"] == "PrimitiveNode":
        return _Value(node["widgets_values"][0])
    if node["type"] in subgraphs:
        definition = subgraphs[node["type"]]
        return _source(_inside(scope, node, definition), definition["outputs"][slot]["linkIds"][0], subgraphs)
    return [f"{scope.prefix}{origin}", slot]


def _widget_values(node: Mapping[str, Any], kind: Kind | None) -> dict[str, Any]:
    """A node's values by field name. The editor stores them by position, including those that a link overrides."""
    values = node.get("widgets_values") or []
    if isinstance(values, Mapping) or kind is None:
        return dict(values) if isinstance(values, Mapping) else {}
    named, left = dict[str, Any](), list(values)
    for entry in _active(kind.fields.values(), named):
        if entry.kind in _WIDGETS and not entry.is_socket and left:
            named[entry.name] = left.pop(0)
            if (entry.has_control or entry.name in _SEEDS) and left and left[0] in _SEED_CONTROLS:
                left.pop(0)
    return named


def _fold(graph: Graph) -> None:
    """Replace links to constants by the constants, and links to switches by the active branch, so that unused branches need no model files."""
    for _ in graph:
        for node in graph.values():
            for name, value in node["inputs"].items():
                origin = graph.get(value[0]) if is_link(value) else None
                if origin is None:
                    continue
                inputs = origin["inputs"]
                if origin["class_type"] in _CONSTANTS and "value" in inputs and not is_link(inputs["value"]):
                    node["inputs"][name] = inputs["value"]
                elif origin["class_type"] == "ComfySwitchNode" and isinstance(inputs.get("switch"), bool):
                    node["inputs"][name] = inputs.get("on_true" if inputs["switch"] else "on_false", value)


# --- fitting to a request -------------------------------------------------------------------------------------------------------


def is_link(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and type(value[1]) is int


def base_graph(template: str, kinds: Kinds, checkpoint: str = "") -> Graph:
    """The nodes of ``template`` on which its picture depends. The graph is not checked yet.

    Raises:
        UserError: The template does not exist, or does not sample and save exactly one picture.
    """
    where = f"template={template}"
    editor = _Editor(flatten(read_template(template), kinds), kinds, where)
    graph = editor.graph
    _fold(graph)
    positive = editor.encoder("positive")
    for name in editor.fields(positive, "STRING"):
        graph[positive]["inputs"][name] = ""  # this also cuts off the prompt enhancer of a template
    saves = [key for key in graph if editor.fields(key, "IMAGE") and "filename_prefix" in graph[key]["inputs"]]
    if len(saves) != 1:
        raise UserError(f"{where}: the template saves {len(saves)} pictures on this server, not one; choose another")
    graph = _needed(graph, saves)
    for node in graph.values():
        if checkpoint and "ckpt_name" in node["inputs"]:
            node["inputs"]["ckpt_name"] = checkpoint
    return graph


def _needed(graph: Graph, ends: Collection[str]) -> Graph:
    """The nodes on which the nodes ``ends`` depend, and these."""
    kept, todo = set(ends), list(ends)
    while todo:
        origins = {value[0] for value in graph[todo.pop()]["inputs"].values() if is_link(value)}
        todo += [origin for origin in origins - kept if origin in graph]
        kept |= origins
    return {key: node for key, node in graph.items() if key in kept}


def choose(kinds: Kinds, template: str, checkpoint: str, where: str) -> tuple[str, Graph]:
    """Name and graph of the first template that the server can run.

    Raises:
        UserError: The server lacks the models of the requested template, or of all of them.
    """
    loader = kinds.get("CheckpointLoaderSimple")
    known = [] if loader is None else [str(name) for name in loader.fields["ckpt_name"].options]
    if checkpoint and checkpoint not in known:
        raise UserError(
            f"{where}: checkpoint={checkpoint}: the server has no checkpoint of that name{nearest(checkpoint, known)}"
        )
    if template or checkpoint:
        name = template or _PLAIN
        graph = base_graph(name, kinds, checkpoint)
        refuse(graph, kinds, f"{where}: template={name}")
        return name, graph
    for name in TEMPLATES if "SaveImage" in kinds else ():
        graph = base_graph(name, kinds)
        if not faults(graph, kinds):
            return name, graph
    if len(known) == 1:
        return choose(kinds, _PLAIN, known[0], where)
    if known:
        raise UserError(f"{where}: the server has {len(known)} checkpoints; choose one: …?checkpoint={known[0]}")
    raise UserError(
        f"{where}: the server has no checkpoint, and the models of no template; put a model into its models folder"
    )


def fit(graph: Graph, kinds: Kinds, request: PaintRequest, references: Sequence[str], where: str) -> Graph:
    """A copy of ``graph`` with the prompt, size, seed, adapters and controls of ``request``.

    Args:
        references: Names of the uploaded pictures of ``request.controls``, in their order.

    Raises:
        UserError: The template has no input for a part of the request, or the server does not know a name.
    """
    graph = copy.deepcopy(graph)
    _Editor(graph, kinds, where).put_texts(request.prompt, request.negative)
    # Some templates join the parts of a text in nodes of their own, which have no use now.
    graph = _needed(graph, [key for key, node in graph.items() if kinds[node["class_type"]].is_output])
    editor = _Editor(graph, kinds, where)
    sized = [key for key, node in graph.items() if {"width", "height"} <= node["inputs"].keys()]
    editor.put("width", sized, ["width"], request.width)
    editor.put("height", sized, ["height"], request.height)
    editor.put("seed", list(graph), _SEEDS, request.seed)
    if request.steps is not None:
        is_split = any("start_at_step" in node["inputs"] for node in graph.values())
        editor.put("steps", [] if is_split else list(graph), ["steps"], request.steps)
    if request.guidance is not None:
        editor.put("guidance", list(graph), ["cfg"], request.guidance)
    for number, lora in enumerate(request.loras, 1):
        editor.insert_lora(f"lora-{number}", lora)
    for number, (control, name) in enumerate(zip(request.controls, references, strict=True), 1):
        editor.insert_control(f"control-{number}", control, name)
    return graph


@dataclass(frozen=True, slots=True)
class _Editor:
    """Changes ``graph`` in place. Error messages begin with ``where``."""

    graph: Graph
    kinds: Kinds
    where: str

    def fields(self, key: str, kind: str) -> list[str]:
        """Names of the inputs of a node whose type is exactly ``kind``."""
        entry = self.kinds.get(self.graph[key]["class_type"])
        return [] if entry is None else [name for name, each in entry.fields.items() if each.kind == kind]

    def sampler(self) -> dict[str, Any]:
        """Inputs of the first sampler: the one whose latents come from no other sampler."""
        sides = {"positive", "negative", "latent_image", "model"}
        samplers = {key: node["inputs"] for key, node in self.graph.items() if sides <= node["inputs"].keys()}
        whole = [inputs for inputs in samplers.values() if all(is_link(inputs[side]) for side in sides)]
        for inputs in whole:
            if self.origin(inputs["latent_image"], "LATENT", stop=samplers)[0] not in samplers:
                return inputs
        raise UserError(
            f"{self.where}: the template has no sampler with positive and negative conditioning; choose another"
        )

    def encoder(self, side: str) -> str:
        """The text encoder of the first sampler's ``side``: positive or negative."""
        return str(self.origin(self.sampler()[side], "CONDITIONING")[0])

    def put_texts(self, prompt: str, negative: str) -> None:
        """Overwrite the template's own texts with both prompts, for every sampler: the example texts must not reach the server."""
        first = self.encoder("positive")
        self.put("prompt", [first], self.fields(first, "STRING"), prompt)
        inputs = [node["inputs"] for node in self.graph.values()]
        links = {side: [each[side] for each in inputs if is_link(each.get(side))] for side in ("positive", "negative")}
        asked, avoided = ({self.origin(link, "CONDITIONING")[0] for link in links[side]} for side in links)
        for key in asked:
            self.graph[key]["inputs"] |= dict.fromkeys(self.fields(key, "STRING"), prompt)
        own = avoided - asked  # samplers without a node of their own take the zeroed conditioning of the prompt
        if negative and not any(self.fields(key, "STRING") for key in own):
            raise UserError(f"{self.where}: negative: {_NO_PLACE}")
        for key in own:
            self.graph[key]["inputs"] |= dict.fromkeys(self.fields(key, "STRING"), negative)

    def origin(self, link: list[Any], kind: str, stop: Collection[str] = ()) -> list[Any]:
        """Follow ``link`` back through nodes that take and return a ``kind``, to the node that creates it."""
        for _ in self.graph:
            inputs = self.graph[link[0]]["inputs"]
            names = [name for name in self.fields(link[0], kind) if is_link(inputs.get(name))]
            if not names or link[0] in stop:
                break
            link = inputs[names[min(link[1], len(names) - 1)]]
        return link

    def put(self, what: str, keys: Collection[str], names: Collection[str], value: Any) -> None:
        places = [
            (key, name) for key in keys for name in names if name in self.kinds[self.graph[key]["class_type"]].fields
        ]
        if not places:
            raise UserError(f"{self.where}: {what}: {_NO_PLACE}")
        for key, name in places:
            self.graph[key]["inputs"][name] = value

    def options(self, kind: str, name: str) -> list[str]:
        if kind not in self.kinds or name not in self.kinds[kind].fields:
            raise UserError(f"{self.where}: this server has no node {kind}; update ComfyUI")
        return [str(option) for option in self.kinds[kind].fields[name].options]

    def rewire(self, old: list[Any], new: list[Any]) -> None:
        for node in self.graph.values():
            node["inputs"] |= {name: list(new) for name, value in node["inputs"].items() if value == old}

    def insert_lora(self, key: str, lora: Lora) -> None:
        """Insert an adapter behind the loader of the model, and of the text encoder where one checkpoint contains both."""
        model = self.origin(self.sampler()["model"], "MODEL")
        clip = self.graph[self.encoder("positive")]["inputs"].get("clip")
        clip = self.origin(clip, "CLIP") if is_link(clip) else ["", 0]
        loader = "LoraLoader" if clip[0] == model[0] else "LoraLoaderModelOnly"
        known = self.options(loader, "lora_name")
        name = match_name(lora.name, known)
        if name is None:
            near = nearest(lora.name, [PurePosixPath(option).stem for option in known]) or f" (of {len(known)})"
            raise UserError(
                f"{self.where}: lora {lora.name}: the server has no adapter of that name{near}; put the file into models/loras"
            )
        inputs = {"model": model, "lora_name": name, "strength_model": lora.weight}
        self.rewire(model, [key, 0])
        if clip[0] == model[0]:
            inputs |= {"clip": clip, "strength_clip": lora.weight}
            self.rewire(clip, [key, 1])
        self.graph[key] = {"class_type": loader, "inputs": inputs}

    def insert_control(self, key: str, control: Control, image: str) -> None:
        """Insert a ControlNet between conditioning and sampler. For ``canny`` the server finds the edges; for other kinds the picture is the map."""
        known, apply = self.options("ControlNetLoader", "control_net_name"), "ControlNetApplyAdvanced"
        kind = control.kind.casefold()
        self.options(apply, "strength")
        fitting = [name for each in (kind, "union") for name in known if each in name.casefold()]
        if not fitting:
            problem = f"none of the server's {len(known)} ControlNets has this word in its name"
            raise UserError(f"{self.where}: control {kind}: {problem}; put one into models/controlnet")
        picture: list[Any] = [f"{key}-image", 0]
        self.graph[f"{key}-image"] = {"class_type": "LoadImage", "inputs": {"image": image}}
        if kind == "canny" and "Canny" in self.kinds:
            values = {name: each.default for name, each in self.kinds["Canny"].fields.items() if each.kind in _WIDGETS}
            self.graph[f"{key}-edges"] = {"class_type": "Canny", "inputs": {**values, "image": picture}}
            picture = [f"{key}-edges", 0]
        self.graph[f"{key}-net"] = {"class_type": "ControlNetLoader", "inputs": {"control_net_name": fitting[0]}}
        sampler = self.sampler()
        inputs = {side: sampler[side] for side in ("positive", "negative")}
        inputs |= {"control_net": [f"{key}-net", 0], "image": picture}
        inputs |= {"strength": control.strength, "start_percent": 0.0, "end_percent": 1.0}
        decoders = [
            node["inputs"]["vae"] for node in self.graph.values() if {"samples", "vae"} <= node["inputs"].keys()
        ]
        if decoders and "vae" in self.kinds[apply].fields:
            inputs["vae"] = decoders[0]
        self.graph[key] = {"class_type": apply, "inputs": inputs}
        sampler["positive"], sampler["negative"] = [key, 0], [key, 1]


def match_name(name: str, known: Sequence[str]) -> str | None:
    """The entry of ``known`` that ``name`` denotes: the same path, or else the only one with this file name or stem. None: there is none."""
    paths = [PurePosixPath(option.replace("\\", "/").casefold()) for option in known]
    wanted = PurePosixPath(name.replace("\\", "/").casefold())
    by_name = [option for option, path in zip(known, paths, strict=True) if path.name == wanted.name]
    by_stem = [option for option, path in zip(known, paths, strict=True) if path.stem == wanted.stem]
    found = next((each for each in (by_name, by_stem) if len(each) == 1), [None])
    return name if name in known else found[0]


# --- checking and repairing -----------------------------------------------------------------------------------------------------


def refuse(graph: Any, kinds: Kinds, where: str) -> None:
    """Raises `UserError` with the first of `faults` and the number of the others."""
    found = faults(graph, kinds)
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise UserError(f"{where}: {found[0]}{more}; nothing was sent")


def faults(graph: Any, kinds: Kinds) -> list[str]:
    """Reasons why the server would refuse ``graph``, fail on it later, or silently do something else."""
    if not isinstance(graph, dict) or not graph:
        return ["the graph has no nodes"]
    found = []
    for key, node in graph.items():
        inputs = node.get("inputs") if isinstance(node, dict) else None
        if not isinstance(key, str) or not isinstance(inputs, dict) or not isinstance(node.get("class_type"), str):
            found.append(f"node {key!r}: must be an object with class_type and inputs, and its name a string")
        elif node["class_type"] not in kinds:
            found.append(f"node {key}: the server has no {node['class_type']}{nearest(node['class_type'], kinds)}")
    if found:
        return found
    for key, node in graph.items():
        found += [f"node {key} ({node['class_type']}): {problem}" for problem in _node_faults(graph, kinds, node)]
    if not any(kinds[node["class_type"]].is_output for node in graph.values()):
        found.append("no node is an output node")
    if cycle := _cycle(graph):
        found.append(f"node {cycle}: the node depends on its own result")
    return found


def _node_faults(graph: Graph, kinds: Kinds, node: Mapping[str, Any]) -> Iterator[str]:
    own = kinds[node["class_type"]].fields.values()
    fields = {entry.name: entry for entry in _active(own, node["inputs"])}
    for name, entry in fields.items():
        if entry.is_required and name not in node["inputs"]:
            yield f"{name} is missing"
    for name, value in node["inputs"].items():
        if name not in fields:  # the server would ignore it without an error
            yield f"there is no input {name}{nearest(name, fields)}"
            continue
        problem = (
            _link_fault(graph, kinds, value, fields[name])
            if isinstance(value, list)
            else _value_fault(kinds, value, fields[name])
        )
        if problem:
            yield f"{name}: {problem}"


def _link_fault(graph: Graph, kinds: Kinds, value: list[Any], entry: Field) -> str | None:
    if not is_link(value):
        return f"{value!r} is not a link [node, output]"
    if value[0] not in graph:
        return f"node {value[0]} does not exist"
    outputs = kinds[graph[value[0]]["class_type"]].outputs
    if not 0 <= value[1] < len(outputs):
        return f"node {value[0]} has no output {value[1]}"
    given = outputs[value[1]]
    if "*" not in (given, entry.kind) and not set(given.split(",")) & set(entry.kind.split(",")):
        return f"takes {entry.kind}, and output {value[1]} of node {value[0]} is {given}"
    return None


def _value_fault(kinds: Kinds, value: Any, entry: Field) -> str | None:
    if entry.kind == "COMBO":
        if value in entry.options or (entry.is_upload and isinstance(value, str) and value):
            return None
        if not entry.options:
            return "the server has no options for it"
        return f"the server has no {value!r}{nearest(str(value), map(str, entry.options))}"
    if entry.kind in ("STRING", "BOOLEAN"):
        wanted = str if entry.kind == "STRING" else bool
        return None if isinstance(value, wanted) else f"{value!r} is not {'text' if wanted is str else 'true or false'}"
    if entry.kind not in ("INT", "FLOAT"):
        is_socket = any(entry.kind in kind.outputs for kind in kinds.values())
        return f"takes {entry.kind} from another node, not a value" if is_socket else None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return f"{value!r} is not a number"
    if entry.kind == "INT" and not isinstance(value, int):
        return f"{value} is not a whole number"
    if not entry.least <= value <= entry.most:
        return f"{value} is not between {entry.least:g} and {entry.most:g}"
    if entry.step and entry.name in ("width", "height") and value % entry.step:
        return f"{value} is not a multiple of {entry.step:g}"
    return None


def _cycle(graph: Graph) -> str | None:
    """A node on a cycle; None: the graph has none."""
    needs = {key: {each[0] for each in node["inputs"].values() if is_link(each)} for key, node in graph.items()}
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        return str(error.args[1][0])
    return None


def repair(graph: Graph, node_errors: Mapping[str, Any]) -> tuple[Graph, list[str]]:
    """A copy of ``graph`` in which those ``node_errors`` of a server are corrected that have one correction, and a note for each.

    Corrected are a file in another folder of the same name, a number out of range, and a missing value with a default, since these differ
    between server versions. Text, size and seed of the request are never changed.
    """
    graph, notes = copy.deepcopy(graph), []
    for key, report in node_errors.items():
        for error in report.get("errors", []) if isinstance(report, Mapping) else []:
            extra = error.get("extra_info") or {}
            name = extra.get("input_name")
            if key not in graph or not isinstance(name, str) or name in ("width", "height", "text", *_SEEDS):
                continue
            entry = _field(name, extra.get("input_config") or ["*"], True)
            old = graph[key]["inputs"].get(name)
            new = _mended(str(error.get("type")), old, entry)
            if new is not None and new != old:
                graph[key]["inputs"][name] = new
                notes.append(f"node {key} ({graph[key]['class_type']}): {name} became {new!r}, it was {old!r}")
    return graph, notes


def _mended(problem: str, value: Any, entry: Field) -> Any:
    if problem == "value_not_in_list":
        return match_name(str(value), [option for option in entry.options if isinstance(option, str)])
    if problem in ("value_smaller_than_min", "value_bigger_than_max"):
        bound = entry.least if problem == "value_smaller_than_min" else entry.most
        return None if not math.isfinite(bound) else int(bound) if entry.kind == "INT" else bound
    if problem == "required_input_missing":
        return entry.default if entry.default is not None else next(iter(entry.options), None)
    if (
        problem == "invalid_input_type"
        and entry.kind in ("INT", "FLOAT")
        and re.fullmatch(r"-?\d+(\.\d+)?", str(value))
    ):
        return round(float(value)) if entry.kind == "INT" else float(value)
    return None
