"""Prompt enhancer at `/api/ernie-5.1/chat`: handles requests of diffusers' prompt enhancer, and passes all others on to the server.

With `Wording.SUFFIX` the model is not asked. A request belongs to the enhancer if its last message is the JSON that diffusers sends:
``prompt``, ``width`` and ``height``.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, Final

import httpx
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stretto.pictures.enhance import Wording, enhance, suffixed
from stretto.server.client import ApiFailure, Client
from stretto.server.limits import BODY_TIMEOUT_S, CLIENT, ApiError, announces_json, late_body, while_connected

PATH: Final = "/api/ernie-5.1/chat"
_MOST_BYTES = 1 << 16
"""Largest body, in bytes, that is searched for a request. Requests for pictures are short."""


def open_door(app: Starlette, wording: Wording) -> None:
    """Add the enhancer to ``app``, which has not started yet, as its innermost middleware: behind access checks, metrics and error handlers."""
    app.user_middleware.append(Middleware(Door, wording=wording))


class Door:
    """ASGI middleware. It asks the model through the server's own routes, so the server's limits and sizes apply."""

    def __init__(self, app: ASGIApp, wording: Wording) -> None:
        self._app, self._wording = app, wording

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_asked = scope["type"] == "http" and scope["path"] == PATH and scope["method"] == "POST"
        if not is_asked or not announces_json(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        messages: list[Message] = []
        body = b""
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                while len(body) <= _MOST_BYTES:
                    messages.append(await receive())
                    body += messages[-1].get("body", b"")
                    if messages[-1]["type"] != "http.request" or not messages[-1].get("more_body"):
                        break
        except TimeoutError:
            raise late_body() from None
        if (asked := _asked(body)) is not None:
            answer = await while_connected(receive, self._enhanced(scope[CLIENT], *asked))
            await answer(scope, receive, send)
            return
        left = iter(messages)

        async def replay() -> Message:
            return next(left, None) or await receive()

        await self._app(scope, replay, send)

    async def _enhanced(self, client_id: str, fields: Mapping[str, Any], request: Mapping[str, Any]) -> Response:
        """``client_id``: client of the request, in whose turn the model is asked. The access checks that set it are not passed again."""
        if self._wording is Wording.SUFFIX:
            return JSONResponse({"text": suffixed(request["prompt"]).prompt, "writer": self._wording})

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await self._app({**scope, CLIENT: client_id}, receive, send)

        async with Client("http://localhost", transport=httpx.ASGITransport(app)) as client:

            async def ask(body: Mapping[str, Any]) -> Any:
                return await client.chat({**body, **fields})

            try:
                enhanced = await enhance(ask, request["prompt"], request["width"], request["height"])
            except ApiFailure as failure:
                raise ApiError(failure.status, failure.message) from None
        return JSONResponse({"text": enhanced.prompt, "writer": enhanced.writer})


def _asked(body: bytes) -> tuple[dict[str, Any], Mapping[str, Any]] | None:
    """Sampling options and the request for a picture in a body; None: the body is not a request of the enhancer."""
    try:
        tree = json.loads(body)
        request = json.loads(tree["messages"][-1]["content"])
        request["prompt"].encode()  # a lone surrogate is not a character and cannot be encoded
        has_size = all(type(request[side]) is int for side in ("width", "height"))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        return None
    if not has_size or len(request) != 3:
        return None
    return {name: tree[name] for name in ("temperature", "seed", "elastic") if tree.get(name) is not None}, request
