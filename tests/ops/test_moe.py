from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from stretto.ops import moe
from stretto.ops.grouped import Clamp, ExpertBiases, Experts, gated_outputs, group_multiple, most_places
from stretto.ops.moe import experts
from stretto.ops.native import training
from tests.ops.references import experts_reference

Close = Callable[[Tensor, Tensor, int], None]


@pytest.fixture(autouse=True)
def backend_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled kernels, which compute in another order, are tested in test_training.py."""
    monkeypatch.setattr(training, "library", lambda: None)


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
        monkeypatch.setattr(moe, "group_multiple", lambda *_, multiple=multiple: multiple)
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
    monkeypatch.setattr(moe, "group_multiple", lambda *_: multiple)
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
        monkeypatch.setattr(moe, "group_multiple", multiple)
        with torch.autocast("cpu", torch.bfloat16):
            actual = experts(inputs[0], chosen, inputs[1], Experts(*inputs[2:]))
        found = (actual, *torch.autograd.grad(actual, inputs, upstream.to(actual.dtype)))
        errors[name] = [
            float((ours.detach() - theirs.detach()).norm() / theirs.detach().norm())
            for ours, theirs in zip(found, wanted, strict=True)
        ]
    for filled, exact in zip(errors["filled"], errors["exact"], strict=True):
        assert filled <= 1.1 * exact <= 8 * torch.finfo(torch.bfloat16).eps, errors


def test_without_tokens_all_gradients_are_zero() -> None:
    """A rank whose experts no token of any rank has chosen."""
    chosen = torch.empty(0, 2, dtype=torch.int64)
    x, gates, gate_up, down = inputs = _inputs(chosen, 6)
    actual = experts(x, chosen, gates, Experts(gate_up, down))
    assert actual.shape == (0, 8)
    for grad, tensor in zip(torch.autograd.grad(actual.sum(), inputs), inputs, strict=True):
        assert torch.equal(grad, torch.zeros_like(tensor))


def test_an_empty_expert_has_a_gradient_of_zero() -> None:
    chosen = CHOICES["empty experts"]
    x, gates, gate_up, down = _inputs(chosen, 6)
    experts(x, chosen, gates, Experts(gate_up, down)).square().sum().backward()
    for weight in (gate_up, down):
        assert weight.grad is not None
        assert weight.grad[[1, 5]].any(-1).any(-1).all()
        assert not weight.grad[[0, 2, 3, 4]].any()


def test_a_token_does_not_feel_its_neighbours(close: Close) -> None:
    chosen = CHOICES["even"]
    x, gates, gate_up, down = _inputs(chosen, 6)
    together = experts(x, chosen, gates, Experts(gate_up, down))
    for token in range(len(chosen)):
        part = slice(token, token + 1)
        close(experts(x[part], chosen[part], gates[part], Experts(gate_up, down))[0], together[token], 8)


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("clamp", [None, Clamp(alpha=1.7, limit=0.5)])
@pytest.mark.parametrize("multiple", [1, 4])
def test_gradients_are_those_of_finite_differences(
    name: str, clamp: Clamp | None, multiple: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a gate is 0, as for a choice that a rollout's routes do not have."""
    chosen, generator = CHOICES[name][:4], torch.Generator().manual_seed(3)
    monkeypatch.setattr(moe, "group_multiple", lambda *_: multiple)
    shapes = ((len(chosen), 3), chosen.shape, (6, 4, 3), (6, 3, 2), (6, 4), (6, 3))
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    inputs[1][0, -1] = 0.0

    def compute(x: Tensor, gates: Tensor, gate_up: Tensor, down: Tensor, *biases: Tensor) -> Tensor:
        return experts(x, chosen, gates, Experts(gate_up, down, ExpertBiases(*biases) if biases else None, clamp))

    for some in (inputs[:4], inputs):
        assert gradcheck(compute, [each.requires_grad_() for each in some], fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_kept_for_the_backward_pass(dtype: torch.dtype) -> None:
    """Inputs, gates, weights, gate-up outputs and indices: no gathered rows, no outputs of experts."""
    chosen = torch.rand(64, 6, generator=torch.Generator().manual_seed(0)).topk(2).indices
    x, gates, gate_up, down = (each.detach().to(dtype).requires_grad_() for each in _inputs(chosen, 6, 32, 16))
    kept: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        y = experts(x, chosen, gates, Experts(gate_up, down))
    places = most_places(128, 6, group_multiple(x.device, dtype, 128 / 6))
    limit = places * (32 * x.itemsize + 2 * 8) + (128 * 8 + 6 * 4)  # gate-up outputs; slots, tokens, places, ends
    given = {each.untyped_storage().data_ptr() for each in (x, gates, gate_up, down)}
    made = [each for address, each in kept.items() if address not in given]
    assert sum(each.untyped_storage().nbytes() for each in made) <= limit
    y.sum().backward()
    assert x.grad is not None and torch.isfinite(x.grad).all()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_in_one_piece_it_computes_the_same(dtype: torch.dtype) -> None:
    """With bf16 on a CPU, padding fills all places that could be needed. Outputs, and gradients of inputs and gates, to the bit."""
    chosen = CHOICES["empty experts"]
    inputs = [each.detach().to(dtype).requires_grad_() for each in _inputs(chosen, 6)]

    def compute(x: Tensor, gates: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        return experts(x * 2, chosen, gates, Experts(gate_up, down))

    found, wanted = torch.compile(compute, backend="aot_eager", fullgraph=True)(*inputs), compute(*inputs)
    assert torch.equal(found, wanted)
    ours, theirs = (torch.autograd.grad(y.square().sum(), inputs) for y in (found, wanted))
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)


def test_terms_of_the_output() -> None:
    chosen = CHOICES["even"]
    x, gates, gate_up, down = _inputs(chosen, 6)
    terms_NKD = gated_outputs(x, chosen, gates, Experts(gate_up, down))
    assert torch.equal(terms_NKD.sum(1), experts(x, chosen, gates, Experts(gate_up, down)))
