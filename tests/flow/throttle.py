"""A run of RL without models: the real controller, and engines, agents and a trainer that are only delays.

All random numbers come from one seed; time is simulated. Kills end all roles at once and the run is taken up again from the
last snapshot and the journal.
"""

from __future__ import annotations

import heapq
import json
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from stretto.base.trajectory import GroupRef, Task
from stretto.flow.controller import Controller, Dispatch, Limits, default_window
from stretto.flow.ledger import Ledger
from tests.flow.refs import check


@dataclass(frozen=True, slots=True)
class Schedule:
    """Delays in simulated seconds, and shares of what goes wrong."""

    seed: int
    limits: Limits
    num_engines: int = 1
    step_s: float = 1.0
    group_s: float = 1.0
    """Median of a group; lognormal."""
    spread: float = 1.0
    """Of the logarithm."""
    straggler_share: float = 0.0
    straggler_s: float = 30.0
    activate_s: float = 0.0
    """Mean time from the end of a step until an engine has its weights; exponential, another one for each engine."""
    fails: float = 0.0
    hangs: float = 0.0
    """Share of attempts that never report."""
    late: float = 0.0
    """Share of attempts that report after their lease."""
    uniform: float = 0.0
    kills: int = 0
    losses: float = 0.0
    """Share of the stored groups that the store loses with each kill, and with each step."""
    snapshot_every: int = 3


@dataclass(slots=True)
class Result:
    """What the trainer saw."""

    staleness: list[int] = field(default_factory=list)
    """Of each group in each step of the history that counts, by step."""
    trained: Counter[int] = field(default_factory=Counter)
    """How often each ordinal was, undone steps not counted."""
    num_generated: Counter[int] = field(default_factory=Counter)
    """Finished attempts that were accepted, by ordinal, over all kills."""
    batches: list[tuple[tuple[int, int], ...]] = field(default_factory=list)
    """By step: (ordinal, attempt) of its batch. An undone step must be made again from the same."""
    num_kills: int = 0
    idle_s: float = 0.0
    wall_s: float = 0.0
    counts: dict[str, float] = field(default_factory=dict)


def random_schedule(seed: int, staleness: int, *, can_kill: bool = True) -> Schedule:
    """Anything may be slow, fail, hang, come late or be killed."""
    draw = random.Random(seed)
    prompts = draw.randint(1, 5)
    widest = staleness * prompts + 1
    window = draw.choice([1, widest, draw.randint(1, widest), default_window(prompts, staleness, draw.randint(1, 8))])
    return Schedule(
        seed=seed,
        limits=Limits(
            prompts, staleness, window, drop_uniform=True, lease_s=20.0, max_attempts=3, num_steps=draw.randint(3, 10)
        ),
        num_engines=draw.randint(1, 3),
        step_s=draw.choice([0.0, 0.1, 1.0, 5.0]),
        spread=draw.choice([0.0, 0.5, 1.5]),
        straggler_share=draw.choice([0.0, 0.02, 0.2]),
        straggler_s=draw.choice([10.0, 19.0]),
        activate_s=draw.choice([0.0, 0.0, 0.5, 5.0]),
        fails=draw.choice([0.0, 0.1]),
        hangs=draw.choice([0.0, 0.05]),
        late=draw.choice([0.0, 0.05]),
        uniform=draw.choice([0.0, 0.2, 0.5]),
        kills=draw.choice([0, 1, 3]) if can_kill else 0,
        snapshot_every=draw.randint(1, 4),
    )


class Run:
    """One schedule, from its first step to its last."""

    def __init__(self, schedule: Schedule, journal: Path) -> None:
        self.schedule = schedule
        self.result = Result()
        self.now = 0.0
        self._journal = journal
        self._draw = random.Random(schedule.seed)
        self._events: list[tuple[float, int, int, Callable[[], None]]] = []
        self._num_events = 0
        self._life = 0  # events of an earlier life do not happen
        self._cuts: list[str] = []
        self._stored = set[str]()
        self._weights = [0]
        """Number of the weights of each version. A step that is made again from other groups makes other weights."""
        self._num_weights = 1
        self._tokens: dict[str, dict[int, int]] = {}
        """Of the group at each location: the versions of its tokens, and the numbers of those weights."""
        self._logs: dict[int, dict[int, int]] = {}
        """The same by ordinal, of samples in flight, which the next attempt continues."""
        self._controller = Controller(schedule.limits, self._task, Ledger.start(journal), lambda: self.now)
        self._boot()

    def play(self) -> Result:
        """Until the last step is trained; an assertion tells what went wrong."""
        limits, schedule = self.schedule.limits, self.schedule
        assert limits.num_steps is not None
        kills = sorted(self._draw.randint(5, 20 * limits.num_steps) for _ in range(schedule.kills))
        while self._controller.version < limits.num_steps:
            assert self._events, f"seed {schedule.seed}: nothing will ever happen; {self._controller.counts()}"
            self.now, _, life, event = heapq.heappop(self._events)
            if life == self._life:
                event()
                self._turn()
            if kills and self._num_events > kills[0]:
                kills.pop(0)
                self._kill()
        self.result.wall_s = self.now
        check(self._controller.state)
        self.result.counts = self._controller.counts()
        for step, batch in enumerate(self.result.batches):
            assert len(batch) == limits.prompts, (step, batch)
            self.result.trained.update(ordinal for ordinal, _ in batch)
        self._controller.finish()
        return self.result

    def _boot(self) -> None:
        self._engine_versions = dict.fromkeys(
            (f"engine-{i}" for i in range(self.schedule.num_engines)), self._controller.version
        )
        for engine, version in self._engine_versions.items():
            self._controller.engine_active(engine, version)
        self._batch: tuple[GroupRef, ...] | None = None
        self._idle_since: float | None = self.now
        self._after(0.0, lambda: None)

    def _kill(self) -> None:
        self._life += 1
        self.result.num_kills += 1
        cut = json.loads(self._cuts[-1]) if self._cuts else None
        ledger = Ledger.resume(self._journal, cut)
        self._controller = Controller(self.schedule.limits, self._task, ledger, lambda: self.now)
        self._lose()
        if lost := self._lost(ledger.ready_groups()):
            self._controller.vanished(lost)
        if not ledger.state.will_repeat:
            self._logs = {}
            first = self._controller.version + len(ledger.state.batches)
            self.result.batches, self._weights = self.result.batches[:first], self._weights[: first + 1]
        self._stored &= ledger.kept_locations()
        self._controller.forget_undone()
        self._boot()

    def _lose(self) -> None:
        self._stored -= {each for each in sorted(self._stored) if self._draw.random() < self.schedule.losses}

    def _lost(self, refs: Iterable[GroupRef]) -> list[int]:
        return [each.ordinal for each in refs if each.location not in self._stored]

    def _turn(self) -> None:
        """What a driver does after every event."""
        for dispatch in self._controller.admit():
            self._dispatch(dispatch)
        if self._batch is not None or (batch := self._controller.next_batch()) is None:
            return
        if not (lost := self._lost(batch)):
            self._batch = batch
            self._train()
        elif self._controller.repeats:
            self._kill()
        else:
            self._controller.vanished(lost)
            self._after(0.0, lambda: None)

    def _dispatch(self, dispatch: Dispatch) -> None:
        schedule, draw = self.schedule, self._draw
        if draw.random() < schedule.hangs:
            self._after(schedule.limits.lease_s, lambda: None)
            return
        seconds = schedule.group_s * draw.lognormvariate(0.0, schedule.spread)
        if draw.random() < schedule.straggler_share:
            seconds = schedule.straggler_s
        if draw.random() < schedule.late:
            seconds = schedule.limits.lease_s * 1.5
        self._after(schedule.limits.lease_s, lambda: None)
        version = self._engine_versions[draw.choice(list(self._engine_versions))]
        tokens = {}
        if self.schedule.losses:
            tokens = self._logs.setdefault(dispatch.task.ordinal, {})
        tokens[version] = self._weights[version]
        if draw.random() < schedule.fails:
            self._after(seconds, lambda: self._controller.group_failed(dispatch.task.ordinal, dispatch.attempt, "test"))
            return
        # A property of the prompt, so that an uninterrupted run drops the same ones.
        is_uniform = random.Random(f"{schedule.seed} {dispatch.task.ordinal}").random() < schedule.uniform
        ref = GroupRef(
            ordinal=dispatch.task.ordinal,
            attempt=dispatch.attempt,
            location=f"{dispatch.task.ordinal}-{dispatch.attempt}",
            num_samples=dispatch.task.group,
            num_tokens=1,
            oldest_version=min(tokens),
            mean_reward=0.5,
            is_uniform=is_uniform,
        )
        self._after(seconds, lambda: self._ready(ref, dict(tokens)))

    def _ready(self, ref: GroupRef, tokens: dict[int, int]) -> None:
        self._stored.add(ref.location)
        self._tokens[ref.location] = tokens
        if self._controller.group_ready(ref):
            self.result.num_generated[ref.ordinal] += 1
            self._logs.pop(ref.ordinal, None)

    def _train(self) -> None:
        assert self._idle_since is not None
        self.result.idle_s += self.now - self._idle_since
        self._idle_since = None
        self._after(self.schedule.step_s * self._draw.uniform(0.5, 1.5), self._trained)

    def _trained(self) -> None:
        controller, batch, self._batch = self._controller, self._batch, None
        assert batch is not None
        step = controller.version
        for ref in batch:
            for version, weights in self._tokens[ref.location].items():
                assert version <= step, f"{ref} has tokens of version {version} in step {step}"
                assert self._weights[version] == weights, f"{ref} has tokens of weights that the run does not have"
        stale = [step - ref.oldest_version for ref in batch]
        self.result.staleness += stale
        identity = tuple((ref.ordinal, ref.attempt) for ref in batch)
        if step < len(self.result.batches):
            assert self.result.batches[step] == identity, "a step was made again from other samples"
        else:
            self.result.batches.append(identity)
            self._weights.append(self._num_weights)
            self._num_weights += 1
        controller.trained(step)
        for engine in self._engine_versions:
            delay = self._draw.expovariate(1 / self.schedule.activate_s) if self.schedule.activate_s else 0.0
            self._after(delay, partial(self._activate, engine, step + 1))
        if (step + 1) % self.schedule.snapshot_every == 0:
            self._snapshot()
        gone = set(controller.unneeded())
        assert gone.isdisjoint(each.location for each in controller.ledger.ready_groups()), "a file that a step needs"
        self._stored -= gone
        assert self._stored <= controller.ledger.kept_locations(), "a file that no step needs stays"
        self._lose()
        self._idle_since = self.now

    def _activate(self, engine: str, version: int) -> None:
        if version > self._engine_versions[engine]:
            self._engine_versions[engine] = version
            self._controller.engine_active(engine, version)

    def _snapshot(self) -> None:
        self._cuts = [*self._cuts, json.dumps(self._controller.checkpoint_cut())][-2:]
        oldest: dict[str, Any] = json.loads(self._cuts[0])
        self._controller.covered(oldest)

    def _after(self, seconds: float, event: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (self.now + seconds, self._num_events, self._life, event))

    def _task(self, ordinal: int) -> Task:
        return Task(ordinal, "test", ordinal, 2, ordinal, 8)
