"""Oldest first and the window; the journal survives kills, shortening and a full disk; cut and events add up to what is
alive; nothing ends twice."""

from __future__ import annotations

import json
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.base.errors import UserError
from stretto.base.trajectory import Ending
from stretto.flow.ledger import Ledger, State, read_events
from tests.flow.refs import check, ref


def filled(num: int, ready: set[int]) -> State:
    state = State()
    for ordinal in range(num):
        state.dispatched(ordinal, 0, 9.0)
    for ordinal in sorted(ready, reverse=True):
        put(state, ordinal)
    return state


def put(state: State, ordinal: int) -> None:
    state.ready(asdict(ref(ordinal)))


def waiting(state: State) -> list[tuple[int, int]]:
    """Those that are not ready, with the number of those before them."""
    return [(entry.ordinal, num_older) for entry, num_older, _ in state.waiting() if entry.ref is None]


def overtaken(state: State) -> dict[int, int]:
    return {entry.ordinal: num_overtaken for entry, _, num_overtaken in state.waiting()}


def chosen(state: State, num: int, window: int) -> list[int] | None:
    refs = state.choose(num, window)
    return None if refs is None else [each.ordinal for each in refs]


def test_a_plain_queue_waits_for_its_oldest() -> None:
    state = filled(6, {0, 2, 3, 4, 5})
    assert chosen(state, 1, window=1) == [0]
    assert chosen(state, 2, window=1) is None
    put(state, 1)
    assert chosen(state, 2, window=1) == [0, 1]


def test_a_window_lets_others_by_and_stops_when_they_were_enough() -> None:
    state = filled(8, {1, 2, 3, 4, 5, 6, 7})
    assert chosen(state, 2, window=2) is None
    assert chosen(state, 2, window=3) == [1, 2]
    state.batch(0, [1, 2])
    assert overtaken(state)[0] == 2
    assert chosen(state, 2, window=4) is None, "one more may pass, not two"
    assert chosen(state, 2, window=5) == [3, 4]


def test_the_window_holds_for_those_behind_the_oldest_too() -> None:
    state = filled(6, {0, 1, 3, 4, 5})
    assert chosen(state, 3, window=1) is None
    assert chosen(state, 3, window=2) == [0, 1, 3]
    assert chosen(state, 4, window=2) is None


def test_dropped_groups_do_not_use_the_window_up() -> None:
    state = filled(6, {1, 2, 3, 4})
    state.ended(1, "stale")
    state.ended(2, "filtered")
    assert chosen(state, 2, window=3) == [3, 4]
    state.ended(0, "failed")
    assert chosen(state, 2, window=1) == [3, 4]
    assert len(state.alive) == 3


def test_places_count_what_is_in_training() -> None:
    state = filled(5, {0, 1, 3})
    assert waiting(state) == [(2, 2), (4, 4)]
    state.batch(0, [0, 3])
    assert waiting(state) == [(2, 3), (4, 4)]
    assert list(state.alive) == [0, 1, 2, 3, 4] and state.batches == {0: [0, 3]}
    state.trained(0, [0, 3], [])
    assert waiting(state) == [(2, 1), (4, 2)] and len(state.alive) == 3


def test_counts_before_the_batches_in_training_are_remembered() -> None:
    state = filled(4, {1, 3})
    state.batch(0, [1])
    state.dispatched(4, 0, 9.0)
    state.dispatched(5, 0, 9.0)
    put(state, 5)
    state.batch(1, [5])
    assert [overtaken(state)[ordinal] for ordinal in (0, 2, 3, 4)] == [2, 1, 1, 1]
    assert [state.alive[ordinal].num_overtaken for ordinal in (0, 1, 2, 3, 4)] == [0, 0, 0, 0, 0]
    state.trained(0, [1], [])
    assert [state.alive[ordinal].num_overtaken for ordinal in (0, 2, 3, 4)] == [1, 0, 0, 0]
    assert [overtaken(state)[ordinal] for ordinal in (0, 2, 3, 4)] == [2, 1, 1, 1]


def test_a_group_is_added_in_order_and_ready_once() -> None:
    state = filled(2, {1})
    with pytest.raises(AssertionError, match="ready twice"):
        put(state, 1)
    with pytest.raises(KeyError):
        put(state, 2)
    with pytest.raises(AssertionError, match="dispatched again"):
        state.dispatched(1, 0, 9.0)
    with pytest.raises(KeyError):
        state.dispatched(3, 0, 9.0)


@given(data=st.data(), num=st.integers(1, 4), window=st.integers(1, 9))
def test_nobody_is_overtaken_more_often_than_the_window_says(data: st.DataObject, num: int, window: int) -> None:
    state, alive, unready = State(), list(range(10)), list(range(10))
    for ordinal in alive:
        state.dispatched(ordinal, 0, 9.0)
    for step in range(20):
        for ordinal in data.draw(st.lists(st.sampled_from(unready), unique=True)) if unready else []:
            put(state, ordinal)
            unready.remove(ordinal)
        refs = state.choose(num, window)
        if refs is None:
            continue
        taken = [each.ordinal for each in refs]
        state.batch(step, taken)
        assert taken == sorted(taken) and len(taken) == num
        passed = [ordinal for ordinal in alive if ordinal < taken[-1] and ordinal not in taken]
        assert set(passed) <= set(unready), "a ready group is passed over"
        alive = [ordinal for ordinal in alive if ordinal not in taken]
        assert all(overtaken(state)[ordinal] < window for ordinal in alive)


def started(tmp_path: Path) -> Ledger:
    return Ledger.start(tmp_path / "journal.sqlite")


def resumed(ledger: Ledger, cut: dict | None = None) -> Ledger:
    return Ledger.resume(ledger.path, json.loads(json.dumps(cut)))


def dispatched(ledger: Ledger, ordinal: int, attempt: int = 0) -> None:
    ledger.record("dispatched", ordinal=ordinal, attempt=attempt, deadline_s=9.0)


def ready(ledger: Ledger, *ordinals: int) -> None:
    for ordinal in ordinals:
        dispatched(ledger, ordinal)
        ledger.record("ready", group=asdict(ref(ordinal)))


def taken(ledger: Ledger, step: int, *ordinals: int) -> None:
    ledger.record("batch", durable=True, step=step, ordinals=list(ordinals))


def trained(ledger: Ledger, step: int) -> None:
    ordinals = ledger.state.batches[step]
    locations = [f"group-{ordinal}-0" for ordinal in ordinals]
    ledger.record("trained", durable=True, step=step, ordinals=ordinals, locations=locations)


def ended(ledger: Ledger, ordinal: int, ending: Ending) -> None:
    ledger.record("ended", durable=True, ordinal=ordinal, ending=ending.value, why="")


def test_lines_add_up_to_what_is_alive(tmp_path: Path) -> None:
    ledger = started(tmp_path)
    ready(ledger, 0, 1)
    for ordinal in (2, 3, 4):
        dispatched(ledger, ordinal)
    ledger.record("lost", ordinal=3, attempt=0, why="engine died", counts=True)
    dispatched(ledger, 3, 1)
    ended(ledger, 4, Ending.FAILED)
    check(ledger.state)
    again = resumed(ledger)
    check(again.state)
    assert again.state.num_dispatched == 5 and again.state.endings == {Ending.FAILED: 1}
    assert list(again.state.alive) == [0, 1, 2, 3]
    assert again.state.alive[0].ref == ref(0)
    assert (again.state.alive[3].attempt, again.state.alive[3].num_failures) == (1, 1)
    assert all(entry.deadline_s is None for entry in again.state.alive.values()), "nobody is at work after a kill"


def test_what_was_trained_after_the_cut_is_alive_again_and_keeps_its_batch(tmp_path: Path) -> None:
    ledger = started(tmp_path)
    ready(ledger, 0, 1, 2, 3, 4)
    taken(ledger, 0, 0)
    trained(ledger, 0)
    taken(ledger, 1, 1)
    cut = ledger.cut()
    trained(ledger, 1)
    taken(ledger, 2, 2)
    trained(ledger, 2)
    taken(ledger, 3, 3)
    ended(ledger, 4, Ending.FILTERED)
    again = resumed(ledger, cut)
    check(again.state)
    assert list(again.state.alive) == [1, 2, 3] and again.state.alive[2].ref == ref(2)
    assert again.state.batches == {1: [1], 2: [2], 3: [3]}
    assert again.state.endings == {Ending.TRAINED: 1, Ending.FILTERED: 1}
    assert again.kept_locations() == {f"group-{ordinal}-0" for ordinal in (0, 1, 2, 3)}, (
        "an older snapshot might still ask for it"
    )
    for step in (1, 2, 3):
        trained(again, step)
    twice = resumed(again, cut)
    assert list(twice.state.alive) == [1, 2, 3] and twice.state.batches == {1: [1], 2: [2], 3: [3]}


def test_files_are_let_go_once_the_oldest_cut_covers_them(tmp_path: Path) -> None:
    ledger = started(tmp_path)
    ready(ledger, 0, 1, 2)
    for step in (0, 1):
        taken(ledger, step, step)
        trained(ledger, step)
    cut = ledger.cut()
    taken(ledger, 2, 2)
    trained(ledger, 2)
    assert ledger.kept_locations() == {"group-0-0", "group-1-0", "group-2-0"}
    assert ledger.covered(cut) == ["group-0-0", "group-1-0"]
    assert ledger.kept_locations() == {"group-2-0"}
    assert len(read_events(ledger.path)) == 1 + 2
    again = resumed(ledger, cut)
    assert list(again.state.alive) == [2] and again.state.batches == {2: [2]}
    dispatched(again, 3)
    assert list(resumed(again, cut).state.alive) == [2, 3], "a shortened journal is written on"


def test_a_file_of_an_undone_step_is_kept_while_its_group_waits_for_another_step(tmp_path: Path) -> None:
    ledger = started(tmp_path)
    ready(ledger, 0, 1, 2)
    start = ledger.cut()
    for step in (0, 1):
        taken(ledger, step, step)
        trained(ledger, step)
    again = resumed(ledger, start)
    assert again.state.reached == 2 and again.state.will_repeat
    again.record("vanished", ordinals=[0])
    assert not again.state.will_repeat
    again.record("forgotten", ordinals=[])
    taken(again, 0, 2)
    trained(again, 0)
    cut = again.cut()
    assert again.covered(cut) == ["group-0-0", "group-2-0"], "group 1 was trained in step 1, which was undone"
    assert again.state.will_repeat and again.kept_locations() == {"group-1-0"}
    taken(again, 1, 1)
    trained(again, 1)
    assert again.covered(again.cut()) == ["group-1-0"]


def test_an_older_snapshot_than_the_journal_reaches_back_to_is_refused(tmp_path: Path) -> None:
    ledger = started(tmp_path)
    old = ledger.cut()
    ready(ledger, 0)
    ledger.covered(ledger.cut())
    for cut in (old, None, {**old, "line": 99}):
        with pytest.raises(UserError, match=r"journal.sqlite: lines: .* restore the journal"):
            resumed(ledger, cut)


@pytest.mark.parametrize("at", range(1, 40, 3))
def test_a_journal_cut_anywhere_is_a_state_it_once_had(tmp_path: Path, at: int) -> None:
    """As a power failure may leave it: of the last writes, only the first have come to the disk, to the byte."""
    ledger = started(tmp_path)
    ready(ledger, 0, 1)
    path, copy = ledger.path, tmp_path / "copy.sqlite"
    shutil.copy(path, copy)
    log = path.with_name(path.name + "-wal").read_bytes()
    copy.with_name(copy.name + "-wal").write_bytes(log[: at * len(log) // 40])
    again = Ledger.resume(copy, None)
    check(again.state)
    assert again.state.num_dispatched <= 2
    dispatched(again, again.state.num_dispatched)
    assert Ledger.resume(copy, None).state.num_dispatched == again.state.num_dispatched, "and it is written on"


def test_what_was_recorded_is_there_after_a_kill(tmp_path: Path) -> None:
    code = (
        "import os, sys; from stretto.flow.ledger import Ledger\n"
        "ledger = Ledger.start(sys.argv[1])\n"
        "for ordinal in range(5): ledger.record('dispatched', ordinal=ordinal, attempt=0, deadline_s=9.0)\n"
        "os.kill(os.getpid(), 9)"
    )
    path = tmp_path / "journal.sqlite"
    assert subprocess.run([sys.executable, "-c", code, path], check=False).returncode == -9
    assert list(Ledger.resume(path, None).state.alive) == [0, 1, 2, 3, 4]


def test_damage_is_refused(tmp_path: Path) -> None:
    ledger = started(tmp_path)
    ready(ledger, *range(200))
    path = ledger.path
    ledger.close()
    content = bytearray(path.read_bytes())
    content[4096 : 4096 + 200] = bytes(200)
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"damaged: .*; restore the file"):
        Ledger.resume(path, None)
    path.write_bytes(b"nonsense" * 1000)
    with pytest.raises(UserError, match="damaged: file is not a database"):
        Ledger.resume(path, None)


def test_a_journal_that_cannot_be_written_says_why(tmp_path: Path) -> None:
    ledger = started(tmp_path)
    ledger._db.execute("PRAGMA max_page_count = 2")
    with pytest.raises(UserError, match="cannot be written: No space left on device; free some space"):
        for ordinal in range(2000):
            dispatched(ledger, ordinal)
    ledger._db.execute("PRAGMA query_only = ON")
    with pytest.raises(UserError, match="cannot be written: attempt to write a readonly database"):
        dispatched(ledger, 5000)
    ledger.close()


def test_threads_may_take_turns_with_a_journal(tmp_path: Path) -> None:
    ledger = started(tmp_path)
    with ThreadPoolExecutor(1) as other:
        other.submit(dispatched, ledger, 0).result()
    dispatched(ledger, 1)
    assert list(ledger.state.alive) == [0, 1]
    ledger.close()


def test_a_journal_is_neither_overwritten_nor_invented(tmp_path: Path) -> None:
    path = started(tmp_path).path
    with pytest.raises(UserError, match="exists already; resume"):
        Ledger.start(path)
    with sqlite3.connect(path) as db:
        db.execute("DELETE FROM events")
    with pytest.raises(UserError, match="damaged: its head is missing"):
        Ledger.resume(path, None)
    for kind in ("a", "z"):  # events of which none is a head
        with sqlite3.connect(path) as db:
            db.execute("INSERT INTO events VALUES (?, ?, ?)", (ord(kind), kind, "{}"))
        with pytest.raises(UserError, match="damaged: its head is missing"):
            Ledger.resume(path, None)
        with sqlite3.connect(path) as db:
            db.execute("DELETE FROM events")
    path.write_bytes(b"")
    with pytest.raises(UserError, match="damaged: no such table"):
        Ledger.resume(path, None)
    path.unlink()
    with pytest.raises(UserError, match="no such file"):
        Ledger.resume(path, None)


def test_a_full_disk_is_one_line_and_leaves_no_half_line(tmp_path: Path) -> None:
    ledger = started(tmp_path)
    ready(ledger, 0)
    size = ledger.path.with_name("journal.sqlite-wal").stat().st_size
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, limits[1]))
    try:
        with pytest.raises(UserError, match=r"journal.sqlite: cannot be written: .*; free some space"):
            dispatched(ledger, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert len(read_events(ledger.path)) == 1 + 2 and list(ledger.state.alive) == [0]
    dispatched(ledger, 1)
    assert list(resumed(ledger).state.alive) == [0, 1]


def test_an_ordinal_ends_once(tmp_path: Path) -> None:
    ledger = started(tmp_path)
    ready(ledger, 0, 1)
    ended(ledger, 0, Ending.STALE)
    with pytest.raises(AssertionError, match="group 0 ends as failed, and had ended before"):
        ended(ledger, 0, Ending.FAILED)
    with pytest.raises(AssertionError, match="ready twice"):
        ledger.record("ready", group=asdict(ref(1)))
    taken(ledger, 0, 1)
    trained(ledger, 0)
    with pytest.raises(KeyError):
        trained(ledger, 0)


def test_groups_that_vanished_wait_again_and_later_batches_do_not_block_them(tmp_path: Path) -> None:
    ledger = started(tmp_path)
    ready(ledger, 0, 1, 2, 3, 4, 5)
    for step, ordinals in enumerate(([0, 1], [2, 3], [4, 5])):
        ledger.record("batch", step=step, ordinals=ordinals)
    ledger.record("vanished", ordinals=[3])
    state = resumed(ledger).state
    assert state.batches == {0: [0, 1]}
    assert [(entry.ordinal, num_older) for entry, num_older, _ in state.waiting()] == [(2, 2), (3, 3), (4, 4), (5, 5)]
    assert state.alive[3].ref is None and state.choose(2, 1) is None
