"""An engine in its own thread for asyncio callers, with one stream of events per request.

The thread owns the engine: others only hand it commands, and it hands events back, one call into the caller's loop for
all tokens of a step. A request that fails, for whatever reason, is told so and no other notices; what leaves
`Engine.step` is the end of the engine: `AsyncEngine.error` says why, and the process had better end too. So is a step that
takes longer than ``EngineConfig.max_step_s``: a second thread watches for that.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import queue
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from torch import Tensor

from stretto.base.errors import UserError
from stretto.engine.engine import Engine
from stretto.engine.grammar import MAX_TRIALS, GrammarState
from stretto.engine.request import Completion, EngineStats, Event, QueueFull, Request

T = TypeVar("T")
_DRAIN_POLL_S = 0.02
_WATCH_S = 1.0
"""Between two looks of the watchdog, at most."""
_log = logging.getLogger(__name__)


class EngineFailed(RuntimeError):  # noqa: N818 - says what happened
    """The engine's thread has died, with what it died of; every open and every later request gets this."""


class RequestFailed(RuntimeError):  # noqa: N818 - says what happened
    """A request could not be taken, by no wish of its own; the log says why. The engine goes on."""


class Closed(RuntimeError):  # noqa: N818 - a state, not a fault
    """The engine is draining or closed and takes no new requests."""


class Channel:
    """Where the engine's thread leaves a request's events. It knows no `Stream`, so that a forgotten one can go."""

    def __init__(self, loop: asyncio.AbstractEventLoop, num_open: int):
        self.loop = loop
        self.num_open = num_open
        """Choices unfinished; the engine's thread counts."""
        self.is_abandoned = False
        """Its stream was left before the request reached the engine."""
        self.events: asyncio.Queue[Event | Exception] = asyncio.Queue()
        self.admitted: asyncio.Future[None] = loop.create_future()

    def tell(self, error: Exception | None) -> None:
        """From the engine's thread: taken, or what went wrong."""
        _from_thread(self.loop, self._tell, error)

    def _tell(self, error: Exception | None) -> None:
        if error is not None:
            self.events.put_nowait(error)
        if not self.admitted.done():
            _settle(self.admitted, None, error)
            self.admitted.exception()  # looked at: a caller that only iterates meets an error there


class Stream(AsyncIterator[Event]):
    """Events of one request, in order; it ends after the `Completion` of each of its choices.

    Left early - closed, its consumer cancelled, or forgotten - it aborts the request. A slow reader holds nobody back:
    what waits for it is at most the request's own tokens.
    """

    def __init__(self, channel: Channel, abandon: Callable[[], None]):
        self._channel, self._abandon = channel, abandon
        self._num_open = channel.num_open

    async def admitted(self) -> Self:
        """Return once the engine has taken the request.

        Raises:
            UserError: it cannot be served. QueueFull: not now. RequestFailed: nor ever. EngineFailed: no more.
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
        """The same events, those together that have come together: a reader that fell behind catches up at once."""
        async for event in self:
            events = [event]
            try:
                while self._num_open > 0 and not self._channel.events.empty():
                    events.append(await anext(self))
            except Exception:
                yield events  # what came before it failed
                raise
            yield events

    def close(self) -> None:
        """Abort what is unfinished; does nothing the second time."""
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
"""Something for the engine's thread to do between two steps, and what to do instead where the engine is dead."""


class AsyncEngine:
    """Runs an `Engine` in one thread. `submit` belongs inside a running event loop, any number of loops may."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._inbox: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._open: dict[str, Channel] = {}  # by request id; the engine's thread alone touches it
        self._busy_s = 0.0  # the engine's thread alone touches it, too
        self.error: EngineFailed | None = None
        """Why the engine is dead; None while it lives."""
        self._is_accepting = True
        self._is_stopping = False
        self._compiling: set[Channel] = set()  # requests whose grammar is read before they reach the engine
        # As many as may wait for the one process that tries grammars, and some for those that are known already.
        self._compilers = ThreadPoolExecutor(2 * MAX_TRIALS, "grammar")
        # Held while a command is handed in: after the thread's last look at the inbox none may be. Re-entrant, since
        # the garbage collector can close a stream anywhere.
        self._lock = threading.RLock()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._working_since_s: float | None = None
        """On the monotonic clock, when the engine's thread began what it does now; None while it waits for work."""
        self._is_hung = False
        """The watchdog has ended the engine; its thread may stay where it is for ever."""
        self._has_ended = threading.Event()
        self._watchdog = threading.Thread(target=self._watch, name="engine watchdog", daemon=True)

    def start(self) -> Self:
        self._thread.start()
        if self._engine.config.max_step_s is not None:
            self._watchdog.start()
        return self

    @property
    def is_accepting(self) -> bool:
        return self._is_accepting and self.error is None

    def submit(self, request: Request) -> Stream:
        """Hand ``request`` in. Its events come from the returned stream; so does a refusal (see `Stream.admitted`).

        Raises:
            Closed: draining. The stream raises EngineFailed where the engine is dead.
        """
        if not self._is_accepting:
            raise Closed("the server is shutting down and takes no new requests")
        channel = Channel(asyncio.get_running_loop(), request.sampling.n)

        def add(grammar: GrammarState | None) -> None:
            self._compiling.discard(channel)
            if channel.is_abandoned:
                return
            with _told(channel, request):
                self._engine.add(request, grammar=grammar)
                self._open[request.id] = channel
                channel.tell(None)

        def compile_grammar() -> None:
            grammar = None
            with _told(channel, request):
                grammar = self._engine.grammar(request)
            self._post(partial(add, grammar) if grammar else partial(self._compiling.discard, channel), channel.tell)

        def abandon() -> None:
            channel.is_abandoned = True
            if self._open.get(request.id) is channel:  # a later request may have the id by now
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
        """Run ``work`` on the engine's thread between two steps; returns what it returns, raises what it raises."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def fail(error: Exception) -> None:
            _from_thread(loop, _settle, future, None, error)

        def run() -> None:
            try:
                result = work(self._engine)
            except Exception as error:
                fail(error)
            else:
                _from_thread(loop, _settle, future, result, None)

        self._post(run, fail)
        return await future

    async def abort(self, request_id: str) -> None:
        """End the request's open choices with reason ``abort``; its stream gets their completions."""
        await self.call(lambda engine: self._dispatch(engine.abort(request_id)))

    async def load_weights(
        self,
        version: int,
        source: Mapping[str, Tensor] | Path | str,
        *,
        keep_cache: bool = False,
        checksum: str | None = None,
    ) -> None:
        """`Engine.load_weights` between two steps; ``source`` is read and verified before, while requests go on."""
        state = await asyncio.to_thread(self._engine.read_weights, source, checksum)
        await self.call(lambda engine: engine.load_weights(version, state, keep_cache=keep_cache))

    async def stats(self) -> EngineStats:
        return await self.call(lambda engine: replace(engine.stats(), busy_s=self._busy_s))

    async def drain(self) -> None:
        """Take nothing new; return when all that was taken is finished, or the engine is dead."""
        self._is_accepting = False
        with suppress(EngineFailed):
            while await self.call(lambda engine: bool(self._open or self._compiling) or engine.has_work):
                await asyncio.sleep(_DRAIN_POLL_S)

    def close(self) -> None:
        """Stop the thread; open requests end with reason ``abort``. Blocks for at most one step, and not for one that hangs."""
        self._is_accepting = False
        self._compilers.shutdown(wait=False, cancel_futures=True)
        if self._thread.is_alive() and not self._is_hung:
            self._post(self._stop, lambda error: None)
            while self._thread.is_alive() and not self._is_hung:
                self._thread.join(_WATCH_S)

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
        except BaseException as error:  # whatever it is, those who wait must hear of it
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
        if self.error is not None:  # it took so long that the watchdog has ended the engine meanwhile
            self._is_stopping = True

    def _watch(self) -> None:
        """End the engine when its thread makes no progress: nothing else would notice, and its clients would wait for ever."""
        limit_s = self._engine.config.max_step_s
        assert limit_s is not None
        while not self._has_ended.wait(min(_WATCH_S, limit_s / 4)):
            since_s = self._working_since_s
            if since_s is None or time.monotonic() - since_s <= limit_s:
                continue
            self._is_hung = True
            _log.critical("the engine has made no progress for %g s; all threads:\n%s", limit_s, _stacks())
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
                continue  # its reader has gone
            by_loop.setdefault(channel.loop, []).append((channel, event))
            if isinstance(event, Completion):
                channel.num_open -= 1
                if channel.num_open == 0:
                    del self._open[event.request_id]
        for loop, deliveries in by_loop.items():
            _from_thread(loop, _deliver, deliveries)


def _stacks() -> str:
    """Where each thread of the process is, in Python's frames."""
    with tempfile.TemporaryFile("w+") as file:  # faulthandler writes to a descriptor
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()


@contextmanager
def _told(channel: Channel, request: Request) -> Iterator[None]:
    """What goes wrong inside, before a request is taken, is told to whoever asked, and nobody else."""
    try:
        yield
    except (UserError, QueueFull) as error:
        channel.tell(error)
    except BaseException as error:  # a panic in a library of Rust is no Exception
        _log.exception("request %s could not be taken", request.id)
        channel.tell(RequestFailed(f"the request could not be taken: {type(error).__name__}"))


def _deliver(deliveries: list[tuple[Channel, Event]]) -> None:
    for channel, event in deliveries:
        channel.events.put_nowait(event)


def _from_thread(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any) -> None:
    """From another thread, have ``loop`` call ``function``; a closed loop has nobody left to tell."""
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        if not loop.is_closed():
            raise


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    """Give ``future`` its end, unless it has one."""
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
