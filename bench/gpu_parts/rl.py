"""Reinforcement learning in bf16: speed of the trainer's step against SFT's, and the mismatch with the engine at staleness 0.

A step of the policy loss replays recorded routes (R3) and computes as the trainer does on this device. The mismatch is k3 =
mean(exp(d) − 1 − d) over sampled tokens, with d = the trainer's log-probability − the engine's; it must be at most 1e-3 nats, and 0 in
batch-invariant arithmetic. FP8 is beside it: the engine's weights are the trainer's, its activations stay in bf16.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from bench.common.gpu_part import (
    OPTIM,
    Case,
    Outcome,
    Setting,
    batch_of,
    network,
    random_ids,
    run_step,
    step_rate,
    training_step,
)
from bench.common.networks import random_network, shape
from stretto.engine.engine import Engine
from stretto.engine.request import EngineConfig, Phases, Request, Sampling
from stretto.learning.objective import PolicyObjective
from stretto.learning.recipe import LossConfig
from stretto.learning.samples import signed_routes
from stretto.model.transformer import Context, Recorder, Replay, Transformer
from stretto.ops.logprob import IGNORED, chosen_logprobs
from stretto.ops.matmul import Arithmetic, default_precision
from stretto.optim.build import build_optimizers

MAX_K3 = 1e-3


def cases(setting: Setting) -> Iterator[Case]:
    yield Case("mismatch, bf16, replayed routes", partial(_mismatch, setting, Arithmetic("bf16"), MAX_K3))
    yield Case("mismatch, bf16, batch-invariant", partial(_mismatch, setting, Arithmetic("bf16", True), 0.0))
    yield Case("mismatch, FP8, replayed routes", partial(_mismatch, setting, Arithmetic("fp8"), None))
    rows, length = setting.rows
    yield Case(f"{setting.size}, {rows * length:,} tokens, over SFT", partial(_speed, setting))


@torch.no_grad()
def _mismatch(setting: Setting, arithmetic: Arithmetic, most: float | None) -> Outcome:
    """``most``: largest k3 for which the check holds; None: it is measured only."""
    device = setting.device
    model = random_network(shape("demo")[0]).to(device)
    rolled_out = deepcopy(model)
    if arithmetic.precision == "fp8" and device.type == "cuda":
        rolled_out = rolled_out.to(torch.bfloat16)
    sizes = EngineConfig(
        num_pages=400, max_batch=8, precision=arithmetic.precision, batch_invariant=arithmetic.batch_invariant
    )
    asked = [
        Request(str(place), tuple(range(10 + place, 30 + 3 * place)), Sampling(seed=place, max_tokens=48),
                Phases(model.config.full()), want_routes=True)
        for place in range(8)
    ]  # fmt: skip
    gaps = []
    for done in Engine(rolled_out, None, sizes).generate(asked):
        assert done.routes is not None, "they were asked for"
        ids_BT = torch.tensor([[*done.prompt, *done.tokens]], device=device)
        routes_BTLK = torch.from_numpy(signed_routes(done.routes)).to(device)[None]  # none for the last token
        routes_BTLK = torch.cat((routes_BTLK, torch.full_like(routes_BTLK[:, :1], -1)), 1)
        logp_T = _scores(model, ids_BT, arithmetic, routes_BTLK)[len(done.prompt) - 1 : -1]
        gaps.append((logp_T - torch.from_numpy(done.logprobs).to(device)).double())
    gap_N = torch.cat(gaps)
    k3 = float((gap_N.expm1() - gap_N).mean())
    values = {"k3, nats": k3, "largest gap, nats": float(gap_N.abs().max()), "tokens": len(gap_N)}
    return Outcome(values, None if most is None else k3 <= most)


def _scores(model: Transformer, ids_BT: Tensor, arithmetic: Arithmetic, routes_BTLK: Tensor) -> Tensor:
    """Log-probability [T] of each next token, as the trainer computes it."""
    operators, dtype = arithmetic.training(ids_BT.device)
    ctx = replace(Context.plain(ids_BT), operators=operators, routing=Replay(routes_BTLK))
    targets_T = torch.cat((ids_BT[0, 1:], ids_BT.new_full((1,), IGNORED)))
    with torch.autocast(ids_BT.device.type, dtype, enabled=dtype != torch.float32):
        hidden_TD = model(ids_BT, model.config.full(), ctx).hidden_BTD[0]
        return chosen_logprobs(hidden_TD, model.head_VD, targets_T, operators=operators)[0]


def _speed(setting: Setting) -> Outcome:
    model, arithmetic = network(setting.config, setting.device), Arithmetic(default_precision(setting.device))
    operators, dtype = arithmetic.training(setting.device)
    sft = step_rate(training_step(model, setting, dtype=dtype), setting)
    batch = batch_of(random_ids(setting), setting.config)
    recorder = Recorder(setting.config, batch.ids_BT)
    with torch.no_grad():
        model(batch.ids_BT, batch.subnet, replace(batch.ctx, routing=recorder))
    zeros_BT = torch.zeros(setting.rows, device=setting.device)
    streams = {"behaviour_BT": zeros_BT, "weights_BT": zeros_BT + 1 / zeros_BT.numel()}
    streams |= {"samples_BT": zeros_BT.long(), "advantages_BT": zeros_BT + 1}
    objective = PolicyObjective(LossConfig(), 1.0, streams, zeros_BT, operators=operators)
    ctx = replace(batch.ctx, operators=operators, routing=Replay(recorder.own_BTLK))
    optimizers = build_optimizers(OPTIM, model)
    batch = replace(batch, ctx=ctx, objective=objective)
    rl = step_rate(lambda: run_step(model, optimizers, [batch], setting, dtype), setting)
    return Outcome(rl.values | {"over SFT": rl.tokens_per_s / sft.tokens_per_s})
