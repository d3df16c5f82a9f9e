"""The journal survives tears, shortening and a full disk; cut and lines add up to what is alive; nothing ends twice."""

from __future__ import annotations

import json
import resource
import signal
from pathlib import Path

import pytest

from stretto.base.errors import UserError
from stretto.base.trajectory import Ending
from stretto.rl.ledger import Journal, Ledger
from tests.rl.refs import ref


def started(tmp_path: Path) -> Ledger:
    return Ledger(Journal(tmp_path / "journal.jsonl", {}))


def resumed(ledger: Ledger, cut: dict | None = None) -> Ledger:
    return Ledger.resume(Journal(ledger.journal.path), json.loads(json.dumps(cut)))


def ready(ledger: Ledger, *ordinals: int) -> None:
    for ordinal in ordinals:
        ledger.dispatched(ordinal, 0, 9.0)
        ledger.ready(ref(ordinal))


def test_lines_add_up_to_what_is_alive(tmp_path: Path) -> None:
    ledger = started(tmp_path)
    ready(ledger, 0, 1)
    for ordinal in (2, 3, 4):
        ledger.dispatched(ordinal, 0, 9.0)
    ledger.lost(3, 0, "engine died", counts=True)
    ledger.dispatched(3, 1, 9.0)
    ledger.ended(4, Ending.FAILED, "engine died")
    ledger.check()
    again = resumed(ledger)
    again.check()
    assert again.num_dispatched == 5 and again.endings == {Ending.FAILED: 1}
    assert list(again.alive) == [0, 1, 2, 3]
    assert again.alive[0].ref == ref(0)
    assert (again.alive[3].attempt, again.alive[3].num_failures) == (1, 1)
    assert all(entry.deadline_s is None for entry in again.alive.values()), "nobody is at work after a kill"


def test_what_was_trained_after_the_cut_is_alive_again_and_keeps_its_batch(tmp_path: Path) -> None:
    ledger = started(tmp_path)
    ready(ledger, 0, 1, 2, 3, 4)
    ledger.taken(0, [0])
    ledger.trained(0)
    ledger.taken(1, [1])
    cut = ledger.cut()
    ledger.trained(1)
    ledger.taken(2, [2])
    ledger.trained(2)
    ledger.taken(3, [3])
    ledger.ended(4, Ending.FILTERED)
    again = resumed(ledger, cut)
    again.check()
    assert list(again.alive) == [1, 2, 3] and again.alive[2].ref == ref(2)
    assert again.batches == {1: [1], 2: [2], 3: [3]}
    assert again.endings == {Ending.TRAINED: 1, Ending.FILTERED: 1}
    assert again.trained_locations == {0: ["group-0-0"]}, "an older snapshot might still ask for it"
    for step in (1, 2, 3):
        again.trained(step)
    twice = resumed(again, cut)
    assert list(twice.alive) == [1, 2, 3] and twice.batches == {1: [1], 2: [2], 3: [3]}


def test_files_are_let_go_once_the_oldest_cut_covers_them(tmp_path: Path) -> None:
    ledger = started(tmp_path)
    ready(ledger, 0, 1, 2)
    for step in (0, 1):
        ledger.taken(step, [step])
        ledger.trained(step)
    cut = ledger.cut()
    ledger.taken(2, [2])
    ledger.trained(2)
    assert ledger.kept_locations() == {"group-0-0", "group-1-0", "group-2-0"}
    assert ledger.covered(cut, version=2) == ["group-0-0", "group-1-0"]
    assert ledger.kept_locations() == {"group-2-0"}
    assert len(ledger.journal.path.read_text().splitlines()) == 1 + 2
    again = resumed(ledger, cut)
    assert list(again.alive) == [2] and again.batches == {2: [2]}
    again.dispatched(3, 0, 9.0)
    assert list(resumed(again, cut).alive) == [2, 3], "a shortened journal is written on"


def test_an_older_snapshot_than_the_journal_reaches_back_to_is_refused(tmp_path: Path) -> None:
    ledger = started(tmp_path)
    old = ledger.cut()
    ready(ledger, 0)
    ledger.covered(ledger.cut(), version=0)
    for cut in (old, None, {**old, "line": 99}):
        with pytest.raises(UserError, match=r"journal.jsonl: lines: .* restore the journal"):
            resumed(ledger, cut)


def test_a_torn_line_is_dropped_and_does_not_stay_in_front_of_others(tmp_path: Path) -> None:
    ledger = started(tmp_path)
    ready(ledger, 0)
    with ledger.journal.path.open("ab") as file:
        file.write(b'{"n": 3, "kind": "disp')
    again = resumed(ledger)
    again.dispatched(1, 0, 9.0)
    assert list(resumed(again).alive) == [0, 1]


@pytest.mark.parametrize("at", range(1, 40, 3))
def test_a_journal_cut_anywhere_is_a_state_it_once_had(tmp_path: Path, at: int) -> None:
    ledger = started(tmp_path)
    ready(ledger, 0, 1)
    text = ledger.journal.path.read_bytes()
    first = text.index(b"\n") + 1
    ledger.journal.path.write_bytes(text[: first + at * (len(text) - first) // 40])
    resumed(ledger).check()


@pytest.mark.parametrize("line", ["nonsense", '{"n": 1, "kind": "resumed"}', "[]", '{"kind": "resumed"}'])
def test_damage_before_the_end_is_refused(tmp_path: Path, line: str) -> None:
    ledger = started(tmp_path)
    ready(ledger, 0)
    with ledger.journal.path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(UserError, match="line 4: damaged"):
        Journal(ledger.journal.path)


def test_a_journal_is_neither_overwritten_nor_invented(tmp_path: Path) -> None:
    path = started(tmp_path).journal.path
    with pytest.raises(UserError, match="exists already; resume"):
        Journal(path, {})
    path.write_bytes(b"")
    with pytest.raises(UserError, match="line 1: not the head"):
        Journal(path)
    path.unlink()
    with pytest.raises(UserError, match="no such file"):
        Journal(path)


def test_a_full_disk_is_one_line_and_leaves_no_half_line(tmp_path: Path) -> None:
    ledger = started(tmp_path)
    ready(ledger, 0)
    size = ledger.journal.path.stat().st_size
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, limits[1]))
    try:
        with pytest.raises(UserError, match=r"journal.jsonl: cannot be written: .*; free some space"):
            ledger.dispatched(1, 0, 9.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert ledger.journal.path.stat().st_size == size and list(ledger.alive) == [0]
    ledger.dispatched(1, 0, 9.0)
    assert list(resumed(ledger).alive) == [0, 1]


def test_an_ordinal_ends_once(tmp_path: Path) -> None:
    ledger = started(tmp_path)
    ready(ledger, 0, 1)
    ledger.ended(0, Ending.STALE)
    with pytest.raises(AssertionError, match="group 0 ends as failed, and had ended before"):
        ledger.ended(0, Ending.FAILED)
    with pytest.raises(AssertionError, match="ready twice"):
        ledger.ready(ref(1))
    ledger.taken(0, [1])
    ledger.trained(0)
    with pytest.raises(KeyError):
        ledger.trained(0)
