"""Measure a router in front of two servers: the latency that it adds, and the requests that are lost when a server is killed.

    python -m bench.router [--router vllm-router] [--clients C] [--seconds S]

Two `stretto serve` processes serve a small random network. The router is a program of its own (``pip install vllm-router``, in an
environment of its own; no GPU is needed). Checks that answers through the router equal the server's, streams included, and measures:
time of a short request, in turn to a server and through the router; with C clients at work, one server is killed with SIGKILL, and
answers are counted before, within and after. Exits with 1 if a request that began after the kill's first `SETTLE_S` seconds is lost.
"""

from __future__ import annotations

import json
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from bench.common.measure import bench_parser, finish, table, wide_console
from bench.common.networks import write_network
from bench.common.server import Server, serving

SETTLE_S = 5.0
"""Time after the kill in which the router may still choose the dead server."""
_START_S = 120.0
CHAT = {"messages": [{"role": "user", "content": "one two three"}], "temperature": 0, "max_tokens": 8}
TEXT = {"prompt": "one two three", "temperature": 0, "max_tokens": 8}
OPTIONS = ("--policy", "round_robin", "--health-check-interval-secs", "1", "--health-failure-threshold", "1")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def routed(program: str, urls: Sequence[str], log: Path) -> Iterator[str]:
    """The address of a router in front of ``urls``. Raises `RuntimeError`: it did not start."""
    port = free_port()
    places = ("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port()))
    with log.open("w") as out:
        process = subprocess.Popen([program, "--worker-urls", *urls, *places, *OPTIONS], stdout=out, stderr=out)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline_s = time.monotonic() + _START_S
        while True:
            try:
                if httpx.get(f"{url}/readiness", trust_env=False).json()["healthy_workers"] == len(urls):
                    break
            except (httpx.HTTPError, ValueError, KeyError):
                pass
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"{program} did not start: {log.read_text()[-2000:]}")
            time.sleep(0.2)
        yield url
    finally:
        process.kill()
        process.wait()


def post(url: str, path: str, body: dict[str, Any]) -> Any:
    answer = httpx.post(f"{url}/v1/{path}", json=body, timeout=60.0, trust_env=False)
    answer.raise_for_status()
    return answer.json()


def streamed(url: str, path: str, body: dict[str, Any]) -> str:
    """The text of a streamed answer. Raises `httpx.HTTPError`: it broke off."""
    text, ended = "", False
    with httpx.stream(
        "POST", f"{url}/v1/{path}", json=body | {"stream": True}, timeout=60.0, trust_env=False
    ) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            ended |= line == "data: [DONE]"
            if line.startswith("data: {"):
                choice = json.loads(line.removeprefix("data: "))["choices"][0]
                text += choice.get("text") or choice.get("delta", {}).get("content") or ""
    if not ended:
        raise httpx.RemoteProtocolError("the stream broke off")
    return text


def problems(server: str, router: str) -> list[str]:
    """Differences between the answers of a server and those through the router."""

    def text(choice: dict[str, Any]) -> str:
        return str(choice["message"]["content"] if "message" in choice else choice["text"])

    found = []
    for path, body in (("completions", TEXT), ("chat/completions", CHAT)):
        wanted = text(post(server, path, body)["choices"][0])
        if text(post(router, path, body)["choices"][0]) != wanted:
            found.append(f"{path}: another answer")
        if streamed(router, path, body) != wanted:
            found.append(f"{path}: another stream")
    names = [
        [each["id"] for each in httpx.get(f"{url}/v1/models", trust_env=False).json()["data"]]
        for url in (server, router)
    ]
    smaller = post(router, "completions", TEXT | {"model": names[0][-1]})
    if names[0] != names[1] or smaller["model"] != names[0][-1]:
        found.append(f"models: {names}, {smaller['model']}")
    return found


@dataclass(frozen=True, slots=True)
class Request:
    """One request of the load. Written by `Load`."""

    started_s: float
    """Seconds after the kill."""
    is_stream: bool
    problem: str
    """Empty: it was answered."""


class Load:
    """Threads that send requests one after another, half of them streams, until they are stopped."""

    def __init__(self, url: str, num_clients: int) -> None:
        self.url, self.requests, self.killed_s = url, list[tuple[float, bool, str]](), float("inf")
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(bool(n % 2),)) for n in range(num_clients)]
        for thread in self._threads:
            thread.start()

    def _ask(self, is_stream: bool) -> None:
        while not self._stop.is_set():
            started_s, problem = time.monotonic(), ""
            try:
                (streamed if is_stream else post)(
                    self.url, "completions", TEXT | {"max_tokens": 128, "ignore_eos": True}
                )
            except httpx.HTTPError as error:
                problem = f"{type(error).__name__}: {error}"
            self.requests.append((started_s, is_stream, problem))

    def stop(self) -> list[Request]:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        return [Request(started_s - self.killed_s, *rest) for started_s, *rest in self.requests]


def killed(router: str, victim: Server, num_clients: int, seconds: float) -> list[Request]:
    """Requests of a load in which ``victim`` is killed after ``seconds``, which goes on for `SETTLE_S` and ``seconds``."""
    load = Load(router, num_clients)
    time.sleep(seconds)
    load.killed_s = time.monotonic()
    victim.process.kill()
    time.sleep(SETTLE_S + seconds)
    return load.stop()


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--router", default="vllm-router", help="program of the router")
    parser.add_argument("--clients", type=int, default=8, help="number of clients at work during the kill")
    parser.add_argument("--seconds", type=float, default=10.0, help="time before the kill, and after it")
    parser.add_argument("--requests", type=int, default=200, help="number of short requests for the latency")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        source = write_network(Path(temporary), "tiny")
        with ExitStack() as stack:
            first, second = (stack.enter_context(serving(source, "--cache-memory", "64MB")) for _ in range(2))
            log = Path(temporary) / "router.log"
            router = stack.enter_context(routed(options.router, (first.url, second.url), log))
            failures = problems(first.url, router)
            times_s: dict[str, list[float]] = {first.url: [], router: []}
            for _ in range(options.requests):
                for url, own_s in times_s.items():
                    started_s = time.perf_counter()
                    post(url, "completions", TEXT | {"max_tokens": 1})
                    own_s.append(time.perf_counter() - started_s)
            requests = killed(router, second, options.clients, options.seconds)
    shown = table(f"{options.clients} clients, one of two servers killed", "requests", "sent", "lost")
    parts = {"before the kill": (-1e9, 0.0), f"within {SETTLE_S:g} s": (0.0, SETTLE_S), "later": (SETTLE_S, 1e9)}
    for name, (low, high) in parts.items():
        own = [each for each in requests if low <= each.started_s < high]
        lost = [each for each in own if each.problem]
        shown.add_row(name, str(len(own)), f"{len(lost)} ({sum(each.is_stream for each in lost)} of them streams)")
        for problem in sorted({each.problem for each in lost}):
            print(problem)
    failures += [
        f"lost {each.started_s:.1f} s after the kill" for each in requests if each.problem and each.started_s > SETTLE_S
    ]
    wide_console().print(shown)
    direct_ms, routed_ms = (1e3 * median(each) for each in times_s.values())
    print(
        f"a short request: {direct_ms:.2f} ms at a server, {routed_ms:.2f} ms through the router (+{routed_ms - direct_ms:.2f})"
    )
    finish(failures)


if __name__ == "__main__":
    main()
