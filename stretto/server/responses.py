"""Endpoint /v1/responses, without stored state: each request brings the whole conversation.

A request is converted to the equivalent chat completion. The answer is written as the items of one response, or as events
while the items grow.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from stretto.engine.request import Completion, TokenEvent
from stretto.server.calls.dialect import Call, Piece, Thought
from stretto.server.completions import ChatBody, NoStore, chat_job
from stretto.server.elastic import Rung
from stretto.server.generate import Answer, Backend, Generation, Job, OnlyFalse, is_cut, sse
from stretto.server.limits import ApiError, parse_body
from stretto.server.messages import (
    TEXT_OR_LIST,
    Allowed,
    Body,
    Content,
    FieldError,
    FunctionName,
    FunctionSpec,
    FunctionType,
    Returned,
    named_by_client,
)

_LOGPROBS = "message.output_text.logprobs"
_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}
"""Kinds of items whose text grows, and the type of their one part."""
_KNOWN_INCLUDES = Allowed((_LOGPROBS, "reasoning.encrypted_content"), f"{{}} is not available; known: {_LOGPROBS}")
_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
}
"""Names of a chat completion's fields here."""
_NO_MEMORY = "this server stores nothing; send the whole conversation as input"


class FlatTool(FunctionSpec, FunctionType):
    """A function whose name and parameters stand beside its type."""


class NamedChoice(FunctionName, FunctionType):
    pass


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


class InputMessage(Returned):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"] = "user"
    content: Content


class InputCall(Returned):
    """A call in an earlier answer."""

    type: Literal["function_call"]
    call_id: str | None = None
    name: str
    arguments: str = "{}"


class InputResult(Returned):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str | None = None
    output: Content


class ReasoningPart(Returned):
    text: str = ""


class InputReasoning(Returned):
    """The reasoning of an earlier answer."""

    type: Literal["reasoning"]
    content: list[ReasoningPart] | None = None


def _type_of(item: Any) -> Any:
    """Value of ``type``, which messages may leave out."""
    return (item.get("type") if isinstance(item, dict) else getattr(item, "type", None)) or "message"


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputResult, Tag("function_call_output")]
    | Annotated[InputReasoning, Tag("reasoning")],
    Discriminator(_type_of),
]


class RepeatedFields(Body):
    """Fields of a request that its response repeats."""

    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    parallel_tool_calls: bool = True
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | AllowedChoice = "auto"
    tools: list[FlatTool] = Field(default_factory=list)
    truncation: Literal["disabled"] = "disabled"
    store: NoStore = False


class ResponsesBody(RepeatedFields, Generation):
    """POST /v1/responses."""

    input: Annotated[
        Annotated[str, Tag("text")] | Annotated[list[InputItem], Tag("list"), Field(min_length=1)], TEXT_OR_LIST
    ]
    n: Annotated[int, Allowed((1,), "a response is one answer; use /v1/chat/completions for several")] = 1
    text: TextOptions = TextOptions()
    top_logprobs: int | None = None
    include: list[Annotated[str, _KNOWN_INCLUDES]] = Field(default_factory=list)
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template, as of /v1/chat/completions."""
    add_special_tokens: OnlyFalse = False
    background: Annotated[bool, Allowed((False,), _NO_MEMORY)] = False
    previous_response_id: Annotated[Any, Allowed((None,), _NO_MEMORY)] = None
    conversation: Annotated[Any, Allowed((None,), _NO_MEMORY)] = None


def read_response(backend: Backend, tree: Any, rung: Rung) -> Answer:
    body = parse_body(ResponsesBody, tree)
    with named_by_client(_NAMES):
        job = chat_job(backend, as_chat(body), rung, prefix="resp", format_field=_NAMES["response_format"])
    return ResponseAnswer(backend, job, body)


def as_chat(body: ResponsesBody) -> ChatBody:
    """The equivalent chat completion."""
    form = body.text.format
    schema = {"json_schema": {"schema": form.schema_ or {}}} if form.type == "json_schema" else {}
    tree = body.model_dump(include=set(Generation.model_fields) & body.model_fields_set) | {
        "messages": _messages(body),
        "tools": [_nested(tool) for tool in body.tools],
        "tool_choice": _choice(body),
        "parallel_tool_calls": body.parallel_tool_calls,
        "logprobs": _LOGPROBS in body.include or bool(body.top_logprobs),
        "top_logprobs": body.top_logprobs,
        "chat_template_kwargs": body.chat_template_kwargs,
        "max_completion_tokens": body.max_output_tokens,
        "response_format": {"type": form.type, **schema},
    }
    return parse_body(ChatBody, tree)


def _nested(flat: FunctionName | FunctionSpec) -> dict[str, Any]:
    return {"type": "function", "function": flat}


def _choice(body: ResponsesBody) -> Any:
    match body.tool_choice:
        case NamedChoice() as choice:
            return _nested(choice)
        case AllowedChoice(mode=mode, tools=tools):
            return {
                "type": "allowed_tools",
                "allowed_tools": {"mode": mode, "tools": [_nested(tool) for tool in tools]},
            }
    return body.tool_choice if body.tools or body.tool_choice == "required" else None  # without tools it is refused


def _messages(body: ResponsesBody) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    thought = ""  # reasoning of the assistant's turn that follows it
    for item in body.input:
        reasoning = {"reasoning_content": thought} if thought else {}
        match item:
            case InputMessage(role="assistant"):
                messages.append({"role": "assistant", "content": item.content, **reasoning})
                thought = ""
            case InputMessage():
                messages.append({"role": item.role, "content": item.content})
                thought = ""  # of an answer that was cut
            case InputCall():
                if thought or not (messages and messages[-1]["role"] == "assistant"):
                    messages.append({"role": "assistant", **reasoning})
                    thought = ""
                call = {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
                messages[-1].setdefault("tool_calls", []).append(call)
            case InputResult():
                messages.append({"role": "tool", "content": item.output, "tool_call_id": item.call_id})
            case InputReasoning():
                text = "".join(part.text for part in item.content or ())
                thought = f"{thought}\n{text}" if thought and text else thought or text
    if not messages:
        raise FieldError("input", "holds reasoning only; add a message")
    return messages


class ResponseAnswer(Answer):
    """Writes a response."""

    def __init__(self, backend: Backend, job: Job, body: ResponsesBody) -> None:
        super().__init__(backend, job)
        self._body, self._num_thought = body, backend.prompts.num_thought
        self._items: list[dict[str, Any]] = []
        self._writing: str | None = None  # kind of the last item while its text grows in `_part`
        self._logprobs: list[dict[str, Any]] = []  # of tokens whose text was not sent yet
        self._num_events = 0

    def whole(self, done: Sequence[Completion]) -> dict[str, Any]:
        [completion] = done
        if self.job.logprobs:  # token by token, because each message has the log-probabilities of its own tokens
            at = 0
            for (token, logprob, top), text in zip(self._sampled(completion), self._texts(completion), strict=True):
                shown = completion.text[at : at + len(text)]  # nothing behind a stop string
                at += len(text)
                list(self.push(TokenEvent(completion.request_id, 0, token, logprob, shown, 0, tuple(top))))
        list(self.push(completion))
        return self._response()

    def start(self) -> Iterator[bytes]:
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._response())

    def finish(self) -> Iterator[bytes]:
        response = self._response()
        yield self._event(f"response.{response['status']}", response=response)

    def fail(self, error: ApiError) -> bytes:
        body = error.body()["error"]
        return self._event("error", message=body["message"], code=error.code or body["type"], param=error.param)

    def _token(self, index: int, event: TokenEvent) -> Iterator[bytes]:
        if self.job.logprobs:
            self._logprobs.append(self._entry(event.token, event.logprob, event.top))
        yield from self._pieces(self._readers[index].push(event.text))

    def _end(self, index: int, done: Completion, rest: str) -> Iterator[bytes]:
        reader = self._readers[index]
        yield from self._pieces([*reader.push(rest), *reader.finish(is_cut(done))])
        if not self._items:  # an empty answer is a message, too
            yield from self._begin("message")
        # A call is always complete, and no item is being written after it.
        yield from self._finish_item("incomplete" if done.finish_reason == "length" else "completed")

    def _pieces(self, pieces: Sequence[Piece]) -> Iterator[bytes]:
        for piece in pieces:
            if isinstance(piece, Call):
                yield from self._finish_item()
                yield from self._call(piece)
                continue
            kind, text = ("reasoning", piece.text) if isinstance(piece, Thought) else ("message", piece)
            if kind != self._writing:
                text = text.lstrip() if self._items else text
                if not text and self._items:
                    continue
                yield from self._finish_item()
                yield from self._begin(kind)
                if kind == "message" and len(self._items) > 1:
                    self._logprobs = self._logprobs[-1:]  # the others are of the mark that ends reasoning
            fields = {"logprobs": self._logprobs} if kind == "message" else {}  # reasoning has none
            self._logprobs = []
            self._part["text"] += text
            if fields:
                self._part["logprobs"] += fields["logprobs"]
            yield self._of_item(f"response.{_PARTS[kind]}.delta", content_index=0, delta=text, **fields)

    def _begin(self, kind: str) -> Iterator[bytes]:
        self._part: dict[str, Any] = {"type": _PARTS[kind], "text": ""}
        item: dict[str, Any] = {"type": kind, "status": "in_progress"}
        if kind == "message":
            self._part |= {"annotations": [], "logprobs": []}
            item |= {"id": f"msg_{secrets.token_hex(12)}", "role": "assistant"}
        else:
            item |= {"id": f"rs_{secrets.token_hex(12)}", "summary": []}
        self._items.append(item | {"content": [self._part]})
        self._writing = kind
        yield self._item("added", item | {"content": []})
        yield self._of_item("response.content_part.added", content_index=0, part=self._part)

    def _finish_item(self, status: str = "completed") -> Iterator[bytes]:
        if self._writing is None:
            return
        texts: dict[str, Any] = {"text": self._part["text"]}
        if self._writing == "message":
            self._part["logprobs"] += self._logprobs
            self._logprobs = []
            texts["logprobs"] = self._part["logprobs"]
        self._items[-1]["status"] = status
        yield self._of_item(f"response.{_PARTS[self._writing]}.done", content_index=0, **texts)
        yield self._of_item("response.content_part.done", content_index=0, part=self._part)
        yield self._item("done", self._items[-1])
        self._writing = None

    def _call(self, call: Call) -> Iterator[bytes]:
        item = {"id": f"fc_{secrets.token_hex(12)}", "type": "function_call", "call_id": call.id, "name": call.name}
        self._items.append(item | {"arguments": call.arguments, "status": "completed"})
        kind = "response.function_call_arguments"
        yield self._item("added", item | {"arguments": "", "status": "in_progress"})
        yield self._of_item(f"{kind}.delta", delta=call.arguments)
        yield self._of_item(f"{kind}.done", arguments=call.arguments, name=call.name)
        yield self._item("done", self._items[-1])

    def _item(self, event: str, item: dict[str, Any]) -> bytes:
        return self._event(f"response.output_item.{event}", output_index=len(self._items) - 1, item=item)

    def _of_item(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._num_events += 1
        return sse({"type": kind, "sequence_number": self._num_events - 1, **fields}, f"event: {kind}\n")

    def _response(self) -> dict[str, Any]:
        body, job = self._body, self.job
        done = self._done[0] if self._done else None
        cut = done is not None and done.finish_reason == "length"
        response: dict[str, Any] = {
            "id": job.id,
            "object": "response",
            "created_at": job.created,
            "status": "in_progress" if done is None else "incomplete" if cut else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "model": job.model,
            "output": list(self._items),
            "previous_response_id": None,
            **body.model_dump(include=set(RepeatedFields.model_fields)),
            **job.requests[0].sampling.model_dump(include={"temperature", "top_p"}),
            "text": {"format": body.text.format.model_dump(by_alias=True, exclude_none=True)},
            "usage": None,
        }
        if done is None:
            return response
        use, has_reasoning = done.usage, any(item["type"] == "reasoning" for item in self._items)
        num_thought = self._num_thought(done.prompt, done.tokens) if has_reasoning else 0
        response["usage"] = {
            "input_tokens": use.prompt_tokens,
            "input_tokens_details": {"cached_tokens": use.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": use.output_tokens,
            "output_tokens_details": {"reasoning_tokens": num_thought},
            "total_tokens": use.prompt_tokens + use.output_tokens,
            "elastic": self._elastic_usage([use]),
        }
        return response | self._token_fields(done)
