"""HTTP client of a server that samples, and arrays as text."""

from __future__ import annotations

import base64
import io
import os
import time
from typing import Any

import httpx
import numpy as np

from stretto.base.endpoint import excerpt
from stretto.base.errors import InfraError, UserError, one_line
from stretto.flow.clients import Unavailable

CONNECT_S = 5.0
"""Seconds within which a server accepts a connection, and answers a question about its state."""
_BUSY = (429, 503)


def to_text(array: np.ndarray) -> str:
    """``array`` as base64 of the npy format, for JSON."""
    with io.BytesIO() as file:
        np.save(file, array, allow_pickle=False)
        return base64.b64encode(file.getvalue()).decode()


def from_text(text: str) -> np.ndarray:
    """The array of `to_text`. Raises ValueError: the text is damaged."""
    array: np.ndarray = np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
    return array


class Server:
    """HTTP client of one server. Errors name the server and the remedy."""

    def __init__(self, address: str, engine: str):
        self.address, self.where = address, f"rollout.address: {engine} at {address}"
        key = next(filter(None, os.environ.get("STRETTO_API_KEYS", "").split(",")), None)
        self._options: dict[str, Any] = {
            "base_url": self.address,
            "headers": {} if key is None else {"Authorization": f"Bearer {key}"},
            "timeout": httpx.Timeout(None, connect=CONNECT_S),  # callers have deadlines
            "limits": httpx.Limits(max_connections=None),
            "trust_env": False,  # servers have private addresses, which no proxy knows
        }
        self._client = httpx.AsyncClient(**self._options)

    def ask(self, path: str, wait_s: float = 0.0, body: Any = None, **query: str) -> Any:
        """JSON of a reply to GET, or to POST of ``body``, from a thread. Waits at most ``wait_s`` for the server to answer.
        Raises UserError: as `_checked`, or nothing answers."""
        stop_s = time.monotonic() + wait_s
        with httpx.Client(**self._options | {"timeout": max(CONNECT_S, wait_s)}) as client:
            while True:
                try:
                    method = "GET" if body is None else "POST"
                    return self._checked(client.request(method, path, json=body, params=query), path)
                except (httpx.TransportError, InfraError) as error:
                    if time.monotonic() >= stop_s:
                        remedy = "start the server, raise rollout.start_s if it needs longer, or correct the address"
                        problem = f"does not answer within {wait_s:g} s: {one_line(error)}"
                        raise UserError(f"{self.where}: {problem}; {remedy}") from None
                    time.sleep(0.2)

    async def post(self, path: str, body: Any = None, **query: str) -> Any:
        """JSON of a reply to POST. Raises UserError: as `_checked`. InfraError: the server is busy. Unavailable: it is gone."""
        try:
            reply = await self._client.post(path, json={} if body is None else body, params=query)
        except httpx.TransportError as error:
            raise self._gone(path, error) from error
        return self._checked(reply, path)

    async def get(self, path: str, timeout_s: float) -> Any:
        """JSON of a reply to GET. Raises as `post`; httpx.TimeoutException: no reply in time."""
        try:
            return self._checked(await self._client.get(path, timeout=timeout_s), path)
        except httpx.TimeoutException:
            raise
        except httpx.TransportError as error:
            raise self._gone(path, error) from error

    def _gone(self, path: str, error: Exception) -> Unavailable:
        reason = one_line(error) or type(error).__name__  # a broken connection may have no text
        return Unavailable(f"{self.where}: {path}: no reply: {reason}")

    async def close(self) -> None:
        await self._client.aclose()

    def _checked(self, reply: httpx.Response, path: str) -> Any:
        """JSON of ``reply``. Raises UserError: the server refuses the request or has no such endpoint. InfraError: it is busy."""
        status, problem = reply.status_code, f"{self.where}: {path}: status {reply.status_code}: {excerpt(reply)}"
        if status in _BUSY:
            raise InfraError(problem)
        if status == 404:
            raise UserError(f"{self.where}: has no {path}: another kind of server, or too old, or started without it; "
                            "see docs/CLUSTER.md")  # fmt: skip
        if status == 401:
            raise UserError(f"{self.where}: refuses the key; put its key first in STRETTO_API_KEYS")
        if not reply.is_success:
            raise UserError(problem)
        try:
            return reply.json() if reply.content else None
        except ValueError:
            raise UserError(f"{self.where}: {path}: not JSON: {excerpt(reply)}; name another server") from None
