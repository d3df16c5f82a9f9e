"""A real S3 server on this machine."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from moto.server import ThreadedMotoServer

from stretto.runtime.store import UrlStore


@contextmanager
def s3_server() -> Iterator[str]:
    """Address for `UrlStore` and for a recipe's ``store``, while the server runs. This process and its children have its keys."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # else it prints every request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    os.environ |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "secret-of-the-test"}
    host, port = server.get_host_and_port()
    url = f"s3://bucket/runs?endpoint_override=http://{host}:{port}&region=us-east-1&allow_bucket_creation=true"
    try:
        UrlStore(url, "first").check()
        yield url
    finally:
        server.stop()
