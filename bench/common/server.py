"""A real server process for a bench script, and what can be read of it from outside."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx

from stretto.base.errors import UserError

SERVING = "serving at "


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
def serving(
    source: Path,
    *flags: str,
    program: Sequence[str] = ("-m", "stretto.apps.cli"),
    environ: Mapping[str, str] | None = None,
    log: IO[str] | None = None,
) -> Iterator[Server]:
    """``stretto serve`` on any free port of this machine, until the block ends.

    Args:
        program: what Python runs with the command's arguments.
        environ: set beside what this process has.
        log: takes what the server writes to stderr; None: stderr of this process.

    Raises:
        UserError: it did not start.
    """
    command = [sys.executable, *program, "serve", str(source), "--port", "0", *flags]
    environment = {**os.environ, **(environ or {})}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            url = next((line.split()[-1] for line in process.stdout if line.startswith(SERVING)), None)
            if url is None:
                raise UserError(f"{source}: its server did not start (exit code {process.wait()}); see above")
            yield Server(url, process.pid, process)
        finally:
            process.terminate()
            try:
                process.wait(timeout=90)
            except subprocess.TimeoutExpired:
                process.kill()
