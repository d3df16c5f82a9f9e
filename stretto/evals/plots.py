"""Pictures of losses: against compute and over training. A record in, a Figure out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from stretto.evals import numbers
from stretto.evals.canvas import (
    MUTED,
    Label,
    blank,
    colours,
    dress,
    end_labels,
    log_ticks,
    place_labels,
    si_ticks,
    subtitle,
)
from stretto.evals.report_data import Curve, ReportData

_EDGE_SHARE = 0.15
"""Start of a run that may lie above the frame: the fall from the loss of an untrained network would flatten the rest."""


def loss_against_compute(data: ReportData) -> Figure:
    """Held-out loss of every size over its forward FLOPs a token; healed sizes and controls beside."""
    shown = [size for size in data.sizes if size.nll is not None or size.healed_nll is not None]
    assert shown, "no size has a loss"
    figure = blank(10.0, 6.0)
    axes = dress(
        figure.subplots(),
        "Held-out loss against compute",
        "Forward compute, FLOPs per token (log scale)",
        "Held-out loss, nats per token",
    )
    colour = colours(size.name for size in data.sizes)
    flops = [size.flops_per_token for size in shown] + [control.flops_per_token for control in data.controls]
    log_ticks(axes, min(flops), max(flops))
    labels: list[Label] = []
    marks: list[tuple[float, float, float]] = []
    for size in shown:
        x, own = size.flops_per_token, colour[size.name]
        if size.nll is not None and size.healed_nll is not None:
            axes.plot([x, x], [size.nll, size.healed_nll], color=own, linewidth=1.6, alpha=0.55, zorder=3)
            marks += [(x, y, 4.0) for y in np.linspace(size.nll, size.healed_nll, 12)]
        if size.nll is not None:
            axes.plot(x, size.nll, "o", color=own, markersize=12, markeredgecolor="white", zorder=4)
            labels.append(Label(x, size.nll, f"{size.name}  {numbers.loss(size.nll)}", own, bold=True))
            marks.append((x, size.nll, 6.0))
        if size.healed_nll is not None:
            axes.plot(x, size.healed_nll, "D", color=own, markersize=10, markeredgecolor="white", zorder=4)
            name = "healed" if size.nll is not None else f"{size.name}, healed"
            labels.append(Label(x, size.healed_nll, f"{name}  {numbers.loss(size.healed_nll)}", own))
            marks.append((x, size.healed_nll, 6.0))
    for control in data.controls:
        x, own = control.flops_per_token, colour.get(control.name, MUTED)
        axes.plot(x, control.nll, "X", color="white", markeredgecolor=own, markeredgewidth=1.8, markersize=12, zorder=4)
        labels.append(Label(x, control.nll, f"{control.name} from scratch  {numbers.loss(control.nll)}", own))
        marks.append((x, control.nll, 6.0))
    axes.margins(y=0.16)
    axes.autoscale_view(scalex=False)
    kinds = {
        "circle: zero-shot, inside the elastic network": any(size.nll is not None for size in shown),
        "diamond: healed": any(size.healed_nll is not None for size in shown),
        "cross: trained from scratch": bool(data.controls),
    }
    subtitle(axes, [kind for kind, is_shown in kinds.items() if is_shown])
    place_labels(axes, labels, marks)
    return figure


def training_curves(data: ReportData) -> Figure:
    """Held-out loss of the full network and every anchor over pre-training; of every healed size in a panel beside."""
    curves = [curve for curve in (data.pretraining, *data.healing) if curve is not None and curve.held_out()]
    assert curves, "no held-out loss was logged"
    colour = colours([*(size.name for size in data.sizes), *(name for curve in curves for name in curve.held_out())])
    figure = blank(10.0, 5.8)
    healing = [curve for curve in data.healing if curve.held_out()]
    pretraining = data.pretraining if data.pretraining in curves else None
    panels = (pretraining is not None) + bool(healing)
    widths = [1.55, 1.0] if panels == 2 else [1.0]
    places = list(figure.subplots(1, panels, width_ratios=widths, squeeze=False)[0])
    if pretraining is not None:
        axes = places.pop(0)
        dress(axes, "Pre-training", _x_name(pretraining), "Held-out loss, nats per token")
        clipped = _draw(
            axes, [(name, pretraining, f"loss/{name}") for name in pretraining.held_out()], colour, _EDGE_SHARE
        )
        subtitle(axes, ["sizes inside the elastic network", *(["starts above the frame"] if clipped else [])])
    if healing:
        axes = places.pop(0)
        dress(axes, "Healing", _x_name(healing[0]), "" if pretraining else "Held-out loss, nats per token")
        _draw(axes, [(curve.name, curve, "loss/full") for curve in healing], colour, edge=0.0)
        subtitle(axes, ["extracted sizes, trained by themselves"])
    return figure


def _x_name(curve: Curve) -> str:
    return "Steps" if curve.tokens_per_step is None else "Training tokens"


def _draw(axes: Axes, lines: Sequence[tuple[str, Curve, str]], colour: dict[str, str], edge: float) -> bool:
    """Curves with their names at the ends; True if values before the share ``edge`` of a curve lie above the frame."""
    labels, tops, lows, highest = [], [], [], 0.0
    for name, curve, metric in lines:
        x, y = curve.series(metric)
        if not x:
            continue
        marker = "o" if len(x) <= 40 else ""
        axes.plot(x, y, color=colour.get(name, MUTED), linewidth=2.2, marker=marker, markersize=4.5, zorder=3)
        labels.append(Label(x[-1], y[-1], f"{name}  {numbers.loss(y[-1])}", colour.get(name, MUTED), name == "full"))
        settled = [value for at, value in zip(x, y, strict=True) if at >= x[0] + edge * (x[-1] - x[0])]
        tops.append(max(settled))
        lows.append(min(y))
        highest = max(highest, *y)
    top, low = max(tops), min(lows)
    room = max(top - low, 1e-3)
    axes.set_ylim(low - 0.08 * room, top + 0.08 * room)
    axes.margins(x=0.02)
    si_ticks(axes.xaxis)
    end_labels(axes, labels)
    return highest > axes.get_ylim()[1]
