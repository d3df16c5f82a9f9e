"""Threads for code of others, which may hang: called with a deadline, left behind where it passes. Imports no torch."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

from stretto.base.loops import from_thread, settle
from stretto.rl.asking import Trouble

T = TypeVar("T")

_IDLE = 4
"""Threads kept for later calls."""

_Call = Callable[[], None]


class Threads:
    """Runs any number of calls at once, each in a thread of its own, which may have served others before.

    Belongs to one loop. One that hangs holds up neither that loop nor the exit of the process.
    """

    def __init__(self) -> None:
        self._idle: list[SimpleQueue[_Call | None]] = []

    async def run(self, work: Callable[[], T], deadline_s: float, what: str) -> T:
        """What ``work`` returns.

        Raises:
            Trouble: nothing within ``deadline_s``. Whatever ``work`` raises.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        inbox = self._idle.pop() if self._idle else _started(what)

        def tell(result: Any, error: Exception | None) -> None:
            self._rest(inbox)
            settle(future, result, error)

        def call() -> None:
            result: Any = None
            problem: Exception | None = None
            try:
                result = work()
            except Exception as error:
                problem = error
            from_thread(loop, tell, result, problem)

        inbox.put(call)
        try:
            return await asyncio.wait_for(future, deadline_s)
        except TimeoutError as error:
            if future.done() and not future.cancelled():
                raise  # the work's own
            raise Trouble(f"{what}: no answer within {deadline_s:g} s") from error

    def close(self) -> None:
        """Let the idle ones end; those that are busy end with the process."""
        while self._idle:
            self._idle.pop().put(None)

    def _rest(self, inbox: SimpleQueue[_Call | None]) -> None:
        if len(self._idle) < _IDLE:
            self._idle.append(inbox)
        else:
            inbox.put(None)


def _started(name: str) -> SimpleQueue[_Call | None]:
    inbox: SimpleQueue[_Call | None] = SimpleQueue()

    def serve() -> None:
        while (call := inbox.get()) is not None:
            call()

    threading.Thread(target=serve, name=name, daemon=True).start()
    return inbox
