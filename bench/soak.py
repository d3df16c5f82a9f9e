"""Many streaming clients for minutes, some of which vanish or send nonsense: errors, leaked pages, memory.

    python -m bench.soak [--run FOLDER] [--clients N] [--seconds S]

A real server process on this machine; every client loops over: stream a completion to its end, leave in its midst, or
send a body that is wrong in one of many ways. Wrong bodies must get a 4xx, right ones their tokens (or a 429, which says
when to come back). When all have left, the server must be idle with every cache page free, and its memory must not have
grown since the first quarter of the run. Exits with 1 if one of the three does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

import httpx
from rich.console import Console

from bench.common.measure import table, wide_console
from bench.common.networks import write_network
from bench.common.server import Server, serving
from stretto.base.paths import checkpoint_folder
from stretto.base.track import progress
from stretto.model.checkpoint import read_config
from stretto.server.client import ApiFailure, Client

LEAVES, WRONG = 0.25, 0.2
"""Shares of visits that leave early and that send a wrong body; the others want their answer."""
FLAT = 1.05
"""Memory at the end over memory after the first quarter; allocators never give all of it back at once (ours)."""
IDLE_S = 60.0
"""For the server to notice that everyone has left."""
LARGE = 5_000_000
"""Bytes of a body over the server's limit."""

Wrong = tuple[str, bytes]
"""Path and body."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="a run or a checkpoint; default: random weights of the demo's shape")
    parser.add_argument("--clients", type=int, default=200, help="the aim is stated for 1000")
    parser.add_argument("--seconds", type=float, default=30.0, help="the aim is stated for 300")
    parser.add_argument("--tokens", type=int, default=24, help="most tokens of an answer")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        source = checkpoint_folder(options.run) if options.run else write_network(Path(temporary), "demo")
        with serving(source) as server:
            soak = Soak(server, read_config(source).vocab_size, options)
            asyncio.run(soak.run())
            holds = soak.report(wide_console())
    if not holds:
        sys.exit(1)


class Soak:
    """The clients and what they saw."""

    def __init__(self, server: Server, vocab_size: int, options: argparse.Namespace):
        self.server = server
        self.vocab_size = vocab_size
        self.num_clients: int = options.clients
        self.seconds: float = options.seconds
        self.most_tokens: int = options.tokens
        self.rng = random.Random(options.seed)
        self.outcomes: Counter[str] = Counter()
        """What visits ended with."""
        self.failures: Counter[str] = Counter()
        """What should not have happened."""
        self.memory: list[tuple[float, int]] = []
        """Seconds since the start, resident bytes of the server."""
        self.after: dict[str, float] = {}
        """Metrics when all had left."""

    async def run(self) -> None:
        """Let the clients loop for the time, then wait until the server is idle."""
        start = time.perf_counter()
        end = start + self.seconds
        wrong = wrong_bodies(self.vocab_size)
        async with Client(self.server.url) as client, _plain_client(self.server.url) as plain:
            with progress(f"{self.num_clients} clients, seconds", int(self.seconds)) as advance:
                watch = asyncio.create_task(self._watch(start, end, advance))
                await asyncio.gather(*(self._client(client, plain, wrong, end) for _ in range(self.num_clients)))
                await watch
        await self._idle()

    async def _client(self, client: Client, plain: httpx.AsyncClient, wrong: list[Wrong], end: float) -> None:
        await asyncio.sleep(self.rng.random() * min(2.0, self.seconds / 4))
        while time.perf_counter() < end:
            kind = self.rng.random()
            try:
                if kind < WRONG:
                    await self._send_wrong(plain, *self.rng.choice(wrong))
                else:
                    await self._stream(client, leaves=kind < WRONG + LEAVES)
            except ApiFailure as failure:
                self._note_status(failure.status, failure.message)
                await asyncio.sleep(self.rng.random() * min(failure.retry_after_s or 0.1, 1.0))
            except httpx.HTTPError as error:
                self.failures[f"{type(error).__name__}: {error}"] += 1
                await asyncio.sleep(0.1)

    async def _stream(self, client: Client, leaves: bool) -> None:
        prompt = [self.rng.randrange(8, self.vocab_size) for _ in range(self.rng.randint(1, 48))]
        num_wanted = self.rng.randint(1, self.most_tokens)
        stays = self.rng.randint(0, num_wanted) if leaves else num_wanted + 1
        fields = {"max_tokens": num_wanted, "ignore_eos": True, "return_token_ids": True}
        num_seen, finished = 0, None
        async with aclosing(client.stream_completion(prompt, **fields)) as pieces:
            async for piece in pieces:
                num_seen += len(piece.token_ids)
                finished = piece.finish_reason or finished
                if num_seen >= stays:
                    break
        self.outcomes["left early" if leaves else "answered"] += 1
        if not leaves and (num_seen != num_wanted or finished != "length"):
            self.failures[f"{num_seen} of {num_wanted} tokens, ended by {finished}"] += 1

    async def _send_wrong(self, plain: httpx.AsyncClient, path: str, body: bytes) -> None:
        try:
            response = await plain.post(path, content=body, headers={"content-type": "application/json"})
        except (httpx.WriteError, httpx.ReadError) as error:
            if len(body) < LARGE:
                raise
            # the server may answer a body that is too large, and close, before it has been sent whole
            self.outcomes[f"refused while sending: {type(error).__name__}"] += 1
            return
        if response.status_code < 400:
            self.failures[f"{response.status_code} for {body[:60]!r}"] += 1
        else:
            self._note_status(response.status_code, f"for {body[:60]!r}")

    def _note_status(self, status: int, message: str) -> None:
        if 400 <= status < 500:
            self.outcomes[f"status {status}"] += 1
        else:
            self.failures[f"{status}: {message[:100]}"] += 1

    async def _watch(self, start: float, end: float, advance: Callable[[int], None]) -> None:
        while (now := time.perf_counter()) < end and self.server.is_alive:
            self.memory.append((now - start, self.server.resident_bytes()))
            await asyncio.sleep(1.0)
            advance(1)

    async def _idle(self) -> None:
        deadline = time.perf_counter() + IDLE_S
        while time.perf_counter() < deadline:
            self.after = await asyncio.to_thread(self.server.metrics)
            if not any(self.after[f"stretto_engine_num_{kind}"] for kind in ("running", "waiting")):
                break
            await asyncio.sleep(0.5)
        self.memory.append((self.memory[-1][0] + 1, self.server.resident_bytes()))

    def report(self, console: Console) -> bool:
        """Print what was seen; whether all aims hold."""
        leaked = self.after["stretto_engine_num_pages"] - self.after["stretto_engine_num_free_pages"]
        left = self.after["stretto_engine_num_running"] + self.after["stretto_engine_num_waiting"]
        quarter = [size for at, size in self.memory if at >= self.seconds / 4]
        growth = self.memory[-1][1] / quarter[0]
        peak = max(size for _, size in self.memory)
        by_server = {status: num for status, num in self.server.answers_by_status().items() if status >= 500}
        shown = table(f"{self.num_clients} clients for {self.seconds:.0f} s", "", "seen", "aim")
        for outcome, num in sorted(self.outcomes.items()):
            shown.add_row(outcome, f"{num:,}", "")
        shown.add_row("other failures seen by clients", f"{sum(self.failures.values()):,}", "0")
        shown.add_row("5xx by the server's count", f"{sum(by_server.values()):,}", "0")
        shown.add_row("requests left in the engine", f"{left:.0f}", "0")
        shown.add_row("cache pages leaked", f"{leaked:.0f}", "0")
        shown.add_row("memory, end over first quarter", f"{growth:.3f}x", f"≤ {FLAT}x")
        shown.add_row("memory, peak", f"{peak / 1e6:,.0f} MB", "")
        console.print(shown)
        for failure, num in self.failures.most_common(10):
            console.print(f"{num} x {failure}", soft_wrap=True, markup=False)
        return not self.failures and not by_server and not left and not leaked and growth <= FLAT


def _plain_client(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(base_url=url, timeout=600.0, limits=limits, trust_env=False)


def wrong_bodies(vocab_size: int) -> list[Wrong]:
    """Bodies that deserve a 4xx, each wrong in a way of its own."""
    completions = [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b'{"prompt": "\xff\xfe"}',
        b"\x00" * 64,
        b'{"prompt": []}',
        b'{"prompt": [-1]}',
        b'{"prompt": [%d]}' % vocab_size,
        b'{"prompt": [1.5]}',
        b'{"prompt": {"a": 1}}',
        b'{"prompt": [9], "max_tokens": -1}',
        b'{"prompt": [9], "max_tokens": "many"}',
        b'{"prompt": [9], "max_tokens": 1e400}',
        b'{"prompt": [9], "n": 1000000}',
        b'{"prompt": [9], "temperature": -1}',
        b'{"prompt": [9], "temperature": NaN}',
        b'{"prompt": [9], "model": "no such model"}',
        b'{"prompt": [9], "elastic": {"layers": 10000}}',
        b'{"prompt": [9], "elastic": {"width": 1}}',
        b'{"prompt": [9], "logit_bias": {"x": 1}}',
        b'{"prompt": [%s]}' % b",".join([b"9"] * 100_000),
        b'{"prompt": "%s"}' % (b"a" * LARGE),
        b"[" * 100_000,
    ]
    chats = [
        b'{"messages": []}',
        b'{"messages": "hello"}',
        b'{"messages": [{"role": "emperor", "content": "x"}]}',
        b'{"messages": [{"content": "x"}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_schema"}}',
        b'{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "stop": [1, 2]}',
    ]
    return [("/v1/completions", body) for body in completions] + [("/v1/chat/completions", body) for body in chats]


if __name__ == "__main__":
    main()
