"""Clients of the agent loop for engines and verifiers: requests, failures, connections.

The two interfaces are met by roles behind a runtime and by the roles themselves. Imports no torch.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Literal, Protocol, TypeVar

import numpy as np

from stretto.base.errors import InfraError
from stretto.base.trajectory import Outcome, Segment, Verdict
from stretto.runtime.pool import ElasticPool
from stretto.runtime.runtime import Caller, Handle, RoleDied, RoleError, RuntimeFailure

T = TypeVar("T")

_SLACK_S = 5.0
"""Between the deadline that a role keeps itself and the one by which its caller gives it up: for the way there and back."""
_IDLE = 4
"""Threads kept for later calls."""


class Unavailable(InfraError):  # noqa: N818 - data, not a fault
    """Nobody is there to do it: an engine that died and is being started again, which takes as long as it takes."""


class Forgotten(InfraError):  # noqa: N818
    """The engine has not the tokens that it is believed to have: it was started again, or had too many. Send them all."""


@dataclass(frozen=True, slots=True, eq=False)
class GenerateRequest:
    """A chunk of one sample. Written by the agent loop."""

    id: str
    """Unique among the requests in flight of all agents."""
    tokens: np.ndarray
    """int32 [T], everything so far but what the engine has."""
    max_tokens: int
    temperature: float
    seed: int
    """With a token's position it decides the draw, so that chunks of any size give the same tokens."""
    stop_ids: tuple[int, ...]
    """These end the turn, and nothing else does; the one that did is part of the tokens."""
    want_routes: bool = True
    num_kept: int = 0
    """Leading tokens that the engine has: it was sent them under this id, or returned them."""
    routes_from: int = 0
    """Rows before this position are known, and are not sent again."""
    deadline_s: float = 600.0


@dataclass(frozen=True, slots=True, eq=False)
class Generated:
    """What came of a request. Written by `EngineRole`."""

    segment: Segment
    """At least one token."""
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
    """An engine to sample from; fails as `EngineRole.generate` does."""

    @property
    def name(self) -> str: ...

    async def generate(self, request: GenerateRequest) -> Generated: ...


class RewardClient(Protocol):
    """Whoever verifies. Where there is no verdict to be had the outcome is INFRA."""

    async def score(self, request: RewardRequest) -> Verdict: ...

    async def compare(self, requests: Sequence[RewardRequest]) -> tuple[Verdict, ...]:
        """Of one problem's answers, judged beside each other."""
        ...


_TROUBLES = {each.__name__: each for each in (Unavailable, Forgotten)}


class RemoteEngine:
    """An `EngineRole` behind a handle."""

    def __init__(self, caller: Caller, handle: Handle):
        self.name = handle.name
        self._caller, self._handle = caller, handle

    async def generate(self, request: GenerateRequest) -> Generated:
        deadline_s = request.deadline_s + _SLACK_S
        try:
            done: Generated = await self._caller.call(self._handle, "generate", request, deadline_s=deadline_s)
        except RuntimeFailure as failure:  # a `UserError` passes
            kind = failure.kind if isinstance(failure, RoleError) else ""
            trouble = _TROUBLES.get(kind, Unavailable if isinstance(failure, RoleDied) else InfraError)
            raise trouble(str(failure)) from failure
        return done


class RemoteRewards:
    """`RewardRole`s behind handles; each request goes to the one with the fewest in flight."""

    def __init__(self, caller: Caller, handles: Sequence[Handle], deadline_s: float):
        """``deadline_s``: of one verification, as the roles keep it; a request waits for its turn before."""
        assert handles, "a reward needs a verifier"
        self._caller, self._handles, self._deadline_s = caller, handles, deadline_s
        self._loads = [0] * len(handles)

    async def score(self, request: RewardRequest) -> Verdict:
        return (await self._verdicts("score", request, [request]))[0]

    async def compare(self, requests: Sequence[RewardRequest]) -> tuple[Verdict, ...]:
        return await self._verdicts("compare", requests, requests)

    async def _verdicts(self, method: str, argument: Any, requests: Sequence[RewardRequest]) -> tuple[Verdict, ...]:
        place = self._loads.index(min(self._loads))
        self._loads[place] += 1
        deadline_s = self._deadline_s * self._loads[place] + _SLACK_S  # those before it may each take all of theirs
        try:
            return _all(await self._caller.call(self._handles[place], method, argument, deadline_s=deadline_s))
        except RuntimeFailure as failure:
            return tuple(infra(request, str(failure)) for request in requests)
        finally:
            self._loads[place] -= 1


class PooledRewards:
    """`RewardRole`s in pools, by source, that live on the agent's own loop."""

    def __init__(self, pools: Mapping[str, ElasticPool], deadline_s: float):
        self._pools, self._deadline_s = pools, deadline_s

    async def score(self, request: RewardRequest) -> Verdict:
        return (await self._verdicts("score", request, [request]))[0]

    async def compare(self, requests: Sequence[RewardRequest]) -> tuple[Verdict, ...]:
        return await self._verdicts("compare", requests, requests)

    async def _verdicts(self, method: str, argument: Any, requests: Sequence[RewardRequest]) -> tuple[Verdict, ...]:
        try:
            pool, deadline_s = self._pools[requests[0].source], self._deadline_s + _SLACK_S
            return _all(await pool.call(method, argument, deadline_s=deadline_s))
        except RuntimeFailure as failure:
            return tuple(infra(request, str(failure)) for request in requests)


def _all(said: Verdict | Sequence[Verdict]) -> tuple[Verdict, ...]:
    return (said,) if isinstance(said, Verdict) else tuple(said)


@dataclass(frozen=True, slots=True)
class Clients:
    """Whom an agent talks to."""

    engines: Sequence[EngineClient]
    rewards: RewardClient


Verifiers = tuple[Handle, ...] | Mapping[str, ElasticPool]
"""So many roles, each for all sources; or pools by source, for agents on the driver's loop."""


def connect(engines: Sequence[Handle], rewards: Verifiers, deadline_s: float, caller: Caller | None) -> Clients:
    """An agent's clients, where the agent lives; ``deadline_s`` is of one verification."""
    assert caller is not None, "the runtime gives roles a caller"
    remote = [RemoteEngine(caller, handle) for handle in engines]
    if isinstance(rewards, Mapping):
        return Clients(remote, PooledRewards(rewards, deadline_s))
    return Clients(remote, RemoteRewards(caller, rewards, deadline_s))


class Threads:
    """Runs code of others, which may hang: any number of calls at once, each in a thread that may have served others before.

    Not concurrent.futures' executor, which bounds the calls at work, counts those that hang among them, and has the
    process wait at its exit for every thread. Here one that hangs holds up neither loop nor exit.
    """

    def __init__(self) -> None:
        self._idle: list[SimpleQueue[_Call | None]] = []

    async def run(self, work: Callable[[], T], deadline_s: float, what: str) -> T:
        """What ``work`` returns. Raises InfraError: nothing within ``deadline_s``. Whatever ``work`` raises."""
        done = self.start(work, what)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(done), deadline_s)
        except TimeoutError as error:
            if done.done() and not done.cancelled() and isinstance(done.exception(), TimeoutError):
                raise  # the work's own
            raise InfraError(f"{what}: no answer within {deadline_s:g} s") from error

    def start(self, work: Callable[[], T], what: str) -> Future[T]:
        """The same for whoever does not wait for it."""
        if self._idle:
            inbox = self._idle.pop()
        else:
            inbox = SimpleQueue()
            threading.Thread(target=self._serve, args=(inbox,), name=what, daemon=True).start()
        done: Future[T] = Future()
        inbox.put((work, done))
        return done

    def close(self) -> None:
        """Let the idle ones end; those that are busy end with the process."""
        while self._idle:
            self._idle.pop().put(None)

    def _serve(self, inbox: SimpleQueue[_Call | None]) -> None:
        while (call := inbox.get()) is not None:
            work, done = call
            is_wanted = done.set_running_or_notify_cancel()
            try:
                tell = partial(done.set_result, work() if is_wanted else None)
            except Exception as error:
                tell = partial(done.set_exception, error)
            if len(self._idle) < _IDLE:
                self._idle.append(inbox)  # before its caller hears of it: the next call finds it here
            else:
                inbox.put(None)
            if is_wanted:
                tell()


_Call = tuple[Callable[[], Any], Future[Any]]
