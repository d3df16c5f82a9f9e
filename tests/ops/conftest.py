"""What tests of the operators share: the compiled kernels, and a comparison under a bound that is derived, not tuned."""

from __future__ import annotations

import ctypes
import math
import shutil
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from stretto.ops.native import load

Close = Callable[[Tensor, Tensor, int], None]


@pytest.fixture
def close() -> Close:
    """``close(actual, expected, length)``: equal up to the rounding of sums of ``length`` terms.

    Rounding errors of such a sum are a random walk, of √length units in the last place of its largest partial sums,
    for which the largest expected value stands. Eight of these cover the tails and the two sides' own roundings.
    """

    def check(actual: Tensor, expected: Tensor, length: int) -> None:
        assert actual.shape == expected.shape, f"{tuple(actual.shape)} is not {tuple(expected.shape)}"
        assert torch.isfinite(actual).all()
        unit = torch.finfo(actual.dtype).eps * max(1e-6, float(expected.detach().abs().max()))
        worst = float((actual.detach().double() - expected.detach().double()).abs().max())
        assert worst <= 8 * math.sqrt(length) * unit, f"{worst:.3g} over {8 * math.sqrt(length) * unit:.3g}"

    return check


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets torch's number of threads, for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def library() -> ctypes.CDLL:
    """The compiled kernels. With a compiler, they must have been built."""
    if not shutil.which("g++") and not shutil.which("clang++"):
        pytest.skip("no C++ compiler")
    handle = load().handle
    assert handle is not None, load().reason
    return handle
