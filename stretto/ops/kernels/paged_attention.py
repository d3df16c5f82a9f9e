"""Attention of one token per sequence to its keys and values in the cache, which are read page by page, without a copy.

The keys of a sequence are divided into splits, so that few sequences also occupy a whole GPU (flash-decoding, Dao et al. 2023). A
program computes all query heads of one key head for one split; a second kernel combines the splits. Softmax and sums are in fp32. Where a
sequence ends is read on the device, so one CUDA graph serves all lengths. Reference: `stretto.ops.paged.attend`.

Shape letters: N sequences, H query heads, G key/value heads, C head width, P pages of the cache, Z tokens per page, M pages of a
sequence, S splits. In kernels, R = H / G rows, padded to a size of tensor cores, and T keys of a block.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto.ops.kernels.products import dot

BLOCK_T = 64
"""Keys that a program reads at once."""
MAX_SPLITS = 32
PROGRAMS_PER_SM = 2
"""Programs for each multiprocessor, to which the number of splits leads (a guess: enough loads in flight)."""
_LOG2E = tl.constexpr(1.4426950408889634)


def num_splits(num_sequences: int, num_kv_heads: int, num_keys: int, device: torch.device) -> int:
    """Splits of each sequence's keys: a power of two that gives every multiprocessor a program, as far as there are blocks of keys."""
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    wanted = -(-PROGRAMS_PER_SM * num_sms // (num_sequences * num_kv_heads))
    return min(MAX_SPLITS, 1 << (wanted - 1).bit_length(), 1 << (-(-num_keys // BLOCK_T)).bit_length() - 1)


def paged_attention(
    q_NHC: Tensor,
    keys_PZGC: Tensor,
    values_PZGC: Tensor,
    table_NM: Tensor,
    lengths_N: Tensor,
    *,
    scale: float | None = None,
    sinks_H: Tensor | None = None,
    window: int | None = None,
    splits: int | None = None,
) -> Tensor:
    """Attention of each sequence's last token to all its keys, [N, H·C] in the type of ``q_NHC``.

    Args:
        q_NHC: queries; heads of a token are contiguous.
        table_NM: int32, pages of each sequence; places after its last page are not read.
        lengths_N: int32, keys of each sequence, at least 1.
        scale: factor of the scores; None: 1/√C.
        sinks_H: score of an additional key with value zero.
        window: number of last keys that are seen; None: all.
        splits: number of splits; None: `num_splits`.
    """
    (N, H, C), (_, Z, G, _) = q_NHC.shape, keys_PZGC.shape
    assert q_NHC.stride()[1:] == (C, 1) and keys_PZGC.is_contiguous() and values_PZGC.is_contiguous(), "strides"
    num_keys = table_NM.shape[1] * Z if window is None else min(table_NM.shape[1] * Z, window + BLOCK_T)
    S = num_splits(N, G, num_keys, q_NHC.device) if splits is None else splits
    y_NHC = torch.empty(N, H, C, dtype=q_NHC.dtype, device=q_NHC.device)
    parts_NHSC = torch.empty((N, H, S, C) if S > 1 else (1,), dtype=torch.float32, device=q_NHC.device)
    stats_NHS2 = torch.empty((N, H, S, 2) if S > 1 else (1,), dtype=torch.float32, device=q_NHC.device)
    block_c = max(16, triton.next_power_of_2(C))
    sinks = sinks_H if sinks_H is not None else parts_NHSC  # not read without sinks
    _attend[(N, G, S)](
        *(q_NHC, keys_PZGC, values_PZGC, table_NM, lengths_N, sinks, y_NHC, parts_NHSC, stats_NHS2),
        *(q_NHC.stride(0), table_NM.stride(0), scale or 1 / math.sqrt(C), window or 0),
        H=H,
        G=G,
        C=C,
        Z=Z,
        SPLITS=S,
        HAS_SINKS=sinks_H is not None,
        BLOCK_R=max(16, triton.next_power_of_2(H // G)),
        BLOCK_C=block_c,
        BLOCK_T=BLOCK_T,
        num_warps=4,
        num_stages=3 if block_c <= 128 else 2,
    )
    if S > 1:
        _combine[(N, H)](
            *(parts_NHSC, stats_NHS2, sinks, y_NHC),
            H=H,
            C=C,
            SPLITS=S,
            HAS_SINKS=sinks_H is not None,
            BLOCK_C=block_c,
            num_warps=1,
        )
    return y_NHC.view(N, H * C)


@triton.jit
def _attend(
    q, keys, values, table, lengths, sinks, y, parts, stats, q_stride, table_stride, scale, window,
    H: tl.constexpr, G: tl.constexpr, C: tl.constexpr, Z: tl.constexpr, SPLITS: tl.constexpr, HAS_SINKS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    n, g, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + n)
    first = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    start = first // BLOCK_T * BLOCK_T
    size = tl.cdiv(tl.cdiv(length - start, SPLITS), BLOCK_T) * BLOCK_T
    low = start + split * size
    high = tl.minimum(low + size, length)

    row_R, c_C, t_T = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_T)
    head_R, is_row_R, is_c_C = g * (H // G) + row_R, row_R < H // G, c_C < C
    q_RC = tl.load(
        q + n * q_stride + head_R[:, None] * C + c_C[None, :], mask=is_row_R[:, None] & is_c_C[None, :], other=0.0
    )
    best_R = tl.full([BLOCK_R], float("-inf"), tl.float32)
    sum_R = tl.zeros([BLOCK_R], tl.float32)
    y_RC = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for at in range(low, high, BLOCK_T):
        place_T = at + t_T
        is_seen_T = (place_T >= first) & (place_T < high)
        page_T = tl.load(table + n * table_stride + place_T // Z, mask=is_seen_T, other=0).to(tl.int64)
        offset_T = ((page_T * Z + place_T % Z) * G + g) * C
        k_CT = tl.load(
            keys + offset_T[None, :] + c_C[:, None], mask=is_seen_T[None, :] & is_c_C[:, None], other=0.0
        ).to(q_RC.dtype)
        scores_RT = dot(q_RC, k_CT) * (scale * _LOG2E)
        scores_RT = tl.where(is_seen_T[None, :], scores_RT, float("-inf"))
        new_R = tl.maximum(best_R, tl.max(scores_RT, 1))
        # a block without a seen key, at the start of a window's first block, has no maximum
        shift_R = tl.where(new_R == float("-inf"), 0.0, new_R)
        weights_RT = tl.exp2(scores_RT - shift_R[:, None])
        fade_R = tl.exp2(best_R - shift_R)
        v_TC = tl.load(
            values + offset_T[:, None] + c_C[None, :], mask=is_seen_T[:, None] & is_c_C[None, :], other=0.0
        ).to(q_RC.dtype)
        sum_R = sum_R * fade_R + tl.sum(weights_RT, 1)
        y_RC = y_RC * fade_R[:, None] + dot(weights_RT.to(q_RC.dtype), v_TC)
        best_R = new_R

    is_out_RC = is_row_R[:, None] & is_c_C[None, :]
    if SPLITS == 1:
        if HAS_SINKS:
            sink_R = tl.load(sinks + head_R, mask=is_row_R, other=0.0).to(tl.float32) * _LOG2E
            sum_R += tl.exp2(sink_R - best_R)
        y_RC = y_RC / sum_R[:, None]
        tl.store(y + (n * H + head_R[:, None]) * C + c_C[None, :], y_RC.to(y.dtype.element_ty), mask=is_out_RC)
    else:
        place_R = (n * H + head_R) * SPLITS + split
        tl.store(parts + place_R[:, None] * C + c_C[None, :], y_RC, mask=is_out_RC)
        tl.store(stats + 2 * place_R, best_R, mask=is_row_R)
        tl.store(stats + 2 * place_R + 1, sum_R, mask=is_row_R)


@triton.jit
def _combine(
    parts, stats, sinks, y, H: tl.constexpr, C: tl.constexpr, SPLITS: tl.constexpr, HAS_SINKS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Sum of the splits in their order, each by its share of the softmax's sum."""
    n, head = tl.program_id(0), tl.program_id(1)
    first = (n * H + head) * SPLITS
    split_S, c_C = tl.arange(0, SPLITS), tl.arange(0, BLOCK_C)
    best_S = tl.load(stats + 2 * (first + split_S))
    best = tl.max(best_S, 0)  # the first split has a key, so it is finite
    share_S = tl.exp2(best_S - best)
    total = tl.sum(share_S * tl.load(stats + 2 * (first + split_S) + 1), 0)
    if HAS_SINKS:
        total += tl.exp2(tl.load(sinks + head).to(tl.float32) * _LOG2E - best)
    part_SC = tl.load(parts + (first + split_S[:, None]) * C + c_C[None, :], mask=c_C[None, :] < C, other=0.0)
    y_C = tl.sum(part_SC * share_S[:, None], 0) / total
    tl.store(y + (n * H + head) * C + c_C, y_C.to(y.dtype.element_ty), mask=c_C < C)
