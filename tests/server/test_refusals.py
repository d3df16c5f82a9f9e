"""What the server refuses: every kind of bad body is a 4xx in OpenAI's form that names the field."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from stretto.engine import grammar
from stretto.engine.async_engine import AsyncEngine
from stretto.engine.engine import Engine
from stretto.engine.request import Sampling
from stretto.server import generate, limits, server
from stretto.server.calls.json_text import MAX_DEPTH
from stretto.server.elastic import REFUSE_WAITING, Resolver, ServedModel
from stretto.server.limits import ApiError
from stretto.server.server import ServeSettings
from stretto.text.tokenizer import Tokenizer

Ask = Callable[..., httpx.Response]
DOCS = Path(__file__).parents[2] / "docs"
USER = [{"role": "user", "content": "hi"}]
CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
UNKNOWN = {
    "Temperature": "Temperature",
    "": "''",
    "$ref": "$ref",
    "ünï": "ünï",
    "\n": r"'\n'",
    "a" * 5000: "a" * 80 + "…",
}
"""Names of fields that there are not, and how they are shown."""
BAD = {"type": "object", "properties": {"a": {"type": 5}}}
"""An invalid JSON Schema."""
FUNCTION = {"type": "function", "function": {"name": "f"}}


def refused(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and "\n" not in error["message"]
    assert len(error["message"]) < 3000
    return error


@pytest.mark.parametrize(
    ("changes", "param", "problem"),
    [
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "king", "content": ""}]}, "messages.0.role", "must be"),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "missing"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content.0.type",
            "text only",
        ),
        ({"temprature": 1}, "temprature", r"did you mean 'temperature'\?"),
        ({"audio": {}}, "audio", "unknown field"),
        *(({name: 1}, shown, "unknown field") for name, shown in UNKNOWN.items()),
        ({"temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"temperature": 1e999}, "temperature", "finite"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"n": 10**6}, "n", "less than or equal to 64"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": -1}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": -(10**30), "min_tokens": 1}, "max_tokens", "greater than or equal to 1"),
        ({"max_completion_tokens": -1}, "max_completion_tokens", "greater than or equal to 1"),
        ({"max_tokens": 10**9}, "max_tokens", "exceed this server's context of 512 tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "contradicts"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens", "more than max_tokens"),
        (
            {"messages": [{"role": "user", "content": "word " * 600}]},
            "messages",
            "exceeds this server's context of 512 tokens",
        ),
        ({"stop": ["a"] * 17}, "stop", "at most 16 items"),
        ({"stop": ""}, "stop", "at least 1 character"),
        ({"logit_bias": {"100000": 1}}, "logit_bias", "100000 lies outside"),
        ({"logit_bias": {"5": 1e308}}, "logit_bias.5", "less than or equal to 100"),
        ({"logit_bias": {"5": -1e999}}, "logit_bias.5", "finite"),
        ({"repetition_penalty": 1e-320}, "repetition_penalty", r"greater than or equal to 0\.01"),
        ({"repetition_penalty": 1e308}, "repetition_penalty", "less than or equal to 100"),
        ({"temperature": 1e308}, "temperature", "less than or equal to 100"),
        ({"top_p": -0.0}, "top_p", "greater than 0"),
        ({"min_p": 1.1}, "min_p", "less than or equal to 1"),
        ({"presence_penalty": 1e308}, "presence_penalty", "less than or equal to 2"),
        ({"frequency_penalty": -2.1}, "frequency_penalty", "greater than or equal to -2"),
        ({"top_k": -2}, "top_k", "greater than or equal to 0"),
        ({"min_tokens": 10**40}, "min_tokens", "more than max_tokens"),
        ({"stop_token_ids": [-1]}, "stop_token_ids.0", "greater than or equal to 0"),
        ({"top_logprobs": 3}, "top_logprobs", "needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        ({"elastic": {"layers": 9}}, "elastic", r"layers=9 lies outside 1\.\.4"),
        ({"elastic": {"layers": 0}}, "elastic.layers", "greater than or equal to 1"),
        ({"elastic": {"experts": 2, "top_k": 3}}, "elastic", r"top_k=3 lies outside 1\.\.2"),
        ({"elastic": "halff"}, "elastic", "did you mean 'half'"),
        ({"elastic": {"layer": 3}}, "elastic.layer", "did you mean 'layers'"),
        ({"elastic": {"prefill": "corner", "answer": "full"}}, "elastic", "did not all compute"),
        ({"elastic": {"layers": 3, "answer": "full"}}, "elastic.answer", "which mean the same"),
        ({"elastic": {"thinking": "full"}}, "elastic.thinking", "has no </think>"),
        ({"max_completion_tokens": 10**9}, "max_completion_tokens", "exceed this server's context of 512 tokens"),
        ({"regex": "("}, "regex", "regex"),
        ({"grammar": "start: x"}, "grammar", "a Lark grammar with a rule named start"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 5}}}},
            "response_format",
            "^response_format: .*; send a JSON Schema of supported keywords",
        ),
        ({"response_format": {"type": "xml"}}, "response_format", "its type must be one of 'text', .*, is 'xml'"),
        ({"response_format": {}}, "response_format.type", "missing; add it"),
        (
            {"tools": [{**FUNCTION, "function": {"name": "f", "parameters": BAD}}], "tool_choice": "required"},
            "tools",
            "^tools: .*; send a JSON Schema of supported keywords",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing; add it"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "grammar", "only one of"),
        ({"tools": [FUNCTION, FUNCTION]}, "tools", "same name"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", "'g'"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name", "missing; add it"),
        ({"tools": [{"type": "function", "function": {"nome": "f"}}]}, "tools.0.function.nome", "did you mean 'name'"),
        ({"store": True}, "store", "stores nothing"),
    ],
)
def test_bad_chat_bodies(ask: Ask, changes: dict[str, Any], param: str | None, problem: str) -> None:
    raw = json.dumps({"messages": USER, **changes}).replace("Infinity", "1e999")
    error = refused(ask("POST", CHAT, content=raw, headers={"content-type": "application/json"}), 400)
    assert re.search(problem, error["message"]), error
    assert param is None or error["param"] == param


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def shaped(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def forced(schema: dict[str, Any]) -> dict[str, Any]:
    function = {"name": "f", "parameters": schema}
    return {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}


WIDE = {"anyOf": [{"type": "object", "properties": {f"v{at}": {}}, "required": [f"v{at}"]} for at in range(5000)]}


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        shaped(nested(64)),
        shaped({"$ref": "#"}),
        shaped(WIDE),
        forced(nested(55)),
        {"regex": r"[^\s\S]"},
        {"grammar": "start: start"},
        {"grammar": "start: x\nx: x x | /[a-z ]/", "min_tokens": 250},
    ],
    ids=["64 objects", "itself", "5,000 ways", "55 objects in a tool", "no character", "no word", "ambiguous"],
)
def test_grammars_that_cannot_be_followed_are_their_senders_fault(
    ask: Ask, changes: dict[str, Any], is_stream: bool
) -> None:
    """Said before the first token or after some: 400, and whoever comes next is served."""
    answer = ask("POST", CHAT, json={"messages": USER, "max_tokens": 300, "stream": is_stream, **changes})
    if is_stream and answer.status_code == 200:
        last = [line for line in answer.text.splitlines() if line.startswith("data: {")][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["type"] == "invalid_request_error"
    else:
        refused(answer, 400)
    assert ask("POST", CHAT, json={"messages": USER, "max_tokens": 3}).status_code == 200


def test_the_documented_ranges_are_those() -> None:
    """In docs/SERVING.md; rows of other tables name no field of a request."""
    fields = Sampling.model_json_schema()["properties"]
    fields["logit_bias"] = fields["logit_bias"]["additionalProperties"]
    ranged = {name for name, field in fields.items() if field.get("type") == "number"}
    rows = re.findall(r"^\| (.*) \| (-?[\d.]+) \| (-?[\d.]+) \|$", (DOCS / "SERVING.md").read_text(), re.MULTILINE)
    found = {name: (float(low), float(high)) for names, low, high in rows for name in re.findall("`(.+?)`", names)}
    low_names = ("minimum", "exclusiveMinimum")
    assert found == {
        name: (next(fields[name][low] for low in low_names if low in fields[name]), fields[name]["maximum"])
        for name in ranged
    }


def test_the_documented_limits_are_those() -> None:
    """In docs/SERVING.md."""
    settings, text = ServeSettings(), (DOCS / "SERVING.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (.*) \| (.*) \|$", text.partition("\n## Limits\n")[2], re.MULTILINE)[1:])
    assert rows == {
        "open requests": f"{settings.max_open:,}",
        "size of one body": f"{limits.MAX_BODY_BYTES >> 20} MiB",
        "size of all bodies held at once": f"{limits.MAX_HELD_BYTES >> 20} MiB",
        "time for a body to arrive": f"{limits.BODY_TIMEOUT_S:g} s",
        "time for a client to read what was sent": f"{settings.send_timeout_s:g} s",
        "nesting of JSON": f"{MAX_DEPTH} levels",
        "choices of one request (prompts × `n`)": f"{generate.MAX_CHOICES}",
        "stop strings": f"{generate.MAX_STOPS}",
        "characters of a grammar": f"{grammar.MAX_CHARS:,}",
        "processor time to read a grammar": f"{grammar.TRIAL_S:g} s",
        "time for open requests to finish after SIGTERM": f"{server.DRAIN_S:g} s",
    }


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [0, 10**6]}, "prompt"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"prompt": ["a"] * 33, "n": 2}, "n"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 30}, "logprobs"),
    ],
)
def test_bad_completion_bodies(ask: Ask, changes: dict[str, Any], param: str) -> None:
    error = refused(ask("POST", TEXT, json={"prompt": "a", **changes}), 400)
    assert error["param"].partition(".")[0] == param


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"input": [{"type": "computer_call"}]}, "input.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.type"),
        ({"input": [5]}, "input.0"),
        ({"input": "word " * 600}, "input"),
        ({"max_output_tokens": 10**9}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": 5}}}}, "text.format"),
        ({"include": ["file_search_call.results"]}, "include.0"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"n": 2}, "n"),
    ],
)
def test_responses_have_no_memory(ask: Ask, changes: dict[str, Any], param: str) -> None:
    error = refused(ask("POST", RESPONSES, json={"input": "a", **changes}), 400)
    assert error["param"] == param and error["message"].startswith(f"{param}: ")
    assert "_type_of" not in error["message"]


def test_unknown_models_and_paths(ask: Ask) -> None:
    error = refused(ask("POST", CHAT, json={"messages": USER, "model": "x:hlaf"}), 404)
    assert error["code"] == "model_not_found" and "did you mean 'x:half'" in error["message"]
    refused(ask("GET", "/v1/models/y"), 404)
    refused(ask("GET", "/nothing"), 404)
    refused(ask("GET", CHAT), 405)
    refused(ask("POST", "/admin/load_weights", json={}), 404)


def test_bodies_that_are_no_json(ask: Ask) -> None:
    kind = {"content-type": "application/json"}
    assert "not UTF-8" in refused(ask("POST", CHAT, content=b'{"\xff', headers=kind), 400)["message"]
    refused(ask("POST", CHAT, content=b"{", headers=kind), 400)
    refused(ask("POST", CHAT, content=b"[]", headers=kind), 400)
    refused(ask("POST", CHAT, content=b"{}", headers={"content-type": "text/plain"}), 415)
    refused(ask("POST", CHAT, content=b" " * (5 << 20), headers=kind), 413)


def test_keys(ask: Ask) -> None:
    settings = {"api_keys": ("k1", "k2"), "admin_key": "root"}
    refused(ask("POST", CHAT, json={"messages": USER}, settings=settings), 401)
    refused(ask("GET", "/v1/models", settings=settings, headers={"Authorization": "Bearer k3"}), 401)
    refused(ask("GET", "/metrics", settings=settings), 401)
    assert ask("GET", "/v1/models", settings=settings, headers={"Authorization": "Bearer k2"}).status_code == 200
    assert ask("GET", "/health", settings=settings).status_code == 200
    refused(ask("POST", "/admin/load_weights", json={}, settings=settings, headers={"Authorization": "Bearer k1"}), 401)


def test_another_host_name_is_refused(ask: Ask) -> None:
    refused(ask("GET", "/v1/models", headers={"host": "evil.example"}), 403)
    assert ask("GET", "/health", headers={"host": "10.0.0.7:8000"}).status_code == 200, "a probe asks by address"


def test_no_other_site_may_read_answers(ask: Ask) -> None:
    origin = {"origin": "http://evil.example"}
    assert "access-control-allow-origin" not in ask("GET", "/v1/models", headers=origin).headers
    allowed = ask("GET", "/v1/models", headers=origin, settings={"cors_origins": ("http://evil.example",)})
    assert allowed.headers["access-control-allow-origin"] == "http://evil.example"
    capital = ask("GET", "/v1/models", headers=origin, settings={"cors_origins": ("http://Evil.example",)})
    assert capital.headers["access-control-allow-origin"] == "http://evil.example"


def test_a_browser_may_ask_before_it_shows_a_key(ask: Ask) -> None:
    settings = {"cors_origins": ("http://page.example",), "api_keys": ("k",)}
    origin = {"origin": "http://page.example"}
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, content-type"}
    preflight = ask("OPTIONS", CHAT, headers=origin | asked, settings=settings)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "http://page.example"
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    refusal = ask("POST", CHAT, json={"messages": USER}, headers=origin, settings=settings)
    refused(refusal, 401)
    assert refusal.headers["access-control-allow-origin"] == "http://page.example"
    other = {"origin": "http://evil.example"}
    assert ask("OPTIONS", CHAT, headers=other | asked, settings=settings).status_code == 400
    refused(ask("OPTIONS", CHAT, headers={"host": "evil.example", **origin, **asked}, settings=settings), 403)


def test_what_breaks_is_told_counted_and_readable_to_the_page(connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any, **rest: Any) -> Any:
        raise KeyError("inside")

    async def run() -> None:
        async with connect(cors_origins=("http://page.example",)) as client:
            monkeypatch.setattr("stretto.server.generate.Backend.job", broken)
            headers = {"origin": "http://page.example"}
            response = await client.post(CHAT, json={"messages": USER}, headers=headers)
            assert "inside" not in refused(response, 500)["message"]
            assert response.headers["access-control-allow-origin"] == "http://page.example"
            counted = f'stretto_http_requests_total{{path="{CHAT}",status="500"}} 1.0'
            assert counted in (await client.get("/metrics")).text

    asyncio.run(run())


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_a_stream_that_breaks_says_so(connect: Any, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    def broken(*given: Any) -> Any:
        raise KeyError("inside")

    body = {CHAT: {"messages": USER}, RESPONSES: {"input": "a"}}[path]

    async def stream() -> None:
        async with connect() as client:
            monkeypatch.setattr("stretto.server.generate.Answer.push", broken)
            text = (await client.post(path, json={**body, "stream": True})).text
            assert "internal error" in text.split("data: ")[-1] and "inside" not in text

    asyncio.run(stream())


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})])
def test_all_that_works_goes_through_the_gate(connect: Any, path: str, body: dict[str, Any]) -> None:
    async def run() -> None:
        async with connect(max_open=1) as client:
            assert (await client.post(path, json=body)).status_code == 200
            with client.app.state.gate.enter():
                refused(await client.post(path, json=body), 429)
            assert (await client.post(path, json=body)).status_code == 200
            assert client.app.state.gate.num_open == 0

    asyncio.run(run())


def test_without_a_chat_template(ask: Ask, served: ServedModel, tokenizer: Tokenizer) -> None:
    bare = dataclasses.replace(served, tokenizer=dataclasses.replace(tokenizer, chat_template=None))
    error = refused(ask("POST", CHAT, json={"messages": USER}, served=bare), 400)
    assert "no chat template" in error["message"] and error["param"] == "messages"
    assert ask("GET", "/api/info", served=bare).json()["has_chat_template"] is False


def test_too_many_open(connect: Any) -> None:
    async def run() -> None:
        async with connect(max_open=1) as client:
            body = {"messages": USER, "max_tokens": 60, "ignore_eos": True}
            answers = await asyncio.gather(*(client.post(CHAT, json=body) for _ in range(4)))
            statuses = sorted(answer.status_code for answer in answers)
            assert statuses[0] == 200 and statuses[-1] == 429
            [full] = [each for each in answers if each.status_code == 429][:1]
            assert refused(full, 429)["code"] == "overloaded" and int(full.headers["retry-after"]) >= 1

    asyncio.run(run())


@pytest.mark.parametrize("floor", [None, "corner"])
def test_only_a_declared_floor_is_a_reason_to_refuse(served: ServedModel, floor: str | None) -> None:
    settings = ServeSettings(floor=floor)
    resolver = Resolver(served, settings.floor, settings.first_token_s, clock=lambda: 0.0)
    if floor is None:
        assert resolver.rung(REFUSE_WAITING) == resolver.control.rungs[0]
    else:
        with pytest.raises(ApiError, match=r"the floor .corner. is reached"):
            resolver.rung(REFUSE_WAITING * 8)


def test_a_full_queue_is_a_429(connect: Any, engine_of: Callable[..., Engine]) -> None:
    service = AsyncEngine(engine_of(max_waiting=1, max_batch=1)).start()

    async def run() -> None:
        async with connect(service=service) as client:
            body = {"messages": USER, "max_tokens": 30, "ignore_eos": True}
            answers = await asyncio.gather(*(client.post(CHAT, json=body) for _ in range(8)))
            assert {answer.status_code for answer in answers} == {200, 429}
            assert all("retry-after" in answer.headers for answer in answers if answer.status_code == 429)

    asyncio.run(run())
    service.close()


def test_the_context_is_what_the_cache_holds(
    connect: Any, engine_of: Callable[..., Engine], served: ServedModel
) -> None:
    """Not what the network could do with more memory: a chat that names no ``max_tokens`` goes to its end."""
    engine = engine_of(num_pages=20)
    service, small = AsyncEngine(engine).start(), dataclasses.replace(served, max_len=engine.max_len)

    async def run() -> None:
        async with connect(service=service, served=small) as client:
            body = {"messages": USER, "ignore_eos": True}
            answers = await asyncio.gather(*(client.post(CHAT, json=body) for _ in range(3)))
            assert [each.json()["usage"]["total_tokens"] for each in answers] == [160] * 3
            assert (await client.get("/v1/models")).json()["data"][0]["max_model_len"] == 160
            assert (await client.get("/health")).json()["max_model_len"] == 160
            text = (await client.get("/metrics")).text
            assert "stretto_engine_max_len 160.0" in text and "stretto_engine_cache_bytes" in text
            error = refused(await client.post(CHAT, json={**body, "max_tokens": 160}), 400)
            assert error["code"] == "context_length_exceeded" and "160" in error["message"]

    asyncio.run(run())
    service.close()


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (TEXT, {"prompt": "word " * 100_000}, "prompt"),
        (TEXT, {"prompt": ["hi", "word " * 100_000]}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": "word " * 100_000}]}, "messages"),
        (RESPONSES, {"input": "word " * 100_000}, "input"),
    ],
)
def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(
    ask: Ask, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], param: str
) -> None:
    encoded: list[int] = []

    def spy(name: str) -> None:
        original = getattr(Tokenizer, name)
        monkeypatch.setattr(Tokenizer, name, lambda self, text: encoded.append(len(text)) or original(self, text))

    spy("encode")
    spy("encode_rendered")
    error = refused(ask("POST", path, json=body), 400)
    assert (error["param"], error["code"]) == (param, "context_length_exceeded")
    assert "at least" in error["message"] and "this server's context of 512 tokens" in error["message"]
    assert max(encoded, default=0) < 100
    assert ask("POST", "/tokenize", json={"prompt": "word " * 1000}).json()["count"] > 512


def test_who_waits_too_long_gets_a_503(connect: Any, engine_of: Callable[..., Engine]) -> None:
    """Whole answers and streams alike: a stream has not begun before its first token."""
    service = AsyncEngine(engine_of(max_batch=1, max_wait_s=0.02)).start()

    async def run() -> None:
        async with connect(service=service) as client:
            body = {"messages": USER, "max_tokens": 200, "ignore_eos": True}
            bodies = [{**body, "stream": place % 2 == 0} for place in range(6)]
            answers = await asyncio.gather(*(client.post(CHAT, json=each) for each in bodies))
            late = [answer for answer in answers if answer.status_code != 200]
            assert len(late) == 5, [answer.status_code for answer in answers]
            for answer in late:
                assert refused(answer, 503)["code"] == "overloaded" and int(answer.headers["retry-after"]) >= 1
            assert "stretto_engine_timeouts_total 5.0" in (await client.get("/metrics")).text
            assert (await client.post(CHAT, json={**body, "max_tokens": 3})).status_code == 200

    asyncio.run(run())
    service.close()


def test_draining_refuses_and_says_so(connect: Any) -> None:
    async def run() -> None:
        async with connect() as client:
            client.app.state.gate.is_draining = True
            response = await client.post(CHAT, json={"messages": USER})
            assert refused(response, 503)["code"] == "draining"
            health = await client.get("/health")
            assert health.status_code == 503 and health.json()["status"] == "draining"

    asyncio.run(run())


def test_a_dead_engine_is_a_500_and_unhealthy(connect: Any, engine_of: Callable[..., Engine]) -> None:
    engine = engine_of()

    def broken() -> list[Any]:
        raise RuntimeError("the device is lost")

    engine.step = broken  # type: ignore[method-assign]
    service = AsyncEngine(engine).start()

    async def run() -> None:
        async with connect(service=service) as client:
            for _ in range(2):
                response = await client.post(CHAT, json={"messages": USER})
                assert "the device is lost" in refused(response, 500)["message"]
            assert (await client.get("/health")).status_code == 503
            assert (await client.get("/metrics")).status_code == 200
            assert client.app.state.gate.num_open == 0

    asyncio.run(run())
