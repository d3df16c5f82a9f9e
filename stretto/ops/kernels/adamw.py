"""One update of AdamW as one kernel: reads gradient, weight and moments once, in the forms that `stretto.optim.compact` stores, and writes
weight and moments. Reference: `stretto.optim.compact.update_in_parts`.

Shape letters: N elements, B blocks that share a scale, X elements of a block.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 16
"""Blocks of a program."""
_LARGEST, _TINY = tl.constexpr(3.4028234663852886e38), tl.constexpr(torch.finfo(torch.float32).tiny)


def update(
    parameter: Tensor,
    low: Tensor | None,
    gradient: Tensor,
    state: dict[str, Tensor],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    key: int,
    scale: Tensor | None,
    norm: Tensor | None,
    block: int,
) -> None:
    """Update ``parameter`` and ``state`` in place.

    Args:
        low: lower bits of a split parameter; None: a parameter in bf16 is rounded stochastically.
        step: 1-based.
        key: 32 bits for the random numbers of stochastic rounding.
        scale: factor of the gradient, fp32 on the device; None: 1.
        norm: nothing changes if it is not finite, fp32 on the device; None: there is no such check.
        block: elements that share a scale in 8 bits.
    """
    first, second = state["exp_avg"], state["exp_avg_sq"]
    in_blocks = first.dtype == torch.int8
    first_B, second_B = (state[f"{name}_scale"] if in_blocks else first for name in ("exp_avg", "exp_avg_sq"))
    assert parameter.is_contiguous() and first.is_contiguous() and second.is_contiguous(), "strides"
    num = parameter.numel()
    _update[(triton.cdiv(num, _ROWS * block),)](
        *(parameter, parameter if low is None else low, gradient.contiguous(), first, second, first_B, second_B),
        *(parameter if scale is None else scale, parameter if norm is None else norm),
        *(num, 1.0 - lr * weight_decay, lr / (1.0 - betas[0] ** step), math.sqrt(1.0 - betas[1] ** step)),
        *(1.0 - betas[0], betas[1], eps, key - (1 << 32) if key >= 1 << 31 else key),
        IS_SPLIT=low is not None,
        IS_ROUNDED=low is None and parameter.dtype == torch.bfloat16,
        IN_BLOCKS=in_blocks,
        HAS_SCALE=scale is not None,
        HAS_NORM=norm is not None,
        ROWS=_ROWS,
        BLOCK=block,
    )


@triton.jit
def _bits(x):
    """The bits of fp32 numbers. NaN has bits that stay NaN when a rounding is added; CUDA's own, 0x7fffffff, would become −0."""
    return tl.where(x == x, x.to(tl.int32, bitcast=True), 0x7FC00000)


@triton.jit
def _nearest(x, ptr):
    """``x`` in the dtype of ``ptr``. Triton's interpreter would cut bf16 off in place of rounding it."""
    if ptr.dtype.element_ty == tl.bfloat16:
        bits = _bits(x)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return x.to(ptr.dtype.element_ty)


@triton.jit(do_not_specialize=["key"])
def _update(
    weight_ptr, low_ptr, grad_ptr, first_ptr, second_ptr, first_scale_ptr, second_scale_ptr, scale_ptr, norm_ptr,
    num, kept, rate, root_correction, share1, beta2, eps, key,
    IS_SPLIT: tl.constexpr, IS_ROUNDED: tl.constexpr, IN_BLOCKS: tl.constexpr, HAS_SCALE: tl.constexpr,
    HAS_NORM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``kept``: factor of the decay. ``rate``: learning rate over the bias correction. ``share1``: 1 − β₁."""
    rows_B = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at_BX = rows_B[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    if HAS_NORM:
        num = tl.where(tl.abs(tl.load(norm_ptr)) <= _LARGEST, num, 0)  # also 0 for NaN
    here_BX, here_B = at_BX < num, rows_B * BLOCK < num

    grad_BX = tl.load(grad_ptr + at_BX, here_BX, other=0.0).to(tl.float32)
    if HAS_SCALE:
        grad_BX *= tl.load(scale_ptr)
    weight_BX = tl.load(weight_ptr + at_BX, here_BX, other=0.0)
    if IS_SPLIT:
        high_BX = weight_BX.to(tl.int16, bitcast=True).to(tl.int32) << 16
        weight_BX = (high_BX + tl.load(low_ptr + at_BX, here_BX, other=0)).to(tl.float32, bitcast=True)
    else:
        weight_BX = weight_BX.to(tl.float32)
    first_BX = tl.load(first_ptr + at_BX, here_BX, other=0).to(tl.float32)
    second_BX = tl.load(second_ptr + at_BX, here_BX, other=0).to(tl.float32)
    if IN_BLOCKS:
        first_BX *= tl.load(first_scale_ptr + rows_B, here_B, other=0.0)[:, None] / (254 - tl.abs(first_BX))
        second_BX = second_BX / 255
        second_BX *= second_BX
        second_BX *= second_BX * tl.load(second_scale_ptr + rows_B, here_B, other=0.0)[:, None]

    weight_BX *= kept
    first_BX += share1 * (grad_BX - first_BX)
    second_BX = second_BX * beta2 + (1 - beta2) * grad_BX * grad_BX
    weight_BX -= rate * first_BX / (tl.sqrt_rn(second_BX) / root_correction + eps)

    if IN_BLOCKS:
        first_B, second_B = tl.max(tl.abs(first_BX), 1), tl.max(second_BX, 1)
        tl.store(first_scale_ptr + rows_B, first_B, here_B)
        tl.store(second_scale_ptr + rows_B, second_B, here_B)
        share_BX = first_BX / tl.maximum(first_B, _TINY)[:, None]
        bent_BX = share_BX * 254 / (1 + tl.abs(share_BX))
        # halves away from zero, where torch rounds them to even: codes of such numbers are equally good
        first_BX = tl.where(bent_BX < 0, -tl.floor(0.5 - bent_BX), tl.floor(0.5 + bent_BX))
        root_BX = tl.sqrt_rn(tl.sqrt_rn(second_BX / tl.maximum(second_B, _TINY)[:, None]))
        second_BX = tl.maximum(tl.floor(root_BX * 255 + 0.5), tl.where(second_BX > 0, 1.0, 0.0))
    tl.store(first_ptr + at_BX, _nearest(first_BX, first_ptr), here_BX)
    tl.store(second_ptr + at_BX, _nearest(second_BX, second_ptr), here_BX)

    bits_BX = _bits(weight_BX)
    if IS_SPLIT:
        low_BX = bits_BX.to(tl.int16)
        tl.store(low_ptr + at_BX, low_BX, here_BX)
        high_BX = (bits_BX - low_BX.to(tl.int32)) >> 16
        tl.store(weight_ptr + at_BX, high_BX.to(tl.int16).to(tl.bfloat16, bitcast=True), here_BX)
    elif IS_ROUNDED:
        # the hash of `stretto.ops.master.random_bits`
        x_BX = at_BX.to(tl.uint32) ^ key.to(tl.uint32)
        x_BX = (x_BX ^ (x_BX >> 16)) * 0x7FEB352D
        x_BX = (x_BX ^ (x_BX >> 15)) * 0x846CA68B
        high_BX = (bits_BX + (x_BX >> 16).to(tl.int32)) >> 16
        tl.store(weight_ptr + at_BX, high_BX.to(tl.int16).to(tl.bfloat16, bitcast=True), here_BX)
    else:
        tl.store(weight_ptr + at_BX, weight_BX, here_BX)
