"""Asynchronous client of the server, and a load generator. Imports no torch."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Self

import httpx
import numpy as np

from stretto.base.endpoint import excerpt
from stretto.base.track import progress
from stretto.server.calls.json_text import parse_json

SERVING = "serving at "
"""Beginning of the line in which `stretto serve` prints its address."""
PERCENTILES = (50, 95, 99)
"""Percentiles of the times in a `LoadResult`."""
_NO_LIMIT = httpx.Limits(max_connections=None, max_keepalive_connections=None)


@dataclass(eq=False)
class ApiFailure(RuntimeError):  # noqa: N818 - an answer of the server, not an error of this client
    """The server answered with an error."""

    status: int
    message: str
    code: str | None = None
    retry_after_s: float | None = None
    """Seconds until the server asks to retry; None: not given."""

    def __str__(self) -> str:
        return f"{self.status}: {self.message}"


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a stream's chunk that belongs to one choice. Written by `Client.stream`."""

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    finish_reason: str | None = None
    usage: Mapping[str, Any] | None = None
    """On the last piece."""


class Client:
    """Client of one server. Use it as a context manager."""

    def __init__(
        self, url: str, api_key: str | None = None, *, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        """``url``: address of the server, with or without the ``/v1`` of its API."""
        self._http = httpx.AsyncClient(
            base_url=url.rstrip("/").removesuffix("/v1"),
            headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
            timeout=httpx.Timeout(600.0, connect=10.0),
            limits=_NO_LIMIT,  # a load generator must not queue requests inside itself
            transport=transport,
            trust_env=False,  # no proxy between this client and a local server
        )

    async def get(self, path: str) -> Any:
        """The JSON at ``path``. Raises `ApiFailure` for an error, httpx.TransportError if the server cannot be reached."""
        return parse_json(_check(await self._http.get(path)).text)

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON answer to ``body``. Raises as `get` does."""
        return parse_json(_check(await self._http.post(path, json=body)).text)

    async def chat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The chat completion for ``body``. Raises as `get` does, and `ApiFailure` for an answer without a message."""
        try:
            answer = await self.post("/v1/chat/completions", body)
            message = answer["choices"][0]["message"]
        except (ValueError, KeyError, TypeError, IndexError):
            message = None
        if not isinstance(message, dict):
            raise ApiFailure(502, "the server has no chat API: its answer contains no message")
        return answer

    def stream_completion(self, prompt: str | Sequence[int], **fields: Any) -> AsyncIterator[Piece]:
        """Pieces of a completion as they arrive. The last piece carries the usage."""
        return self.stream("/v1/completions", {"prompt": prompt, **fields})

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[Piece]:
        """Pieces of a streamed answer. Raises `ApiFailure`, possibly after some pieces. Closing the iterator aborts the request."""
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        async with self._http.stream("POST", path, json=body) as response:
            if response.status_code >= 400:
                await response.aread()
            _check(response)
            async for line in _lines(response):
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    return
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise ApiFailure(500, str(chunk["error"].get("message")), chunk["error"].get("code"))
                for choice in chunk["choices"]:
                    logprobs = choice.get("logprobs") or {}
                    entries = logprobs.get("content") or []
                    yield Piece(
                        choice["text"] if "text" in choice else choice["delta"].get("content") or "",
                        tuple(choice.get("token_ids") or ()),
                        tuple(logprobs.get("token_logprobs") or [entry["logprob"] for entry in entries]),
                        choice.get("finish_reason"),
                    )
                if not chunk["choices"]:
                    yield Piece("", usage=chunk.get("usage"))
        raise ApiFailure(502, "the stream broke off before its end")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.aclose()


async def _lines(response: httpx.Response) -> AsyncIterator[str]:
    """Lines of server-sent events. httpx's own lines also end at characters such as U+2028, which a text may have."""
    rest = ""
    async for text in response.aiter_text():
        *lines, rest = (rest + text).split("\n")
        for line in lines:
            yield line.removesuffix("\r")
    if rest:
        yield rest.removesuffix("\r")


def _check(response: httpx.Response) -> httpx.Response:
    if response.status_code < 400:
        return response
    try:
        error = response.json()["error"]
        message, code = str(error.get("message")), error.get("code")
    except (ValueError, KeyError, TypeError, AttributeError):
        message, code = excerpt(response), None
    wait = response.headers.get("retry-after", "")
    raise ApiFailure(response.status_code, message, code, float(wait) if wait.isdecimal() else None)


@dataclass(frozen=True, slots=True)
class Load:
    """Description of a load."""

    num_requests: int
    concurrency: int
    """Number of open requests; the next one starts when one ends."""
    prompts: Sequence[Sequence[int]]
    """Prompts as token ids, used in turn."""
    max_tokens: int
    rate: float | None = None
    """Arrivals per second (Poisson), within ``concurrency``; None: each request starts as soon as ``concurrency`` allows."""
    model: str | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Seen:
    """Times of one request. Written by `run_load`."""

    first_token_s: float
    num_tokens: int
    total_s: float

    @property
    def between_tokens_s(self) -> float | None:
        """Mean time between the tokens; None: fewer than two tokens.

        The single times cannot be measured here: tokens that the client reads together arrive at once.
        """
        return (self.total_s - self.first_token_s) / (self.num_tokens - 1) if self.num_tokens > 1 else None


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Measurements of a load. Written by `run_load`."""

    seen: tuple[Seen, ...]
    errors: Mapping[str, int]
    """Number of failed requests by their error message."""
    wall_s: float

    @property
    def tokens_per_s(self) -> float:
        return sum(each.num_tokens for each in self.seen) / self.wall_s

    @property
    def requests_per_s(self) -> float:
        return len(self.seen) / self.wall_s

    def first_token_ms(self) -> list[float]:
        """Times to first token in milliseconds, at `PERCENTILES`."""
        return _percentiles_ms([each.first_token_s for each in self.seen])

    def between_tokens_ms(self) -> list[float]:
        """Mean times between tokens of the requests in milliseconds, at `PERCENTILES`."""
        return _percentiles_ms([mean_s for each in self.seen if (mean_s := each.between_tokens_s) is not None])


async def run_load(client: Client, load: Load) -> LoadResult:
    """Send ``load`` and wait for all answers. Failed requests are counted, not raised."""
    places = asyncio.Semaphore(load.concurrency)
    seen: list[Seen] = []
    errors: Counter[str] = Counter()
    rng = random.Random(load.seed)
    start = time.perf_counter()
    with progress("load", load.num_requests, "requests") as advance:

        async def one(number: int, arrival_s: float) -> None:
            await asyncio.sleep(max(0.0, start + arrival_s - time.perf_counter()))
            async with places:
                try:
                    seen.append(await _complete(client, load, number))
                except (ApiFailure, httpx.HTTPError) as error:
                    errors[str(error) or type(error).__name__] += 1
            advance(1)

        gaps = (rng.expovariate(load.rate) if load.rate else 0.0 for _ in range(load.num_requests))
        await asyncio.gather(*(one(number, arrival_s) for number, arrival_s in enumerate(accumulate(gaps))))
    return LoadResult(tuple(seen), errors, time.perf_counter() - start)


async def _complete(client: Client, load: Load, number: int) -> Seen:
    pieces = client.stream_completion(
        load.prompts[number % len(load.prompts)],
        model=load.model,
        max_tokens=load.max_tokens,
        seed=load.seed + number,
        ignore_eos=True,
        return_token_ids=True,
    )
    start = time.perf_counter()
    chunks = [(time.perf_counter(), num) async for piece in pieces if (num := len(piece.token_ids))]
    first_s = chunks[0][0] - start if chunks else 0.0
    return Seen(first_s, sum(num for _, num in chunks), time.perf_counter() - start)


def _percentiles_ms(seconds: Sequence[float]) -> list[float]:
    return (1e3 * np.percentile(seconds, PERCENTILES)).tolist() if seconds else []
