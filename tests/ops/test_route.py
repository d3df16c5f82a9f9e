from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stretto.ops.operators import Routes, route

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
