"""Products of few tokens with weights in 16 bits, or in FP8, int8 or int4 that are dequantised in registers: linear layers and experts.

The time of such a product is the time to read its weights, so every program reads rows of the weight that no other reads. Experts need no
sort: of few pairs (token, expert), a program finds those of its expert itself; of more, another kernel lists them. Sums are in fp32, in
one fixed order. References: `stretto.ops.paged.chosen_experts`, and a product with the dequantised weight.

Shape letters: N tokens, D inputs, F outputs, E experts, K experts per token, S = N·K pairs, I expert width, J groups of a row of a weight,
B bytes of a row. In kernels, M rows of activations and W rows of the weight that a program multiplies.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto.ops.fp8_rows import Rows
from stretto.ops.grouped import Clamp
from stretto.ops.int_weights import IntWeight, pack

_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
_LAUNCH = {"num_warps": 4, "num_stages": 4}
"""Warps of a program, and loads of weights in flight."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """Rows of weights, as the kernels read them."""

    rows: Tensor
    """[…, F, D] in the type of the activations; FP8; int8 codes; or uint8 […, F, B] with two codes of 4 bits, each larger by 8."""
    scales: Tensor | None = None
    """fp16 […, F, J]; for FP8, fp32 […, F], the factor of each output; None: the weights are not quantised."""
    zeros: Tensor | None = None
    """int8 […, F, J]; None: all are 0."""
    bits: int = 16

    @staticmethod
    def of(weight: IntWeight | Rows) -> Matrix:
        """The kernels' form of a weight in FP8, or of integers, which the kernels must take (`takes`)."""
        if isinstance(weight, Rows):
            return Matrix(weight.bytes_ND, weight.scale_N, None, 8)
        assert Matrix.takes(weight), f"groups of {weight.group}"
        rows = weight.codes.contiguous()
        if weight.bits == 4:
            rows = pack(weight.codes, 4).contiguous().view(torch.uint8)
        zeros = None if weight.zeros is None else weight.zeros.contiguous()
        return Matrix(rows, weight.scales.contiguous(), zeros, weight.bits)

    @staticmethod
    def takes(weight: IntWeight | Rows) -> bool:
        """Whether the kernels multiply by the weight; groups of integers must be a power of two."""
        return isinstance(weight, Rows) or weight.group.bit_count() == 1

    def arguments(self) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, scales and zeros; tensors that are missing are not read."""
        assert self.rows.is_contiguous(), "rows of a weight with strides"
        scales = self.rows if self.scales is None else self.scales
        return self.rows, scales, scales if self.zeros is None else self.zeros

    def options(self, num_inputs: int) -> dict[str, Any]:
        """Constants of the kernels."""
        if self.scales is None:
            group = num_inputs
        else:
            group = 0 if self.rows.is_floating_point() else num_inputs // self.scales.shape[-1]
        return {"BITS": self.bits, "GROUP": group, "HAS_ZEROS": self.zeros is not None}


def linear(x_ND: Tensor, weight: Matrix, bias_F: Tensor | None = None) -> Tensor:
    """``x`` · ``weight``ᵀ + ``bias``, [N, F]."""
    (N, D), F = x_ND.shape, weight.rows.shape[-2]
    assert x_ND.stride(1) == 1, "strides"
    y_NF = x_ND.new_empty(N, F)
    block_m = _block_m(N)
    _linear[(triton.cdiv(F, 16), triton.cdiv(N, block_m))](
        *(x_ND, *weight.arguments(), y_NF if bias_F is None else bias_F, y_NF, N, D, F, x_ND.stride(0)),
        **weight.options(D),
        HAS_BIAS=bias_F is not None,
        BLOCK_M=block_m,
        BLOCK_W=16,
        BLOCK_D=_block_d(D),
        **_LAUNCH,
    )
    return y_NF


def expert_outputs(
    x_ND: Tensor,
    chosen_NK: Tensor,
    gates_NK: Tensor,
    gate_up: Matrix,
    down: Matrix,
    biases: tuple[Tensor, Tensor] | None = None,
    clamp: Clamp | None = None,
    num_more: int = 0,
) -> Tensor:
    """Gated output of each token's experts, [N, K + num_more, D]. Expert E does not exist: its outputs are not written, nor are the last
    ``num_more``, which are the caller's.

    Args:
        chosen_NK: int32, in the order in which a token's outputs are added.
        gates_NK: fp32; they multiply the input of the down product, and its bias.
        gate_up: [E, 2·I, D], the gate's rows first.
        down: [E, D, I].
        biases: [E, 2·I] and [E, D].
    """
    (N, D), K = x_ND.shape, chosen_NK.shape[1]
    S, (E, F, _) = N * K, gate_up.rows.shape
    assert x_ND.is_contiguous() and chosen_NK.is_contiguous() and gates_NK.is_contiguous(), "strides"
    inner_SI, y_NKD = x_ND.new_empty(S, F // 2), x_ND.new_empty(N, K + num_more, D)
    gate_up_bias, down_bias = (inner_SI, inner_SI) if biases is None else biases
    is_few = min(E, 256) >= S  # then a program begins with a pair, and the first of an expert's pairs computes them all
    lists_ES, counts_E = chosen_NK, chosen_NK
    if not is_few:
        lists_ES, counts_E = chosen_NK.new_empty(E, S), chosen_NK.new_empty(E)
        _list_pairs[(E,)](chosen_NK, lists_ES, counts_E, S, BLOCK_S=128, num_warps=4)
    block_m, block_s = _block_m(min(N, -(-2 * S // E))), max(16, triton.next_power_of_2(S)) if is_few else 16
    shared = {"BY_PAIR": is_few, "HAS_BIAS": biases is not None, "BLOCK_S": block_s, "BLOCK_M": block_m, "BLOCK_W": 32}
    programs, pairs = S if is_few else E, (lists_ES, counts_E, gates_NK)
    _gate_up[(programs, triton.cdiv(F // 2, 16))](
        *(x_ND, *pairs, *gate_up.arguments(), gate_up_bias, inner_SI, S, K, E, D, F // 2),
        *(0.0, 0.0) if clamp is None else (clamp.alpha, clamp.limit),
        **shared,
        **gate_up.options(D),
        CLAMPED=clamp is not None,
        BLOCK_D=_block_d(D),
        **_LAUNCH,
    )
    _down[(programs, triton.cdiv(D, 32))](
        *(inner_SI, *pairs, *down.arguments(), down_bias, y_NKD, S, K, K + num_more, E, D, F // 2),
        **shared,
        **down.options(F // 2),
        BLOCK_D=_block_d(F // 2),
        **_LAUNCH,
    )
    return y_NKD


def _block_m(num_rows: int) -> int:
    """Rows of activations that a program multiplies at once: tensor cores take 16 at least."""
    return max(16, min(64, triton.next_power_of_2(num_rows)))


def _block_d(num_inputs: int) -> int:
    return max(32, min(128, triton.next_power_of_2(num_inputs)))


@triton.jit
def dot(a, b):
    """Product of two tiles with fp32 sums. Triton's interpreter cannot multiply bf16, so there the operands are widened."""
    if _INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _product(
    x, x_M, is_row_M, rows, scales, zeros, row_W, is_row_W, D, BITS: tl.constexpr, GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """[M, W]: rows of ``x`` that begin at ``x_M``, times rows ``row_W`` (int64) of a `Matrix`."""
    acc_MW = tl.zeros([BLOCK_M, BLOCK_W], tl.float32)
    PER_BYTE: tl.constexpr = 2 if BITS == 4 else 1
    num_columns = D // PER_BYTE
    for start in range(0, D, BLOCK_D):
        column = start // PER_BYTE + tl.arange(0, BLOCK_D // PER_BYTE)
        mask_WD = is_row_W[:, None] & (column < num_columns)[None, :]
        w_WD = tl.load(rows + row_W[:, None] * num_columns + column[None, :], mask=mask_WD, other=0.0)
        if BITS < 16 and GROUP > 0:
            w_WD = _values(w_WD, scales, zeros, row_W, is_row_W, start, D, BITS, GROUP, HAS_ZEROS, BLOCK_W, BLOCK_D)
        d_D = start + tl.arange(0, BLOCK_D)
        x_MD = tl.load(x + x_M[:, None] + d_D[None, :], mask=is_row_M[:, None] & (d_D < D)[None, :], other=0.0)
        acc_MW += dot(x_MD, tl.trans(w_WD.to(x.dtype.element_ty)))
    if GROUP == 0:
        acc_MW *= tl.load(scales + row_W, mask=is_row_W, other=0.0)[None, :]
    return acc_MW


@triton.jit
def _values(
    codes_WB, scales, zeros, row_W, is_row_W, start, D, BITS: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr,
    BLOCK_W: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Values (fp32) of the codes of inputs ``start`` and following. A scale is read once for its group."""
    NUM: tl.constexpr = BLOCK_D // GROUP if GROUP < BLOCK_D else 1
    group_J = start // GROUP + tl.arange(0, NUM)
    place_WJ = row_W[:, None] * (D // GROUP) + group_J[None, :]
    mask_WJ = is_row_W[:, None] & (group_J < D // GROUP)[None, :]
    scales_WJ1 = tl.load(scales + place_WJ, mask=mask_WJ, other=0.0).to(tl.float32)[:, :, None]
    if BITS == 4:  # the two codes of a byte belong to neighbouring inputs
        codes_WB = tl.reshape(tl.join(codes_WB & 15, codes_WB >> 4), (BLOCK_W, BLOCK_D))
    wide_WJX = tl.reshape(codes_WB.to(tl.float32), (BLOCK_W, NUM, BLOCK_D // NUM))
    if BITS == 4:
        wide_WJX -= 8.0
    if HAS_ZEROS:
        wide_WJX -= tl.load(zeros + place_WJ, mask=mask_WJ, other=0).to(tl.float32)[:, :, None]
    return tl.reshape(wide_WJX * scales_WJ1, (BLOCK_W, BLOCK_D))


@triton.jit
def _linear(
    x, rows, scales, zeros, bias, y, N, D, F, x_stride, BITS: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row_W, n_M = tl.program_id(0) * BLOCK_W + tl.arange(0, BLOCK_W), tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row_W, is_row_M = row_W < F, n_M < N
    acc_MW = _product(
        x, n_M.to(tl.int64) * x_stride, is_row_M, rows, scales, zeros, row_W.to(tl.int64), is_row_W, D, BITS, GROUP,
        HAS_ZEROS, BLOCK_M, BLOCK_W, BLOCK_D,
    )  # fmt: skip
    if HAS_BIAS:
        acc_MW += tl.load(bias + row_W, mask=is_row_W, other=0.0).to(tl.float32)[None, :]
    place_MW = n_M.to(tl.int64)[:, None] * F + row_W[None, :]
    tl.store(y + place_MW, acc_MW.to(y.dtype.element_ty), mask=is_row_M[:, None] & is_row_W[None, :])


@triton.jit
def _list_pairs(chosen, lists, counts, S, BLOCK_S: tl.constexpr):
    """Pairs of each expert in their order, [E, S], and their numbers [E]; a program for each expert."""
    expert, count = tl.program_id(0), 0
    for first in range(0, S, BLOCK_S):
        s_S = first + tl.arange(0, BLOCK_S)
        is_own_S = (tl.load(chosen + s_S, mask=s_S < S, other=-1) == expert).to(tl.int32)
        place_S = count + tl.cumsum(is_own_S, 0) - 1
        tl.store(lists + expert.to(tl.int64) * S + place_S, s_S, mask=is_own_S > 0)
        count += tl.sum(is_own_S, 0)
    tl.store(counts + expert, count)


@triton.jit
def _expert_of(lists, counts, S, E, BY_PAIR: tl.constexpr, BLOCK_S: tl.constexpr):
    """The expert of a program, and the number of its pairs; 0 if there are none, or another program computes them."""
    expert = tl.program_id(0)
    if BY_PAIR:
        s_S = tl.arange(0, BLOCK_S)
        expert_S = tl.load(lists + s_S, mask=s_S < S, other=-1)
        expert = tl.load(lists + tl.program_id(0))
        is_own_S = (expert_S == expert).to(tl.int32)
        num_before = tl.sum(tl.where(s_S < tl.program_id(0), is_own_S, 0), 0)
        count = tl.where((num_before > 0) | (expert >= E), 0, tl.sum(is_own_S, 0))
    else:
        count = tl.load(counts + expert)
    return expert, count


@triton.jit
def _pairs_at(place_M, is_row_M, expert, lists, S, BY_PAIR: tl.constexpr, BLOCK_S: tl.constexpr):
    """Pairs [M] at places among those of the expert; 0 beyond the last."""
    if BY_PAIR:
        s_S = tl.arange(0, BLOCK_S)
        is_own_S = (tl.load(lists + s_S, mask=s_S < S, other=-1) == expert).to(tl.int32)
        place_S = tl.where(is_own_S > 0, tl.cumsum(is_own_S, 0) - 1, -1)
        pair_M = tl.sum(tl.where(place_S[None, :] == place_M[:, None], s_S[None, :], 0), 1)
    else:
        pair_M = tl.load(lists + expert.to(tl.int64) * S + place_M, mask=is_row_M, other=0)
    return pair_M


@triton.jit
def _gate_up(
    x, lists, counts, gates, rows, scales, zeros, bias, inner, S, K, E, D, width, alpha, limit, BY_PAIR: tl.constexpr,
    CLAMPED: tl.constexpr, HAS_BIAS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Pairs' gated SwiGLU [S, I]. Rows of gate and up take turns in a tile, so that one product computes both."""
    expert, count = _expert_of(lists, counts, S, E, BY_PAIR, BLOCK_S)
    w_W = tl.arange(0, BLOCK_W)
    i_W = tl.program_id(1) * (BLOCK_W // 2) + w_W // 2
    row_W = expert.to(tl.int64) * (2 * width) + (w_W % 2) * width + i_W
    out_I = tl.program_id(1) * (BLOCK_W // 2) + tl.arange(0, BLOCK_W // 2)
    for first in range(0, count, BLOCK_M):
        place_M = first + tl.arange(0, BLOCK_M)
        is_row_M = place_M < count
        pair_M = _pairs_at(place_M, is_row_M, expert, lists, S, BY_PAIR, BLOCK_S)
        x_M = (pair_M // K).to(tl.int64) * D
        acc_MW = _product(
            x,
            x_M,
            is_row_M,
            rows,
            scales,
            zeros,
            row_W,
            i_W < width,
            D,
            BITS,
            GROUP,
            HAS_ZEROS,
            BLOCK_M,
            BLOCK_W,
            BLOCK_D,
        )
        if HAS_BIAS:
            acc_MW += tl.load(bias + row_W, mask=i_W < width, other=0.0).to(tl.float32)[None, :]
        gate_MI, up_MI = tl.split(tl.reshape(acc_MW, [BLOCK_M, BLOCK_W // 2, 2]))
        if CLAMPED:
            gate_MI = tl.minimum(gate_MI, limit)
            up_MI = tl.minimum(tl.maximum(up_MI, -limit), limit) + 1.0
            gate_MI = gate_MI / (1.0 + tl.exp(-alpha * gate_MI))
        else:
            gate_MI = gate_MI / (1.0 + tl.exp(-gate_MI))
        weight_M = tl.load(gates + pair_M, mask=is_row_M, other=0.0)
        out_MI = gate_MI * up_MI * weight_M[:, None]
        place_MI = pair_M.to(tl.int64)[:, None] * width + out_I[None, :]
        tl.store(inner + place_MI, out_MI.to(inner.dtype.element_ty), mask=is_row_M[:, None] & (out_I < width)[None, :])


@triton.jit
def _down(
    inner, lists, counts, gates, rows, scales, zeros, bias, y, S, K, num_rows, E, D, width, BY_PAIR: tl.constexpr, HAS_BIAS: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_W: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Pairs' outputs, each in its row of the ``num_rows`` of a token."""
    expert, count = _expert_of(lists, counts, S, E, BY_PAIR, BLOCK_S)
    d_W = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    is_d_W = d_W < D
    row_W = expert.to(tl.int64) * D + d_W
    for first in range(0, count, BLOCK_M):
        place_M = first + tl.arange(0, BLOCK_M)
        is_row_M = place_M < count
        pair_M = _pairs_at(place_M, is_row_M, expert, lists, S, BY_PAIR, BLOCK_S)
        acc_MW = _product(
            inner, pair_M.to(tl.int64) * width, is_row_M, rows, scales, zeros, row_W, is_d_W, width, BITS, GROUP, HAS_ZEROS,
            BLOCK_M, BLOCK_W, BLOCK_D,
        )  # fmt: skip
        if HAS_BIAS:
            weight_M = tl.load(gates + pair_M, mask=is_row_M, other=0.0)
            acc_MW += weight_M[:, None] * tl.load(bias + row_W, mask=is_d_W, other=0.0).to(tl.float32)[None, :]
        place_M = pair_M // K * num_rows + pair_M % K
        place_MW = place_M.to(tl.int64)[:, None] * D + d_W[None, :]
        tl.store(y + place_MW, acc_MW.to(y.dtype.element_ty), mask=is_row_M[:, None] & is_d_W[None, :])
