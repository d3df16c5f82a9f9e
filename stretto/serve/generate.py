"""One generating HTTP request, from its body to its last byte: read, submit, stream, and abort when the client goes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.requests import Request as HttpRequest
from starlette.types import Receive, Scope, Send

from stretto.base.errors import UserError
from stretto.engine.async_engine import AsyncEngine as Service
from stretto.engine.async_engine import Closed, EngineFailed, Stream
from stretto.engine.request import Completion, Event, QueueFull, TokenEvent
from stretto.serve.elastic import LoadControl, Rung
from stretto.serve.errors import ApiError, from_user_error, overloaded
from stretto.serve.limits import CUT, Gate, GoneError, bounded, read_json, while_connected
from stretto.serve.metrics import Metrics
from stretto.serve.openai import Job
from stretto.serve.phases import Chooser
from stretto.serve.settings import ServeSettings

_LONG_BODY = 1 << 15
"""Bytes of a body from which on it is rendered and tokenised in a thread, so that streams go on meanwhile."""


class StreamWriter(Protocol):
    """Turns events into the bytes of a stream; state of one request."""

    def start(self) -> list[bytes]: ...
    def push(self, event: Event) -> list[bytes]: ...
    def finish(self) -> list[bytes]: ...
    def fail(self, error: ApiError) -> list[bytes]: ...


@dataclass(frozen=True, slots=True)
class Reading:
    """A body understood. Written by one of the readers in `stretto.serve.server`."""

    job: Job
    whole: Callable[[Sequence[Completion]], dict[str, Any]]
    """Body of an answer that is not streamed, from all choices in order."""
    stream: StreamWriter | None
    """None: this endpoint does not stream."""


Reader = Callable[[Any, Rung], Reading]


class Waiting:
    """Prompts whose first token has not come: what a new request would have to wait behind."""

    def __init__(self, control: LoadControl, clock: Callable[[], float]) -> None:
        self.num = 0
        self._control = control
        self._clock = clock

    @contextmanager
    def enter(self) -> Iterator[Ticket]:
        """Count a request, from before its Subnet is chosen (or a burst would not see itself)."""
        ticket = Ticket(self, self._clock())
        try:
            yield ticket
        finally:
            self.num -= ticket.num

    def came(self, after_s: float) -> None:
        """Note one first token, ``after_s`` after its request."""
        self.num -= 1
        self._control.observe(after_s)

    def now_s(self) -> float:
        return self._clock()


class Ticket:
    """One request's share of `Waiting`."""

    def __init__(self, waiting: Waiting, start_s: float) -> None:
        self.num = 0
        self._waiting = waiting
        self._start_s = start_s

    def add(self, num: int) -> None:
        """Count ``num`` more prompts."""
        self.num += num
        self._waiting.num += num

    def came(self) -> None:
        """The first token of one of them has come."""
        self.num -= 1
        self._waiting.came(self._waiting.now_s() - self._start_s)


@dataclass(frozen=True, slots=True)
class Shared:
    """What generating endpoints share. Written by `create_app`."""

    service: Service
    settings: ServeSettings
    chooser: Chooser
    gate: Gate
    waiting: Waiting
    metrics: Metrics


class Generate:
    """An ASGI endpoint that generates."""

    def __init__(self, shared: Shared, reader: Reader) -> None:
        self._shared = shared
        self._reader = reader

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        shared, settings = self._shared, self._shared.settings
        send = bounded(send, settings.send_timeout_s, scope.get(CUT, _nothing_to_cut))
        with shared.gate.enter(), shared.waiting.enter() as ticket:
            try:
                http = HttpRequest(scope, receive)
                tree = await read_json(http, settings.max_body_bytes, settings.body_timeout_s)
                length = http.headers.get("content-length", "")
                reading = await self._read(tree, ticket, int(length) if length.isdecimal() else _LONG_BODY)
                await while_connected(receive, self._answer(reading, ticket, send))
            except GoneError:
                shared.metrics.gone.labels(scope["path"]).inc()

    async def _read(self, tree: Any, ticket: Ticket, num_bytes: int) -> Reading:
        shared = self._shared
        try:
            rung = shared.chooser.rung(shared.waiting.num)
        except ApiError:
            shared.metrics.refused.inc()
            raise
        ticket.add(1)
        shared.metrics.level.set(shared.chooser.control.level)
        if num_bytes < _LONG_BODY:
            return self._reader(tree, rung)
        return await asyncio.to_thread(self._reader, tree, rung)

    async def _answer(self, reading: Reading, ticket: Ticket, send: Send) -> None:
        shared, job = self._shared, reading.job
        async with AsyncExitStack() as stack:
            ticket.add(len(job.requests) - 1)
            streams = []
            for request in job.requests:
                stream = shared.service.submit(request)
                stack.callback(stream.close)
                streams.append(stream)
            for stream in streams:
                await stream.admitted()
            shared.metrics.started(job)
            events = self._watched(job, merged(streams), ticket)
            if job.stream and reading.stream is not None:
                await _send_stream(reading.stream, events, send)
            else:
                await _send_json(reading.whole(await _collect(job, events)), send)

    async def _watched(
        self, job: Job, batches: AsyncIterator[list[Event]], ticket: Ticket
    ) -> AsyncIterator[list[Event]]:
        """``batches``, with first tokens and finished choices noted."""
        seen: set[str] = set()
        async for events in batches:
            for event in events:
                if event.request_id not in seen:
                    seen.add(event.request_id)
                    ticket.came()
                if isinstance(event, Completion):
                    self._shared.metrics.finished(job, event)
            yield events


def _nothing_to_cut() -> None:
    """In tests without a connection."""


async def merged(streams: Sequence[Stream]) -> AsyncIterator[list[Event]]:
    """Events of all streams as they come; the first error ends it."""
    if len(streams) == 1:
        async for events in streams[0].batches():
            yield events
        return
    arrived: asyncio.Queue[list[Event] | Exception | None] = asyncio.Queue()

    async def pump(stream: Stream) -> None:
        try:
            async for events in stream.batches():
                arrived.put_nowait(events)
        except Exception as error:
            arrived.put_nowait(error)
        else:
            arrived.put_nowait(None)

    pumps = [asyncio.ensure_future(pump(stream)) for stream in streams]
    try:
        num_open = len(pumps)
        while num_open:
            item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()


async def _collect(job: Job, batches: AsyncIterator[list[Event]]) -> list[Completion]:
    """The completions, in the order of choices."""
    done: dict[int, Completion] = {}
    async for events in batches:
        for event in events:
            if not isinstance(event, TokenEvent):
                done[job.choice(event.request_id, event.index)] = event
    assert len(done) == job.num_choices, (len(done), job.num_choices)
    return [done[index] for index in range(job.num_choices)]


async def _send_stream(writer: StreamWriter, batches: AsyncIterator[list[Event]], send: Send) -> None:
    headers = [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-store"),
        (b"x-accel-buffering", b"no"),  # nginx would hold the chunks back
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def write(frames: list[bytes]) -> None:
        if frames:
            await send({"type": "http.response.body", "body": b"".join(frames), "more_body": True})

    try:
        await write(writer.start())
        async for events in batches:  # one write for all that came together
            await write([frame for event in events for frame in writer.push(event)])
        await write(writer.finish())
    except (ApiError, UserError, QueueFull, Closed, EngineFailed) as error:
        await write(writer.fail(as_api_error(error)))
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_json(body: dict[str, Any], send: Send) -> None:
    raw = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(raw)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": raw, "more_body": False})


def as_api_error(error: Exception) -> ApiError:
    """The answer to a known kind of failure."""
    match error:
        case ApiError():
            return error
        case UserError():
            return from_user_error(error)
        case QueueFull():
            return overloaded(str(error), 2.0)
        case Closed():
            return ApiError(503, str(error), code="draining", headers={"Retry-After": "5"})
    return ApiError(500, str(error), code="engine_failed")
