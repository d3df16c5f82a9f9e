"""A real uvicorn on a free loopback port, in a thread of the test's process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from stretto.engine.async_engine import AsyncEngine
from stretto.serve.elastic import ServedModel
from stretto.serve.server import DrainingServer, ServeSettings, create_app, make_server, open_socket


@contextmanager
def live(service: AsyncEngine, served: ServedModel, settings: ServeSettings) -> Iterator[tuple[str, DrainingServer]]:
    """Its address and the server; stopped in the end."""
    listening = open_socket("127.0.0.1", 0)
    server = make_server(create_app(service, served, settings))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", server
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()
