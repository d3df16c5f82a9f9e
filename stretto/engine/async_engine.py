"""An engine in its own thread for asyncio callers, with one stream of events per request.

The thread owns the engine. Other threads send it commands; it returns events, with one call into the caller's event loop for
all tokens of a step. An error in one request is reported to its stream only. An exception that leaves `Engine.step` ends the
engine: `AsyncEngine.error` has the cause, and the process should end too. The engine also ends if a step takes longer than
``EngineConfig.max_step_s``, which a second thread watches.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Self, TypeVar

from stretto.base.errors import UserError
from stretto.base.stacks import stacks
from stretto.engine.engine import Engine
from stretto.engine.grammar import MAX_TRIALS, GrammarState
from stretto.engine.request import Completion, EngineStats, Event, QueueFull, Request
from stretto.engine.runner import WeightSource, read_weights

T = TypeVar("T")
_DRAIN_POLL_S = 0.02
_WATCH_S = 1.0
"""Longest interval between two checks of the watchdog, in seconds."""
_log = logging.getLogger(__name__)


class EngineFailed(RuntimeError):  # noqa: N818 - says what happened
    """The engine's thread has ended; the message has the cause. Raised for all open and all later requests."""


class RequestFailed(RuntimeError):  # noqa: N818 - says what happened
    """An internal error while a request was admitted; the log has the traceback. The engine continues."""


class Closed(RuntimeError):  # noqa: N818 - a state, not a fault
    """The engine is draining or closed and accepts no new requests."""


class Channel:
    """Queue of a request's events, from the engine's thread to its `Stream`. It has no reference to the stream, so a stream that the
    caller drops is collected."""

    def __init__(self, loop: asyncio.AbstractEventLoop, num_open: int):
        self.loop = loop
        self.num_open = num_open
        """Number of unfinished choices, updated by the engine's thread."""
        self.is_abandoned = False
        """Whether the stream was closed before the request reached the engine."""
        self.events: asyncio.Queue[Event | Exception] = asyncio.Queue()
        self.admitted: asyncio.Future[None] = loop.create_future()

    def tell(self, error: Exception | None) -> None:
        """From another thread: report that the request is admitted (None), or an error."""
        _from_thread(self.loop, self._tell, error)

    def _tell(self, error: Exception | None) -> None:
        if error is not None:
            self.events.put_nowait(error)
        if self.admitted.done():
            return
        if error is None:
            self.admitted.set_result(None)
        else:
            self.admitted.set_exception(error)
            self.admitted.exception()  # marks it as retrieved: a caller that only iterates gets the error as an event


class Stream(AsyncIterator[Event]):
    """Events of one request, in order; ends after the `Completion` of each choice.

    If the stream is closed early, its consumer cancelled, or its last reference dropped, the request is aborted. A slow reader
    does not delay others: its queue holds at most the request's own tokens.
    """

    def __init__(self, channel: Channel, abandon: Callable[[], None]):
        self._channel, self._abandon = channel, abandon
        self._num_open = channel.num_open

    async def admitted(self) -> Self:
        """Wait until the engine has admitted the request.

        Raises:
            UserError: the request is invalid. QueueFull: too many requests wait. RequestFailed: internal error in this request.
            EngineFailed: the engine has ended.
        """
        try:
            await asyncio.shield(self._channel.admitted)
        except asyncio.CancelledError:
            self.close()
            raise
        return self

    async def __anext__(self) -> Event:
        if self._num_open <= 0:
            raise StopAsyncIteration
        try:
            event = await self._channel.events.get()
        except asyncio.CancelledError:
            self.close()
            raise
        if isinstance(event, Exception):
            self._num_open = 0
            raise event
        self._num_open -= isinstance(event, Completion)
        return event

    async def batches(self) -> AsyncIterator[list[Event]]:
        """The same events, in lists of all that are available, so a slow reader catches up at once."""
        async for event in self:
            events = [event]
            try:
                while self._num_open > 0 and not self._channel.events.empty():
                    events.append(await anext(self))
            except Exception:
                yield events  # the events before the error
                raise
            yield events

    def close(self) -> None:
        """Abort unfinished choices; a second call has no effect."""
        if self._num_open > 0:
            self._num_open = 0
            self._abandon()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


_Command = tuple[Callable[[], None], Callable[[EngineFailed], None]]
"""A function for the engine's thread to call between two steps, and one to call instead if the engine has ended."""


class AsyncEngine:
    """Runs an `Engine` in one thread. `submit` must be called in a running event loop; several loops may use one engine."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._inbox: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._open: dict[str, Channel] = {}  # by request id; used by the engine's thread only
        self._busy_s = 0.0  # used by the engine's thread only
        self.error: EngineFailed | None = None
        """Cause of the engine's end; None while it runs."""
        self._is_accepting = True
        self._is_stopping = False
        self._compiling: set[Channel] = set()  # requests whose grammar is compiled before they reach the engine
        # Enough threads for all grammars that may wait for their trial, for many requests that wait for the same one, and for grammars
        # that are in the cache. They are started when they are needed.
        self._compilers = ThreadPoolExecutor(32 * MAX_TRIALS, "grammar")
        # Held while a command is added, so none is added after the thread's last read of the inbox. Re-entrant, because
        # the garbage collector can close a stream at any point.
        self._lock = threading.RLock()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._working_since_s: float | None = None
        """Start of the current work of the engine's thread, on the monotonic clock; None while it waits for work."""
        self._is_hung = False
        """Whether the watchdog has ended the engine; its thread may then never return."""
        self._has_ended = threading.Event()
        self._watchdog = threading.Thread(target=self._watch, name="engine watchdog", daemon=True)

    def start(self) -> Self:
        self._thread.start()
        if self._engine.config.max_step_s is not None or self._engine.config.tp > 1:
            self._watchdog.start()
        return self

    @property
    def is_accepting(self) -> bool:
        return self._is_accepting and self.error is None

    def submit(self, request: Request) -> Stream:
        """Submit ``request``. The returned stream yields its events, and raises its errors (see `Stream.admitted`).

        Raises:
            Closed: the engine is draining or closed.
        """
        if not self._is_accepting:
            raise Closed("the server is shutting down and takes no new requests")
        channel = Channel(asyncio.get_running_loop(), request.sampling.n)

        def add(grammar: GrammarState | None) -> None:
            self._compiling.discard(channel)
            if channel.is_abandoned:
                return
            with _reported(channel, request):
                self._engine.add(request, grammar=grammar)
                self._open[request.id] = channel
                channel.tell(None)

        def compile_grammar() -> None:
            grammar = None
            with _reported(channel, request):
                grammar = self._engine.grammar(request)
            self._post(partial(add, grammar) if grammar else partial(self._compiling.discard, channel), channel.tell)

        def abandon() -> None:
            channel.is_abandoned = True
            if self._open.get(request.id) is channel:  # else a later request uses the id
                del self._open[request.id]
                self._engine.abort(request.id)

        stream = Stream(channel, lambda: self._post(abandon, lambda error: None))
        if request.sampling.grammar is None:
            self._post(partial(add, None), channel.tell)
        else:
            self._compiling.add(channel)
            self._compilers.submit(compile_grammar)
        return stream

    async def call(self, work: Callable[[Engine], T]) -> T:
        """Result of ``work``, which the engine's thread calls between two steps, also if this coroutine is cancelled meanwhile."""
        future: Future[T] = Future()

        def fail(error: Exception) -> None:
            with suppress(InvalidStateError):  # the caller was cancelled
                future.set_exception(error)

        def run() -> None:
            try:
                future.set_result(work(self._engine))
            except Exception as error:
                fail(error)

        self._post(run, fail)
        return await asyncio.wrap_future(future)

    async def load_weights(
        self, version: int, source: WeightSource, *, keep_cache: bool = False, checksum: str | None = None
    ) -> None:
        """`Engine.load_weights` between two steps; ``source`` is read and checked before, while the engine continues."""
        state = await asyncio.to_thread(read_weights, source, self._engine.network, checksum)
        await self.call(lambda engine: engine.load_weights(version, state, keep_cache=keep_cache))

    async def stats(self) -> EngineStats:
        return await self.call(lambda engine: replace(engine.stats(), busy_s=self._busy_s))

    async def drain(self) -> None:
        """Accept no new requests, and wait until all accepted ones are finished or the engine has ended."""
        self._is_accepting = False
        with suppress(EngineFailed):
            while await self.call(lambda engine: bool(self._open or self._compiling) or engine.has_work):
                await asyncio.sleep(_DRAIN_POLL_S)

    def close(self) -> None:
        """Stop the thread; open requests end with reason ``abort``. Blocks for at most one step, and not if the engine hangs."""
        self._is_accepting = False
        self._compilers.shutdown(wait=False, cancel_futures=True)
        if self._thread.is_alive() and not self._is_hung:
            self._post(self._stop, lambda error: None)
            while self._thread.is_alive() and not self._is_hung:
                self._thread.join(_WATCH_S)
        self._engine.close()

    def _stop(self) -> None:
        for request_id in list(self._open):
            self._dispatch(self._engine.abort(request_id))
        self._is_stopping = True

    def _post(self, run: Callable[[], None], refuse: Callable[[EngineFailed], None]) -> None:
        with self._lock:
            if self.error is None:
                self._inbox.put((run, refuse))
                return
        refuse(self.error)

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                if not self._engine.has_work:
                    self._work(self._inbox.get()[0])
                while not self._is_stopping and not self._inbox.empty():
                    self._work(self._inbox.get()[0])
                if self._engine.has_work:
                    started_s = time.perf_counter()
                    self._work(lambda: self._dispatch(self._engine.step()))
                    self._busy_s += time.perf_counter() - started_s
        except BaseException as error:  # every waiting client must get any exception
            _log.exception("the engine has failed")
            self._fail(EngineFailed(f"the engine has failed: {type(error).__name__}: {error}"))
        else:
            self._fail(EngineFailed("the engine is closed"))
        finally:
            self._has_ended.set()

    def _work(self, work: Callable[[], None]) -> None:
        self._working_since_s = time.monotonic()
        try:
            work()
        finally:
            self._working_since_s = None
        if self.error is not None:  # the watchdog has ended the engine meanwhile
            self._is_stopping = True

    def _watch(self) -> None:
        """End the engine when its thread makes no progress; otherwise its clients would wait for ever."""
        limit_s = self._engine.config.max_step_s or math.inf
        while not self._has_ended.wait(min(_WATCH_S, limit_s / 4)):
            if self._engine.has_lost_rank:  # an idle engine does not notice it otherwise
                self._post(self._engine.check_ranks, lambda error: None)
            since_s = self._working_since_s
            if since_s is None or time.monotonic() - since_s <= limit_s:
                continue
            self._is_hung = True
            _log.critical("the engine has made no progress for %g s; all threads:\n%s", limit_s, stacks())
            self._fail(
                EngineFailed(f"the engine has failed: no progress for {limit_s:g} s; the log shows where it hangs")
            )
            return

    def _fail(self, error: EngineFailed) -> None:
        with self._lock:
            if self.error is not None:
                return
            self.error = error
        for channel in (*self._open.values(), *self._compiling.copy()):
            channel.tell(error)
        self._open.clear()
        while not self._inbox.empty():
            self._inbox.get()[1](error)

    def _dispatch(self, events: Sequence[Event]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Channel, Event]]] = {}
        for event in events:
            channel = self._open.get(event.request_id)
            if channel is None:
                continue  # its stream is closed
            by_loop.setdefault(channel.loop, []).append((channel, event))
            if isinstance(event, Completion):
                channel.num_open -= 1
                if channel.num_open == 0:
                    del self._open[event.request_id]
        for loop, deliveries in by_loop.items():
            _from_thread(loop, _deliver, deliveries)


@contextmanager
def _reported(channel: Channel, request: Request) -> Iterator[None]:
    """Context for the admission of a request: an exception in it is reported to the request's stream only."""
    try:
        yield
    except (UserError, QueueFull) as error:
        channel.tell(error)
    except BaseException as error:  # a panic in a Rust library is not an Exception
        _log.exception("request %s could not be taken", request.id)
        channel.tell(RequestFailed(f"the request could not be taken: {type(error).__name__}"))


def _deliver(deliveries: list[tuple[Channel, Event]]) -> None:
    for channel, event in deliveries:
        channel.events.put_nowait(event)


def _from_thread(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any) -> None:
    """Let ``loop`` call ``function``, from another thread; does nothing if the loop is closed."""
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        if not loop.is_closed():
            raise
