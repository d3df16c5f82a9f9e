"""Conversations: from messages and tools to token ids under the chat template, and readers of answers.

How calls and reasoning are written is a matter of `stretto.server.dialects`. Knows neither HTTP nor torch: RL renders and
reads its conversations here, too.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from stretto.base.errors import UserError
from stretto.engine.request import Grammar
from stretto.sandbox.tools import shorten
from stretto.server.dialects import (
    HERMES,
    AnswerReader,
    Schemas,
    answer_rules,
    dialect_of,
    marks,
    parse_json,
    think_of,
)
from stretto.server.schemas import closed
from stretto.text.chat import OWN_NAMES, Arguments, Contents, check_shown, named_tokens, render
from stretto.text.tokenizer import Tokenizer

_TURN_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<|end_of_sentence|>",
    "<|observation|>",
    "<|call|>",
    "<|return|>",
    "<|user|>",
)
"""Special tokens that end an assistant's turn in the templates of the families we read (and of their relatives)."""
_SEEN = 16
"""Tokens of a prompt's end in which reasoning may have been opened."""


class FieldError(UserError):
    """A body that cannot be served, and the field that is to blame."""

    def __init__(self, param: str | None, problem: str, code: str | None = None) -> None:
        super().__init__(problem if param is None else f"{param}: {problem}")
        self.param = param
        self.code = code


class Body(BaseModel):
    """Base of what a client sends: an unknown field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


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
            raise ValueError("json_schema must be given for the type json_schema, and for no other")
        return self


class Returned(BaseModel):
    """Base of what clients send back as it came: fields of other servers' answers are left aside."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class ContentPart(Returned):
    """A piece of a message; parts that are not text are refused."""

    type: str
    text: str | None = None


class CallFunction(Returned):
    name: str
    arguments: str | dict[str, Any] = "{}"


class MessageCall(Returned):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CallFunction


class Message(Returned):
    """One turn. Fields that answers carry and clients send back (refusal, annotations…) are left aside."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[MessageCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    """What the assistant thought, as an answer carried it; the template decides how much of it is shown again."""


class Prompts:
    """One tokenizer's conversations: messages and texts to ids, and readers of what is answered."""

    def __init__(self, tokenizer: Tokenizer, tool_chars: int | None = None) -> None:
        """``tool_chars``: of what a tool gave, so many characters are shown (`shorten`); None: all. Raises `UserError` for a
        ``response_template`` that transformers refuses."""
        self.tokenizer, self.tool_chars = tokenizer, tool_chars
        template, declared = tokenizer.chat_template or "", tokenizer.config.get("response_template")
        self.dialect, self.think = dialect_of(template, declared), think_of(template, declared)
        """How calls are read; None: they cannot be."""
        added = tokenizer.rust.get_added_tokens_decoder()
        ids = {token.content: token_id for token_id, token in added.items() if token.special}
        self.turn_ends = tuple(ids[end] for end in _TURN_ENDS if end in ids)
        named = {token.content: token_id for token_id, token in added.items()}
        self.marks = marks(named, self.dialect, self.think)
        """Ids of the tokens that are marks of calls and reasoning, by their spelling; special or not."""
        self.visible_ids = frozenset(self.marks.values())
        """Part of an answer's text, special or not."""

    def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Ids of a conversation, ending with the header of the turn to be written.

        Args:
            variables: for the template, beside what every template is given (``chat_template_kwargs``).

        Raises:
            UserError: the template refuses these messages, or leaves out tools or calls of theirs, or a content is not text.
            FieldError: the checkpoint has no chat template, tools have calls that could not be read, or a variable is not the
                client's to set.
        """
        template = self.tokenizer.chat_template
        if template is None:
            way = "leave them out" if tools else "use /v1/completions"
            problem = (
                f"this checkpoint has no chat template; {way}, or put a chat_template.jinja beside its tokenizer.json"
            )
            raise FieldError("tools" if tools else "messages", problem)
        if tools and self.dialect is None:
            way = "declare it as response_template in its tokenizer_config.json, or leave them out"
            raise FieldError("tools", f"the format of tool calls in this model's chat template is not known; {way}")
        contents = Contents(self.tokenizer)
        told = self.shortened([_turn(message, f"messages.{place}") for place, message in enumerate(messages)])
        turns = [contents.hidden(turn) for turn in told]
        strict = {"function": {"strict"}}  # is for the server to keep to
        offered = [contents.hidden(tool.model_dump(exclude_none=True, exclude=strict)) for tool in tools]
        named = named_tokens(self.tokenizer)
        if taken := [name for name in variables or () if name in {*OWN_NAMES, *named}]:
            raise FieldError("chat_template_kwargs", f"{taken[0]} is set by the server; leave it out")
        given = contents.hidden(variables or {})
        check_shown(lambda messages, tools: render(template, messages, tools, variables=named | given), turns, offered)
        text = render(template, turns, offered, generation_prompt, named | given)
        return contents.encode(text)

    def shortened(self, turns: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """``turns``, with no more of what tools gave than is to be shown."""
        most = self.tool_chars
        return [
            {**turn, "content": shorten(turn["content"], most)} if most and turn["role"] == "tool" else turn
            for turn in turns
        ]

    def text(self, text: str, parse_special: bool) -> list[int]:
        """Ids of a text; ``parse_special``: spellings of special tokens are those tokens."""
        return self.tokenizer.encode_rendered(text) if parse_special else self.tokenizer.encode(text)

    def thinks(self, ids: Sequence[int]) -> bool:
        """Whether a prompt ends within reasoning that it has opened itself."""
        end = self.tokenizer.decode(ids[-_SEEN:]).rstrip()
        return self.think is not None and end.endswith(self.think.open)

    def num_thought(self, prompt: Sequence[int], answer: Sequence[int]) -> int:
        """Tokens of an answer up to the end of its reasoning, the mark included; 0 where it has none."""
        if self.think is None:
            return 0
        text = self.tokenizer.decode(answer)
        if not self.thinks(prompt) and not text.lstrip().startswith(self.think.open):
            return 0
        place = text.find(self.think.close)
        if place < 0:
            return len(answer)
        num_characters = place + len(self.think.close)
        sizes = range(1, len(answer) + 1)
        return 1 + bisect_left(sizes, num_characters, key=lambda num: len(self.tokenizer.decode(answer[:num])))

    def reader(
        self, schemas: Schemas | None, reads_thoughts: bool, is_thinking: bool = False, max_calls: int | None = None
    ) -> AnswerReader:
        """A reader of one answer. ``schemas``: of the tools on offer; None: no calls are read."""
        is_read = schemas is not None or (self.dialect is not None and self.dialect.frames)
        dialect, think = self.dialect if is_read else None, self.think if reads_thoughts else None
        return AnswerReader(dialect, schemas, think, is_thinking, max_calls)

    def grammar(
        self, use: ToolUse, form: ResponseFormat | None, parallel: bool, is_thinking: bool = False
    ) -> Grammar | None:
        """The grammar that tools and ``response_format`` ask for together; None where anything may be written."""
        shaped = form is not None and form.type != "text"
        if not (use.forced or shaped or use.is_strict):
            return None
        schema = None
        if form is not None and shaped and not use.forced:
            schema = {"type": "object"} if form.json_schema is None else form.json_schema.schema_
            if not use.offered and not is_thinking:
                kind = "json_object" if form.json_schema is None else "json_schema"
                return Grammar(kind=kind, text=json.dumps(schema) if kind == "json_schema" else "")
        if use.offered and not (self.dialect and self.dialect.call):
            problem = "calls cannot be forced: no grammar is known for the tool-call format of this checkpoint"
            raise FieldError("tool_choice" if use.forced else "response_format" if shaped else "tools", problem)
        is_free = not (use.forced or shaped)
        if is_free and self.dialect and self.dialect.frames:
            raise FieldError(
                "tools", "strict needs tool_choice 'required' with the tool-call format of this checkpoint"
            )
        thinks = self.think if is_thinking or is_free else None
        text = answer_rules(
            self.dialect or HERMES,
            use.grammars(),
            self.marks,
            parallel,
            schema,
            thinks,
            is_thinking=is_thinking,
            is_free=is_free,
        )
        return Grammar(kind="lark", text=text)


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
                arguments = parse_json(arguments or "{}")
            except ValueError:
                raise FieldError(f"{where}.tool_calls", "arguments are not JSON") from None
        if isinstance(arguments, dict):
            arguments = Arguments(arguments)
        function = {"name": call.function.name, "arguments": arguments}
        named = {} if call.id is None else {"id": call.id}
        turn.setdefault("tool_calls", []).append({**named, "type": "function", "function": function})
    return turn


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request may call. Written by `tool_use`."""

    offered: tuple[Tool, ...]
    """Rendered into the prompt; empty: none."""
    forced: bool
    """A call must come; the grammar sees to it."""

    @property
    def is_strict(self) -> bool:
        """Calls, if any come, follow the schemas of the tools that say so."""
        return any(tool.function.strict for tool in self.offered)

    def schemas(self) -> dict[str, dict[str, Any]]:
        """Of the parameters, by the tools' names."""
        return {tool.function.name: tool.function.parameters or {} for tool in self.offered}

    def grammars(self) -> dict[str, dict[str, Any]]:
        """What arguments follow where a grammar sees to it, by the tools' names: a strict tool takes nothing that its schema does not
        name, and another one that stands beside it, and need not be called, whatever that allows."""
        others: dict[str, Any] = {} if self.forced else {"additionalProperties": True}
        specs = [(tool.function, tool.function.parameters or {}) for tool in self.offered]
        return {spec.name: closed(schema) if spec.strict else others | schema for spec, schema in specs}


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
        raise FieldError("tool_choice", "a call is required, but the request has no tools")
    return ToolUse(tuple(tool for tool in tools if tool.function.name in wanted), forced)
