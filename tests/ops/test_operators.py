"""RMSNorm, attention and rotary positions against their definitions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from stretto.ops.operators import (
    Routes,
    attention,
    attention_reference,
    document_mask,
    rms_norm,
    rms_norm_reference,
    rotary_tables,
    rotate,
    route,
    window_mask,
)

Close = Callable[[Tensor, Tensor, int], None]

DOCUMENTS = torch.tensor([[0] * 5 + [1] * 9 + [2] * 2, [0] * 11 + [-1] * 5, [-1] * 16])
"""Three documents; one and padding; nothing but padding."""


def _qkv(rows: int, heads: int, groups: int, length: int, width: int = 8) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(rows, num, length, width, requires_grad=True) for num in (heads, groups, groups)]


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("packed", [False, True])
def test_equals_the_reference(heads: int, groups: int, packed: bool, close: Close) -> None:
    qkv = _qkv(3, heads, groups, 16)
    mask = document_mask(DOCUMENTS) if packed else None
    actual, expected = attention(*qkv, mask), attention_reference(*qkv, mask)
    close(actual, expected, 16)
    upstream = torch.randn_like(actual)
    for ours, theirs in zip(
        torch.autograd.grad(actual, qkv, upstream), torch.autograd.grad(expected, qkv, upstream), strict=True
    ):
        close(ours, theirs, 16 * heads // groups)


def test_gradients_are_those_of_finite_differences() -> None:
    qkv = [x.detach().double().requires_grad_() for x in _qkv(1, 2, 1, 5, width=4)]
    mask = document_mask(torch.tensor([[0, 0, 1, 1, 1]]))
    assert gradcheck(lambda q, k, v: attention(q, k, v, mask), qkv)


def test_a_packed_document_sees_only_itself(close: Close) -> None:
    qkv = [x[:1] for x in _qkv(1, 4, 2, 16)]
    together = attention(*qkv, document_mask(DOCUMENTS[:1]))
    for start, stop in ((0, 5), (5, 14), (14, 16)):
        alone = attention(*(x[:, :, start:stop].contiguous() for x in qkv), None)
        close(together[:, :, start:stop], alone, stop - start)


def test_padding_gives_no_gradient_to_tokens() -> None:
    qkv = _qkv(3, 2, 2, 16)
    out = attention(*qkv, document_mask(DOCUMENTS))
    out[1, :, 11:].sum().backward()  # the padding of the second row
    for x in qkv:
        assert x.grad is not None
        assert torch.isfinite(x.grad).all()
        assert not x.grad[1, :, :11].any()


def test_document_mask_is_causal_within_documents() -> None:
    mask = document_mask(DOCUMENTS[:1])[0, 0]
    for query in range(16):
        for key in range(16):
            same = bool(DOCUMENTS[0, query] == DOCUMENTS[0, key])
            assert bool(mask[query, key]) == (same and key <= query), (query, key)


def test_a_shared_beginning_is_seen_by_those_that_share_it() -> None:
    documents = torch.tensor([[0, 0, 0, 1, 1, 2, 2, -1]])  # 1 and 2 go on from what 0 begins, its columns 0 and 1
    shared = torch.tensor([[[0, 0]] * 3 + [[0, 2]] * 4 + [[0, 0]]])
    mask = document_mask(documents, shared)[0, 0]
    for query in range(8):
        for key in range(8):
            own = bool(documents[0, query] == documents[0, key]) and key <= query
            assert bool(mask[query, key]) == (own or (3 <= query < 7 and key < 2)), (query, key)


def frequencies(rotary_dim: int, theta: float = 10_000.0) -> Tensor:
    return theta ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)


def test_rotation_keeps_lengths_and_depends_on_distance_alone(close: Close) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(1, 1, 1, 8, dtype=torch.float32), torch.randn(1, 1, 1, 8)
    positions = torch.arange(12)[None]
    cos, sin = rotary_tables(positions, frequencies(8))
    xs, ys = rotate(x.expand(1, 12, 1, 8), cos, sin), rotate(y.expand(1, 12, 1, 8), cos, sin)
    close(xs.norm(dim=-1), x.norm(dim=-1).expand(1, 12, 1), 8)
    products = xs[0, :, 0] @ ys[0, :, 0].T
    for distance in range(1, 5):
        diagonal = products.diagonal(distance)
        assert torch.allclose(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-5)  # angles of up to 12 in fp32
    assert not torch.allclose(products[0, 0], products[0, 1], atol=1e-3)


def test_rotation_pairs_halves_and_leaves_the_rest() -> None:
    x = torch.zeros(1, 1, 1, 6)
    x[..., 0], x[..., 4] = 1.0, 7.0
    cos, sin = rotary_tables(torch.tensor([[1]]), frequencies(4))
    angle = torch.tensor(1.0)
    expected = torch.tensor([angle.cos(), 0.0, angle.sin(), 0.0, 7.0, 0.0])
    assert torch.allclose(rotate(x, cos, sin).flatten(), expected)


def test_rotation_gradients_are_those_of_finite_differences() -> None:
    torch.manual_seed(0)
    cos, sin = rotary_tables(torch.arange(3).expand(2, 3), frequencies(4, 100.0))
    x = torch.randn(2, 3, 2, 6, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x: rotate(x, cos.double(), sin.double()), (x,))


@pytest.mark.parametrize("shape", [(1, 8), (5, 3, 64), (2, 7, 6, 32)])
@pytest.mark.parametrize("per_head", [False, True])
def test_norm_equals_the_reference(shape: tuple[int, ...], per_head: bool, close: Close) -> None:
    torch.manual_seed(0)
    x = (3 * torch.randn(shape)).requires_grad_()
    weight = torch.randn(shape[-2:] if per_head else shape[-1:], requires_grad=True)
    upstream = torch.randn(shape)
    actual, expected = rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5)
    close(actual, expected, shape[-1])
    num_rows = x.numel() // weight.numel()
    for ours, theirs, length in zip(
        torch.autograd.grad(actual, (x, weight), upstream),
        torch.autograd.grad(expected, (x, weight), upstream),
        (shape[-1], num_rows),
        strict=True,
    ):
        close(ours, theirs, length)


def test_norm_gradients_are_those_of_finite_differences() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x, weight: rms_norm(x, weight, 1e-3), (x, weight))


def test_a_zero_row_stays_finite() -> None:
    x = torch.zeros(2, 16, requires_grad=True)
    out = rms_norm(x, torch.ones(16), 1e-5)
    out.sum().backward()
    assert torch.equal(out, torch.zeros_like(out))
    assert x.grad is not None and torch.isfinite(x.grad).all()


def test_bf16_follows_the_fp32_reference(close: Close) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(6, 32).bfloat16(), torch.randn(32).bfloat16()
    close(rms_norm(x, weight, 1e-5), rms_norm_reference(x.float(), weight.float(), 1e-5), 1)


BOTH = pytest.mark.parametrize("softmax", [False, True])


def _route(logits: Tensor, bias: Tensor | None, allowed: Tensor | None, top_k: int, softmax: bool) -> Routes:
    return route(logits, bias, allowed, top_k, softmax=softmax, normalize=True, scaling=1.0)


@BOTH
def test_masking_equals_a_router_with_columns_removed(softmax: bool) -> None:
    torch.manual_seed(0)
    logits, bias, upstream = torch.randn(20, 8), torch.randn(8), torch.randn(20, 3)
    kept = torch.tensor([0, 2, 3, 7])
    allowed = torch.zeros(8, dtype=torch.bool)
    allowed[kept] = True
    wide, narrow = logits.clone().requires_grad_(), logits[:, kept].clone().requires_grad_()
    for raw in (True, False):  # also without renormalisation, which would hide a wrong softmax
        masked = route(wide, bias, allowed, 3, softmax=softmax, normalize=not raw, scaling=1.0)
        removed = route(narrow, bias[kept], None, 3, softmax=softmax, normalize=not raw, scaling=1.0)
        assert torch.equal(masked.chosen_NK, kept[removed.chosen_NK])
        assert torch.allclose(masked.gates_NK, removed.gates_NK, rtol=1e-6, atol=0)
        (grad_wide,) = torch.autograd.grad(masked.gates_NK, wide, upstream)
        (grad_narrow,) = torch.autograd.grad(removed.gates_NK, narrow, upstream)
        assert torch.allclose(grad_wide[:, kept], grad_narrow, rtol=1e-5, atol=1e-7)
        assert not grad_wide[:, ~allowed].any()


@BOTH
def test_a_masked_expert_is_never_chosen_whatever_the_bias(softmax: bool) -> None:
    logits = torch.zeros(4, 6)
    bias = torch.tensor([1e3, -1e3, -1e3, 1e3, 1e3, 1e3])
    allowed = torch.tensor([False, True, True, False, False, False])
    assert set(_route(logits, bias, allowed, 2, softmax).chosen_NK.unique().tolist()) == {1, 2}


@BOTH
def test_gradients_are_finite_where_all_but_one_expert_are_masked(softmax: bool) -> None:
    logits = torch.full((3, 5), 50.0).requires_grad_()
    allowed = torch.zeros(3, 5, dtype=torch.bool)
    allowed[torch.arange(3), torch.arange(3)] = True
    routes = _route(logits, None, allowed, 1, softmax)
    routes.gates_NK.sum().backward()
    assert routes.chosen_NK.flatten().tolist() == [0, 1, 2]
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


@BOTH
@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_gates_add_up_to_the_scaling_whatever_k(softmax: bool, top_k: int) -> None:
    torch.manual_seed(0)
    routes = route(torch.randn(9, 5), None, None, top_k, softmax=softmax, normalize=True, scaling=2.5)
    assert torch.allclose(routes.gates_NK.sum(-1), torch.full((9,), 2.5), rtol=1e-6)


@BOTH
def test_the_bias_moves_the_choice_and_never_the_gates(softmax: bool) -> None:
    torch.manual_seed(0)
    logits = torch.randn(12, 6)
    scores = logits.softmax(-1) if softmax else logits.sigmoid()
    pushed = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 5.0], requires_grad=True)
    plain = route(logits, None, None, 2, softmax=softmax, normalize=False, scaling=1.0)
    biased = route(logits, pushed, None, 2, softmax=softmax, normalize=False, scaling=1.0)
    assert (plain.chosen_NK != 5).all(-1).any()
    assert (biased.chosen_NK[:, 0] == 5).all()
    assert torch.equal(biased.gates_NK, scores.gather(-1, biased.chosen_NK))
    assert not biased.gates_NK.requires_grad  # neither logits nor bias gave it a path


def test_gates_are_fp32_from_bf16_logits() -> None:
    assert _route(torch.randn(3, 4).bfloat16(), None, None, 2, False).gates_NK.dtype == torch.float32


def test_masks_and_biases_may_differ_by_token() -> None:
    logits = torch.zeros(2, 4)
    bias = torch.tensor([[0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]])
    allowed = torch.tensor([[True, True, False, False], [True, False, True, True]])
    chosen = _route(logits, bias, allowed, 1, False).chosen_NK
    assert chosen.flatten().tolist() == [1, 3]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("width", "value_width"), [(8, 8), (8, 5), (6, 11), (7, 7)])
@pytest.mark.parametrize("sinks", [False, True])
def test_scaled_attention_with_sinks_and_narrow_values_is_the_reference(
    packed: bool, width: int, value_width: int, sinks: bool, close: Close
) -> None:
    torch.manual_seed(0)
    shapes = ((3, 6, 16, width), (3, 2, 16, width), (3, 2, 16, value_width))
    qkv = [torch.randn(shape, requires_grad=True) for shape in shapes]
    tensors = [*qkv, (3 * torch.randn(6)).requires_grad_()] if sinks else qkv
    mask = document_mask(DOCUMENTS) if packed else None
    arguments = (*qkv, mask, 0.7, tensors[3] if sinks else None)
    actual, expected = attention(*arguments), attention_reference(*arguments)
    assert actual.shape == (3, 6, 16, value_width)
    close(actual, expected, 16)
    upstream = torch.randn_like(actual)
    found, wanted = (torch.autograd.grad(y, tensors, upstream) for y in (actual, expected))
    for ours, theirs in zip(found, wanted, strict=True):
        close(ours, theirs, 16 * 16 * 3)


def test_a_sink_takes_its_share_to_nowhere() -> None:
    """One key: the head's output is its value times σ(score − sink)."""
    q, k, v = (torch.tensor([[[[number]]]]) for number in (0.5, 2.0, 3.0))
    y = attention_reference(q, k, v, None, scale=0.1, sinks_H=torch.tensor([0.7]))
    assert torch.allclose(y, 3.0 * torch.sigmoid(torch.tensor(0.5 * 2.0 * 0.1 - 0.7)))


@pytest.mark.parametrize("window", [1, 3, 20])
def test_a_window_is_counted_in_positions(window: int) -> None:
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2], [5, 6, 9, 10, 11, 12, 30, 31]])
    mask = window_mask(positions, window)
    for row in range(2):
        for query in range(8):
            for key in range(8):
                near = int(positions[row, query]) - int(positions[row, key]) < window
                assert bool(mask[row, 0, query, key]) == near


def _by_groups(scores: list[float], num_groups: int, num_chosen: int, top_k: int) -> list[int]:
    """Written out for one token."""
    size = len(scores) // num_groups
    members = [list(range(group * size, (group + 1) * size)) for group in range(num_groups)]
    ranked = sorted(members, key=lambda group: -sum(sorted((scores[expert] for expert in group), reverse=True)[:2]))
    open_experts = [expert for group in ranked[:num_chosen] for expert in group]
    return sorted(open_experts, key=lambda expert: -scores[expert])[:top_k]


@BOTH
@pytest.mark.parametrize(("num_groups", "num_chosen", "top_k"), [(4, 2, 3), (2, 1, 4), (3, 3, 5), (4, 1, 2)])
def test_tokens_choose_in_their_best_groups(softmax: bool, num_groups: int, num_chosen: int, top_k: int) -> None:
    """Bias and mask count when groups are ranked; weights stay those of the scores alone."""
    torch.manual_seed(0)
    logits, bias, allowed = torch.randn(30, 12), 0.3 * torch.randn(12), torch.ones(12, dtype=torch.bool)
    allowed[:: 12 // num_groups] = num_groups == 3  # else the first of each group may not be chosen
    routes = route(
        logits, bias, allowed, top_k, softmax=softmax, normalize=True, scaling=1.0, groups=(num_groups, num_chosen)
    )
    masked = logits.masked_fill(~allowed, -1e9)
    scores = masked.softmax(-1) if softmax else masked.sigmoid()
    choice = (scores + bias).masked_fill(~allowed, -1e9)
    assert routes.chosen_NK.tolist() == [_by_groups(row, num_groups, num_chosen, top_k) for row in choice.tolist()]
    free = route(logits, bias, allowed, top_k, softmax=softmax, normalize=True, scaling=1.0)
    assert torch.equal(routes.chosen_NK, free.chosen_NK) == (num_groups == num_chosen)
    gates = scores.gather(-1, routes.chosen_NK)
    assert torch.allclose(routes.gates_NK, gates / gates.sum(-1, keepdim=True), rtol=1e-6)
