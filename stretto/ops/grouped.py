"""Grouping of tokens by expert without dropping any, and products of rows grouped by expert.

Shape letters: N tokens, K experts per token, E experts, S = N·K slots (one per token and chosen expert), P places of the slots
sorted by expert, padding included, D hidden, I expert width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


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


def gated_outputs(x_ND: Tensor, chosen_NK: Tensor, gates_NK: Tensor, weights: Experts) -> Tensor:
    """Gated output of each chosen expert [N, K, D]: the terms of the sums of `stretto.ops.moe.experts`, for statistics of experts."""
    num_experts, dtype = len(weights.down_EDI), compute_dtype(x_ND)
    slots = group_slots(chosen_NK, num_experts, group_multiple(x_ND.device, dtype, chosen_NK.numel() / num_experts))
    y_PD = grouped_swiglu(x_ND[slots.token_P], slots.ends_E, weights, gates_NK.flatten()[slots.order_P])
    return y_PD[slots.place_S].view(*chosen_NK.shape, y_PD.shape[1])


def group_multiple(device: torch.device, dtype: torch.dtype, mean_slots: float) -> int:
    """Multiple to which the number of rows of a group is rounded up in products in ``dtype``; a group has ``mean_slots`` on average.

    On a CPU, oneDNN multiplies bf16. It prepares a kernel for every number of rows that it has not seen recently, and routers
    give new numbers in each step: this took most of a training step. With multiples of about an eighth of a group, few different
    numbers occur, at the cost of a sixteenth more rows on average. fp32 products and accelerators need no such preparation.
    """
    if device.type != "cpu" or dtype != torch.bfloat16:
        return 1
    return 1 << min(6, max(4, int(mean_slots / 8).bit_length() - 1))


def grouped_swiglu(x_SD: Tensor, ends_E: Tensor, weights: Experts, gates_S: Tensor | None = None) -> Tensor:
    """Expert outputs [S, D] of slots sorted by expert, times ``gates_S``.

    ``ends_E`` (int32) is where each expert's slots end; rows after the last end belong to no expert and may hold anything.
    """
    return down_outputs(gate_up_outputs(x_SD, ends_E, weights), ends_E, weights, gates_S)


Multiply = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A function like `grouped_mm`."""


def gate_up_outputs(x_SD: Tensor, ends_E: Tensor, weights: Experts, multiply: Multiply | None = None) -> Tensor:
    """Outputs [S, F] of the gate-up product of `grouped_swiglu`, bias included. ``multiply`` None: `grouped_mm`."""
    dtype = compute_dtype(x_SD)
    hidden_SF = (multiply or grouped_mm)(x_SD.to(dtype), weights.gate_up_EFD.to(dtype).transpose(1, 2), ends_E)
    if weights.biases is None:
        return hidden_SF
    return hidden_SF + weights.biases.gate_up_EF.to(dtype).index_select(0, expert_of_places(ends_E, len(x_SD)))


def down_outputs(
    hidden_SF: Tensor,
    ends_E: Tensor,
    weights: Experts,
    gates_S: Tensor | None = None,
    multiply: Multiply | None = None,
) -> Tensor:
    """Expert outputs [S, D] from those of `gate_up_outputs`. Gates multiply the input of the product, and its bias."""
    dtype = hidden_SF.dtype
    hidden_SI = swiglu(hidden_SF, weights.clamp)
    gates_S1 = None if gates_S is None else gates_S[:, None].to(dtype)
    if gates_S1 is not None:
        hidden_SI = hidden_SI * gates_S1
    y_SD = (multiply or grouped_mm)(hidden_SI, weights.down_EDI.to(dtype).transpose(1, 2), ends_E)
    if weights.biases is None:
        return y_SD
    bias_SD = weights.biases.down_ED.to(dtype).index_select(0, expert_of_places(ends_E, len(y_SD)))
    return y_SD + (bias_SD if gates_S1 is None else bias_SD * gates_S1)


def expert_of_places(ends_E: Tensor, num_places: int) -> Tensor:
    """Expert of each place; places after the last end get the last expert."""
    places_P = torch.arange(num_places, dtype=ends_E.dtype, device=ends_E.device)
    return torch.searchsorted(ends_E, places_P, right=True).clamp_(max=len(ends_E) - 1)


def grouped_mm(rows: Tensor, weights: Tensor, ends_E: Tensor) -> Tensor:
    """`torch.nn.functional.grouped_mm` of each expert's rows with its matrix.

    torch needs rows of a multiple of 16 bytes, and no fp64; others are multiplied group by group.
    """
    if is_grouped(rows, *weights.shape[1:]):
        return F.grouped_mm(rows, weights, offs=ends_E)
    parts = rows.tensor_split(ends_E[:-1].tolist())
    return torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)])


def grouped_weight_gradient(grad_PF: Tensor, x_PD: Tensor, ends_E: Tensor) -> Tensor:
    """For each expert, the product [F, D] of its rows of ``grad_PF``, transposed, with those of ``x_PD``: the gradient of its matrix."""
    if is_grouped(x_PD, grad_PF.shape[1], x_PD.shape[1]):
        return F.grouped_mm(grad_PF.t(), x_PD, offs=ends_E)
    ends = ends_E.tolist()
    sides = (side[: ends[-1]].tensor_split(ends[:-1]) for side in (grad_PF, x_PD))
    return torch.stack([grad.t() @ x for grad, x in zip(*sides, strict=True)])


def is_grouped(rows: Tensor, *widths: int) -> bool:
    """Whether torch has grouped products of ``rows`` with matrices of these sizes."""
    return rows.dtype != torch.float64 and not any(width * rows.itemsize % 16 for width in widths)


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


def gated_swiglu_backward(
    grad_NI: Tensor, gates_N: Tensor, gate_up_NF: Tensor, clamp: Clamp | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The product [N, I] of `swiglu` and its gates, and the gradients of gates [N] and of the input [N, F], from the gradient of the
    product, which is overwritten."""
    gate, up = gate_up_NF.chunk(2, dim=-1)
    grad_NF, gates_N1 = torch.empty_like(gate_up_NF), gates_N[:, None].to(grad_NI.dtype)
    grad_gate, grad_up = grad_NF.chunk(2, dim=-1)
    if clamp is None:
        per_up = F.silu(gate)
    else:
        kept, is_free = gate.clamp(max=clamp.limit), up.abs() <= clamp.limit
        share, up = torch.sigmoid(clamp.alpha * kept), up.clamp(-clamp.limit, clamp.limit) + 1
        per_up = kept * share
    inner_NI = per_up * up
    grad_gates_N = (grad_NI * inner_NI).sum(-1, dtype=gates_N.dtype)
    grad_NI.mul_(gates_N1)
    torch.mul(grad_NI, per_up, out=grad_up)
    grad_NI.mul_(up)
    if clamp is None:
        torch.ops.aten.silu_backward(grad_NI, gate, grad_input=grad_gate)
    else:
        grad_up.mul_(is_free)
        slope = share * (1 + clamp.alpha * kept * (1 - share)) * (gate <= clamp.limit)
        torch.mul(grad_NI, slope, out=grad_gate)
    return inner_NI.mul_(gates_N1), grad_gates_N, grad_NF


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


class Gradients(NamedTuple):
    """Gradients of the inputs of `stretto.ops.moe.experts`; None for those that were not asked for."""

    x_ND: Tensor | None
    gates_P: Tensor | None
    gate_up_EFD: Tensor | None
    down_EDI: Tensor | None
    gate_up_bias_EF: Tensor | None = None
    down_bias_ED: Tensor | None = None


class Wants(NamedTuple):
    """Which of the `Gradients` are needed."""

    x: bool
    gates: bool
    gate_up: bool
    down: bool
    gate_up_bias: bool
    down_bias: bool


def group_slots(chosen_NK: Tensor, num_experts: int, multiple: int = 1, num_places: int | None = None) -> Slots:
    """Sort the slots of ``chosen_NK`` by expert, then by token; the sort is stable, so the layout is reproducible. The host does not
    wait for the device.

    Args:
        multiple: the number of places of each expert is rounded up to a multiple of it. Padding repeats a token; the caller must not
            read its output nor let gradients flow from it.
        num_places: number of places, at least `most_places`; those after the last end are padding too. None: as many as there are,
            which a device would have to tell the host where ``multiple`` is above 1.
    """
    flat_S = chosen_NK.reshape(-1)
    expert_S, order_S = flat_S.sort(stable=True)
    experts_E = torch.arange(num_experts, device=flat_S.device, dtype=flat_S.dtype)
    ends_E = torch.searchsorted(expert_S, experts_E, right=True, out_int32=True)
    place_S = torch.empty_like(order_S)
    place_S[order_S] = torch.arange(order_S.numel(), device=order_S.device)
    if multiple == 1:
        return Slots(order_S, place_S, order_S // chosen_NK.shape[1], ends_E)
    spare_E = -ends_E.diff(prepend=ends_E.new_zeros(1)) % multiple
    shift_E = spare_E.cumsum(0, dtype=torch.int32)
    place_S += (shift_E - spare_E)[flat_S]
    ends_E = ends_E + shift_E
    order_P = order_S.new_zeros(int(ends_E[-1]) if num_places is None else num_places)
    order_P[place_S] = torch.arange(order_S.numel(), device=order_S.device)
    return Slots(order_P, place_S, order_P // chosen_NK.shape[1], ends_E)


def most_places(num_slots: int, num_experts: int, multiple: int) -> int:
    """Largest number of places that `group_slots` can need."""
    return num_slots + num_experts * (multiple - 1)


def sum_of_places(y_PD: Tensor, place_S: Tensor, num_tokens: int, dtype: torch.dtype) -> Tensor:
    """For each token, the sum [N, D] of the rows of its slots in their order, in ``dtype``."""
    place_NK = place_S.view(num_tokens, len(place_S) // num_tokens if num_tokens else 1)
    return F.embedding_bag(place_NK, y_PD.to(dtype), mode="sum")  # gathers and adds in one pass


def counted(ids: Tensor, num: int) -> Tensor:
    """How often each of the ids 0 to ``num`` − 1 occurs, int64. `torch.bincount`, for which the host waits, in a known size."""
    ids_S = ids.reshape(-1)
    return ids_S.new_zeros(num).scatter_add_(0, ids_S, torch.ones_like(ids_S))
