"""A real uvicorn on a free loopback port, in a thread of the test's process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from bench.common.server import in_thread
from stretto.engine.async_engine import AsyncEngine
from stretto.server.elastic import ServedModel
from stretto.server.server import DrainingServer, ServeSettings, create_app, make_server


@contextmanager
def live(service: AsyncEngine, served: ServedModel, settings: ServeSettings) -> Iterator[tuple[str, DrainingServer]]:
    """Its address and the server; stopped in the end."""
    server = make_server(create_app(service, served, settings))
    with in_thread(server) as url:
        yield url, server
