"""The enhancer behind `/api/ernie-5.1/chat`: a last message that is diffusers' input of a prompt enhancer is written out; any other is
answered by the server as before."""

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

from stretto.pictures.enhance import enhance
from stretto.server.client import ApiFailure, Client
from stretto.server.limits import BODY_TIMEOUT_S, ApiError, announces_json, late_body, while_connected

PATH: Final = "/api/ernie-5.1/chat"
_MOST_BYTES = 1 << 16
"""Of a body that is looked into: requests for pictures are short."""


def open_door(app: Starlette) -> None:
    """Put the enhancer into ``app``, before it starts: behind all that lets in, counts and answers for failures."""
    app.user_middleware.append(Middleware(Door))


class Door:
    """The innermost middleware. The model is asked through the routes behind it, so limits and sizes are the server's own."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_asked = scope["type"] == "http" and scope["path"] == PATH and scope["method"] == "POST"
        if not is_asked or not announces_json(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        came: list[Message] = []
        body = b""
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                while len(body) <= _MOST_BYTES:
                    came.append(await receive())
                    body += came[-1].get("body", b"")
                    if came[-1]["type"] != "http.request" or not came[-1].get("more_body"):
                        break
        except TimeoutError:
            raise late_body() from None
        if (asked := _asked(body)) is not None:
            answer = await while_connected(receive, self._written(*asked))
            await answer(scope, receive, send)
            return
        left = iter(came)

        async def again() -> Message:
            return next(left, None) or await receive()

        await self._app(scope, again, send)

    async def _written(self, fields: Mapping[str, Any], request: Mapping[str, Any]) -> Response:
        async with Client("http://localhost", transport=httpx.ASGITransport(self._app)) as client:

            async def ask(body: Mapping[str, Any]) -> Any:
                return await client.chat({**body, **fields})

            try:
                made = await enhance(ask, request["prompt"], request["width"], request["height"])
            except ApiFailure as failure:
                raise ApiError(failure.status, failure.message) from None
        return JSONResponse({"text": made.prompt})


def _asked(body: bytes) -> tuple[dict[str, Any], Mapping[str, Any]] | None:
    """What of a body goes on to the model, and the request for a picture in it; None: there is none."""
    try:
        tree = json.loads(body)
        request = json.loads(tree["messages"][-1]["content"])
        request["prompt"].encode()  # no half of a surrogate pair, which is no character
        given = all(type(request[side]) is int for side in ("width", "height"))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        return None
    if not given or len(request) != 3:
        return None
    return {name: tree[name] for name in ("temperature", "seed", "elastic") if tree.get(name) is not None}, request
