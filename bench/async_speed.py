"""Asynchronous against synchronous training of one recipe, to the same number of samples, with slow verifiers.

    python -m bench.async_speed [--model CHECKPOINT] [--steps N] [--seeds N] [--out FOLDER]

Each verdict takes a lognormal time, drawn from the sample's seed, so both sides have the same delays. The verifier waits and does
not compute; no answer waits for the verdict of another. The synchronous side is the same system at a staleness of 0: its engine and
its trainer work in turns, with both cores each. On the asynchronous side both work at once, with one core each. No group is
dropped, because the synchronous side would then wait a second time.

Wall time runs from the first dispatch of a group to the weights of the last step, including the evaluation of the start. The rewards
of the synchronous side do not depend on delays, so all its seeds but the first run without delays.

Choose the staleness bound by the longest delay: bound x time of a step should not be below it. The mean staleness depends on the
number of groups in flight, which need only keep the trainer busy while typical verdicts arrive, and on the window.
"""

from __future__ import annotations

import argparse
import math
import random
import shutil
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from pydantic import Field

from bench.common.measure import bench_parser, table, wide_console
from stretto.api.rl import made_start
from stretto.base.config import Config, read_recipe, validate
from stretto.base.paths import RECIPES, checkpoint_folder
from stretto.base.track import progress, read_metrics
from stretto.flow.launch import Job
from stretto.flow.log import read_spans
from stretto.flow.run import run_rl
from stretto.learning.recipe import SUPERVISED, PoolConfig, RlRecipe
from stretto.sandbox.isolate import Sandbox
from stretto.tasks.registry import source_kind
from stretto.tasks.task import Answer, Problem, Score, TaskSource

AIM, AIM_WAIT = 2.5, 0.10


class DelayedArgs(Config):
    """Arguments of `Delayed`."""

    kind: str
    """Kind of the task set that makes the problems and the verdicts."""
    args: dict[str, Any] = Field(default_factory=dict)
    median_s: float = Field(ge=0)
    """Median of the lognormal delay."""
    sigma: float = Field(ge=0)
    """Standard deviation of its logarithm."""
    cut_s: float = Field(gt=0)
    """Longest delay."""


class Delayed(TaskSource):
    """A task set with delayed verdicts. The delay is a function of the sample's seed. Held-out answers have no delay."""

    args_kind = DelayedArgs
    at_once = 512

    def __init__(self, name: str, args: DelayedArgs, sandbox: Sandbox | None = None) -> None:
        super().__init__(name, args, sandbox)
        kind = source_kind(name, args.kind)
        self._inner = kind(name, validate(kind.args_kind, args.args, f"sources.{name}.args.args"), sandbox)
        self._args = args
        self._lock = threading.Lock()

    @property
    def num_items(self) -> int | None:
        return self._inner.num_items

    def problem(self, item: int) -> Problem:
        with self._lock:
            return self._inner.problem(item)

    def score(self, problem: Problem, answer: Answer) -> Score:
        args = self._args
        if answer.seed is not None and problem.item < SUPERVISED and args.median_s > 0:
            delay_s = random.Random(answer.seed).lognormvariate(math.log(args.median_s), args.sigma)
            time.sleep(min(args.cut_s, delay_s))
        with self._lock:
            return self._inner.score(problem, answer)


@dataclass(frozen=True, slots=True)
class Side:
    """Settings of one run."""

    name: str
    staleness: int
    window: int | None
    steps: int
    median_s: float
    cut_s: float
    seed: int = 0
    threads: int = 1
    """Threads of the engine, and of the trainer."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Measurements of one run. Written by `run_side`."""

    wall_s: float
    step_s: float
    """Mean time of a training step and of the publication of its weights."""
    wait_share: float
    """Share of the wall time in which the trainer waited, including the evaluation before its first step."""
    staleness_mean: float
    staleness_max: float
    first_held_out: float
    last_held_out: float
    rewards: tuple[float, ...]
    """Mean reward of each step's samples."""


def recipe_of(options: argparse.Namespace, side: Side) -> RlRecipe:
    """The recipe with delayed sources and the settings of ``side``."""
    recipe = read_recipe(options.recipe, RlRecipe)
    delays = {"median_s": side.median_s, "sigma": options.sigma, "cut_s": side.cut_s}
    sources = {
        name: source.replace(
            kind="bench.async_speed:Delayed", args={"kind": source.kind, "args": source.args, **delays}
        )
        for name, source in recipe.sources.items()
    }
    train = recipe.train.replace(
        steps=side.steps,
        prompts=options.prompts,
        seed=side.seed,
        threads=side.threads,
        eval_prompts=options.eval_prompts,
        eval_every=side.steps + 1,
        snapshot_every=side.steps + 1,
    )
    return recipe.replace(
        sources=sources,
        staleness=side.staleness,
        window=side.window,
        rollout=recipe.rollout.replace(group=options.group, threads=side.threads),
        loss=recipe.loss.replace(drop_uniform=False),
        optim=recipe.optim.replace(lr=options.lr),
        train=train,
        runtime=recipe.runtime.replace(isolate=options.isolate, rewards=PoolConfig(min=1, max=1)),
    )


def run_side(options: argparse.Namespace, side: Side, start: Path) -> Outcome:
    recipe, folder = recipe_of(options, side), options.out / side.name
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier bench
    with progress(side.name, recipe.train.steps) as advance:
        result = run_rl(Job(recipe, folder, start), advance, lambda text: None)
    rows = [row for row in read_metrics(folder) if "reward/mean" in row]
    spans = read_spans(folder)
    first_s = min(span.started_s for span in spans if (span.role, span.name) == ("agents", "group"))
    trainer = [span for span in spans if span.role == "trainer"]
    steps = [span for span in trainer if span.name in ("step", "publish") and span.started_s >= first_s]
    wall_s = max(span.finished_s for span in steps) - first_s
    waits = [span for span in trainer if span.name == "wait"]
    return Outcome(
        wall_s=wall_s,
        step_s=sum(span.seconds for span in steps) / len(rows),
        wait_share=(waits[0].started_s - first_s + sum(span.seconds for span in waits)) / wall_s,
        staleness_mean=fmean(row["staleness/mean"] for row in rows),
        staleness_max=max(row["staleness/max"] for row in rows),
        first_held_out=result.first_reward,
        last_held_out=result.last_reward,
        rewards=tuple(row["reward/mean"] for row in rows),
    )


def compare(options: argparse.Namespace, start: Path) -> None:
    """Run both sides with every seed, and print speed and rewards."""
    # the window that leaves ``alive`` batches in flight beside the bound (`stretto.flow.controller`)
    window = (options.staleness + 1 - options.alive) * options.prompts + 1
    delayed = Side("asynchronous", options.staleness, window, options.steps, options.median, options.cut)
    sides = (replace(delayed, name="synchronous", staleness=0, window=None, threads=options.sync_threads), delayed)
    outcomes: dict[str, list[Outcome]] = {side.name: [] for side in sides}
    for seed in range(options.seeds):
        for side in sides:
            median_s = 0.0 if seed and side.staleness == 0 else side.median_s
            named = replace(side, name=f"{side.name}-{seed}", seed=seed, median_s=median_s)
            outcomes[side.name].append(run_side(options, named, start))
    times = table(
        f"{options.steps} steps of {options.prompts} prompts x {options.group} samples; verdicts after a lognormal time, "
        f"median {options.median:g} s, sigma {options.sigma:g}, at most {options.cut:g} s",
        *("seed 0", "wall s", "s per step", "trainer s per step", "trainer waits"),
        *("staleness mean", "max", "samples/s"),
    )
    rewards = table(f"reward, {options.seeds} seeds", "", "first half", "second half", "held out before", "after")
    for name, runs in outcomes.items():
        run, half = runs[0], options.steps // 2
        times.add_row(
            name,
            f"{run.wall_s:.1f}",
            f"{run.wall_s / options.steps:.2f}",
            f"{run.step_s:.2f}",
            f"{run.wait_share:.1%}",
            f"{run.staleness_mean:.2f}",
            f"{run.staleness_max:.0f}",
            f"{options.steps * options.prompts * options.group / run.wall_s:.1f}",
        )
        columns = zip(
            *((fmean(r.rewards[:half]), fmean(r.rewards[half:]), r.first_held_out, r.last_held_out) for r in runs),
            strict=True,
        )
        spreads = (f"{fmean(each):.3f}" + (f" ± {stdev(each):.3f}" if len(each) > 1 else "") for each in columns)
        rewards.add_row(name, *spreads)
    console = wide_console()
    console.print(times)
    console.print(rewards)
    synchronous, asynchronous = (runs[0] for runs in outcomes.values())
    console.print(
        f"asynchronous over synchronous: {synchronous.wall_s / asynchronous.wall_s:.2f}x (aim {AIM}x), "
        f"trainer waits {asynchronous.wait_share:.1%} (aim {AIM_WAIT:.0%}); aim for the rewards: no loss"
    )


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--recipe", type=Path, default=RECIPES / "rl_gym.toml")
    parser.add_argument(
        "--model", type=Path, help="checkpoint to start from; default: the recipe's own start is trained"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/async_speed"))
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--staleness", type=int, default=16, help="staleness bound of the asynchronous side")
    parser.add_argument("--alive", type=int, default=6, help="batches in flight on the asynchronous side")
    parser.add_argument(
        "--isolate", choices=("none", "torch", "all"), default="torch", help="runtime.isolate of both sides"
    )
    parser.add_argument(
        "--sync-threads", type=int, default=2, help="threads of the synchronous side's engine and trainer"
    )
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--eval-prompts", type=int, default=128)
    parser.add_argument("--median", type=float, default=0.15, help="median delay in seconds")
    parser.add_argument("--sigma", type=float, default=1.2, help="standard deviation of the delay's logarithm")
    parser.add_argument("--cut", type=float, default=5.0, help="longest delay in seconds")
    options = parser.parse_args()
    if options.model is not None:
        start = checkpoint_folder(options.model)
    else:
        start = made_start(read_recipe(options.recipe, RlRecipe), options.out)
    compare(options, start)


if __name__ == "__main__":
    main()
