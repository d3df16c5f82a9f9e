"""The workers of a pool: started, replaced, and let go when they have finished."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from stretto.base.errors import UserError
from stretto.runtime.runtime import Handle, NoRoom, RoleState, Runtime, RuntimeFailure

_MAX_FAILURES = 3
"""Starts that fail in a row, while nobody works, before it is told."""
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Worker:
    """One of a crew. The pool counts its leases."""

    handle: Handle
    num_leases: int = 0
    freed_s: float = 0.0
    is_leaving: bool = False
    is_free: asyncio.Event = field(default_factory=asyncio.Event)

    def leave(self) -> None:
        """Take no more leases."""
        self.is_leaving = True
        if not self.num_leases:
            self.is_free.set()


class Crew:
    """Belongs to the driver's loop."""

    def __init__(
        self,
        runtime: Runtime,
        name: str,
        spawn: Callable[[str], Awaitable[Handle]],
        drain_s: float,
        clock: Callable[[], float],
        has_come: Callable[[], None],
        fail: Callable[[Exception], None],
    ):
        """
        Args:
            spawn: starts the worker of that name.
            drain_s: for the last calls of one that goes.
            has_come: called when there is one more.
            fail: told why none can be started, where there is none.
        """
        self._runtime = runtime
        self._name = name
        self._spawn = spawn
        self._drain_s = drain_s
        self._clock = clock
        self._has_come = has_come
        self._fail = fail
        self.workers: dict[str, Worker] = {}
        """By handle id, those that leave included."""
        self.num_named = self.num_starting = 0
        self.num_replaced = 0
        self._num_failures = 0
        self._ended_s = 0.0
        self._lives: dict[int, float] = {}
        """When each that still costs something began to start."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    @property
    def staying(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if not worker.is_leaving]

    def worker_s(self) -> float:
        """Seconds that workers were there, from the start of their starting."""
        now = self._clock()
        return self._ended_s + sum(now - born for born in self._lives.values())

    async def open(self, num: int) -> None:
        """Start so many and wait for them."""
        await asyncio.gather(*(self._add(self._next()) for _ in range(num)))

    def grow(self) -> None:
        self.keep(self._add(self._next()))

    def let_go(self, worker: Worker) -> None:
        """Drain before removal: its leases end first."""
        worker.leave()
        self.keep(self._let_go(worker))

    def dismiss(self, worker: Worker, hard: bool = True) -> None:
        """Another instead of it: it is dead or hangs, or (not ``hard``) may end what it has."""
        if worker.is_leaving or self._is_closed:  # leases that end with a closed crew find their workers dead
            return
        worker.leave()
        self.num_replaced += 1
        self.keep(self._end(worker, hard=True) if hard else self._let_go(worker))
        self.grow()

    def dismiss_dead(self) -> None:
        for worker in self.staying:
            if self._runtime.status(worker.handle).state is RoleState.DEAD:
                self.dismiss(worker)

    def keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Run it beside everything else, until `close`."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End them all, whatever they do."""
        self._is_closed = True
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(self._runtime.kill(worker.handle) for worker in self.workers.values()))
        self.workers.clear()
        self._ended_s = self.worker_s()
        self._lives.clear()

    def _next(self) -> int:
        """The number of one more worker, which counts as starting from now on: a task of its own begins later."""
        self.num_named += 1
        self.num_starting += 1
        self._lives[self.num_named] = self._clock()
        return self.num_named

    async def _add(self, number: int) -> None:
        try:
            handle = await self._spawn(f"{self._name}-{number}")
        except (UserError, RuntimeFailure) as error:
            self._ended_s += self._clock() - self._lives.pop(number)
            self._num_failures += 1
            _log.warning("%s-%d could not be started: %s", self._name, number, error)
            is_hopeless = isinstance(error, (UserError, NoRoom)) or self._num_failures >= _MAX_FAILURES
            if is_hopeless and not self.workers:
                self._fail(error)
            return
        finally:
            self.num_starting -= 1
        self._num_failures = 0
        self.workers[handle.id] = Worker(handle, freed_s=self._clock())
        self._has_come()

    async def _let_go(self, worker: Worker) -> None:
        try:
            async with asyncio.timeout(self._drain_s):
                await worker.is_free.wait()
            await self._runtime.drain(worker.handle, self._drain_s)
        except (TimeoutError, RuntimeFailure) as error:
            _log.warning("%s goes before it has finished: %s", worker.handle.name, error)
        await self._end(worker, hard=False)

    async def _end(self, worker: Worker, hard: bool) -> None:
        await self._runtime.kill(worker.handle, hard=hard)
        del self.workers[worker.handle.id]
        number = int(worker.handle.name.rpartition("-")[2])
        self._ended_s += self._clock() - self._lives.pop(number)
