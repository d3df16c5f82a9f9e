from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from stretto.ops.operators import rms_norm, rms_norm_reference

Close = Callable[[Tensor, Tensor, int], None]


@pytest.mark.parametrize("shape", [(1, 8), (5, 3, 64), (2, 7, 6, 32)])
@pytest.mark.parametrize("per_head", [False, True])
def test_equals_the_reference(shape: tuple[int, ...], per_head: bool, close: Close) -> None:
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


def test_gradients_are_those_of_finite_differences() -> None:
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
