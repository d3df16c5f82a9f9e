"""The studio: a web page for a conversation about a picture, with the requirements, all versions side by side, and undo.

A process has one conversation. The server keeps it; the page displays ``/state``.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.staticfiles import StaticFiles

from stretto.base.errors import UserError
from stretto.base.paths import replacing, write_json
from stretto.pictures.agent import Dialogue, Reply
from stretto.pictures.backend import png
from stretto.server.limits import ApiError, GoneError, as_api_error, read_json
from stretto.server.server import CONTENT_POLICY
from stretto.tasks.shapes.ledger import Ledger

CONVERSATION_FILE = "conversation.json"
"""File with the conversation, in the folder of the versions."""
_PAGE = Path(__file__).parent / "page"
_MOST_BYTES = 1 << 16
"""Largest body of a turn, in bytes."""


class Studio:
    """A conversation and the function that answers its turns. A turn waits until the one before it has ended."""

    def __init__(self, answer: Callable[..., Reply], out: Path | None = None) -> None:
        """
        Args:
            answer: `respond` with backend, verifier, options and writer bound.
            out: Folder to which every version is written at once.
        """
        self._answer, self._out = answer, out
        self._lock = threading.Lock()
        self._dialogue = Dialogue()
        self._turns: tuple[tuple[str, Reply], ...] = ()
        self._done: float | None = None

    def turn(self, text: str) -> None:
        """Handle a user's turn. Raises as `respond`, and `UserError` where files cannot be written; the conversation is unchanged then."""
        with self._lock:
            self._done = 0.0
            try:
                reply = self._answer(self._dialogue, text, progress=self._progress)
            finally:
                self._done = None
            turns = (*self._turns, (text, reply))
            if self._out is not None:
                num_before = len(self._dialogue.versions)
                for number, version in enumerate(reply.dialogue.versions[num_before:], num_before + 1):
                    with replacing(self._out / f"{number:03}.png") as path:
                        version.picture.save(path, format="PNG")
                write_json(self._out / CONVERSATION_FILE, _state_of(reply.dialogue, turns, None))
            self._dialogue, self._turns = reply.dialogue, turns

    def _progress(self, done: float) -> None:
        self._done = done

    def state(self) -> dict[str, Any]:
        """State of the page as JSON values."""
        return _state_of(self._dialogue, self._turns, self._done)

    def picture(self, number: int) -> bytes:
        """A version as PNG. Raises IndexError: there is no such version."""
        return png(self._dialogue.versions[number].picture)


def _state_of(dialogue: Dialogue, turns: Sequence[tuple[str, Reply]], done: float | None) -> dict[str, Any]:
    shown = dialogue.shown
    return {
        "turns": [{"text": text, "reply": reply.message, "question": reply.is_question} for text, reply in turns],
        "ledger": _lines(dialogue.conversation.now),
        "versions": [
            {
                "prompt": each.prompt,
                "lacks": [fault.says for fault in each.verdict.faults],
                "unchecked": each.verdict.unchecked,
                "images": each.num_images,
            }
            for each in dialogue.versions
        ],
        "shown": None if shown is None else dialogue.versions.index(shown),
        "undoable": len(dialogue.conversation.states) - 1,
        "done": done,
    }


def _lines(ledger: Ledger) -> list[str]:
    things = [f"{'some' if thing.count is None else thing.count} {thing.name}" for thing in ledger.things]
    places = [
        f"{ledger.thing(each.subject).name} {each.kind} {ledger.thing(each.other).name}" for each in ledger.relations
    ]
    rest = [f"no {noun}" for noun in ledger.absent] + [*ledger.medium] + [f"“{text}”" for text in ledger.texts]
    rest += [f"in your words, unchecked: {sentence}" for sentence in ledger.unread]
    return things + places + rest + ([] if ledger.size is None else ["{}×{} pixels".format(*ledger.size)])


def create_studio(studio: Studio) -> Starlette:
    """Application with the page and its three routes. Only requests to 127.0.0.1 and localhost are accepted."""

    def picture(request: Request) -> Response:
        try:
            return Response(studio.picture(request.path_params["number"]), media_type="image/png")
        except IndexError:
            return JSONResponse({"error": "there is no such version"}, 404)

    async def turn(request: Request) -> Response:
        try:
            body = await read_json(request, max_bytes=_MOST_BYTES)
            if not isinstance(body, dict) or not isinstance(text := body.get("text"), str):
                raise ApiError(400, 'send {"text": …}')
            await asyncio.to_thread(studio.turn, text)
        except (ApiError, GoneError, UserError) as error:
            refusal = as_api_error(error)
            return JSONResponse({"error": refusal.message}, refusal.status)
        except RuntimeError as error:  # the backend failed while it painted
            return JSONResponse({"error": f"painting failed: {error}"}, 502)
        return JSONResponse(studio.state())

    routes = [
        Route("/state", lambda request: JSONResponse(studio.state())),
        Route("/pictures/{number:int}.png", picture),
        Route("/turn", turn, methods=["POST"]),
        Route("/{path:path}", _Page(directory=_PAGE, html=True)),
    ]
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"])
    return Starlette(routes=routes, middleware=[hosts])


class _Page(StaticFiles):
    """The page's files, with headers that forbid content from other hosts."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update(
            {
                "content-security-policy": CONTENT_POLICY,
                "x-content-type-options": "nosniff",
                "cache-control": "no-cache",
            }
        )
        return response
