"""Shared code of the generating endpoints: one request from its body to its last byte.

`Backend` turns a body into engine requests, an `Answer` turns engine events into the response, and `Generate` is the ASGI endpoint that
connects them and aborts requests whose client went away. `completions` and `responses` define the forms of the single endpoints. The
fields that only this server has (token ids, routes, weight versions, cost of a Subnet) are the same everywhere and are written here.
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
from typing import Annotated, Any

from pydantic import Field, Tag, ValidationError
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import Message, Receive, Scope, Send
from tokenizers.decoders import ByteLevel

from stretto.base.errors import UserError
from stretto.engine.async_engine import AsyncEngine, Stream
from stretto.engine.request import (
    Completion,
    Event,
    Grammar,
    Request,
    Sampling,
    TokenEvent,
    TopLogprob,
    Usage,
)
from stretto.model.spec import Subnet
from stretto.server.access_log import ACCESS, Access
from stretto.server.calls.answers import AnswerReader
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
from stretto.server.messages import CONTEXT_LENGTH, TEXT_OR_LIST, Allowed, Body, FieldError, Prompts, TokenId
from stretto.server.metrics import Metrics
from stretto.text.stream import BYTE_OF_CHARACTER, Detokenizer
from stretto.text.tokenizer import Tokenizer

MAX_CHOICES = 64
"""Largest number of completions of one HTTP request: number of prompts times ``n``."""
_LONG_BODY = 1 << 15
"""Bytes. Longer bodies are rendered and tokenised in a thread, so that streams continue meanwhile."""
MAX_STOPS = 16
"""Largest number of stop strings."""
_SEEDS = 1 << 63
"""OpenAI takes any integer as a seed, the engine takes 0 to ``_SEEDS - 1``."""
StopText = Annotated[str, Field(min_length=1)]
OnlyTrue = Annotated[bool, Allowed((True,), "must be true, is {}; leave it out")]
OnlyFalse = Annotated[bool, Allowed((False,), "must be false, is {}; leave it out")]
"""Fields of vLLM and SGLang in the one value that describes this server. Routers write them into every body."""


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool = False
    """Padding that hides the lengths of tokens. This server sends none, which the API allows."""


class Generation(Body):
    """Request fields of every generating endpoint. Fields of `Sampling` are validated by it; None: its default."""

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
    logit_bias: dict[Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")], float] = Field(
        default_factory=dict, json_schema_extra={"additionalProperties": False}
    )
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    min_tokens: int | None = None
    ignore_eos: bool = False
    seed: int | None = None
    stop: Annotated[
        Annotated[StopText, Tag("text")] | Annotated[list[StopText], Tag("list"), Field(max_length=MAX_STOPS)],
        TEXT_OR_LIST,
    ] = Field(default_factory=list)
    stop_token_ids: list[TokenId] = Field(default_factory=list)
    regex: str | None = None
    """Regular expression that the answer must match."""
    grammar: str | None = None
    """Grammar that the answer must match (Lark, in the dialect of llguidance)."""
    elastic: Elastic | None = None
    return_token_ids: bool = False
    return_routes: bool = False
    no_stop_trim: OnlyFalse = False
    skip_special_tokens: OnlyTrue = True
    return_hidden_states: OnlyFalse = False


@dataclass(frozen=True, slots=True)
class Job:
    """The engine requests of one HTTP request. Written by `Backend.job`."""

    id: str
    created: int
    """Unix seconds."""
    model: str
    """Name of the model in the request and the answer."""
    body: Generation
    given: Given
    requests: tuple[Request, ...]
    """One for each prompt."""
    logprobs: bool
    reader: Callable[[], AnswerReader] = AnswerReader
    """Makes the reader that splits one choice's text into content, reasoning and calls."""

    @property
    def num_choices(self) -> int:
        return len(self.requests) * self.body.n

    def choice(self, request_id: str, index: int) -> int:
        """Index in the answer of choice ``index`` of the engine request ``request_id``."""
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
    """Time limit from the arrival of a body to the engine's queue, seconds."""
    tool_chars: int | None = None
    """See `Prompts`."""

    def __post_init__(self) -> None:
        self.spell = speller(self.model.tokenizer)

    @cached_property
    def prompts(self) -> Prompts:
        """Raises `UserError` for a checkpoint without a tokenizer."""
        if self.model.tokenizer is None:
            raise UserError("messages: this checkpoint has no tokenizer; send token ids to /v1/completions")
        return Prompts(self.model.tokenizer, self.tool_chars)

    def check_ids(self, ids: Sequence[int], param: str) -> tuple[int, ...]:
        """``ids`` as a tuple. Raises `FieldError` if it is empty or an id lies outside the vocabulary."""
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
        """The engine requests of a body, one for each of ``prompts`` (token ids).

        Args:
            max_tokens: largest number of tokens of an answer; None: to the end of the context.
            turn_ends: token ids that end an answer beside the model's own.
            shape: grammar that the endpoint itself requires.
            reader: see `Job`. The special tokens ``visible_ids`` are part of the text that it reads.
            fields: fields of `Sampling` that the body does not have under the same name.

        Raises:
            FieldError: a value outside its range, or a prompt that leaves no room for an answer. ApiError: an unknown model.
        """
        model, num_prompt = self.model, max(map(len, prompts))
        grammars = [] if shape is None else [shape]
        grammars += [] if body.regex is None else [Grammar(kind="regex", text=body.regex, field="regex")]
        grammars += [] if body.grammar is None else [Grammar(kind="lark", text=body.grammar, field="grammar")]
        if len(grammars) > 1:
            raise FieldError("grammar", "give only one of regex, grammar, response_format and a forced tool")
        room = model.max_len - num_prompt
        if room < 1 or (max_tokens or 1) > room:
            wanted = "exceeds" if max_tokens is None else f"and max_tokens {max_tokens} exceed"
            problem = (
                f"a prompt of {num_prompt} tokens {wanted} this server's context of {model.max_len} tokens; shorten it"
            )
            raise FieldError("max_tokens" if room > 0 else "prompt", problem, CONTEXT_LENGTH)
        if body.n * len(prompts) > MAX_CHOICES:
            raise FieldError("n", f"{body.n} lies outside 1..{MAX_CHOICES // len(prompts)}")
        longest = room if max_tokens is None else max_tokens
        if (body.min_tokens or 0) > longest:
            raise FieldError("min_tokens", f"{body.min_tokens} is more than max_tokens, {longest}")
        stops = [body.stop] if isinstance(body.stop, str) else body.stop
        for name, ids in (("logit_bias", list(map(int, body.logit_bias))), ("stop_token_ids", body.stop_token_ids)):
            if ids:
                self.check_ids(ids, name)
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
        name = f"{prefix}-{secrets.token_hex(12)}"
        requests = tuple(
            Request(f"{name}-{place}", ids, sampling, given.phases, body.return_routes, visible_ids)
            for place, ids in enumerate(prompts)
        )
        return Job(name, int(time.time()), body.model or model.name, body, given, requests, logprobs, reader)


def speller(tokenizer: Tokenizer | None) -> Callable[[int], tuple[str, tuple[int, ...]]]:
    """A function from a token id to the token's text in ``logprobs`` and its bytes. As in OpenAI's API, the text of a token that is
    not a whole character is ``bytes:\\x…``."""
    if tokenizer is None:
        return lambda token: (f"token_id:{token}", ())
    special, rust = tokenizer.special_ids, tokenizer.rust
    byte_of = BYTE_OF_CHARACTER if isinstance(rust.decoder, ByteLevel) else {}

    @lru_cache(maxsize=1 << 16)
    def spell(token: int) -> tuple[str, tuple[int, ...]]:
        stored = rust.id_to_token(token)
        if stored is None:  # the vocabulary is padded: this row of the embedding has no token
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
"""A token id, its log-probability in nats, and its alternatives."""


class Answer(ABC):
    """Base of the forms of an answer: one JSON body, or server-sent events while the tokens arrive."""

    def __init__(self, backend: Backend, job: Job) -> None:
        self.job = job
        self._spell, self._least = backend.spell, backend.model.least
        self._tokenizer = backend.model.tokenizer
        self._readers = [job.reader() for _ in range(job.num_choices)]
        self._num_sent = [0] * job.num_choices  # number of characters of each choice that token events brought
        self._done: list[Completion] = []

    @abstractmethod
    def whole(self, done: Sequence[Completion]) -> dict[str, Any]:
        """The body of an answer that is not streamed. ``done``: the completions in the order of choices."""

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
        """Events at the end of a choice. ``rest``: the end of its text, which no token event brought."""

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

    def _texts(self, done: Completion) -> list[str]:
        """Text that each sampled token completes, as in a stream."""
        detokenizer = self._detokenizer(done.prompt)
        return [detokenizer.push([token]) if detokenizer else "" for token in done.tokens]

    def _detokenizer(self, prompt: Sequence[int]) -> Detokenizer | None:
        """As the engine's, of an answer to ``prompt``; None: there is no tokenizer."""
        if self._tokenizer is None:
            return None
        return Detokenizer(self._tokenizer, self.job.requests[0].visible_ids, after=prompt)

    def _sampled(self, done: Completion) -> Iterator[Sampled]:
        return zip(done.tokens, done.logprobs.tolist(), done.top or [()] * len(done.tokens), strict=True)

    def _elastic_usage(self, uses: Sequence[Usage]) -> dict[str, Any]:
        """Field ``elastic`` of the usage: the requested Subnet, the Subnets that ran, the reason, and their cost."""

        def axes(subnet: Subnet) -> dict[str, Any]:
            """Layers, experts and top-k; one number where all layers agree, else a list by layer."""
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
        """Fields of a finished choice for RL clients. ``weight_versions``: ``[version, number of tokens]`` in order."""
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
                # Base64 of little-endian bytes in C order; JSON numbers would take several times the space.
                data = base64.b64encode(routes.astype(routes.dtype.newbyteorder("<")).tobytes()).decode()
                fields["routed_experts"] = {"data": data, "dtype": routes.dtype.name, "shape": list(routes.shape)}
        return fields


def sse(payload: Any, head: str = "") -> bytes:
    """One server-sent event. Characters at which some clients would end the line are escaped."""
    text = json.dumps(payload, ensure_ascii=False, separators=(",", ":"))
    for character in "\x85\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return f"{head}data: {text}\n\n".encode()


def finite(logprob: float) -> float:
    """A log-probability for JSON, which has no infinity: -9999 replaces it, as in OpenAI's API."""
    return max(float(logprob), -9999.0)


def is_cut(done: Completion) -> bool:
    """Whether a length limit or a stop string ended the answer. An unfinished call is then left out."""
    return done.finish_reason == "length" or isinstance(done.stop, str)


def raise_for(completion: Completion) -> None:
    """Raises `UserError` for a choice that failed because of the request, `ApiError` for one that failed otherwise."""
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
    """The ASGI endpoint of one generating path."""

    backend: Backend
    read: Callable[[Backend, Any, Rung], Answer]
    """From the parsed body to an `Answer`. The rung is the Subnet of a request that names none. Raises `ApiError`, `UserError`."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        backend, http = self.backend, HttpRequest(scope, receive)
        try:
            async with backend.gate.admit(http) as (tree, leave):

                async def send_and_leave(message: Message) -> None:
                    if message["type"] == "http.response.body" and not message.get("more_body", False):
                        leave()  # before `send`: the client may read this and send its next request before `send` returns
                    await send(message)

                with closing(Ticket(backend.resolver.control)) as ticket:
                    await while_connected(receive, self._serve(http, tree, ticket, send_and_leave))
        except GoneError:
            backend.metrics.gone.labels(scope["path"]).inc()

    async def _serve(self, http: HttpRequest, tree: Any, ticket: Ticket, send: Send) -> None:
        with ExitStack() as stack:
            try:
                async with asyncio.timeout(self.backend.max_wait_s):
                    answer = await self._read_body(http, tree, ticket)
                    access = _access(http, answer.job)
                    submit, client = self.backend.service.submit, http.scope[CLIENT]
                    requests = [replace(request, client=client) for request in answer.job.requests]
                    streams = [stack.enter_context(closing(submit(request))) for request in requests]
                    for stream in streams:
                        await stream.admitted()
            except TimeoutError:
                raise overloaded("the engine did not take this request in time; try again later", 5.0, 503) from None
            await self._send(answer, streams, ticket, access, http, send)

    async def _read_body(self, http: HttpRequest, tree: Any, ticket: Ticket) -> Answer:
        backend, control = self.backend, self.backend.resolver.control
        with backend.metrics.refused.count_exceptions(ApiError):
            rung = backend.resolver.rung(control.num_waiting)
        ticket.add(1)  # before the body is read, so that the requests of a burst count each other
        length = http.headers.get("content-length", "")
        if length.isdecimal() and int(length) < _LONG_BODY:
            answer = self.read(backend, tree, rung)
        else:
            answer = await asyncio.to_thread(self.read, backend, tree, rung)
        ticket.add(len(answer.job.requests) - 1)
        return answer

    async def _send(
        self, answer: Answer, streams: Sequence[Stream], ticket: Ticket, access: Access, http: HttpRequest, send: Send
    ) -> None:
        job = answer.job
        self.backend.metrics.started(job.given)
        batches = merged([self._watched(stream, job.given, ticket, access) for stream in streams])
        if job.body.stream:
            first = await anext(batches)  # before the head of the response: a failure here still has its own status
            for event in first:
                if isinstance(event, Completion):
                    raise_for(event)
            # `stream_response`, because calling the response (or sse-starlette's) would also listen for disconnects, as
            # `while_connected` does already. sse-starlette's would end streams at shutdown, where this server drains them.
            headers = {"cache-control": "no-store", "x-accel-buffering": "no"}  # nginx would buffer the chunks
            response = StreamingResponse(_frames(answer, first, batches), 200, headers, "text/event-stream")
            await response.stream_response(send)
        else:
            await JSONResponse(answer.whole(await _collect(job, batches)))(http.scope, http.receive, send)

    async def _watched(
        self, stream: Stream, given: Given, ticket: Ticket, access: Access
    ) -> AsyncIterator[list[Event]]:
        """Batches of events of one request. Notes its first token in ``ticket`` and ``access``, its tokens in ``access`` and its
        completions in the metrics."""
        is_first = True
        async for events in stream.batches():
            if is_first:
                ticket.first_token()
            is_first = False
            access.num_generated += len(events)
            for event in events:
                if isinstance(event, Completion):
                    access.num_generated -= 1
                    self.backend.metrics.finished(given, event)
            if access.first_token_s is None and access.num_generated:
                access.first_token_s = time.perf_counter()
            yield events


def _access(http: HttpRequest, job: Job) -> Access:
    """The request's record for the access log, with what is known before its first token."""
    access: Access = http.scope.setdefault(ACCESS, Access())
    access.model, access.size = job.model, job.given.name
    access.num_prompt = sum(len(request.prompt) for request in job.requests)
    return access


async def merged(sources: Sequence[AsyncIterator[list[Event]]]) -> AsyncIterator[list[Event]]:
    """Batches of all ``sources`` in the order of arrival. The first error ends the iteration."""
    if len(sources) == 1:  # nearly all requests have one prompt; no task is needed
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
    """All completions in the order of choices. Raises as `raise_for` does."""
    done = [event async for events in batches for event in events if isinstance(event, Completion)]
    assert len(done) == job.num_choices, (len(done), job.num_choices)
    done.sort(key=lambda each: job.choice(each.request_id, each.index))
    for completion in done:
        raise_for(completion)
    return done


async def _frames(answer: Answer, first: Sequence[Event], batches: AsyncIterator[list[Event]]) -> AsyncIterator[bytes]:
    try:
        yield b"".join([*answer.start(), *(frame for event in first for frame in answer.push(event))])
        async for events in batches:  # one write for each batch
            if frames := b"".join(frame for event in events for frame in answer.push(event)):
                yield frames
        yield b"".join(answer.finish())
    except Exception as error:
        yield answer.fail(as_api_error(error))
        if not isinstance(error, KNOWN_ERRORS):
            raise
