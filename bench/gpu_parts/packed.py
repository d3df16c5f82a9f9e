"""Packed rows of several documents against whole rows, both in bf16: speed of a training step, and its memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from bench.common.gpu_part import Case, Outcome, Setting, network, step_rate, training_step
from stretto.model.transformer import Context

MEAN_DOCUMENTS = 4
"""Mean number of documents in a row."""


def cases(setting: Setting) -> Iterator[Case]:
    rows, length = setting.rows
    yield Case(f"{setting.size}, {rows} rows of {length}, {MEAN_DOCUMENTS} documents each", lambda: _packed(setting))


def packed_context(ids_BT: Tensor) -> Context:
    """Documents that end at random places."""
    ctx = Context.plain(ids_BT)
    starts_BT = torch.rand(ids_BT.shape, device=ids_BT.device) < (MEAN_DOCUMENTS - 1) / ids_BT.shape[1]
    first_BT = torch.where(starts_BT, ctx.positions_BT, 0).cummax(1).values
    return replace(ctx, positions_BT=ctx.positions_BT - first_BT, documents_BT=starts_BT.cumsum(1))


def _packed(setting: Setting) -> Outcome:
    model = network(setting.config, setting.device)
    whole = step_rate(training_step(model, setting), setting)
    packed = step_rate(training_step(model, setting, context=packed_context), setting)
    return Outcome(
        {
            "tokens/s, whole": whole.tokens_per_s,
            "tokens/s, packed": packed.tokens_per_s,
            "packed over whole": packed.tokens_per_s / whole.tokens_per_s,
            "peak GiB, whole": whole.peak_gib,
            "peak GiB, packed": packed.peak_gib,
        }
    )
