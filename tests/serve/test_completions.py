"""/v1/completions against a real engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from stretto.engine.naive import generate_naive
from stretto.engine.request import Sampling
from stretto.model.spec import ModelConfig
from stretto.model.transformer import build
from stretto.serve import elastic
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


@pytest.mark.parametrize("floor", [None, "corner"])
def test_a_burst_gets_smaller_subnets_only_above_a_floor(
    connect: Any, floor: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, num_waiting in {"SHRINK_WAITING": 2, "GROW_WAITING": 0, "REFUSE_WAITING": 12}.items():
        monkeypatch.setattr(elastic, name, num_waiting)

    async def run() -> list[httpx.Response]:
        async with connect(floor=floor) as client:
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
