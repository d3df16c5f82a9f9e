"""The picture of a search: loss × memory × measured latency of every candidate it evaluated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from stretto.evals import numbers
from stretto.evals.canvas import (
    INK,
    LABEL_PT,
    MUTED,
    SERIES,
    TEXT_PT,
    TIME_COLOURS,
    Label,
    blank,
    dress,
    place_labels,
    si_ticks,
    subtitle,
)
from stretto.evals.report_data import ReportData, SearchData, SearchPoint


def pareto_front(data: ReportData) -> Figure:
    """Loss × memory × measured latency (or active parameters) of the candidates that the search evaluated."""
    search = data.search
    assert search is not None and search.points, "no search was run"
    figure = blank(10.0, 6.6)
    axes = dress(
        figure.subplots(),
        "The front of the search: loss, memory, latency" if _timed(search) else "The front of the search",
        "Memory, total parameters",
        "Held-out loss, nats per token",
    )
    si_ticks(axes.xaxis, as_params=True)
    top = _highest_shown(search)
    shown = [point for point in search.points if point.nll <= top]
    largest = max(point.active_params for point in search.points)
    _front_line(axes, shown)
    fill = _colour_of(figure, axes, search)
    marks = []
    for point in shown:
        radius = _radius(point, largest)
        axes.plot(
            point.total_params,
            point.nll,
            "o",
            markersize=2 * radius,
            markerfacecolor=fill(point) if point.within else "white",
            markeredgecolor="white" if point.within else fill(point),
            markeredgewidth=0.8 if point.within else 1.8,
            alpha=1.0 if point.on_front or point.chosen else 0.55,
            zorder=3,
        )
        marks.append((point.total_params, point.nll, radius))
        if point.healed_nll is not None:
            marks += [(point.total_params, y, 4.0) for y in np.linspace(point.nll, point.healed_nll, 12)]
    bottom = min(point.nll for point in shown)
    bottom = min([bottom, *(point.healed_nll for point in shown if point.healed_nll is not None)])
    room = max(top - bottom, 1e-3)
    axes.set_ylim(bottom - 0.16 * room, top + 0.12 * room)
    totals = [point.total_params for point in shown]
    width = max(max(totals) - min(totals), 0.02 * max(totals))
    axes.set_xlim(min(totals) - 0.10 * width, max(totals) + 0.12 * width)
    _limit_line(axes, search, data.full.total_params)
    _reading_key(axes, search, len(search.points) - len(shown))
    place_labels(axes, _front_labels(axes, shown, largest), marks)
    return figure


def _front_labels(axes: Axes, shown: Sequence[SearchPoint], largest: int) -> list[Label]:
    """Marks the chosen and the healed; returns what to write beside them."""
    labels = []
    for point in sorted(shown, key=lambda point: not point.chosen):
        x = point.total_params
        if point.chosen:
            ring = 2 * _radius(point, largest) + 7
            axes.plot(
                x, point.nll, "o", markersize=ring, markerfacecolor="none", markeredgecolor=INK, markeredgewidth=2
            )
            name = f"{point.name}, chosen" if point.name else "chosen"
            labels.append(Label(x, point.nll, f"{name}  {numbers.loss(point.nll)}", bold=True))
        elif point.name:
            labels.append(Label(x, point.nll, point.name, MUTED))
        if point.healed_nll is not None:
            axes.plot([x, x], [point.nll, point.healed_nll], color=INK, linewidth=1.2, alpha=0.5, zorder=2)
            axes.plot(x, point.healed_nll, "D", color=INK, markersize=6.5, markeredgecolor="white", zorder=4)
            if point.chosen:
                labels.append(Label(x, point.healed_nll, f"healed  {numbers.loss(point.healed_nll)}"))
    return labels


def _timed(search: SearchData) -> bool:
    return all(point.latency_ms is not None for point in search.points)


def _highest_shown(search: SearchData) -> float:
    """Losses above it are left out: the front runs on to networks that are good for nothing and would flatten the rest.

    As far again above the chosen and the named ones as the worst of those lies above the best of all.
    """
    losses = [point.nll for point in search.points]
    worst = max((point.nll for point in search.points if point.chosen or point.name), default=max(losses))
    reach = worst - min(losses)
    return min(max(losses), worst + reach) if reach > 0 else max(losses)


def _front_line(axes: Axes, shown: Sequence[SearchPoint]) -> None:
    """The least loss on the front for the memory it takes, as a staircase."""
    front = sorted((point for point in shown if point.on_front), key=lambda point: (point.total_params, point.nll))
    best = np.minimum.accumulate([point.nll for point in front]) if front else np.array([])
    axes.plot(
        [point.total_params for point in front], best, color="#aab1ba", linewidth=2, drawstyle="steps-post", zorder=1
    )


def _colour_of(figure: Figure, axes: Axes, search: SearchData) -> Callable[[SearchPoint], Any]:
    """Fill of a point, by latency; a bar says which colour is which, and where the limit lies."""
    times = [point.latency_ms for point in search.points if point.latency_ms is not None]
    if not _timed(search):
        return lambda point: SERIES[0]
    low, high = min(times), max(times)
    scale = Normalize(low, high if high > low else low * 1.01 + 1e-9)
    bar = figure.colorbar(ScalarMappable(scale, TIME_COLOURS), ax=axes, pad=0.02, aspect=28)
    of = f" ({search.workload})" if search.workload else ""
    bar.set_label(f"Latency, ms a step{of}", fontsize=LABEL_PT, color=INK, labelpad=10, parse_math=False)
    bar.ax.tick_params(labelsize=TEXT_PT - 0.5, colors=MUTED, length=0)
    bar.outline.set_visible(False)  # type: ignore[operator]
    limit = search.max_latency_ms
    if limit is not None and scale.vmin <= limit <= scale.vmax:  # type: ignore[operator]
        bar.ax.axhline(limit, color=INK, linewidth=2)
        bar.ax.annotate(
            "limit", (0, limit), xycoords=("axes fraction", "data"), xytext=(-4, 0), textcoords="offset points",
            ha="right", va="center", fontsize=TEXT_PT - 1, color=INK,
        )  # fmt: skip
    return lambda point: TIME_COLOURS(scale(point.latency_ms or 0.0))


def _radius(point: SearchPoint, largest: int) -> float:
    """Radius in points: area in proportion to active parameters."""
    return max(3.0, 8.5 * (point.active_params / largest) ** 0.5)


def _limit_line(axes: Axes, search: SearchData, full_params: int) -> None:
    if search.max_total is None:
        return
    limit = search.max_total * full_params
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, limit - 0.04 * (high - low)), max(high, limit + 0.04 * (high - low)))
    axes.axvline(limit, color=INK, linewidth=1.3, linestyle=(0, (5, 4)), zorder=1)
    is_left = limit < sum(axes.get_xlim()) / 2
    axes.annotate(
        f"memory limit, {numbers.percent(search.max_total)}",
        (limit, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(6 if is_left else -6, -4),
        textcoords="offset points",
        ha="left" if is_left else "right",
        va="top",
        fontsize=TEXT_PT,
        color=INK,
    )


def limits(search: SearchData) -> list[str]:
    """The limits that were asked for, in words."""
    asked = {
        "total": None if search.max_total is None else numbers.percent(search.max_total),
        "active": None if search.max_active is None else numbers.percent(search.max_active),
        "latency": None if search.max_latency_ms is None else numbers.milliseconds(search.max_latency_ms),
    }
    return [f"{name} ≤ {value}" for name, value in asked.items() if value is not None]


def _reading_key(axes: Axes, search: SearchData, num_above: int) -> None:
    parts = ["area: active parameters", "line: least loss for the memory"]
    if num_above:
        parts.append(f"{num_above} above the frame")
    if any(not point.within for point in search.points):
        parts.append(f"hollow: outside the limits ({', '.join(limits(search))})")
    if any(point.healed_nll is not None for point in search.points):
        parts.append("diamond: healed")
    subtitle(axes, parts)
