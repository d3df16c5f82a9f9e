"""The arguments of a Python function compared with its annotations."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from inspect import Parameter, signature
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

_MAX_SHOWN = 60
"""Values with a longer text are shown as the name of their type."""
_WORDS = {bool: "True or False", float: "a number", int: "a whole number", os.PathLike: "a path", str: "a text"}


def wrong_argument(function: Callable[..., object], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """What is wrong with the first argument that has another type than the annotation: "max_total: needs a number, is '0.5'". None: each
    has the right type. Elements of lists and mappings are not compared.

    ``Annotated[T, WORDS, REMEDY]`` replaces the words for T, and adds a remedy if there is one.
    """
    hints, positional = _annotations(function)
    for name, value in [*zip(positional, args, strict=False), *kwargs.items()]:
        hint = hints.get(name, Any)
        if not _fits(value, hint):
            remedy = get_args(hint)[2:] if get_origin(hint) is Annotated else ()
            return "; ".join([f"{name}: needs {_words(hint)}, is {_shown(value)}", *remedy])
    return None


@cache
def _annotations(function: Callable[..., object]) -> tuple[dict[str, Any], list[str]]:
    """The annotations of the named parameters, and the names of those that may be positional."""
    named = {name: each.kind for name, each in signature(function).parameters.items()}
    several = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    hints = get_type_hints(function, include_extras=True)
    positional = [name for name, kind in named.items() if kind is Parameter.POSITIONAL_OR_KEYWORD]
    return {name: hint for name, hint in hints.items() if named.get(name, several[0]) not in several}, positional


def _fits(value: object, hint: Any) -> bool:
    origin = get_origin(hint) or hint
    if hint is Any:
        return True
    if origin is Annotated:
        return _fits(value, get_args(hint)[0])
    if origin in (Union, UnionType):
        return any(_fits(value, each) for each in get_args(hint))
    if hint in (int, float):  # of NumPy, too
        return isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool)
    if origin is Sequence:  # arrays, series and generators, too; a table would give the names of its columns
        return isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping) and not _is_table(value)
    return isinstance(value, NoneType if hint is None else origin)


def _words(hint: Any) -> str:
    """What ``hint`` asks for, in words; that None is allowed, too, is not said."""
    origin = get_origin(hint) or hint
    if origin is Annotated:
        return str(get_args(hint)[1])
    if origin in (Union, UnionType):
        parts = [each for each in get_args(hint) if each is not NoneType]
        if any(get_origin(each) is os.PathLike for each in parts):
            parts.remove(str)
        return ", or ".join(dict.fromkeys(map(_words, parts)))
    if origin in (Mapping, Sequence):
        return "a mapping" if origin is Mapping else "several in a list"
    return _WORDS.get(origin) or origin.__name__


def _is_table(value: object) -> bool:
    return hasattr(value, "columns") or hasattr(value, "column_names")  # of pandas, polars, pyarrow and datasets


def _shown(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= _MAX_SHOWN and not _is_table(value) else f"of type {type(value).__name__}"
