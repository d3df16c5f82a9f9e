"""A page of pictures: PNG files, and one HTML file that holds everything it shows. What it is about is the template's."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from typing import Any, Generic, TypeVar

from jinja2 import Environment, FunctionLoader, StrictUndefined
from matplotlib.figure import Figure

from stretto.base.paths import replacing
from stretto.evals.canvas import DPI

REPORT_FOLDER = "report"
PAGE = "report.html"
D = TypeVar("D")


@dataclass(frozen=True, slots=True)
class Picture(Generic[D]):
    """One picture of a report, or the sentence that stands in for it."""

    slug: str
    """Name of the PNG, without its ending."""
    heading: str
    alt: str
    """What kind of picture it is, for those who cannot see it; the numbers are in the caption."""
    absent: Callable[[D], str | None]
    """Why it cannot be drawn; None if it can."""
    draw: Callable[[D], Figure]
    caption: Callable[[D], str]


@dataclass(frozen=True, slots=True)
class Shown:
    """A picture as the page shows it."""

    slug: str
    heading: str
    alt: str
    text: str
    """Its caption; without a picture, why there is none."""
    png: bytes | None
    size: tuple[int, int] = (0, 0)
    """Width and height in pixels."""

    @property
    def source(self) -> str:
        assert self.png is not None
        return "data:image/png;base64," + base64.b64encode(self.png).decode("ascii")


def draw_all(pictures: Sequence[Picture[D]], data: D, advance: Callable[[int], None] | None = None) -> list[Shown]:
    """Every picture; one that lacks its data carries the reason in its place. ``advance`` is told of each."""
    found = []
    for picture in pictures:
        if advance is not None:
            advance(1)
        reason = picture.absent(data)
        if reason is not None:
            found.append(Shown(picture.slug, picture.heading, picture.alt, reason, None))
            continue
        png, size = to_png(picture.draw(data))
        found.append(Shown(picture.slug, picture.heading, picture.alt, picture.caption(data), png, size))
    return found


def to_png(figure: Figure) -> tuple[bytes, tuple[int, int]]:
    """The figure as a PNG on white, and its width and height in pixels."""
    buffer = BytesIO()
    # without a date or version inside, the same data gives the same bytes
    figure.savefig(buffer, format="png", dpi=DPI, facecolor="white", metadata={"Software": None})
    width, height = figure.get_size_inches() * DPI
    return buffer.getvalue(), (int(width), int(height))


def fill(template: str, **values: Any) -> str:
    """The page as text. Everything from the run is escaped; nothing in it is fetched from anywhere."""

    def load(name: str) -> str:
        return files("stretto.evals").joinpath(name).read_text(encoding="utf-8")

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, loader=FunctionLoader(load)
    )
    return environment.get_template(template).render(**values).lstrip() + "\n"


def write_page(page: str, shown: Sequence[Shown], folder: Path | str) -> Path:
    """Write ``report/`` in the run folder ``folder``, all of it or nothing, and return its page.

    The page needs no other file: pictures and style are inside it. The same pictures lie beside it as PNG files.

    Raises:
        UserError: the folder cannot be written.
    """
    target = Path(folder) / REPORT_FOLDER
    with replacing(target) as temporary:
        temporary.mkdir()
        for picture in shown:
            if picture.png is not None:
                (temporary / f"{picture.slug}.png").write_bytes(picture.png)
        (temporary / PAGE).write_text(page, encoding="utf-8")
    return target / PAGE
