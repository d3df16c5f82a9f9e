"""/v1/responses: OpenAI's newer form of a chat, without its memory. Nothing is stored, so each request brings it all."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from stretto.serve.bodies import Body, ChatBody, ContentPart, FunctionName, Generation, parse_body
from stretto.serve.elastic import Rung
from stretto.serve.errors import bad
from stretto.serve.openai import Desk, Job

_LOGPROBS = "message.output_text.logprobs"


class FlatTool(Body):
    """A function, as this API nests it: not at all."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedChoice(Body):
    type: Literal["function"]
    name: str


class AllowedChoice(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedChoice]


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    format: TextFormat = TextFormat()
    verbosity: str | None = None
    """Accepted without effect."""


class InputItem(BaseModel):
    """A message, a call made or its result. Items of reasoning are left aside."""

    model_config = ConfigDict(extra="ignore")
    type: str = "message"
    role: str | None = None
    content: str | list[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str = "{}"
    output: str | list[ContentPart] | None = None


class ResponsesBody(Generation):
    """POST /v1/responses."""

    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[FlatTool] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | AllowedChoice = "auto"
    parallel_tool_calls: bool = True
    text: TextOptions = TextOptions()
    top_logprobs: int | None = None
    include: list[str] = Field(default_factory=list)
    truncation: Literal["disabled"] = "disabled"
    store: bool = False
    background: bool = False
    previous_response_id: str | None = None
    conversation: Any = None


def parse_responses(tree: Any) -> ResponsesBody:
    """Validate a body.

    Raises:
        ApiError: 400, also for what would need memory.
    """
    body = parse_body(ResponsesBody, tree)
    if body.store:
        raise bad("store", "nothing is stored here; send store=false")
    for name in ("previous_response_id", "conversation", "background"):
        if getattr(body, name):
            raise bad(name, "nothing is stored here; send the whole conversation as input")
    if body.n != 1:
        raise bad("n", "a response is one answer; use /v1/chat/completions for several")
    if unknown := [name for name in body.include if name not in (_LOGPROBS, "reasoning.encrypted_content")]:
        raise bad("include", f"{unknown[0]!r} is not available; known: {_LOGPROBS}")
    return body


def respond(desk: Desk, body: ResponsesBody, rung: Rung) -> Job:
    """The job of a response: that of the same chat."""
    return desk.chat(as_chat(body), rung, prefix="resp")


def as_chat(body: ResponsesBody) -> ChatBody:
    """The chat completion that asks for the same."""
    shared = {name: getattr(body, name) for name in Generation.model_fields if name in body.model_fields_set}
    form = body.text.format
    tree: dict[str, Any] = {
        **{name: value.model_dump() if isinstance(value, BaseModel) else value for name, value in shared.items()},
        "messages": _messages(body),
        "tools": [
            {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
            for tool in body.tools
        ],
        "tool_choice": _choice(body),
        "parallel_tool_calls": body.parallel_tool_calls,
        "logprobs": _LOGPROBS in body.include or bool(body.top_logprobs),
        "top_logprobs": body.top_logprobs,
        "max_completion_tokens": body.max_output_tokens,
        "response_format": {"type": form.type}
        | ({"json_schema": {"schema": form.schema_ or {}}} if form.type == "json_schema" else {}),
    }
    return parse_body(ChatBody, tree)


def _choice(body: ResponsesBody) -> Any:
    def named(choice: NamedChoice) -> dict[str, Any]:
        return {"type": "function", "function": FunctionName(name=choice.name).model_dump()}

    match body.tool_choice:
        case NamedChoice() as choice:
            return named(choice)
        case AllowedChoice() as choice:
            allowed = {"mode": choice.mode, "tools": [named(tool) for tool in choice.tools]}
            return {"type": "allowed_tools", "allowed_tools": allowed}
    return body.tool_choice if body.tools else None


def _messages(body: ResponsesBody) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    for place, item in enumerate(body.input):
        match item.type:
            case "message":
                messages.append({"role": item.role or "user", "content": _plain(item.content)})
            case "function_call":
                call = {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
                if messages and messages[-1]["role"] == "assistant":
                    messages[-1].setdefault("tool_calls", []).append(call)
                else:
                    messages.append({"role": "assistant", "tool_calls": [call]})
            case "function_call_output":
                messages.append({"role": "tool", "content": _plain(item.output), "tool_call_id": item.call_id})
            case "reasoning":
                pass
            case _:
                raise bad(f"input.{place}", f"items of type {item.type!r} are not supported")
    return messages


def _plain(content: str | list[ContentPart] | None) -> Any:
    return [part.model_dump() for part in content] if isinstance(content, list) else content
