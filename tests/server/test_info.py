"""What generates nothing: models, sizes, tokens, metrics and weights, against a real engine."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openapi_spec_validator
import pytest

from stretto.engine.async_engine import AsyncEngine
from stretto.engine.engine import Engine
from stretto.model.checkpoint import write_checkpoint
from stretto.model.counts import count
from stretto.model.spec import ModelConfig
from stretto.model.transformer import build
from stretto.server.completions import ChatBody, CompletionBody
from stretto.server.elastic import ServedModel
from stretto.server.info import DetokenizeBody, LoadWeightsBody, TokenizeBody
from stretto.server.openapi import BEYOND_SCHEMA, ENDPOINTS
from stretto.server.responses import ResponsesBody
from stretto.server.server import PLAYGROUND
from stretto.text.tokenizer import Tokenizer

Ask = Callable[..., httpx.Response]
PATH = "/v1/completions"


def test_special_spellings_are_the_clients_choice(ask: Ask, tokenizer: Tokenizer) -> None:
    text = "a<|im_end|>"
    parsed = ask("POST", "/tokenize", json={"prompt": text}).json()
    plain = ask("POST", "/tokenize", json={"prompt": text, "parse_special": False}).json()
    assert parsed["tokens"][-1] == tokenizer.rust.token_to_id("<|im_end|>") and parsed["count"] == 2
    assert plain["tokens"] == tokenizer.encode(text)
    for tokens in (parsed["tokens"], plain["tokens"]):
        assert ask("POST", "/detokenize", json={"tokens": tokens}).json() == {"prompt": text}


def test_a_tokenizer_that_a_client_may_use_from_afar(ask: Ask, tokenizer: Tokenizer) -> None:
    """What lm-eval asks before and while it counts tokens."""
    told = ask("GET", "/tokenizer_info").json()
    assert told["eos_token"] == tokenizer.eos_token and told["chat_template"] == tokenizer.chat_template
    assert told["vocab_size"] == tokenizer.vocab_size
    sent = {"prompt": told["eos_token"], "add_special_tokens": False}
    assert ask("POST", "/tokenize", json=sent).json()["tokens"] == [tokenizer.eos_id]


def interface(connect: Any, **settings: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """The document that a server answers with, and the methods of its routes but the page's."""

    async def run() -> tuple[dict[str, Any], dict[str, str]]:
        async with connect(**settings) as client:
            pages = {"/", *(f"/{file.name}" for file in PLAYGROUND.iterdir())}
            routes = {route.path.replace(":path", ""): route.methods for route in client.app.routes}
            methods = {path: "get" if "GET" in told else "post" for path, told in routes.items() if path not in pages}
            return (await client.get("/openapi.json")).json(), methods

    return asyncio.run(run())


def test_the_document_of_the_interface_names_every_route(connect: Any) -> None:
    for settings in ({}, {"admin_key": "root"}):
        document, methods = interface(connect, **settings)
        openapi_spec_validator.validate(document)
        assert {path: next(iter(told)) for path, told in document["paths"].items()} == methods


def test_the_document_of_the_interface_names_every_field(connect: Any) -> None:
    schemas = interface(connect, admin_key="root")[0]["components"]["schemas"]
    for body in (ChatBody, CompletionBody, ResponsesBody, TokenizeBody, DetokenizeBody, LoadWeightsBody):
        properties = schemas[body.__name__]["properties"]
        assert set(body.model_fields) <= set(properties)
        for name, field in body.model_fields.items():
            assert properties[name].get("description") == field.description
    chat = schemas["ChatBody"]["properties"]
    assert "Lark" in chat["grammar"]["description"] and "user" in chat  # the last is accepted without effect
    text = (Path(__file__).parents[2] / "docs" / "SERVING.md").read_text(encoding="utf-8")
    table = text.partition("Fields beside OpenAI's")[2].partition("\n\n")[2].partition("\n\n")[0]
    documented = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert len(documented) > 10 and set(documented) <= chat.keys() | schemas["CompletionBody"]["properties"].keys()
    for endpoint in ENDPOINTS:
        assert f"`{endpoint.path}`" in text, endpoint.path


def test_models_are_the_presets(ask: Ask) -> None:
    names = [entry["id"] for entry in ask("GET", "/v1/models").json()["data"]]
    assert names == ["x", "x:full", "x:half", "x:wide", "x:corner"]
    assert ask("GET", "/v1/models/x:half").json()["id"] == "x:half"


def test_info(ask: Ask, served: ServedModel, config: ModelConfig) -> None:
    info = ask("GET", "/api/info").json()
    assert info["limits"] == {"layers": 4, "min_layers": 1, "experts": 8, "top_k": 2}
    counts = count(config, config.subnet(2, 2, 1))
    corner = info["presets"]["corner"]
    assert corner["active_params"] == counts.active_params and corner["flops_per_token"] == counts.linear_flops
    assert corner["kv_bytes_per_token"] == 4 * counts.kv_elements
    assert ask("GET", "/api/cost?layers=2&experts=2&top_k=1").json() == corner
    assert ask("GET", "/api/cost").json() == info["presets"]["full"]
    for wrong in ("layers=9", "layers=-1", "layers=x", "layer=2", "experts=1&top_k=2"):
        assert ask("GET", f"/api/cost?{wrong}").status_code == 400
    assert (info["max_len"], info["vocab_size"]) == (served.max_len, config.vocab_size)
    assert info["has_chat_template"] and info["kernels"] and info["is_batch_invariant"] is False
    shown = {"shown_by_template": ["tools", "calls", "results"], "dialect": "hermes", "can_be_forced": True}
    assert info["tools"] == shown
    assert ask("GET", "/health").json() == {"status": "ok", "model": "x", "max_model_len": served.max_len}


def test_metrics(connect: Any) -> None:
    async def run() -> str:
        async with connect(floor="corner") as client:
            await client.post(PATH, json={"prompt": "a", "max_tokens": 4, "ignore_eos": True})
            await client.post(PATH, json={"prompt": "a", "model": "x:half", "max_tokens": 4, "ignore_eos": True})
            await client.post(PATH, json={"prompt": ""})
            await client.get("/made-up")
            return (await client.get("/metrics")).text

    text = asyncio.run(run())
    assert 'stretto_http_requests_total{path="/v1/completions",status="200"} 2.0' in text
    assert 'stretto_http_requests_total{path="/v1/completions",status="400"} 1.0' in text
    assert 'stretto_http_requests_total{path="other",status="404"} 1.0' in text and "made-up" not in text
    assert 'stretto_output_tokens_total{subnet="half"} 4.0' in text
    assert 'stretto_elastic_requests_total{reason="default",subnet="full"} 1.0' in text
    assert "stretto_first_token_seconds_count 2.0" in text
    assert "stretto_engine_num_free_pages" in text and "stretto_http_open 0.0" in text


def test_weights_are_swapped_by_the_admin_only(
    connect: Any, config: ModelConfig, tokenizer: Tokenizer, engine_of: Callable[..., Engine], tmp_path: Path
) -> None:
    tokenizer.save(tmp_path / "tokenizer")
    write_checkpoint(tmp_path / "new", build(config, seed=4), config, tokenizer_dir=tmp_path / "tokenizer")
    service = AsyncEngine(engine_of()).start()
    root = {"Authorization": "Bearer root"}
    body = {"prompt": "The cat", "temperature": 0, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}

    async def run() -> None:
        async with connect(service=service, admin_key="root") as client:
            before = (await client.post(PATH, json=body)).json()["choices"][0]
            swap = {"version": 8, "path": str(tmp_path / "new")}
            assert (await client.post("/admin/load_weights", json=swap)).status_code == 401
            bad = {**swap, "path": str(tmp_path / "nowhere")}
            assert (await client.post("/admin/load_weights", json=bad, headers=root)).status_code == 400
            same = (await client.post(PATH, json=body)).json()["choices"][0]
            assert same["token_ids"] == before["token_ids"] and same["weight_version"] == 7
            done = await client.post("/admin/load_weights", json=swap, headers=root)
            assert done.json() == {"weight_version": 8}, done.text
            after = (await client.post(PATH, json=body)).json()["choices"][0]
            assert after["token_ids"] != before["token_ids"] and after["weight_versions"] == [[8, 8]]

            last = (1 << 63) - 1
            for version, status in ((1 << 63, 400), (-1, 400), (1 << 31, 200), (last, 200)):
                answer = await client.post("/admin/load_weights", json={**swap, "version": version}, headers=root)
                assert answer.status_code == status, answer.text
                assert status == 200 or answer.json()["error"]["param"] == "version"
            again = (await client.post(PATH, json=body)).json()["choices"][0]
            assert again["token_ids"] == after["token_ids"] and again["weight_versions"] == [[last, 8]]

    asyncio.run(run())
    service.close()


def test_the_page_needs_no_key_and_no_other_file_is_served(ask: Ask) -> None:
    settings = {"api_keys": ("key",)}
    for path in ("/", "/index.html", "/app.js"):
        page = ask("GET", path, settings=settings)
        assert page.status_code == 200 and page.headers["cache-control"] == "no-cache"
        assert "default-src 'self'" in page.headers["content-security-policy"]
    for path in ("/server.py", "/%2e%2e/server.py", "/playground"):
        assert ask("GET", path).status_code == 404
        assert ask("GET", path, settings=settings).status_code == 401


@pytest.mark.parametrize("body", ["ChatBody", "CompletionBody", "ResponsesBody", "ShortChatBody"])
def test_the_document_states_the_bounds_that_the_server_enforces(ask: Callable[..., httpx.Response], body: str) -> None:
    properties = ask("GET", "/openapi.json").json()["components"]["schemas"][body]["properties"]
    [number] = [form for form in properties["temperature"]["anyOf"] if form["type"] == "number"]
    assert (number["minimum"], number["maximum"]) == (0, 100)
    for name, least in (("top_p", "exclusiveMinimum"), ("min_p", "minimum"), ("top_k", "minimum")):
        if name in properties:
            assert [form[least] for form in properties[name]["anyOf"] if form["type"] != "null"] == [0]


CHAT, TEXT, USER = "/v1/chat/completions", "/v1/completions", [{"role": "user", "content": "hi"}]
RESPONSES = "/v1/responses"


@pytest.mark.parametrize(
    ("path", "body", "is_valid"),
    [
        (CHAT, {"messages": USER, "max_tokens": 2}, True),
        (CHAT, {"messages": USER, "max_tokens": 2.0, "stop": None, "user": 5}, True),
        (CHAT, {"messages": USER, "max_tokens": 2, "stream_options": {"include_usage": None}}, True),
        (CHAT, {"messages": USER, "max_tokens": 0}, False),
        (CHAT, {"messages": USER, "temperature": 101}, False),
        (CHAT, {"messages": USER, "temperature": True}, False),
        (CHAT, {"messages": USER, "seed": "5"}, False),
        (CHAT, {"messages": USER, "n": 65}, False),
        (CHAT, {"messages": USER, "stop": ""}, False),
        (CHAT, {"messages": USER, "stop": ["a"] * 17}, False),
        (CHAT, {"messages": USER, "logit_bias": {"a": 1}}, False),
        (CHAT, {"messages": USER, "logit_bias": {"5": 101}}, False),
        (CHAT, {"messages": USER, "logit_bias": {"5": 1}, "max_tokens": 2}, True),
        (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 21}, False),
        (CHAT, {"messages": USER, "store": 0}, False),
        (CHAT, {"messages": [{"role": "user"}]}, False),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, False),
        (CHAT, {"messages": [*USER, {"role": "assistant"}, *USER], "max_tokens": 2}, True),
        (CHAT, {"messages": USER, "response_format": {"type": "json_schema"}}, False),
        (CHAT, {"messages": USER, "elastic": "half", "max_tokens": 2}, True),
        (CHAT, {"messages": USER, "elastic": {"layers": 0}}, False),
        (CHAT, {"messages": USER, "elastic": {"layers": 9}}, True),  # refused with a code for that
        (CHAT, {"messages": USER, "regex": "("}, True),
        (TEXT, {"prompt": ""}, True),  # refused with a code for that, unless the tokenizer adds tokens
        (TEXT, {"prompt": [[1], []]}, False),
        (TEXT, {"prompt": [True]}, False),
        (TEXT, {"prompt": [1, 2.0], "max_tokens": 2}, True),
        (TEXT, {"prompt": "a", "logprobs": 21}, False),
        (TEXT, {"prompt": "a", "max_tokens": 0}, True),
        (RESPONSES, {"input": "a", "stop": None, "max_output_tokens": 2}, True),
        (RESPONSES, {"input": "a", "store": True}, False),
        (RESPONSES, {"input": "a", "n": 2}, False),
        (RESPONSES, {"input": []}, False),
        (RESPONSES, {"input": [{"type": "function_call"}]}, False),
        (RESPONSES, {"input": [{"role": "user"}]}, False),
        (RESPONSES, {"input": "a", "include": ["x"]}, False),
        ("/tokenize", {}, False),
        ("/tokenize", {"prompt": "a", "messages": USER}, False),
        ("/tokenize", {"prompt": "a", "messages": None}, True),
        ("/tokenize", {"messages": []}, False),
        ("/tokenize", {"prompt": "a", "add_special_tokens": True}, True),
        ("/tokenize", {"messages": USER, "add_special_tokens": True}, False),
        ("/tokenize", {"messages": USER, "add_special_tokens": False}, True),
        ("/detokenize", {"tokens": []}, False),
        ("/detokenize", {"tokens": ["0"]}, False),
        ("/detokenize", {"tokens": [False]}, False),
        ("/detokenize", {"tokens": [1, 2], "model": None}, True),
        ("/detokenize", {"tokens": [10**9]}, True),
    ],
)
def test_the_document_says_which_bodies_are_accepted(ask: Ask, path: str, body: dict[str, Any], is_valid: bool) -> None:
    document = ask("GET", "/openapi.json").json()
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    validator = jsonschema.Draft202012Validator({**document, **schema})
    assert validator.is_valid(body) == is_valid
    answer = ask("POST", path, json=body)
    code = None if answer.is_success else answer.json()["error"]["code"]
    assert (answer.is_success or code in BEYOND_SCHEMA) == is_valid, answer.text
