"""Write the report of a run: PNG pictures and one page that holds everything it shows."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from matplotlib.figure import Figure

from stretto.base.paths import replacing
from stretto.evals.canvas import DPI
from stretto.evals.captions import headline, remarks
from stretto.evals.ledger import family_sheet, ledger_sheet, mixture_sheet, size_sheet
from stretto.evals.pictures import pictures
from stretto.evals.report_data import ReportData

REPORT_FOLDER = "report"
PAGE = "report.html"
_TEMPLATE = "report.html"


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


def write_report(data: ReportData, folder: Path | str) -> Path:
    """Write ``report/`` in the run folder ``folder``, all of it or nothing, and return its page.

    The page needs no other file: pictures and style are inside it. The same pictures lie beside it as PNG files.

    Raises:
        UserError: the folder cannot be written.
    """
    shown = draw(data)
    page = render(data, shown)
    target = Path(folder) / REPORT_FOLDER
    with replacing(target) as temporary:
        temporary.mkdir()
        for picture in shown:
            if picture.png is not None:
                (temporary / f"{picture.slug}.png").write_bytes(picture.png)
        (temporary / PAGE).write_text(page, encoding="utf-8")
    return target / PAGE


def draw(data: ReportData) -> list[Shown]:
    """Every picture of the report; one that lacks its data carries the reason in its place."""
    found = []
    for picture in pictures():
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


def render(data: ReportData, shown: list[Shown]) -> str:
    """The page as text. Everything from the run is escaped; nothing in it is fetched from anywhere."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(files("stretto.evals").joinpath(_TEMPLATE).read_text(encoding="utf-8"))
    tables: dict[str, Any] = {
        "sizes": size_sheet(data),
        "ledger": ledger_sheet(data.ledger) if data.ledger is not None else None,
        "family": family_sheet(data.family) if data.family is not None else None,
        "mixture": mixture_sheet(data) if data.mixture_drawn or data.mixture_configured else None,
    }
    page = template.render(
        data=data,
        shown=shown,
        headline=headline(data),
        remarks=remarks(data),
        samples=[size for size in data.sizes if size.sample is not None],
        **tables,
    )
    return page.lstrip() + "\n"
