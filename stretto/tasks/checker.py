"""Are two formulas the same? math-verify, in a process of its own.

Why a process: it bounds its own time with an alarm signal, which only a main thread may have, and which does not
interrupt what sympy does in C; an answer like ``9^{9^{9^9}}`` takes all time or all memory there is. It is started as a
program: a spawned worker of `multiprocessing` would import the caller's main module, torch and all.
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import resource
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

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
        self._running: tuple[subprocess.Popen[bytes], Connection] | None = None
        self._lock = threading.Lock()

    def same(self, gold: str, answer: str) -> Checked:
        """Whether ``answer`` says what ``gold`` says: both text with formulas between ``$``, or numbers in prose.

        Raises:
            RuntimeError: the process does not start or sleeps, which is no answer's fault.
        """
        if len(answer) > _MAX_CHARS:
            return Checked(False, Outcome.OK, f"an answer of {len(answer)} characters")
        with self._lock:
            process, connection = self._running = self._running or _start()
            try:
                connection.send_bytes(json.dumps([self._limit_s, gold, answer]).encode())
            except OSError:
                self._end()
                raise RuntimeError("math-verify's process was gone before it was asked") from None
            is_silent = not connection.poll(_PATIENCE_S + _PATIENCE * self._limit_s)
            try:
                if not is_silent:
                    return Checked(bool(json.loads(connection.recv_bytes())), Outcome.OK)
            except (EOFError, OSError):
                process.wait(_PATIENCE_S)  # its own end, not ours
            self._end()
        if is_silent:
            raise RuntimeError("math-verify's process neither answered nor used up its processor time")
        if process.returncode == -signal.SIGPROF:
            return Checked(False, Outcome.TIMEOUT, f"comparing it took more than {self._limit_s:g} processor seconds")
        return Checked(False, Outcome.CRASH, "comparing it ended the process that did")

    def close(self) -> None:
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._running is not None:
            process, connection = self._running
            process.kill()
            process.wait()
            connection.close()
            self._running = None


def _start() -> tuple[subprocess.Popen[bytes], Connection]:
    ours, theirs = multiprocessing.Pipe()
    # As a module: beside this file lies one named math.py, which a script's search path would put before Python's.
    command = [sys.executable, "-m", "stretto.tasks.checker", str(theirs.fileno())]
    folder, mute = Path(stretto.__file__).parents[1], subprocess.DEVNULL
    with theirs:
        process = subprocess.Popen(command, stdin=mute, stdout=mute, cwd=folder, pass_fds=[theirs.fileno()])
    with contextlib.suppress(EOFError, OSError):
        if ours.poll(_START_S) and ours.recv_bytes() == b"ready":
            return process, ours
    process.kill()
    raise RuntimeError(f"math-verify's process did not start (exit {process.wait()})")


def _serve(connection: Connection) -> None:
    """Answers ``true`` or ``false`` to each ``[limit_s, gold, answer]``, until the other side is gone."""
    from math_verify import parse, verify

    logging.disable(logging.WARNING)  # it warns at length that its own time limits are off

    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    connection.send_bytes(b"ready")
    while True:
        try:
            limit_s, *texts = json.loads(connection.recv_bytes())
        except EOFError:
            return
        # Processor time, so that a busy machine refuses no right answer; nothing handles the signal, so that it ends
        # the process inside C code too.
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        gold, answer = (parse(text, parsing_timeout=None) for text in texts)
        is_same = verify(gold, answer, timeout_seconds=None)
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send_bytes(json.dumps(bool(is_same)).encode())


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
