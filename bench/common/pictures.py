"""What the pictures of several benches have in common."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.common.measure import half_width
from stretto.base.paths import replacing
from stretto.report import style


def draw_means(
    axes: Axes,
    places: Sequence[float],
    values: Sequence[Sequence[float]],
    colour: str,
    label: str,
    along: Literal["x", "y"],
) -> None:
    """Draw the mean of each of ``values`` with its 95 % interval, if it has one, at ``places``; ``along``: the axis of the values."""
    means, widths = [fmean(each) for each in values], [half_width(each) if len(each) > 1 else 0.0 for each in values]
    points = (means, places) if along == "x" else (places, means)
    axes.errorbar(
        *points, **{f"{along}err": widths}, fmt="o", color=colour, linewidth=2.0, markersize=7, capsize=4, label=label
    )


def sign_differences(axes: Axes) -> None:
    """Give differences along y their signs."""
    style.ticks(axes.yaxis, lambda value: f"{value:+.3g}" if value else "0")


def save_picture(figure: Figure, path: Path) -> None:
    """Write ``figure`` as PNG, in the resolution of the documentation's pictures. Raises UserError: it cannot be written."""
    with replacing(path) as fresh:
        figure.savefig(fresh, format="png", dpi=110)
