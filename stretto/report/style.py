"""Style of all figures: colours, axes, labels that do not overlap.

Figures are built without pyplot and rcParams, so they do not change the state of matplotlib.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, LinearSegmentedColormap, Normalize, to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patheffects import withStroke
from matplotlib.text import Annotation, Text
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator
from matplotlib.transforms import Bbox

from stretto.base import numbers

DPI = 150
INK = "#1b1f24"
MUTED = "#667080"
FAINT = "#e3e6ea"
ABSENT = "#f0f1f3"
PALE = "#c9ced6"
"""Colour of areas that are not highlighted."""
SERIES = BLUE, ORANGE, GREEN, PINK, SKY, SAND = "#0072b2", "#d55e00", "#009e73", "#b0538c", "#2f9fd8", "#b07d00"
"""Okabe and Ito's colours for all kinds of colour vision; pale ones are darkened so that text in them is legible."""
LOAD_COLOURS = LinearSegmentedColormap.from_list("load", ["#08407e", "#6aa6d6", "#f7f7f7", "#f0a35e", "#9c3d00"])
TIME_COLOURS = LinearSegmentedColormap.from_list("time", ["#123a63", "#1f78a8", "#4fb3a5", "#c2d65b", "#f6c945"])

HALO = withStroke(linewidth=3.5, foreground="white")
"""Keeps text legible on grid lines."""
LABEL_PT, TEXT_PT = 12.5, 12.0
_TITLE: dict[str, Any] = {"y": 1.0, "fontsize": 15.0, "fontweight": "bold", "color": INK, "parse_math": False}
"""Without ``y``, matplotlib would measure all tick labels at every drawing, to move titles above ticks on the upper side; no figure has such ticks."""

Form = Callable[[float], str]
"""Format of a value."""


def colours(names: Iterable[str]) -> dict[str, str]:
    """Colour of each size: `INK` for the full network, then `SERIES` in order."""
    others = [name for name in dict.fromkeys(names) if name != "full"]
    return {"full": INK} | {name: SERIES[place % len(SERIES)] for place, name in enumerate(others)}


def shades(base: Sequence[str], num: int) -> list[str]:
    """``num`` different colours: those of ``base``, then darker ones of the same hues. White text is legible in them if it is in ``base``."""
    num_rounds = -(-num // len(base))
    found = []
    for place in range(num):
        light = 1 - 0.75 * (place // len(base)) / num_rounds
        red, green, blue = to_rgb(base[place % len(base)])
        found.append(to_hex((light * red, light * green, light * blue)))
    return found


def blank(width_in: float, height_in: float) -> Figure:
    layout = ConstrainedLayoutEngine(w_pad=0.14, h_pad=0.12, wspace=0.04)
    figure = Figure(figsize=(width_in, height_in), dpi=DPI, facecolor="white", layout=layout)
    FigureCanvasAgg(figure)
    return figure


def dress(axes: Axes, title: str, x: str, y: str, grid: str | None = "both") -> Axes:
    """Set title, axis labels with units, ticks, spines and grid of ``axes``."""
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


def write(axes: Axes, text: str, at: tuple[float, float], offset_pt: tuple[float, float], **style: Any) -> Annotation:
    """Text at an offset in points from ``at``; ``style`` as of matplotlib's ``annotate``."""
    options: dict[str, Any] = {"fontsize": TEXT_PT, "color": INK, "parse_math": False} | style
    return axes.annotate(text, at, xytext=offset_pt, textcoords="offset points", **options)


def subtitle(axes: Axes, parts: Sequence[str]) -> None:
    """Write explanations in a muted colour between title and axes."""
    place = axes.get_subplotspec()
    assert place is not None
    lines, line_chars = [""], 118 // place.get_gridspec().ncols
    for part in parts:
        joined = f"{lines[-1]}  ·  {part}" if lines[-1] else part
        lines[-1:] = [joined] if len(joined) <= line_chars else [lines[-1], part]
    style = {"fontsize": 10.5, "color": MUTED, "linespacing": 1.4}
    note = write(axes, "\n".join(lines), (0, 1), (0, 9), xycoords="axes fraction", **style)
    note.set_in_layout(False)  # otherwise a long line would shrink the axes
    axes.set_title(axes.get_title(loc="left"), loc="left", pad=16 + 16 * len(lines), **_TITLE)


def ticks(axis: Axis, form: Form, most: int | None = None, **steps: Any) -> None:
    """Format tick labels by ``form``. ``most``: largest number of ticks; ``steps``: arguments of `MaxNLocator`."""
    if most is not None:
        axis.set_major_locator(MaxNLocator(most, **steps))
    axis.set_major_formatter(lambda value, _: numbers.trimmed(form(value)))


def log_ticks(axes: Axes, low: float, high: float) -> None:
    """Logarithmic x axis over ``low``..``high`` with round ticks, also if it spans less than a decade."""
    margin = max(1.5 if low == high else 1.12, (high / low) ** 0.12)
    axes.set_xscale("log")
    axes.set_xlim(low / margin, high * margin)
    decades = math.log10(high / low * margin**2)
    steps = (1.0, 2.0, 5.0) if decades < 2.5 else (1.0,)
    locator = MaxNLocator(6, steps=[1, 2, 5, 10]) if decades < 1 else LogLocator(subs=steps, numticks=8)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_minor_locator(NullLocator())
    ticks(axes.xaxis, numbers.si)


def colour_bar(axes: Axes | Sequence[Axes], scale: Normalize, colours: Colormap, label: str) -> Axes:
    """Add a colour bar beside ``axes``; returns its axes."""
    figure = (axes if isinstance(axes, Axes) else axes[0]).figure
    bar = figure.colorbar(ScalarMappable(scale, colours), ax=axes, pad=0.02, aspect=28)
    bar.set_label(label, fontsize=LABEL_PT, color=INK, labelpad=10, parse_math=False)
    bar.ax.tick_params(labelsize=TEXT_PT - 0.5, colors=MUTED, length=0)
    bar.ax.spines[:].set_visible(False)
    return bar.ax


@dataclass(frozen=True, slots=True)
class Label:
    """Text beside a point."""

    x: float
    y: float
    text: str
    colour: str = INK
    bold: bool = False

    def write(self, axes: Axes, at: tuple[float, float], offset_pt: tuple[float, float], **style: Any) -> Annotation:
        weight = "bold" if self.bold else "normal"
        return write(axes, self.text, at, offset_pt, color=self.colour, fontweight=weight, **style)


_LEADER_PT = 40.0
"""Distance in points from which a label is connected with its point by a thin line."""
_TRIES = [
    (reach * dx, reach * dy)
    for reach in (10.0, 18.0, 30.0, 46.0, 64.0, 84.0)
    for dx, dy in ((1, 0), (0.75, 0.75), (0.75, -0.75), (-1, 0), (0, 1), (0, -1), (-0.75, 0.75), (-0.75, -0.75))
]


def place_labels(axes: Axes, labels: Sequence[Label], marks: Sequence[tuple[float, float, float]] = ()) -> None:
    """Write each label beside its point so that it overlaps neither marks, nor other labels, nor texts on the axes, as far as possible.
    Earlier labels are placed first. ``marks`` are (x, y, radius in points)."""
    canvas = _laid_out(axes)
    renderer, pixels = canvas.get_renderer(), canvas.figure.dpi / 72.0
    frame = axes.get_window_extent(renderer)
    taken = [text.get_window_extent(renderer) for text in axes.texts]
    for x, y, radius in marks:
        centre = np.asarray(axes.transData.transform((x, y)))
        taken.append(Bbox([centre - radius * pixels, centre + radius * pixels]))
    for label in labels:
        arrow = {"arrowstyle": "-", "color": label.colour, "linewidth": 0.9, "shrinkA": 1, "shrinkB": 7}
        note = label.write(axes, (label.x, label.y), (0, 0), zorder=6, path_effects=[HALO], arrowprops=arrow)
        note.set_in_layout(False)
        boxes = [_move(note, offset, renderer).padded(2 * pixels) for offset in _TRIES]
        is_inside = [np.all(box.min >= frame.min) and np.all(box.max <= frame.max) for box in boxes]
        hidden = [box.count_overlaps(taken) + 100 * (not fits) for box, fits in zip(boxes, is_inside, strict=True)]
        place = int(np.argmin(hidden))
        _move(note, _TRIES[place], renderer)
        taken.append(boxes[place])


def _move(note: Annotation, offset: tuple[float, float], renderer: RendererAgg) -> Bbox:
    """Move the text to an offset in points, aligned so that it extends away from its point. Returns its bounding box."""
    dx, dy = offset
    across = "left" if dx > 0 else "right" if dx < 0 else "center"
    note.set(position=offset, ha=across, va="center" if dy == 0 else "bottom" if dy > 0 else "top")
    assert note.arrow_patch is not None
    note.arrow_patch.set_visible(math.hypot(dx, dy) > _LEADER_PT)
    note.update_positions(renderer)
    return Text.get_window_extent(note, renderer)  # of the text without the connecting line


def spread(values: Sequence[float], gap: float) -> list[float]:
    """Positions at least ``gap`` apart that are nearest to ``values`` (least squares), for labels at the ends of curves."""
    order = np.argsort(values, kind="stable")
    steps = gap * np.arange(len(values))
    placed = np.empty(len(values))
    placed[order] = scipy.optimize.isotonic_regression(np.asarray(values, np.float64)[order] - steps).x + steps
    return placed.tolist()


Ends = tuple[Axes, Sequence[Label]]
"""A panel and the labels at the ends of its curves."""
_AT_END: dict[str, Any] = {"xycoords": "axes fraction", "va": "center", "annotation_clip": False}


def name_ends(*panels: Ends) -> None:
    """Write labels at the right ends of curves, outside the axes, moved apart if curves end close together.

    Call it once per figure, with all panels, after everything is drawn: the layout is computed here, and not again when the figure is saved.
    """
    # the layout needs the widths of the labels, and their heights need the layout
    notes = [[label.write(axes, (1.0, 0.5), (8, 0), **_AT_END) for label in labels] for axes, labels in panels]
    canvas = _laid_out(panels[0][0])
    gap = 1.35 * TEXT_PT * canvas.figure.dpi / 72.0
    for (axes, labels), written in zip(panels, notes, strict=True):
        if not labels:
            continue
        frame = axes.get_window_extent(canvas.get_renderer())
        ends = [float(axes.transData.transform((label.x, label.y))[1]) for label in labels]  # pixels, on any scale
        placed = spread(ends, gap)
        low, high = frame.y0 + 0.2 * gap, frame.y1 - 0.4 * gap  # above the x axis' tick labels, below a long subtitle
        for rank, (y, note) in enumerate(sorted(zip(placed, written, strict=True), key=lambda pair: pair[0])):
            inside = max(min(y, high - (len(labels) - 1 - rank) * gap), low + rank * gap)
            note.xy = (1.0, (inside - frame.y0) / frame.height)
    canvas.figure.set_layout_engine("none")


def _laid_out(axes: Axes) -> FigureCanvasAgg:
    """The canvas of the figure after its layout was computed."""
    canvas = axes.figure.canvas
    assert isinstance(canvas, FigureCanvasAgg), canvas
    layout = canvas.figure.get_layout_engine()
    assert layout is not None
    layout.execute(canvas.figure)
    return canvas
