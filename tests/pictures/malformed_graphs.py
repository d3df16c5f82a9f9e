"""ComfyUI graphs that no server should ever be sent, each made out of a good one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from stretto.pictures.comfy_kinds import Graph
from tests.pictures.comfy_double import MODELS

Spoil = Callable[[Graph], Any]

MORE = {
    **MODELS,
    "diffusion_models": [
        *MODELS["diffusion_models"],
        "qwen_image_2512_fp8_e4m3fn.safetensors",
        "ernie-image-turbo.safetensors",
    ],
    "text_encoders": [*MODELS["text_encoders"], "qwen_2.5_vl_7b_fp8_scaled.safetensors"],
    "vae": [*MODELS["vae"], "qwen_image_vae.safetensors"],
}
"""What the templates want that the double has the nodes of."""


def key_of(graph: Graph, kind: str) -> str:
    """Of the first node of a kind."""
    return next(key for key, node in graph.items() if node["class_type"] == kind)


def _spoil(kind: str, field: str, value: Any) -> Spoil:
    def spoil(graph: Graph) -> Any:
        graph[key_of(graph, kind)]["inputs"][field] = value
        return graph

    return spoil


def _without(kind: str, field: str) -> Spoil:
    def spoil(graph: Graph) -> Any:
        del graph[key_of(graph, kind)]["inputs"][field]
        return graph

    return spoil


def _cycle(graph: Graph) -> Any:
    graph["lora-2"]["inputs"] |= {"model": ["lora-1", 0]}
    return graph


def _changed(key: str, **fields: Any) -> Spoil:
    return lambda graph: {**graph, key: {**graph[key], **fields}}


MALFORMED: dict[str, Spoil] = {
    "no nodes": lambda graph: {},
    "no object": lambda graph: [graph],
    "a node that is none": lambda graph: {**graph, "x": "KSampler"},
    "a name that is no text": lambda graph: {**graph, 3: graph["lora-1"]},
    "no class_type": lambda graph: {**graph, "x": {"inputs": {}}},
    "no inputs": lambda graph: {**graph, "x": {"class_type": "SaveImage"}},
    "unknown node": _changed("lora-1", class_type="LoraLoadr"),
    "missing input": _without("KSampler", "steps"),
    "missing link": _without("VAEDecode", "vae"),
    "unknown input": _spoil("KSampler", "step", 3),
    "link to nobody": _spoil("VAEDecode", "vae", ["99", 0]),
    "no such output": _spoil("VAEDecode", "vae", ["lora-1", 2]),
    "output before the first": _spoil("VAEDecode", "vae", ["lora-1", -1]),
    "half a link": _spoil("VAEDecode", "vae", ["lora-1"]),
    "a link by name": _spoil("VAEDecode", "vae", ["lora-1", "VAE"]),
    "link of another kind": _spoil("VAEDecode", "vae", ["lora-1", 0]),
    "value for a socket": _spoil("VAEDecode", "vae", "ae.safetensors"),
    "unknown checkpoint": _spoil("CheckpointLoaderSimple", "ckpt_name", "nobody.safetensors"),
    "unknown sampler": _spoil("KSampler", "sampler_name", "eulr"),
    "number as text": _spoil("KSampler", "steps", "many"),
    "no whole number": _spoil("KSampler", "steps", 7.5),
    "truth for a number": _spoil("KSampler", "steps", True),
    "too small": _spoil("KSampler", "steps", 0),
    "too large": _spoil("KSampler", "cfg", 1e6),
    "not a number": _spoil("KSampler", "cfg", math.nan),
    "endless": _spoil("KSampler", "denoise", math.inf),
    "between two sizes": _spoil("EmptyLatentImage", "width", 1001),
    "text that is none": _spoil("CLIPTextEncode", "text", None),
    "a circle": _cycle,
    "nothing given out": lambda graph: {key: node for key, node in graph.items() if node["class_type"] != "SaveImage"},
}
"""Ways to spoil a graph of the template image_sdxl_simple with two adapters; each takes a graph that nobody else has."""
