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
from typing import Any

import uvicorn
from pydantic import Field, SecretStr, field_validator
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
"""The page; the files that lie there at the start are served by name, and no others."""
CONTENT_POLICY = "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; img-src 'self' data:"
"""Pages load nothing from elsewhere and run no inline script."""
_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "content-security-policy": CONTENT_POLICY,
}
_PAGE_HEADERS = {"cache-control": "no-cache"}
_HEAD_S = 30
"""For the head of a request to be whole, after its connection was made or the last answer ended."""
_MAX_HEAD_BYTES = 1 << 16
_MOST_FILES = 1 << 16
"""Asked of the system."""
DRAIN_S = 60.0
"""For open requests to finish after SIGTERM."""
_ERRORS_ONLY = logging.getLogger("uvicorn.error.connections")
"""Log of connections without uvicorn's warnings: clients could fill the log with malformed requests."""
_LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")
_HOST_NAME = re.compile(r"[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]")
_ORIGIN = re.compile(r"\*|https?://([A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\])(:\d{1,5})?")


class ServeSettings(Config):
    """What a server is told before it starts."""

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    """0: any free one."""
    api_keys: tuple[SecretStr, ...] = ()
    """None: whoever reaches the port may ask."""
    admin_key: SecretStr | None = None
    """Opens /admin; without one there is no such path."""
    allowed_hosts: tuple[str, ...] = ()
    """Names in Host headers that are answered, beside the loopback names. None given: on a loopback address only the loopback
    names (against DNS rebinding: a web page must not reach the server under a name of its own), on another address all."""
    cors_origins: tuple[str, ...] = ()
    max_open: int = Field(default=2048, gt=0)
    """HTTP requests worked on at once; a further one is told to come back. Connections may be twice as many."""
    max_wait_s: float = Field(default=120.0, gt=0)
    """For the engine to take a request whose body is there; then it is told to come back."""
    send_timeout_s: float = Field(default=30.0, gt=0)
    """For a client to take what was sent; then its request is aborted."""
    tool_chars: int | None = Field(default=None, ge=100)
    """Characters shown to the model of what a tool gave, its beginning and its end; None: all, and what does not fit is refused."""
    floor: str | None = None
    """Smallest Subnet under load: a preset or ``layers=…,experts=…,top_k=…``. None: no elasticity under load."""
    first_token_s: float = Field(default=2.0, gt=0)
    """With a floor: times to first token above it shrink new requests' Subnets; on the floor, who would wait longer is
    refused."""

    @field_validator("allowed_hosts")
    @classmethod
    def _check_hosts(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if not _HOST_NAME.fullmatch(name):
                raise ValueError(f"{name!r} is not a host name; write it without scheme and port: api.example.org")
        return tuple(name.lower() for name in names)

    @field_validator("cors_origins")
    @classmethod
    def _check_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"{origin!r} is not an origin; write scheme and host: https://example.org, or * for all"
                )
        return origins

    def hosts(self) -> tuple[str, ...] | None:
        """Host names answered (without port), or None for all."""
        return (*_LOOPBACK, *self.allowed_hosts) if self.allowed_hosts or self.host in _LOOPBACK else None

    def exposure(self) -> str | None:
        """A warning for a server that other machines reach without a key; None for any other server."""
        if self.host in _LOOPBACK or self.api_keys:
            return None
        names = "" if self.allowed_hosts else " under any host name"
        return (
            f"--host {self.host} without an API key: every machine that reaches this port{names} can use the whole API; "
            "set --api-key or STRETTO_API_KEYS, and --allowed-host"
        )


def create_app(service: AsyncEngine, model: ServedModel, settings: ServeSettings) -> Starlette:
    """The application over a running ``service``; its `Gate` is ``app.state.gate``. Raises `UserError` for a default
    Subnet or a floor that is none of this network."""
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
    if origins := settings.cors_origins:  # before keys: a browser asks without one whether it may send it
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
    app: ASGIApp, hosts: Sequence[str] | None, pages: Collection[str], paths: Collection[str], metrics: Metrics
) -> ASGIApp:
    """The outermost layer: host, headers for browsers, and the count of answers."""

    async def enter(scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        known = path if path in paths else "other"  # a label must not grow with what clients make up

        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                metrics.requests.labels(known, str(message["status"])).inc()
                headers = MutableHeaders(scope=message)
                for name, value in (_HEADERS | _PAGE_HEADERS if path in pages else _HEADERS).items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            check_host(Headers(scope=scope).get("host"), hosts)
        except ApiError as error:
            await error.response()(scope, receive, send_counted)
        else:
            await app(scope, receive, send_counted)

    return enter


def key_holders(app: ASGIApp, settings: ServeSettings, pages: Collection[str]) -> ASGIApp:
    """The innermost layer: lets in who shows a key (``pages`` and /health need none), and answers for what breaks."""
    admin_keys = [settings.admin_key] if settings.admin_key else []

    async def enter(scope: Scope, receive: Receive, send: Send) -> None:
        path, has_begun = scope["path"], False

        async def send_noted(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            if path not in pages and path != "/health":
                given = Headers(scope=scope).get("authorization")
                check_key(given, admin_keys if path.startswith("/admin/") else settings.api_keys)
                scope[CLIENT] = client_of(scope, bool(settings.api_keys))
            await app(scope, receive, send_noted)
        except Exception as error:
            # Here and not in Starlette's own outermost layer, which neither counts nor knows what browsers want.
            if not has_begun:
                await as_api_error(error).response()(scope, receive, send)
            if not isinstance(error, KNOWN_ERRORS):
                raise  # into the log

    return enter


async def failed(http: HttpRequest, error: Exception) -> Response:
    """The answer to what a handler raises."""
    if isinstance(error, HTTPException):
        known = {404: f"there is no {http.url.path} here", 405: f"{http.method} is not for {http.url.path}"}
        error = ApiError(error.status_code, known.get(error.status_code, error.detail), headers=error.headers)
    return as_api_error(error).response()


class DrainingServer(uvicorn.Server):
    """A uvicorn that, told to stop, first lets open requests finish while new ones get a 503; told twice, it stops. With
    a dead engine it stops at once."""

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
        """Called by uvicorn ten times a second; whether to stop."""
        is_done = self._gate.is_draining and (self._gate.num_open == 0 or time.monotonic() > self._deadline_s)
        if is_done or self._service.error is not None:
            self.should_exit = True
        return await super().on_tick(counter)


class PatientConnection(HttpToolsProtocol):
    """uvicorn's connection, made for clients that open many and say nothing, or begin a request and never end it.

    The head of a request has to be whole in time and has a largest size (uvicorn waits for ever once a byte has come, and
    keeps all that comes), and where there are too many connections, the one that has been idle for longest makes room.
    """

    def __init__(self, *, idle: dict[PatientConnection, float], most: int, **given: Any) -> None:
        """``idle``: connections on which no request is being answered, and since when, oldest first; all share it."""
        super().__init__(**given)
        self.logger = _ERRORS_ONLY
        self._idle, self._most = idle, most
        self._num_head_bytes: int | None = None  # of a head that is not whole yet

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._rest()
        if len(self.connections) > self._most:
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
        elif self in self._idle and not self.transport.is_closing():  # what has come does not extend the time
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
    """A listening socket, opened before a checkpoint is read so that a taken port is told at once (`UserError`)."""
    is_ipv6 = ":" in host
    family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
    try:
        made = socket.create_server((host, port), family=family, backlog=2048, dualstack_ipv6=is_ipv6)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(f"--port {port}: in use on {host}; choose another, or 0 for any free one") from None
        raise UserError(f"--host {host}, --port {port}: cannot listen there: {error}; choose another") from None
    # That function leaves the protocol open, connections inherit it, and asyncio sets TCP_NODELAY only where it says TCP.
    return socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=made.detach())


def make_server(app: Starlette) -> DrainingServer:
    """The process's server around ``app``; ``run(sockets=[…])`` returns when open requests have finished, or the engine
    is dead (`AsyncEngine.error` says so)."""
    settings: ServeSettings = app.state.settings

    async def outermost(scope: Scope, receive: Receive, send: Send) -> None:
        # Outside of all middleware: only here is ``send`` the one of uvicorn itself.
        await app(scope, receive, bounded(send, settings.send_timeout_s))

    config = uvicorn.Config(
        outermost,
        http=partial(PatientConnection, idle={}, most=min(2 * settings.max_open, _free_files() // 2)),  # type: ignore[arg-type]
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        lifespan="off",
        timeout_graceful_shutdown=5,  # what is still open when the drain has ended is cut
    )
    _ERRORS_ONLY.setLevel(logging.ERROR)  # after the configuration, which resets the levels of uvicorn's loggers
    return DrainingServer(config, app.state.gate, app.state.service)


def _free_files() -> int:
    """How many files and connections this process may have open, after asking for as many as it is allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return _MOST_FILES if soft == resource.RLIM_INFINITY else soft
