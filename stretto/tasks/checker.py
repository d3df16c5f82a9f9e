"""Are two formulas the same? math-verify, in a process of its own.

Why a process: it bounds its own time with an alarm signal, which only a main thread may have, and which does not
interrupt what sympy does in C; an answer like ``9^{9^{9^9}}`` takes all time or all memory there is.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import stretto
from stretto.base.trajectory import Outcome

_START_S = 120.0
"""Patience with a process that imports sympy on a busy machine."""
_PATIENCE, _PATIENCE_S = 20, 60.0
"""Wall seconds that we wait for an answer: this often the processor seconds that it may take, and these."""
_MEMORY_BYTES = 2 << 30
_MAX_CHARS = 2_000
"""No answer is longer; a parser's time grows faster than its text."""


@dataclass(frozen=True, slots=True)
class Checked:
    """Written by `Checker`."""

    is_same: bool
    outcome: Outcome
    """OK: ``is_same`` says it. TIMEOUT or CRASH: the answer brought the comparison down."""
    why: str = ""


class Checker:
    """A process that compares formulas, started at the first question and again after one that brought it down."""

    def __init__(self, limit_s: float) -> None:
        """
        Args:
            limit_s: processor seconds of one comparison.
        """
        self._limit_s = limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def same(self, gold: str, answer: str) -> Checked:
        """Whether ``answer`` says what ``gold`` says: both text with formulas between ``$``, or numbers in prose.

        Raises:
            RuntimeError: the process does not start or sleeps, which is no answer's fault.
        """
        if len(answer) > _MAX_CHARS:
            return Checked(False, Outcome.OK, f"an answer of {len(answer)} characters")
        with self._lock:
            process = self._process or self._start()
            self._process = process
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps([self._limit_s, gold, answer]).encode() + b"\n")
                process.stdin.flush()
            except BrokenPipeError:
                self._end()
                raise RuntimeError("math-verify's process was gone before it was asked") from None
            line = _read_line(process, _PATIENCE_S + _PATIENCE * self._limit_s)
            if line is not None and line.endswith(b"\n"):
                return Checked(bool(json.loads(line)), Outcome.OK)
            if line is not None:
                process.wait(_PATIENCE_S)  # it has closed its output: its own end, not ours
            self._end()
        if line is None:
            raise RuntimeError("math-verify's process neither answered nor used up its processor time")
        if process.returncode == -signal.SIGPROF:
            return Checked(False, Outcome.TIMEOUT, f"comparing it took more than {self._limit_s:g} processor seconds")
        return Checked(False, Outcome.CRASH, "comparing it ended the process that did")

    def close(self) -> None:
        with self._lock:
            self._end()

    def _start(self) -> subprocess.Popen[bytes]:
        # As a module: beside this file lies one named math.py, which a script's search path would put before Python's.
        process = subprocess.Popen(
            [sys.executable, "-m", "stretto.tasks.checker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(stretto.__file__).parents[1],
        )
        if _read_line(process, _START_S) != b"ready\n":
            process.kill()
            raise RuntimeError(f"math-verify's process did not start (exit {process.wait()})")
        return process

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                _close(pipe)
            self._process = None


def _read_line(process: subprocess.Popen[bytes], limit_s: float) -> bytes | None:
    """One line; less where the process ended; None where time ran out."""
    assert process.stdout is not None
    descriptor, line = process.stdout.fileno(), b""
    end = time.monotonic() + limit_s
    while not line.endswith(b"\n"):
        if not select.select([descriptor], [], [], max(0.0, end - time.monotonic()))[0]:
            return None
        chunk = os.read(descriptor, 64)
        if not chunk:
            return line
        line += chunk
    return line


def _close(pipe: IO[bytes] | None) -> None:
    if pipe is not None:
        with contextlib.suppress(BrokenPipeError):  # what was not written is lost with the process
            pipe.close()


def _serve() -> None:
    """Answers ``true`` or ``false`` to each line of ``[limit_s, gold, answer]``, until the input ends."""
    from math_verify import parse, verify

    logging.disable(logging.WARNING)  # it warns at length that its own time limits are off

    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        limit_s, *texts = json.loads(line)
        # Processor time, so that a busy machine refuses no right answer; nothing handles the signal, so that it ends
        # the process inside C code too.
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        gold, answer = (parse(text, parsing_timeout=None) for text in texts)
        is_same = verify(gold, answer, timeout_seconds=None)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write("true\n" if is_same else "false\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _serve()
