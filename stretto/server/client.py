"""Asynchronous client of the server, and a load generator. Imports no torch."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Self

import httpx
import numpy as np

from stretto.base.endpoint import excerpt
from stretto.base.track import progress

SERVING = "serving at "
"""Beginning of the line in which `stretto serve` prints its address."""
PERCENTILES = (50, 95, 99)
_NO_LIMIT = httpx.Limits(max_connections=None, max_keepalive_connections=None)


@dataclass(eq=False)
class ApiFailure(RuntimeError):  # noqa: N818 - what the server says, not our fault
    """The server answered with an error."""

    status: int
    message: str
    code: str | None = None
    retry_after_s: float | None = None
    """When to come back; None: the server does not say."""

    def __str__(self) -> str:
        return f"{self.status}: {self.message}"


@dataclass(frozen=True, slots=True)
class Piece:
    """One choice's part of a chunk of a stream. Written by `Client.stream`."""

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    finish_reason: str | None = None
    usage: Mapping[str, Any] | None = None
    """On the last piece."""


class Client:
    """Speaks to one server. Use it as a context manager."""

    def __init__(
        self, url: str, api_key: str | None = None, *, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
            timeout=httpx.Timeout(600.0, connect=10.0),
            limits=_NO_LIMIT,  # a load generator must not queue inside itself
            transport=transport,
            trust_env=False,  # a proxy has no business between this and a local server
        )

    async def get(self, path: str) -> Any:
        """The JSON at ``path``. Raises `ApiFailure` for an error, httpx.TransportError where nobody answers."""
        return _check(await self._http.get(path)).json()

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON answer to ``body``; raises as `get` does."""
        return _check(await self._http.post(path, json=body)).json()

    async def chat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The chat API's answer to ``body``, which has a message; raises as `get` does, and `ApiFailure` where there is none."""
        try:
            told = await self.post("/v1/chat/completions", body)
            message = told["choices"][0]["message"]
        except (ValueError, KeyError, TypeError, IndexError):
            message = None
        if not isinstance(message, dict):
            raise ApiFailure(502, "what answers is no chat API: there is no message in its answer")
        return told

    def stream_completion(self, prompt: str | Sequence[int], **fields: Any) -> AsyncIterator[Piece]:
        """A completion as it comes; the last piece carries the usage."""
        return self.stream("/v1/completions", {"prompt": prompt, **fields})

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[Piece]:
        """Pieces of a streamed answer; raises `ApiFailure` at once or in the midst. Closing the iterator aborts the request."""
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        async with self._http.stream("POST", path, json=body) as response:
            if response.status_code >= 400:
                await response.aread()
            _check(response)
            async for line in response.aiter_lines():
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
    """What to send."""

    num_requests: int
    concurrency: int
    """Requests open at once; the next starts when one ends."""
    prompts: Sequence[Sequence[int]]
    """Token ids, taken in turn."""
    max_tokens: int
    rate: float | None = None
    """Arrivals a second (Poisson) instead of a fixed concurrency; None: as fast as ``concurrency`` allows."""
    model: str | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Seen:
    """What one client saw. Written by `run_load`."""

    first_token_s: float
    gaps_s: tuple[float, ...]
    """Between tokens; tokens that came in one chunk share its time."""
    num_tokens: int
    total_s: float


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What all clients saw. Written by `run_load`."""

    seen: tuple[Seen, ...]
    errors: Mapping[str, int]
    """Message -> how often."""
    wall_s: float

    @property
    def tokens_per_s(self) -> float:
        return sum(each.num_tokens for each in self.seen) / self.wall_s

    @property
    def requests_per_s(self) -> float:
        return len(self.seen) / self.wall_s

    def first_token_ms(self) -> list[float]:
        """At `PERCENTILES`."""
        return _percentiles_ms([each.first_token_s for each in self.seen])

    def between_tokens_ms(self) -> list[float]:
        """At `PERCENTILES`."""
        return _percentiles_ms([gap for each in self.seen for gap in each.gaps_s])


async def run_load(client: Client, load: Load) -> LoadResult:
    """Send ``load`` and wait for all answers; a failed request is counted, not raised."""
    places = asyncio.Semaphore(load.concurrency)
    seen: list[Seen] = []
    errors: Counter[str] = Counter()
    rng = random.Random(load.seed)
    start = time.perf_counter()
    with progress("load", load.num_requests) as advance:

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
    came = [(time.perf_counter(), num) async for piece in pieces if (num := len(piece.token_ids))]
    gaps = [(now - last) / num for (last, _), (now, num) in pairwise(came) for _ in range(num)]
    first_s = came[0][0] - start if came else 0.0
    return Seen(first_s, tuple(gaps), sum(num for _, num in came), time.perf_counter() - start)


def _percentiles_ms(seconds: Sequence[float]) -> list[float]:
    return (1e3 * np.percentile(seconds, PERCENTILES)).tolist() if seconds else []
