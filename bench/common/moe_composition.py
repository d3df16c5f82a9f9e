"""The experts of a layer as a composition of torch's operators with autograd's gradients: the peer of `stretto.ops.moe`.

Shape letters: N tokens, K experts per token, E experts, S = N·K slots, P places of the slots sorted by expert, padding included,
D hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stretto.ops.grouped import Experts, compute_dtype, group_multiple, group_slots, grouped_swiglu


def experts_composed(x_ND: Tensor, chosen_NK: Tensor, gates_NK: Tensor, weights: Experts) -> Tensor:
    """Output [N, D] of `stretto.ops.moe.experts`, with gathers around grouped products."""
    num_experts, num_chosen = weights.gate_up_EFD.shape[0], chosen_NK.shape[1]
    multiple = group_multiple(x_ND.device, compute_dtype(x_ND), chosen_NK.numel() / num_experts)
    slots = group_slots(chosen_NK, num_experts, multiple)
    x_PD = _Gather.apply(x_ND, slots.token_P, slots.place_S, num_chosen)
    gates_P = _Gather.apply(gates_NK.reshape(-1), slots.order_P, slots.place_S, 1)
    if multiple > 1:  # a gate of zero keeps padding out of every gradient
        gates_P = gates_P * torch.zeros_like(slots.order_P, dtype=torch.bool).index_fill_(0, slots.place_S, True)
    y_PD = grouped_swiglu(x_PD, slots.ends_E, weights, gates_P)
    return _Combine.apply(y_PD, slots.place_S, slots.token_P, num_chosen)


class _Gather(torch.autograd.Function):
    """Rows of ``x`` at ``index``. The inverse is known: row r of ``x`` is read at places ``inverse[r·fan : (r+1)·fan]``."""

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
