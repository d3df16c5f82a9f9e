"""Clients of remote HTTP servers: retries for temporary errors, a `UserError` for permanent ones, and a chat model."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import httpx
from pydantic import Field, field_validator

from stretto.base.config import Config
from stretto.base.errors import UserError, one_line

_TEMPORARY: Final = (408, 409, 425, 429)
"""Client errors that are worth a retry: timeout, conflict, too early, too many requests."""
KEY_ENV: Final = "OPENAI_API_KEY"
_MODELS_TIMEOUT_S = 20.0
"""Timeout of a request to ``/models``."""
_NO_TIME = "no time is left for the answer"
_PAUSE_S = 0.5
"""Pause before the first retry; it doubles with every further one."""


class ChatConfig(Config):
    """A model behind ``/chat/completions`` of this package's server, vLLM, SGLang, llama.cpp or a provider."""

    url: str = Field(pattern=r"^https?://")
    """Base address, ``/v1`` included."""
    model: str
    key_env: str = KEY_ENV
    """Environment variable that holds the API key, if the server needs one."""
    at_once: int = Field(default=8, gt=0)
    """Largest number of concurrent requests of one process and source."""
    timeout_s: float = Field(default=20.0, gt=0)
    """Timeout of one request."""
    retries: int = Field(default=2, ge=0)
    """Number of retries of a request that failed or whose answer does not have the form that was asked for."""
    body: dict[str, Any] = Field(default_factory=lambda: {"temperature": 0.0, "max_tokens": 1024})
    """Further fields of the request body."""

    @field_validator("url")
    @classmethod
    def _is_address(cls, url: str) -> str:
        try:
            httpx.URL(url)
        except httpx.InvalidURL as error:
            raise ValueError(f"{error}; write http://127.0.0.1:8000/v1") from None
        return url


class Unanswered(RuntimeError):  # noqa: N818 - data, not a fault
    """A server did not answer in any try."""


def patiently(
    send: Callable[[], httpx.Response], where: str, remedy: str, *, tries: int, pause_s: float, stop_s: float = math.inf
) -> Any:
    """Send a request until it succeeds; returns the parsed JSON of the reply.

    Args:
        where: start of the message of a `UserError`; ``remedy`` is its end.
        tries: largest number of tries.
        pause_s: pause after the first failed try; it doubles after each further one.
        stop_s: time on `time.monotonic` after which there are no more pauses.

    Raises:
        UserError: the server rejects the request with a permanent error.
        Unanswered: no try succeeded.
    """
    problem = ""
    for attempt in range(tries):
        if attempt:
            time.sleep(max(0.0, min(pause_s * 2 ** (attempt - 1), stop_s - time.monotonic())))
        try:
            reply = send()
            if reply.is_success:
                return reply.json()
            problem = f"{reply.status_code}: {excerpt(reply)}"
        except (httpx.HTTPError, ValueError, RecursionError) as error:  # RecursionError: JSON nested too deeply
            problem = one_line(f"{type(error).__name__}: {error}")
            continue
        if reply.is_client_error and reply.status_code not in _TEMPORARY:
            raise UserError(f"{where}: {problem}; {remedy}")
    raise Unanswered(problem)


def excerpt(reply: httpx.Response) -> str:
    """The start of a reply's text, on one line."""
    text = one_line(reply.text[:200])
    return "a page of HTML, so no such API" if text.lower().startswith(("<!doctype html", "<html")) else text


class Chat:
    """Client of a chat model. Thread-safe."""

    def __init__(self, config: ChatConfig, where: str) -> None:
        """``where``: start of error messages, such as the recipe's table of this model."""
        self._config, self._where = config, where
        self._client = httpx.Client(base_url=config.url, headers=key_header(config.key_env), timeout=config.timeout_s)
        self._slots = threading.Semaphore(config.at_once)

    def said(self, messages: Sequence[Mapping[str, Any]], stop_s: float = math.inf) -> str:
        """The text of a completion; empty where the reply has none. Raises as `patiently` does; no try starts after ``stop_s``, a
        time on `time.monotonic`. Half of a surrogate pair, which cannot be stored or sent again, becomes a question mark.
        """
        config = self._config

        def send() -> httpx.Response:
            wait_s = None if stop_s == math.inf else max(0.0, stop_s - time.monotonic())
            if not self._slots.acquire(timeout=wait_s):
                raise httpx.PoolTimeout(_NO_TIME)
            try:
                body = {"model": config.model, **config.body, "messages": messages}
                return self._post(body, min(config.timeout_s, stop_s - time.monotonic()))
            finally:
                self._slots.release()

        remedy = "check url, model, key and body"
        reply = patiently(send, self._where, remedy, tries=config.retries + 1, pause_s=_PAUSE_S, stop_s=stop_s)
        try:
            return str(reply["choices"][0]["message"]["content"] or "").encode(errors="replace").decode()
        except (KeyError, IndexError, TypeError):
            return ""

    def _post(self, body: Mapping[str, Any], timeout_s: float) -> httpx.Response:
        """The reply to ``body``. httpx limits only the pauses within a reply, and some servers send blank lines until the answer is there. So
        ``timeout_s`` also limits the time of a reply whose body trickles in; headers that trickle in may take longer."""
        end_s, parts = time.monotonic() + timeout_s, list[bytes]()
        if timeout_s <= 0:
            raise httpx.PoolTimeout(_NO_TIME)
        with self._client.stream("POST", "chat/completions", json=body, timeout=timeout_s) as reply:
            for part in reply.iter_bytes():
                parts.append(part)
                if time.monotonic() > end_s:
                    raise httpx.ReadTimeout(f"the reply is not complete after {timeout_s:.3g} s")
        return httpx.Response(reply.status_code, content=b"".join(parts))

    def close(self) -> None:
        self._client.close()


def key_header(key_env: str = KEY_ENV) -> dict[str, str]:
    """The header with the API key in the environment variable ``key_env``; none without a key."""
    key = os.environ.get(key_env)
    return {"authorization": f"Bearer {key}"} if key else {}


def served_name(url: str) -> str:
    """Name of the first model that the server at ``url`` lists. Raises `UserError`: the server does not list its models."""
    try:
        reply = httpx.get(f"{url.rstrip('/')}/models", headers=key_header(), timeout=_MODELS_TIMEOUT_S)
        return str(reply.json()["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, IndexError, TypeError) as error:
        raise UserError(
            f"{url}: cannot list its models: {type(error).__name__}; start the server, or give the model's name"
        ) from None
