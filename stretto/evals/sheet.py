"""A table as data, printed alike on the console and on the page."""

from __future__ import annotations

from dataclasses import dataclass

from rich import box
from rich.console import JustifyMethod
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True, slots=True)
class Cell:
    text: str
    value: float | int | None = None
    """The exact number behind ``text``; the page carries it beside the rounded one."""
    note: str = ""
    """Second, smaller line."""


NOTHING = Cell("–")
"""Not measured, or it does not apply."""


@dataclass(frozen=True, slots=True)
class Column:
    heading: str
    is_number: bool = True
    """Set flush right."""


@dataclass(frozen=True, slots=True)
class Sheet:
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    totals: tuple[tuple[Cell, ...], ...] = ()
    """Rows set apart at the foot."""

    def __post_init__(self) -> None:
        widths = {len(row) for row in (*self.rows, *self.totals)}
        assert widths <= {len(self.columns)}, f"{len(self.columns)} columns, rows of {sorted(widths)} cells"


def to_rich(sheet: Sheet) -> Table:
    """For the console. Names are text, never markup."""
    table = Table(title=Text(sheet.title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for column in sheet.columns:
        justify: JustifyMethod = "right" if column.is_number else "left"
        # words first: a narrow console breaks headings of numbers before it breaks names
        table.add_column(
            Text(column.heading), justify=justify, min_width=None if column.is_number else 10, overflow="fold"
        )
    for row in sheet.rows:
        table.add_row(*map(_rich_cell, row))
    if sheet.totals:
        table.add_section()
    for row in sheet.totals:
        table.add_row(*map(_rich_cell, row), style="bold")
    return table


def _rich_cell(cell: Cell) -> Text:
    text = Text(cell.text)
    if cell.note:
        text.append(f"\n{cell.note}", style="dim")
    return text
