"""Clients through which an agent calls engines and verifiers, and their requests, results and errors.

The roles themselves implement the same two interfaces, so that an agent can also call them directly. Imports no torch.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
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
"""Time by which a caller's deadline exceeds the deadline that the role keeps itself, for both ways of the call."""
_KEPT_TOKENS = 1 << 24
"""Tokens of unfinished samples that an engine role keeps, over all samples: 64 MiB."""
_DROP_POLL_S = 0.01
_MAX_IDLE = 4
"""Largest number of idle threads kept for later calls."""


class Unavailable(InfraError):  # noqa: N818 - data, not a fault
    """The engine died and is being restarted. The caller waits as long as its lease lasts."""


class Forgotten(InfraError):  # noqa: N818
    """The engine lacks tokens that the request expects it to have: it was restarted or dropped them. Send all tokens."""


@asynccontextmanager
async def within(deadline_s: float, message: str) -> AsyncIterator[None]:
    """Context with a deadline. Raises InfraError with ``message`` when the deadline passes."""
    try:
        async with asyncio.timeout(deadline_s) as limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise  # an error of the context's body
        raise InfraError(message) from error


class CallsInFlight:
    """Calls of a role that `drop` ends together."""

    def __init__(self, name: str):
        """``name``: the role's, for errors."""
        self._name = name
        self._limits: set[asyncio.Timeout] = set()

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Context of one call. Raises InfraError: it was dropped."""
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._limits.add(limit)
                yield
        except TimeoutError as error:
            if not limit.expired():
                raise  # an error of the context's body
            raise InfraError(f"{self._name}: dropped, because the trainer returns to a snapshot") from error
        finally:
            self._limits.discard(limit)

    async def drop(self) -> None:
        """Cancel all calls so far, and wait until they have ended; later ones go on."""
        dropped = self._limits.copy()
        for limit in dropped:
            limit.reschedule(asyncio.get_running_loop().time())
        while dropped & self._limits:
            await asyncio.sleep(_DROP_POLL_S)


@dataclass(frozen=True, slots=True, eq=False)
class GenerateRequest:
    """Request for one chunk of one sample. Written by the agent."""

    id: str
    """Unique among the requests in flight of all agents."""
    tokens: np.ndarray
    """int32 [T], all tokens of the sample after the first ``num_kept``."""
    max_tokens: int
    temperature: float
    seed: int
    """Seed and position determine each draw, so that the size of the chunks does not change the tokens."""
    stop_ids: tuple[int, ...]
    """Only these tokens end the turn. The one that did is part of the result."""
    want_routes: bool = True
    num_kept: int = 0
    """Leading tokens that the engine already has: it received or returned them under the same id."""
    routes_from: int = 0
    """First position whose routes are returned."""
    deadline_s: float = 600.0


@dataclass(frozen=True, slots=True, eq=False)
class Generated:
    """Result of a `GenerateRequest`. Written by `EngineRole`."""

    segment: Segment
    """At least one token."""
    routes: np.ndarray | None
    """uint8 or uint16 [R, L, K], for positions ``routes_from`` to the last token but one, prompt and cache hits included."""
    finish_reason: Literal["stop", "length"]
    cached_tokens: int
    """Prompt tokens found in the prefix cache."""
    computed_tokens: int
    """Prompt tokens not found in the prefix cache."""
    num_preemptions: int
    """Times that the request's keys and values were dropped, for other requests or because of new weights."""
    queued_s: float


class KeptTokens:
    """Tokens of unfinished samples, by request id, so that an agent sends each token to an engine role once."""

    def __init__(self, name: str):
        """``name``: the engine role's, for errors."""
        self._name = name
        self._kept: dict[str, np.ndarray] = {}  # the last used last
        self._num_kept = 0

    def prefix(self, request: GenerateRequest) -> np.ndarray:
        """All tokens that the request continues, kept ones included. Raises Forgotten: some of them are not here."""
        if not request.num_kept:
            return request.tokens
        kept = self._kept.get(request.id, request.tokens[:0])
        if len(kept) < request.num_kept:  # it may be longer, if the agent did not receive the last result
            raise Forgotten(f"{self._name}: request {request.id}: {len(kept)} of {request.num_kept} tokens are here")
        return np.concatenate([kept[: request.num_kept], request.tokens])

    def keep(self, id: str, tokens: np.ndarray) -> None:
        """Keep ``tokens`` for the next chunk; drop the least recently used samples beyond `_KEPT_TOKENS`."""
        self._num_kept += len(tokens) - len(self._kept.pop(id, ()))
        self._kept[id] = tokens
        while self._num_kept > _KEPT_TOKENS:
            self._num_kept -= len(self._kept.pop(next(iter(self._kept))))


@dataclass(frozen=True, slots=True)
class RewardRequest:
    """Request to verify a finished sample. Written by the agent."""

    source: str
    item: int
    text: str
    """The last turn of the model."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """All messages after the prompt, including tool turns and the last turn."""
    seed: int | None = None
    """See `stretto.tasks.task.Answer`."""


def infra(request: RewardRequest, why: str) -> Verdict:
    """Verdict with outcome INFRA: the verification failed, which says nothing about the answer."""
    return Verdict(0.0, Outcome.INFRA, 0.0, detail=f"sources.{request.source}: item {request.item}: {why}")


class EngineClient(Protocol):
    """Interface of an engine. Raises the same errors as `EngineRole.generate`."""

    @property
    def name(self) -> str: ...

    async def generate(self, request: GenerateRequest) -> Generated: ...


class RewardClient(Protocol):
    """Interface of a verifier. A verification that fails returns the outcome INFRA."""

    async def score(self, request: RewardRequest) -> Verdict: ...

    async def compare(self, requests: Sequence[RewardRequest]) -> tuple[Verdict, ...]:
        """Verdicts on several answers to one problem, which the task judges together."""
        ...


_ENGINE_ERRORS = {kind.__name__: kind for kind in (Unavailable, Forgotten)}


class RemoteEngine:
    """Client of an `EngineRole` behind a handle."""

    def __init__(self, caller: Caller, handle: Handle):
        self.name = handle.name
        self._caller, self._handle = caller, handle

    async def generate(self, request: GenerateRequest) -> Generated:
        deadline_s = request.deadline_s + _SLACK_S
        try:
            result: Generated = await self._caller.call(self._handle, "generate", request, deadline_s=deadline_s)
        except RuntimeFailure as failure:  # a `UserError` passes
            name = failure.kind if isinstance(failure, RoleError) else ""
            kind = _ENGINE_ERRORS.get(name, Unavailable if isinstance(failure, RoleDied) else InfraError)
            raise kind(str(failure)) from failure
        return result


class _Verifiers(ABC):
    """`RewardRole`s behind a runtime. A call that fails gives verdicts with outcome INFRA."""

    async def score(self, request: RewardRequest) -> Verdict:
        return (await self._verdicts("score", request, [request]))[0]

    async def compare(self, requests: Sequence[RewardRequest]) -> tuple[Verdict, ...]:
        return await self._verdicts("compare", requests, requests)

    async def _verdicts(self, method: str, argument: Any, requests: Sequence[RewardRequest]) -> tuple[Verdict, ...]:
        try:
            verdicts = await self._call(requests[0].source, method, argument)
        except RuntimeFailure as failure:
            return tuple(infra(request, str(failure)) for request in requests)
        return (verdicts,) if isinstance(verdicts, Verdict) else tuple(verdicts)

    @abstractmethod
    async def _call(self, source: str, method: str, argument: Any) -> Any:
        """Result of ``method`` of a verifier for ``source``. Raises RuntimeFailure."""


class RemoteRewards(_Verifiers):
    """A fixed number of verifiers; each request goes to the one with the fewest requests in flight."""

    def __init__(self, caller: Caller, handles: Sequence[Handle], lease_s: float):
        """``lease_s``: longest wait for a verdict, the role's queue included: other agents fill that queue too. The role itself keeps
        the deadline of one verification."""
        assert handles, "a reward needs a verifier"
        self._caller, self._handles, self._lease_s = caller, handles, lease_s
        self._loads = [0] * len(handles)

    async def _call(self, source: str, method: str, argument: Any) -> Any:
        place = self._loads.index(min(self._loads))
        self._loads[place] += 1
        try:
            return await self._caller.call(self._handles[place], method, argument, deadline_s=self._lease_s)
        finally:
            self._loads[place] -= 1


class PooledRewards(_Verifiers):
    """Elastic pools of verifiers, by source, on the agent's own loop."""

    def __init__(self, pools: Mapping[str, ElasticPool], deadline_s: float):
        self._pools, self._deadline_s = pools, deadline_s

    async def _call(self, source: str, method: str, argument: Any) -> Any:
        return await self._pools[source].call(method, argument, deadline_s=self._deadline_s + _SLACK_S)


@dataclass(frozen=True, slots=True)
class Clients:
    """All clients of one agent."""

    engines: Sequence[EngineClient]
    rewards: RewardClient


Verifiers = tuple[Handle, ...] | Mapping[str, ElasticPool]
"""Handles of roles that each verify all sources; or pools by source, for agents on the driver's loop."""


def connect(
    engines: Sequence[Handle], rewards: Verifiers, deadline_s: float, lease_s: float, caller: Caller | None
) -> Clients:
    """Make an agent's clients in the agent's process. ``deadline_s``: deadline of one verification; ``lease_s``: of a group."""
    assert caller is not None, "the runtime gives roles a caller"
    remote = [RemoteEngine(caller, handle) for handle in engines]
    if isinstance(rewards, Mapping):
        return Clients(remote, PooledRewards(rewards, deadline_s))
    return Clients(remote, RemoteRewards(caller, rewards, lease_s))


class Threads:
    """Threads for foreign code that may hang. Any number of calls run at once; finished threads are reused.

    Unlike concurrent.futures' executor, a hanging call occupies no worker slot, and the process does not wait for it at exit.
    """

    def __init__(self) -> None:
        self._idle: list[SimpleQueue[_Call | None]] = []

    async def run(self, work: Callable[[], T], deadline_s: float, what: str) -> T:
        """Result of ``work``, called ``what`` in errors. Raises InfraError: no result within ``deadline_s``; errors of ``work``."""
        async with within(deadline_s, f"{what}: no answer within {deadline_s:g} s"):
            return await asyncio.wrap_future(self.start(work, what))

    def start(self, work: Callable[[], T], what: str) -> Future[T]:
        """Start ``work`` without waiting for it."""
        if self._idle:
            inbox = self._idle.pop()
        else:
            inbox = SimpleQueue()
            threading.Thread(target=self._serve, args=(inbox,), name=what, daemon=True).start()
        result: Future[T] = Future()
        inbox.put((work, result))
        return result

    async def close_after(self, work: Callable[[], None]) -> None:
        """Do ``work`` in a thread, then `close`, also if it fails."""
        try:
            await asyncio.wrap_future(self.start(work, "close"))
        finally:
            self.close()

    def close(self) -> None:
        """End the idle threads. Busy threads end with the process."""
        while self._idle:
            self._idle.pop().put(None)

    def _serve(self, inbox: SimpleQueue[_Call | None]) -> None:
        while (call := inbox.get()) is not None:
            work, result = call
            is_wanted = result.set_running_or_notify_cancel()
            try:
                report = partial(result.set_result, work() if is_wanted else None)
            except SystemExit as error:  # raised in a coroutine, it would end the process
                report = partial(result.set_exception, InfraError(f"it raised SystemExit: {error}"))
            except Exception as error:
                report = partial(result.set_exception, error)
            if len(self._idle) < _MAX_IDLE:
                self._idle.append(inbox)  # before the report, so that the caller's next call can reuse this thread
            else:
                inbox.put(None)
            if is_wanted:
                report()


_Call = tuple[Callable[[], Any], Future[Any]]
