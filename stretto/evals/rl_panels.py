"""One panel of an RL report: curves over steps, faint as measured and bold as smoothed, named at their ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from stretto.evals import numbers
from stretto.evals.canvas import MUTED, SERIES, Label, blank, dress, subtitle
from stretto.evals.rl_data import RlData

Form = Callable[[float], str]
Ends = tuple[Axes, list[Label]]
"""A panel and the names of its curves: for `stretto.evals.canvas.name_ends`, once all panels of the figure are drawn."""
_SMOOTH_SHARE = 1 / 15
"""Of a run's steps that one point of a bold curve is the mean of."""
_FEW = 30
"""Points up to which each is marked."""
PALE = "#c9ced6"
"""For areas of which nothing is to be read but their size."""


@dataclass(frozen=True, slots=True)
class Line:
    """A curve."""

    metric: str
    name: str
    colour: str
    is_smooth: bool = True
    """Draw a running mean, and the values themselves faintly."""


def grid(num: int) -> tuple[Figure, list[Axes]]:
    """A figure with ``num`` panels, two a row."""
    columns = min(num, 2)
    rows = -(-num // columns)
    figure = blank(10.0, 1.0 + 3.7 * rows if columns > 1 else 5.6)
    places = [axes for row in figure.subplots(rows, columns, squeeze=False) for axes in row]
    for axes in places[num:]:
        axes.set_visible(False)
    return figure, places[:num]


def lines(*named: tuple[str, str], is_smooth: bool = True) -> list[Line]:
    """Curves of (metric, name) in the order of the house's colours."""
    return [Line(metric, name, SERIES[place % len(SERIES)], is_smooth) for place, (metric, name) in enumerate(named)]


def panel(
    axes: Axes,
    data: RlData,
    title: str,
    curves: Sequence[Line],
    form: Form,
    notes: Sequence[str] = (),
    *,
    zero: bool = True,
    log: bool = False,
    top: float | None = None,
) -> Ends:
    """Draw those of ``curves`` that were logged.

    Args:
        form: how a value is written, on the axis and at the end of its curve.
        notes: how to read it, between title and axes.
        zero: the axis begins at 0.
        top: the axis reaches so far at least.
    """
    dress(axes, title, "Step", "")
    found = [(line, *data.series(line.metric)) for line in curves if data.has(line.metric)]
    values = [value for *_, each in found for value in each]
    floor = None
    if log and any(value > 0 for value in values):
        axes.set_yscale("log")
        floor = min(value for value in values if value > 0) / 3  # zeros are drawn a little below all others
    labels = []
    for line, steps, each in found:
        end = _draw(axes, line, steps, each, floor)
        shown = each[-1] if floor is not None and end <= floor else end
        labels.append(Label(steps[-1], end, f"{line.name}  {form(shown)}", line.colour))
    if floor is not None:
        _log_axis(axes, form)
    elif log:
        axes.set_yticks([0.0], ["0"])
    else:
        _linear_axis(axes, values, form, zero, top)
    step_axis(axes, data)
    zeros = [value for value in values if value <= 0] if log else []
    notes = [*notes, *(["at the foot: exactly 0" if floor is not None else "exactly 0 in every step"] if zeros else [])]
    subtitle(axes, notes, line_chars=58)
    return axes, labels


def step_axis(axes: Axes, data: RlData) -> None:
    """The run's steps, whole ones."""
    last = max((row["step"] for row in data.rows), default=1)
    axes.set_xlim(0, max(last, 1))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: numbers.trimmed(numbers.si(value))))


def smoothed(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Centred running mean; at the ends, of what there is."""
    reach = int(len(values) * _SMOOTH_SHARE / 2)
    sums = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    places = np.arange(len(values))
    low, high = np.maximum(places - reach, 0), np.minimum(places + reach + 1, len(values))
    return (sums[high] - sums[low]) / (high - low)


def _draw(axes: Axes, line: Line, steps: list[float], values: list[float], floor: float | None) -> float:
    """The curve; returns where it ends."""
    shown = np.asarray(values) if floor is None else np.maximum(values, floor)
    marker = "o" if len(values) <= _FEW else ""
    if not line.is_smooth:
        axes.plot(steps, shown, color=line.colour, linewidth=1.9, marker=marker, markersize=4, zorder=3)
        return float(shown[-1])
    # on a logarithmic axis the mean of logarithms is what the eye smooths too
    curve = smoothed(shown) if floor is None else np.exp(smoothed(np.log(shown)))
    axes.plot(steps, shown, color=line.colour, linewidth=0.9, alpha=0.28, zorder=2)
    axes.plot(steps, curve, color=line.colour, linewidth=2.3, marker=marker, markersize=4.5, zorder=3)
    return float(curve[-1])


def _linear_axis(axes: Axes, values: Sequence[float], form: Form, zero: bool, top: float | None) -> None:
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10], integer=form is whole))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: numbers.trimmed(form(value))))
    if zero and min(values, default=0.0) >= 0:
        axes.set_ylim(bottom=0.0)
    if top is not None:
        axes.set_ylim(top=max(top, 1.08 * max(values, default=0.0)))


def _log_axis(axes: Axes, form: Form) -> None:
    low, high = axes.get_ylim()
    if high / low < 10:  # a decade at least, or there would be no tick
        middle = (low * high) ** 0.5
        axes.set_ylim(middle / 3.3, middle * 3.3)
    axes.yaxis.set_major_locator(LogLocator(numticks=7))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: form(value)))


def tiny(value: float) -> str:
    """For what spans many powers of ten: ``3.1e−7``, ``0.042``; ``0`` is exact."""
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return _minus(numbers.trimmed(numbers.three(value)))
    digits, _, power = f"{value:.1e}".partition("e")
    return _minus(f"{numbers.trimmed(digits)}e{int(power)}")


def fine(value: float) -> str:
    """Four decimals: for what stays near 1."""
    return numbers.trimmed(f"{value:.4f}")


def whole(value: float) -> str:
    """For counts: the axis has whole ticks."""
    return numbers.trimmed(f"{value:,.1f}")


def plain(value: float) -> str:
    return _minus(numbers.trimmed(f"{value:,.2f}") if abs(value) < 100 else f"{value:,.0f}")


def seconds(value: float) -> str:
    """``0``, ``3.2 ms``, ``1.4 s``, ``120 s``."""
    if value == 0:
        return "0"
    return numbers.milliseconds(value * 1e3) if abs(value) < 1 else f"{numbers.trimmed(numbers.three(value))} s"


def share(value: float) -> str:
    return numbers.percent(value)


def _minus(text: str) -> str:
    return text.replace("-", "−")


def stack(axes: Axes, data: RlData, parts: Sequence[tuple[str, Sequence[float], str]], steps: Sequence[float]) -> Ends:
    """Areas on top of each other, smoothed over steps."""
    means = [smoothed(values) for _, values, _ in parts]
    colours = [colour for *_, colour in parts]
    axes.stackplot(steps, *means, colors=colours, edgecolor="white", linewidth=0.8, zorder=2)
    step_axis(axes, data)
    tops = np.cumsum([mean[-1] for mean in means])
    labels = [
        Label(steps[-1], float(top - mean[-1] / 2), name, MUTED if colour == PALE else colour)
        for (name, _, colour), mean, top in zip(parts, means, tops, strict=True)
    ]
    return axes, labels
