"""A role's object with its thread: the part that is the same wherever a role lives.

A role's *worker* runs the constructor and the sync methods, one at a time, in a thread; the loop of its process runs the
async methods and all of the bookkeeping here.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import queue
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from stretto.base.errors import UserError
from stretto.runtime.runtime import CONSTRUCTOR, Caller, RoleDied, RoleError, Work

CLOSE_S = 5.0
"""What a role's ``close`` may take."""
_log = logging.getLogger(__name__)


class Worker:
    """Runs functions one at a time, in the order they were handed in, on whichever thread `run` is called.

    An executor of `concurrent.futures` could neither use a process's main thread nor leave a thread that hangs behind.
    """

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        """From any thread. Cancelling the future takes the work back if it has not begun."""
        future: Future[Any] = Future()
        self._inbox.put((future, work))
        return future

    def stop(self) -> None:
        """`run` returns after what was handed in before."""
        self._inbox.put(None)

    def run(self) -> None:
        while (item := self._inbox.get()) is not None:
            future, work = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:  # a SystemExit too is the caller's, not the thread's end
                    future.set_exception(error)
            del item, future, work  # or the last call's arrays would live until the next


class Actor:
    """One incarnation of a role."""

    def __init__(self, name: str, worker: Worker | None):
        """``worker`` None: sync methods run on the loop, and hold it up."""
        self.name = name
        self._refusal: str | None = None
        """Why it takes no calls; None: it does."""
        self._worker = worker
        self._role: Any = None
        self._started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self, load: Callable[[], Work], caller: Caller) -> None:
        """Make the object, of what ``load`` returns; calls that came before go on after.

        Raises:
            UserError, RoleError: the constructor raised it; the actor has ended.
        """

        def build() -> Any:
            role, args = load()
            if "caller" in inspect.signature(role).parameters:
                return role(*args, caller=caller)
            return role(*args)

        try:
            self._role = await self._invoke(CONSTRUCTOR, build)
        except (UserError, RoleError) as error:
            self.end(f"its constructor failed: {error}")
            raise
        if not self._started.done():
            self._started.set_result(None)

    async def call(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """`Caller.call`, but for the deadline."""
        if self._refusal is not None:
            raise RoleDied(self.name, self._refusal)
        task = asyncio.get_running_loop().create_task(self._run(method, args, kwargs))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            return await task
        except asyncio.CancelledError:
            if self._refusal is not None:
                raise RoleDied(self.name, self._refusal) from None
            raise

    def end(self, why: str) -> None:
        """Fail what is in flight, and every call from now on. A sync method that runs goes on, unheard."""
        self._refusal = why
        if not self._started.done():
            self._started.cancel()
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """Let the role close itself, within `CLOSE_S`; what goes wrong is logged."""
        close = getattr(self._role, "close", None)
        if close is None:
            return
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._invoke("close", close)
        except (UserError, RoleError, TimeoutError) as error:
            _log.warning("%s: close failed: %s", self.name, str(error) or f"not done within {CLOSE_S:g} s")

    async def _run(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        await asyncio.shield(self._started)
        found = None if method.startswith("_") else getattr(self._role, method, None)
        if found is None:
            missing = AttributeError(f"{type(self._role).__name__} has no method {method!r}")
            raise as_role_error(self.name, method, missing)
        return await self._invoke(method, functools.partial(found, *args, **kwargs))

    async def _invoke(self, method: str, function: Callable[[], Any]) -> Any:
        is_async = inspect.iscoroutinefunction(function)

        def work() -> Any:
            try:
                return function()
            except BaseException as error:
                raise as_role_error(self.name, method, error) from None

        if not is_async:
            return work() if self._worker is None else await asyncio.wrap_future(self._worker.submit(work))
        result = work()
        try:
            return await result
        except BaseException as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # else it is the method's own doing
            raise as_role_error(self.name, method, error) from None


def as_role_error(name: str, method: str, error: BaseException) -> Exception:
    """What the caller is to see: a `UserError` as it is, anything else as text, so that no frame's arrays stay alive."""
    if isinstance(error, UserError):
        return UserError(str(error))
    trace = "".join(traceback.format_exception(error))
    return RoleError(name, method, type(error).__name__, str(error), trace)
