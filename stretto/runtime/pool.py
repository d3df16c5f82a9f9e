"""An elastic pool of equal workers over a runtime: grows and shrinks with its load, and replaces its dead."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Self

from stretto.base.errors import UserError
from stretto.runtime.crew import Crew, Worker
from stretto.runtime.runtime import (
    NO_LABELS,
    NO_RESOURCES,
    START_DEADLINE_S,
    DeadlinePassed,
    Handle,
    Placement,
    Resources,
    RoleDied,
    Runtime,
)
from stretto.runtime.sizing import Limits, Load, Meter, settled_size, target_size

_BEAT_S = 0.1
"""Between two looks at the load."""
_WAIT_S = 600.0
"""For a free worker, unless the caller says otherwise."""
_DRAIN_S = 60.0
"""For the last calls of a worker that goes."""


@dataclass(frozen=True, slots=True)
class PoolStats:
    """A pool as it is now, and what it has done since it was opened."""

    size: int
    """Workers that take calls."""
    num_starting: int
    num_leaving: int
    num_leased: int
    """Leases held."""
    target: int
    load: Load
    num_served: int
    """Leases that have ended."""
    num_started: int
    num_replaced: int
    """Workers that died, or hung."""
    worker_s: float
    """Seconds that workers were there, from the start of their starting: what they cost."""
    busy_s: float
    """Seconds of ended leases."""


class ElasticPool:
    """Workers of one kind. Use it as an async context manager; belongs to the driver's loop."""

    def __init__(
        self,
        runtime: Runtime,
        role: Callable[..., Any],
        *args: Any,
        name: str,
        placement: Placement,
        limits: Limits,
        resources: Resources = NO_RESOURCES,
        labels: Mapping[str, str] = NO_LABELS,
        deadline_s: float = START_DEADLINE_S,
        drain_s: float = _DRAIN_S,
        hangs_whole: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ):
        """
        Args:
            drain_s: for the last calls of a worker that goes.
            hangs_whole: a passed deadline says that the worker hangs with all its calls, also where it takes several:
                for roles that keep their calls' deadlines themselves. The others as of `Runtime.spawn`, for each worker.
        """
        self.name = name
        self.labels = dict(labels)
        self.limits = limits
        self._runtime = runtime
        self._hangs_whole = hangs_whole or limits.slots == 1
        self._clock = clock
        self._queue: deque[tuple[float, asyncio.Future[Worker]]] = deque()
        self._meter = Meter(clock(), limits.window_s)
        self._targets: deque[tuple[float, int]] = deque()
        self._error: Exception | None = None

        def spawn(worker: str) -> Awaitable[Handle]:
            options: dict[str, Any] = {"placement": placement, "resources": resources, "labels": labels}
            return runtime.spawn(role, *args, name=worker, deadline_s=deadline_s, **options)

        self._crew = Crew(runtime, name, spawn, drain_s, clock, self._hand_out, self._fail)

    async def __aenter__(self) -> Self:
        """Raises what `Runtime.spawn` raises, for the first workers."""
        try:
            await self._crew.open(self.limits.min)
            if self._error is not None:
                raise self._error
        except BaseException:
            await self.close()
            raise
        self._crew.keep(self._manage())
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the workers, whatever they do; who waits gets `RoleDied`."""
        self._fail(RoleDied(self.name, "the pool is closed"))
        await self._crew.close()

    @asynccontextmanager
    async def lease(self, wait_s: float = _WAIT_S) -> AsyncIterator[Handle]:
        """A worker (a slot of one), first come first served.

        A worker whose death comes out of the block is replaced; one that hangs, too.

        Raises:
            DeadlinePassed: none is free within ``wait_s``.
            UserError, RuntimeFailure: no worker can be started; or the pool is closed.
        """
        came = self._clock()
        self._meter.arrive(came)
        worker = await self._acquire(came, wait_s)
        number = self._meter.begin(came, self._clock())
        try:
            yield worker.handle
        except (RoleDied, DeadlinePassed) as error:
            has_hung = isinstance(error, DeadlinePassed) and self._hangs_whole
            if error.name == worker.handle.name and (has_hung or isinstance(error, RoleDied)):
                self._crew.dismiss(worker)
            raise
        finally:
            self._meter.end(number, self._clock())
            self._release(worker)

    async def call(
        self,
        method: str,
        *args: Any,
        deadline_s: float,
        key: str | None = None,
        wait_s: float = _WAIT_S,
        **kwargs: Any,
    ) -> Any:
        """`Runtime.call` of whichever worker is free; the deadline counts from when one is."""
        async with self.lease(wait_s) as handle:
            return await self._runtime.call(handle, method, *args, deadline_s=deadline_s, key=key, **kwargs)

    @property
    def error(self) -> Exception | None:
        """Why nobody gets a worker any more; None: they do."""
        return self._error

    def handles(self) -> tuple[Handle, ...]:
        """Of the workers that take calls."""
        return tuple(worker.handle for worker in self._crew.staying)

    def replace(self, handle: Handle, *, hard: bool = True) -> None:
        """Another instead of this worker: it hangs (by force, whatever it has in hand), or is to end its calls and go.

        One that is leaving already is left to it.
        """
        worker = self._crew.workers.get(handle.id)
        if worker is not None:
            self._crew.dismiss(worker, hard)

    def stats(self) -> PoolStats:
        crew, size = self._crew, len(self._crew.staying)
        return PoolStats(
            size=size,
            num_starting=crew.num_starting,
            num_leaving=len(crew.workers) - size,
            num_leased=self._meter.num_running,
            target=self._targets[-1][1] if self._targets else self.limits.min,
            load=self._load(self._clock()),
            num_served=self._meter.num_served,
            num_started=crew.num_named - crew.num_starting,
            num_replaced=crew.num_replaced,
            worker_s=crew.worker_s(),
            busy_s=self._meter.busy_s,
        )

    async def _acquire(self, came: float, wait_s: float) -> Worker:
        if self._error is not None:
            raise self._error
        future: asyncio.Future[Worker] = asyncio.get_running_loop().create_future()
        self._queue.append((came, future))
        self._hand_out()
        try:
            async with asyncio.timeout(wait_s):
                return await future
        except BaseException as error:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._release(future.result())  # it came as its taker left
            if isinstance(error, TimeoutError):
                raise DeadlinePassed(self.name, "lease", wait_s) from None
            raise

    def _hand_out(self) -> None:
        while self._queue:
            if self._queue[0][1].done():  # its taker has left
                self._queue.popleft()
                continue
            able = [each for each in self._crew.staying if each.num_leases < self.limits.slots]
            if not able:
                return
            # The last to have worked first, so that those who may go stay idle.
            worker = min(able, key=lambda each: (each.num_leases, -each.freed_s))
            worker.num_leases += 1
            worker.is_free.clear()
            self._queue.popleft()[1].set_result(worker)

    def _release(self, worker: Worker) -> None:
        worker.num_leases -= 1
        worker.freed_s = self._clock()
        if not worker.num_leases:
            worker.is_free.set()
        self._hand_out()

    async def _manage(self) -> None:
        try:
            while True:
                self._crew.dismiss_dead()
                self._resize(self._clock())
                await asyncio.sleep(_BEAT_S)
        except Exception as error:
            self._fail(error)
            raise

    def _resize(self, now: float) -> None:
        staying = self._crew.staying
        size = len(staying) + self._crew.num_starting
        self._targets.append((now, target_size(self._load(now), size, self.limits)))
        while len(self._targets) > 1 and self._targets[1][0] <= now - self.limits.patience_s:
            self._targets.popleft()
        wanted = settled_size(self._targets, size, now, self.limits.patience_s)
        for _ in range(wanted - size):
            self._crew.grow()
        idle_first = sorted(staying, key=lambda worker: (worker.num_leases, worker.freed_s))
        for worker in idle_first[: max(0, min(size - wanted, len(staying) - self.limits.min))]:
            self._crew.let_go(worker)

    def _load(self, now: float) -> Load:
        return self._meter.load(now, [came for came, future in self._queue if not future.done()])

    def _fail(self, error: Exception) -> None:
        """Nobody gets a worker any more."""
        self._error = self._error or error
        while self._queue:
            _, future = self._queue.popleft()
            if not future.done():
                future.set_exception(error)


def choose(pools: Sequence[ElasticPool], labels: Mapping[str, str]) -> ElasticPool:
    """The first pool that has all of ``labels``.

    Raises:
        UserError: none has.
    """
    for pool in pools:
        if labels.items() <= pool.labels.items():
            return pool
    known = "; ".join(f"{pool.name}: {pool.labels}" for pool in pools)
    raise UserError(f"labels: no pool has {dict(labels)}; there are {known}")
