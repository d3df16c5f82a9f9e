"""Kinds of nodes that a ComfyUI server has, and the form of graphs of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Final

from stretto.base.errors import UserError

Graph = dict[str, dict[str, Any]]
"""Nodes by their ids, in the server's format: ``{"class_type", "inputs"}``."""

WIDGETS: Final = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")
"""Types of inputs that take a value in the editor. All other types take links only."""
ANY_TYPE, BY_OPTION, REPEATED = "COMFY_MATCHTYPE_V3", "COMFY_DYNAMICCOMBO_V3", "COMFY_AUTOGROW_V3"
"""Dynamic types: any type that all such inputs of the node share; options that bring inputs of their own, named ``input.part``; and an input
that is repeated as ``input.name0``, ``input.name1`` …"""
SEEDS: Final = ("seed", "noise_seed")
"""Names of inputs that take a seed."""


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
"""The kinds of node of a server, by name."""


def read_kinds(info: Any, where: str) -> dict[str, Kind]:
    """The kinds of node in an answer of ``/object_info``. Raises `UserError`: the answer has another form."""
    try:
        return {name: _kind(entry) for name, entry in info.items()}
    except (AttributeError, KeyError, TypeError, IndexError, ValueError) as error:
        problem = f"/object_info is not as ComfyUI documents it ({type(error).__name__}: {error})"
        raise UserError(f"{where}: {problem}; is this a ComfyUI server?") from None


def _kind(entry: Mapping[str, Any]) -> Kind:
    fields = {field.name: field for field in _fields(entry["input"])}
    outputs = (
        "COMBO" if isinstance(output, list) else "*" if output == ANY_TYPE else output for output in entry["output"]
    )
    return Kind(fields, tuple(outputs), bool(entry.get("output_node")))


def _fields(inputs: Mapping[str, Mapping[str, Any]], prefix: str = "") -> Iterator[Field]:
    for part in ("required", "optional"):
        for key, spec in inputs.get(part, {}).items():
            if spec[0] != REPEATED:
                yield one_field(prefix + key, spec, part == "required")
                continue
            template = spec[1]["template"]
            names = template.get("names") or [f"{template['prefix']}{number}" for number in range(template["max"])]
            of, repeated = next((of, each) for of, specs in template["input"].items() for each in specs.values())
            for number, name in enumerate(names):
                yield one_field(f"{prefix}{key}.{name}", repeated, of == "required" and number < template.get("min", 0))


def active_fields(fields: Iterable[Field], values: Mapping[str, Any]) -> Iterator[Field]:
    """``fields``, each followed by the inputs that its value brings. ``values`` may be filled meanwhile."""
    for entry in fields:
        yield entry
        value = values.get(entry.name)
        yield from active_fields(entry.parts.get(value, ()) if isinstance(value, str) else (), values)


def one_field(name: str, spec: Sequence[Any], is_required: bool) -> Field:
    kind, config = spec[0], spec[1] if len(spec) > 1 else {}
    options = kind if isinstance(kind, list) else config.get("options", []) if kind in ("COMBO", BY_OPTION) else []
    parts = {}
    if kind == BY_OPTION:
        parts = {option["key"]: tuple(_fields(option["inputs"], f"{name}.")) for option in options}
        options = list(parts)
    return Field(
        name=name,
        kind="COMBO" if isinstance(kind, list) or parts else "*" if kind == ANY_TYPE else kind,
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


def match_name(name: str, known: Sequence[str]) -> str | None:
    """The entry of ``known`` that ``name`` denotes: the same path, or else the only one with this file name or stem. None: there is none."""
    paths = [PurePosixPath(option.replace("\\", "/").casefold()) for option in known]
    wanted = PurePosixPath(name.replace("\\", "/").casefold())
    by_name = [option for option, path in zip(known, paths, strict=True) if path.name == wanted.name]
    by_stem = [option for option, path in zip(known, paths, strict=True) if path.stem == wanted.stem]
    found = next((each for each in (by_name, by_stem) if len(each) == 1), [None])
    return name if name in known else found[0]


def is_link(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and type(value[1]) is int
