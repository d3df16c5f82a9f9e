"""Group ledger: the state of every dispatched group, and the journal of events behind it.

Each ordinal ends exactly once. A run resumes from a *cut*, the ledger's state in a snapshot of the trainer, and from the
journal's events after it. Steps after the snapshot are undone with the trainer's weights: their groups are alive again and
belong to the same batches of the same steps as before, so that the same weights are computed a second time. If the store has lost
one of these groups, its step and the later ones are made with other groups: what was sampled with their former weights is
dropped (`State.forgotten`), and those groups are sampled again.
"""

from __future__ import annotations

import errno
import json
import os
import sqlite3
from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
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
    """Number in the run, from 1."""
    kind: str
    """Name of a method of `State`."""
    facts: dict[str, Any]
    """Arguments of that method, plain JSON values."""


@dataclass(slots=True)
class Entry:
    """A group alive: from its first dispatch until it was trained or dropped. Written by `State` alone."""

    ordinal: int
    attempt: int = 0
    """Number of the last attempt, from 0."""
    num_failures: int = 0
    """Number of failed attempts that count (`Controller.group_failed`)."""
    deadline_s: float | None = None
    """End of the lease of the attempt in flight, in Unix seconds; None if no attempt is in flight."""
    ref: GroupRef | None = None
    """The stored group; None until it is ready."""
    num_overtaken: int = 0
    """Number of younger groups that were trained before it."""
    num_vanished: int = 0
    """How often the store lost the group."""


@dataclass(slots=True)
class State:
    """State of every ordinal. The methods above `choose` are the kinds of events; equal events give equal states."""

    version: int = 0
    """Version of the trainer: number of completed steps."""
    num_dispatched: int = 0
    """All ordinals below this were dispatched."""
    alive: dict[int, Entry] = field(default_factory=dict)
    """By ordinal, ascending."""
    endings: dict[Ending, int] = field(default_factory=dict)
    """Number of ordinals by ending; together, all that were dispatched and are not alive."""
    batches: dict[int, list[int]] = field(default_factory=dict)
    """By step: ordinals, ascending, of a batch that was chosen and is not trained yet."""
    reached: int = 0
    """Version from which the run last returned to a snapshot. While it is above `version`, the run repeats steps."""

    @property
    def will_repeat(self) -> bool:
        """Whether all steps up to the version ``reached`` have the batches with which they were made before the return to a snapshot."""
        return self.version + len(self.batches) >= self.reached

    def dispatched(self, ordinal: int, attempt: int, deadline_s: float) -> None:
        """An attempt at a group starts, with a lease until ``deadline_s``."""
        if ordinal == self.num_dispatched:
            self.alive[ordinal] = Entry(ordinal)
            self.num_dispatched += 1
        entry = self.alive[ordinal]
        assert entry.deadline_s is None and entry.ref is None, f"{entry} is dispatched again"
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
        """An attempt failed. It ``counts`` if the group itself may be the reason."""
        self.alive[ordinal].num_failures += counts
        self.alive[ordinal].deadline_s = None

    def vanished(self, ordinals: list[int]) -> None:
        """Stored groups were lost with a part of the store: they are dispatched again. Batches from the first one with such a group
        on are chosen again, because a group must not wait for groups of later steps."""
        for ordinal in ordinals:
            self.alive[ordinal].ref = None
            self.alive[ordinal].num_vanished += 1
        self._choose_again(ordinals)

    def forgotten(self, ordinals: list[int]) -> None:
        """Not all steps will be repeated (`will_repeat`). Stored groups that may have tokens of weights that are not made again are
        dispatched again."""
        for ordinal in ordinals:
            self.alive[ordinal].ref = None
        self.reached = self.version + len(self.batches)

    def _choose_again(self, ordinals: Sequence[int]) -> None:
        """Forget the batches from the first one with a group of ``ordinals`` on."""
        broken = [step for step, chosen in self.batches.items() if not set(ordinals).isdisjoint(chosen)]
        self.batches = {step: chosen for step, chosen in self.batches.items() if step < min(broken, default=step + 1)}

    def batch(self, step: int, ordinals: list[int]) -> None:
        """Ready groups were chosen as the batch of a step."""
        assert all(self.alive[ordinal].ref is not None for ordinal in ordinals), ordinals
        self.batches[step] = ordinals

    def trained(self, step: int, ordinals: list[int], locations: list[str]) -> None:
        """The batch of ``step`` was trained: its groups end. Their files stay until `Ledger.covered` releases them."""
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
        self._choose_again([ordinal])  # a resumed run that ends early has batches of steps that it was to repeat

    def resumed(self) -> None:
        """The run was resumed: no attempt is in flight."""
        for entry in self.alive.values():
            entry.deadline_s = None

    def choose(self, num: int, window: int) -> list[GroupRef] | None:
        """The oldest ``num`` ready groups that the window W admits, by ordinal; None if there are fewer.

        While a group waits, at most W − 1 younger ones are chosen; dropped ones do not count. This is MiniMax's windowed
        queue (2605.26494), counted in groups trained instead of positions.
        """
        chosen: list[GroupRef] = []
        left = num  # groups that may still be chosen before the window of a waiting group is exhausted
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
        """Groups in no batch, oldest first: each with the number of groups that are older or in a batch, and with the
        number of younger groups that were chosen before it."""
        chosen = sorted(ordinal for ordinals in self.batches.values() for ordinal in ordinals)
        waiting = self.alive.keys() - chosen
        others = (entry for entry in self.alive.values() if entry.ordinal in waiting)
        for num_older, entry in enumerate(others, len(chosen)):
            yield entry, num_older, entry.num_overtaken + len(chosen) - bisect(chosen, entry.ordinal)


_HEAD = "opened"
"""Kind of the first row. Its number is that of the last event that was deleted from the journal."""
_CREATE = "CREATE TABLE events (number INTEGER PRIMARY KEY, kind TEXT, facts TEXT)"
_INSERT = "INSERT INTO events VALUES (?, ?, ?)"


def read_events(path: Path | str) -> list[Event]:
    """All events of a journal, its head first. The run may be in progress.
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
    """The state, and the journal to which each change is written first: sqlite with a write-ahead log. A kill of the process
    loses no event, a power failure at most the events after the last durable one. The newest events are in the ``-wal`` file."""

    def __init__(self, path: Path | str, state: State, last: int) -> None:
        """Use `start` or `resume`."""
        self.path, self.state = Path(path), state
        self._last = last  # number of the last event
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)  # never used concurrently

    @classmethod
    def in_memory(cls) -> Self:
        """The ledger of a simulated run, whose journal no other process reads."""
        ledger = cls(":memory:", State(), 0)
        ledger._db.execute(_CREATE)
        return ledger

    @classmethod
    def start(cls, path: Path | str) -> Self:
        """The ledger of a new run. Raises UserError: there is a journal already, or it cannot be written."""
        if Path(path).exists():
            raise UserError(f"{path}: exists already; resume that run or choose another folder")
        # under a temporary name first, so that a journal that exists is complete
        with replacing(path) as partial, _writing(path), closing(sqlite3.connect(partial)) as db, db:
            db.execute("PRAGMA journal_mode = WAL")  # the file remembers it
            db.execute(_CREATE)
            db.execute(_INSERT, (0, _HEAD, "{}"))
        return cls(path, State(), 0)

    @classmethod
    def resume(cls, path: Path | str, cut: Mapping[str, Any] | None) -> Self:
        """The ledger after a cut (None: the run's start) and the journal's later events, with no attempt in flight.
        Raises UserError: the journal is damaged, or the cut does not belong to it."""
        events, start = read_events(path), cut["line"] if cut else 0
        first, last = events[0].number, events[-1].number
        if not first <= start <= last:
            raise UserError(
                f"{path}: lines: it has {first + 1} to {last}, the snapshot was taken after {start}; resume from a newer "
                "snapshot, or restore the journal"
            )
        state = msgspec.convert(cut["state"], State, str_keys=True) if cut else State()
        for number, kind, facts in events:
            if number > start and kind == "trained":  # the step's weights are lost: its groups are trained again
                state.reached = max(state.reached, facts["step"] + 1)
            elif number > start:
                getattr(state, kind)(**facts)
        ledger = cls(path, state, last)
        ledger.record("resumed")
        return ledger

    def record(self, kind: str, *, durable: bool = False, **facts: Any) -> None:
        """Append an event and apply it: the method ``kind`` of `State` with its arguments. ``durable``: it and all earlier
        events survive a power failure too. Raises UserError: the disk is full, or the file cannot be written."""
        with _writing(self.path):
            self._db.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            self._db.execute(_INSERT, (self._last + 1, kind, json.dumps(facts)))
        self._last += 1
        getattr(self.state, kind)(**facts)

    def cut(self) -> dict[str, Any]:
        """State and number of the last event for `resume`, as plain JSON values."""
        return {"line": self._last, "state": msgspec.to_builtins(self.state, str_keys=True)}

    def covered(self, cut: Mapping[str, Any]) -> list[str]:
        """Delete the journal before ``cut``: no older cut will be resumed from. Returns the files of groups that no run can
        need any more. A group of an undone step may still wait for its step."""
        locations = self._trained_locations(cut["line"])
        with _writing(self.path), self._db:
            self._db.execute("BEGIN")
            self._db.execute("DELETE FROM events WHERE number <= ?", (cut["line"],))
            self._db.execute(_INSERT, (cut["line"], _HEAD, "{}"))
        kept = self.kept_locations()
        return [location for location in locations if location not in kept]

    def ready_groups(self) -> list[GroupRef]:
        """Stored groups that a step will train."""
        return [entry.ref for entry in self.state.alive.values() if entry.ref is not None]

    def kept_locations(self) -> set[str]:
        """Files of all groups that this run or a resumed one may read. Other files, left by a kill, may be deleted."""
        return {*(ref.location for ref in self.ready_groups()), *self._trained_locations(self._last)}

    def _trained_locations(self, until: int) -> list[str]:
        rows = self._db.execute("SELECT facts FROM events WHERE kind = 'trained' AND number <= ?", (until,))
        return [location for (facts,) in rows for location in json.loads(facts)["locations"]]

    def close(self) -> None:
        """Close the journal. May be called twice."""
        self._db.close()


@contextmanager
def _writing(path: Path | str) -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError as error:
        problem = os.strerror(errno.ENOSPC) if error.sqlite_errorcode == sqlite3.SQLITE_FULL else error
        raise UserError(f"{path}: cannot be written: {problem}; free some space, then resume the run") from error
