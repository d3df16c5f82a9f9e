"""The planner's peak memory against measured peaks of training steps, on one rank and on two.

    python -m bench.plan [--only NAME]

Each shape trains two steps in processes of its own (several ranks communicate through gloo). Measured is the peak of the resident
memory of rank 0 (VmHWM) above its resident memory after a step of a tiny network, so that libraries do not count. glibc returns every
block to the system, and oneDNN keeps few compiled products, so that the resident memory is that of tensors. Fails (exit code 1) if a
prediction is more than 10 % off.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch

from bench.common.measure import bench_parser, finish, table
from stretto.base.numbers import percent, si
from stretto.base.track import progress, wide_console
from stretto.model.counts import count
from stretto.model.parallel import Ranks, join, random_network
from stretto.model.spec import ModelConfig
from stretto.model.transformer import Context
from stretto.ops.native import training
from stretto.optim.build import build_optimizers
from stretto.optim.schedule import OptimConfig
from stretto.planner.hardware import Dtype
from stretto.planner.memory import Layout, training_memory
from stretto.train.step import MicroBatch, optimisation_step
from tests.ranks import run_ranks

AIM = 0.10
STEPS = 2
BASE = {
    "vocab_size": 8192, "hidden_size": 256, "num_layers": 6, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "num_experts": 16,
    "top_k": 4, "expert_intermediate_size": 256, "max_positions": 2048,
}  # fmt: skip
TINY = BASE | {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_layers": 1,
    "expert_intermediate_size": 32,
    "num_experts": 4,
    "top_k": 1,
}
MIXED = {
    "hidden_size": 384,
    "num_layers": 4,
    "dense_layers": (0,),
    "dense_intermediate_size": 1536,
    "top_k": 3,
    "tie_embeddings": True,
}
DENSE = {"dense_layers": (0, 1, 2, 3, 4, 5), "dense_intermediate_size": 1024}
WIDE_EXPERTS = {"num_experts": 64, "top_k": 2, "num_layers": 4}
Shape = tuple[dict[str, object], Layout, int, Dtype, str]
SHAPES: dict[str, Shape] = {  # changes of BASE, layout, tokens per row, dtype, optimiser
    "AdamW": ({}, Layout(1, 1, 4, 1), 512, "float32", "adamw"),
    "two passes": ({}, Layout(1, 1, 4, 2), 512, "float32", "adamw"),
    "Muon, recompute": ({}, Layout(1, 1, 4, 2, True), 512, "float32", "muon"),
    "Muon, bf16": ({}, Layout(1, 1, 4, 2), 512, "bfloat16", "muon"),
    "dense": (DENSE, Layout(1, 1, 4, 1), 512, "float32", "adamw"),
    "shared expert, norms": ({"num_shared_experts": 1, "qk_norm": True, "top_k": 2}, Layout(1, 1, 4, 1), 512, "float32", "muon"),
    "64 experts": (WIDE_EXPERTS, Layout(1, 1, 2, 1), 256, "float32", "muon"),
    "vocabulary 32,768": ({"vocab_size": 32768, "num_layers": 2}, Layout(1, 1, 2, 1), 1024, "bfloat16", "adamw"),
    "16 layers": ({"num_layers": 16}, Layout(1, 1, 1, 2), 512, "float32", "adamw"),
    "one dense layer, tied head": (MIXED, Layout(1, 1, 3, 1), 384, "float32", "adamw"),
    "int8 moments": ({}, Layout(1, 1, 4, 1), 512, "float32", "adamw moments=int8"),
    "split weights, int8": ({}, Layout(1, 1, 4, 1), 512, "bfloat16", "adamw moments=int8 master=split"),
    "bf16 weights, in the backward pass": (WIDE_EXPERTS, Layout(1, 1, 2, 1), 256, "bfloat16", "adamw moments=int8 master=bf16_stochastic in_backward=true"),
    "packed answers": ({}, Layout(1, 1, 4, 2), 512, "bfloat16", "adamw"),
    "packed answers, mask": ({}, Layout(1, 1, 4, 2), 512, "float32", "adamw"),
    "2 ranks": ({}, Layout(2, 1, 8, 1), 512, "float32", "adamw"),
    "2 ranks, ep 2": ({}, Layout(2, 2, 8, 2), 512, "float32", "adamw"),
    "2 ranks, ep 2, Muon": (WIDE_EXPERTS, Layout(2, 2, 4, 1), 512, "float32", "muon"),
}  # fmt: skip
PACKED = "packed answers"
"""Beginning of the names of shapes whose rows hold a prompt and the answers to it, as in RL."""
NUM_ANSWERS = 3
"""Answers to a prompt; all are equally long."""
QUIET_ALLOCATORS = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_ARENA_MAX": "1", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8"}


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--only", choices=SHAPES, help="one shape")
    parser.add_argument("--worker", choices=SHAPES, help="internal: measure this shape in this process")
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(peak_bytes(*SHAPES[options.worker], is_packed=options.worker.startswith(PACKED))), flush=True)
        return
    os.environ.update(QUIET_ALLOCATORS)  # of the processes that are measured
    shown = table(
        "peak memory of rank 0: predicted, and measured as resident memory above that of a tiny step",
        *("shape", "parameters", "layout", "dtype", "predicted", "measured", "error", f"aim ±{AIM:.0%}"),
    )
    failures, names = [], [options.only] if options.only else list(SHAPES)
    with progress("shapes", len(names)) as advance:
        for name in names:
            changes, layout, length, dtype, optimiser = SHAPES[name]
            config = ModelConfig.model_validate(BASE | changes)
            prefix_keys = NUM_ANSWERS / (1 + NUM_ANSWERS) if name.startswith(PACKED) else None
            shape = config, layout, length, dtype, optim_of(optimiser)
            rounds = training.has_bf16_kernels()
            predicted = training_memory(*shape, prefix_keys=prefix_keys, on_gpu=False, rounds=rounds).total
            measured = _measured(name, layout.ranks)
            error = predicted / measured - 1
            holds = abs(error) <= AIM
            failures += [] if holds else [f"{name}: {error:+.1%}"]
            params = si(count(config, config.full()).total_params)
            sizes = si(predicted, "B"), si(measured, "B")
            shown.add_row(name, params, str(layout), dtype, *sizes, percent(error), "yes" if holds else "NO")
            advance(1)
    wide_console().print(shown)
    finish(failures)


def optim_of(words: str) -> OptimConfig:
    """Settings of ``muon``, ``adamw``, or ``adamw moments=int8 master=split``."""
    name, *settings = words.split()
    return OptimConfig.model_validate({"lr": 1e-4, "name": name} | dict(each.split("=") for each in settings))


def _measured(name: str, world: int) -> float:
    """Peak bytes of rank 0 in ``world`` new processes."""
    done = run_ranks(world, [sys.executable, "-m", "bench.plan", "--worker", name])
    assert not any(rank.returncode for rank in done), f"{name}: a rank failed: {done[0].stderr[-2000:]}"
    return float(json.loads(done[0].stdout.splitlines()[-1]))


def peak_bytes(
    changes: dict[str, object], layout: Layout, length: int, dtype: Dtype, optimiser: str, *, is_packed: bool
) -> int:
    """Peak resident memory of this rank over `STEPS` steps, above that after a step of a tiny network."""
    torch.set_num_threads(1)
    ranks = join("cpu", layout.ep)
    for kind in ("float32", "bfloat16"):
        _train(
            ModelConfig.model_validate(TINY),
            Layout(layout.ranks, layout.ep, layout.ranks, 1, True),
            8,
            kind,
            "muon",
            ranks,
        )
    before = _resident("VmRSS")
    _train(ModelConfig.model_validate(BASE | changes), layout, length, dtype, optimiser, ranks, is_packed=is_packed)
    return _resident("VmHWM") - before


def _train(
    config: ModelConfig,
    layout: Layout,
    length: int,
    dtype: str,
    optimiser: str,
    ranks: Ranks,
    *,
    is_packed: bool = False,
) -> None:
    kind = getattr(torch, dtype)
    model = random_network(config, 0).place(config, ranks, kind, torch.float32)
    optimizers = build_optimizers(optim_of(optimiser), model)
    generator = torch.Generator().manual_seed(ranks.rank)
    for _ in range(STEPS):
        batches = []
        for _ in range(layout.micro_batches):
            ids_BT = torch.randint(config.vocab_size, (layout.rows, length + 1), generator=generator)
            ctx = _answers(layout.rows, length) if is_packed else Context.plain(ids_BT[:, :-1])
            ctx = replace(ctx, recompute=layout.recompute)
            num = layout.micro_rows * length
            batches.append(MicroBatch("full", ids_BT[:, :-1], ids_BT[:, 1:].contiguous(), ctx, config.full(), num))
        optimisation_step(model, optimizers, batches, ranks, clip_norm=1.0, balance_rate=0.0, dtype=kind)


def _answers(rows: int, length: int) -> Context:
    """Each row is a prompt and `NUM_ANSWERS` answers that read it, documents of the same length."""
    columns_T, part = torch.arange(length), length // (1 + NUM_ANSWERS)
    documents_T = columns_T // part
    positions_T = columns_T % part + part * (documents_T > 0)
    shared_T2 = torch.stack((torch.zeros_like(columns_T), part * (documents_T > 0)), dim=-1)
    documents_BT, positions_BT = (each.expand(rows, length) for each in (documents_T, positions_T))
    return Context(positions_BT, documents_BT, shared_BT2=shared_T2.expand(rows, length, 2))


def _resident(field: str) -> int:
    """``field`` of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024


if __name__ == "__main__":
    main()
