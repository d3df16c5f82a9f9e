"""Products by oneDNN, wherever torch contains it, against fp64; and which products are left to torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.ops.native import products
from stretto.ops.native.training import has_bf16_kernels

Close = Callable[[Tensor, Tensor, int], None]


@pytest.fixture(autouse=True)
def onednn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """All products that are large enough are oneDNN's; returns the shapes of the results so far."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("torch was built without oneDNN")
    found: list[tuple[int, ...]] = []
    compute = products._onednn

    def recorded(*operands: Tensor) -> Tensor:
        y_NF = compute(*operands)
        found.append(tuple(y_NF.shape))
        return y_NF

    monkeypatch.setattr(products, "has_fast_onednn", lambda: True)
    monkeypatch.setattr(products, "LEAST", 1000)
    monkeypatch.setattr(products, "_onednn", recorded)
    return found


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", [(37, 20), (3, 11, 20)], ids=["rows", "batch"])
def test_a_linear_layer_and_its_gradients_equal_fp64(
    shape: tuple[int, ...], with_bias: bool, onednn: list[tuple[int, ...]], close: Close
) -> None:
    inputs = [normal(*shape[:-1], 3, 20, seed=1)[..., 1, :], normal(33, 20, seed=2)]  # rows that lie apart
    inputs += [normal(33, seed=3)] if with_bias else []
    wide = [x.double().requires_grad_() for x in inputs]
    own = [x.requires_grad_() for x in inputs]
    y, expected = products.linear(*own), F.linear(*wide)
    upstream = normal(*y.shape, seed=4)
    close(y, expected, 20)
    for ours, theirs in zip(
        torch.autograd.grad(y, own, upstream), torch.autograd.grad(expected, wide, upstream.double()), strict=True
    ):
        close(ours, theirs, 37)
    assert len(onednn) == 3


def test_a_gradient_without_memory_of_its_own_is_taken(onednn: list[tuple[int, ...]], close: Close) -> None:
    x, weight = normal(40, 20).requires_grad_(), normal(33, 20, seed=1).requires_grad_()
    products.linear(x, weight).sum().backward()  # the gradient of a sum is one number, repeated
    assert x.grad is not None and weight.grad is not None and len(onednn) == 3
    close(x.grad, weight.double().sum(0).expand(40, 20), 33)
    close(weight.grad, x.double().sum(0).expand(33, 20), 40)


@pytest.mark.parametrize("shape", [(50, 7, 9), (9, 7, 50)], ids=["tall", "wide"])
def test_products_go_into_given_memory_in_pieces(
    shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch, onednn: list[tuple[int, ...]], close: Close
) -> None:
    monkeypatch.setattr(products, "PIECE_BYTES", 4 * 9 * 16)
    M, K, N = shape
    a, b, total = normal(K, M).t(), normal(K, N, seed=1), normal(M, N, seed=2)
    expected = a.double() @ b.double()
    close(products.product(a, b), expected, K)
    out = torch.full((M, N), torch.nan)
    assert products.product(a, b, out) is out
    close(out, expected, K)
    added = total.clone()
    products.add_product_(added, a, b)
    close(added, total + expected, K)
    assert [max(each) for each in onednn] == [50, 16, 16, 16, 9, 16, 16, 16, 9]


def test_other_products_are_left_to_torch(onednn: list[tuple[int, ...]]) -> None:
    x, weight = normal(40, 20), normal(33, 20)
    products.linear(x[:1], weight)
    products.linear(x.double(), weight.double())
    with torch.autocast("cpu", torch.bfloat16):
        in_bf16 = products.linear(x, weight)  # by the kernels, if they multiply in bf16, with a result in fp32
    assert in_bf16.dtype == (torch.float32 if has_bf16_kernels() else torch.bfloat16)
    assert torch.equal(torch.compile(products.linear, backend="eager")(x, weight), F.linear(x, weight))
    assert products.linear(x[:0], weight).shape == (0, 33)
    assert not onednn
