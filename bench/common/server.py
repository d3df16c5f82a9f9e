"""Real servers for benches and tests: in a process of their own, with their metrics, or in a thread."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import uvicorn

from stretto.harness import suites
from stretto.server.server import open_socket

_VLLM_START_S = 600


@dataclass(frozen=True, slots=True)
class Server:
    """A running server. Written by `serving`."""

    url: str
    pid: int
    process: subprocess.Popen[str]

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def resident_bytes(self) -> int:
        """Resident memory of the process in bytes (Linux)."""
        fields = Path(f"/proc/{self.pid}/statm").read_text().split()
        return int(fields[1]) * 4096

    def metrics(self) -> dict[str, float]:
        """Values of /metrics by name and labels."""
        text = httpx.get(f"{self.url}/metrics", timeout=60.0, trust_env=False).text
        lines = [line for line in text.splitlines() if line and not line.startswith("#")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    def answers_by_status(self) -> dict[int, int]:
        """Number of answers with each status, as the server counts them."""
        counts = Counter[int]()
        for name, value in self.metrics().items():
            if match := re.match(r'stretto_http_requests_total\{.*status="(\d+)"', name):
                counts[int(match[1])] += int(value)
        return counts


@contextmanager
def serving(source: Path, *flags: str, **settings: Any) -> Iterator[Server]:
    """`stretto.harness.suites.serving` with a `Server`. Raises `UserError`: the server did not start."""
    with suites.serving(source, *flags, **settings) as (url, process):
        yield Server(url, process.pid, process)


@dataclass(slots=True)
class Vllm:
    """A vLLM server on this machine's CPU, in fp32. Made by `vllm_server`."""

    python: str
    checkpoint: Path
    flags: tuple[str, ...]
    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start the server and wait until it answers."""
        settings = {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "TORCHDYNAMO_DISABLE": "1",  # else the first request waits for a compiler
        }
        sizes = ("--max-model-len", "128", "--max-num-seqs", "32", "--port", str(self.port), "--host", "127.0.0.1")
        modes = ("--enforce-eager", "--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--dtype", "float32")
        program = (self.python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.checkpoint))
        environment = os.environ | settings | {"PYTHONPATH": str(Path(__file__).parents[2])}
        with tempfile.TemporaryFile() as log:
            command = [*program, *sizes, *modes, *self.flags]
            process = self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            stop_s = time.monotonic() + _VLLM_START_S
            while process.poll() is None and time.monotonic() < stop_s:
                try:
                    if httpx.get(f"{self.url}/health", timeout=5.0, trust_env=False).is_success:
                        return
                except httpx.TransportError:
                    time.sleep(1.0)
            log.seek(0)
            raise SystemExit(log.read().decode(errors="replace")[-2000:] + "\nvLLM did not start")

    def kill(self) -> None:
        """Kill the server with its engine, which is a process of its own, by SIGKILL."""
        assert self.process is not None, "the server was not started"
        with suppress(psutil.NoSuchProcess):
            for process in [*psutil.Process(self.process.pid).children(recursive=True), self.process]:
                process.kill()
        self.process.wait()


@contextmanager
def vllm_server(python: str, checkpoint: Path, *flags: str) -> Iterator[Vllm]:
    """A vLLM server of ``checkpoint`` in the environment of the interpreter ``python``."""
    with open_socket("127.0.0.1", 0) as free:
        server = Vllm(python, checkpoint, flags, free.getsockname()[1])
    try:
        server.start()
        yield server
    finally:
        if server.process is not None:
            server.process.terminate()
            server.process.wait()


@contextmanager
def serving_vllm(python: str, checkpoint: Path, *flags: str) -> Iterator[str]:
    """Address of a `vllm_server`."""
    with vllm_server(python, checkpoint, *flags) as server:
        yield server.url


@contextmanager
def in_thread(server: uvicorn.Server, port: int = 0) -> Iterator[str]:
    """Run ``server`` in a thread and return its address; port 0 takes a free port. The server stops on exit."""
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
