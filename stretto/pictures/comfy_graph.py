"""ComfyUI's graphs: a template of its editor made into what its server runs, fitted to a request, and checked before it is sent.

The server takes node ids to ``{"class_type", "inputs"}``, an input being a value or a link ``[node id, output]``. Templates (of the
package comfyui-workflow-templates-json, MIT) are in the editor's format: values by position, links by number, groups of nodes as
subgraphs. ``/object_info`` says what each kind of node takes and gives; all here is a function of that, a template and a request.
Written from ComfyUI's documentation (docs.comfy.org); its code, under the GPL, is neither imported nor copied.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
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
"""Text to picture, the first that a server can run first. The last runs with any checkpoint that holds its own text encoder."""
_PLAIN: Final = TEMPLATES[-1]

_WIDGETS: Final = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")
"""Kinds that hold values. All others are sockets."""
_SEED_CONTROLS: Final = ("fixed", "increment", "decrement", "randomize")
"""Follows a seed among a node's values; the server never sees it."""
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
_NO_PLACE: Final = "this template has no place for it; leave it out, or choose another template"


@dataclass(frozen=True, slots=True)
class Field:
    """What one input of a node takes. Written by `read_kinds`."""

    name: str
    kind: str
    """``COMBO`` where ``options`` are all it takes; ``*``: anything; several are joined by commas."""
    is_required: bool
    options: tuple[Any, ...] = ()
    least: float = -math.inf
    most: float = math.inf
    step: float | None = None
    default: Any = None
    is_upload: bool = False
    """Names a file that clients bring: what is not among ``options`` may be there all the same."""
    has_control: bool = False


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of node that a server has. Written by `read_kinds`."""

    fields: Mapping[str, Field]
    outputs: tuple[str, ...]
    is_output: bool


Kinds = Mapping[str, Kind]


def read_kinds(info: Any, where: str) -> dict[str, Kind]:
    """Of the answer to ``/object_info``. Raises `UserError`: it is no such answer."""
    try:
        return {name: _kind(entry) for name, entry in info.items()}
    except (AttributeError, KeyError, TypeError, IndexError, ValueError) as error:
        problem = f"/object_info is not as ComfyUI documents it ({type(error).__name__}: {error})"
        raise UserError(f"{where}: {problem}; is this a ComfyUI server?") from None


def _kind(entry: Mapping[str, Any]) -> Kind:
    fields = {}
    for part in ("required", "optional"):
        for key, spec in entry["input"].get(part, {}).items():
            fields[key] = _field(key, spec, part == "required")
    outputs = tuple("COMBO" if isinstance(output, list) else output for output in entry["output"])
    return Kind(fields, outputs, bool(entry.get("output_node")))


def _field(name: str, spec: Sequence[Any], is_required: bool) -> Field:
    kind, config = spec[0], spec[1] if len(spec) > 1 else {}
    options = kind if isinstance(kind, list) else config.get("options", []) if kind == "COMBO" else []
    return Field(
        name=name,
        kind="COMBO" if isinstance(kind, list) else kind,
        is_required=is_required,
        options=tuple(options),
        least=float(config.get("min", -math.inf)),
        most=float(config.get("max", math.inf)),
        step=config.get("step") if kind == "INT" else None,
        default=config.get("default"),
        is_upload=bool(config.get("image_upload")),
        has_control=bool(config.get("control_after_generate")),
    )


# --- from the editor's format ---------------------------------------------------------------------------------------------------


def read_template(name: str) -> dict[str, Any]:
    """A workflow of the templates' package. Raises `UserError`: no package, no such template."""
    try:
        folder = resources.files("comfyui_workflow_templates_json") / "templates"
    except ModuleNotFoundError:
        raise UserError("comfyui-workflow-templates-json is not installed; pip install 'stretto[pictures]'") from None
    known = {entry.name.removesuffix(".json"): entry for entry in folder.iterdir() if entry.name.endswith(".json")}
    if name not in known:
        raise UserError(f"template={name}: the templates' package has none of that name{nearest(name, known)}")
    workflow = json.loads(known[name].read_text(encoding="utf-8"))
    if not isinstance(workflow, dict) or "nodes" not in workflow:
        raise UserError(f"template={name}: this is no workflow; choose another")
    return workflow


@dataclass(frozen=True, slots=True)
class _Value:
    """Stands at the end of a link whose origin only holds a value."""

    value: Any


@dataclass(frozen=True, slots=True)
class _Scope:
    """A workflow, or one use of a subgraph inside it."""

    prefix: str
    nodes: Mapping[int, Mapping[str, Any]]
    links: Mapping[int, tuple[int, int]]
    """Number to the node and output it starts from."""
    definition: Mapping[str, Any] | None = None
    around: _Scope | None = None
    node: Mapping[str, Any] = field(default_factory=dict)
    """What stands for it in the scope ``around``."""


def flatten(workflow: Mapping[str, Any], kinds: Kinds) -> Graph:
    """The nodes of ``workflow``, those of its subgraphs among them as ``outer:inner``, notes, detours and the editor's own nodes
    resolved. Nodes of a kind that ``kinds`` lacks keep their links alone."""
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
    """Where a link starts, through all that the server knows nothing of. None: nowhere, a value of the node's own counts."""
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
    """Values by their fields' names: the editor keeps them by position, those that a link overrides among them."""
    values = node.get("widgets_values") or []
    if isinstance(values, Mapping) or kind is None:
        return dict(values) if isinstance(values, Mapping) else {}
    named, left = {}, list(values)
    for name, entry in kind.fields.items():
        if entry.kind in _WIDGETS and left:
            named[name] = left.pop(0)
            if (entry.has_control or name in _SEEDS) and left and left[0] in _SEED_CONTROLS:
                left.pop(0)
    return named


def _fold(graph: Graph) -> None:
    """Constants go where they are used, and a switch gives way to the branch it takes: what nobody asks for needs no model file."""
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
    """What ``template`` paints its picture with, and nothing else; not yet checked.

    Raises:
        UserError: no such template, or it does not sample and save exactly one picture.
    """
    where = f"template={template}"
    editor = _Editor(flatten(read_template(template), kinds), kinds, where)
    graph = editor.graph
    _fold(graph)
    positive = editor.encoder("positive")
    for name in editor.fields(positive, "STRING"):
        graph[positive]["inputs"][name] = ""  # and with what was there goes the template's own enhancer
    saves = [key for key in graph if editor.fields(key, "IMAGE") and "filename_prefix" in graph[key]["inputs"]]
    if len(saves) != 1:
        raise UserError(f"{where}: on this server it saves {len(saves)} pictures, not one; choose another")
    kept, todo = set(saves), list(saves)
    while todo:
        origins = {value[0] for value in graph[todo.pop()]["inputs"].values() if is_link(value)}
        todo += [origin for origin in origins - kept if origin in graph]
        kept |= origins
    for node in graph.values():
        if checkpoint and "ckpt_name" in node["inputs"]:
            node["inputs"]["ckpt_name"] = checkpoint
    return {key: node for key, node in graph.items() if key in kept}


def choose(kinds: Kinds, template: str, checkpoint: str, where: str) -> tuple[str, Graph]:
    """The template that this server can run, by name, and its graph.

    Raises:
        UserError: it has the models of none, or not those of the one asked for.
    """
    loader = kinds.get("CheckpointLoaderSimple")
    known = [] if loader is None else [str(name) for name in loader.fields["ckpt_name"].options]
    if checkpoint and checkpoint not in known:
        raise UserError(
            f"{where}: checkpoint={checkpoint}: the server has none of that name{nearest(checkpoint, known)}"
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
        raise UserError(f"{where}: it has {len(known)} checkpoints; say which one: …?checkpoint={known[0]}")
    raise UserError(f"{where}: it has no checkpoints and the models of no template; put a model into its models folder")


def fit(graph: Graph, kinds: Kinds, request: PaintRequest, references: Sequence[str], where: str) -> Graph:
    """``graph`` painting what ``request`` asks for, with its adapters and controls.

    Args:
        references: names under which the server has the pictures of ``request.controls``.

    Raises:
        UserError: the template has no place for something asked for, or the server does not know a name.
    """
    editor = _Editor(copy.deepcopy(graph), kinds, where)
    graph = editor.graph
    editor.put_texts(request.prompt, request.negative)
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
    """Changes ``graph`` where it lies; messages begin with ``where``."""

    graph: Graph
    kinds: Kinds
    where: str

    def fields(self, key: str, kind: str) -> list[str]:
        """Of a node, those that take ``kind`` and nothing else."""
        entry = self.kinds.get(self.graph[key]["class_type"])
        return [] if entry is None else [name for name, each in entry.fields.items() if each.kind == kind]

    def sampler(self) -> dict[str, Any]:
        """Inputs of the sampler whose latents no other sampler made."""
        sides = {"positive", "negative", "latent_image", "model"}
        samplers = {key: node["inputs"] for key, node in self.graph.items() if sides <= node["inputs"].keys()}
        whole = [inputs for inputs in samplers.values() if all(is_link(inputs[side]) for side in sides)]
        for inputs in whole:
            if self.origin(inputs["latent_image"], "LATENT", stop=samplers)[0] not in samplers:
                return inputs
        raise UserError(f"{self.where}: it has no sampler with a positive and a negative side; choose another")

    def encoder(self, side: str) -> str:
        """The node that makes the conditioning of one side of the first sampler out of text."""
        return str(self.origin(self.sampler()[side], "CONDITIONING")[0])

    def put_texts(self, prompt: str, negative: str) -> None:
        """Write both prompts over the template's own texts, for every sampler: a template's example must not reach the server."""
        first = self.encoder("positive")
        self.put("prompt", [first], self.fields(first, "STRING"), prompt)
        inputs = [node["inputs"] for node in self.graph.values()]
        links = {side: [each[side] for each in inputs if is_link(each.get(side))] for side in ("positive", "negative")}
        asked, avoided = ({self.origin(link, "CONDITIONING")[0] for link in links[side]} for side in links)
        for key in asked:
            self.graph[key]["inputs"] |= dict.fromkeys(self.fields(key, "STRING"), prompt)
        own = avoided - asked  # the other samplers set their prompt's conditioning to zero for the negative side
        if negative and not any(self.fields(key, "STRING") for key in own):
            raise UserError(f"{self.where}: negative: {_NO_PLACE}")
        for key in own:
            self.graph[key]["inputs"] |= dict.fromkeys(self.fields(key, "STRING"), negative)

    def origin(self, link: list[Any], kind: str, stop: Collection[str] = ()) -> list[Any]:
        """The link that ``link`` leads back to: of the node that makes a ``kind`` out of none."""
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
        """Behind the loader of the model, and of the text encoder where both are one checkpoint."""
        model = self.origin(self.sampler()["model"], "MODEL")
        clip = self.graph[self.encoder("positive")]["inputs"].get("clip")
        clip = self.origin(clip, "CLIP") if is_link(clip) else ["", 0]
        loader = "LoraLoader" if clip[0] == model[0] else "LoraLoaderModelOnly"
        known = self.options(loader, "lora_name")
        name = match_name(lora.name, known)
        if name is None:
            near = nearest(lora.name, [PurePosixPath(option).stem for option in known]) or f" (it has {len(known)})"
            raise UserError(
                f"{self.where}: lora {lora.name}: the server has none of that name{near}; put it into models/loras"
            )
        inputs = {"model": model, "lora_name": name, "strength_model": lora.weight}
        self.rewire(model, [key, 0])
        if clip[0] == model[0]:
            inputs |= {"clip": clip, "strength_clip": lora.weight}
            self.rewire(clip, [key, 1])
        self.graph[key] = {"class_type": loader, "inputs": inputs}

    def insert_control(self, key: str, control: Control, image: str) -> None:
        """Between conditioning and sampler. Edges are found on the server; of any other kind the picture is the map itself."""
        known, apply = self.options("ControlNetLoader", "control_net_name"), "ControlNetApplyAdvanced"
        kind = control.kind.casefold()
        self.options(apply, "strength")
        fitting = [name for each in (kind, "union") for name in known if each in name.casefold()]
        if not fitting:
            problem = f"none of its {len(known)} ControlNets has it in its name"
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
    """The one of ``known`` that ``name`` means: itself, or the only one with that file name or stem, wherever it lies."""
    paths = [PurePosixPath(option.replace("\\", "/").casefold()) for option in known]
    wanted = PurePosixPath(name.replace("\\", "/").casefold())
    by_name = [option for option, path in zip(known, paths, strict=True) if path.name == wanted.name]
    by_stem = [option for option, path in zip(known, paths, strict=True) if path.stem == wanted.stem]
    found = next((each for each in (by_name, by_stem) if len(each) == 1), [None])
    return name if name in known else found[0]


# --- checking and repairing -----------------------------------------------------------------------------------------------------


def refuse(graph: Any, kinds: Kinds, where: str) -> None:
    """Raises `UserError` with the first of `faults`, and how many more there are."""
    found = faults(graph, kinds)
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise UserError(f"{where}: {found[0]}{more}; nothing was sent")


def faults(graph: Any, kinds: Kinds) -> list[str]:
    """All for which the server would refuse ``graph``, fail on it later, or silently do something else."""
    if not isinstance(graph, dict) or not graph:
        return ["the graph has no nodes"]
    found = []
    for key, node in graph.items():
        inputs = node.get("inputs") if isinstance(node, dict) else None
        if not isinstance(key, str) or not isinstance(inputs, dict) or not isinstance(node.get("class_type"), str):
            found.append(f"node {key!r}: is no object with class_type and inputs, under a name that is text")
        elif node["class_type"] not in kinds:
            found.append(f"node {key}: the server has no {node['class_type']}{nearest(node['class_type'], kinds)}")
    if found:
        return found
    for key, node in graph.items():
        found += [f"node {key} ({node['class_type']}): {problem}" for problem in _node_faults(graph, kinds, node)]
    if not any(kinds[node["class_type"]].is_output for node in graph.values()):
        found.append("no node gives anything out")
    if cycle := _cycle(graph):
        found.append(f"node {cycle}: it needs its own result")
    return found


def _node_faults(graph: Graph, kinds: Kinds, node: Mapping[str, Any]) -> Iterator[str]:
    fields = kinds[node["class_type"]].fields
    for name, entry in fields.items():
        if entry.is_required and name not in node["inputs"]:
            yield f"{name} is missing"
    for name, value in node["inputs"].items():
        if name not in fields:  # the server would leave it out without a word
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
        return f"{value!r} is no link [node, output]"
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
            return "the server has nothing to choose from"
        return f"the server has no {value!r}{nearest(str(value), map(str, entry.options))}"
    if entry.kind in ("STRING", "BOOLEAN"):
        wanted = str if entry.kind == "STRING" else bool
        return None if isinstance(value, wanted) else f"{value!r} is no {'text' if wanted is str else 'true or false'}"
    if entry.kind not in ("INT", "FLOAT"):
        is_socket = any(entry.kind in kind.outputs for kind in kinds.values())
        return f"takes {entry.kind} from another node, not a value" if is_socket else None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return f"{value!r} is no number"
    if entry.kind == "INT" and not isinstance(value, int):
        return f"{value} is no whole number"
    if not entry.least <= value <= entry.most:
        return f"{value} is not between {entry.least:g} and {entry.most:g}"
    if entry.step and entry.name in ("width", "height") and value % entry.step:
        return f"{value} is no multiple of {entry.step:g}"
    return None


def _cycle(graph: Graph) -> str | None:
    """A node on a cycle."""
    needs = {key: {each[0] for each in node["inputs"].values() if is_link(each)} for key, node in graph.items()}
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        return str(error.args[1][0])
    return None


def repair(graph: Graph, node_errors: Mapping[str, Any]) -> tuple[Graph, list[str]]:
    """``graph`` with what a server's ``node_errors`` name put right where there is one way to, and what was done, a sentence each.

    A file that lies elsewhere by the same name, a number out of a range, a missing value with a default: such things differ between
    servers' versions. What the request itself asked for (text, size, seed) is never changed.
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
