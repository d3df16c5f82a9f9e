"""Operators over a paged cache that round as the trainer's do: those of `stretto.ops.paged` for an arithmetic that is not plain.

Shape letters: as in `stretto.ops.paged`; L tokens of a chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stretto.ops import exact
from stretto.ops.matmul import Arithmetic, rounded
from stretto.ops.operators import Routes, rotate
from stretto.ops.paged import Group, RouteRule, Spans


def store_rotated(
    qk_NJC: Tensor,
    v_NGC: Tensor,
    spans: Spans,
    keys_PZGC: Tensor,
    values_PZGC: Tensor,
    arithmetic: Arithmetic,
) -> Tensor:
    """Rotate normed queries and keys as the model's attention does, put keys and values into one layer's cache, return
    the queries [N, H, C]."""
    G, half = keys_PZGC.shape[2], spans.cos_N1R.shape[-1] // 2
    cos_1NR, sin_1NR = spans.cos_N1R[None, :, 0, :half], spans.sin_N1R[None, :, 0, half:]
    qk_NJC = rounded(rotate(qk_NJC[None], cos_1NR, sin_1NR)[0], arithmetic)
    for pool_PZGC, rows_NGC in ((keys_PZGC, qk_NJC[:, -G:]), (values_PZGC, v_NGC)):
        pool_PZGC.flatten(0, 1).index_copy_(0, spans.slots_N, rows_NGC.to(pool_PZGC.dtype))
    return qk_NJC[:, :-G]


def attend_exact(q_NHC: Tensor, keys_PZGC: Tensor, values_PZGC: Tensor, groups: tuple[Group, ...]) -> Tensor:
    """`attend` by `stretto.ops.exact.attention`: however the sequence was cut into chunks, to the bit."""
    parts = []
    for group in groups:
        B, length = group.num_chunks, group.length
        k_BGTC, v_BGTC = (
            pool_PZGC.index_select(0, group.pages).view(B, -1, *pool_PZGC.shape[2:]).transpose(1, 2)
            for pool_PZGC in (keys_PZGC, values_PZGC)
        )
        q_BHLC = q_NHC[group.start : group.start + B * length].view(B, length, *q_NHC.shape[1:]).transpose(1, 2)
        if group.mask_B1LT is None:
            seen_B1LT = torch.ones(1, 1, length, k_BGTC.shape[2], dtype=torch.bool, device=q_NHC.device).tril()
        else:
            seen_B1LT = group.mask_B1LT == 0
        y_BHLC = exact.attention(q_BHLC, k_BGTC, v_BGTC, seen_B1LT)
        parts.append(y_BHLC.transpose(1, 2).reshape(B * length, -1))
    return torch.cat(parts)


def route_tokens_exact(logits_NE: Tensor, rule: RouteRule) -> Routes:
    """`route_tokens` from batch-invariant logits, to the bit what `stretto.ops.operators.route` makes of them."""
    if rule.mask is not None:
        logits_NE = logits_NE + rule.mask
    scores_NE = (exact.softmax if rule.softmax else exact.sigmoid)(logits_NE)
    chosen_NK = exact.top_k(scores_NE if rule.bias is None else scores_NE + rule.bias, rule.top_k)
    gates_NK = scores_NE.gather(-1, chosen_NK)
    if rule.dropped_NK is not None:
        gates_NK = gates_NK.masked_fill(rule.dropped_NK, 0.0)
        chosen_NK = chosen_NK.masked_fill(rule.dropped_NK, logits_NE.shape[1])
    if rule.normalize:
        gates_NK = gates_NK / (exact.sum_in_order(gates_NK, -1)[:, None] + 1e-20)
    return Routes(chosen_NK, gates_NK * rule.scaling if rule.scaling != 1.0 else gates_NK)
