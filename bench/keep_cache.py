"""Asynchronous RL that keeps the keys and values of older weights beside RL that computes them again: reward and speed.

    python -m bench.keep_cache OUT [--rates 3e-4 1e-3 3e-3] [--seeds 0 1 2 3] [--record FILE]
    python -m bench.keep_cache FILE                   print a record again
    python -m bench.keep_cache OUT --staleness 0      no sample is in flight when weights change: the speed differs by noise alone

The recipe is that of 128-token answers (`bench/rl_trl_long.toml`), in which most samples see new weights before they end. The arms
differ in ``rollout.keep_cache`` alone: "again" computes keys and values again when weights are loaded, "kept" keeps them. The first
seed searches the learning rate of each arm; the others are reported, one run at a time. Exit code 1: "kept" is not faster, or the
interval of its reward minus that of "again", at equal samples, is below 0.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.common.measure import NO_INTERVAL, finish, half_width, refusing, shown_mean, table
from bench.common.rl_curves import START, at_end, best_rate, searched, start_once
from bench.common.study import Results, Run, carry_out, is_record, read_fields, recorded, study_parser, write_record
from stretto.base.config import read_recipe
from stretto.base.track import wide_console
from stretto.learning.recipe import RlRecipe

RECIPE = Path(__file__).with_name("rl_trl_long.toml")
ARMS = {"again": False, "kept": True}


@dataclass(frozen=True, slots=True)
class Study:
    """Settings of all runs."""

    rates: Sequence[float]
    seeds: Sequence[int]
    """The first one searches, the others are reported."""
    steps: int
    staleness: int
    settings: Sequence[str]

    @property
    def identity(self) -> dict[str, Any]:
        """What must be equal in runs of one record."""
        recipe = read_recipe(RECIPE, RlRecipe, self.settings)
        return {"staleness": self.staleness, "steps": self.steps, "first_seed": self.seeds[0], "recipe": recipe}

    def recipe(self, arm: str, rate: float, seed: int) -> RlRecipe:
        recipe, never = read_recipe(RECIPE, RlRecipe, self.settings), self.steps + 1
        train = recipe.train.replace(
            steps=self.steps, seed=seed, eval_prompts=64, eval_every=never, snapshot_every=never
        )
        return recipe.replace(
            staleness=self.staleness,
            rollout=recipe.rollout.replace(keep_cache=ARMS[arm]),
            optim=recipe.optim.replace(lr=rate),
            train=train,
        )

    def runs(self, results: Results, out: Path) -> list[Run]:
        """All runs that ``results`` make possible."""
        found = [Run(START, partial(start_once, read_recipe(RECIPE, RlRecipe, self.settings)))]
        for arm in ARMS:
            best = best_rate(of_seed(results, arm, self.seeds[0]), self.rates)
            found += searched(partial(self.recipe, arm), partial(name, arm), self.rates, self.seeds, best, out)
        return found


@refusing()
def main() -> None:
    parser = study_parser(__doc__)
    parser.add_argument("--rates", type=float, nargs="+", default=[3e-4, 1e-3, 3e-3], help="rates of the search")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--staleness", type=int, default=4)
    _study(parser.parse_args())


def _study(options: argparse.Namespace) -> None:
    if is_record(options.out):
        record = read_fields(options.out, ("runs", "first_seed"))
        finish(report(record["runs"], record["first_seed"]))
        return
    study = Study(options.rates, options.seeds, options.steps, options.staleness, options.settings)
    known = recorded(options.record, study.identity) if options.record else {}
    out = options.out.resolve()
    results = {**known, **carry_out(partial(study.runs, out=out), out, 1, options.minutes, known)}
    if options.record:
        write_record(options.record, study.identity, results)
    finish(report(results, study.seeds[0]))


def name(arm: str, rate: float, seed: int) -> str:
    return f"{arm}-{rate:g}-{seed}"


def of_seed(results: Results, arm: str, seed: int) -> dict[float, dict[str, Any]]:
    """The runs of ``arm`` with ``seed``, by learning rate."""
    start, end = f"{arm}-", f"-{seed}"
    names = [run for run in results if run.startswith(start) and run.endswith(end)]
    return {float(run.removeprefix(start).removesuffix(end)): results[run] for run in names}


def report(results: Results, first: int) -> list[str]:
    """Print the tables; returns the aims that are missed, or what is missing."""
    rates = sorted({rate for arm in ARMS for rate in of_seed(results, arm, first)})
    search = table(f"search on seed {first}: reward of the last fifth", "keys", *(f"{rate:g}" for rate in rates))
    for arm in ARMS:
        found = of_seed(results, arm, first)
        search.add_row(arm, *(f"{at_end(found[rate]):.3f}" if rate in found else "" for rate in rates))
    wide_console().print(search)
    best = {arm: best_rate(of_seed(results, arm, first), rates) for arm in ARMS}
    others = sorted({int(run.rsplit("-", 1)[1]) for run in results if run != START} - {first})
    seeds = [seed for seed in others if all(best[arm] in of_seed(results, arm, seed) for arm in ARMS)]
    if not seeds:
        return ["no reported seed is complete: run the command again"]
    runs = {arm: [results[name(arm, rate, seed)] for seed in seeds] for arm, rate in best.items() if rate is not None}
    shown = table(
        f"{len(seeds)} seeds, means ± half of the 95 % interval",
        *("keys", "rate", "samples/s", "staleness", "reward of the last fifth", "held out"),
    )
    for arm, own in runs.items():
        speeds = [run["samples"] / run["ended_s"][-1] for run in own]
        staleness = fmean(run["staleness_mean"] for run in own)
        rewards, held_out = ([at_end(run) for run in own], [run["held_out"] for run in own])
        shown.add_row(
            arm, f"{best[arm]:g}", f"{fmean(speeds):.0f}", f"{staleness:.1f}", *map(shown_mean, (rewards, held_out))
        )
    wide_console().print(shown)
    speed = fmean(
        again["ended_s"][-1] / kept["ended_s"][-1] for again, kept in zip(runs["again"], runs["kept"], strict=True)
    )
    differences = [at_end(kept) - at_end(again) for again, kept in zip(runs["again"], runs["kept"], strict=True)]
    print(f"kept over again: {speed:.2f}x the speed; reward {shown_mean(differences, '+')} at equal samples")
    failures = [] if speed > 1 else [f"kept has {speed:.2f} times the speed of again"]
    if len(seeds) < 2:
        failures.append(NO_INTERVAL)
    elif fmean(differences) + half_width(differences) < 0:
        failures.append(f"kept has {shown_mean(differences, '+')} of the reward of again")
    return failures


if __name__ == "__main__":
    main()
