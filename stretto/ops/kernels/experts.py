"""The MoE operator by Triton kernels, as a backend of `stretto.ops.moe`."""

from __future__ import annotations

import torch
from torch import Tensor

from stretto.ops.grouped import Experts, Gradients, Slots, Wants
from stretto.ops.kernels import rows
from stretto.ops.kernels.combine import combine
from stretto.ops.kernels.weight_gradient import weight_gradient


class TritonBackend:
    """SwiGLU and gates behind the gate-up product, gathers in front of the products, no row of an expert stored twice."""

    def multiple(self, x_ND: Tensor, dtype: torch.dtype, mean_slots: float) -> int:
        return 1

    def forward(self, x_ND: Tensor, gates_P: Tensor, slots: Slots, weights: Experts) -> tuple[Tensor, Tensor]:
        gate_up_EFD, down_EDI, _, _ = weights
        x_ND = x_ND.to(down_EDI.dtype).contiguous()
        hidden_PF, inner_PI = rows.gate_up(x_ND, gates_P, slots, gate_up_EFD.contiguous())
        y_PD = rows.product(inner_PI, slots.ends_E, down_EDI.transpose(1, 2))
        return combine(y_PD, slots.place_S, len(x_ND), y_PD.dtype), hidden_PF

    def backward(
        self,
        grad_ND: Tensor,
        x_ND: Tensor,
        gates_P: Tensor,
        hidden_PF: Tensor,
        slots: Slots,
        weights: Experts,
        wants: Wants,
    ) -> Gradients:
        gate_up_EFD, down_EDI, _, _ = weights
        grad_ND = grad_ND.to(down_EDI.dtype).contiguous()
        inner_PI, gates, grad_PF = rows.gate_up_gradient(grad_ND, gates_P, hidden_PF, slots, down_EDI.contiguous())
        x, gate_up, down = None, None, None
        if wants.down:
            down = weight_gradient(grad_ND, inner_PI, slots, gathers_left=True)
        if wants.gate_up:
            rows_ND = x_ND.to(down_EDI.dtype).contiguous()
            gate_up = weight_gradient(grad_PF, rows_ND, slots, gathers_left=False)
        if wants.x:
            x = combine(rows.product(grad_PF, slots.ends_E, gate_up_EFD), slots.place_S, len(x_ND), x_ND.dtype)
        return Gradients(x, gates, gate_up, down)
