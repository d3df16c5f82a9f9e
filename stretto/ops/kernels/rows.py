"""Products of each expert's rows with its matrix, whose rows may be gathered; SwiGLU behind one of them, and its gradient.

Operands are in bf16, or in FP8 with an fp32 factor for each row of the activations and each output of a matrix (`Factors`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto.ops.grouped import Slots
from stretto.ops.kernels.tiles import configs, plus_product, position, settings, tile_of


class Factors(NamedTuple):
    """What multiplies a product of FP8 operands."""

    rows_N: Tensor
    """fp32, of each row of activations."""
    columns_EN: Tensor
    """fp32, of each output of each expert's matrix."""


def gate_up(
    x_ND: Tensor, gates_P: Tensor, slots: Slots, gate_up_EFD: Tensor, factors: Factors | None = None
) -> tuple[Tensor, Tensor]:
    """Gate-up outputs [P, F] of the tokens of the places, and SwiGLU of these times the gates [P, I]."""
    num_experts, (num_places,), (_, F, D) = len(gate_up_EFD), slots.token_P.shape, gate_up_EFD.shape
    dtype = _output_dtype(x_ND)
    hidden_PF, inner_PI = (x_ND.new_empty(num_places, width, dtype=dtype) for width in (F, F // 2))
    _gate_up[_grid(num_places, num_experts, F // 2)](
        x_ND, slots.token_P, gate_up_EFD, gates_P, slots.ends_E, *_pointers(factors, gates_P), hidden_PF, inner_PI,
        num_experts, D, F // 2, HAS_FACTORS=factors is not None, BLOCK_E=triton.next_power_of_2(num_experts),
        **settings(x_ND),
    )  # fmt: skip
    return hidden_PF, inner_PI


def product(
    rows_NK: Tensor,
    ends_E: Tensor,
    weights_EKN: Tensor,
    token_P: Tensor | None = None,
    factors: Factors | None = None,
) -> Tensor:
    """Rows of each expert times its matrix [P, N]. The matrices may be transposed views; in FP8 they must be.

    ``token_P``: row of each place; None: places are rows.
    """
    num_experts, width, num_columns = weights_EKN.shape
    num_places = len(rows_NK) if token_P is None else len(token_P)
    y_PN = rows_NK.new_empty(num_places, num_columns, dtype=_output_dtype(rows_NK))
    _product[_grid(num_places, num_experts, num_columns)](
        rows_NK, ends_E if token_P is None else token_P, weights_EKN, ends_E, *_pointers(factors, ends_E), y_PN,
        num_experts, width, num_columns, *weights_EKN.stride(), GATHERS=token_P is not None,
        HAS_FACTORS=factors is not None, BLOCK_E=triton.next_power_of_2(num_experts), **settings(rows_NK),
    )  # fmt: skip
    return y_PN


def swiglu_gradient(grad_PI: Tensor, gates_P: Tensor, hidden_PF: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `stretto.ops.grouped.gated_swiglu_backward`: SwiGLU times gates [P, I], which overwrites ``grad_PI``, and the gradients of the
    gates [P] and of the gate-up outputs [P, F].

    A kernel of its own: behind the product that gives ``grad_PI``, its numbers do not fit into a program's registers, and the product took
    three times as long (H100).
    """
    num_places, I = grad_PI.shape
    gates, grad_PF = torch.empty_like(gates_P), torch.empty_like(hidden_PF)
    _swiglu_gradient[(triton.cdiv(num_places, _PLACES),)](
        grad_PI, gates_P, hidden_PF, gates, grad_PF, num_places, I, BLOCK_P=_PLACES,
        BLOCK_I=min(256, triton.next_power_of_2(I)),
    )  # fmt: skip
    return grad_PI, gates, grad_PF


_PLACES = 4
"""Rows of a program of `_swiglu_gradient`."""


def _output_dtype(x_ND: Tensor) -> torch.dtype:
    """Data type of a product: bf16 for operands in FP8."""
    return torch.bfloat16 if x_ND.itemsize == 1 else x_ND.dtype


def _pointers(factors: Factors | None, unused: Tensor) -> tuple[Tensor, Tensor]:
    return (unused, unused) if factors is None else (factors.rows_N, factors.columns_EN)


def _grid(num_places: int, num_experts: int, num_columns: int) -> Callable[[dict[str, Any]], tuple[int]]:
    """Number of programs: all tiles of rows that may exist, times tiles of columns."""
    return lambda meta: ((num_places // meta["BLOCK_M"] + num_experts) * triton.cdiv(num_columns, meta["BLOCK_N"]),)


@triton.autotune(configs((128, 128, 8, 3), (128, 64, 8, 3)), key=["D", "I", "HAS_FACTORS"])
@triton.jit
def _gate_up(
    x_ptr, token_ptr, weight_ptr, gates_ptr, ends_ptr, row_factors_ptr, column_factors_ptr, hidden_ptr, inner_ptr,
    num_experts, D, I, HAS_FACTORS: tl.constexpr, BLOCK_E: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    num_n = tl.cdiv(I, BLOCK_N)
    tile, column = position(tl.program_id(0), tl.num_programs(0) // num_n, num_n, GROUP_M)
    expert, first, end = tile_of(tile, ends_ptr, num_experts, BLOCK_E, BLOCK_M)
    if expert >= num_experts:
        return
    rows, ks = first + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    # one product computes gate and up: their columns take turns, so that both of a pair are in the same thread
    both = tl.arange(0, 2 * BLOCK_N)
    pair = column * BLOCK_N + both // 2
    outputs = expert.to(tl.int64) * 2 * I + both % 2 * I + pair
    is_row, is_output = rows < end, pair < I
    token = tl.load(token_ptr + rows, mask=is_row, other=0)
    x_ptrs = x_ptr + token[:, None] * D + ks[None, :]
    weight_ptrs = weight_ptr + outputs[None, :] * D + ks[:, None]
    y = tl.zeros((BLOCK_M, 2 * BLOCK_N), tl.float32)
    for _ in range(0, D, BLOCK_K):
        x = tl.load(x_ptrs, mask=is_row[:, None], other=0.0)
        y = plus_product(y, x, tl.load(weight_ptrs, mask=is_output[None, :], other=0.0), PRECISION)
        x_ptrs += BLOCK_K
        weight_ptrs += BLOCK_K
    if HAS_FACTORS:
        row_factors = tl.load(row_factors_ptr + token, mask=is_row, other=0.0)
        y *= row_factors[:, None] * tl.load(column_factors_ptr + outputs, mask=is_output, other=0.0)[None, :]
    gate, up = tl.split(tl.reshape(y, (BLOCK_M, BLOCK_N, 2)))
    cols, place = column * BLOCK_N + tl.arange(0, BLOCK_N), rows.to(tl.int64)[:, None]
    is_own = is_row[:, None] & (cols < I)[None, :]
    # rounded as the backward pass reads them
    gate, up = gate.to(hidden_ptr.dtype.element_ty), up.to(hidden_ptr.dtype.element_ty)
    tl.store(hidden_ptr + place * (2 * I) + cols[None, :], gate, mask=is_own)
    tl.store(hidden_ptr + place * (2 * I) + I + cols[None, :], up, mask=is_own)
    gate, up = gate.to(tl.float32), up.to(tl.float32)
    weight = tl.load(gates_ptr + rows, mask=is_row, other=0.0).to(tl.float32)
    inner = gate / (1.0 + tl.exp(-gate)) * up * weight[:, None]
    tl.store(inner_ptr + place * I + cols[None, :], inner.to(inner_ptr.dtype.element_ty), mask=is_own)


@triton.autotune(
    configs((128, 256, 8, 3), (128, 256, 8, 4), (128, 128, 8, 3)), key=["K", "N", "GATHERS", "HAS_FACTORS"]
)
@triton.jit
def _product(
    rows_ptr, token_ptr, weight_ptr, ends_ptr, row_factors_ptr, column_factors_ptr, out_ptr, num_experts, K, N, stride_e,
    stride_k, stride_n, GATHERS: tl.constexpr, HAS_FACTORS: tl.constexpr, BLOCK_E: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    num_n = tl.cdiv(N, BLOCK_N)
    tile, column = position(tl.program_id(0), tl.num_programs(0) // num_n, num_n, GROUP_M)
    expert, first, end = tile_of(tile, ends_ptr, num_experts, BLOCK_E, BLOCK_M)
    if expert >= num_experts:
        return
    rows, cols, ks = first + tl.arange(0, BLOCK_M), column * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    is_row, is_col, place = rows < end, cols < N, rows.to(tl.int64)
    source = tl.load(token_ptr + rows, mask=is_row, other=0).to(tl.int64) if GATHERS else place
    row_ptrs = rows_ptr + source[:, None] * K + ks[None, :]
    weight_ptrs = weight_ptr + expert.to(tl.int64) * stride_e + cols[None, :] * stride_n + ks[:, None] * stride_k
    y = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for _ in range(0, K, BLOCK_K):
        row = tl.load(row_ptrs, mask=is_row[:, None], other=0.0)
        y = plus_product(y, row, tl.load(weight_ptrs, mask=is_col[None, :], other=0.0), PRECISION)
        row_ptrs += BLOCK_K
        weight_ptrs += BLOCK_K * stride_k
    if HAS_FACTORS:
        column_factors = tl.load(column_factors_ptr + expert.to(tl.int64) * N + cols, mask=is_col, other=0.0)
        y *= tl.load(row_factors_ptr + source, mask=is_row, other=0.0)[:, None] * column_factors[None, :]
    is_own = is_row[:, None] & is_col[None, :]
    tl.store(out_ptr + place[:, None] * N + cols[None, :], y.to(out_ptr.dtype.element_ty), mask=is_own)


@triton.jit
def _swiglu_gradient(
    grad_ptr, gates_ptr, hidden_ptr, grad_gates_ptr, grad_hidden_ptr, num_places, I, BLOCK_P: tl.constexpr, BLOCK_I: tl.constexpr
):  # fmt: skip
    places = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    is_place, row = places < num_places, places.to(tl.int64)[:, None]
    weight = tl.load(gates_ptr + places, mask=is_place, other=0.0).to(tl.float32)[:, None]
    grad_gates = tl.zeros((BLOCK_P,), tl.float32)
    for first in range(0, I, BLOCK_I):
        cols = first + tl.arange(0, BLOCK_I)[None, :]
        is_own = is_place[:, None] & (cols < I)
        grad = tl.load(grad_ptr + row * I + cols, mask=is_own, other=0.0).to(tl.float32)
        gate = tl.load(hidden_ptr + row * (2 * I) + cols, mask=is_own, other=0.0).to(tl.float32)
        up = tl.load(hidden_ptr + row * (2 * I) + I + cols, mask=is_own, other=0.0).to(tl.float32)
        share = 1.0 / (1.0 + tl.exp(-gate))
        silu = gate * share
        grad_gates += tl.sum(grad * silu * up, 1)
        grad *= weight
        inner = silu * up * weight
        tl.store(grad_ptr + row * I + cols, inner.to(grad_ptr.dtype.element_ty), mask=is_own)
        grad_gate = grad * up * share * (1.0 + gate * (1.0 - share))
        grad_ptrs = grad_hidden_ptr + row * (2 * I) + cols
        tl.store(grad_ptrs, grad_gate.to(grad_hidden_ptr.dtype.element_ty), mask=is_own)
        tl.store(grad_ptrs + I, (grad * silu).to(grad_hidden_ptr.dtype.element_ty), mask=is_own)
    tl.store(grad_gates_ptr + places, grad_gates, mask=is_place)
