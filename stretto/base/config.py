"""Configuration: frozen, complete before anything is built, an unknown key is an error.

A recipe is a TOML file; ``--set train.steps=100`` overrides one dotted key. Nothing here imports torch, so a bad
recipe is refused in a fraction of a second.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from stretto.base.errors import UserError, nearest


class Config(BaseModel):
    """Base of every configuration object: frozen, and refuses keys it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    def replace(self, **changes: Any) -> Self:
        """A copy with ``changes`` applied and validated again (``model_copy`` would skip validation)."""
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self).model_validate({**fields, **changes})


ConfigT = TypeVar("ConfigT", bound=Config)


def read_recipe(path: Path | str, kind: type[ConfigT], overrides: Sequence[str] = ()) -> ConfigT:
    """Read a TOML recipe, apply ``key.path=value`` overrides, and validate it as ``kind``. Raises `UserError`: the file
    is missing or not TOML, a key is unknown, or a value is impossible.
    """
    path = Path(path)
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such recipe; the shipped ones are in recipes/") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as UTF-8 text: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: not valid TOML: {error}") from None
    for override in overrides:
        _apply_override(tree, override)
    return validate(kind, tree, source=str(path))


def validate(kind: type[ConfigT], tree: Mapping[str, Any], source: str) -> ConfigT:
    """Build ``kind`` from plain data; a problem becomes one line naming ``source`` and the field."""
    try:
        return kind.model_validate(dict(tree))
    except ValidationError as error:
        raise UserError(_explain(error, kind, source)) from None


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


def _explain(error: ValidationError, kind: type[Config], source: str) -> str:
    """The first problem of a pydantic error as one line."""
    problem = error.errors(include_url=False)[0]
    path = [str(part) for part in problem["loc"]]
    field = ".".join(path) or "(whole file)"
    if problem["type"] == "extra_forbidden":
        known = _fields_at(kind, path[:-1])
        return f"{source}: {field}: unknown key{nearest(path[-1], known)}"
    message = problem["msg"].removeprefix("Value error, ")
    return f"{source}: {field}: {message}"


def _fields_at(kind: type[BaseModel], path: Sequence[str]) -> list[str]:
    for part in path:
        field = kind.model_fields.get(part)
        annotation = field.annotation if field else None
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        kind = annotation
    return list(kind.model_fields)
