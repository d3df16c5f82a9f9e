"""The compiled norm, rotation and softmax of training against torch in fp64, and against themselves with other numbers of threads."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from stretto.ops import operators
from stretto.ops.logprob import _softmax_
from stretto.ops.native import rows, training

Close = Callable[[Tensor, Tensor, int], None]
pytestmark = pytest.mark.usefixtures("library")


def with_both(threads: Callable[[int], None], compute: Callable[[], list[Tensor]]) -> list[Tensor]:
    """Results of ``compute``, which must be equal for one and two threads."""
    threads(2)
    found = compute()
    threads(1)
    assert all(torch.equal(one, two) for one, two in zip(compute(), found, strict=True))
    return found


# rows that do not divide into blocks, widths that no vector divides, and one row
@pytest.mark.parametrize("shape", [(3, 50, 64), (131, 20), (2, 7, 4, 9), (1, 33)])
def test_a_norm_and_its_gradients_equal_torch_in_fp64(
    shape: tuple[int, ...], close: Close, threads: Callable[[int], None]
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, upstream = (torch.randn(each, generator=generator) for each in (shape, shape[-1:], shape))
    x[0] = 0.0
    inputs = x.requires_grad_(), weight.requires_grad_()
    assert rows.norms(x, weight)

    def passes() -> list[Tensor]:
        out = operators.rms_norm(x, weight, 1e-6)
        return [out, *torch.autograd.grad(out, inputs, upstream)]

    wide = [each.detach().double().requires_grad_() for each in inputs]
    expected = wide[0] * torch.rsqrt(wide[0].pow(2).mean(-1, keepdim=True) + 1e-6) * wide[1]
    wanted = [expected, *torch.autograd.grad(expected, wide, upstream.double())]
    for ours, theirs in zip(with_both(threads, passes), wanted, strict=True):
        close(ours, theirs, x.numel())


def test_a_norm_whose_weight_is_frozen() -> None:
    x, weight = torch.randn(5, 8, requires_grad=True), torch.ones(8)
    assert torch.isfinite(torch.autograd.grad(operators.rms_norm(x, weight, 1e-6).sum(), x)[0]).all()


@pytest.mark.parametrize(("width", "pairs"), [(32, 16), (20, 7), (9, 4), (64, 0)])
def test_a_rotation_and_its_gradient_equal_torch_in_fp64(
    width: int, pairs: int, close: Close, threads: Callable[[int], None]
) -> None:
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(2, 11, 5, width, generator=generator)
    x = whole[:, :, :3].requires_grad_()  # a part of a projection, as in a network
    upstream = torch.randn(2, 3, 11, width, generator=generator).transpose(1, 2)
    angle = torch.rand(2, 11, pairs, generator=generator)
    tables = angle.cos(), angle.sin()
    if pairs:
        assert rows.rotates(x, *tables)

    def passes() -> list[Tensor]:
        out = operators.rotate(x, *tables)
        return [out, *torch.autograd.grad(out, x, upstream)]

    wide = x.detach().double().requires_grad_()
    expected = operators.rotate(wide, *(each.double() for each in tables))
    wanted = [expected, *torch.autograd.grad(expected, wide, upstream.double())]
    for ours, theirs in zip(with_both(threads, passes), wanted, strict=True):
        close(ours, theirs, 2)


@pytest.mark.parametrize("width", [1, 9, 64, 1000])
def test_a_softmax_equals_torch_in_fp64(width: int, close: Close, threads: Callable[[int], None]) -> None:
    logits = 20 * torch.randn(37, width, generator=torch.Generator().manual_seed(0))
    kept = (torch.arange(37) % 3 != 0)[:, None]
    assert rows.softmaxes(logits)

    def passes() -> list[Tensor]:
        probs = logits.clone()
        return [_softmax_(probs, kept), probs]

    lse, probs = with_both(threads, passes)
    close(lse, logits.double().logsumexp(-1, keepdim=True), width)
    close(probs, logits.double().softmax(-1) * kept, width)
    assert not probs[::3].any()


def test_other_rows_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, angle = torch.ones(2, 3, 4, 8), torch.ones(8), torch.ones(2, 3, 4)
    assert rows.norms(x, weight) and rows.rotates(x, angle, angle) and rows.softmaxes(x[0, 0])
    assert not rows.norms(x, torch.ones(4, 8)) and not rows.norms(x.double(), weight.double())
    assert not rows.rotates(x, angle[:1], angle[:1]) and not rows.rotates(x.transpose(2, 3), angle, angle)
    assert not rows.softmaxes(x[0, 0].t()) and not rows.softmaxes(x[0, 0].bfloat16())
    monkeypatch.setattr(training, "library", lambda: None)
    assert not rows.norms(x, weight) and not rows.rotates(x, angle, angle) and not rows.softmaxes(x[0, 0])


def test_records_have_the_sizes_of_the_library() -> None:
    handle = training.library()
    assert handle is not None
    records = training.RECORDS + rows.RECORDS
    sizes = (ctypes.c_int32 * len(records))()
    handle.stretto_training_sizes(sizes)
    assert list(sizes) == [ctypes.sizeof(kind) for kind in records]
