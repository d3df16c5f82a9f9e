"""The official client against a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from stretto.engine.async_engine import AsyncEngine
from stretto.server.elastic import ServedModel
from stretto.server.server import ServeSettings
from tests.server.live import live

openai = pytest.importorskip("openai")
PICK = {
    "name": "pick",
    "description": "picks",
    "parameters": {
        "type": "object",
        "properties": {"n": {"enum": [1, 2]}},
        "required": ["n"],
        "additionalProperties": False,
    },
}
USER: list[Any] = [{"role": "user", "content": "Hello"}]


class Answer(BaseModel):
    yes: bool


@pytest.fixture(scope="module")
def client(service: AsyncEngine, served: ServedModel) -> Iterator[Any]:
    settings = ServeSettings.model_validate({"api_keys": ["key"]})
    with (
        live(service, served, settings) as (url, _),
        openai.OpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0) as client,
    ):
        yield client


def test_models(client: Any) -> None:
    assert {model.id for model in client.models.list()} >= {"x", "x:half"}


def test_a_wrong_key_and_a_wrong_model(client: Any) -> None:
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="other").models.list()
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="y", messages=USER)
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="x", messages=USER, n=10**6)
    assert caught.value.param == "n"


def test_chat(client: Any) -> None:
    extra = {"elastic": {"layers": 2, "experts": 4, "top_k": 2}, "ignore_eos": True}
    answer = client.chat.completions.create(
        model="x:half", messages=USER, max_completion_tokens=5, seed=1, extra_body=extra
    )
    assert answer.choices[0].message.role == "assistant" and answer.usage.completion_tokens == 5
    assert answer.usage.elastic["layers"] == 2 and answer.usage.elastic["experts"] == 4


def test_chat_streams(client: Any) -> None:
    # The client's own reader of streams refuses answers that were cut, so this one ends by itself.
    fields = {"model": "x", "messages": USER, "max_tokens": 40, "seed": 2, "extra_body": {"regex": "(ab|cd){5}"}}
    whole = client.chat.completions.create(**fields)
    with client.chat.completions.stream(**fields, stream_options={"include_usage": True}) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.usage == whole.usage.model_copy(
        update={"elastic": final.usage.elastic, "prompt_tokens_details": final.usage.prompt_tokens_details}
    )
    assert len(final.choices[0].message.content) == 10 and final.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "pick"}}])
def test_chat_tools(client: Any, choice: Any) -> None:
    fields = {
        "model": "x",
        "messages": USER,
        "tools": [{"type": "function", "function": PICK}],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 200,
        "seed": 3,
    }
    message = client.chat.completions.create(**fields).choices[0].message
    [call] = message.tool_calls
    assert call.function.name == "pick" and json.loads(call.function.arguments)["n"] in (1, 2)
    with client.chat.completions.stream(**fields) as stream:
        for _ in stream:
            pass
        [streamed] = stream.get_final_completion().choices[0].message.tool_calls
    assert streamed.function.arguments == call.function.arguments
    follow = [
        *USER,
        {"role": "assistant", "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "3"},
    ]
    for said in (follow[1], message.model_dump()):  # the second has null in the fields that the answer has not
        follow[1] = said
        assert client.chat.completions.create(**{**fields, "messages": follow, "tool_choice": "none", "max_tokens": 3})


def test_chat_parses_a_schema(client: Any) -> None:
    answer = client.chat.completions.parse(model="x", messages=USER, response_format=Answer, max_tokens=100, seed=4)
    assert isinstance(answer.choices[0].message.parsed, Answer)


def test_completions(client: Any) -> None:
    fields = {
        "model": "x",
        "prompt": ["a", "b"],
        "max_tokens": 4,
        "seed": 5,
        "logprobs": 2,
        "extra_body": {"ignore_eos": True},
    }
    whole = client.completions.create(**fields)
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert len(whole.choices[0].logprobs.token_logprobs) == 4
    texts = ["", ""]
    for chunk in client.completions.create(**fields, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]


def test_responses(client: Any) -> None:
    first = client.responses.create(
        model="x:half",
        input="Hello",
        instructions="Be brief.",
        max_output_tokens=5,
        extra_body={"seed": 1, "ignore_eos": True},
    )
    assert first.status == "incomplete" and first.incomplete_details.reason == "max_output_tokens"
    assert first.usage.output_tokens == 5 and first.usage.elastic["subnet"] == "half" and first.store is False
    history = [{"role": "user", "content": "Hello"}, *[item.model_dump(exclude_none=True) for item in first.output]]
    again = client.responses.create(
        model="x", input=[*history, {"role": "user", "content": "More"}], max_output_tokens=4
    )
    assert again.output[0].type == "message"
    with pytest.raises(openai.BadRequestError, match="whole conversation"):
        client.responses.create(model="x", input="a", previous_response_id=first.id)


def test_responses_stream(client: Any) -> None:
    fields = {
        "model": "x",
        "input": "Hello",
        "max_output_tokens": 40,
        "include": ["message.output_text.logprobs"],
        "extra_body": {"seed": 1, "regex": "(ab|cd){5}"},
    }
    whole = client.responses.create(**fields)
    with client.responses.stream(**fields) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.output_text == whole.output_text
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-1] == "response.completed" and len(final.output_text) == 10
    assert [event.sequence_number for event in events] == list(range(len(events)))
    logprobs = final.output[0].content[0].logprobs
    assert len(logprobs) == final.usage.output_tokens
    assert [each.logprob for each in logprobs] == [each.logprob for each in whole.output[0].content[0].logprobs]


def test_a_response_that_is_cut_has_an_incomplete_item(client: Any) -> None:
    fields = {"model": "x", "input": "Hello", "max_output_tokens": 5, "extra_body": {"ignore_eos": True}}
    with client.responses.stream(**fields) as stream:
        events = list(stream)
    [item] = [event.item for event in events if event.type == "response.output_item.done"]
    assert events[-1].type == "response.incomplete"
    assert [item.status, events[-1].response.output[0].status] == ["incomplete"] * 2


def test_responses_tools_and_schemas(client: Any) -> None:
    tool = {"type": "function", "strict": True, **PICK}
    fields = {
        "model": "x",
        "input": "Pick.",
        "tools": [tool],
        "tool_choice": {"type": "function", "name": "pick"},
        "parallel_tool_calls": False,
        "extra_body": {"seed": 6},
    }
    [call] = client.responses.create(**fields).output
    assert call.type == "function_call" and json.loads(call.arguments)["n"] in (1, 2)
    with client.responses.stream(**fields) as stream:
        kinds = [event.type for event in stream]
        [streamed] = stream.get_final_response().output
    assert streamed.arguments == call.arguments and streamed.name == "pick"
    assert "response.function_call_arguments.done" in kinds and kinds[-1] == "response.completed"
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "2"}
    follow = [{"role": "user", "content": "Pick."}, call.model_dump(exclude_none=True), output]
    assert client.responses.create(**{**fields, "input": follow, "tool_choice": "auto"}, max_output_tokens=3).output
    parsed = client.responses.parse(
        model="x", input="Yes?", text_format=Answer, max_output_tokens=100, extra_body={"seed": 7}
    )
    assert isinstance(parsed.output_parsed, Answer)
