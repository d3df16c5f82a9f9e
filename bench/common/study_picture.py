"""Picture of `bench.study`: the loss of every size over its FLOPs, and its distance to a network of that shape trained alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes

from bench.common.pictures import draw_means, save_picture, sign_differences
from stretto.base.numbers import counted
from stretto.report import style

Row = Mapping[str, Mapping[str, Any]]
"""Results of one seed by arm."""
SERIES = (
    ("elastic, not healed", style.BLUE, "elastic", True),
    ("elastic, healed", style.GREEN, "heal-elastic-{size}", False),
    ("cut from ordinary, healed", style.ORANGE, "heal-ordinary-{size}", False),
    ("cut from EMO, healed", style.PINK, "heal-emo-{size}", False),
)
"""Label, colour, arm of a size, and whether the arm has the losses of all sizes."""


def draw(rows: Sequence[Row], sizes: Sequence[str], path: Path) -> None:
    """Draw means over the seeds that have the arms; intervals are of differences within a seed.

    Args:
        sizes: trained sizes, largest first.
    """
    figure = style.blank(13.0, 5.6)
    left, right = figure.subplots(1, 2)
    _losses_over_flops(left, rows, sizes)
    _distances(right, rows, sizes)
    save_picture(figure, path)


def _losses_over_flops(axes: Axes, rows: Sequence[Row], sizes: Sequence[str]) -> None:
    style.dress(axes, "every size of one training", "forward FLOPs per token", "held-out loss, nats per token")
    alone = {"full": "ordinary"} | {size: f"scratch-{size}" for size in sizes}
    complete = [row for row in rows if {"elastic", *alone.values()} <= row.keys()]
    if not complete:
        return
    style.subtitle(axes, [f"means of {counted(len(complete), 'seed')}"])
    flops = {size: float(complete[0][arm]["token_flops"]["full"]) for size, arm in alone.items()}
    randoms = [name for name in complete[0]["elastic"]["report"] if name.startswith("random-")]
    axes.plot(
        [float(complete[0]["elastic"]["token_flops"][name]) for name in randoms],
        [fmean(row["elastic"]["report"][name] for row in complete) for name in randoms],
        "o", color=style.PALE, markersize=6, label="elastic, sizes never trained for",
    )  # fmt: skip
    losses = [fmean(row[arm]["report"]["full"] for row in complete) for arm in alone.values()]
    axes.plot(list(flops.values()), losses, "o-", color=style.INK, linewidth=2.0, label="each trained alone")
    for label, colour, arm, has_all in SERIES[:2]:
        shown = ["full", *sizes] if has_all else list(sizes)
        found = [row for row in complete if {arm.format(size=size) for size in shown} <= row.keys()]
        if found:
            means = [fmean(_loss(row, arm, size, has_all) for row in found) for size in shown]
            axes.plot([flops[size] for size in shown], means, "o-", color=colour, linewidth=2.0, label=label)
    style.log_ticks(axes, min(flops.values()), max(flops.values()))
    axes.legend(frameon=False, fontsize=style.TEXT_PT)
    names = [style.Label(flops[size], loss, size) for size, loss in zip(flops, losses, strict=True)]
    drawn = [(float(x), float(y), 4.0) for line in axes.lines for x, y in zip(*line.get_data(), strict=True)]
    style.place_labels(axes, names, drawn)


def _distances(axes: Axes, rows: Sequence[Row], sizes: Sequence[str]) -> None:
    """A group for each size: loss of each way to get it, minus that of a network trained alone."""
    style.dress(axes, "distance to training it alone", "", "nats per token", grid="y")
    style.subtitle(axes, ["equal tokens", "mean and 95 % interval over the seeds"])
    axes.axhline(0.0, color=style.INK, linewidth=1.0)
    for place, (label, colour, arm, has_all) in enumerate(SERIES):
        at, gaps = [], []
        for group, size in enumerate(sizes):
            alone = f"scratch-{size}"
            found = [row for row in rows if {arm.format(size=size), alone} <= row.keys()]
            if found:
                at.append(group + 0.16 * (place - 1.5))
                gaps.append([_loss(row, arm, size, has_all) - float(row[alone]["report"]["full"]) for row in found])
        if at:
            draw_means(axes, at, gaps, colour, label, along="y")
    axes.set_xticks(range(len(sizes)), list(sizes))
    sign_differences(axes)
    if axes.containers:
        axes.legend(frameon=False, fontsize=style.TEXT_PT)


def _loss(row: Row, arm: str, size: str, has_all: bool) -> float:
    return float(row[arm.format(size=size)]["report"][size if has_all else "full"])
