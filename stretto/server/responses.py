"""Endpoint /v1/responses, without stored state: each request brings the whole conversation.

It is read as the chat completion that asks for the same, and written as the items of one response, or as the events
that tell of them as they grow.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pydantic import Field

from stretto.engine.request import Completion, TokenEvent
from stretto.server.completions import ChatBody, chat_job
from stretto.server.dialects import Call, Piece, Thought
from stretto.server.elastic import Rung
from stretto.server.generate import Answer, Backend, Generation, Job, is_cut, sse
from stretto.server.limits import ApiError, parse_body
from stretto.server.messages import Body, ContentPart, FieldError, FunctionName, FunctionSpec, FunctionType, Returned

_LOGPROBS = "message.output_text.logprobs"
_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}
"""Items whose text grows, and what their one part is called."""


class FlatTool(FunctionSpec, FunctionType):
    """A function, as this API nests it: not at all."""


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


class InputItem(Returned):
    """A message, a call made or its result, or reasoning."""

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
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template, as of /v1/chat/completions."""
    truncation: Literal["disabled"] = "disabled"
    store: bool = False
    background: bool = False
    previous_response_id: str | None = None
    conversation: Any = None


def read_response(backend: Backend, tree: Any, rung: Rung) -> Answer:
    """What would need memory is refused."""
    body = parse_body(ResponsesBody, tree)
    if body.store:
        raise FieldError("store", "this server stores nothing; send store=false")
    for name in ("previous_response_id", "conversation", "background"):
        if getattr(body, name):
            raise FieldError(name, "this server stores nothing; send the whole conversation as input")
    if body.n != 1:
        raise FieldError("n", "a response is one answer; use /v1/chat/completions for several")
    if unknown := [name for name in body.include if name not in (_LOGPROBS, "reasoning.encrypted_content")]:
        raise FieldError("include", f"{unknown[0]!r} is not available; known: {_LOGPROBS}")
    return ResponseAnswer(backend, chat_job(backend, as_chat(body), rung, prefix="resp"), body)


def as_chat(body: ResponsesBody) -> ChatBody:
    """The chat completion that asks for the same."""
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
    return body.tool_choice if body.tools else None


def _messages(body: ResponsesBody) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    thought = ""  # of the assistant's turn that follows
    for place, item in enumerate(body.input):
        match item.type:
            case "message":
                messages.append({"role": item.role or "user", "content": item.content})
                if thought and item.role == "assistant":
                    messages[-1]["reasoning_content"], thought = thought, ""
            case "function_call":
                call = {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
                if thought or not (messages and messages[-1]["role"] == "assistant"):
                    messages.append({"role": "assistant", **({"reasoning_content": thought} if thought else {})})
                    thought = ""
                messages[-1].setdefault("tool_calls", []).append(call)
            case "function_call_output":
                messages.append({"role": "tool", "content": item.output, "tool_call_id": item.call_id})
            case "reasoning":
                thought = "".join(part.text or "" for part in item.content or () if isinstance(part, ContentPart))
            case _:
                raise FieldError(f"input.{place}", f"items of type {item.type!r} are not supported")
    return messages


class ResponseAnswer(Answer):
    """Writes a response."""

    def __init__(self, backend: Backend, job: Job, body: ResponsesBody) -> None:
        super().__init__(backend, job)
        self._body, self._num_thought = body, backend.prompts.num_thought
        self._items: list[dict[str, Any]] = []
        self._writing: str | None = None  # kind of the last item, while its text grows in `_part`
        self._logprobs: list[dict[str, Any]] = []  # of tokens whose text is not out yet
        self._num_events = 0

    def whole(self, done: Sequence[Completion]) -> dict[str, Any]:
        [completion] = done
        if self.job.logprobs:
            self._logprobs = [self._entry(*each) for each in self._sampled(completion)]
        list(self.push(completion))
        return self._response()

    def start(self) -> Iterator[bytes]:
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._response())

    def finish(self) -> Iterator[bytes]:
        response = self._response()
        yield self._event(f"response.{response['status']}", response=response)

    def fail(self, error: ApiError) -> bytes:
        told = error.body()["error"]
        return self._event("error", message=told["message"], code=error.code or told["type"], param=error.param)

    def _token(self, index: int, event: TokenEvent) -> Iterator[bytes]:
        if self.job.logprobs:
            self._logprobs.append(self._entry(event.token, event.logprob, event.top))
        yield from self._pieces(self._readers[index].push(event.text))

    def _end(self, index: int, done: Completion, rest: str) -> Iterator[bytes]:
        reader = self._readers[index]
        yield from self._pieces([*reader.push(rest), *reader.finish(is_cut(done))])
        if not self._items:  # an answer without a word is still a message
            yield from self._begin("message")
        yield from self._finish_item()
        if done.finish_reason == "length" and self._items[-1]["type"] != "function_call":  # which is whole
            self._items[-1]["status"] = "incomplete"

    def _pieces(self, pieces: Sequence[Piece]) -> Iterator[bytes]:
        for piece in pieces:
            if isinstance(piece, Call):
                yield from self._finish_item()
                yield from self._call(piece)
                continue
            kind, text = ("reasoning", piece.text) if isinstance(piece, Thought) else ("message", piece)
            if kind != self._writing:
                if not text.strip() and self._items:
                    continue
                yield from self._finish_item()
                yield from self._begin(kind)
            # What is known of tokens is told of the answer's alone.
            logprobs, self._logprobs = self._logprobs if kind == "message" else [], []
            self._part["text"] += text
            told = {}
            if kind == "message":
                self._part["logprobs"] += logprobs
                told = {"logprobs": logprobs}
            yield self._of_item(f"response.{_PARTS[kind]}.delta", content_index=0, delta=text, **told)

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

    def _finish_item(self) -> Iterator[bytes]:
        if self._writing is None:
            return
        texts: dict[str, Any] = {"text": self._part["text"]}
        if self._writing == "message":
            self._part["logprobs"] += self._logprobs
            self._logprobs = []
            texts["logprobs"] = self._part["logprobs"]
        self._items[-1]["status"] = "completed"
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

    def _item(self, what: str, item: dict[str, Any]) -> bytes:
        return self._event(f"response.output_item.{what}", output_index=len(self._items) - 1, item=item)

    def _of_item(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._num_events += 1
        return sse({"type": kind, "sequence_number": self._num_events - 1, **fields}, f"event: {kind}\n")

    def _response(self) -> dict[str, Any]:
        body, job = self._body, self.job
        done = self._done[0] if self._done else None
        cut = done is not None and done.finish_reason == "length"
        sent = (
            "instructions",
            "max_output_tokens",
            "parallel_tool_calls",
            "tool_choice",
            "tools",
            "truncation",
            "store",
        )
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
            **body.model_dump(include=set(sent)),
            **job.requests[0].sampling.model_dump(include={"temperature", "top_p"}),
            "text": {"format": body.text.format.model_dump(by_alias=True, exclude_none=True)},
            "usage": None,
        }
        if done is None:
            return response
        use, is_read = done.usage, any(item["type"] == "reasoning" for item in self._items)
        num_thought = self._num_thought(done.prompt, done.tokens) if is_read else 0
        response["usage"] = {
            "input_tokens": use.prompt_tokens,
            "input_tokens_details": {"cached_tokens": use.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": use.output_tokens,
            "output_tokens_details": {"reasoning_tokens": num_thought},
            "total_tokens": use.prompt_tokens + use.output_tokens,
            "elastic": self._elastic_usage([use]),
        }
        return response | self._token_fields(done)
