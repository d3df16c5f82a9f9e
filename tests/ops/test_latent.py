"""Latent attention over pages: both ways round against keys and values written out, one token at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.ops.latent import LatentWeights, absorbed, expanded, is_expanded_faster, latent_attention
from stretto.ops.matmul import PLAIN
from stretto.ops.operators import attention_reference, rms_norm_reference, rotary_tables, rotate
from stretto.ops.paged import Group, Spans

Close = Callable[[Tensor, Tensor, int], None]
HIDDEN, HEADS, NOPE, ROPE, RANK, VALUE, PAGE = 16, 3, 6, 4, 10, 5, 4
EPS = 1e-3


def weights(query_rank: int | None) -> LatentWeights:
    torch.manual_seed(0)
    width = query_rank or HIDDEN
    return LatentWeights(
        q_down=None if query_rank is None else torch.randn(query_rank, HIDDEN),
        q_down_bias=None if query_rank is None else torch.randn(query_rank),
        q_down_norm=None if query_rank is None else torch.randn(query_rank),
        q_up=torch.randn(HEADS * (NOPE + ROPE), width) / width**0.5,
        kv_down=torch.randn(RANK + ROPE, HIDDEN) / HIDDEN**0.5,
        kv_down_bias=torch.randn(RANK + ROPE),
        kv_down_norm=torch.randn(RANK),
        kv_up=torch.randn(HEADS * (NOPE + VALUE), RANK) / RANK**0.5,
        num_heads=HEADS,
        nope_dim=NOPE,
        value_dim=VALUE,
        scale=None,
        eps=EPS,
    )


def reference(x_ND: Tensor, layer: LatentWeights, cos_NR: Tensor, sin_NR: Tensor) -> Tensor:
    """A whole sequence from position 0, with keys and values of its own for every head."""
    short = x_ND
    if layer.q_down is not None:
        assert isinstance(layer.q_down, Tensor) and layer.q_down_norm is not None
        short = rms_norm_reference(F.linear(x_ND, layer.q_down, layer.q_down_bias), layer.q_down_norm, EPS)
    assert isinstance(layer.q_up, Tensor) and isinstance(layer.kv_down, Tensor) and isinstance(layer.kv_up, Tensor)
    q_NHC = F.linear(short, layer.q_up).unflatten(-1, (HEADS, -1))
    short_NS, rope_NC = F.linear(x_ND, layer.kv_down, layer.kv_down_bias).split((RANK, ROPE), -1)
    kv_NHX = F.linear(rms_norm_reference(short_NS, layer.kv_down_norm, EPS), layer.kv_up).unflatten(-1, (HEADS, -1))
    turned = [rotate(part[None], cos_NR[None], sin_NR[None])[0] for part in (q_NHC[..., NOPE:], rope_NC[:, None])]
    q_NHC = torch.cat((q_NHC[..., :NOPE], turned[0]), -1)
    k_NHC = torch.cat((kv_NHX[..., :NOPE], turned[1].expand(-1, HEADS, -1)), -1)
    q, k, v = (part.transpose(0, 1)[None] for part in (q_NHC, k_NHC, kv_NHX[..., NOPE:]))
    return attention_reference(q, k, v, None)[0].transpose(0, 1).flatten(1)


def rotations(num: int) -> tuple[Tensor, Tensor]:
    return rotary_tables(torch.arange(num), 50.0 ** (-torch.arange(0, ROPE, 2) / ROPE))


def spans(start: int, length: int) -> Spans:
    """One chunk of a sequence whose pages are 2, 0, 1."""
    cos, sin = (table[start:] for table in rotations(start + length))
    pages = torch.tensor([2, 0, 1])
    positions = torch.arange(start, start + length)
    slots = pages[positions // PAGE] * PAGE + positions % PAGE
    hidden_LT = positions[:, None] < torch.arange(3 * PAGE)
    mask = None if start == 0 and length > 1 else torch.where(hidden_LT, float("-inf"), 0.0)[None, None]
    group = Group(0, 1, length, pages, mask)
    return Spans(torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None], slots, (group,))


@pytest.mark.parametrize("query_rank", [None, 7])
@pytest.mark.parametrize("sizes", [[11], [1] * 11, [5, 1, 3, 2]])
def test_chunks_equal_the_whole_sequence(query_rank: int | None, sizes: list[int], close: Close) -> None:
    layer = weights(query_rank)
    x_ND, rows = torch.randn(11, HIDDEN), torch.zeros(3, PAGE, 1, RANK + ROPE)
    parts, start = [], 0
    for size in sizes:
        part = x_ND[start : start + size]
        parts.append(latent_attention(part, layer, spans(start, size), rows, PLAIN))
        start += size
    close(torch.cat(parts), reference(x_ND, layer, *rotations(11)), HIDDEN * RANK)


@pytest.mark.parametrize("scale", [None, 0.21])
@pytest.mark.parametrize(("start", "length"), [(0, 5), (6, 1), (3, 4)])
def test_both_ways_are_one_function(scale: float | None, start: int, length: int, close: Close) -> None:
    layer = replace(weights(None), scale=scale)
    q_BHLC, rows = torch.randn(1, HEADS, length, NOPE + ROPE), torch.randn(1, 3 * PAGE, 1, RANK + ROPE)
    (group,) = spans(start, length).groups
    results = [attend(q_BHLC, rows, layer, group, PLAIN) for attend in (absorbed, expanded)]
    close(*results, RANK * NOPE)


def test_prompts_are_expanded_and_single_tokens_are_not() -> None:
    """DeepSeek-V3: level at 512 · 256 / (2 · 512 − 256) = 170.7 queries. Keys and values that are together wider than two short
    vectors are never worth making."""
    layer = replace(weights(None), nope_dim=128, value_dim=128, kv_down_norm=torch.ones(512))
    assert [is_expanded_faster(num, layer) for num in (1, 170, 171)] == [False, False, True]
    assert not is_expanded_faster(10**6, replace(layer, kv_down_norm=torch.ones(128)))
