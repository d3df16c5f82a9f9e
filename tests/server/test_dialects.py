"""Calls and reasoning in every dialect: what a template writes is read back, streamed, forced and cut."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from pydantic import TypeAdapter

from stretto.base.errors import UserError
from stretto.engine.grammar import GrammarCompiler
from stretto.server.calls import grammar as grammar_module
from stretto.server.calls.answers import AnswerReader, Said, read_answer
from stretto.server.calls.dialect import Call, Dialect, Piece, Think, Thought
from stretto.server.calls.formats import DIALECTS
from stretto.server.calls.recognise import dialect_of, think_of
from stretto.server.messages import Message, PlainFormat, Prompts, ResponseFormat, SchemaFormat, Tool, tool_use
from stretto.text.chat import CHATML, Arguments, render, tool_form
from stretto.text.tokenizer import Tokenizer, train_tokenizer
from tests.server.templates import MARKS, TEMPLATES

CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "s": "é </tool_call> {"}}</tool_call>'
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"$ref": "#/$defs/days"},
        "unit": {"enum": ["C", "F"]},
        "dry": {"type": "boolean"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer"}},
}
SCHEMAS = {"get_weather": WEATHER, "now": {}}
TOOLS = [Tool.model_validate({"type": "function", "function": {"name": n, "parameters": s}}) for n, s in SCHEMAS.items()]  # fmt: skip
SAID: list[tuple[str, dict[str, Any]]] = [
    ("get_weather", {"city": 'São "Paulo"', "days": 3, "unit": "C"}),
    ("get_weather", {"city": "12", "days": 1, "dry": True}),
]
GPT_OSS = next(each for each in DIALECTS if each.name == "gpt-oss")


def written(template: str, calls: list[tuple[str, dict[str, Any]]], content: str = "") -> str:
    """What the model's own turn would be."""
    from stretto.server.messages import _turn

    trees = [{"id": "call_123456789", "function": {"name": name, "arguments": tree}} for name, tree in calls]
    asked = Message(role="user", content="Well?")
    answer = Message.model_validate({"role": "assistant", "content": content, "tool_calls": trees})
    turns = [_turn(each) for each in (asked, answer)]
    before = render(template, turns[:1], add_generation_prompt=True)
    return render(template, turns).removeprefix(before).removesuffix("<|im_end|>\n")


def told(said: Said) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in said.calls]


@cache
def tokenizer_of(template: str, special: bool) -> Tokenizer:
    trained = train_tokenizer(iter([Path(__file__).read_text()]), 400, template)
    (trained.rust.add_special_tokens if special else trained.rust.add_tokens)(list(MARKS))
    return Tokenizer(trained.rust, trained.eos_token, template, trained.config)


@cache
def compiler_of(template: str, special: bool) -> GrammarCompiler:
    """One for all tests of this file, since each starts a process."""
    return GrammarCompiler(tokenizer_of(template, special))


@pytest.fixture(scope="module", autouse=True)
def compilers() -> Iterator[None]:
    """Ends the compilers' processes after the last test."""
    yield
    compiler_of.cache_clear()


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_template_writes_is_read(name: str) -> None:
    template = TEMPLATES[name]
    dialect = dialect_of(template)
    content = "" if dialect.is_first else "Let me see.\n"
    text = written(template, SAID, content)
    said = read_answer(AnswerReader(dialect, SCHEMAS), text)
    assert told(said) == SAID
    assert said.content == content.strip()
    assert len({call.id for call in said.calls}) == len(SAID)


TEXTS = st.text("x1\n{}; \"\\'<>[]=,(", max_size=6)


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(arguments=st.dictionaries(st.sampled_from(["a", "max-results", "größe"]), TEXTS, max_size=3))
@example(arguments={"a": "};{"})
def test_every_text_that_a_template_writes_is_read(name: str, arguments: dict[str, str]) -> None:
    schemas = {"f": {"properties": {key: {"type": "string"} for key in arguments}}}
    calls = [("f", arguments), ("f", {})]
    reader = AnswerReader(dialect_of(TEMPLATES[name]), schemas)
    assert told(read_answer(reader, written(TEMPLATES[name], calls))) == calls


def test_each_template_has_a_dialect_of_its_own() -> None:
    assert {name: dialect_of(template).name for name, template in TEMPLATES.items()} == {
        name: name for name in TEMPLATES
    }
    assert {each.name for each in DIALECTS} == {*TEMPLATES, "gpt-oss", "gemma-4"}
    assert dialect_of(CHATML) is dialect_of("") is DIALECTS[-1]


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_forced_call_is_what_the_template_writes(name: str, special: bool) -> None:
    """To the token, whether the marks are special tokens or ordinary ones."""
    tokenizer = tokenizer_of(TEMPLATES[name], special)
    prompts = Prompts(tokenizer)
    grammar = prompts.grammar(tool_use(TOOLS, "required"), None, parallel=True)
    assert grammar is not None
    ids = tokenizer.encode_rendered(written(TEMPLATES[name], SAID))
    state = compiler_of(TEMPLATES[name], special).compile(grammar)
    for place, token in enumerate(ids):
        assert state.accept(token), (tokenizer.decode(ids[:place]), tokenizer.decode([token]))
    assert state.accept(tokenizer.eos_id)
    hidden = tokenizer.special_ids - prompts.visible_ids
    text = tokenizer.decode([token for token in ids if token not in hidden])
    assert told(read_answer(prompts.reader(SCHEMAS, True), text)) == SAID


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_forced_call_follows_its_schema(name: str) -> None:
    tokenizer = tokenizer_of(TEMPLATES[name], False)
    grammar = Prompts(tokenizer).grammar(tool_use(TOOLS[:1], "required"), None, parallel=False)
    assert grammar is not None
    compiler = compiler_of(TEMPLATES[name], False)
    for wrong in (
        [("get_weather", {"city": "a"})],
        [("get_weather", {"city": "a", "days": "b"})],
        [("get_weather", {"city": "a", "days": 1, "unit": "K"})],
        [("now", {})],
        SAID,  # two
    ):
        state = compiler.compile(grammar)
        ids = [*tokenizer.encode_rendered(written(TEMPLATES[name], wrong)), tokenizer.eos_id]
        assert not all(state.accept(token) for token in ids), wrong


OPEN = {"find": {"type": "object", "properties": {"where": {"type": "string"}}, "required": ["where"]}}
"""Which does not say that nothing else goes."""
STRICT = [
    Tool.model_validate({"type": "function", "function": {"name": name, "parameters": schema, "strict": True}})
    for name, schema in {"get_weather": WEATHER, **OPEN}.items()
]


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_call_that_may_come_follows_a_strict_schema(name: str, special: bool) -> None:
    """Text is free, and what begins as a call goes on as one of the tools allows."""
    template, tokenizer = TEMPLATES[name], tokenizer_of(TEMPLATES[name], special)
    prompts = Prompts(tokenizer)
    assert prompts.grammar(tool_use(TOOLS, "auto"), None, parallel=True) is None
    asked = [Message(role="user", content="Well?")]
    loose = [
        Tool.model_validate(tool.model_dump() | {"function": tool.function.model_dump() | {"strict": None}})
        for tool in STRICT
    ]
    assert prompts.chat(asked, STRICT) == prompts.chat(asked, loose)
    grammar = prompts.grammar(tool_use(STRICT, "auto"), None, parallel=True)
    assert grammar is not None
    compiler = compiler_of(template, special)

    def reads(text: str) -> bool:
        state = compiler.compile(grammar)
        return all(state.accept(token) for token in [*tokenizer.encode_rendered(text), tokenizer.eos_id])

    content = "" if dialect_of(template).is_first else "Let me see.\n"
    assert reads("It is warm.\n\nIs it?") and reads(written(template, SAID, content))
    for tool, arguments in (
        ("get_weather", {"city": "a", "days": 1, "unit": "K"}),
        ("get_weather", {"city": "a"}),
        ("get_wether", {"city": "a", "days": 1}),
        ("find", {"where": "a", "when": "b"}),
    ):
        assert not reads(written(template, [(tool, arguments)], content)), (tool, arguments)
    assert reads(written(template, [("find", {"where": "a"})], content))


def schema(fields: dict[str, Any], **rest: Any) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": list(fields), **rest}


NUMBER, UNIT = {"type": "integer"}, {"type": "string", "enum": ["C", "F"]}
A, B = schema({"a": NUMBER}), schema({"b": NUMBER})
HELD: dict[str, tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]] = {
    "an optional choice": (schema({"u": {"anyOf": [UNIT, {"type": "null"}]}}), [{"u": "C"}, {"u": None}], [{"u": "K"}]),
    "a choice elsewhere": (
        schema({"u": {"anyOf": [{"$ref": "#/$defs/U"}, {"type": "null"}]}}, **{"$defs": {"U": UNIT}}),
        [{"u": "C"}, {"u": None}],
        [{"u": "K"}],
    ),
    "a constant": (schema({"u": {"const": "C"}}), [{"u": "C"}], [{"u": "K"}]),
    "numbers to choose from": (schema({"u": {"enum": [1, 2]}}), [{"u": 1}], [{"u": 3}, {"u": "x"}]),
    "a choice of anything": (schema({"u": {"enum": ["a", 1, None]}}), [{"u": "a"}, {"u": 1}, {"u": None}], [{"u": 3}]),
    "a pattern": (schema({"u": {"type": "string", "pattern": "^[A-Z]{3}$"}}), [{"u": "ABC"}], [{"u": "abc"}]),
    "a part that matches": (schema({"u": {"type": "string", "pattern": "/[0-9]"}}), [{"u": "a/1"}], [{"u": "a1"}]),
    "a pattern of two": (schema({"u": {"type": "string", "pattern": "^a|[/|]b$"}}), [{"u": "ax"}, {"u": "x|b"}], [{"u": "xax"}]),
    "a dollar": (schema({"u": {"type": "string", "pattern": "[(]c\\$"}}), [{"u": "a (c$ 5"}], [{"u": "(c"}]),
    "an optional pattern": (
        schema({"u": {"anyOf": [{"type": "string", "pattern": "^[A-Z]+$"}, {"type": "null"}]}}),
        [{"u": "ABC"}, {"u": None}],
        [{"u": "abc"}],
    ),
    "types of both": (schema({"u": {"type": ["string", "null"], "allOf": [{"type": ["null", "integer"]}]}}), [{"u": None}], [{"u": "x"}]),
    "limits of both": (
        schema({"u": {"type": ["string", "null"], "anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]}}),
        [{"u": "ABC"}, {"u": None}],
        [{"u": "ABCD"}],
    ),
    "values of both": (schema({"u": {"enum": ["a", "b", "c"], "allOf": [{"enum": ["b", "d"]}]}}), [{"u": "b"}], [{"u": "a"}, {"u": "d"}]),
    "items of both": (
        schema({"u": {"allOf": [{"type": "array", "items": {"type": "string"}}, {"items": {"maxLength": 2}}]}}),
        [{"u": ["ab"]}],
        [{"u": ["abc"]}, {"u": [1]}],
    ),
    "objects as items of both": (
        schema({"u": {"allOf": [{"type": "array", "items": A}, {"items": B}]}}),
        [{"u": [{"a": 1, "b": 2}]}],
        [{"u": [{"a": 1}]}, {"u": [{"a": 1, "b": 2, "c": 3}]}],
    ),
    "others of both": (
        {"allOf": [{"type": "object", "additionalProperties": {"type": "integer"}}, {"additionalProperties": {"minimum": 2}}]},
        [{"a": 2}],
        [{"a": 1}, {"a": "x"}],
    ),
    "values of its type": (schema({"u": {"type": "string", "enum": ["a", None]}}), [{"u": "a"}], [{"u": None}]),
    "a value that cannot be": (
        {"type": "object", "properties": {"a": NUMBER, "u": {"type": "string", "allOf": [NUMBER]}}}, [{"a": 1}, {}], [{"u": 1}, {"u": "x"}],
    ),
    "a length": (schema({"u": {"type": "string", "maxLength": 3}}), [{"u": "ABC"}], [{"u": "ABCD"}]),
    "objects in it": (schema({"o": A}), [{"o": {"a": 1}}], [{"o": {"a": 1, "b": 2}}, {"o": {}}]),
    "one of two objects": (schema({"o": {"anyOf": [A, B]}}), [{"o": {"a": 1}}, {"o": {"b": 1}}], [{"o": {"a": 1, "b": 2}}]),
    "a whole that is elsewhere": ({"$ref": "#/$defs/A", "$defs": {"A": A}}, [{"a": 1}], [{"a": "x"}, {"a": 1, "b": 1}]),
    "itself": (
        schema({"a": NUMBER, "kids": {"type": "array", "items": {"$ref": "#"}}}),
        [{"a": 1, "kids": [{"a": 2, "kids": []}]}],
        [{"a": 1, "kids": [{"a": 2}]}, {"a": 1, "kids": [3]}],
    ),
    "two at once": ({"allOf": [A, B]}, [{"a": 1, "b": 2}], [{"a": 1}, {"a": 1, "b": 2, "c": 3}]),
    "two at once in it": (schema({"o": {"allOf": [A, B]}}), [{"o": {"a": 1, "b": 2}}], [{"o": {"a": 1}}]),
    "two ways": ({"type": "object", "oneOf": [A, B]}, [{"a": 1}, {"b": 1}], [{}, {"a": 1, "b": 1}]),
    "an argument called properties": (schema({"properties": A}), [{"properties": {"a": 1}}], [{"properties": {"a": 1, "b": 3}}]),
    "an argument called default": (schema({"default": A}), [{"default": {"a": 1}}], [{"default": {"a": 1, "b": 2}}]),
    "nothing": ({}, [{}], [{"x": 1}]),
    "no properties": (schema({}), [{}], [{"x": 1}]),
    "others of a kind": (schema({"a": NUMBER}, additionalProperties=NUMBER), [{"a": 1, "z": 2}], [{"a": 1, "z": "t"}]),
    "names that are none in Python": (schema({"from": UNIT, "max-results": NUMBER}), [{"from": "C", "max-results": 1}], []),
}  # fmt: skip
"""What a strict function takes, what follows it and what does not."""


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("name", ["hermes", "glm", "qwen-coder", "lfm2"])
def test_a_strict_schema_holds_whatever_it_is_made_of(name: str, held: str) -> None:
    tree, right, wrong = HELD[held]
    told_of = {"type": "function", "function": {"name": "get.it-now", "parameters": tree, "strict": True}}
    tokenizer = tokenizer_of(TEMPLATES[name], True)
    prompts = Prompts(tokenizer)
    grammar = prompts.grammar(tool_use([Tool.model_validate(told_of)], "auto"), None, parallel=True)
    assert grammar is not None
    compiler = compiler_of(TEMPLATES[name], True)
    for arguments in (*right, *wrong):
        text = written(TEMPLATES[name], [("get.it-now", arguments)])
        state = compiler.compile(grammar)
        is_taken = all(state.accept(token) for token in [*tokenizer.encode_rendered(text), tokenizer.eos_id])
        assert is_taken is (arguments in right), text
        if arguments in right:
            assert told(read_answer(prompts.reader({"get.it-now": tree}, True), text)) == [("get.it-now", arguments)]


NAMED = {"properties": {"a": NUMBER, "in": {"type": "object", "properties": {"b": NUMBER}}}}


@pytest.mark.parametrize(
    ("tree", "right", "wrong"),
    [
        (NAMED, [{"a": 1, "in": {"b": 2}}], [{"a": 1, "more": "x"}, {"a": 1, "in": {"b": 2, "more": "x"}}]),
        ({**NAMED, "additionalProperties": True}, [{"a": 1, "more": "x"}], [{"a": 1, "in": {"more": "x"}}]),
        ({"type": "object", "properties": {}}, [{}], [{"more": "x"}]),
        ({"type": "object"}, [{}, {"more": "x"}], []),
    ],
)
@pytest.mark.parametrize("name", ["hermes", "glm", "lfm2"])
def test_a_forced_call_has_no_arguments_beyond_those_that_its_schema_names(
    name: str, tree: dict[str, Any], right: list[dict[str, Any]], wrong: list[dict[str, Any]]
) -> None:
    """Otherwise a model that is not trained for calls adds one after the other, up to its last token."""
    tool = Tool.model_validate({"type": "function", "function": {"name": "f", "parameters": tree}})
    tokenizer = tokenizer_of(TEMPLATES[name], True)
    grammar = Prompts(tokenizer).grammar(tool_use([tool], "required"), None, parallel=False)
    assert grammar is not None
    for arguments in (*right, *wrong):
        state = compiler_of(TEMPLATES[name], True).compile(grammar)
        ids = [*tokenizer.encode_rendered(written(TEMPLATES[name], [("f", arguments)])), tokenizer.eos_id]
        assert all(state.accept(token) for token in ids) is (arguments in right), arguments


@pytest.mark.parametrize("name", ["hermes", "glm", "lfm2"])
def test_a_function_beside_a_strict_one_takes_what_its_schema_allows(name: str) -> None:
    trees = {"f": (A, True), "g": ({"properties": {"b": NUMBER}}, None)}
    tools = [
        Tool.model_validate({"type": "function", "function": {"name": name, "parameters": tree, "strict": is_strict}})
        for name, (tree, is_strict) in trees.items()
    ]
    tokenizer = tokenizer_of(TEMPLATES[name], True)
    grammar = Prompts(tokenizer).grammar(tool_use(tools, "auto"), None, parallel=True)
    assert grammar is not None
    compiler = compiler_of(TEMPLATES[name], True)
    for calls, is_right in (
        ([("f", {"a": 1}), ("g", {"b": 1, "more": "x"})], True),
        ([("g", {"b": "x"})], False),
        ([("f", {"a": 1, "more": "x"})], False),
    ):
        state = compiler.compile(grammar)
        ids = [*tokenizer.encode_rendered(written(TEMPLATES[name], calls)), tokenizer.eos_id]
        assert all(state.accept(token) for token in ids) is is_right, calls
    wrong = compiler_of(TEMPLATES["hermes"], True).compile(
        Prompts(tokenizer_of(TEMPLATES["hermes"], True)).grammar(tool_use(tools, "auto"), None, True)
    )
    text = '<tool_call>{"name": "g", "arguments": 5}</tool_call>'
    assert not all(wrong.accept(token) for token in tokenizer_of(TEMPLATES["hermes"], True).encode_rendered(text))


@pytest.mark.parametrize("name", TEMPLATES)
def test_no_text_beside_strict_calls_is_read_as_one(name: str) -> None:
    """Whatever part of a call a model begins with; here no mark is a token."""
    template = TEMPLATES[name]
    tokenizer = train_tokenizer(iter([Path(__file__).read_text()]), 400, template)
    prompts, dialect = Prompts(tokenizer), dialect_of(template)
    grammar = prompts.grammar(tool_use(STRICT[:1], "auto"), None, parallel=True)
    assert grammar is not None and dialect is not None
    compiler, wrong = GrammarCompiler(tokenizer), written(template, [("get_weather", {"city": "a"})])
    for start in range(len(wrong)):
        text = ("" if dialect.is_first else "Well. ") + wrong[start:]
        if read_answer(AnswerReader(dialect, SCHEMAS), text).calls:
            state = compiler.compile(grammar)
            assert not all(state.accept(token) for token in [*tokenizer.encode(text), tokenizer.eos_id]), text


@pytest.mark.parametrize("name", ["hermes", "glm", "qwen-coder", "lfm2"])
@pytest.mark.parametrize(
    "tree",
    [
        {"properties": ["a"]},
        {"properties": {"a": 5}, "required": 5},
        {"properties": {"a": {"type": 5}}},
        {"properties": {"a": {"type": [{}], "enum": 5, "anyOf": {"x": 1}}}},
        {"properties": {"a": {"$ref": 5}}},
        {"properties": {"a": {"$ref": "#/x/y"}}},
        {"properties": {"a": {"$ref": "#/properties/a"}}},
        {"allOf": [{"$ref": "#"}, {"properties": {"a": {}}}]},
        {"properties": {"a": {"type": "string", "pattern": '/\n"', "minLength": -1}}},
        {"allOf": [{"anyOf": [{"properties": {"a": {}}}] * 40}] * 40},
    ],
)
def test_what_is_no_schema_is_no_fault_of_ours(name: str, tree: dict[str, Any]) -> None:
    """A call is read all the same; to force one is refused where that cannot be."""
    told_of = {"type": "function", "function": {"name": "f", "parameters": tree, "strict": True}}
    prompts = Prompts(tokenizer_of(TEMPLATES[name], True))
    with suppress(UserError):
        grammar = prompts.grammar(tool_use([Tool.model_validate(told_of)], "required"), None, True)
        assert grammar is not None
        compiler_of(TEMPLATES[name], True).compile(grammar)
    text = written(TEMPLATES[name], [("f", {"a": "x"})])
    assert told(read_answer(AnswerReader(dialect_of(TEMPLATES[name]), {"f": tree}), text)) == [("f", {"a": "x"})]


@pytest.mark.parametrize(
    ("name", "tree", "message"),
    [
        ("lfm2", {"properties": {"x y": {}}}, "cannot name the argument 'x y' of f"),
        ("glm", {"properties": {" a": {}}}, "cannot name the argument ' a' of f"),
        ("qwen-coder", {"properties": {"a>b": {}}}, "cannot name the argument 'a>b' of f"),
        ("pythonic", {"properties": {"a": NUMBER}, "minProperties": 1}, "cannot enforce minProperties"),
        ("glm", schema({"a": NUMBER}, minProperties="1"), "cannot enforce minProperties"),
        (
            "glm",
            {"properties": {"a": NUMBER, "b": NUMBER}, "dependencies": {"a": ["b"]}},
            "cannot enforce dependencies",
        ),
        ("glm", {"properties": {"a": NUMBER}, "unevaluatedProperties": NUMBER}, "cannot enforce unevaluatedProperties"),
    ],
)
def test_what_a_format_of_calls_cannot_express_is_refused(name: str, tree: dict[str, Any], message: str) -> None:
    told_of = {"type": "function", "function": {"name": "f", "parameters": tree}}
    with pytest.raises(UserError, match=f"^tools: this model's format of calls {message}"):
        Prompts(tokenizer_of(TEMPLATES[name], True)).grammar(
            tool_use([Tool.model_validate(told_of)], "required"), None, True
        )


def test_the_names_of_arguments_are_checked_once_for_all_alternatives(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check for each of a hundred alternatives took seconds."""
    checked: list[list[str]] = []
    monkeypatch.setattr(grammar_module, "unreadable_name", lambda dialect, names: checked.append(list(names)))
    tree = {"properties": {"a": NUMBER, "b": NUMBER}, "anyOf": [{"required": ["a"]}, {"properties": {"c": NUMBER}}]}
    told_of = {"type": "function", "function": {"name": "f", "parameters": tree}}
    Prompts(tokenizer_of(TEMPLATES["glm"], True)).grammar(
        tool_use([Tool.model_validate(told_of)], "required"), None, True
    )
    assert checked == [["a", "b", "c"]]


@pytest.mark.parametrize(
    "limits",
    [
        {"minProperties": 0},
        {"minProperties": 1, "required": ["a"]},
        {"propertyNames": {"type": "string"}},
        {"patternProperties": {}, "dependencies": {}},
        {"unevaluatedProperties": False},
    ],
)
@pytest.mark.parametrize("name", ["glm", "qwen-coder", "lfm2", "pythonic"])
def test_limits_that_all_calls_follow_are_accepted(name: str, limits: dict[str, Any]) -> None:
    told_of = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": NUMBER}, **limits}}}
    use = tool_use([Tool.model_validate(told_of)], "required")
    assert Prompts(tokenizer_of(TEMPLATES[name], True)).grammar(use, None, parallel=True) is not None


@pytest.mark.parametrize(
    "part", [{"type": "string", "allOf": [NUMBER]}, {"allOf": [{"type": "string", "const": "x"}, NUMBER]}]
)
@pytest.mark.parametrize("name", ["hermes", "glm"])
def test_parameters_that_nothing_follows_are_refused(name: str, part: dict[str, Any]) -> None:
    told_of = {"type": "function", "function": {"name": "f", "parameters": schema({"u": part})}}
    use = tool_use([Tool.model_validate(told_of)], "required")
    with pytest.raises(UserError, match=r"^(request: )?tools: .*('u' of f: its enum .*; correct|Unsatisfiable)"):
        compiler_of(TEMPLATES[name], True).compile(
            Prompts(tokenizer_of(TEMPLATES[name], True)).grammar(use, None, parallel=True)
        )


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (schema({"a": NUMBER, "u": {"type": "integer", "enum": ["1", "2"]}}), "no value is allowed for the argument 'u' of f: .*; correct"),
        (schema({"u": {"type": "float", "enum": [0.5]}}), "no value is allowed for the argument 'u' of f: .*; correct"),
        (schema({"u": {"enum": []}}), "no value is allowed for the argument 'u' of f: .*; correct"),
        ({"enum": []}, "no arguments are allowed by the parameters of f: .*; correct"),
    ],
)  # fmt: skip
def test_the_refusal_of_parameters_names_the_argument(tree: dict[str, Any], message: str) -> None:
    told_of = {"type": "function", "function": {"name": "f", "parameters": tree}}
    use = tool_use([Tool.model_validate(told_of)], "required")
    with pytest.raises(UserError, match=f"^tools: {message}"):
        Prompts(tokenizer_of(TEMPLATES["glm"], True)).grammar(use, None, parallel=True)


@pytest.mark.parametrize(
    "tree",
    [
        {"properties": {"a": {"$ref": "#/properties/a"}}},
        {"properties": {"a": {"anyOf": [{"type": "string"}] * 300}}},
        {"allOf": [{"$ref": "#"}, {"properties": {"a": {}}}]},
    ],
)
def test_a_schema_that_cannot_be_followed_to_its_end_forces_no_call(tree: dict[str, Any]) -> None:
    """It used to allow anything."""
    told_of = {"type": "function", "function": {"name": "f", "parameters": tree}}
    prompts = Prompts(tokenizer_of(TEMPLATES["glm"], True))
    with pytest.raises(UserError, match=r"^tools: resolving .* more than 256 steps; remove references"):
        prompts.grammar(tool_use([Tool.model_validate(told_of)], "required"), None, True)


def test_calls_in_python_are_read_as_values_alone() -> None:
    dialect = dialect_of(TEMPLATES["lfm2"])

    def read(text: str) -> list[tuple[str, Any]]:
        return told(read_answer(AnswerReader(dialect, {}), f"<|tool_call_start|>[{text}]<|tool_call_end|>"))

    text = """get-it(from="a b(c=1)", x=-5.5, y={"a": [1, true, None]}, z='it"s f(x)'), a.b(t=\"\"\"say "f(x)=1" ok\"\"\")"""
    values = {"from": "a b(c=1)", "x": -5.5, "y": {"a": [1, True, None]}, "z": 'it"s f(x)'}
    assert read(text) == [("get-it", values), ("a.b", {"t": 'say "f(x)=1" ok'})]
    for text in ("f(1)", "f(x=g(1))", 'f(x=b"a")', "f(x={(1, 2): 3})", "f(x=1+2j)", "(f)(x=1)"):
        assert read(text) == []
    assert read(f"f(x={'a' * 20000})") == []  # in linear time: with cubic time, this test does not end


@pytest.mark.parametrize("name", TEMPLATES)
def test_nothing_of_a_cut_call_is_told(name: str) -> None:
    dialect, content = dialect_of(TEMPLATES[name]), ""
    text = written(TEMPLATES[name], SAID, content)
    for end in range(len(text)):
        said = read_answer(AnswerReader(dialect, SCHEMAS), text[:end], is_cut=True)
        assert told(said) in ([], SAID[:1], SAID)
        assert said.content == "", (end, said.content)


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=25)
@given(data=st.data())
def test_streamed_in_any_pieces_it_reads_the_same(name: str, data: st.DataObject) -> None:
    template = TEMPLATES[name]
    call = written(template, SAID[:1])
    parts = ["Hi ", "<", "[", "</tool_call>", "<think>", "</think>\n", "\n", '{"name"', CALL, call]
    text = "".join(data.draw(st.lists(st.sampled_from(parts), max_size=6)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    reader, whole = (AnswerReader(dialect_of(template), SCHEMAS, Think("<think>", "</think>")) for _ in range(2))
    pieces: list[Piece] = []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        pieces += reader.push(text[start:end])
    pieces += reader.finish()

    def seen(found: list[Piece]) -> tuple[str, str, list[tuple[str, str]]]:
        content = "".join(piece for piece in found if isinstance(piece, str))
        thoughts = "".join(piece.text for piece in found if isinstance(piece, Thought))
        return content, thoughts, [(piece.name, piece.arguments) for piece in found if isinstance(piece, Call)]

    assert seen(pieces) == seen([*whole.push(text), *whole.finish()])


@pytest.mark.parametrize(
    "text",
    ["", "plain", "<tool_call>{", "<tool_call>not json</tool_call>", '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>',
     "<tool_cal", "a < b", '<tool_call>{"no": 1}</tool_call>'],
)  # fmt: skip
def test_what_is_no_call_stays_text(text: str) -> None:
    assert read_answer(AnswerReader(DIALECTS[-1]), text) == Said(text, "", ())


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"name": "Alice", "age": 3}', []),
        ('{"name": "Alice"}', []),
        ('{"name": "now", "age": 3}', []),
        ('{"name": "now"}', [("now", {})]),
        ('{"type": "function", "name": "now"}', [("now", {})]),
        ('{"type": "function", "function": {"name": "now", "parameters": {}}}', [("now", {})]),
        ('{"name": "other", "parameters": {}}', [("other", {})]),
    ],
)
def test_an_answer_in_json_is_no_call(text: str, calls: list[tuple[str, Any]]) -> None:
    said = read_answer(AnswerReader(dialect_of(TEMPLATES["llama"]), SCHEMAS), text)
    assert (told(said), said.content) == (calls, "" if calls else text)


def test_marks_in_arguments_and_white_space_between_calls() -> None:
    said = read_answer(AnswerReader(DIALECTS[-1]), f"Let me see. {CALL}\n{CALL}")
    assert (said.content, told(said)) == ("Let me see.", [("add", {"a": 2, "s": "é </tool_call> {"})] * 2)


BROKEN = '<tool_call>{"name": "add", "arguments": {"a": 2}</tool_call>'
MENTIONED = "The <tool_call> mark begins a call."


@pytest.mark.parametrize("before", [BROKEN, MENTIONED, f"{MENTIONED} {BROKEN}"])
def test_what_is_no_call_does_not_make_text_of_the_calls_after_it(before: str) -> None:
    for after in ("", "\n\n\nDone."):
        text = f"{before}\n{CALL}\n{CALL}{after[2:]}"
        reader = AnswerReader(DIALECTS[-1])
        streamed = [piece for letter in text for piece in reader.push(letter)] + reader.finish()
        said = read_answer(AnswerReader(DIALECTS[-1]), text)
        assert (said.content, told(said)) == (before + after, [("add", {"a": 2, "s": "é </tool_call> {"})] * 2)
        assert "".join(piece for piece in streamed if isinstance(piece, str)) == said.content
        assert len([piece for piece in streamed if isinstance(piece, Call)]) == 2


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_call_within_the_text_of_an_argument_is_no_call(name: str) -> None:
    dialect = dialect_of(TEMPLATES[name])
    calls = [("get_weather", {"city": written(TEMPLATES[name], [("now", {})]), "days": 1})]
    said = read_answer(AnswerReader(dialect, SCHEMAS), written(TEMPLATES[name], calls))
    assert told(said) == ([] if name == "mistral-11" else calls)  # its calls are divided by the mark


@pytest.mark.parametrize("name", ["glm", "qwen-coder", "lfm2"])
def test_closing_marks_within_an_argument_take_little_time(name: str) -> None:
    """If the parser reads the argument at each of them, this test takes minutes."""
    dialect = dialect_of(TEMPLATES[name])
    mark = dialect.close.pattern.replace("\\", "")
    calls = [("get_weather", {"city": f"{mark} x " * 6000, "days": 1})]
    assert told(read_answer(AnswerReader(dialect, SCHEMAS), written(TEMPLATES[name], calls))) == calls


def test_arguments_written_as_a_string() -> None:
    text = '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>'
    assert told(read_answer(AnswerReader(DIALECTS[-1]), text)) == [("f", {"a": 1})]


@pytest.mark.parametrize("arguments", ["ls -la", "[1]"])
@pytest.mark.parametrize("name", ["hermes", "deepseek", "mistral-11", "llama"])
def test_a_template_gets_arguments_that_are_no_object_as_text(name: str, arguments: str) -> None:
    call = {"id": "call00001", "function": {"name": "now", "arguments": arguments}}
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    prompts = Prompts(tokenizer_of(TEMPLATES[name], False))
    assert arguments in prompts.tokenizer.decode(prompts.chat([Message.model_validate(turn) for turn in turns]))


def test_arguments_that_are_null_are_none() -> None:
    text = '<tool_call>{"name": "f", "arguments": null}</tool_call>'
    assert told(read_answer(AnswerReader(DIALECTS[-1]), text)) == [("f", {})]


@pytest.mark.parametrize("arguments", ['{"a": "\\ud800"}', '"{\\"a\\": \\"\\\\ud800\\"}"'])
def test_half_a_surrogate_pair_is_no_character(arguments: str) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    [call] = read_answer(AnswerReader(DIALECTS[-1]), text).calls
    assert json.loads(call.arguments) == {"a": "\ufffd"} and call.arguments.encode()


def test_nothing_is_held_back_that_cannot_be_a_call() -> None:
    reader = AnswerReader(DIALECTS[-1])
    assert reader.push("a <tool") == ["a"]
    assert reader.push("box") == [" <toolbox"]
    assert AnswerReader().push("<tool_call>") == ["<tool_call>"]


class Counting:
    """A pattern that counts the characters that its searches read."""

    def __init__(self, pattern: Any) -> None:
        self._pattern, self.num_read = pattern, 0

    def search(self, text: str, start: int = 0, **rest: Any) -> Any:
        self.num_read += len(text) - start
        return self._pattern.search(text, start, **rest)

    def match(self, text: str, start: int = 0, **rest: Any) -> Any:
        self.num_read += len(text) - start
        return self._pattern.match(text, start, **rest)


@pytest.mark.parametrize("before", ["", "Well.", "<think>Hm.</think>"])
@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda each: each.name)
def test_the_time_for_white_space_is_linear(dialect: Dialect, before: str) -> None:
    """A model that repeats line breaks would otherwise block all other requests."""
    opening = Counting(dialect.open)
    reader = AnswerReader(replace(dialect, open=opening), SCHEMAS, Think("<think>", "</think>"))
    for text in [before, *["\n"] * 1000]:
        reader.push(text)
    assert opening.num_read < 1100
    assert not begins_with_white_space(dialect.open)  # otherwise one search of a long run is quadratic


def begins_with_white_space(mark: Any) -> bool:
    return mark.search("\n", partial=True).start() == 0


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda each: each.name)
def test_an_opening_mark_that_may_go_on_is_short(dialect: Dialect) -> None:
    marks = ["<tool_call>", "[", "{", "<|python_tag|>", " to=functions.f", " to=functions.f<|channel|>commentary"]
    for text in (mark + each * 300 for mark in marks for each in "\na"):
        mark = dialect.open.search(text, partial=True)
        assert not mark.partial or mark.start() == len(text)


def test_white_space_within_an_answer_is_kept_and_around_calls_removed() -> None:
    for parts, content in (
        (["Well.", "\n\n", CALL], "Well."),
        ([CALL, "\n\n", "def f(x):\n", "    ", "return", " ", "x", "\n"], "def f(x):\n    return x"),
        (["\n", CALL, "\n", CALL, "\n"], ""),
        (["Well. ", CALL, "\n", "So."], "Well. \nSo."),
        (["Well.", "\n"], "Well.\n"),
    ):
        reader = AnswerReader(DIALECTS[-1])
        pieces = [piece for part in parts for piece in reader.push(part)] + reader.finish()
        assert "".join(piece for piece in pieces if isinstance(piece, str)) == content
        assert read_answer(AnswerReader(DIALECTS[-1]), "".join(parts)).content == content


def test_values_without_quotes_are_of_the_kind_that_the_schema_says() -> None:
    dialect = dialect_of(TEMPLATES["glm"])
    kinds: list[tuple[Any, str, Any]] = [
        ({"type": "string"}, "12", "12"),
        ({"type": "integer"}, "12", 12),
        ({"type": ["string", "null"]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "12", "12"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({}, "[1, 2]", [1, 2]),
        ({}, "[1, 2", "[1, 2"),
        ({"type": "object"}, '{"a": NaN}', '{"a": NaN}'),
        ({"type": "array"}, "['a', 1, None]", ["a", 1, None]),
        ({"type": ["object", "null"]}, "{'a': True}", {"a": True}),
        ({"type": "array"}, "{'a': True}", "{'a': True}"),
        ({"type": "array"}, "['a', f(1)]", "['a', f(1)]"),
        ({"type": "array"}, "[b'a']", "[b'a']"),
        ({"type": ["array", "string"]}, "['a']", "['a']"),
        ({}, "['a']", "['a']"),
    ]
    for schema, text, value in kinds:
        answer = f"<tool_call>f<arg_key>k</arg_key><arg_value>{text}</arg_value></tool_call>"
        said = read_answer(AnswerReader(dialect, {"f": {"properties": {"k": schema}}}), answer)
        assert told(said) == [("f", {"k": value})]


def test_reasoning_comes_first_or_not_at_all() -> None:
    think = Think("<think>", "</think>")

    def read(text: str, is_thinking: bool = False, is_cut: bool = False) -> tuple[str, str]:
        said = read_answer(AnswerReader(None, think=think, is_thinking=is_thinking), text, is_cut)
        return said.reasoning, said.content

    assert read("<think>\nHm.\n</think>\n\nYes.") == ("Hm.", "Yes.")
    assert read("Hm.</think>Yes.", is_thinking=True) == ("Hm.", "Yes.")
    assert read("Yes, <think>is a mark.</think>") == ("", "Yes, <think>is a mark.</think>")
    assert read("<think>Hm", is_cut=True) == ("Hm", "")
    assert read("") == ("", "")
    assert think_of(TEMPLATES["glm"]) == think and think_of(CHATML) is None
    assert think_of("[THINK]…[/THINK]") == Think("[THINK]", "[/THINK]")


def test_a_checkpoint_may_declare_its_own_dialect() -> None:
    """The one transformers itself has for Qwen 3.5, and one that no grammar of ours spells."""
    declared: dict[str, Any] = {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "thinking": {"open": "<mull>", "close": "</mull>", "content": "text"},
            "tool_calls": {
                "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
                "close_pattern": r"</function>\s*</tool_call>",
                "repeats": True,
                "content": "xml-inline",
                "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            },
            "content": {"content": "text"},
        },
    }
    template = TEMPLATES["qwen-coder"]
    dialect = dialect_of(template, declared)
    assert not begins_with_white_space(dialect.open)
    text = written(template, SAID, "Well.")
    said = read_answer(AnswerReader(dialect, SCHEMAS, think_of(template, declared)), f"<mull>Hm.</mull>{text}")
    assert (said.reasoning, said.content, told(said)) == ("Hm.", "Well.", SAID) and dialect.call
    declared["fields"]["tool_calls"] |= {"open_pattern": r"<run (?P<name>\w+)>", "close_pattern": "</run>"}
    own = dialect_of(template, declared)
    said = read_answer(AnswerReader(own, SCHEMAS), "<run now></run>")
    assert told(said) == [("now", {})] and not own.call
    tokenizer = tokenizer_of(template, False)
    tokenizer = Tokenizer(tokenizer.rust, tokenizer.eos_token, template, {"response_template": declared})
    with pytest.raises(UserError, match="cannot be forced"):
        Prompts(tokenizer).grammar(tool_use(TOOLS, "required"), None, True)
    with pytest.raises(UserError, match="response_template"):
        dialect_of(template, {"fields": {}})


@pytest.mark.parametrize("form", [None, {"type": "json_schema", "json_schema": {"schema": {"type": "integer"}}}])
@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_grammars_are_what_the_library_reads(name: str, form: dict | None, parallel: bool, thinking: bool) -> None:
    prompts = Prompts(tokenizer_of(TEMPLATES[name], True))
    shape = None if form is None else TypeAdapter(ResponseFormat).validate_python(form)
    prompt = prompts.tokenizer.encode_rendered("<think>\n") if thinking else []
    grammar = prompts.grammar(tool_use(TOOLS, "auto" if form else "required"), shape, parallel, prompt)
    assert grammar is not None and grammar.kind == "lark"
    compiler_of(TEMPLATES[name], True).compile(grammar)
    assert LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(grammar.text)) in ("", None) or "<[" in grammar.text


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_model_may_call_a_tool_or_answer_in_the_format(name: str, special: bool) -> None:
    tokenizer = tokenizer_of(TEMPLATES[name], special)
    prompts, tools = Prompts(tokenizer), tool_use(TOOLS, "auto")
    person = schema({"name": {"type": "string"}, "age": NUMBER}, additionalProperties=False)
    right = [
        '{"name": "Alice", "age": 3}',
        '{"name": "get_weather", "age": 3}',
        *(written(TEMPLATES[name], SAID[:num]) for num in (1, 2)),
    ]
    wrong = ['{"name": "Alice"}', '{"age": 3}', written(TEMPLATES[name], [("get_wether", {"city": "a", "days": 1})])]
    for form, texts in ((person, right), ({"type": "object"}, [*right, '{"a": {"name": 1}}', "{}"])):
        shape = SchemaFormat.model_validate({"type": "json_schema", "json_schema": {"schema": form}})
        grammar = prompts.grammar(tools, shape, parallel=True)
        assert grammar is not None
        for text in (*texts, *(wrong if form is person else [])):
            state = compiler_of(TEMPLATES[name], special).compile(grammar)
            is_taken = all(state.accept(token) for token in [*tokenizer.encode_rendered(text), tokenizer.eos_id])
            assert is_taken is (text in texts), text


@pytest.mark.parametrize("special", [False, True])
def test_a_shape_is_asked_of_what_follows_the_reasoning(special: bool) -> None:
    tokenizer = tokenizer_of(TEMPLATES["hermes"], special)
    prompts = Prompts(tokenizer)
    shape = SchemaFormat.model_validate({"type": "json_schema", "json_schema": {"schema": {"type": "integer"}}})
    grammar = prompts.grammar(tool_use([], None), shape, True, tokenizer.encode_rendered("<think>\n"))
    assert grammar is not None
    compiler = compiler_of(TEMPLATES["hermes"], special)
    state = compiler.compile(grammar)
    ids = tokenizer.encode_rendered("Hm, 12.\n</think>\n\n12")
    assert all(state.accept(token) for token in ids) and state.accept(tokenizer.eos_id)
    assert not all(map(compiler.compile(grammar).accept, tokenizer.encode_rendered("Hm.</think>x")))


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("is_forced", [False, True])
def test_a_model_may_reason_before_the_shape_where_the_prompt_leaves_that_to_it(special: bool, is_forced: bool) -> None:
    tokenizer = tokenizer_of(TEMPLATES["hermes"], special)
    prompts, asked = Prompts(tokenizer), [Message(role="user", content="Well?")]
    call = written(TEMPLATES["hermes"], [("now", {})])
    shape = SchemaFormat.model_validate({"type": "json_schema", "json_schema": {"schema": {"type": "integer"}}})
    use, form = (tool_use(TOOLS, "required"), None) if is_forced else (tool_use([], None), shape)
    right, wrong = (call, "12") if is_forced else ("12", call)

    def reads(text: str, **variables: Any) -> bool:
        grammar = prompts.grammar(use, form, True, prompts.chat(asked, variables=variables))
        assert grammar is not None
        state = compiler_of(TEMPLATES["hermes"], special).compile(grammar)
        return all(state.accept(token) for token in [*tokenizer.encode_rendered(text), tokenizer.eos_id])

    thought = "<think>\nHm, 12.\n</think>\n\n"
    assert reads(right) and reads(thought + right) and not reads(thought + wrong) and not reads(thought)
    assert reads(right, enable_thinking=False) and not reads(thought + right, enable_thinking=False)


@pytest.mark.parametrize("special", [False, True])
def test_a_shape_is_asked_of_the_final_channel(special: bool) -> None:
    trained = train_tokenizer(iter([Path(__file__).read_text()]), 400, "<|channel|>analysis<|message|>")
    tokens = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>"] if special else []
    trained.rust.add_special_tokens(tokens)
    tokenizer = Tokenizer(trained.rust, trained.eos_token, trained.chat_template, trained.config)
    prompts = Prompts(tokenizer)
    prompts.dialect = GPT_OSS
    prompts.marks = {text: tokenizer.rust.token_to_id(text) for text in tokens}
    shape = SchemaFormat.model_validate({"type": "json_schema", "json_schema": {"schema": {"type": "integer"}}})
    thought, final = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant", "<|channel|>final<|message|>12"
    call = " to=functions.now<|channel|>commentary json<|message|>{}"
    compiler = GrammarCompiler(tokenizer)
    for use, text, ending in ((tool_use([], None), final, ""), (tool_use(TOOLS, "required"), call, "<|call|>")):
        grammar = prompts.grammar(use, None if use.forced else shape, True)
        assert grammar is not None
        for whole, is_right in ((text, True), (thought + text, True), (thought + "12", False)):
            state = compiler.compile(grammar)
            ids = [*tokenizer.encode_rendered(whole + ending), tokenizer.eos_id]
            assert all(state.accept(token) for token in ids) is is_right, whole
        said = read_answer(prompts.reader({"now": {}}, True), thought + text)
        assert (said.reasoning, said.content) == ("Hm.", "" if use.forced else "12")
        assert told(said) == ([("now", {})] if use.forced else [])


def test_a_format_without_tools_is_a_schema() -> None:
    none, prompts = tool_use([], None), Prompts(tokenizer_of(CHATML, False))
    assert prompts.grammar(none, PlainFormat(type="json_object"), True).kind == "json_object"  # type: ignore[union-attr]
    shape = SchemaFormat.model_validate({"type": "json_schema", "json_schema": {"schema": {"type": "integer"}}})
    grammar = prompts.grammar(none, shape, True)
    assert grammar is not None and json.loads(grammar.text) == {"type": "integer"}
    assert prompts.grammar(none, PlainFormat(type="text"), True) is None


# Templates as they are on the hub: those that TRL ships, where it is installed

REAL = (
    *(
        "cohere2",
        "deepseek_r1_distill",
        "deepseekv3",
        "gemma",
        "gemma3",
        "gemma4",
        "glm4moe",
        "gptoss",
        "lfm2",
        "lfm2_v2",
    ),
    *("llama3", "llama3_1", "llama3_2", "nemotron_3_nano", "phi3", "qwen2_5", "qwen3", "qwen3_5_think", "qwen3_6"),
)
VALUES = st.recursive(
    st.integers(-99, 10**6) | st.booleans() | st.text('aé1 "{,:\\', min_size=1).map(lambda text: f"x{text}x"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=2),
    max_leaves=4,
)


def real_template(name: str) -> str:
    trl = pytest.importorskip("trl")
    return (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()


@pytest.mark.parametrize("name", REAL)
@settings(max_examples=8, deadline=None)
@given(arguments=st.dictionaries(st.sampled_from(["city", "days", "at_once"]), VALUES, min_size=1))
def test_what_real_templates_write_is_read(name: str, arguments: dict[str, Any]) -> None:
    """Their own form, or ours where they have none: offered, called, answered and read back."""
    template, blank = real_template(name), {"bos_token": "", "eos_token": ""}
    tree = [
        {"id": "call00001", "type": "function", "function": {"name": "get_weather", "arguments": Arguments(arguments)}}
    ]
    asked = {"role": "user", "content": "Well?"}
    turn = {"role": "assistant", "content": "", "tool_calls": tree}
    told = {"role": "tool", "tool_call_id": "call00001", "name": "get_weather", "content": "it rains"}
    offered = [{"type": "function", "function": {"name": "get_weather", "description": "w", "parameters": WEATHER}}]
    prompt = render(template, [asked], offered, True, blank)
    assert "get_weather" in prompt and "city" in prompt
    text = render(template, [asked, turn], offered, variables=blank)
    plain = render(template, [asked, {"role": "assistant", "content": "answered"}], offered, variables=blank)
    assert "it rains" in render(template, [asked, turn, told], offered, True, blank)
    said_before = next(prompt[:num] for num in range(len(prompt), 0, -1) if text.startswith(prompt[:num]))
    text = text.removeprefix(re.sub(r"<\w*$", "", said_before)).removesuffix(plain.rpartition("answered")[2])
    dialect = dialect_of(template)
    assert dialect is not None and "".join(text.split()) not in prompt
    kinds = {str: "string", int: "integer", bool: "boolean", list: "array", dict: "object"}
    schema = {"properties": {key: {"type": kinds[type(value)]} for key, value in arguments.items()}}
    said = read_answer(AnswerReader(dialect, {"get_weather": schema}), text)
    assert [(call.name, json.loads(call.arguments)) for call in said.calls] == [("get_weather", arguments)]


def test_every_real_template_has_its_dialect_or_is_refused() -> None:
    found = {name: dialect_of(real_template(name)) for name in (*REAL, "muse_glimmer")}
    names = {name: dialect.name if dialect else None for name, dialect in found.items()}
    ours = {"cohere2", "deepseek_r1_distill", "gemma", "gemma3", "lfm2", "llama3", "phi3"}
    assert {name for name in names if not tool_form(real_template(name)).shows_calls} == ours
    assert names == {
        **dict.fromkeys([*ours, "qwen2_5", "qwen3"], "hermes"),
        **dict.fromkeys(["nemotron_3_nano", "qwen3_5_think", "qwen3_6"], "qwen-coder"),
        **dict.fromkeys(["llama3_1", "llama3_2"], "llama"),
        "deepseekv3": "deepseek",
        "gemma4": "gemma-4",
        "glm4moe": "glm",
        "gptoss": "gpt-oss",
        "lfm2_v2": "lfm2",
        "muse_glimmer": None,
    }


def test_channels_of_gpt_oss_are_reasoning_content_and_calls() -> None:
    template = real_template("gptoss")
    dialect, think = dialect_of(template), think_of(template)
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    for call in (
        ' to=functions.now<|channel|>commentary json<|message|>{"a": 1}<|call|>',
        '<|channel|>commentary to=functions.now <|constrain|>json<|message|>{"a": 1}',
    ):
        said = read_answer(AnswerReader(dialect, {"now": {}}, think), thought + call)
        assert (said.reasoning, said.content, told(said)) == ("Hm.", "", [("now", {"a": 1})])
    for text in (thought + "<|channel|>final<|message|>Yes.", "<|channel|>final<|message|>Yes."):
        for size in (1, 5, 100):
            reader = AnswerReader(dialect, None, think)
            pieces = [piece for at in range(0, len(text), size) for piece in reader.push(text[at : at + size])]
            assert "".join(each for each in [*pieces, *reader.finish()] if isinstance(each, str)) == "Yes."
    preamble = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.now<|message|>{}"
    said = read_answer(AnswerReader(dialect, {"now": {}}, think), preamble)
    assert (said.content, told(said)) == ("I look.", [("now", {})])


def test_messages_of_gpt_oss_follow_each_other_in_any_order() -> None:
    start = "<|start|>assistant<|channel|>"
    first, second = (f"<|channel|>analysis<|message|>Think {number}.<|end|>" for number in (1, 2))
    call = ' to=functions.now<|channel|>commentary json<|message|>{"a": 1}'
    for text, reasoning, content, calls in (
        (f"{first}<|start|>assistant{second}{start}final<|message|>Yes.", "Think 1.\nThink 2.", "Yes.", []),
        (
            f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{second}<|start|>assistant{call}",
            "Think 2.",
            "I look.",
            [("now", {"a": 1})],
        ),
    ):
        for size in (1, 7, len(text)):
            reader = AnswerReader(GPT_OSS, {"now": {}}, think_of("<|channel|>analysis<|message|>"))
            pieces = [piece for at in range(0, len(text), size) for piece in reader.push(text[at : at + size])]
            pieces += reader.finish()
            assert "".join(piece.text for piece in pieces if isinstance(piece, Thought)) == reasoning
            assert "".join(piece for piece in pieces if isinstance(piece, str)) == content
            found = [(piece.name, json.loads(piece.arguments)) for piece in pieces if isinstance(piece, Call)]
            assert found == calls


def test_kimis_calls_are_read_and_numbered_through_the_conversation() -> None:
    """Its template shows a function's name in the call's id only, and results by the same id."""
    template = TEMPLATES["kimi-k2"]
    begin, end = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"

    def call(name: str, arguments: str = "{}") -> str:
        return f"<|tool_call_begin|>{name}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"

    marked = json.dumps({"a": "<|tool_call_end|>é"}, ensure_ascii=False)
    text = f"Well. {begin}\n{call('functions.get.it-now:7', marked)} {call('now:8')}{end}"
    reader, pieces = AnswerReader(dialect_of(template), {}), []
    for letter in text:
        pieces += reader.push(letter)
    pieces += reader.finish()
    found = [(piece.name, json.loads(piece.arguments)) for piece in pieces if isinstance(piece, Call)]
    assert found == told(read_answer(AnswerReader(dialect_of(template), {}), text))
    assert found == [("get.it-now", {"a": "<|tool_call_end|>é"}), ("now", {})]
    for wrong in (call("functions.now"), call(":0"), call("functions.now:0", "{"), f"{begin}{end}"):
        assert told(read_answer(AnswerReader(dialect_of(template), {}), wrong)) == []

    def calling(*calls: tuple[str, str]) -> dict[str, Any]:
        functions = [
            ({"id": key} if key else {}) | {"function": {"name": name, "arguments": {}}} for key, name in calls
        ]
        return {"role": "assistant", "content": "", "tool_calls": functions}

    for ids in (("one", "two", "one"), ("", "", ""), ("functions.f:0", "functions.g:1", "functions.f:2")):
        answers = [
            {"role": "tool", "content": content} | ({"tool_call_id": key} if key else {})
            for key, content in zip(ids, "ABC", strict=True)
        ]
        first = answers[:2] if not ids[0] else answers[1::-1]
        turns = [
            {"role": "user", "content": "u"},
            calling((ids[0], "f"), (ids[1], "g")),
            *first,
            calling((ids[2], "f")),
            answers[2],
        ]
        shown = render(template, turns)
        assert re.findall(r"<\|tool_call_begin\|>([^<]*)<", shown) == [
            "functions.f:0",
            "functions.g:1",
            "functions.f:2",
        ]
        assert sorted(re.findall(r"## Return of (.*)\n(.)", shown)) == [
            ("functions.f:0", "A"),
            ("functions.f:2", "C"),
            ("functions.g:1", "B"),
        ]
