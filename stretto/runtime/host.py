"""A role's object with its thread and its loop: the part that is the same wherever a role lives.

Two threads serve one role. Its *worker* runs the constructor and the sync methods, one at a time; its *loop* runs the
async methods and all of the bookkeeping here. Everything of a `Host` belongs to its loop, unless it says otherwise.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import queue
import traceback
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from stretto.base.errors import UserError
from stretto.base.loops import from_thread
from stretto.runtime.runtime import Caller, RoleDied, RoleError

CONSTRUCTOR = "__init__"
"""The method that a constructor's `RoleError` names."""
CLOSE_S = 5.0
"""What a role's ``close`` may take."""
_KEYS_KEPT = 1024
"""Results that an incarnation remembers by their key."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Counts:
    """What a host knows of itself. Fields as in `RoleStatus`."""

    num_calls: int
    oldest_call_s: float
    failed_casts: int


class Worker:
    """Runs functions one at a time, in the order they were handed in, on whichever thread `run` is called."""

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
                    result = work()
                except BaseException as error:  # a SystemExit too is the caller's, not the thread's end
                    future.set_exception(error)
                else:
                    future.set_result(result)
                    del result
            del item, future, work  # or the last call's arrays would live until the next


class Host:
    """One incarnation of a role."""

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop, worker: Worker | None):
        """``worker`` None: sync methods run on the loop, and hold it up."""
        self.name = name
        self.loop = loop
        self._worker = worker
        self._role: Any = None
        self._started: asyncio.Future[None] = loop.create_future()
        self._refusal: str | None = None
        """Why no new call is taken."""
        self._has_ended = False
        self._numbers = itertools.count()
        self._flights: dict[int, float] = {}
        """Loop time at which each call in flight came."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._keyed: OrderedDict[tuple[str, str], asyncio.Task[Any]] = OrderedDict()
        self._idle = asyncio.Event()
        self._idle.set()
        self._failed_casts = 0

    @property
    def refusal(self) -> str | None:
        """Why it takes no calls; None: it does. From any thread."""
        return self._refusal

    async def start(self, build: Callable[[], Any]) -> None:
        """Make the object; calls that came before go on after.

        Raises:
            UserError, RoleError: ``build`` raised it; the host has ended.
        """
        try:
            self._role = await self._in_thread(CONSTRUCTOR, build)
        except (UserError, RoleError) as error:
            self.end(f"its constructor failed: {error}")
            raise
        if not self._started.done():
            self._started.set_result(None)

    async def call(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], key: str | None = None) -> Any:
        """`Caller.call`, but for the deadline."""
        if self._refusal is not None:
            raise RoleDied(self.name, self._refusal)
        task = self._keyed.get((method, key)) if key is not None else None
        if task is None:
            task = self.loop.create_task(self._run(method, args, kwargs))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            if key is not None:
                self._remember((method, key), task)
        try:
            return await (task if key is None else asyncio.shield(task))
        except asyncio.CancelledError:
            if self._has_ended:
                raise RoleDied(self.name, str(self._refusal)) from None
            raise

    def cast(self, method: str, arguments: Callable[[], tuple[Sequence[Any], Mapping[str, Any]]]) -> None:
        """`Caller.cast`, the role's end of it; ``arguments`` may raise."""
        task = self.loop.create_task(self._cast(method, arguments))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def counts(self) -> Counts:
        """From any thread."""
        came = list(self._flights.values())
        return Counts(len(came), self.loop.time() - min(came) if came else 0.0, self._failed_casts)

    async def drain(self) -> None:
        """Take no new calls; return when none is in flight."""
        self.refuse("it is draining and takes no new calls")
        await self._idle.wait()

    def refuse(self, why: str) -> None:
        if self._refusal is None:
            self._refusal = why

    def end(self, why: str) -> None:
        """Fail what is in flight, and every call from now on. A sync method that runs goes on, unheard."""
        self._refusal = why
        self._has_ended = True
        if not self._started.done():
            self._started.cancel()
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """Let the role close itself, within `CLOSE_S`; what goes wrong is logged."""
        if getattr(self._role, "close", None) is None:
            return
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._invoke("close", (), {})
        except (UserError, RoleError, TimeoutError) as error:
            _log.warning("%s: close failed: %s", self.name, str(error) or f"not done within {CLOSE_S:g} s")

    def _remember(self, key: tuple[str, str], task: asyncio.Task[Any]) -> None:
        self._keyed[key] = task

        def done(task: asyncio.Task[Any]) -> None:
            if task.cancelled() or task.exception() is not None:
                self._keyed.pop(key, None)  # a failure is no result: who calls again tries again
                return
            self._keyed.move_to_end(key)
            if len(self._keyed) > _KEYS_KEPT:
                oldest = next(iter(self._keyed))
                if self._keyed[oldest].done():
                    del self._keyed[oldest]

        task.add_done_callback(done)

    async def _cast(self, method: str, arguments: Callable[[], tuple[Sequence[Any], Mapping[str, Any]]]) -> None:
        try:
            if self._refusal is not None:
                raise RoleDied(self.name, self._refusal)
            try:
                args, kwargs = arguments()
            except Exception as error:
                raise as_role_error(self.name, method, error) from None
            await self._run(method, args, kwargs)
        except (UserError, RoleError, RoleDied) as error:
            self._failed_casts += 1
            _log.warning("%s: cast %s failed: %s", self.name, method, error)

    async def _run(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        number = self._take_off()
        try:
            await asyncio.shield(self._started)
            is_left_to_thread = self._is_sync(method) and self._worker is not None
        except BaseException:
            self._land(number)
            raise
        if is_left_to_thread:  # it lands when the thread has done it, which may be long after its caller has gone
            return await self._in_thread(method, lambda: self._method(method)(*args, **kwargs), number)
        try:
            return await self._invoke(method, args, kwargs)
        finally:
            self._land(number)

    def _is_sync(self, method: str) -> bool:
        return not inspect.iscoroutinefunction(getattr(self._role, method, None))

    def _method(self, method: str) -> Callable[..., Any]:
        found = None if method.startswith("_") else getattr(self._role, method, None)
        if found is None:
            raise AttributeError(f"{type(self._role).__name__} has no method {method!r}")
        return found

    async def _invoke(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if self._is_sync(method):
            return await self._in_thread(method, lambda: self._method(method)(*args, **kwargs))
        try:
            return await self._method(method)(*args, **kwargs)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise as_role_error(self.name, method, error) from None  # the method's own doing
        except BaseException as error:
            raise as_role_error(self.name, method, error) from None

    async def _in_thread(self, method: str, work: Callable[[], Any], number: int | None = None) -> Any:
        def guarded() -> Any:
            try:
                return work()
            except BaseException as error:
                raise as_role_error(self.name, method, error) from None

        if self._worker is None:
            return guarded()
        future = self._worker.submit(guarded)
        if number is not None:
            future.add_done_callback(lambda _: from_thread(self.loop, self._land, number))
        return await asyncio.wrap_future(future)

    def _take_off(self) -> int:
        number = next(self._numbers)
        self._flights[number] = self.loop.time()
        self._idle.clear()
        return number

    def _land(self, number: int) -> None:
        del self._flights[number]
        if not self._flights:
            self._idle.set()


async def on_loop(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Await ``coroutine`` on another loop, or on this one; cancellation is passed on."""
    if loop is asyncio.get_running_loop():
        return await coroutine
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, loop))


def build(role: Callable[..., Any], args: Sequence[Any], caller: Caller) -> Any:
    """Call the constructor, with ``caller`` if it has a parameter of that name."""
    if "caller" in inspect.signature(role).parameters:
        return role(*args, caller=caller)
    return role(*args)


def as_role_error(name: str, method: str, error: BaseException) -> Exception:
    """What the caller is to see: a `UserError` as it is, anything else as text, so that no frame's arrays stay alive."""
    if isinstance(error, UserError):
        return UserError(str(error))
    trace = "".join(traceback.format_exception(error))
    return RoleError(name, method, type(error).__name__, str(error), trace)
