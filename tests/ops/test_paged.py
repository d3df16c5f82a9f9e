"""Operators over pages against their references, one token at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stretto.ops import paged
from stretto.ops.grouped import Clamp, ExpertBiases, Experts, grouped_swiglu
from stretto.ops.operators import (
    MASKED,
    ORDINARY,
    Routes,
    attention_reference,
    rms_norm_reference,
    rotary_tables,
    rotate,
)
from stretto.ops.paged import (
    ExpertWeights,
    Group,
    Heads,
    RouteRule,
    Spans,
    _all_experts,
    attend,
    chosen_experts,
    norm,
    route_tokens,
    store,
    store_rounded,
)
from tests.ops.references import chosen_experts_reference, route_tokens_reference

Close = Callable[[Tensor, Tensor, int], None]
PAGE, NUM_PAGES, HEADS, KV_HEADS, WIDTH = 4, 12, 6, 2, 8
EPS = torch.tensor(1e-2)
HEAD = Heads(norm_JC=None, is_wide=False, clip=None, scale=None, sinks_H=None, is_sliding=False)


def store_reference(
    qkv_NX: Tensor,
    heads: Heads,
    eps: float,
    spans: Spans,
    keys_PZGC: Tensor,
    values_PZGC: Tensor,
) -> Tensor:
    """`store` as the model's attention does it, one token at a time; leaves ``qkv_NX`` alone."""
    G, C = keys_PZGC.shape[2:]
    qkv_NHC = qkv_NX.view(len(qkv_NX), -1, C)
    qk_NJC, weight_JC = qkv_NHC[:, :-G], heads.norm_JC
    if weight_JC is not None and heads.is_wide:
        parts = zip(qk_NJC.split((HEADS, KV_HEADS), 1), weight_JC.split((HEADS, KV_HEADS)), strict=True)
        qk_NJC = torch.cat([rms_norm_reference(x.flatten(1), w.flatten(), eps).view_as(x) for x, w in parts], 1)
    elif weight_JC is not None:
        qk_NJC = rms_norm_reference(qk_NJC, weight_JC, eps)
    if heads.clip is not None:
        qk_NJC, qkv_NHC = (x.clamp(-heads.clip, heads.clip) for x in (qk_NJC, qkv_NHC))
    half = spans.cos_N1R.shape[-1] // 2
    rotated_1NJC = rotate(qk_NJC[None], spans.cos_N1R[None, :, 0, :half], spans.sin_N1R[None, :, 0, half:])
    for slot, qk_JC, qkv_HC in zip(spans.slots_N.tolist(), rotated_1NJC[0], qkv_NHC, strict=True):
        page, place = divmod(slot, keys_PZGC.shape[1])
        keys_PZGC[page, place] = qk_JC[-G:]
        values_PZGC[page, place] = qkv_HC[-G:]
    return rotated_1NJC[0, :, :-G]


def attend_reference(
    q_NHC: Tensor,
    keys_PZGC: Tensor,
    values_PZGC: Tensor,
    tables: list[list[int]],
    positions: list[int],
    heads: Heads = HEAD,
) -> Tensor:
    """`attend` one token at a time: ``tables`` are the pages of each token's sequence, ``positions`` where it stands."""
    rows = []
    for q_HC, table, position in zip(q_NHC, tables, positions, strict=True):
        k_GTC, v_GTC = (
            pool_PZGC[table].flatten(0, 1)[: position + 1].transpose(0, 1) for pool_PZGC in (keys_PZGC, values_PZGC)
        )
        seen = torch.ones(1, 1, 1, position + 1, dtype=torch.bool, device=q_NHC.device)
        query, (k_1GTC, v_1GTC) = q_HC[None, :, None], (x[None] for x in (k_GTC, v_GTC))
        rows.append(attention_reference(query, k_1GTC, v_1GTC, seen, heads.scale, heads.sinks_H).flatten())
    return torch.stack(rows)


def spans(positions: list[int], tables: list[list[int]], rotated: int) -> Spans:
    cos, sin = rotary_tables(torch.tensor(positions), 100.0 ** (-torch.arange(0, rotated, 2) / rotated))
    slots = [
        table[position // PAGE] * PAGE + position % PAGE for position, table in zip(positions, tables, strict=True)
    ]
    return Spans(torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None], torch.tensor(slots), ())


@pytest.mark.parametrize("shape", [(1, 16), (5, 3, 8), (64, 128)])
def test_norm(shape: tuple[int, ...], close: Close) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(shape), torch.randn(shape[1:])
    close(norm(x, weight, EPS), rms_norm_reference(x, weight, 1e-2), shape[-1])
    narrow = norm(x.bfloat16(), weight.bfloat16(), EPS)
    assert narrow.dtype == torch.bfloat16
    close(narrow, rms_norm_reference(x.bfloat16(), weight.bfloat16(), 1e-2), shape[-1])


@pytest.mark.parametrize("rotated", [WIDTH, WIDTH // 2])
@pytest.mark.parametrize("normed", ["each head", "wide", "not"])
@pytest.mark.parametrize("clip", [None, 0.7])
def test_store(rotated: int, normed: str, clip: float | None, close: Close) -> None:
    torch.manual_seed(0)
    where = spans([0, 9, 3], [[5], [7, 2, 4], [1]], rotated)
    qkv = torch.randn(3, (HEADS + 2 * KV_HEADS) * WIDTH)
    weight = None if normed == "not" else torch.randn(HEADS + KV_HEADS, WIDTH)
    heads = replace(HEAD, norm_JC=weight, is_wide=normed == "wide", clip=clip)
    pools = [torch.randn(NUM_PAGES, PAGE, KV_HEADS, WIDTH) for _ in range(2)]
    expected_pools = [pool.clone() for pool in pools]
    expected = store_reference(qkv.clone(), heads, 1e-2, where, *expected_pools)
    rounded_pools = [pool.clone() for pool in pools]
    close(store_rounded(qkv, heads, 1e-2, where, *rounded_pools, ORDINARY), expected, HEADS * WIDTH)
    close(store(qkv, heads, EPS, where, *pools), expected, HEADS * WIDTH)
    for pool, rounded, other in zip(pools, rounded_pools, expected_pools, strict=True):
        close(pool, other, HEADS * WIDTH)
        close(rounded, other, HEADS * WIDTH)


def groups(lengths: list[int], starts: list[int], tables: list[list[int]]) -> tuple[Group, ...]:
    """One group a chunk, with junk pages beyond what it needs."""
    made, first = [], 0
    for length, start, table in zip(lengths, starts, tables, strict=True):
        hidden_LT = torch.arange(start, start + length)[:, None] < torch.arange(len(table) * PAGE)
        mask = None if start == 0 and length > 1 else torch.where(hidden_LT, float("-inf"), 0.0)[None, None]
        made.append(Group(first, 1, length, torch.tensor(table), mask))
        first += length
    return tuple(made)


def within(made: tuple[Group, ...]) -> Spans:
    """Spans of which attention reads no more than the groups."""
    nothing = torch.empty(0)
    return Spans(nothing, nothing, nothing, made)


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 9)), min_size=1, max_size=4),
    st.sampled_from([1, 2, 6]),
    st.sampled_from([None, 0.2]),
    st.booleans(),
)
def test_attend(chunks: list[tuple[int, int]], kv_heads: int, scale: float | None, sinks: bool) -> None:
    torch.manual_seed(0)
    heads = replace(HEAD, scale=scale, sinks_H=torch.randn(HEADS) if sinks else None)
    lengths, starts = [list(column) for column in zip(*chunks, strict=True)]
    tables = [torch.randperm(NUM_PAGES)[:4].tolist() for _ in chunks]
    pools = [torch.randn(NUM_PAGES, PAGE, kv_heads, WIDTH) for _ in range(2)]
    q = torch.randn(sum(lengths), HEADS, WIDTH)
    positions = [start + place for length, start in zip(lengths, starts, strict=True) for place in range(length)]
    by_token = [table for length, table in zip(lengths, tables, strict=True) for _ in range(length)]
    actual = attend(q, *pools, within(groups(lengths, starts, tables)), heads)
    expected = attend_reference(q, *pools, by_token, positions, heads)
    assert (actual - expected).abs().max() <= 8 * 4 * 1.2e-7 * float(expected.abs().max()) * 2


def test_attend_in_one_group_of_several(close: Close) -> None:
    torch.manual_seed(0)
    tables, starts = [[3, 1], [7, 0], [5, 2]], [6, 0, 3]
    pools = [torch.randn(NUM_PAGES, PAGE, KV_HEADS, WIDTH) for _ in range(2)]
    for length in (1, 2):
        q = torch.randn(3 * length, HEADS, WIDTH)
        seen = torch.tensor(starts)[:, None, None] + torch.arange(length)[:, None]
        mask = torch.where(seen < torch.arange(8), float("-inf"), 0.0)[:, None]
        group = Group(0, 3, length, torch.tensor(tables).flatten(), mask)
        positions = [start + place for start in starts for place in range(length)]
        by_token = [table for table in tables for _ in range(length)]
        close(attend(q, *pools, within((group,)), HEAD), attend_reference(q, *pools, by_token, positions), 16)


@pytest.mark.parametrize("softmax", [True, False])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("masked", ["no bias", "bias", "one mask", "a mask a token", "masks and ks", "groups"])
def test_route(softmax: bool, normalize: bool, masked: str, close: Close) -> None:
    torch.manual_seed(0)
    x, gate, router_bias = torch.randn(7, 16), torch.randn(6, 16), torch.randn(6)
    experts = (2, 1) if masked == "groups" else (1, 1)
    bias = mask = dropped = None
    if masked != "no bias":
        bias = torch.randn(6) * 0.3
    if masked == "one mask":
        bias = torch.where(torch.arange(6) % 2 == 0, bias, MASKED)
    elif masked not in ("no bias", "bias", "groups"):
        bias = torch.where(torch.rand(7, 6).argsort(-1) < 4, bias, MASKED)
    if softmax and bias is not None and (bias == MASKED).any():
        mask = torch.where(bias == MASKED, MASKED, 0.0)
    if masked == "masks and ks":
        dropped = torch.arange(3) >= torch.tensor([1, 3, 2, 3, 3, 1, 2])[:, None]
    rule = RouteRule(3, softmax, normalize, 1.7, experts, bias, mask, dropped)
    actual, expected = route_tokens(x, gate, rule, router_bias), route_tokens_reference(x, gate, rule, router_bias)
    assert torch.equal(actual.chosen_NK, expected.chosen_NK)
    close(actual.gates_NK, expected.gates_NK, 16)


@pytest.mark.parametrize("num_tokens", [1, 3, 40])
@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("width", [8, 7])
def test_experts(num_tokens: int, dropped: bool, biased: bool, width: int, close: Close) -> None:
    """Both paths: pair by pair and grouped; a choice of expert E adds nothing. Rows need not be whole 16 bytes."""
    torch.manual_seed(0)
    biases = ExpertBiases(torch.randn(9, 2 * width), torch.randn(9, 8)) if biased else None
    clamp = Clamp(1.7, 2.0) if biased else None
    weights = ExpertWeights.of(Experts(torch.randn(9, 2 * width, 8), torch.randn(9, 8, width), biases, clamp))
    chosen = torch.rand(num_tokens, 9).argsort(-1)[:, :4].contiguous()
    gates = torch.rand(num_tokens, 4)
    if dropped:
        chosen[::2, 2:], gates[::2, 2:] = 9, 0.0
    x = torch.randn(num_tokens, 8)
    expected = chosen_experts_reference(x, Routes(chosen, gates), weights)
    for computed in (chosen_experts, _all_experts):
        close(computed(x, Routes(chosen, gates), weights), expected, 32)


def test_rows_that_no_expert_wrote_reach_no_token(monkeypatch: pytest.MonkeyPatch, close: Close) -> None:
    """A grouped product leaves the rows after the last group as they were; here that is NaN."""

    def unwritten(x_SD: Tensor, ends_E: Tensor, weights: Experts) -> Tensor:
        y_SD = grouped_swiglu(x_SD, ends_E, weights)
        y_SD[int(ends_E[-1]) :] = torch.nan
        return y_SD

    monkeypatch.setattr(paged, "grouped_swiglu", unwritten)
    weights = ExpertWeights.of(Experts(torch.randn(9, 16, 8), torch.randn(9, 8, 8)))
    chosen, gates, x = torch.rand(40, 9).argsort(-1)[:, :4].contiguous(), torch.rand(40, 4), torch.randn(40, 8)
    chosen[0], chosen[1, 2:] = 9, 9  # the first token has no expert at all
    gates.masked_fill_(chosen == 9, 0.0)
    expected = chosen_experts_reference(x, Routes(chosen, gates), weights)
    close(chosen_experts(x, Routes(chosen, gates), weights), expected, 32)


def test_a_token_that_is_not_a_number_reaches_no_token_of_fewer_experts(close: Close) -> None:
    weights = ExpertWeights.of(Experts(torch.randn(9, 16, 8), torch.randn(9, 8, 8)))
    chosen, gates, x = torch.rand(40, 9).argsort(-1)[:, :4].contiguous(), torch.rand(40, 4), torch.randn(40, 8)
    chosen[1:, 2:] = 9
    gates.masked_fill_(chosen == 9, 0.0)
    chosen[0] = torch.arange(4)  # its row is the first of all
    x[0] = torch.nan
    y = chosen_experts(x, Routes(chosen, gates), weights)
    assert y[0].isnan().all()
    close(y[1:], chosen_experts_reference(x[1:], Routes(chosen[1:], gates[1:]), weights), 32)
