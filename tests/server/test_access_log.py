"""Access log: requests are answered whatever happens to stderr."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, suppress

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from stretto.server.access_log import logged


def new_app() -> ASGIApp:
    return logged(Starlette(routes=[Route("/health", lambda request: PlainTextResponse("ok"))]))


def answers(app: ASGIApp, num: int) -> list[int]:
    """Statuses of ``num`` requests, all of which must be answered within some seconds."""

    async def inside() -> list[int]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return [(await client.get("/health")).status_code for _ in range(num)]

    statuses: list[int] = []
    thread = threading.Thread(target=lambda: statuses.extend(asyncio.run(inside())), daemon=True)
    thread.start()
    thread.join(60)
    return statuses


@contextmanager
def unread() -> Iterator[tuple[int, int]]:
    """A pipe in place of stderr: the end to read, which does not block, and the end that the server writes to."""
    source, target = os.pipe()
    os.set_blocking(source, False)
    try:
        with os.fdopen(target, "w", buffering=1) as stderr, redirect_stderr(stderr):
            yield source, target
    finally:
        os.close(source)


@pytest.mark.slow
def test_a_pipe_that_nobody_reads_does_not_stop_the_server() -> None:
    app = new_app()
    with unread() as (source, target):
        statuses = answers(app, 2000)
        os.set_blocking(target, False)
        warning = b"w" * (16 << 10)
        num_written = os.write(target, warning) if statuses else 0
        written = os.read(source, 1 << 20).decode()
        later = answers(app, 2)
        written_later = os.read(source, 1 << 20).decode()
    assert statuses == [200] * 2000 and later == [200] * 2
    assert num_written == len(warning), "room for warnings and errors"
    lines = written.rstrip("w").splitlines()
    assert 100 < len(lines) < 2000 and all(" GET /health 200 total_s=" in line for line in lines)
    said, *lines_later = written_later.splitlines()
    match = re.fullmatch(r"\S+ (\d+) requests are not in this log: stderr was not read", said)
    assert match is not None and int(match[1]) == 2000 - len(lines)
    assert len(lines_later) == 2 and all(" GET /health 200 total_s=" in line for line in lines_later)


def test_without_a_stderr_requests_are_answered() -> None:
    """As after ``2>&-``, where Python has None in its place, and after its owner has closed it."""
    with redirect_stderr(None):
        assert answers(new_app(), 1) == [200]
    with unread(), suppress(ValueError):
        sys.stderr.close()
        assert answers(new_app(), 1) == [200]


def test_a_reader_that_has_ended_does_not_end_requests() -> None:
    with unread() as (source, _):
        nowhere = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nowhere, source)
        os.close(nowhere)
        assert answers(new_app(), 3) == [200] * 3
