"""Asynchronous RL at several staleness bounds beside synchronous RL: reward by samples and by wall time, with slow verdicts.

    python -m bench.async_speed OUT [--staleness 0 1 4 16] [--seeds 0 1 2 3] [--rates 3e-4 1e-3 3e-3] [--record FILE] [--picture FILE.png]
    python -m bench.async_speed FILE                  print a record again
    python -m bench.async_speed OUT --median 0        must end in FAILED: without delays there is less to win

Each verdict takes a lognormal time, drawn from the sample's seed, so all bounds have the same delays. A staleness of 0 is the synchronous
control: the same system, whose engine and trainer work in turns, with two threads each. With other bounds both work at once, with one
thread each. No group is dropped, because the synchronous side would then wait a second time. All runs take the same number of samples and
begin with one supervised start (`stretto/recipes/rl_gym.toml`).

The first seed searches the learning rate of every bound; the others are reported, one run at a time. The search of the control needs no
delays, which do not change its rewards. Wall time runs from the first dispatch of a group to the weights of a step. Exit code 1: no bound
reaches ``AIM`` times the control's speed, or one with that speed is not rewarded more than the control at the time at which it ends.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from bench.common.delayed import KIND
from bench.common.measure import finish, refusing, shown_mean, table
from bench.common.pictures import save_picture
from bench.common.rl_curves import START, at_end, best_rate, searched, start_once
from bench.common.study import Results, Run, carry_out, is_record, read_fields, recorded, study_parser, write_record
from stretto.base.config import read_recipe
from stretto.base.paths import RECIPES
from stretto.base.track import wide_console
from stretto.learning.recipe import RlRecipe
from stretto.learning.roles import PoolConfig
from stretto.report import style

RECIPE = RECIPES / "rl_gym.toml"
RATES = (3e-4, 1e-3, 3e-3)
SYNC_THREADS = 2
AIM = 2.5
"""Aim: speed over that of the control."""
SMOOTH = 5
"""Steps over which a reward at some time is averaged."""


@dataclass(frozen=True, slots=True)
class Study:
    """Settings of all runs."""

    bounds: Sequence[int]
    seeds: Sequence[int]
    """The first one searches, the others are reported."""
    rates: Sequence[float]
    """Candidates of the search."""
    steps: int
    median_s: float
    sigma: float
    cut_s: float
    settings: Sequence[str]

    @property
    def identity(self) -> dict[str, Any]:
        """What must be equal in runs of one record."""
        recipe = read_recipe(RECIPE, RlRecipe, self.settings)
        delays = {"median_s": self.median_s, "sigma": self.sigma, "cut_s": self.cut_s}
        search = {"first_seed": self.seeds[0], "rates": self.rates}
        return {**delays, **search, "steps": self.steps, "recipe": recipe}

    def recipe(self, bound: int, rate: float, seed: int) -> RlRecipe:
        """The recipe with delayed verdicts; those of the control's search are at once."""
        recipe = read_recipe(RECIPE, RlRecipe, self.settings)
        median_s = 0.0 if bound == 0 and seed == self.seeds[0] else self.median_s
        delays = {"median_s": median_s, "sigma": self.sigma, "cut_s": self.cut_s}
        sources = {
            name: source.replace(kind=KIND, args={"kind": source.kind, "args": source.args, **delays})
            for name, source in recipe.sources.items()
        }
        threads, never = SYNC_THREADS if bound == 0 else 1, self.steps + 1
        train = recipe.train.replace(
            steps=self.steps, prompts=16, seed=seed, threads=threads, eval_prompts=256, eval_every=never, snapshot_every=never
        )  # fmt: skip
        return recipe.replace(
            sources=sources,
            staleness=bound,
            rollout=recipe.rollout.replace(threads=threads),
            loss=recipe.loss.replace(drop_uniform=False),
            optim=recipe.optim.replace(lr=rate),
            train=train,
            runtime=recipe.runtime.replace(rewards=PoolConfig(min=1, max=1)),
        )

    def runs(self, results: Results, out: Path) -> list[Run]:
        """All runs that ``results`` make possible."""
        start = read_recipe(RECIPE, RlRecipe, self.settings)
        found = [Run(START, partial(start_once, start))]
        curves = Curves(results, self.rates, self.seeds[0])
        for bound in self.bounds:
            best = curves.best_rate(bound)
            found += searched(partial(self.recipe, bound), partial(name, bound), self.rates, self.seeds, best, out)
        return found


@dataclass(frozen=True, slots=True)
class Curves:
    """The finished runs, of which those of the first seed searched the rate."""

    results: Results
    rates: Sequence[float]
    """Candidates of the search."""
    first: int

    def searched(self, bound: int) -> dict[float, Mapping[str, Any]]:
        """The runs of the search by rate."""
        names = {rate: name(bound, rate, self.first) for rate in self.rates}
        return {rate: self.results[run] for rate, run in names.items() if run in self.results}

    def best_rate(self, bound: int) -> float | None:
        """The rate that the search chose; None: not all of its runs are known."""
        return best_rate(self.searched(bound), self.rates)

    def reported(self, bound: int) -> dict[int, Mapping[str, Any]]:
        """The runs at the best rate, by seed, without that of the search."""
        rate = self.best_rate(bound)
        if rate is None:
            return {}
        stem = name(bound, rate, 0)[:-1]
        found = {int(run.removeprefix(stem)): self.results[run] for run in self.results if run.startswith(stem)}
        return {seed: found[seed] for seed in sorted(found) if seed != self.first}


@refusing()
def main() -> None:
    parser = study_parser(__doc__, "curves of the reward")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 4, 16], help="bounds; 0 is the control")
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES), help="learning rates of the search")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--median", type=float, default=0.1, help="median of the verdicts' times, seconds")
    parser.add_argument("--sigma", type=float, default=1.2, help="standard deviation of their logarithm")
    parser.add_argument("--cut", type=float, default=3.0, help="longest time, seconds")
    _study(parser.parse_args())


def _study(options: argparse.Namespace) -> None:
    if is_record(options.out):
        curves = read_curves(options.out)
        bounds = [bound for bound in options.staleness if curves.best_rate(bound) is not None]
    else:
        delays = options.median, options.sigma, options.cut
        study = Study(options.staleness, options.seeds, options.rates, options.steps, *delays, options.settings)
        known = recorded(options.record, study.identity) if options.record else {}
        out, bounds = options.out.resolve(), options.staleness
        results = {**known, **carry_out(partial(study.runs, out=out), out, 1, options.minutes, known)}
        curves = Curves(results, options.rates, options.seeds[0])
        if options.record:
            write_record(options.record, study.identity, results)
    if 0 not in bounds:
        finish(["--staleness: the control, 0, is missing"])
    failures = report(curves, bounds)
    if options.picture:
        draw(curves, bounds, options.picture)
    finish(failures)


def read_curves(record: Path) -> Curves:
    """The runs in a file of --record."""
    found = read_fields(record, ("runs", "rates", "first_seed"))
    return Curves(found["runs"], found["rates"], found["first_seed"])


def name(bound: int, rate: float, seed: int) -> str:
    return f"staleness{bound}-{rate:g}-{seed}"


def reward_at(run: Mapping[str, Any], seconds: float) -> float:
    """Mean reward of the last steps that had ended after ``seconds``; of the first step before any had."""
    done = max(1, sum(each <= seconds for each in run["ended_s"]))
    return fmean(run["rewards"][max(0, done - SMOOTH) : done])


def report(curves: Curves, bounds: Sequence[int]) -> list[str]:
    """Print the tables; returns the aims that are missed, or what is missing."""
    runs = {bound: curves.reported(bound) for bound in bounds}
    seeds = sorted(set.intersection(*(set(each) for each in runs.values())))
    search = table(
        f"search on seed {curves.first}: reward of the last fifth",
        "staleness at most",
        *(f"{rate:g}" for rate in curves.rates),
    )
    for bound in bounds:
        found = curves.searched(bound)
        search.add_row(str(bound), *(f"{at_end(found[rate]):.3f}" if rate in found else "" for rate in curves.rates))
    wide_console().print(search)
    if not seeds:
        return ["no reported seed is complete: run the command again"]
    shown = table(
        f"{len(seeds)} seeds, means ± half of the 95 % interval",
        *("staleness at most", "mean", "rate", "samples/s", "over 0", "trainer waits", "reward of the last fifth"),
        *("held out", "minus 0, equal samples", "minus 0, equal wall time"),
    )
    failures, control = [], runs[0]
    speeds = {}
    for bound in bounds:
        own = [runs[bound][seed] for seed in seeds]
        pairs = [(runs[bound][seed], control[seed]) for seed in seeds]
        rates = [run["samples"] / run["ended_s"][-1] for run in own]
        speeds[bound] = fmean(other["ended_s"][-1] / ours["ended_s"][-1] for ours, other in pairs)
        by_samples = [at_end(ours) - at_end(other) for ours, other in pairs]
        by_time = [
            reward_at(ours, ours["ended_s"][-1]) - reward_at(other, ours["ended_s"][-1]) for ours, other in pairs
        ]
        cells = ("", "") if bound == 0 else (shown_mean(by_samples, "+"), shown_mean(by_time, "+"))
        shown.add_row(
            str(bound),
            f"{fmean(run['staleness_mean'] for run in own):.1f}",
            f"{curves.best_rate(bound):g}",
            f"{fmean(rates):.0f}",
            f"{speeds[bound]:.2f}x",
            f"{fmean(run['waits'] for run in own):.0%}",
            shown_mean([at_end(run) for run in own]),
            shown_mean([run["held_out"] for run in own]),
            *cells,
        )
        if bound and speeds[bound] >= AIM and fmean(by_time) <= 0:
            failures.append(f"staleness {bound}: reward {fmean(by_time):+.3f} beside the control at equal wall time")
    wide_console().print(shown)
    if max(speeds.values()) < AIM:
        failures.append(f"the fastest bound has {max(speeds.values()):.2f} times the control's speed, aim {AIM}")
    return failures


def draw(curves: Curves, bounds: Sequence[int], path: Path) -> None:
    """Reward by samples and by wall time, a curve for each bound, means over the reported seeds."""
    figure = style.blank(12.0, 5.0)
    left, right = figure.subplots(1, 2, sharey=True)
    style.dress(left, "reward by samples", "samples", "mean reward")
    style.dress(right, "reward by wall time", "seconds", "")
    colours = style.colours(map(str, bounds))
    for bound in bounds:
        runs = list(curves.reported(bound).values())
        if not runs:
            continue
        smooth = np.mean([np.convolve(run["rewards"], np.full(SMOOTH, 1 / SMOOTH), "valid") for run in runs], axis=0)
        ended = np.mean([run["ended_s"] for run in runs], axis=0)[SMOOTH - 1 :]
        samples = np.arange(SMOOTH, SMOOTH + len(smooth)) * runs[0]["samples"] / len(runs[0]["rewards"])
        for axes, at in ((left, samples), (right, ended)):
            axes.plot(at, smooth, color=colours[str(bound)], linewidth=2.0, label=f"staleness at most {bound}")
    left.legend(frameon=False, fontsize=style.TEXT_PT)
    save_picture(figure, path)


if __name__ == "__main__":
    main()
