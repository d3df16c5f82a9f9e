"""Requests that nobody should send, by the thousand, to a real server: 500s, hangs, dead engines, wrong tokens.

    python -m tests.server.fuzz_server [--bodies N] [--seed S] [--clients C] [--failures FILE]
    python -m tests.server.fuzz_server --replay FILE          what failed, one by one
    python -m tests.server.fuzz_server --mutant FAULT         a server with a fault that this must find

A server process over a small random network gets the requests (`tests.server.bodies`: every endpoint; valid ones, and what can be
done to them), many at once. Every so often a control
request asks for tokens that are known: those of the reference, computed here. Every whole request must be answered within
the time, none with a 500 (nor a stream with one in it), valid ones with a 2xx, and the control must always get its tokens. A
server that is found dead is started again. Each failure is kept with its bytes in ``--failures``. Exits with 1 if there is one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx
from rich.console import Console

from bench.common.measure import random_prompts, table
from bench.common.naive_engine import generate_naive
from bench.common.networks import write_network
from bench.common.server import Server, serving
from stretto.base.track import Advance, progress, wide_console
from stretto.engine.request import Sampling
from stretto.model.checkpoint import read_checkpoint, read_presets
from tests.server.bodies import ORIGIN, Case, World, make_case
from tests.server.mutant_server import FAULTS

KEY, ADMIN_KEY = "key", "admin"
CONTROL_TOKENS = 24
CONTROL = -1
"""Stands for the number of a request in the file of failures."""
CONTROL_EVERY = 50
"""Requests between two controls."""
NO_FAULT = (503, 429)
"""Statuses above 400 that a server in order may give even to valid requests: it has more to do than it takes."""
PROBLEMS = ("500s", "hangs", "no answer", "unreadable answers", "valid refused", "dead engines", "control mismatches")
HEALTH_S = 30.0
"""For /health to answer, a dead engine apart: on a machine that others use, too, a step may take a while."""


@dataclass(frozen=True, slots=True)
class Control:
    """A request of known answer."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back for one request."""

    status: int | None
    """None: nothing that begins like an answer."""
    head: bytes = b""
    body: bytes = b""
    has_ended: bool = True
    """The server closed in time, or the client hung up as it meant to."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bodies", type=int, default=2000, help="the aim is stated for 20000")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=16, help="requests open at once")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds without an end that make a hang")
    parser.add_argument("--failures", type=Path, default=Path("fuzz_failures.jsonl"))
    parser.add_argument("--replay", type=Path, help="a file of failures: these, one at a time")
    parser.add_argument("--mutant", choices=sorted(FAULTS), help="the fault to find")
    options = parser.parse_args()
    console = wide_console()
    with tempfile.TemporaryDirectory() as temporary:
        source = write_network(Path(temporary), "tiny")
        fuzz = Fuzz(source, options, console)
        fuzz.run()
    fuzz.report()
    if fuzz.failures:
        sys.exit(1)


class Fuzz:
    """What was sent, and what came of it."""

    def __init__(self, source: Path, options: argparse.Namespace, console: Console):
        self.source, self.options, self.console = source, options, console
        self.world = _world(source)
        self.controls = known_answers(source)
        lines = options.replay.read_text().splitlines() if options.replay else ()
        cases = (Case.load(json.loads(line)["case"]) for line in lines)
        self.replayed = [case for case in cases if case.number != CONTROL]
        self.statuses: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        """By name of what went wrong."""
        self.num_controls = 0
        self.seconds = 0.0

    def run(self) -> None:
        """Send the requests; begin again with a new one when it is found dead."""
        cases, total = self._cases()
        flags = ["--memory", "64MB", "--api-key", KEY, "--cors", ORIGIN]
        program = ("-m", "stretto")
        if self.options.mutant:
            program = ("-m", "tests.server.mutant_server", self.options.mutant)
        start = time.perf_counter()
        log_path = self.options.failures.with_suffix(".log")
        with (
            log_path.open("w") as log,
            self.options.failures.open("w") as kept,
            progress("requests", total, console=self.console) as advance,
        ):
            is_dead = True
            while is_dead:
                environ = {"STRETTO_ADMIN_KEY": ADMIN_KEY}
                with serving(self.source, *flags, program=program, environ=environ, log=log) as server:
                    life = Life(self, server, cases, kept, advance)
                    asyncio.run(life.run())
                    if is_dead := life.is_dead:
                        self.failures["dead engines"] += 1
                        server.process.kill()
        self.seconds = time.perf_counter() - start

    def _cases(self) -> tuple[Iterator[Case], int]:
        if self.replayed:
            return iter(self.replayed), len(self.replayed)
        num = self.options.bodies
        return (make_case(self.options.seed, number, self.world) for number in range(num)), num

    def report(self) -> None:
        shown = table("malformed and valid requests", "", "number", "aim")
        for status, num in sorted(self.statuses.items()):
            shown.add_row(status, f"{num:,}", "")
        for name in PROBLEMS:
            shown.add_row(name, f"{self.failures[name]:,}", "0")
        total = self.statuses.total()
        shown.add_row("requests", f"{total:,}", "")
        shown.add_row("requests/s, the server's start included", f"{total / self.seconds:.0f}", "")
        self.console.print(shown)
        self.console.print(f"{self.num_controls} controls answered")
        if self.failures:
            self.console.print(f"kept in {self.options.failures}; again with --replay", soft_wrap=True)


class Life:
    """One server, until no request is left or it is dead."""

    def __init__(self, fuzz: Fuzz, server: Server, cases: Iterator[Case], kept: IO[str], advance: Advance):
        self.fuzz, self.server = fuzz, server
        self.cases, self.kept, self.advance = cases, kept, advance
        self.host, port = server.url.removeprefix("http://").split(":")
        self.port = int(port)
        self.is_dead = False
        self.num_sent = 0

    async def run(self) -> None:
        """Until no request is left, or the server is dead."""
        num = 1 if self.fuzz.options.replay else self.fuzz.options.clients
        async with asyncio.TaskGroup() as group:
            for _ in range(num):
                group.create_task(self._client())
        if not self.is_dead:
            await self._control()
        self.is_dead = self.is_dead or not await self._is_healthy()

    async def _client(self) -> None:
        while not self.is_dead:
            case = next(self.cases, None)
            if case is None:
                return
            self.num_sent += 1
            if self.num_sent % CONTROL_EVERY == 0 or self.fuzz.options.replay:
                await self._control()
            try:
                answer = await exchange(self.host, self.port, case, self.fuzz.options.patience)
            except OSError as error:  # nobody listens
                answer = Answer(None, repr(error).encode())
            await self._judge(case, answer)
            self.advance(1)

    async def _judge(self, case: Case, answer: Answer) -> None:
        problem = verdict(case, answer)
        hung_up = case.sends is not None or case.reads is not None
        status = "client hung up" if hung_up else "none" if answer.status is None else f"{answer.status // 100}xx"
        self.fuzz.statuses[status] += 1
        if problem is not None:
            self.is_dead = self.is_dead or not await self._is_healthy()
            if not self.is_dead:
                self.fuzz.failures[problem] += 1
            self._keep(case.dump(), "in flight when the engine died" if self.is_dead else problem, answer)

    def _keep(self, case: dict[str, Any], problem: str, answer: Answer) -> None:
        said = (answer.head[:200] + b"\n" + answer.body[-600:]).decode("utf-8", "replace")
        record = {"problem": problem, "answer": said, "case": case}
        self.kept.write(json.dumps(record) + "\n")
        self.kept.flush()

    async def _is_healthy(self) -> bool:
        if not self.server.is_alive:
            return False
        with suppress(httpx.HTTPError):
            async with httpx.AsyncClient(base_url=self.server.url, timeout=HEALTH_S, trust_env=False) as client:
                return (await client.get("/health")).status_code == 200
        return False

    async def _control(self) -> None:
        control = self.fuzz.controls[self.num_sent // CONTROL_EVERY % len(self.fuzz.controls)]
        fields = {"prompt": control.prompt, "max_tokens": len(control.tokens), "temperature": 0, "ignore_eos": True}
        try:
            async with httpx.AsyncClient(
                base_url=self.server.url, timeout=self.fuzz.options.patience, trust_env=False
            ) as client:
                body = fields | {"return_token_ids": True}
                response = await client.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {KEY}"})
            if response.status_code in NO_FAULT:
                return
            self.fuzz.num_controls += 1
            said = response.text
            is_right = (
                response.status_code == 200 and tuple(response.json()["choices"][0]["token_ids"]) == control.tokens
            )
        except httpx.HTTPError as error:
            said, is_right = repr(error), False
        if not is_right and not self.is_dead:
            self.is_dead = not await self._is_healthy()
            if not self.is_dead:
                self.fuzz.failures["control mismatches"] += 1
                raw = json.dumps(fields)
                case = Case(CONTROL, "control", raw.encode(), True, True).dump()
                self._keep(case, f"control: {control.tokens} expected", Answer(None, said.encode()))


async def exchange(host: str, port: int, case: Case, patience_s: float) -> Answer:
    """Send ``case`` and read until the server closes, or the client hangs up as the case says."""
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 24)
    received = bytearray()
    try:
        async with asyncio.timeout(patience_s):
            sending = asyncio.create_task(_send(writer, case))
            try:
                while piece := await reader.read(1 << 16):
                    received += piece
                    if case.reads is not None and len(received) >= case.reads:
                        break
            except ConnectionError:  # the server refused what it had not read yet
                pass
            finally:
                sending.cancel()
                with suppress(asyncio.CancelledError, ConnectionError):
                    await sending
        has_ended = True
    except TimeoutError:
        has_ended = False
    finally:
        writer.transport.abort()
    head, _, body = bytes(received).partition(b"\r\n\r\n")
    while head.startswith(b"HTTP/1.1 100"):
        head, _, body = body.partition(b"\r\n\r\n")
    status = int(head[9:12]) if head.startswith(b"HTTP/1.") and head[9:12].isdigit() else None
    if b"transfer-encoding: chunked" in head.lower():
        body = _joined(body)
    return Answer(status, head, body, has_ended)


async def _send(writer: asyncio.StreamWriter, case: Case) -> None:
    writer.write(case.raw[: case.sends])
    await writer.drain()
    if case.sends is not None:
        writer.transport.abort()
    elif not case.is_whole:
        writer.write_eof()  # nothing more comes: the server need not wait for it


def _joined(body: bytes) -> bytes:
    pieces = []
    while body:
        size, _, rest = body.partition(b"\r\n")
        if not (num := int(size or b"0", 16)):
            break
        pieces.append(rest[:num])
        body = rest[num + 2 :]
    return b"".join(pieces)


def verdict(case: Case, answer: Answer) -> str | None:
    """What is wrong with an answer; None: nothing."""
    if not answer.has_ended:
        return "hangs"
    if case.sends is not None or case.reads is not None:
        return None
    if answer.status is None:
        return "no answer" if case.is_whole else None
    if answer.status >= 500 and answer.status not in NO_FAULT:
        return "500s"
    if case.is_valid and answer.status >= 400 and answer.status not in NO_FAULT:
        return "valid refused"
    try:
        return "500s" if _has_server_error(case, answer) else None
    except (ValueError, KeyError, TypeError, IndexError):
        return "unreadable answers" if case.is_whole else None


def _has_server_error(case: Case, answer: Answer) -> bool:
    """Whether a stream ends in a fault of the server; raises where the answer is none of the forms it may have."""
    head = answer.head.lower()
    if case.raw.startswith(b"HEAD") or not answer.body:
        return False
    if b"text/event-stream" in head:
        events = [line[6:] for line in answer.body.decode().split("\n") if line.startswith("data: ")]
        if events[-1] == "[DONE]":
            return False
        last = json.loads(events[-1])
        if str(last.get("type")) in ("response.completed", "response.incomplete"):
            return False
        error = last if last.get("type") == "error" else last["error"]
        return (error.get("code") or error["type"]) in ("server_error", "engine_failed")
    if answer.status is not None and answer.status >= 400 and case.is_whole:
        return not isinstance(json.loads(answer.body)["error"]["message"], str)
    if b"application/json" in head:
        json.loads(answer.body)
    return False


def _world(source: Path) -> World:
    presets = ("full", *read_presets(source))
    return World(source.name, presets, read_checkpoint(source).config.vocab_size, source, KEY, ADMIN_KEY)


def known_answers(source: Path) -> Sequence[Control]:
    """Greedy continuations, by the reference."""
    model = read_checkpoint(source).model.requires_grad_(False)
    sampling = Sampling(temperature=0, max_tokens=CONTROL_TOKENS, ignore_eos=True)
    prompts = random_prompts(4, 12, model.config.vocab_size)
    full = model.config.full()
    return [Control(tuple(ids), generate_naive(model, ids, sampling, full).tokens) for ids in prompts]


if __name__ == "__main__":
    main()
