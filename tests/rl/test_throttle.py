"""The gate's inequality against a brute-force search for the worst order of training."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.base.errors import UserError
from stretto.rl.throttle import Gate, Limits, default_window


def worst_step(prompts: int, window: int, version: int, num_older: int) -> int:
    """The latest step that can train a group: all older ones go first, and as many younger ones as may overtake it."""
    older, younger, step = num_older, window - 1, version
    while older + younger >= prompts:
        taken = min(older, prompts)
        older -= taken
        younger -= prompts - taken
        step += 1
    return step


@given(
    prompts=st.integers(1, 9),
    staleness=st.integers(0, 8),
    data=st.data(),
)
def test_the_gate_opens_exactly_where_the_worst_order_keeps_the_bound(
    prompts: int, staleness: int, data: st.DataObject
) -> None:
    window = data.draw(st.integers(1, staleness * prompts + 1))
    version = data.draw(st.integers(0, 20))
    engine = data.draw(st.integers(max(0, version - staleness - 1), version))
    num_older = data.draw(st.integers(0, (staleness + 2) * prompts))
    keeps = worst_step(prompts, window, version, num_older) - engine <= staleness
    assert Gate(prompts, staleness, window).may_dispatch(num_older, version, engine) == keeps


@given(prompts=st.integers(1, 9), staleness=st.integers(0, 8), data=st.data())
def test_enough_groups_for_a_step_may_be_alive(prompts: int, staleness: int, data: st.DataObject) -> None:
    window = data.draw(st.integers(1, staleness * prompts + 1))
    gate = Gate(prompts, staleness, window)
    assert gate.limit >= prompts
    assert gate.may_dispatch(gate.limit - 1, 5, 5) and not gate.may_dispatch(gate.limit, 5, 5)


def test_a_plain_queue_has_the_published_number_of_slots() -> None:
    assert Gate(prompts=8, staleness=4).limit == 5 * 8
    assert Gate(prompts=8, staleness=0).limit == 8


def test_engines_that_trail_are_charged() -> None:
    gate = Gate(prompts=8, staleness=2)
    assert gate.may_dispatch(23, trainer_version=7, oldest_engine_version=7)
    assert gate.may_dispatch(7, trainer_version=7, oldest_engine_version=5)
    assert not gate.may_dispatch(8, trainer_version=7, oldest_engine_version=5)
    assert not gate.may_dispatch(0, trainer_version=7, oldest_engine_version=4)


def test_a_window_without_room_for_a_step_is_refused() -> None:
    Gate(prompts=8, staleness=2, window=17)
    with pytest.raises(UserError, match=r"window: 18 .* at most 17"):
        Gate(prompts=8, staleness=2, window=18)
    with pytest.raises(UserError, match="at most 1"):
        Gate(prompts=8, staleness=0, window=2)


@given(prompts=st.integers(1, 64), staleness=st.integers(0, 8), capacity=st.none() | st.integers(1, 1000))
def test_the_default_window_leaves_what_engines_and_trainer_need(
    prompts: int, staleness: int, capacity: int | None
) -> None:
    gate = Gate(prompts, staleness, default_window(prompts, staleness, capacity))
    most = (staleness + 1) * prompts
    assert gate.limit == (most if capacity is None else min(most, capacity + 2 * prompts))


def test_only_what_the_bound_depends_on_identifies_a_run() -> None:
    limits = Limits(8, 4, 1, drop_uniform=True, lease_s=1.0, max_attempts=2, num_steps=3)
    assert limits.identity == {"prompts": 8, "staleness": 4, "window": 1, "drop_uniform": True}
