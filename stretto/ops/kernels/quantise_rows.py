"""The quantiser of rowwise FP8 as one kernel: reads a tensor, writes its bytes and scales. Reference: `stretto.ops.fp8_rows.Rows.of`.

Shape letters: E matrices, N rows, D entries of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto.ops.fp8 import FP8, LARGEST

_LARGEST = tl.constexpr(LARGEST)


def quantise_rows(x_END: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes [E, N, D], contiguous, and scales [E, N] in fp32, of ``x_END`` with any strides, such as a transposed weight."""
    E, N, D = x_END.shape
    bytes_END = torch.empty(E, N, D, dtype=FP8, device=x_END.device)
    scale_EN = torch.empty(E, N, dtype=torch.float32, device=x_END.device)
    is_transposed = x_END.stride(2) != 1
    block_n, block_d = (64, 64) if is_transposed else (4, 512)
    _quantise[(triton.cdiv(N, block_n), E)](
        x_END, bytes_END, scale_EN, N, D, *x_END.stride(), BLOCK_N=block_n, BLOCK_D=block_d
    )
    return bytes_END, scale_EN


@triton.jit
def _quantise(
    x_ptr, bytes_ptr, scale_ptr, N, D, stride_e, stride_n, stride_d, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    e = tl.program_id(1).to(tl.int64)
    rows_N = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row_N = rows_N < N
    x_ptr_N = x_ptr + e * stride_e + rows_N * stride_n
    # Bits of magnitudes: their order is that of the numbers, and NaN is the largest.
    largest_N = tl.zeros((BLOCK_N,), tl.int32)
    for start in range(0, D, BLOCK_D):
        columns_D = start + tl.arange(0, BLOCK_D)
        mask_ND = is_row_N[:, None] & (columns_D < D)[None, :]
        x_ND = tl.load(x_ptr_N[:, None] + columns_D[None, :] * stride_d, mask=mask_ND, other=0.0).to(tl.float32)
        largest_N = tl.maximum(largest_N, tl.max(x_ND.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1))
    scale_N = tl.div_rn(largest_N.to(tl.float32, bitcast=True), _LARGEST)
    scale_N = tl.where(scale_N == 0, 1.0, scale_N)
    tl.store(scale_ptr + e * N + rows_N, scale_N, mask=is_row_N)
    for start in range(0, D, BLOCK_D):  # from the cache
        columns_D = start + tl.arange(0, BLOCK_D)
        mask_ND = is_row_N[:, None] & (columns_D < D)[None, :]
        x_ND = tl.load(x_ptr_N[:, None] + columns_D[None, :] * stride_d, mask=mask_ND, other=0.0).to(tl.float32)
        divisor_ND = tl.broadcast_to(scale_N[:, None], (BLOCK_N, BLOCK_D))
        quantised_ND = _rounded(tl.div_rn(x_ND, divisor_ND)).to(tl.float8e4nv)
        tl.store(bytes_ptr + (e * N + rows_N[:, None]) * D + columns_D[None, :], quantised_ND, mask=mask_ND)


@triton.jit
def _rounded(x):
    """``x`` rounded to the nearest number of E4M3, in fp32, ties to even; Triton's interpreter converts such numbers only correctly.
    NaN becomes any number: the scale of its row is NaN."""
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(
        tl.float32, bitcast=True
    )  # 3 bits after the leading one
    small = (x + 24576.0) - 24576.0  # 1.5 · 2¹⁴: a sum of this size has a last place of 2⁻⁹, the least number of E4M3
    return tl.where(tl.abs(x) < 0.015625, small, normal)
