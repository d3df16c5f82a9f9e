"""Task sets by the name of their kind."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from stretto.base.config import validate
from stretto.base.errors import UserError, nearest
from stretto.sandbox.isolate import Sandbox
from stretto.tasks.code import CodeSource
from stretto.tasks.gym import GymSource
from stretto.tasks.math import ArithmeticSource, MathSource
from stretto.tasks.strings import StringsSource
from stretto.tasks.task import TaskSource, one_line
from stretto.tasks.tools import ToolsSource
from stretto.tasks.verifiers import VerifiersSource

KINDS: Final[Mapping[str, type[TaskSource]]] = {
    "arithmetic": ArithmeticSource,
    "code": CodeSource,
    "gym": GymSource,
    "math": MathSource,
    "strings": StringsSource,
    "tools": ToolsSource,
    "verifiers": VerifiersSource,
}
"""What a recipe's ``kind`` may be, besides ``module:Class`` and ``path/to/file.py:Class``."""


class SourceLike(Protocol):
    """A recipe's table of one source."""

    @property
    def kind(self) -> str: ...
    @property
    def args(self) -> Mapping[str, Any]: ...


def open_source(name: str, source: SourceLike, sandbox: Sandbox | None = None) -> TaskSource:
    """The task set ``sources.{name}`` of a recipe, its ``args`` checked. It is not validated yet.

    Args:
        sandbox: for sources that run programs (`code`, `tools` with Python); they refuse to open without one.

    Raises:
        UserError: an unknown kind or argument, or whatever the source itself finds wrong.
    """
    kind = source_kind(name, source.kind)
    args = validate(kind.args_kind, source.args, f"sources.{name}.args")
    try:
        return kind(name, args, sandbox)
    except UserError:
        raise
    except Exception as error:  # a task is code of others, and this is where it opens its files
        problem = f"{source.kind!r} cannot be made: {_line(error)}"
        raise UserError(f"sources.{name}: kind: {problem}; correct its constructor") from error


def source_kind(name: str, kind: str) -> type[TaskSource]:
    """The class that a kind names.

    Raises:
        UserError: no such kind, module, class, or a class that is no `TaskSource`.
    """
    if kind in KINDS:
        return KINDS[kind]
    place, colon, attribute = kind.rpartition(":")
    if not colon:
        problem, known = f"no kind {kind!r}{nearest(kind, KINDS)}", ", ".join(KINDS)
        raise UserError(f"sources.{name}: kind: {problem}; one of {known}, or file.py:Class")
    found = getattr(_module(name, place), attribute, None)
    if not (isinstance(found, type) and issubclass(found, TaskSource)):
        raise UserError(f"sources.{name}: kind: {kind!r} is no class made from TaskSource; name one after the colon")
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        raise UserError(f"sources.{name}: kind: {kind!r} lacks {', '.join(missing)}; write what is missing")
    return found


def _module(name: str, place: str) -> Any:
    try:
        if not place.endswith(".py"):
            return importlib.import_module(place)
        path = Path(place).resolve()
        spec = importlib.util.spec_from_file_location(f"stretto_task_{path.stem}", path)
        assert spec is not None and spec.loader is not None, f"no loader for {path}"
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses and pydantic look their module up
        spec.loader.exec_module(module)
        return module
    except Exception as error:  # it is code of others, which runs when it is imported
        problem = f"cannot import {place!r}: {_line(error)}"
        raise UserError(f"sources.{name}: kind: {problem}; check the name and what the file imports") from error


def _line(error: Exception) -> str:
    """What went wrong, by its class too where that is not about names and files."""
    text = one_line(error)
    return text if isinstance(error, ImportError | OSError | SyntaxError) else f"{type(error).__name__}: {text}"
