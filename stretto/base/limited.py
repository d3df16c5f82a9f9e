"""A worker process that answers requests under limits of processor time, memory and stack.

It isolates libraries in C or Rust that parse untrusted input: a running call cannot be interrupted from Python, and a stack
overflow or a failed allocation ends the process that the library runs in. The worker is started as a program, because a spawned
worker of `multiprocessing` would import the caller's main module and so torch.
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
"""Longest time in which a worker may start; long, for busy machines."""
_WALL_FACTOR, _WALL_EXTRA_S = 20, 60.0
"""A request may take ``_WALL_FACTOR`` times its limit of processor seconds, plus ``_WALL_EXTRA_S``, in wall seconds."""


class Overrun(Exception):  # noqa: N818 - a property of the request, not a fault of the worker
    """A request exceeded a limit and ended the worker; the message names the limit."""

    def __init__(self, message: str, *, is_late: bool = False) -> None:
        """``is_late``: the limit was that of processor time."""
        super().__init__(message)
        self.is_late = is_late


class LimitedProcess:
    """Client of a worker process. The worker starts at the first request, and again after a request that ended it."""

    def __init__(self, module: str, setup: bytes = b"", *, limit_s: float) -> None:
        """
        Args:
            module: module that calls `serve`; started with ``python -m``, because a script would import files beside it before those
                of the standard library.
            setup: data for the worker before the first request; no limit applies to it.
            limit_s: processor seconds of one request. Not wall seconds, so that a busy machine rejects no request.
        """
        self._module, self._setup, self._limit_s = module, setup, limit_s
        self._running: tuple[subprocess.Popen[bytes], Connection] | None = None
        self._end: Callable[[], object] = lambda: None  # ends the process; a finalizer of this object
        self._lock = threading.Lock()

    def ask(self, question: bytes) -> bytes:
        """The worker's answer to a request. Thread-safe; requests are answered one after another.

        Raises:
            Overrun: the request exceeded a limit.
            RuntimeError: the worker does not start, or sleeps; the request is not the cause.
        """
        with self._lock:
            if self._running is None or self._running[0].poll() is not None:  # it ended between requests
                self._close()
                self._running = self._start()
            process, connection = self._running
            with contextlib.suppress(EOFError, OSError):
                connection.send_bytes(question)
                if connection.poll(_WALL_EXTRA_S + _WALL_FACTOR * self._limit_s):
                    return connection.recv_bytes()
                self._close()
                raise RuntimeError(f"{self._module}: neither answered nor used up its processor time")
            code = process.wait(_WALL_EXTRA_S)
            self._close()
        if code == -signal.SIGPROF:
            raise Overrun(f"took more than {self._limit_s:g} processor seconds", is_late=True)
        known = {-signal.SIGSEGV: "overflowed the stack", -signal.SIGABRT: "took too much memory"}
        raise Overrun(known.get(code, f"ended its process (exit {code})"))

    def close(self) -> None:
        with self._lock:
            self._close()

    def _start(self) -> tuple[subprocess.Popen[bytes], Connection]:
        connection, remote = multiprocessing.Pipe()
        command = [sys.executable, "-m", self._module, str(remote.fileno()), str(self._limit_s)]
        folder, null = Path(stretto.__file__).parents[1], subprocess.DEVNULL
        with remote:
            process = subprocess.Popen(command, stdin=null, stdout=null, cwd=folder, pass_fds=[remote.fileno()])
        self._end = weakref.finalize(self, _end, process, connection)
        with contextlib.suppress(EOFError, OSError):
            connection.send_bytes(self._setup)
            if connection.poll(_START_S) and connection.recv_bytes() == b"ready":
                return process, connection
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
    """Main function of a worker: answer requests until the client closes the connection.

    Args:
        prepare: returns, from the client's setup, the function that answers one request.
        memory_bytes: limit of the address space of the whole process.
        stack_bytes: limit of the stack; None: the system's own.
    """
    connection, limit_s = Connection(int(sys.argv[1])), float(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the client, whose end closes the connection
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
        # The signal has no handler, so it ends the process inside C code too.
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        reply = answer(question)
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send_bytes(reply)
