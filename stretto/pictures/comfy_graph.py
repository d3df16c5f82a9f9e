"""ComfyUI graphs: a template of ComfyUI's editor is converted to the server's format, fitted to a request, and checked before it is sent.

The server's format maps node ids to ``{"class_type", "inputs"}``; an input is a value or a link ``[node id, output]``. Templates (of the package
comfyui-workflow-templates-json, MIT) are in the editor's format: values by position, links by number, groups of nodes as subgraphs.
``/object_info`` lists the inputs and outputs of every kind of node. All functions here depend on that list, a template and a request only.
Written from ComfyUI's documentation (docs.comfy.org); its code, under the GPL, is neither imported nor copied.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import PurePosixPath
from typing import Any, Final

from stretto.base.errors import UserError, nearest
from stretto.pictures.backend import Control, Lora, PaintRequest
from stretto.pictures.comfy_faults import faults, refuse
from stretto.pictures.comfy_kinds import SEEDS, WIDGETS, Graph, Kind, Kinds, active_fields, is_link, match_name

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
_NO_PLACE: Final = "this template has no input for it; leave it out, or choose another template"


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
    for entry in active_fields(kind.fields.values(), named):
        if entry.kind in WIDGETS and not entry.is_socket and left:
            named[entry.name] = left.pop(0)
            if (entry.has_control or entry.name in SEEDS) and left and left[0] in _SEED_CONTROLS:
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
    editor.put("seed", list(graph), SEEDS, request.seed)
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
            values = {name: each.default for name, each in self.kinds["Canny"].fields.items() if each.kind in WIDGETS}
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
