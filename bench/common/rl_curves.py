"""What studies of RL share: the supervised start of all runs, a run with its rewards and times, and the reward at the end of its curve."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.common.study import Run
from stretto.api.rl import made_start
from stretto.base.paths import CHECKPOINT
from stretto.base.track import read_metrics
from stretto.flow.launch import Job
from stretto.flow.log import read_spans
from stretto.flow.run import run_rl
from stretto.learning.recipe import RlRecipe

FIFTH = 5
START = "start"
"""Name of the run that trains the start."""


def start_once(recipe: RlRecipe, folder: Path) -> dict[str, Any]:
    """Work of a run that trains the recipe's start, on a CPU, into ``folder``; returns no results."""
    start = made_start(recipe, folder / "made", device="cpu")
    (folder / CHECKPOINT).symlink_to(start, target_is_directory=True)
    return {}


def run_once(recipe: RlRecipe, start: Path, folder: Path) -> dict[str, Any]:
    """Work of a run of RL from the checkpoint ``start``: rewards of the steps, and when each ended after the first dispatch of a group."""
    result = run_rl(Job(recipe, folder / "run", start), lambda *_: None, lambda text: None)
    rows = [row for row in read_metrics(folder / "run") if "reward/mean" in row]
    spans = read_spans(folder / "run")
    first_s = min(span.started_s for span in spans if (span.role, span.name) == ("agents", "group"))
    trainer = [span for span in spans if span.role == "trainer" and span.started_s >= first_s]
    published = sorted(span.finished_s - first_s for span in trainer if span.name == "publish")
    waits = [span for span in trainer if span.name == "wait"]
    return {
        "rewards": [round(row["reward/mean"], 4) for row in rows],
        "ended_s": [round(each, 2) for each in published[-len(rows) :]],
        "samples": recipe.train.prompts * recipe.rollout.group * len(rows),
        "waits": sum(span.seconds for span in waits) / published[-1],
        "staleness_mean": fmean(row["staleness/mean"] for row in rows),
        "staleness_max": max(row["staleness/max"] for row in rows),
        "held_out": result.last_reward,
    }


def searched(
    recipe: Callable[[float, int], RlRecipe],
    name: Callable[[float, int], str],
    rates: Sequence[float],
    seeds: Sequence[int],
    best: float | None,
    out: Path,
) -> list[Run]:
    """Runs of one arm, from the start of the study in ``out``: the first seed at every rate, the others at the ``best`` one, if it is known.

    ``recipe`` and ``name`` take the rate and the seed."""
    wanted = [(rate, seeds[0]) for rate in rates]
    wanted += [(best, seed) for seed in seeds[1:] if best is not None]
    start = out / START / CHECKPOINT
    return [
        Run(name(rate, seed), partial(run_once, recipe(rate, seed), start), needs=(START,)) for rate, seed in wanted
    ]


def best_rate(runs: Mapping[float, Mapping[str, Any]], rates: Sequence[float]) -> float | None:
    """The one of ``rates`` whose run has the highest reward at the end; None: not all of them have a run.

    Args:
        runs: those of the search by rate.
    """
    last = {rate: at_end(runs[rate]) for rate in rates if rate in runs}
    return max(last, key=lambda rate: last[rate]) if last and len(last) == len(rates) else None


def fifth(run: Mapping[str, Any]) -> int:
    """Number of steps of a fifth of a run."""
    return max(1, len(run["rewards"]) // FIFTH)


def at_end(run: Mapping[str, Any]) -> float:
    """Mean reward of the last fifth."""
    return fmean(run["rewards"][-fifth(run) :])
