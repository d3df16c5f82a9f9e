"""Training steps of one micro-batch (16k tokens of the large networks) and of four (65k), with clipping and the router's own choices.

Plain, compiled and reproducible in bf16, and once in fp32, beside a large bf16 product of the GPU's library. Split weights are bf16 halves
of the fp32 masters (``optim.master = "split"``), which need no casts; their gradients are in bf16.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial

import torch

from bench.common.gpu_part import (
    CEILING_SIZE,
    OPTIM,
    Case,
    Outcome,
    Setting,
    median_seconds,
    network,
    step_rate,
    training_step,
)
from stretto.model.transformer import Transformer
from stretto.ops.tuning import deterministic
from stretto.optim.schedule import OptimConfig

MICRO = (1, 4)
"""Micro-batches of a step."""


def cases(setting: Setting) -> Iterator[Case]:
    """The steps; compiled ones last, since blocks stay compiled, as weights stay split."""

    @cache
    def model() -> Transformer:
        return network(setting.config, setting.device)

    def rate(
        num_micro: int, dtype: torch.dtype = torch.bfloat16, is_compiled: bool = False, optim: OptimConfig = OPTIM
    ) -> Outcome:
        if is_compiled:
            for block in model().blocks:
                block.compile()
        step = training_step(model(), setting, num_micro=num_micro, dtype=dtype, optim=optim)
        return Outcome(step_rate(step, setting, num_micro).values)

    def reproducible() -> Outcome:
        with deterministic():
            return rate(1)

    rows, length = setting.rows
    yield Case("large product, bf16", partial(product_rate, setting.device))
    for num_micro in MICRO:
        yield Case(f"{setting.size}, {num_micro * rows * length:,} tokens, bf16", partial(rate, num_micro))
    yield Case(f"{setting.size}, {rows * length:,} tokens, bf16, reproducible", reproducible)
    yield Case(f"{setting.size}, {rows * length:,} tokens, fp32", partial(rate, 1, torch.float32))
    for num_micro in MICRO:
        name = f"{setting.size}, {num_micro * rows * length:,} tokens, bf16, compiled"
        yield Case(name, partial(rate, num_micro, is_compiled=True))
    split = OPTIM.replace(master="split")
    yield Case(f"{name}, split weights", partial(rate, MICRO[-1], is_compiled=True, optim=split))


def product_rate(device: torch.device) -> Outcome:
    """A square product, in FLOP/s."""
    size = CEILING_SIZE if device.type == "cuda" else CEILING_SIZE // 16
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds = median_seconds(lambda: a @ b, device, 10)
    return Outcome({"size": float(size), "TFLOP/s": 2 * size**3 / seconds / 1e12})
