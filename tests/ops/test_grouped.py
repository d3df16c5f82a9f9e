from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck
from torch.utils.flop_counter import FlopCounterMode

from stretto.ops import grouped
from stretto.ops.grouped import (
    Clamp,
    ExpertBiases,
    Experts,
    _Combine,
    _Gather,
    experts,
    group_multiple,
    group_slots,
    grouped_swiglu,
    swiglu,
)
from tests.ops.references import experts_reference

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
    actual = experts(x, chosen, gates, Experts(gate_up, down))
    expected = experts_reference(x, chosen, gates, gate_up, down)
    terms = 8 * chosen.numel()
    close(actual, expected, terms)
    upstream = torch.randn_like(actual)
    for ours, theirs in zip(
        torch.autograd.grad(actual, inputs, upstream), torch.autograd.grad(expected, inputs, upstream), strict=True
    ):
        close(ours, theirs, terms)


@pytest.mark.parametrize("name", CHOICES)
def test_groups_that_are_filled_up_give_what_the_others_give(
    name: str, close: Close, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs bit for bit: a product's rows are independent. Weights' gradients sum the same terms and zeros."""
    chosen = CHOICES[name]
    x, gates, gate_up, down = inputs = _inputs(chosen, 6)
    expected = experts_reference(x, chosen, gates, gate_up, down)
    upstream = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, inputs, upstream)
    for multiple in (1, 4, 16):
        monkeypatch.setattr(grouped, "group_multiple", lambda *_, multiple=multiple: multiple)
        actual = experts(x, chosen, gates, Experts(gate_up, down))
        close(actual, expected, 8 * chosen.numel())
        for ours, theirs in zip(torch.autograd.grad(actual, inputs, upstream), wanted, strict=True):
            close(ours, theirs, 8 * chosen.numel())


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize(("hidden", "width"), [(7, 4), (8, 3), (5, 9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_widths_that_torchs_kernel_does_not_take(
    name: str, hidden: int, width: int, dtype: torch.dtype, close: Close
) -> None:
    chosen = CHOICES[name]
    inputs = [tensor.detach().to(dtype).requires_grad_() for tensor in _inputs(chosen, 6, hidden, width)]
    x, gates, gate_up, down = inputs
    actual = experts(x, chosen, gates, Experts(gate_up, down))
    expected = experts_reference(x, chosen, gates, gate_up, down)
    close(actual, expected, 8 * chosen.numel())
    found, wanted = (torch.autograd.grad(y.sum(), inputs) for y in (actual, expected))
    for ours, theirs in zip(found, wanted, strict=True):
        close(ours, theirs, 8 * chosen.numel())


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("multiple", [1, 16])
@pytest.mark.parametrize("biased", [False, True])
def test_biases_and_clamps_equal_the_reference(
    name: str, multiple: int, biased: bool, close: Close, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = CHOICES[name]
    x, gates, gate_up, down = _inputs(chosen, 6)
    generator = torch.Generator().manual_seed(2)
    shapes = ((6, gate_up.shape[1]), (6, down.shape[1]))
    biases = ExpertBiases(*(torch.randn(shape, generator=generator).requires_grad_() for shape in shapes))
    inputs = [x, gates, gate_up, down, *(biases if biased else ())]
    more = (biases if biased else None, Clamp(alpha=1.7, limit=0.5))
    expected = experts_reference(x, chosen, gates, gate_up, down, *more)
    monkeypatch.setattr(grouped, "group_multiple", lambda *_: multiple)
    actual = experts(x, chosen, gates, Experts(gate_up, down, *more))
    close(actual, expected, 8 * chosen.numel())
    upstream = torch.randn_like(actual)
    found, wanted = (torch.autograd.grad(y, inputs, upstream) for y in (actual, expected))
    for ours, theirs in zip(found, wanted, strict=True):
        close(ours, theirs, 8 * chosen.numel())


def test_frozen_experts_cost_neither_the_work_nor_the_memory_of_a_gradient() -> None:
    """Two thirds of what training costs, and nothing as large as the weights is made."""
    chosen = CHOICES["even"]
    products, largest = {}, {}
    for frozen in (False, True):
        x, gates, gate_up, down = _inputs(chosen, 6)
        gate_up.requires_grad_(not frozen), down.requires_grad_(not frozen)
        sizes: list[int] = []

        def multiply(a: tuple[int, ...], b: tuple[int, ...], *_: Any, sizes: list[int] = sizes, **more: Any) -> int:
            sizes.append(math.prod(more["out_shape"]))
            return 2 * a[0] * a[1] * b[-1]

        with FlopCounterMode(display=False, custom_mapping={torch.ops.aten._grouped_mm: multiply}) as counter:
            experts(x, chosen, gates, Experts(gate_up, down)).sum().backward()
        products[frozen], largest[frozen] = counter.get_total_flops(), max(sizes[2:])
        assert x.grad is not None and gates.grad is not None and (gate_up.grad is None) == (down.grad is None) == frozen
    assert 3 * products[True] == 2 * products[False]
    assert largest[False] == 6 * 8 * 8 and largest[True] == chosen.numel() * 8


def test_a_clamped_swiglu_written_out() -> None:
    """gate and up on both sides of the limit; the gate is cut from above alone."""
    clamp = Clamp(alpha=2.0, limit=1.5)
    for gate in (-4.0, -1.0, 0.3, 2.0):
        for up in (-3.0, 0.5, 1.6):
            g, u = min(gate, 1.5), max(-1.5, min(up, 1.5))
            expected = g / (1 + math.exp(-2.0 * g)) * (u + 1)
            both = torch.tensor([[gate, up]])
            assert swiglu(both, clamp).item() == pytest.approx(expected, rel=1e-6)


def test_only_bf16_on_a_cpu_is_filled_up() -> None:
    x = torch.zeros(1)
    assert group_multiple(x, 1000) == 1
    with torch.autocast("cpu", torch.bfloat16):
        assert [group_multiple(x, mean) for mean in (1, 300, 10_000)] == [16, 32, 64]


def test_bf16_experts_equal_those_that_are_not_filled_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the reference in fp32, filling up makes bf16 no worse; errors of both are of the same roundings."""
    torch.manual_seed(0)
    chosen = torch.rand(64, 6).topk(2).indices
    inputs = _inputs(chosen, 6, hidden=32, width=16)
    expected = experts_reference(inputs[0], chosen, *inputs[1:])
    upstream = torch.randn_like(expected)
    wanted = (expected, *torch.autograd.grad(expected, inputs, upstream))
    errors = {}
    for name, multiple in (("filled", group_multiple), ("exact", lambda *_: 1)):
        monkeypatch.setattr(grouped, "group_multiple", multiple)
        with torch.autocast("cpu", torch.bfloat16):
            actual = experts(inputs[0], chosen, inputs[1], Experts(*inputs[2:]))
        found = (actual, *torch.autograd.grad(actual, inputs, upstream.to(actual.dtype)))
        errors[name] = [
            float((ours.detach() - theirs).norm() / theirs.norm()) for ours, theirs in zip(found, wanted, strict=True)
        ]
    for filled, exact in zip(errors["filled"], errors["exact"], strict=True):
        assert filled <= 1.1 * exact <= 8 * torch.finfo(torch.bfloat16).eps, errors


def test_an_empty_expert_has_a_gradient_of_zero() -> None:
    chosen = CHOICES["empty experts"]
    x, gates, gate_up, down = _inputs(chosen, 6)
    experts(x, chosen, gates, Experts(gate_up, down)).square().sum().backward()
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
    assert gradcheck(lambda x: _Gather.apply(x, slots.token_P, slots.place_S, num_chosen), (x,))
    assert gradcheck(lambda y: _Combine.apply(y, slots.place_S, slots.token_P, num_chosen), (y,))


def test_a_token_does_not_feel_its_neighbours(close: Close) -> None:
    chosen = CHOICES["even"]
    x, gates, gate_up, down = _inputs(chosen, 6)
    together = experts(x, chosen, gates, Experts(gate_up, down))
    for token in range(len(chosen)):
        part = slice(token, token + 1)
        close(experts(x[part], chosen[part], gates[part], Experts(gate_up, down))[0], together[token], 8)


def test_gates_of_slots_multiply_their_outputs(close: Close) -> None:
    torch.manual_seed(0)
    x, gates = torch.randn(6, 8), torch.randn(6)
    gate_up, down, ends = torch.randn(2, 8, 8), torch.randn(2, 8, 4), torch.tensor([2, 6], dtype=torch.int32)
    plain = grouped_swiglu(x, ends, Experts(gate_up, down))
    close(grouped_swiglu(x, ends, Experts(gate_up, down), gates), plain * gates[:, None], 8)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(st.integers(0, 4), min_size=2, max_size=2), min_size=1, max_size=12))
def test_slots_are_a_stable_sort_and_its_inverse(choices: list[list[int]]) -> None:
    chosen = torch.tensor(choices)
    slots = group_slots(chosen, 5)
    flat = chosen.flatten().tolist()
    assert slots.order_P.tolist() == sorted(range(len(flat)), key=lambda slot: flat[slot])  # sorted() is stable
    assert slots.order_P[slots.place_S].tolist() == list(range(len(flat)))
    assert slots.token_P.tolist() == [slot // 2 for slot in slots.order_P.tolist()]
    assert slots.ends_E.tolist() == [sum(choice <= expert for choice in flat) for expert in range(5)]
    assert slots.ends_E.dtype == torch.int32
    filled = group_slots(chosen, 5, 4)
    assert filled.order_P[filled.place_S].tolist() == list(range(len(flat)))
    assert filled.real_P is not None
    assert filled.order_P[filled.real_P].tolist() == slots.order_P.tolist()
    counts = filled.ends_E.diff(prepend=torch.zeros(1, dtype=torch.int32)).tolist()
    assert counts == [-(-flat.count(expert) // 4) * 4 for expert in range(5)]
