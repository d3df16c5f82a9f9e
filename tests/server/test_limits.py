from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest
from pydantic import SecretStr
from starlette.requests import Request
from starlette.types import Message

from stretto.server.limits import (
    ApiError,
    Gate,
    GoneError,
    bounded,
    check_host,
    check_key,
    client_of,
    parse_json,
    read_json,
    while_connected,
)


def test_clients_share_a_turn_by_key_or_by_address() -> None:
    def client(key: str, has_keys: bool) -> str:
        headers = [(b"authorization", f"Bearer {key}".encode())]
        return client_of({"type": "http", "client": ("10.0.0.7", 5000), "headers": headers}, has_keys)

    assert client("one", True) == client("one", True) != client("other", True)
    assert client("one", False) == client("other", False) == "10.0.0.7", "an invented key brings no turn of its own"


def test_keys() -> None:
    keys = [SecretStr("one"), SecretStr("zwei ü")]
    check_key("Bearer one", keys)
    check_key("bearer  zwei ü", keys)
    for wrong in (None, "", "one", "Basic one", "Bearer", "Bearer on", "Bearer one2", "Bearer \udcff"):
        with pytest.raises(ApiError) as caught:
            check_key(wrong, keys)
        assert caught.value.status == 401
    check_key(None, [])


@pytest.mark.parametrize("header", ["localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:8000", "[::1]"])
def test_loopback_names(header: str) -> None:
    check_host(header, ("localhost", "127.0.0.1", "[::1]"))


@pytest.mark.parametrize("header", [None, "", "evil.example:8000", "localhost.evil.example", "127.0.0.1.example"])
def test_other_names_are_refused(header: str | None) -> None:
    with pytest.raises(ApiError, match="host"):
        check_host(header, ("localhost", "127.0.0.1", "[::1]"))
    check_host(header, None)


def test_the_gate_counts_and_closes() -> None:
    gate = Gate(2)
    with gate.enter(), gate.enter():
        with pytest.raises(ApiError) as caught:
            gate.enter().__enter__()
        assert caught.value.status == 429 and caught.value.headers["Retry-After"] == "1"
        gate.is_draining = True
    assert gate.num_open == 0
    with pytest.raises(ApiError) as caught:
        gate.enter().__enter__()
    assert caught.value.status == 503


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b'{"a": "\xff"}', "not UTF-8: byte 7 is 0xff"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b"[" * 200_000, "nested more than 128 levels deep"),
        (b"[" * 129 + b"]" * 129, "nested more than 128 levels deep"),
        (b"", "not JSON"),
        (b'{"a": 1' + b"0" * 5000 + b"}", "not JSON"),
    ],
)
def test_bad_json(raw: bytes, problem: str) -> None:
    with pytest.raises(ApiError, match=problem) as caught:
        parse_json(raw)
    assert caught.value.status == 400 and "\n" not in caught.value.message


def test_good_json() -> None:
    assert parse_json('{"a": "é \\ud83d\\ude42"}'.encode()) == {"a": "é 🙂"}
    parse_json(b'{"a":' * 128 + b"1" + b"}" * 128)


def body(pieces: list[bytes], headers: dict[str, str], wait_s: float = 0.0) -> Request:
    """A request whose body arrives in pieces, ``wait_s`` apart."""
    left = list(pieces)

    async def receive() -> Message:
        await asyncio.sleep(wait_s)
        piece = left.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(left)}

    listed = {"content-type": "application/json", **headers}
    raw = [(name.encode(), value.encode()) for name, value in listed.items()]
    return Request({"type": "http", "method": "POST", "path": "/", "headers": raw}, receive)


def read(request: Request, timeout_s: float = 5.0) -> object:
    return asyncio.run(read_json(request, max_bytes=100, timeout_s=timeout_s))


def test_a_body_in_pieces() -> None:
    assert read(body([b'{"a"', b": 1}", b""], {})) == {"a": 1}


@pytest.mark.parametrize("headers", [{"content-length": "101"}, {}])
def test_a_body_too_large_is_refused_unparsed(headers: dict[str, str]) -> None:
    with pytest.raises(ApiError) as caught:  # it is no JSON either, which nobody looked at
        read(body([b"x" * 60, b"x" * 41], headers))
    assert caught.value.status == 413


def test_the_gate_bounds_what_all_bodies_take() -> None:
    gate = Gate(max_open=2, max_body_bytes=12)

    async def admitted(pieces: list[bytes]) -> int:
        async with gate.admit(body(pieces, {})) as (tree, _):
            assert tree == [1, 1] and gate.num_open == 1
            held = gate.num_body_bytes
            with pytest.raises(ApiError) as caught:
                async with gate.admit(body([b"[1,", b"1 ", b" ]"], {})):
                    pytest.fail("admitted")
            assert caught.value.status == 429 and gate.num_body_bytes == held
            return held

    assert asyncio.run(admitted([b"[1,", b"1 ", b"]"])) == 6
    assert (gate.num_open, gate.num_body_bytes) == (0, 0)


def test_a_sender_that_asks_first_is_refused_at_once() -> None:
    with pytest.raises(ApiError) as caught:
        read(body([], {"content-length": "101", "expect": "100-continue"}))
    assert caught.value.status == 413


def test_a_slow_body() -> None:
    with pytest.raises(ApiError) as caught:
        read(body([b"{", b"}"], {}, wait_s=0.2), timeout_s=0.05)
    assert caught.value.status == 408


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_other_content_types(kind: str) -> None:
    with pytest.raises(ApiError) as caught:
        read(body([b"{}"], {"content-type": kind}))
    assert caught.value.status == 415


def test_work_is_cancelled_when_the_client_goes() -> None:
    cancelled = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    async def receive() -> Message:
        await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    async def run() -> None:
        with pytest.raises(GoneError):
            await while_connected(receive, work())
        assert cancelled.is_set()

    asyncio.run(run())


def test_work_returns_and_raises_through() -> None:
    async def receive() -> Message:
        await asyncio.sleep(60)
        raise AssertionError

    async def work(error: Exception | None) -> str:
        if error:
            raise error
        return "done"

    assert asyncio.run(while_connected(receive, work(None))) == "done"
    with pytest.raises(KeyError):
        asyncio.run(while_connected(receive, work(KeyError("x"))))


def test_a_client_that_stops_reading_is_cut() -> None:
    cut: list[bool] = []
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)
        await asyncio.sleep(0 if len(sent) < 3 else 60)

    async def run(send: Callable) -> None:
        while True:
            await send({"type": "http.response.body", "body": b"", "more_body": True})

    with pytest.raises(GoneError):
        asyncio.run(run(bounded(send, 0.05, lambda _: cut.append(True))))
    assert len(sent) == 3 and cut == [True]


def test_errors_are_json() -> None:
    error = ApiError(404, "no", param="model", code="model_not_found")
    assert json.loads(json.dumps(error.body())) == {
        "error": {"message": "no", "type": "not_found_error", "param": "model", "code": "model_not_found"}
    }
