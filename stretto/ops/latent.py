"""Latent attention (MLA; DeepSeek-V2, 2405.04434) over a paged cache with one short row per token. Forward only.

A row is the normed short vector that keys and values of all heads are made of, then the one rotated part of the keys. Few
queries attend to the rows as they are: what would make keys and values of them is applied to queries and outputs instead
(*absorbed*). Many queries attend to keys and values, which are made once for all of them (*expanded*), as the model's own
forward pass does, and as every arithmetic must that is to round like it.

Shape letters: N tokens of a step, D hidden, H heads, C head width, of which A come first and are not rotated, S width of the short
vector, Z = S + C − A that of a row, U width of a head's values, P pages; B chunks of a group, L tokens of each, T keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.ops import matmul
from stretto.ops.matmul import Arithmetic, Weight, linear, rounded
from stretto.ops.paged import Group, Spans, attend_rows, gathered, rotated


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """One layer's projections, prepared for one arithmetic; biases and norms as they are."""

    q_down: Weight | None
    """Of the queries' short vector; None: ``q_up`` takes the layer's input."""
    q_down_bias: Tensor | None
    q_down_norm: Tensor | None
    q_up: Weight
    kv_down: Weight
    """[Z, D]."""
    kv_down_bias: Tensor | None
    kv_down_norm: Tensor
    kv_up: Weight
    """[H·(A + U), S]: of each head what makes the first part of its keys, then what makes its values."""
    num_heads: int
    nope_dim: int
    value_dim: int
    scale: float | None
    """Of the scores; None: 1/√C."""
    eps: float
    """Of both norms."""


def latent_attention(
    x_ND: Tensor, weights: LatentWeights, spans: Spans, rows_PZ1Z: Tensor, arithmetic: Arithmetic
) -> Tensor:
    """Put each token's row into one layer's cache, and attend to its sequence up to itself: [N, H·U]."""
    q_NHC = _queries(x_ND, weights, arithmetic).view(len(x_ND), weights.num_heads, -1)
    row_NZ = linear(x_ND, weights.kv_down, weights.kv_down_bias, arithmetic)
    short_NS, rope_NC = row_NZ.tensor_split((len(weights.kv_down_norm),), -1)
    short_NS = matmul.norm(short_NS, weights.kv_down_norm, weights.eps, arithmetic)
    q_nope_NHA, q_rope_NHC = q_NHC.tensor_split((weights.nope_dim,), -1)
    rope_NHC = rounded(rotated(torch.cat((q_rope_NHC, rope_NC[:, None]), 1), spans), arithmetic)
    row_NZ = torch.cat((short_NS, rope_NHC[:, -1]), -1)
    rows_PZ1Z.view(-1, row_NZ.shape[-1]).index_copy_(0, spans.slots_N, row_NZ.to(rows_PZ1Z.dtype))
    q_NHC = torch.cat((q_nope_NHA, rope_NHC[:, :-1]), -1)
    parts = [_attend_group(q_NHC, weights, group, rows_PZ1Z, arithmetic) for group in spans.groups]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _queries(x_ND: Tensor, weights: LatentWeights, arithmetic: Arithmetic) -> Tensor:
    if weights.q_down is not None:
        assert weights.q_down_norm is not None
        x_ND = linear(x_ND, weights.q_down, weights.q_down_bias, arithmetic)
        x_ND = matmul.norm(x_ND, weights.q_down_norm, weights.eps, arithmetic)
    return linear(x_ND, weights.q_up, None, arithmetic)


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
    """Whether so many queries of a sequence cost fewer multiplications if its keys and values are made for them.

    For a key and a head: absorbed 2·S + (C − A) a query; expanded C + U a query, and S·(A + U) once.
    """
    rank, made = len(weights.kv_down_norm), weights.nope_dim + weights.value_dim
    return num_queries * (2 * rank - made) > rank * made


def expanded(q_BHLC: Tensor, row_BT1Z: Tensor, weights: LatentWeights, group: Group, arithmetic: Arithmetic) -> Tensor:
    """Attention to the keys and values that the rows stand for, [B, H, L, U]."""
    B, T, _, _ = row_BT1Z.shape
    short_BTS, rope_BT1C = row_BT1Z.squeeze(2), row_BT1Z[..., len(weights.kv_down_norm) :]
    short_BTS = short_BTS[..., : len(weights.kv_down_norm)]
    kv_BTHX = linear(short_BTS, weights.kv_up, None, arithmetic).view(B, T, weights.num_heads, -1)
    nope_BTHA, v_BTHU = kv_BTHX.tensor_split((weights.nope_dim,), -1)
    k_BTHC = torch.cat((nope_BTHA, rope_BT1C.expand(-1, -1, weights.num_heads, -1)), -1)
    k_BHTC, v_BHTU = k_BTHC.transpose(1, 2), v_BTHU.transpose(1, 2)
    return attend_rows(q_BHLC, k_BHTC, v_BHTU, group, weights.scale, None, arithmetic.batch_invariant)


def absorbed(q_BHLC: Tensor, row_BT1Z: Tensor, weights: LatentWeights, group: Group, arithmetic: Arithmetic) -> Tensor:
    """`expanded` in plain arithmetic, without keys and values: the rows are one key/value head for all queries."""
    assert arithmetic.is_plain and isinstance(weights.kv_up, Tensor)
    rank, scale = len(weights.kv_down_norm), weights.scale or q_BHLC.shape[-1] ** -0.5
    up_HXS = weights.kv_up.view(weights.num_heads, -1, rank)
    nope_BHLA, rope_BHLC = q_BHLC.tensor_split((weights.nope_dim,), -1)
    q_BHLZ = torch.cat((nope_BHLA @ up_HXS[:, : weights.nope_dim], rope_BHLC), -1)
    row_B1TZ = row_BT1Z.transpose(1, 2)
    if group.length == 1:  # queries of one head, which is faster than telling torch that heads share their keys
        y_BHLZ = attend_rows(q_BHLZ.transpose(1, 2), row_B1TZ, row_B1TZ, group, scale).transpose(1, 2)
    else:
        y_BHLZ = attend_rows(q_BHLZ, row_B1TZ, row_B1TZ, group, scale)
    return y_BHLZ[..., :rank] @ up_HXS[:, weights.nope_dim :].transpose(1, 2)
