"""A training run in a process of its own, watched from outside: when it finished each step, and at what cost (Linux)."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stretto.base.errors import UserError
from stretto.base.track import METRICS_FILE
from stretto.sandbox.isolate import usage

POLL_S = 0.02
_MARK = b'"reward/mean"'
"""In the row of a step, and in no other."""


@dataclass(frozen=True, slots=True)
class Tick:
    """A step was seen to be finished. Written by `watched`."""

    step: int
    """Steps finished, the first is 1."""
    at_s: float
    """Of the performance counter."""
    processor_s: float
    """Of the run's processes so far, all threads."""


def watched(
    command: Sequence[str],
    folder: Path,
    advance: Callable[[int], None] = lambda num: None,
    environment: Mapping[str, str] | None = None,
) -> list[Tick]:
    """Run ``command``, which logs to ``folder``, to its end; nothing else that this process started may run beside it.

    Raises:
        UserError: it failed; the message is the end of what it printed.
    """
    ticks: list[Tick] = []
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        # Its processor seconds are those of all that we started, less what earlier commands took.
        earlier_s = usage(os.getpid()).cpu_s
        with subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **(environment or {})}) as process:
            while process.poll() is None:
                time.sleep(POLL_S)
                step = _num_steps(folder / METRICS_FILE)
                if step > (ticks[-1].step if ticks else 0):
                    advance(step - (ticks[-1].step if ticks else 0))
                    ticks.append(Tick(step, time.perf_counter(), usage(os.getpid()).cpu_s - earlier_s))
        if process.returncode:
            log.seek(0)
            lines = [line for line in log.read().splitlines() if line.strip()] or ["it printed nothing"]
            raise UserError(f"{folder.name}: failed with exit code {process.returncode}: {lines[-1]}")
    return ticks


def _num_steps(path: Path) -> int:
    return path.read_bytes().count(_MARK) if path.is_file() else 0
