"""The planner's simulation of RL against measured runs.

    python -m bench.plan_rl [--out FOLDER] [--steps N] [--only RUN]

Each run is `stretto rl` on a tiny network with verdicts that take a lognormal time. Its role times (answers, verdicts, steps, hand-over
of weights) are read from its trace and from the verifiers' own log, and replayed by group and step. The simulation must reach the
run's samples per second, without the steps that fill the pipeline, within 15 %. Exits with 1 if it does not.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import fmean, median
from typing import Any

from bench.common.delayed import Delayed, DelayedArgs
from bench.common.measure import bench_parser, finish, table
from stretto.api.rl import made_start
from stretto.base.config import read_recipe
from stretto.base.numbers import duration, percent
from stretto.base.paths import RECIPES
from stretto.base.track import progress, wide_console
from stretto.flow.launch import Job
from stretto.flow.log import read_spans
from stretto.flow.prompts import SUPERVISED
from stretto.flow.run import controller_limits, run_rl
from stretto.learning.recipe import RlRecipe
from stretto.learning.roles import PoolConfig
from stretto.planner.simulate import Roles, Simulated, simulate
from stretto.tasks.task import Answer, Problem, Score

AIM = 0.15
SEEDS = 5
"""Simulations of one run; the median counts."""
RUNS: Mapping[str, Mapping[str, Any]] = {  # changes of the recipe, kind of verifier, median of a verdict
    "turns": {"staleness": 0, "kind": "Timed", "median_s": 0.2},
    "bound": {"staleness": 1, "kind": "Timed", "median_s": 0.6},
    "free": {"staleness": 6, "kind": "Timed", "median_s": 0.3},
    "few verifiers": {"staleness": 4, "kind": "Few", "median_s": 0.15},
}
PROMPTS, GROUP = 4, 8


class TimedArgs(DelayedArgs):
    log: str
    """File to which each verdict appends its item, start and end."""


class Timed(Delayed):
    """A delayed task set that writes down when it judged."""

    args_kind = TimedArgs

    def score(self, problem: Problem, answer: Answer) -> Score:
        started_s = time.time()
        score = super().score(problem, answer)
        if answer.seed is not None and problem.item < SUPERVISED:
            with self._lock, open(self._args.log, "a", encoding="utf-8") as file:  # type: ignore[attr-defined]
                file.write(json.dumps([problem.item, started_s, time.time()]) + "\n")
        return score


class Few(Timed):
    """The same, four answers at once."""

    at_once = 4


def recipe_of(name: str, folder: Path, steps: int) -> RlRecipe:
    given, recipe = RUNS[name], read_recipe(RECIPES / "rl_gym.toml", RlRecipe, ["start.steps=4", "start.rows=4"])
    delays = {"median_s": given["median_s"], "sigma": 0.8, "cut_s": 5.0, "log": str(folder.with_suffix(".verdicts"))}
    kind = f"bench.plan_rl:{given['kind']}"
    source = recipe.sources["backward"]
    source = source.replace(kind=kind, args={"kind": source.kind, "args": source.args, **delays})
    loop = {"steps": steps, "prompts": PROMPTS, "eval_prompts": 2, "eval_every": steps + 1, "snapshot_every": steps + 1}
    return recipe.replace(
        sources={"backward": source},
        staleness=given["staleness"],
        rollout=recipe.rollout.replace(group=GROUP),
        loss=recipe.loss.replace(drop_uniform=False),
        train=recipe.train.replace(**loop, snapshot_minutes=60.0),
        runtime=recipe.runtime.replace(rewards=PoolConfig(min=1, max=1)),
    )


def compare(name: str, out: Path, start: Path, steps: int) -> tuple[float, Simulated, str]:
    """Samples per second of a real run; its simulation; its role times in words."""
    folder = out / name.replace(" ", "-")
    shutil.rmtree(folder, ignore_errors=True)
    recipe = recipe_of(name, folder, steps)
    log = folder.with_suffix(".verdicts")
    log.unlink(missing_ok=True)
    run_rl(Job(recipe, folder, start), lambda num, text: None, lambda text: None)
    spans = read_spans(folder)
    verdicts = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    groups = {
        span.facts["ordinal"]: span for span in spans if (span.role, span.name) == ("agents", "group") and span.facts
    }
    took = {
        kind: [span.seconds for span in spans if f"{span.role.partition('-')[0]}/{span.name}" == kind]
        for kind in ("trainer/step", "trainer/publish", "weights/publish", "engine/activate")
    }
    ends = [span.finished_s for span in spans if (span.role, span.name) == ("trainer", "step")]
    answers, judged, last = dict[int, list[float]](), dict[int, list[float]](), dict[int, float]()
    for item, started_s, ended_s in verdicts:
        if item in groups:
            answers.setdefault(item, []).append(started_s - groups[item].started_s)
            judged.setdefault(item, []).append(ended_s - started_s)
            last[item] = max(ended_s, last.get(item, 0.0))
    every, few = sorted(chain.from_iterable(answers.values())), RUNS[name]["kind"] == "Few"
    if few:  # most of the time until a verdict starts is the wait for a verifier
        answers, every = {}, every[: len(every) // 20 + 1]
    all_judged = [*chain.from_iterable(judged.values())]
    # from the end of a verdict to the start of the next one in its place, while answers wait
    starts, stops = sorted(each[1] for each in verdicts), sorted(each[2] for each in verdicts)
    gap_s = median(start - stop for start, stop in zip(starts[Few.at_once :], stops, strict=False)) if few else 0.0
    roles = Roles(
        limits=replace(controller_limits(recipe), lease_s=math.inf),
        group=GROUP,
        engines=1,
        batch=recipe.rollout.max_batch,
        decode_s=lambda batch: 1.0,  # answers are given in seconds, as measured beside each other
        tokens=lambda rng, ordinal: rng.choice(answers.get(ordinal, every)),
        step_s=lambda rng, step: took["trainer/step"][step],
        verifiers=Few.at_once if few else Timed.at_once,
        verdict_s=lambda rng, ordinal: rng.choice(judged.get(ordinal, all_judged)) + gap_s,
        store_s=median(groups[item].finished_s - end for item, end in last.items()),
        publish_s=fmean(took["trainer/publish"]),
        deliver_s=fmean(took["weights/publish"][1:]),
        activate_s=fmean(took["engine/activate"][1:]),
    )
    skipped = min(recipe.staleness + 1, len(ends) - 1)
    measured = (len(ends) - skipped) * PROMPTS * GROUP / (ends[-1] - ends[skipped - 1])
    found = sorted((simulate(roles, seed) for seed in range(SEEDS)), key=lambda each: each.samples_per_s)[SEEDS // 2]
    times = {"answer": every, "verdict": all_judged, "step": took["trainer/step"]}
    return measured, found, ", ".join(f"{what} {duration(fmean(values))}" for what, values in times.items())


def measured(out: Path, steps: int, names: Sequence[str]) -> Iterator[str]:
    recipe = recipe_of("turns", out / "start", steps)
    plain = {name: source.replace(kind="gym", args=source.args["args"]) for name, source in recipe.sources.items()}
    start = made_start(recipe.replace(sources=plain), out)
    shown = table(
        f"{steps} steps of {PROMPTS} x {GROUP} samples: `stretto rl`, and its simulation with the run's own role times",
        *("run", "η", "mean times", "samples/s measured", "simulated", "error", "limit", f"aim ±{AIM:.0%}"),
    )
    with progress("runs", len(names)) as advance:
        for name in names:
            rate, found, times = compare(name, out, start, steps)
            error = found.samples_per_s / rate - 1
            holds = abs(error) <= AIM
            row = name, str(RUNS[name]["staleness"]), times, f"{rate:.1f}", f"{found.samples_per_s:.1f}"
            shown.add_row(*row, percent(error), found.limit, "yes" if holds else "NO")
            if not holds:
                yield f"{name}: {error:+.0%}"
            advance(1)
    wide_console().print(shown)


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/plan_rl"))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--only", choices=RUNS, help="one run")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    finish(list(measured(options.out.resolve(), options.steps, [options.only] if options.only else list(RUNS))))


if __name__ == "__main__":
    main()
