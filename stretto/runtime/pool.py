"""An elastic pool of equal workers over a runtime: grows and shrinks with its load, and replaces its dead.

How many workers it should have is a matter of pure functions, at the end: `measure`, `target_size` and `settled_size`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Self

from stretto.base.errors import UserError
from stretto.runtime.runtime import (
    START_DEADLINE_S,
    DeadlinePassed,
    Handle,
    Placement,
    RoleDied,
    RoleState,
    Runtime,
    RuntimeFailure,
)

_BEAT_S = 0.1
"""Between two looks at the load."""
_WAIT_S = 600.0
"""For a free worker, unless the caller says otherwise."""
_MAX_FAILURES = 3
"""Starts that fail in a row, while nobody works, before it is told."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """Of an elastic pool."""

    min: int = 1
    max: int = 2
    utilisation: float = 0.7
    """Aim of arrival rate × mean service time / (workers × slots)."""
    slots: int = 1
    """Calls that one worker takes at once."""
    wait_aim_s: float = 0.5
    """Of the 95th percentile of waits in the queue; above it, workers are added for the queue too."""
    window_s: float = 5.0
    """Over which rates and waits are taken."""
    patience_s: float = 5.0
    """Workers go when they were not wanted for so long."""

    def __post_init__(self) -> None:
        assert 0 < self.min <= self.max, f"a pool of {self.min} to {self.max} workers"
        assert 0 < self.utilisation <= 1, f"a utilisation of {self.utilisation}"


@dataclass(frozen=True, slots=True)
class Load:
    """What the last window showed. Written by `measure`."""

    arrivals_per_s: float
    mean_service_s: float
    """Of finished calls, or of the age of running ones where that is more; 0 where there was none."""
    p95_wait_s: float
    """Of those who were served and those who still wait."""
    num_waiting: int


@dataclass(frozen=True, slots=True)
class PoolStats:
    """A pool as it is now, and what it has done since it was opened."""

    size: int
    """Workers that take calls."""
    num_leased: int
    """Leases held."""
    load: Load
    num_served: int
    """Leases that have ended."""
    num_started: int
    num_replaced: int
    """Workers that died, or hung."""
    worker_s: float
    """Seconds that workers were there, from the start of their starting: what they cost."""


@dataclass(slots=True, eq=False)
class Turn:
    """One who came for a worker. Seconds of one clock; inf: not yet, and a turn may end before it begins."""

    came_s: float
    began_s: float = math.inf
    ended_s: float = math.inf


@dataclass(slots=True, eq=False)
class _Worker:
    name: str
    born_s: float
    """When it began to start."""
    handle: Handle = field(init=False)
    is_up: bool = False
    """It has a handle."""
    is_leaving: bool = False
    """It takes no more leases."""
    num_leases: int = 0
    freed_s: float = 0.0


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
        deadline_s: float = START_DEADLINE_S,
        drain_s: float = 60.0,
        hangs_whole: bool = False,
    ):
        """
        Args:
            drain_s: for the last calls of a worker that goes.
            hangs_whole: a passed deadline says that the worker hangs with all its calls, also where it takes several:
                for roles that keep their calls' deadlines themselves.
        """
        self.name = name
        self.limits = limits
        self.error: Exception | None = None
        """Why nobody gets a worker any more; None: they do."""
        self._runtime = runtime
        self._drain_s = drain_s
        self._hangs_whole = hangs_whole or limits.slots == 1
        self._spawn = functools.partial(runtime.spawn, role, *args, placement=placement, deadline_s=deadline_s)
        self._opened_s = time.monotonic()
        self._workers: list[_Worker] = []
        self._queue: deque[asyncio.Future[_Worker]] = deque()
        self._turns: list[Turn] = []
        """Of the last window, and those that have not ended."""
        self._targets: deque[tuple[float, int]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_named = self._num_replaced = self._num_served = self._num_failures = 0
        self._ended_s = 0.0

    async def __aenter__(self) -> Self:
        """Raises what `Runtime.spawn` raises, for the first workers."""
        try:
            await asyncio.gather(*(self._start(self._new()) for _ in range(self.limits.min)))
            if self.error is not None:
                raise self.error
        except BaseException:
            await self.close()
            raise
        self._keep(self._manage())
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the workers, whatever they do; who waits gets `RoleDied`."""
        self._fail(RoleDied(self.name, "the pool is closed"))
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        workers = tuple(self._workers)
        await asyncio.gather(*(self._runtime.kill(worker.handle) for worker in workers if worker.is_up))
        for worker in workers:
            self._forget(worker)

    @asynccontextmanager
    async def lease(self, wait_s: float = _WAIT_S) -> AsyncIterator[Handle]:
        """A worker (a slot of one), first come first served.

        A worker whose death comes out of the block is replaced; one that hangs, too.

        Raises:
            DeadlinePassed: none is free within ``wait_s``.
            UserError, RuntimeFailure: no worker can be started; or the pool is closed.
        """
        if self.error is not None:
            raise self.error
        turn, future = Turn(time.monotonic()), asyncio.get_running_loop().create_future()
        self._turns.append(turn)
        self._queue.append(future)
        self._hand_out()
        try:
            async with asyncio.timeout(wait_s):
                worker: _Worker = await future
        except BaseException as error:
            turn.ended_s = time.monotonic()
            if future.done() and not future.cancelled() and future.exception() is None:
                self._release(future.result())  # it came as its taker left
            if isinstance(error, TimeoutError):
                raise DeadlinePassed(self.name, "lease", wait_s) from None
            raise
        turn.began_s = time.monotonic()
        try:
            yield worker.handle
        except (RoleDied, DeadlinePassed) as error:
            if error.name == worker.name and (isinstance(error, RoleDied) or self._hangs_whole):
                self.replace(worker.handle)
            raise
        finally:
            turn.ended_s = time.monotonic()
            self._num_served += 1
            self._release(worker)

    async def call(self, method: str, *args: Any, deadline_s: float, wait_s: float = _WAIT_S, **kwargs: Any) -> Any:
        """`Runtime.call` of whichever worker is free; the deadline counts from when one is."""
        async with self.lease(wait_s) as handle:
            return await self._runtime.call(handle, method, *args, deadline_s=deadline_s, **kwargs)

    def handles(self) -> tuple[Handle, ...]:
        """Of the workers that take calls."""
        return tuple(worker.handle for worker in self._staying())

    def replace(self, handle: Handle, *, hard: bool = True) -> None:
        """Another instead of this worker: it hangs (by force, whatever it has in hand), or is to end its calls and go.

        One that is leaving already is left to it.
        """
        for worker in self._staying():
            if worker.handle == handle and self.error is None:  # leases of a closed pool find their workers dead
                self._num_replaced += 1
                worker.is_leaving = True
                self._keep(self._end(worker, hard))
                self._keep(self._start(self._new()))

    def stats(self) -> PoolStats:
        now = time.monotonic()
        num_starting = sum(not worker.is_up for worker in self._workers)
        return PoolStats(
            size=len(self._staying()),
            num_leased=sum(worker.num_leases for worker in self._workers),
            load=self._load(now),
            num_served=self._num_served,
            num_started=self._num_named - num_starting,
            num_replaced=self._num_replaced,
            worker_s=self._ended_s + sum(now - worker.born_s for worker in self._workers),
        )

    def _staying(self) -> list[_Worker]:
        return [worker for worker in self._workers if worker.is_up and not worker.is_leaving]

    def _new(self) -> _Worker:
        """It counts as starting from now on: a task of its own begins later."""
        self._num_named += 1
        worker = _Worker(f"{self.name}-{self._num_named}", time.monotonic())
        self._workers.append(worker)
        return worker

    async def _start(self, worker: _Worker) -> None:
        try:
            worker.handle = await self._spawn(name=worker.name)
        except (UserError, RuntimeFailure) as error:
            self._num_failures += 1
            _log.warning("%s could not be started: %s", worker.name, error)
            is_hopeless = isinstance(error, UserError) or self._num_failures >= _MAX_FAILURES
            if is_hopeless and not any(each.is_up for each in self._workers):
                self._fail(error)
            self._forget(worker)
            return
        worker.is_up, self._num_failures = True, 0
        worker.freed_s = time.monotonic()
        self._hand_out()

    async def _end(self, worker: _Worker, hard: bool) -> None:
        give_up_s = time.monotonic() + self._drain_s
        while worker.num_leases and not hard:
            if time.monotonic() > give_up_s:
                _log.warning("%s goes before it has finished", worker.name)
                break
            await asyncio.sleep(_BEAT_S)
        await self._runtime.kill(worker.handle, hard=hard)
        self._forget(worker)

    def _forget(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        self._ended_s += time.monotonic() - worker.born_s

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Run it beside everything else, until `close`."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _hand_out(self) -> None:
        while self._queue and (able := [each for each in self._staying() if each.num_leases < self.limits.slots]):
            future = self._queue.popleft()
            if not future.done():  # else its taker has left
                # The last to have worked first, so that those who may go stay idle.
                worker = min(able, key=lambda each: (each.num_leases, -each.freed_s))
                worker.num_leases += 1
                future.set_result(worker)

    def _release(self, worker: _Worker) -> None:
        worker.num_leases -= 1
        worker.freed_s = time.monotonic()
        self._hand_out()

    async def _manage(self) -> None:
        while True:
            for handle in self.handles():
                if self._runtime.status(handle).state is RoleState.DEAD:
                    self.replace(handle)
            self._resize(time.monotonic())
            await asyncio.sleep(_BEAT_S)

    def _resize(self, now_s: float) -> None:
        since_s = now_s - self.limits.window_s
        self._turns = [turn for turn in self._turns if turn.ended_s >= since_s]
        staying = self._staying()
        size = len(staying) + sum(not worker.is_up for worker in self._workers)
        self._targets.append((now_s, target_size(self._load(now_s), size, self.limits)))
        while len(self._targets) > 1 and self._targets[1][0] <= now_s - self.limits.patience_s:
            self._targets.popleft()
        wanted = settled_size(self._targets, size, now_s, self.limits.patience_s)
        for _ in range(wanted - size):
            self._keep(self._start(self._new()))
        idle_first = sorted(staying, key=lambda worker: (worker.num_leases, worker.freed_s))
        for worker in idle_first[: max(0, min(size - wanted, len(staying) - self.limits.min))]:
            worker.is_leaving = True
            self._keep(self._end(worker, hard=False))

    def _load(self, now_s: float) -> Load:
        # The first moments say little: one arrival at once is no endless rate.
        return measure(self._turns, now_s, min(max(now_s - self._opened_s, 1.0), self.limits.window_s))

    def _fail(self, error: Exception) -> None:
        """Nobody gets a worker any more."""
        self.error = self.error or error
        while self._queue:
            future = self._queue.popleft()
            if not future.done():
                future.set_exception(error)


def measure(turns: Sequence[Turn], now_s: float, window_s: float) -> Load:
    """Arrivals, waits and services of the window that ends now."""
    since_s, never = now_s - window_s, math.inf
    waiting = [now_s - turn.came_s for turn in turns if turn.began_s == turn.ended_s == never]
    waits = [turn.began_s - turn.came_s for turn in turns if since_s <= turn.began_s < never]
    ages = [now_s - turn.began_s for turn in turns if turn.began_s < turn.ended_s == never]
    services = [
        turn.ended_s - turn.began_s for turn in turns if turn.began_s < never and since_s <= turn.ended_s < never
    ]
    mean_s = fmean(services or [0.0])
    if ages:  # long calls are in no statistics of ended ones until they end
        mean_s = max(mean_s, fmean(ages + services))
    rate = sum(turn.came_s >= since_s for turn in turns) / window_s
    return Load(rate, mean_s, percentile(waiting + waits, 0.95), len(waiting))


def target_size(load: Load, size: int, limits: Limits) -> int:
    """Little's law at the utilisation aimed at, and enough more to clear the queue within the wait aimed at.

    Workers in use = arrival rate × mean service time, whatever the distributions; see METHODS on elastic pools. The
    law knows only the mean over the window, so a burst is first seen by those who wait.

    Args:
        size: workers there are, those that are starting included.
    """
    busy = load.arrivals_per_s * load.mean_service_s / limits.slots
    wanted = math.ceil(busy / limits.utilisation - 1e-9)  # or 0.7 / 0.7 would ask for two
    if load.p95_wait_s > limits.wait_aim_s and load.num_waiting:
        behind = load.num_waiting * load.mean_service_s / (limits.wait_aim_s * limits.slots)
        wanted = max(wanted, math.ceil(busy + behind), size + 1)
    return min(max(wanted, limits.min), limits.max)


def settled_size(targets: Sequence[tuple[float, int]], size: int, now_s: float, patience_s: float) -> int:
    """``size`` raised to the latest target at once, or lowered to the highest one of the time of patience.

    Args:
        targets: (seconds, target), oldest first; one from before the time of patience shows that it is over.
    """
    assert targets, "no target yet"
    latest = targets[-1][1]
    if latest >= size:
        return latest
    if targets[0][0] > now_s - patience_s:
        return size
    return min(size, max(target for seconds, target in targets if seconds >= now_s - patience_s))


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least ``share`` of them do not exceed; 0 without any."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0
