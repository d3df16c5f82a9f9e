"""Configuration objects and recipes: frozen, validated before anything is built; an unknown key is an error.

A recipe is a TOML file; ``--set train.steps=100`` overrides one dotted key. This module does not import torch, so an invalid
recipe is rejected in a fraction of a second.
"""

from __future__ import annotations

import copy
import importlib
import json
import math
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, time
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, ClassVar, Self, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Tag, ValidationError
from pydantic_core import ErrorDetails, to_jsonable_python

from stretto.base.errors import UserError, nearest, one_line
from stretto.base.paths import RECIPES, read_json
from stretto.base.plugin import name_of

_MAX_NAME_CHARS = 80
"""Longer names from the data are cut in error messages."""
_MAX_SHOWN = 40
"""Longest invalid value, in characters of its Python form, that a message repeats."""
_MOST = 10**9
"""Largest count in a recipe. More steps, rows or tokens are a slip, which would otherwise show only after hours."""
_NO_COUNTS = ("seed", "_bytes")
"""Ends of the keys of whole numbers that may be larger."""
_INPUT = "Input should be"
"""Start of pydantic's messages about a value; ours say "must be"."""
_RECIPE_MODULES = ("stretto.train.recipe", "stretto.learning.recipe", "stretto.post.pipeline")
"""Modules that define recipes; imported only to say which command a rejected recipe belongs to."""


class Config(BaseModel):
    """Base class of all configuration objects: frozen; unknown keys are errors."""

    command: ClassVar[str] = ""
    """Name of the command that takes this recipe, for messages; empty where the class is not a recipe."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    def replace(self, **changes: Any) -> Self:
        """A copy with ``changes`` applied and validated again (``model_copy`` would skip validation)."""
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self).model_validate({**fields, **changes})


ConfigT = TypeVar("ConfigT", bound=Config)
_SETTINGS_WORDS = 'texts such as "train.rows=8", or a mapping of keys to values'
Settings = Annotated[str | Sequence[str] | Mapping[str, Any], _SETTINGS_WORDS]
"""Overrides of single recipe keys: ``["train.rows=8"]``, ``"train.rows=8"`` or ``{"train.rows": 8}``."""
RecipeLike = Annotated[
    str | os.PathLike[str] | Mapping[str, Any] | Config,
    "a file, the name of a shipped recipe, a mapping or a recipe object",
]
"""A TOML file, the name of a shipped recipe (``small``), a mapping of the same form, or a recipe object."""


def read_recipe(
    recipe: RecipeLike,
    kind: type[ConfigT],
    overrides: Settings = (),
    given: Mapping[str, Any] | None = None,
) -> ConfigT:
    """Read a recipe, replace its tables by those in ``given``, apply the overrides, and validate the result as ``kind``.

    Args:
        recipe: a TOML file, a JSON file (the form in run folders), the name of a shipped recipe, a mapping, or a recipe object. A class
            or function in a mapping is replaced by its name (`stretto.base.plugin.name_of`).
        overrides: items of the form ``key.path=value``, one of them, or a mapping of such keys to values.

    Raises:
        UserError: the file is missing or cannot be read, a key is unknown, or a value is invalid.
    """
    source, overrides = source_name(recipe), listed_settings(overrides)
    if isinstance(recipe, str | os.PathLike):
        tree = read_tree(Path(source))
    else:
        tree = plain_tree(recipe)
    tree |= given or {}
    before_overrides, tree = tree, overridden(tree, overrides)
    if dated := _dated_key(tree):
        raise UserError(
            f"{source}: {dated}: is a date or a time; write it as text in quotes{_origin(dated, overrides)}"
        )
    for key, value in _flat(tree).items():
        numbers = [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, float)]
        if not all(map(math.isfinite, numbers)):
            raise UserError(
                f"{source}: {one_line(key)}: {value} is not a finite number; correct it{_origin(key, overrides)}"
            )
    try:
        read = kind.model_validate(tree)
    except ValidationError as error:
        problem = first_problem(error, kind, "key")
        line = ": ".join(filter(None, (source, problem.field, problem.message)))
        line += _origin(problem.field or "", overrides, problem.is_unknown)
        raise UserError(_other_command(before_overrides, kind, source) or line) from None
    for key, value in _flat(read.model_dump(mode="json")).items():
        counts = [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, int)]
        if not key.endswith(_NO_COUNTS) and any(count > _MOST for count in counts):
            raise UserError(
                f"{source}: {key}: must be at most {_MOST:,}, is {value}; correct it{_origin(key, overrides)}"
            )
    return read


def _dated_key(value: Any, key: str = "") -> str | None:
    """Dotted key of the first date or time, which TOML has and no recipe takes; None: there is none."""
    if isinstance(value, date | time):  # a datetime is a date
        return key
    if isinstance(value, list):
        return next(filter(None, (_dated_key(item, key) for item in value)), None)
    if isinstance(value, Mapping):
        found = (_dated_key(item, f"{key}.{name}" if key else name) for name, item in value.items())
        return next(filter(None, found), None)
    return None


def _origin(field: str, overrides: Sequence[str], is_unknown: bool = False) -> str:
    """Which of ``overrides`` gave ``field`` its invalid value, in parentheses; empty: the value stands in the recipe. An unknown table
    comes from an override of any key in it."""
    for override in reversed(overrides):
        key = override.partition("=")[0].strip()
        if f"{field}.".startswith(f"{key}.") or (is_unknown and key.startswith(f"{field}.")):
            return f" (from the setting {one_line(override)})"
    return ""


def _other_command(tree: Mapping[str, Any], kind: type[Config], source: str) -> str:
    """The error message for a valid recipe of another command than ``kind``'s; empty where ``tree`` is not one."""
    if not kind.command or _is_valid(kind, tree):  # valid: an override causes the error
        return ""
    values = (value for name in _RECIPE_MODULES for value in vars(importlib.import_module(name)).values())
    recipes = [value for value in values if _is_model(value) and issubclass(value, Config) and value.command]
    found = next((recipe.command for recipe in recipes if recipe is not kind and _is_valid(recipe, tree)), "")
    return f"{source}: a recipe of {found}, not of {kind.command}; name another recipe" if found else ""


def _is_valid(kind: type[Config], tree: Mapping[str, Any]) -> bool:
    try:
        kind.model_validate(dict(tree))
    except ValidationError:
        return False
    return True


def source_name(recipe: RecipeLike) -> str:
    """Name of ``recipe`` in messages: its path, the class of an object, or ``recipe`` for a mapping. Raises `UserError`: no such file."""
    if isinstance(recipe, Config):
        return type(recipe).__name__
    return "recipe" if isinstance(recipe, Mapping) else str(find_recipe(os.fspath(recipe)))


def listed_settings(settings: Settings) -> list[str]:
    """``settings`` as overrides of the form ``key.path=value``. Raises `UserError`: they are something else."""
    if isinstance(settings, Mapping):
        return [f"{key}={_as_toml(key, value)}" for key, value in settings.items()]
    listed = [settings] if isinstance(settings, str) else list(settings) if isinstance(settings, Iterable) else [None]
    if not all(isinstance(each, str) for each in listed):
        raise UserError(f"settings: needs {_SETTINGS_WORDS}")
    return [str(each) for each in listed]


def _as_toml(key: str, value: Any) -> str:
    """A number, a text or a list of them, as TOML spells it. Raises `UserError`: another value."""
    items = value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(item, str | int | float) for item in items):
        raise UserError(f"settings: {key}: needs a number, a text or a list of them, is {one_line(value, _MAX_SHOWN)}")
    return json.dumps(value, ensure_ascii=False)  # TOML writes these like JSON


def overridden(tree: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """A copy of ``tree``, a recipe as plain data, with ``settings``. Raises `UserError`: a setting is none."""
    changed = copy.deepcopy(dict(tree))
    for override in listed_settings(settings):
        _apply_override(changed, override)
    return changed


def overriding(settings: Settings, options: Mapping[str, Any]) -> list[str]:
    """``settings`` and one more override for each of ``options`` that is not None."""
    return [*listed_settings(settings), *(f"{key}={value}" for key, value in options.items() if value is not None)]


def plain_tree(recipe: Mapping[str, Any] | Config) -> dict[str, Any]:
    """A recipe object as plain data. A class or function in it is replaced by its name (`stretto.base.plugin.name_of`).
    Raises `UserError`: something else in it has no name and no text."""
    tree: dict[str, Any] = to_jsonable_python(recipe, fallback=_plain)
    return tree


def _plain(value: Any) -> Any:
    """Convert a value that pydantic cannot: other mappings than dicts, and classes and functions, which become their names."""
    if isinstance(value, Mapping):
        return dict(value)
    if callable(value):
        return name_of(value)
    if str(value) == object.__repr__(value):  # the class has no text of its own
        raise UserError(f"recipe: contains an instance of {type(value).__name__}; give the class, not an instance")
    return str(value)


def find_recipe(name: Path | str) -> Path:
    """The recipe file of this path, or the shipped recipe of this name: ``small``, ``small.toml``, ``recipes/small.toml``.

    Raises UserError: no such recipe.
    """
    path = Path(os.path.expanduser(name))
    if path.exists() and not path.is_dir():  # a recipe may also come from a pipe
        return path
    if path.is_symlink() and not path.exists():
        raise UserError(
            f"{path}: a symbolic link to {path.readlink()}, which does not exist or leads back to the link; name a file"
        )
    shipped = RECIPES / f"{path.stem}.toml"
    if path.parent.as_posix() in (".", RECIPES.name) and path.suffix in ("", ".toml") and shipped.is_file():
        return shipped
    known = sorted(file.stem for file in RECIPES.glob("*.toml"))
    if path.is_dir():
        raise UserError(f"{path}: a folder, not a recipe; name a file, or a shipped one: {', '.join(known)}")
    raise UserError(
        f"{path}: no such recipe{nearest(path.stem, known)}; name a file, or a shipped one: {', '.join(known)}"
    )


def read_tree(path: Path) -> dict[str, Any]:
    """The tables of a TOML or JSON file. Raises `UserError`: the file cannot be read, or is not a table."""
    if path.suffix == ".json":
        tree = read_json(path)
        if not isinstance(tree, dict):
            raise UserError(f"{path}: not a JSON object; name a recipe")
        return tree
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # some editors on Windows write a mark of byte order
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read: {(error.strerror or str(error)).lower()}; name a readable file"
        ) from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: cannot be read as UTF-8 text: {error}") from None
    except (ValueError, RecursionError) as error:
        # ValueError: not TOML, or a number of thousands of digits; RecursionError: nested too deeply
        raise UserError(f"{path}: not valid TOML: {error}") from None


def validate(kind: type[ConfigT], tree: Mapping[str, Any], source: str) -> ConfigT:
    """Build ``kind`` from plain data. Raises `UserError`: invalid data; one line with ``source``, field and problem."""
    try:
        return kind.model_validate(dict(tree) if isinstance(tree, Mapping) else tree)
    except ValidationError as error:
        problem = first_problem(error, kind, "key")
        raise UserError(": ".join(filter(None, (source, problem.field, problem.message)))) from None


def validate_options(
    kind: type[ConfigT], tree: Mapping[str, Any], names: Mapping[str, str] = MappingProxyType({})
) -> ConfigT:
    """Build ``kind`` from options of a command. Raises `UserError`: one line that names the option, that of ``names`` or ``--`` and the
    field."""
    try:
        return kind.model_validate(dict(tree))
    except ValidationError as error:
        problem = first_problem(error, kind)
        field = (problem.field or "").partition(".")[0]
        option = names.get(field, f"--{field.replace('_', '-')}") if field else ""
        raise UserError(": ".join(filter(None, (option, problem.message)))) from None


def read_versioned(path: Path, kind: type[ConfigT], version: int) -> ConfigT:
    """Read a JSON file with a field ``schema_version``. Raises `UserError`: the file is damaged or of another version."""
    tree = read_json(path)
    found = tree.get("schema_version") if isinstance(tree, dict) else None
    if found is None:
        raise UserError(f"{path}: schema_version: missing; the file is damaged, or Stretto did not write it")
    if found != version:
        problem = f"{found} cannot be read, this Stretto reads {version}"
        raise UserError(f"{path}: schema_version: {problem}; use the version that wrote it")
    return validate(kind, tree, str(path))


def check_unchanged(
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    where: Path | str,
    free: Sequence[str] = (),
    *,
    work: str = "run",
    remedy: str = "start a new run folder",
    options: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Compare the recipe of the run in folder ``where`` (as plain data, see `completed`) with the one it is to be resumed with.

    Fields in ``free`` may differ; a name that ends with a dot stands for a whole table. Raises `UserError`: another field
    differs; the message names the first one, its option if the last part of the field's name has one in ``options``, and the ``remedy``.
    """
    tables = tuple(name for name in free if name.endswith("."))
    for field, values in differences(old, new).items():
        if field not in free and not field.startswith(tables):
            before, after = ("not set" if value is None else repr(value) for value in values)
            option = options.get(field.rpartition(".")[2])
            name = f"{field} ({option})" if option else field
            raise UserError(
                f"{where}: {name}: was {before} when this {work} started, is {after} now; change it back, or {remedy}"
            )


def completed(kind: type[Config], tree: Mapping[str, Any]) -> dict[str, Any]:
    """``tree``, a recipe of ``kind`` that an older version may have written as plain data, with the default of each key that it lacks.
    Keys that ``kind`` does not know any more stay. A recipe that is invalid for another reason is returned as it is.
    Nested keys of the result may be joined by dots.
    """
    known: dict[str, Any] = copy.deepcopy(dict(tree))
    for _ in range(2):  # the second time without the unknown keys
        try:
            return {**_flat(tree), **_flat(kind.model_validate(known).model_dump(mode="json"))}
        except ValidationError as error:
            for each in error.errors(include_url=False):
                if each["type"] == "extra_forbidden":
                    _remove(known, each["loc"])
    return dict(tree)


def _remove(tree: Any, loc: Sequence[Any]) -> None:
    """Delete the key that pydantic calls ``loc``, which also names members of unions."""
    *above, last = loc
    for part in above:
        if isinstance(tree, list) or part in tree:
            tree = tree[part]
    tree.pop(last, None)


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Fields in which two recipes (as plain data) differ: old and new value by dotted key; None for a missing field."""
    before, after = _flat(old), _flat(new)
    fields = sorted(before.keys() | after.keys())
    return {name: (before.get(name), after.get(name)) for name in fields if before.get(name) != after.get(name)}


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by dotted key; tuples become lists, as in a file."""
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
        raise UserError(f"--set {one_line(override)}: expected key.path=value, for example train.steps=100")
    try:
        parsed = tomllib.loads(f"value = {text}")
        # a line break may begin another key, which is no part of the value
        value = parsed["value"] if len(parsed) == 1 else text
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a string, so that --set data.name=books needs no quotes
    except (ValueError, RecursionError):
        raise UserError(
            f"--set {key.strip()}: has too many digits, or is nested too deeply; shorten the value"
        ) from None
    *parents, leaf = key.strip().split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            raise UserError(f"--set {one_line(override)}: {parent!r} is a value, not a table")
    tree[leaf] = value


@dataclass(frozen=True, slots=True)
class Problem:
    """One validation error. Written by `first_problem`."""

    field: str | None
    """Dotted path of the field, as the data spells it; None: the data as a whole."""
    message: str
    is_unknown: bool = False
    """Whether the field does not exist."""


def first_problem(error: ValidationError, kind: type[BaseModel], noun: str = "field") -> Problem:
    """The first problem that pydantic found while it validated a ``kind``; ``noun``: the word for a field in the message, ``key`` in a
    recipe, whose values with keys are tables, and ``field`` in a request, where they are objects."""
    nearest_ones = _nearest_member(error.errors(include_url=False), kind)
    found = nearest_ones[0]
    place = _place(found["loc"], kind)
    if found["type"] == "union_tag_invalid":
        tag, known = (found["ctx"][name] for name in ("tag", "expected_tags"))
        return Problem(".".join(place.path) or None, f"its type must be one of {known}{_shown(tag)}")
    if found["type"] == "union_tag_not_found":
        return Problem(".".join([*place.path, found["ctx"]["discriminator"].strip("'")]), "missing; add it")
    if found["type"] != "extra_forbidden":
        message = "missing; add it" if found["type"] == "missing" else found["msg"].removeprefix("Value error, ")
        if found["type"] == "int_parsing_size":
            message = f"must be a smaller number{_shown(found['input'])}"
        if found["type"] == "too_short":
            message = (
                f"needs at least {found['ctx']['min_length']}, has {found['ctx']['actual_length']}; add what is missing"
            )
        if message.startswith(_INPUT):
            texts = (_wanted(each, "a table" if noun == "key" else "an object") for each in nearest_ones)
            message = f"must be {', or '.join(dict.fromkeys(texts))}{_shown(found['input'])}"
        return Problem(".".join(place.path) or None, message)
    *above, last = found["loc"]
    types = _place(tuple(above), kind).types
    known = [field.alias or name for each in types if _is_model(each) for name, field in each.model_fields.items()]
    return Problem(".".join(place.path), f"unknown {noun}{nearest(str(last), known)}", True)


def _wanted(error: ErrorDetails, tree: str) -> str:
    """What the value of an error about its type should be, in the format's words: ``tree`` for a value with keys."""
    if error["type"] in ("dict_type", "model_type"):
        return tree
    if error["type"] in ("tuple_type", "list_type"):
        return "a list"
    if error["type"] in ("bool_type", "bool_parsing"):
        return "true or false"
    return error["msg"].removeprefix(f"{_INPUT} ").partition(", unable to parse")[0]


@dataclass(frozen=True, slots=True)
class _Place:
    """Place of a value in the data. Written by `_place`."""

    path: list[str]
    """Keys and indices, without pydantic's names of members of a union."""
    types: list[Any]
    """Types that the value may have."""
    union_at: int | None
    """Length of ``path`` at the first union on the way that has a named member; None: there is none."""
    member: int | str | None
    """Pydantic's name of that member."""


def _place(loc: Sequence[int | str], kind: type[BaseModel]) -> _Place:
    """The place that pydantic calls ``loc`` in a ``kind``."""
    path: list[str] = []
    union_at, member = None, None
    # Types of the value at this place. Where it is a union, pydantic's next step names a member, which is not part of the path.
    types = [_Member(kind)]
    for part in loc:
        if len(types) > 1:
            if union_at is None:
                union_at, member = len(path), part
            types = _named(types, str(part))
        elif part != "[key]":
            path.append(_printable(str(part)))
            types = [found for each in types for found in _members(_type_at(each.type, part))]
    return _Place(path, [each.type for each in types], union_at, member)


def _named(members: Sequence[_Member], part: str) -> list[_Member]:
    """The member of a union that pydantic calls ``part``: its tag, or text with its label. [] if there is none."""
    if tagged := [each for each in members if each.tag == part]:
        return tagged
    named = [each for each in members if each.tag is None and _label(each.type) in part.lower()]
    return sorted(named, key=lambda each: len(_label(each.type)))[-1:]


def _nearest_member(errors: Sequence[ErrorDetails], kind: type[BaseModel]) -> list[ErrorDetails]:
    """The first error, or the unknown field beside a missing one that has a similar name.

    If the first error concerns a member of a union, the result is the errors of the nearest member. Members are compared by four
    criteria, in this order: how deep an error lies, whether the type fits, whether every field is known, and the number of errors.
    If no member's type fits, the result is one error of each member.
    """
    places = [_place(error["loc"], kind) for error in errors]
    first = places[0]
    if first.union_at is None:
        if errors[0]["type"] != "missing":
            return [errors[0]]
        for error, place in zip(errors, places, strict=True):
            is_beside = error["type"] == "extra_forbidden" and place.path[:-1] == first.path[:-1]
            if is_beside and nearest(place.path[-1], first.path[-1:]):
                return [error]
        return [errors[0]]
    above = first.path[: first.union_at]
    members: dict[int | str | None, list[ErrorDetails]] = {}
    depths: dict[int | str | None, int] = {}
    for error, place in zip(errors, places, strict=True):
        if place.union_at == first.union_at and place.path[: first.union_at] == above:
            members.setdefault(place.member, []).append(error)
            depths[place.member] = max(depths.get(place.member, 0), len(place.path))

    def fits(member: int | str | None) -> bool:
        return depths[member] > len(above) or not _is_other_type(members[member][0])

    def nearness(member: int | str | None) -> tuple[int, bool, bool, int]:
        knows_all = all(error["type"] != "extra_forbidden" for error in members[member])
        return depths[member], fits(member), knows_all, -len(members[member])

    best = max(members, key=nearness)
    return [members[best][0]] if fits(best) else [of_member[0] for of_member in members.values()]


def _is_other_type(error: ErrorDetails) -> bool:
    """Whether the value is of another type than expected, or none of the values of a `Literal`."""
    return error["type"].endswith(("_type", "_parsing")) or error["type"] == "literal_error"


def _shown(value: Any) -> str:
    """``, is 0`` for a short value; empty for a long one or one with parts."""
    is_short = isinstance(value, bool | int | float | str) and len(repr(value)) <= _MAX_SHOWN
    return f", is {value!r}" if is_short else ""


def _type_at(annotation: Any, part: int | str) -> Any:
    """Type of the field or item ``part`` of a value of type ``annotation``; `Any` if unknown."""
    if _is_model(annotation):
        named = [field for name, field in annotation.model_fields.items() if part in (name, field.alias)]
        return named[0].annotation if named else Any
    arguments = get_args(annotation)
    return arguments[-1 if get_origin(annotation) is dict else 0] if arguments else Any


@dataclass(frozen=True, slots=True)
class _Member:
    """A member of a union. Written by `_members`."""

    type: Any
    tag: str | None = None
    """Its `pydantic.Tag`, which is its name in pydantic's paths."""


def _members(annotation: Any, tag: str | None = None) -> list[_Member]:
    """Members of a union without None, which has no step in pydantic's paths; another type is its only member."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        tags = [each.tag for each in arguments[1:] if isinstance(each, Tag)]
        return _members(arguments[0], tags[0] if tags else tag)
    if origin in (Union, UnionType):
        return [member for each in arguments if each is not NoneType for member in _members(each, tag)]
    return [_Member(annotation, tag)]


def _label(annotation: Any) -> str:
    """Name of a union's member in pydantic's paths, in lower case: ``list[int]``."""
    origin = get_origin(annotation)
    name = str(getattr(origin or annotation, "__name__", annotation)).lower()
    return f"{name}[{','.join(map(_label, get_args(annotation)))}]" if origin in (list, tuple, dict) else name


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _printable(name: str) -> str:
    """A name from untrusted data, cut and escaped for a message of one line."""
    short = name if len(name) <= _MAX_NAME_CHARS else f"{name[:_MAX_NAME_CHARS]}…"
    return short if short.isprintable() and short else ascii(short)
