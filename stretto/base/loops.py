"""From a thread to an event loop, which may be closed by then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


def from_thread(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any) -> None:
    """Have ``loop`` call ``function``; a closed loop has nobody left to tell."""
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        if not loop.is_closed():
            raise


def settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    """Give ``future`` its end, unless it has one."""
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
