"""How every picture looks: colours, axes, and labels that keep out of each other's way.

Figures are built without pyplot and without rcParams, so drawing one changes nothing for anyone else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patheffects import withStroke
from matplotlib.text import Annotation, Text
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator
from matplotlib.transforms import Bbox

from stretto.evals import numbers

DPI = 150
INK = "#1b1f24"
MUTED = "#667080"
FAINT = "#e3e6ea"
ABSENT = "#f0f1f3"
SERIES = ("#0072b2", "#d55e00", "#009e73", "#b0538c", "#2f9fd8", "#b07d00")
"""Okabe and Ito's colours for all kinds of colour vision, the pale ones darkened so that text in them can be read."""
LOAD_COLOURS = LinearSegmentedColormap.from_list("load", ["#08407e", "#6aa6d6", "#f7f7f7", "#f0a35e", "#9c3d00"])
TIME_COLOURS = LinearSegmentedColormap.from_list("time", ["#123a63", "#1f78a8", "#4fb3a5", "#c2d65b", "#f6c945"])

HALO = withStroke(linewidth=3.5, foreground="white")
"""Keeps text legible on grid lines."""
LABEL_PT, TEXT_PT = 12.5, 12.0
_TITLE: dict[str, Any] = {"fontsize": 15.0, "fontweight": "bold", "color": INK, "parse_math": False}


def colours(names: Iterable[str]) -> dict[str, str]:
    """A colour for each size: ink for the full network, then the series in order."""
    others = [name for name in dict.fromkeys(names) if name != "full"]
    return {"full": INK} | {name: SERIES[place % len(SERIES)] for place, name in enumerate(others)}


def blank(width_in: float, height_in: float) -> Figure:
    layout = ConstrainedLayoutEngine(w_pad=0.14, h_pad=0.12, wspace=0.04)
    figure = Figure(figsize=(width_in, height_in), dpi=DPI, facecolor="white", layout=layout)
    FigureCanvasAgg(figure)
    return figure


def dress(axes: Axes, title: str, x: str, y: str, grid: str | None = "both") -> Axes:
    """Title, axis labels with their units, and no more lines than needed."""
    axes.set_facecolor("white")
    axes.set_title(title, loc="left", pad=14, **_TITLE)
    axes.set_xlabel(x, fontsize=LABEL_PT, color=INK, labelpad=8)
    axes.set_ylabel(y, fontsize=LABEL_PT, color=INK, labelpad=8)
    axes.tick_params(labelsize=TEXT_PT - 0.5, colors=MUTED, length=0, pad=6)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom") and grid is not None)
        spine.set_color("#b8bec6")
    if grid is not None:
        axes.grid(axis=grid, color=FAINT, linewidth=0.9)  # type: ignore[arg-type]
    axes.set_axisbelow(True)
    return axes


def subtitle(axes: Axes, parts: Sequence[str], line_chars: int = 114) -> None:
    """Quieter lines between the title and the axes: how to read the picture."""
    lines = [""]
    for part in parts:
        joined = f"{lines[-1]}  ·  {part}" if lines[-1] else part
        lines[-1:] = [joined] if len(joined) <= line_chars else [lines[-1], part]
    note = axes.annotate(
        "\n".join(lines),
        (0, 1),
        xycoords="axes fraction",
        xytext=(0, 9),
        textcoords="offset points",
        fontsize=10.5,
        color=MUTED,
        linespacing=1.4,
        parse_math=False,
    )
    note.set_in_layout(False)  # or a long line would squeeze the axes
    axes.set_title(axes.get_title(loc="left"), loc="left", pad=16 + 16 * len(lines), **_TITLE)


def log_ticks(axes: Axes, low: float, high: float) -> None:
    """A logarithmic x axis over ``low``..``high`` with round ticks, also where it spans less than a decade."""
    margin = max(1.5 if low == high else 1.12, (high / low) ** 0.12)
    low, high = low / margin, high * margin
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8), (1, 1.5, 2, 3, 5), (1, 2, 5), (1, 3), (1,)):
        ticks = [step * 10.0**power for power in powers for step in steps if low <= step * 10.0**power <= high]
        if len(ticks) <= 7:
            break
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: numbers.trimmed(numbers.si(value))))
    axes.xaxis.set_minor_formatter(NullFormatter())


def si_ticks(axis: Any, as_params: bool = False) -> None:
    shown = numbers.params if as_params else numbers.si
    axis.set_major_formatter(FuncFormatter(lambda value, _: numbers.trimmed(shown(value))))


@dataclass(frozen=True, slots=True)
class Label:
    """Text beside a point."""

    x: float
    y: float
    text: str
    colour: str = INK
    bold: bool = False


_LEADER_PT = 40.0
"""A label farther from its point than this is tied to it by a thin line."""
_TRIES = [
    (reach * dx, reach * dy)
    for reach in (10.0, 18.0, 30.0, 46.0, 64.0, 84.0)
    for dx, dy in ((1, 0), (0.75, 0.75), (0.75, -0.75), (-1, 0), (0, 1), (0, -1), (-0.75, 0.75), (-0.75, -0.75))
]


def place_labels(axes: Axes, labels: Sequence[Label], marks: Sequence[tuple[float, float, float]] = ()) -> None:
    """Write each label where it hides neither a mark nor another label; the first ones choose first.

    ``marks`` are (x, y, radius in points). Texts already on the axes are kept clear as well. Where nothing is free, a
    label stands where it hides least.
    """
    canvas = axes.figure.canvas
    assert isinstance(canvas, FigureCanvasAgg), canvas
    canvas.figure.draw_without_rendering()
    renderer = canvas.get_renderer()
    pixels = canvas.figure.dpi / 72.0
    frame = axes.get_window_extent(renderer)
    taken = [text.get_window_extent(renderer) for text in axes.texts]
    for x, y, radius in marks:
        at_x, at_y = axes.transData.transform((x, y))
        reach = radius * pixels
        taken.append(Bbox([[at_x - reach, at_y - reach], [at_x + reach, at_y + reach]]))
    for label in labels:
        note = _note(axes, label)
        found: list[tuple[int, int, Bbox]] = []
        for place, offset in enumerate(_TRIES):
            _move(note, *offset)
            note.update_positions(renderer)
            box = Text.get_window_extent(note, renderer).padded(2 * pixels)  # of the words, without the leader
            inside = frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
            num_hidden = sum(box.overlaps(other) for other in taken) + 100 * (not inside)
            found.append((num_hidden, place, box))
            if num_hidden == 0:
                break
        _, place, box = min(found, key=lambda each: each[:2])
        _move(note, *_TRIES[place])
        taken.append(box)


def _note(axes: Axes, label: Label) -> Annotation:
    note = axes.annotate(
        label.text,
        (label.x, label.y),
        xytext=(0, 0),
        textcoords="offset points",
        fontsize=TEXT_PT,
        fontweight="bold" if label.bold else "normal",
        color=label.colour,
        parse_math=False,
        zorder=6,
        path_effects=[HALO],
        arrowprops={"arrowstyle": "-", "color": label.colour, "linewidth": 0.9, "shrinkA": 1, "shrinkB": 7},
    )
    note.set_in_layout(False)
    return note


def _move(note: Annotation, dx: float, dy: float) -> None:
    """Put the words at an offset in points from their point, aligned so that they grow away from it."""
    note.set_position((dx, dy))
    note.set_horizontalalignment("left" if dx > 0 else "right" if dx < 0 else "center")
    note.set_verticalalignment("center" if dy == 0 else "bottom" if dy > 0 else "top")
    assert note.arrow_patch is not None
    note.arrow_patch.set_visible(math.hypot(dx, dy) > _LEADER_PT)


def spread(values: Sequence[float], gap: float) -> list[float]:
    """Positions as near as may be to ``values`` and at least ``gap`` apart: for labels at the ends of curves."""
    order = sorted(range(len(values)), key=lambda index: values[index])
    groups: list[list[float]] = []  # each [centre, how many]: neighbours that were pushed together
    for index in order:
        groups.append([values[index], 1.0])
        while len(groups) > 1:
            (low, num_low), (high, num_high) = groups[-2:]
            if high - low >= gap * (num_low + num_high) / 2:
                break
            num = num_low + num_high
            groups[-2:] = [[(low * num_low + high * num_high) / num, num]]
    placed = [centre + gap * (place - (num - 1) / 2) for centre, num in groups for place in range(int(num))]
    result = [0.0] * len(values)
    for index, at in zip(order, placed, strict=True):
        result[index] = at
    return result


def end_labels(axes: Axes, labels: Sequence[Label]) -> None:
    """Name curves at their right ends, outside the axes, pushed apart where they end close together."""
    name_ends((axes, labels))


def name_ends(*panels: tuple[Axes, Sequence[Label]]) -> None:
    """`end_labels` of all panels of a figure, which is laid out once for them all."""
    canvas = panels[0][0].figure.canvas
    assert isinstance(canvas, FigureCanvasAgg), canvas
    canvas.figure.draw_without_rendering()
    gap = 1.35 * TEXT_PT * canvas.figure.dpi / 72.0
    for axes, labels in panels:
        frame = axes.get_window_extent(canvas.get_renderer())
        ends = [float(axes.transData.transform((label.x, label.y))[1]) for label in labels]  # pixels, on any scale
        placed = spread(ends, gap)
        lift = max(0.0, frame.y0 + 0.2 * gap - min(placed, default=frame.y1))  # clear of the ticks below
        for label, y in zip(labels, placed, strict=True):
            axes.annotate(
                label.text,
                (1.0, (y + lift - frame.y0) / frame.height),
                xycoords="axes fraction",
                xytext=(8, 0),
                textcoords="offset points",
                va="center",
                fontsize=TEXT_PT,
                fontweight="bold" if label.bold else "normal",
                color=label.colour,
                parse_math=False,
                annotation_clip=False,
            )
