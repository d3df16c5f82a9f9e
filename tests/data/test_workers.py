from __future__ import annotations

import operator
import os
from functools import partial

import pytest

from stretto.data.workers import in_order


@pytest.mark.parametrize("processes", [1, 3])
def test_results_come_in_the_order_of_the_work(processes: int) -> None:
    results: list[int] = []
    with in_order(processes, partial(operator.mul, 2), results.append) as submit:
        for number in range(20):
            submit(number)
    assert results == list(range(0, 40, 2))


@pytest.mark.parametrize("processes", [1, 2])
def test_what_a_worker_raises_is_raised_here(processes: int) -> None:
    results: list[float] = []
    with pytest.raises(ZeroDivisionError), in_order(processes, partial(operator.truediv, 2), results.append) as submit:
        for number in (1, 2, 0):
            submit(number)
    assert results == [2, 1]


def test_a_worker_that_dies_is_told() -> None:
    with pytest.raises(RuntimeError, match="a worker process died"), in_order(2, os._exit, print) as submit:
        submit(3)
