"""Figures of a search: evaluated candidates, layers and experts of the chosen Subnet, expert loads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, ListedColormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from stretto.base import numbers
from stretto.report import style
from stretto.report.style import ABSENT, BLUE, FAINT, INK, LOAD_COLOURS, MUTED, TEXT_PT, TIME_COLOURS, Label
from stretto.subnets.candidate import Candidate
from stretto.subnets.search import SearchResult

_MAX_OVERLOAD = 3.0
"""Upper end of the colour scale of loads, relative to perfect balance; the lower end is its inverse."""
_MAX_CELLS_WITH_EDGES = 64


@dataclass(frozen=True, slots=True)
class _Point:
    """A candidate that was evaluated."""

    x: int
    """Total parameters."""
    nll: float
    candidate: Candidate
    on_front: bool
    within: bool
    chosen: bool


def _points(search: SearchResult) -> list[_Point]:
    chosen, limits = search.chosen.subnet, search.limits
    return [
        _Point(each.total_params, each.nll, each, place in search.front, each.fits(limits), each.subnet == chosen)
        for place, each in enumerate(search.candidates)
        if each.nll is not None
    ]


def candidates(search: SearchResult) -> Figure:
    """Loss, memory and measured latency (or active parameters) of the evaluated candidates."""
    points = _points(search)
    times = [point.candidate.latency_ms for point in points if point.candidate.latency_ms is not None]
    is_timed = len(times) == len(points)
    figure = style.blank(10.0, 6.6)
    title = "Pareto front of the search: loss, memory, latency" if is_timed else "Pareto front of the search"
    axes = style.dress(figure.subplots(), title, "Memory, total parameters", "Held-out loss, nats per token")
    style.ticks(axes.xaxis, numbers.params)
    top = _highest_shown(points)
    shown = [point for point in points if point.nll <= top]
    front = sorted((point.x, point.nll) for point in shown if point.on_front)
    best = np.minimum.accumulate([nll for _, nll in front] or [top])[: len(front)]
    look: dict[str, Any] = {"color": "#aab1ba", "linewidth": 2, "drawstyle": "steps-post", "zorder": 1}
    axes.plot([x for x, _ in front], best, **look)
    scale = Normalize(min(times), max(max(times), 1.01 * min(times) + 1e-9)) if is_timed else None
    if scale is not None:
        _time_bar(axes, search, scale)
    largest = max(candidate.active_params for candidate in search.candidates)
    marks: list[tuple[float, float, float]] = []
    labels = []
    for point in sorted(shown, key=lambda point: not point.chosen):
        x, nll, name, healed = point.x, point.nll, point.candidate.name, point.candidate.healed_nll
        radius_pt = max(3.0, 8.5 * (point.candidate.active_params / largest) ** 0.5)
        own = BLUE if scale is None else TIME_COLOURS(scale(point.candidate.latency_ms or 0.0))
        face, edge, width = (own, "white", 0.8) if point.within else ("white", own, 1.8)
        alpha = 1.0 if point.on_front or point.chosen else 0.55
        look = {"markerfacecolor": face, "markeredgecolor": edge, "markeredgewidth": width, "alpha": alpha}
        axes.plot(x, nll, "o", markersize=2 * radius_pt, zorder=3.5 if point.chosen else 3, **look)
        marks.append((x, nll, radius_pt))
        if point.chosen:
            look = {"markersize": 2 * radius_pt + 7, "markeredgecolor": INK, "markeredgewidth": 2}
            axes.plot(x, nll, "o", markerfacecolor="none", **look)
            words = f"{name}, chosen" if name else "chosen"
            labels.append(Label(x, nll, f"{words}  {numbers.loss(nll)}", bold=True))
        elif name:
            labels.append(Label(x, nll, name, MUTED))
        if healed is not None:
            axes.plot([x, x], [nll, healed], color=INK, linewidth=1.2, alpha=0.5, zorder=2)
            axes.plot(x, healed, "D", color=INK, markersize=6.5, markeredgecolor="white", zorder=4)
            marks += [(x, y, 4.0) for y in np.linspace(nll, healed, 12)]
            labels += [Label(x, healed, f"healed  {numbers.loss(healed)}")] if point.chosen else []
    bottom = min(y for _, y, _ in marks)
    room = max(top - bottom, 1e-3)
    axes.set_ylim(bottom - 0.16 * room, top + 0.12 * room)
    totals = [point.x for point in shown]
    width = max(max(totals) - min(totals), 0.02 * max(totals))
    axes.set_xlim(min(totals) - 0.10 * width, max(totals) + 0.12 * width)
    _limit_line(axes, search)
    parts = ["area: active parameters", "line: smallest loss by memory"]
    if len(shown) < len(points):
        parts.append(f"{len(points) - len(shown)} above the frame")
    if any(not point.within for point in points):
        parts.append(f"hollow: violates the limits ({', '.join(_limits(search))})")
    if any(point.candidate.healed_nll is not None for point in points):
        parts.append("diamond: healed")
    style.subtitle(axes, parts)
    style.place_labels(axes, labels, marks)
    return figure


def _highest_shown(points: Sequence[_Point]) -> float:
    """Largest loss in the figure; useless networks above it would flatten the rest.

    Its distance to the worst of the chosen and named candidates is that candidate's distance to the best of all.
    """
    losses = [point.nll for point in points]
    worst = max((point.nll for point in points if point.chosen or point.candidate.name), default=max(losses))
    return min(max(losses), 2 * worst - min(losses)) if worst > min(losses) else max(losses)


def _time_bar(axes: Axes, search: SearchResult, scale: Normalize) -> None:
    """Draw the colour bar of latencies, with the limit."""
    of = f" ({search.workload.label()})" if search.workload else ""
    bar = style.colour_bar(axes, scale, TIME_COLOURS, f"Latency, ms per step{of}")
    limit = search.limits.max_latency_ms
    if limit is not None and scale.vmin <= limit <= scale.vmax:  # type: ignore[operator]
        bar.axhline(limit, color=INK, linewidth=2)
        look = {"xycoords": ("axes fraction", "data"), "ha": "right", "va": "center", "fontsize": TEXT_PT - 1}
        style.write(bar, "limit", (0, limit), (-4, 0), **look)


def _limit_line(axes: Axes, search: SearchResult) -> None:
    share = search.limits.max_total
    if share is None:
        return
    limit = share * search.candidates[0].total_params / search.candidates[0].total_share
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, limit - 0.04 * (high - low)), max(high, limit + 0.04 * (high - low)))
    axes.axvline(limit, color=INK, linewidth=1.3, linestyle=(0, (5, 4)), zorder=1)
    side, align = (6, "left") if limit < sum(axes.get_xlim()) / 2 else (-6, "right")
    look = {"xycoords": ("data", "axes fraction"), "ha": align, "va": "top"}
    style.write(axes, f"memory limit, {numbers.percent(share)}", (limit, 1.0), (side, -4), **look)


def _limits(search: SearchResult) -> list[str]:
    """The limits of the search, in words."""
    shares = {"total": search.limits.max_total, "active": search.limits.max_active}
    asked = [f"{name} ≤ {numbers.percent(share)}" for name, share in shares.items() if share is not None]
    latency_ms = search.limits.max_latency_ms
    return asked if latency_ms is None else [*asked, f"latency ≤ {numbers.duration(latency_ms / 1e3)}"]


def search_caption(search: SearchResult) -> str:
    points, asked, best = _points(search), _limits(search), search.chosen
    assert best.nll is not None
    latency = "" if best.latency_ms is None else f", {numbers.duration(best.latency_ms / 1e3)} per step"
    within = sum(point.within for point in points)
    meeting = f"{within:,} meet the limits ({', '.join(asked)})" if asked else "no limit was set"
    text = (
        f"{'All ' * search.is_complete}{search.num_predicted:,} candidates were predicted and {len(points):,} evaluated; {meeting}, "
        f"and {sum(point.on_front for point in points):,} are on the Pareto front. "
        f"The chosen Subnet has {numbers.params(best.total_params)} parameters, "
        f"{numbers.params(best.active_params)} active{latency}, at loss {numbers.loss(best.nll)}."
    )
    ranks = {
        "predicted and evaluated loss": search.correlations.predicted_true,
        "the same within the limits": search.correlations.predicted_true_within,
        "loss before and after healing": search.correlations.before_after_healing,
    }
    known = [f"{name} {value:.2f}" for name, value in ranks.items() if value is not None]
    return text + (
        f" Rank correlation: {', '.join(known)}."
        if known
        else " Too few candidates for a rank correlation of predicted and evaluated loss."
    )


@dataclass(frozen=True, slots=True)
class Kept:
    """Layers and experts of the maximum network that the chosen Subnet keeps."""

    layers: tuple[bool, ...]
    """Whether each layer is kept."""
    experts: tuple[tuple[bool, ...], ...]
    """By layer and expert; an empty row is a dense layer, a dropped layer's experts are all False."""


def kept_grid(kept: Kept) -> Figure:
    """Figure of the layers and experts that the chosen Subnet keeps."""
    num_layers, num_experts = len(kept.layers), max([1, *map(len, kept.experts)])
    figure = style.blank(10.0, _height(num_layers))
    axes = style.dress(figure.subplots(), "Layers and experts of the chosen Subnet", "Expert", "Layer", grid=None)
    style.subtitle(axes, ["filled: kept", "pale: dropped", "first column: the layer itself (attention and norms)"])
    # the layer itself, a gap as wide, then the experts; NaN is drawn as nothing
    side = max(1, num_experts // 16)
    first = 2 * side
    cells = np.full((num_layers, first + num_experts), math.nan)
    for layer, (is_kept, experts) in enumerate(zip(kept.layers, kept.experts, strict=True)):
        cells[layer, :side] = 2.0 if is_kept else 0.0
        cells[layer, first : first + len(experts)] = experts
        if not experts:
            colour = "#4f555c" if is_kept else ABSENT
            axes.add_patch(Rectangle((first + 0.04, layer + 0.06), num_experts - 0.08, 0.88, color=colour, linewidth=0))
        if num_layers <= 40:
            text = "dropped" if not is_kept else f"{sum(experts)} of {len(experts)}" if experts else "dense"
            at, own = first + 1.015 * num_experts, INK if is_kept else MUTED
            axes.text(at, layer + 0.5, text, va="center", fontsize=TEXT_PT - 1, color=own)
    _grid(axes, cells, ListedColormap([ABSENT, BLUE, INK]), vmin=0, vmax=2)
    _number(axes, range(num_layers), num_experts, side)
    return figure


def kept_caption(kept: Kept) -> str:
    text = f"{sum(kept.layers)} of {numbers.counted(len(kept.layers), 'layer')} are kept"
    dropped = [str(layer) for layer, is_kept in enumerate(kept.layers) if not is_kept]
    if dropped:
        text += f" ({'layer' if len(dropped) == 1 else 'layers'} {numbers.listed(dropped)} dropped)"
    rows = [row for row, is_kept in zip(kept.experts, kept.layers, strict=True) if is_kept and row]
    if rows:
        span = " to ".join(map(str, sorted({min(map(sum, rows)), max(map(sum, rows))})))
        text += f", with {span} of {max(map(len, rows))} experts in each remaining MoE layer"
    return text + "."


@dataclass(frozen=True, slots=True)
class Load:
    """Routing of held-out tokens in one size."""

    name: str
    layers: tuple[int, ...]
    """Depth of each row in the maximum network."""
    shares: tuple[tuple[float | None, ...], ...]
    """By MoE layer of the maximum network and expert: share of the layer's routed tokens. None: not in this size."""

    @property
    def relative(self) -> np.ndarray:
        """Load relative to perfect balance over the layer's remaining experts, by layer and expert; NaN for missing experts."""
        cells = np.full((len(self.shares), max(map(len, self.shares), default=0)), math.nan)
        for layer, row in enumerate(self.shares):
            cells[layer, : len(row)] = np.array(row, np.float64) * sum(share is not None for share in row)
        return cells


def expert_load(loads: Sequence[Load]) -> Figure:
    """Figure of the expert load on held-out text, for each size."""
    figure = style.blank(10.0, _height(max(len(load.shares) for load in loads)) + 0.5)
    panels = list(figure.subplots(1, len(loads), squeeze=False)[0])
    scale = LogNorm(1 / _MAX_OVERLOAD, _MAX_OVERLOAD)
    for axes, load in zip(panels, loads, strict=True):
        style.dress(axes, f"Expert load, {load.name}", "Expert", "Layer" if axes is panels[0] else "", grid=None)
        has_gaps = bool(np.isnan(load.relative).any())
        if has_gaps:
            axes.patch.set(hatch="////", edgecolor=FAINT)
        style.subtitle(axes, ["hatched: not in this size" if has_gaps else "1×: mean load"])
        # an expert without tokens has the lowest colour; only missing experts are gaps
        _grid(axes, np.clip(load.relative, 1 / _MAX_OVERLOAD, _MAX_OVERLOAD), LOAD_COLOURS, norm=scale)
        _number(axes, load.layers, load.relative.shape[1], most=16 if len(loads) == 1 else 8)
    bar = style.colour_bar(panels, scale, LOAD_COLOURS, "Load over perfect balance").yaxis
    bar.set_ticks([1 / 3, 0.5, 1, 2, 3], labels=["≤ ⅓", "½", "1×", "2×", "≥ 3×"])
    bar.set_ticks([], minor=True)
    return figure


def load_caption(loads: Sequence[Load]) -> str:
    parts = []
    for load in loads:
        values = load.relative[~np.isnan(load.relative)]
        if values.size:
            unused = int((values == 0).sum())
            idle = f"{numbers.counted(unused, 'expert')} never chosen" if unused else "every expert used"
            parts.append(f"in {load.name} {values.max():.2f}× ({idle})")
    return f"Load of the busiest expert relative to perfect balance: {numbers.listed(parts)}."


def _grid(axes: Axes, cells: np.ndarray, colours: Colormap, **scale: Any) -> None:
    """Draw cells of equal size, the first row on top, with white gaps between few cells."""
    few = max(cells.shape) <= _MAX_CELLS_WITH_EDGES
    edges: dict[str, Any] = {"edgecolors": "white" if few else "none", "linewidth": 1.6 if few else 0}
    axes.pcolormesh(np.ma.masked_invalid(cells), cmap=colours, **edges, **scale)
    axes.invert_yaxis()


def _number(axes: Axes, layers: Sequence[int], num_experts: int, side: int = 0, most: int = 16) -> None:
    """Number layers and experts. The first ``side`` columns stand for the layer itself, and a gap of the same width follows."""

    def some(num: int, most: int) -> range:
        step = next(step for step in (1, 2, 4, 5, 8, 10, 16, 20, 32, 50, 64, 100, 1000) if num <= most * step)
        return range(0, num, step)

    rows, experts = some(len(layers), 16), some(num_experts, most)
    axes.set_yticks([row + 0.5 for row in rows], [str(layers[row]) for row in rows])
    places = [(side / 2, "layer")] if side else []
    places += [(2 * side + expert + 0.5, str(expert)) for expert in experts]
    axes.set_xticks([place for place, _ in places], [text for _, text in places])


def _height(num_layers: int) -> float:
    """Height of the figure in inches."""
    return 2.1 + min(6.5, max(1.6, 0.36 * num_layers))
