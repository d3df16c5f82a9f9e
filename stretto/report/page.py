"""A page of pictures and tables: PNG files, and one HTML file that holds everything it shows; tables for the console too."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from html import escape
from importlib.resources import files
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any, TypeVar

import rich.table
from jinja2 import Environment, StrictUndefined
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.text import Text

from stretto.base.paths import replacing
from stretto.base.track import progress
from stretto.report.style import DPI

REPORT_FOLDER = "report"
PAGE = "report.html"
T = TypeVar("T")


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
class Table:
    """A table as data, shown alike on the console and on the page."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    totals: tuple[tuple[Cell, ...], ...] = ()
    """Rows set apart at the foot."""
    note: str = ""
    """How to read it."""
    num_words: int = 1
    """Columns, the first ones, that hold words; numbers stand flush right."""

    def __rich__(self) -> rich.table.Table:
        """As rich prints it. Names are text, never markup."""
        shown = rich.table.Table(
            title=Text(self.title, style="bold"), title_justify="left", box=box.SIMPLE_HEAD, caption=self.note,
            caption_justify="left",
        )  # fmt: skip
        for place, heading in enumerate(self.columns):
            # words first: a narrow console breaks headings of numbers before it breaks names
            look: dict[str, Any] = {"min_width": 10} if place < self.num_words else {"justify": "right"}
            shown.add_column(Text(heading), overflow="fold", **look)
        for rows, style in ((self.rows, ""), (self.totals, "bold")):
            for row in rows:
                cells = (Text.assemble(cell.text, (f"\n{cell.note}" if cell.note else "", "dim")) for cell in row)
                shown.add_row(*cells, style=style)
            shown.add_section()
        return shown

    def text(self) -> str:
        """As plain text, for a console or a log."""
        console = Console(width=100, no_color=True, record=True, file=StringIO())
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


def _small(note: str) -> str:
    return f"<br><small>{escape(note)}</small>" if note else ""


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a page."""

    slug: str
    """Name of its PNG, without the ending."""
    heading: str
    text: str = ""
    """Caption of the picture."""
    draw: Callable[[], Figure] | None = None
    alt: str = ""
    """What kind of picture it is, for those who cannot see it; the numbers are in the caption."""
    tables: tuple[Table, ...] = ()
    samples: tuple[tuple[str, str, str], ...] = ()
    """Name, prompt and continuation."""


def pictured(
    slug: str,
    heading: str,
    alt: str,
    data: T | None,
    draw: Callable[[T], Figure],
    caption: Callable[[T], str],
    *tables: Table,
) -> Section:
    """The section of the picture that ``draw`` makes of ``data``; without data, of its tables alone."""
    if data is None:
        return Section(slug, heading, tables=tables)
    return Section(slug, heading, caption(data), partial(draw, data), alt, tables)


@dataclass(frozen=True, slots=True)
class Page:
    """Everything a report shows."""

    name: str
    headline: str
    """The run in a sentence or two."""
    facts: tuple[str, ...]
    """The network or the run in a few short lines."""
    sections: tuple[Section, ...]
    """Those that hold nothing are not shown."""
    environment: str
    """Device, versions, commit."""
    recipe: str


def to_png(figure: Figure) -> bytes:
    """The figure as a PNG on white."""
    buffer = BytesIO()
    # without a date or version inside, the same data gives the same bytes
    figure.savefig(buffer, format="png", dpi=DPI, facecolor="white", metadata={"Software": None})
    return buffer.getvalue()


def render(page: Page, pngs: Mapping[str, bytes]) -> str:
    """The page as text. Everything from the run is escaped; nothing in it is fetched from anywhere."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(files("stretto.report").joinpath("page.html").read_text(encoding="utf-8"))
    images = {slug: base64.b64encode(png).decode("ascii") for slug, png in pngs.items()}
    shown = [section for section in page.sections if section.draw or section.text or section.tables or section.samples]
    return template.render(page=page, sections=shown, images=images).lstrip() + "\n"


def write_page(page: Page, run: Path) -> Path:
    """Write ``report/`` in the folder ``run``, all of it or nothing, and return its page.

    The page needs no other file: pictures and style are inside it. The same pictures lie beside it as PNG files.

    Raises:
        UserError: the folder cannot be written.
    """
    pngs = {}
    with progress("pictures", len(page.sections)) as advance:
        for section in page.sections:
            if section.draw is not None:
                pngs[section.slug] = to_png(section.draw())
            advance(1)
    target = run / REPORT_FOLDER
    with replacing(target) as temporary:
        temporary.mkdir()
        for slug, png in pngs.items():
            (temporary / f"{slug}.png").write_bytes(png)
        (temporary / PAGE).write_text(render(page, pngs), encoding="utf-8")
    return target / PAGE
