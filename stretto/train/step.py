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
from stretto.ops.logprob import IGNORED, Teacher, TopLogProbs, head_loss
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
    rows: TaughtRows | None = None
    """Which rows it teaches, and learns; None: all. The others' loss is cross-entropy."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a frozen network said of a micro-batch, by a pass that was made before."""

    said: TopLogProbs
    config: ModelConfig
    """The teacher's: its forward pass is counted with the step that reads of it."""
    ce_weight: float


@dataclass(frozen=True, slots=True)
class TaughtRows:
    """Some rows of a micro-batch: those on which the trained Subnet is not its teacher itself."""

    taught_B: Tensor
    """Of this rank, bool."""
    num_rows: int
    """Over all ranks."""
    num_target_tokens: int
    """Over all ranks."""


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
    distil: Distil | Recorded | None = None
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
    """A loss or gradient is NaN or infinite: the run diverged. Nothing was applied: the last snapshot is good."""

    exit_code = 3


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
        # a share of the global mean: gradients are added up over ranks, not averaged
        share = 1.0 if batch.objective is not None else 1.0 / total_tokens
        for taken in forward_backward(model, batch, dtype, share):
            nll_by_kind[taken.kind] += taken.measured.nll_N.sum()
            tokens_by_kind[taken.kind] += taken.num_target_tokens
            for row, counts_WE in taken.counts.items():
                counts[row] = counts[row] + counts_WE if row in counts else counts_WE
            if batch.objective is not None:
                streams_N.append(taken.measured.streams_N)
        flops += _executed_flops(model.config, batch, ranks.world)
    for value in nll_by_kind.values():
        ranks.sum(value)
    counts = {row: ranks.sum(counts_WE) for row, counts_WE in counts.items()}
    ranks.sum_gradients(model)
    grad_norm = ranks.clip_gradients(model, clip_norm)
    bad = [kind for kind, value in nll_by_kind.items() if not torch.isfinite(value)]
    if bad or not math.isfinite(grad_norm):
        where = f"the loss of {', '.join(bad)}" if bad else "the gradient"
        raise NonFiniteError(f"{where} is not finite; lower optim.lr")
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


@dataclass(frozen=True, slots=True)
class Pass:
    """A trained pass of a micro-batch; written by `forward_backward`."""

    kind: str
    measured: Measured
    counts: dict[int, Tensor]
    """Slots each expert got, by MoE row, [W, E]."""
    num_target_tokens: int
    """Over all ranks."""


def forward_backward(model: Transformer, batch: MicroBatch, dtype: torch.dtype, share: float = 1.0) -> list[Pass]:
    """Add ``share`` times the gradient of ``batch`` to the parameters' own; one pass's activations are alive at a time."""
    assert batch.distil is None or batch.objective is None, (
        "a pass has one loss: its objective's, or the blend with a teacher"
    )
    autocast = torch.autocast(batch.ids_BT.device.type, dtype=dtype, enabled=dtype != torch.float32)
    done = []
    for taken in _passes(model, batch, autocast):
        (taken.measured.loss * share).backward()
        done.append(replace(taken, measured=replace(taken.measured, loss=taken.measured.loss.detach())))
    return done


def _passes(model: Transformer, batch: MicroBatch, autocast: torch.autocast) -> Iterator[Pass]:
    """The trained passes of ``batch``; each is to be differentiated before the next one is asked for."""
    targets_N, distil, num = batch.targets_BT.flatten(), batch.distil, batch.num_target_tokens
    teacher: Teacher | TopLogProbs | None = None
    ce_weight, taught_N = 1.0, None
    if isinstance(distil, Recorded):
        teacher, ce_weight = (distil.said, distil.ce_weight) if distil.ce_weight < 1.0 else (None, 1.0)
    elif distil is not None and (distil.learns or distil.ce_weight < 1.0):
        lesson = batch if distil.rows is None else _taught_part(batch, distil.rows)
        with autocast, torch.set_grad_enabled(distil.learns):
            taught = distil.model(lesson.ids_BT, distil.subnet, replace(lesson.ctx, widths=None, routing=None))
            hidden_ND = taught.hidden_BTD.flatten(0, 1)
            if distil.learns:
                measured = Measured(*head_loss(hidden_ND, distil.model.head_VD, lesson.targets_BT.flatten()))
        if distil.learns:
            yield Pass("full", measured, taught.counts, lesson.num_target_tokens)
        if distil.ce_weight < 1.0:
            teacher, ce_weight = Teacher(hidden_ND.detach(), distil.model.head_VD), distil.ce_weight
            taught_N = None if distil.rows is None else distil.rows.taught_B.repeat_interleave(batch.ids_BT.shape[1])
    with autocast:
        output = model(batch.ids_BT, batch.subnet, batch.ctx)
        hidden_ND = output.hidden_BTD.flatten(0, 1)
        if batch.objective is not None:
            measured = batch.objective(hidden_ND, model.head_VD, targets_N)
        elif taught_N is None:
            measured = Measured(*head_loss(hidden_ND, model.head_VD, targets_N, teacher, ce_weight))
        else:
            measured = _partly_taught(hidden_ND, model.head_VD, targets_N, taught_N, teacher, ce_weight)
    yield Pass(batch.kind, measured, output.counts, num)


def _taught_part(batch: MicroBatch, rows: TaughtRows) -> MicroBatch:
    """The ``rows`` of ``batch`` as a batch; a rank that has none computes its first one, without targets, beside the others."""
    chosen_B, targets_BT = rows.taught_B, batch.targets_BT
    if not chosen_B.any():
        chosen_B = torch.zeros_like(chosen_B).index_fill_(0, chosen_B.new_zeros(1, dtype=torch.int64), True)
        targets_BT = torch.full_like(targets_BT, IGNORED)
    assert batch.ctx.shared_BT2 is None, "rows with a shared beginning are not taught in part"
    documents_BT = None if batch.ctx.documents_BT is None else batch.ctx.documents_BT[chosen_B]
    ctx = replace(batch.ctx, positions_BT=batch.ctx.positions_BT[chosen_B], documents_BT=documents_BT, widths=None)
    return replace(
        batch,
        ids_BT=batch.ids_BT[chosen_B],
        targets_BT=targets_BT[chosen_B],
        ctx=ctx,
        num_target_tokens=rows.num_target_tokens,
    )


def _partly_taught(
    hidden_ND: Tensor,
    head_VD: Tensor,
    targets_N: Tensor,
    taught_N: Tensor,
    teacher: Teacher | TopLogProbs | None,
    ce_weight: float,
) -> Measured:
    """The blend with ``teacher``, which holds the tokens ``taught_N`` alone, and the cross-entropy of the others."""
    nll_N = torch.zeros_like(targets_N, dtype=torch.float32)
    loss, nll_N[~taught_N] = head_loss(hidden_ND[~taught_N], head_VD, targets_N[~taught_N])
    if taught_N.any():
        blend, nll_N[taught_N] = head_loss(hidden_ND[taught_N], head_VD, targets_N[taught_N], teacher, ce_weight)
        loss = loss + blend
    return Measured(loss, nll_N)


def _executed_flops(config: ModelConfig, batch: MicroBatch, world: int) -> int:
    """FLOPs of the passes of all ranks: trained ones forward and backward, a teacher's forward."""
    num_passes = 4 if batch.ctx.recompute else 3
    num_rows, length = batch.ids_BT.shape
    flops, distil = num_passes * _forward_flops(config, batch.subnet, num_rows * world, length), batch.distil
    if isinstance(distil, Recorded):
        if distil.ce_weight < 1.0:
            flops += _forward_flops(distil.config, distil.config.full(), num_rows * world, length)
    elif distil is not None and (distil.learns or distil.ce_weight < 1.0):
        taught = num_rows * world if distil.rows is None else distil.rows.num_rows
        forward = _forward_flops(distil.model.config, distil.subnet, taught, length)
        flops += (num_passes if distil.learns else 1) * forward
    return flops


def _forward_flops(config: ModelConfig, subnet: Subnet, num_rows: int, length: int) -> int:
    """A masked Subnet runs its router over all experts, and masked attention computes every score."""
    return count(config, executed(config, subnet)).forward_flops(num_rows * length, length)


@contextmanager
def metered(model: Transformer, meter: Meter, world: int = 1) -> Iterator[None]:
    """Add to ``meter`` the FLOPs of every forward pass of ``model`` in this block, on ``world`` ranks: what no training step
    counts, such as rankings and searches. Its tokens are none that anything was trained on.

    The head is counted once a pass, whether or not it is applied.
    """

    def add(module: Transformer, arguments: tuple[Any, ...], output: Any) -> None:
        ids_BT, subnet, *_ = arguments
        meter.add(flops=_forward_flops(module.config, subnet, world * ids_BT.shape[0], ids_BT.shape[1]))

    hook = model.register_forward_hook(add)
    try:
        yield
    finally:
        hook.remove()
