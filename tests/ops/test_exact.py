"""Batch-invariant operators: right within fp32's rounding, and the same to the bit in whatever company."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stretto.ops import exact, grouped
from stretto.ops.grouped import Clamp
from stretto.ops.matmul import Arithmetic
from stretto.ops.operators import attention_reference, rms_norm_reference, rotary_tables, route


def rand(*shape: int, seed: int = 0, spread: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    return x * torch.exp(spread * torch.randn(*shape, generator=generator))


@pytest.mark.parametrize("inner", [3, 64, 512, 513, 1400])
def test_a_product_is_as_good_as_one_in_fp32(inner: int) -> None:
    x_ND, weight_FD = rand(33, inner, spread=0.5), rand(17, inner, seed=1)
    true_NF = x_ND.double() @ weight_FD.double().T
    error = (exact.linear(x_ND, weight_FD).double() - true_NF).abs()
    # each side is off by up to half a unit of 2^-22 of its row's largest entry
    bound_N1 = x_ND.abs().amax(-1, keepdim=True).double() * weight_FD.abs().sum(-1)
    bound_F = weight_FD.abs().amax(-1).double() * x_ND.abs().sum(-1, keepdim=True)
    assert (error <= 2**-22 * (bound_N1 + bound_F) + 2**-23 * true_NF.abs()).all()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 600), st.integers(0, 99), st.integers(1, 2))
def test_a_row_is_the_same_alone_and_in_any_batch(rows: int, inner: int, seed: int, threads: int) -> None:
    x_ND, weight_FD = rand(rows, inner, seed=seed, spread=1.0), rand(9, inner, seed=1)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    gain_D = rand(inner, seed=2)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    for function in (
        lambda x: exact.linear(x, weight_FD),
        lambda x: exact.rms_norm(x, gain_D, 1e-5),
        exact.softmax,
        exact.sigmoid,
        lambda x: exact.swiglu(torch.cat((x, x), -1)),
    ):
        whole = function(x_ND)
        assert torch.equal(function(x_ND[order]), whole[order])
        for row in range(0, rows, 7):
            assert torch.equal(function(x_ND[row : row + 1]), whole[row : row + 1])
    torch.set_num_threads(before)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(0, 30), st.integers(0, 99))
def test_attention_feels_neither_hidden_keys_nor_other_queries(length: int, hidden: int, seed: int) -> None:
    q, k, v = (rand(1, heads, length, 8, seed=seed + heads) * 2 for heads in (4, 2, 3))
    v = v[:, :2]
    causal = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
    whole = exact.attention(q, k, v, causal)
    for query in range(0, length, 5):
        junk = rand(1, 2, hidden, 8, seed=seed, spread=3.0)
        keys, values = torch.cat((k[:, :, : query + 1], junk), 2), torch.cat((v[:, :, : query + 1], 9 * junk), 2)
        mask = torch.arange(query + 1 + hidden)[None, None, None] <= query
        assert torch.equal(
            exact.attention(q[:, :, query : query + 1], keys, values, mask), whole[:, :, query : query + 1]
        )
        # a document that begins further along its row
        keys, values = torch.cat((junk, k[:, :, : query + 1]), 2), torch.cat((junk, v[:, :, : query + 1]), 2)
        mask = torch.arange(query + 1 + hidden)[None, None, None] >= hidden
        assert torch.equal(
            exact.attention(q[:, :, query : query + 1], keys, values, mask), whole[:, :, query : query + 1]
        )
    # scores of some tens, off by a unit of 2^-22 of the largest entries, err by some 1e-5 in the exponent
    assert torch.allclose(whole, attention_reference(q, k, v, causal), atol=2e-4)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 30), st.integers(0, 20), st.integers(0, 99), st.floats(-20.0, 20.0))
def test_attention_with_sinks_feels_no_hidden_keys_either(length: int, hidden: int, seed: int, sink: float) -> None:
    q, k, v = (rand(1, heads, length, 8, seed=seed + heads) for heads in (4, 2, 3))
    v, sinks = v[:, :2, :, :5], rand(4, seed=seed) + sink
    causal = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
    whole = exact.attention(q, k, v, causal, 0.3, sinks)
    junk = rand(1, 2, hidden, 8, seed=seed, spread=3.0)
    keys, values = torch.cat((junk, k), 2), torch.cat((9 * junk[..., :5], v), 2)
    mask = torch.arange(length + hidden)[None, None, None] >= hidden
    assert torch.equal(exact.attention(q[:, :, -1:], keys, values, mask, 0.3, sinks), whole[:, :, -1:])
    assert torch.allclose(whole, attention_reference(q, k, v, causal, 0.3, sinks), atol=2e-4)


def test_exp_is_within_two_units_and_zero_far_below() -> None:
    x = torch.linspace(-86.9, 20.0, 200_001)
    true = x.double().exp()
    assert ((exact.exp(x).double() - true).abs() <= 2 * 1.2e-7 * true).all()
    assert exact.exp(torch.tensor([-torch.inf, -1e9, -88.0])).tolist() == [0.0, 0.0, 0.0]
    assert exact.exp(torch.zeros(1)).item() == 1.0


def test_elementwise_functions_are_the_ordinary_ones_within_fp32() -> None:
    x = rand(50, 24, spread=1.0)
    assert torch.allclose(exact.softmax(x), x.softmax(-1), rtol=1e-5, atol=1e-7)
    assert torch.allclose(exact.sigmoid(x), x.sigmoid(), rtol=1e-6, atol=1e-7)
    assert torch.allclose(exact.rms_norm(x, x[0], 1e-5), rms_norm_reference(x, x[0], 1e-5), rtol=1e-5, atol=1e-6)
    frequencies = 1e4 ** (-torch.arange(0, 8, 2) / 8)
    both = exact.rotary_tables(50, frequencies, 1.5), rotary_tables(torch.arange(50), frequencies, 1.5)
    for ours, theirs in zip(*both, strict=True):
        assert torch.allclose(ours, theirs, atol=5e-6)  # of angles up to 50, which fp32 rounds to 2^-18


@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize("num_experts", [2, 5, 6])
def test_of_equal_logits_the_lower_ids_are_chosen_in_any_batch(softmax: bool, num_experts: int) -> None:
    """Torch computes the last elements of a tensor with another exp than the others."""
    operators = Arithmetic("fp32", True).operators
    logits_NE = torch.linspace(-40.0, 40.0, 300)[:, None].expand(-1, num_experts)
    for size in range(1, 10):
        for part_NE in logits_NE.split(size):
            chosen = route(part_NE, None, None, 2, softmax=softmax, normalize=True, scaling=1.0, operators=operators)
            assert chosen.chosen_NK.tolist() == [[0, 1]] * len(part_NE)


def test_the_wide_sigmoid_is_torchs_within_fp64() -> None:
    x = torch.linspace(-700.0, 700.0, 100_001, dtype=torch.float64)
    true = x.sigmoid()
    assert ((exact.wide_sigmoid(x) - true).abs() <= 4 * 2**-53 * true).all()
    ends = torch.tensor([-torch.inf, -1e9, 0.0, 1e9, torch.inf])
    assert torch.allclose(exact.wide_sigmoid(ends), ends.double().sigmoid(), rtol=0.0, atol=1e-300)
    assert exact.wide_sigmoid(torch.tensor([torch.nan])).isnan()


def test_of_equal_scores_the_lower_id_is_chosen() -> None:
    scores = torch.tensor([[0.5, 0.9, 0.5, 0.9, 0.5]])
    assert exact.top_k(scores, 4).tolist() == [[1, 3, 0, 2]]


def test_gradients_are_the_ordinary_operators_own() -> None:
    q, k, v = (rand(2, 2, 6, 8, seed=seed).requires_grad_() for seed in range(3))
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
    upstream = rand(2, 2, 6, 8, seed=4)
    ours = torch.autograd.grad(exact.attention(q, k, v, mask), (q, k, v), upstream)
    theirs = torch.autograd.grad(attention_reference(q, k, v, mask), (q, k, v), upstream)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    sinks = rand(2, seed=6).requires_grad_()
    ours = torch.autograd.grad(exact.attention(q, k, v, mask, 0.5, sinks), (q, k, v, sinks), upstream)
    theirs = torch.autograd.grad(attention_reference(q, k, v, mask, 0.5, sinks), (q, k, v, sinks), upstream)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    both = rand(5, 8, seed=7).requires_grad_()
    ours, theirs = (torch.autograd.grad(kind.swiglu(both, Clamp(1.7, 0.5)).sum(), both) for kind in (exact, grouped))
    assert torch.allclose(ours[0], theirs[0], atol=1e-6)
    weight = rand(5, 8, seed=5).requires_grad_()
    ours = torch.autograd.grad(exact.linear(q, weight).sum(), (q, weight))
    theirs = torch.autograd.grad(torch.nn.functional.linear(q, weight).sum(), (q, weight))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(ours, theirs, strict=True))
