"""The events of one request on their way from the engine's thread to an asyncio reader."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Self

from stretto.base.loops import from_thread
from stretto.engine.request import Completion, Event, Request


class EngineFailed(RuntimeError):  # noqa: N818 - says what happened
    """The engine's thread has died, with what it died of; every open and every later request gets this."""


class Closed(RuntimeError):  # noqa: N818 - a state, not a fault
    """The service is draining or closed and takes no new requests."""


class Stream(AsyncIterator[Event]):
    """Events of one request, in order; it ends after the `Completion` of each of its choices.

    Left early - closed, its consumer cancelled, or forgotten - it aborts the request. A slow reader holds nobody back:
    what waits for it is at most the request's own tokens.
    """

    def __init__(self, request: Request, channel: Channel, abandon: Callable[[], None]):
        self.request = request
        self._channel = channel
        self._abandon = abandon
        self._num_open = request.sampling.n

    async def admitted(self) -> Self:
        """Return once the engine has taken the request.

        Raises:
            UserError: it cannot be served. QueueFull: not now. EngineFailed: no more.
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

    async def aclose(self) -> None:
        """`close`, as asynchronous generators spell it."""
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class Channel:
    """Where the engine's thread leaves a request's events. It knows no `Stream`, so that a forgotten one can go."""

    def __init__(self, loop: asyncio.AbstractEventLoop, num_open: int):
        self.loop = loop
        self.num_open = num_open
        """Choices unfinished; the engine's thread counts."""
        self.events: asyncio.Queue[Event | Exception] = asyncio.Queue()
        self.admitted: asyncio.Future[None] = loop.create_future()

    def tell(self, error: Exception | None) -> None:
        """From the engine's thread: taken, or what went wrong."""
        from_thread(self.loop, self._tell, error)

    def _tell(self, error: Exception | None) -> None:
        if error is not None:
            self.events.put_nowait(error)
        if self.admitted.done():
            return
        if error is None:
            self.admitted.set_result(None)
        else:
            self.admitted.set_exception(error)
            self.admitted.exception()  # looked at: a caller that only iterates meets it there
