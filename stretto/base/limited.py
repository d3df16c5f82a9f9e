"""A process that answers questions under limits of processor time, memory and stack.

For libraries in C or Rust that read what strangers send: nothing else stops them once they run, and what kills them (a
stack that overflows, no memory left) kills the process that they run in. It is started as a program: a spawned worker of
`multiprocessing` would import the caller's main module, torch and all.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import stretto

_START_S = 120.0
"""Patience with a process that starts on a busy machine."""
_PATIENCE, _PATIENCE_S = 20, 60.0
"""Wall seconds that an answer is waited for: this often the processor seconds that it may take, and these."""


class Overrun(Exception):  # noqa: N818 - what a question did
    """A question ended the process that was to answer it; says by exceeding what."""

    def __init__(self, what: str, *, is_late: bool = False) -> None:
        super().__init__(what)
        self.is_late = is_late


class LimitedProcess:
    """A module run as a program, which calls `serve`. Started at the first question, and again after one that ended it."""

    def __init__(self, module: str, setup: bytes = b"", *, limit_s: float) -> None:
        """
        Args:
            module: by its name: run as a script, it would find the files beside it before Python's own.
            setup: what the program is told before the first question, outside of any limit.
            limit_s: processor seconds of one question, so that a busy machine refuses none.
        """
        self._module, self._setup, self._limit_s = module, setup, limit_s
        self._running: tuple[subprocess.Popen[bytes], Connection] | None = None
        self._end: Callable[[], object] = lambda: None  # of the process; called when this object goes, too
        self._lock = threading.Lock()

    def ask(self, question: bytes) -> bytes:
        """The program's answer. Any thread may ask; they take turns.

        Raises:
            Overrun: the question took more than it may.
            RuntimeError: the process does not start or sleeps, which is no question's fault.
        """
        with self._lock:
            if self._running is None or self._running[0].poll() is not None:  # no question's fault, if none was open
                self._close()
                self._running = self._start()
            process, connection = self._running
            with contextlib.suppress(EOFError, OSError):
                connection.send_bytes(question)
                if connection.poll(_PATIENCE_S + _PATIENCE * self._limit_s):
                    return connection.recv_bytes()
                self._close()
                raise RuntimeError(f"{self._module}: neither answered nor used up its processor time")
            code = process.wait(_PATIENCE_S)
            self._close()
        if code == -signal.SIGPROF:
            raise Overrun(f"took more than {self._limit_s:g} processor seconds", is_late=True)
        known = {-signal.SIGSEGV: "overflowed the stack", -signal.SIGABRT: "took too much memory"}
        raise Overrun(known.get(code, f"ended its process (exit {code})"))

    def close(self) -> None:
        with self._lock:
            self._close()

    def _start(self) -> tuple[subprocess.Popen[bytes], Connection]:
        ours, theirs = multiprocessing.Pipe()
        command = [sys.executable, "-m", self._module, str(theirs.fileno()), str(self._limit_s)]
        folder, mute = Path(stretto.__file__).parents[1], subprocess.DEVNULL
        with theirs:
            process = subprocess.Popen(command, stdin=mute, stdout=mute, cwd=folder, pass_fds=[theirs.fileno()])
        self._end = weakref.finalize(self, _end, process, ours)
        with contextlib.suppress(EOFError, OSError):
            ours.send_bytes(self._setup)
            if ours.poll(_START_S) and ours.recv_bytes() == b"ready":
                return process, ours
        process.kill()
        raise RuntimeError(f"{self._module} did not start (exit {process.wait()})")

    def _close(self) -> None:
        self._end()
        self._running = None


def _end(process: subprocess.Popen[bytes], connection: Connection) -> None:
    process.kill()
    process.wait()
    connection.close()


def serve(
    prepare: Callable[[bytes], Callable[[bytes], bytes]], *, memory_bytes: int, stack_bytes: int | None = None
) -> None:
    """What the program runs: answer questions until whoever asks them is gone.

    Args:
        prepare: from the setup to the function that answers one question.
        memory_bytes: address space of the whole process.
        stack_bytes: None: the machine's own limit.
    """
    connection, limit_s = Connection(int(sys.argv[1])), float(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever asks, and their end is ours
    answer = prepare(connection.recv_bytes())
    for kind, limit in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_STACK, stack_bytes),
    ):
        if limit is not None:
            resource.setrlimit(kind, (limit, limit))
    connection.send_bytes(b"ready")
    while True:
        try:
            question = connection.recv_bytes()
        except EOFError:
            return
        # Nothing handles the signal, so that it ends the process inside foreign code too.
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        reply = answer(question)
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send_bytes(reply)
