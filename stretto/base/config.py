"""Configuration: frozen, complete before anything is built, an unknown key is an error.

A recipe is a TOML file; ``--set train.steps=100`` overrides one dotted key. Nothing here imports torch, so a bad
recipe is refused in a fraction of a second.
"""

from __future__ import annotations

import copy
import importlib
import json
import math
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Self, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError

from stretto.base.errors import UserError, nearest
from stretto.base.paths import RECIPES, read_json
from stretto.base.plugin import name_of

_LONGEST_NAME = 80
"""Characters of a name that a message repeats."""


_RECIPE_MODULES = ("stretto.train.recipe", "stretto.learning.recipe", "stretto.post.pipeline")
"""Where recipes are defined; imported only to say which command a refused recipe belongs to."""


class Config(BaseModel):
    """Base of every configuration object: frozen, and refuses keys it does not know."""

    command: ClassVar[str] = ""
    """Of a recipe: the commands that take it, as a message names them."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    def replace(self, **changes: Any) -> Self:
        """A copy with ``changes`` applied and validated again (``model_copy`` would skip validation)."""
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self).model_validate({**fields, **changes})


ConfigT = TypeVar("ConfigT", bound=Config)


def read_recipe(
    recipe: str | os.PathLike[str] | Mapping[str, Any] | Config,
    kind: type[ConfigT],
    overrides: Sequence[str] = (),
    given: Mapping[str, Any] | None = None,
) -> ConfigT:
    """Read a recipe, replace its tables by those that are ``given``, apply ``key.path=value`` overrides, and validate it as ``kind``.

    Args:
        recipe: a TOML file (or JSON, as runs keep theirs), the name of a shipped recipe, a mapping of the same form, or an object. In a
            mapping, a class or a function stands for its name (`stretto.base.plugin.name_of`).

    Raises:
        UserError: the file is missing or cannot be read, a key is unknown, or a value is impossible.
    """
    source = source_name(recipe)
    if isinstance(recipe, Config):
        tree = recipe.model_dump(mode="json")
    elif isinstance(recipe, Mapping):
        tree = _plain(recipe)
    else:
        tree = read_tree(Path(source))
    tree |= given or {}
    written = copy.deepcopy(tree)
    for override in overrides:
        _apply_override(tree, override)
    for key, value in _flat(tree).items():
        if any(
            isinstance(each, float) and not math.isfinite(each)
            for each in (value if isinstance(value, list) else [value])
        ):
            raise UserError(f"{source}: {key}: {value} is not a finite number; correct it")
    try:
        return validate(kind, tree, source=source)
    except UserError as error:
        raise UserError(_other_command(written, kind, source) or str(error)) from None


def _other_command(tree: Mapping[str, Any], kind: type[Config], source: str) -> str:
    """What to say of a recipe that is complete, but for another command than ``kind``'s; empty where it is not."""
    if _fits(kind, tree):  # an override is wrong
        return ""
    kinds = (each for name in _RECIPE_MODULES for each in vars(importlib.import_module(name)).values())
    recipes = [each for each in kinds if _is_model(each) and issubclass(each, Config) and each.command]
    found = next((each.command for each in recipes if each is not kind and _fits(each, tree)), "")
    return (
        f"{source}: a recipe of {found}, not of {kind.command}; name another recipe" if found and kind.command else ""
    )


def _fits(kind: type[Config], tree: Mapping[str, Any]) -> bool:
    try:
        kind.model_validate(dict(tree))
    except ValidationError:
        return False
    return True


def source_name(recipe: str | os.PathLike[str] | Mapping[str, Any] | Config) -> str:
    """How messages name ``recipe``: its path, the class of an object, or ``recipe`` for a mapping. Raises `UserError`: no such file."""
    if isinstance(recipe, Config):
        return type(recipe).__name__
    return "recipe" if isinstance(recipe, Mapping) else str(find_recipe(os.fspath(recipe)))


def overriding(settings: Sequence[str], told: Mapping[str, Any]) -> list[str]:
    """``settings``, and one more for each key of ``told`` that has a value."""
    return [*settings, *(f"{key}={value}" for key, value in told.items() if value is not None)]


def _plain(value: Any) -> Any:
    """``value`` as a file could hold it."""
    if isinstance(value, Config):
        return value.model_dump(mode="json")
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return name_of(value) if callable(value) else value


def find_recipe(named: Path | str) -> Path:
    """The file that ``named`` is: a path, or the name of a shipped recipe: ``small``, ``small.toml``, ``recipes/small.toml``.
    Raises `UserError`: there is neither.
    """
    path = Path(named)
    if path.exists():
        return path
    shipped = RECIPES / path.with_suffix(".toml").name
    if path.parent.as_posix() in (".", RECIPES.name) and path.suffix in ("", ".toml") and shipped.is_file():
        return shipped
    known = sorted(each.stem for each in RECIPES.glob("*.toml"))
    raise UserError(
        f"{path}: no such recipe{nearest(path.stem, known)}; name a file, or a shipped one: {', '.join(known)}"
    )


def read_tree(path: Path) -> dict[str, Any]:
    """The tables of a TOML file, or of a JSON file. Raises `UserError`: it cannot be read, or holds no table."""
    if path.suffix == ".json":
        tree = read_json(path)
        if not isinstance(tree, dict):
            raise UserError(f"{path}: not a JSON object; name a recipe, or tables like one")
        return tree
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read: {(error.strerror or str(error)).lower()}; name a file that is there"
        ) from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: cannot be read as UTF-8 text: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: not valid TOML: {error}") from None


def validate(kind: type[ConfigT], tree: Mapping[str, Any], source: str) -> ConfigT:
    """Build ``kind`` from plain data; a problem becomes one line naming ``source`` and the field."""
    try:
        return kind.model_validate(dict(tree) if isinstance(tree, Mapping) else tree)
    except ValidationError as error:
        problem = first_problem(error, kind, "key")
        raise UserError(f"{': '.join(filter(None, (source, problem.field, problem.message)))}") from None


def check_unchanged(
    old: Mapping[str, Any], new: Mapping[str, Any], where: Path | str, free: Sequence[str] = ()
) -> None:
    """Refuse to go on under another recipe (as plain data) than the run in the folder ``where`` was started with.

    Fields in ``free`` may differ; one that ends with a dot stands for a whole table. Raises `UserError`, naming the
    first field that differs.
    """
    tables = tuple(name for name in free if name.endswith("."))
    for field, (before, after) in differences(old, new).items():
        if field not in free and not field.startswith(tables):
            raise UserError(
                f"{where}: {field}: was {before!r} when this run started, is {after!r} now; "
                "change it back, or start a new run folder"
            )


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What two recipes (as plain data) do not have in common: by dotted key, before and after; None where it is missing."""
    before, after = _flat(old), _flat(new)
    fields = sorted(before.keys() | after.keys())
    return {name: (before.get(name), after.get(name)) for name in fields if before.get(name) != after.get(name)}


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """By dotted key; tuples as lists, as they come out of a file."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = json.loads(json.dumps(value))
    return flat


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise UserError(f"--set {override}: expected key.path=value, for example train.steps=100")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a string, so that --set data.name=books needs no quotes
    *parents, leaf = key.strip().split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            raise UserError(f"--set {override}: {parent!r} is a value, not a table")
    tree[leaf] = value


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with plain data. Written by `first_problem`."""

    field: str | None
    """Its dotted path, as the data spells it; None: the data as a whole."""
    message: str
    is_unknown: bool = False
    """There is no such field."""


def first_problem(error: ValidationError, kind: type[BaseModel], noun: str = "field") -> Problem:
    """The first problem that pydantic found in what should have been a ``kind``; ``noun``: what a field is called there."""
    found = error.errors(include_url=False, include_input=False, include_context=False)[0]
    *above, last = found["loc"] or (None,)
    is_unknown = found["type"] == "extra_forbidden"
    path: list[str] = []
    # what the data at this place may be: several where pydantic's next step names one of them
    inside: list[Any] = [kind]
    for part in above if is_unknown or last is None else (*above, last):
        if len(inside) > 1:
            named = [each for each in inside if _label(each) in str(part).lower()]
            inside = sorted(named, key=lambda each: len(_label(each)))[-1:]
        elif part != "[key]":
            path.append(_shown(str(part)))
            inside = [member for each in inside for member in _members(_at(each, part))]
    if not is_unknown:
        message = "missing; add it" if found["type"] == "missing" else found["msg"].removeprefix("Value error, ")
        return Problem(".".join(path) or None, message)
    known = [field.alias or name for each in inside if _is_model(each) for name, field in each.model_fields.items()]
    return Problem(".".join([*path, _shown(str(last))]), f"unknown {noun}{nearest(str(last), known)}", True)


def _at(annotation: Any, part: int | str) -> Any:
    """The type of what lies at ``part`` in a value of a type; `Any` where nothing is known of it."""
    if _is_model(annotation):
        named = [field for name, field in annotation.model_fields.items() if part in (name, field.alias)]
        return named[0].annotation if named else Any
    arguments = get_args(annotation)
    return arguments[-1 if get_origin(annotation) is dict else 0] if arguments else Any


def _members(annotation: Any) -> list[Any]:
    """What a union is made of, None left out: it has no step in pydantic's paths."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _members(arguments[0])
    if origin in (Union, UnionType):
        return [member for each in arguments if each is not NoneType for member in _members(each)]
    return [annotation]


def _label(annotation: Any) -> str:
    """As pydantic's paths name a member of a union, in lower case: ``list[int]``."""
    origin = get_origin(annotation)
    name = str(getattr(origin or annotation, "__name__", annotation)).lower()
    return f"{name}[{','.join(map(_label, get_args(annotation)))}]" if origin in (list, tuple, dict) else name


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _shown(name: str) -> str:
    """A name as it stands in a message of one line, however its sender made it up."""
    short = name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}…"
    return short if short.isprintable() and short else ascii(short)
