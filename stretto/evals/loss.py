"""Held-out loss of Subnets, and how far each lies from the full network.

Candidates are compared by loss and by KL to the full network, never by a multiple-choice score: at small sizes those
sit at chance and rank at random.

Shape letters: B rows, T positions, N tokens that carry a loss, D hidden, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.base.errors import UserError
from stretto.data.loader import Batch
from stretto.model.spec import Subnet, check_subnet
from stretto.model.transformer import Context, Transformer
from stretto.ops.logprob import IGNORED, Teacher, head_loss
from stretto.train.batch import tensors


@dataclass(frozen=True, slots=True)
class EvalBatch:
    """A held-out batch on the device where it is evaluated, again and again."""

    ids_BT: Tensor
    """Token ids, int64."""
    targets_BT: Tensor
    """Next tokens, int64; `IGNORED` where there is no loss."""
    ctx: Context


def to_device(batches: Iterable[Batch], device: torch.device | str) -> tuple[EvalBatch, ...]:
    """Move the loader's batches to ``device``, once."""
    return tuple(EvalBatch(*tensors(batch, torch.device(device))) for batch in batches)


@dataclass(frozen=True, slots=True)
class LossReport:
    """Loss of one Subnet over held-out tokens. Reports over disjoint tokens (domains, ranks) add up."""

    nll: float
    """Mean negative log-likelihood, nats per token."""
    num_tokens: int
    """Tokens that carry a loss."""
    wall_s: float
    """Seconds spent on this Subnet, the full network's passes excluded."""
    kl: float | None = None
    """Mean KL(full ‖ Subnet), nats per token; None where it was not asked for."""
    logit_error: float | None = None
    """Squared distance of the logits to the full network's over the squared size of those; None as above."""

    def __add__(self, other: LossReport) -> LossReport:
        total = self.num_tokens + other.num_tokens

        def mean(left: float | None, right: float | None) -> float | None:
            if left is None or right is None:
                return None
            return (left * self.num_tokens + right * other.num_tokens) / total

        nll = mean(self.nll, other.nll)
        assert nll is not None
        # a ratio of two sums over different tokens does not add up from the ratios
        return LossReport(nll, total, self.wall_s + other.wall_s, mean(self.kl, other.kl))


def evaluate(
    model: Transformer, subnet: Subnet, batches: Sequence[EvalBatch], *, autocast: torch.dtype | None = None
) -> LossReport:
    """Loss of ``subnet`` over ``batches``, each token weighing the same."""
    return evaluate_many(model, [subnet], batches, autocast=autocast)[0]


def evaluate_domains(
    model: Transformer,
    subnet: Subnet,
    domains: Mapping[str, Sequence[EvalBatch]],
    *,
    autocast: torch.dtype | None = None,
) -> dict[str, LossReport]:
    """Loss of ``subnet`` on each data set by itself; the sum of the reports is the loss over all their tokens."""
    return {name: evaluate(model, subnet, batches, autocast=autocast) for name, batches in domains.items()}


def evaluate_many(
    model: Transformer,
    subnets: Sequence[Subnet],
    batches: Sequence[EvalBatch],
    *,
    autocast: torch.dtype | None = None,
    advance: Callable[[int], None] | None = None,
) -> list[LossReport]:
    """Loss of each of ``subnets`` over the same batches.

    Args:
        autocast: run under autocast to this dtype; None computes in the dtype of the weights.
        advance: called with 1 after each Subnet and batch, ``len(subnets) * len(batches)`` times in all.

    Raises:
        UserError: a Subnet lies outside the network, or no token of the batches carries a loss.
    """
    return _run(model, subnets, batches, autocast, advance, against_full=False)


def compare_many(
    model: Transformer,
    subnets: Sequence[Subnet],
    batches: Sequence[EvalBatch],
    *,
    autocast: torch.dtype | None = None,
    advance: Callable[[int], None] | None = None,
) -> list[LossReport]:
    """`evaluate_many`, and the distance of each Subnet to the full network, which runs once a batch."""
    return _run(model, subnets, batches, autocast, advance, against_full=True)


def kl_to_full(
    model: Transformer, subnet: Subnet, batches: Sequence[EvalBatch], *, autocast: torch.dtype | None = None
) -> float:
    """Mean KL(full network ‖ ``subnet``) in nats per token."""
    kl = compare_many(model, [subnet], batches, autocast=autocast)[0].kl
    assert kl is not None
    return kl


@torch.no_grad()
def _run(
    model: Transformer,
    subnets: Sequence[Subnet],
    batches: Sequence[EvalBatch],
    autocast: torch.dtype | None,
    advance: Callable[[int], None] | None,
    against_full: bool,
) -> list[LossReport]:
    for subnet in subnets:
        check_subnet(model.config, subnet)
    sums = [_Sums() for _ in subnets]
    head_VD = model.head_VD.detach()  # a leaf that wants a gradient would make head_loss compute one
    # |W·d|² = dᵀ(WᵀW)d: the [N, V] logits of the difference are never formed
    gram_DD = head_VD.float().T @ head_VD.float() if against_full else None
    num_tokens, full_size = 0, 0.0
    with torch.autocast(head_VD.device.type, dtype=autocast, enabled=autocast is not None):
        for batch in batches:
            kept_BT = batch.targets_BT != IGNORED
            targets_N = batch.targets_BT[kept_BT]
            num_tokens += targets_N.numel()
            full_ND = None
            if gram_DD is not None:
                full_ND = model(batch.ids_BT, model.config.full(), batch.ctx).hidden_BTD[kept_BT]
                full_size += _logit_size(full_ND, gram_DD)
            for subnet, total in zip(subnets, sums, strict=True):
                start = time.perf_counter()
                hidden_ND = model(batch.ids_BT, subnet, batch.ctx).hidden_BTD[kept_BT]
                teacher = None if full_ND is None else Teacher(full_ND, head_VD)
                kl, nll_N = head_loss(hidden_ND, head_VD, targets_N, teacher, 1.0 if teacher is None else 0.0)
                total.nll += float(nll_N.double().sum())
                if full_ND is not None and gram_DD is not None:
                    total.kl += float(kl)
                    total.error += _logit_size(hidden_ND - full_ND, gram_DD)
                total.wall_s += time.perf_counter() - start
                if advance is not None:
                    advance(1)
    if num_tokens == 0:
        raise UserError("held-out data: no token carries a loss; give longer documents or more of them")
    return [
        LossReport(
            nll=total.nll / num_tokens,
            num_tokens=num_tokens,
            wall_s=total.wall_s,
            kl=total.kl / num_tokens if against_full else None,
            logit_error=total.error / full_size if against_full else None,
        )
        for total in sums
    ]


@dataclass(slots=True)
class _Sums:
    """Running sums of one Subnet over the batches."""

    nll: float = 0.0
    kl: float = 0.0
    error: float = 0.0
    wall_s: float = 0.0


def _logit_size(hidden_ND: Tensor, gram_DD: Tensor) -> float:
    """Sum over tokens of the squared length of the logits of ``hidden_ND``."""
    with torch.autocast(hidden_ND.device.type, enabled=False):
        wide_ND = hidden_ND.float()
        return float(((wide_ND @ gram_DD) * wide_ND).double().sum())
