"""Held-out loss of Subnets, and KL to the full network.

Candidate Subnets are compared by loss and by KL to the full network, not by multiple-choice scores: small networks score at
chance level, so their ranking would be random.

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
from stretto.ops.documents import Documents
from stretto.ops.logprob import IGNORED, Teacher, head_loss

NO_TARGETS = "held-out data: contains no target token; give longer documents or more of them"
GRAM_ROWS = 1 << 14
"""Rows of the head that are converted to fp32 at a time; the whole head of a large vocabulary would take gigabytes."""


@dataclass(frozen=True, slots=True)
class EvalBatch:
    """A batch on its device. Held-out batches are used many times."""

    ids_BT: Tensor
    """Token ids, int64."""
    targets_BT: Tensor
    """Next tokens, int64; `IGNORED` where there is no loss."""
    ctx: Context

    @staticmethod
    def of(batch: Batch, device: torch.device | str) -> EvalBatch:
        """The loader's ``batch`` on ``device``."""
        ids_BT, targets_BT, documents_BT, positions_BT = (
            torch.from_numpy(array).to(device=device, dtype=torch.int64, non_blocking=True)
            for array in (batch.tokens_BT, batch.targets_BT, batch.documents_BT, batch.positions_BT)
        )
        documents = Documents.of(documents_BT, batch.documents_BT)
        return EvalBatch(ids_BT, targets_BT, Context(positions_BT, documents_BT, documents=documents))

    @property
    def real_BT(self) -> Tensor:
        """Mask of the tokens that belong to a document, bool; padding is False."""
        is_real_BT = self.ctx.is_real_BT
        return torch.ones_like(self.ids_BT, dtype=torch.bool) if is_real_BT is None else is_real_BT


@dataclass(frozen=True, slots=True)
class LossReport:
    """Loss of one Subnet over held-out tokens."""

    nll: float
    """Mean negative log-likelihood, nats per token."""
    num_tokens: int
    """Number of target tokens."""
    kl: float | None = None
    """Mean KL(full ‖ Subnet), nats per token; None unless requested."""
    logit_error: float | None = None
    """Squared distance of the logits to the full network's, divided by the squared norm of the latter; None unless requested."""


def evaluate(model: Transformer, subnet: Subnet, batches: Sequence[EvalBatch]) -> LossReport:
    """Loss of ``subnet`` over ``batches``, mean over tokens."""
    return evaluate_many(model, [subnet], batches)[0]


@dataclass(frozen=True, slots=True)
class _Sums:
    """Sums over the target tokens of some batches. Written by `_sum_up`."""

    of_subnets: list[dict[str, float]]
    """For each Subnet, ``nll`` and, if measured, ``kl`` and ``error``."""
    num_tokens: int
    full_size: float
    """Squared norm of the full network's logits; 0 if not measured."""


def evaluate_many(
    model: Transformer,
    subnets: Sequence[Subnet],
    batches: Sequence[EvalBatch],
    *,
    against_full: bool = False,
    advance: Callable[[int], None] = lambda num: None,
) -> list[LossReport]:
    """Losses of ``subnets`` over the same batches, in the dtype of the weights or of autocast.

    Args:
        against_full: also measure KL and logit error to the full network, which runs once per batch.
        advance: called with 1 after each Subnet and batch, ``len(subnets) * len(batches)`` times in total.

    Raises:
        UserError: a Subnet that does not fit the network, or batches without a target token.
    """
    sums = _sum_up(model, subnets, batches, against_full, advance)
    if sums.num_tokens == 0:
        raise UserError(NO_TARGETS)
    return [
        LossReport(
            nll=total["nll"] / sums.num_tokens,
            num_tokens=sums.num_tokens,
            kl=total["kl"] / sums.num_tokens if against_full else None,
            logit_error=total["error"] / sums.full_size if against_full else None,
        )
        for total in sums.of_subnets
    ]


@torch.no_grad()
def _sum_up(
    model: Transformer,
    subnets: Sequence[Subnet],
    batches: Sequence[EvalBatch],
    against_full: bool = False,
    advance: Callable[[int], None] = lambda num: None,
) -> _Sums:
    for subnet in subnets:
        check_subnet(model.config, subnet)
    sums: list[dict[str, float]] = [defaultdict(float) for _ in subnets]
    head_VD = model.head_VD.detach()  # otherwise head_loss would compute its gradient
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
    return _Sums(sums, num_tokens, full_size)


def logit_gram(head_VD: Tensor) -> Tensor:
    """WᵀW of the head, in fp32. With |W·d|² = dᵀ(WᵀW)d, norms of logits need no [N, V] tensor."""
    gram_DD = torch.zeros(head_VD.shape[1], head_VD.shape[1], device=head_VD.device)
    with torch.autocast(head_VD.device.type, enabled=False):
        for rows_VD in head_VD.split(GRAM_ROWS):
            gram_DD.addmm_(rows_VD.float().T, rows_VD.float())
    return gram_DD


def logit_size(hidden_ND: Tensor, gram_DD: Tensor) -> float:
    """Sum over tokens of the squared norm of the logits of ``hidden_ND``."""
    with torch.autocast(gram_DD.device.type, enabled=False):
        wide_ND = hidden_ND.float()
        return float(((wide_ND @ gram_DD) * wide_ND).double().sum())


def held_out_losses(
    model: Transformer, presets: Mapping[str, SubnetChoice], batches: Sequence[EvalBatch], ranks: Ranks
) -> dict[str, float]:
    """Losses of the full network and of every preset by name, over the ``batches`` of all ranks.

    Raises `UserError`, on all ranks: no rank has a target token. One rank alone may have rows of padding only.
    """
    subnets = named_subnets(model.config, presets)
    own = _sum_up(model, list(subnets.values()), batches)
    sums = torch.tensor([[total["nll"], own.num_tokens] for total in own.of_subnets])
    sums = ranks.sum(sums.to(ranks.device)).cpu()
    if not sums[0, 1]:
        raise UserError(NO_TARGETS)
    return {name: float(nll / num) for name, (nll, num) in zip(subnets, sums, strict=True)}


def without_layers(config: ModelConfig, dropped: set[int]) -> Subnet:
    """The full network without the layers ``dropped``."""
    return config.full(layer for layer in range(config.num_layers) if layer not in dropped)
