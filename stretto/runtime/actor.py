"""Execution of a role's methods, for all runtimes, and connections between the processes of the local runtime.

A role's *worker* runs the constructor and the sync methods, one at a time, in a thread; the loop of its process runs the
async methods and the rest of this file.

Between two processes asyncio transfers the bytes; the frames and the numbering of calls are defined here. A pickle of protocol 5
leaves out numpy's buffers, and asyncio's `BufferedProtocol` receives each into its own memory. ZeroMQ was measured and
rejected: its threads make a call take three times as long, and it does not report the death of the other process, which must make
calls in flight fail.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
import logging
import pickle
import queue
import socket
import struct
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from stretto.base.errors import UserError
from stretto.runtime.runtime import CONSTRUCTOR, Caller, Handle, RoleDied, RoleError, RuntimeFailure, Work, deadline

CLOSE_S = 5.0
"""Longest time for a role's ``close``, in seconds."""
_HEAD = struct.Struct("<QQ")
"""Head of a frame: sizes of its envelope and of its body in bytes. The buffers follow; the envelope ends with their lengths."""
_AHEAD_BYTES = 1 << 16
"""Parts below this size are read ahead, several frames at once, because a system call takes longer than the copy."""
_SOCKET_BYTES = 1 << 20
_PIECE_BYTES = 1 << 18
"""Bytes given to asyncio at once. Python 3.11 copies all bytes that the socket does not accept, which would take a sixth of the
time of a large array."""
_log = logging.getLogger(__name__)


class Worker:
    """Runs functions one at a time, in the order of submission, on the thread that calls `run`.

    An executor of `concurrent.futures` could neither use the main thread of a process nor abandon a thread that hangs.
    """

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        """Submit ``work``. Thread-safe. Cancelling the future removes the work if it has not begun."""
        future: Future[Any] = Future()
        self._inbox.put((future, work))
        return future

    def stop(self) -> None:
        """Let `run` return after all work that was submitted before."""
        self._inbox.put(None)

    def run(self) -> None:
        while (item := self._inbox.get()) is not None:
            future, work = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:  # a SystemExit also goes to the caller and does not end the thread
                    future.set_exception(error)
            del item, future, work  # or the arrays of the last call would stay in memory until the next


class Actor:
    """One incarnation of a role."""

    def __init__(self, name: str, worker: Worker | None):
        """``worker`` None: sync methods run on the loop, and block it."""
        self.name = name
        self._refusal: str | None = None
        """Reason why the actor accepts no calls; None: it does."""
        self._worker = worker
        self._role: Any = None
        self._started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self, load: Callable[[], Work], caller: Caller) -> None:
        """Create the role's object from the class and arguments that ``load`` returns. Earlier calls wait for it.

        Raises:
            UserError, RoleError: raised by the constructor; the actor has ended. RoleDied: the actor was ended meanwhile.
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
        if self._refusal is not None:
            raise RoleDied(self.name, self._refusal)
        self._started.set_result(None)

    async def call(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """`Caller.call` without the deadline."""
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
        """Let calls in flight and all later calls fail. A running sync method continues, and its result is dropped."""
        self._refusal = self._refusal or why
        self._started.cancel()
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """Call the role's ``close``, for at most `CLOSE_S`; failures are logged."""
        if hasattr(self._role, "close"):
            try:
                async with asyncio.timeout(CLOSE_S):
                    await self._invoke("close", self._role.close)
            except (UserError, RoleError, TimeoutError) as error:
                _log.warning("%s: close failed: %s", self.name, str(error) or f"not done within {CLOSE_S:g} s")

    async def _run(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        await asyncio.shield(self._started)
        function = None if method.startswith("_") else getattr(self._role, method, None)
        if function is None:
            raise as_role_error(self.name, method, AttributeError(f"{type(self._role).__name__} has no {method!r}"))
        return await self._invoke(method, functools.partial(function, *args, **kwargs))

    async def _invoke(self, method: str, function: Callable[[], Any]) -> Any:
        """Result of ``function``, called on the loop if it is async, else by the worker; ``method``: its name in errors."""

        def work() -> Any:
            try:
                return function()
            except BaseException as error:
                raise as_role_error(self.name, method, error) from None

        if not inspect.iscoroutinefunction(function):
            return work() if self._worker is None else await asyncio.wrap_future(self._worker.submit(work))
        result = work()
        try:
            return await result
        except BaseException as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # the call was cancelled; otherwise the method itself raised CancelledError
            raise as_role_error(self.name, method, error) from None


def as_role_error(name: str, method: str, error: BaseException) -> Exception:
    """Exception for the caller, without the traceback, whose frames would keep arrays alive: a copy of a `UserError`, or a `RoleError`
    with the traceback as text."""
    if isinstance(error, UserError):
        copy = UserError(str(error))
        copy.exit_code = error.exit_code
        return copy
    trace = "".join(traceback.format_exception(error))
    return RoleError(name, method, type(error).__name__, str(error), trace)


class Connection(asyncio.BufferedProtocol):
    """One socket between two processes: calls actors of the other process, and answers calls of actors in this one.

    Envelopes, with the body in brackets: ``("call", number, id, method)`` [args, kwargs], ``("cancel", number)``,
    ``("result", number)`` [value], ``("error", number)`` [exception].
    """

    def __init__(self, name: str, actors: Mapping[str, Actor]):
        """``name``: the role in the other process, for errors; ``actors``: actors of this process, by handle id."""
        self.is_open = True
        self._name = name
        self._actors = actors
        self._numbers = itertools.count()
        self._outbox: deque[memoryview] = deque()
        """Bytes to write when the socket has accepted earlier ones."""
        self._is_full = False
        self._asked: dict[int, asyncio.Future[tuple[memoryview, Sequence[Any]]]] = {}
        self._answering: dict[int, asyncio.Task[None]] = {}
        self._ahead = memoryview(bytearray(_AHEAD_BYTES))
        self._parts = self._read()
        self._part = self._rest = memoryview(bytearray(next(self._parts)))
        """Memory for the part that is being received, and its bytes that are still missing."""

    async def call(self, id: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """`Actor.call` in the other process; cancelling it cancels the call there."""
        number = next(self._numbers)
        self._send(("call", number, id, method), (args, kwargs))
        future = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            body, buffers = await future
        except asyncio.CancelledError:
            if self.is_open:
                self._send(("cancel", number))
            raise
        finally:
            del self._asked[number]
        try:
            return pickle.loads(body, buffers=buffers)
        except Exception as error:
            raise as_role_error(self._name, method, error) from None

    def close(self) -> None:
        """Close the socket; calls in flight fail with `RoleDied`."""
        self._transport.abort()

    def connection_made(self, transport: Any) -> None:
        self._transport: asyncio.Transport = transport
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, option, _SOCKET_BYTES)

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        self._write()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        self._outbox.clear()
        for future in self._asked.values():
            if not future.done():
                future.set_exception(self._died())
        for task in self._answering.values():
            task.cancel()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._rest if len(self._rest) >= _AHEAD_BYTES else self._ahead

    def buffer_updated(self, num_bytes: int) -> None:
        received = self._ahead[:num_bytes]
        if len(self._rest) >= _AHEAD_BYTES:  # it was received directly into the part
            received, self._rest = received[:0], self._rest[num_bytes:]
        while True:
            count = min(len(received), len(self._rest))
            self._rest[:count] = received[:count]
            received, self._rest = received[count:], self._rest[count:]
            if self._rest:
                return
            self._part = self._rest = memoryview(bytearray(self._parts.send(self._part)))

    def _read(self) -> Generator[int, memoryview, None]:
        """Coroutine that parses frames: yields the size of the next part, and is sent that part."""
        while True:
            envelope_bytes, body_bytes = _HEAD.unpack((yield _HEAD.size))
            part = yield envelope_bytes + body_bytes
            *envelope, lengths = pickle.loads(part[:envelope_bytes])
            buffers = []
            for length in lengths:
                buffers.append((yield length) if length else b"")
            self._receive(envelope, part[envelope_bytes:], buffers)
            del part, buffers

    def _receive(self, envelope: Sequence[Any], body: memoryview, buffers: Sequence[Any]) -> None:
        kind, number, *target = envelope
        if kind == "call":
            id, method = target
            answer = self._answer(number, id, method, body, buffers)
            task = self._answering[number] = asyncio.get_running_loop().create_task(answer)
            task.add_done_callback(lambda _: self._answering.pop(number))
        elif kind == "cancel":
            if number in self._answering:  # else already answered
                self._answering[number].cancel()
        elif number in self._asked and not self._asked[number].done():  # else cancelled
            if kind == "result":
                self._asked[number].set_result((body, buffers))
            else:
                self._asked[number].set_exception(pickle.loads(body, buffers=buffers))

    async def _answer(self, number: int, id: str, method: str, body: memoryview, buffers: Sequence[Any]) -> None:
        try:
            if id not in self._actors:
                raise RoleDied(self._name, "it has ended")
            args, kwargs = pickle.loads(body, buffers=buffers)
            self._send(("result", number), await self._actors[id].call(method, args, kwargs))
        except Exception as error:
            is_final = isinstance(error, (UserError, RuntimeFailure))  # else the result cannot be pickled
            if self.is_open:
                self._send(("error", number), error if is_final else as_role_error(self._name, method, error))

    def _send(self, envelope: tuple[Any, ...], value: Any = None) -> None:
        """Send a frame without waiting.

        Raises:
            TypeError: the value cannot be pickled.
            RoleDied: the connection is closed.
        """
        pickled: list[pickle.PickleBuffer] = []
        try:
            body = pickle.dumps(value, protocol=5, buffer_callback=pickled.append)
        except Exception as error:  # pickle raises several classes, and pickled objects their own
            raise TypeError(f"a value cannot be sent to another process: {error}") from error
        if not self.is_open:
            raise self._died()
        buffers = [buffer.raw() for buffer in pickled]
        head = pickle.dumps((*envelope, [len(buffer) for buffer in buffers]), protocol=5)
        self._outbox.append(memoryview(b"".join((_HEAD.pack(len(head), len(body)), head, body))))
        self._outbox.extend(buffers)
        self._write()

    def _write(self) -> None:
        """Write as many bytes as the socket accepts, small parts together: each write is a call of the system."""
        while self._outbox and not self._is_full:
            pieces, room = list[memoryview](), _PIECE_BYTES
            while self._outbox and room:
                part = self._outbox.popleft()
                if len(part) > room:
                    self._outbox.appendleft(part[room:])
                pieces.append(part[:room])
                room -= len(pieces[-1])
            self._transport.write(pieces[0] if len(pieces) == 1 else b"".join(pieces))

    def _died(self) -> RoleDied:
        return RoleDied(self._name, "its process has ended, or closed the connection")


class LocalCaller(Caller):
    """`Caller` for all roles of a process."""

    def __init__(self, actors: Mapping[str, Actor], address: str | None = None):
        """``actors``: actors of this process, by handle id; ``address``: socket on which other processes reach them."""
        super().__init__()
        self._actors = actors
        self._address = address
        self._connections: dict[str, Connection] = {}
        self._connecting: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    @property
    def host(self) -> str:
        return "127.0.0.1"

    async def call(self, handle: Handle, method: str, *args: Any, deadline_s: float, **kwargs: Any) -> Any:
        async with deadline(handle.name, method, deadline_s):
            if handle.id in self._actors:
                return await self._actors[handle.id].call(method, args, kwargs)
            if handle.address == self._address:
                raise RoleDied(handle.name, "it has ended")
            return await (await self._connect(handle)).call(handle.id, method, args, kwargs)

    async def disconnect(self) -> None:
        for task in tuple(self._casts):
            task.cancel()
        for connection in self._connections.values():
            connection.close()
        await asyncio.sleep(0)  # the loop closes the sockets in its next iteration

    async def _connect(self, handle: Handle) -> Connection:
        """The connection to the role's process; a new one if the last was closed with an earlier incarnation."""
        async with self._connecting[handle.address]:
            connection = self._connections.get(handle.address)
            if connection is None or not connection.is_open:
                connection = Connection(handle.name, {})
                try:
                    await asyncio.get_running_loop().create_unix_connection(lambda: connection, handle.address)
                except (ConnectionRefusedError, FileNotFoundError):
                    raise RoleDied(handle.name, "it has ended") from None
                self._connections[handle.address] = connection
            return connection
