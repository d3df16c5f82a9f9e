"""Shared code of the generating endpoints: one request from its body to its last byte.

A body becomes engine requests (`Backend`), events become an `Answer`; `Generate` aborts what a client no longer waits for.

The endpoints' own forms are in `completions` and `responses`; the fields that only this server has (token ids, routes,
weight versions, what a Subnet cost) are the same in all of them, and are written here.
"""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import groupby
from typing import Any

from pydantic import Field, ValidationError
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import Message, Receive, Scope, Send
from tokenizers.decoders import ByteLevel

from stretto.base.errors import UserError
from stretto.engine.async_engine import AsyncEngine, Stream
from stretto.engine.request import Completion, Event, Grammar, Request, Sampling, TokenEvent, TopLogprob, Usage
from stretto.model.spec import Subnet
from stretto.server.dialects import AnswerReader
from stretto.server.elastic import Elastic, Given, Resolver, Rung, ServedModel, Ticket
from stretto.server.limits import (
    CLIENT,
    KNOWN_ERRORS,
    ApiError,
    Gate,
    GoneError,
    as_api_error,
    from_validation,
    overloaded,
    while_connected,
)
from stretto.server.messages import Body, FieldError, Prompts
from stretto.server.metrics import Metrics
from stretto.text.stream import BYTE_OF_CHARACTER
from stretto.text.tokenizer import Tokenizer

MAX_CHOICES = 64
"""Completions of one HTTP request: its prompts times n."""
_LONG_BODY = 1 << 15
"""Bytes of a body from which on it is rendered and tokenised in a thread, so that streams go on meanwhile."""
MAX_STOPS = 16
_SEEDS = 1 << 63
"""Any 64-bit integer is a seed to OpenAI; ours are not negative."""


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool = False
    """Against eavesdroppers of packet sizes; we send none, as the client may choose."""


class Generation(Body):
    """Request fields of every generating endpoint. None: the default of `Sampling`, for fields of the same name."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] = Field(default_factory=dict)
    n: int = 1
    min_tokens: int | None = None
    ignore_eos: bool = False
    seed: int | None = None
    stop: str | list[str] = Field(default_factory=list)
    stop_token_ids: list[int] = Field(default_factory=list)
    regex: str | None = None
    """The answer must match this expression."""
    grammar: str | None = None
    """The answer must match this grammar (Lark, as llguidance reads it)."""
    elastic: Elastic | None = None
    return_token_ids: bool = False
    return_routes: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """One HTTP request's worth of engine requests. Written by `Backend.job`."""

    id: str
    created: int
    """Unix seconds."""
    model: str
    """The name the client used."""
    body: Generation
    given: Given
    requests: tuple[Request, ...]
    """One a prompt."""
    logprobs: bool
    reader: Callable[[], AnswerReader] = AnswerReader
    """Makes a reader for a choice: what of its text is a call or reasoning."""

    @property
    def num_choices(self) -> int:
        return len(self.requests) * self.body.n

    def choice(self, request_id: str, index: int) -> int:
        """Place of one request's choice among all of them."""
        return int(request_id.rpartition("-")[2]) * self.body.n + index


@dataclass(eq=False)
class Backend:
    """State shared by the endpoints: the engine, the model that it serves, and the counters of this application."""

    service: AsyncEngine
    model: ServedModel
    resolver: Resolver
    gate: Gate
    metrics: Metrics
    max_wait_s: float
    """From a body that is there to the engine's queue."""
    tool_chars: int | None = None
    """As of `Prompts`."""

    def __post_init__(self) -> None:
        self.spell = speller(self.model.tokenizer)

    @cached_property
    def prompts(self) -> Prompts:
        """Raises `UserError` on a server of token ids only."""
        if self.model.tokenizer is None:
            raise UserError("messages: this checkpoint has no tokenizer; send token ids to /v1/completions")
        return Prompts(self.model.tokenizer, self.tool_chars)

    def check_ids(self, ids: Sequence[int], param: str) -> tuple[int, ...]:
        """``ids`` if there are some, and each has a row in the embedding; else raises `FieldError`."""
        vocab_size = self.model.config.vocab_size
        if not ids:
            raise FieldError(param, "is empty; give at least one token")
        if not 0 <= min(ids) <= max(ids) < vocab_size:
            wrong = min(ids) if min(ids) < 0 else max(ids)
            raise FieldError(param, f"token id {wrong} lies outside 0..{vocab_size - 1}")
        return tuple(ids)

    def job(
        self,
        prefix: str,
        body: Generation,
        rung: Rung,
        prompts: Sequence[tuple[int, ...]],
        *,
        max_tokens: int | None,
        logprobs: bool,
        turn_ends: Sequence[int] = (),
        shape: Grammar | None = None,
        reader: Callable[[], AnswerReader] = AnswerReader,
        visible_ids: frozenset[int] = frozenset(),
        **fields: Any,
    ) -> Job:
        """The engine requests of a body, one a prompt.

        Args:
            max_tokens: None: to the end of the context.
            turn_ends: ids that end an answer, beside the model's own.
            shape: what the endpoint itself asks the answer to match.
            reader: as of `Job`; for it, the special tokens ``visible_ids`` are part of the text.
            fields: of `Sampling`, where bodies spell them otherwise.

        Raises:
            FieldError: a value outside its range, or a prompt that leaves no room. ApiError: an unknown model.
        """
        model, num_prompt = self.model, max(map(len, prompts))
        grammars = [] if shape is None else [shape]
        grammars += [] if body.regex is None else [Grammar(kind="regex", text=body.regex)]
        grammars += [] if body.grammar is None else [Grammar(kind="lark", text=body.grammar)]
        if len(grammars) > 1:
            known = "regex, grammar, response_format and a forced tool"
            raise FieldError("grammar", f"give only one of {known}")
        room = model.max_len - num_prompt
        if room < 1 or (max_tokens or 1) > room:
            wanted = f"a prompt of {num_prompt} tokens" + (
                "" if max_tokens is None else f" and max_tokens {max_tokens}"
            )
            problem = f"{wanted} exceed this server's context of {model.max_len} tokens; shorten it"
            raise FieldError("max_tokens" if room > 0 else "prompt", problem, "context_length_exceeded")
        most = max(1, MAX_CHOICES // len(prompts))
        if not 1 <= body.n <= most:
            raise FieldError("n", f"{body.n} lies outside 1..{most}")
        longest = room if max_tokens is None else max_tokens
        if longest < 1:
            raise FieldError("max_tokens", f"{longest} lies outside 1..{room}")
        if (body.min_tokens or 0) > longest:
            raise FieldError("min_tokens", f"{body.min_tokens} is more than max_tokens, {longest}")
        stops = [body.stop] if isinstance(body.stop, str) else body.stop
        if len(stops) > MAX_STOPS or not all(stops):
            raise FieldError("stop", f"give at most {MAX_STOPS} strings, none of them empty")
        for name, ids in (("logit_bias", body.logit_bias), ("stop_token_ids", body.stop_token_ids)):
            if ids:
                self.check_ids(list(ids), name)
        if model.tokenizer is None and (stops or grammars):
            raise FieldError("stop" if stops else "grammar", "this server has no tokenizer; send token ids")
        ends = () if body.ignore_eos else (*turn_ends, *model.stop_ids)
        fields |= body.model_dump(include=set(Generation.model_fields) & set(Sampling.model_fields), exclude_none=True)
        fields |= {
            "max_tokens": longest,
            "seed": None if body.seed is None else body.seed % _SEEDS,
            "stop": stops,
            "stop_ids": tuple(dict.fromkeys([*body.stop_token_ids, *ends])),
            "grammar": grammars[0] if grammars else None,
        }
        try:
            sampling = Sampling.model_validate(fields)
        except ValidationError as error:
            raise from_validation(error, Sampling) from None
        given = self.resolver.resolve(body.model, body.elastic, rung)
        name, called = f"{prefix}-{secrets.token_hex(12)}", body.model or model.name
        requests = tuple(
            Request(f"{name}-{place}", ids, sampling, given.phases, body.return_routes, visible_ids)
            for place, ids in enumerate(prompts)
        )
        return Job(name, int(time.time()), called, body, given, requests, logprobs, reader)


def speller(tokenizer: Tokenizer | None) -> Callable[[int], tuple[str, tuple[int, ...]]]:
    """A function from a token to its text, for ``logprobs``, and its bytes. A token that is part of a character is
    ``bytes:\\x…``, as OpenAI spells it."""
    if tokenizer is None:
        return lambda token: (f"token_id:{token}", ())
    special, rust = tokenizer.special_ids(), tokenizer.rust
    byte_of = BYTE_OF_CHARACTER if isinstance(rust.decoder, ByteLevel) else {}

    @lru_cache(maxsize=1 << 16)
    def spell(token: int) -> tuple[str, tuple[int, ...]]:
        stored = rust.id_to_token(token)
        if stored is None:  # a row of the embedding without a token
            return f"<{token}>", ()
        if token in special or any(each not in byte_of for each in stored):
            text = stored if token in special else tokenizer.decode([token])
            return text, tuple(text.encode())
        raw = bytes(byte_of[each] for each in stored)
        try:
            return raw.decode(), tuple(raw)
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{each:02x}" for each in raw), tuple(raw)

    return spell


Sampled = tuple[int, float, Sequence[TopLogprob]]
"""A token, its log-probability and its alternatives."""


class Answer(ABC):
    """One answer, whole or as server-sent events while its tokens come."""

    def __init__(self, backend: Backend, job: Job) -> None:
        self.job = job
        self._spell, self._least = backend.spell, backend.model.least
        self._readers = [job.reader() for _ in range(job.num_choices)]
        self._num_sent = [0] * job.num_choices  # characters of each choice's text so far
        self._done: list[Completion] = []

    @abstractmethod
    def whole(self, done: Sequence[Completion]) -> dict[str, Any]:
        """The body of an answer that is not streamed; ``done`` in the order of choices."""

    def start(self) -> Iterator[bytes]:
        """Events before the first token."""
        return iter(())

    def push(self, event: Event) -> Iterator[bytes]:
        """Server-sent events for one engine event."""
        index = self.job.choice(event.request_id, event.index)
        if isinstance(event, TokenEvent):
            self._num_sent[index] += len(event.text)
            return self._token(index, event)
        raise_for(event)
        self._done.append(event)
        return self._end(index, event, event.text[self._num_sent[index] :])

    @abstractmethod
    def _token(self, index: int, event: TokenEvent) -> Iterator[bytes]: ...

    @abstractmethod
    def _end(self, index: int, done: Completion, rest: str) -> Iterator[bytes]:
        """A choice has ended; ``rest`` of its text was held back until now."""

    @abstractmethod
    def finish(self) -> Iterator[bytes]:
        """Events after the end of the last choice."""

    @abstractmethod
    def fail(self, error: ApiError) -> bytes:
        """Last event of a stream that failed."""

    def _entry(self, token: int, logprob: float, top: Sequence[TopLogprob]) -> dict[str, Any]:
        """One entry of ``logprobs.content``."""

        def spell(token: int, logprob: float) -> dict[str, Any]:
            text, raw = self._spell(token)
            return {"token": text, "logprob": finite(logprob), "bytes": list(raw)}

        entry = spell(token, logprob) | {"top_logprobs": [spell(each.token, each.logprob) for each in top]}
        return entry | {"token_id": token} if self.job.body.return_token_ids else entry

    def _sampled(self, done: Completion) -> Iterator[Sampled]:
        return zip(done.tokens, done.logprobs.tolist(), done.top or [()] * len(done.tokens), strict=True)

    def _elastic_usage(self, uses: Sequence[Usage]) -> dict[str, Any]:
        """What the request asked for, what it got and why, and what that cost."""

        def axes(subnet: Subnet) -> dict[str, Any]:
            """A number where all layers agree, else a list by layer."""
            by_layer = {"experts": subnet.experts, "top_k": subnet.top_k}
            short = {name: values[0] if len(set(values)) == 1 else values for name, values in by_layer.items()}
            return {"layers": len(subnet.layers), **short}

        given = self.job.given
        phases = {"prefill": given.phases.prefill, "thinking": given.phases.thinking}
        run = [given.phases.answer, *filter(None, phases.values())]
        warnings = list(dict.fromkeys(warning for subnet in run for warning in self._least.warnings(subnet)))
        return {
            **axes(given.phases.answer),
            "subnet": given.name,
            "flops": sum(use.flops for use in uses),
            "milliseconds": round(1e3 * max(use.total_s for use in uses), 3),
            "queued_milliseconds": round(1e3 * max(use.queued_s for use in uses), 3),
            "asked": given.asked,
            "given_reason": given.reason,
            **{name: axes(subnet) for name, subnet in phases.items() if subnet is not None},
            **({"warnings": warnings} if warnings else {}),
        }

    def _token_fields(self, done: Completion) -> dict[str, Any]:
        """What an RL client reads of a finished choice; version spans are ``[version, number of tokens]``."""
        fields: dict[str, Any] = {}
        if self.job.body.return_token_ids:
            spans = [[version, len(list(same))] for version, same in groupby(done.versions.tolist())]
            fields |= {
                "prompt_token_ids": list(done.prompt),
                "token_ids": list(done.tokens),
                "weight_version": spans[-1][0] if spans else None,
                "weight_versions": spans,
                "seed": done.seed,
            }
        if self.job.body.return_routes:
            fields["routed_experts"], routes = None, done.routes
            if routes is not None:
                # Base64 of little-endian bytes in C order: a list of numbers were several times larger.
                data = base64.b64encode(routes.astype(routes.dtype.newbyteorder("<")).tobytes()).decode()
                fields["routed_experts"] = {"data": data, "dtype": routes.dtype.name, "shape": list(routes.shape)}
        return fields


def sse(payload: Any, head: str = "") -> bytes:
    """One server-sent event."""
    return f"{head}data: {json.dumps(payload, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


def finite(logprob: float) -> float:
    """A log-probability as JSON, which has no minus infinity: -9999 stands for it, as in OpenAI's API."""
    return max(float(logprob), -9999.0)


def is_cut(done: Completion) -> bool:
    """Whether an answer ended before the model did: what it had begun is then no part of it."""
    return done.finish_reason == "length" or isinstance(done.stop, str)


def raise_for(completion: Completion) -> None:
    """Raises `UserError` if a choice failed because of the request, `ApiError` if it failed for another reason."""
    if completion.is_refused:
        raise UserError(completion.error or "this request cannot be finished")
    if completion.finish_reason == "error":
        raise ApiError(500, completion.error or "the engine could not finish this request")
    if completion.finish_reason == "timeout":
        raise ApiError(503, completion.error or "", code="overloaded", headers={"Retry-After": "5"})
    if completion.finish_reason == "abort":
        raise ApiError(503, "the request was aborted by the server; ask again", code="aborted")


@dataclass(frozen=True, eq=False)
class Generate:
    """An ASGI endpoint that generates."""

    backend: Backend
    read: Callable[[Backend, Any, Rung], Answer]
    """Understands a parsed body, or raises `ApiError` or `UserError`. The rung is for one that leaves its Subnet open."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        backend, http = self.backend, HttpRequest(scope, receive)
        try:
            async with backend.gate.admit(http) as (tree, leave):

                async def send_and_leave(message: Message) -> None:
                    if message["type"] == "http.response.body" and not message.get("more_body", False):
                        leave()  # first: the client may have read this, and asked again, before `send` returns
                    await send(message)

                with closing(Ticket(backend.resolver.control)) as ticket:
                    await while_connected(receive, self._serve(http, tree, ticket, send_and_leave))
        except GoneError:
            backend.metrics.gone.labels(scope["path"]).inc()

    async def _serve(self, http: HttpRequest, tree: Any, ticket: Ticket, send: Send) -> None:
        with ExitStack() as stack:
            try:
                async with asyncio.timeout(self.backend.max_wait_s):
                    answer = await self._understood(http, tree, ticket)
                    submit, client = self.backend.service.submit, http.scope[CLIENT]
                    requests = [replace(request, client=client) for request in answer.job.requests]
                    streams = [stack.enter_context(closing(submit(request))) for request in requests]
                    for stream in streams:
                        await stream.admitted()
            except TimeoutError:
                raise overloaded("the engine did not take this request in time; try again later", 5.0, 503) from None
            await self._send(answer, streams, ticket, http, send)

    async def _understood(self, http: HttpRequest, tree: Any, ticket: Ticket) -> Answer:
        backend, control = self.backend, self.backend.resolver.control
        with backend.metrics.refused.count_exceptions(ApiError):
            rung = backend.resolver.rung(control.num_waiting)
        ticket.add(1)  # before the body is understood, or a burst would not see itself
        length = http.headers.get("content-length", "")
        if length.isdecimal() and int(length) < _LONG_BODY:
            answer = self.read(backend, tree, rung)
        else:
            answer = await asyncio.to_thread(self.read, backend, tree, rung)
        ticket.add(len(answer.job.requests) - 1)
        return answer

    async def _send(
        self, answer: Answer, streams: Sequence[Stream], ticket: Ticket, http: HttpRequest, send: Send
    ) -> None:
        job = answer.job
        self.backend.metrics.started(job.given)
        batches = merged([self._watched(stream, job.given, ticket) for stream in streams])
        if job.body.stream:
            batches = await begun(batches)
            # Not called as an app, nor sse-starlette's: both listen for a client that goes, which `while_connected`
            # does for whole answers, too; the latter also ends streams with the process, which here drains them.
            headers = {"cache-control": "no-store", "x-accel-buffering": "no"}  # nginx would hold the chunks back
            response = StreamingResponse(_frames(answer, batches), 200, headers, "text/event-stream")
            await response.stream_response(send)
        else:
            await JSONResponse(answer.whole(await _collect(job, batches)))(http.scope, http.receive, send)

    async def _watched(self, stream: Stream, given: Given, ticket: Ticket) -> AsyncIterator[list[Event]]:
        """Events of one request, those together that came together; its first token and its ends are noted."""
        is_first = True
        async for events in stream.batches():
            if is_first:
                ticket.came()
            is_first = False
            for event in events:
                if isinstance(event, Completion):
                    self.backend.metrics.finished(given, event)
            yield events


async def begun(batches: AsyncIterator[list[Event]]) -> AsyncIterator[list[Event]]:
    """The same once the first have come. A request that fails before has a status of its own: nothing is sent yet."""
    first = await anext(batches)
    for event in first:
        if isinstance(event, Completion):
            raise_for(event)

    async def all_of_them() -> AsyncIterator[list[Event]]:
        yield first
        async for events in batches:
            yield events

    return all_of_them()


async def merged(sources: Sequence[AsyncIterator[list[Event]]]) -> AsyncIterator[list[Event]]:
    """Events of all as they come; the first error ends it."""
    if len(sources) == 1:  # no task in between, as nearly all requests have one prompt
        async for events in sources[0]:
            yield events
        return
    waiting = {asyncio.ensure_future(anext(source)): source for source in sources}
    try:
        while waiting:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in waiting if task.done()]:
                source = waiting.pop(task)
                with suppress(StopAsyncIteration):
                    yield task.result()
                    waiting[asyncio.ensure_future(anext(source))] = source
    finally:
        for task in waiting:
            task.cancel()


async def _collect(job: Job, batches: AsyncIterator[list[Event]]) -> list[Completion]:
    """The completions, in the order of choices."""
    done = [event async for events in batches for event in events if isinstance(event, Completion)]
    assert len(done) == job.num_choices, (len(done), job.num_choices)
    done.sort(key=lambda each: job.choice(each.request_id, each.index))
    for completion in done:
        raise_for(completion)
    return done


async def _frames(answer: Answer, batches: AsyncIterator[list[Event]]) -> AsyncIterator[bytes]:
    try:
        yield b"".join(answer.start())
        async for events in batches:  # one write for all that came together
            if frames := b"".join(frame for event in events for frame in answer.push(event)):
                yield frames
        yield b"".join(answer.finish())
    except Exception as error:
        yield answer.fail(as_api_error(error))
        if not isinstance(error, KNOWN_ERRORS):
            raise
