from __future__ import annotations

import pytest

from stretto.serve.completions import ChatBody
from stretto.serve.limits import parse_body
from stretto.serve.messages import (
    FieldError,
    Message,
    Prompts,
    Tool,
    tool_use,
)
from stretto.text.chat import CHATML
from stretto.text.tokenizer import train_tokenizer

ADD = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "integer"}}}}  # fmt: skip


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


def test_tools_that_the_template_leaves_out_are_refused() -> None:
    plain = "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"
    asked = [Message(role="user", content="weather?")]
    for template, shows in ((plain, False), (CHATML, True)):
        prompts = Prompts(train_tokenizer(iter(["weather in Paris"]), 300, template))
        assert prompts.chat(asked)
        if shows:
            assert len(prompts.chat(asked, tools(ADD))) > len(prompts.chat(asked))
        else:
            with pytest.raises(FieldError, match=r"^tools: this model's chat template shows none"):
                prompts.chat(asked, tools(ADD))
