"""The learning rate: warm-up, stable, decay."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.optim.schedule import OptimConfig, learning_rate


def rates(config: OptimConfig, num_steps: int) -> list[float]:
    return [learning_rate(config, step, num_steps) for step in range(num_steps)]


def test_rises_holds_and_falls() -> None:
    config = OptimConfig(lr=2.0, warmup_steps=4, decay_fraction=0.5, final_lr_fraction=0.1)
    assert rates(config, 16) == pytest.approx(
        [0.5, 1.0, 1.5, 2.0] + [2.0] * 4 + [2.0 * (1 - 0.9 * done / 9) for done in range(1, 9)]
    )


def test_a_plain_linear_decay() -> None:
    config = OptimConfig(lr=1.0, decay_fraction=1.0)
    assert rates(config, 4) == pytest.approx([0.8, 0.6, 0.4, 0.2])


def test_no_decay_and_no_warmup_is_constant() -> None:
    assert rates(OptimConfig(lr=0.3, decay_fraction=0.0), 5) == [0.3] * 5


def test_the_square_root_falls_first() -> None:
    linear = OptimConfig(lr=1.0, decay_fraction=1.0)
    root = linear.replace(decay_shape="sqrt")
    assert all(low < high for low, high in zip(rates(root, 20), rates(linear, 20), strict=True))
    assert rates(root, 3) == pytest.approx([1 - 0.25**0.5, 1 - 0.5**0.5, 1 - 0.75**0.5])


@given(
    lr=st.floats(1e-6, 10),
    warmup=st.integers(0, 50),
    decay=st.floats(0, 1),
    final=st.floats(0, 1),
    shape=st.sampled_from(["linear", "sqrt"]),
    num_steps=st.integers(1, 200),
)
def test_bounds(lr: float, warmup: int, decay: float, final: float, shape: str, num_steps: int) -> None:
    config = OptimConfig.model_validate(
        {"lr": lr, "warmup_steps": warmup, "decay_fraction": decay, "final_lr_fraction": final, "decay_shape": shape}
    )
    values = rates(config, num_steps)
    assert all(0 < rate <= lr * (1 + 1e-12) for rate in values), "never above the peak, never a wasted step at zero"
    rising, falling = values[:warmup], values[warmup:]
    assert all(low < high for low, high in pairwise(rising))
    assert all(low >= high for low, high in pairwise(falling))
    assert all(rate >= lr * final * (1 - 1e-12) for rate in falling)


def test_half_the_steps_are_the_same_whatever_comes_after() -> None:
    """The stable phase does not know the length of the run: a longer run can branch off it."""
    config = OptimConfig(lr=1.0, warmup_steps=5, decay_fraction=0.2)
    assert rates(config, 100)[:80] == rates(config, 1000)[:80]
