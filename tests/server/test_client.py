"""The load generator against the app in this process, and what it makes of what it saw."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from stretto.server.client import PERCENTILES, ApiFailure, Client, Load, LoadResult, Seen, run_load
from stretto.server.generate import sse


def loaded(connect: Any, load: Load) -> LoadResult:
    """``load`` sent to a fresh app."""

    async def send() -> LoadResult:
        async with connect() as http, Client("http://test", transport=httpx.ASGITransport(http.app)) as client:
            return await run_load(client, load)

    return asyncio.run(send())


def test_percentiles_are_over_all_clients() -> None:
    seen = (Seen(0.1, 51, 1.1), Seen(0.2, 51, 3.2))
    result = LoadResult(seen, {"429: busy": 3}, wall_s=4.0)
    assert PERCENTILES == (50, 95, 99)
    # numpy's own rule: linear between the two nearest of the sorted values
    assert result.between_tokens_ms() == pytest.approx([40.0, 58.0, 59.6])
    assert result.first_token_ms() == pytest.approx([150.0, 195.0, 199.0])
    assert (result.tokens_per_s, result.requests_per_s) == (25.5, 0.5)


def test_nothing_seen_has_no_percentiles() -> None:
    result = LoadResult((), {"ConnectError": 2}, wall_s=1.0)
    assert result.first_token_ms() == result.between_tokens_ms() == []
    assert result.tokens_per_s == 0


@pytest.mark.parametrize("rate", [None, 200.0])
def test_every_token_of_every_client_is_counted(connect: Any, rate: float | None) -> None:
    load = Load(num_requests=6, concurrency=3, prompts=[(5, 6, 7), (8, 9)], max_tokens=7, rate=rate, model="x:half")
    result = loaded(connect, load)
    assert result.errors == {} and len(result.seen) == 6
    for seen in result.seen:
        assert seen.num_tokens == 7
        assert 0 < seen.first_token_s <= seen.total_s
        assert seen.first_token_s + 6 * (seen.between_tokens_s or 0) == pytest.approx(seen.total_s)
    assert result.tokens_per_s == pytest.approx(42 / result.wall_s)


def test_tokens_that_arrive_in_one_read_are_not_timed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0

    async def reads() -> AsyncIterator[bytes]:
        nonlocal now_s
        for num in (1, 5, 5, 10):  # a token every 3 ms
            now_s += 0.003 * num
            yield b"".join(b'data: {"choices": [{"text": "a", "token_ids": [5]}]}\n\n' for _ in range(num))
        yield b"data: [DONE]\n\n"

    async def send() -> LoadResult:
        async with Client(
            "http://test", transport=httpx.MockTransport(lambda _: httpx.Response(200, content=reads()))
        ) as client:
            return await run_load(client, Load(1, 1, [(5, 6)], max_tokens=21))

    monkeypatch.setattr("stretto.server.client.time.perf_counter", lambda: now_s)
    result = asyncio.run(send())
    assert result.errors == {} and result.seen[0].num_tokens == 21
    assert result.between_tokens_ms() == pytest.approx([3.0] * 3)


def test_no_more_are_open_than_asked_for(connect: Any) -> None:
    """Of an app that lets two in, three at once lose some; two never."""

    async def send(concurrency: int) -> LoadResult:
        async with (
            connect(max_open=2) as http,
            Client("http://test", transport=httpx.ASGITransport(http.app)) as client,
        ):
            return await run_load(client, Load(8, concurrency, [(5, 6, 7)], max_tokens=12))

    assert asyncio.run(send(2)).errors == {}
    crowded = asyncio.run(send(8))
    assert sum(crowded.errors.values()) + len(crowded.seen) == 8
    assert crowded.errors and all(reason.startswith("429") for reason in crowded.errors)


def test_errors_are_counted_by_what_they_say(connect: Any) -> None:
    result = loaded(connect, Load(5, 2, [(5, 6), (9999,)], max_tokens=3))
    assert len(result.seen) == 3
    (reason,) = result.errors
    assert result.errors[reason] == 2 and reason.startswith("400") and "9999" in reason


@pytest.mark.parametrize("url", ["http://test", "http://test/", "http://test/v1", "http://test/v1/"])
def test_an_address_may_end_in_v1(url: str) -> None:
    async def ask() -> Any:
        transport = httpx.MockTransport(lambda request: httpx.Response(200, json=str(request.url)))
        async with Client(url, transport=transport) as client:
            return await client.get("/v1/models")

    assert asyncio.run(ask()) == "http://test/v1/models"


@pytest.mark.parametrize("answer", ["<p>hello</p>", "[]", '{"choices": []}', '{"choices": [{"message": "hello"}]}'])
def test_what_is_no_chat_api_is_a_failure(answer: str) -> None:
    async def ask() -> Any:
        transport = httpx.MockTransport(lambda request: httpx.Response(200, text=answer))
        async with Client("http://test", transport=transport) as client:
            return await client.chat({"messages": []})

    with pytest.raises(ApiFailure, match="502: the server has no chat API"):
        asyncio.run(ask())


@pytest.mark.parametrize("end", ["\n\n", ""])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_lines_of_a_stream_end_at_a_line_feed_only(size: int, end: str) -> None:
    """A text may have other characters at which Python's `str.splitlines` divides, here as another server writes them."""
    text = "a\x85\u2028é\u2029🙂"
    chunk = json.dumps({"choices": [{"text": text}]}, ensure_ascii=False)
    raw = f"data: {chunk}\r\n\r\ndata: [DONE]{end}".encode()

    async def reads() -> AsyncIterator[bytes]:
        for start in range(0, len(raw), size):
            yield raw[start : start + size]

    async def streamed() -> list[str]:
        transport = httpx.MockTransport(lambda request: httpx.Response(200, content=reads()))
        async with Client("http://test", transport=transport) as client:
            return [piece.text async for piece in client.stream_completion("x")]

    assert asyncio.run(streamed()) == [text]


def test_a_stream_has_no_character_at_which_a_client_may_break_its_lines() -> None:
    payload = {"text": "a\x85\u2028é\u2029🙂"}
    written = sse(payload).decode()
    assert written.splitlines() == [written.strip(), ""] and "é🙂" in written.replace("\\u2029", "")
    assert json.loads(written.removeprefix("data: ")) == payload
