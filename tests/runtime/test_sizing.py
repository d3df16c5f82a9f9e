"""The sizing rule, on lists of numbers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.runtime.sizing import Limits, Load, Meter, percentile, settled_size, target_size

LIMITS = Limits(min=1, max=50, utilisation=0.5, wait_aim_s=1.0, window_s=10.0, patience_s=5.0)


@pytest.mark.parametrize(
    ("rate", "service_s", "slots", "workers"),
    [(0.0, 1.0, 1, 1), (10.0, 0.5, 1, 10), (10.0, 0.51, 1, 11), (10.0, 0.5, 4, 3), (1000.0, 1.0, 1, 50)],
)
def test_a_quiet_queue_is_sized_by_littles_law(rate: float, service_s: float, slots: int, workers: int) -> None:
    limits = Limits(min=1, max=50, utilisation=0.5, slots=slots)
    for size in (1, 7, 50):
        assert target_size(Load(rate, service_s, 0.0, 0), size, limits) == workers


def test_who_waits_too_long_is_added_for() -> None:
    calm = Load(4.0, 0.5, p95_wait_s=1.0, num_waiting=20)
    late = Load(4.0, 0.5, p95_wait_s=1.1, num_waiting=20)
    assert target_size(calm, 4, LIMITS) == 4
    assert target_size(late, 4, LIMITS) == 2 + 10, "2 for the arrivals, 10 to do 20 x 0.5 s in 1 s"
    assert target_size(late, 30, LIMITS) == 31, "those there are do not suffice"
    assert target_size(Load(0.0, 0.0, 9.0, 3), 2, LIMITS) == 3, "nothing has ended yet"
    assert target_size(Load(4.0, 0.5, p95_wait_s=9.0, num_waiting=0), 4, LIMITS) == 4, "the queue is over"


@given(
    rate=st.floats(0, 1e4),
    service_s=st.floats(0, 1e3),
    wait_s=st.floats(0, 1e3),
    waiting=st.integers(0, 10_000),
    size=st.integers(0, 60),
)
def test_the_target_keeps_within_its_limits_and_never_below_the_law(
    rate: float, service_s: float, wait_s: float, waiting: int, size: int
) -> None:
    target = target_size(Load(rate, service_s, wait_s, waiting), size, LIMITS)
    assert LIMITS.min <= target <= LIMITS.max
    assert target == LIMITS.max or target * LIMITS.utilisation >= rate * service_s * (1 - 1e-6)


@pytest.mark.parametrize(
    ("targets", "settled"),
    [
        ([(99.0, 9)], 9),
        ([(99.0, 2)], 5),
        ([(94.0, 2), (96.0, 4), (99.0, 2)], 4),
        ([(94.0, 9), (96.0, 2), (99.0, 3)], 3),
        ([(94.0, 2), (96.0, 8), (99.0, 2)], 5),
    ],
)
def test_workers_go_after_a_time_of_patience_only(targets: list[tuple[float, int]], settled: int) -> None:
    assert settled_size(targets, size=5, now_s=100.0, patience_s=5.0) == settled


def test_the_percentile_is_the_nearest_rank() -> None:
    assert percentile([], 0.95) == 0.0
    assert percentile(range(1, 101), 0.95) == 95
    assert percentile([7.0], 0.5) == 7.0
    assert percentile([3, 1, 2], 1.0) == 3


def test_the_meter_forgets_what_left_its_window() -> None:
    meter = Meter(0.0, 10.0)
    for second in range(20):
        meter.arrive(float(second))
        meter.end(meter.begin(float(second), second + 0.25), second + 0.75)
    load = meter.load(20.0, [])
    assert load == Load(arrivals_per_s=1.0, mean_service_s=0.5, p95_wait_s=0.25, num_waiting=0)
    assert (meter.num_served, meter.busy_s) == (20, 10.0)
    assert meter.load(100.0, []) == Load(0.0, 0.0, 0.0, 0)


def test_the_meter_counts_those_who_are_not_done() -> None:
    meter = Meter(0.0, 10.0)
    meter.end(meter.begin(0.0, 0.0), 1.0)
    meter.begin(0.0, 1.0)
    load = meter.load(6.0, [2.0])
    assert math.isclose(load.mean_service_s, 3.0), "one took 1 s, the other has taken 5 s"
    assert (load.p95_wait_s, load.num_waiting) == (4.0, 1)
