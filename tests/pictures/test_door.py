"""The enhancer's door, in front of a server that is a rule."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest
from pydantic import SecretStr
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from stretto.pictures import door
from stretto.pictures.door import PATH, Door, open_door
from stretto.pictures.enhance import Wording
from stretto.server.limits import CLIENT, GoneError
from stretto.server.server import ServeSettings, key_holders
from stretto.tasks.shapes.fields import EXAMPLE, FIELDS, PLAIN
from stretto.tasks.shapes.rules import read, unkept

REQUEST = "two red cubes left of a blue sphere"
ASKED = {"messages": [{"content": json.dumps({"prompt": REQUEST, "width": 64, "height": 64})}]}


def served(wording: Wording) -> Starlette:
    """Answers a chat with the example, and anything else with what it was sent."""

    async def chat(http: Request) -> JSONResponse:
        assert http.scope[CLIENT], "the model is asked in the turn of the client whose request it is"
        return JSONResponse({"choices": [{"message": {"content": json.dumps(EXAMPLE[1])}}]})

    async def echo(http: Request) -> JSONResponse:
        return JSONResponse(await http.json())

    routes = [Route("/v1/chat/completions", chat, methods=["POST"]), Route(PATH, echo, methods=["POST"])]
    settings = ServeSettings(api_keys=(SecretStr("key"),))
    app = Starlette(routes=routes, middleware=[Middleware(key_holders, settings=settings, pages=())])
    open_door(app, wording)
    return app


def sent(
    *parts: bytes,
    key: str = "key",
    kind: str = "application/json",
    pause_s: float = 0.0,
    wording: Wording = Wording.MODEL,
) -> tuple[httpx.Response, int]:
    """The answer, and how many parts of the body were taken."""
    num = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal num
        for part in parts:
            num += 1
            yield part
            await asyncio.sleep(pause_s)

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(served(wording))
        async with httpx.AsyncClient(base_url="http://localhost", transport=transport) as client:
            headers = {"authorization": f"Bearer {key}", "content-type": kind}
            return await client.post(PATH, content=body(), headers=headers)

    return asyncio.run(ask()), num


def test_a_request_for_a_picture_is_written_out_and_anything_else_goes_on() -> None:
    written, _ = sent(json.dumps(ASKED).encode())
    assert written.status_code == 200 and unkept(read(REQUEST), written.json()["text"]) == ()
    assert written.json()["writer"] == "model" and str(EXAMPLE[1]["lighting"]) in written.json()["text"].lower()
    other = json.dumps({"messages": [{"content": "x" * 200_000}]}).encode()
    for size in (7000, 300_000):
        answer, _ = sent(*(other[at : at + size] for at in range(0, len(other), size)))
        assert answer.json() == json.loads(other)


def test_with_the_suffix_no_model_is_asked() -> None:
    written, _ = sent(json.dumps(ASKED).encode(), wording=Wording.SUFFIX)
    sentences = [REQUEST, *(PLAIN[name] for name in FIELDS[1:])]
    text = " ".join(f"{each[0].upper()}{each[1:]}." for each in sentences)
    assert written.json() == {"text": text, "writer": "suffix"}


def test_what_is_not_announced_as_json_or_no_text_is_left_to_the_server() -> None:
    assert sent(json.dumps(ASKED).encode(), kind="text/plain")[0].json() == ASKED
    for prompt in ("a \ud800 cube", 3, None):
        other = {"messages": [{"content": json.dumps({"prompt": prompt, "width": 64, "height": 64})}]}
        assert sent(json.dumps(other).encode())[0].json() == other


def test_who_goes_away_is_not_written_for() -> None:
    ended: list[str] = []

    async def model(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    async def ask() -> None:
        told = iter([{"type": "http.request", "body": json.dumps(ASKED).encode()}, {"type": "http.disconnect"}])

        async def receive() -> Message:
            return next(told)

        async def send(message: Message) -> None:
            ended.append("answered")

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "path": PATH, "method": "POST", "headers": headers, CLIENT: "here"}
        await Door(model, Wording.MODEL)(scope, receive, send)

    with pytest.raises(GoneError):
        asyncio.run(asyncio.wait_for(ask(), 5))
    assert ended in ([], ["cancelled"])  # it may not have begun


def test_without_a_key_nothing_of_a_body_is_read() -> None:
    refused, num = sent(b" " * 1024, b" " * 1024, key="another")
    assert (refused.status_code, num) == (401, 0)


def test_who_is_late_or_contradicts_himself_is_refused_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = {"messages": [{"content": json.dumps({"prompt": "a red blue cube", "width": 64, "height": 64})}]}
    refused, _ = sent(json.dumps(bad).encode())
    assert refused.status_code == 400 and "red or blue" in refused.json()["error"]["message"]
    monkeypatch.setattr(door, "BODY_TIMEOUT_S", 0.05)
    late, _ = sent(b" ", b" ", pause_s=0.2)
    assert late.status_code == 408
