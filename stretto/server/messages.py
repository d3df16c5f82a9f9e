"""Conversations: from messages and tools to token ids under the chat template, and readers of answers.

`stretto.server.calls` defines how calls and reasoning are written. This file imports neither HTTP nor torch, because RL
renders and reads its conversations with it, too.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from stretto.base.errors import UserError
from stretto.engine.request import Grammar
from stretto.sandbox.tools import shorten
from stretto.server.calls.answers import AnswerReader
from stretto.server.calls.dialect import Schemas
from stretto.server.calls.formats import HERMES
from stretto.server.calls.grammar import answer_rules
from stretto.server.calls.json_text import parse_json
from stretto.server.calls.recognise import dialect_of, marks, think_of
from stretto.server.schemas import closed
from stretto.text.chat import OWN_NAMES, Arguments, check_shown, named_tokens, render
from stretto.text.contents import Contents
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
"""Special tokens that end an assistant's turn in the chat templates of the supported families."""
_NUM_LAST = 16
"""Number of tokens at the end of a prompt that are searched for an opening mark of reasoning."""
TokenId = Annotated[int, Field(ge=0)]
TEXT_OR_LIST = Discriminator(lambda value: "text" if isinstance(value, str) else "list")
"""Chooses between two members of a union, so that errors are those of the member that the client meant."""
CONTEXT_LENGTH, SUBNET, UNPROCESSABLE = "context_length_exceeded", "subnet", "unprocessable"
"""Error codes of bodies that follow /openapi.json and cannot be served: too long, a size that the network lacks, other reasons."""


class FieldError(UserError):
    """A body that cannot be served. ``param``: the field at fault; ``code``: OpenAI's ``error.code``."""

    def __init__(self, param: str | None, problem: str, code: str | None = UNPROCESSABLE) -> None:
        super().__init__(problem if param is None else f"{param}: {problem}")
        self.param = param
        self.code = code


@contextmanager
def named_by_client(names: Mapping[str, str]) -> Iterator[None]:
    """A `FieldError` of the block names the client's field: ``names`` has the client's name of each field that is called otherwise
    here."""
    try:
        yield
    except FieldError as error:
        field = (error.param or "").partition(".")[0]
        if field not in names:
            raise
        problem = str(error).removeprefix(f"{error.param}: ")
        raise FieldError(names[field], problem, error.code) from None


@dataclass(frozen=True, slots=True)
class Allowed:
    """Annotation of a field that takes a few values of its type. The JSON schema lists them; the validator refuses others with
    ``problem``, in which ``{}`` stands for the value."""

    values: tuple[Any, ...]
    problem: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": list(self.values)}

    def _check(self, value: Any) -> Any:
        if value not in self.values:
            raise ValueError(self.problem.format(repr(value)))
        return value


class JsonObject(BaseModel):
    """Base of all objects in requests: a value of another JSON type is an error."""

    model_config = ConfigDict(strict=True, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _read_json(cls, tree: Any) -> Any:
        """In JSON, 2.0 is an integer, too. A field of value null counts as left out."""
        if not isinstance(tree, dict):
            return tree
        return {name: _as_integers(value) for name, value in tree.items() if value is not None}


class Body(JsonObject):
    """Base of request bodies: an unknown field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def _as_integers(value: Any) -> Any:
    """Numbers without a fraction as integers, alone or in lists; not those in objects, which are a client's own data."""
    if isinstance(value, list):
        return [_as_integers(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


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


class PlainFormat(Body):
    type: Literal["text", "json_object"]
    json_schema: None = None


class SchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")]


class Returned(JsonObject):
    """Base of objects that clients send back from earlier answers: unknown fields are ignored."""


class ContentPart(Returned):
    """A piece of a message: text."""

    type: Annotated[
        str, Allowed(("text", "input_text", "output_text"), "this model reads text only, not content of type {}")
    ]
    text: str


Content = Annotated[Annotated[str, Tag("text")] | Annotated[list[ContentPart], Tag("list")], TEXT_OR_LIST]


class CallFunction(Returned):
    name: str
    arguments: str | dict[str, Any] = "{}"


class MessageCall(Returned):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CallFunction


class Message(Returned):
    """One turn. Other fields of answers that clients send back (refusal, annotations…) are ignored."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = Field(default=None, validate_default=True)
    name: str | None = None
    tool_calls: list[MessageCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    """The assistant's reasoning, as in the answer. The chat template decides how much of it the model sees again."""

    model_config = ConfigDict(
        json_schema_extra={
            "if": {"properties": {"role": {"const": "assistant"}}},
            "else": {"required": ["content"], "properties": {"content": {"not": {"type": "null"}}}},
        }
    )

    @field_validator("content")
    @classmethod
    def _check_content(cls, content: Any, info: ValidationInfo) -> Any:
        if content is None and info.data.get("role", "assistant") != "assistant":
            raise ValueError("missing; add it")
        return content


class Prompts:
    """Conversion of messages and texts to token ids, and readers of answers, for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, tool_chars: int | None = None) -> None:
        """``tool_chars``: number of characters of a tool result that the model sees (`shorten`); None: all. Raises `UserError`
        for a ``response_template`` that transformers refuses."""
        self.tokenizer, self.tool_chars = tokenizer, tool_chars
        template, declared = tokenizer.chat_template or "", tokenizer.config.get("response_template")
        self.dialect, self.think = dialect_of(template, declared), think_of(template, declared)
        """Format of tool calls and marks of reasoning; None: unknown, or the template has none."""
        added = tokenizer.rust.get_added_tokens_decoder()
        special = {token.content: token_id for token_id, token in added.items() if token.special}
        self.turn_ends = tuple(special[end] for end in _TURN_ENDS if end in special)
        named = {token.content: token_id for token_id, token in added.items()}
        self.marks = marks(named, self.dialect, self.think)
        """Token ids of the marks of calls and reasoning by their spelling, special tokens or not."""
        self.visible_ids = frozenset(self.marks.values())
        """Ids that are part of an answer's text although they may be special tokens."""

    def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        max_len: int | None = None,
    ) -> list[int]:
        """Token ids of a conversation; with ``generation_prompt`` they end with the header of the assistant's next turn.

        Args:
            variables: further variables of the template (``chat_template_kwargs``).
            max_len: refuse a conversation that has at least as many tokens by its length alone, before it is encoded.

        Raises:
            UserError: the template refuses these messages, or leaves out tools or calls.
            FieldError: the checkpoint has no chat template, its format of tool calls is unknown, or a variable is reserved for
                the server.
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
        shortened = self.shortened([_turn(message) for message in messages])
        turns = [contents.hidden(turn) for turn in shortened]
        strict = {"function": {"strict"}}  # an instruction to the server, not to the model
        offered = [contents.hidden(tool.model_dump(exclude_none=True, exclude=strict)) for tool in tools]
        named = named_tokens(self.tokenizer)
        if reserved := [name for name in variables or () if name in {*OWN_NAMES, *named}]:
            raise FieldError("chat_template_kwargs", f"{reserved[0]} is set by the server; leave it out")
        given = contents.hidden(variables or {})
        check_shown(lambda messages, tools: render(template, messages, tools, variables=named | given), turns, offered)
        text = render(template, turns, offered, generation_prompt, named | given)
        if max_len is not None:
            _check_length("messages", contents.least_tokens(text), max_len)
        return contents.encode(text)

    def shortened(self, turns: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """``turns`` with tool results of at most ``tool_chars`` characters."""
        most = self.tool_chars
        return [
            {**turn, "content": shorten(turn["content"], most)} if most and turn["role"] == "tool" else turn
            for turn in turns
        ]

    def text(self, text: str, parse_special: bool, max_len: int | None = None) -> list[int]:
        """Token ids of a text. ``parse_special``: spellings of special tokens become these tokens. ``max_len``: as for `chat`."""
        if max_len is not None:
            _check_length("prompt", self.tokenizer.least_tokens(text), max_len)
        return self.tokenizer.encode_rendered(text) if parse_special else self.tokenizer.encode(text)

    def missing_start(self, ids: Sequence[int]) -> tuple[int, ...]:
        """The tokens that the tokenizer adds before a text; none if ``ids``, a client's text, begins with them."""
        start = self.tokenizer.start
        return () if tuple(ids[: len(start)]) == start else start

    def thinks(self, ids: Sequence[int]) -> bool:
        """Whether a prompt ends with an opened block of reasoning."""
        return self.think is not None and self._end(ids).endswith(self.think.open)

    def _end(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids[-_NUM_LAST:]).rstrip()

    def num_thought(self, prompt: Sequence[int], answer: Sequence[int]) -> int:
        """Number of an answer's tokens up to the end of its reasoning, closing mark included; 0 without reasoning."""
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
        """A reader of one answer. ``schemas``: parameters of the offered tools by name; None: no calls are read."""
        reads_calls = schemas is not None or (self.dialect is not None and self.dialect.frames)
        dialect, think = self.dialect if reads_calls else None, self.think if reads_thoughts else None
        return AnswerReader(dialect, schemas, think, is_thinking, max_calls)

    def grammar(
        self,
        use: ToolUse,
        form: ResponseFormat | None,
        parallel: bool,
        prompt: Sequence[int] = (),
        format_field: str = "response_format",
    ) -> Grammar | None:
        """The grammar of answers that tools and ``form``, the client's ``format_field``, require; None where every text is allowed. The
        answer may begin with reasoning, unless the end of ``prompt`` closes it."""
        has_format = form is not None and form.type != "text"
        if not (use.forced or has_format or use.is_strict):
            return None
        fields = {"tools": bool(use.offered), format_field: has_format and not use.forced}
        field = " and ".join(name for name, is_used in fields.items() if is_used)
        is_thinking, schema = self.thinks(prompt), None
        thinks = None if self.think is None or self._end(prompt).endswith(self.think.close) else self.think
        if form is not None and has_format and not use.forced:
            schema = {"type": "object"} if form.json_schema is None else form.json_schema.schema_
            if not use.offered and thinks is None:
                kind = "json_schema" if form.json_schema else "json_object"
                return Grammar(kind=kind, text=json.dumps(schema) if form.json_schema else "", field=field)
        if use.offered and not (self.dialect and self.dialect.call):
            problem = "calls cannot be forced: no grammar is known for the tool-call format of this checkpoint"
            raise FieldError("tool_choice" if use.forced else "response_format" if has_format else "tools", problem)
        is_free = not (use.forced or has_format)
        if is_free and self.dialect and self.dialect.frames:
            problem = "strict needs tool_choice 'required' with the tool-call format of this checkpoint"
            raise FieldError("tools", problem)
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
        return Grammar(kind="lark", text=text, field=field)


def _check_length(field: str, least: int, max_len: int) -> None:
    """Raises `FieldError`: ``least`` tokens leave no room for an answer."""
    if least >= max_len:
        problem = f"a prompt of at least {least} tokens exceeds this server's context of {max_len} tokens; shorten it"
        raise FieldError(field, problem, CONTEXT_LENGTH)


def _turn(message: Message) -> dict[str, Any]:
    """A message as chat templates read it: content as one text, arguments of calls as objects. Arguments that are no JSON object
    stay text, so that a conversation can go on after such a call."""
    turn = message.model_dump(include={"role", "name", "tool_call_id", "reasoning_content"}, exclude_none=True)
    if message.role == "developer":
        turn["role"] = "system"
    content = message.content or ""
    turn["content"] = content if isinstance(content, str) else "".join(part.text for part in content)
    for call in message.tool_calls or ():
        arguments = call.function.arguments
        if isinstance(arguments, str):
            with suppress(ValueError):
                tree = parse_json(arguments or "{}")
                arguments = tree if isinstance(tree, dict) else arguments
        if isinstance(arguments, dict):
            arguments = Arguments(arguments)
        function = {"name": call.function.name, "arguments": arguments}
        named = {} if call.id is None else {"id": call.id}
        turn.setdefault("tool_calls", []).append({**named, "type": "function", "function": function})
    return turn


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools that an answer may call. Written by `tool_use`."""

    offered: tuple[Tool, ...]
    """Tools that the prompt shows."""
    forced: bool
    """The grammar forces a call."""

    @property
    def is_strict(self) -> bool:
        """Whether a tool is strict: its calls must follow its schema even where no call is forced."""
        return any(tool.function.strict for tool in self.offered)

    def schemas(self) -> dict[str, dict[str, Any]]:
        """JSON schemas of the parameters by the tools' names."""
        return {tool.function.name: tool.function.parameters or {} for tool in self.offered}

    def grammars(self) -> dict[str, dict[str, Any]]:
        """JSON schemas that a grammar enforces, by the tools' names. Those of strict tools and of forced calls are closed: no other
        arguments. Other calls take any further argument."""
        strict = {tool.function.name: bool(tool.function.strict) for tool in self.offered}
        return {
            name: closed(schema, strict[name])
            if self.forced or strict[name]
            else {"additionalProperties": True} | schema
            for name, schema in self.schemas().items()
        }


def tool_use(tools: Sequence[Tool], choice: ToolChoice | None) -> ToolUse:
    """The tools that ``tool_choice`` allows, and whether it forces a call. Raises `FieldError` for names that are not tools."""
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
