"""The watchdog names who is stuck, about which group, and the end of the chain of those that wait for each other."""

from __future__ import annotations

import pytest

from stretto.rl.watchdog import Watchdog


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_only_waits_without_progress_are_stuck_longest_first(clock: Clock) -> None:
    watchdog = Watchdog(10.0, clock)
    watchdog.waits("agent-0", "engine-0", ordinal=7)
    clock.now = 4.0
    watchdog.waits("agent-1", "engine-0", ordinal=8)
    watchdog.waits("agent-1", "reward-0", ordinal=9)
    clock.now = 10.0
    assert watchdog.stuck() == [] and watchdog.report() is None
    watchdog.done("agent-1", ordinal=9)
    clock.now = 14.5
    assert [(each.role, each.ordinal, each.quiet_s) for each in watchdog.stuck()] == [
        ("agent-0", 7, 14.5),
        ("agent-1", 8, 10.5),
    ]
    watchdog.waits("agent-0", "engine-0", ordinal=7)  # it got some tokens
    assert [each.role for each in watchdog.stuck()] == ["agent-1"]


def test_a_report_follows_the_chain_to_its_cause(clock: Clock) -> None:
    watchdog = Watchdog(10.0, clock)
    watchdog.waits("trainer", "agent-0", ordinal=7)
    watchdog.waits("agent-0", "engine-1", ordinal=3)
    clock.now = 1.0
    watchdog.waits("agent-0", "reward-2", ordinal=7)
    clock.now = 12.0
    assert watchdog.report() == (
        "trainer (group 7) has waited for agent-0 for 12 s; agent-0 (group 7) has waited for reward-2 for 11 s"
    )


def test_a_circle_is_followed_once(clock: Clock) -> None:
    watchdog = Watchdog(1.0, clock)
    watchdog.waits("trainer", "engine-0")
    watchdog.waits("engine-0", "trainer")
    clock.now = 2.0
    assert [each.role for each in watchdog.chain(watchdog.stuck()[0])] == ["trainer", "engine-0", "trainer"]


def test_a_role_that_ended_waits_for_nothing(clock: Clock) -> None:
    watchdog = Watchdog(1.0, clock)
    watchdog.waits("agent-0", "engine-0", ordinal=1)
    watchdog.waits("agent-0", "engine-0", ordinal=2)
    watchdog.waits("agent-1", "engine-0", ordinal=3)
    watchdog.gone("agent-0")
    clock.now = 5.0
    assert [each.ordinal for each in watchdog.stuck()] == [3]
