"""An RL run in simulated time: the real controller and ledger, with engines, verifiers and a trainer that are only delays.

Staleness, window and order of groups therefore limit as in a real run. An engine gives each of its sequences an equal share of its
steps; sequences beyond its batch wait. A verifier judges one answer at a time. The trainer steps, publishes, and steps again.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from stretto.base.trajectory import GroupRef, Task
from stretto.flow.controller import Controller, Dispatch, Limits
from stretto.flow.ledger import Ledger

Draw = Callable[[random.Random, int], float]
"""A random time or number, for the group of this ordinal or for the step of this number (from 0)."""
BUSY = 0.9
"""Share of the time from which a part counts as the limit."""


@dataclass(frozen=True, slots=True)
class Roles:
    """Role times of a run. Times in seconds."""

    limits: Limits
    group: int
    """Samples of a group."""
    engines: int
    batch: int
    """Sequences that one engine runs at once."""
    decode_s: Callable[[int], float]
    """Time of an engine's step with so many sequences, each of which gets a token."""
    tokens: Draw
    """Sampled tokens of an answer."""
    step_s: Draw
    """Time of a training step."""
    prefill_s: float = 0.0
    """Time of a group's prompt, for which its engine's steps wait."""
    verifiers: int = 1
    """Answers judged at once."""
    verdict_s: Draw = lambda rng, ordinal: 0.0
    store_s: float = 0.0
    """Time from the last verdict of a group until it is ready."""
    publish_s: float = 0.0
    """Time after a step for which the next one waits."""
    deliver_s: float = 0.0
    """Time from the end of that wait until engines begin to load the weights."""
    activate_s: float = 0.0
    """Time in which an engine loads new weights and computes nothing."""
    uniform: float = 0.0
    """Share of groups whose rewards are all equal."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """Result of a simulation."""

    wall_s: float
    """From the first dispatch to the end of the last step."""
    samples_per_s: float
    """Trained samples per second, without the steps of the first fill."""
    max_staleness: int
    limit: str
    """Part that limits: trainer, engines or verifiers; else the staleness bound, for which all of them wait."""


@dataclass(slots=True)
class _Engine:
    """Sequences of one engine, measured in tokens that each sequence has got since the start (``progress``)."""

    progress: float = 0.0
    at_s: float = 0.0
    """Time up to which ``progress`` is known; in the future while the engine computes a prompt or loads weights."""
    running: list[tuple[float, int, int]] = field(default_factory=list)
    """Heap of (progress at which the sequence ends, tie-breaker, ordinal)."""
    waiting: deque[tuple[float, int]] = field(default_factory=deque)
    next_event: int = -1
    """Number of the event that ends its next sequence; older ones are void."""
    place_s: float = 0.0
    """Sum over time of sequences running."""


def simulate(roles: Roles, seed: int = 0) -> Simulated:
    """Run ``roles`` to the last step of their limits."""
    run = _Run(roles, seed)
    try:
        return run.play()
    finally:
        run.ledger.close()


class _Run:
    """State of a simulation: a clock, a heap of future events, and the queues of engines and verifiers."""

    def __init__(self, roles: Roles, seed: int) -> None:
        assert roles.limits.num_steps is not None, "a simulation needs a last step"
        self.roles, self.now = roles, 0.0
        self.ledger = Ledger.in_memory()
        self._rng = random.Random(seed)
        self._controller = Controller(roles.limits, self._task, self.ledger, lambda: self.now)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._engines = [_Engine() for _ in range(roles.engines)]
        self._version = 0  # of the engines' weights
        self._versions: dict[int, int] = {}  # by ordinal, that of the weights at the dispatch
        self._left: dict[int, int] = {}  # by ordinal, answers without a verdict
        self._queue: deque[int] = deque()  # ordinals of answers that wait for a verifier
        self._judging = self._num_ready = 0
        self._is_training = False
        self._trainer_s = self._verifier_s = 0.0
        self._ends_s: list[float] = []
        self._controller.engine_active("all", self._version)

    def play(self) -> Simulated:
        """Run all events in order of time until the last step ends."""
        self._turn()
        limits = self.roles.limits
        assert limits.num_steps is not None
        while self._controller.version < limits.num_steps:
            assert self._events, f"nothing will happen any more: {self._controller.counts()}"
            self.now, _, event = heapq.heappop(self._events)
            event()
        wall_s = self.now
        for engine in self._engines:
            self._advance(engine)
        # the first fill of an empty pipeline is not the run's speed
        skipped = min(limits.staleness + 1, len(self._ends_s) - 1)
        since_s = self._ends_s[skipped - 1] if skipped else 0.0
        num = (len(self._ends_s) - skipped) * limits.prompts * self.roles.group
        places = self.roles.engines * self.roles.batch
        busy = {
            "trainer": self._trainer_s / wall_s,
            "engines": sum(engine.place_s for engine in self._engines) / places / wall_s,
            "verifiers": self._verifier_s / self.roles.verifiers / wall_s,
        }
        highest = max(busy, key=lambda name: busy[name])
        return Simulated(
            wall_s=wall_s,
            samples_per_s=num / (wall_s - since_s),
            max_staleness=self._controller.max_staleness,
            limit=highest if busy[highest] >= BUSY else "staleness bound",
        )

    def _turn(self) -> None:
        """Dispatch what the controller admits, as the driver does after each event that may change its answer."""
        for dispatch in self._controller.admit():
            self._dispatch(dispatch)
        self._train()

    def _train(self) -> None:
        """Start the next step if its batch is complete. Counting first saves most of the controller's searches."""
        if self._is_training or self._num_ready < self.roles.limits.prompts:
            return
        if self._controller.next_batch() is not None:
            self._is_training = True
            seconds = self.roles.step_s(self._rng, self._controller.version)
            self._trainer_s += seconds + self.roles.publish_s
            self._after(seconds, self._trained)

    def _trained(self) -> None:
        self._controller.trained(self._controller.version)
        self._num_ready -= self.roles.limits.prompts
        self._ends_s.append(self.now)
        self._after(self.roles.publish_s, partial(self._published, self._controller.version))

    def _published(self, version: int) -> None:
        self._is_training = False
        self._after(self.roles.deliver_s, partial(self._load, version))
        self._turn()

    def _load(self, version: int) -> None:
        """All engines begin to load ``version``."""
        for engine in self._engines:
            self._pause(engine, self.roles.activate_s)
        self._after(self.roles.activate_s, partial(self._activate, version))

    def _activate(self, version: int) -> None:
        self._version = max(version, self._version)
        self._controller.engine_active("all", self._version)
        self._turn()

    def _dispatch(self, dispatch: Dispatch) -> None:
        ordinal = dispatch.task.ordinal
        self._controller.attempt_begun(ordinal, dispatch.attempt)
        engine = min(self._engines, key=lambda each: len(each.running) + len(each.waiting))
        self._left[ordinal] = self.roles.group
        self._versions[ordinal] = self._version
        self._advance(engine)
        for _ in range(self.roles.group):
            engine.waiting.append((self.roles.tokens(self._rng, ordinal), ordinal))
        self._pause(engine, self.roles.prefill_s)

    def _advance(self, engine: _Engine) -> None:
        """Bring ``engine`` up to now, unless it computes something else until later."""
        seconds = self.now - engine.at_s
        if seconds > 0:
            if engine.running:
                engine.progress += seconds / self.roles.decode_s(len(engine.running))
                engine.place_s += seconds * len(engine.running)
            engine.at_s = self.now

    def _pause(self, engine: _Engine, seconds: float) -> None:
        """Let ``engine`` compute something else than tokens for ``seconds``, after other such work."""
        self._advance(engine)
        engine.at_s += seconds
        self._plan(engine)

    def _plan(self, engine: _Engine) -> None:
        """Give free places to waiting sequences, and plan the end of the sequence that ends first."""
        while engine.waiting and len(engine.running) < self.roles.batch:
            num_tokens, ordinal = engine.waiting.popleft()
            heapq.heappush(engine.running, (engine.progress + num_tokens, next(self._numbers), ordinal))
        if engine.running:
            left = max(0.0, engine.running[0][0] - engine.progress)
            engine.next_event = next(self._numbers)
            seconds = engine.at_s - self.now + left * self.roles.decode_s(len(engine.running))
            self._after(seconds, partial(self._sequences_end, engine, engine.next_event))

    def _sequences_end(self, engine: _Engine, event: int) -> None:
        if event != engine.next_event:
            return
        self._advance(engine)
        engine.progress = max(engine.progress, engine.running[0][0])  # rounding may leave it a little before its end
        while engine.running and engine.running[0][0] <= engine.progress:
            _, _, ordinal = heapq.heappop(engine.running)
            self._queue.append(ordinal)
        self._judge()
        self._plan(engine)

    def _judge(self) -> None:
        """Give waiting answers to free verifiers."""
        while self._queue and self._judging < self.roles.verifiers:
            self._judging += 1
            ordinal = self._queue.popleft()
            seconds = self.roles.verdict_s(self._rng, ordinal)
            self._verifier_s += seconds
            self._after(seconds, partial(self._judged, ordinal))

    def _judged(self, ordinal: int) -> None:
        self._judging -= 1
        self._left[ordinal] -= 1
        if self._left[ordinal] == 0:
            del self._left[ordinal]
            self._after(self.roles.store_s, partial(self._ready, ordinal))
        self._judge()

    def _ready(self, ordinal: int) -> None:
        ref = GroupRef(
            ordinal=ordinal,
            attempt=0,
            location=str(ordinal),
            num_samples=self.roles.group,
            num_tokens=1,
            oldest_version=self._versions.pop(ordinal),
            mean_reward=0.5,
            is_uniform=self._rng.random() < self.roles.uniform,
        )
        self._controller.group_ready(ref)
        if ref.is_uniform and self.roles.limits.drop_uniform:
            self._turn()  # another group may take its place
        else:
            self._num_ready += 1
            self._train()

    def _after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), event))

    def _task(self, ordinal: int) -> Task:
        return Task(ordinal, "simulated", ordinal, self.roles.group, ordinal, 1)
