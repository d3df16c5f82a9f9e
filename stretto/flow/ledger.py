"""Group ledger: the state of every dispatched group, and the journal of events behind it.

Each ordinal ends exactly once. A run is taken up again from a *cut*, the state that goes into a snapshot of the trainer, and
the journal's events after it. What was trained after the snapshot is undone with the trainer's weights: those groups are
alive again, and belong to the same batches of the same steps as before, so that the same weights are made a second time.
"""

from __future__ import annotations

import errno
import json
import os
import sqlite3
from bisect import bisect
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec

from stretto.base.errors import UserError
from stretto.base.paths import replacing
from stretto.base.trajectory import Ending, GroupRef


class Event(NamedTuple):
    """A change of the state. Written by `Ledger`."""

    number: int
    """In the run, from 1."""
    kind: str
    """The name of a method of `State`."""
    facts: dict[str, Any]
    """The arguments of that method, plain JSON values."""


@dataclass(slots=True)
class Entry:
    """A group alive: from its first hand-out until it was trained or dropped. Written by `State` alone."""

    ordinal: int
    attempt: int = 0
    """Its last hand-out."""
    num_failures: int = 0
    """Hand-outs that failed for a reason that counts."""
    deadline_s: float | None = None
    """Unix seconds by which it must report; None: nobody has it."""
    ref: GroupRef | None = None
    """Once it is ready."""
    num_overtaken: int = 0
    """Younger groups that were trained before it."""


@dataclass(slots=True)
class State:
    """Where every ordinal is. The methods above `choose` are the kinds of events; the same events make the same state."""

    version: int = 0
    """Of the trainer: steps done."""
    num_dispatched: int = 0
    """Ordinals below this were handed out."""
    alive: dict[int, Entry] = field(default_factory=dict)
    """By ordinal, ascending."""
    endings: dict[Ending, int] = field(default_factory=dict)
    """How many ordinals ended so; all that were handed out and are not alive."""
    batches: dict[int, list[int]] = field(default_factory=dict)
    """Ordinals, ascending, of the batches that were taken and not trained since, by step."""

    def dispatched(self, ordinal: int, attempt: int, deadline_s: float) -> None:
        """Handed out, with a lease until ``deadline_s``."""
        if ordinal == self.num_dispatched:
            self.alive[ordinal] = Entry(ordinal)
            self.num_dispatched += 1
        entry = self.alive[ordinal]
        assert entry.deadline_s is None and entry.ref is None, f"{entry} is handed out again"
        entry.attempt, entry.deadline_s = attempt, deadline_s

    def leased(self, ordinal: int, attempt: int, deadline_s: float) -> None:
        """An agent has begun the attempt ``attempt``: its lease ends at ``deadline_s``, however long it waited for the agent."""
        self.alive[ordinal].deadline_s = deadline_s

    def ready(self, group: Mapping[str, Any]) -> None:
        """The group is stored; ``group`` are the fields of its `GroupRef`."""
        entry = self.alive[group["ordinal"]]
        assert entry.ref is None, f"group {group['ordinal']} is ready twice"
        entry.ref, entry.deadline_s = GroupRef(**group), None

    def lost(self, ordinal: int, attempt: int, why: str, counts: bool) -> None:
        """An attempt came to nothing. It ``counts`` where the group itself may be the reason."""
        self.alive[ordinal].num_failures += counts
        self.alive[ordinal].deadline_s = None

    def batch(self, step: int, ordinals: list[int]) -> None:
        """Ready groups make the batch of a step."""
        assert all(self.alive[ordinal].ref is not None for ordinal in ordinals), ordinals
        self.batches[step] = ordinals

    def trained(self, step: int, ordinals: list[int], locations: list[str]) -> None:
        """The batch of ``step`` was trained: its groups end. Their files stay until `Ledger.covered` lets them go."""
        assert step == self.version and self.batches[step] == ordinals, f"step {step} of version {self.version}"
        self.version += 1
        del self.batches[step]
        for ordinal in ordinals:
            self.ended(ordinal, Ending.TRAINED.value)
        for entry in self.alive.values():
            entry.num_overtaken += len(ordinals) - bisect(ordinals, entry.ordinal)

    def ended(self, ordinal: int, ending: str, why: str = "") -> None:
        assert ordinal in self.alive, f"group {ordinal} ends as {ending}, and had ended before"
        del self.alive[ordinal]
        self.endings[Ending(ending)] = self.endings.get(Ending(ending), 0) + 1

    def resumed(self) -> None:
        """Nobody has a group."""
        for entry in self.alive.values():
            entry.deadline_s = None

    def choose(self, num: int, window: int) -> list[GroupRef] | None:
        """The oldest ``num`` ready groups that the window W lets by, by ordinal; None as long as there are fewer.

        While a group waits, at most W − 1 younger ones are taken; dropped ones do not count. This is MiniMax's windowed
        queue (2605.26494), counted in groups trained instead of positions.
        """
        chosen: list[GroupRef] = []
        left = num  # how many may still be chosen without overtaking somebody too often
        for entry, _, num_overtaken in self.waiting():
            if left == 0:
                break
            if entry.ref is not None:
                chosen.append(entry.ref)
                left -= 1
            else:
                left = min(left, window - 1 - num_overtaken)
        return chosen if len(chosen) == num else None

    def waiting(self) -> Iterator[tuple[Entry, int, int]]:
        """Groups in no batch, oldest first: each with the number of those that are older or in a batch, and with the
        number of younger ones that were taken before it."""
        taken = sorted(ordinal for ordinals in self.batches.values() for ordinal in ordinals)
        waiting = self.alive.keys() - taken
        others = (entry for entry in self.alive.values() if entry.ordinal in waiting)
        for num_older, entry in enumerate(others, len(taken)):
            yield entry, num_older, entry.num_overtaken + len(taken) - bisect(taken, entry.ordinal)

    def check(self) -> None:
        """Raises AssertionError: a group was lost, or counted twice."""
        ended = sum(self.endings.values())
        assert self.num_dispatched == len(self.alive) + ended, (self.num_dispatched, len(self.alive), self.endings)
        taken = [ordinal for ordinals in self.batches.values() for ordinal in ordinals]
        assert len(set(taken)) == len(taken) and set(taken) <= set(self.alive), (taken, list(self.alive))


_HEAD = "opened"
"""Kind of the first row. Its number is that of the last event that the journal has forgotten."""
_INSERT = "INSERT INTO events VALUES (?, ?, ?)"


def read_events(path: Path | str) -> list[Event]:
    """What is in a journal, its head first; also while its run goes on.
    Raises UserError: there is no journal, or it is damaged."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file; without its journal the run cannot be resumed")
    try:
        with closing(sqlite3.connect(path)) as db:
            rows = db.execute("SELECT number, kind, facts FROM events ORDER BY number").fetchall()
        events = [Event(number, kind, json.loads(facts)) for number, kind, facts in rows]
    except (sqlite3.DatabaseError, ValueError) as error:
        raise UserError(f"{path}: damaged: {error}; restore the file or start a new run") from error
    if not events or events[0].kind != _HEAD:
        raise UserError(f"{path}: damaged: its head is missing; restore the file or start a new run")
    return events


class Ledger:
    """The state, and the journal that each change of it is written to first: sqlite with a write-ahead log. A kill of the
    process loses no event, a power failure at most those after the last durable one. The last ones lie in ``-wal`` beside it."""

    def __init__(self, path: Path | str, state: State, last: int) -> None:
        """Use `start` or `resume`."""
        self.path, self.state = Path(path), state
        self._last = last  # event's number
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)  # one after the other

    @classmethod
    def start(cls, path: Path | str) -> Self:
        """A new run. Raises UserError: there is a journal already, or it cannot be written."""
        if Path(path).exists():
            raise UserError(f"{path}: exists already; resume that run or choose another folder")
        # beside its name first: a journal that is there is whole
        with replacing(path) as partial, _writing(path), closing(sqlite3.connect(partial)) as db, db:
            db.execute("PRAGMA journal_mode = WAL")  # the file remembers it
            db.execute("CREATE TABLE events (number INTEGER PRIMARY KEY, kind TEXT, facts TEXT)")
            db.execute(_INSERT, (0, _HEAD, "{}"))
        return cls(path, State(), 0)

    @classmethod
    def resume(cls, path: Path | str, cut: Mapping[str, Any] | None) -> Self:
        """What a cut (None: the run's start) and the journal's later events add up to; nobody has a group.
        Raises UserError: the journal is damaged, or the two do not belong together."""
        events, start = read_events(path), cut["line"] if cut else 0
        first, last = events[0].number, events[-1].number
        if not first <= start <= last:
            raise UserError(
                f"{path}: lines: it has {first + 1} to {last}, the snapshot was taken after {start}; resume from a newer "
                "snapshot, or restore the journal"
            )
        state = msgspec.convert(cut["state"], State, str_keys=True) if cut else State()
        for number, kind, facts in events:
            if number > start and kind != "trained":  # that step's weights are gone: its groups are to be trained again
                getattr(state, kind)(**facts)
        ledger = cls(path, state, last)
        ledger.record("resumed")
        return ledger

    def record(self, kind: str, *, durable: bool = False, **facts: Any) -> None:
        """Something has happened: a method of `State` and its arguments. ``durable``: it survives a power failure too, with
        all before it. Raises UserError: the disk is full, or the file cannot be written."""
        with _writing(self.path):
            self._db.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            self._db.execute(_INSERT, (self._last + 1, kind, json.dumps(facts)))
        self._last += 1
        getattr(self.state, kind)(**facts)

    def cut(self) -> dict[str, Any]:
        """For `resume`, as plain JSON values."""
        return {"line": self._last, "state": msgspec.to_builtins(self.state, str_keys=True)}

    def covered(self, cut: Mapping[str, Any]) -> list[str]:
        """No cut older than this one will be resumed from: the journal before it is given up. Returns where the groups lie
        that nobody can ask for any more."""
        locations = self._trained_locations(cut["line"])
        with _writing(self.path), self._db:
            self._db.execute("BEGIN")
            self._db.execute("DELETE FROM events WHERE number <= ?", (cut["line"],))
            self._db.execute(_INSERT, (cut["line"], _HEAD, "{}"))
        return locations

    def kept_locations(self) -> set[str]:
        """Where all groups lie that this run or a resumed one may read; what else a kill has left behind may be deleted."""
        ready = [entry.ref.location for entry in self.state.alive.values() if entry.ref is not None]
        return {*ready, *self._trained_locations(self._last)}

    def _trained_locations(self, until: int) -> list[str]:
        rows = self._db.execute("SELECT facts FROM events WHERE kind = 'trained' AND number <= ?", (until,))
        return [location for (facts,) in rows for location in json.loads(facts)["locations"]]

    def close(self) -> None:
        """Closing twice is nothing."""
        self._db.close()


@contextmanager
def _writing(path: Path | str) -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError as error:
        problem = os.strerror(errno.ENOSPC) if error.sqlite_errorcode == sqlite3.SQLITE_FULL else error
        raise UserError(f"{path}: cannot be written: {problem}; free some space, then resume the run") from error
