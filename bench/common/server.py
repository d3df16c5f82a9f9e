"""Real servers for benches and tests: a process of its own and what can be read of it from outside, or a thread of this one."""

from __future__ import annotations

import re
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from stretto.harness import suites
from stretto.server.server import open_socket


@dataclass(frozen=True, slots=True)
class Server:
    """A server that is up. Written by `serving`."""

    url: str
    pid: int
    process: subprocess.Popen[str]

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def resident_bytes(self) -> int:
        """Memory of the process, of which nothing is shared with others worth speaking of (Linux)."""
        fields = Path(f"/proc/{self.pid}/statm").read_text().split()
        return int(fields[1]) * 4096

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics by its name and labels."""
        text = httpx.get(f"{self.url}/metrics", timeout=60.0, trust_env=False).text
        lines = [line for line in text.splitlines() if line and not line.startswith("#")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    def answers_by_status(self) -> dict[int, int]:
        """How often the server answered with each status, by its own count."""
        found: dict[int, int] = {}
        for name, value in self.metrics().items():
            match = re.match(r'stretto_http_requests_total\{.*status="(\d+)"', name)
            if match:
                found[int(match[1])] = found.get(int(match[1]), 0) + int(value)
        return found


@contextmanager
def serving(source: Path, *flags: str, **told: Any) -> Iterator[Server]:
    """`stretto.harness.suites.serving`, with what can be asked of the process. Raises `UserError`: it did not start."""
    with suites.serving(source, *flags, **told) as (url, process):
        yield Server(url, process.pid, process)


@contextmanager
def in_thread(server: uvicorn.Server, port: int = 0) -> Iterator[str]:
    """The address of ``server`` on this port, 0 being a free one, of this machine; stopped in the end."""
    listening = open_socket("127.0.0.1", port)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()
