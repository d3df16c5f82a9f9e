"""The small operators between the products of a layer that decodes, each as one kernel: residual sum and norm; norm, clip and rotation of
queries and keys with the write to the cache; and the router's choice.

Each token has its own Subnet. What a Subnet changes is data on the device: a token that skips a layer keeps its residual stream and writes
no keys, and its experts and top-k are rows of tables. References: `stretto.ops.paged.norm`, ``store`` and ``route_tokens``.

Shape letters: N tokens, D hidden, K experts per token, H query heads, G key/value heads, C head width, R rotated channels, X = (H + 2·G)·C,
P pages of the cache, Z tokens per page, M pages of a sequence, E experts, U Subnets, L MoE layers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto.ops.operators import MASKED

_EXCLUDED = tl.constexpr(MASKED / 2)
_MASKED = tl.constexpr(MASKED)


def add_norm(
    x_ND: Tensor,
    parts_NKD: Tensor | None,
    weight_D: Tensor,
    eps: float,
    *,
    stays_N: Tensor | None = None,
    chosen_NK: Tensor | None = None,
    num_experts: int = 0,
    with_fp32: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Residual sum, its RMS norm, and (``with_fp32``) the norm in fp32, each [N, D].

    Args:
        parts_NKD: added to ``x_ND`` in their order; None: nothing.
        stays_N: uint8, 0 for tokens to which nothing is added; None: all are added to.
        chosen_NK: int32; parts whose choice is ``num_experts`` or more are not read. Parts after the last choice are.
    """
    (N, D), K = x_ND.shape, 0 if parts_NKD is None else parts_NKD.shape[1]
    assert x_ND.is_contiguous() and (parts_NKD is None or parts_NKD.is_contiguous()), "strides"
    sum_ND, y_ND = torch.empty_like(x_ND) if K else x_ND, torch.empty_like(x_ND)
    wide_ND = torch.empty(N, D, dtype=torch.float32, device=x_ND.device) if with_fp32 else y_ND
    _add_norm[(N,)](
        *(x_ND, x_ND if parts_NKD is None else parts_NKD, x_ND if stays_N is None else stays_N),
        *(x_ND if chosen_NK is None else chosen_NK, weight_D, sum_ND, y_ND, wide_ND, D, num_experts, eps),
        K=K,
        HAS_STAYS=stays_N is not None,
        NUM_CHOSEN=0 if chosen_NK is None else chosen_NK.shape[1],
        WITH_FP32=with_fp32,
        BLOCK_D=triton.next_power_of_2(D),
        num_warps=4 if D <= 2048 else 8,
    )
    return sum_ND, y_ND, wide_ND


@triton.jit
def _add_norm(
    x, parts, stays, chosen, weight, sums, y, wide, D, num_experts, eps, K: tl.constexpr, HAS_STAYS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr, WITH_FP32: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    n, d_D = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_D)
    is_d_D = d_D < D
    x_D = tl.load(x + n * D + d_D, mask=is_d_D, other=0.0)
    if K > 0:
        num_added = D
        if HAS_STAYS:
            num_added = tl.where(tl.load(stays + n) != 0, D, 0)
        total_D = x_D.to(tl.float32)
        for k in tl.static_range(K):
            num_read = num_added
            if k < NUM_CHOSEN:
                num_read = tl.where(tl.load(chosen + n * NUM_CHOSEN + k) < num_experts, num_added, 0)
            total_D += tl.load(parts + (n * K + k) * D + d_D, mask=d_D < num_read, other=0.0).to(tl.float32)
        x_D = total_D.to(x.dtype.element_ty)
        tl.store(sums + n * D + d_D, x_D, mask=is_d_D)
    wide_D = x_D.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide_D * wide_D, 0) / D + eps)
    weight_D = tl.load(weight + d_D, mask=is_d_D, other=0.0).to(tl.float32)
    # rounded before and after the weight, as the reference
    y_D = (wide_D * scale).to(x.dtype.element_ty).to(tl.float32) * weight_D
    tl.store(y + n * D + d_D, y_D.to(y.dtype.element_ty), mask=is_d_D)
    if WITH_FP32:
        tl.store(wide + n * D + d_D, y_D.to(y.dtype.element_ty).to(tl.float32), mask=is_d_D)


def rotate_and_store(
    qkv_NX: Tensor,
    norm_JC: Tensor | None,
    is_wide: bool,
    clip: float | None,
    eps: float,
    rotary_P2R: Tensor,
    table_NM: Tensor,
    lengths_N: Tensor,
    keys_PZGC: Tensor,
    values_PZGC: Tensor,
    stays_N: Tensor | None = None,
) -> Tensor:
    """`stretto.ops.paged.store` for the last token of each sequence: queries [N, H, C]; keys and values go to the cache.

    Args:
        norm_JC: weights of the norm of query heads, then key heads; None: no norm.
        rotary_P2R: cosines and sines of all positions, as the planner has them.
        table_NM: int32, pages of each sequence.
        lengths_N: int32, tokens of each sequence with this one.
        stays_N: uint8, 0 for tokens that write nothing; None: all write.
    """
    (N, X), (_, Z, G, C) = qkv_NX.shape, keys_PZGC.shape
    H, R = X // C - 2 * G, rotary_P2R.shape[-1]
    assert qkv_NX.is_contiguous() and rotary_P2R.is_contiguous(), "strides"
    assert norm_JC is None or norm_JC.is_contiguous(), "strides"
    q_NHC = torch.empty(N, H, C, dtype=qkv_NX.dtype, device=qkv_NX.device)
    _rotate_and_store[(N, H + 2 * G)](
        *(qkv_NX, qkv_NX if norm_JC is None else norm_JC, rotary_P2R, table_NM, lengths_N),
        *(qkv_NX if stays_N is None else stays_N, q_NHC, keys_PZGC, values_PZGC, table_NM.stride(0), clip or 0.0, eps),
        H=H,
        G=G,
        C=C,
        R=R,
        Z=Z,
        HAS_NORM=norm_JC is not None,
        IS_WIDE=is_wide,
        HAS_CLIP=clip is not None,
        HAS_STAYS=stays_N is not None,
        BLOCK_C=triton.next_power_of_2(C),
        BLOCK_WIDE=triton.next_power_of_2(H * C),
        num_warps=4 if is_wide else 1,
    )
    return q_NHC


@triton.jit
def _rotate_and_store(
    qkv, norm, rotary, table, lengths, stays, q, keys, values, table_stride, clip, eps, H: tl.constexpr, G: tl.constexpr,
    C: tl.constexpr, R: tl.constexpr, Z: tl.constexpr, HAS_NORM: tl.constexpr, IS_WIDE: tl.constexpr,
    HAS_CLIP: tl.constexpr, HAS_STAYS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_WIDE: tl.constexpr,
):  # fmt: skip
    """One head of one token. The queries go to a tensor of their own, because other threads still read the channels of a pair."""
    n, head, c_C = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK_C)
    X: tl.constexpr = (H + 2 * G) * C
    is_c_C, is_turned_C = c_C < C, c_C < R
    pair_C = tl.where(is_turned_C, (c_C + R // 2) % R, 0)
    row = qkv + n * X + head * C
    x_C = tl.load(row + c_C, mask=is_c_C, other=0.0).to(tl.float32)
    other_C = tl.load(row + pair_C, mask=is_turned_C, other=0.0).to(tl.float32)
    is_rotated = head < H + G
    num_own, num_turned = tl.where(is_rotated, C, 0), tl.where(is_rotated, R, 0)
    if HAS_NORM:
        if IS_WIDE:
            is_query = head < H
            c_W = tl.arange(0, BLOCK_WIDE)
            num = tl.where(is_query, H * C, G * C)
            first = tl.where(is_query, 0, H * C)
            part_W = tl.load(qkv + n * X + first + c_W, mask=c_W < num, other=0.0).to(tl.float32)
            mean = tl.sum(part_W * part_W, 0) / num
        else:
            mean = tl.sum(x_C * x_C, 0) / C
        scale = 1.0 / tl.sqrt(mean + eps)
        weight_C = tl.load(norm + head * C + c_C, mask=c_C < num_own, other=0.0).to(tl.float32)
        weight_pair_C = tl.load(norm + head * C + pair_C, mask=c_C < num_turned, other=0.0).to(tl.float32)
        x_C = tl.where(is_rotated, x_C * scale * weight_C, x_C)
        other_C = other_C * scale * weight_pair_C
    if HAS_CLIP:
        x_C = tl.minimum(tl.maximum(x_C, -clip), clip)
        other_C = tl.minimum(tl.maximum(other_C, -clip), clip)
    position = tl.load(lengths + n) - 1
    angle = rotary + position.to(tl.int64) * (2 * R) + c_C
    cos_C = tl.load(angle, mask=c_C < num_turned, other=1.0).to(tl.float32)
    sin_C = tl.load(angle + R, mask=c_C < num_turned, other=0.0).to(tl.float32)
    y_C = x_C * cos_C + other_C * sin_C
    tl.store(q + (n * H + head) * C + c_C, y_C.to(q.dtype.element_ty), mask=c_C < tl.where(head < H, C, 0))
    num_stored = tl.where(head >= H, C, 0)
    if HAS_STAYS:
        num_stored = tl.where(tl.load(stays + n) != 0, num_stored, 0)
    page = tl.load(table + n * table_stride + position // Z).to(tl.int64)
    place = (page * Z + position % Z) * (G * C)
    key_place_C, value_place_C = place + (head - H) * C + c_C, place + (head - H - G) * C + c_C
    tl.store(keys + key_place_C, y_C.to(keys.dtype.element_ty), mask=c_C < tl.where(is_rotated, num_stored, 0))
    tl.store(values + value_place_C, y_C.to(values.dtype.element_ty), mask=c_C < tl.where(is_rotated, 0, num_stored))


def choose_experts(
    logits_NE: Tensor,
    bias_ULE: Tensor,
    top_k_UL: Tensor,
    subnet_N: Tensor,
    row: int,
    top_k: int,
    *,
    softmax: bool,
    normalize: bool,
    scaling: float,
    groups: tuple[int, int] = (1, 1),
) -> tuple[Tensor, Tensor]:
    """`stretto.ops.paged.route_tokens` from the router's logits: choices (int32) and gates (fp32), both [N, K]. Among equal scores, the
    first expert is chosen.

    Args:
        bias_ULE: fp32, added to the scores for the selection only; `MASKED` where an expert may not be chosen.
        top_k_UL: int32, experts per token; later choices are expert E with a gate of 0.
        subnet_N: int32, row of the tables for each token.
        row: index of the MoE layer.
        top_k: K, at least the largest top-k of the tokens.
        groups: number of equal groups of experts, and of groups in which a token chooses; see `stretto.ops.operators.in_best_groups`.
    """
    (N, E), (_, L, stride) = logits_NE.shape, bias_ULE.shape
    chosen_NK = torch.empty(N, top_k, dtype=torch.int32, device=logits_NE.device)
    gates_NK = torch.empty(N, top_k, dtype=torch.float32, device=logits_NE.device)
    assert logits_NE.is_contiguous() and bias_ULE.is_contiguous() and top_k_UL.is_contiguous(), "strides"
    _choose_experts[(N,)](
        *(logits_NE, bias_ULE, top_k_UL, subnet_N, chosen_NK, gates_NK, row, L, stride, E, scaling),
        K=top_k,
        BLOCK_E=triton.next_power_of_2(E),
        BLOCK_K=triton.next_power_of_2(top_k),
        SOFTMAX=softmax,
        NORMALIZE=normalize,
        GROUPS=groups[0],
        TOP_GROUPS=groups[1],
        BLOCK_G=triton.next_power_of_2(groups[0]),
        num_warps=1 if E <= 128 else 4,
    )
    return chosen_NK, gates_NK


@triton.jit
def _choose_experts(
    logits, bias, top_k, subnet, chosen, gates, row, L, bias_stride, E, scaling, K: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr, SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr, GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    n, e_E, k_K = tl.program_id(0), tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    is_e_E = e_E < E
    place = tl.load(subnet + n).to(tl.int64) * L + row
    bias_E = tl.load(bias + place * bias_stride + e_E, mask=is_e_E, other=_MASKED)
    logits_E = tl.load(logits + n.to(tl.int64) * E + e_E, mask=is_e_E, other=float("-inf"))
    if SOFTMAX:
        logits_E = tl.where(bias_E < _EXCLUDED, logits_E + _MASKED, logits_E)
        exps_E = tl.exp(logits_E - tl.max(logits_E, 0))
        scores_E = exps_E / tl.sum(exps_E, 0)
        choice_E = scores_E + bias_E
    else:
        # the selection is in fp64, see `stretto.ops.operators.selection`
        wide_E = 1.0 / (1.0 + tl.exp(-logits_E.to(tl.float64)))
        scores_E = 1.0 / (1.0 + tl.exp(-logits_E))
        choice_E = wide_E + bias_E.to(tl.float64)
    choice_E = tl.where(is_e_E, choice_E, float("-inf"))
    if GROUPS > 1:
        is_best_E = _is_in_best_groups(choice_E, e_E // (E // GROUPS), e_E, GROUPS, TOP_GROUPS, BLOCK_E, BLOCK_G)
        choice_E = tl.where(is_best_E | (e_E >= E), choice_E, _MASKED)
    num_chosen = tl.load(top_k + place)
    chosen_K, gates_K = tl.zeros([BLOCK_K], tl.int32), tl.zeros([BLOCK_K], tl.float32)
    for k in tl.static_range(K):
        best = tl.max(choice_E, 0)
        expert = tl.min(tl.where(choice_E == best, e_E, BLOCK_E), 0)
        gate = tl.sum(tl.where(e_E == expert, scores_E, 0.0), 0)
        chosen_K = tl.where(k_K == k, expert, chosen_K)
        gates_K = tl.where(k_K == k, gate, gates_K)
        choice_E = tl.where(e_E == expert, float("-inf"), choice_E)
    is_own_K = k_K < num_chosen
    gates_K = tl.where(is_own_K, gates_K, 0.0)
    if NORMALIZE:
        gates_K = gates_K / (tl.sum(gates_K, 0) + 1e-20)
    tl.store(chosen + n * K + k_K, tl.where(is_own_K, chosen_K, E), mask=k_K < K)
    tl.store(gates + n * K + k_K, gates_K * scaling, mask=k_K < K)


@triton.jit
def _is_in_best_groups(
    choice_E, group_E, e_E, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_G: tl.constexpr
):
    """Whether each expert is in one of the groups with the highest sums of their two best scores."""
    g_G = tl.arange(0, BLOCK_G)
    two_G = tl.where(g_G < GROUPS, 0.0, float("-inf")) + tl.zeros([BLOCK_G], choice_E.dtype)
    for g in tl.static_range(GROUPS):
        own_E = tl.where(group_E == g, choice_E, float("-inf"))
        first = tl.max(own_E, 0)
        place = tl.min(tl.where(own_E == first, e_E, BLOCK_E), 0)
        second = tl.max(tl.where(e_E == place, float("-inf"), own_E), 0)
        two_G = tl.where(g_G == g, first + second, two_G)
    is_best_E = e_E < 0
    for _ in tl.static_range(TOP_GROUPS):
        best = tl.min(tl.where(two_G == tl.max(two_G, 0), g_G, BLOCK_G), 0)
        is_best_E = is_best_E | (group_E == best)
        two_G = tl.where(g_G == best, float("-inf"), two_G)
    return is_best_E
