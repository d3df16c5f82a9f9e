"""What the agent loop asks of engines and verifiers: the records, the two interfaces, and patience with their troubles.

Imports no torch. The interfaces are met by roles behind a runtime (`stretto.rl.clients`) and by the roles themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

import numpy as np

from stretto.base.errors import UserError
from stretto.base.trajectory import Outcome, Verdict

T = TypeVar("T")


class Trouble(RuntimeError):  # noqa: N818 - data, not a fault
    """Something of ours did not work: a dead engine, a full queue, a deadline. Worth another try; never a reward."""


class Unavailable(Trouble):
    """Nobody is there to do it: an engine that died and is being started again, which takes as long as it takes."""


class GroupFailed(RuntimeError):  # noqa: N818
    """A group could not be finished, for reasons of ours. Its token log stays: another attempt goes on from there."""

    def __init__(self, ordinal: int, attempt: int, why: str):
        super().__init__(f"ordinal {ordinal}, attempt {attempt}: {why}")
        self.ordinal = ordinal
        self.attempt = attempt
        self.why = why

    def __reduce__(self) -> tuple[Any, ...]:  # it crosses processes
        return GroupFailed, (self.ordinal, self.attempt, self.why)


def group_failure(error: Exception, ordinal: int, attempt: int) -> Exception:
    """The one failure to report of several: a user's mistake first, then a fault of the code, then the first trouble."""
    flat = _leaves(error)
    users = [leaf for leaf in flat if isinstance(leaf, UserError)]
    faults = [leaf for leaf in flat if not isinstance(leaf, Trouble)]
    if users or faults:
        return (users or faults)[0]
    return GroupFailed(ordinal, attempt, str(flat[0]))


def _leaves(error: Exception) -> list[Exception]:
    if isinstance(error, ExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]


@dataclass(frozen=True, slots=True, eq=False)
class GenerateRequest:
    """A chunk of one sample. Written by the agent loop."""

    id: str
    """Unique among the requests in flight of all agents."""
    tokens: np.ndarray
    """int32 [T], everything so far."""
    max_tokens: int
    """To sample at most."""
    temperature: float
    seed: int
    """With a token's position it decides the draw, so that chunks of any size give the same tokens."""
    stop_ids: tuple[int, ...]
    """These end the turn, and nothing else does; the one that did is part of the tokens."""
    want_routes: bool = True
    routes_from: int = 0
    """Rows before this position are known, and are not sent again."""
    deadline_s: float = 600.0
    """After this the engine gives the request up."""


@dataclass(frozen=True, slots=True, eq=False)
class Generated:
    """What came of a request. Written by `EngineRole`."""

    tokens: np.ndarray
    """int32 [T] sampled, at least one."""
    logprobs: np.ndarray
    """fp32 [T], processed."""
    versions: np.ndarray
    """int32 [T]."""
    routes: np.ndarray | None
    """uint8 or uint16 [R, L, K], of positions ``routes_from`` to the last token but one, prompt and cache hits included."""
    finish_reason: Literal["stop", "length"]
    cached_tokens: int
    """Prompt tokens that the prefix cache had."""
    computed_tokens: int
    """The other prompt tokens."""
    num_preemptions: int
    """Times its keys and values were lost: to other requests, or to new weights."""
    queued_s: float
    started_s: float
    """Unix seconds, as is the next."""
    finished_s: float


@dataclass(frozen=True, slots=True)
class RewardRequest:
    """A finished sample to be verified. Written by the agent loop."""

    source: str
    item: int
    text: str
    """The last turn of the model."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """All that followed the prompt, tool turns included, the last turn too."""
    seed: int | None = None
    """As of `stretto.tasks.task.Answer`."""


def infra(request: RewardRequest, why: str) -> Verdict:
    """The verdict that says nothing about the answer."""
    return Verdict(0.0, Outcome.INFRA, 0.0, detail=f"sources.{request.source}: item {request.item}: {why}")


class EngineClient(Protocol):
    """An engine to sample from."""

    @property
    def name(self) -> str: ...

    async def generate(self, request: GenerateRequest) -> Generated:
        """Sample. Cancelled or out of time, it leaves nothing of the request in the engine.

        Raises:
            Trouble: the engine is dead, busy, slow, or its output was no number.
            UserError: the request cannot be served by this engine, now or later.
        """
        ...


class RewardClient(Protocol):
    """Whoever verifies."""

    async def score(self, request: RewardRequest) -> Verdict:
        """A verdict; INFRA, with the task's name in its detail, where there is none to be had."""
        ...


@dataclass(frozen=True, slots=True)
class Patience:
    """How often something is tried, and how long is waited in between."""

    attempts: int = 5
    first_s: float = 0.1
    """Before the second attempt; each further wait is twice as long."""
    most_s: float = 5.0

    def wait_s(self, failures: int) -> float:
        """Before the attempt that follows so many failed ones."""
        return float(min(self.most_s, self.first_s * 2 ** min(failures - 1, 60)))  # more is no float


@dataclass(slots=True)
class Troubles:
    """Counts of troubles by what was tried. Written by `patiently`, read by metrics."""

    counts: dict[str, int] = field(default_factory=dict)

    def note(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1


async def patiently(
    what: str,
    work: Callable[[], Awaitable[T]],
    patience: Patience,
    troubles: Troubles,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> T:
    """Await ``work()`` until it succeeds. Who is unavailable is waited for; it is the caller's lease that ends that.

    Raises:
        Trouble: that of the last attempt. Anything else passes at once.
    """
    failures = absences = 0
    while True:
        try:
            return await work()
        except Unavailable:
            troubles.note(what)
            absences += 1
        except Trouble as trouble:
            troubles.note(what)
            failures += 1
            if failures == patience.attempts:
                raise Trouble(f"{what}: {trouble} ({failures} attempts)") from trouble
        await sleep(patience.wait_s(failures + absences))
