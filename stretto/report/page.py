"""Reports as a self-contained HTML page with PNG files."""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from jinja2 import Environment, StrictUndefined

from stretto.base.paths import replacing
from stretto.base.table import Table
from stretto.base.track import progress

# tables are printed by commands that draw nothing, and matplotlib takes longer to import than they do
if TYPE_CHECKING:
    from matplotlib.figure import Figure

REPORT_FOLDER = "report"
PAGE = "report.html"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Section:
    """A section of a page."""

    slug: str
    """Name of its PNG file without the extension."""
    heading: str
    text: str = ""
    """Caption of the picture."""
    draw: Callable[[], Figure] | None = None
    alt: str = ""
    """Alternative text of the figure; the numbers are in the caption."""
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
    """A section with the figure that ``draw`` makes from ``data``; without data, a section with the tables alone."""
    if data is None:
        return Section(slug, heading, tables=tables)
    return Section(slug, heading, caption(data), partial(draw, data), alt, tables)


@dataclass(frozen=True, slots=True)
class Page:
    """Data of a report page."""

    name: str
    headline: str
    """Summary in one or two sentences."""
    facts: tuple[str, ...]
    """Description of the network or the run, a few lines."""
    sections: tuple[Section, ...]
    """Empty sections are omitted."""
    environment: str
    """Device, versions, commit."""
    recipe: str


def to_png(figure: Figure) -> bytes:
    """The figure as a PNG on white."""
    buffer = BytesIO()
    # `savefig` would draw twice; without date and version, equal data gives equal bytes
    figure.canvas.print_png(buffer, metadata={"Software": None})  # type: ignore[attr-defined]
    return buffer.getvalue()


@dataclass(frozen=True, slots=True)
class Plot:
    """A figure that shows itself in a notebook."""

    figure: Figure
    """The `matplotlib.figure.Figure`."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a PNG file. Raises `UserError`: it cannot be written."""
        with replacing(Path(path)) as temporary:
            temporary.write_bytes(to_png(self.figure))

    def _repr_png_(self) -> bytes:
        return to_png(self.figure)


def render(page: Page, pngs: Mapping[str, bytes]) -> str:
    """The page as HTML. Text from the run is escaped, and the page loads nothing from elsewhere."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(files("stretto.report").joinpath("page.html").read_text(encoding="utf-8"))
    images = {slug: base64.b64encode(png).decode("ascii") for slug, png in pngs.items()}
    shown = [section for section in page.sections if section.draw or section.text or section.tables or section.samples]
    return template.render(page=page, sections=shown, images=images).lstrip() + "\n"


def write_page(page: Page, run: Path) -> Path:
    """Write ``report/`` in the folder ``run`` atomically and return its page.

    The page contains its pictures and styles. The pictures are also written as PNG files beside it.

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
