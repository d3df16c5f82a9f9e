"""The application and the process: routes, doors, and a shutdown that lets open streams finish."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from stretto.base.errors import UserError
from stretto.engine.async_engine import AsyncEngine as Service
from stretto.engine.async_engine import Closed, EngineFailed
from stretto.engine.request import QueueFull
from stretto.serve.door import Door, error_response
from stretto.serve.errors import ApiError
from stretto.serve.generate import Generate, Shared, Waiting, as_api_error
from stretto.serve.info import Handler, Info
from stretto.serve.limits import CUT, Gate, GoneError, Keys, connection_cutter
from stretto.serve.metrics import Metrics
from stretto.serve.openai import Desk
from stretto.serve.phases import Chooser
from stretto.serve.readers import readers
from stretto.serve.settings import ServedModel, ServeSettings

PLAYGROUND = Path(__file__).parent / "playground"
"""The page; its files are served by name, and no others."""


def create_app(
    service: Service,
    model: ServedModel,
    settings: ServeSettings,
    *,
    clock: Callable[[], float] = time.monotonic,
    playground: Path = PLAYGROUND,
) -> FastAPI:
    """The application over a running ``service``. Its `Gate` is ``app.state.gate``.

    Raises:
        UserError: the default Subnet or the floor is none of this network.
    """
    chooser = Chooser(model, settings, clock)
    gate = Gate(settings.max_open)
    metrics = Metrics(gate)
    shared = Shared(service, settings, chooser, gate, Waiting(chooser.control, clock), metrics)
    desk = Desk(model, settings, chooser)
    info = Info(shared, desk, model)
    # No generated documentation: its pages load scripts from elsewhere, and bodies are read by hand to bound them.
    app = FastAPI(title="Stretto", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.gate = gate
    routes = [Route(path, Generate(shared, reader), methods=["POST"]) for path, reader in readers(desk).items()]
    routes += [Route(path, handler, methods=["GET"]) for path, handler in info.gets().items()]
    routes += [Route(path, handler, methods=["POST"]) for path, handler in info.posts().items()]
    pages = _pages(playground)
    routes += [Route(path, _file(file), methods=["GET"]) for path, file in pages.items()]
    app.router.routes.extend(routes)
    for kind in (ApiError, UserError, QueueFull, Closed, EngineFailed):
        app.add_exception_handler(kind, _failed)
    app.add_exception_handler(GoneError, _failed)
    app.add_exception_handler(HTTPException, _not_here)
    app.add_exception_handler(Exception, _broken)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.cors_origins, allow_methods=["*"], allow_headers=["*"]
        )
    app.add_middleware(
        Door,
        keys=Keys(settings.api_keys),
        admin_keys=Keys([settings.admin_key] if settings.admin_key else []),
        hosts=settings.hosts(),
        open_paths={"/health", *pages},
        known_paths={route.path for route in routes},
        metrics=metrics,
    )
    return app


def _pages(folder: Path) -> dict[str, Path]:
    """Path -> file of the page, found when the app is made."""
    files = {f"/{path.relative_to(folder).as_posix()}": path for path in sorted(folder.rglob("*")) if path.is_file()}
    return files | ({"/": files["/index.html"]} if "/index.html" in files else {})


def _file(path: Path) -> Handler:
    async def send_file(http: HttpRequest) -> Response:
        return FileResponse(path, headers={"cache-control": "no-cache"})

    return send_file


async def _failed(http: HttpRequest, error: Exception) -> Response:
    return error_response(ApiError(499, "gone") if isinstance(error, GoneError) else as_api_error(error))


async def _not_here(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = http.url.path
    known = {404: f"there is no {path} here", 405: f"{http.method} is not for {path}"}
    return error_response(
        ApiError(error.status_code, known.get(error.status_code, error.detail), headers=error.headers)
    )


async def _broken(http: HttpRequest, error: Exception) -> Response:
    # What went wrong is in the log (the server raises on); a stranger is told nothing of our inside.
    return error_response(ApiError(500, "internal error; the server's log says more"))


class DrainingServer(uvicorn.Server):
    """A uvicorn that, told to stop, first lets open requests finish while new ones get a 503; told twice, it stops."""

    def __init__(self, config: uvicorn.Config, gate: Gate, drain_timeout_s: float) -> None:
        super().__init__(config)
        self._gate = gate
        self._drain_timeout_s = drain_timeout_s
        self._deadline_s = float("inf")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by uvicorn for SIGINT and SIGTERM."""
        if self._gate.is_draining:
            super().handle_exit(sig, frame)
            return
        self._gate.is_draining = True
        self._deadline_s = time.monotonic() + self._drain_timeout_s

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second; whether to stop."""
        if self._gate.is_draining and (self._gate.num_open == 0 or time.monotonic() > self._deadline_s):
            self.should_exit = True
        return await super().on_tick(counter)


def open_socket(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        UserError: the port is in use or not ours to open, or there is no such address.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(2048)
    except (OSError, OverflowError) as error:
        listening.close()
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise UserError(f"--port {port}: in use on {host}; choose another, or 0 for any free one") from None
        raise UserError(f"--host {host}, --port {port}: cannot listen there: {error}; choose another") from None
    return listening


def serve(app: FastAPI, settings: ServeSettings, listening: socket.socket, *, log_level: str = "warning") -> None:
    """Serve ``app`` until told to stop; returns when open requests have finished. The caller closes its service.

    Args:
        listening: from `open_socket`, opened before the checkpoint is read so that a taken port is told at once.
    """
    make_server(app, settings, log_level).run(sockets=[listening])


def make_server(app: FastAPI, settings: ServeSettings, log_level: str = "warning") -> DrainingServer:
    """The process's server around ``app``."""

    async def cuttable(scope: Scope, receive: Receive, send: Send) -> None:
        # Outside of all middleware: only here is ``send`` the one of uvicorn itself.
        scope[CUT] = connection_cutter(send)
        await app(scope, receive, send)

    config = uvicorn.Config(
        cuttable,
        log_level=log_level,
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_keep_alive=30,
        timeout_graceful_shutdown=5,  # what is still open when the drain has ended is cut
    )
    return DrainingServer(config, app.state.gate, settings.drain_timeout_s)
