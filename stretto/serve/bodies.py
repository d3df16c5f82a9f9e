"""The bodies that clients send: OpenAI's fields, ours beside them, and nothing that is silently left undone.

A field is one of three things: honoured (it is in a model below), accepted without effect (`IGNORED`, because clients
send it and no answer depends on it), or refused with a 400 that names the nearest known one. ``null`` is "left out".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from stretto.serve.errors import ApiError, bad, from_validation

IGNORED = (
    *("user", "metadata", "service_tier", "safety_identifier", "verbosity", "reasoning_effort", "reasoning"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "prediction"),
    *("add_special_tokens", "max_tool_calls"),
)
"""Accepted without effect: labels, hints about price, caching and effort, and defaults that clients spell out."""


class Body(BaseModel):
    """Base of everything a client sends."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


BodyT = TypeVar("BodyT", bound=Body)


def parse_body(kind: type[BodyT], tree: Any) -> BodyT:
    """Validate a parsed JSON body.

    Raises:
        ApiError: 400 naming the field.
    """
    if not isinstance(tree, Mapping):
        raise ApiError(400, "the body must be a JSON object")
    kept = {name: value for name, value in tree.items() if value is not None and name not in IGNORED}
    try:
        return kind.model_validate(kept)
    except ValidationError as error:
        raise from_validation(error, kind) from None


class Axes(Body):
    """A Subnet: a preset to start from, and axes that replace its own."""

    preset: str | None = None
    layers: int | None = None
    experts: int | None = None
    top_k: int | None = None


class Elastic(Axes):
    """The ``elastic`` field: the Subnet of the answer, and of the phases before it where they differ."""

    answer: Axes | str | None = None
    prefill: Axes | str | None = None
    thinking: Axes | str | None = None


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool = False
    """Against eavesdroppers of packet sizes; we send none, as the client may choose."""


class Generation(Body):
    """What every generating endpoint takes. None: the default of `Sampling`."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] = Field(default_factory=dict)
    seed: int | None = None
    n: int = 1
    min_tokens: int | None = None
    stop: str | list[str] = Field(default_factory=list)
    stop_token_ids: list[int] = Field(default_factory=list)
    ignore_eos: bool = False
    regex: str | None = None
    """The answer must match this expression."""
    grammar: str | None = None
    """The answer must match this grammar (Lark, as llguidance reads it)."""
    elastic: Elastic | str | None = None
    return_token_ids: bool = False
    return_routes: bool = False


class FunctionSpec(Body):
    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: FunctionSpec


class FunctionName(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
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

    model_config = ConfigDict(extra="ignore")
    type: str
    text: str | None = None


class CallFunction(BaseModel):
    model_config = ConfigDict(extra="ignore")
    name: str
    arguments: str | dict[str, Any] = "{}"


class MessageCall(BaseModel):
    model_config = ConfigDict(extra="ignore")
    id: str | None = None
    type: Literal["function"] = "function"
    function: CallFunction


class Message(BaseModel):
    """One turn. Fields that answers carry and clients send back (refusal, annotations…) are left aside."""

    model_config = ConfigDict(extra="ignore")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[MessageCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class Prompted(Generation):
    """What chat and responses share."""

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: list[Tool] = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    response_format: ResponseFormat | None = None


class ChatBody(Prompted):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    modalities: list[Literal["text"]] | None = None
    store: Literal[False] = False


class CompletionBody(Generation):
    """POST /v1/completions."""

    prompt: str | list[int] | list[str] | list[list[int]] = Field(union_mode="left_to_right")
    max_tokens: int = 16
    echo: bool = False
    logprobs: int | None = None
    best_of: int | None = None
    parse_special: bool = True
    """Whether spellings of special tokens in a text prompt are those tokens, as clients that render templates expect."""


class ShortChatBody(Body):
    """POST /api/ernie-5.1/chat."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    elastic: Elastic | str | None = None


class TokenizeBody(Body):
    """POST /tokenize: a text, or messages under the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] = Field(default_factory=list)
    add_generation_prompt: bool = True
    parse_special: bool = True

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


class LoadWeightsBody(Body):
    """POST /admin/load_weights."""

    version: int = Field(ge=0)
    path: str
    """A checkpoint on the server's own disk."""
    keep_cache: bool = False
    checksum: str | None = None


def one_of(param: str, value: int, low: int, high: int) -> int:
    """``value`` if it lies in ``low``…``high``; else a 400."""
    if not low <= value <= high:
        raise bad(param, f"{value} lies outside {low}..{high}")
    return value
