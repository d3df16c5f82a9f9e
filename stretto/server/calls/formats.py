"""Formats in which models write tool calls, one per family: `DIALECTS` has a row for each, with its parser."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from typing import Any

import regex

from stretto.server.calls.dialect import (
    ARGUMENTS,
    INDEX,
    KEY,
    LINE,
    NAME,
    SPACE,
    VALUE,
    Dialect,
    Found,
    Pattern,
    Read,
    Schemas,
    Spelling,
)
from stretto.server.calls.json_text import parse_json
from stretto.server.schemas import Schema, argument, constants, kinds


def tree_calls(tree: Any) -> Found:
    """Calls of the form ``{"name": …, "arguments": {…}}`` (Llama: ``parameters``), alone, in a list, or nested as in OpenAI's API."""
    if isinstance(tree, list) and tree:
        return [call for each in tree for call in tree_calls(each)]
    tree = tree.get("function", tree) if isinstance(tree, dict) else None
    if not isinstance(tree, dict) or not isinstance(tree.get("name"), str):
        raise ValueError("no call")
    return [(tree["name"], tree.get("arguments", tree.get("parameters", {})))]


def _json_calls(body: str, groups: Mapping[str, str], schemas: Schemas) -> Found:
    return tree_calls(parse_json(groups.get("lead", "") + body))


_SEMICOLON = regex.compile(r'"(?:[^"\\]|\\.)*+(?:"|\Z)(*SKIP)(*FAIL)|(?<=\})\s*;\s*(?=\{)')
"""The separator of two JSON objects; strings are skipped."""


def _json_sequence(body: str, groups: Mapping[str, str], schemas: Schemas) -> Found:
    """Calls that are separated by semicolons. The format has no mark, so an object without arguments is a call only if it consists of the
    name of a tool; otherwise it is an answer in JSON."""
    trees = [parse_json(part) for part in _SEMICOLON.split(groups.get("lead", "") + body)]
    calls = tree_calls(trees)
    for tree, (name, _) in zip(trees, calls, strict=True):
        keys = tree.get("function", tree).keys()
        if not keys & {"arguments", "parameters"} and (keys - {"name", "type"} or name not in schemas):
            raise ValueError("no call")
    return calls


def _named(head: str, tail: str = "", between: str | None = None) -> Read:
    """A parser of calls that consist of ``head``, which captures the name, the arguments as JSON, and ``tail``."""
    form = regex.compile(rf"\s*+{head}(?P<arguments>.*){tail}\s*", regex.DOTALL)

    def read(body: str, groups: Mapping[str, str], schemas: Schemas) -> Found:
        matches = [form.fullmatch(part) for part in ([body] if between is None else body.split(between))]
        if None in matches:
            raise ValueError("no call")
        return [(match["name"], parse_json(match["arguments"])) for match in matches]

    return read


def _tagged(head: str, pair: str, tag: str) -> Read:
    """A parser of calls that consist of ``head``, which captures the name, and one ``pair`` for each argument, which captures its ``key``
    and ``value`` and ends in ``tag``."""
    form, pairs = regex.compile(rf"\s*+{head}", regex.DOTALL), regex.compile(rf"\s*{pair}\s*", regex.DOTALL)

    def read(body: str, groups: Mapping[str, str], schemas: Schemas) -> Found:
        match = form.match(body)
        # Most texts that end within a value are recognised by their end. Reading the value would take much longer.
        if match is None or (body[match.end() :].strip() and not body.rstrip().endswith(tag)):
            raise ValueError("no call")
        at, arguments, name = match.end(), {}, match["name"].strip()
        schema = schemas.get(name, {})
        while (each := pairs.match(body, at)) is not None:
            key = each["key"].strip()
            arguments[key] = typed(each["value"], argument(schema, key))
            at = each.end()
        if body[at:].strip():
            raise ValueError("no argument")
        return [(name, arguments)]

    return read


def typed(text: str, known: Sequence[Schema]) -> Any:
    """Value of the unquoted ``text`` of an argument whose schema is one of ``known``: a string if the schema allows one, otherwise JSON if
    ``text`` is JSON."""
    named = {kind for way in known for kind in kinds(way)}
    if named == {"string"} or any(text in constants(way) for way in known):
        return text
    if "boolean" in named and "string" not in named and text in ("True", "False"):  # as Qwen 3.5's template spells them
        return text == "True"
    try:
        value = parse_json(text)
    except ValueError:
        return text if "string" in named else _python_value(text, named)
    return text if "string" in named and value is not None else value


def _python_value(text: str, named: set[str]) -> Any:
    """The list or object that ``text`` spells in Python's syntax, if ``named``, the types of the schema, has that type; otherwise ``text``."""
    kind = {"[": "array", "{": "object"}.get(text.strip()[:1])
    if kind not in named:
        return text
    try:
        return parse_json(json.dumps(ast.literal_eval(text.strip())))
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return text


_PARTS = regex.compile(
    r"""("{3}(?s:.*?)"{3}|'{3}(?s:.*?)'{3}|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')"""
    r"""|(?<![^\s"'()\[\]{},:=])([^\s"'()\[\]{},:=]++)(?=\s*[(=])|(?<![\w.])(true|false|null)(?![\w.])"""
)
"""Strings, names of functions and keys, and JSON's constants, in calls in Python's syntax."""
_CONSTANTS = {"true": "True", "false": "False", "null": "None"}


def _python_calls(body: str, groups: Mapping[str, str], schemas: Schemas) -> Found:
    """Calls of the form ``[name(key=value, …), …]``. Values are Python's literals or ``true``, ``false``, ``null``. Names of functions and
    keys that Python does not allow (``from``, ``max-results``) are replaced by numbered names before parsing."""
    if not body.rstrip().endswith("]"):  # reading the calls before this is noticed would take much longer
        raise ValueError("no end")
    names: list[str] = []

    def numbered(match: Any) -> str:
        if match[1] or match[3]:
            return match[1] or _CONSTANTS[match[3]]
        names.append(match[2])
        return f"_{len(names) - 1}"

    def read(node: ast.expr) -> tuple[str, Any]:
        assert isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.args
        arguments = {names[int(each.arg[1:])]: ast.literal_eval(each.value) for each in node.keywords if each.arg}
        return names[int(node.func.id[1:])], parse_json(json.dumps(arguments))

    try:
        tree = ast.parse(_PARTS.sub(numbered, groups.get("lead", "") + body.strip()), mode="eval").body
        assert isinstance(tree, ast.List) and tree.elts
        return [read(node) for node in tree.elts]
    except (SyntaxError, TypeError, AssertionError, RecursionError, MemoryError) as error:
        raise ValueError from error


def _channel_call(body: str, groups: Mapping[str, str], schemas: Schemas) -> Found:
    """A call whose name is part of the opening mark; the body is the arguments as JSON."""
    return [(groups["name"], parse_json(body.removesuffix("<|call|>")))]


def _bare_call(body: str, groups: Mapping[str, str], schemas: Schemas) -> Found:
    """Calls of the form ``call:name{key:<|"|>text<|"|>,…}``: JSON with other quotes."""
    match = regex.fullmatch(r"\s*call:(?P<name>[\w.-]+)(?P<arguments>\{.*\})\s*", body, regex.DOTALL)
    if match is None:
        raise ValueError("no call")
    parts = match["arguments"].split('<|"|>')
    parts[::2] = (regex.sub(r"(?<=[{,])\s*([\w.-]+)\s*:", r'"\1":', part) for part in parts[::2])
    parts[1::2] = (json.dumps(part) for part in parts[1::2])
    return [(match["name"], parse_json("".join(parts)))]


def _marks(open: str, close: str | None) -> tuple[Pattern, Pattern | None]:
    return regex.compile(open), None if close is None else regex.compile(close)


# Parts of opening marks. Each token repeats the search of a mark that may go on, so all parts are short.
_GAP, _NAME = r"\s{0,8}+", r"(?P<name>[\w.-]{1,256}+)"
_JSON_CALL: Spelling = ('{"name": "', NAME, '", "arguments": ', ARGUMENTS, "}")
_DEEPSEEK = _marks(r"<｜tool▁call▁begin｜>|(?P<no><｜tool▁calls▁(?:begin|end)｜>)", "<｜tool▁call▁end｜>")
HERMES = Dialect(
    "hermes",
    *_marks("<tool_call>", "</tool_call>"),
    _json_calls,
    ("<tool_call>", SPACE, *_JSON_CALL, SPACE, "</tool_call>"),
)
DIALECTS = (
    Dialect(  # GLM 4.5 and later
        "glm",
        *_marks("<tool_call>", "</tool_call>"),
        _tagged(
            r"(?P<name>[^\s<]+)",
            r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
            "</arg_value>",
        ),
        ("<tool_call>", NAME, SPACE, ARGUMENTS, "</tool_call>"),
        ("<arg_key>", KEY, "</arg_key>", SPACE, "<arg_value>", VALUE, "</arg_value>", SPACE),
    ),
    Dialect(  # Qwen3-Coder, Qwen 3.5, Nemotron 3
        "qwen-coder",
        *_marks(rf"(?:<tool_call>{_GAP})?<function=|(?P<no></tool_call>)", "</function>"),
        _tagged(r"(?P<name>[^>\n]+)>", r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>", "</parameter>"),
        ("<tool_call>", SPACE, "<function=", NAME, ">", SPACE, ARGUMENTS, "</function>", SPACE, "</tool_call>"),
        ("<parameter=", KEY, ">", LINE, VALUE, LINE, "</parameter>", SPACE),
    ),
    Dialect(  # DeepSeek V3 and R1
        "deepseek",
        *_DEEPSEEK,
        _named(r"\w+<｜tool▁sep｜>(?P<name>[^\n]+)\n```json\n", "\n```"),
        ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", NAME, "\n```json\n", ARGUMENTS, "\n```<｜tool▁call▁end｜>"),
        begin=("<｜tool▁calls▁begin｜>",),
        end=("<｜tool▁calls▁end｜>",),
    ),
    Dialect(  # DeepSeek V3.1
        "deepseek-3.1",
        *_DEEPSEEK,
        _named("(?P<name>[^<]+)<｜tool▁sep｜>"),
        ("<｜tool▁call▁begin｜>", NAME, "<｜tool▁sep｜>", ARGUMENTS, "<｜tool▁call▁end｜>"),
        begin=("<｜tool▁calls▁begin｜>",),
        between=(),
        end=("<｜tool▁calls▁end｜>",),
    ),
    Dialect(  # Kimi K2 and K2.5
        "kimi-k2",
        *_marks(
            r"<\|tool_call_begin\|>|(?P<no><\|tool_calls_section_(?:begin|end)\|>)",
            r"<\|tool_call_end\|>",
        ),
        _named(r"(?:functions\.)?(?P<name>[\w.-]+):\d+\s*<\|tool_call_argument_begin\|>"),
        (
            "<|tool_call_begin|>functions.",
            NAME,
            ":",
            INDEX,
            "<|tool_call_argument_begin|>",
            ARGUMENTS,
            "<|tool_call_end|>",
        ),
        begin=("<|tool_calls_section_begin|>",),
        between=(),
        end=("<|tool_calls_section_end|>",),
    ),
    Dialect(  # Mistral from its tokenizer v11 on
        "mistral-11",
        *_marks(r"\[TOOL_CALLS\]", None),
        _named(r"(?P<name>[\w.-]+)(?:\[CALL_ID\]\w*)?\[ARGS\]", between="[TOOL_CALLS]"),
        ("[TOOL_CALLS]", NAME, "[ARGS]", ARGUMENTS),
        between=(),
    ),
    Dialect(  # Mistral before
        "mistral",
        *_marks(r"\[TOOL_CALLS\]", None),
        _json_calls,
        _JSON_CALL,
        begin=("[TOOL_CALLS]", SPACE, "["),
        between=(", ",),
        end=("]",),
    ),
    Dialect(  # LFM2
        "lfm2",
        *_marks(r"<\|tool_call_start\|>", r"<\|tool_call_end\|>"),
        _python_calls,
        (NAME, "(", ARGUMENTS, ")"),
        (KEY, "=", VALUE),
        comma=", ",
        begin=("<|tool_call_start|>[",),
        between=(", ",),
        end=("]<|tool_call_end|>",),
    ),
    Dialect(  # Llama 3.2 (small) and 4
        "pythonic",
        *_marks(rf"(?:<\|python_start\|>{_GAP})?(?P<lead>\[{_GAP}[\w.-]{{1,256}}+\()", None),
        _python_calls,
        (NAME, "(", ARGUMENTS, ")"),
        (KEY, "=", VALUE),
        comma=", ",
        begin=("[",),
        between=(", ",),
        end=("]",),
        is_first=True,
        asked="func_name1(",
    ),
    Dialect(  # Llama 3.1 to 3.3
        "llama",
        *_marks(rf'(?:<\|python_tag\|>{_GAP})?(?P<lead>\{{{_GAP}"(?:name|type)")', None),
        _json_sequence,
        ('{"name": "', NAME, '", "parameters": ', ARGUMENTS, "}"),
        between=("; ",),
        is_first=True,
    ),
    Dialect(
        "gpt-oss",
        *_marks(
            rf"(?:<\|start\|>assistant{_GAP})?(?:<\|channel\|>commentary{_GAP})?to=functions\.{_NAME}{_GAP}"
            rf"(?:<\|channel\|>commentary{_GAP})?(?:<\|constrain\|>)?(?:json)?<\|message\|>"
            r"|(?P<no><\|end\|>|(?:<\|start\|>assistant)?<\|channel\|>(?:final|commentary|(?P<think>analysis))<\|message\|>)",
            None,
        ),
        _channel_call,
        (" to=functions.", NAME, "<|channel|>commentary json<|message|>", ARGUMENTS, "<|call|>"),  # this ends the turn
        between=(),
        frames=True,
        answer=("<|channel|>final<|message|>",),
        turn=("<|start|>assistant",),
    ),
    Dialect(
        "gemma-4",
        *_marks(r"<\|tool_call>", r"<tool_call\|>"),
        _bare_call,
        (),  # calls cannot be forced: the marks that quote strings may occur within values
        argument=(KEY, ':<|"|>', VALUE, '<|"|>'),
    ),
    HERMES,  # Hermes, Qwen 2.5 and 3, ERNIE 4.5, Stretto's own template
)
"""Formats, in the order in which `stretto.server.calls.recognise.dialect_of` tries them. The last one is used for templates that do not render calls."""
