"""A judge behind real HTTP with scripted replies."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.web import serving

Said = Callable[[dict[str, Any]], str | int | None]


@contextmanager
def judging(said: Said) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server on a free port; yields its address and the requests that it received. ``said`` returns a reply's text, an error status, or
    None: no reply for a second."""
    asked: list[dict[str, Any]] = []
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None: ...

        def do_GET(self) -> None:  # the list of models
            self._answer(200, {"data": [{"id": "double"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(body | {"path": self.path, "key": self.headers.get("Authorization")})
            text = said(body)
            if text is None:
                over.wait(1.0)
            status = text if isinstance(text, int) else 200
            self._answer(status, {"choices": [{"message": {"role": "assistant", "content": text}}]})

        def _answer(self, status: int, tree: dict[str, Any]) -> None:
            content = json.dumps(tree).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    with serving(Handler) as url:
        try:
            yield f"{url}/v1", asked
        finally:
            over.set()


def question(body: dict[str, Any]) -> str:
    return str(body["messages"][0]["content"])


def shown(body: dict[str, Any]) -> list[str]:
    """The texts between the tags: the request, then the answers."""
    mark = question(body).split("<", 1)[1].split(">", 1)[0]
    return [part.split(f"\n</{mark}>")[0] for part in question(body).split(f"<{mark}>\n")[1:]]
