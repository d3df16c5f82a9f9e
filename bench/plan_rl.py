"""The planner's simulation against measured RL runs, how it scales with each role, and predictions for large clusters.

    python -m bench.plan_rl [--out FOLDER] [--steps N] [--only measured|scaling|large]

Measured runs: `stretto rl` on a tiny network with verdicts that take a lognormal time. The role times of a run (answers, verdicts,
steps, hand-over of weights) are read from its trace and from the verifiers' own log, and the simulation must reach its samples per
second, without the first steps, within 15 %. Scaling: with fixed role times, more engines, verifiers or trainer ranks must give at
least 0.9 of linear speed until another part limits, which is named. Large: plans of three networks on 64 to 4,096 H100, which nobody
can check here; they are predictions. Exits with 1 if an aim is missed.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import fmean, median
from typing import Any

import stretto
from bench.async_speed import Delayed, DelayedArgs
from bench.common.measure import bench_parser, finish, table, wide_console
from stretto.api.rl import made_start
from stretto.base.config import read_recipe
from stretto.base.numbers import duration, params, percent, si
from stretto.base.paths import RECIPES
from stretto.base.track import progress
from stretto.flow.controller import Limits
from stretto.flow.launch import Job
from stretto.flow.log import read_spans
from stretto.flow.run import controller_limits, run_rl
from stretto.learning.recipe import SUPERVISED, PoolConfig, RlRecipe
from stretto.planner.plans import Workload
from stretto.planner.simulate import Roles, Simulated, simulate
from stretto.tasks.task import Answer, Problem, Score

AIM, AIM_LINEAR = 0.15, 0.9
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
    roles = Roles(
        limits=replace(controller_limits(recipe), lease_s=math.inf),
        group=GROUP,
        engines=1,
        batch=recipe.rollout.max_batch,
        decode_s=lambda batch: 1.0,  # answers are given in seconds, as measured beside each other
        tokens=lambda rng, ordinal: rng.choice(answers.get(ordinal, every)),
        step_s=lambda rng, step: took["trainer/step"][step],
        verifiers=Few.at_once if few else Timed.at_once,
        verdict_s=lambda rng, ordinal: rng.choice(judged.get(ordinal, all_judged)),
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


def measured(out: Path, steps: int) -> Iterator[str]:
    recipe = recipe_of("turns", out / "start", steps)
    plain = {name: source.replace(kind="gym", args=source.args["args"]) for name, source in recipe.sources.items()}
    start = made_start(recipe.replace(sources=plain), out)
    shown = table(
        f"{steps} steps of {PROMPTS} x {GROUP} samples: `stretto rl`, and its simulation with the run's own role times",
        *("run", "η", "mean times", "samples/s measured", "simulated", "error", "limit", f"aim ±{AIM:.0%}"),
    )
    with progress("runs", len(RUNS)) as advance:
        for name in RUNS:
            rate, found, times = compare(name, out, start, steps)
            error = found.samples_per_s / rate - 1
            holds = abs(error) <= AIM
            row = name, str(RUNS[name]["staleness"]), times, f"{rate:.1f}", f"{found.samples_per_s:.1f}"
            shown.add_row(*row, percent(error), found.limit, "yes" if holds else "NO")
            if not holds:
                yield f"{name}: {error:+.0%}"
            advance(1)
    wide_console().print(shown)


def scaling() -> Iterator[str]:
    """More of one role, with the others fast enough, until these limit."""
    limits = Limits(prompts=16, staleness=4, window=1, lease_s=math.inf, num_steps=40)
    base = Roles(
        limits=limits, group=8, engines=16, batch=16, decode_s=lambda batch: 0.02, verifiers=512,
        tokens=lambda rng, number: min(512.0, rng.lognormvariate(4.6, 0.6)), step_s=lambda rng, number: 0.5,
        verdict_s=lambda rng, number: rng.lognormvariate(-0.5, 0.5),
    )  # fmt: skip
    ways: Mapping[str, tuple[Sequence[int], Any]] = {
        "engines": ((1, 2, 3, 4, 64), lambda num: replace(base, engines=num)),
        "verifiers": ((1, 2, 4, 8, 16, 256), lambda num: replace(base, verifiers=num)),
        "trainer": ((1, 2, 4, 32), lambda num: replace(base, step_s=lambda rng, number: 16.0 / num)),
    }
    shown = table(
        "simulated role times: samples/s",
        "role",
        "number",
        "samples/s",
        "of linear",
        "limit",
        "aim ≥ 0.9 until another limits",
    )
    for role, (numbers, roles_of) in ways.items():
        first = 0.0
        for num in numbers:
            found = simulate(roles_of(num))
            first = first or found.samples_per_s
            linear = found.samples_per_s / (first * num / numbers[0])
            holds = linear >= AIM_LINEAR or found.limit != role
            shown.add_row(
                role, str(num), f"{found.samples_per_s:.1f}", f"{linear:.2f}", found.limit, "yes" if holds else "NO"
            )
            if not holds:
                yield f"{num} {role}: {linear:.2f} of linear"
    wide_console().print(shown)


SHAPES: Mapping[str, dict[str, Any]] = {
    "30B": {  # Qwen3-30B-A3B
        "vocab_size": 151936, "hidden_size": 2048, "num_layers": 48, "num_heads": 32, "num_kv_heads": 4, "head_dim": 128,
        "num_experts": 128, "top_k": 8, "expert_intermediate_size": 768, "qk_norm": True,
    },
    "300B": {  # ERNIE-4.5-300B-A47B
        "vocab_size": 103424, "hidden_size": 8192, "num_layers": 54, "num_heads": 64, "num_kv_heads": 8, "head_dim": 128,
        "num_experts": 64, "top_k": 8, "expert_intermediate_size": 3584, "dense_layers": [0, 1, 2], "dense_intermediate_size": 28672,
    },
    "2T": {
        "vocab_size": 163840, "hidden_size": 9216, "num_layers": 62, "num_heads": 72, "num_kv_heads": 8, "head_dim": 128,
        "num_experts": 384, "top_k": 8, "expert_intermediate_size": 3072, "num_shared_experts": 1,
        "dense_layers": [0], "dense_intermediate_size": 28672,
    },
}  # fmt: skip


def large() -> None:
    """Pre-training on 16.8M tokens a step, and RL with 512 x 16 answers of 1,500 tokens a step."""
    optim = {"lr": 1e-4}
    pretrain = {"optim": optim, "train": {"steps": 100_000, "rows": 4096, "seq_len": 4096, "ep": 1}}
    rollout = {"group": 16, "max_tokens": 3072, "max_batch": 128, "cache_bytes": 20_000_000_000}
    rl = {
        "sources": {"sums": {"kind": "math"}}, "rollout": rollout, "optim": optim, "precision": {"rollout": "bf16", "train": "bf16"},
        "train": {"steps": 1000, "prompts": 512, "seq_len": 4096, "micro_rows": 8},
    }  # fmt: skip
    work = Workload(answer_tokens=1500, prompt_tokens=500, verdict_s=1.0, verifiers=1024)
    shown = table(
        "PREDICTED, never run: H100, bf16, AdamW",
        "run",
        "network",
        "GPUs",
        "best layout",
        "fits",
        "step",
        "tokens/s per GPU",
        "limit",
    )
    for name, shape in SHAPES.items():
        for num in (64, 256, 1024, 4096):
            model = shape | {"max_positions": 16384}
            for kind, recipe in (
                ("pretrain", pretrain | {"model": model}),
                ("rl", rl | {"start": {"optim": optim, "steps": 1, "model": model}}),
            ):
                try:
                    plan = stretto.plan(recipe, f"{num}xH100", sweep=True, workload=work)
                except stretto.UserError as error:
                    shown.add_row(kind, name, str(num), str(error).partition(": ")[2], "–", "–", "–", "–")
                    continue
                best = plan.best
                cells = best.name, "yes" if best.fits else "NO", duration(best.step_s), si(best.tokens_per_s / num)
                shown.add_row(
                    kind, f"{name} ({params(plan.params)})", str(num), *cells, best.limit if best.fits else "memory"
                )
    wide_console().print(shown)


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/plan_rl"))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--only", choices=("measured", "scaling", "large"))
    options = parser.parse_args()
    os.makedirs(options.out, exist_ok=True)
    failures = [] if options.only not in (None, "scaling") else list(scaling())
    if options.only in (None, "large"):
        large()
    if options.only in (None, "measured"):
        failures += measured(options.out.resolve(), options.steps)
    finish(failures)


if __name__ == "__main__":
    main()
