"""Rowwise FP8 for training and rollouts: one scale per row of activations and gradients, and per output of a weight.

All numbers are E4M3; a scale is the row's largest magnitude / 448, in fp32. Outputs and gradients of inputs are FP8 products, the latter
with the weight quantised along its other dim. The gradient of a weight sums over all tokens, and is a bf16 product. (The rowwise recipe of
torchao with weight gradients in high precision.) Engines on a GPU decode from weights that are quantised in the same way (`Fp8Weights`).
`stretto.ops.fp8` has scales of blocks, for batch-invariant rollouts and for weights that travel.

On GPUs before Hopper and on CPUs products are emulated: dequantised, multiplied in fp32, rounded to bf16.

Shape letters: N tokens, D inner dim, F outputs, E experts, P places of slots sorted by expert, … any leading dims.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.base.track import say
from stretto.ops import kernels
from stretto.ops.fp8 import FP8, scale_of
from stretto.ops.grouped import Experts, grouped_mm
from stretto.ops.moe import BACKENDS, TorchBackend, experts, why_no_kernels
from stretto.ops.operators import Operators, Routes, Weight

LEAST_CAPABILITY = (9, 0)
MULTIPLE = 16
"""Both widths of a weight must be multiples of this; other weights are multiplied in bf16."""
KERNEL_MULTIPLE = 128
"""Hidden size and width of experts that the Triton kernels multiply in FP8 are multiples of this: the columns that they read at once."""


def why_emulated(device: torch.device) -> str:
    """Reason why products on ``device`` are emulated; empty if tensor cores compute them."""
    if device.type != "cuda":
        return f"on {device.type}"
    return "" if torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY else "the GPU is older than Hopper"


@cache
def said_emulated(device: torch.device) -> str:
    """`why_emulated`, said once to a run that therefore computes with `stretto.ops.fp8`."""
    why = why_emulated(device)
    if why:
        say(f"FP8: {why}: products are emulated in fp64, which is slower than bf16")
    return why


@dataclass(frozen=True, slots=True)
class Rows:
    """A tensor that is quantised along its last dim."""

    bytes_ND: Tensor
    """E4M3, […, N, D]."""
    scale_N: Tensor
    """fp32, […, N]."""

    @staticmethod
    def of(x_ND: Tensor) -> Rows:
        """``x_ND`` quantised; the bytes are contiguous. On CUDA by one kernel, `stretto.ops.kernels.quantise_rows`."""
        x_ND = x_ND.detach()
        if x_ND.is_cuda and x_ND.dim() <= 3 and not _why_torch(x_ND.device):
            from stretto.ops.kernels.quantise_rows import quantise_rows  # imports Triton

            bytes_END, scale_EN = quantise_rows(x_ND if x_ND.dim() == 3 else x_ND[None])
            return Rows(bytes_END.view(x_ND.shape), scale_EN.view(x_ND.shape[:-1]))
        scale_N = scale_of(x_ND.abs().amax(-1))
        return Rows((x_ND / scale_N[..., None]).to(FP8).contiguous(), scale_N)

    def dequantise(self) -> Tensor:
        """fp32 […, N, D]."""
        return self.bytes_ND.float() * self.scale_N[..., None]


@cache
def _why_torch(device: torch.device) -> str:
    """Reason why torch quantises on ``device``, said once; empty if the kernel does."""
    why = kernels.why_not(device)
    if why:
        say(f"FP8: {why}: torch quantises, in about six kernels in place of one")
    return why


def product(x: Rows, weight: Rows) -> Tensor:
    """``x`` [N, D] · ``weight`` [F, D]ᵀ, bf16 [N, F]."""
    if why_emulated(x.bytes_ND.device):
        return (x.dequantise() @ weight.dequantise().t()).bfloat16()
    recipe = F.ScalingType.RowWise  # type: ignore[attr-defined]
    scales = x.scale_N[:, None], weight.scale_N[None]
    return F.scaled_mm(
        x.bytes_ND, weight.bytes_ND.t(), scales[0], recipe, scales[1], recipe, output_dtype=torch.bfloat16
    )


def grouped_product(x: Rows, weights: Rows, ends_E: Tensor) -> Tensor:
    """`product` of each expert's rows of ``x`` [P, D] with its matrix of ``weights`` [E, F, D]; bf16 [P, F]."""
    if why_emulated(x.bytes_ND.device):
        return grouped_mm(x.dequantise(), weights.dequantise().transpose(1, 2), ends_E).bfloat16()
    recipe = F.ScalingType.RowWise  # type: ignore[attr-defined]
    return F.scaled_grouped_mm(  # type: ignore[attr-defined]
        x.bytes_ND, weights.bytes_ND.transpose(1, 2), x.scale_N, recipe, weights.scale_N, recipe, offs=ends_E,
        output_dtype=torch.bfloat16,
    )  # fmt: skip


class _Linear(torch.autograd.Function):
    """``x`` [N, D] · ``weight`` [F, D]ᵀ of bf16 operands."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_FD: Tensor) -> Tensor:
        ctx.save_for_backward(x_ND, weight_FD)
        return product(Rows.of(x_ND), Rows.of(weight_FD))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (grad_NF,), (x_ND, weight_FD) = grads, ctx.saved_tensors
        grad_x = product(Rows.of(grad_NF), Rows.of(weight_FD.t())) if ctx.needs_input_grad[0] else None
        return grad_x, grad_NF.t() @ x_ND if ctx.needs_input_grad[1] else None


class Fp8Backend(TorchBackend):
    """Routed experts whose products with weights are in FP8."""

    def multiply(self, rows_PD: Tensor, weights_EDF: Tensor, ends_E: Tensor) -> Tensor:
        if any(width % MULTIPLE for width in weights_EDF.shape[1:]):
            return super().multiply(rows_PD, weights_EDF, ends_E)
        return grouped_product(Rows.of(rows_PD), Rows.of(weights_EDF.transpose(1, 2)), ends_E)


BACKENDS["fp8"] = Fp8Backend()


class Fp8Operators(Operators):
    """Operators for training under autocast in bf16, with the products of projections, feed-forward networks and experts in FP8. With
    experts on several ranks, theirs stay in bf16."""

    def linear(self, x_ND: Tensor, weight: Weight, bias_F: Tensor | None = None) -> Tensor:
        if any(width % MULTIPLE for width in weight.shape):
            return super().linear(x_ND, weight, bias_F)
        y_MF = _Linear.apply(x_ND.reshape(-1, x_ND.shape[-1]).bfloat16(), weight.bfloat16())
        y_NF = y_MF.view(*x_ND.shape[:-1], -1)
        return y_NF if bias_F is None else y_NF + bias_F.bfloat16()

    def experts(self, x_ND: Tensor, routes: Routes, weights: Experts) -> Tensor:
        is_emulated = bool(why_emulated(x_ND.device))
        backend = "fp8" if is_emulated or why_no_kernels(x_ND.device, weights, KERNEL_MULTIPLE) else "triton-fp8"
        return experts(x_ND, routes.chosen_NK, routes.gates_NK, weights, backend=backend)


class Fp8Weights:
    """The quantised weights of a network for rollouts; the network's own weights become their values.

    Decoding steps read the bytes (`stretto.engine.decode.KernelSteps`), half as many as bf16 has. Their activations stay in bf16, because
    products of few tokens take the time to read the weights. Other steps multiply by the values.
    """

    def __init__(self, blocks: nn.Module, prefix: str):
        """``prefix``: of the names of the weights of ``blocks`` in the network's state dict."""
        self._blocks, self._prefix = blocks, prefix
        self.rows = {name: Rows.of(weight.bfloat16()) for name, weight in self._weights()}
        """By name in the state dict. `refresh` writes to these tensors."""
        self._write()

    @torch.no_grad()
    def refresh(self) -> None:
        """Quantise the network's weights anew, which were replaced."""
        for name, weight in self._weights():
            fresh, own = Rows.of(weight.bfloat16()), self.rows[name]
            own.bytes_ND.copy_(fresh.bytes_ND)
            own.scale_N.copy_(fresh.scale_N)
        self._write()

    @torch.no_grad()
    def _write(self) -> None:
        for name, weight in self._weights():
            weight.copy_(self.rows[name].dequantise())

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        """The matrices of attention, feed-forward networks and experts. The router decides on small differences, and stays."""
        for name, weight in self._blocks.named_parameters():
            is_matrix = weight.ndim > 1 and not name.endswith(("mlp.gate", "bias"))
            if is_matrix and not any(width % MULTIPLE for width in weight.shape[-2:]):
                yield self._prefix + name, weight.detach()
