"""FP8 against bf16: a large product, and the training step."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from bench.common.gpu_part import (
    CEILING_SIZE,
    Case,
    Outcome,
    Setting,
    median_seconds,
    network,
    step_rate,
    training_step,
)
from stretto.ops import fp8
from stretto.ops.matmul import Arithmetic


def cases(setting: Setting) -> Iterator[Case]:
    if setting.device.type == "cuda":
        yield Case("large product, blocks", partial(_blockwise_rate, setting.device))
    rows, length = setting.rows
    yield Case(f"{setting.size}, {rows * length:,} tokens, over bf16", partial(_training, setting))


def _blockwise_rate(device: torch.device) -> Outcome:
    x_ND, weight_FD = (torch.randn(CEILING_SIZE, CEILING_SIZE, device=device) for _ in range(2))
    x, weight = fp8.quantise_rows(x_ND), fp8.quantise_weight(weight_FD)
    seconds = median_seconds(lambda: fp8.product_hopper(x, weight), device, 10)
    return Outcome({"TFLOP/s": 2 * CEILING_SIZE**3 / seconds / 1e12})


def _training(setting: Setting) -> Outcome:
    model = network(setting.config, setting.device)
    bf16 = step_rate(training_step(model, setting), setting)
    low = step_rate(training_step(model, setting, arithmetic=Arithmetic("fp8")), setting)
    return Outcome(low.values | {"over bf16": low.tokens_per_s / bf16.tokens_per_s})
