"""The MoE operator by Triton kernels, as backends of `stretto.ops.moe`: in bf16, and with FP8 products."""

from __future__ import annotations

import torch
from torch import Tensor

from stretto.ops.grouped import Experts, Gradients, Slots, Wants
from stretto.ops.kernels import rows
from stretto.ops.kernels.combine import combine
from stretto.ops.kernels.quantise_rows import quantise_rows
from stretto.ops.kernels.rows import Factors
from stretto.ops.kernels.weight_gradient import weight_gradient


class TritonBackend:
    """SwiGLU and gates behind the gate-up product, gathers in front of the products, no row of an expert stored twice."""

    def multiple(self, x_ND: Tensor, dtype: torch.dtype, mean_slots: float) -> int:
        return 1

    def gate_up(self, x_ND: Tensor, gates_P: Tensor, slots: Slots, gate_up_EFD: Tensor) -> tuple[Tensor, Tensor]:
        """See `rows.gate_up`."""
        return rows.gate_up(x_ND, gates_P, slots, gate_up_EFD.contiguous())

    def product(self, rows_NK: Tensor, ends_E: Tensor, weights_EKN: Tensor, token_P: Tensor | None = None) -> Tensor:
        """See `rows.product`."""
        return rows.product(rows_NK, ends_E, weights_EKN, token_P)

    def forward(self, x_ND: Tensor, gates_P: Tensor, slots: Slots, weights: Experts) -> tuple[Tensor, Tensor]:
        gate_up_EFD, down_EDI, _, _ = weights
        x_ND = x_ND.to(down_EDI.dtype).contiguous()
        hidden_PF, inner_PI = self.gate_up(x_ND, gates_P, slots, gate_up_EFD)
        y_PD = self.product(inner_PI, slots.ends_E, down_EDI.transpose(1, 2))
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
        grad_PI = self.product(grad_ND, slots.ends_E, down_EDI, slots.token_P)
        inner_PI, gates, grad_PF = rows.swiglu_gradient(grad_PI, gates_P, hidden_PF)
        x, gate_up, down = None, None, None
        if wants.down:
            down = weight_gradient(grad_ND, inner_PI, slots, gathers_left=True)
        if wants.gate_up:
            rows_ND = x_ND.to(down_EDI.dtype).contiguous()
            gate_up = weight_gradient(grad_PF, rows_ND, slots, gathers_left=False)
        if wants.x:
            x = combine(self.product(grad_PF, slots.ends_E, gate_up_EFD), slots.place_S, len(x_ND), x_ND.dtype)
        return Gradients(x, gates, gate_up, down)


class Fp8Backend(TritonBackend):
    """The same with FP8 products of rows and matrices, as `stretto.ops.fp8_rows` has them; gradients of weights are products in bf16.

    Tokens are quantised before they are gathered, once and not once per expert.
    """

    def gate_up(self, x_ND: Tensor, gates_P: Tensor, slots: Slots, gate_up_EFD: Tensor) -> tuple[Tensor, Tensor]:
        (x_1ND, scale_1N), (weights_EFD, scale_EF) = quantise_rows(x_ND[None]), quantise_rows(gate_up_EFD)
        return rows.gate_up(x_1ND[0], gates_P, slots, weights_EFD, Factors(scale_1N[0], scale_EF))

    def product(self, rows_NK: Tensor, ends_E: Tensor, weights_EKN: Tensor, token_P: Tensor | None = None) -> Tensor:
        (rows_1NK, scale_1N), (weights_ENK, scale_EN) = (
            quantise_rows(rows_NK[None]),
            quantise_rows(weights_EKN.transpose(1, 2)),
        )
        return rows.product(rows_1NK[0], ends_E, weights_ENK.transpose(1, 2), token_P, Factors(scale_1N[0], scale_EN))
