"""Measure the time to first token of an ordinary client while another client has many long requests.

    python -m bench.fair_serving [--greedy N] [--requests R] [--max-batch B]
    python -m bench.fair_serving --one-client         both clients share one API key: first come, first served, which fails

The server has a small random network. An ordinary client sends short requests one after another in three situations: the server is
idle; long requests of another client leave one place in the batch (equal batch); there are many more long requests than places.
Prints the median and the largest time to first token of each. Exits with 1 if the third median is more than 3 times the second.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from statistics import median

from bench.common.measure import bench_parser, finish, random_prompts, table, times, wide_console
from bench.common.networks import shape, write_network
from bench.common.server import serving
from stretto.server.client import Client

AIM = 3.0
PROMPT, LONG, SHORT = 64, 900, 4
"""Tokens of a prompt, of a long answer and of a short one."""
_SETTLE_S = 2.0
"""Wait until the long requests are in the batch."""
GREEDY, ORDINARY = "greedy", "ordinary"
NETWORK = "tiny"


async def first_token_s(client: Client, prompt: list[int]) -> float:
    """Time to the first token of a short request, which is read to its end."""
    started_s, first_s = time.perf_counter(), 0.0
    async for _ in client.stream_completion(prompt, max_tokens=SHORT, ignore_eos=True):
        first_s = first_s or time.perf_counter() - started_s
    return first_s


@asynccontextmanager
async def long_requests(url: str, num: int, vocab_size: int) -> AsyncIterator[None]:
    """Keep ``num`` long requests of the greedy client running: each is sent again when it ends."""

    async def keep_asking(client: Client, prompt: list[int]) -> None:
        while True:
            async for _ in client.stream_completion(prompt, max_tokens=LONG, ignore_eos=True):
                pass

    async with Client(url, GREEDY) as client:
        tasks = [asyncio.create_task(keep_asking(client, each)) for each in random_prompts(num, PROMPT, vocab_size, 1)]
        try:
            await asyncio.sleep(_SETTLE_S)
            yield
        finally:
            for task in tasks:
                task.cancel()
            with suppress(Exception):
                await asyncio.gather(*tasks, return_exceptions=True)


async def measured(url: str, key: str, num_long: int, num: int, vocab_size: int) -> list[float]:
    """Times to first token of ``num`` ordinary requests, one after another, beside ``num_long`` long ones."""
    async with long_requests(url, num_long, vocab_size), Client(url, key) as client:
        return [await first_token_s(client, each) for each in random_prompts(num, PROMPT, vocab_size)]


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--greedy", type=int, default=160, help="number of long requests of the greedy client")
    parser.add_argument("--requests", type=int, default=20, help="number of ordinary requests in each situation")
    parser.add_argument("--max-batch", type=int, default=16, help="places in the batch of the server")
    parser.add_argument("--one-client", action="store_true", help="give both clients the same key, which must fail")
    options = parser.parse_args()
    console, key = wide_console(), GREEDY if options.one_client else ORDINARY
    vocab_size = shape(NETWORK)[0].vocab_size
    loads = {"idle server": 0, "equal batch": options.max_batch - 1, f"{options.greedy} long requests": options.greedy}
    times_s: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        flags = f"--max-batch {options.max_batch} --api-key {GREEDY} --api-key {ORDINARY} --cache-memory 64MB".split()
        with serving(write_network(Path(temporary), NETWORK), *flags) as server:
            for name, num_long in loads.items():
                times_s[name] = asyncio.run(measured(server.url, key, num_long, options.requests, vocab_size))
    shown = table("time to first token of an ordinary client, ms", "situation", "median", "largest")
    for name, seconds in times_s.items():
        shown.add_row(name, f"{1e3 * median(seconds):.1f}", f"{1e3 * max(seconds):.1f}")
    console.print(shown)
    _, equal, crowded = (median(seconds) for seconds in times_s.values())
    line = f"{options.greedy} long requests over equal batch: {times(crowded / equal)}, aim: at most {AIM:g}x"
    console.print(line)
    finish([line] if crowded > AIM * equal else [])


if __name__ == "__main__":
    main()
