"""Reaching a Ray cluster, or hearing soon that there is none."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import ray

from stretto.base.errors import UserError

_CONNECT_S = 10.0
"""For a cluster to answer."""


async def connect(address: str, options: Mapping[str, Any]) -> None:
    """`ray.init`, which may wait for a cluster for minutes, in a thread that can be left to it."""
    if address == "local":
        # In this thread: the kernel kills a cluster's processes together with the thread that started them.
        failed = _init(options)
        if failed is not None:
            raise UserError(f"--address local: Ray starts no cluster here ({failed}); use --runtime local")
        return
    problem: str | None = "it does not answer"
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdecimal():
        try:
            await asyncio.to_thread(lambda: socket.create_connection((host, int(port)), _CONNECT_S / 2).close())
        except OSError as error:
            raise _unreachable(address, error.strerror or str(error)) from None
    loop = asyncio.get_running_loop()
    done: asyncio.Future[str | None] = loop.create_future()

    def tell(failed: str | None) -> None:
        if not done.done():
            done.set_result(failed)

    def run() -> None:
        failed = _init(options)
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(tell, failed)

    threading.Thread(target=run, name="ray.init", daemon=True).start()
    with suppress(TimeoutError):
        problem = await asyncio.wait_for(done, _CONNECT_S)
    if problem is not None:
        raise _unreachable(address, problem)


def _init(options: Mapping[str, Any]) -> str | None:
    """Why it failed, on one line; None: it did not."""
    try:
        ray.init(**options)
    except Exception as error:  # Ray has no one class for it
        return str(error).strip().partition("\n")[0] or type(error).__name__
    return None


def _unreachable(address: str, problem: str) -> UserError:
    return UserError(
        f"--address {address}: no Ray cluster answers there ({problem}); start one with `ray start --head`, "
        f"or run without one: --runtime local"
    )
