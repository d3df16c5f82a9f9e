"""Comparison with a reference under a bound that is derived, not tuned."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

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
