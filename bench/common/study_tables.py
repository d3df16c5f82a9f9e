"""The tables of the study of elastic pre-training: every comparison as a difference within each seed that has its arms."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np
from rich.table import Table

from bench.common.measure import half_width, shown_half, shown_mean, table
from bench.common.study_picture import Row
from bench.common.study_runs import NUM_RANDOM
from stretto.base.track import wide_console

SIZES = {"large": (1.0, 2 / 3), "half": (7 / 8, 1 / 2), "corner": (3 / 4, 1 / 3)}
"""Trained sizes: share of the layers; share of the experts and of top-k."""
MAXIMUM = ("elastic", "ernie", "ordinary", "emo")
"""Arms that train the maximum network."""
ONE_SIZE = {"single": "one size a pass", "grown": "smaller sizes more often at first"}
"""Arms that train one size a pass, and their titles."""
EQUAL_TOKENS_AIM, EQUAL_FLOPS_AIM = 0.02, 0.03
"""Largest mean loss of the elastic network's full size minus that of an ordinary network, nats per token."""
ZERO_SHOT_AIM, HEALED_AIM = 0.03, 0.0
"""Largest mean loss of a size, not healed and healed, minus that of its shape trained alone."""
MUTANT_GAP = 0.1
"""Least mean loss of half and of corner minus that of the shape trained alone, where no smaller size is trained."""
RANDOM = f"{NUM_RANDOM} random Subnets"


def print_tables(rows: Sequence[Row]) -> list[str]:
    """Print each comparison over the seeds that have its arms; return the aims that are missed. ``rows``: one a seed."""
    first = next((row["ordinary"] for row in rows if "ordinary" in row), None)
    if first is None:
        return []
    title = f"{first['parameters'] / 1e6:.2f}M parameters, {first['tokens'] / 1e6:.2f}M tokens"
    shown = table(title, "nats, on held-out rows that chose nothing", "mean", "± 95 %", "aim", "seeds")
    compared = _Comparisons(rows, shown, [])
    _compare_full(compared)
    for size in SIZES:
        _compare_size(compared, size)
    _compare_family(compared)
    for each in (shown, _controls_table(rows), _experts_table(rows), _criteria_table(rows)):
        if each.row_count:
            wide_console().print(each)
    return compared.missed


def mutant_misses(mutant: str, rows: Sequence[Row]) -> list[str]:
    """The sizes that a seed lacks with ``mutant``, or that are not so much worse than trained alone as they must be. ``rows``: one a seed."""
    missed = []
    for size in ("half", "corner"):
        values = in_seeds(rows, *minus("elastic", size, f"scratch-{size}"))
        text = f"{size}, zero-shot − scratch, {mutant}"
        if len(values) < len(rows):
            missed.append(f"{text}: done in {len(values)} of {len(rows)} reported seeds")
        if values and fmean(values) <= MUTANT_GAP:
            missed.append(f"{text}: {fmean(values):+.4f}, must be above {MUTANT_GAP:g}")
    return missed


@dataclass(frozen=True, slots=True)
class _Comparisons:
    """A table of means over the seeds that have the arms, and the aims that they miss."""

    rows: Sequence[Row]
    shown: Table
    missed: list[str]

    def add(
        self,
        text: str,
        arms: Sequence[str],
        value: Callable[[Row], float],
        aim: float = math.inf,
        form: str = "{:+.4f}",
    ) -> None:
        """Add the mean of ``value`` over the seeds that have ``arms``, if there is one. ``aim``: largest mean that meets it."""
        values = in_seeds(self.rows, arms, value)
        if not values:
            return
        mean = fmean(values)
        shown_aim = "" if math.isinf(aim) else f"≤ {aim:g}"
        self.shown.add_row(
            text, form.format(mean), shown_half(half_width(values), "{:.4f}"), shown_aim, str(len(values))
        )
        if mean > aim:
            self.missed.append(f"{text}: {form.format(mean)}, aim at most {aim:g}")


def in_seeds(rows: Sequence[Row], arms: Sequence[str], value: Callable[[Row], float]) -> list[float]:
    """``value`` of each seed that has ``arms``."""
    return [value(row) for row in rows if row.keys() >= set(arms)]


def _compare_full(compared: _Comparisons) -> None:
    add = compared.add
    add("loss of ordinary, full", ["ordinary"], lambda row: float(row["ordinary"]["report"]["full"]), form="{:.4f}")
    add("elastic full − ordinary, equal tokens", *minus("elastic", "full", "ordinary"), EQUAL_TOKENS_AIM)
    add("elastic full − ordinary, equal FLOPs", *minus("elastic", "full", "ordinary+"), EQUAL_FLOPS_AIM)
    add("FLOPs of elastic / ordinary", *_cost(["elastic"], "ordinary"), form="{:.3f}")
    for arm, title in ONE_SIZE.items():
        add(f"{title}, full − ordinary, equal tokens", *minus(arm, "full", "ordinary"))
        add(f"{title}, full − ordinary, equal FLOPs", *minus(f"{arm}+", "full", "ordinary+"))
        add(f"FLOPs of {title} / elastic, equal tokens", *_cost([arm], "elastic"), form="{:.3f}")
        add(f"FLOPs of {title} / elastic, equal FLOPs", *_cost([f"{arm}+"], "elastic"), form="{:.3f}")


def _compare_size(compared: _Comparisons, size: str) -> None:
    add, scratch, healed = compared.add, f"scratch-{size}", f"heal-elastic-{size}"
    add(f"{size}, zero-shot − scratch", *minus("elastic", size, scratch), ZERO_SHOT_AIM)
    for arm, title in ONE_SIZE.items():
        add(f"{size}, {title}, equal FLOPs, zero-shot − scratch", *minus(f"{arm}+", size, scratch))
    add(f"{size}, healed − scratch", *minus(healed, "full", scratch), HEALED_AIM)
    add(f"{size}, healed − scratch at equal marginal FLOPs", *minus(healed, "full", f"marginal-{size}"), HEALED_AIM)

    def marginal_share(row: Row) -> float:
        return marginal_flops(row["elastic"], row["ordinary"], row[healed]) / float(row[scratch]["flops"])

    add(
        f"{size}: marginal FLOPs / scratch FLOPs",
        ["elastic", "ordinary", healed, scratch],
        marginal_share,
        form="{:.3f}",
    )


def _compare_family(compared: _Comparisons) -> None:
    """All sizes together, and random Subnets that are none of them."""
    family = ["elastic", *(f"heal-elastic-{size}" for size in SIZES)]
    text = "FLOPs of four healed sizes, parent included / ordinary"
    compared.add(text, *_cost(family, "ordinary"), 1.35, "{:.3f}")
    text = "FLOPs of ordinary and making it elastic / elastic"
    compared.add(text, *_cost(["ordinary", "continued"], "elastic"), form="{:.3f}")
    alone = [*(f"scratch-{size}" for size in SIZES), "ordinary"]
    text = f"{RANDOM} − frontier of scratch networks"
    compared.add(text, ["elastic", *alone], partial(_over_frontier, "elastic", alone), 0.06)
    for arm, title in ONE_SIZE.items():
        compared.add(f"{title}, equal FLOPs: {text}", [f"{arm}+", *alone], partial(_over_frontier, f"{arm}+", alone))
    for arm, equal in (("ernie", "tokens"), ("ernie+", "FLOPs")):
        text = f"random Subnets in which ernie is not worse than ours, equal {equal}"
        compared.add(text, ["elastic", arm], partial(_num_not_worse, arm), NUM_RANDOM - 8, "{:.1f}")


Difference = tuple[Sequence[str], Callable[[Row], float]]
"""Arms, and a difference of their losses in a seed that has them."""


def minus(arm: str, name: str, other: str, other_name: str = "full") -> Difference:
    """Two arms, and the loss of ``name`` in ``arm`` minus that of ``other_name`` in ``other``."""
    return (arm, other), lambda row: float(row[arm]["report"][name] - row[other]["report"][other_name])


def _controls_table(rows: Sequence[Row]) -> Table:
    """Loss of every control minus that of our network of the same size, over the seeds that have both."""
    title = "loss of each control − ours of the same size, nats; above 0: ours is better"
    shown = table(title, "control", "full", *SIZES, RANDOM, "seeds")
    for control, differences in _controls().items():
        found = {size: in_seeds(rows, *difference) for size, difference in differences.items()}
        if any(found.values()):
            cells = [shown_mean(found[size], "+") if found.get(size) else "" for size in ("full", *SIZES, RANDOM)]
            shown.add_row(control, *cells, ", ".join(map(str, sorted({len(each) for each in found.values() if each}))))
    return shown


def _controls() -> dict[str, dict[str, Difference]]:
    """What is compared with ours, by control and size."""
    cut = {
        parent: {size: minus(f"heal-{parent}-{size}", "full", f"heal-elastic-{size}") for size in SIZES}
        for parent in ("ordinary", "emo")
    }
    afterwards = {size: minus("continued", size, "elastic", size) for size in ("full", *SIZES)}
    return {
        "made elastic afterwards, equal FLOPs": afterwards,
        "ordinary; sizes cut, both healed": cut["ordinary"],
        "EMO; sizes cut, both healed": {"full": minus("emo", "full", "elastic"), **cut["emo"]},
    } | {
        f"{title}, equal {equal}": _inside(f"{arm}{plus}")
        for arm, title in {**ONE_SIZE, "ernie": "ERNIE 5.0"}.items()
        for equal, plus in (("tokens", ""), ("FLOPs", "+"))
    }


def _inside(arm: str) -> dict[str, Difference]:
    """Loss of every size inside the network of ``arm`` minus that of the same size inside ours."""

    def random(row: Row) -> float:
        ours, theirs = row["elastic"]["report"], row[arm]["report"]
        return fmean(theirs[name] - ours[name] for name in _randoms(ours))

    return {size: minus(arm, size, "elastic", size) for size in ("full", *SIZES)} | {RANDOM: ((arm, "elastic"), random)}


def _cost(arms: Sequence[str], other: str) -> tuple[Sequence[str], Callable[[Row], float]]:
    """All these arms, and the FLOPs of ``arms`` over those of ``other``."""
    return (*arms, other), lambda row: sum(float(row[arm]["flops"]) for arm in arms) / float(row[other]["flops"])


def _experts_table(rows: Sequence[Row]) -> Table:
    """Losses with fewer experts, minus that of the ordinary network with all, over the seeds that have both networks."""
    found = {arm: [row for row in rows if row.keys() >= {arm, f"experts-{arm}", "ordinary"}] for arm in MAXIMUM}
    names = {name: None for arm, own in found.items() for row in own for name in row[f"experts-{arm}"]["report"]}
    title = "all layers and top-k, fewer experts (kept: the same for all text; pooled: by document): loss − ordinary full, nats"
    shown = table(title, "arm", "all", *names, "seeds")
    for arm, own in found.items():
        gaps = [minus(arm, "full", "ordinary"), *(minus(f"experts-{arm}", name, "ordinary") for name in names)]
        if own:
            shown.add_row(arm, *(f"{fmean(map(gap, own)):+.4f}" for _, gap in gaps), str(len(own)))
    return shown


def _criteria_table(rows: Sequence[Row]) -> Table:
    """Losses of the ordinary network with half of its experts, minus that with those that our criterion keeps."""
    shown = table("ordinary network, half of its experts kept by", "criterion", "loss − ours, nats", "± 95 %", "seeds")
    found = [row["criteria"]["report"] for row in rows if "criteria" in row]
    for criterion in ("reap", "published", "frequency", "random") if found else ():
        names = [name for name in found[0] if name.startswith(criterion)]
        gaps = [fmean(losses[name] for name in names) - losses["ours"] for losses in found]
        shown.add_row(criterion, f"{fmean(gaps):+.4f}", shown_half(half_width(gaps), "{:.4f}"), str(len(gaps)))
    return shown


def marginal_flops(elastic: Mapping[str, Any], ordinary: Mapping[str, Any], healed: Mapping[str, Any]) -> float:
    """FLOPs that a size adds: its part of the passes that the ordinary network does not make, and healing."""
    return float((elastic["flops"] - ordinary["flops"]) / len(SIZES) + healed["flops"])


def _over_frontier(elastic: str, alone: Sequence[str], row: Row) -> float:
    """Mean loss of the random Subnets of the arm ``elastic`` minus those of networks trained ``alone`` with their FLOPs per token,
    interpolated over log FLOPs."""
    points = sorted((math.log(row[arm]["token_flops"]["full"]), row[arm]["report"]["full"]) for arm in alone)
    at, losses = zip(*points, strict=True)
    report, flops = row[elastic]["report"], row[elastic]["token_flops"]
    return fmean(report[name] - float(np.interp(math.log(flops[name]), at, losses)) for name in _randoms(report))


def _num_not_worse(ernie: str, row: Row) -> int:
    """Number of random Subnets in which the arm ``ernie`` has a loss as low as ours or lower."""
    ours, theirs = row["elastic"]["report"], row[ernie]["report"]
    return sum(theirs[name] <= ours[name] for name in _randoms(ours))


def _randoms(report: Mapping[str, float]) -> list[str]:
    """Names of the random Subnets in the losses of a network."""
    return [name for name in report if name.startswith("random-")]
