"""Oldest first, the window, and what dropping and taking do to both."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.rl.buffer import Buffer
from tests.rl.refs import ref


def filled(num: int, ready: set[int]) -> Buffer:
    buffer = Buffer()
    for ordinal in range(num):
        buffer.add(ordinal)
    for ordinal in sorted(ready, reverse=True):
        buffer.put(ref(ordinal))
    return buffer


def chosen(buffer: Buffer, num: int, window: int) -> list[int] | None:
    refs = buffer.choose(num, window)
    return None if refs is None else [each.ordinal for each in refs]


def test_a_plain_queue_waits_for_its_oldest() -> None:
    buffer = filled(6, {0, 2, 3, 4, 5})
    assert chosen(buffer, 1, window=1) == [0]
    assert chosen(buffer, 2, window=1) is None
    buffer.put(ref(1))
    assert chosen(buffer, 2, window=1) == [0, 1]


def test_a_window_lets_others_by_and_stops_when_they_were_enough() -> None:
    buffer = filled(8, {1, 2, 3, 4, 5, 6, 7})
    assert chosen(buffer, 2, window=2) is None
    assert chosen(buffer, 2, window=3) == [1, 2]
    buffer.take(0, [1, 2])
    assert buffer.num_overtaken(0) == 2
    assert chosen(buffer, 2, window=4) is None, "one more may pass, not two"
    assert chosen(buffer, 2, window=5) == [3, 4]


def test_the_window_holds_for_those_behind_the_oldest_too() -> None:
    buffer = filled(6, {0, 1, 3, 4, 5})
    assert chosen(buffer, 3, window=1) is None
    assert chosen(buffer, 3, window=2) == [0, 1, 3]
    assert chosen(buffer, 4, window=2) is None


def test_dropped_groups_do_not_use_the_window_up() -> None:
    buffer = filled(6, {1, 2, 3, 4})
    buffer.drop(1)
    buffer.drop(2)
    assert chosen(buffer, 2, window=3) == [3, 4]
    buffer.drop(0)
    assert chosen(buffer, 2, window=1) == [3, 4]
    assert len(buffer) == 3


def test_places_count_what_is_in_training() -> None:
    buffer = filled(5, {0, 1, 3})
    assert buffer.waiting() == [(2, 2), (4, 4)]
    buffer.take(0, [0, 3])
    assert buffer.waiting() == [(2, 3), (4, 4)]
    assert (len(buffer), buffer.num_ready, buffer.num_taken, buffer.ordinals()) == (5, 1, 2, [0, 1, 2, 3, 4])
    assert [each.ordinal for each in buffer.trained(0)] == [0, 3]
    assert buffer.waiting() == [(2, 1), (4, 2)] and len(buffer) == 3


def test_counts_before_the_batches_in_training_are_remembered() -> None:
    buffer = filled(4, {1, 3})
    buffer.take(0, [1])
    buffer.add(4)
    buffer.add(5)
    buffer.put(ref(5))
    buffer.take(1, [5])
    assert [buffer.num_overtaken(ordinal) for ordinal in (0, 2, 3, 4)] == [2, 1, 1, 1]
    before = buffer.overtaken()
    assert [before[ordinal] for ordinal in (0, 1, 2, 3, 4)] == [0, 0, 0, 0, 0]
    buffer.trained(0)
    before = buffer.overtaken()
    assert [before[ordinal] for ordinal in (0, 2, 3, 4)] == [1, 0, 0, 0]


def test_a_group_is_added_in_order_and_ready_once() -> None:
    buffer = filled(2, {1})
    with pytest.raises(AssertionError, match="ready twice"):
        buffer.put(ref(1))
    with pytest.raises(AssertionError, match="does not wait"):
        buffer.put(ref(2))
    with pytest.raises(AssertionError, match="added after"):
        buffer.add(1)


@given(data=st.data(), num=st.integers(1, 4), window=st.integers(1, 9))
def test_nobody_is_overtaken_more_often_than_the_window_says(data: st.DataObject, num: int, window: int) -> None:
    buffer, alive, unready = Buffer(), list(range(10)), list(range(10))
    for ordinal in alive:
        buffer.add(ordinal)
    for step in range(20):
        for ordinal in data.draw(st.lists(st.sampled_from(unready), unique=True)) if unready else []:
            buffer.put(ref(ordinal))
            unready.remove(ordinal)
        refs = buffer.choose(num, window)
        if refs is None:
            continue
        taken = [each.ordinal for each in buffer.take(step, [each.ordinal for each in refs])]
        assert taken == sorted(taken) and len(taken) == num
        passed = [ordinal for ordinal in alive if ordinal < taken[-1] and ordinal not in taken]
        assert set(passed) <= set(unready), "a ready group is passed over"
        alive = [ordinal for ordinal in alive if ordinal not in taken]
        assert all(buffer.num_overtaken(ordinal) < window for ordinal in alive)
