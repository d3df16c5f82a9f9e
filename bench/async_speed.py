"""Asynchronous over synchronous training of one recipe, to equal trained samples, with verifiers that take their time.

    python -m bench.async_speed [--model CHECKPOINT] [--steps N] [--seeds N] [--out FOLDER]
    python -m bench.async_speed --grid 1 4 16 [--bounds 0 1 2 4 8 16] [--model CHECKPOINT] [--steps N] [--out FOLDER]

A verdict takes a lognormal time, drawn from the sample's seed: both sides meet the same delays. They are waits, so one
process holds them all, and no answer waits for another's verdict. The synchronous side is the same system at a staleness
of 0: a batch of prompts goes out, all their verdicts are awaited, a step is taken. Its engine and trainer take turns, so
each has both cores; on the asynchronous side both work at once and have one each. No group is dropped and none drawn
instead, which would have the synchronous side wait twice.

Wall time runs from the first prompt's way out, while the start is evaluated, to the last step's weights. What the
synchronous side learns does not depend on delays, so its other seeds run without them, for the rewards alone.

The bound is chosen against the tail: a group may be as late as the longest delay, so the bound times a step should be no
less. How old samples are on average is another matter: it goes by the groups under way, which need to be no more than
keep the trainer busy while typical verdicts come in, and by the window for those that do not.

``--grid`` measures that: for each longest delay, in steps of the trainer, and each bound, the recipe's own among them, with
the window that a recipe gets by default and a thread each for engine and trainer. There ``--steps`` are counted once all
groups that were handed out at first, which are on their way together, have been trained.
"""

from __future__ import annotations

import argparse
import copy
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from bench.common.measure import table, wide_console
from stretto.api.rl import made_start
from stretto.base.config import read_recipe
from stretto.base.paths import checkpoint_folder
from stretto.base.track import progress, read_metrics
from stretto.flow.launch import Job
from stretto.flow.log import read_spans
from stretto.flow.run import run_rl
from stretto.learning.recipe import PoolConfig, RlRecipe

DELAYED = "bench.common.delayed:Delayed"
AIM, AIM_WAIT = 2.5, 0.10
WARM_UP = 4
"""Steps that do not count in the grid, and as many more as the bound."""
MEDIAN_SHARE = 0.05
"""Of the longest delay in the grid: the median one."""


@dataclass(frozen=True, slots=True)
class Side:
    """One run."""

    name: str
    seed: int
    is_delayed: bool
    staleness: int
    window: int | None
    threads: int
    """Of engine and trainer each."""
    isolate: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run came to."""

    wall_s: float
    step_s: float
    """Mean time of a trainer's step, and of what weights hold it up by."""
    steady_s: float
    """From one step to the next, without those that do not count."""
    wait_share: float
    """Of the wall time, in which the trainer had nothing to do; the evaluation before its first step is in both."""
    num_samples: int
    staleness_mean: float
    staleness_max: float
    first_held_out: float
    last_held_out: float
    rewards: tuple[float, ...]
    """By step: under the weights that sampled."""

    @property
    def late_reward(self) -> float:
        return fmean(self.rewards[len(self.rewards) // 2 :])


def recipe_of(options: argparse.Namespace, side: Side) -> RlRecipe:
    """The recipe with its sources behind delays."""
    recipe = read_recipe(options.recipe, RlRecipe)
    delays = {"median_s": options.median if side.is_delayed else 0.0, "sigma": options.sigma, "cut_s": options.cut}
    sources = {
        name: source.model_copy(update={"kind": DELAYED, "args": {"kind": source.kind, "args": source.args, **delays}})
        for name, source in recipe.sources.items()
    }
    one_worker = PoolConfig(min=1, max=1)
    train = {
        "steps": options.steps,
        "prompts": options.prompts,
        "seed": side.seed,
        "threads": side.threads,
        "eval_prompts": options.eval_prompts,
        "eval_every": options.steps + 1,
        "snapshot_every": options.steps + 1,
    }
    return recipe.model_copy(
        update={
            "sources": sources,
            "staleness": side.staleness,
            "window": side.window,
            "rollout": recipe.rollout.model_copy(update={"group": options.group, "threads": side.threads}),
            "loss": recipe.loss.model_copy(update={"drop_uniform": False}),
            "optim": recipe.optim.model_copy(update={"lr": options.lr}),
            "train": recipe.train.model_copy(update=train),
            "runtime": recipe.runtime.model_copy(update={"isolate": side.isolate, "rewards": one_worker}),
        }
    )


def play(options: argparse.Namespace, side: Side, start: Path) -> Outcome:
    recipe, folder = recipe_of(options, side), options.out / side.name
    shutil.rmtree(folder, ignore_errors=True)  # an earlier bench's
    with progress(side.name, recipe.train.steps) as advance:
        result = run_rl(Job(recipe, folder, start), advance, lambda text: None)
    rows = [row for row in read_metrics(folder) if "reward/mean" in row]
    spans = read_spans(folder)
    first_s = min(span.started_s for span in spans if (span.role, span.name) == ("agents", "group"))
    trainer = [span for span in spans if span.role == "trainer"]
    steps = [span for span in trainer if span.name in ("step", "publish") and span.started_s >= first_s]
    wall_s = max(span.finished_s for span in steps) - first_s
    waits = [span for span in trainer if span.name == "wait"]
    ends = [span.finished_s for span in steps if span.name == "step"]
    num_early = min(WARM_UP + side.staleness, len(ends) - 1)
    idle_s = waits[0].started_s - first_s + sum(span.seconds for span in waits)
    return Outcome(
        wall_s=wall_s,
        step_s=sum(span.seconds for span in steps) / len(rows),
        steady_s=(ends[-1] - ends[num_early - 1]) / (len(ends) - num_early),
        wait_share=idle_s / wall_s,
        num_samples=len(rows) * options.prompts * options.group,
        staleness_mean=fmean(row["staleness/mean"] for row in rows),
        staleness_max=max(row["staleness/max"] for row in rows),
        first_held_out=result.first_reward,
        last_held_out=result.last_reward,
        rewards=tuple(row["reward/mean"] for row in rows),
    )


def sides(options: argparse.Namespace) -> list[Side]:
    """The window is what the bound leaves beside the groups that are to be under way (`stretto.flow.controller`)."""
    window = (options.staleness + 1 - options.alive) * options.prompts + 1
    found = []
    for seed in range(options.seeds):
        found.append(Side(f"asynchronous-{seed}", seed, True, options.staleness, window, 1, options.isolate))
        found.append(Side(f"synchronous-{seed}", seed, seed == 0, 0, None, options.sync_threads, options.isolate))
    return found


def grid(options: argparse.Namespace, start: Path) -> None:
    """Print a table of all tails and bounds."""
    own = read_recipe(options.recipe, RlRecipe).staleness
    bounds = sorted({own, *options.bounds})
    plain = play(options, Side("grid-step", 0, False, own, None, 1, options.isolate), start)

    def ran(tail: float, bound: int) -> Outcome:
        told = copy.copy(options)
        told.cut = tail * plain.step_s
        told.median = MEDIAN_SHARE * told.cut
        told.steps = options.steps + WARM_UP + bound
        return play(told, Side(f"grid-{tail:g}-{bound}", 0, True, bound, None, 1, options.isolate), start)

    shown = table(
        f"steps a second over those of η = 0 (trainer waits, mean staleness); {options.steps} steps of {options.prompts} "
        f"prompts x {options.group} samples; a step of the trainer {plain.step_s:.2f} s; recipe's own η in brackets",
        *("longest delay, steps", *(f"[η {bound}]" if bound == own else f"η {bound}" for bound in bounds)),
    )
    for tail in options.grid:
        found = {bound: ran(tail, bound) for bound in bounds}
        shown.add_row(f"{tail:g}", *_cells(found, found[min(found)].steady_s))
    wide_console().print(shown)


def _cells(found: Mapping[int, Outcome], slowest_s: float) -> list[str]:
    return [
        f"{slowest_s / each.steady_s:.2f}x ({each.wait_share:.0%}, {each.staleness_mean:.1f})"
        for each in found.values()
    ]


def spread(values: Sequence[float]) -> str:
    return f"{fmean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")


def show(options: argparse.Namespace, outcomes: dict[str, Outcome]) -> None:
    console = wide_console()
    title = (
        f"{options.steps} steps of {options.prompts} prompts x {options.group} samples; verdicts after a lognormal time, "
        f"median {options.median:g} s, sigma {options.sigma:g}, cut at {options.cut:g} s"
    )
    headings = (
        "seed 0",
        "wall s",
        "s a step",
        "trainer s a step",
        "trainer waits",
        "staleness mean",
        "max",
        "samples/s",
    )
    times = table(title, *headings)
    for name in ("synchronous", "asynchronous"):
        run = outcomes[f"{name}-0"]
        times.add_row(
            name,
            f"{run.wall_s:.1f}",
            f"{run.wall_s / options.steps:.2f}",
            f"{run.step_s:.2f}",
            f"{run.wait_share:.1%}",
            f"{run.staleness_mean:.2f}",
            f"{run.staleness_max:.0f}",
            f"{run.num_samples / run.wall_s:.1f}",
        )
    console.print(times)
    rewards = table(f"reward, {options.seeds} seeds", "", "first half", "second half", "held out before", "after")
    for name in ("synchronous", "asynchronous"):
        runs = [outcomes[f"{name}-{seed}"] for seed in range(options.seeds)]
        halves = [fmean(run.rewards[: len(run.rewards) // 2]) for run in runs]
        held_out = ([run.first_held_out for run in runs], [run.last_held_out for run in runs])
        rewards.add_row(name, spread(halves), spread([run.late_reward for run in runs]), *map(spread, held_out))
    console.print(rewards)
    free, bound = outcomes["asynchronous-0"], outcomes["synchronous-0"]
    console.print(
        f"asynchronous over synchronous: {bound.wall_s / free.wall_s:.2f}x (aim {AIM}x), "
        f"trainer waits {free.wait_share:.1%} (aim {AIM_WAIT:.0%}); aim for the rewards: no loss"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=Path("recipes/rl_gym.toml"))
    parser.add_argument(
        "--model", type=Path, help="checkpoint to begin with; without it, the recipe's own start is made"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/async_speed"))
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--staleness", type=int, default=16, help="bound of the asynchronous side")
    parser.add_argument("--alive", type=int, default=6, help="batches of its groups under way at once")
    parser.add_argument("--isolate", choices=("none", "torch", "all"), default="torch", help="on both sides")
    parser.add_argument("--sync-threads", type=int, default=2, help="of the synchronous side's engine and trainer")
    parser.add_argument("--grid", type=float, nargs="+", metavar="TAIL", help="longest delays, in steps of the trainer")
    parser.add_argument("--bounds", type=int, nargs="+", default=[0, 1, 2, 4, 8, 16], help="of the grid")
    parser.add_argument("--only", default="", help="run the sides whose names begin so, and print them as they are")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--eval-prompts", type=int, default=128)
    parser.add_argument("--median", type=float, default=0.15, help="seconds")
    parser.add_argument("--sigma", type=float, default=1.2)
    parser.add_argument("--cut", type=float, default=5.0, help="seconds")
    options = parser.parse_args()
    plan = sides(options)
    if options.model is not None:
        start = checkpoint_folder(options.model)
    else:
        start = made_start(read_recipe(options.recipe, RlRecipe), options.out)
    if options.grid:
        grid(options, start)
        return
    outcomes = {side.name: play(options, side, start) for side in plan if side.name.startswith(options.only)}
    if len(outcomes) == len(plan):
        show(options, outcomes)
    else:
        for name, outcome in outcomes.items():
            print(name, outcome)


if __name__ == "__main__":
    main()
