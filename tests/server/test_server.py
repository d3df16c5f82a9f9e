"""The process: clients that go, stall or send too much, a shutdown in the midst, a port that is taken; and our client."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from stretto.base.errors import UserError
from stretto.engine.async_engine import AsyncEngine
from stretto.server.client import ApiFailure, Client
from stretto.server.elastic import ServedModel
from stretto.server.server import ServeSettings, create_app, open_socket
from tests.server.live import live

USER = [{"role": "user", "content": "Hello"}]
LONG = {"messages": USER, "max_tokens": 400, "ignore_eos": True}
PATH = "/v1/chat/completions"


def run(
    service: AsyncEngine, served: ServedModel, work: Callable[[Client, Any], Awaitable[None]], **changes: Any
) -> None:
    """``work(client, server)`` against a live server."""

    async def inside(url: str, server: Any) -> None:
        async with Client(url) as client:
            await work(client, server)

    with live(service, served, ServeSettings(**changes)) as (url, server):
        asyncio.run(inside(url, server))


async def settled(service: AsyncEngine, server: Any) -> None:
    """Return once nothing is open: every page and every place given back."""
    for _ in range(500):
        stats = await service.stats()
        if not (stats.num_running or stats.num_waiting or server._gate.num_open):
            break
        await asyncio.sleep(0.02)
    assert (stats.num_running, stats.num_waiting, server._gate.num_open) == (0, 0, 0)
    assert stats.num_free_pages == stats.num_pages


def test_our_client(service: AsyncEngine, served: ServedModel) -> None:
    async def work(client: Client, server: Any) -> None:
        fields: dict[str, Any] = {"max_tokens": 6, "seed": 1, "ignore_eos": True, "logprobs": True, "return_token_ids": True}  # fmt: skip
        whole = await client.post(PATH, {"messages": USER, **fields})
        pieces = [piece async for piece in client.stream(PATH, {"messages": USER, **fields})]
        assert "".join(piece.text for piece in pieces) == whole["choices"][0]["message"]["content"]
        assert [token for piece in pieces for token in piece.token_ids] == whole["choices"][0]["token_ids"]
        assert sum(len(piece.logprobs) for piece in pieces) == 6
        assert pieces[-1].usage is not None and pieces[-1].usage["completion_tokens"] == 6
        ids = (await client.post("/tokenize", {"prompt": "a b"}))["tokens"]
        assert (await client.post("/v1/completions", {"prompt": ids, "max_tokens": 2}))["usage"][
            "prompt_tokens"
        ] == len(ids)
        with pytest.raises(ApiFailure) as caught:
            await client.get("/v1/models/y")
        assert (caught.value.status, caught.value.code) == (404, "model_not_found")
        with pytest.raises(ApiFailure, match="n: must be greater"):
            [piece async for piece in client.stream_completion("a", n=0)]
        assert (await client.get("/health"))["status"] == "ok"

    run(service, served, work)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_aborts_its_request(service: AsyncEngine, served: ServedModel, stream: bool) -> None:
    async def work(client: Client, server: Any) -> None:
        before = (await service.stats()).output_tokens
        if stream:
            pieces = client.stream(PATH, {**LONG, "n": 4})
            async for piece in pieces:
                if piece.text:
                    break
            await pieces.aclose()  # type: ignore[attr-defined]
        else:
            task = asyncio.create_task(client.post(PATH, {**LONG, "n": 4}))
            while not (await service.stats()).num_running:
                await asyncio.sleep(0.005)
            task.cancel()
        await settled(service, server)
        assert (await service.stats()).output_tokens - before < 1600

    run(service, served, work)


@pytest.mark.slow
def test_a_client_that_stops_reading_is_cut(service: AsyncEngine, served: ServedModel) -> None:
    async def work(client: Client, server: Any) -> None:
        url = str(client._http.base_url)
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        raw.connect(("127.0.0.1", int(url.rsplit(":", 1)[1].strip("/"))))
        body = json.dumps({**LONG, "stream": True, "n": 16, "logprobs": True, "top_logprobs": 20}).encode()
        head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        raw.sendall(head.encode() + body)
        while not server._gate.num_open:
            await asyncio.sleep(0.01)
        await settled(service, server)
        assert 'stretto_http_gone_total{path="/v1/chat/completions"} 1.0' in (await client._http.get("/metrics")).text
        raw.settimeout(5)
        with pytest.raises(ConnectionResetError):  # not closed politely: nothing is left waiting in the server
            while raw.recv(1 << 16):
                pass
        raw.close()

    run(service, served, work, send_timeout_s=0.3)


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_of_100_mb_gets_a_413(service: AsyncEngine, served: ServedModel, declared: bool) -> None:
    async def work(client: Client, server: Any) -> None:
        async def pieces() -> Any:
            for _ in range(100):
                yield b" " * (1 << 20)

        content = b" " * (100 << 20) if declared else pieces()
        response = await client._http.post(PATH, content=content, headers={"content-type": "application/json"})
        assert response.status_code == 413
        assert (await client.get("/health"))["status"] == "ok"

    run(service, served, work)


@pytest.mark.slow
def test_many_clients_that_come_and_go(service: AsyncEngine, served: ServedModel) -> None:
    async def work(client: Client, server: Any) -> None:
        async def one(number: int) -> int:
            body = {
                "messages": USER,
                "max_tokens": 5 + number % 7,
                "seed": number,
                "model": ["x", "x:half"][number % 2],
            }
            if number % 5 == 0:
                raw = b'{"messages": [' + bytes([number % 256]) * 3
                answer = await client._http.post(PATH, content=raw, headers={"content-type": "application/json"})
                return answer.status_code
            pieces = client.stream(PATH, body)
            async for _ in pieces:
                if number % 3 == 0:
                    break
            await pieces.aclose()  # type: ignore[attr-defined]
            return 200

        statuses = await asyncio.gather(*map(one, range(60)))
        assert set(statuses) == {200, 400}
        await settled(service, server)

    run(service, served, work)


def connected(client: Client) -> socket.socket:
    """A connection of its own to the server that ``client`` speaks to."""
    url = client._http.base_url
    assert url.port is not None
    return socket.create_connection((url.host, url.port), timeout=30)


def post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


async def received(connection: socket.socket) -> bytes:
    """All until the server closes."""

    def read() -> bytes:
        pieces = []
        while piece := connection.recv(1 << 16):
            pieces.append(piece)
        return b"".join(pieces)

    return await asyncio.to_thread(read)


def test_answers_leave_at_once(service: AsyncEngine, served: ServedModel) -> None:
    """Without TCP_NODELAY the second answer on a connection waits for the client's delayed acknowledgement."""

    async def work(client: Client, server: Any) -> None:
        await client.get("/health")
        [connection] = server.server_state.connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    run(service, served, work)


@pytest.mark.slow
@pytest.mark.parametrize("begun", [b"", b"POST /tokenize HTTP/1.1\r\nHost: local"])
def test_a_connection_must_become_a_request(
    service: AsyncEngine, served: ServedModel, monkeypatch: pytest.MonkeyPatch, begun: bytes
) -> None:
    monkeypatch.setattr("stretto.server.server._HEAD_S", 1)

    async def work(client: Client, server: Any) -> None:
        with connected(client) as idle:
            closed = asyncio.create_task(received(idle))
            idle.sendall(begun)
            for _ in range(200):  # a byte now and then does not keep it open
                if closed.done():
                    break
                await asyncio.sleep(0.1)
                with suppress(OSError):
                    idle.sendall(b"h" if begun else b"")
            assert closed.done()
            await asyncio.gather(closed, return_exceptions=True)
        assert (await client.get("/health"))["status"] == "ok"

    run(service, served, work)


def test_idle_connections_make_room(service: AsyncEngine, served: ServedModel) -> None:
    async def work(client: Client, server: Any) -> None:
        with ExitStack() as stack:
            crowd = [stack.enter_context(connected(client)) for _ in range(8)]
            assert (await client.get("/health"))["status"] == "ok"
            assert len(server.server_state.connections) == 4
            assert crowd[0].recv(1) == b""  # the oldest is closed

    run(service, served, work, max_open=2)


@pytest.mark.parametrize("head", ["GET /health HTTP/1.1\r\nX: {long}", "GET /{long} HTTP/1.1\r\nX: y"])
def test_a_head_has_a_largest_size(service: AsyncEngine, served: ServedModel, head: str) -> None:
    """The server closes the connection without an answer. The client sees a reset or a plain end, whichever comes first."""

    async def work(client: Client, server: Any) -> None:
        answer = b""
        with connected(client) as greedy, suppress(ConnectionError):
            ending = "\r\nHost: localhost\r\nConnection: close\r\n\r\n"
            await asyncio.to_thread(greedy.sendall, (head.format(long="a" * (1 << 20)) + ending).encode())
            answer = await received(greedy)
        assert not answer
        assert (await client.get("/health"))["status"] == "ok"

    run(service, served, work)


def test_a_refused_sender_may_finish_and_ask_again(service: AsyncEngine, served: ServedModel) -> None:
    """Who is answered before all of a body came gets to read the answer, on a connection that goes on."""

    async def work(client: Client, server: Any) -> None:
        with connected(client) as sender:
            body = b" " * (1 << 18)
            await asyncio.to_thread(sender.sendall, post(PATH, body) + post("/nothing", b"{}", "Connection: close"))
            answers = await received(sender)
        assert answers.count(b"HTTP/1.1 401 ") == 2

    run(service, served, work, api_keys=("k",))


def test_a_socket_is_not_upgraded(service: AsyncEngine, served: ServedModel) -> None:
    """Nothing gets past host and key by asking for a WebSocket."""

    async def work(client: Client, server: Any) -> None:
        with connected(client) as web:
            asked = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: " + "A" * 22 + "==")  # fmt: skip
            web.sendall(post(PATH, b"", *asked, "Connection: close"))
            assert (await received(web)).startswith(b"HTTP/1.1 401 ")

    run(service, served, work, api_keys=("k",))


def test_slow_bodies_hold_no_places(service: AsyncEngine, served: ServedModel) -> None:
    async def work(client: Client, server: Any) -> None:
        body = json.dumps({"messages": USER, "max_tokens": 2}).encode()
        with connected(client) as slow:
            slow.sendall(post(PATH, body, "Connection: close")[:-5])
            while not server._gate.num_body_bytes:
                await asyncio.sleep(0.01)
            assert server._gate.num_open == 0
            await client.post(PATH, {"messages": USER, "max_tokens": 2})
            slow.sendall(body[-5:])
            assert (await received(slow)).startswith(b"HTTP/1.1 200")
        while server._gate.num_body_bytes:  # given back, a moment after the answer
            await asyncio.sleep(0.01)

    run(service, served, work, max_open=1)


@pytest.mark.parametrize("stream", [False, True])
def test_a_place_is_free_before_its_answer_has_ended(service: AsyncEngine, served: ServedModel, stream: bool) -> None:
    """Or the next request of a client that has just read its answer is one too many."""
    app = create_app(service, served, ServeSettings(max_open=1))
    body = json.dumps({"messages": USER, "max_tokens": 2, "stream": stream}).encode()
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    given: list[Any] = [{"type": "http.request", "body": body, "more_body": False}]
    open_at: list[int] = []

    async def receive() -> Any:
        return given.pop() if given else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            open_at.append(app.state.gate.num_open)

    scope = {"type": "http", "http_version": "1.1", "method": "POST", "scheme": "http", "path": PATH, "query_string": b"", "headers": headers}  # fmt: skip
    asyncio.run(app(scope, receive, send))
    assert open_at[-1] == 0 and all(open_at[:-1]) and len(open_at) > stream


def test_a_body_of_two_lengths_is_refused(service: AsyncEngine, served: ServedModel) -> None:
    """A proxy in front may believe the other length, and what it took for a body would be a request here."""

    async def work(client: Client, server: Any) -> None:
        with connected(client) as smuggler:
            smuggler.sendall(post("/tokenize", b"0\r\n\r\nGET /metrics HTTP/1.1\r\n\r\n", "Transfer-Encoding: chunked"))
            answer = await received(smuggler)
        assert answer.startswith(b"HTTP/1.1 400") and answer.count(b"HTTP/1.1") == 1

    run(service, served, work)


@pytest.mark.slow
def test_an_engine_that_takes_nothing(service: AsyncEngine, served: ServedModel) -> None:
    async def work(client: Client, server: Any) -> None:
        stuck = asyncio.create_task(service.call(lambda engine: time.sleep(1.0)))
        with pytest.raises(ApiFailure) as caught:
            await client.post(PATH, {"messages": USER, "max_tokens": 2})
        assert (caught.value.status, caught.value.retry_after_s) == (503, 5.0)
        await stuck
        await settled(service, server)

    run(service, served, work, max_wait_s=0.1)


def test_a_port_in_use_is_told_in_one_line() -> None:
    taken = open_socket("127.0.0.1", 0)
    port = taken.getsockname()[1]
    for wrong in (-1, 65_536):
        with pytest.raises(UserError, match=f"--port {wrong}: must be 0 to 65535"):
            open_socket("127.0.0.1", wrong)
    with pytest.raises(UserError, match=f"--port {port}: in use on 127.0.0.1; choose another"):
        open_socket("127.0.0.1", port)
    taken.close()
    with pytest.raises(UserError, match="cannot listen there"):
        open_socket("203.0.113.1", 0)


CHILD = """
import sys
from pathlib import Path
from stretto.engine.engine import Engine
from stretto.engine.request import EngineConfig
from stretto.engine.async_engine import AsyncEngine
from stretto.model.spec import ModelConfig
from stretto.model.transformer import build
from stretto.server.server import ServeSettings, create_app, make_server, open_socket
from stretto.server.elastic import ServedModel
from stretto.text.tokenizer import load_tokenizer

config = ModelConfig.model_validate_json(sys.argv[2])
tokenizer = load_tokenizer(Path(sys.argv[1]))
service = AsyncEngine(Engine(build(config, seed=3), tokenizer, EngineConfig(num_pages=256, page_size=8))).start()
listening = open_socket("127.0.0.1", 0)
print(listening.getsockname()[1], flush=True)
app = create_app(service, ServedModel("x", config, {}, tokenizer, 512), ServeSettings())
make_server(app).run(sockets=[listening])
service.close()
print("closed", flush=True)
"""


def test_told_to_stop_it_finishes_what_is_open(service: AsyncEngine, served: ServedModel) -> None:
    async def work(client: Client, server: Any) -> None:
        pieces = client.stream(PATH, {**LONG, "max_tokens": 100, "return_token_ids": True})
        received = [await anext(pieces) for _ in range(3)]
        server.handle_exit(signal.SIGTERM, None)
        with pytest.raises(ApiFailure) as caught:
            await client.post(PATH, {"messages": USER})
        assert (caught.value.status, caught.value.code, caught.value.retry_after_s) == (503, "draining", 5.0)
        assert not server.should_exit
        received += [piece async for piece in pieces]
        assert sum(len(piece.token_ids) for piece in received) == 100
        while not server.should_exit:
            await asyncio.sleep(0.02)

    run(service, served, work)


@pytest.mark.slow
def test_sigterm_lets_open_streams_finish(served: ServedModel, tmp_path: Any) -> None:
    assert served.tokenizer is not None
    served.tokenizer.save(tmp_path)
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path), served.config.model_dump_json()],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert child.stdout is not None
    try:
        url = f"http://127.0.0.1:{int(child.stdout.readline())}"
        body = {**LONG, "stream": True, "return_token_ids": True}
        with (
            httpx.Client(timeout=120, trust_env=False) as client,
            httpx.Client(timeout=120, trust_env=False) as other,
            client.stream("POST", url + PATH, json=body) as stream,
        ):
            lines = stream.iter_lines()
            received = [next(lines) for _ in range(4)]
            child.send_signal(signal.SIGTERM)
            late = other.post(url + PATH, json={**LONG, "max_tokens": 1})
            while late.status_code == 200:  # sent before the signal was seen
                late = other.post(url + PATH, json={**LONG, "max_tokens": 1})
            received += list(lines)
        assert late.status_code == 503 and late.json()["error"]["code"] == "draining"
        assert sum('"token_ids":[' in line for line in received) == 400
        assert "data: [DONE]" in received
        assert child.stdout.readline() == "closed\n"
        assert child.wait(30) == 0
    finally:
        child.kill()
        child.wait()


def test_only_loopback_names_on_loopback() -> None:
    assert "localhost" in (ServeSettings().hosts() or ())
    assert ServeSettings(host="0.0.0.0").hosts() is None
    assert ServeSettings(host="0.0.0.0", allowed_hosts=("A",)).hosts() == (
        "127.0.0.1",
        "localhost",
        "::1",
        "[::1]",
        "a",
    )


def test_keys_do_not_show() -> None:
    assert "secret" not in repr(ServeSettings.model_validate({"api_keys": ["secret"], "admin_key": "secret"}))


def test_malformed_requests_do_not_fill_the_log(
    service: AsyncEngine, served: ServedModel, capfd: pytest.CaptureFixture[str]
) -> None:
    """uvicorn's configuration sets the levels of its loggers anew and writes to stderr, which pytest's log capture does not see."""

    async def work(client: Client, server: Any) -> None:
        upgrade = b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n"
        for begun in (b"no HTTP\r\n\r\n", upgrade):
            with connected(client) as raw:
                raw.sendall(begun)
                await asyncio.wait_for(asyncio.to_thread(raw.recv, 100), 10)

    run(service, served, work)
    assert capfd.readouterr().err == ""


def test_a_body_announced_too_large_is_refused_by_its_header(service: AsyncEngine, served: ServedModel) -> None:
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += "Content-Length: 99999999999\r\n\r\n"

    async def work(client: Client, server: Any) -> None:
        with connected(client) as raw:
            raw.sendall(head.encode())  # and nothing of the body
            raw.settimeout(5)
            said = b""
            while b"larger than" not in said:
                said += await asyncio.to_thread(raw.recv, 1 << 16)
        assert said.startswith(b"HTTP/1.1 413")

    run(service, served, work)


def test_a_server_that_others_reach_without_a_key_warns() -> None:
    warning = ServeSettings(host="0.0.0.0").exposure()
    assert warning is not None and "--api-key" in warning and "any host name" in warning
    assert "any host name" not in (ServeSettings(host="::", allowed_hosts=("a",)).exposure() or "any host name")
    assert ServeSettings(host="0.0.0.0", api_keys=("k",)).exposure() is None  # type: ignore[arg-type]
    assert ServeSettings().exposure() is None


LINE = re.compile(
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4} 127\.0\.0\.1 (?P<request>[A-Z]+ \S+ \d{3})"
    r'(?: model=(?P<model>\S+) size=(?P<size>"[^"]+"|\S+) prompt_tokens=(?P<prompt>\d+)'
    r" generated_tokens=(?P<generated>\d+))?"
    r"(?: first_token_s=(?P<first>\d+\.\d{3}))? total_s=(?P<total>\d+\.\d{3})"
)


@pytest.mark.parametrize("stream", [True, False])
def test_each_request_is_one_line_of_the_log(
    service: AsyncEngine, served: ServedModel, capsys: pytest.CaptureFixture[str], stream: bool
) -> None:
    key, secret, free = "keykeykey", "secretsecret", {"ignore_eos": True, "stream": stream}
    odd = {"elastic": {"layers": 3, "experts": 4, "top_k": 1}}
    with live(service, served, ServeSettings(access_log=True, api_keys=(SecretStr(key),))) as (url, server):
        with httpx.Client(base_url=url, trust_env=False, headers={"authorization": f"Bearer {key}"}) as client:
            body = {"messages": [{"role": "user", "content": secret}], "max_tokens": 5, "n": 2, "model": "x:half"}
            usage = {"stream_options": {"include_usage": True}} if stream else {}
            client.post(PATH, json={**body, **free, **usage}).raise_for_status()
            client.post(
                "/v1/completions", json={"prompt": [5, 6, 7], "max_tokens": 4, **odd, **free}
            ).raise_for_status()
            assert client.post(PATH, json={**body, "temperature": -1}).status_code == 400
            assert client.get(f"/v1/none%0aforged%20line?question={secret}").status_code == 404
            assert client.get("/v1/models", headers={"authorization": f"Bearer {secret}"}).status_code == 401
            assert client.get("/health").status_code == 200
        headers = {"authorization": f"Bearer {key}"}
        with httpx.stream(
            "POST", url + PATH, json={**LONG, "stream": True}, headers=headers, trust_env=False
        ) as response:
            next(response.iter_lines())
        asyncio.run(settled(service, server))
    written = capsys.readouterr().err
    assert key not in written and secret not in written
    found = [LINE.fullmatch(line) for line in written.splitlines()]
    lines = [match.groupdict() for match in found if match is not None]
    assert len(lines) == len(found) == 7, written
    assert [line["request"] for line in lines] == [
        f"POST {PATH} 200",
        "POST /v1/completions 200",
        f"POST {PATH} 400",
        "GET /v1/none%0Aforged%20line 404",
        "GET /v1/models 401",
        "GET /health 200",
        f"POST {PATH} 200",
    ]
    assert [line["model"] for line in lines] == ["x:half", "x", None, None, None, None, "x"]
    assert [line["size"] for line in lines][:2] == ["half", '"3 layers, 4 experts, top-1"']
    assert [line["generated"] for line in lines][:2] == ["10", "4"] and lines[1]["prompt"] == "3"
    assert int(lines[0]["prompt"] or 0) > len("user") and 0 < int(lines[6]["generated"] or 0) < 400
    for line in lines:
        assert (line["first"] is None) == (line["model"] is None)
        assert float(line["first"] or 0) <= float(line["total"] or -1)


def test_a_server_logs_no_requests_unless_asked(
    service: AsyncEngine, served: ServedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    with live(service, served, ServeSettings()) as (url, _):
        assert httpx.get(f"{url}/health", trust_env=False).status_code == 200
    assert capsys.readouterr().err == ""
