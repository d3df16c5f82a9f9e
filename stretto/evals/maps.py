"""Pictures of what is inside and what it cost: layers and experts kept, expert load, the cost ledger."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, ListedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, MaxNLocator, NullFormatter, NullLocator

from stretto.base.receipt import Family, Ledger
from stretto.evals import numbers
from stretto.evals.canvas import (
    ABSENT,
    FAINT,
    INK,
    LABEL_PT,
    LOAD_COLOURS,
    MUTED,
    SERIES,
    TEXT_PT,
    blank,
    dress,
    subtitle,
)
from stretto.evals.report_data import ReportData

_MAX_OVERLOAD = 3.0
"""Ends of the colour scale of loads: this many times perfect balance, and its inverse."""
_MAX_CELLS_WITH_EDGES = 64


def kept_grid(data: ReportData) -> Figure:
    """Which layers, and which experts of each, the chosen Subnet keeps."""
    kept = data.kept
    assert kept is not None, "no Subnet was chosen"
    num_layers, num_experts = len(kept.layers), max([1, *map(len, kept.experts)])
    figure = blank(10.0, _height(num_layers))
    axes = dress(figure.subplots(), "Layers and experts that were kept", "Expert", "Layer", grid=None)
    subtitle(axes, ["filled: kept", "pale: dropped", "first column: the layer itself (attention and norms)"])
    # the layer itself, a gap as wide, then the experts; NaN is drawn as nothing
    side = max(1, num_experts // 16)
    first = 2 * side
    cells = np.full((num_layers, first + num_experts), math.nan)
    for layer, (is_kept, experts) in enumerate(zip(kept.layers, kept.experts, strict=True)):
        cells[layer, :side] = 2.0 if is_kept else 0.0
        cells[layer, first : first + len(experts)] = [1.0 if one else 0.0 for one in experts]
    _grid(axes, cells, ListedColormap([ABSENT, SERIES[0], INK]), vmin=0, vmax=2)
    for layer, (is_kept, experts) in enumerate(zip(kept.layers, kept.experts, strict=True)):
        own = INK if is_kept else MUTED
        if not experts:
            colour = "#4f555c" if is_kept else ABSENT
            axes.add_patch(Rectangle((first + 0.04, layer + 0.06), num_experts - 0.08, 0.88, color=colour, linewidth=0))
        if num_layers <= 40:
            text = "dropped" if not is_kept else f"{sum(experts)} of {len(experts)}" if experts else "dense"
            at = first + 1.015 * num_experts
            axes.text(at, layer + 0.5, text, va="center", fontsize=TEXT_PT - 1, color=own)
    _ticks(axes, range(num_layers), num_experts, side)
    return figure


def expert_load(data: ReportData) -> Figure:
    """How evenly held-out tokens spread over the experts, in the full network and in the corner."""
    assert data.loads, "no routing was measured"
    num_layers = max(len(load.shares) for load in data.loads)
    figure = blank(10.0, _height(num_layers) + 0.5)
    panels = list(figure.subplots(1, len(data.loads), squeeze=False)[0])
    scale = LogNorm(1 / _MAX_OVERLOAD, _MAX_OVERLOAD)
    for axes, load in zip(panels, data.loads, strict=True):
        first = axes is panels[0]
        dress(axes, f"Expert load, {load.name}", "Expert", "Layer" if first else "", grid=None)
        num_experts = max(map(len, load.shares), default=0)
        cells = np.full((len(load.shares), num_experts), math.nan)
        for layer, row in enumerate(load.relative):
            cells[layer, : len(row)] = row
        if np.isnan(cells).any():
            axes.patch.set(hatch="////", edgecolor=FAINT)
        subtitle(axes, ["hatched: not in this size" if np.isnan(cells).any() else "1×: an even share of the tokens"])
        # an expert that is there and got no token is no gap: it takes the coldest colour
        _grid(
            axes,
            np.where(np.isnan(cells), cells, np.clip(cells, 1 / _MAX_OVERLOAD, _MAX_OVERLOAD)),
            LOAD_COLOURS,
            norm=scale,
        )
        _ticks(axes, load.layers, num_experts, most=16 if len(data.loads) == 1 else 8)
    bar = figure.colorbar(ScalarMappable(scale, LOAD_COLOURS), ax=panels, pad=0.02, aspect=26)
    bar.set_label("Load over perfect balance", fontsize=LABEL_PT, color=INK, labelpad=8)
    bar.ax.yaxis.set_major_locator(FixedLocator([1 / 3, 0.5, 1, 2, 3]))
    bar.ax.yaxis.set_minor_locator(NullLocator())
    bar.ax.yaxis.set_minor_formatter(NullFormatter())
    bar.ax.yaxis.set_major_formatter(lambda value, _: {1 / 3: "≤ ⅓", 0.5: "½", 3: "≥ 3×"}.get(value, f"{value:g}×"))
    bar.ax.tick_params(labelsize=TEXT_PT - 0.5, colors=MUTED, length=0)
    bar.outline.set_visible(False)  # type: ignore[operator]
    return figure


def cost_bars(data: ReportData) -> Figure:
    """FLOPs of every stage: this model alone and with its parent, and a family of sizes against training each alone."""
    assert data.ledger is not None or data.family is not None, "no cost was measured"
    bars = [*(_ledger_bars(data.ledger) if data.ledger else []), *(_family_bars(data.family) if data.family else [])]
    figure = blank(10.0, 1.9 + 0.95 * len(bars))
    totals = [sum(flops for _, flops, _ in parts) for _, parts in bars]
    factor, prefix = numbers.scale_of(max(totals))
    axes = dress(
        figure.subplots(), "What it cost, with and without the parent", f"{prefix}FLOPs executed", "", grid="x"
    )
    largest = max(totals) / factor
    for place, ((_, parts), total) in enumerate(zip(bars, totals, strict=True)):
        left = 0.0
        for label, flops, colour in parts:
            width = flops / factor
            axes.barh(place, width, left=left, height=0.56, color=colour, edgecolor="white", linewidth=1.5)
            if width > 0.0145 * largest * len(label):  # room for the text inside
                axes.text(
                    left + width / 2,
                    place,
                    label,
                    ha="center",
                    va="center",
                    color="white",
                    fontsize=TEXT_PT - 0.5,
                    parse_math=False,
                )
            left += width
        axes.text(left + 0.012 * largest, place, numbers.si(total, "FLOPs"), va="center", fontsize=TEXT_PT, color=INK)
    axes.set_yticks(range(len(bars)), [name for name, _ in bars], fontsize=TEXT_PT, color=INK, parse_math=False)
    axes.spines["left"].set_visible(False)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.17 * largest if largest else 1.0)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    return figure


_PARENT, _OWN = "#56616f", (SERIES[1], SERIES[2], SERIES[4], SERIES[3], SERIES[5])
_Bar = tuple[str, list[tuple[str, int, str]]]
"""Name of a bar; label, FLOPs and colour of its parts."""


def _ledger_bars(ledger: Ledger) -> list[_Bar]:
    own = [row for row in ledger.rows if row.role == "own"]
    parents = [(row.receipt.stage, row.receipt.flops, _PARENT) for row in ledger.rows if row.role == "parent"]
    parts = [(row.receipt.stage, row.receipt.flops, _OWN[place % len(_OWN)]) for place, row in enumerate(own)]
    return [("this model alone", parts), *([("with its parent", parents + parts)] if parents else [])]


def _family_bars(family: Family) -> list[_Bar]:
    num = numbers.counted(len(family.rows), "size")
    shades = [SERIES[0], SERIES[4]]
    own = [(row.name, row.own_flops, shades[place % 2]) for place, row in enumerate(family.rows)]
    alone = [(row.name, row.alone.flops, shades[place % 2]) for place, row in enumerate(family.rows)]
    each = "each trained alone" if family.basis == "measured" else "each trained alone\n(computed)"
    return [(f"{num} out of\none parent", [("parent", family.parent_flops, _PARENT), *own]), (f"{num},\n{each}", alone)]


def _grid(axes: Axes, cells: np.ndarray, colours: Colormap, **scale: Any) -> None:
    """Cells of equal size, the first row on top; white gaps between them while they are few enough to be seen."""
    few = max(cells.shape) <= _MAX_CELLS_WITH_EDGES
    axes.pcolormesh(
        np.ma.masked_invalid(cells),
        cmap=colours,
        edgecolors="white" if few else "none",
        linewidth=1.6 if few else 0,
        **scale,
    )
    axes.invert_yaxis()


def _ticks(axes: Axes, layers: Sequence[int], num_experts: int, side: int = 0, most: int = 16) -> None:
    """Numbers of layers and experts; ``side`` columns of the layer itself, and a gap as wide, stand before the experts."""
    rows, experts = _places(len(layers), 16), _places(num_experts, most)
    axes.set_yticks([row + 0.5 for row in rows], [str(layers[row]) for row in rows])
    places = [(side / 2, "layer")] if side else []
    places += [(2 * side + expert + 0.5, str(expert)) for expert in experts]
    axes.set_xticks([place for place, _ in places], [text for _, text in places])


def _places(num: int, most: int) -> Sequence[int]:
    step = next(step for step in (1, 2, 4, 5, 8, 10, 16, 20, 32, 50, 64, 100, 1000) if num <= most * step)
    return range(0, num, step)


def _height(num_layers: int) -> float:
    """Inches: rows of a readable height, within a page."""
    return 2.1 + min(6.5, max(1.6, 0.36 * num_layers))
