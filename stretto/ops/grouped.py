"""Dropless expert computation: every token goes through the experts it chose, grouped by expert.

Shape letters: N tokens, K experts a token, E experts, S = N·K slots (one a token and choice), D hidden, I expert width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def experts_reference(
    x_ND: Tensor, chosen_NK: Tensor, gates_NK: Tensor, gate_up_EFD: Tensor, down_EDI: Tensor
) -> Tensor:
    """SwiGLU experts, one token group at a time: the definition that `experts` is tested against.

    ``gate_up_EFD`` holds the gate's rows, then the up projection's (F = 2·I). Returns [N, D].
    """
    out_ND = torch.zeros_like(x_ND)
    for expert in range(gate_up_EFD.shape[0]):
        token, choice = (chosen_NK == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x_ND[token], gate_up_EFD[expert]).chunk(2, dim=-1)
        y = F.linear(F.silu(gate) * up, down_EDI[expert]) * gates_NK[token, choice, None].to(x_ND.dtype)
        out_ND = out_ND.index_add(0, token, y.to(x_ND.dtype))
    return out_ND


def experts(x_ND: Tensor, chosen_NK: Tensor, gates_NK: Tensor, gate_up_EFD: Tensor, down_EDI: Tensor) -> Tensor:
    """`experts_reference` through grouped matrix products.

    The K outputs of a token are always added in the order of ``chosen_NK``, whatever the rest of the batch is. Gates
    multiply the input of the down projection, which is linear: its rows are narrower than its output's.
    """
    slots = group_slots(chosen_NK, gate_up_EFD.shape[0])
    num_chosen = chosen_NK.shape[1]
    x_SD = _Gather.apply(x_ND, slots.token_S, slots.place_S, num_chosen)
    gates_S = _Gather.apply(gates_NK.reshape(-1), slots.order_S, slots.place_S, 1)
    y_SD = grouped_swiglu(x_SD, slots.ends_E, gate_up_EFD, down_EDI, gates_S)
    return _Combine.apply(y_SD, slots.place_S, slots.token_S, num_chosen)


def grouped_swiglu(
    x_SD: Tensor, ends_E: Tensor, gate_up_EFD: Tensor, down_EDI: Tensor, gates_S: Tensor | None = None
) -> Tensor:
    """SwiGLU of slots sorted by expert; ``ends_E`` (int32) is where each expert's slots end. Returns [S, D].

    ``gates_S`` are factors of the slots' outputs.
    """
    dtype = compute_dtype(x_SD)
    hidden_SF = _grouped_mm(x_SD.to(dtype), gate_up_EFD.to(dtype).transpose(1, 2), offs=ends_E)
    hidden_SI = swiglu(hidden_SF)
    if gates_S is not None:
        hidden_SI = hidden_SI * gates_S[:, None].to(dtype)
    return _grouped_mm(hidden_SI, down_EDI.to(dtype).transpose(1, 2), offs=ends_E)


_eager_grouped_mm = torch.compiler.disable(F.grouped_mm)


def _grouped_mm(rows: Tensor, weights: Tensor, offs: Tensor) -> Tensor:
    """`torch.nn.functional.grouped_mm`, which torch.compile can trace in bf16 only: elsewhere it stays out of the graph."""
    compute = F.grouped_mm if rows.dtype == torch.bfloat16 else _eager_grouped_mm
    return compute(rows, weights, offs=offs)


def swiglu(gate_up_NF: Tensor) -> Tensor:
    """silu(gate) · up for the two halves of the last dim, contiguous."""
    gate, up = gate_up_NF.chunk(2, dim=-1)
    return F.silu(gate) * up


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype a matrix product should run in: autocast's where it is on (grouped_mm ignores it), else ``x``'s."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


class Slots(NamedTuple):
    """Where every (token, choice) pair goes when pairs are sorted by expert."""

    order_S: Tensor
    """Sorted place -> pair."""
    place_S: Tensor
    """Pair -> sorted place."""
    token_S: Tensor
    """Sorted place -> token."""
    ends_E: Tensor
    """Where each expert's pairs end, int32."""


def group_slots(chosen_NK: Tensor, num_experts: int) -> Slots:
    """Sort the pairs of ``chosen_NK`` by expert, ties by token: a stable sort, so the layout is reproducible."""
    flat_S = chosen_NK.reshape(-1)
    order_S = torch.argsort(flat_S, stable=True)
    place_S = torch.empty_like(order_S)
    place_S[order_S] = torch.arange(order_S.numel(), device=order_S.device)
    counts_E = torch.bincount(flat_S, minlength=num_experts)
    ends_E = counts_E.cumsum(0).to(torch.int32)
    return Slots(order_S, place_S, order_S // chosen_NK.shape[1], ends_E)


class _Gather(torch.autograd.Function):
    """Rows of ``x`` at ``index``, where the inverse is known: row r of x goes to places ``inverse[r·fan : (r+1)·fan]``.

    Autograd's own backward of a gather is a scatter-add, serial on a CPU and unordered on a GPU; with the inverse
    it is another gather and a sum in a fixed order.
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
    """The transpose of `_Gather`: row r is the sum of rows ``place[r·fan : (r+1)·fan]``, in that order."""

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
