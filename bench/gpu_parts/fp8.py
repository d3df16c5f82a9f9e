"""FP8 against bf16: a large product, the training step, and the loss of a small network that learns an artificial language in both.

Each token of the language is followed by one of `FOLLOWERS` others, all equally probable; a network that knows them all has a loss of
ln(`FOLLOWERS`) = 1.386 nats.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from statistics import mean

import torch
from torch import Tensor

from bench.common.gpu_part import (
    CEILING_SIZE,
    Case,
    Outcome,
    Setting,
    batch_of,
    median_seconds,
    network,
    run_step,
    step_rate,
    training_step,
)
from stretto.model.transformer import build
from stretto.ops import fp8
from stretto.ops.matmul import Arithmetic
from stretto.ops.operators import ORDINARY
from stretto.optim.build import build_optimizers
from stretto.optim.schedule import OptimConfig

FOLLOWERS = 4
LOSS_STEPS = 500


def cases(setting: Setting) -> Iterator[Case]:
    if setting.device.type == "cuda":
        yield Case("large product, blocks", partial(_blockwise_rate, setting.device))
    rows, length = setting.rows
    yield Case(f"{setting.size}, {rows * length:,} tokens, over bf16", partial(_training, setting))
    yield Case("loss of a small network", partial(_losses, setting))


def _losses(setting: Setting) -> Outcome:
    """Mean loss of the last tenth of the steps, from the same weights on the same rows."""
    small = replace(setting, size="small" if setting.device.type == "cuda" else "tiny")
    num_steps, last = LOSS_STEPS if setting.device.type == "cuda" else 20, {}
    for kind, arithmetic in (("bf16", None), ("FP8", Arithmetic("fp8"))):
        model, ids_RT = build(small.config, 0, setting.device), _language(small, num_steps)
        operators, dtype = (ORDINARY, torch.bfloat16) if arithmetic is None else arithmetic.training(setting.device)
        optimizers, losses = build_optimizers(OptimConfig(lr=2e-3), model), []
        for ids_BT in ids_RT.split(small.rows[0]):
            batch = batch_of(ids_BT, small.config)
            batch = replace(batch, ctx=replace(batch.ctx, operators=operators))
            losses.append(run_step(model, optimizers, [batch], small, dtype).nll)
        last[kind] = mean(losses[-num_steps // 10 :])
    return Outcome(
        {
            "steps": num_steps,
            **{f"nats, {kind}": nats for kind, nats in last.items()},
            "more": last["FP8"] - last["bf16"],
        }
    )


def _language(setting: Setting, num_steps: int) -> Tensor:
    """Ids [R, T] of the rows of all steps."""
    (rows, length), vocab_size, device = setting.rows, setting.config.vocab_size, setting.device
    generator, num = torch.Generator(device).manual_seed(7), num_steps * rows
    followers_VX = torch.randint(vocab_size, (vocab_size, FOLLOWERS), generator=generator, device=device)
    choices_TR = torch.randint(FOLLOWERS, (length, num), generator=generator, device=device)
    ids_TR = torch.empty_like(choices_TR)
    ids_TR[0] = torch.randint(vocab_size, (num,), generator=generator, device=device)
    for at in range(1, length):
        ids_TR[at] = followers_VX[ids_TR[at - 1], choices_TR[at]]
    return ids_TR.t().contiguous()


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
