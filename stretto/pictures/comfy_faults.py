"""Reasons why a ComfyUI server would refuse a graph, and the repair of what it has refused."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Any

from stretto.base.errors import UserError, nearest
from stretto.pictures.comfy_kinds import SEEDS, Field, Graph, Kinds, active_fields, is_link, match_name, one_field


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
    fields = {entry.name: entry for entry in active_fields(own, node["inputs"])}
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
            if key not in graph or not isinstance(name, str) or name in ("width", "height", "text", *SEEDS):
                continue
            entry = one_field(name, extra.get("input_config") or ["*"], True)
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
