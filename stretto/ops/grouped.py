"""Dropless expert computation: tokens grouped by expert.

Shape letters: N tokens, K experts per token, E experts, S = N·K slots (one per token and chosen expert), P places of the slots
sorted by expert, padding included, D hidden, I expert width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._compile import _disable_dynamo


class Clamp(NamedTuple):
    """Parameters of gpt-oss's clamped SwiGLU, see `swiglu_reference`."""

    alpha: float
    limit: float


class ExpertBiases(NamedTuple):
    """Biases of each expert's two products."""

    gate_up_EF: Tensor
    down_ED: Tensor


class Experts(NamedTuple):
    """Weights of a layer's experts."""

    gate_up_EFD: Tensor
    """The gate's rows, then the up projection's (F = 2·I)."""
    down_EDI: Tensor
    biases: ExpertBiases | None = None
    clamp: Clamp | None = None


def experts(
    x_ND: Tensor,
    chosen_NK: Tensor,
    gates_NK: Tensor,
    weights: Experts,
    seen: Callable[[Slots, Tensor], None] | None = None,
) -> Tensor:
    """Output [N, D] of SwiGLU experts, with grouped matrix products; reference: ``tests/ops/references.py:experts_reference``.

    The K outputs of a token are added in the order of ``chosen_NK``, whatever the rest of the batch is. Gates
    multiply the input of the down projection, which is linear, because that input is narrower than the output.

    ``seen`` is called with the slots and the gated output of each place [P, D].
    """
    num_experts, num_chosen = weights.gate_up_EFD.shape[0], chosen_NK.shape[1]
    slots = group_slots(chosen_NK, num_experts, group_multiple(x_ND, chosen_NK.numel() / num_experts))
    x_PD = _Gather.apply(x_ND, slots.token_P, slots.place_S, num_chosen)
    gates_P = _Gather.apply(gates_NK.reshape(-1), slots.order_P, slots.place_S, 1)
    if slots.real_P is not None:  # a gate of zero keeps padding out of every gradient
        gates_P = gates_P * slots.real_P
    y_PD = grouped_swiglu(x_PD, slots.ends_E, weights, gates_P)
    if seen is not None:
        seen(slots, y_PD)
    return _Combine.apply(y_PD, slots.place_S, slots.token_P, num_chosen)


def group_multiple(x: Tensor, mean_slots: float) -> int:
    """Multiple to which the number of rows of a group is rounded up in products of ``x``; a group has ``mean_slots`` on average.

    On a CPU, oneDNN multiplies bf16. It prepares a kernel for every number of rows that it has not seen recently, and routers
    give new numbers in each step: this took most of a training step. With multiples of about an eighth of a group, few different
    numbers occur, at the cost of a sixteenth more rows on average. fp32 products and accelerators need no such preparation.
    """
    if x.device.type != "cpu" or compute_dtype(x) != torch.bfloat16:
        return 1
    return 1 << min(6, max(4, int(mean_slots / 8).bit_length() - 1))


def grouped_swiglu(x_SD: Tensor, ends_E: Tensor, weights: Experts, gates_S: Tensor | None = None) -> Tensor:
    """Expert outputs [S, D] of slots sorted by expert, times ``gates_S``.

    ``ends_E`` (int32) is where each expert's slots end; rows after the last end belong to no expert and may hold anything.
    """
    dtype = compute_dtype(x_SD)
    hidden_SF = grouped_mm(x_SD.to(dtype), weights.gate_up_EFD.to(dtype).transpose(1, 2), offs=ends_E)
    down_bias_SD = None
    if weights.biases is not None:
        places_S = torch.arange(len(x_SD), dtype=ends_E.dtype, device=x_SD.device)
        expert_S = torch.searchsorted(ends_E, places_S, right=True).clamp_(max=len(ends_E) - 1)
        gate_up_bias_SF, down_bias_SD = (bias.to(dtype).index_select(0, expert_S) for bias in weights.biases)
        hidden_SF = hidden_SF + gate_up_bias_SF
    hidden_SI = swiglu(hidden_SF, weights.clamp)
    if gates_S is not None:
        gates_S1 = gates_S[:, None].to(dtype)
        hidden_SI = hidden_SI * gates_S1
        down_bias_SD = None if down_bias_SD is None else down_bias_SD * gates_S1
    y_SD = grouped_mm(hidden_SI, weights.down_EDI.to(dtype).transpose(1, 2), offs=ends_E)
    return y_SD if down_bias_SD is None else y_SD + down_bias_SD


# torch.compiler.disable imports the compiler at once, which takes a second; this function of torch imports it at the first call.
_eager_grouped_mm = _disable_dynamo(F.grouped_mm)


def grouped_mm(rows: Tensor, weights: Tensor, offs: Tensor) -> Tensor:
    """`torch.nn.functional.grouped_mm`. torch.compile can trace it in bf16 only; other types run outside the compiled graph.

    torch needs rows of a multiple of 16 bytes; other sizes are multiplied group by group.
    """
    if any(width * rows.itemsize % 16 for width in weights.shape[1:]):
        parts = rows.tensor_split(offs[:-1].tolist())
        return torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)])
    is_traced = torch.compiler.is_compiling() and rows.dtype != torch.bfloat16
    compute = _eager_grouped_mm if is_traced else F.grouped_mm
    return compute(rows, weights, offs=offs)


def swiglu_reference(gate_up_NF: Tensor, clamp: Clamp | None = None) -> Tensor:
    """silu(gate) · up of the two halves of the last dim. With ``clamp`` (gpt-oss): gate · sigmoid(alpha · gate) · (up + 1), where
    the gate is clamped to at most ``limit`` and up to ± ``limit``.
    """
    gate, up = gate_up_NF.chunk(2, dim=-1)
    if clamp is None:
        return gate * torch.sigmoid(gate) * up
    gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
    return gate * torch.sigmoid(clamp.alpha * gate) * (up + 1)


def swiglu(gate_up_NF: Tensor, clamp: Clamp | None = None) -> Tensor:
    """`swiglu_reference` with torch's silu; the result is contiguous."""
    if clamp is not None:
        return swiglu_reference(gate_up_NF, clamp)
    gate, up = gate_up_NF.chunk(2, dim=-1)
    return F.silu(gate) * up


def compute_dtype(x: Tensor) -> torch.dtype:
    """Data type of a matrix product with ``x``: autocast's if it is on (grouped_mm itself ignores autocast), else that of ``x``."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


class Slots(NamedTuple):
    """Permutation that sorts the slots by expert."""

    order_P: Tensor
    """Place -> slot; slot 0 for padding."""
    place_S: Tensor
    """Slot -> place."""
    token_P: Tensor
    """Place -> token."""
    ends_E: Tensor
    """End of each expert's places, int32."""
    real_P: Tensor | None
    """False for padding, bool; None: there is no padding."""


def group_slots(chosen_NK: Tensor, num_experts: int, multiple: int = 1) -> Slots:
    """Sort the slots of ``chosen_NK`` by expert, then by token; the sort is stable, so the layout is reproducible.

    The number of places of each expert is a multiple of ``multiple``. Padding at the end repeats a token; the caller must not
    read its output nor let gradients flow from it.
    """
    flat_S = chosen_NK.reshape(-1)
    order_S = torch.argsort(flat_S, stable=True)
    counts_E = torch.bincount(flat_S, minlength=num_experts)
    place_S = torch.empty_like(order_S)
    place_S[order_S] = torch.arange(order_S.numel(), device=order_S.device)
    if multiple == 1:
        return Slots(order_S, place_S, order_S // chosen_NK.shape[1], counts_E.cumsum(0).to(torch.int32), None)
    spare_E = -counts_E % multiple
    place_S += (spare_E.cumsum(0) - spare_E)[flat_S]
    ends_E = (counts_E + spare_E).cumsum(0)
    order_P = order_S.new_zeros(int(ends_E[-1]))
    order_P[place_S] = torch.arange(order_S.numel(), device=order_S.device)
    real_P = torch.zeros_like(order_P, dtype=torch.bool).index_fill_(0, place_S, True)
    return Slots(order_P, place_S, order_P // chosen_NK.shape[1], ends_E.to(torch.int32), real_P)


class _Gather(torch.autograd.Function):
    """Rows of ``x`` at ``index``. The inverse is known: row r of ``x`` is read at places ``inverse[r·fan : (r+1)·fan]``.

    The backward pass is a gather with the inverse and a sum in a fixed order. Autograd's own backward pass of a gather is a
    scatter-add, which is serial on a CPU and has no fixed order on a GPU.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor, fan: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.fan = fan
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        return _gather_sum(grads[0], inverse, ctx.fan), None, None, None


class _Combine(torch.autograd.Function):
    """Transpose of `_Gather`: row r is the sum of rows ``place[r·fan : (r+1)·fan]``, in that order."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, place: Tensor, row: Tensor, fan: int) -> Tensor:
        ctx.save_for_backward(row)
        return _gather_sum(y, place, fan)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (row,) = ctx.saved_tensors
        return grads[0].index_select(0, row), None, None, None


def _gather_sum(x: Tensor, index: Tensor, fan: int) -> Tensor:
    gathered = x.index_select(0, index)
    return gathered if fan == 1 else gathered.unflatten(0, (-1, fan)).sum(1)
