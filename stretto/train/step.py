"""The optimisation step: every stage's gradient goes through here.

A step is a list of micro-batches, each with its Subnet; their losses are sums over tokens, divided once by the number
of target tokens of the whole step over all ranks. How a step is split into micro-batches or ranks changes nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim import Optimizer

from stretto.base.errors import UserError
from stretto.model.count import count
from stretto.model.elastic import update_balance
from stretto.model.parallel import Ranks
from stretto.model.spec import ModelConfig, Subnet, executed
from stretto.model.transformer import Context, Transformer
from stretto.ops.logprob import Teacher, head_loss


@dataclass(frozen=True, slots=True)
class Distil:
    """A network whose distribution the trained Subnet is pulled to."""

    model: Transformer
    """The teacher; for an anchor, the trained model itself."""
    subnet: Subnet
    ce_weight: float
    """Weight of cross-entropy in the loss; the rest is KL(teacher ‖ student)."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """This rank's share of one forward/backward pass."""

    kind: str
    """Label for the log."""
    ids_BT: Tensor
    targets_BT: Tensor
    ctx: Context
    subnet: Subnet
    num_target_tokens: int
    """Targets over all ranks."""
    distil: Distil | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did; sums over all ranks."""

    nll_by_kind: dict[str, float]
    """Summed negative log-likelihood, nats."""
    tokens_by_kind: dict[str, int]
    grad_norm: float
    """Global norm before clipping."""
    flops: int
    """Executed by the model's matrix products, forward and backward, teachers and recomputation included."""
    teacher_flops: int
    """The part of them spent on teachers' forward passes."""
    counts: dict[int, Tensor] = field(default_factory=dict)
    """Slots each expert got, by MoE row, [W, E]."""

    @property
    def num_tokens(self) -> int:
        return sum(self.tokens_by_kind.values())

    @property
    def nll(self) -> float:
        """Mean over the step's target tokens, whatever Subnet they went through."""
        return sum(self.nll_by_kind.values()) / max(1, self.num_tokens)


class NonFiniteError(UserError):
    """A loss or gradient is NaN or infinite. Nothing was applied: the last snapshot is good."""


def optimisation_step(
    model: Transformer,
    optimizers: Sequence[Optimizer],
    batches: Sequence[MicroBatch],
    ranks: Ranks,
    *,
    clip_norm: float,
    balance_rate: float,
    dtype: torch.dtype,
) -> StepResult:
    """Accumulate gradients over ``batches``, clip, update weights and balance biases.

    Raises:
        NonFiniteError: before anything is changed.
    """
    total_tokens = sum(batch.num_target_tokens for batch in batches)
    assert total_tokens > 0, "a step without a single target token"
    nll_by_kind: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), device=ranks.device))
    tokens_by_kind: dict[str, int] = defaultdict(int)
    counts: dict[int, Tensor] = {}
    flops = teacher_flops = 0
    for batch in batches:
        with torch.autocast(ranks.device.type, dtype=dtype, enabled=dtype != torch.float32):
            loss, nll, batch_counts = _forward(model, batch)
        # a share of the global mean: gradients are added up over ranks, not averaged
        (loss * (1.0 / total_tokens)).backward()
        nll_by_kind[batch.kind] += nll
        tokens_by_kind[batch.kind] += batch.num_target_tokens
        for row, counts_WE in batch_counts.items():
            counts[row] = counts[row] + counts_WE if row in counts else counts_WE
        student, teacher = _executed_flops(model.config, batch)
        flops += (student + teacher) * ranks.world
        teacher_flops += teacher * ranks.world
    for value in nll_by_kind.values():
        ranks.sum(value)
    counts = {row: ranks.sum(counts_WE) for row, counts_WE in counts.items()}
    ranks.sum_gradients(model)
    grad_norm = ranks.clip_gradients(model, clip_norm)
    _check_finite(nll_by_kind, grad_norm)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    update_balance(model, counts, balance_rate)
    return StepResult(
        nll_by_kind={kind: float(value) for kind, value in nll_by_kind.items()},
        tokens_by_kind=dict(tokens_by_kind),
        grad_norm=grad_norm,
        flops=flops,
        teacher_flops=teacher_flops,
        counts=counts,
    )


def _forward(model: Transformer, batch: MicroBatch) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
    """Summed loss (differentiable), summed negative log-likelihood, expert counts."""
    teacher, ce_weight = None, 1.0
    if batch.distil is not None and batch.distil.ce_weight < 1.0:
        ce_weight = batch.distil.ce_weight
        plain = Context(batch.ctx.positions_BT, batch.ctx.documents_BT)
        with torch.no_grad():
            hidden_BTD = batch.distil.model(batch.ids_BT, batch.distil.subnet, plain).hidden_BTD
        teacher = Teacher(hidden_BTD.flatten(0, 1), batch.distil.model.head_VD)
    output = model(batch.ids_BT, batch.subnet, batch.ctx)
    hidden_ND = output.hidden_BTD.flatten(0, 1)
    loss, nll_N = head_loss(hidden_ND, model.head_VD, batch.targets_BT.flatten(), teacher, ce_weight)
    return loss, nll_N.sum(), output.counts


def _check_finite(nll_by_kind: dict[str, Tensor], grad_norm: float) -> None:
    bad = [kind for kind, value in nll_by_kind.items() if not torch.isfinite(value)]
    if bad or not torch.isfinite(torch.tensor(grad_norm)):
        where = f"the loss of {', '.join(bad)}" if bad else "the gradient"
        raise NonFiniteError(f"{where} is not finite; lower optim.lr or look at the batch, then continue with --resume")


def _executed_flops(config: ModelConfig, batch: MicroBatch) -> tuple[int, int]:
    """FLOPs of this rank's student pass (forward and backward) and teacher pass.

    A masked Subnet runs its router over all experts, and masked attention computes every score.
    """
    rows, length = batch.ids_BT.shape
    forward = count(config, executed(config, batch.subnet)).forward_flops(rows * length, length)
    passes = 4 if batch.ctx.recompute else 3
    teacher = 0
    if batch.distil is not None and batch.distil.ce_weight < 1.0:
        other = batch.distil.model.config
        teacher = count(other, executed(other, batch.distil.subnet)).forward_flops(rows * length, length)
    return passes * forward, teacher
