"""Task sets by the name of their kind."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Protocol

from stretto.base.config import validate
from stretto.base.errors import UserError, nearest
from stretto.sandbox.isolate import Sandbox
from stretto.tasks.code import CodeSource
from stretto.tasks.gym import GymSource
from stretto.tasks.math import ArithmeticSource, MathSource
from stretto.tasks.strings import StringsSource
from stretto.tasks.task import TaskSource
from stretto.tasks.tools import ToolsSource
from stretto.tasks.verifiers import VerifiersSource

KINDS: Final[Mapping[str, type[TaskSource]]] = MappingProxyType(
    {
        "arithmetic": ArithmeticSource,
        "code": CodeSource,
        "gym": GymSource,
        "math": MathSource,
        "strings": StringsSource,
        "tools": ToolsSource,
        "verifiers": VerifiersSource,
    }
)
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
    return kind(name, validate(kind.args_kind, source.args, f"sources.{name}.args"), sandbox)


def source_kind(name: str, kind: str) -> type[TaskSource]:
    """The class that a kind names.

    Raises:
        UserError: no such kind, module, class, or a class that is no `TaskSource`.
    """
    if kind in KINDS:
        return KINDS[kind]
    place, colon, attribute = kind.rpartition(":")
    if not colon:
        raise UserError(
            f"sources.{name}: kind: no kind {kind!r}{nearest(kind, KINDS)}; one of {', '.join(KINDS)}, or file.py:Class"
        )
    found = getattr(_module(name, place), attribute, None)
    if not (isinstance(found, type) and issubclass(found, TaskSource)):
        raise UserError(f"sources.{name}: kind: {kind!r} is no class made from TaskSource; name one after the colon")
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
    except (ImportError, OSError, SyntaxError) as error:
        raise UserError(f"sources.{name}: kind: cannot import {place!r}: {error}; check the name") from None
