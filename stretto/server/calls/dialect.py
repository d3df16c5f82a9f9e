"""Formats of tool calls and of reasoning, as data.

A `Dialect` has the marks around a call, a parser of the text between them, and the spelling of a call, from which the grammar of forced
calls is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any

import regex

Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schemas of the parameters of the offered tools, by the tools' names."""
Found = Sequence[tuple[str, Any]]
"""Calls in a text: names and arguments."""
Read = Callable[[str, Mapping[str, str], Schemas], Found]
"""Parser of calls. Input: the text between the marks, the groups that the opening mark captured, and the schemas. Raises ValueError for a
text that is not a call."""
Pattern = Any
"""A pattern of the ``regex`` package. Unlike `re`, it finds partial matches, which show that more text could complete a mark."""


class Slot(Enum):
    """Variable parts in the spelling of a call."""

    NAME = "name"
    ARGUMENTS = "arguments"
    """One JSON object, or `Dialect.argument` for each argument if that is set."""
    KEY = "key"
    VALUE = "value"
    """A string without quotes if a literal that ends it follows; otherwise JSON."""
    SPACE = "space"
    """A blank, a line break or nothing. Templates of one family differ here."""
    LINE = "line"
    """A line break or nothing; not a part of the value beside it."""
    INDEX = "index"
    """Number of a call in the conversation."""


NAME, ARGUMENTS, KEY, VALUE, SPACE, LINE, INDEX = Slot
FREE = {SPACE: "/[ \\n]?/", LINE: "/\\n?/", INDEX: "/0|[1-9][0-9]*/"}
"""Slots that a grammar leaves to the model."""
Spelling = tuple[str | Slot, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """One call that the model wrote."""

    id: str
    name: str
    arguments: str
    """What the model wrote: usually a JSON object, as text."""

    def body(self) -> dict[str, Any]:
        """OpenAI's form."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True)
class Thought:
    """A piece of reasoning."""

    text: str


Piece = str | Thought | Call


@dataclass(frozen=True)
class Dialect:
    """Format of calls. A row of `DIALECTS`."""

    name: str
    open: Pattern
    """Mark that begins a call. A match of its group ``no`` is removed from the text, too, but begins no call; one of its group ``think``
    begins reasoning. The pattern does not begin with white space: the reader removes that around calls, and the search of a long run of it
    would take too long."""
    close: Pattern | None
    """Mark that ends a call. None: the calls extend to the end of the answer."""
    read: Read
    call: Spelling
    """Spelling of a call; empty: calls cannot be forced."""
    argument: Spelling = ()
    """Spelling of one argument; empty: the arguments are one JSON object."""
    comma: str = ""
    """Text between two arguments."""
    begin: Spelling = ()
    """Text before all calls."""
    between: Spelling = (SPACE,)
    """Text between two calls."""
    end: Spelling = ()
    """Text after all calls."""
    is_first: bool = False
    """Whether a call is recognised only at the beginning of an answer, because the format has no mark of its own."""
    asked: str = ""
    """Text in the system prompt of a chat template that asks for this format, even if the template renders earlier calls in another."""
    frames: bool = False
    """Whether the marks surround answers without calls, too."""
    answer: Spelling = ()
    """Text before an answer without calls."""
    turn: Spelling = ()
    """Text between reasoning and what follows it."""

    @cached_property
    def spelt(self) -> str:
        """The spellings of all marks, one per line."""
        parts = (*self.begin, *self.call, *self.between, *self.argument, *self.end)
        patterns = [each.pattern for each in (self.open, self.close) if each is not None]
        return "\n".join([*(part for part in parts if isinstance(part, str)), *map(_unescaped, patterns)])


@dataclass(frozen=True, slots=True)
class Think:
    """The marks around reasoning."""

    open: str
    close: str
    sign: str = ""
    """Text by which a template with reasoning is recognised; empty: ``close``, because some templates do not contain ``open``."""


def ending_of(argument: Spelling) -> str:
    """The literal that ends a value; empty if there is none."""
    if VALUE not in argument:
        return ""
    return next((part for part in argument[argument.index(VALUE) :] if isinstance(part, str)), "")


def _unescaped(pattern: str) -> str:
    return regex.sub(r"\\(.)", r"\1", pattern)
