"""Formats in which models write tool calls and reasoning, one per family: parsers and grammars.

`DIALECTS` has a row for each format: the marks around a call, a parser of the text between them, and the spelling of a call, from which
the grammar of forced calls is made. For a checkpoint with a ``response_template`` (transformers 5), that template replaces marks and parser.

Marks may be special tokens, which are usually removed from the text of answers; `marks` lists those that must stay.
"""

from __future__ import annotations

import ast
import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any

import regex

from stretto.base.errors import UserError
from stretto.server.schemas import Schema, alone, argument, constants, kinds, properties, required, ways
from stretto.text.chat import tool_form

Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schemas of the parameters of the offered tools, by the tools' names."""
Found = Sequence[tuple[str, Any]]
"""Calls in a text: names and arguments."""
Read = Callable[[str, Mapping[str, str], Schemas], Found]
"""Parser of calls. Input: the text between the marks, the groups that the opening mark captured, and the schemas. Raises ValueError for a
text that is not a call."""
Pattern = Any
"""A pattern of the ``regex`` package. Unlike `re`, it finds partial matches, which show that more text could complete a mark."""
# Spacing of json.dumps, which chat templates render and models are trained on.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_TEXT = "/(?s:.*)/"
MAX_DEPTH = 128
"""Deepest nesting of JSON, as in most parsers. Templates, schemas and messages are processed by recursive functions."""
_SURROGATE = regex.compile("[\ud800-\udfff]")


class Slot(Enum):
    """Variable parts in the spelling of a call."""

    NAME = "name"
    ARGUMENTS = "arguments"
    """One JSON object, or `Dialect.argument` for each argument if that is set."""
    KEY = "key"
    VALUE = "value"
    """A string without quotes if a literal that ends it follows; otherwise JSON."""
    SPACE = "space"
    """A blank, a line break or nothing. Templates of one family differ here."""
    LINE = "line"
    """A line break or nothing; not a part of the value beside it."""
    INDEX = "index"
    """Number of a call in the conversation."""


NAME, ARGUMENTS, KEY, VALUE, SPACE, LINE, INDEX = Slot
_FREE = {SPACE: "/[ \\n]?/", LINE: "/\\n?/", INDEX: "/0|[1-9][0-9]*/"}
"""Slots that a grammar leaves to the model."""
Spelling = tuple[str | Slot, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """One call that the model wrote."""

    id: str
    name: str
    arguments: str
    """A JSON object as text."""

    def body(self) -> dict[str, Any]:
        """OpenAI's form."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True)
class Thought:
    """A piece of reasoning."""

    text: str


Piece = str | Thought | Call


@dataclass(frozen=True)
class Dialect:
    """Format of calls. A row of `DIALECTS`."""

    name: str
    open: Pattern
    """Mark that begins a call. A match of its group ``no`` is removed from the text, too, but begins no call."""
    close: Pattern | None
    """Mark that ends a call. None: the calls extend to the end of the answer."""
    read: Read
    call: Spelling
    """Spelling of a call; empty: calls cannot be forced."""
    argument: Spelling = ()
    """Spelling of one argument; empty: the arguments are one JSON object."""
    comma: str = ""
    """Text between two arguments."""
    begin: Spelling = ()
    """Text before all calls."""
    between: Spelling = (SPACE,)
    """Text between two calls."""
    end: Spelling = ()
    """Text after all calls."""
    is_first: bool = False
    """Whether a call is recognised only at the beginning of an answer, because the format has no mark of its own."""
    asked: str = ""
    """Text in the system prompt of a chat template that asks for this format, even if the template renders earlier calls in another."""
    frames: bool = False
    """Whether the marks surround answers without calls, too."""

    @cached_property
    def spelt(self) -> str:
        """The spellings of all marks, one per line."""
        parts = (*self.begin, *self.call, *self.between, *self.argument, *self.end)
        patterns = [each.pattern for each in (self.open, self.close) if each is not None]
        return "\n".join([*(part for part in parts if isinstance(part, str)), *map(_unescaped, patterns)])


@dataclass(frozen=True, slots=True)
class Think:
    """The marks around reasoning."""

    open: str
    close: str
    sign: str = ""
    """Text by which a template with reasoning is recognised; empty: ``close``, because some templates do not contain ``open``."""


_ANALYSIS = "<|channel|>analysis<|message|>"
THINKS = (
    Think("<think>", "</think>"),
    Think("[THINK]", "[/THINK]"),
    Think("<seed:think>", "</seed:think>"),
    Think(_ANALYSIS, "<|end|>", _ANALYSIS),
)
"""Known marks of reasoning."""


def parse_json(text: str) -> Any:
    """``text`` as JSON. Raises ValueError for anything else, NaN included. Lone surrogates, which no answer can contain, are replaced."""
    try:
        tree = strict_json(text)
        spelt = json.dumps(tree, ensure_ascii=False)
        return json.loads(_SURROGATE.sub("\ufffd", spelt)) if _SURROGATE.search(spelt) else tree
    except RecursionError:
        raise ValueError("too deep") from None


def strict_json(text: str) -> Any:
    """``text`` as JSON. Raises ValueError for NaN and RecursionError for more than `MAX_DEPTH` nested lists and objects."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    tree = json.loads(text, parse_constant=refuse)
    level = [tree]
    for _ in range(MAX_DEPTH):
        inner = (node.values() if isinstance(node, dict) else node for node in level if isinstance(node, dict | list))
        level = [each for nodes in inner for each in nodes if isinstance(each, dict | list)]
    if level:
        raise RecursionError
    return tree


def _tree_calls(tree: Any) -> Found:
    """Calls of the form ``{"name": …, "arguments": {…}}`` (Llama: ``parameters``), alone, in a list, or nested as in OpenAI's API."""
    if isinstance(tree, list) and tree:
        return [call for each in tree for call in _tree_calls(each)]
    tree = tree.get("function", tree) if isinstance(tree, dict) else None
    if not isinstance(tree, dict) or not isinstance(tree.get("name"), str):
        raise ValueError("no call")
    return [(tree["name"], tree.get("arguments", tree.get("parameters", {})))]


def _json_calls(body: str, groups: Mapping[str, str], schemas: Schemas) -> Found:
    return _tree_calls(parse_json(groups.get("lead", "") + body))


def _json_sequence(body: str, groups: Mapping[str, str], schemas: Schemas) -> Found:
    """Calls that are separated by semicolons."""
    parts = regex.split(r"(?<=\})\s*;\s*(?=\{)", groups.get("lead", "") + body)
    return [call for part in parts for call in _json_calls(part, {}, schemas)]


def _named(head: str, tail: str = "", between: str | None = None) -> Read:
    """A parser of calls that consist of ``head``, which captures the name, the arguments as JSON, and ``tail``."""
    form = regex.compile(rf"\s*{head}(?P<arguments>.*?){tail}\s*", regex.DOTALL)

    def read(body: str, groups: Mapping[str, str], schemas: Schemas) -> Found:
        matches = [form.fullmatch(part) for part in ([body] if between is None else body.split(between))]
        if None in matches:
            raise ValueError("no call")
        return [(match["name"], parse_json(match["arguments"])) for match in matches]

    return read


def _tagged(head: str, pair: str) -> Read:
    """A parser of calls that consist of ``head``, which captures the name, and one ``pair`` for each argument, which captures its ``key``
    and ``value``."""
    form, pairs = regex.compile(rf"\s*{head}", regex.DOTALL), regex.compile(rf"\s*{pair}\s*", regex.DOTALL)

    def read(body: str, groups: Mapping[str, str], schemas: Schemas) -> Found:
        match = form.match(body)
        if match is None:
            raise ValueError("no call")
        at, arguments, name = match.end(), {}, match["name"].strip()
        schema = schemas.get(name, {})
        while (each := pairs.match(body, at)) is not None:
            key = each["key"].strip()
            arguments[key] = _typed(each["value"], argument(schema, key))
            at = each.end()
        if body[at:].strip():
            raise ValueError("no argument")
        return [(name, arguments)]

    return read


def _typed(text: str, known: Sequence[Schema]) -> Any:
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
        return text
    return text if "string" in named and value is not None else value


_PARTS = regex.compile(
    r"""("{3}(?s:.*?)"{3}|'{3}(?s:.*?)'{3}|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')"""
    r"""|([^\s"'()\[\]{},:=]+)(?=\s*[(=])|(?<![\w.])(true|false|null)(?![\w.])"""
)
"""Strings, names of functions and keys, and JSON's constants, in calls in Python's syntax."""
_CONSTANTS = {"true": "True", "false": "False", "null": "None"}


def _python_calls(body: str, groups: Mapping[str, str], schemas: Schemas) -> Found:
    """Calls of the form ``[name(key=value, …), …]``. Values are Python's literals or ``true``, ``false``, ``null``. Names of functions and
    keys that Python does not allow (``from``, ``max-results``) are replaced by numbered names before parsing."""
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


_JSON_CALL: Spelling = ('{"name": "', NAME, '", "arguments": ', ARGUMENTS, "}")
_DEEPSEEK = _marks(r"<｜tool▁call▁begin｜>|(?P<no>\s*<｜tool▁calls▁(?:begin|end)｜>)", "<｜tool▁call▁end｜>")
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
        _tagged(r"(?P<name>[^\s<]+)", r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>\n?(?P<value>.*?)\n?</arg_value>"),
        ("<tool_call>", NAME, SPACE, ARGUMENTS, "</tool_call>"),
        ("<arg_key>", KEY, "</arg_key>", SPACE, "<arg_value>", VALUE, "</arg_value>", SPACE),
    ),
    Dialect(  # Qwen3-Coder, Qwen 3.5, Nemotron 3
        "qwen-coder",
        *_marks(r"(?:<tool_call>\s*)?<function=|(?P<no>\s*</tool_call>)", "</function>"),
        _tagged(r"(?P<name>[^>\n]+)>", r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"),
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
            r"<\|tool_call_begin\|>|(?P<no>\s*<\|tool_calls_section_(?:begin|end)\|>)",
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
        *_marks(r"\s*(?:<\|python_start\|>\s*)?(?P<lead>\[\s*[\w.-]+\()", None),
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
        *_marks(r'\s*(?:<\|python_tag\|>\s*)?(?P<lead>\{\s*"(?:name|type)")', None),
        _json_sequence,
        ('{"name": "', NAME, '", "parameters": ', ARGUMENTS, "}"),
        between=("; ",),
        is_first=True,
    ),
    Dialect(
        "gpt-oss",
        *_marks(
            r"(?:<\|start\|>assistant)?(?:<\|channel\|>commentary)?\s*to=functions\.(?P<name>[\w.-]+)\s*"
            r"(?:<\|channel\|>commentary)?\s*(?:<\|constrain\|>)?(?:json)?<\|message\|>"
            r"|(?P<no><\|end\|>|(?:<\|start\|>assistant)?<\|channel\|>(?:final|commentary)<\|message\|>)",
            None,
        ),
        _channel_call,
        (" to=functions.", NAME, "<|channel|>commentary json<|message|>", ARGUMENTS, "<|call|>"),  # this ends the turn
        between=(),
        frames=True,
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
"""Formats, in the order in which `dialect_of` tries them. The last one is used for templates that do not render calls."""


def dialect_of(template: str, response_template: Mapping[str, Any] | None = None) -> Dialect | None:
    """The format in which a chat template writes calls: the first in `DIALECTS` that can read a call rendered by the template; None: none
    can. Raises `UserError` for an invalid template, or a ``response_template`` that transformers refuses."""
    form = tool_form(template)
    if not form.shows_calls:
        return HERMES
    known = next((each for each in DIALECTS if each.asked and each.asked in template), None)
    known = known or next((each for each in DIALECTS if _reads(each, form.call)), None)
    return known if response_template is None else _declared(response_template, known)


def _reads(dialect: Dialect, call: str) -> bool:
    calls = read_answer(AnswerReader(dialect, {"calledname": {}}), call).calls
    return [(each.name, each.arguments) for each in calls] == [("calledname", '{"calledkey": "calledvalue"}')]


def _declared(response_template: Mapping[str, Any], known: Dialect | None) -> Dialect | None:
    """The format that the checkpoint declares. The spelling of forced calls is that of ``known``, if the declared format can read it."""
    # Imported here because the import takes half a second and few checkpoints need it.
    from transformers.utils.chat_parsing.content_parsers import process_field
    from transformers.utils.chat_parsing.response_templates import load_response_template

    try:
        field = load_response_template(dict(response_template)).fields.get("tool_calls")
    except (ValueError, TypeError) as error:
        raise UserError(f"tokenizer_config.json: response_template: {error}; correct or remove it") from None
    if field is None or field.open_re is None:
        return known

    def read(body: str, groups: Mapping[str, str], schemas: Schemas) -> Found:
        try:
            found = _tree_calls(process_field(body, field, dict(groups)))
        except (KeyError, TypeError) as error:
            raise ValueError from error
        return [(name, _all_typed(tree, schemas.get(name, {}))) for name, tree in found]

    if known is None:
        return Dialect("declared", field.open_re, field.close_re, read, ())
    declared = replace(known, open=field.open_re, close=field.close_re, read=read, is_first=False)
    reader = AnswerReader(declared)
    pieces = [*reader.push(_example(known)), *reader.finish()]
    is_spelt = [(each.name, each.arguments) for each in pieces if isinstance(each, Call)] == [("f", '{"a": "b"}')]
    return declared if is_spelt else replace(declared, call=())


def _all_typed(arguments: Any, schema: Mapping[str, Any]) -> Any:
    if not isinstance(arguments, dict):
        return arguments
    known = {key: argument(schema, key) for key in arguments}
    return {
        key: _typed(each, known[key]) if isinstance(each, str) and known[key] else each
        for key, each in arguments.items()
    }


def _example(dialect: Dialect) -> str:
    """The spelling of a call of ``f`` with ``{"a": "b"}``."""
    fill = {KEY: "a", VALUE: "b" if _ending(dialect.argument) else '"b"', NAME: "f", SPACE: "", LINE: "", INDEX: "0"}
    inner = "".join(part if isinstance(part, str) else fill[part] for part in dialect.argument)
    fill[ARGUMENTS] = inner or '{"a": "b"}'
    parts = (*dialect.begin, *dialect.call, *dialect.end)
    return "".join(part if isinstance(part, str) else fill[part] for part in parts)


def think_of(template: str, response_template: Mapping[str, Any] | None = None) -> Think | None:
    """The marks of reasoning in a chat template; None: it has none."""
    fields = (response_template or {}).get("fields") or {}
    declared = fields.get("reasoning_content") or fields.get("thinking") or {}
    match declared:
        case {"open": str(open), "close": str(close)}:
            return Think(open.strip(), close.strip())
    return next((each for each in THINKS if (each.sign or each.close) in template), None)


def marks(added: Mapping[str, int], dialect: Dialect | None, think: Think | None) -> dict[str, int]:
    """The tokens among ``added`` (ids by spelling) that are marks of ``dialect`` or ``think``."""
    spellings = (dialect.spelt if dialect else "") + ("" if think is None else f"\n{think.open}\n{think.close}")
    return {text: token for text, token in added.items() if text in spellings and text.strip()}


class AnswerReader:
    """Splits streamed text into content, reasoning and calls. Holds back text that may be the beginning of a mark."""

    def __init__(
        self,
        dialect: Dialect | None = None,
        schemas: Schemas | None = None,
        think: Think | None = None,
        is_thinking: bool = False,
        max_calls: int | None = None,
    ) -> None:
        """
        Args:
            dialect: None: no calls are read.
            think: None: no reasoning is read.
            is_thinking: the prompt ends with an opened block of reasoning.
            max_calls: number of calls after which further ones are left out; None: no limit.
        """
        self._dialect, self._schemas, self._calls_left = dialect, schemas or {}, max_calls
        marks = None if think is None else (regex.escape(think.open), regex.escape(think.close))
        self._think = marks and (regex.compile(rf"\s*{marks[0]}\s?"), regex.compile(rf"\s?{marks[1]}\s*"))
        self._is_thinking = is_thinking and think is not None
        self._may_think = not self._is_thinking  # only white space so far
        self._is_first = True  # no content so far
        self._opened: Any = None  # match of the opening mark of the current call
        self._held = ""
        self._searched = 0  # place in the held text of a call where the search for the closing mark continues

    def push(self, text: str) -> list[Piece]:
        """The pieces that ``text`` completes, in order: content, reasoning and calls."""
        self._held += text
        return self._read(is_last=False)

    def finish(self, is_cut: bool = False) -> list[Piece]:
        """The remaining pieces at the end of the answer. An unfinished call becomes text; if the answer was cut, it is left out, and so is
        a part of a mark."""
        marks = [*(self._think or ()), *([self._dialect.open] if self._dialect else [])]
        halves = [pattern.search(self._held, partial=True) for pattern in marks if is_cut and self._opened is None]
        self._held = self._held[: min([half.start() for half in halves if half and half.partial], default=None)]
        found = self._read(is_last=True)
        rest, opened = self._held, self._opened
        self._held, self._opened = "", None
        if opened is not None and not is_cut:
            found.append(opened.group() + rest)
        return found

    def _read(self, is_last: bool) -> list[Piece]:
        found: list[Piece] = []
        while self._step(found, is_last):
            pass
        return found

    def _step(self, found: list[Piece], is_last: bool) -> bool:
        """Continue to the next mark. False: more text is needed."""
        if self._opened is not None:
            return self._take_call(found, is_last)
        if self._is_thinking:
            return self._take_thought(found, is_last)
        if self._may_think and self._think is not None:
            mark = self._find(self._think[0], is_last, is_first=True)
            if mark is None:
                return False
            self._may_think, self._is_thinking = False, bool(mark)
            if mark:
                self._held = self._held[mark.end() :]
            return True
        return self._take_content(found, is_last)

    def _find(self, pattern: Pattern, is_last: bool, is_first: bool = False) -> Any:
        """The next match in the held text; False: there is none; None: more text is needed to decide."""
        look = pattern.match if is_first else pattern.search
        match = look(self._held, self._searched, partial=not is_last)
        if match is None:
            return False
        # A match at the end of the text may still grow by an optional part of the pattern.
        if is_last or not (match.partial or match.end() == len(self._held)):
            return match
        self._searched = 0 if is_first else match.start()
        return None

    def _take_thought(self, found: list[Piece], is_last: bool) -> bool:
        assert self._think is not None
        content, mark = self._split(self._think[1], is_last)
        if content:
            found.append(Thought(content))
        self._is_thinking = not mark
        return bool(mark)

    def _take_content(self, found: list[Piece], is_last: bool) -> bool:
        if self._dialect is None or (self._dialect.is_first and not self._is_first):
            content, mark = self._held, None
            self._held = ""
        elif self._dialect.is_first:
            mark = self._find(self._dialect.open, is_last, is_first=True)
            if mark is None:
                return False
            content = "" if mark else self._held
            self._held = self._held[mark.end() :] if mark else ""
        else:
            content, mark = self._split(self._dialect.open, is_last)
        if content:
            found.append(content)
            self._is_first = False
        self._opened = mark if mark and not mark.groupdict().get("no") else None
        return bool(mark)

    def _split(self, pattern: Pattern, is_last: bool) -> tuple[str, Any]:
        """Text before the next mark, and the mark if it is complete. Text that may begin a mark is held back."""
        mark = self._find(pattern, is_last)
        start = len(self._held) if mark is False else mark.start() if mark else self._searched
        content, self._held = self._held[:start], self._held[mark.end() if mark else start :]
        self._searched = 0
        return content, mark or None

    def _take_call(self, found: list[Piece], is_last: bool) -> bool:
        # A closing mark within a string of the arguments does not end the call: the text before it cannot be parsed.
        assert self._dialect is not None
        close = self._dialect.close
        while True:
            if close is None:
                end = after = len(self._held) if is_last else -1
            else:
                mark = self._find(close, is_last)
                end, after = mark.span() if mark else (-1, -1)
            if end < 0:
                return False
            try:
                calls = self._dialect.read(self._held[:end], self._opened.groupdict(""), self._schemas)
            except ValueError:
                if close is None:
                    return False
                self._searched = after
                continue
            found += [_call(*each) for each in calls[: self._calls_left]]
            if self._calls_left is not None:
                self._calls_left -= len(calls[: self._calls_left])
            self._held, self._opened, self._searched, self._is_first = self._held[after:], None, 0, False
            return True


def _call(name: str, arguments: Any) -> Call:
    """A call with a new id. Some models write the arguments as a string that contains JSON."""
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments)
        except ValueError:
            return Call(_call_id(), name, arguments)
    return Call(_call_id(), name, json.dumps(arguments, ensure_ascii=False))


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


@dataclass(frozen=True, slots=True)
class Said:
    """A whole answer, split into its parts. Written by `read_answer`."""

    content: str
    reasoning: str
    calls: tuple[Call, ...]


def read_answer(reader: AnswerReader, text: str, is_cut: bool = False) -> Said:
    """The parts of a whole answer. White space around calls is not content."""
    pieces = [*reader.push(text), *reader.finish(is_cut)]
    calls = tuple(piece for piece in pieces if isinstance(piece, Call))
    content = "".join(piece for piece in pieces if isinstance(piece, str))
    reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Thought))
    return Said(content.strip() if calls else content, reasoning, calls)


def answer_rules(
    dialect: Dialect,
    schemas: Schemas,
    marked: Mapping[str, int],
    parallel: bool,
    beside: Mapping[str, Any] | None = None,
    thinks: Think | None = None,
    *,
    is_thinking: bool = True,
    is_free: bool = False,
) -> str:
    """The Lark grammar of answers that consist of calls of the tools, or of JSON that follows a schema.

    Args:
        marked: see `marks`. llguidance needs their ids; it would have the model spell them character by character.
        parallel: whether several calls may follow each other.
        beside: schema of a JSON answer that is allowed in place of calls.
        thinks: marks of reasoning with which the answer may begin.
        is_thinking: the prompt has opened the reasoning, so the answer begins with it.
        is_free: text is allowed before calls and in place of them. Text that begins like a call must continue as one.
    """
    spell = _Speller(marked)
    choices, rules, lead = [], [], ""
    if is_free:
        dialect, lead, texts = _beside_text(dialect, spell)
        choices.append("text")
        rules += texts
    if schemas:
        again = f" ({spell(dialect.between)} call)*" if parallel else ""
        choices.append(f"{lead} {spell(dialect.begin)} call{again} {spell(dialect.end)}".strip())
        rules.append("call: " + " | ".join(f"call{number}" for number in range(len(schemas))))
        for number, (name, schema) in enumerate(schemas.items()):
            rules += _call_rules(dialect, name, schema, spell, str(number))
    if beside is not None:
        choices.append("answer")
        rules.append(f"answer: {_json_rule(beside)}")
    start = " | ".join(choices)
    if thinks is not None:
        after = f"thought /[ \\n]/? /[ \\n]/? ({start})"
        start = after if is_thinking else f"{spell((thinks.open,))} {after} | {start}"
        rules.append(spell.text_up_to(thinks.close, "thought"))
    return "\n".join([f"start: {start}", *rules]) + "\n"


def _beside_text(dialect: Dialect, spell: _Speller) -> tuple[Dialect, str, list[str]]:
    """For answers that may be text: the dialect without the mark that begins its calls, the name of the rule for text up to and including
    that mark, and the rules."""
    if dialect.is_first:  # text must not begin like a call
        (first, *_) = (*dialect.begin, *dialect.call)
        assert isinstance(first, str)
        return dialect, "", [f"text: TEXT\nTEXT: {_TEXT} & ~/(?s:\\s*{_escaped(first[0])}.*)/"]
    # Some formats also open at a later mark, with which a model may begin: <function= without <tool_call>.
    found = [dialect.open.search(part) for part in (*dialect.begin, *dialect.call) if isinstance(part, str)]
    opening = [match.group() for match in found if match and not match.groupdict().get("no")]
    if dialect.begin:
        mark, rest = spell.cut(dialect.begin)
        dialect = replace(dialect, begin=rest)
    else:
        mark, rest = spell.cut(dialect.call)
        dialect = replace(dialect, call=rest, between=(*dialect.between, mark))
    without = spell.text_without(*opening)
    return (
        dialect,
        "lead",
        [f"text: TEXT\nTEXT: {spell.text_without(mark, *opening)}", spell.text_up_to(mark, "lead", without)],
    )


def _escaped(text: str) -> str:
    """A regular expression for exactly this text, for use between slashes."""
    return regex.escape(text).replace("/", r"\/").replace("\n", r"\n")


class _Speller:
    """Converts spellings to right-hand sides of Lark rules."""

    def __init__(self, marked: Mapping[str, int]) -> None:
        self._marked = marked
        longest = sorted(map(regex.escape, marked), key=len, reverse=True)
        self._split = regex.compile(f"({'|'.join(longest)})") if marked else None

    def __call__(self, parts: Spelling, fill: Mapping[Slot, str] | None = None) -> str:
        return " ".join(filter(None, (self._part(part, fill or {}) for part in parts)))

    def _part(self, part: str | Slot, fill: Mapping[Slot, str]) -> str:
        if isinstance(part, Slot):
            return _FREE.get(part) or fill[part]
        pieces = self._pieces(part)
        return " ".join(f"<[{self._marked[piece]}]>" if self.is_token(piece) else _quoted(piece) for piece in pieces)

    def _pieces(self, text: str) -> list[str]:
        """``text`` split into marks that are tokens and the text between them."""
        return [each for each in ([text] if self._split is None else self._split.split(text)) if each]

    def is_token(self, mark: str) -> bool:
        """Whether a mark is a token of its own."""
        return mark in self._marked

    def cut(self, parts: Spelling) -> tuple[str, Spelling]:
        """The first mark of ``parts``, and the rest."""
        assert isinstance(parts[0], str)
        mark, *rest = self._pieces(parts[0])
        return mark, (*rest, *parts[1:])

    def text_without(self, *marks: str) -> str:
        """Terminal for text that contains none of ``marks``."""
        return " & ".join(
            [_TEXT, *(f"~/(?s:.*{_escaped(mark)}.*)/" for mark in dict.fromkeys(marks) if not self.is_token(mark))]
        )

    def text_up_to(self, end: str, rule: str, text: str = _TEXT) -> str:
        """Definition of ``rule``: the terminal ``text`` followed by the literal ``end``."""
        terminal = f"TEXT_{rule.upper()}"
        if self.is_token(end):
            return f"{rule}: {terminal} <[{self._marked[end]}]>\n{terminal}: {text}"
        return f"{rule}[suffix={_quoted(end)}]: {terminal}\n{terminal}: {text}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json_rule(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': _SPACING})}"


def _call_rules(dialect: Dialect, name: str, schema: Schema, spell: _Speller, number: str) -> Iterator[str]:
    """Rules for a call of the tool ``name``."""
    arguments = f"arguments{number}"
    yield f"call{number}: {spell(dialect.call, {NAME: _quoted(name), ARGUMENTS: arguments})}"
    if not dialect.argument:
        yield f"{arguments}: {_json_rule({'type': 'object', **schema})}"
        return
    lists = []
    for at, way in enumerate(ways(schema, schema)):
        named, others = properties(way), way.get("additionalProperties")
        rules = {key: f"argument{number}_{at}_{place}" for place, key in enumerate(named)}
        for key, rule in rules.items():
            yield from _argument_rules(dialect, _quoted(key), ways(named[key], schema), schema, spell, rule)
        other = ""
        if others or (others is None and not named):
            other = f"argument{number}_{at}"
            taken = f" & ~/{'|'.join(map(_escaped, named))}/" if named else ""
            yield f"KEY_{other.upper()}: /[A-Za-z0-9_.-]+/{taken}"
            yield from _argument_rules(dialect, f"KEY_{other.upper()}", ways(others, schema), schema, spell, other)
        wanted = required(way)
        first = [rule for key, rule in rules.items() if key in wanted]
        later = [rule for key, rule in rules.items() if key not in wanted]
        lists.append(_listed(first, later, other, dialect.comma))
    yield f"{arguments}: {' | '.join(lists)}"


def _argument_rules(
    dialect: Dialect, key: str, values: Sequence[Schema], root: Schema, spell: _Speller, rule: str
) -> Iterator[str]:
    """Rules for one argument whose value follows one of the schemas ``values``. ``key``: a literal or a terminal."""
    parts, ending, value = dialect.argument, _ending(dialect.argument), f"value_{rule}"
    exact: list[str] = []
    texts: list[str] = []  # used instead of ``exact`` if a string is allowed: unquoted text up to the mark that ends it
    is_text = False
    for way in values:
        if ending and (known := _listed_values(way)):
            exact += map(_quoted, known)
            texts += [f"/\\n?{_escaped(each)}\\n?/" for each in known]
        elif ending and (not kinds(way) or "string" in kinds(way)):
            texts.append(_text_of(way))
            is_text = True
        else:
            exact += [_json_rule(alone(way, root)), *['"True"', '"False"'] * (kinds(way) == {"boolean"})]
            texts.append(_TEXT)
    if not is_text:
        yield f"{rule}: {spell(parts, {KEY: key, VALUE: value})}"
        yield f"{value}: {' | '.join(exact)}"
        return
    until = (*parts[: parts.index(VALUE) + 1], *parts[parts.index(ending) + 1 :])  # the value's rule has the ending
    yield f"{rule}: {spell(until, {KEY: key, VALUE: value})}"
    yield spell.text_up_to(ending, value, _TEXT if _TEXT in texts else " | ".join(f"({text})" for text in texts))


def _listed_values(way: Schema) -> list[str]:
    """Spellings of all values of a schema that lists them; otherwise empty."""
    values = [each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in constants(way)]
    if not values and kinds(way) and kinds(way) <= {"boolean", "null"}:
        values = ["true", "false", "True", "False"] * ("boolean" in kinds(way)) + ["null"] * ("null" in kinds(way))
    return values


def _text_of(way: Schema) -> str:
    """Terminal for the texts that the schema of a string allows, with the line breaks that templates put around them."""
    found, (least, most) = [], (way.get(name) for name in ("minLength", "maxLength"))
    if isinstance(pattern := way.get("pattern"), str):
        ways = ["".join(_anchored(pieces)) for pieces in _alternatives(pattern)]
        found.append(f"(?:{'|'.join(ways)})")
    if type(least) is int or type(most) is int:
        found.append(f"(?s:.{{{least if type(least) is int else 0},{most if type(most) is int else ''}}})")
    return " & ".join(f"/\\n?{each}\\n?/" for each in found) or _TEXT


def _alternatives(pattern: str) -> list[list[str]]:
    """The alternatives of a regular expression at its top level, each split into characters, escapes and classes."""
    found: list[list[str]] = [[]]
    depth = 0
    for piece in regex.findall(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", pattern, regex.DOTALL):
        depth += (piece == "(") - (piece == ")")
        if piece == "|" and not depth:
            found.append([])
        else:
            found[-1].append(piece)
    return found


def _anchored(pieces: list[str]) -> list[str]:
    """An alternative for Lark's terminals, which match whole texts: any text in place of the anchor that it lacks."""
    start, end = pieces[:1] == ["^"], pieces[-1:] == ["$"]
    inner = ["(?s:.*)"] * (not start) + pieces[start : len(pieces) - end] + ["(?s:.*)"] * (not end)
    return [regex.sub(r"(?<!\\)/", r"\/", piece).replace("\n", r"\n") for piece in inner]


def _ending(argument: Spelling) -> str:
    """The literal that ends a value; empty if there is none."""
    if VALUE not in argument:
        return ""
    return next((part for part in argument[argument.index(VALUE) :] if isinstance(part, str)), "")


def _listed(required: Sequence[str], optional: Sequence[str], other: str, comma: str) -> str:
    """Right-hand side for the ``required`` rules in order, then the ``optional`` ones, then ``other`` any number of times."""
    mark = f"{_quoted(comma)} " if comma else ""
    later = [f"({mark}{rule})?" for rule in optional] + ([f"({mark}{other})*"] if other else [])
    if required or not comma:
        return " ".join([f" {mark}".join(required), *later])
    # the first of them has no comma before it
    firsts = [" ".join([rule, *later[place + 1 :]]) for place, rule in enumerate(optional)]
    firsts += [f"{other} {later[-1]}"] if other else []
    return f"({' | '.join(firsts)})?" if firsts else '""'


def _unescaped(pattern: str) -> str:
    return regex.sub(r"\\(.)", r"\1", pattern)
