from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stretto.data.shuffle import key_of, mix, permute


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
def test_permute_is_a_bijection_that_needs_no_neighbours(size: int, key: int) -> None:
    whole = permute(np.arange(size), size, key)
    assert sorted(whole) == list(range(size))
    some = np.arange(size)[:: max(size // 7, 1)]
    assert (permute(some, size, key) == whole[some]).all()


def test_keys_give_unlike_orders() -> None:
    size = 10_000
    orders = [permute(np.arange(size), size, key_of(seed, epoch)) for seed in range(3) for epoch in range(3)]
    orders.append(np.arange(size))
    for index, one in enumerate(orders):
        for other in orders[:index]:
            # The correlation of independent orders has a standard deviation of 1/sqrt(size) = 0.01.
            assert abs(np.corrcoef(one, other)[0, 1]) < 0.05
            assert (one == other).sum() < 12  # Poisson with mean 1


def test_streams_never_change() -> None:
    """Values in use: a change here would reshuffle every run that resumes."""
    assert int(mix(np.zeros(1, np.uint64))[0]) == 0xE220A8397B1DCDAF  # SplitMix64's first output for seed 0
    assert key_of(1, 2) != key_of(2, 1) != key_of(1, 2, 0)
    assert permute(np.arange(8), 8, 0).tolist() == [4, 5, 7, 2, 0, 1, 3, 6]
