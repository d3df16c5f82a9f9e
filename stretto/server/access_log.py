"""The access log: one line on stderr for each request. It has no texts, queries or keys."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

ACCESS = "stretto.access"
"""Key of an ASGI scope under which the request's `Access` is stored."""
_GONE = 499
"""Status in the log of a request whose client went away before the answer, as nginx writes it."""
_MAX_PATH_CHARS = 200


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
            with suppress(OSError, ValueError):  # a stderr that is closed or full must not end requests
                sys.stderr.write(_line(scope, status, access, started_s))

    return enter


def _line(scope: Scope, status: int, access: Access, started_s: float) -> str:
    client = scope["client"][0] if scope.get("client") else "-"
    path = quote(scope["path"][:_MAX_PATH_CHARS])  # a client may send line breaks in it
    fields = [time.strftime("%Y-%m-%dT%H:%M:%S%z"), client, scope["method"], path, str(status)]
    if access.model is not None:
        size = f'"{access.size}"' if " " in access.size else access.size  # as in logfmt
        fields += [f"model={quote(access.model, safe='/:')}", f"size={size}"]
        fields += [f"prompt_tokens={access.num_prompt}", f"generated_tokens={access.num_generated}"]
    if access.first_token_s is not None:
        fields.append(f"first_token_s={access.first_token_s - started_s:.3f}")
    return f"{' '.join(fields)} total_s={time.perf_counter() - started_s:.3f}\n"
