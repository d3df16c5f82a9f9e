"""Who is handed out, what is trained next, and what a resumed run takes up again: metadata only. Imports no torch.

The driver calls, in any order that events come in:

    controller.admit()                                         hand these out now; after every other call, and when a lease may have run out
    controller.group_ready(ref), controller.group_failed(…)    an attempt has stored its group, or came to nothing
    controller.next_batch(), controller.trained(step)          while the trainer has room; the step is done
    controller.published(version), controller.engine_active(engine, version), controller.engine_gone(engine)
    controller.checkpoint_cut(), controller.covered(cut)       into a snapshot; all older ones are gone

Nothing here waits, and time comes from ``clock`` alone, so that simulated schedules test it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from stretto.base.errors import UserError
from stretto.base.trajectory import Ending, Task
from stretto.rl.buffer import Buffer, GroupRef
from stretto.rl.ledger import Entry, Handout, Journal, Ledger
from stretto.rl.throttle import Gate, Limits


class Controller:
    """Owns the ledger and the buffer. Not for several threads."""

    def __init__(
        self,
        limits: Limits,
        task_of: Callable[[int], Task],
        ledger: Ledger,
        *,
        version: int = 0,
        overtaken: Mapping[int, int] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Use `start` or `resume`. ``task_of`` gives the task of an ordinal, always the same; ``clock`` Unix seconds."""
        self.limits = limits
        self.version = version
        self.published_version = version
        self.max_staleness = 0  # largest among all groups trained
        self._gate = Gate(limits.prompts, limits.staleness, limits.window)
        self._task_of = task_of
        self._ledger = ledger
        self._clock = clock
        self._buffer = Buffer()
        for entry in ledger.alive.values():
            self._buffer.add(entry.ordinal, (overtaken or {}).get(entry.ordinal, 0))
            if entry.ref is not None:
                self._buffer.put(entry.ref)
        self._engines: dict[str, int] = {}
        self._engine_floor = 0
        self._unneeded: list[str] = []
        self._events: Counter[str] = Counter()
        self.discarded: Counter[str] = Counter()
        """Sampled tokens not trained on, by an ending's name or ``late``."""

    @classmethod
    def start(
        cls,
        limits: Limits,
        task_of: Callable[[int], Task],
        journal: Path | str,
        clock: Callable[[], float] = time.time,
    ) -> Self:
        """A new run.

        Raises:
            UserError: there is a journal already.
        """
        return cls(limits, task_of, Ledger(Journal(journal, {"limits": limits.identity})), clock=clock)

    @classmethod
    def resume(
        cls,
        limits: Limits,
        task_of: Callable[[int], Task],
        journal: Path | str,
        cut: Mapping[str, Any] | None,
        clock: Callable[[], float] = time.time,
    ) -> Self:
        """Go on from the snapshot that holds ``cut``; None: from the run's start, with the groups that its journal knows.

        No agent is at work any more: what was in flight is handed out again, as soon as the bound allows.

        Raises:
            UserError: the recipe differs, or the journal is damaged or not this run's.
        """
        opened = Journal(journal)
        for name, value in limits.identity.items():
            if opened.header["limits"][name] != value:
                raise UserError(
                    f"recipe: {name}: {value}, and the run was started with {opened.header['limits'][name]} ({journal}); "
                    "resume it with its own recipe, or start a new run"
                )
        ledger = Ledger.resume(opened, cut and cut["ledger"])
        version = 0 if cut is None else cut["version"]
        overtaken = {} if cut is None else {int(ordinal): num for ordinal, num in cut["overtaken"].items()}
        return cls(limits, task_of, ledger, version=version, overtaken=overtaken, clock=clock)

    def admit(self) -> list[Handout]:
        """Groups to be handed out now, oldest first; leases that ran out are taken back before.

        A group is handed out again under its old place in line. Empty as long as no engine is known.
        """
        now = self._clock()
        for entry in [entry for entry in self._ledger.alive.values() if entry.deadline_s is not None]:
            if entry.deadline_s is not None and entry.deadline_s <= now:
                self._events["expired"] += 1
                self._lose(entry, f"no report within {self.limits.lease_s:g} s", counts=True)
        if not self._engines:
            return []
        handouts = []
        for ordinal, num_older in self._buffer.waiting():
            entry = self._ledger.alive[ordinal]
            if entry.deadline_s is None:
                if not self._may_dispatch(num_older, self._buffer.num_overtaken(ordinal)):
                    break  # the younger ones have more before them
                handouts.append(self._hand_out(ordinal, entry.attempt + 1, now))
        while self._is_needed() and self._may_dispatch(len(self._buffer), 0):
            ordinal = self._ledger.num_dispatched
            handouts.append(self._hand_out(ordinal, 0, now))
            self._buffer.add(ordinal)
        return handouts

    def group_ready(self, ref: GroupRef) -> bool:
        """An attempt has stored its group; False: too late, another attempt is under way or was first."""
        entry = self._ledger.alive.get(ref.ordinal)
        if entry is None or entry.attempt != ref.attempt or entry.deadline_s is None:
            self._events["late"] += 1
            if ref.location not in self._ledger.kept_locations():
                self._unneeded.append(ref.location)
                self.discarded["late"] += ref.num_tokens
            return False
        self._ledger.ready(ref)
        self._buffer.put(ref)
        if ref.is_uniform and self.limits.drop_uniform:
            self._drop(ref.ordinal, Ending.FILTERED, "all rewards are equal")
        return True

    def group_failed(self, ordinal: int, attempt: int, why: str, counts: bool = True) -> None:
        """An attempt came to nothing, for a reason of ours: it is handed out again, or ends as failed after too many.

        Args:
            counts: the group itself may be the reason. A role that was killed under it is none.
        """
        entry = self._ledger.alive.get(ordinal)
        if entry is None or entry.attempt != attempt or entry.deadline_s is None:
            self._events["late"] += 1
            return
        self._events["failed_attempts"] += 1
        self._lose(entry, why, counts)

    def next_batch(self) -> tuple[GroupRef, ...] | None:
        """The groups of the next step, by ordinal; None: not yet. The next may be taken while others are trained."""
        step = self.version + self._buffer.num_batches
        if step in self._ledger.batches:  # a resumed run makes the steps after its snapshot again, from the same groups
            ordinals = self._ledger.batches[step]
        else:
            chosen = self._choose(step)
            if chosen is None:
                return None
            ordinals = [ref.ordinal for ref in chosen]
            self._ledger.taken(step, ordinals)
        return self._buffer.take(step, ordinals)

    def trained(self, step: int) -> None:
        """The trainer has made version ``step`` + 1. The groups' files stay until `covered` lets them go."""
        assert step == self.version, f"step {step} makes no use of version {self.version}"
        refs = self._buffer.trained(step)
        self._ledger.trained(step)
        self.max_staleness = max(self.max_staleness, *(step - ref.oldest_version for ref in refs))
        self.version += 1

    def published(self, version: int) -> None:
        """Engines may activate these weights from now on."""
        assert self.published_version <= version <= self.version, (self.published_version, version, self.version)
        self.published_version = version

    def engine_active(self, engine: str, version: int) -> None:
        """An engine computes with these weights, and will never again with older ones."""
        oldest = max(self._engine_floor, self._engines.get(engine, 0))
        assert oldest <= version <= self.published_version, (
            f"{engine} has version {version}; groups alive count on {oldest}, and {self.published_version} is published"
        )
        self._engines[engine] = version

    def engine_gone(self, engine: str) -> None:
        """It will compute no more under this name; until this is said, its version holds hand-outs back."""
        self._engines.pop(engine, None)

    def checkpoint_cut(self) -> dict[str, Any]:
        """All that `resume` needs, as plain JSON values, to be stored with the trainer's snapshot of `version`."""
        overtaken = {str(ordinal): num for ordinal, num in self._buffer.overtaken().items() if num}
        return {"version": self.version, "ledger": self._ledger.cut(), "overtaken": overtaken}

    def covered(self, oldest_cut: Mapping[str, Any]) -> None:
        """``oldest_cut`` is in the oldest snapshot that still exists, safe on disk: the journal before it is given up."""
        self._unneeded += self._ledger.covered(oldest_cut["ledger"], oldest_cut["version"])

    def unneeded(self) -> list[str]:
        """Locations, since the last call, of groups that neither this run nor a resumed one will read."""
        locations, self._unneeded = self._unneeded, []
        return locations

    def needed(self) -> set[str]:
        """Locations of all groups that one of them may read; what else a kill has left behind may be deleted."""
        return self._ledger.kept_locations()

    def unfinished(self) -> set[int]:
        """Ordinals alive that are not stored yet: agents go on with their token logs."""
        return {entry.ordinal for entry in self._ledger.alive.values() if entry.ref is None}

    def finish(self) -> None:
        """The run is over: what is alive ends as cancelled, and the controller is closed."""
        self._ledger.batches.clear()
        for ordinal in list(self._ledger.alive):
            self._ledger.ended(ordinal, Ending.CANCELLED)
        self._buffer = Buffer()
        self.close()

    def close(self) -> None:
        self._ledger.journal.close()

    def waits_for(self) -> list[int]:
        """Groups, oldest first, that the next batch waits for; for the watchdog."""
        last = self._buffer.num_taken + self.limits.prompts
        return [ordinal for ordinal, num_older in self._buffer.waiting() if num_older < last]

    def counts(self) -> dict[str, float]:
        """For the log: how many are where, and how many ended how."""
        alive = self._ledger.alive.values()
        oldest = min(self._engines.values(), default=self.version)
        return {
            "alive": len(alive),
            "in_flight": sum(entry.deadline_s is not None for entry in alive),
            "ready": self._buffer.num_ready,
            "training": self._buffer.num_taken,
            "free_slots": self._gate.limit - len(alive),
            "engine_lag": self.version - oldest,
            "max_staleness": self.max_staleness,
            **{name: self._events[name] for name in ("expired", "late", "failed_attempts")},
            **{ending.value: self._ledger.endings[ending] for ending in Ending},
        }

    def check(self) -> None:
        """Every ordinal is in one place.

        Raises:
            AssertionError: a group was lost, or counted twice.
        """
        self._ledger.check()
        assert self._buffer.ordinals() == list(self._ledger.alive), (self._buffer.ordinals(), list(self._ledger.alive))

    def _is_needed(self) -> bool:
        """Whether a step of the run is left for one more group."""
        if self.limits.num_steps is None:
            return True
        return (
            self.version * self.limits.prompts + len(self._ledger.alive) < self.limits.num_steps * self.limits.prompts
        )

    def _may_dispatch(self, num_older: int, num_overtaken: int) -> bool:
        return self._gate.may_dispatch(num_older, self.version, min(self._engines.values()), num_overtaken)

    def _hand_out(self, ordinal: int, attempt: int, now: float) -> Handout:
        self._engine_floor = max(self._engine_floor, min(self._engines.values()))
        deadline_s = now + self.limits.lease_s
        self._ledger.dispatched(ordinal, attempt, deadline_s)
        return Handout(self._task_of(ordinal), attempt, deadline_s)

    def _choose(self, step: int) -> tuple[GroupRef, ...] | None:
        while True:
            chosen = self._buffer.choose(self.limits.prompts, self.limits.window)
            if chosen is None:
                return None
            stale = [ref for ref in chosen if step - ref.oldest_version > self.limits.staleness]
            if not stale:
                return chosen
            # The gate rules this out; a role that breaks its word must still not break the bound.
            for ref in stale:
                self._drop(ref.ordinal, Ending.STALE, f"of version {ref.oldest_version}, for step {step}")

    def _lose(self, entry: Entry, why: str, counts: bool) -> None:
        self._ledger.lost(entry.ordinal, entry.attempt, why, counts)
        if entry.num_failures >= self.limits.max_attempts:
            self._drop(entry.ordinal, Ending.FAILED, why)

    def _drop(self, ordinal: int, ending: Ending, why: str) -> None:
        ref = self._ledger.alive[ordinal].ref
        if ref is not None:
            self._unneeded.append(ref.location)
            self.discarded[ending.value] += ref.num_tokens
        self._ledger.ended(ordinal, ending, why)
        self._buffer.drop(ordinal)
