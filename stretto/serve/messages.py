"""Conversations in and out: messages and tools to token ids under the chat template, and calls read back from an answer.

A message that spells ``<|im_end|>`` must not end its own turn. Spellings of special tokens in contents are swapped for
marks while the template renders, and encoded as the ordinary text they are.

A call is ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, as `stretto.text.chat.CHATML` and the templates of
Qwen and its relatives render it. An answer that begins one and does not finish it stays text.

Knows neither HTTP nor torch: RL renders and reads its conversations here, too.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from stretto.base.errors import UserError
from stretto.engine.request import Grammar
from stretto.text.chat import render
from stretto.text.tokenizer import Tokenizer

CALL_START = "<tool_call>"
CALL_END = "</tool_call>"
# Spacing of json.dumps, which is what templates render and models have seen.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end_of_sentence|>", "<|observation|>", "<|user|>")
"""Special tokens that end an assistant's turn in the templates of the families we read (and of their relatives)."""
_MARK = "\ue000{}\ue001"
_MARKED = re.compile("\ue000(\\d+)\ue001")


class FieldError(UserError):
    """A body that cannot be served, and the field that is to blame."""

    def __init__(self, param: str | None, problem: str, code: str | None = None) -> None:
        super().__init__(problem if param is None else f"{param}: {problem}")
        self.param = param
        self.code = code


class Body(BaseModel):
    """Base of what a client sends: an unknown field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class FunctionType(Body):
    type: Literal["function"]


class FunctionName(Body):
    name: str


class FunctionSpec(Body):
    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(FunctionType):
    function: FunctionSpec


class NamedTool(FunctionType):
    function: FunctionName


class AllowedTools(Body):
    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class AllowedToolsChoice(Body):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedToolsChoice


class JsonSchema(Body):
    name: str = "answer"
    description: str | None = None
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with the type json_schema, and with no other")
        return self


class ContentPart(BaseModel):
    """A piece of a message; parts that are not text are refused."""

    type: str
    text: str | None = None


class CallFunction(BaseModel):
    name: str
    arguments: str | dict[str, Any] = "{}"


class MessageCall(BaseModel):
    type: Literal["function"] = "function"
    function: CallFunction


class Message(BaseModel):
    """One turn. Fields that answers carry and clients send back (refusal, annotations…) are left aside."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[MessageCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class Prompts:
    """Turns messages and texts into ids with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        added = tokenizer.rust.get_added_tokens_decoder()
        ids = {token.content: token_id for token_id, token in added.items() if token.special}
        special = sorted(ids, key=len, reverse=True)
        self._spelled = re.compile("|".join(["\ue000", *map(re.escape, special)]))  # our own mark is one, too
        self.turn_ends = tuple(ids[end] for end in _TURN_ENDS if end in ids)

    def chat(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), generation_prompt: bool = True
    ) -> list[int]:
        """Ids of a conversation, ending with the header of the turn to be written.

        Raises:
            UserError: the checkpoint has no chat template, it refuses these messages, or a content is not text.
        """
        template = self.tokenizer.chat_template
        if template is None:
            way = "use /v1/completions, or put a chat_template.jinja beside its tokenizer.json"
            raise UserError(f"messages: this checkpoint has no chat template; {way}")
        swapped: list[str] = []
        turns = [self._swap(_turn(message, f"messages.{place}"), swapped) for place, message in enumerate(messages)]
        offered = [self._swap(tool.model_dump(exclude_none=True), swapped) for tool in tools]
        text = render(template, turns, offered, add_generation_prompt=generation_prompt)
        ids: list[int] = []
        for number, piece in enumerate(_MARKED.split(text)):
            if number % 2:
                ids += self.tokenizer.encode(swapped[int(piece)])
            elif piece:
                ids += self.tokenizer.encode_rendered(piece)
        return ids

    def text(self, text: str, parse_special: bool) -> list[int]:
        """Ids of a text; ``parse_special``: spellings of special tokens are those tokens."""
        return self.tokenizer.encode_rendered(text) if parse_special else self.tokenizer.encode(text)

    def _swap(self, value: Any, swapped: list[str]) -> Any:
        """``value`` with special spellings in its strings replaced by marks, which are places in ``swapped``."""
        if isinstance(value, dict):
            return {self._swap(key, swapped): self._swap(item, swapped) for key, item in value.items()}
        if isinstance(value, list):
            return [self._swap(item, swapped) for item in value]
        if not isinstance(value, str):
            return value

        def mark(match: re.Match[str]) -> str:
            swapped.append(match.group())
            return _MARK.format(len(swapped) - 1)

        return self._spelled.sub(mark, value)


def _turn(message: Message, where: str) -> dict[str, Any]:
    """As templates read it: content as one text, arguments of calls as objects, which they write as JSON themselves."""
    turn = message.model_dump(include={"role", "name", "tool_call_id", "reasoning_content"}, exclude_none=True)
    if message.role == "developer":
        turn["role"] = "system"
    if message.content is None and message.role != "assistant":
        raise FieldError(f"{where}.content", "is missing")
    turn["content"] = message.content or ""
    if isinstance(message.content, list):
        for place, part in enumerate(message.content):
            if part.type not in ("text", "input_text", "output_text") or part.text is None:
                raise FieldError(f"{where}.content.{place}", f"this model reads text only, not {part.type!r}")
        turn["content"] = "".join(part.text or "" for part in message.content)
    for call in message.tool_calls or ():
        arguments = call.function.arguments
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (json.JSONDecodeError, RecursionError):
                raise FieldError(f"{where}.tool_calls", "arguments are not JSON") from None
        function = {"name": call.function.name, "arguments": arguments}
        turn.setdefault("tool_calls", []).append({"type": "function", "function": function})
    return turn


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request may call. Written by `tool_use`."""

    offered: tuple[Tool, ...]
    """Rendered into the prompt; empty: none."""
    forced: bool
    """A call must come; the grammar sees to it."""


def tool_use(tools: Sequence[Tool], choice: ToolChoice | None) -> ToolUse:
    """Apply ``tool_choice``: what is offered, and whether a call is forced. Raises `FieldError` for what is not there."""
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise FieldError("tools", "two tools have the same name")
    wanted, forced = names, True
    match choice:
        case None | "auto":
            return ToolUse(tuple(tools), False)
        case "none":
            return ToolUse((), False)
        case NamedTool():
            wanted = [choice.function.name]
        case AllowedToolsChoice():
            wanted = [tool.function.name for tool in choice.allowed_tools.tools]
            forced = choice.allowed_tools.mode == "required"
    if missing := [name for name in wanted if name not in names]:
        raise FieldError("tool_choice", f"{missing[0]!r} is not among the tools")
    if not wanted:
        raise FieldError("tool_choice", "a call is wanted and there are no tools")
    return ToolUse(tuple(tool for tool in tools if tool.function.name in wanted), forced)


def answer_grammar(use: ToolUse, form: ResponseFormat | None, parallel: bool) -> Grammar | None:
    """The grammar that tools and ``response_format`` ask for together; None where anything may be written."""
    if use.forced:
        return Grammar(kind="lark", text=_call_grammar(use.offered, parallel))
    if form is None or form.type == "text":
        return None
    schema = {"type": "object"} if form.json_schema is None else form.json_schema.schema_
    if use.offered:
        return Grammar(kind="lark", text=_call_grammar(use.offered, parallel, beside=schema))
    if form.json_schema is None:
        return Grammar(kind="json_object")
    return Grammar(kind="json_schema", text=json.dumps(schema))


def _call_grammar(tools: Sequence[Tool], parallel: bool, beside: dict[str, Any] | None = None) -> str:
    """One rule a tool, whose schema stays the root that its own references point into."""
    rules = [f"start: {'call+' if parallel else 'call'}{'' if beside is None else ' | answer'}"]
    if beside is not None:
        rules.append(f"answer: %json {json.dumps(beside)}")
    names = " | ".join(f"tool{number}" for number in range(len(tools)))
    rules.append(f'call: "{CALL_START}" ({names}) "{CALL_END}"')
    for number, tool in enumerate(tools):
        head = json.dumps(f'{{"name": "{tool.function.name}", "arguments": ')
        schema = {"x-guidance": _SPACING, **(tool.function.parameters or {"type": "object"})}
        rules += [f'tool{number}: {head} arguments{number} "}}"', f"arguments{number}: %json {json.dumps(schema)}"]
    return "\n".join(rules) + "\n"


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


def read_call(text: str) -> Call | None:
    """The call that ``text`` (between the marks) spells, or None."""
    try:
        tree = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return None
    tree = tree.get("function", tree) if isinstance(tree, dict) else None
    if not isinstance(tree, dict) or not isinstance(tree.get("name"), str):
        return None
    arguments = tree.get("arguments", {})
    if not isinstance(arguments, str):  # some models write the object as a string of JSON
        arguments = json.dumps(arguments, ensure_ascii=False)
    return Call(f"call_{uuid.uuid4().hex[:24]}", tree["name"], arguments)


class CallReader:
    """Splits streamed text into content and calls; holds back what may be the beginning of a mark."""

    def __init__(self, is_reading: bool = True) -> None:
        """``is_reading`` false: all text is content."""
        self._is_reading = is_reading
        self._held = ""
        self._inside = False
        self._searched = 0  # within the held call: no end mark that closes a readable call lies before

    def push(self, text: str) -> list[str | Call]:
        """What is certain now: pieces of content and finished calls, in order."""
        if not self._is_reading:
            return [text] if text else []
        self._held += text
        found: list[str | Call] = []
        while self._take_call(found) if self._inside else self._take_content(found):
            pass
        return found

    def finish(self) -> list[str | Call]:
        """The rest; a call that was not finished is text."""
        rest = (CALL_START if self._inside else "") + self._held
        self._held, self._inside = "", False
        return [rest] if rest else []

    def _take_content(self, found: list[str | Call]) -> bool:
        content, start, rest = self._held.partition(CALL_START)
        if not start:  # the longest end that may begin the mark stays
            ends = (CALL_START[:size] for size in range(len(CALL_START) - 1, -1, -1))
            rest = next(end for end in ends if content.endswith(end))
            content = content.removesuffix(rest)
        if content:
            found.append(content)
        self._held, self._inside, self._searched = rest, bool(start), 0
        return self._inside

    def _take_call(self, found: list[str | Call]) -> bool:
        # An end mark inside a string of the arguments does not close the call: what is before it is not yet JSON.
        while (end := self._held.find(CALL_END, self._searched)) >= 0:
            call = read_call(self._held[:end])
            if call is not None:
                found.append(call)
                self._held, self._inside = self._held[end + len(CALL_END) :], False
                return True
            self._searched = end + len(CALL_END)
        return False


def read_answer(text: str) -> tuple[str, list[Call]]:
    """Content and calls of a whole answer; white space between calls is no content."""
    reader = CallReader()
    pieces = [*reader.push(text), *reader.finish()]
    calls = [piece for piece in pieces if isinstance(piece, Call)]
    content = "".join(piece for piece in pieces if isinstance(piece, str))
    return (content.strip() if calls else content), calls
