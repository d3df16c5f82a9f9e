"""How RL scales with each role, simulated and with real processes that sleep, and predictions of large networks on large clusters.

    python -m bench.plan_scale [--only scaling|processes|large] [--steps N]

Scaling: with fixed role times, more engines, verifiers or trainer ranks must give at least 0.9 of linear speed until another part
limits, which is named; exits with 1 if they do not. A trainer of n ranks is taken to step n times as fast. Processes: the same with a
whole run in processes (`bench.common.sleeping`), where `stretto top` names the limit; needs an idle machine, and a few minutes. Large: plans of three
networks on 64 to 4,096 H100. Nothing of that size was ever run: the rows are predictions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import stretto
from bench.common.measure import bench_parser, finish, table
from bench.common.sleeping import Times, put_to_sleep
from stretto.api.rl import made_start
from stretto.base.config import read_recipe
from stretto.base.numbers import duration, si
from stretto.base.track import progress, wide_console
from stretto.flow.controller import Limits
from stretto.flow.launch import Job
from stretto.flow.log import RunStatus, read_spans, read_status
from stretto.flow.run import run_rl
from stretto.learning.recipe import STATUS_FILE, RlRecipe
from stretto.planner.rl import Workload
from stretto.planner.simulate import Roles, simulate
from stretto.report.top import limiting_part

AIM_LINEAR = 0.9
WARM_UP = 4
"""Steps of a run that are not measured: those whose groups wait since before the first step."""


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


RUN = """
staleness = 3
replay = "off"
sources.slow = { kind = "bench.common.sleeping:Sleepy", args = { verdict_s = %(verdict_s)g } }
start.steps = 1
start.rows = 4
start.optim.lr = 1e-3
start.model = { vocab_size = 300, hidden_size = 32, num_layers = 1, num_heads = 1, num_kv_heads = 1, head_dim = 32, \
max_positions = 128, num_experts = 2, top_k = 1, expert_intermediate_size = 32 }
rollout = { group = 4, max_tokens = 8, chunk_tokens = 8, engines = %(engines)d }
loss.drop_uniform = false
optim.lr = 1e-3
train = { steps = %(steps)d, prompts = 8, seq_len = 64, micro_rows = 8, eval_every = 1000, eval_prompts = 2, snapshot_every = 1000 }
trainer.ranks = %(ranks)d
runtime = { isolate = "all", agents = { min = 1, max = 1 }, rewards = { min = 1, max = %(verifiers)d } }
"""
"""Eight groups of four samples for each step."""


def processes(num_steps: int) -> Iterator[str]:
    """Whole runs in processes, with more of one role and the others fast enough."""
    usual: dict[str, Any] = {"engines": 2, "verifiers": 4, "ranks": 1, "verdict_s": 0.02}
    fast = Times(step_s=0.5, answer_s=0.5, batch=32)
    ways: Mapping[str, tuple[Sequence[int], dict[str, Any], Times]] = {
        "engines": ((1, 2, 4), usual, replace(fast, answer_s=1.0, batch=8)),
        "verifiers": ((1, 4, 16), usual | {"verdict_s": 0.4}, fast),
        "trainer": ((1, 2, 4), usual, replace(fast, step_s=4.0)),
        "engines, until the trainer limits": ((1, 4), usual, replace(fast, answer_s=1.0, batch=8, step_s=1.6)),
    }
    columns = ("role", "number", "samples/s", "of linear", "stretto top: limited by", "aim ≥ 0.9 until another limits")
    shown = table("real processes, simulated model times", *columns)
    for way, (numbers, settings, times) in ways.items():
        first, role = 0.0, way.partition(",")[0]
        for num in numbers:
            counts = settings | {"ranks" if role == "trainer" else role: num, "steps": num_steps}
            speed, limit = _slept(RUN % counts, times)
            first = first or speed / numbers[0]
            linear, is_own = speed / (first * num), limit.startswith(f"the {role}")
            holds = linear >= AIM_LINEAR or not is_own
            shown.add_row(way, str(num), f"{speed:.1f}", f"{linear:.2f}", limit, "yes" if holds else "NO")
            if not holds:
                yield f"processes: {num} {role}: {linear:.2f} of linear"
    wide_console().print(shown)


def _slept(text: str, times: Times) -> tuple[float, str]:
    """Samples per second of a run of the recipe ``text``, and the part that limits it by `stretto top`."""
    put_to_sleep(times)
    with TemporaryDirectory(prefix="stretto-") as folder:
        path, run = Path(folder) / "recipe.toml", Path(folder) / "run"
        path.write_text(text)
        recipe = read_recipe(path, RlRecipe)
        status: list[RunStatus] = []
        run_rl(
            Job(recipe, run, made_start(recipe, run, device="cpu")),
            lambda num, note: status.append(read_status(run)) if num and (run / STATUS_FILE).exists() else None,
            lambda line: None,
        )
        ends = [span.finished_s for span in read_spans(run) if (span.role, span.name) == ("trainer", "step")]
    num_samples = recipe.train.prompts * recipe.rollout.group
    return num_samples * (len(ends) - WARM_UP) / (ends[-1] - ends[WARM_UP - 1]), limiting_part(status[-1])


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
    """Pre-training on 16.8M tokens a step, and RL with 16 answers of 1,500 tokens to a group for every 8 GPUs."""
    optim, work = {"lr": 1e-4}, Workload(answer_tokens=1500, prompt_tokens=500, verdict_s=1.0, verifiers=1024)
    rollout = {"group": 16, "max_tokens": 3072, "max_batch": 128, "cache_bytes": 20_000_000_000}
    shown = table("PREDICTED, never run: H100, bf16, AdamW", *HEADINGS)
    with progress("plans", 8 * len(SHAPES)) as advance:
        for kind in ("pretrain", "rl"):
            for name, shape in SHAPES.items():
                model = shape | {"max_positions": 4096}
                for num in (64, 256, 1024, 4096):
                    train: dict[str, Any] = {"steps": 100_000, "rows": 4096, "seq_len": 4096}
                    recipe: dict[str, Any] = {"model": model, "optim": optim, "train": train}
                    if kind == "rl":
                        train = {"steps": 1000, "prompts": max(32, num // 8), "seq_len": 4096, "micro_rows": 8}
                        recipe = {
                            "start": {"model": model, "optim": optim, "steps": 1},
                            "sources": {"sums": {"kind": "math"}},
                        }
                        recipe |= {"rollout": rollout, "optim": optim, "train": train}
                        recipe |= {"precision": {"rollout": "bf16", "train": "bf16"}}
                    shown.add_row(kind, name, f"{num:,}", *_cells(recipe, num, work))
                    advance(1)
    wide_console().print(shown)


HEADINGS = ("run", "network", "GPUs", "best layout", "memory", "step", "tokens/s per GPU", "limit")


def _cells(recipe: Mapping[str, Any], num: int, work: Workload) -> tuple[str, ...]:
    try:
        plan = stretto.plan(recipe, f"{num}xH100", sweep=True, workload=work)
    except stretto.UserError as error:
        return str(error).partition(": ")[2], "", "", "", ""
    best = plan.best
    memory = f"{best.peak / 2**30:.0f} of {best.available / 2**30:.0f} GiB"
    times = duration(best.step_s), si(best.tokens_per_s / num)
    return best.name, memory, *times, best.limit


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--only", choices=("scaling", "processes", "large"))
    parser.add_argument("--steps", type=int, default=12, help="steps of a run in processes")
    options = parser.parse_args()
    failures = list(scaling()) if options.only in (None, "scaling") else []
    if options.only in (None, "processes"):
        failures += processes(options.steps)
    if options.only in (None, "large"):
        large()
    finish(failures)


if __name__ == "__main__":
    main()
