"""The optimisation step of every training stage.

A step is a list of micro-batches, each with its Subnet. Losses are summed over tokens and divided once by the number of target
tokens of the whole step over all ranks, so the split into micro-batches and ranks does not change the gradient.

The loss is an argument: cross-entropy (with a teacher's KL) by default, else an `Objective` of the stage. The step contains no
algorithm.

Shape letters: B rows, T positions, N = B·T tokens, D hidden, V vocabulary, W branches of balance state, E experts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from stretto.base.errors import UserError
from stretto.base.records import Meter
from stretto.model.counts import count
from stretto.model.elastic import update_balance
from stretto.model.parallel import Ranks, scale_gradients
from stretto.model.spec import ModelConfig, Subnet, executed
from stretto.model.transformer import Context, RowWidths, Transformer
from stretto.ops.logprob import IGNORED, Teacher, TopLogProbs, head_loss, num_head_tokens
from stretto.optim.compact import CompactAdamW
from stretto.train.sampler import WidthPlan


@dataclass(frozen=True, slots=True)
class Distil:
    """A teacher network towards whose distribution the trained Subnet is distilled."""

    model: Transformer
    """The teacher: the trained model itself, or a frozen one."""
    subnet: Subnet
    ce_weight: float
    """Weight of cross-entropy in the loss; the rest is KL(teacher ‖ student)."""
    learns: bool = False
    """The teacher is the trained model and learns the same tokens by cross-entropy (the sandwich rule, 1903.05134)."""
    rows: TaughtRows | None = None
    """Rows that the teacher teaches and learns; None: all. The loss of the other rows is cross-entropy."""

    @property
    def runs(self) -> bool:
        """Whether a step has any use for a forward pass of the teacher."""
        return self.learns or self.ce_weight < 1.0


@dataclass(frozen=True, slots=True)
class Recorded:
    """Log-probabilities of a frozen teacher for a micro-batch, from an earlier pass."""

    logprobs: TopLogProbs
    config: ModelConfig
    """The teacher's. Its forward pass is counted as FLOPs of the step that reads the log-probabilities."""
    ce_weight: float

    @property
    def runs(self) -> bool:
        """As of `Distil`."""
        return self.ce_weight < 1.0


@dataclass(frozen=True, slots=True)
class TaughtRows:
    """Rows of a micro-batch in which the trained Subnet differs from its teacher."""

    taught_B: Tensor
    """Bool, for the rows of this rank."""
    num_rows: int
    """Over all ranks."""
    num_target_tokens: int
    """Over all ranks."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Result of an objective for one pass."""

    loss: Tensor
    """A differentiable scalar: this pass's part of the sum over all passes and ranks."""
    nll_N: Tensor
    """Negative log-likelihood of each target, detached; 0 for positions without a target."""
    streams_N: Mapping[str, Tensor] = field(default_factory=dict)
    """Values per token for the log, detached, by name."""
    num_extra_head_products: int = 0
    """Products with the head's matrix for each target, beside one in the forward pass and two in the backward pass."""


class Objective(Protocol):
    """Loss on final hidden states, created for one micro-batch.

    It includes its normaliser, which must be the same in all passes of a step: the step does not divide afterwards.
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
    """Target tokens over all ranks."""
    distil: Distil | Recorded | None = None
    objective: Objective | None = None
    """Loss of the pass; None: cross-entropy, or its weighted sum with ``distil``, averaged over the step's target tokens."""
    num_rows: int | None = None
    """Rows over all ranks; None: every rank has as many as this one."""
    num_own_targets: int | None = None
    """Target tokens of this rank; None: the device counts them, for which the host waits."""


def row_widths(plan: WidthPlan | None, rows: slice, device: torch.device) -> RowWidths | None:
    """This rank's ``rows`` of a width plan."""
    if plan is None:
        return None
    arrays = (plan.branch_B, plan.allowed_BE, plan.counted_B)
    return RowWidths(*(torch.from_numpy(array[rows]).to(device) for array in arrays))


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a step; sums over all ranks."""

    nll_by_kind: dict[str, float]
    """Summed negative log-likelihood, nats."""
    tokens_by_kind: dict[str, int]
    """Target tokens by kind. A teacher that learns counts its tokens beside those of its student."""
    num_tokens: int
    """Target tokens of the data."""
    grad_norm: float
    """Global norm before clipping."""
    flops: int
    """FLOPs of the model's matrix products, forward and backward, teachers and recomputation included. Gradients of frozen weights, and the
    head at tokens that the loss leaves out, are not. Attention is counted as if every row were one document; packed rows execute less."""
    counts: dict[int, Tensor] = field(default_factory=dict)
    """Tokens routed to each expert, padding excluded, by MoE row, [W, E]."""
    streams_N: list[Mapping[str, Tensor]] = field(default_factory=list)
    """Values per token from the objectives, by micro-batch, for this rank's tokens."""

    @property
    def nll(self) -> float:
        """Mean over all passes of the step, in nats per token."""
        return sum(self.nll_by_kind.values()) / max(1, sum(self.tokens_by_kind.values()))


class NonFiniteError(UserError):
    """A loss or gradient is NaN or infinite: the run diverged. No weight was changed, except by an optimiser in the backward pass, and the
    last snapshot is good."""

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
    """Accumulate gradients over ``batches``, clip them, and update weights and balance biases. Raises `NonFiniteError` before any
    weight is changed.

    An optimiser with ``in_backward`` updates weights during the last backward pass, clips by the norm of the previous step, and may have
    changed weights when the error is raised.
    """
    total_tokens = sum(batch.num_target_tokens for batch in batches)
    assert total_tokens > 0, "a step without a single target token"
    nll_by_kind: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), device=ranks.device))
    tokens_by_kind: dict[str, int] = defaultdict(int)
    counts: dict[int, Tensor] = {}
    streams_N: list[Mapping[str, Tensor]] = []
    flops = 0
    eager = next((each for each in optimizers if isinstance(each, CompactAdamW) and each.in_backward), None)
    scale = None if eager is None else eager.begin(clip_norm)
    for batch in batches:
        # gradients are summed over ranks, not averaged, so each pass contributes its share of the global mean
        share = 1.0 if batch.objective is not None else 1.0 / total_tokens
        updating: AbstractContextManager[None] = nullcontext()
        if eager is not None and scale is not None and batch is batches[-1]:
            updating = eager.updating(scale)
        passes = forward_backward(model, batch, dtype, share, updating)
        for done in passes:
            nll_by_kind[done.kind] += done.measured.nll_N.sum()
            tokens_by_kind[done.kind] += done.num_target_tokens
            for row, counts_WE in done.counts.items():
                counts[row] = counts[row] + counts_WE if row in counts else counts_WE
            if batch.objective is not None:
                streams_N.append(done.measured.streams_N)
        flops += _step_flops(model, batch, ranks.world, passes[-1].measured.num_extra_head_products)
    for value in nll_by_kind.values():
        ranks.sum(value)
    counts = {row: ranks.sum(counts_WE) for row, counts_WE in counts.items()}
    if eager is None or scale is None:
        ranks.sum_gradients(model)
        norm = ranks.gradient_norm(model)
        scale = (clip_norm / (norm + 1e-6)).clamp(max=1.0)
    else:
        eager.step(scale=scale)  # parameters that only earlier backward passes reached
        eager.zero_grad(set_to_none=True)
        norm = eager.gradient_norm()
    # the only place where the host waits for the device
    *sums, grad_norm = torch.stack([*nll_by_kind.values(), norm]).tolist()
    bad = [kind for kind, value in zip(nll_by_kind, sums, strict=True) if not math.isfinite(value)]
    if bad or not math.isfinite(grad_norm):
        where = f"the loss of {', '.join(bad)}" if bad else "the gradient"
        raise NonFiniteError(f"{where} is not finite; lower optim.lr")
    _apply(model, optimizers, scale)
    update_balance(model, counts, balance_rate)
    return StepResult(
        nll_by_kind=dict(zip(nll_by_kind, sums, strict=True)),
        tokens_by_kind=dict(tokens_by_kind),
        num_tokens=total_tokens,
        grad_norm=grad_norm,
        flops=flops,
        counts=counts,
        streams_N=streams_N,
    )


def _apply(model: Transformer, optimizers: Sequence[Optimizer], scale: Tensor) -> None:
    """Make the optimisers' updates with the gradients times ``scale``, and free the gradients."""
    if not all(isinstance(optimizer, CompactAdamW) for optimizer in optimizers):
        scale_gradients(model, scale)
    for optimizer in optimizers:
        if isinstance(optimizer, CompactAdamW):
            optimizer.step(scale=scale)
        else:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)


@dataclass(frozen=True, slots=True)
class Pass:
    """One trained pass of a micro-batch. Written by `forward_backward`."""

    kind: str
    measured: Measured
    counts: dict[int, Tensor]
    """Tokens routed to each expert, by MoE row, [W, E]."""
    num_target_tokens: int
    """Over all ranks."""
    is_last: bool = True
    """Whether no other pass of the micro-batch follows."""


def forward_backward(
    model: Transformer,
    batch: MicroBatch,
    dtype: torch.dtype,
    share: float = 1.0,
    last_backward: AbstractContextManager[None] | None = None,
) -> list[Pass]:
    """Add ``share`` times the gradient of ``batch`` to the parameters' gradients. Activations of one pass at a time are in memory.
    ``last_backward``: context of the last pass's backward pass."""
    assert batch.distil is None or batch.objective is None, "a micro-batch has an objective or a teacher, not both"
    autocast = torch.autocast(batch.ids_BT.device.type, dtype=dtype, enabled=dtype != torch.float32)
    done = []
    for current in _passes(model, batch, autocast):
        with (last_backward if current.is_last else None) or nullcontext():
            (current.measured.loss * share).backward()
        done.append(replace(current, measured=replace(current.measured, loss=current.measured.loss.detach())))
    return done


def _passes(model: Transformer, batch: MicroBatch, autocast: torch.autocast) -> Iterator[Pass]:
    """The trained passes of ``batch``. The caller must run backward on each before it requests the next."""
    targets_N, distil, num = batch.targets_BT.flatten(), batch.distil, batch.num_target_tokens
    teacher: Teacher | TopLogProbs | None = None
    ce_weight, taught_N = 1.0, None
    if isinstance(distil, Recorded) and distil.runs:
        teacher, ce_weight = distil.logprobs, distil.ce_weight
    elif isinstance(distil, Distil) and distil.runs:
        taught = batch if distil.rows is None else _taught_rows(batch, distil.rows)
        with autocast, torch.set_grad_enabled(distil.learns):
            output = distil.model(taught.ids_BT, distil.subnet, replace(taught.ctx, widths=None, routing=None))
            hidden_ND = output.hidden_BTD.flatten(0, 1)
            if distil.learns:
                measured = Measured(*head_loss(hidden_ND, distil.model.head_VD, taught.targets_BT.flatten()))
        if distil.learns:
            yield Pass("full", measured, output.counts, taught.num_target_tokens, is_last=False)
        if distil.ce_weight < 1.0:
            teacher, ce_weight = Teacher(hidden_ND.detach(), distil.model.head_VD), distil.ce_weight
            taught_N = None if distil.rows is None else distil.rows.taught_B.repeat_interleave(batch.ids_BT.shape[1])
    with autocast:
        output = model(batch.ids_BT, batch.subnet, batch.ctx)
        hidden_ND = output.hidden_BTD.flatten(0, 1)
        if batch.objective is not None:
            measured = batch.objective(hidden_ND, model.head_VD, targets_N)
        elif taught_N is None:
            known = batch.num_own_targets
            measured = Measured(*head_loss(hidden_ND, model.head_VD, targets_N, teacher, ce_weight, known))
        else:
            measured = _partly_taught(hidden_ND, model.head_VD, targets_N, taught_N, teacher, ce_weight)
    yield Pass(batch.kind, measured, output.counts, num)


def _taught_rows(batch: MicroBatch, rows: TaughtRows) -> MicroBatch:
    """The ``rows`` of ``batch`` as a batch.

    A rank without such rows computes its first row as padding, so that all ranks make the same collective calls.
    """
    chosen_B, targets_BT, documents_BT = rows.taught_B, batch.targets_BT, batch.ctx.documents_BT
    if not chosen_B.any():
        chosen_B = torch.zeros_like(chosen_B).index_fill_(0, chosen_B.new_zeros(1, dtype=torch.int64), True)
        targets_BT, documents_BT = torch.full_like(targets_BT, IGNORED), torch.full_like(targets_BT, -1)
    assert batch.ctx.shared_BT2 is None, "rows with a shared prefix cannot be taught in part"
    documents_BT = None if documents_BT is None else documents_BT[chosen_B]
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
    """Loss of a pass in which ``teacher`` holds the tokens ``taught_N`` only.

    The weighted sum with ``teacher`` for these tokens, and cross-entropy for all others.
    """
    nll_N = torch.zeros_like(targets_N, dtype=torch.float32)
    loss, nll_N[~taught_N] = head_loss(hidden_ND[~taught_N], head_VD, targets_N[~taught_N])
    if taught_N.any():
        blend, nll_N[taught_N] = head_loss(hidden_ND[taught_N], head_VD, targets_N[taught_N], teacher, ce_weight)
        loss = loss + blend
    return Measured(loss, nll_N)


def _step_flops(model: Transformer, batch: MicroBatch, world: int, num_extra_head_products: int) -> int:
    """FLOPs of the passes of all ranks: forward and backward of trained passes, forward of a teacher."""
    num_own, length = batch.ids_BT.shape
    num_rows = num_own * world if batch.num_rows is None else batch.num_rows
    num_targets, distil = batch.num_target_tokens, batch.distil

    def trained(subnet: Subnet, num_rows: int, head_tokens: int) -> int:
        counts = count(model.config, executed(model.config, subnet))
        flops = counts.trained_flops(num_rows * length, length, batch.ctx.recompute, head_tokens)
        output = model.embedding if model.head is None else model.head  # `head_VD` would gather a sharded matrix
        head = 0 if output.weight.requires_grad else head_tokens * counts.head_flops
        return flops - head - num_rows * length * _frozen_flops(model, subnet)

    rows = distil.rows if isinstance(distil, Distil) else None
    num_taught, taught_targets = (num_rows, num_targets) if rows is None else (rows.num_rows, rows.num_target_tokens)
    if distil is not None and distil.ce_weight < 1.0:  # a teacher's distribution is compared at all tokens of its rows
        others = num_head_tokens((num_rows - num_taught) * length, num_targets - taught_targets)
        student = trained(batch.subnet, num_rows, num_taught * length + others)
    elif batch.objective is not None:
        extra = num_targets * num_extra_head_products * count(model.config, batch.subnet).head_flops
        student = trained(batch.subnet, num_rows, num_targets) + extra
    else:
        student = trained(batch.subnet, num_rows, num_head_tokens(num_rows * length, num_targets))
    if distil is None or not distil.runs:
        return student
    if isinstance(distil, Recorded):
        return student + _forward_flops(distil.config, distil.config.full(), num_rows, length)
    if distil.learns:
        return student + trained(distil.subnet, num_taught, num_head_tokens(num_taught * length, taught_targets))
    return student + _forward_flops(distil.model.config, distil.subnet, num_taught, length)


def _frozen_flops(model: Transformer, subnet: Subnet) -> int:
    """FLOPs per token of the gradients that frozen matrices of the layers of ``subnet`` would have. A weight with adapters is not frozen: its
    gradient is computed for them."""
    config, total = model.config, 0
    moe_layers = [config.moe_layers[row] for row in config.moe_rows(subnet.layers)]
    top_k = dict(zip(moe_layers, subnet.top_k, strict=True))
    for layer in subnet.layers:
        for name, parameter in model.blocks[layer].named_parameters():
            if parameter.requires_grad or parameter.dim() < 2 or name.endswith(("bias", ".original")):
                continue
            is_stack = parameter.dim() == 3
            total += 2 * (parameter.numel() // len(parameter) * top_k[layer] if is_stack else parameter.numel())
    return total


def _forward_flops(config: ModelConfig, subnet: Subnet, num_rows: int, length: int) -> int:
    """FLOPs of a forward pass. A masked Subnet computes router scores of all experts. Attention is counted as if every row were one
    document: all scores of the row. Kernels that attend by document execute less on packed rows."""
    return count(config, executed(config, subnet)).forward_flops(num_rows * length, length)


@contextmanager
def metered(model: Transformer, meter: Meter) -> Iterator[None]:
    """Add the FLOPs of every forward pass of ``model`` inside this block to ``meter``: the cost of measurements outside of training steps.

    No trained tokens are counted. The head is counted once per pass, whether or not it is applied. Attention is counted as if every row were
    one document.
    """

    def add(module: Transformer, arguments: tuple[Any, ...], output: Any) -> None:
        ids_BT, subnet, *_ = arguments
        meter.add(flops=_forward_flops(module.config, subnet, *ids_BT.shape))

    hook = model.register_forward_hook(add)
    try:
        yield
    finally:
        hook.remove()
