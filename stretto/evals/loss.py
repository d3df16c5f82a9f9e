"""Held-out loss of Subnets, and KL to the full network.

Candidates are compared by loss and by KL to the full network, never by a multiple-choice score: at small sizes those
sit at chance and rank at random.

Shape letters: B rows, T positions, N tokens that carry a loss, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.base.errors import UserError
from stretto.data.loader import Batch
from stretto.model.parallel import Ranks
from stretto.model.spec import ModelConfig, Subnet, SubnetChoice, check_subnet, named_subnets
from stretto.model.transformer import Context, Transformer
from stretto.ops.logprob import IGNORED, Teacher, head_loss

GRAM_ROWS = 1 << 14
"""Of the head, widened to fp32 at a time: the whole of a large vocabulary would take gigabytes."""


@dataclass(frozen=True, slots=True)
class EvalBatch:
    """A batch on the device where it is computed; a held-out one again and again."""

    ids_BT: Tensor
    """Token ids, int64."""
    targets_BT: Tensor
    """Next tokens, int64; `IGNORED` where there is no loss."""
    ctx: Context

    @staticmethod
    def of(batch: Batch, device: torch.device | str) -> EvalBatch:
        """The loader's ``batch``, moved to ``device``."""
        ids_BT, targets_BT, documents_BT, positions_BT = (
            torch.from_numpy(array).to(device=device, dtype=torch.int64, non_blocking=True)
            for array in (batch.tokens_BT, batch.targets_BT, batch.documents_BT, batch.positions_BT)
        )
        return EvalBatch(ids_BT, targets_BT, Context(positions_BT, documents_BT))

    @property
    def real_BT(self) -> Tensor:
        """Which tokens belong to a document, and are no padding; bool."""
        documents_BT = self.ctx.documents_BT
        return torch.ones_like(self.ids_BT, dtype=torch.bool) if documents_BT is None else documents_BT >= 0


@dataclass(frozen=True, slots=True)
class LossReport:
    """Loss of one Subnet over held-out tokens."""

    nll: float
    """Mean negative log-likelihood, nats per token."""
    num_tokens: int
    """Tokens that carry a loss."""
    kl: float | None = None
    """Mean KL(full ‖ Subnet), nats per token; None where it was not asked for."""
    logit_error: float | None = None
    """Squared distance of the logits to the full network's over the squared size of those; None as above."""


def evaluate(model: Transformer, subnet: Subnet, batches: Sequence[EvalBatch]) -> LossReport:
    """Loss of ``subnet`` over ``batches``, each token weighing the same."""
    return evaluate_many(model, [subnet], batches)[0]


@torch.no_grad()
def evaluate_many(
    model: Transformer,
    subnets: Sequence[Subnet],
    batches: Sequence[EvalBatch],
    *,
    against_full: bool = False,
    advance: Callable[[int], None] = lambda num: None,
) -> list[LossReport]:
    """Loss of each of ``subnets`` over the same batches, in the dtype of the weights or the one that autocast says.

    Args:
        against_full: also the distance of each to the full network, which runs once a batch.
        advance: called with 1 after each Subnet and batch, ``len(subnets) * len(batches)`` times in all.

    Raises:
        UserError: a Subnet lies outside the network, or no token of the batches carries a loss.
    """
    for subnet in subnets:
        check_subnet(model.config, subnet)
    sums: list[dict[str, float]] = [defaultdict(float) for _ in subnets]
    head_VD = model.head_VD.detach()  # a leaf that wants a gradient would make head_loss compute one
    gram_DD = logit_gram(head_VD) if against_full else None
    num_tokens, full_size = 0, 0.0
    for batch in batches:
        kept_BT = batch.targets_BT != IGNORED
        targets_N = batch.targets_BT[kept_BT]
        num_tokens += targets_N.numel()
        full_ND = None
        if gram_DD is not None:
            full_ND = model(batch.ids_BT, model.config.full(), batch.ctx).hidden_BTD[kept_BT]
            full_size += logit_size(full_ND, gram_DD)
        for subnet, total in zip(subnets, sums, strict=True):
            hidden_ND = model(batch.ids_BT, subnet, batch.ctx).hidden_BTD[kept_BT]
            teacher = None if full_ND is None else Teacher(full_ND, head_VD)
            kl, nll_N = head_loss(hidden_ND, head_VD, targets_N, teacher, 1.0 if teacher is None else 0.0)
            total["nll"] += float(nll_N.double().sum())
            if full_ND is not None and gram_DD is not None:
                total["kl"] += float(kl)
                total["error"] += logit_size(hidden_ND - full_ND, gram_DD)
            advance(1)
    if num_tokens == 0:
        raise UserError("held-out data: no token carries a loss; give longer documents or more of them")
    return [
        LossReport(
            nll=total["nll"] / num_tokens,
            num_tokens=num_tokens,
            kl=total["kl"] / num_tokens if against_full else None,
            logit_error=total["error"] / full_size if against_full else None,
        )
        for total in sums
    ]


def logit_gram(head_VD: Tensor) -> Tensor:
    """WᵀW of the head: |W·d|² = dᵀ(WᵀW)d, so that the [N, V] logits of a difference are never formed."""
    gram_DD = torch.zeros(head_VD.shape[1], head_VD.shape[1], device=head_VD.device)
    with torch.autocast(head_VD.device.type, enabled=False):
        for rows_VD in head_VD.split(GRAM_ROWS):
            gram_DD.addmm_(rows_VD.float().T, rows_VD.float())
    return gram_DD


def logit_size(hidden_ND: Tensor, gram_DD: Tensor) -> float:
    """Sum over tokens of the squared length of the logits of ``hidden_ND``."""
    with torch.autocast(gram_DD.device.type, enabled=False):
        wide_ND = hidden_ND.float()
        return float(((wide_ND @ gram_DD) * wide_ND).double().sum())


def held_out_losses(
    model: Transformer, presets: Mapping[str, SubnetChoice], batches: Sequence[EvalBatch], ranks: Ranks
) -> dict[str, float]:
    """Loss of the full network and of every preset, by name, over all ranks: each has ``batches`` of its own."""
    subnets = named_subnets(model.config, presets)
    reports = evaluate_many(model, list(subnets.values()), batches)
    sums = torch.tensor([[report.nll * report.num_tokens, report.num_tokens] for report in reports])
    sums = ranks.sum(sums.to(ranks.device)).cpu()
    return {name: float(nll / num) for name, (nll, num) in zip(subnets, sums, strict=True)}


def without_layers(config: ModelConfig, dropped: set[int]) -> Subnet:
    """The full network less some layers."""
    return config.full(layer for layer in range(config.num_layers) if layer not in dropped)
