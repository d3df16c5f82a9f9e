"""Admission of groups: dispatch, choice of the next batch, resuming. Metadata only, no torch.

Nothing here waits, and the time comes from ``clock`` alone, so that tests can simulate schedules.

How many groups may be alive, so that no trained token is older than the staleness bound η? A step trains P groups; step s
trains the weights of version s and makes version s + 1. A group is *alive* from its first dispatch until it was trained or
dropped. Its staleness is the step that trains it minus the version of its oldest token. v is the trainer's version, e the
oldest version on any engine. The window W: while a group is alive, at most W − 1 younger ones are trained.

The bound. Dispatch a group while p others, all older, are alive. Its tokens come from version e or later, because no engine
goes back. Before the step that trains it, at most those p and W − 1 younger groups have been trained since, P in a step: so
that step is at most v + ⌊(p + W − 1) / P⌋. Staleness stays within η if

    v·P + p + W ≤ (e + η + 1)·P                                                                                   (*)

With e = v: (η + 1)·P + 1 − W groups may be alive, the last one included. In whole steps this is the published rule, a slot
limit of (η' + 1)·P and a bound of η' + ⌈(W − 1) / P⌉ (TitanRL after 2605.26494), without its rounding. Engines that trail
the trainer reduce the number by P for each version. At W = 1 this is AReaL's capacity (2505.24298), with the engine's version
in it; AReaL has no order, so a slow group may be overtaken without end and no capacity bounds its age.

A group that is dispatched again keeps its place, and (*) still holds for it: with p of the older ones left and o younger ones
trained meanwhile, v·P + p + W − o never grows. Only a return to a snapshot breaks this, because v and e fall and p rises;
so a second dispatch is checked like a first one, and waits for its turn.

Nothing waits for ever if W ≤ η·P + 1. The oldest group alive may always be dispatched once the engines have caught up, as
p = 0 and W ≤ (η + 1)·P; and when all that are alive are ready, those are at least P, or another may be dispatched.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from stretto.base.errors import UserError
from stretto.base.trajectory import Ending, GroupRef, Task
from stretto.flow.ledger import Entry, Ledger


@dataclass(frozen=True, slots=True)
class Limits:
    """The settings of a recipe that the controller needs."""

    prompts: int
    """P, groups of a step."""
    staleness: int
    """η, the bound."""
    window: int = 1
    """W; see `default_window`."""
    drop_uniform: bool = True
    lease_s: float = 300.0
    max_attempts: int = 5
    num_steps: int | None = None
    """Steps of the run: groups that no step would train are not dispatched. None: no end."""

    def __post_init__(self) -> None:
        assert self.prompts > 0 and self.staleness >= 0, self
        assert 0 < self.window <= self.staleness * self.prompts + 1, self  # `RlRecipe` refuses a wider one

    @property
    def most_alive(self) -> int:
        """Largest number of groups alive while all engines have the trainer's weights."""
        return (self.staleness + 1) * self.prompts + 1 - self.window

    def may_dispatch(
        self, num_older: int, trainer_version: int, oldest_engine_version: int, num_overtaken: int = 0
    ) -> bool:
        """The inequality (*): whether a group may be dispatched now, with ``num_older`` older ones alive (for a new group
        these are all) and ``num_overtaken`` younger ones trained since its first dispatch."""
        assert num_older >= 0 and 0 <= num_overtaken < self.window, (num_older, num_overtaken, self)
        assert oldest_engine_version <= trainer_version, (oldest_engine_version, trainer_version)
        latest = trainer_version * self.prompts + num_older + self.window - num_overtaken
        return latest <= (oldest_engine_version + self.staleness + 1) * self.prompts


def default_window(prompts: int, staleness: int, capacity: int | None) -> int:
    """The widest window with which engines and trainer still never wait for groups.

    A group is always trained within η steps of its dispatch, whatever W is: the number of groups alive and W add up to a
    constant, so a wider window delays dispatches. On engines that run all groups at once this gains nothing. Engines with
    fewer places keep the other groups in a queue, and dispatching those later costs nothing. So as many groups are alive as
    keep the engines and the trainer busy, and the rest of the constant goes to the window: the trainer waits less for slow
    groups, and groups are trained younger than the bound requires.

    Args:
        capacity: number of groups that are processed at once, those that wait for tools and verifiers included. None: all
            that are dispatched, or unknown, because too small a number leaves engines without work.
    """
    most = (staleness + 1) * prompts
    # Alive but not on an engine: one batch is trained, and up to one more is ready or waits for a slow group.
    needed = most if capacity is None else min(most, max(capacity, 1) + 2 * prompts)
    return most + 1 - max(needed, prompts)


@dataclass(frozen=True, slots=True)
class Dispatch:
    """An attempt at a task, for an agent. Written by `Controller.admit`."""

    task: Task
    attempt: int
    """From 0; the result must carry it."""
    is_last: bool = False
    """Whether the group ends as failed if this attempt fails by itself."""


class Controller:
    """Owner of the ledger. Not thread-safe."""

    def __init__(
        self, limits: Limits, task_of: Callable[[int], Task], ledger: Ledger, clock: Callable[[], float] = time.time
    ) -> None:
        """Continue from the state of ``ledger``; attempts in flight are dispatched again, as soon as the bound allows.
        ``task_of`` returns the task of an ordinal, always the same; ``clock`` Unix seconds."""
        self.limits = limits
        self.max_staleness = 0  # largest among all groups trained
        self.discarded: Counter[str] = Counter()
        """Tokens of stored groups that were not trained on, by the ending of the group. ``late``: those that were stored after the lease;
        the next attempt at the group may have trained a copy of the same tokens."""
        self.last_failed = ""
        """The last group that ended as failed, with the reason."""
        self._task_of, self._clock, self.ledger, self.state = task_of, clock, ledger, ledger.state
        self._engines: dict[str, int] = {}
        self._engine_floor = 0
        self._unneeded: list[str] = []
        self._events: Counter[str] = Counter()

    @property
    def version(self) -> int:
        """Version of the trainer: number of completed steps."""
        return self.state.version

    @property
    def oldest_engine_version(self) -> int:
        """Oldest version on any engine; while no engine is known, the trainer's."""
        return min(self._engines.values(), default=self.version)

    @property
    def repeats(self) -> bool:
        """Whether the next step was made before, and undone by a return to a snapshot."""
        return self.state.version < self.state.reached

    def admit(self) -> list[Dispatch]:
        """End the leases that ran out; return the attempts to dispatch now, oldest group first. [] while no engine is known."""
        now = self._clock()
        for entry in [*self.state.alive.values()]:
            if entry.deadline_s is not None and entry.deadline_s <= now:
                self._events["expired"] += 1
                self._lose(entry, f"no report within {self.limits.lease_s:g} s", counts=True)
        if not self._engines:
            return []
        limits, dispatches, oldest = self.limits, list[Dispatch](), min(self._engines.values())

        def dispatch(ordinal: int, attempt: int) -> None:
            self._engine_floor = max(self._engine_floor, oldest)
            self.ledger.record("dispatched", ordinal=ordinal, attempt=attempt, deadline_s=now + limits.lease_s)
            is_last = self.state.alive[ordinal].num_failures + 1 >= limits.max_attempts
            dispatches.append(Dispatch(self._task_of(ordinal), attempt, is_last))

        for entry, num_older, num_overtaken in self.state.waiting():
            if entry.ref is None and entry.deadline_s is None:  # a lost attempt: again, in its old place
                if not limits.may_dispatch(num_older, self.version, oldest, num_overtaken):
                    break  # younger groups have even more groups before them
                dispatch(entry.ordinal, entry.attempt + 1)
        while limits.may_dispatch(len(self.state.alive), self.version, oldest):
            num_planned = self.version * limits.prompts + len(self.state.alive)
            if limits.num_steps is not None and num_planned >= limits.num_steps * limits.prompts:
                break  # the groups alive suffice for all remaining steps
            dispatch(self.state.num_dispatched, 0)
        return dispatches

    def attempt_begun(self, ordinal: int, attempt: int) -> None:
        """An agent has begun the attempt: the lease starts now, so that waiting for a free agent does not use it up."""
        if self._holder(ordinal, attempt) is not None:
            deadline_s = self._clock() + self.limits.lease_s
            self.ledger.record("leased", ordinal=ordinal, attempt=attempt, deadline_s=deadline_s)

    def group_ready(self, ref: GroupRef) -> bool:
        """An attempt has stored its group. Returns False if it is too late: another attempt is under way or was first."""
        if self._holder(ref.ordinal, ref.attempt) is None:
            if ref.location not in self.ledger.kept_locations():
                self._unneeded.append(ref.location)
                self.discarded["late"] += ref.num_tokens
            return False
        self.ledger.record("ready", group=asdict(ref))
        if ref.is_uniform and self.limits.drop_uniform:
            self._drop(ref.ordinal, Ending.FILTERED, "all rewards are equal")
        return True

    def group_failed(self, ordinal: int, attempt: int, why: str, counts: bool = True) -> None:
        """An attempt failed because of an infrastructure error. The group is dispatched again, or ends as failed after
        ``max_attempts`` failures that ``counts``: failures that the group itself may have caused, unlike a killed role."""
        entry = self._holder(ordinal, attempt)
        if entry is not None:
            self._events["failed_attempts"] += 1
            self._lose(entry, why, counts)

    def vanished(self, ordinals: Sequence[int]) -> None:
        """Stored groups were lost with a part of the store. They are dispatched again. Raises UserError: the store lost one of them
        ``max_attempts`` times, and will hardly keep it the next time."""
        self._events["vanished"] += len(ordinals)
        self.ledger.record("vanished", durable=True, ordinals=sorted(ordinals))
        for ordinal in ordinals:
            if (times := self.state.alive[ordinal].num_vanished) >= self.limits.max_attempts:
                raise UserError(
                    f"store: it lost group {ordinal} {times} times; check whether something deletes its files, and continue with --resume"
                )

    def forget_undone(self) -> int:
        """After a return to a snapshot, before the first dispatch. If the store lost groups of steps that were to be repeated
        (`State.will_repeat`), the run will not have the weights of those steps: stored groups that may have tokens of such weights
        are dispatched again. Token logs may have such tokens too, and must be deleted before. Returns the number of groups."""
        if self.state.will_repeat:
            return 0
        chosen = {ordinal for ordinals in self.state.batches.values() for ordinal in ordinals}
        refs = [ref for ref in self.ledger.ready_groups() if ref.ordinal not in chosen]
        self.ledger.record("forgotten", durable=True, ordinals=[ref.ordinal for ref in refs])
        self._unneeded += [ref.location for ref in refs]
        return len(refs)

    def next_batch(self) -> tuple[GroupRef, ...] | None:
        """The groups of the next step, by ordinal; None while there are too few."""
        step = self.version
        if step not in self.state.batches:  # a resumed run repeats the steps after its snapshot with the same groups
            chosen = self._choose(step)
            if chosen is None:
                return None
            self.ledger.record("batch", durable=True, step=step, ordinals=[ref.ordinal for ref in chosen])
        return self._batch(step)

    def trained(self, step: int) -> None:
        """The trainer has made version ``step`` + 1. The groups' files stay until `covered` releases them."""
        refs = self._batch(step)
        ordinals, locations = [ref.ordinal for ref in refs], [ref.location for ref in refs]
        self.ledger.record("trained", durable=True, step=step, ordinals=ordinals, locations=locations)
        self.max_staleness = max(self.max_staleness, *(step - ref.oldest_version for ref in refs))

    def engine_active(self, engine: str, version: int) -> None:
        """An engine computes with this version, and will not return to an older one."""
        oldest = max(self._engine_floor, self._engines.get(engine, 0))
        assert oldest <= version <= self.version, f"{engine} has version {version}; groups alive count on {oldest}"
        self._engines[engine] = version

    def engine_gone(self, engine: str) -> None:
        """The engine will not compute any more. Until this call, its version limits dispatches."""
        self._engines.pop(engine, None)

    def checkpoint_cut(self) -> dict[str, Any]:
        """The state for `Ledger.resume` as plain JSON values, to be stored with the trainer's snapshot of `version`."""
        return self.ledger.cut()

    def covered(self, oldest_cut: Mapping[str, Any]) -> None:
        """``oldest_cut`` is in the oldest snapshot on disk: the journal before it is deleted."""
        self._unneeded += self.ledger.covered(oldest_cut)

    def unneeded(self) -> list[str]:
        """Files of groups that neither this run nor a resumed one will read, since the last call."""
        locations, self._unneeded = self._unneeded, []
        return locations

    def finish(self) -> None:
        """End the run: groups alive end as cancelled, and the ledger is closed."""
        for ordinal in [*self.state.alive]:
            self.ledger.record("ended", durable=True, ordinal=ordinal, ending=Ending.CANCELLED.value)
        self.ledger.close()

    def counts(self) -> dict[str, float]:
        """Numbers of groups for the log: by state, and by ending."""
        alive = self.state.alive.values()
        num_training = len(self.state.batches.get(self.version, ()))
        return {
            "alive": len(alive),
            "in_flight": sum(entry.deadline_s is not None for entry in alive),
            "ready": sum(entry.ref is not None for entry in alive) - num_training,
            "training": num_training,
            "free_slots": self.limits.most_alive - len(alive),
            "engine_lag": self.version - self.oldest_engine_version,
            "max_staleness": self.max_staleness,
            **{name: self._events[name] for name in ("expired", "late", "failed_attempts", "vanished")},
            **{ending.value: self.state.endings.get(ending, 0) for ending in Ending},
        }

    def _holder(self, ordinal: int, attempt: int) -> Entry | None:
        """The entry of the group, if this attempt holds its lease; None if the attempt reports too late."""
        entry = self.state.alive.get(ordinal)
        if entry is None or entry.attempt != attempt or entry.deadline_s is None:
            self._events["late"] += 1
            return None
        return entry

    def _choose(self, step: int) -> list[GroupRef] | None:
        while True:
            chosen = self.state.choose(self.limits.prompts, self.limits.window)
            stale = [ref for ref in chosen or () if step - ref.oldest_version > self.limits.staleness]
            if not stale:
                return chosen
            # (*) rules this out, unless a role samples with older weights than it reported
            for ref in stale:
                self._drop(ref.ordinal, Ending.STALE, f"of version {ref.oldest_version}, for step {step}")

    def _batch(self, step: int) -> tuple[GroupRef, ...]:
        refs = (self.state.alive[ordinal].ref for ordinal in self.state.batches[step])
        return tuple(ref for ref in refs if ref is not None)

    def _lose(self, entry: Entry, why: str, counts: bool) -> None:
        self.ledger.record("lost", ordinal=entry.ordinal, attempt=entry.attempt, why=why, counts=counts)
        if entry.num_failures >= self.limits.max_attempts:
            self.last_failed = f"group {entry.ordinal}: {why}"
            self._drop(entry.ordinal, Ending.FAILED, why)

    def _drop(self, ordinal: int, ending: Ending, why: str) -> None:
        ref = self.state.alive[ordinal].ref
        if ref is not None:
            self._unneeded.append(ref.location)
            self.discarded[ending.value] += ref.num_tokens
        self.ledger.record("ended", durable=True, ordinal=ordinal, ending=ending.value, why=why)


class Watchdog:
    """Detects a run that is stuck: the trainer waits for groups, and no group has finished or continued for ``stuck_s``."""

    def __init__(self, stuck_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """``stuck_s``: seconds of ``clock``."""
        self._stuck_s, self._clock = stuck_s, clock
        self._since_s = math.inf  # last progress while the trainer waits; inf while it does not wait
        self._groups: dict[int, tuple[str, float]] = {}

    def trainer_waits(self) -> None:
        """The trainer starts to wait for groups."""
        self._since_s = self._clock()

    def trainer_works(self) -> None:
        """The trainer does not wait any more."""
        self._since_s = math.inf

    def progress(self) -> None:
        """A group has finished, or has continued in another attempt."""
        self._since_s = math.inf if self._since_s == math.inf else self._clock()

    def group_waits(self, ordinal: int, waits_for: str) -> None:
        """A group starts to wait for ``waits_for``."""
        self._groups[ordinal] = waits_for, self._clock()

    def group_ended(self, ordinal: int) -> None:
        """An attempt at a group has ended."""
        self._groups.pop(ordinal, None)

    def report(self) -> str | None:
        """One line about the trainer's wait and the longest wait of a group; None if the run is not stuck."""
        now = self._clock()
        if now - self._since_s <= self._stuck_s:
            return None
        waits = [f"the trainer has waited for groups for {now - self._since_s:.0f} s"]
        for ordinal, (waits_for, since_s) in sorted(self._groups.items(), key=lambda group: group[1][1])[:1]:
            waits.append(f"group {ordinal} has waited for {waits_for} for {now - since_s:.0f} s")
        return "; ".join(waits)
