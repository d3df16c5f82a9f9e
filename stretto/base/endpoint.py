"""Servers elsewhere that are asked over HTTP: what is worth another try, and what is the user's to mend."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, Final

import httpx

from stretto.base.errors import UserError

_PASSING: Final = (408, 409, 425, 429)
"""Refusals that another try may not meet: too late, too early, too many."""


class Unanswered(RuntimeError):  # noqa: N818 - data, not a fault
    """A server did not answer, however often it was asked."""


def patiently(
    send: Callable[[], httpx.Response], where: str, remedy: str, *, tries: int, pause_s: float, stop_s: float = math.inf
) -> Any:
    """The JSON of the reply to ``send``, asked for again after ``pause_s`` and then twice as long each time.

    Args:
        where: what the message of a refusal begins with; it ends with ``remedy``.
        stop_s: on `time.monotonic`: no pause lasts longer.

    Raises:
        UserError: the server refuses, and no other try would mend it.
        Unanswered: none of so many tries had a reply.
    """
    problem = ""
    for attempt in range(tries):
        if attempt:
            time.sleep(max(0.0, min(pause_s * 2 ** (attempt - 1), stop_s - time.monotonic())))
        try:
            reply = send()
            if reply.is_success:
                return reply.json()
            problem = f"{reply.status_code}: {' '.join(reply.text[:200].split())}"
        except (httpx.HTTPError, ValueError) as error:
            problem = " ".join(f"{type(error).__name__}: {error}".split())
            continue
        if reply.is_client_error and reply.status_code not in _PASSING:
            raise UserError(f"{where}: {problem}; {remedy}")
    raise Unanswered(problem)
