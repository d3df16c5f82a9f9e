"""Slots, leases, order, resumes: by hand, and over random schedules in which anything is slow, fails or is killed; the bound
against a brute-force search for the worst order of training; the wait that is stuck, and the wait behind it."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stretto.base.errors import UserError
from stretto.flow.controller import Controller, Limits, Watchdog, default_window
from stretto.flow.ledger import Ledger
from tests.flow.refs import check, ref, task
from tests.flow.throttle import Result, Run, Schedule, random_schedule

MEMORY = Path("/dev/shm")
"""Where syncing a file to the disk costs nothing."""
LIMITS = Limits(prompts=2, staleness=1, window=1, drop_uniform=True, lease_s=10.0, max_attempts=2)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def started(tmp_path: Path, **changes: Any) -> tuple[Controller, Clock]:
    clock = Clock()
    controller = Controller(replace(LIMITS, **changes), task, Ledger.start(tmp_path / "journal.sqlite"), clock)
    controller.engine_active("engine-0", 0)
    return controller, clock


def resumed(tmp_path: Path, cut: dict[str, Any] | None, **changes: Any) -> Controller:
    ledger = Ledger.resume(tmp_path / "journal.sqlite", json.loads(json.dumps(cut)))
    controller = Controller(replace(LIMITS, **changes), task, ledger, Clock())
    check(controller.state)
    controller.engine_active("engine-0", controller.version)
    return controller


def handed(controller: Controller) -> list[tuple[int, int]]:
    return [(each.task.ordinal, each.attempt) for each in controller.admit()]


def batch(controller: Controller) -> list[int] | None:
    refs = controller.next_batch()
    return None if refs is None else [each.ordinal for each in refs]


def train(controller: Controller) -> None:
    step = controller.version
    controller.trained(step)
    controller.engine_active("engine-0", step + 1)


def test_slots_are_charged_when_handed_out_and_freed_when_trained(tmp_path: Path) -> None:
    controller, _ = started(tmp_path)
    assert handed(controller) == [(0, 0), (1, 0), (2, 0), (3, 0)]
    for ordinal in (1, 2, 3):
        assert controller.group_ready(ref(ordinal))
    assert handed(controller) == [], "ready ones keep their slots"
    assert batch(controller) is None and controller.counts()["ready"] == 3
    controller.group_ready(ref(0))
    assert batch(controller) == [0, 1]
    assert handed(controller) == [], "and so do those in training"
    train(controller)
    assert handed(controller) == [(4, 0), (5, 0)]
    check(controller.state)


def test_weights_that_engines_have_not_activated_hold_hand_outs_back(tmp_path: Path) -> None:
    controller, _ = started(tmp_path)
    controller.engine_active("engine-1", 0)
    controller.admit()
    for ordinal in range(4):
        controller.group_ready(ref(ordinal))
    controller.next_batch()
    controller.trained(0)
    assert handed(controller) == []
    controller.engine_active("engine-0", 1)
    assert handed(controller) == [], "the other engine might get it"
    controller.engine_gone("engine-1")
    assert handed(controller) == [(4, 0), (5, 0)]
    with pytest.raises(AssertionError, match="engine-1 has version 0"):
        controller.engine_active("engine-1", 0)


def test_a_dropped_group_frees_its_slot_and_its_file(tmp_path: Path) -> None:
    controller, _ = started(tmp_path)
    controller.admit()
    assert controller.group_ready(ref(1, is_uniform=True))
    assert handed(controller) == [(4, 0)]
    assert controller.unneeded() == ["group-1-0"] and controller.unneeded() == []
    for ordinal in (0, 2):
        controller.group_ready(ref(ordinal))
    assert batch(controller) == [0, 2]
    assert controller.counts()["filtered"] == 1
    assert controller.discarded == {"filtered": 10}


def test_uniform_groups_are_trained_where_the_recipe_says_so(tmp_path: Path) -> None:
    controller, _ = started(tmp_path, drop_uniform=False)
    controller.admit()
    for ordinal in (0, 1):
        controller.group_ready(ref(ordinal, is_uniform=True))
    assert batch(controller) == [0, 1]


def test_without_staleness_a_step_is_all_of_its_groups_in_order(tmp_path: Path) -> None:
    controller, _ = started(tmp_path, staleness=0, prompts=3)
    for step in range(3):
        first = 3 * step
        assert handed(controller) == [(first, 0), (first + 1, 0), (first + 2, 0)]
        for ordinal in (first + 2, first, first + 1):
            assert batch(controller) is None
            controller.group_ready(ref(ordinal, version=step))
        assert batch(controller) == [first, first + 1, first + 2] and handed(controller) == []
        train(controller)


def test_a_lease_starts_when_an_agent_begins_the_attempt(tmp_path: Path) -> None:
    controller, clock = started(tmp_path)
    controller.admit()
    clock.now = 9.0
    controller.attempt_begun(0, 0)
    clock.now = 18.0
    assert handed(controller) == [(1, 1), (2, 1), (3, 1)], "the others have waited for an agent too long"
    clock.now = 19.0
    assert handed(controller) == [(0, 1)]
    clock.now = 28.0
    controller.attempt_begun(0, 0)  # too late: another attempt has the group
    assert controller.state.alive[0].deadline_s == 29.0
    again = Ledger.resume(tmp_path / "journal.sqlite", None)
    assert [entry.num_failures for entry in again.state.alive.values()] == [1, 1, 1, 1]


def test_a_lease_that_runs_out_is_handed_out_again_and_the_late_result_is_ignored(tmp_path: Path) -> None:
    controller, clock = started(tmp_path)
    controller.admit()
    clock.now = 9.0
    assert handed(controller) == []
    clock.now = 10.0
    controller.group_ready(ref(0))  # nobody has taken it back yet
    assert handed(controller) == [(1, 1), (2, 1), (3, 1)]
    assert not controller.group_ready(ref(1, attempt=0)) and controller.unneeded() == ["group-1-0"]
    controller.group_failed(1, 0, "too late to fail")
    assert controller.group_ready(ref(1, attempt=1))
    assert not controller.group_ready(ref(1, attempt=1)) and controller.unneeded() == [], (
        "told twice; its file is needed"
    )
    assert batch(controller) == [0, 1]
    assert (controller.counts()["expired"], controller.counts()["late"]) == (3, 3)
    assert controller.discarded == {"late": 10}, "what was told twice is trained once"


def test_a_group_is_given_up_after_so_many_failures_of_its_own(tmp_path: Path) -> None:
    controller, clock = started(tmp_path)
    controller.admit()
    for attempt in range(3):
        controller.group_failed(0, attempt, "the engine was killed", counts=False)
        assert handed(controller) == [(0, attempt + 1)]
    controller.group_failed(0, 3, "the reward raised")
    assert handed(controller) == [(0, 4)]
    controller.group_failed(0, 4, "the reward raised")
    assert handed(controller) == [(4, 0)] and controller.counts()["failed"] == 1
    clock.now = 10.0
    controller.admit()
    clock.now = 20.0
    controller.admit()
    assert controller.counts()["failed"] == 5


def test_a_store_that_loses_a_group_again_and_again_ends_the_run(tmp_path: Path) -> None:
    controller, _ = started(tmp_path)
    controller.admit()
    controller.group_ready(ref(0))
    controller.vanished([0])
    assert handed(controller) == [(0, 1)]
    controller.group_ready(replace(ref(0), attempt=1))
    with pytest.raises(UserError, match=r"store: it lost group 0 2 times; .* --resume"):
        controller.vanished([0])


def test_an_attempt_knows_whether_it_is_the_last(tmp_path: Path) -> None:
    controller, _ = started(tmp_path)
    assert not any([each.is_last for each in controller.admit()]) and not controller.last_failed
    controller.group_failed(0, 0, "the engine was killed", counts=False)
    (again,) = controller.admit()
    controller.group_failed(0, 1, "the reward raised")
    (last,) = controller.admit()
    assert (again.is_last, last.is_last) == (False, True)
    controller.group_failed(0, 2, "the reward raised")
    assert controller.last_failed == "group 0: the reward raised"


def test_no_more_is_handed_out_than_the_run_will_train(tmp_path: Path) -> None:
    controller, _ = started(tmp_path, num_steps=1)
    assert handed(controller) == [(0, 0), (1, 0)]
    controller.group_ready(ref(0, is_uniform=True))
    assert handed(controller) == [(2, 0)]


def test_a_role_that_breaks_its_word_does_not_break_the_bound(tmp_path: Path) -> None:
    controller, _ = started(tmp_path)
    for step in range(3):
        for each in controller.admit():
            version = -9 if each.task.ordinal == 6 else step
            controller.group_ready(ref(each.task.ordinal, version=version))
        controller.next_batch()
        train(controller)
    assert [batch(controller), controller.counts()["stale"]] == [None, 1]
    assert handed(controller)[0] == (8, 0)
    assert controller.max_staleness <= 1


def test_steps_that_were_undone_are_made_again_before_anybody_else_is_handed_out(tmp_path: Path) -> None:
    controller, _ = started(tmp_path)
    cut = controller.checkpoint_cut()
    for _ in range(2):
        for each in controller.admit():
            controller.group_ready(ref(each.task.ordinal, version=controller.version))
        controller.next_batch()
        train(controller)
    assert handed(controller) == [(6, 0), (7, 0)]
    again = resumed(tmp_path, cut)
    assert handed(again) == [], "6 and 7 must wait until the first step is made again"
    assert batch(again) == batch(again) == [0, 1]
    train(again)
    assert batch(again) == [2, 3] and handed(again) == []
    train(again)
    assert handed(again) == [(6, 1), (7, 1)] and batch(again) == [4, 5]


def test_a_resume_goes_on_with_exactly_what_was_alive(tmp_path: Path) -> None:
    controller, _ = started(tmp_path)
    controller.admit()
    for ordinal in (0, 1, 3):
        controller.group_ready(ref(ordinal))
    controller.next_batch()
    train(controller)
    cut = controller.checkpoint_cut()
    controller.admit()
    controller.group_ready(ref(2))
    controller.group_ready(ref(5, version=1))
    assert batch(controller) == [2, 3]
    train(controller)
    controller.admit()
    controller.group_ready(ref(6, version=2))
    controller.covered(cut)
    assert controller.unneeded() == ["group-0-0", "group-1-0"]
    again = resumed(tmp_path, cut)
    assert again.version == 1
    assert again.ledger.kept_locations() == {f"group-{ordinal}-0" for ordinal in (2, 3, 5, 6)}
    assert handed(again) == [(4, 1)], "5 and 6 are ready, 7 was handed out under weights that are no more"
    assert batch(again) == [2, 3], "the same step from the same samples"
    train(again)
    assert handed(again) == [(7, 1)]
    again.group_ready(ref(4, attempt=1, version=1))
    assert batch(again) == [4, 5]
    check(again.state)


def test_a_run_that_was_killed_before_its_first_snapshot_is_resumed(tmp_path: Path) -> None:
    controller, _ = started(tmp_path)
    controller.admit()
    controller.group_ready(ref(1))
    again = resumed(tmp_path, None)
    assert handed(again) == [(0, 1), (2, 1), (3, 1)]


def test_a_resumed_run_that_ends_before_it_has_repeated_its_steps_can_be_resumed(tmp_path: Path) -> None:
    controller, _ = started(tmp_path)
    cut = controller.checkpoint_cut()
    for _ in range(3):
        for each in controller.admit():
            controller.group_ready(ref(each.task.ordinal, version=controller.version))
        assert controller.next_batch() is not None
        train(controller)
    again = resumed(tmp_path, cut)
    assert batch(again) == [0, 1]
    train(again)
    later = again.checkpoint_cut()
    again.finish()  # out of time, with batches of two steps that were to be repeated
    last = resumed(tmp_path, later)
    for each in last.admit():
        last.group_ready(ref(each.task.ordinal, attempt=each.attempt, version=1))
    assert batch(last) == [8, 9]


def test_what_was_sampled_with_weights_that_are_not_made_again_is_sampled_again(tmp_path: Path) -> None:
    """Two steps are undone, and the store has lost a group of the second one. Group 6 has tokens of version 2, which will be another."""
    controller, _ = started(tmp_path)
    cut = controller.checkpoint_cut()
    for _ in range(2):
        for each in controller.admit():
            controller.group_ready(ref(each.task.ordinal, version=controller.version))
        controller.next_batch()
        train(controller)
    controller.admit()
    controller.group_ready(ref(6, version=2))
    again = resumed(tmp_path, cut)
    assert again.repeats and again.forget_undone() == 0
    again.vanished([3])
    stored = {ref.ordinal: ref.location for ref in again.ledger.ready_groups()}
    assert again.forget_undone() == 4
    assert again.unneeded() == [stored[ordinal] for ordinal in (2, 4, 5, 6)], "no step will read their files"
    assert again.forget_undone() == 0 and again.unneeded() == []
    assert [entry.ordinal for entry in again.state.alive.values() if entry.ref is not None] == [0, 1]
    assert batch(again) == [0, 1], "the first step is repeated"
    twice = resumed(tmp_path, cut)
    assert twice.state.alive == again.state.alive and twice.state.batches == again.state.batches
    assert batch(twice) == [0, 1]
    train(twice)
    assert not twice.repeats and handed(twice) == [(2, 1), (3, 1), (4, 1), (5, 1)]


def test_what_is_alive_at_the_end_is_cancelled(tmp_path: Path) -> None:
    controller, _ = started(tmp_path)
    controller.admit()
    for ordinal in (0, 1, 2):
        controller.group_ready(ref(ordinal))
    controller.next_batch()
    controller.finish()
    check(controller.state)
    assert controller.counts()["cancelled"] == 4 and controller.counts()["alive"] == 0


def play(schedule: Schedule) -> Result:
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        return Run(schedule, Path(folder) / "journal.sqlite").play()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 10**9), staleness=st.sampled_from([0, 1, 2, 4, 8]))
def test_any_schedule_reaches_every_step_within_the_bound(seed: int, staleness: int) -> None:
    schedule = random_schedule(seed, staleness)
    result = play(schedule)
    assert max(result.staleness) <= staleness
    assert result.counts["stale"] == 0, "the gate alone keeps the bound"
    assert set(result.trained.values()) == {1}
    assert set(result.num_generated.values()) == {1}, "a group that was ready is not generated again"


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 10**9), staleness=st.sampled_from([0, 1, 4]))
def test_kills_and_delays_change_nothing_about_what_is_trained(seed: int, staleness: int) -> None:
    schedule = replace(random_schedule(seed, staleness), fails=0.0, hangs=0.0, late=0.0, kills=3)
    result, calm = play(schedule), play(replace(schedule, kills=0, spread=0.0, straggler_share=0.0))
    assert result.trained == calm.trained
    if staleness == 0:
        ordinals = [[ordinal for ordinal, _ in each] for each in result.batches]
        assert ordinals == [[ordinal for ordinal, _ in each] for each in calm.batches]
        assert ordinals == sorted(ordinals)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 10**9), staleness=st.sampled_from([0, 1, 4]), losses=st.sampled_from([0.02, 0.1, 0.5]))
def test_a_store_that_loses_groups_changes_neither_the_bound_nor_how_often_a_group_is_trained(
    seed: int, staleness: int, losses: float
) -> None:
    """With each kill, while the trainer returns to a snapshot, and between steps. `Run` checks that no token is of other weights."""
    schedule = random_schedule(seed, staleness)
    limits = replace(schedule.limits, max_attempts=10**6)  # no group is lost too often
    result = play(replace(schedule, kills=3, losses=losses, limits=limits))
    assert max(result.staleness) <= staleness and result.counts["stale"] == 0
    assert set(result.trained.values()) == {1}


def test_the_controller_is_light() -> None:
    code = "import sys, stretto.flow.controller; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"torch", "transformers", "pydantic"}.isdisjoint(done.stdout.split())


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
    assert Limits(prompts, staleness, window).may_dispatch(num_older, version, engine) == keeps


@given(prompts=st.integers(1, 9), staleness=st.integers(0, 8), data=st.data())
def test_enough_groups_for_a_step_may_be_alive(prompts: int, staleness: int, data: st.DataObject) -> None:
    window = data.draw(st.integers(1, staleness * prompts + 1))
    gate = Limits(prompts, staleness, window)
    assert gate.most_alive >= prompts
    assert gate.may_dispatch(gate.most_alive - 1, 5, 5) and not gate.may_dispatch(gate.most_alive, 5, 5)


def test_a_plain_queue_has_the_published_number_of_slots() -> None:
    assert Limits(prompts=8, staleness=4).most_alive == 5 * 8
    assert Limits(prompts=8, staleness=0).most_alive == 8


def test_engines_that_trail_are_charged() -> None:
    gate = Limits(prompts=8, staleness=2)
    assert gate.may_dispatch(23, trainer_version=7, oldest_engine_version=7)
    assert gate.may_dispatch(7, trainer_version=7, oldest_engine_version=5)
    assert not gate.may_dispatch(8, trainer_version=7, oldest_engine_version=5)
    assert not gate.may_dispatch(0, trainer_version=7, oldest_engine_version=4)


@given(prompts=st.integers(1, 64), staleness=st.integers(0, 8), capacity=st.none() | st.integers(1, 1000))
def test_the_default_window_leaves_what_engines_and_trainer_need(
    prompts: int, staleness: int, capacity: int | None
) -> None:
    gate = Limits(prompts, staleness, default_window(prompts, staleness, capacity))
    most = (staleness + 1) * prompts
    assert gate.most_alive == (most if capacity is None else min(most, capacity + 2 * prompts))


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_run_is_stuck_when_no_group_makes_progress_while_the_trainer_waits(clock: Clock) -> None:
    watchdog = Watchdog(10.0, clock)
    watchdog.group_waits(3, "agent-1")
    watchdog.progress()  # while the trainer works
    clock.now = 20.0
    assert watchdog.report() is None
    watchdog.trainer_waits()
    clock.now = 21.0
    watchdog.group_waits(7, "agent-2")
    clock.now = 30.0
    assert watchdog.report() is None
    clock.now = 31.0
    assert watchdog.report() == ("the trainer has waited for groups for 11 s; group 3 has waited for agent-1 for 31 s")
    watchdog.group_ended(3)
    assert watchdog.report() == "the trainer has waited for groups for 11 s; group 7 has waited for agent-2 for 10 s"
    watchdog.progress()
    clock.now = 41.0
    assert watchdog.report() is None
    clock.now = 42.0
    watchdog.group_ended(7)
    assert watchdog.report() == "the trainer has waited for groups for 11 s"
    watchdog.trainer_works()
    assert watchdog.report() is None
