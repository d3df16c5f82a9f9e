from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher

from stretto.serve.completions import ChatBody
from stretto.serve.limits import parse_body
from stretto.serve.messages import (
    Call,
    CallReader,
    FieldError,
    ResponseFormat,
    Tool,
    answer_grammar,
    read_answer,
    read_call,
    tool_use,
)

ADD = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "integer"}}}}  # fmt: skip
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "s": "é </tool_call> {"}}</tool_call>'


def tools(*functions: dict) -> list[Tool]:
    return [Tool.model_validate({"type": "function", "function": function}) for function in functions]


def choice(value: object) -> object:
    body = {"messages": [{"role": "user", "content": ""}], "tool_choice": value}
    return parse_body(ChatBody, body).tool_choice


def test_content_and_calls() -> None:
    content, calls = read_answer(f"Let me see. {CALL}\n{CALL}")
    assert content == "Let me see."
    assert [call.name for call in calls] == ["add", "add"]
    assert json.loads(calls[0].arguments) == {"a": 2, "s": "é </tool_call> {"}
    assert calls[0].id != calls[1].id


@pytest.mark.parametrize(
    "text",
    ["", "plain", "<tool_call>{", "<tool_call>not json</tool_call>", "<tool_cal", "a < b", '<tool_call>{"no": 1}</tool_call>'],
)  # fmt: skip
def test_what_is_no_call_stays_text(text: str) -> None:
    assert read_answer(text) == (text, [])


def test_arguments_written_as_a_string() -> None:
    call = read_call('{"name": "f", "arguments": "{\\"a\\": 1}"}')
    assert call is not None and json.loads(call.arguments) == {"a": 1}


@given(st.lists(st.sampled_from(["Hi ", "<", "<tool_call>", "</tool_call>", CALL, "\n", '{"name"']), max_size=6), st.data())  # fmt: skip
def test_streamed_in_any_pieces_it_reads_the_same(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    reader = CallReader()
    pieces: list[str | Call] = []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        pieces += reader.push(text[start:end])
    pieces += reader.finish()
    whole = CallReader()
    expected = [*whole.push(text), *whole.finish()]

    def told(found: list[str | Call]) -> tuple[str, list[tuple[str, str]]]:
        content = "".join(piece for piece in found if isinstance(piece, str))
        return content, [(piece.name, piece.arguments) for piece in found if isinstance(piece, Call)]

    assert told(pieces) == told(expected)


def test_nothing_is_held_back_that_cannot_be_a_call() -> None:
    reader = CallReader()
    assert reader.push("a <tool") == ["a "]
    assert reader.push("box") == ["<toolbox"]


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


@pytest.mark.parametrize("form", [None, {"type": "json_schema", "json_schema": {"schema": {"type": "integer"}}}])
@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("wanted", ["auto", "required"])
def test_grammars_are_what_the_library_reads(form: dict | None, parallel: bool, wanted: str) -> None:
    shape = None if form is None else ResponseFormat.model_validate(form)
    grammar = answer_grammar(tool_use(tools(ADD, {"name": "mul"}), choice(wanted)), shape, parallel)
    if grammar is None:
        assert form is None and wanted == "auto"
        return
    assert grammar.kind == "lark"
    assert LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(grammar.text)) == ""


def test_a_format_without_tools_is_a_schema() -> None:
    none = tool_use([], None)
    assert answer_grammar(none, ResponseFormat(type="json_object"), True).kind == "json_object"  # type: ignore[union-attr]
    shape = ResponseFormat.model_validate({"type": "json_schema", "json_schema": {"schema": {"type": "integer"}}})
    grammar = answer_grammar(none, shape, True)
    assert grammar is not None and json.loads(grammar.text) == {"type": "integer"}
    assert answer_grammar(none, ResponseFormat(type="text"), True) is None
