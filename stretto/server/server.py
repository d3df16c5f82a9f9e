"""The application and the server process: settings, routes, access checks, and a shutdown that finishes open streams."""

from __future__ import annotations

import asyncio
import errno
import logging
import re
import resource
import socket
import time
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import uvicorn
from pydantic import AfterValidator, Field, SecretStr
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from stretto.base.config import Config
from stretto.base.errors import UserError
from stretto.engine.async_engine import AsyncEngine
from stretto.server.access_log import logged
from stretto.server.completions import read_chat, read_completion, read_short_chat
from stretto.server.elastic import Resolver, ServedModel
from stretto.server.generate import Backend, Generate
from stretto.server.info import Info
from stretto.server.limits import (
    CLIENT,
    KNOWN_ERRORS,
    ApiError,
    Gate,
    as_api_error,
    bounded,
    check_host,
    check_key,
    client_of,
)
from stretto.server.metrics import Metrics
from stretto.server.openapi import document
from stretto.server.responses import read_response

PLAYGROUND = Path(__file__).parent / "playground"
"""Folder of the playground. The server serves the files that are there at its start."""
CONTENT_POLICY = "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; img-src 'self' data:"
"""Content-Security-Policy: pages load nothing from other sites and run no inline scripts."""
_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "content-security-policy": CONTENT_POLICY,
}
_PAGE_HEADERS = {"cache-control": "no-cache"}
_HEAD_S = 30
"""Time limit for the head of a request, from the opening of the connection or the end of the last answer, seconds."""
_MAX_HEAD_BYTES = 1 << 16
_MAX_FILES = 1 << 16
"""Number of open files that the process requests from the system."""
DRAIN_S = 60.0
"""Time limit for open requests after SIGTERM, seconds."""
_ERRORS_ONLY = logging.getLogger("uvicorn.error.connections")
"""Log of connections without uvicorn's warnings: clients could fill the log with malformed requests."""
_LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")
_HOST_NAME = re.compile(r"[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]")
_ORIGIN = re.compile(r"\*|https?://([A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\])(:\d{1,5})?")


def _check_host_name(name: str) -> str:
    if not _HOST_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a host name; write it without scheme and port: api.example.org")
    return name.lower()


def _check_origin(origin: str) -> str:
    if not _ORIGIN.fullmatch(origin):
        raise ValueError(f"{origin!r} is not an origin; write scheme and host: https://example.org, or * for all")
    return origin.lower()  # browsers send it so


class ServeSettings(Config):
    """Settings of a server."""

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    """0: any free port."""
    api_keys: tuple[SecretStr, ...] = ()
    """Keys of the API; empty: no key is needed."""
    admin_key: SecretStr | None = None
    """Key of the paths below /admin; None: these paths do not exist."""
    allowed_hosts: tuple[Annotated[str, AfterValidator(_check_host_name)], ...] = ()
    """Accepted names in Host headers, beside the loopback names. If empty, a server on a loopback address accepts the loopback names only
    (against DNS rebinding, by which a web page could reach it), and a server on another address accepts all names."""
    cors_origins: tuple[Annotated[str, AfterValidator(_check_origin)], ...] = ()
    """Web origins whose pages may call the API."""
    max_open: int = Field(default=2048, gt=0)
    """Largest number of open HTTP requests; further ones get status 429. There may be twice as many connections."""
    max_wait_s: float = Field(default=120.0, gt=0)
    """Time limit for the engine to accept a request, from the arrival of the body, seconds; then the status is 503."""
    send_timeout_s: float = Field(default=30.0, gt=0)
    """Time limit for a client to read what was sent, seconds; then its request is aborted."""
    access_log: bool = False
    """Write a line to stderr at the end of each request (`stretto.server.access_log`)."""
    tool_chars: int | None = Field(default=None, ge=100)
    """Number of characters of a tool result that the model sees: its beginning and its end. None: all of it."""
    floor: str | None = None
    """Smallest Subnet under load: a preset or ``layers=…,experts=…,top_k=…``. None: the size does not depend on the load."""
    first_token_s: float = Field(default=2.0, gt=0)
    """Time to first token above which, with a floor, new requests get smaller Subnets, seconds. At the floor, requests that would wait
    longer are refused."""

    def hosts(self) -> tuple[str, ...] | None:
        """Accepted host names without port; None: all."""
        return (*_LOOPBACK, *self.allowed_hosts) if self.allowed_hosts or self.host in _LOOPBACK else None

    def exposure(self) -> str | None:
        """A warning if other machines can use the API without a key; else None."""
        if self.host in _LOOPBACK or self.api_keys:
            return None
        names = "" if self.allowed_hosts else " under any host name"
        return (
            f"--host {self.host} without an API key: every machine that reaches this port{names} can use the whole API; "
            "set --api-key or STRETTO_API_KEYS, and --allowed-host"
        )


def create_app(service: AsyncEngine, model: ServedModel, settings: ServeSettings) -> Starlette:
    """The application of a running engine. Its `Gate` is ``app.state.gate``. Raises `UserError` for a default Subnet or a floor that the
    network does not have."""
    gate = Gate(settings.max_open)
    resolver = Resolver(model, settings.floor, settings.first_token_s)
    metrics = Metrics(gate, resolver.control)
    backend = Backend(service, model, resolver, gate, metrics, settings.max_wait_s, settings.tool_chars)
    static = StaticFiles(directory=PLAYGROUND, html=True)
    with_admin = settings.admin_key is not None
    pages = ["/", *(f"/{file.name}" for file in PLAYGROUND.iterdir())]
    routes = [
        Route("/v1/chat/completions", Generate(backend, read_chat), methods=["POST"]),
        Route("/v1/completions", Generate(backend, read_completion), methods=["POST"]),
        Route("/v1/responses", Generate(backend, read_response), methods=["POST"]),
        Route("/api/ernie-5.1/chat", Generate(backend, read_short_chat), methods=["POST"]),
        *Info(backend).routes(with_admin),
        Route("/openapi.json", lambda http: JSONResponse(document(with_admin))),
        *(Route(path, static, methods=["GET"]) for path in pages),
    ]
    paths = [route.path for route in routes]
    middleware = [Middleware(entrance, hosts=settings.hosts(), pages=pages, paths=paths, metrics=metrics)]
    if origins := settings.cors_origins:  # outside of `key_holders`: CORS preflights carry no key
        middleware.append(Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]))
    middleware.append(Middleware(key_holders, settings=settings, pages=pages))
    app = Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers=dict.fromkeys((*KNOWN_ERRORS, HTTPException), failed),
    )
    app.state.gate, app.state.service, app.state.settings = gate, service, settings
    return app


def entrance(
    app: ASGIApp, hosts: Sequence[str] | None, pages: Collection[str], paths: Collection[str], metrics: Metrics | None
) -> ASGIApp:
    """The outermost middleware: checks the host (not for /health), adds headers for browsers, and counts the answers in ``metrics``, if any."""

    async def enter(scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        known = path if path in paths else "other"  # clients must not create labels of the metrics

        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                if metrics is not None:
                    metrics.requests.labels(known, str(message["status"])).inc()
                headers = MutableHeaders(scope=message)
                for name, value in (_HEADERS | _PAGE_HEADERS if path in pages else _HEADERS).items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            if path != "/health":  # probes ask by address
                check_host(Headers(scope=scope).get("host"), hosts)
        except ApiError as error:
            await error.response()(scope, receive, send_counted)
        else:
            await app(scope, receive, send_counted)

    return enter


def key_holders(app: ASGIApp, settings: ServeSettings, pages: Collection[str]) -> ASGIApp:
    """The innermost middleware: checks keys (``pages`` and /health need none) and answers unexpected errors."""
    admin_keys = [settings.admin_key] if settings.admin_key else []

    async def enter(scope: Scope, receive: Receive, send: Send) -> None:
        path, has_begun = scope["path"], False

        async def send_observed(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            if path not in pages and path != "/health":
                given = Headers(scope=scope).get("authorization")
                check_key(given, admin_keys if path.startswith("/admin/") else settings.api_keys)
                scope[CLIENT] = client_of(scope, bool(settings.api_keys))
            await app(scope, receive, send_observed)
        except Exception as error:
            # Here, because Starlette's own error middleware lies outside of `entrance` and its headers and counts.
            if not has_begun:
                await as_api_error(error).response()(scope, receive, send)
            if not isinstance(error, KNOWN_ERRORS):
                raise  # into the log

    return enter


async def failed(http: HttpRequest, error: Exception) -> Response:
    """The answer to an exception that a handler raises."""
    if isinstance(error, HTTPException):
        known = {404: f"there is no {http.url.path} here", 405: f"{http.method} is not for {http.url.path}"}
        error = ApiError(error.status_code, known.get(error.status_code, error.detail), headers=error.headers)
    return as_api_error(error).response()


class DrainingServer(uvicorn.Server):
    """A uvicorn server that drains: after the first signal, open requests finish and new ones get status 503. After a second signal, or if
    the engine is dead, it stops at once."""

    def __init__(self, config: uvicorn.Config, gate: Gate, service: AsyncEngine) -> None:
        super().__init__(config)
        self._gate, self._service = gate, service
        self._deadline_s = float("inf")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by uvicorn for SIGINT and SIGTERM."""
        if self._gate.is_draining:
            super().handle_exit(sig, frame)
        else:
            self._gate.is_draining = True
            self._deadline_s = time.monotonic() + DRAIN_S

    async def on_tick(self, counter: int) -> bool:
        """Whether to stop. Called by uvicorn ten times a second."""
        is_done = self._gate.is_draining and (self._gate.num_open == 0 or time.monotonic() > self._deadline_s)
        if is_done or self._service.error is not None:
            self.should_exit = True
        return await super().on_tick(counter)


class PatientConnection(HttpToolsProtocol):
    """uvicorn's connection with limits for idle clients and for requests that never end.

    The head of a request has a time limit and a largest size; uvicorn has neither once a byte has arrived. If there are too many
    connections, the one that has been idle for longest is closed.
    """

    def __init__(self, *, idle: dict[PatientConnection, float], max_connections: int, **options: Any) -> None:
        """``idle``: the connections without a request, and since when, oldest first. All connections share this table."""
        super().__init__(**options)
        self.logger = _ERRORS_ONLY
        self._idle, self._max_connections = idle, max_connections
        self._num_head_bytes: int | None = None  # of an incomplete head

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._rest()
        if len(self.connections) > self._max_connections:
            oldest = next(iter(self._idle))
            del self._idle[oldest]
            oldest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._idle.pop(self, None)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_head_bytes = 0

    def on_headers_complete(self) -> None:
        self._num_head_bytes = None
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._num_head_bytes is not None:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > _MAX_HEAD_BYTES:
                self.transport.abort()
        if self.cycle is not None and not self.cycle.response_complete:
            self._idle.pop(self, None)
        elif self in self._idle and not self.transport.is_closing():  # further bytes do not extend the time limit
            self._close_at(self._idle[self] + _HEAD_S)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.pipeline:
            self._rest()

    def _rest(self) -> None:
        if not self.transport.is_closing():
            self._idle[self] = self.loop.time()
            self._close_at(self._idle[self] + _HEAD_S)

    def _close_at(self, time_s: float) -> None:
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_at(time_s, self.timeout_keep_alive_handler)


def open_socket(host: str, port: int) -> socket.socket:
    """A listening socket. Open it before the checkpoint is read, so that a port in use is reported at once (`UserError`)."""
    if not 0 <= port <= 65535:
        raise UserError(f"--port {port}: must be 0 to 65535; 0 is any free one")
    is_ipv6 = ":" in host
    family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
    try:
        opened = socket.create_server((host, port), family=family, backlog=2048, dualstack_ipv6=is_ipv6)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(f"--port {port}: in use on {host}; choose another, or 0 for any free one") from None
        raise UserError(f"--host {host}, --port {port}: cannot listen there: {error}; choose another") from None
    # `create_server` sets no protocol number, and asyncio sets TCP_NODELAY only on sockets whose protocol is TCP.
    return socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=opened.detach())


def make_server(app: Starlette) -> DrainingServer:
    """The server process of ``app``. ``run(sockets=[…])`` returns when the open requests have finished, or when the engine is dead
    (`AsyncEngine.error`)."""
    settings: ServeSettings = app.state.settings
    served = logged(app) if settings.access_log else app

    async def outermost(scope: Scope, receive: Receive, send: Send) -> None:
        # Outside of all middleware, because `bounded` needs uvicorn's own ``send``.
        await served(scope, receive, bounded(send, settings.send_timeout_s))

    config = uvicorn.Config(
        outermost,
        http=partial(PatientConnection, idle={}, max_connections=min(2 * settings.max_open, _file_limit() // 2)),  # type: ignore[arg-type]
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        lifespan="off",
        timeout_graceful_shutdown=5,  # seconds after the drain, before open connections are cut
    )
    _ERRORS_ONLY.setLevel(logging.ERROR)  # after the configuration, which resets the levels of uvicorn's loggers
    return DrainingServer(config, app.state.gate, app.state.service)


def _file_limit() -> int:
    """Number of files and connections that this process may open, after raising its limit as far as allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return _MAX_FILES if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted
