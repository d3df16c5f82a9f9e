"""An elastic pool of equal workers on a runtime: grows and shrinks with its load, and replaces dead workers.

Pure functions at the end of the file compute the size of the pool: `measure`, `target_size` and `settled_size`.
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
    NOTHING,
    START_DEADLINE_S,
    DeadlinePassed,
    Handle,
    Needs,
    Placement,
    Restarts,
    RoleDied,
    RoleState,
    Runtime,
    RuntimeFailure,
    cancel_all,
)

_BEAT_S = 0.1
"""Interval between two measurements of the load, in seconds."""
_WAIT_S = 600.0
"""Default for the longest wait for a free worker, in seconds."""
_MAX_FAILURES = 3
"""Number of consecutive failed starts after which the pool fails, if no worker stays and none is being started."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """Size limits and aims of an elastic pool."""

    min: int = 1
    """Smallest number of workers."""
    max: int = 2
    """Largest number of workers."""
    utilisation: float = 0.7
    """Aim for arrival rate × mean service time / (workers × slots)."""
    slots: int = 1
    """Number of concurrent calls per worker."""
    wait_aim_s: float = 0.5
    """Aim for the 95th percentile of waits in the queue, in seconds; above it, workers are added for the queue as well."""
    window_s: float = 5.0
    """Time over which rates and waits are measured, in seconds."""
    patience_s: float = 5.0
    """Time after which surplus workers are ended, in seconds."""

    def __post_init__(self) -> None:
        assert 0 < self.min <= self.max, f"a pool of {self.min} to {self.max} workers"
        assert 0 < self.utilisation <= 1, f"a utilisation of {self.utilisation}"


@dataclass(frozen=True, slots=True)
class Load:
    """Load in the last window. Written by `measure`."""

    arrivals_per_s: float
    mean_service_s: float
    """Mean duration of finished leases, or mean age including running ones if it is longer; 0 without leases. Seconds."""
    p95_wait_s: float
    """95th percentile of waits of served and of waiting callers, in seconds."""
    num_waiting: int


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Current state of a pool, and counts since it was opened."""

    size: int
    """Workers that accept calls."""
    num_leased: int
    """Current leases."""
    load: Load
    num_served: int
    """Leases that have ended."""
    num_replaced: int
    """Workers that died or hung."""
    worker_s: float
    """Sum over workers of the seconds from the beginning of their start to their end: the cost of the pool."""


@dataclass(slots=True, eq=False)
class Turn:
    """Times of one caller of `lease`, in seconds of one clock; inf: not yet. A turn ends without beginning if the caller gives up."""

    came_s: float
    began_s: float = math.inf
    ended_s: float = math.inf


@dataclass(slots=True, eq=False)
class _Worker:
    name: str
    born_s: float
    """Beginning of its start."""
    handle: Handle = field(init=False)
    is_up: bool = False
    """Whether it has started and has a handle."""
    is_leaving: bool = False
    """Whether it is being ended and gets no new leases."""
    num_leases: int = 0
    freed_s: float = 0.0


class ElasticPool:
    """Pool of workers of one class. An async context manager; belongs to the driver's loop."""

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
        restarts: int = 10,
        window_s: float = 600.0,
        needs: Needs = NOTHING,
    ):
        """``drain_s``: longest wait for the last calls of a worker that is being ended, in seconds. ``restarts``: largest number of
        workers that die or hang, within ``window_s`` seconds, for each worker of the largest size; the pool fails after more."""
        self.name = name
        self.limits = limits
        self.error: Exception | None = None
        """Reason why `lease` fails for all callers; None: it does not."""
        self._runtime = runtime
        self._drain_s = drain_s
        self._spawn = functools.partial(
            runtime.spawn, role, *args, placement=placement, deadline_s=deadline_s, needs=needs
        )
        self._again = Restarts(restarts * limits.max, window_s)
        self._starts = Restarts(restarts * limits.max, window_s)
        """Counts failed starts."""
        self._grows_from_s = 0.0
        """Time before which no workers are added, after a failed start; inf: never again, until one starts."""
        self._opened_s = time.monotonic()
        self._workers: list[_Worker] = []
        self._queue: deque[asyncio.Future[_Worker]] = deque()
        self._turns: list[Turn] = []
        """Turns of the last window, and those that have not ended."""
        self._targets: deque[tuple[float, int]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_named = self._num_replaced = self._num_served = self._num_failures = 0
        self._ended_s = 0.0

    async def __aenter__(self) -> Self:
        """Start the first workers; raises the errors of `Runtime.spawn`."""
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
        """End all workers; waiting callers get `RoleDied`."""
        self._fail(RoleDied(self.name, "the pool is closed"))
        await cancel_all(tuple(self._tasks))
        workers = tuple(self._workers)
        await asyncio.gather(*(self._runtime.kill(worker.handle) for worker in workers if worker.is_up))
        for worker in workers:
            self._forget(worker)

    @asynccontextmanager
    async def lease(self, wait_s: float = _WAIT_S) -> AsyncIterator[Handle]:
        """Context with a slot of a worker, in order of arrival.

        If `RoleDied` or `DeadlinePassed` of this worker leaves the block, the worker is replaced with all its calls: a worker that
        works enforces shorter deadlines itself.

        Raises:
            DeadlinePassed: no worker is free within ``wait_s``.
            UserError, RuntimeFailure: no worker can be started, or the pool is closed.
        """
        if self.error is not None:
            raise self.error
        turn, future = Turn(time.monotonic()), asyncio.get_running_loop().create_future()
        self._turns.append(turn)
        self._queue.append(future)
        self._assign()
        try:
            async with asyncio.timeout(wait_s):
                worker: _Worker = await future
        except BaseException as error:
            turn.ended_s = time.monotonic()
            if future.done() and not future.cancelled() and future.exception() is None:
                self._release(future.result())  # a worker was assigned while the caller gave up
            if isinstance(error, TimeoutError):
                raise DeadlinePassed(self.name, "lease", wait_s) from None
            raise
        turn.began_s = time.monotonic()
        try:
            yield worker.handle
        except (RoleDied, DeadlinePassed) as error:
            if error.name == worker.name:
                self.replace(worker.handle, why=error.why if isinstance(error, RoleDied) else "")
            raise
        finally:
            turn.ended_s = time.monotonic()
            self._num_served += 1
            self._release(worker)

    async def call(self, method: str, *args: Any, deadline_s: float, wait_s: float = _WAIT_S, **kwargs: Any) -> Any:
        """`Runtime.call` on a free worker; the deadline starts when one is free."""
        async with self.lease(wait_s) as handle:
            return await self._runtime.call(handle, method, *args, deadline_s=deadline_s, **kwargs)

    def handles(self) -> tuple[Handle, ...]:
        """Handles of workers that accept calls."""
        return tuple(worker.handle for worker in self._staying())

    def replace(self, handle: Handle, *, hard: bool = True, why: str = "") -> None:
        """Start another worker in place of this one, which is killed (``hard``) or ended after its calls. Does nothing if the worker is
        being ended already. ``why``: what is known beside its status.
        """
        for worker in self._staying():
            if worker.handle == handle and self.error is None:  # closing the pool also kills workers
                self._num_replaced += 1
                worker.is_leaving = True
                self._keep(self._end(worker, hard))
                if self._again.next_pause_s() is None:  # no pause, because all workers of a node die together
                    why = self._runtime.status(handle).why or why or "it hangs"
                    self._fail(RoleDied(worker.name, f"{why}, after {self._again}"))
                    return
                self._keep(self._start(self._new()))

    def stats(self) -> PoolStats:
        now = time.monotonic()
        return PoolStats(
            size=len(self._staying()),
            num_leased=sum(worker.num_leases for worker in self._workers),
            load=self._load(now),
            num_served=self._num_served,
            num_replaced=self._num_replaced,
            worker_s=self._ended_s + sum(now - worker.born_s for worker in self._workers),
        )

    def _staying(self) -> list[_Worker]:
        return [worker for worker in self._workers if worker.is_up and not worker.is_leaving]

    def _new(self) -> _Worker:
        """A new worker, counted as starting from now on, although the task that starts it begins later."""
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
            pause_s = None if isinstance(error, UserError) else self._starts.next_pause_s()
            self._grows_from_s = math.inf if pause_s is None else time.monotonic() + pause_s
            self._forget(worker)
            is_hopeless = pause_s is None or self._num_failures >= _MAX_FAILURES
            if is_hopeless and all(other.is_leaving for other in self._workers):
                self._fail(error)
            return
        worker.is_up, self._num_failures, self._grows_from_s = True, 0, 0.0
        self._starts.began()
        worker.freed_s = time.monotonic()
        self._assign()

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
        """Run ``work`` in a task that `close` cancels."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _assign(self) -> None:
        """Assign free slots to waiting callers."""
        while self._queue and (free := [other for other in self._staying() if other.num_leases < self.limits.slots]):
            future = self._queue.popleft()
            if not future.done():  # else the caller has given up
                # The most recently used worker first, so the others stay idle and can be ended.
                worker = min(free, key=lambda other: (other.num_leases, -other.freed_s))
                worker.num_leases += 1
                future.set_result(worker)

    def _release(self, worker: _Worker) -> None:
        worker.num_leases -= 1
        worker.freed_s = time.monotonic()
        self._assign()

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
        if now_s < self._grows_from_s:
            wanted = min(wanted, size)
        for _ in range(wanted - size):
            self._keep(self._start(self._new()))
        idle_first = sorted(staying, key=lambda worker: (worker.num_leases, worker.freed_s))
        for worker in idle_first[: max(0, min(size - wanted, len(staying) - self.limits.min))]:
            worker.is_leaving = True
            self._keep(self._end(worker, hard=False))

    def _load(self, now_s: float) -> Load:
        # At least a second, or the first arrival would be a huge rate.
        return measure(self._turns, now_s, min(max(now_s - self._opened_s, 1.0), self.limits.window_s))

    def _fail(self, error: Exception) -> None:
        """Let all waiting and later callers fail."""
        self.error = self.error or error
        while self._queue:
            future = self._queue.popleft()
            if not future.done():
                future.set_exception(error)


def measure(turns: Sequence[Turn], now_s: float, window_s: float) -> Load:
    """Load in the window of ``window_s`` that ends at ``now_s``."""
    since_s, never = now_s - window_s, math.inf
    waiting = [now_s - turn.came_s for turn in turns if turn.began_s == turn.ended_s == never]
    waits = [turn.began_s - turn.came_s for turn in turns if since_s <= turn.began_s < never]
    ages = [now_s - turn.began_s for turn in turns if turn.began_s < turn.ended_s == never]
    services = [
        turn.ended_s - turn.began_s for turn in turns if turn.began_s < never and since_s <= turn.ended_s < never
    ]
    mean_s = fmean(services or [0.0])
    if ages:  # a long lease is not among the finished ones until it ends
        mean_s = max(mean_s, fmean(ages + services))
    rate = sum(turn.came_s >= since_s for turn in turns) / window_s
    return Load(rate, mean_s, percentile(waiting + waits, 0.95), len(waiting))


def target_size(load: Load, size: int, limits: Limits) -> int:
    """Number of workers for the aimed utilisation by Little's law, and more if the queue must be cleared within the aimed wait.

    Workers in use = arrival rate × mean service time, for any distributions; see METHODS on elastic pools. The
    law uses means over the window, so a burst first shows in the queue.

    Args:
        size: current number of workers, including starting ones.
    """
    busy = load.arrivals_per_s * load.mean_service_s / limits.slots
    wanted = math.ceil(busy / limits.utilisation - 1e-9)  # without the margin, rounding of 0.7 / 0.7 could give two
    if load.p95_wait_s > limits.wait_aim_s and load.num_waiting:
        behind = load.num_waiting * load.mean_service_s / (limits.wait_aim_s * limits.slots)
        wanted = max(wanted, math.ceil(busy + behind), size + 1)
    return min(max(wanted, limits.min), limits.max)


def settled_size(targets: Sequence[tuple[float, int]], size: int, now_s: float, patience_s: float) -> int:
    """New size of the pool: the latest target if it is larger than ``size``, else the highest target of the last ``patience_s``.

    Args:
        targets: (seconds, target), oldest first. Without a target older than ``patience_s``, the size is not reduced.
    """
    assert targets, "no target yet"
    latest = targets[-1][1]
    if latest >= size:
        return latest
    if targets[0][0] > now_s - patience_s:
        return size
    return min(size, max(target for seconds, target in targets if seconds >= now_s - patience_s))


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least ``share`` of the values do not exceed; 0 without values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0
