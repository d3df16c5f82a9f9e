"""Servers elsewhere that are asked over HTTP: what is worth another try, and what is the user's to mend."""

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

_PASSING: Final = (408, 409, 425, 429)
"""Refusals that another try may not meet: too late, too early, too many."""


KEY_ENV: Final = "OPENAI_API_KEY"
_NAME_S = 20.0
"""For a server to say what it serves."""
_PAUSE_S = 0.5
"""Before the second try of a request; each is twice the one before."""


class ChatConfig(Config):
    """A model behind ``/chat/completions``: of this package's server, vLLM, SGLang, llama.cpp or a provider."""

    url: str = Field(pattern=r"^https?://")
    """Up to and with ``/v1``."""
    model: str
    key_env: str = KEY_ENV
    """Environment variable that holds the key, if the server wants one."""
    at_once: int = Field(default=8, gt=0)
    """Requests in flight of one process and source."""
    timeout_s: float = Field(default=20.0, gt=0)
    """Of one request."""
    retries: int = Field(default=2, ge=0)
    """Of one request that failed, or was not answered in the form asked for."""
    body: dict[str, Any] = Field(default_factory=lambda: {"temperature": 0.0, "max_tokens": 1024})
    """The rest of a request."""

    @field_validator("url")
    @classmethod
    def _is_address(cls, url: str) -> str:
        try:
            httpx.URL(url)
        except httpx.InvalidURL as error:
            raise ValueError(f"{error}; write http://127.0.0.1:8000/v1") from None
        return url


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
            problem = f"{reply.status_code}: {excerpt(reply)}"
        except (httpx.HTTPError, ValueError) as error:
            problem = one_line(f"{type(error).__name__}: {error}")
            continue
        if reply.is_client_error and reply.status_code not in _PASSING:
            raise UserError(f"{where}: {problem}; {remedy}")
    raise Unanswered(problem)


def excerpt(reply: httpx.Response) -> str:
    """The beginning of what it says, on one line."""
    text = one_line(reply.text[:200])
    return "a page of HTML, so no such API" if text.lower().startswith(("<!doctype html", "<html")) else text


class Chat:
    """A model that is asked, by several threads."""

    def __init__(self, config: ChatConfig, where: str) -> None:
        """``where``: what messages about it begin with."""
        self._config, self._where = config, where
        self._client = httpx.Client(base_url=config.url, headers=_key(config.key_env), timeout=config.timeout_s)
        self._slots = threading.Semaphore(config.at_once)

    def said(self, messages: Sequence[Mapping[str, Any]], stop_s: float = math.inf) -> str:
        """The text of a completion; empty where the reply holds none. Raises as `patiently`; after ``stop_s``, on
        `time.monotonic`, nothing is tried any more."""
        config = self._config

        def send() -> httpx.Response:
            left_s = min(config.timeout_s, stop_s - time.monotonic())
            wait_s = None if stop_s == math.inf else max(0.0, stop_s - time.monotonic())
            if left_s <= 0 or not self._slots.acquire(timeout=wait_s):
                raise httpx.PoolTimeout("its time for an answer is over")
            try:
                body = {"model": config.model, **config.body, "messages": messages}
                return self._client.post("chat/completions", json=body, timeout=left_s)
            finally:
                self._slots.release()

        remedy = "check url, model, key and body"
        reply = patiently(send, self._where, remedy, tries=config.retries + 1, pause_s=_PAUSE_S, stop_s=stop_s)
        try:
            return str(reply["choices"][0]["message"]["content"] or "")
        except (KeyError, IndexError, TypeError):
            return ""

    def close(self) -> None:
        self._client.close()


def _key(key_env: str) -> dict[str, str]:
    key = os.environ.get(key_env)
    return {"authorization": f"Bearer {key}"} if key else {}


def served_name(url: str) -> str:
    """Of the first model at an address. Raises `UserError`: nobody answers there."""
    try:
        reply = httpx.get(f"{url.rstrip('/')}/models", headers=_key(KEY_ENV), timeout=_NAME_S)
        return str(reply.json()["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, IndexError, TypeError) as error:
        raise UserError(
            f"{url}: says no name of a model: {type(error).__name__}; start the judge there, or give its name"
        ) from None
