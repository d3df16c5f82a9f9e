"""Products of each expert's rows with its matrix: with gathered rows and SwiGLU behind it, plain, and with SwiGLU's gradient behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto.ops.grouped import Slots
from stretto.ops.kernels.tiles import configs, plus_product, position, settings, tile_of


def gate_up(x_ND: Tensor, gates_P: Tensor, slots: Slots, gate_up_EFD: Tensor) -> tuple[Tensor, Tensor]:
    """Gate-up outputs [P, F] of the tokens of the places, and SwiGLU of these times the gates [P, I]."""
    num_experts, (num_places,), (_, F, D) = len(gate_up_EFD), slots.token_P.shape, gate_up_EFD.shape
    hidden_PF, inner_PI = x_ND.new_empty(num_places, F), x_ND.new_empty(num_places, F // 2)
    _gate_up[_grid(num_places, num_experts, F // 2)](
        x_ND, slots.token_P, gate_up_EFD, gates_P, slots.ends_E, hidden_PF, inner_PI, num_experts, D, F // 2,
        **settings(x_ND, num_experts),
    )  # fmt: skip
    return hidden_PF, inner_PI


def product(rows_PK: Tensor, ends_E: Tensor, weights_EKN: Tensor) -> Tensor:
    """Rows of each expert times its matrix [P, N]. The matrices may be transposed views."""
    num_experts, width, num_columns = weights_EKN.shape
    y_PN = rows_PK.new_empty(len(rows_PK), num_columns)
    _product[_grid(len(rows_PK), num_experts, num_columns)](
        rows_PK, weights_EKN, ends_E, y_PN, num_experts, width, num_columns, *weights_EKN.stride(),
        **settings(rows_PK, num_experts),
    )  # fmt: skip
    return y_PN


def gate_up_gradient(
    grad_ND: Tensor, gates_P: Tensor, hidden_PF: Tensor, slots: Slots, down_EDI: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """As `stretto.ops.grouped.gated_swiglu_backward`, from the gradient of the experts' sum: SwiGLU times gates [P, I], and the
    gradients of the gates [P] and of the gate-up outputs [P, F]."""
    num_experts, D, I = down_EDI.shape
    num_places = len(hidden_PF)
    inner_PI, grad_PF = grad_ND.new_empty(num_places, I), torch.empty_like(hidden_PF)
    # a program has some of the columns: their sums are added below, in a fixed order
    sums_PT = gates_P.new_zeros(num_places, triton.cdiv(I, _gate_up_gradient.configs[0].kwargs["BLOCK_N"]))
    _gate_up_gradient[_grid(num_places, num_experts, I)](
        grad_ND, slots.token_P, down_EDI, gates_P, slots.ends_E, hidden_PF, inner_PI, grad_PF, sums_PT, num_experts, D, I,
        sums_PT.shape[1], **settings(grad_ND, num_experts),
    )  # fmt: skip
    return inner_PI, sums_PT.sum(1), grad_PF


def _grid(num_places: int, num_experts: int, num_columns: int) -> Callable[[dict[str, Any]], tuple[int]]:
    """Number of programs: all tiles of rows that may exist, times tiles of columns."""
    return lambda meta: ((num_places // meta["BLOCK_M"] + num_experts) * triton.cdiv(num_columns, meta["BLOCK_N"]),)


@triton.autotune(configs((128, 64, 8, 3), (128, 128, 8, 3), (64, 128, 8, 3)), key=["D", "I"])
@triton.jit
def _gate_up(
    x_ptr, token_ptr, weight_ptr, gates_ptr, ends_ptr, hidden_ptr, inner_ptr, num_experts, D, I,
    BLOCK_E: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    num_n = tl.cdiv(I, BLOCK_N)
    tile, column = position(tl.program_id(0), tl.num_programs(0) // num_n, num_n, GROUP_M)
    expert, first, end = tile_of(tile, ends_ptr, num_experts, BLOCK_E, BLOCK_M)
    if expert >= num_experts:
        return
    rows, cols, ks = first + tl.arange(0, BLOCK_M), column * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    is_row, is_col = rows < end, cols < I
    token = tl.load(token_ptr + rows, mask=is_row, other=0)
    x_ptrs = x_ptr + token[:, None] * D + ks[None, :]
    gate_ptrs = weight_ptr + expert.to(tl.int64) * 2 * I * D + cols[None, :] * D + ks[:, None]
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for _ in range(0, D, BLOCK_K):
        x = tl.load(x_ptrs, mask=is_row[:, None], other=0.0)
        gate = plus_product(gate, x, tl.load(gate_ptrs, mask=is_col[None, :], other=0.0), PRECISION)
        up = plus_product(up, x, tl.load(gate_ptrs + I * D, mask=is_col[None, :], other=0.0), PRECISION)
        x_ptrs += BLOCK_K
        gate_ptrs += BLOCK_K
    place, is_own = rows.to(tl.int64)[:, None], is_row[:, None] & is_col[None, :]
    # rounded as the backward pass reads them
    gate, up = gate.to(hidden_ptr.dtype.element_ty), up.to(hidden_ptr.dtype.element_ty)
    tl.store(hidden_ptr + place * (2 * I) + cols[None, :], gate, mask=is_own)
    tl.store(hidden_ptr + place * (2 * I) + I + cols[None, :], up, mask=is_own)
    gate, up = gate.to(tl.float32), up.to(tl.float32)
    weight = tl.load(gates_ptr + rows, mask=is_row, other=0.0).to(tl.float32)
    inner = gate / (1.0 + tl.exp(-gate)) * up * weight[:, None]
    tl.store(inner_ptr + place * I + cols[None, :], inner.to(inner_ptr.dtype.element_ty), mask=is_own)


@triton.autotune(configs((128, 128, 8, 3), (128, 256, 8, 3), (64, 128, 4, 4)), key=["K", "N"])
@triton.jit
def _product(
    rows_ptr, weight_ptr, ends_ptr, out_ptr, num_experts, K, N, stride_e, stride_k, stride_n,
    BLOCK_E: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    num_n = tl.cdiv(N, BLOCK_N)
    tile, column = position(tl.program_id(0), tl.num_programs(0) // num_n, num_n, GROUP_M)
    expert, first, end = tile_of(tile, ends_ptr, num_experts, BLOCK_E, BLOCK_M)
    if expert >= num_experts:
        return
    rows, cols, ks = first + tl.arange(0, BLOCK_M), column * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    is_row, is_col, place = rows < end, cols < N, rows.to(tl.int64)[:, None]
    row_ptrs = rows_ptr + place * K + ks[None, :]
    weight_ptrs = weight_ptr + expert.to(tl.int64) * stride_e + cols[None, :] * stride_n + ks[:, None] * stride_k
    y = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for _ in range(0, K, BLOCK_K):
        row = tl.load(row_ptrs, mask=is_row[:, None], other=0.0)
        y = plus_product(y, row, tl.load(weight_ptrs, mask=is_col[None, :], other=0.0), PRECISION)
        row_ptrs += BLOCK_K
        weight_ptrs += BLOCK_K * stride_k
    is_own = is_row[:, None] & is_col[None, :]
    tl.store(out_ptr + place * N + cols[None, :], y.to(out_ptr.dtype.element_ty), mask=is_own)


# one width of columns, as the number of partial sums of the gates depends on it
@triton.autotune(configs((128, 128, 8, 3), (64, 128, 4, 3)), key=["D", "I"])
@triton.jit
def _gate_up_gradient(
    grad_ptr, token_ptr, weight_ptr, gates_ptr, ends_ptr, hidden_ptr, inner_ptr, grad_hidden_ptr, sums_ptr, num_experts, D, I,
    num_sums, BLOCK_E: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    num_n = tl.cdiv(I, BLOCK_N)
    tile, column = position(tl.program_id(0), tl.num_programs(0) // num_n, num_n, GROUP_M)
    expert, first, end = tile_of(tile, ends_ptr, num_experts, BLOCK_E, BLOCK_M)
    if expert >= num_experts:
        return
    rows, cols, ks = first + tl.arange(0, BLOCK_M), column * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    is_row, is_col, place = rows < end, cols < I, rows.to(tl.int64)[:, None]
    token = tl.load(token_ptr + rows, mask=is_row, other=0)
    grad_ptrs = grad_ptr + token[:, None] * D + ks[None, :]
    weight_ptrs = weight_ptr + expert.to(tl.int64) * D * I + cols[None, :] + ks[:, None] * I
    grad = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for _ in range(0, D, BLOCK_K):
        row = tl.load(grad_ptrs, mask=is_row[:, None], other=0.0)
        grad = plus_product(grad, row, tl.load(weight_ptrs, mask=is_col[None, :], other=0.0), PRECISION)
        grad_ptrs += BLOCK_K
        weight_ptrs += BLOCK_K * I
    is_own = is_row[:, None] & is_col[None, :]
    gate = tl.load(hidden_ptr + place * (2 * I) + cols[None, :], mask=is_own, other=0.0).to(tl.float32)
    up = tl.load(hidden_ptr + place * (2 * I) + I + cols[None, :], mask=is_own, other=0.0).to(tl.float32)
    weight = tl.load(gates_ptr + rows, mask=is_row, other=0.0).to(tl.float32)[:, None]
    share = 1.0 / (1.0 + tl.exp(-gate))
    silu = gate * share
    tl.store(sums_ptr + rows.to(tl.int64) * num_sums + column, tl.sum(grad * silu * up, 1), mask=is_row)
    grad *= weight
    tl.store(inner_ptr + place * I + cols[None, :], (silu * up * weight).to(inner_ptr.dtype.element_ty), mask=is_own)
    grad_gate = grad * up * share * (1.0 + gate * (1.0 - share))
    grad_ptrs = grad_hidden_ptr + place * (2 * I) + cols[None, :]
    tl.store(grad_ptrs, grad_gate.to(grad_hidden_ptr.dtype.element_ty), mask=is_own)
    tl.store(grad_ptrs + I, (grad * silu).to(grad_hidden_ptr.dtype.element_ty), mask=is_own)
