"""A burst of several times what the server can take, with and without elasticity under load.

    python -m bench.burst [--run FOLDER] [--factor 3] [--seconds S] [--limit-s L]

Capacity is what the server answers per second at full size when it is kept busy. Then requests arrive at random times at
``--factor`` times that rate: to a server that always gives the full network and lets all wait (off), to one that gives
the full network and refuses whom it would keep waiting longer than ``--limit-s`` (refusing), and to one that may go down to
``--floor`` before it refuses (on). So the third over the second is what smaller networks alone bring. Goodput counts the
answers per second whose first token came within ``--limit-s``; a refused request (429) counts as none.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from bench.common.measure import random_prompts, table, times, wide_console
from bench.common.networks import write_network
from bench.common.server import serving
from stretto.base.paths import checkpoint_folder
from stretto.model.checkpoint import read_config, read_presets
from stretto.server.client import Client, Load, LoadResult, run_load

AIM = 2.0
NO_QUEUE = 1_000_000
"""Concurrency that never holds a request back."""


@dataclass(frozen=True, slots=True)
class Burst:
    """What one server did in the burst."""

    result: LoadResult
    subnets: dict[str, int]
    """Requests by the Subnet they got."""

    def goodput(self, limit_s: float) -> float:
        """Answers a second whose first token came in time."""
        return sum(seen.first_token_s <= limit_s for seen in self.result.seen) / self.result.wall_s

    def first_token_s(self, percentile: float) -> float:
        return float(np.percentile([seen.first_token_s for seen in self.result.seen], percentile))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="a run or a checkpoint; default: random weights of the demo's shape")
    parser.add_argument("--floor", help="smallest Subnet under load: a preset; default: the last one of the network")
    parser.add_argument("--factor", type=float, default=3.0, help="arrivals over capacity")
    parser.add_argument("--seconds", type=float, default=8.0, help="length of the burst")
    parser.add_argument("--limit-s", type=float, default=1.0, help="time to first token that counts as good")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of an answer")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        source = checkpoint_folder(options.run) if options.run else write_network(Path(temporary), "demo")
        prompts = random_prompts(256, options.prompt, read_config(source).vocab_size)
        floor = options.floor or list(read_presets(source))[-1]
        with serving(source) as server:
            capacity = asyncio.run(_capacity(server.url, prompts, options))
            bursts = {"off": asyncio.run(_burst(server.url, server.metrics, prompts, capacity, options))}
        for name, least in (("refusing", "full"), ("on", floor)):
            # half of the limit: what waits is also computed
            with serving(source, "--floor", least, "--first-token-s", str(options.limit_s / 2)) as server:
                bursts[name] = asyncio.run(_burst(server.url, server.metrics, prompts, capacity, options))
    _show(wide_console(), bursts, capacity, floor, options)


async def _capacity(url: str, prompts: list[list[int]], options: argparse.Namespace) -> float:
    """Requests a second at full size with the batch kept full."""
    async with Client(url) as client:
        for num in (64, 256):  # the first warms the server up
            result = await run_load(client, Load(num, 64, prompts, options.tokens))
            assert not result.errors, result.errors
    return result.requests_per_s


async def _burst(
    url: str,
    metrics: Callable[[], dict[str, float]],
    prompts: list[list[int]],
    capacity: float,
    options: argparse.Namespace,
) -> Burst:
    rate = options.factor * capacity
    async with Client(url) as client:
        await run_load(client, Load(16, 4, prompts, options.tokens))  # few at once: no load to react to yet
        load = Load(int(rate * options.seconds), NO_QUEUE, prompts, options.tokens, rate=rate, seed=1)
        before = metrics()
        result = await run_load(client, load)
    after, name = metrics(), "stretto_elastic_requests_total"
    subnets: dict[str, int] = {}
    for key, value in after.items():
        if key.startswith(name):
            label = key.split('subnet="')[1].split('"')[0]
            subnets[label] = subnets.get(label, 0) + int(value - before.get(key, 0.0))
    return Burst(result, {label: num for label, num in subnets.items() if num})


def _show(console: Console, bursts: dict[str, Burst], capacity: float, floor: str, options: argparse.Namespace) -> None:
    console.print(
        f"capacity at full size {capacity:,.1f} requests/s; burst of {options.factor * capacity:,.1f} requests/s for {options.seconds:.0f} s"
    )
    shown = table(
        f"first token within {options.limit_s} s counts as good; floor {floor}",
        *("elasticity", "goodput/s", "answers/s", "refused", "TTFT p50, s", "TTFT p95, s", "tokens/s"),
    )
    for name, burst in bursts.items():
        result = burst.result
        shown.add_row(
            name,
            f"{burst.goodput(options.limit_s):,.1f}",
            f"{result.requests_per_s:,.1f}",
            f"{sum(result.errors.values()):,}",
            f"{burst.first_token_s(50):.2f}",
            f"{burst.first_token_s(95):.2f}",
            f"{result.tokens_per_s:,.0f}",
        )
    console.print(shown)
    for name, burst in bursts.items():
        console.print(f"{name}: {', '.join(f'{label} {num:,}' for label, num in sorted(burst.subnets.items()))}")
        for reason, num in sorted(burst.result.errors.items(), key=lambda item: -item[1])[:2]:
            console.print(f"{name}: {num:,} x {reason}", soft_wrap=True)
    on = bursts["on"].goodput(options.limit_s)
    for other in ("off", "refusing"):
        goodput = bursts[other].goodput(options.limit_s)
        found = times(on / goodput) if goodput else "no good answer without"
        console.print(f"goodput, elasticity on over {other}: {found} (aim ≥ {AIM:.0f}x)")


if __name__ == "__main__":
    main()
