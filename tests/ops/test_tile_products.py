"""Training's products in bf16 by the kernels (AMX or AVX512_BF16): against torch in fp64 on rounded operands, and through whole layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from stretto.ops import moe, operators
from stretto.ops.grouped import Clamp, Experts
from stretto.ops.logprob import head_loss
from stretto.ops.native import training
from tests.ops.test_training import CHOICES, SHAPES, WIDTHS, heads, layer, masks, passes

Close = Callable[[Tensor, Tensor, int], None]
EPS = 2.0**-8
"""Largest relative error of rounding to bf16."""


@pytest.fixture(autouse=True)
def bf16_kernels(library: object) -> None:
    if not training.has_bf16_kernels():
        pytest.skip("no bf16 products (AMX, AVX512_BF16)")


@pytest.fixture(autouse=True)
def autocast() -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16):
        yield


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def by_column(x: Tensor) -> Tensor:
    """The same matrix, with the numbers of a column side by side."""
    return x.t().contiguous().t()


# whole tiles, parts of tiles, one number, several parts of depth, and several panels of rows
@pytest.mark.parametrize("sizes", [(64, 64, 96), (33, 65, 47), (1, 1, 1), (17, 2100, 5), (1100, 40, 20)])
def test_a_product_rounds_its_operands_and_sums_in_fp32(
    sizes: tuple[int, int, int], close: Close, threads: Callable[[int], None]
) -> None:
    rows, depth, columns = sizes
    a, b = random(rows, depth), random(depth, columns, seed=1)
    expected = a.bfloat16().double() @ b.bfloat16().double()
    threads(2)
    found = training.product(a, b)
    close(found, expected, depth)
    threads(1)
    for left in (a, by_column(a)):
        for right in (b, by_column(b)):
            assert torch.equal(training.product(left, right), found)
    total = random(rows, columns, seed=2)
    close(training.product(a, b, total.clone(), adds=True), total + expected, depth)


def test_an_empty_product() -> None:
    assert training.product(torch.ones(0, 4), torch.ones(4, 3)).shape == (0, 3)
    assert not training.product(torch.ones(2, 0), torch.ones(0, 3)).any()
    assert training.product(torch.ones(2, 0), torch.ones(0, 3), torch.ones(2, 3), adds=True).all()


def test_a_row_of_a_product_does_not_depend_on_the_others() -> None:
    a, b = random(300, 70), random(70, 50, seed=1)
    assert torch.equal(training.product(a, b)[123:124], training.product(a[123:124], b))


def relative(found: Tensor, expected: Tensor) -> float:
    """Norm of the error over that of the expected values."""
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm().clamp_min(1e-300))


def test_a_linear_layer_and_its_gradients() -> None:
    inputs = [
        random(2, 30, 40).requires_grad_(),
        random(50, 40, seed=1).requires_grad_(),
        random(50, seed=2).requires_grad_(),
    ]
    upstream = random(2, 30, 50, seed=3)
    assert training.rounds(*inputs[:2])
    found = operators.ORDINARY.linear(*inputs)
    wide = [each.detach().double().requires_grad_() for each in inputs]
    with torch.autocast("cpu", enabled=False):
        expected = torch.nn.functional.linear(*wide)
    grads = zip(
        torch.autograd.grad(found, inputs, upstream),
        torch.autograd.grad(expected, wide, upstream.double()),
        strict=True,
    )
    for ours, theirs in ((found, expected), *grads):
        assert ours.dtype == torch.float32 and relative(ours, theirs) < EPS


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("chosen", CHOICES.values(), ids=CHOICES)
def test_experts_and_their_gradients(chosen: Tensor, widths: tuple[int, int], threads: Callable[[int], None]) -> None:
    """Against the kernels in fp32: each product rounds both operands, and at most three follow one another. A gate's gradient is a sum of
    terms that cancel each other, so that those of a few tokens alone may be far off."""
    inputs = layer(chosen, *widths)
    x, gates, gate_up, down = inputs
    upstream = torch.ones_like(x).cumsum(-1).sin()

    def passes(backend: str | None) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=backend is None):
            out = moe.experts(x, chosen, gates, Experts(gate_up, down), backend)
        return [out, *torch.autograd.grad(out, inputs, upstream)]

    threads(2)
    found = passes(None)
    for ours, theirs in zip(found, passes("native"), strict=True):
        assert ours.dtype == torch.float32
        assert relative(ours, theirs) < (1 if theirs.shape == gates.shape and gates.numel() < 10 else 3 * EPS)
        assert theirs.numel() < 100 or not theirs.any() or not torch.equal(ours, theirs)  # rounding was in effect
    threads(1)
    assert all(torch.equal(one, two) for one, two in zip(passes(None), found, strict=True))


@pytest.mark.parametrize("kind", masks(1, 1))
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_attention_and_its_gradients(shape: tuple[int, ...], kind: str, threads: Callable[[int], None]) -> None:
    """Against the kernels in fp32: at most three products follow one another, each of which rounds both operands, and a probability's
    relative error is the absolute one of its score."""
    B, _, _, T, _ = shape
    qkv, mask = heads(*shape), masks(B, T)[kind]
    threads(2)
    found = passes(qkv, mask)
    with torch.autocast("cpu", enabled=False):
        expected = passes(qkv, mask)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == torch.float32
        assert relative(ours, theirs) < 4 * EPS and not torch.equal(ours, theirs)
    threads(1)
    assert all(torch.equal(one, two) for one, two in zip(passes(qkv, mask), found, strict=True))


def test_the_head_and_its_gradients() -> None:
    inputs = [random(70, 24).requires_grad_(), random(90, 24, seed=1).requires_grad_()]
    targets = torch.arange(70) % 90
    loss, nll = head_loss(*inputs, targets)
    grads = torch.autograd.grad(loss, inputs)
    with torch.autocast("cpu", enabled=False):
        expected, wanted = head_loss(*inputs, targets)
        for ours, theirs in zip((nll, *grads), (wanted, *torch.autograd.grad(expected, inputs)), strict=True):
            assert relative(ours, theirs) < 3 * EPS and not torch.equal(ours, theirs)


def test_experts_without_tokens() -> None:
    inputs = [random(*shape).requires_grad_() for shape in ((0, 16), (0, 2), (3, 8, 16), (3, 16, 4))]
    x, gates, gate_up, down = inputs
    out = moe.experts(x, torch.zeros(0, 2, dtype=torch.int64), gates, Experts(gate_up, down))
    assert out.shape == (0, 16)
    for grad, tensor in zip(torch.autograd.grad(out.sum(), inputs), inputs, strict=True):
        assert torch.equal(grad, torch.zeros_like(tensor))


def test_what_the_bf16_kernels_do_not_multiply() -> None:
    x, weight = torch.ones(3, 4), torch.ones(5, 4)
    assert training.rounds(x, weight)
    assert not training.rounds(x, weight.bfloat16()) and not training.rounds(x.double(), weight)
    with torch.autocast("cpu", enabled=False):
        assert not training.rounds(x, weight)
    with torch.autocast("cpu", torch.float16):
        assert not training.rounds(x, weight)
    clamped = Experts(torch.ones(2, 6, 4), torch.ones(2, 4, 3), clamp=Clamp(1.7, 7.0))
    assert moe.experts(x, torch.tensor([[0], [1], [1]]), torch.ones(3, 1), clamped).dtype == torch.bfloat16
