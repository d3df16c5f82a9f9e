"""Tables as data, for the console, a notebook and report pages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from io import StringIO
from typing import Any

import rich.table
from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from stretto.base.track import PIPE_COLUMNS

WORDS_WIDTH = 16
"""Smallest width, in characters, to which a column of words is narrowed on a console."""
Rows = tuple[tuple["Cell", ...], ...]


@dataclass(frozen=True, slots=True)
class Cell:
    text: str
    value: float | int | None = None
    """Exact value of the number in ``text``; the page contains it too."""
    note: str = ""
    """Second line in a smaller font."""


NOTHING = Cell("–")
"""Cell of a value that was not measured or does not apply."""


def in_columns(rows: Rows, *forms: Callable[[list[float]], list[str]] | None) -> Rows:
    """``rows`` with the numbers of each column formatted together, so that they have one unit. None: the column is unchanged."""
    columns = [list(column) for column in zip(*rows, strict=True)]
    if not rows:
        return rows
    for place, form in enumerate(forms):
        if form is not None:
            texts = iter(form([cell.value for cell in columns[place] if cell.value is not None]))
            columns[place] = [
                cell if cell.value is None else replace(cell, text=next(texts)) for cell in columns[place]
            ]
    return tuple(zip(*columns, strict=True))


@dataclass(frozen=True, slots=True, repr=False)
class Table:
    """A table as data, for the console, a notebook and the page."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    totals: tuple[tuple[Cell, ...], ...] = ()
    """Rows in a section of their own at the end."""
    note: str = ""
    """Explanation below the table."""
    num_words: int = 1
    """Number of leading columns with words; the other columns are right-aligned."""
    optional: tuple[str, ...] = ()
    """Columns that a narrow console omits, in this order; after them it omits columns from the right."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Rendering for rich. A console that is too narrow omits wide notes, then columns, so that no cell is broken."""
        kept, leaving = list(range(len(self.columns))), self._leaving()
        has_notes = not self._has_wide_notes() or self._width(kept, True) <= options.max_width
        while leaving and self._width(kept, has_notes) > options.max_width:
            kept.remove(leaving.pop(0))
        left_out = [self.columns[place] for place in range(len(self.columns)) if place not in kept]
        if not has_notes:
            left_out.insert(0, "the smaller figures")
        notes = [self.note] if self.note else []
        notes += [f"Omitted on this narrow console: {', '.join(left_out)}."] if left_out else []
        yield self._shown(kept, has_notes, " ".join(notes))

    def _leaving(self) -> list[int]:
        """Indices of the columns that may be omitted, in the order in which they are."""
        named = [self.columns.index(name) for name in self.optional]
        return named + [place for place in reversed(range(self.num_words, len(self.columns))) if place not in named]

    def _cells(self, place: int) -> list[Cell]:
        return [row[place] for row in (*self.rows, *self.totals)]

    def _has_wide_notes(self) -> bool:
        """Whether notes make a column of numbers wider than its numbers."""
        for place in range(self.num_words, len(self.columns)):
            cells = self._cells(place)
            widest = max(map(cell_len, (self.columns[place], *(cell.text for cell in cells))))
            if any(cell_len(cell.note) > widest for cell in cells):
                return True
        return False

    def _width(self, kept: Sequence[int], has_notes: bool) -> int:
        return 1 + sum(self._least_width(place, has_notes) + 3 for place in kept)

    def _least_width(self, place: int, has_notes: bool) -> int:
        """Smallest width of a column in characters. Numbers and headings need one line, words may wrap."""
        shows_notes = has_notes or place < self.num_words
        cells = self._cells(place)
        texts = [self.columns[place], *(cell.text for cell in cells), *(cell.note for cell in cells if shows_notes)]
        longest = max(map(cell_len, texts))
        if place >= self.num_words:
            return longest
        return max(min(longest, WORDS_WIDTH), *(cell_len(word) for text in texts for word in (text.split() or [""])))

    def _shown(self, kept: Sequence[int], has_notes: bool, caption: str) -> rich.table.Table:
        # names are plain text, not markup
        shown = rich.table.Table(
            title=Text(self.title, style="bold"), title_justify="left", box=box.SIMPLE_HEAD,
            caption=Text(caption, style="dim") if caption else None, caption_justify="left",
        )  # fmt: skip
        for place in kept:
            is_words = place < self.num_words
            look: dict[str, Any] = (
                {"min_width": self._least_width(place, has_notes)}
                if is_words
                else {"justify": "right", "no_wrap": True}
            )
            shown.add_column(Text(self.columns[place]), overflow="fold", **look)
        for rows, style in ((self.rows, ""), (self.totals, "bold")):
            for row in rows:
                shown.add_row(*(_text(row[place], has_notes or place < self.num_words) for place in kept), style=style)
            shown.add_section()
        return shown

    def text(self) -> str:
        """As plain text, for a console or a log."""
        console = Console(width=PIPE_COLUMNS, no_color=True, record=True, file=StringIO(), force_jupyter=False)
        console.print(self)
        return console.export_text().rstrip()

    def html(self) -> str:
        """As an HTML table, for a notebook."""
        heads = "".join(f"<th>{escape(name)}</th>" for name in self.columns)
        rows = "".join(
            "<tr>" + "".join(f"<td>{escape(cell.text)}{_small(cell.note)}</td>" for cell in row) + "</tr>"
            for row in (*self.rows, *self.totals)
        )
        caption = f"<caption>{escape(self.title)}</caption>" if self.title else ""
        return f"<table>{caption}<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>{_small(self.note)}"

    __repr__, _repr_html_ = text, html


class Tabled(ABC):
    """A result that a console and a notebook show as its table. Dataclasses that inherit it have ``repr=False``."""

    __slots__ = ()

    @property
    @abstractmethod
    def table(self) -> Table: ...

    def __repr__(self) -> str:
        return self.table.text()

    def _repr_html_(self) -> str:
        return self.table.html()


def _small(note: str) -> str:
    return f"<br><small>{escape(note)}</small>" if note else ""


def _text(cell: Cell, has_note: bool) -> Text:
    return Text.assemble(cell.text, (f"\n{cell.note}" if cell.note and has_note else "", "dim"))
