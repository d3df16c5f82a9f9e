"""The access log: one line on stderr for each request. It has no texts, queries or keys."""

from __future__ import annotations

import fcntl
import io
import os
import select
import stat
import sys
import termios
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TextIO
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

ACCESS = "stretto.access"
"""Key of an ASGI scope under which the request's `Access` is stored."""
_GONE = 499
"""Status in the log of a request whose client went away before the answer, as nginx writes it."""
_MAX_PATH_CHARS = 200
_MOST_UNREAD = 32 << 10
"""Most bytes of a pipe that are unread when a line is written: half of what a pipe on Linux holds. The rest is for warnings and errors,
which would block the server if the pipe were full."""


@dataclass(slots=True)
class Access:
    """What the log tells about a generating request. Written by `stretto.server.generate.Generate`."""

    model: str | None = None
    """Name in the request, once it is known to be served."""
    size: str = ""
    """The Subnet that the request got."""
    num_prompt: int = 0
    num_generated: int = 0
    """Tokens so far, of all choices."""
    first_token_s: float | None = None
    """Time of the first token by `time.perf_counter`."""


def logged(app: ASGIApp) -> ASGIApp:
    """``app`` with a line on stderr at the end of each request."""
    log = _Log()

    async def enter(scope: Scope, receive: Receive, send: Send) -> None:
        started_s, status = time.perf_counter(), _GONE
        access = scope[ACCESS] = Access()

        async def send_observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await app(scope, receive, send_observed)
        finally:
            log.write(_line(scope, status, access, started_s))

    return enter


class _Log:
    """Writes lines to stderr, and leaves out those for which stderr has no room, so that no request waits for its reader."""

    def __init__(self) -> None:
        self._num_left_out = 0

    def write(self, line: str) -> None:
        with suppress(OSError, ValueError):  # stderr is closed, or its disk is full
            if sys.stderr is None or not _has_room(sys.stderr):  # None: it was closed when Python started
                self._num_left_out += 1
                return
            if self._num_left_out:
                line = f"{_now()} {self._num_left_out} requests are not in this log: stderr was not read\n{line}"
                self._num_left_out = 0
            sys.stderr.write(line)


def _has_room(stderr: TextIO) -> bool:
    """Whether ``stderr`` takes a line without blocking."""
    try:
        file = stderr.fileno()
    except (io.UnsupportedOperation, AttributeError):  # in memory, or an object that only writes
        return True
    if stat.S_ISFIFO(os.fstat(file).st_mode):
        unread = int.from_bytes(fcntl.ioctl(file, termios.FIONREAD, bytes(4)), sys.byteorder)
        if unread > _MOST_UNREAD:
            return False
    poll = select.poll()
    poll.register(file, select.POLLOUT)
    return poll.poll(0) == [(file, select.POLLOUT)]  # other events: the reader has ended


def _line(scope: Scope, status: int, access: Access, started_s: float) -> str:
    client = scope["client"][0] if scope.get("client") else "-"
    path = quote(scope["path"][:_MAX_PATH_CHARS])  # a client may send line breaks in it
    fields = [_now(), client, scope["method"], path, str(status)]
    if access.model is not None:
        size = f'"{access.size}"' if " " in access.size else access.size  # as in logfmt
        fields += [f"model={quote(access.model, safe='/:')}", f"size={size}"]
        fields += [f"prompt_tokens={access.num_prompt}", f"generated_tokens={access.num_generated}"]
    if access.first_token_s is not None:
        fields.append(f"first_token_s={access.first_token_s - started_s:.3f}")
    return f"{' '.join(fields)} total_s={time.perf_counter() - started_s:.3f}\n"


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
