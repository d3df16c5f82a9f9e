"""An elastic pool beside fixed ones under a bursty load: waits in the queue, and what the workers cost.

    python -m bench.elastic_pool [--cycles N] [--seed N]

Calls arrive at random (Poisson), few in the quiet part of a cycle and many in its burst; service times are lognormal.
Every pool gets the same calls at the same moments, all pools side by side, in processes of their own that sleep for as
long as a call takes: the machine's other work meets all alike. Worker-seconds run from the start of a worker's starting
to its end, and until the last call is answered. The fixed pool of equal mean size is the next whole number of workers.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.common.roles import Sleeper
from stretto.base.track import Advance, progress
from stretto.runtime.local import LocalRuntime
from stretto.runtime.pool import ElasticPool, Limits, percentile
from stretto.runtime.runtime import Placement, Runtime

DEADLINE_S = 600.0


@dataclass(frozen=True, slots=True)
class Call:
    at_s: float
    service_s: float


@dataclass(frozen=True, slots=True)
class Result:
    """What one pool made of the calls."""

    waits: tuple[float, ...]
    worker_s: float
    wall_s: float
    num_started: int

    @property
    def mean_size(self) -> float:
        return self.worker_s / self.wall_s


def trace(options: argparse.Namespace) -> list[Call]:
    """Exponential gaps, at the rate of the part of the cycle in which each begins."""
    random = np.random.default_rng(options.seed)
    sigma = 0.75  # of the logarithm: the slowest of a hundred takes six times the median
    mu = math.log(options.service) - sigma**2 / 2
    calls: list[Call] = []
    now = 0.0
    while True:
        is_burst = now % options.cycle >= options.cycle - options.burst
        now += float(random.exponential(1.0 / (options.burst_rate if is_burst else options.quiet_rate)))
        if now >= options.cycles * options.cycle:
            return calls
        calls.append(Call(now, float(random.lognormal(mu, sigma))))


async def play(runtime: Runtime, calls: Sequence[Call], name: str, limits: Limits, advance: Advance) -> Result:
    waits: list[float] = []

    async def one(call: Call, came_s: float) -> None:
        async with pool.lease() as handle:
            waits.append(time.monotonic() - came_s)
            await runtime.call(handle, "sleep", call.service_s, deadline_s=DEADLINE_S)
        advance(1)

    async with ElasticPool(runtime, Sleeper, name=name, placement=Placement.PROCESS, limits=limits) as pool:
        before_s, start = pool.stats().worker_s, time.monotonic()
        async with asyncio.TaskGroup() as group:
            for call in calls:
                await asyncio.sleep(start + call.at_s - time.monotonic())
                group.create_task(one(call, time.monotonic()))
        stats, wall_s = pool.stats(), time.monotonic() - start
    return Result(tuple(waits), stats.worker_s - before_s, wall_s, stats.num_started)


async def play_all(options: argparse.Namespace, calls: Sequence[Call]) -> dict[str, Result]:
    common = {"utilisation": options.utilisation, "wait_aim_s": options.wait_aim, "window_s": 3.0, "patience_s": 3.0}
    limits = {"elastic": Limits(min=1, max=options.max, **common)}
    limits |= {f"fixed {size}": Limits(min=size, max=size) for size in options.fixed}
    async with LocalRuntime() as runtime:
        with progress("pools", len(calls) * len(limits)) as advance:
            results = await asyncio.gather(
                *(play(runtime, calls, name, each, advance) for name, each in limits.items())
            )
    return dict(zip(limits, results, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=4)
    parser.add_argument("--cycle", type=float, default=30.0, help="seconds from one burst to the next")
    parser.add_argument("--burst", type=float, default=8.0, help="seconds of a burst, at the end of a cycle")
    parser.add_argument("--quiet-rate", type=float, default=2.0, help="calls a second")
    parser.add_argument("--burst-rate", type=float, default=20.0, help="calls a second")
    parser.add_argument("--service", type=float, default=0.25, help="mean seconds of a call")
    parser.add_argument("--max", type=int, default=12, help="workers of the elastic pool")
    parser.add_argument("--fixed", type=int, nargs="+", default=[3, 4, 5, 6], help="workers of the fixed pools")
    parser.add_argument("--utilisation", type=float, default=0.7)
    parser.add_argument("--wait-aim", type=float, default=0.2, help="seconds: 95th percentile of waits")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    calls, console = trace(options), Console()
    results = asyncio.run(play_all(options, calls))
    elastic = results["elastic"]
    shown = Table(title=f"{len(calls)} calls in {options.cycles} cycles", title_justify="left")
    for heading in ("pool", "p50 wait, s", "p95 wait, s", "p99 wait, s", "worker-seconds", "mean size", "started"):
        shown.add_column(heading, justify="left" if heading == "pool" else "right")
    for name, result in results.items():
        shares = [f"{percentile(result.waits, share):.2f}" for share in (0.5, 0.95, 0.99)]
        shown.add_row(name, *shares, f"{result.worker_s:.0f}", f"{result.mean_size:.2f}", f"{result.num_started}")
    console.print(shown)
    size = math.ceil(elastic.mean_size)
    if size not in options.fixed:
        parser.error(f"--fixed: has no {size}, the elastic pool's mean size")
    equal = results[f"fixed {size}"]
    waits = percentile(elastic.waits, 0.95) / percentile(equal.waits, 0.95)
    console.print(
        f"elastic over fixed {size}: p95 wait {waits:.2f}x, worker-seconds {elastic.worker_s / equal.worker_s:.2f}x"
    )
    console.print("aim: both below 1")


if __name__ == "__main__":
    main()
