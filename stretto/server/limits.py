"""Limits and refusals of the server: keys, bodies, number of requests, slow and vanished clients.

An answer other than 2xx is an `ApiError` here, in the form that OpenAI's clients read.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import re
import socket
import struct
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import KW_ONLY, dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, SecretStr, ValidationError
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from stretto.base.config import first_problem
from stretto.base.errors import UserError
from stretto.engine.async_engine import Closed, EngineFailed
from stretto.engine.request import QueueFull
from stretto.server.calls.json_text import MAX_DEPTH, strict_json
from stretto.server.messages import UNPROCESSABLE, Body, FieldError

T = TypeVar("T")
BodyT = TypeVar("BodyT", bound=Body)
IGNORED = (
    *("user", "metadata", "service_tier", "safety_identifier", "verbosity", "reasoning_effort", "reasoning"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "prediction"),
    "max_tool_calls",
)
"""Fields accepted without effect: labels, hints about price, caching and effort, and defaults that clients spell out."""
MAX_BODY_BYTES = 4 << 20
"""Largest size of one body."""
MAX_HELD_BYTES = 256 << 20
"""Largest size of all bodies that are arriving or being processed. As Python objects they take a multiple of it."""
BODY_TIMEOUT_S = 30.0
"""Time limit for a body to arrive, seconds."""
_LINGER_S = 20.0
"""Time for which the rest of a body that is too large is still read after the answer, seconds."""
_REQUEST = re.compile(r"^request \S+: ")
"""Beginning of the engine's messages; a client does not know this number."""
_MAX_MESSAGE_CHARS = 2000
"""Longest error message. Many repeat a part of the request, which may have megabytes."""
_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


@dataclass(eq=False)
class ApiError(Exception):
    """An answer other than 2xx: raised anywhere in a handler, rendered in one place."""

    status: int
    message: str
    _: KW_ONLY
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] | None = None

    def body(self) -> dict[str, Any]:
        kind = _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        message = self.message
        if len(message) > _MAX_MESSAGE_CHARS:
            message = f"{message[:_MAX_MESSAGE_CHARS]}…"
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        kind = LingeringResponse if self.status == 413 else JSONResponse
        return kind(self.body(), self.status, self.headers)


class LingeringResponse(JSONResponse):
    """An answer that is sent before the whole body was read. It then reads and discards the rest of the body for a while: closing a
    connection with unread bytes resets it, and the client might never read the answer."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                while (message := await receive())["type"] == "http.request" and message.get("more_body"):
                    pass
        await send({"type": "http.response.body", "body": b""})


def overloaded(message: str, retry_after_s: float, status: int = 429) -> ApiError:
    """An error that asks the client to retry after ``retry_after_s`` seconds."""
    return ApiError(status, message, code="overloaded", headers={"Retry-After": str(max(1, round(retry_after_s)))})


class GoneError(ConnectionError):
    """The client has closed the connection or stopped reading, so no answer can be sent."""


KNOWN_ERRORS = (ApiError, UserError, QueueFull, Closed, EngineFailed, GoneError)
"""Errors that have an answer of their own. Any other exception is a bug, answered with status 500 and logged."""


def as_api_error(error: Exception) -> ApiError:
    """The answer to a failure of any kind."""
    match error:
        case ApiError():
            return error
        case FieldError():
            return ApiError(400, str(error), param=error.param, code=error.code)
        case UserError():  # a name before the first colon, possibly with dots, is the field at fault
            line = _REQUEST.sub("", str(error))
            field = line.partition(":")[0].strip()
            is_field = all(map(str.isidentifier, field.split(".")))
            return ApiError(400, line, param=field if is_field else None, code=UNPROCESSABLE)
        case QueueFull():
            return overloaded(str(error), 2.0)
        case Closed():
            return ApiError(503, str(error), code="draining", headers={"Retry-After": "5"})
        case EngineFailed():
            return ApiError(500, str(error), code="engine_failed")
        case GoneError():
            return ApiError(499, "gone")
    # The details are in the log only: the server re-raises the exception.
    return ApiError(500, "internal error; see the server's log")


def check_key(authorization: str | None, keys: Sequence[SecretStr]) -> None:
    """Raises `ApiError` 401 if there are ``keys`` and the header ``authorization`` holds none of them. Takes the same time for every
    wrong key."""

    def digest(key: str) -> bytes:
        return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()

    scheme, _, offered = (authorization or "").partition(" ")
    known = [digest(key.get_secret_value()) for key in keys]
    matches = [hmac.compare_digest(digest(offered.strip()), each) for each in known]  # no early end: constant time
    if keys and (scheme.lower() != "bearer" or not any(matches)):
        problem = "no valid API key: send the header Authorization: Bearer KEY"
        raise ApiError(401, problem, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def check_host(header: str | None, allowed: Sequence[str] | None) -> None:
    """Raises `ApiError` 403 for a Host header that is not ``allowed``; None allows all. Starlette's TrustedHostMiddleware would answer
    in a form that OpenAI's clients cannot read."""
    name = (header or "").lower()
    if name.rpartition(":")[2].isdecimal() and not name.endswith("]"):
        name = name.rpartition(":")[0]
    if allowed is not None and name not in allowed:
        raise ApiError(
            403, f"host: {name!r} is not served; use the server's address, or start it with --allowed-host NAME"
        )


CLIENT = "stretto.client"
"""Key of an ASGI scope under which `client_of` is stored."""


def client_of(scope: Scope, has_keys: bool) -> str:
    """Name of the client for fair scheduling: its API key (hashed) if the server has keys, else its network address. Without keys the
    header is ignored, because a client could send another one with every request."""
    given = Headers(scope=scope).get("authorization")
    if has_keys and given:
        return hashlib.sha256(given.encode("utf-8", "surrogateescape")).hexdigest()
    return scope["client"][0] if scope.get("client") else ""


class Gate:
    """Admission of requests: limits the number of open requests and the bytes of their bodies, and refuses all while draining."""

    def __init__(self, max_open: int, max_body_bytes: int = MAX_HELD_BYTES) -> None:
        self.num_open = 0
        self.num_body_bytes = 0
        """Bytes of bodies that are arriving or being processed."""
        self.is_draining = False
        self._max_open = max_open
        self._max_body_bytes = max_body_bytes

    @asynccontextmanager
    async def admit(self, http: Request) -> AsyncIterator[tuple[Any, Callable[[], None]]]:
        """Read the body, then admit the request. Yields the body as JSON, and a function that ends the admission early: a client that
        has read its whole answer may send the next request at once.

        Raises:
            ApiError: 503 while draining, 429 with too many open requests or bytes, and the errors of `read_json`.
            GoneError: the client went away.
        """
        self._check()  # before the body is read
        with self._held() as hold:
            tree = await read_json(http, hold)
            with self.enter() as leave:
                yield tree, leave

    @contextmanager
    def enter(self) -> Iterator[Callable[[], None]]:
        """Count one open request until the yielded function is called or the block ends. Raises `ApiError`: 503 while draining, 429
        with too many open requests."""
        self._check()
        self.num_open += 1
        with ExitStack() as stack:
            stack.callback(self._leave)
            yield stack.close

    def _leave(self) -> None:
        self.num_open -= 1

    def _check(self) -> None:
        if self.is_draining:
            headers = {"Retry-After": "5", "Connection": "close"}
            raise ApiError(503, "the server is shutting down; use another server", code="draining", headers=headers)
        if self.num_open >= self._max_open:
            raise overloaded(f"{self._max_open} requests are open, which is the most allowed; try again later", 1.0)

    @contextmanager
    def _held(self) -> Iterator[Callable[[int], None]]:
        """A function that counts bytes of one body until the block ends. It raises `ApiError` 429 if all bodies become too large."""
        with ExitStack() as stack:

            def hold(num: int) -> None:
                if self.num_body_bytes + num > self._max_body_bytes:
                    raise overloaded(f"the server holds {self.num_body_bytes:,} bytes of bodies; try again later", 1.0)
                self.num_body_bytes += num
                stack.callback(self._release, num)

            yield hold

    def _release(self, num: int) -> None:
        self.num_body_bytes -= num


async def read_json(
    request: Request,
    hold: Callable[[int], None] = lambda num: None,
    max_bytes: int = MAX_BODY_BYTES,
    timeout_s: float = BODY_TIMEOUT_S,
) -> Any:
    """The body as JSON. ``hold`` is called with the size of each piece.

    Raises:
        ApiError: 415 without a content type of JSON, 413 too large, 408 too slow, 400 no JSON. GoneError: the client went away.
    """
    if not announces_json(request.headers):
        kind = request.headers.get("content-type") or "none"
        raise ApiError(415, f"content-type: {kind} is not application/json; set that header")
    try:
        async with asyncio.timeout(timeout_s):
            return parse_json(await _read(request, hold, max_bytes))
    except TimeoutError:
        raise late_body(timeout_s) from None
    except ClientDisconnect:
        raise GoneError from None


def announces_json(headers: Headers) -> bool:
    """Whether the content type is JSON. Browsers let web pages post other types across sites without a CORS preflight."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind == "application/json" or kind.endswith("+json")


def late_body(timeout_s: float = BODY_TIMEOUT_S) -> ApiError:
    return ApiError(408, f"the body did not arrive within {timeout_s:g} seconds")


async def _read(request: Request, hold: Callable[[int], None], max_bytes: int) -> bytes:
    too_large = ApiError(
        413, f"the body is larger than {max_bytes:,} bytes; send less", headers={"Connection": "close"}
    )
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise too_large
    raw = bytearray()
    async for piece in request.stream():
        if len(raw) + len(piece) > max_bytes:
            raise too_large
        hold(len(piece))
        raw += piece
    return bytes(raw)


def parse_json(raw: bytes) -> Any:
    """Strict JSON: UTF-8, no NaN, no lone surrogates, at most `MAX_DEPTH` levels. Raises `ApiError` 400 for anything else."""
    try:
        text = raw.decode("utf-8")
        tree = strict_json(text)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(tree, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8: byte {error.start} is {raw[error.start]:#04x}") from None
    except UnicodeEncodeError:
        raise ApiError(
            400, "the body contains half a surrogate pair, which is not a character; send valid Unicode"
        ) from None
    except RecursionError:
        raise ApiError(400, f"the body is nested more than {MAX_DEPTH} levels deep; flatten it") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    return tree


def parse_body(kind: type[BodyT], tree: Any, strict: bool | None = None) -> BodyT:
    """A parsed JSON body as a ``kind``. The fields in `IGNORED` count as left out. ``strict`` False: texts stand for numbers, as in a
    URL. Raises `FieldError`."""
    if not isinstance(tree, Mapping):
        raise FieldError(None, "the body must be a JSON object", code=None)
    fields = {name: value for name, value in tree.items() if name not in IGNORED}
    try:
        return kind.model_validate(fields, strict=strict)
    except ValidationError as error:
        raise from_validation(error, kind) from None


def from_validation(error: ValidationError, kind: type[BaseModel]) -> FieldError:
    """The first problem that pydantic found. For an unknown field the message names the nearest known one."""
    problem = first_problem(error, kind)
    return FieldError(problem.field, problem.message, "unknown_parameter" if problem.is_unknown else None)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Result of ``work``. Cancels ``work`` and raises `GoneError` as soon as the client disconnects."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise GoneError
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


def cut_connection(send: Send) -> None:
    """Drop the connection behind uvicorn's ``send``, with the data in its buffer.

    ASGI has no message for it. If the application raised, uvicorn would close the transport after its buffer is empty, which never happens
    with a client that does not read. Does nothing behind other servers.
    """
    transport = getattr(getattr(send, "__self__", None), "transport", None)
    if isinstance(transport, asyncio.WriteTransport):
        connection = transport.get_extra_info("socket")
        if connection is not None:  # reset, so that the kernel discards its buffer, too
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()


def bounded(send: Send, timeout_s: float, cut: Callable[[Send], None] = cut_connection) -> Send:
    """``send`` with a time limit: if a client does not read for ``timeout_s`` seconds, calls ``cut`` and raises `GoneError`. The server
    buffers 64 KiB per connection, so this limits the memory of a client that stops reading."""

    async def send_bounded(message: Any) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await send(message)
        except TimeoutError:
            cut(send)
            raise GoneError from None

    return send_bounded
