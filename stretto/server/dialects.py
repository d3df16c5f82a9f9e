"""Formats in which models write tool calls and reasoning, one per family: parsers and grammars.

Chat templates write calls in a handful of dialects. `DIALECTS` has a row for each: the marks, how a call between them
is read, and how one is spelt, which is also the grammar of a call that is forced. A checkpoint that brings a
``response_template`` (transformers 5) is read by that instead.

Marks may be special tokens, which are no part of other answers' text; `marks` says which must stay.
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
"""JSON schemas of the parameters of the tools on offer, by their names."""
Found = Sequence[tuple[str, Any]]
"""Calls that were read: names and arguments."""
Read = Callable[[str, Mapping[str, str], Schemas], Found]
"""From what stands between the marks, and the groups that the opening one captured, to calls. Raises ValueError if it is not a call."""
Pattern = Any
"""Of the ``regex`` package, whose matches may be partial: `re` cannot say that more text could complete a mark."""
# Spacing of json.dumps, which is what templates render and models have seen.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_TEXT = "/(?s:.*)/"
MAX_DEPTH = 128
"""Of JSON, as most parsers allow: templates, schemas and messages are walked by functions that call themselves."""
_SURROGATE = regex.compile("[\ud800-\udfff]")


class Slot(Enum):
    """What is not literal in the spelling of a call."""

    NAME = "name"
    ARGUMENTS = "arguments"
    """One JSON object, or `Dialect.argument` for each where that is given."""
    KEY = "key"
    VALUE = "value"
    """A string stands for itself where a literal follows that ends it; everything else is JSON."""
    SPACE = "space"
    """A blank, a line break or nothing: templates of one family differ."""
    LINE = "line"
    """A line break or nothing, which is no part of a value beside it."""


NAME, ARGUMENTS, KEY, VALUE, SPACE, LINE = Slot
_BLANKS = {SPACE: "/[ \\n]?/", LINE: "/\\n?/"}
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
    """How calls are written. A row of `DIALECTS`."""

    name: str
    open: Pattern
    """Begins a call; what its group ``no`` matches is a mark, too, and begins none."""
    close: Pattern | None
    """Ends it. None: all that follows ``open`` belongs to the calls."""
    read: Read
    call: Spelling
    argument: Spelling = ()
    comma: str = ""
    """Between two arguments."""
    begin: Spelling = ()
    between: Spelling = (SPACE,)
    end: Spelling = ()
    """Around all calls, and between two."""
    is_first: bool = False
    """Without a mark of its own: a call is one only where the answer begins."""
    asked: str = ""
    """Templates that say this ask for it, whatever they make of earlier calls."""
    frames: bool = False
    """Its marks stand around answers without calls, too."""

    @cached_property
    def spelt(self) -> str:
        """Every mark, wherever it stands."""
        parts = (*self.begin, *self.call, *self.between, *self.argument, *self.end)
        patterns = [each.pattern for each in (self.open, self.close) if each is not None]
        return "\n".join([*(part for part in parts if isinstance(part, str)), *map(_unescaped, patterns)])


@dataclass(frozen=True, slots=True)
class Think:
    """The marks around reasoning."""

    open: str
    close: str
    sign: str = ""
    """What of them only templates with reasoning have; empty: ``close``, for some leave the other to the model."""

    def opening(self) -> Pattern:
        return regex.compile(rf"\s*{regex.escape(self.open)}\s?")

    def closing(self) -> Pattern:
        return regex.compile(rf"\s?{regex.escape(self.close)}\s*")


_ANALYSIS = "<|channel|>analysis<|message|>"
THINKS = (
    Think("<think>", "</think>"),
    Think("[THINK]", "[/THINK]"),
    Think("<seed:think>", "</seed:think>"),
    Think(_ANALYSIS, "<|end|>", _ANALYSIS),
)
"""Known marks; a template names the closing one where it can."""


def parse_json(text: str) -> Any:
    """The JSON that ``text`` spells; ValueError where it is none. NaN is none, and half a surrogate pair, which no
    answer could carry, is replaced."""
    try:
        tree = strict_json(text)
        spelt = json.dumps(tree, ensure_ascii=False)
        return json.loads(_SURROGATE.sub("\ufffd", spelt)) if _SURROGATE.search(spelt) else tree
    except RecursionError:
        raise ValueError("too deep") from None


def strict_json(text: str) -> Any:
    """JSON without NaN (ValueError), with lists and objects in each other at most `MAX_DEPTH` times (RecursionError)."""

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
    """Of ``{"name": …, "arguments": {…}}``, a list of such, or OpenAI's nesting of it; Llama says ``parameters``."""
    if isinstance(tree, list) and tree:
        return [call for each in tree for call in _tree_calls(each)]
    tree = tree.get("function", tree) if isinstance(tree, dict) else None
    if not isinstance(tree, dict) or not isinstance(tree.get("name"), str):
        raise ValueError("no call")
    return [(tree["name"], tree.get("arguments", tree.get("parameters", {})))]


def _json_calls(body: str, groups: Mapping[str, str], schemas: Schemas) -> Found:
    return _tree_calls(parse_json(groups.get("lead", "") + body))


def _json_sequence(body: str, groups: Mapping[str, str], schemas: Schemas) -> Found:
    """Calls one after the other, by semicolons."""
    parts = regex.split(r"(?<=\})\s*;\s*(?=\{)", groups.get("lead", "") + body)
    return [call for part in parts for call in _json_calls(part, {}, schemas)]


def _named(head: str, tail: str = "", between: str | None = None) -> Read:
    """Calls of which ``head`` captures the name, followed by the arguments as JSON and by ``tail``."""
    form = regex.compile(rf"\s*{head}(?P<arguments>.*?){tail}\s*", regex.DOTALL)

    def read(body: str, groups: Mapping[str, str], schemas: Schemas) -> Found:
        matches = [form.fullmatch(part) for part in ([body] if between is None else body.split(between))]
        if None in matches:
            raise ValueError("no call")
        return [(match["name"], parse_json(match["arguments"])) for match in matches]

    return read


def _tagged(head: str, pair: str) -> Read:
    """Calls of which ``head`` captures the name, and ``pair`` the ``key`` and the ``value`` of each argument."""
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
    """The value that a tag's ``text`` stands for: a string where its schema, one of ``known``, has one there, else JSON where it is."""
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


_STRING_OR_NAME = regex.compile(
    r"""("{3}(?s:.*?)"{3}|'{3}(?s:.*?)'{3}|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|([^\s"'()\[\]{},:=]+)(?=\s*[(=])"""
)


def _python_calls(body: str, groups: Mapping[str, str], schemas: Schemas) -> Found:
    """Of ``[name(key=value, …), …]``: Python's literals, and JSON's names for three of them. What is called and the keys may be no
    names in Python: ``from``, ``max-results``."""
    names: list[str] = []

    def numbered(match: Any) -> str:
        if match[1]:
            return str(match[1])
        names.append(match[2])
        return f"_{len(names) - 1}"

    def read(node: ast.expr) -> tuple[str, Any]:
        assert isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.args
        arguments = {names[int(each.arg[1:])]: _literal_value(each.value) for each in node.keywords if each.arg}
        return names[int(node.func.id[1:])], parse_json(json.dumps(arguments))

    try:
        tree = ast.parse(_STRING_OR_NAME.sub(numbered, groups.get("lead", "") + body.strip()), mode="eval").body
        assert isinstance(tree, ast.List) and tree.elts
        return [read(node) for node in tree.elts]
    except (SyntaxError, TypeError, AssertionError, RecursionError, MemoryError) as error:
        raise ValueError from error


def _literal_value(node: ast.expr) -> Any:
    known = {"true": True, "false": False, "null": None}
    names = {name: ast.Constant(value) for name, value in known.items()}

    class Named(ast.NodeTransformer):
        def visit_Name(self, name: ast.Name) -> ast.expr:
            return names.get(name.id, name)

    return ast.literal_eval(Named().visit(node))


def _channel_call(body: str, groups: Mapping[str, str], schemas: Schemas) -> Found:
    """Of the arguments as JSON; the name stands in the mark."""
    return [(groups["name"], parse_json(body.removesuffix("<|call|>")))]


def _bare_call(body: str, groups: Mapping[str, str], schemas: Schemas) -> Found:
    """Of ``call:name{key:<|"|>text<|"|>,…}``: JSON, but for the quotes."""
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
        (" to=functions.", NAME, "<|channel|>commentary json<|message|>", ARGUMENTS, "<|call|>"),  # which ends the turn
        between=(),
        frames=True,
    ),
    Dialect(
        "gemma-4",
        *_marks(r"<\|tool_call>", r"<tool_call\|>"),
        _bare_call,
        (),  # not forced: quotes that are marks stand within values, too
        argument=(KEY, ':<|"|>', VALUE, '<|"|>'),
    ),
    HERMES,  # Hermes, Qwen 2.5 and 3, ERNIE 4.5, our own
)
"""In which a template's calls are looked for, in turn. What a template does not write itself is written in the last."""


def dialect_of(template: str, response_template: Mapping[str, Any] | None = None) -> Dialect | None:
    """The dialect in which a chat template writes calls, which is the first that can read one of them; None: none can. Raises
    `UserError` for a template that is not valid, or a ``response_template`` that transformers refuses."""
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
    """As the checkpoint declares it; ``known`` spells forced calls, if what it spells can be read."""
    # Half a second, for the few that have one.
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
    """A call of ``f`` with ``{"a": "b"}``."""
    fill = {KEY: "a", VALUE: "b" if _ending(dialect.argument) else '"b"', NAME: "f", SPACE: "", LINE: ""}
    inner = "".join(part if isinstance(part, str) else fill[part] for part in dialect.argument)
    fill[ARGUMENTS] = inner or '{"a": "b"}'
    parts = (*dialect.begin, *dialect.call, *dialect.end)
    return "".join(part if isinstance(part, str) else fill[part] for part in parts)


def think_of(template: str, response_template: Mapping[str, Any] | None = None) -> Think | None:
    """The marks of reasoning in a chat template; None where it has none."""
    fields = (response_template or {}).get("fields") or {}
    declared = fields.get("reasoning_content") or fields.get("thinking") or {}
    match declared:
        case {"open": str(open), "close": str(close)}:
            return Think(open.strip(), close.strip())
    return next((each for each in THINKS if (each.sign or each.close) in template), None)


def marks(added: Mapping[str, int], dialect: Dialect | None, think: Think | None) -> dict[str, int]:
    """The ``added`` tokens of a tokenizer, ids by spelling, that are marks."""
    spelt = (dialect.spelt if dialect else "") + ("" if think is None else f"\n{think.open}\n{think.close}")
    return {text: token for text, token in added.items() if text in spelt and text.strip()}


class AnswerReader:
    """Splits streamed text into content, reasoning and calls; holds back what may be the beginning of a mark."""

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
            is_thinking: the prompt has opened the reasoning already.
            max_calls: later ones are left out, with their marks.
        """
        self._dialect, self._schemas, self._calls_left = dialect, schemas or {}, max_calls
        self._think = None if think is None else (think.opening(), think.closing())
        self._is_thinking = is_thinking and think is not None
        self._may_think = not self._is_thinking  # nothing but white space was written so far
        self._is_first = True  # no content was written so far
        self._opened: Any = None  # the mark of the call that is being written
        self._held = ""
        self._searched = 0  # in the held call: before it no mark closes a call that can be read

    def push(self, text: str) -> list[Piece]:
        """What is certain now: pieces of content and of reasoning, and finished calls, in order."""
        self._held += text
        return self._read(is_last=False)

    def finish(self, is_cut: bool = False) -> list[Piece]:
        """The rest. A call that was not finished is text, unless the answer was cut: then nothing is told of it, nor of
        half a mark."""
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
        """Go on by one mark; False where more text is needed."""
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
        """The next match in what is held; False: there is none; None: more text must tell."""
        look = pattern.match if is_first else pattern.search
        match = look(self._held, self._searched, partial=not is_last)
        if match is None:
            return False
        # A mark that ends where the text ends may go on (an optional part); nearly always another token comes.
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
        """Text before the next mark, and the mark if it is there; what may begin one stays."""
        match = pattern.search(self._held, partial=not is_last)
        if match is None:
            content, self._held = self._held, ""
            return content, None
        content = self._held[: match.start()]
        if is_last or not (match.partial or match.end() == len(self._held)):
            self._held = self._held[match.end() :]
            return content, match
        self._held = self._held[match.start() :]
        return content, None

    def _take_call(self, found: list[Piece], is_last: bool) -> bool:
        # A closing mark within a string of the arguments does not close the call: what is before it cannot be read yet.
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
    """Some models write the object as a string of JSON."""
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
    """A whole answer, read. Written by `read_answer`."""

    content: str
    reasoning: str
    calls: tuple[Call, ...]


def read_answer(reader: AnswerReader, text: str, is_cut: bool = False) -> Said:
    """A whole answer; white space around calls is no content."""
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
    """The Lark grammar of an answer that calls one of the tools, or where there are none follows a schema.

    Args:
        marked: as of `marks`. The library takes special tokens, and any in angle brackets, for nothing but themselves: it
            would have a model spell them.
        parallel: several calls may follow each other.
        beside: the schema of an answer that is allowed instead of calls.
        thinks: the answer begins with reasoning; without ``is_thinking``, it may.
        is_thinking: the prompt has opened it.
        is_free: text is allowed before calls, and instead of them; what begins as a call must go on as one.
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
    """Of an answer that may be text: the dialect without the mark that begins its calls; what leads up to them, that mark
    included; and the rules of that and of text that holds none."""
    if dialect.is_first:  # what begins as a call does is none of the text
        (first, *_) = (*dialect.begin, *dialect.call)
        assert isinstance(first, str)
        return dialect, "", [f"text: TEXT\nTEXT: {_TEXT} & ~/(?s:\\s*{_escaped(first[0])}.*)/"]
    # some open at a later mark, too, which a model may begin with: <function= without <tool_call>
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
    """As a regular expression between slashes."""
    return regex.escape(text).replace("/", r"\/").replace("\n", r"\n")


class _Speller:
    """Spellings as right-hand sides of Lark rules."""

    def __init__(self, marked: Mapping[str, int]) -> None:
        self._marked = marked
        longest = sorted(map(regex.escape, marked), key=len, reverse=True)
        self._split = regex.compile(f"({'|'.join(longest)})") if marked else None

    def __call__(self, parts: Spelling, fill: Mapping[Slot, str] | None = None) -> str:
        return " ".join(filter(None, (self._part(part, fill or {}) for part in parts)))

    def _part(self, part: str | Slot, fill: Mapping[Slot, str]) -> str:
        if isinstance(part, Slot):
            return _BLANKS.get(part) or fill[part]
        pieces = self._pieces(part)
        return " ".join(f"<[{self._marked[piece]}]>" if self.is_token(piece) else _quoted(piece) for piece in pieces)

    def _pieces(self, text: str) -> list[str]:
        """Marks that are tokens, and what is between them."""
        return [each for each in ([text] if self._split is None else self._split.split(text)) if each]

    def is_token(self, mark: str) -> bool:
        """One token for itself, which no text spells."""
        return mark in self._marked

    def cut(self, parts: Spelling) -> tuple[str, Spelling]:
        """The mark that ``parts`` begin with, and the rest."""
        assert isinstance(parts[0], str)
        mark, *rest = self._pieces(parts[0])
        return mark, (*rest, *parts[1:])

    def text_without(self, *marks: str) -> str:
        """Any text in which none of ``marks`` is, as a terminal."""
        return " & ".join(
            [_TEXT, *(f"~/(?s:.*{_escaped(mark)}.*)/" for mark in dict.fromkeys(marks) if not self.is_token(mark))]
        )

    def text_up_to(self, end: str, rule: str, text: str = _TEXT) -> str:
        """The rule of ``text``, a terminal, and the ``end`` of it."""
        terminal = f"TEXT_{rule.upper()}"
        if self.is_token(end):
            return f"{rule}: {terminal} <[{self._marked[end]}]>\n{terminal}: {text}"
        return f"{rule}[suffix={_quoted(end)}]: {terminal}\n{terminal}: {text}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json_rule(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': _SPACING})}"


def _call_rules(dialect: Dialect, name: str, schema: Schema, spell: _Speller, number: str) -> Iterator[str]:
    """Rules of the call of one tool."""
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
    """One argument, whose value follows one of ``values``; ``key``: a literal or a terminal."""
    parts, ending, value = dialect.argument, _ending(dialect.argument), f"value_{rule}"
    exact: list[str] = []
    texts: list[str] = []  # the same, where one of them is a string: it stands for itself up to the mark that ends it
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
    until = (*parts[: parts.index(VALUE) + 1], *parts[parts.index(ending) + 1 :])  # the rule of the text takes it along
    yield f"{rule}: {spell(until, {KEY: key, VALUE: value})}"
    yield spell.text_up_to(ending, value, _TEXT if _TEXT in texts else " | ".join(f"({text})" for text in texts))


def _listed_values(way: Schema) -> list[str]:
    """What may stand for a value where its schema lists them all; else nothing."""
    told = [each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in constants(way)]
    if not told and kinds(way) and kinds(way) <= {"boolean", "null"}:
        told = ["true", "false", "True", "False"] * ("boolean" in kinds(way)) + ["null"] * ("null" in kinds(way))
    return told


def _text_of(way: Schema) -> str:
    """The text that the schema of a string allows, as a terminal, and the line breaks that templates put around it."""
    found, (least, most) = [], (way.get(name) for name in ("minLength", "maxLength"))
    if isinstance(pattern := way.get("pattern"), str):
        before, after = "" if pattern.startswith("^") else "(?s:.*)", "" if pattern.endswith("$") else "(?s:.*)"
        inner = regex.sub(r"(?<!\\)/", r"\/", pattern.removeprefix("^").removesuffix("$")).replace("\n", r"\n")
        found.append(f"{before}(?:{inner}){after}")
    if type(least) is int or type(most) is int:
        found.append(f"(?s:.{{{least if type(least) is int else 0},{most if type(most) is int else ''}}})")
    return " & ".join(f"/\\n?{each}\\n?/" for each in found) or _TEXT


def _ending(argument: Spelling) -> str:
    """The literal that ends a value; empty where none does."""
    if VALUE not in argument:
        return ""
    return next((part for part in argument[argument.index(VALUE) :] if isinstance(part, str)), "")


def _listed(required: Sequence[str], optional: Sequence[str], other: str, comma: str) -> str:
    """All that is required, in order, then what is optional, then any number of the ``other``, if there is one."""
    mark = f"{_quoted(comma)} " if comma else ""
    later = [f"({mark}{rule})?" for rule in optional] + ([f"({mark}{other})*"] if other else [])
    if required or not comma:
        return " ".join([f" {mark}".join(required), *later])
    # one of them comes first, without a comma
    firsts = [" ".join([rule, *later[place + 1 :]]) for place, rule in enumerate(optional)]
    firsts += [f"{other} {later[-1]}"] if other else []
    return f"({' | '.join(firsts)})?" if firsts else '""'


def _unescaped(pattern: str) -> str:
    return regex.sub(r"\\(.)", r"\1", pattern)
