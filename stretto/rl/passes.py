"""A packed batch on its way through a training step: which forward passes it takes, all with the same routes.

Shape letters: B rows, T positions, N targets of a step over all ranks, L MoE layers, K route slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from stretto.data.pack import IGNORED, PADDING
from stretto.model.count import count
from stretto.model.parallel import Ranks
from stretto.model.spec import ModelConfig, Subnet
from stretto.model.transformer import Context, Transformer
from stretto.ops.logprob import chosen_logprobs
from stretto.ops.matmul import Arithmetic
from stretto.rl.batches import Batch
from stretto.rl.objective import PolicyObjective
from stretto.rl.recipe import LossConfig
from stretto.train.step import MicroBatch


@dataclass(slots=True, eq=False)
class Pass:
    """One batch and what is found out about it before the update; made by `place`."""

    batch: Batch
    """All ranks' rows."""
    rows: slice
    """This rank's."""
    mine: dict[str, Tensor]
    """Streams of this rank's rows, on the device, by their names in `Batch`."""
    ctx: Context
    """Of every pass of the policy; its routes are what is replayed."""
    proximal_BT: Tensor | None
    """Centre of the trust region; None: the policy as the update itself finds it, which is the same in a first update."""
    reference_BT: Tensor | None = None
    num_flips: int = 0
    """Places, (token, MoE layer), where the policy's own choice of experts is not what the engine recorded."""
    num_recorded: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """A forward pass without gradient; written by `score`."""

    logp_BT: Tensor
    """Of the targets, 0 elsewhere."""
    own_BTLK: Tensor | None
    """The network's own choice of experts."""


def place(batch: Batch, ranks: Ranks, arithmetic: Arithmetic, *, replays: bool) -> Pass:
    """This rank's rows of ``batch``, on its device. ``replays``: with the engine's routes (R3)."""
    rows = ranks.rows(len(batch.tokens_BT))
    part = batch.rows(rows)
    mine = {
        name: torch.from_numpy(value).to(ranks.device)
        for name in Batch.__slots__
        if (value := getattr(part, name)) is not None
    }
    routes_BTLK = mine["routes_BTLK"] if replays else None
    ctx = Context(
        mine["positions_BT"],
        mine["documents_BT"],
        shared_BT2=mine["shared_BT2"],
        routes_BTLK=routes_BTLK,
        arithmetic=arithmetic,
    )
    return Pass(batch, rows, mine, ctx, mine["behaviour_BT"])


@torch.no_grad()
def score(
    model: Transformer, each: Pass, temperature: float, *, want_routes: bool = False, replays: bool = False
) -> Scored:
    """Log-probabilities under ``model``. A reference network takes its own routes, the policy (``replays``) those of the pass."""
    ctx = replace(each.ctx, routes_BTLK=each.ctx.routes_BTLK if replays else None, want_routes=want_routes)
    tokens_BT = each.mine["tokens_BT"]
    output = model(tokens_BT, model.config.full(), ctx)
    logp_N, _ = chosen_logprobs(
        output.hidden_BTD.flatten(0, 1),
        model.head_VD,
        each.mine["targets_BT"].flatten(),
        temperature,
        arithmetic=ctx.arithmetic,
    )
    return Scored(logp_N.view_as(tokens_BT), output.routes_BTLK)


def recompute(model: Transformer, each: Pass, temperature: float, replay: str) -> None:
    """Make the policy as it is the centre of the trust region, and compare its choice of experts with the engine's.

    With R2 that choice is what the update replays; what was scored here took it, as nothing else was told.
    """
    found = score(model, each, temperature, want_routes=True, replays=True)
    each.proximal_BT = found.logp_BT
    recorded_BTLK, own_BTLK = each.mine.get("routes_BTLK"), found.own_BTLK
    assert own_BTLK is not None, "the pass was asked for routes"
    if recorded_BTLK is not None:
        is_known_BTL = (recorded_BTLK[..., 0] >= 0) & (each.mine["documents_BT"] != PADDING)[..., None]
        is_other_BTL = (own_BTLK.sort(-1).values != recorded_BTLK.sort(-1).values).any(-1)
        each.num_flips, each.num_recorded = int((is_other_BTL & is_known_BTL).sum()), int(is_known_BTL.sum())
    if replay == "r2":
        each.ctx = replace(each.ctx, routes_BTLK=own_BTLK)


def micro_batch(each: Pass, loss: LossConfig, temperature: float, subnet: Subnet) -> MicroBatch:
    """The pass as the optimisation step takes it."""
    objective = PolicyObjective(
        loss,
        temperature,
        each.mine["advantages_BT"].flatten(),
        each.mine["weights_BT"].flatten(),
        each.mine["behaviour_BT"].flatten(),
        None if each.proximal_BT is None else each.proximal_BT.flatten(),
        each.mine["samples_BT"].flatten(),
        None if each.reference_BT is None else each.reference_BT.flatten(),
        each.ctx.arithmetic,
    )
    tokens_BT, targets_BT = each.mine["tokens_BT"], each.mine["targets_BT"]
    return MicroBatch("policy", tokens_BT, targets_BT, each.ctx, subnet, each.batch.num_targets, objective=objective)


def gather(passes: Sequence[Pass], ranks: Ranks, mine: Sequence[Tensor]) -> np.ndarray:
    """What all ranks hold of the targets' values, in the order of the batches: fp64 [N]."""
    assert len(passes) == len(mine), f"{len(passes)} passes, values for {len(mine)}"
    parts = []
    for each, value in zip(passes, mine, strict=True):
        whole_BT = torch.zeros(each.batch.tokens_BT.shape, device=ranks.device)
        whole_BT[each.rows] = value.view(-1, whole_BT.shape[1])
        parts.append(ranks.sum(whole_BT).cpu().numpy()[each.batch.targets_BT != IGNORED])
    return np.concatenate(parts).astype(np.float64)


def forward_flops(config: ModelConfig, passes: Sequence[Pass]) -> int:
    """FLOPs of one forward pass of the whole network over all ranks' rows."""
    counts = count(config, config.full())
    shapes = [each.batch.tokens_BT.shape for each in passes]
    return sum(counts.forward_flops(rows * length, length) for rows, length in shapes)
