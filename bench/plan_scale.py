"""How simulated RL scales with each role, and predictions of large networks on large clusters.

    python -m bench.plan_scale [--only scaling|large]

Scaling: with fixed role times, more engines, verifiers or trainer ranks must give at least 0.9 of linear speed until another part
limits, which is named; exits with 1 if they do not. A trainer of n ranks is taken to step n times as fast. Large: plans of three
networks on 64 to 4,096 H100. Nothing of that size was ever run: the rows are predictions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import stretto
from bench.common.measure import bench_parser, finish, table, wide_console
from stretto.base.numbers import duration, si
from stretto.base.track import progress
from stretto.flow.controller import Limits
from stretto.planner.rl import Workload
from stretto.planner.simulate import Roles, simulate

AIM_LINEAR = 0.9


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
    parser.add_argument("--only", choices=("scaling", "large"))
    options = parser.parse_args()
    failures = list(scaling()) if options.only != "large" else []
    if options.only != "scaling":
        large()
    finish(failures)


if __name__ == "__main__":
    main()
