"""A small asynchronous client of this server, for the load generator and the chat command. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import httpx

_NO_LIMIT = httpx.Limits(max_connections=None, max_keepalive_connections=None)


class ApiFailure(RuntimeError):  # noqa: N818 - what the server says, not our fault
    """The server answered with an error."""

    def __init__(self, status: int, message: str, code: str | None, retry_after_s: float | None) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message
        self.code = code
        self.retry_after_s = retry_after_s
        """When to come back; None: the server does not say."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One chunk of a stream. Written by `Client.stream`."""

    text: str
    index: int = 0
    """Which choice."""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    finish_reason: str | None = None
    usage: Mapping[str, Any] | None = None
    """On the last piece."""
    raw: Mapping[str, Any] = field(default_factory=dict)
    """The chunk as it came."""


class Client:
    """Speaks to one server. Use it as a context manager."""

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        timeout_s: float = 600.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._http = httpx.AsyncClient(
            base_url=url,
            headers=headers,
            timeout=httpx.Timeout(timeout_s, connect=10.0),
            limits=_NO_LIMIT,  # a load generator must not queue inside itself
            transport=transport,
            trust_env=False,  # a proxy has no business between this and a local server
        )

    async def get(self, path: str) -> Any:
        """The JSON at ``path``.

        Raises:
            ApiFailure: the server answered with an error. httpx.TransportError: it did not answer.
        """
        return _checked(await self._http.get(path))

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON answer to ``body``; raises as `get` does."""
        return _checked(await self._http.post(path, json=body))

    async def chat(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> Any:
        """A whole chat completion."""
        return await self.post("/v1/chat/completions", {"messages": list(messages), **fields})

    async def complete(self, prompt: str | Sequence[int], **fields: Any) -> Any:
        """A whole completion of a text or of token ids."""
        return await self.post("/v1/completions", {"prompt": _plain(prompt), **fields})

    def stream_chat(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> AsyncIterator[Piece]:
        """A chat completion as it comes; the last piece carries the usage."""
        return self.stream("/v1/chat/completions", {"messages": list(messages), **fields})

    def stream_completion(self, prompt: str | Sequence[int], **fields: Any) -> AsyncIterator[Piece]:
        """A completion as it comes; the last piece carries the usage."""
        return self.stream("/v1/completions", {"prompt": _plain(prompt), **fields})

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[Piece]:
        """Pieces of a streamed answer. Closing the iterator closes the connection, and so aborts the request.

        Raises:
            ApiFailure: the server answered with an error, at once or in the midst.
        """
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        async with self._http.stream("POST", path, json=body) as response:
            if response.status_code >= 400:
                await response.aread()
            _check(response)
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    return
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise _failure(response, chunk["error"])
                for piece in _pieces(chunk):
                    yield piece
        raise ApiFailure(502, "the stream broke off before its end", None, None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()


def _plain(prompt: str | Sequence[int]) -> str | list[int]:
    return prompt if isinstance(prompt, str) else list(prompt)


def _pieces(chunk: Mapping[str, Any]) -> list[Piece]:
    if not chunk["choices"]:
        return [Piece("", usage=chunk.get("usage"), raw=chunk)]
    pieces = []
    for choice in chunk["choices"]:
        logprobs = choice.get("logprobs") or {}
        values = logprobs.get("token_logprobs") or [entry["logprob"] for entry in logprobs.get("content") or []]
        pieces.append(
            Piece(
                text=choice["text"] if "text" in choice else choice["delta"].get("content") or "",
                index=choice["index"],
                token_ids=tuple(choice.get("token_ids") or ()),
                logprobs=tuple(values),
                finish_reason=choice.get("finish_reason"),
                raw=chunk,
            )
        )
    return pieces


def _checked(response: httpx.Response) -> Any:
    _check(response)
    return response.json()


def _check(response: httpx.Response) -> None:
    if response.status_code < 400:
        return
    try:
        error = response.json()["error"]
    except (ValueError, KeyError, TypeError):
        error = {"message": response.text[:200]}
    raise _failure(response, error)


def _failure(response: httpx.Response, error: Mapping[str, Any]) -> ApiFailure:
    wait = response.headers.get("retry-after", "")
    status = response.status_code if response.status_code >= 400 else 500
    return ApiFailure(status, str(error.get("message")), error.get("code"), float(wait) if wait.isdecimal() else None)
