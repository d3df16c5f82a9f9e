"""JSON schemas of tool parameters: the schema of one argument, and the closed schema of a strict or forced function.

Schemas come from clients and may be malformed. A value that is not a schema counts as a schema without constraints.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from stretto.base.errors import UserError

Schema = Mapping[str, Any]

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords whose values are mappings from names to schemas."""
_DATA = ("enum", "const", "default", "examples")
"""Keywords whose values are data, not schemas."""
_UNIONS = ("anyOf", "oneOf")
_OTHERS = ("items", "additionalProperties")
"""Keywords whose value is the schema of all elements or properties that have no schema of their own."""
_TIGHTER: Mapping[str, Callable[[Any, Any], Any]] = {
    **dict.fromkeys(("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"), max),
    **dict.fromkeys(("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"), min),
}
"""Of two values of a limit the one that implies the other."""
_MAX_STEPS = 256
"""Largest number of references, unions and intersections that are resolved for one schema: references may be circular."""


def properties(schema: Schema) -> Mapping[str, Any]:
    return _mapping(schema, "properties")


def required(schema: Schema) -> list[str]:
    return [each for each in _list(schema, "required") if isinstance(each, str)]


def kinds(schema: Schema) -> set[str]:
    """The JSON types that ``schema`` allows; empty: all."""
    named = schema.get("type")
    return {each for each in ([named] if isinstance(named, str) else _list(schema, "type")) if isinstance(each, str)}


def constants(schema: Schema) -> Sequence[Any]:
    """The allowed values, if ``schema`` lists them."""
    return [schema["const"]] if "const" in schema else _list(schema, "enum")


def _is_listed(schema: Schema) -> bool:
    """Whether ``schema`` lists the allowed values."""
    return "const" in schema or isinstance(schema.get("enum"), list | tuple)


def ways(schema: Any, root: Schema) -> list[Schema]:
    """Alternatives of ``schema``, a part of ``root``: a value follows ``schema`` if it follows one of them. They contain no reference, union
    or intersection at their top, and list only values of their types. Empty: no value follows ``schema``. Raises `UserError` if this takes
    more than `_MAX_STEPS` steps."""
    found: list[Schema] = []
    waiting = [schema]
    for _ in range(_MAX_STEPS):
        if not waiting:
            return found
        each = waiting.pop(0)
        if not isinstance(each, Mapping):
            found.append({})
        elif "$ref" in each:
            waiting.insert(0, _both(_without(each, "$ref"), _referred(each["$ref"], root)))
        elif parts := _list(each, "allOf"):
            waiting.insert(0, _both(_without(each, "allOf") | ({"allOf": parts[1:]} if parts[1:] else {}), parts[0]))
        elif name := next((name for name in _UNIONS if _list(each, name)), None):
            waiting[:0] = [_both(_without(each, name), part) for part in _list(each, name)]
        elif not _is_listed(each):
            found.append(each)
        elif values := [value for value in constants(each) if not kinds(each) or _common({_kind(value)}, kinds(each))]:
            found.append({**_without(each, "const"), "enum": values})
    problem = f"resolving a schema of their parameters takes more than {_MAX_STEPS} steps"
    raise UserError(f"tools: {problem}; remove references that lead back to themselves, or allow fewer alternatives")


def argument(schema: Schema, name: str) -> list[Schema]:
    """`ways` of the argument ``name`` of a call whose parameters follow ``schema``. Empty if the schema does not mention the argument or is
    too complex: a call that was made is read all the same."""
    try:
        known = [properties(way).get(name) for way in ways(schema, schema)]
        return [each for part in known if part is not None for each in ways(part, schema)]
    except UserError:
        return []


def alone(part: Schema, root: Schema) -> Schema:
    """``part`` of ``root`` as a schema of its own, with the references changed so that they still resolve."""

    def moved(schema: Any) -> Any:
        schema = _each(schema, moved)
        if isinstance(schema, dict) and str(schema.get("$ref", "")).startswith("#"):
            return schema | {"$ref": f"#/$defs/whole{schema['$ref'][1:]}"}
        return schema

    return {**moved(part), "$defs": {"whole": moved(root)}} if '"$ref"' in json.dumps(part) else part


def closed(schema: Schema, is_strict: bool) -> dict[str, Any]:
    """The parameters of a function, where objects have no properties beyond those in their schema, unless the schema itself allows them.
    Parameters that say nothing about properties allow none if ``is_strict``, and otherwise any."""
    budget = iter(range(_MAX_STEPS))

    def close(part: Any) -> Any:
        if isinstance(part, dict) and _is_several(part) and next(budget, None) is not None:
            # closed one by one, each part of an intersection would forbid the properties of the others
            several = [dict(way) for way in ways(part, schema)]
            if not several:
                return {"enum": []}
            if any(properties(way) or any("allOf" in _mapping(way, name) for name in _OTHERS) for way in several):
                kept = {key: part[key] for key in ("$defs", "definitions") if key in part}
                return _each(kept, close) | ({"anyOf": list(map(close, several))} if several[1:] else close(several[0]))
        found = _each(part, close)
        return (
            {"additionalProperties": False, **found}
            if isinstance(found, dict) and isinstance(found.get("properties"), dict)
            else found
        )

    found: dict[str, Any] = close(dict(schema))
    says = found.keys() & {"properties", "patternProperties", "$ref", "allOf", *_UNIONS}
    if says or not is_strict:
        return found
    return {"additionalProperties": False, **found, "type": "object", "properties": {}}


def _is_several(schema: Schema) -> bool:
    """Whether ``schema`` is an intersection of several schemas."""
    num = len(_list(schema, "allOf")) + ("$ref" in schema) + any(_list(schema, name) for name in _UNIONS)
    return num + bool(properties(schema)) > 1


def _each(schema: Any, change: Callable[[Any], Any]) -> Any:
    """``schema`` with ``change`` applied to each schema directly inside."""
    if isinstance(schema, list):
        return [change(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: value
        if key in _DATA
        else {name: change(each) for name, each in value.items()}
        if key in _MAPS and isinstance(value, dict)
        else change(value)
        for key, value in schema.items()
    }


def _referred(reference: Any, root: Schema) -> Any:
    found: Any = root
    for step in str(reference).partition("#")[2].split("/")[1:]:
        found = found.get(unquote(step).replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def _both(first: Schema, second: Any) -> Schema:
    """The intersection of two schemas. Of two unions or references, one is kept in ``allOf``."""
    if not isinstance(second, Mapping):
        return first
    waiting = [*_list(first, "allOf"), *_list(second, "allOf")]
    waiting += [{key: second[key]} for key in ("$ref", *_UNIONS) if key in first and key in second]
    named = dict(properties(first))
    for name, each in properties(second).items():
        named[name] = {"allOf": [named[name], each]} if named.get(name, each) != each else each
    found = {**second, **first}
    for name, tighter in _TIGHTER.items():
        limits = [each[name] for each in (first, second) if isinstance(each.get(name), int | float)]
        if limits[1:]:
            found[name] = tighter(*limits)
    if _is_listed(first) and _is_listed(second):
        found = _without(found, "const") | {"enum": [each for each in constants(first) if each in constants(second)]}
    if kinds(first) and kinds(second) and kinds(first) != kinds(second):
        both = _common(kinds(first), kinds(second))
        found = found | {"type": sorted(both)} if both else _without(found, "const") | {"enum": []}
    if waiting:
        found["allOf"] = waiting
    if named:
        found["properties"] = named
    if wanted := list(dict.fromkeys([*required(first), *required(second)])):
        found["required"] = wanted
    for name in _OTHERS:
        parts = [each[name] for each in (first, second) if isinstance(each.get(name), Mapping)]
        if parts[1:] and parts[0] != parts[1]:
            found[name] = {"allOf": parts}
    if second.get("additionalProperties") is False:
        found["additionalProperties"] = False
    return found


def _kind(value: Any) -> str:
    """The JSON type of a value."""
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    names = {str: "string", bool: "boolean", int: "integer", list: "array", dict: "object"}
    return names.get(type(value), "null")


def _common(first: set[str], second: set[str]) -> set[str]:
    """The JSON types in both sets; an integer is a number, too."""
    wide = [each | {"integer"} if "number" in each else each for each in (first, second)]
    both = wide[0] & wide[1]
    return both - {"integer"} if "number" in both else both


def _without(schema: Schema, key: str) -> dict[str, Any]:
    return {name: each for name, each in schema.items() if name != key}


def _mapping(schema: Schema, key: str) -> Mapping[str, Any]:
    found = schema.get(key)
    return found if isinstance(found, Mapping) else {}


def _list(schema: Schema, key: str) -> Sequence[Any]:
    found = schema.get(key)
    return found if isinstance(found, list | tuple) else ()
