"""A load generator: many streaming clients against one server, and what they saw. Imports no torch."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx
import numpy as np

from stretto.base.track import progress
from stretto.serve.client import ApiFailure, Client

PERCENTILES = (50, 95, 99)


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
    """What one client saw."""

    first_token_s: float
    gaps_s: tuple[float, ...]
    """Between tokens; tokens that came in one chunk share its time."""
    num_tokens: int
    total_s: float


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What all clients saw. Written by `run_load`."""

    seen: tuple[Seen, ...]
    errors: dict[str, int]
    """Message -> how often."""
    wall_s: float

    @property
    def tokens_per_s(self) -> float:
        return sum(each.num_tokens for each in self.seen) / self.wall_s

    @property
    def requests_per_s(self) -> float:
        return len(self.seen) / self.wall_s

    def first_token_ms(self) -> list[float]:
        """Time to first token at `PERCENTILES`, milliseconds."""
        return _percentiles([each.first_token_s for each in self.seen])

    def between_tokens_ms(self) -> list[float]:
        """Inter-token latency at `PERCENTILES`, milliseconds."""
        return _percentiles([gap for each in self.seen for gap in each.gaps_s])


async def run_load(client: Client, load: Load) -> LoadResult:
    """Send ``load`` and wait for all answers; a failed request is counted, not raised."""
    doors = asyncio.Semaphore(load.concurrency)
    seen: list[Seen] = []
    errors: dict[str, int] = {}
    rng = random.Random(load.seed)
    start = time.perf_counter()
    with progress("load", load.num_requests) as advance:

        async def one(number: int, arrival_s: float) -> None:
            await asyncio.sleep(max(0.0, start + arrival_s - time.perf_counter()))
            async with doors:
                try:
                    seen.append(await _ask(client, load, number))
                except (ApiFailure, httpx.HTTPError) as error:
                    reason = str(error) or type(error).__name__
                    errors[reason] = errors.get(reason, 0) + 1
            advance(1)

        arrivals, at = [], 0.0
        for _ in range(load.num_requests):
            at += rng.expovariate(load.rate) if load.rate else 0.0
            arrivals.append(at)
        await asyncio.gather(*(one(number, arrival) for number, arrival in enumerate(arrivals)))
    return LoadResult(tuple(seen), errors, time.perf_counter() - start)


async def _ask(client: Client, load: Load, number: int) -> Seen:
    fields: dict[str, object] = {
        "max_tokens": load.max_tokens,
        "ignore_eos": True,
        "seed": load.seed + number,
        "return_token_ids": True,
    }
    if load.model is not None:
        fields["model"] = load.model
    start = last = time.perf_counter()
    first_s, num_tokens, gaps = 0.0, 0, []
    async for piece in client.stream_completion(load.prompts[number % len(load.prompts)], **fields):
        if not piece.token_ids:
            continue
        now = time.perf_counter()
        if num_tokens == 0:
            first_s = now - start
        else:
            gaps += [(now - last) / len(piece.token_ids)] * len(piece.token_ids)
        num_tokens, last = num_tokens + len(piece.token_ids), now
    return Seen(first_s, tuple(gaps), num_tokens, time.perf_counter() - start)


def _percentiles(seconds: Sequence[float]) -> list[float]:
    return [1e3 * float(value) for value in np.percentile(seconds, PERCENTILES)] if seconds else []
