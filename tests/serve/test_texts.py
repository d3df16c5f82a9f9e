"""/v1/completions, /tokenize and what generates nothing, against a real engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from stretto.engine.async_engine import AsyncEngine as Service
from stretto.engine.engine import Engine
from stretto.engine.reference import generate_naive
from stretto.engine.request import Sampling
from stretto.model.count import count
from stretto.model.hub import write_checkpoint
from stretto.model.spec import ModelConfig
from stretto.model.transformer import build
from stretto.serve.settings import ServedModel
from stretto.text.tokenizer import Tokenizer

Ask = Callable[..., httpx.Response]
PATH = "/v1/completions"


def complete(ask: Ask, **fields: Any) -> Any:
    response = ask("POST", PATH, json={"seed": 5, "max_tokens": 5, "ignore_eos": True, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def test_prompts_as_text_ids_and_lists(ask: Ask, tokenizer: Tokenizer) -> None:
    ids, other = tokenizer.encode("The cat"), tokenizer.encode("Ça va?")
    by_text = complete(ask, prompt="The cat")["choices"][0]["text"]
    assert complete(ask, prompt=ids)["choices"][0]["text"] == by_text
    texts = complete(ask, prompt=["The cat", "Ça va?"], n=2)["choices"]
    assert [choice["index"] for choice in texts] == [0, 1, 2, 3]
    assert [choice["text"] for choice in complete(ask, prompt=[ids, other], n=2)["choices"]] == [
        choice["text"] for choice in texts
    ]
    assert texts[0]["text"] == by_text


def test_streams_of_several_prompts(ask: Ask) -> None:
    whole = complete(ask, prompt=["The cat", "Ça va?"])["choices"]
    body = {"prompt": ["The cat", "Ça va?"], "seed": 5, "max_tokens": 5, "ignore_eos": True, "stream": True}
    frames = ask("POST", PATH, json=body).text.split("\n\n")
    assert frames[-2] == "data: [DONE]"
    texts = ["", ""]
    for frame in frames[:-2]:
        [choice] = json.loads(frame.removeprefix("data: "))["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in whole]


def test_echo_with_log_probabilities(ask: Ask, tokenizer: Tokenizer) -> None:
    prompt = "The cat sat"
    ids = tokenizer.encode(prompt)
    [choice] = complete(ask, prompt=prompt, echo=True, logprobs=2)["choices"]
    table = choice["logprobs"]
    assert choice["text"].startswith(prompt)
    assert "".join(table["tokens"][: len(ids)]) == prompt
    assert table["token_logprobs"][0] is None and all(value <= 0 for value in table["token_logprobs"][1:])
    assert len(table["tokens"]) == len(ids) + 5
    assert table["text_offset"][:2] == [0, len(table["tokens"][0])]
    assert all(len(top) == 2 for top in table["top_logprobs"][len(ids) :])
    [scored] = complete(ask, prompt=prompt, echo=True, logprobs=0, max_tokens=0)["choices"]
    assert scored["text"] == prompt
    assert scored["logprobs"]["token_logprobs"] == table["token_logprobs"][: len(ids)]


def test_special_spellings_are_the_clients_choice(ask: Ask, tokenizer: Tokenizer) -> None:
    text = "a<|im_end|>"
    parsed = ask("POST", "/tokenize", json={"prompt": text}).json()
    plain = ask("POST", "/tokenize", json={"prompt": text, "parse_special": False}).json()
    assert parsed["tokens"][-1] == tokenizer.rust.token_to_id("<|im_end|>") and parsed["count"] == 2
    assert plain["tokens"] == tokenizer.encode(text)
    for tokens in (parsed["tokens"], plain["tokens"]):
        assert ask("POST", "/detokenize", json={"tokens": tokens}).json() == {"prompt": text}


def test_the_tokens_are_those_of_the_slow_reference(ask: Ask, config: ModelConfig, tokenizer: Tokenizer) -> None:
    body = complete(ask, prompt="The cat", temperature=0, return_token_ids=True, model="x:half", max_tokens=12)
    subnet = config.subnet(3, 4, 2)
    sampling = Sampling(temperature=0, max_tokens=12, ignore_eos=True)
    expected = generate_naive(build(config, seed=3), tokenizer.encode("The cat"), sampling, subnet)
    assert body["choices"][0]["token_ids"] == list(expected.tokens)


def test_an_axis_replaces_the_presets_own(ask: Ask) -> None:
    elastic = complete(ask, prompt="a", model="x:half", elastic={"top_k": 1})["usage"]["elastic"]
    assert (elastic["layers"], elastic["experts"], elastic["top_k"]) == (3, 4, 1)
    assert elastic["asked"] == "half,top_k=1"
    elastic = complete(ask, prompt="a", elastic={"prefill": "full", "answer": "corner"})["usage"]["elastic"]
    assert (elastic["layers"], elastic["prefill"]["layers"], elastic["subnet"]) == (2, 4, "corner")


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
    assert info["has_chat_template"] and info["kernels"]


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
    service = Service(engine_of()).start()
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

    asyncio.run(run())
    service.close()


@pytest.mark.parametrize("floor", [None, "corner"])
def test_a_burst_gets_smaller_subnets_only_above_a_floor(connect: Any, floor: str | None) -> None:
    async def run() -> list[httpx.Response]:
        elastic = {"shrink_waiting": 2, "grow_waiting": 0, "refuse_waiting": 12}
        async with connect(floor=floor, elastic=elastic) as client:
            body = {"prompt": "The cat", "max_tokens": 8, "ignore_eos": True}
            named = {**body, "model": "x:half"}
            bodies = [named if number % 5 == 4 else body for number in range(20)]
            return await asyncio.gather(*(client.post(PATH, json=each) for each in bodies))

    answers = asyncio.run(run())
    assert {answer.status_code for answer in answers} <= {200, 429}
    done = [answer.json()["usage"]["elastic"] for answer in answers if answer.status_code == 200]
    left_open = [elastic for elastic in done if elastic["asked"] == "auto"]
    assert all(elastic["subnet"] == "half" for elastic in done if elastic["asked"] == "half")
    assert left_open[0]["given_reason"] == "default"
    if floor is None:
        assert {elastic["subnet"] for elastic in left_open} == {"full"}
        return
    assert {elastic["subnet"] for elastic in left_open} >= {"full", "corner"}
    assert all(elastic["layers"] >= 2 for elastic in left_open)
    assert any(elastic["given_reason"] == "load" for elastic in left_open)
    refused = [answer for answer in answers if answer.status_code == 429]
    assert refused and all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
