"""docs/RECIPES.md lists every shipped recipe and every key of every recipe; both lists are generated.

``REWRITE_DOCS=1 pytest tests/test_recipe_keys.py`` rewrites them instead of comparing them.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from itertools import pairwise
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import to_json

from stretto.base.config import Config
from stretto.base.numbers import listed
from stretto.learning.recipe import RlRecipe
from stretto.post.pipeline import PipelineRecipe
from stretto.train.recipe import ElasticizeRecipe, HealRecipe, Recipe, SftRecipe
from tests.test_house import RECIPES, ROOT, anchor_of, check_block

PAGE = ROOT / "docs/RECIPES.md"
KINDS: tuple[type[Config], ...] = (Recipe, ElasticizeRecipe, HealRecipe, SftRecipe, RlRecipe, PipelineRecipe)
WORDS = {int: "integer", float: "number", bool: "`true`, `false`", str: "text", dict: "table", Any: "any value"}
BOUNDS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}


def test_the_page_lists_every_key_of_every_recipe() -> None:
    check_block(PAGE, "keys", key_lines(), fence="")


def test_the_page_lists_every_shipped_recipe() -> None:
    check_block(PAGE, "recipes", recipe_lines(), fence="")


def recipe_lines() -> Iterator[str]:
    """Each shipped recipe with its command and the first sentence of its comment."""
    yield from ("| recipe | command | what it does |", "|---|---|---|")
    for path in sorted(RECIPES.glob("*.toml")):
        comment = re.match(r"(#.*\n)+", path.read_text(encoding="utf-8"))
        assert comment, f"{path}: does not say what it is for"
        text = " ".join(comment.group().replace("#", " ").split())
        command = re.search(rf"stretto \w+(?=[^#]* recipes/{path.stem}\.toml)|stretto demo", comment.group())
        assert command, f"{path}: does not name its command"
        yield f"| [{path.stem}](../stretto/recipes/{path.name}) | `{command.group()}` | {text.split('. ')[0]}. |"


def key_lines() -> Iterator[str]:
    """A section for each recipe, with a table of keys for each of its tables. A table that several recipes have stands at the first."""
    titles: dict[type[BaseModel], str] = {}
    for kind in KINDS:
        for table, path in tables(kind):
            if first_of(table, titles) is None:
                command = kind.command.replace("`", "")
                titles[table] = f"[{path}] of {command}" if path else f"Recipe of {command}"
    shown: set[type[BaseModel]] = set()
    for kind in KINDS:
        for table, path in tables(kind):
            first = first_of(table, titles)
            assert first is not None
            missing = [f"`{name}`" for name in first.model_fields if name not in table.model_fields]
            if first is table and table not in shown:
                shown.add(table)
                yield from (f"{'###' if path else '##'} {titles[table]}", "", text_of(table), "")
                yield from ("| key | value | default | meaning |", "|---|---|---|---|", *rows(table, titles), "")
            elif missing:
                yield from (f"Here `[{path}]` does not have the keys {listed(missing)}.", "")


def first_of(table: type[BaseModel], titles: Mapping[type[BaseModel], str]) -> type[BaseModel] | None:
    """The class in ``titles`` that has all keys of ``table``."""
    return next((each for each in titles if issubclass(each, table)), None)


def tables(kind: type[BaseModel], path: str = "") -> Iterator[tuple[type[BaseModel], str]]:
    """``kind`` and the tables in it, with their places in the file; each once."""
    yield kind, path
    found: dict[type[BaseModel], str] = {}
    for name, field in kind.model_fields.items():
        for table, under in tables_in(field.annotation):
            found.setdefault(table, ".".join(filter(None, (path, field.alias or name, under))))
    for table, place in found.items():
        yield from tables(table, place)


def tables_in(annotation: Any) -> Iterator[tuple[type[BaseModel], str]]:
    """Tables in a value of this type, and where: ``NAME`` for one of a mapping."""
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        yield annotation, ""
    under = "NAME" if get_origin(annotation) is dict else ""
    for member in get_args(annotation):
        yield from ((table, ".".join(filter(None, (under, rest)))) for table, rest in tables_in(member))


def rows(table: type[BaseModel], titles: Mapping[type[BaseModel], str]) -> Iterator[str]:
    meanings = docstrings(table)
    for name, field in table.model_fields.items():
        value, meaning = value_of(field), plain(meanings.get(name, ""))
        if inner := next((each for each, _ in tables_in(field.annotation)), None):
            value = value.replace("table", f"[table](#{anchor_of(titles[first_of(inner, titles) or inner])})")
        yield f"| `{field.alias or name}` | {value} | {default_of(field)} | {meaning} |"


def docstrings(table: type[BaseModel]) -> dict[str, str]:
    """The text below each field, also of the classes that ``table`` extends."""
    found: dict[str, str] = {}
    for each in reversed(table.__mro__):
        if each is BaseModel or not issubclass(each, BaseModel):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(each))).body[0].body  # type: ignore[attr-defined]
        for field, text in pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                found[field.target.id] = text.value.value  # type: ignore[union-attr, assignment]
    return found


def text_of(table: type[BaseModel]) -> str:
    return f"{plain(inspect.getdoc(table) or '')} In Python: `{table.__module__}.{table.__name__}`."


def plain(text: str) -> str:
    """One line, for a cell of a table."""
    return " ".join(text.replace("``", "`").replace("|", "\\|").split())


def value_of(field: FieldInfo) -> str:
    """What the key may be: ``integer > 0``."""
    bounds = [
        f"{sign} {getattr(each, name)}"
        for each in field.metadata
        for name, sign in BOUNDS.items()
        if hasattr(each, name)
    ]
    return " ".join(filter(None, (kind_of(field.annotation), ", ".join(bounds))))


def kind_of(annotation: Any) -> str:
    origin, members = get_origin(annotation), [each for each in get_args(annotation) if each is not NoneType]
    if origin is Literal:
        return ", ".join(f"`{member}`" for member in members)
    if origin in (Union, UnionType):
        return " or ".join(map(kind_of, members))
    if origin is Annotated:
        return kind_of(members[0])
    if origin is dict:
        return f"table of {kind_of(members[1])}" if members[1] is not Any else "table"
    if origin in (tuple, list):
        return f"list of {kind_of(members[0])}"
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return "table"
    return WORDS[annotation]


def default_of(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "none"
    return "" if isinstance(value, BaseModel) else f"`{to_json(value).decode()}`"
