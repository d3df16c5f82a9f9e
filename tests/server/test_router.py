"""A router between clients and two servers: the fields that routers add, and, where one is installed, a real one."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.common.networks import write_network
from bench.common.server import Server, serving
from stretto.server.server import open_socket

ROUTER = shutil.which("vllm-router")
SETTLE_S = 5.0
"""Time after the kill in which the router may still choose the dead server."""
_START_S = 120.0
CHAT = {"messages": [{"role": "user", "content": "one two three"}], "temperature": 0, "max_tokens": 8}
TEXT = {"prompt": "one two three", "temperature": 0, "max_tokens": 8}
OPTIONS = ("--policy", "round_robin", "--health-check-interval-secs", "1", "--health-failure-threshold", "1")
ADDED = {"no_stop_trim": False, "ignore_eos": False, "skip_special_tokens": True, "return_hidden_states": False}
"""What vllm-router 0.1.17 and sglang-router 0.3.2 write into every body."""
ADDED_TO_CHATS = {
    "logprobs": False,
    "continue_final_message": False,
    "separate_reasoning": True,
    "stream_reasoning": True,
    "include_reasoning": True,
}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 2, "echo": False, **ADDED},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 2,
        **ADDED,
        **ADDED_TO_CHATS,
    },
}


@pytest.mark.parametrize("path", BODIES)
def test_fields_that_routers_add_are_accepted_in_the_value_that_holds(
    ask: Callable[..., httpx.Response], path: str
) -> None:
    assert ask("POST", path, json=BODIES[path]).status_code == 200
    for name in ("no_stop_trim", "skip_special_tokens", "return_hidden_states"):
        answer = ask("POST", path, json={**BODIES[path], name: not BODIES[path][name]})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == name, answer.text


@contextmanager
def routed(program: str, urls: Sequence[str], log: Path) -> Iterator[str]:
    """The address of a router in front of ``urls``. Raises `RuntimeError`: it did not start."""
    with open_socket("127.0.0.1", 0) as free, open_socket("127.0.0.1", 0) as other:
        port, metrics = (each.getsockname()[1] for each in (free, other))
    places = ("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics))
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


@pytest.mark.slow
@pytest.mark.skipif(ROUTER is None, reason="vllm-router is not on the PATH")
def test_a_router_goes_on_with_the_other_server(tmp_path: Path) -> None:
    assert ROUTER is not None
    source = write_network(tmp_path, "tiny")
    with ExitStack() as stack:
        first, second = (stack.enter_context(serving(source, "--cache-memory", "64MB")) for _ in range(2))
        router = stack.enter_context(routed(ROUTER, (first.url, second.url), tmp_path / "router.log"))
        assert problems(first.url, router) == []
        requests = killed(router, second, num_clients=4, seconds=3.0)
    later = [each for each in requests if each.started_s > SETTLE_S]
    assert later and not [each.problem for each in later if each.problem]
    assert not [each.problem for each in requests if each.problem and not each.is_stream], "they can be sent again"
