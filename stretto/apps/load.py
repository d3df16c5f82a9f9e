"""`stretto bench-serve`: load a server, and print what its clients saw."""

from __future__ import annotations

import asyncio
import random
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import httpx
import rich
from rich.markup import escape
from rich.table import Table

from stretto.apps.serve import environment_keys
from stretto.base.errors import UserError
from stretto.harness.suites import serving
from stretto.serve.client import PERCENTILES, ApiFailure, Client, Load, LoadResult, run_load


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What `stretto bench-serve` was asked for."""

    requests: int
    concurrency: int
    rate: float | None
    prompt_tokens: int
    max_tokens: int
    seed: int


def bench_serve_command(source: Path | None, url: str | None, subnet: str | None, options: LoadOptions) -> None:
    """Load ``url``, or a server of ``source`` started for it; print what the clients saw."""
    if (source is None) == (url is None):
        raise UserError("bench-serve: name either a run or --url of a running server")
    for name in ("requests", "concurrency", "prompt_tokens", "max_tokens", "rate"):
        value = getattr(options, name)
        if value is not None and not 0 < value < float("inf"):
            raise UserError(f"--{name.replace('_', '-')} {value:g}: needs a number above 0")
    flags = ["--subnet", subnet] if subnet else []
    with serving(source, *flags) if source is not None else nullcontext((str(url), None)) as (started, _):
        _show(asyncio.run(_load(started, options)))


async def _load(url: str, options: LoadOptions) -> LoadResult:
    async with Client(url, next(iter(environment_keys()), None)) as client:
        try:
            info = await client.get("/api/info")
        except httpx.TransportError:
            raise UserError(f"--url {url}: nobody answers there; start `stretto serve` first") from None
        except ApiFailure as error:
            raise UserError(f"--url {url}: {error}; name a server of `stretto serve` that takes this key") from None
        rng = random.Random(options.seed)
        prompts = [rng.choices(range(info["vocab_size"]), k=options.prompt_tokens) for _ in range(options.requests)]
        num_open = options.requests if options.rate else options.concurrency
        load = Load(options.requests, num_open, prompts, options.max_tokens, options.rate, seed=options.seed)
        return await run_load(client, load)


def _show(result: LoadResult) -> None:
    table = Table(title=f"{len(result.seen)} answers in {result.wall_s:.1f} s")
    for column in ("", *(f"p{each}" for each in PERCENTILES)):
        table.add_column(column, justify="right" if column else "left")
    table.add_row("time to first token, ms", *(f"{value:,.2f}" for value in result.first_token_ms()))
    table.add_row("between tokens, ms", *(f"{value:,.2f}" for value in result.between_tokens_ms()))
    rich.print(table)
    rich.print(f"{result.tokens_per_s:,.0f} tokens/s, {result.requests_per_s:,.2f} requests/s")
    for reason, times in sorted(result.errors.items()):
        rich.print(f"[red]{times} x {escape(reason)}")
    if not result.seen:
        raise UserError(f"bench-serve: none of the {sum(result.errors.values())} requests was answered; see above")
