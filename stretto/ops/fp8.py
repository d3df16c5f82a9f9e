"""Blockwise FP8: the quantiser, and the matrix product that trainer and engine share.

All numbers are E4M3. Weights have one scale per block of 128 × 128, activations and gradients one per 128 neighbouring
entries of a row; a scale is the block's largest magnitude / 448, in fp32. Rounding is to nearest even. A product sums the
128 terms of a block, multiplies by the two scales in fp32, and adds blocks in order (DeepSeek-V3, 2412.19437, §3.3).

The reference is an exact emulation: a product of two E4M3 numbers is a multiple of 2⁻¹⁸ below 2¹⁸, so fp64 sums
128 of them without rounding, in any order. The emulation therefore depends neither on the batch nor on the matrix library. On
Hopper, `torch.nn.functional.scaled_mm` computes the same product from the same bytes; only the tensor cores' rounding of sums
differs.

Shape letters: N tokens, D inner dim, F outputs, J = ⌈D / 128⌉ and I = ⌈F / 128⌉ blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128
LARGEST = 448.0
"""Largest number in E4M3."""
FP8 = torch.float8_e4m3fn
ROWS = 4
"""cuBLAS needs a number of activation rows that is a multiple of this; the tokens of an expert can be any number."""


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """Quantised activations or gradients."""

    bytes_ND: Tensor
    """E4M3."""
    scale_NJ: Tensor
    """fp32."""

    def dequantise(self) -> Tensor:
        """fp32 [N, D]."""
        num_inner = self.bytes_ND.shape[1]
        return self.bytes_ND.float() * self.scale_NJ.repeat_interleave(BLOCK, 1)[:, :num_inner]


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A quantised weight."""

    bytes_FD: Tensor
    """E4M3."""
    scale_IJ: Tensor
    """fp32."""
    wide_FD: Tensor | None = None
    """``bytes_FD`` in fp64, for the emulation; None: converted at each use."""

    def dequantise(self) -> Tensor:
        """fp32 [F, D]."""
        num_outputs, num_inner = self.bytes_FD.shape
        scale_FD = self.scale_IJ.repeat_interleave(BLOCK, 0)[:num_outputs].repeat_interleave(BLOCK, 1)[:, :num_inner]
        return self.bytes_FD.float() * scale_FD

    def widened(self) -> Fp8Weight:
        """The same weight with ``wide_FD`` filled in."""
        return Fp8Weight(self.bytes_FD, self.scale_IJ, self.bytes_FD.double())


def scale_of(largest: Tensor) -> Tensor:
    """Scale for a block's largest magnitude, fp32; 1 for a block of zeros, and of numbers so small that their scale would be 0. A block
    with NaN has the scale NaN."""
    scale = largest.float() / LARGEST
    return torch.where(scale == 0, 1.0, scale)


def quantise_rows(x_ND: Tensor) -> Fp8Rows:
    """Quantise ``x_ND`` with one scale per 128 entries of a row."""
    num_inner = x_ND.shape[1]
    blocks_NJ = F.pad(x_ND.detach().float(), (0, -num_inner % BLOCK)).unflatten(1, (-1, BLOCK))
    scale_NJ = scale_of(blocks_NJ.abs().amax(-1))
    quantised_ND = (blocks_NJ / scale_NJ[..., None]).to(FP8).flatten(1)[:, :num_inner]
    return Fp8Rows(quantised_ND.contiguous(), scale_NJ)


def quantise_weight(weight_FD: Tensor) -> Fp8Weight:
    """Quantise ``weight_FD`` with one scale per block of 128 × 128. A dequantised weight quantises to the same bytes again."""
    num_outputs, num_inner = weight_FD.shape
    padded = F.pad(weight_FD.detach().float(), (0, -num_inner % BLOCK, 0, -num_outputs % BLOCK))
    blocks = padded.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
    scale_IJ = scale_of(blocks.abs().amax((1, 3)))
    quantised = (blocks / scale_IJ[:, None, :, None]).to(FP8).flatten(2, 3).flatten(0, 1)
    return Fp8Weight(quantised[:num_outputs, :num_inner].contiguous(), scale_IJ)


def product_reference(x: Fp8Rows, weight: Fp8Weight) -> Tensor:
    """``x`` · ``weight``ᵀ, fp32 [N, F], by exact emulation."""
    num_outputs, num_inner = weight.bytes_FD.shape
    assert x.bytes_ND.shape[1] == num_inner, f"rows of {x.bytes_ND.shape[1]} for a weight of {num_inner} columns"
    wide_ND = x.bytes_ND.double()
    wide_FD = weight.bytes_FD.double() if weight.wide_FD is None else weight.wide_FD
    scale_JF = weight.scale_IJ.t().repeat_interleave(BLOCK, 1)[:, :num_outputs]
    y_NF = wide_ND.new_zeros(len(wide_ND), num_outputs, dtype=torch.float32)
    for block, start in enumerate(range(0, num_inner, BLOCK)):
        part = slice(start, start + BLOCK)
        sum_NF = (wide_ND[:, part] @ wide_FD[:, part].t()).float()
        y_NF = y_NF + sum_NF * (x.scale_NJ[:, block, None] * scale_JF[block])
    return y_NF


def why_emulated(weight_FD: Tensor, batch_invariant: bool) -> str:
    """Reason why the product with this weight is emulated; empty if the GPU's FP8 kernel computes it."""
    if weight_FD.device.type != "cuda":
        return f"on {weight_FD.device.type}"
    if batch_invariant:
        return "batch-invariant"
    if torch.cuda.get_device_capability(weight_FD.device) != (9, 0):
        return "no Hopper GPU"  # cuBLAS supports scales of blocks of 128 on compute capability 9.0 only
    if tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2]) < (12, 9):
        return f"CUDA {torch.version.cuda} is older than 12.9"
    if weight_FD.shape[0] % BLOCK or weight_FD.shape[1] % BLOCK:
        return f"{tuple(weight_FD.shape)} is not a multiple of {BLOCK}"
    return ""


def product_hopper(x: Fp8Rows, weight: Fp8Weight) -> Tensor:
    """`product_reference` with cuBLAS, which rounds results to bf16; fp32 [N, F]."""
    num_rows = len(x.bytes_ND)
    spare = (0, 0, 0, -num_rows % ROWS)
    bytes_ND = F.pad(x.bytes_ND.view(torch.uint8), spare).view(FP8)
    # cuBLAS needs scales of neighbouring rows next to each other, and rows of weight scales padded to a multiple of 4
    scale_NJ = F.pad(x.scale_NJ, spare).t().contiguous().t()
    scale_IJ = F.pad(weight.scale_IJ, (0, -weight.scale_IJ.shape[1] % 4)).contiguous()
    y_NF = F.scaled_mm(
        bytes_ND,
        weight.bytes_FD.contiguous().t(),
        scale_NJ,
        F.ScalingType.BlockWise1x128,  # type: ignore[attr-defined]
        scale_IJ.t(),
        F.ScalingType.BlockWise128x128,  # type: ignore[attr-defined]
        output_dtype=torch.bfloat16,
    )
    return y_NF[:num_rows].float()


def product(x: Fp8Rows, weight: Fp8Weight, batch_invariant: bool = False) -> Tensor:
    """`product_reference`, computed by the GPU's FP8 kernel if `why_emulated` gives no reason against it."""
    if len(x.bytes_ND) and not why_emulated(weight.bytes_FD, batch_invariant):
        return product_hopper(x, weight)
    return product_reference(x, weight)


def linear(x_ND: Tensor, weight: Tensor | Fp8Weight, batch_invariant: bool = False) -> Tensor:
    """``x`` · ``weight``ᵀ with both operands in FP8, fp32 [N, F].

    A weight that is already quantised receives no gradient. For other weights, the gradient of ``x`` is an FP8 product of the
    quantised output gradient and the quantised weight. The gradient of the weight is an fp32 product of the quantised
    activations and the output gradient without quantisation, because it sums over all tokens of a step.
    """
    if isinstance(weight, Fp8Weight):
        return product(quantise_rows(x_ND), weight, batch_invariant)
    return _Fp8Linear.apply(x_ND, weight, batch_invariant)


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_FD: Tensor, batch_invariant: bool) -> Tensor:
        x, weight = quantise_rows(x_ND), quantise_weight(weight_FD)
        ctx.save_for_backward(x.bytes_ND, x.scale_NJ, weight.bytes_FD, weight.scale_IJ)
        ctx.batch_invariant = batch_invariant
        return product(x, weight, batch_invariant)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        bytes_ND, scale_NJ, bytes_FD, scale_IJ = ctx.saved_tensors
        (grad_NF,) = grads
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            # blocks are square, so the transposed weight is quantised in the same way
            grad_x = product(quantise_rows(grad_NF), Fp8Weight(bytes_FD.t(), scale_IJ.t()), ctx.batch_invariant)
        if ctx.needs_input_grad[1]:
            grad_weight = grad_NF.float().t() @ Fp8Rows(bytes_ND, scale_NJ).dequantise()
        return grad_x, grad_weight, None
