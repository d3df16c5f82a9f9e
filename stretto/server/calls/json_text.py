"""Strict JSON of bounded depth, from models and clients."""

from __future__ import annotations

import json
from typing import Any

import regex

MAX_DEPTH = 128
"""Deepest nesting of JSON, as in most parsers. Templates, schemas and messages are processed by recursive functions."""
_SURROGATE = regex.compile("[\ud800-\udfff]")


def parse_json(text: str) -> Any:
    """``text`` as JSON. Raises ValueError for anything else, and for NaN and numbers beyond the range of floats.
    Lone surrogates, which no answer can contain, are replaced."""
    try:
        tree = strict_json(text)
        spelt = json.dumps(tree, ensure_ascii=False, allow_nan=False)
        return json.loads(_SURROGATE.sub("\ufffd", spelt)) if _SURROGATE.search(spelt) else tree
    except RecursionError:
        raise ValueError("too deep") from None


def strict_json(text: str) -> Any:
    """``text`` as JSON. Raises ValueError for NaN and RecursionError for more than `MAX_DEPTH` nested lists and objects."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    tree = json.loads(text, parse_constant=refuse)
    level = [tree]
    for _ in range(MAX_DEPTH):
        inner = (node.values() if isinstance(node, dict) else node for node in level if isinstance(node, dict | list))
        level = [each for nodes in inner for each in nodes if isinstance(each, dict | list)]
    if level:
        raise RecursionError
    return tree
