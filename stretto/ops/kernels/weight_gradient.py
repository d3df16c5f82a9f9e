"""Gradients of experts' matrices: sums over each expert's rows, one of whose sides may be gathered from the tokens."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from stretto.ops.grouped import Slots
from stretto.ops.kernels.tiles import configs, plus_product, position, settings


def weight_gradient(left: Tensor, right: Tensor, slots: Slots, *, gathers_left: bool) -> Tensor:
    """For each expert the product [M, N] of its rows of ``left`` [·, M], transposed, with those of ``right`` [·, N]. One of them has a
    row per token, the other one per place."""
    num_experts, M, N = len(slots.ends_E), left.shape[1], right.shape[1]
    grad_EMN = left.new_empty(num_experts, M, N)

    def grid(meta: dict[str, Any]) -> tuple[int, int]:
        return triton.cdiv(M, meta["BLOCK_M"]) * triton.cdiv(N, meta["BLOCK_N"]), num_experts

    _weight_gradient[grid](
        left, right, slots.token_P, slots.ends_E, grad_EMN, M, N, GATHERS_LEFT=gathers_left, **settings(left)
    )
    return grad_EMN


@triton.autotune(configs((128, 256, 8, 3), (256, 128, 8, 3), (128, 128, 8, 3)), key=["M", "N", "GATHERS_LEFT"])
@triton.jit
def _weight_gradient(
    left_ptr, right_ptr, token_ptr, ends_ptr, out_ptr, M, N, GATHERS_LEFT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    m, n = position(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    expert = tl.program_id(1)
    start = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends_ptr + expert)
    ms, ns, ks = m * BLOCK_M + tl.arange(0, BLOCK_M), n * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    is_m, is_n = ms < M, ns < N
    grad = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    places = start + ks
    token = tl.load(token_ptr + places, mask=places < end, other=0)
    for _ in range(start, end, BLOCK_K):
        is_own, place = places < end, places.to(tl.int64)
        if GATHERS_LEFT:
            left_rows, right_rows = token, place
        else:
            left_rows, right_rows = place, token
        left = tl.load(left_ptr + left_rows[:, None] * M + ms[None, :], mask=is_own[:, None] & is_m[None, :], other=0.0)
        right = tl.load(
            right_ptr + right_rows[:, None] * N + ns[None, :], mask=is_own[:, None] & is_n[None, :], other=0.0
        )
        places += BLOCK_K
        # one iteration ahead: with a load that waits for another of the same iteration, fewer tiles are in flight
        token = tl.load(token_ptr + places, mask=places < end, other=0)
        grad = plus_product(grad, tl.trans(left), right, PRECISION)
    out_ptrs = out_ptr + expert.to(tl.int64) * M * N + ms[:, None] * N + ns[None, :]
    tl.store(out_ptrs, grad.to(out_ptr.dtype.element_ty), mask=is_m[:, None] & is_n[None, :])
