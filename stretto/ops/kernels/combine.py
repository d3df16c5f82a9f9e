"""Sums of the outputs of each token's experts, gathered in the order of choice: no atomics, so the result has the same bits every time."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TOKENS, _COLUMNS = 4, 512
"""Size of a program's part of the output."""


def combine(y_PD: Tensor, place_S: Tensor, num_tokens: int, dtype: torch.dtype) -> Tensor:
    """For each token, the sum [N, D] of the rows of its slots in their order, in ``dtype``; sums are fp32."""
    if num_tokens == 0:  # as for a rank of expert parallelism whose experts nobody chose
        return y_PD.new_zeros(0, y_PD.shape[1], dtype=dtype)
    out_ND, (_, D) = y_PD.new_empty(num_tokens, y_PD.shape[1], dtype=dtype), y_PD.shape
    grid = triton.cdiv(num_tokens, _TOKENS), triton.cdiv(D, _COLUMNS)
    _combine[grid](y_PD, place_S, out_ND, num_tokens, D, len(place_S) // num_tokens, BLOCK_T=_TOKENS, BLOCK_D=_COLUMNS)
    return out_ND


@triton.jit
def _combine(
    y_ptr, place_ptr, out_ptr, num_tokens, D, NUM_CHOSEN: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr
):
    tokens, cols = (
        tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T),
        tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D),
    )
    is_token = tokens < num_tokens
    is_own = is_token[:, None] & (cols < D)[None, :]
    total = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for choice in range(NUM_CHOSEN):
        place = tl.load(place_ptr + tokens * NUM_CHOSEN + choice, mask=is_token, other=0)
        total += tl.load(y_ptr + place[:, None] * D + cols[None, :], mask=is_own, other=0.0).to(tl.float32)
    out_ptrs = out_ptr + tokens.to(tl.int64)[:, None] * D + cols[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=is_own)
