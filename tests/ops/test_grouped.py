from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck

from stretto.ops.grouped import _Combine, _Gather, experts, experts_reference, group_slots, grouped_swiglu

Close = Callable[[Tensor, Tensor, int], None]


def _inputs(chosen_NK: Tensor, num_experts: int, hidden: int = 8, width: int = 4) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((len(chosen_NK), hidden), chosen_NK.shape, (num_experts, 2 * width, hidden), (num_experts, hidden, width))
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


CHOICES = {
    "even": torch.stack([torch.tensor([0, 1, 2]).roll(token) for token in range(9)]),
    "empty experts": torch.tensor([[5, 1]] * 7),
    "one expert takes all": torch.zeros(6, 1, dtype=torch.int64),
    "one choice": torch.tensor([[3], [0], [5], [3], [3]]),
    "one token": torch.tensor([[4, 2]]),
    "an expert twice": torch.tensor([[2, 2], [0, 2]]),
}


@pytest.mark.parametrize("name", CHOICES)
def test_equals_the_reference(name: str, close: Close) -> None:
    chosen = CHOICES[name]
    x, gates, gate_up, down = inputs = _inputs(chosen, 6)
    actual = experts(x, chosen, gates, gate_up, down)
    expected = experts_reference(x, chosen, gates, gate_up, down)
    terms = 8 * chosen.numel()
    close(actual, expected, terms)
    upstream = torch.randn_like(actual)
    for ours, theirs in zip(
        torch.autograd.grad(actual, inputs, upstream), torch.autograd.grad(expected, inputs, upstream), strict=True
    ):
        close(ours, theirs, terms)


def test_an_empty_expert_has_a_gradient_of_zero() -> None:
    chosen = CHOICES["empty experts"]
    x, gates, gate_up, down = _inputs(chosen, 6)
    experts(x, chosen, gates, gate_up, down).square().sum().backward()
    for weight in (gate_up, down):
        assert weight.grad is not None
        assert weight.grad[[1, 5]].any(-1).any(-1).all()
        assert not weight.grad[[0, 2, 3, 4]].any()


@pytest.mark.parametrize("name", CHOICES)
def test_gradients_of_gathers_are_those_of_finite_differences(name: str) -> None:
    """In float64, which the grouped product between them does not support."""
    torch.manual_seed(0)
    chosen = CHOICES[name]
    (num_tokens, num_chosen), slots = chosen.shape, group_slots(chosen, 6)
    x = torch.randn(num_tokens, 3, dtype=torch.float64, requires_grad=True)
    y = torch.randn(chosen.numel(), 3, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x: _Gather.apply(x, slots.token_S, slots.place_S, num_chosen), (x,))
    assert gradcheck(lambda y: _Combine.apply(y, slots.place_S, slots.token_S, num_chosen), (y,))


def test_a_token_does_not_feel_its_neighbours(close: Close) -> None:
    chosen = CHOICES["even"]
    x, gates, gate_up, down = _inputs(chosen, 6)
    together = experts(x, chosen, gates, gate_up, down)
    for token in range(len(chosen)):
        part = slice(token, token + 1)
        close(experts(x[part], chosen[part], gates[part], gate_up, down)[0], together[token], 8)


def test_gates_of_slots_multiply_their_outputs(close: Close) -> None:
    torch.manual_seed(0)
    x, gates = torch.randn(6, 8), torch.randn(6)
    gate_up, down, ends = torch.randn(2, 8, 8), torch.randn(2, 8, 4), torch.tensor([2, 6], dtype=torch.int32)
    plain = grouped_swiglu(x, ends, gate_up, down)
    close(grouped_swiglu(x, ends, gate_up, down, gates), plain * gates[:, None], 8)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(st.integers(0, 4), min_size=2, max_size=2), min_size=1, max_size=12))
def test_slots_are_a_stable_sort_and_its_inverse(choices: list[list[int]]) -> None:
    chosen = torch.tensor(choices)
    slots = group_slots(chosen, 5)
    flat = chosen.flatten().tolist()
    assert slots.order_S.tolist() == sorted(range(len(flat)), key=lambda slot: flat[slot])  # sorted() is stable
    assert slots.order_S[slots.place_S].tolist() == list(range(len(flat)))
    assert slots.token_S.tolist() == [slot // 2 for slot in slots.order_S.tolist()]
    assert slots.ends_E.tolist() == [sum(choice <= expert for choice in flat) for expert in range(5)]
    assert slots.ends_E.dtype == torch.int32
