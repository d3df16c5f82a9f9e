"""Task sets by the name of their kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Protocol

from stretto.base.config import Config, validate
from stretto.base.errors import UserError, nearest
from stretto.base.plugin import error_line, line_of, load_named
from stretto.sandbox.isolate import Sandbox
from stretto.tasks.briefs import BriefsSource
from stretto.tasks.choice import ChoiceSource
from stretto.tasks.code import CodeSource
from stretto.tasks.gym import GymSource
from stretto.tasks.judge import JudgedSource
from stretto.tasks.math import ArithmeticSource, MathSource
from stretto.tasks.shapes.source import ShapesSource
from stretto.tasks.strings import StringsSource
from stretto.tasks.task import TaskSource
from stretto.tasks.tools import ToolsSource
from stretto.tasks.verifiers import VerifiersSource
from stretto.tasks.worlds.search import SearchSource
from stretto.tasks.worlds.service import ServiceSource
from stretto.tasks.worlds.sheets import SheetsSource

KINDS: Final[Mapping[str, type[TaskSource]]] = {
    "arithmetic": ArithmeticSource,
    "briefs": BriefsSource,
    "choice": ChoiceSource,
    "code": CodeSource,
    "gym": GymSource,
    "judged": JudgedSource,
    "math": MathSource,
    "search": SearchSource,
    "service": ServiceSource,
    "shapes": ShapesSource,
    "sheets": SheetsSource,
    "strings": StringsSource,
    "tools": ToolsSource,
    "verifiers": VerifiersSource,
}
"""Task sources by ``kind`` in a recipe. A recipe may also give ``module:Class`` or ``path/to/file.py:Class``."""


class SourceLike(Protocol):
    """Fields of a recipe's source table."""

    @property
    def kind(self) -> str: ...
    @property
    def args(self) -> Mapping[str, Any]: ...


def open_source(name: str, source: SourceLike, sandbox: Sandbox | None = None) -> TaskSource:
    """Open the task source ``sources.{name}`` of a recipe. Checks its ``args``; does not call `TaskSource.validate`.

    Args:
        sandbox: runs programs for sources that need it (`code`, `tools` with Python), which refuse to open without one.

    Raises:
        UserError: an unknown kind or argument, or an error that the source finds in its arguments.
    """
    kind, args = checked_source(name, source)
    try:
        return kind(name, args, sandbox)
    except UserError:
        raise
    except Exception as error:  # a task source may be a user's code
        problem = f"{source.kind!r} cannot be made: {error_line(error)}{line_of(error, kind)}"
        raise UserError(f"sources.{name}: kind: {problem}; correct its constructor") from error


def checked_source(name: str, source: SourceLike) -> tuple[type[TaskSource], Config]:
    """The class of ``sources.{name}`` and its arguments. Raises `UserError`: an unknown kind or argument, or a wrong value."""
    kind = source_kind(name, source.kind)
    return kind, validate(kind.args_kind, source.args, f"sources.{name}.args")


def source_kind(name: str, kind: str) -> type[TaskSource]:
    """The class of ``kind``. Raises `UserError`: no such kind, module or class, or a class that is no `TaskSource`."""
    if kind in KINDS:
        return KINDS[kind]
    if ":" not in kind:
        problem, known = f"no kind {kind!r}{nearest(kind, KINDS)}", ", ".join(KINDS)
        raise UserError(f"sources.{name}: kind: {problem}; one of {known}, or file.py:Class")
    found = load_named(kind, f"sources.{name}: kind")
    if not (isinstance(found, type) and issubclass(found, TaskSource)):
        raise UserError(f"sources.{name}: kind: {kind!r} is not a subclass of TaskSource; name one after the colon")
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        raise UserError(f"sources.{name}: kind: {kind!r} lacks {', '.join(missing)}; write what is missing")
    return found
