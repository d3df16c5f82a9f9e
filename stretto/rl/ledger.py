"""Every group that was ever handed out, and how it ended: a journal on disk, and the state that its lines add up to.

Each ordinal ends exactly once. A run is taken up again from a *cut*, the state that goes into a snapshot of the trainer, and
the journal's lines after it. What was trained after the snapshot is undone with the trainer's weights: those groups are
alive again, and belong to the same batches of the same steps as before, so that the same weights are made a second time.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from stretto.base.errors import UserError
from stretto.base.paths import replacing
from stretto.base.trajectory import Ending, Task
from stretto.rl.buffer import GroupRef

Line = Mapping[str, Any]
"""Plain JSON: ``n`` (number of the line in the run), ``kind``, and what the kind needs."""


class Journal:
    """Lines of JSON that are only ever appended. A kill can tear the last one, which is dropped when it is opened again.

    It replaces nothing while it grows, so it is not written by `replacing`; `shorten` is.
    """

    def __init__(self, path: Path | str, header: Mapping[str, Any] | None = None) -> None:
        """Start a journal with ``header``, or open one that exists (None).

        Raises:
            UserError: one exists already, there is none, or it is damaged.
        """
        self.path = Path(path)
        if header is not None:
            if self.path.exists():
                raise UserError(f"{self.path}: exists already; resume that run or choose another folder")
            self._replace([{"n": 0, "kind": "opened", **header}])
        self.lines: list[Line] = self._read()
        """What was in it when it was opened; to be let go by whoever has read them."""
        self.header = self.lines[0]
        self.last: int = self.lines[-1]["n"]
        """Number of the last line."""
        self._file = self._open()

    def append(self, kind: str, *, durable: bool = False, **values: Any) -> Line:
        """Write a line; ``durable``: it survives a power failure too, with all lines before it.

        Raises:
            UserError: the disk is full, or the file cannot be written.
        """
        line = {"n": self.last + 1, "kind": kind, **values}
        rest = json.dumps(line).encode() + b"\n"
        size = os.lseek(self._file, 0, os.SEEK_END)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
            if durable:
                os.fsync(self._file)
        except OSError as error:
            os.ftruncate(self._file, size)  # half a line must not stay in front of others
            raise UserError(
                f"{self.path}: cannot be written: {error.strerror}; free some space, then resume the run"
            ) from error
        self.last = line["n"]
        return line

    def shorten(self, after: int) -> None:
        """Forget all lines up to number ``after``."""
        if after <= self.header["n"]:
            return
        lines = self._read()
        self.header = {**self.header, "n": after}
        self._replace([self.header, *(line for line in lines[1:] if line["n"] > after)])
        os.close(self._file)
        self._file = self._open()

    def close(self) -> None:
        """Closing twice is nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _open(self) -> int:
        return os.open(self.path, os.O_WRONLY | os.O_APPEND)

    def _read(self) -> list[Line]:
        try:
            text = self.path.read_bytes()
        except FileNotFoundError:
            raise UserError(f"{self.path}: no such file; without its journal the run cannot be resumed") from None
        whole = text.rfind(b"\n") + 1
        if whole < len(text):
            os.truncate(self.path, whole)
        lines: list[Line] = []
        for number, row in enumerate(text[:whole].splitlines(), start=1):
            try:
                lines.append(json.loads(row))
                in_order = len(lines) == 1 or lines[-1]["n"] > lines[-2]["n"]
            except (ValueError, TypeError, KeyError):
                in_order = False
            if not in_order:
                raise UserError(f"{self.path}: line {number}: damaged; restore the file or start a new run")
        if not lines or lines[0].get("kind") != "opened":
            raise UserError(f"{self.path}: line 1: not the head of a journal; restore the file or start a new run")
        return lines

    def _replace(self, lines: Iterable[Line]) -> None:
        with replacing(self.path) as temporary, temporary.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())


@dataclass(frozen=True, slots=True)
class Handout:
    """A task for an agent. Written by `Controller.admit`."""

    task: Task
    attempt: int
    """From 0; the result must carry it."""
    deadline_s: float
    """Unix seconds; whoever has not reported by then need not."""


@dataclass(slots=True)
class Entry:
    """A group alive. Written by `Ledger` alone."""

    ordinal: int
    attempt: int = 0
    """Its last hand-out."""
    num_failures: int = 0
    """Hand-outs that failed for a reason that counts."""
    deadline_s: float | None = None
    """Unix seconds by which it must report; None: nobody has it."""
    ref: GroupRef | None = None
    """Once it is ready."""


@dataclass(slots=True)
class Ledger:
    """State of all ordinals. Each method writes one line and then changes the state as reading that line would."""

    journal: Journal
    num_dispatched: int = 0
    """Ordinals below this were handed out."""
    alive: dict[int, Entry] = field(default_factory=dict)
    """By ordinal, ascending."""
    endings: Counter[Ending] = field(default_factory=Counter)
    """How many ordinals ended so; all that were handed out and are not alive."""
    batches: dict[int, list[int]] = field(default_factory=dict)
    """Ordinals of the batches that were taken and not trained since, by step."""
    trained_locations: dict[int, list[str]] = field(default_factory=dict)
    """Where the groups lie that were trained after the oldest cut that the journal reaches back to, by step."""

    @classmethod
    def resume(cls, journal: Journal, cut: Mapping[str, Any] | None) -> Ledger:
        """The state that a cut (None: the run's start) and the later lines of the journal add up to; nobody has a group.

        Raises:
            UserError: the two do not belong together.
        """
        ledger = cls(journal)
        start = 0
        if cut is not None:
            start = cut["line"]
            ledger.num_dispatched = cut["num_dispatched"]
            entries = [Entry(**{**row, "ref": _ref(row["ref"])}) for row in cut["alive"]]
            ledger.alive = {entry.ordinal: entry for entry in entries}
            ledger.endings = Counter({Ending(name): num for name, num in cut["endings"].items()})
            ledger.batches = {int(step): list(ordinals) for step, ordinals in cut["batches"].items()}
        if not journal.header["n"] <= start <= journal.last:
            raise UserError(
                f"{journal.path}: lines: it has {journal.header['n'] + 1} to {journal.last}, the snapshot was taken after "
                f"{start}; resume from a newer snapshot, or restore the journal"
            )
        for line in journal.lines:
            if line["n"] > start:
                ledger._apply(line)
            elif line["kind"] == "trained":
                ledger.trained_locations[line["step"]] = line["locations"]
        ledger._apply(journal.append("resumed"))
        journal.lines = []
        return ledger

    def cut(self) -> dict[str, Any]:
        """The state as plain JSON values."""
        return {
            "line": self.journal.last,
            "num_dispatched": self.num_dispatched,
            "alive": [asdict(entry) for entry in self.alive.values()],
            "endings": {ending.value: num for ending, num in self.endings.items()},
            "batches": {str(step): ordinals for step, ordinals in self.batches.items()},
        }

    def dispatched(self, ordinal: int, attempt: int, deadline_s: float) -> None:
        """Handed out, with a lease until ``deadline_s``."""
        self._apply(self.journal.append("dispatched", ordinal=ordinal, attempt=attempt, deadline_s=deadline_s))

    def ready(self, ref: GroupRef) -> None:
        self._apply(self.journal.append("ready", group=asdict(ref)))

    def lost(self, ordinal: int, attempt: int, why: str, counts: bool) -> None:
        """An attempt came to nothing. It ``counts`` where the group itself may be the reason."""
        self._apply(self.journal.append("lost", ordinal=ordinal, attempt=attempt, why=why, counts=counts))

    def taken(self, step: int, ordinals: list[int]) -> None:
        """Ready groups make the batch of a step."""
        self._apply(self.journal.append("batch", durable=True, step=step, ordinals=ordinals))

    def trained(self, step: int) -> None:
        """The batch of ``step`` was trained: its groups end."""
        ordinals = self.batches.pop(step)
        refs = [self.alive[ordinal].ref for ordinal in ordinals]
        locations = [ref.location for ref in refs if ref is not None]
        self.journal.append("trained", durable=True, step=step, ordinals=ordinals, locations=locations)
        self.trained_locations[step] = locations
        for ordinal in ordinals:
            self._end(ordinal, Ending.TRAINED)

    def covered(self, cut: Mapping[str, Any], version: int) -> list[str]:
        """No cut older than this one, of trainer version ``version``, will be resumed from: what nobody can ask for now."""
        self.journal.shorten(cut["line"])
        steps = [step for step in self.trained_locations if step < version]
        return [location for step in steps for location in self.trained_locations.pop(step)]

    def ended(self, ordinal: int, ending: Ending, why: str = "") -> None:
        """A group was dropped."""
        assert ending is not Ending.TRAINED, f"group {ordinal}: a batch is trained as one"
        self._apply(self.journal.append("ended", durable=True, ordinal=ordinal, ending=ending.value, why=why))

    def kept_locations(self) -> set[str]:
        """Where all groups lie that this run or a resumed one may read."""
        ready = {entry.ref.location for entry in self.alive.values() if entry.ref is not None}
        return ready.union(*self.trained_locations.values())

    def check(self) -> None:
        """Every ordinal is alive or has ended, once."""
        ended = sum(self.endings.values())
        assert self.num_dispatched == len(self.alive) + ended, (self.num_dispatched, len(self.alive), self.endings)
        taken = [ordinal for ordinals in self.batches.values() for ordinal in ordinals]
        assert len(set(taken)) == len(taken) and set(taken) <= set(self.alive), (taken, list(self.alive))

    def _apply(self, line: Line) -> None:
        kind = line["kind"]
        if kind == "dispatched":
            self._dispatch(line["ordinal"], line["attempt"], line["deadline_s"])
        elif kind == "ready":
            ref = _ref(line["group"])
            assert ref is not None and self.alive[ref.ordinal].ref is None, f"group {line['group']} is ready twice"
            self.alive[ref.ordinal].ref = ref
            self.alive[ref.ordinal].deadline_s = None
        elif kind == "lost":
            self.alive[line["ordinal"]].num_failures += line["counts"]
            self.alive[line["ordinal"]].deadline_s = None
        elif kind == "batch":
            assert all(self.alive[ordinal].ref is not None for ordinal in line["ordinals"]), line
            self.batches[line["step"]] = line["ordinals"]
        elif kind == "ended":
            self._end(line["ordinal"], Ending(line["ending"]))
        elif kind == "resumed":
            for entry in self.alive.values():
                entry.deadline_s = None
        else:
            # Only read when resuming, after the cut: the weights of that step are gone, so its groups are to be trained.
            assert kind == "trained", line

    def _dispatch(self, ordinal: int, attempt: int, deadline_s: float) -> None:
        if ordinal == self.num_dispatched:
            self.alive[ordinal] = Entry(ordinal)
            self.num_dispatched += 1
        entry = self.alive[ordinal]
        assert entry.deadline_s is None and entry.ref is None, f"{entry} is handed out again"
        entry.attempt, entry.deadline_s = attempt, deadline_s

    def _end(self, ordinal: int, ending: Ending) -> None:
        assert ordinal in self.alive, f"group {ordinal} ends as {ending.value}, and had ended before"
        del self.alive[ordinal]
        self.endings[ending] += 1


def _ref(values: Mapping[str, Any] | None) -> GroupRef | None:
    return None if values is None else GroupRef(**values)
