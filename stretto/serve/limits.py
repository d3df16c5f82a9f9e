"""What a server refuses before it works: keys, hosts, bodies, too many at once, clients that stop reading or go away."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

from pydantic import SecretStr
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Send

from stretto.serve.errors import ApiError, overloaded

T = TypeVar("T")
CUT = "stretto.cut"
"""Key of the ASGI scope under which `make_server` leaves the function that drops the connection."""
_LINGER_S = 20.0
"""How long the rest of a body that is too large is read and thrown away, so that its sender gets to read the answer
(a connection closed on unread bytes is reset)."""


class GoneError(ConnectionError):
    """The client is no longer there, or has stopped reading: nothing can be answered."""


class Keys:
    """API keys. Comparison takes the same time whatever is wrong with a key."""

    def __init__(self, keys: Sequence[SecretStr]) -> None:
        self._digests = [_digest(key.get_secret_value()) for key in keys]

    def check(self, authorization: str | None) -> None:
        """Raises `ApiError` 401 unless there are no keys, or ``authorization`` bears one of them."""
        if not self._digests:
            return
        scheme, _, key = (authorization or "").partition(" ")
        offered = _digest(key.strip())
        matches = [hmac.compare_digest(offered, digest) for digest in self._digests]  # all of them, always
        if scheme.lower() != "bearer" or not any(matches):
            raise ApiError(
                401,
                "no valid API key: send the header Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def check_host(header: str | None, allowed: Sequence[str] | None) -> None:
    """Raises `ApiError` 403 for a Host header that is not ``allowed``; None allows all."""
    if allowed is None:
        return
    name = (header or "").lower()
    if name.rpartition(":")[2].isdecimal() and not name.endswith("]"):
        name = name.rpartition(":")[0]
    if name not in allowed:
        raise ApiError(403, f"host: {name!r} is not served; start the server with that name allowed")


class Gate:
    """Counts open requests, and closes for good when the server drains."""

    def __init__(self, max_open: int) -> None:
        self.num_open = 0
        self.is_draining = False
        self._max_open = max_open

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Hold a place for one request.

        Raises:
            ApiError: 503 while draining, 429 where all places are taken.
        """
        if self.is_draining:
            raise ApiError(
                503,
                "the server is shutting down; ask another one",
                code="draining",
                headers={"Retry-After": "5", "Connection": "close"},
            )
        if self.num_open >= self._max_open:
            raise overloaded(f"{self._max_open} requests are open, which is the limit; come back later", 1.0)
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1


async def read_json(request: Request, max_bytes: int, timeout_s: float) -> Any:
    """The body as JSON; it is parsed only when all of it has arrived and is not too large.

    Raises:
        ApiError: 415 not announced as JSON, 413 too large, 408 too slow, 400 not UTF-8 or not JSON.
        GoneError: the client went away.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        # A web page may post any other type across sites without asking; this one makes its browser ask first.
        raise ApiError(415, f"content-type: {kind or 'none'} is not application/json; set that header")
    declared = request.headers.get("content-length", "")
    try:
        async with asyncio.timeout(timeout_s):
            raw = await _read(request, max_bytes, int(declared) if declared.isdecimal() else 0)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {timeout_s:g} seconds") from None
    except ClientDisconnect:
        raise GoneError from None
    return parse_json(raw)


async def _read(request: Request, max_bytes: int, declared: int) -> bytes:
    pieces: list[bytes] = []
    num_bytes = 0
    too_large = declared > max_bytes
    deadline_s = time.monotonic() + _LINGER_S
    if too_large and "100-continue" in request.headers.get("expect", ""):
        _refuse_size(max_bytes)  # nothing is under way: it waits for our word
    async for piece in request.stream():
        num_bytes += len(piece)
        too_large = too_large or num_bytes > max_bytes
        if not too_large:
            pieces.append(piece)
            continue
        pieces.clear()
        if time.monotonic() > deadline_s:
            break
    if too_large:
        _refuse_size(max_bytes)
    return b"".join(pieces)


def _refuse_size(max_bytes: int) -> NoReturn:
    raise ApiError(413, f"the body is larger than {max_bytes:,} bytes; send less", headers={"Connection": "close"})


def parse_json(raw: bytes) -> Any:
    """Strict JSON: UTF-8, no NaN, no lone surrogates, no depth that overflows the stack.

    Raises:
        ApiError: 400 otherwise.
    """
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8: byte {error.start} is {raw[error.start]:#04x}") from None
    try:
        tree = json.loads(text, parse_constant=_refuse_constant)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(tree, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ApiError(400, "the body holds half a surrogate pair, which is no character") from None
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    return tree


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` and return its result; cancel it as soon as the client goes away.

    Raises:
        GoneError: it did. (And whatever ``work`` raises.)
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise GoneError
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def bounded(send: Send, timeout_s: float, cut: Callable[[], None]) -> Send:
    """``send`` that gives a client ``timeout_s`` to take what is in its way, then ``cut``s the connection.

    The server buffers a little (64 KiB) and waits from then on, so this bounds the memory of a client that stops reading.
    """

    async def send_bounded(message: Any) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await send(message)
        except TimeoutError:
            cut()
            raise GoneError from None

    return send_bounded


def connection_cutter(send: Callable[..., Awaitable[None]]) -> Callable[[], None]:
    """A function that drops the connection behind uvicorn's ``send`` with all that waits in its buffer.

    ASGI has no message for it: raising makes uvicorn close the transport, which first waits for the buffer to empty,
    for ever where the client does not read. Behind another server there is nothing to reach, and nothing is done.
    """
    transport = getattr(getattr(send, "__self__", None), "transport", None)
    if not isinstance(transport, asyncio.WriteTransport):
        return lambda: None

    def cut() -> None:
        connection = transport.get_extra_info("socket")
        if connection is not None:  # reset: the kernel, too, forgets what it holds for this client
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()

    return cut
