"""Forward passes of a batch on this rank's device, by the policy and by networks that only score.

Shape letters: B rows, T positions, L MoE layers, K route slots.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from stretto.learning.batch import Batch
from stretto.learning.distillation import Lesson
from stretto.model.parallel import Ranks
from stretto.model.transformer import Context, Replay, Routing, Transformer
from stretto.ops.documents import Documents
from stretto.ops.logprob import chosen_logprobs
from stretto.ops.matmul import Arithmetic


@dataclass(slots=True, eq=False)
class Pass:
    """One batch and its scores before the update; made by `place`."""

    batch: Batch
    """All ranks' rows."""
    mine: dict[str, Tensor]
    """Arrays of this rank's rows, on the device, by their names in `Batch`, and the loss's ``advantages_BT`` and ``weights_BT``."""
    ctx: Context
    """Context of every forward pass of the policy, with the routes to replay."""
    dtype: torch.dtype = torch.float32
    """Autocast's data type in every forward and backward pass; fp32: without autocast."""
    scores: dict[str, Tensor] = field(default_factory=dict)
    """Log-probabilities [B, T] of the targets, 0 elsewhere, by network; ``policy``: the policy before the update."""
    lessons: tuple[Lesson, ...] = ()
    """The teachers' scores of this rank's rows."""
    num_flips: int = 0
    """Number of pairs (token, MoE layer) for which the policy would choose other experts than the engine recorded."""
    num_recorded: int = 0
    """Number of pairs (token, MoE layer) with recorded routes."""

    @property
    def autocast(self) -> torch.autocast:
        """Context of the forward passes."""
        kind = self.mine["tokens_BT"].device.type
        return torch.autocast(kind, self.dtype, enabled=self.dtype != torch.float32)


def place(batch: Batch, ranks: Ranks, arithmetic: Arithmetic, *, replays: bool) -> Pass:
    """This rank's rows of ``batch``, on its device. ``replays``: replay the engine's routes (R3)."""
    part = batch.rows(ranks.rows(len(batch.tokens_BT)))
    mine = {
        name: torch.from_numpy(value).to(ranks.device)
        for name in Batch.__slots__
        if (value := getattr(part, name)) is not None
    }
    operators, dtype = arithmetic.training(ranks.device)
    ctx = Context(
        mine["positions_BT"],
        mine["documents_BT"],
        shared_BT2=mine["shared_BT2"],
        operators=operators,
        documents=Documents.of(mine["documents_BT"], part.documents_BT, part.shared_BT2),
        routing=Replay(mine["routes_BTLK"]) if replays else None,
    )
    return Pass(batch, mine, ctx, dtype)


@torch.no_grad()
def score(model: Transformer, micro: Pass, temperature: float, routing: Routing | None = None) -> Tensor:
    """Log-probabilities [B, T] of the targets under ``model``, 0 elsewhere. ``routing`` None: the model's own routes."""
    tokens_BT, ctx = micro.mine["tokens_BT"], replace(micro.ctx, routing=routing)
    with micro.autocast:
        output = model(tokens_BT, model.config.full(), ctx)
        logp_N, _ = chosen_logprobs(
            output.hidden_BTD.flatten(0, 1),
            model.head_VD,
            micro.mine["targets_BT"].flatten(),
            temperature,
            operators=ctx.operators,
        )
    return logp_N.view_as(tokens_BT)
