from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from stretto.engine.grammar import GrammarCompiler
from stretto.server.calls.answers import read_answer
from stretto.server.completions import ChatBody
from stretto.server.limits import parse_body
from stretto.server.messages import (
    Body,
    FieldError,
    Message,
    Prompts,
    Tool,
    tool_use,
)
from stretto.server.responses import ResponsesBody, as_chat
from stretto.text.chat import CHATML
from stretto.text.tokenizer import train_tokenizer
from tests.text.test_chat import BARE

ADD = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "integer"}}}}  # fmt: skip

MUL = {"type": "function", "function": {"name": "mul"}}


def tools(*functions: dict) -> list[Tool]:
    return [Tool.model_validate({"type": "function", "function": function}) for function in functions]


def choice(value: object) -> object:
    body = {"messages": [{"role": "user", "content": ""}], "tool_choice": value}
    return parse_body(ChatBody, body).tool_choice


def test_choices() -> None:
    both = tools(ADD, {"name": "mul"})
    assert tool_use(both, choice("auto")).offered == tuple(both)
    assert not tool_use(both, choice("auto")).forced
    assert tool_use(both, choice("none")).offered == ()
    assert tool_use(both, choice("required")).forced
    named = tool_use(both, choice({"type": "function", "function": {"name": "mul"}}))
    assert named.forced and [tool.function.name for tool in named.offered] == ["mul"]
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "add"}}]}
    use = tool_use(both, choice({"type": "allowed_tools", "allowed_tools": allowed}))
    assert not use.forced and [tool.function.name for tool in use.offered] == ["add"]


CHAT: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "be brief", "name": "s"},
        {"role": "user", "content": [{"type": "text", "text": "hi", "annotations": []}]},
        {
            "role": "assistant",
            "content": "so",
            "refusal": "",
            "annotations": [],
            "audio": {},
            "function_call": {},
            "tool_calls": [{"id": "c", "type": "function", "index": 0, "function": {"name": "add", "arguments": "{}"}}],
            "reasoning_content": "so",
        },
        {"role": "tool", "content": "3", "tool_call_id": "c"},
    ],
    "tools": [{"type": "function", "function": {"name": "add", "description": "sum", "strict": True}}],
    "tool_choice": {"type": "function", "function": {"name": "add"}},
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "description": "b", "strict": True}},
    "stream_options": {"include_usage": True},
    "elastic": {"layers": 1},
}
RESPONSES: dict[str, Any] = {
    "input": [
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]},
        {"type": "function_call", "id": "f", "call_id": "c", "name": "add", "arguments": "{}", "status": "completed"},
        {"type": "function_call_output", "call_id": "c", "output": "3"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "3", "logprobs": []}]},
        {"type": "message", "role": "user", "content": "thanks"},
    ],
    "tools": [{"type": "function", "name": "add", "description": "sum", "strict": True}],
    "tool_choice": {"type": "function", "name": "add"},
    "text": {"format": {"type": "json_schema", "name": "a", "strict": True}, "verbosity": "low"},
}


def places(tree: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every field of every object in ``tree``."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        if isinstance(tree, dict):
            yield (*before, key)
        yield from places(value, (*before, key))


def outcome(kind: type[Body], tree: dict[str, Any]) -> Body | str:
    try:
        return parse_body(kind, tree)
    except FieldError as error:
        return str(error)


@pytest.mark.parametrize(
    ("kind", "place"),
    [(kind, place) for kind, tree in ((ChatBody, CHAT), (ResponsesBody, RESPONSES)) for place in places(tree)],
    ids=lambda part: part.__name__ if isinstance(part, type) else ".".join(map(str, part)),
)
def test_null_is_a_field_that_is_left_out(kind: type[Body], place: tuple[Any, ...]) -> None:
    """At every depth. A required field is missing then, which is an error of one line."""
    tree = CHAT if kind is ChatBody else RESPONSES
    assert isinstance(outcome(kind, tree), kind)
    null, without = deepcopy(tree), deepcopy(tree)
    for changed in (null, without):
        parent: Any = changed
        for step in place[:-1]:
            parent = parent[step]
        if changed is null:
            parent[place[-1]] = None
        else:
            del parent[place[-1]]
    given, expected = outcome(kind, null), outcome(kind, without)
    if isinstance(expected, str):
        assert isinstance(given, str) and given.startswith(place[0]) and "\n" not in given
    else:
        assert given == expected


def test_reasoning_goes_to_the_answer_of_its_own_turn() -> None:
    def reasoning(text: str) -> dict[str, Any]:
        return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}

    answer = {"role": "assistant", "content": "later"}
    for items, thoughts in (
        ([reasoning("first"), reasoning("second"), answer], ["first\nsecond"]),
        ([reasoning("first"), answer, reasoning("second"), answer], ["first", "second"]),
        ([reasoning("first"), {"role": "user", "content": "go"}, answer], [None]),
    ):
        chat = as_chat(parse_body(ResponsesBody, {"input": [{"role": "user", "content": "q"}, *items]}))
        assert [each.reasoning_content for each in chat.messages if each.role == "assistant"] == thoughts


@pytest.mark.parametrize(
    ("functions", "wanted", "problem"),
    [
        ([ADD, ADD], "auto", "same name"),
        ([ADD], {"type": "function", "function": {"name": "sub"}}, "'sub' is not among"),
        ([], "required", "no tools"),
    ],
)
def test_impossible_choices(functions: list[dict], wanted: object, problem: str) -> None:
    with pytest.raises(FieldError, match=problem):
        tool_use(tools(*functions), choice(wanted))


@pytest.fixture(params=["chatml", "bare"])
def prompts(request: pytest.FixtureRequest) -> Prompts:
    """A template with tools, and one that knows none."""
    template = CHATML if request.param == "chatml" else BARE
    return Prompts(train_tokenizer(iter(["weather in Paris, add a and b", json.dumps(ADD)]), 300, template))


def test_every_choice_of_tools_works_with_every_template(prompts: Prompts) -> None:
    asked, both = [Message(role="user", content="weather?")], tools(ADD, {"name": "mul", "description": "times"})
    plain, shown = prompts.chat(asked), prompts.tokenizer.decode(prompts.chat(asked, both))
    assert "times" in shown and '{"type": "object", "properties"' in shown
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    for wanted, forced, offered in (("auto", False, 2), ("required", True, 2), ("none", False, 0), (MUL, True, 1)):
        use = tool_use(both, choice(wanted))
        assert (prompts.chat(asked, use.offered) == plain) == (not offered) and len(use.offered) == offered
        grammar = prompts.grammar(use, None, parallel=True)
        assert (grammar is not None) == forced
        if grammar is not None:
            state = GrammarCompiler(prompts.tokenizer).compile(grammar)
            ids = prompts.tokenizer.encode_rendered(call)
            assert all(map(state.accept, ids)) == (wanted == "required")
    for most, num in ((None, 2), (1, 1)):
        said = read_answer(prompts.reader({"add": {}}, True, max_calls=most), f"{call}\n{call}")
        assert (len(said.calls), said.content) == (num, "")


def test_calls_that_nothing_can_read_are_refused() -> None:
    odd = CHATML.replace("'<tool_call>'", "'(((call '").replace("'</tool_call>'", "')))'")
    prompts = Prompts(train_tokenizer(iter(["weather in Paris"]), 300, odd))
    asked = [Message(role="user", content="weather?")]
    assert prompts.chat(asked) and prompts.dialect is None
    with pytest.raises(
        FieldError, match=r"^tools: the format of tool calls in this model's chat template is not known"
    ):
        prompts.chat(asked, tools(ADD))
    with pytest.raises(FieldError, match=r"^tool_choice: calls cannot be forced"):
        prompts.grammar(tool_use(tools(ADD), "required"), None, True)
    bare = Prompts(replace(prompts.tokenizer, chat_template=None))
    with pytest.raises(FieldError, match=r"^tools: this checkpoint has no chat template; leave them out, or put"):
        bare.chat(asked, tools(ADD))
