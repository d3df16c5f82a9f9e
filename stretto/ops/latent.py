"""Latent attention (MLA; DeepSeek-V2, 2405.04434) over a paged cache with one short row per token. Forward only.

A row of the cache is the normed low-rank vector from which keys and values of all heads are computed, then the rotated part of
the keys, which all heads share. *Absorbed* attention, for few queries, attends to the rows directly: the projections to keys and
values are applied to queries and outputs instead. *Expanded* attention, for many queries, first computes keys and values from the
rows. The model's own forward pass is expanded, so an arithmetic that must round as the model does is always expanded.

Shape letters: N tokens of a step, D hidden, H heads, C head width, A channels of a head before the rotated ones, S width of the
low-rank vector, Z = S + C − A width of a row, U head width of values, P pages; B chunks of a group, L tokens of each chunk, T keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.ops.matmul import Arithmetic
from stretto.ops.operators import Operators, Weight
from stretto.ops.paged import Group, Spans, attend_rows, gathered, rotated


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """Weights of one layer. Projections are prepared for one arithmetic."""

    q_down: Weight | None
    """Projection to the low-rank vector of the queries; None: ``q_up`` is applied to the layer's input."""
    q_down_bias: Tensor | None
    q_down_norm: Tensor | None
    q_up: Weight
    kv_down: Weight
    """[Z, D]."""
    kv_down_bias: Tensor | None
    kv_down_norm: Tensor
    kv_up: Weight
    """[H·(A + U), S]: for each head, the rows for the part of its keys that is not rotated, then the rows for its values."""
    num_heads: int
    nope_dim: int
    value_dim: int
    scale: float | None
    """Factor of the scores; None: 1/√C."""
    eps: float
    """Epsilon of both norms."""


def latent_attention(
    x_ND: Tensor, weights: LatentWeights, spans: Spans, rows_PZ1Z: Tensor, arithmetic: Arithmetic
) -> Tensor:
    """Write each token's row to one layer's cache, and return the causal attention to its sequence, [N, H·U]."""
    operators = arithmetic.operators
    q_NHC = _queries(x_ND, weights, operators).view(len(x_ND), weights.num_heads, -1)
    row_NZ = operators.linear(x_ND, weights.kv_down, weights.kv_down_bias)
    short_NS, rope_NC = row_NZ.tensor_split((len(weights.kv_down_norm),), -1)
    short_NS = operators.norm(short_NS, weights.kv_down_norm, weights.eps)
    q_nope_NHA, q_rope_NHC = q_NHC.tensor_split((weights.nope_dim,), -1)
    rope_NHC = operators.rounded(rotated(torch.cat((q_rope_NHC, rope_NC[:, None]), 1), spans))
    row_NZ = torch.cat((short_NS, rope_NHC[:, -1]), -1)
    rows_PZ1Z.view(-1, row_NZ.shape[-1]).index_copy_(0, spans.slots_N, row_NZ.to(rows_PZ1Z.dtype))
    q_NHC = torch.cat((q_nope_NHA, rope_NHC[:, :-1]), -1)
    parts = [_attend_group(q_NHC, weights, group, rows_PZ1Z, arithmetic) for group in spans.groups]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _queries(x_ND: Tensor, weights: LatentWeights, operators: Operators) -> Tensor:
    if weights.q_down is not None:
        assert weights.q_down_norm is not None
        x_ND = operators.linear(x_ND, weights.q_down, weights.q_down_bias)
        x_ND = operators.norm(x_ND, weights.q_down_norm, weights.eps)
    return operators.linear(x_ND, weights.q_up)


def _attend_group(
    q_NHC: Tensor, weights: LatentWeights, group: Group, rows_PZ1Z: Tensor, arithmetic: Arithmetic
) -> Tensor:
    _, H, C = q_NHC.shape
    B, L = group.num_chunks, group.length
    row_BT1Z = gathered(rows_PZ1Z, group)
    q_BHLC = q_NHC[group.start : group.start + B * L].view(B, L, H, C).transpose(1, 2)
    attend = absorbed if arithmetic.is_plain and not is_expanded_faster(L, weights) else expanded
    return attend(q_BHLC, row_BT1Z, weights, group, arithmetic).transpose(1, 2).reshape(B * L, -1)


def is_expanded_faster(num_queries: int, weights: LatentWeights) -> bool:
    """Whether expanded attention needs fewer multiplications than absorbed attention for ``num_queries`` of one sequence.

    Multiplications per key and head: absorbed 2·S + (C − A) for each query; expanded C + U for each query, and S·(A + U) once.
    """
    rank, width = len(weights.kv_down_norm), weights.nope_dim + weights.value_dim
    return num_queries * (2 * rank - width) > rank * width


def expanded(q_BHLC: Tensor, row_BT1Z: Tensor, weights: LatentWeights, group: Group, arithmetic: Arithmetic) -> Tensor:
    """Attention to keys and values that are computed from the rows, [B, H, L, U]."""
    B, T, _, _ = row_BT1Z.shape
    short_BT1S, rope_BT1C = row_BT1Z.tensor_split((len(weights.kv_down_norm),), -1)
    kv_BTHX = arithmetic.operators.linear(short_BT1S.squeeze(2), weights.kv_up).view(B, T, weights.num_heads, -1)
    nope_BTHA, v_BTHU = kv_BTHX.tensor_split((weights.nope_dim,), -1)
    k_BTHC = torch.cat((nope_BTHA, rope_BT1C.expand(-1, -1, weights.num_heads, -1)), -1)
    k_BHTC, v_BHTU = k_BTHC.transpose(1, 2), v_BTHU.transpose(1, 2)
    return attend_rows(q_BHLC, k_BHTC, v_BHTU, group, weights.scale, None, arithmetic.batch_invariant)


def absorbed(q_BHLC: Tensor, row_BT1Z: Tensor, weights: LatentWeights, group: Group, arithmetic: Arithmetic) -> Tensor:
    """`expanded` in plain arithmetic without computing keys and values: the rows are one key/value head for all queries."""
    assert arithmetic.is_plain, f"absorbed attention in {arithmetic}"
    rank, scale = len(weights.kv_down_norm), weights.scale or q_BHLC.shape[-1] ** -0.5
    up_HXS = weights.kv_up.view(weights.num_heads, -1, rank)
    nope_BHLA, rope_BHLC = q_BHLC.tensor_split((weights.nope_dim,), -1)
    q_BHLZ = torch.cat((nope_BHLA @ up_HXS[:, : weights.nope_dim], rope_BHLC), -1)
    row_B1TZ = row_BT1Z.transpose(1, 2)
    if group.length == 1:  # heads are passed as queries of one head, which is faster than torch's enable_gqa
        y_BHLZ = attend_rows(q_BHLZ.transpose(1, 2), row_B1TZ, row_B1TZ, group, scale).transpose(1, 2)
    else:
        y_BHLZ = attend_rows(q_BHLZ, row_B1TZ, row_B1TZ, group, scale)
    return y_BHLZ[..., :rank] @ up_HXS[:, weights.nope_dim :].transpose(1, 2)
