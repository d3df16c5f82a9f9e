"""A real S3 server on this machine: moto, in this process or in one of its own that can be killed.

moto keeps its objects in memory. The server in a process of its own writes every change to a file before it answers, and reads that file
when it starts, so that a server that was killed has the same objects as before.
"""

from __future__ import annotations

import logging
import os
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from moto.s3.models import s3_backends
from moto.server import ThreadedMotoServer
from werkzeug.serving import make_server

from stretto.runtime.store import UrlStore

KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "secret-of-the-test"}
_ACCOUNT = "123456789012"
"""moto's account for keys that it does not know."""
_START_S = 60.0
"""Longest wait for a server to start, in seconds."""


def url_of(host: str, port: int) -> str:
    """Address of the server for `UrlStore` and for a recipe's ``store``."""
    return f"s3://bucket/runs?endpoint_override=http://{host}:{port}&region=us-east-1&allow_bucket_creation=true"


@contextmanager
def s3_server() -> Iterator[str]:
    """Address for `UrlStore` and for a recipe's ``store``, while the server runs. This process and its children have its keys."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # else it prints every request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    os.environ |= KEYS
    url = url_of(*server.get_host_and_port())
    try:
        UrlStore(url, "first").check()
        yield url
    finally:
        server.stop()


@dataclass(slots=True)
class S3Process:
    """A server in a process of its own, whose objects are in ``disk``. Made by `s3_process`."""

    disk: Path
    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return url_of("127.0.0.1", self.port)

    def start(self) -> None:
        """Start the server and wait until it answers."""
        command = [sys.executable, "-m", "bench.common.s3", str(self.port), str(self.disk)]
        with self.disk.with_suffix(".log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        end_s = time.monotonic() + _START_S
        while not answers("127.0.0.1", self.port):
            assert self.process.poll() is None and time.monotonic() < end_s, f"see {self.disk.with_suffix('.log')}"
            time.sleep(0.1)

    def kill(self) -> None:
        assert self.process is not None, "the server was not started"
        self.process.kill()
        self.process.wait()


@contextmanager
def s3_process(disk: Path) -> Iterator[S3Process]:
    """A server in a process of its own. This process and its later children have its keys."""
    os.environ |= KEYS
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        server = S3Process(disk, probe.getsockname()[1])
    server.start()
    try:
        UrlStore(server.url, "first").check()
        yield server
    finally:
        server.kill()


def answers(host: str, port: int) -> bool:
    """Whether a server listens there."""
    with socket.socket() as sock:
        return sock.connect_ex((host, port)) == 0


class _Durable:
    """moto's application, which answers a change when it is in the file ``disk``."""

    def __init__(self, disk: Path) -> None:
        self._app = DomainDispatcherApplication(create_backend_app)
        self._backend = s3_backends[_ACCOUNT]["aws"]
        self._db = sqlite3.connect(disk, check_same_thread=False, isolation_level=None)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("CREATE TABLE IF NOT EXISTS objects (bucket, name, content, PRIMARY KEY (bucket, name))")
        self._stored: dict[tuple[str, str], Any] = {}
        """moto's own records of the objects in the file. A changed object has another record."""
        self._lock = threading.Lock()
        for bucket, name, content in self._db.execute("SELECT * FROM objects ORDER BY name"):
            if bucket not in self._backend.buckets:
                self._backend.create_bucket(bucket, "us-east-1")
            self._stored[bucket, name] = self._backend.put_object(bucket, name, content, disable_notification=True)

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        answer = list(self._app(environ, start_response))
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            with self._lock:
                self._save()
        return answer

    def _save(self) -> None:
        buckets = self._backend.buckets.items()
        now = {(bucket, name): key for bucket, made in buckets for name, key in list(made.keys.items())}
        for place in self._stored.keys() - now.keys():
            self._db.execute("DELETE FROM objects WHERE bucket = ? AND name = ?", place)
        for place, key in now.items():
            if self._stored.get(place) is not key:
                self._db.execute("REPLACE INTO objects VALUES (?, ?, ?)", (*place, key.value))
        self._stored = now


def main() -> None:
    """Serve at a port, with the objects in a file, until the process is killed."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    port, disk = sys.argv[1:]
    make_server("127.0.0.1", int(port), _Durable(Path(disk)), True, request_handler=MotoRequestHandler).serve_forever()


if __name__ == "__main__":
    main()
