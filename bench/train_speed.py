"""Training speed: ours against transformers' Glm4MoeForCausalLM of the same shape and weights; the default dtype against fp32.

    python -m bench.train_speed [--shape small|medium] [--steps N] [--threads N] [--compile]

A step is forward, loss, backward, gradient clipping and fused AdamW, on rows of its own: routers then give groups of new sizes,
as in training. The default is what a run takes that is told nothing (``train.dtype = "auto"``). transformers runs SDPA attention and, of its
expert implementations, the fastest on this machine. All run in one process and take turns. A fixed matrix product is
timed before and after each step; steps around which it was slow (another job had the cores) are dropped. Beside wall
time stands the processor time of this process, which other jobs disturb less; the two agree on a quiet machine.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from bench.common.measure import (
    CALIBRATION_SIZE,
    Sample,
    Step,
    fastest_calibration,
    measure,
    quiet,
    ratio,
    times,
    wide_console,
)
from stretto.base.track import progress
from stretto.model.checkpoint import write_checkpoint
from stretto.model.parallel import join
from stretto.model.spec import ModelConfig, count
from stretto.model.transformer import Context, Transformer, build
from stretto.ops.logprob import IGNORED
from stretto.ops.tuning import multiplies_bf16, threads_kept
from stretto.optim.build import build_optimizers
from stretto.optim.schedule import OptimConfig
from stretto.train.pace import Pace, find_pace
from stretto.train.step import MicroBatch, optimisation_step

EXPERTS_IMPLEMENTATIONS = ("grouped_mm", "eager", "batched_mm")
"""Those of transformers that run without optional kernels."""
HOPELESS = 4.0
"""An implementation whose first step takes this many times the best one's is not timed further."""
BATCHED_BYTES = 6 * 2**30
"""batched_mm copies an expert's weights for every token and choice; beyond this it is left out."""
OPTIM = OptimConfig(lr=1e-4)
LEAST = 0.95
"""Tokens/s of the default over fp32's; below that, the bench fails."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What is measured."""

    config: ModelConfig
    rows: int
    length: int
    """Tokens a row."""


def shapes() -> dict[str, Shape]:
    """The shapes by name; every layer is a MoE layer with one shared expert."""
    common: dict[str, Any] = {"num_kv_heads": 2, "head_dim": 32, "top_k": 4, "num_shared_experts": 1}
    small = ModelConfig(
        vocab_size=4096,
        hidden_size=128,
        num_layers=8,
        num_heads=4,
        num_experts=16,
        expert_intermediate_size=64,
        **common,
    )
    medium = ModelConfig(
        vocab_size=8192,
        hidden_size=192,
        num_layers=8,
        num_heads=6,
        num_experts=32,
        expert_intermediate_size=96,
        **common,
    )
    return {"small": Shape(small, 8, 256), "medium": Shape(medium, 16, 256)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=shapes(), default="small")
    parser.add_argument("--steps", type=int, default=12, help="timed steps of each; the median is shown")
    parser.add_argument("--threads", type=int, default=0, help="threads of torch; default: all cores")
    parser.add_argument(
        "--compile", action="store_true", help="our blocks through torch.compile, as train.compile does"
    )
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    shape, num_threads = shapes()[options.shape], torch.get_num_threads()
    ours, theirs = _models(shape.config)
    with threads_kept():
        pace = find_pace("auto", shape.config, lambda: _batch(shape), join("cpu"))
    torch.manual_seed(0)
    ids_BT = torch.randint(shape.config.vocab_size, (shape.rows, shape.length))
    our_loss, their_loss = _our_loss(ours, ids_BT), _their_loss(theirs, ids_BT)
    assert abs(our_loss - their_loss) < 1e-4, f"not the same model: losses {our_loss} and {their_loss}"
    console = wide_console()
    console.print(f"same weights, same batch: loss {our_loss:.6f} ours, {their_loss:.6f} transformers'")

    if options.compile:
        for block in ours.blocks:
            block.compile()
    steps = {
        "ours": _our_step(ours, shape, pace.torch_dtype),
        "fp32": _our_step(build(shape.config, seed=0), shape, torch.float32),
        "theirs": _their_step(theirs, shape, pace.torch_dtype),
    }
    if multiplies_bf16(torch.device("cpu")):
        steps["bf16"] = _our_step(build(shape.config, seed=0), shape, torch.bfloat16)
    best = _fastest_experts(theirs, steps["theirs"], shape, console)
    threads = {name: pace.num_threads if name == "ours" else num_threads for name in steps}
    prepare = {name: partial(torch.set_num_threads, num) for name, num in threads.items()}
    with progress("interleaved", len(steps) * (2 + options.steps)) as advance:
        samples = measure(steps, options.steps, advance, prepare=prepare)
    _show(console, options.shape, shape, pace, samples, best)
    default = ratio(samples, "fp32", "ours")
    # by both clocks: another job disturbs the one, threads that wait for each other the other
    if max(default.wall or 0.0, default.processor) < LEAST:
        raise SystemExit(f"the default is slower than fp32: {times(default.wall)}, at least {LEAST}x is asked")


def _models(config: ModelConfig) -> tuple[Transformer, nn.Module]:
    """Our model and transformers' of the same weights, handed over as a checkpoint on disk."""
    import transformers

    model = build(config, seed=0)
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(f"{folder}/model", model, config, family="glm4_moe")
        theirs = transformers.Glm4MoeForCausalLM.from_pretrained(
            f"{folder}/model", attn_implementation="sdpa", dtype=torch.float32
        )
    return model, theirs.train()


def _targets(ids_BT: Tensor) -> Tensor:
    return torch.cat((ids_BT[:, 1:], torch.full_like(ids_BT[:, :1], IGNORED)), dim=1)


@torch.no_grad()
def _our_loss(model: Transformer, ids_BT: Tensor) -> float:
    logits_BTV = model.logits(ids_BT)
    return float(
        nn.functional.cross_entropy(logits_BTV.flatten(0, 1), _targets(ids_BT).flatten(), ignore_index=IGNORED)
    )


@torch.no_grad()
def _their_loss(model: nn.Module, ids_BT: Tensor) -> float:
    return float(model(ids_BT, labels=ids_BT, use_cache=False).loss)


def _batch(shape: Shape) -> MicroBatch:
    ids_BT = torch.randint(shape.config.vocab_size, (shape.rows, shape.length))
    num_targets = shape.rows * (shape.length - 1)
    return MicroBatch("full", ids_BT, _targets(ids_BT), Context.plain(ids_BT), shape.config.full(), num_targets)


def _our_step(model: Transformer, shape: Shape, dtype: torch.dtype) -> Step:
    optimizers, ranks = build_optimizers(OPTIM, model), join("cpu")

    def step() -> float:
        result = optimisation_step(
            model, optimizers, [_batch(shape)], ranks, clip_norm=OPTIM.clip_norm, balance_rate=0.0, dtype=dtype
        )
        return result.nll

    return step


def _their_step(model: nn.Module, shape: Shape, dtype: torch.dtype) -> Step:
    optimizers = build_optimizers(OPTIM, model)

    def step() -> float:
        ids_BT = _batch(shape).ids_BT
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            loss = model(ids_BT, labels=ids_BT, use_cache=False).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), OPTIM.clip_norm, foreach=True)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def _fastest_experts(model: Any, step: Step, shape: Shape, console: Console) -> str:
    """Leave ``model`` with its fastest expert implementation; returns the name."""
    config = shape.config
    slots = shape.rows * shape.length * config.top_k
    copies = 4 * slots * 3 * config.hidden_size * config.expert_intermediate_size * config.num_layers
    times: dict[str, float] = {}
    for name in EXPERTS_IMPLEMENTATIONS:
        if name == "batched_mm" and copies > BATCHED_BYTES:
            console.print(
                f"transformers' batched_mm: left out, it would keep {copies / 2**30:.0f} GiB of copied weights"
            )
            continue
        model.set_experts_implementation(name)
        times[name] = _processor_s(step, 1)
        if times[name] < HOPELESS * min(times.values()):
            times[name] = _processor_s(step, 3)
    best = min(times, key=lambda name: times[name])
    for name, seconds in times.items():
        console.print(f"transformers' {name}: {seconds / times[best]:.2f}x the step time of its fastest")
    model.set_experts_implementation(best)
    return best


def _processor_s(step: Step, rounds: int) -> float:
    return median(sample.processor_s for sample in measure({"": step}, rounds, warm_up=0)[""])


def _show(
    console: Console,
    name: str,
    shape: Shape,
    pace: Pace,
    samples: dict[str, list[Sample]],
    best: str,
) -> None:
    fastest = fastest_calibration(samples.values())
    config, num_tokens = shape.config, shape.rows * shape.length
    wall = {key: [s.wall_s for s in quiet(each, fastest)] for key, each in samples.items()}
    processor = {key: [s.processor_s for s in each] for key, each in samples.items()}
    title = (
        f"{name}: {config.num_layers} layers, hidden {config.hidden_size}, {config.num_experts} experts, top-{config.top_k}, "
        f"{shape.rows}x{shape.length} tokens, default {pace.dtype}, {pace.num_threads} threads"
    )
    table = Table(title=title)
    for heading in ("", "tokens/s", "tokens per processor-s", "of the matmul rate", "quiet steps"):
        table.add_column(heading, justify="right" if heading else "left")
    labels = {"ours": "stretto, default", "fp32": "stretto, fp32", "bf16": "stretto, bf16"}
    labels = {key: label for key, label in labels.items() if key in samples} | {"theirs": f"transformers, {best}"}
    # both multiply the same matrices, so a step has the same FLOPs; the rate is that of the calibration's product
    flops = 3 * count(config, config.full()).forward_flops(num_tokens, shape.length)
    peak = 2 * CALIBRATION_SIZE**3 / fastest
    for key, label in labels.items():
        step_s = median(wall[key]) if wall[key] else None
        table.add_row(
            label,
            f"{num_tokens / step_s:,.0f}" if step_s else "none quiet",
            f"{num_tokens / median(processor[key]):,.0f}",
            f"{flops / step_s / peak:.0%}" if step_s else "",
            f"{len(wall[key])} of {len(samples[key])}",
        )
    console.print(table)
    line = (
        f"stretto over transformers: {median(processor['theirs']) / median(processor['ours']):.2f}x by processor time"
    )
    if wall["ours"] and wall["theirs"]:
        line += f", {median(wall['theirs']) / median(wall['ours']):.2f}x by wall time"
    console.print(line, soft_wrap=True)
    for key in ("ours", "bf16"):
        if key in samples:
            found = ratio(samples, "fp32", key)
            told = f"{labels[key]} over fp32: {times(found.wall)} by wall time ({found.num_quiet} quiet rounds)"
            console.print(f"{told}, {times(found.processor)} by processor time", soft_wrap=True)


if __name__ == "__main__":
    main()
