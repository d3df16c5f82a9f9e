"""The optimisation step: every stage's gradient goes through here.

A step is a list of micro-batches, each with its Subnet; their losses are sums over tokens, divided once by the number
of target tokens of the whole step over all ranks. How a step is split into micro-batches or ranks changes nothing.

What is minimised is an argument: cross-entropy (and a teacher's KL) by default, else an `Objective` that a stage brings.
The step knows no algorithm.

Shape letters: B rows, T positions, N = B·T tokens, D hidden, V vocabulary, W branches of balance state, E experts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from stretto.base.errors import UserError
from stretto.base.records import Meter
from stretto.model.elastic import update_balance
from stretto.model.parallel import Ranks
from stretto.model.spec import ModelConfig, Subnet, count, executed
from stretto.model.transformer import Context, RowWidths, Transformer
from stretto.ops.logprob import Teacher, head_loss
from stretto.train.sampler import WidthPlan


@dataclass(frozen=True, slots=True)
class Distil:
    """A network whose distribution the trained Subnet is pulled to."""

    model: Transformer
    """The teacher; for an anchor, the trained model itself."""
    subnet: Subnet
    ce_weight: float
    """Weight of cross-entropy in the loss; the rest is KL(teacher ‖ student)."""
    learns: bool = False
    """The teacher is the trained model and learns the same tokens, by cross-entropy (the sandwich rule, 1903.05134)."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What an objective says of one pass."""

    loss: Tensor
    """A scalar, differentiable: this pass's part of a sum over all passes and ranks."""
    nll_N: Tensor
    """Negative log-likelihood of each target, detached, 0 where there is none."""
    streams_N: Mapping[str, Tensor] = field(default_factory=dict)
    """For the log, detached: what the objective knows of each token."""


class Objective(Protocol):
    """A loss on final hidden states, made for one micro-batch.

    It brings its own normaliser, which must be one of the whole step: nothing is divided afterwards.
    """

    def __call__(self, hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor) -> Measured: ...


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
    objective: Objective | None = None
    """What the pass minimises; None: cross-entropy, or its blend with ``distil``, averaged over the step's targets."""


def row_widths(plan: WidthPlan | None, rows: slice, device: torch.device) -> RowWidths | None:
    """This rank's ``rows`` of a width plan."""
    if plan is None:
        return None
    arrays = (plan.branch_B, plan.allowed_BE, plan.counted_B)
    return RowWidths(*(torch.from_numpy(array[rows]).to(device) for array in arrays))


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did; sums over all ranks."""

    nll_by_kind: dict[str, float]
    """Summed negative log-likelihood, nats."""
    tokens_by_kind: dict[str, int]
    """Target tokens that went through each kind; a teacher that learns sees its tokens beside its student."""
    num_tokens: int
    """Target tokens of the data."""
    grad_norm: float
    """Global norm before clipping."""
    flops: int
    """Executed by the model's matrix products, forward and backward, teachers and recomputation included."""
    counts: dict[int, Tensor] = field(default_factory=dict)
    """Slots each expert got, by MoE row, [W, E]."""
    streams_N: list[Mapping[str, Tensor]] = field(default_factory=list)
    """What objectives said of each token, by micro-batch: this rank's own."""

    @property
    def nll(self) -> float:
        """Mean over the step's passes, whatever Subnet they went through."""
        return sum(self.nll_by_kind.values()) / max(1, sum(self.tokens_by_kind.values()))


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
    """Accumulate gradients over ``batches``, clip, update weights and balance biases. Raises `NonFiniteError`: before
    anything is changed.
    """
    total_tokens = sum(batch.num_target_tokens for batch in batches)
    assert total_tokens > 0, "a step without a single target token"
    nll_by_kind: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), device=ranks.device))
    tokens_by_kind: dict[str, int] = defaultdict(int)
    counts: dict[int, Tensor] = {}
    streams_N: list[Mapping[str, Tensor]] = []
    flops = 0
    for batch in batches:
        assert batch.distil is None or batch.objective is None, (
            "a pass has one loss: its objective's, or the blend with a teacher"
        )
        autocast = torch.autocast(ranks.device.type, dtype=dtype, enabled=dtype != torch.float32)
        # a share of the global mean: gradients are added up over ranks, not averaged
        share = 1.0 if batch.objective is not None else 1.0 / total_tokens
        for kind, measured, own_counts in _passes(model, batch, autocast):
            (measured.loss * share).backward()
            nll_by_kind[kind] += measured.nll_N.sum()
            tokens_by_kind[kind] += batch.num_target_tokens
            for row, counts_WE in own_counts.items():
                counts[row] = counts[row] + counts_WE if row in counts else counts_WE
            if batch.objective is not None:
                streams_N.append(measured.streams_N)
        flops += _executed_flops(model.config, batch) * ranks.world
    for value in nll_by_kind.values():
        ranks.sum(value)
    counts = {row: ranks.sum(counts_WE) for row, counts_WE in counts.items()}
    ranks.sum_gradients(model)
    grad_norm = ranks.clip_gradients(model, clip_norm)
    bad = [kind for kind, value in nll_by_kind.items() if not torch.isfinite(value)]
    if bad or not math.isfinite(grad_norm):
        where = f"the loss of {', '.join(bad)}" if bad else "the gradient"
        raise NonFiniteError(f"{where} is not finite; lower optim.lr or look at the batch, then continue with --resume")
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    update_balance(model, counts, balance_rate)
    return StepResult(
        nll_by_kind={kind: float(value) for kind, value in nll_by_kind.items()},
        tokens_by_kind=dict(tokens_by_kind),
        num_tokens=total_tokens,
        grad_norm=grad_norm,
        flops=flops,
        counts=counts,
        streams_N=streams_N,
    )


def _passes(
    model: Transformer, batch: MicroBatch, autocast: torch.autocast
) -> Iterator[tuple[str, Measured, dict[int, Tensor]]]:
    """The trained passes of ``batch``: label, what was measured, slots each expert got by MoE row.

    Each is to be differentiated before the next one is asked for, so that one pass's activations are alive at a time.
    """
    targets_N, distil = batch.targets_BT.flatten(), batch.distil
    teacher, ce_weight = None, 1.0
    if distil is not None and (distil.learns or distil.ce_weight < 1.0):
        plain = replace(batch.ctx, widths=None, routing=None)
        with autocast, torch.set_grad_enabled(distil.learns):
            taught = distil.model(batch.ids_BT, distil.subnet, plain)
            hidden_ND = taught.hidden_BTD.flatten(0, 1)
            if distil.learns:
                loss, nll_N = head_loss(hidden_ND, distil.model.head_VD, targets_N)
        if distil.learns:
            yield "full", Measured(loss, nll_N), taught.counts
        if distil.ce_weight < 1.0:
            teacher, ce_weight = Teacher(hidden_ND.detach(), distil.model.head_VD), distil.ce_weight
    with autocast:
        output = model(batch.ids_BT, batch.subnet, batch.ctx)
        hidden_ND = output.hidden_BTD.flatten(0, 1)
        if batch.objective is not None:
            measured = batch.objective(hidden_ND, model.head_VD, targets_N)
        else:
            measured = Measured(*head_loss(hidden_ND, model.head_VD, targets_N, teacher, ce_weight))
    yield batch.kind, measured, output.counts


def _executed_flops(config: ModelConfig, batch: MicroBatch) -> int:
    """FLOPs of this rank's passes: trained ones forward and backward, a teacher's forward."""
    passes = 4 if batch.ctx.recompute else 3
    flops, distil = passes * _forward_flops(config, batch.subnet, batch.ids_BT), batch.distil
    if distil is not None and (distil.learns or distil.ce_weight < 1.0):
        flops += (passes if distil.learns else 1) * _forward_flops(distil.model.config, distil.subnet, batch.ids_BT)
    return flops


def _forward_flops(config: ModelConfig, subnet: Subnet, ids_BT: Tensor) -> int:
    """A masked Subnet runs its router over all experts, and masked attention computes every score."""
    rows, length = ids_BT.shape
    return count(config, executed(config, subnet)).forward_flops(rows * length, length)


@contextmanager
def metered(model: Transformer, meter: Meter, world: int = 1) -> Iterator[None]:
    """Add to ``meter`` the FLOPs and positions of every forward pass of ``model`` in this block, on ``world`` ranks: what no
    training step counts, such as rankings and searches.

    The head is counted once a pass, whether or not it is applied.
    """

    def add(module: Transformer, arguments: tuple[Any, ...], output: Any) -> None:
        ids_BT, subnet, *_ = arguments
        meter.add(flops=world * _forward_flops(module.config, subnet, ids_BT), tokens=world * ids_BT.numel())

    hook = model.register_forward_hook(add)
    try:
        yield
    finally:
        hook.remove()
