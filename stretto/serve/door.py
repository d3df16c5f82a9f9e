"""The outermost layer of the app: host, key, headers for browsers, and the count of answers."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stretto.serve.errors import ApiError
from stretto.serve.limits import Keys, check_host
from stretto.serve.metrics import Metrics

CONTENT_POLICY = "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; img-src 'self' data:"
"""Pages load nothing from elsewhere and run no inline script."""


class Door:
    """Lets a request in, or answers it right here. Everything needs a key but the paths named as open."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: Keys,
        admin_keys: Keys,
        hosts: Sequence[str] | None,
        open_paths: Collection[str],
        known_paths: Collection[str],
        metrics: Metrics,
    ) -> None:
        self._app = app
        self._keys = keys
        self._admin_keys = admin_keys
        self._hosts = hosts
        self._open_paths = open_paths
        self._known_paths = known_paths
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path: str = scope["path"]
        known = path if path in self._known_paths else "other"  # a label must not grow with what clients make up

        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.requests.labels(known, str(message["status"])).inc()
                headers = MutableHeaders(raw=message.setdefault("headers", []))
                message["headers"] = headers.raw
                headers.setdefault("x-content-type-options", "nosniff")
                headers.setdefault("referrer-policy", "no-referrer")
                headers.setdefault("content-security-policy", CONTENT_POLICY)
            await send(message)

        try:
            self._check(path, Headers(scope=scope))
        except ApiError as error:
            await error_response(error)(scope, receive, send_counted)
            return
        await self._app(scope, receive, send_counted)

    def _check(self, path: str, headers: Headers) -> None:
        check_host(headers.get("host"), self._hosts)
        if path.startswith("/admin/"):
            self._admin_keys.check(headers.get("authorization"))
        elif path not in self._open_paths:
            self._keys.check(headers.get("authorization"))


def error_response(error: ApiError) -> Response:
    """``error`` in OpenAI's form."""
    return JSONResponse(error.body(), status_code=error.status, headers=error.headers)
