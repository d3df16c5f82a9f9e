"""Write the report of a run: PNG pictures and one page that holds everything it shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stretto.evals.captions import headline, remarks
from stretto.evals.ledger import family_sheet, ledger_sheet, mixture_sheet, size_sheet
from stretto.evals.page import Shown, draw_all, fill, write_page
from stretto.evals.pictures import pictures
from stretto.evals.report_data import ReportData

_TEMPLATE = "report.html"


def write_report(data: ReportData, folder: Path | str) -> Path:
    """Write ``report/`` in the run folder ``folder``, all of it or nothing, and return its page.

    Raises:
        UserError: the folder cannot be written.
    """
    shown = draw_all(pictures(), data)
    return write_page(render(data, shown), shown, folder)


def render(data: ReportData, shown: list[Shown]) -> str:
    """The page as text."""
    tables: dict[str, Any] = {
        "sizes": size_sheet(data),
        "ledger": ledger_sheet(data.ledger) if data.ledger is not None else None,
        "family": family_sheet(data.family) if data.family is not None else None,
        "mixture": mixture_sheet(data) if data.mixture_drawn or data.mixture_configured else None,
    }
    return fill(
        _TEMPLATE,
        data=data,
        shown=shown,
        headline=headline(data),
        remarks=remarks(data),
        samples=[size for size in data.sizes if size.sample is not None],
        **tables,
    )
