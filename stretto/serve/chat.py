"""/v1/chat/completions, and the short form /api/ernie-5.1/chat: messages in, one message a choice out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from pydantic import Field

from stretto.engine.request import Completion, TokenEvent
from stretto.serve.elastic import Elastic, Rung
from stretto.serve.generate import Answer, Backend, ChunkedAnswer, Generation, Job, Sampled
from stretto.serve.limits import parse_body
from stretto.serve.messages import (
    Body,
    Call,
    FieldError,
    Message,
    ResponseFormat,
    Tool,
    ToolChoice,
    answer_grammar,
    read_answer,
    tool_use,
)


class ShortChatBody(Body):
    """POST /api/ernie-5.1/chat."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    elastic: Elastic | None = None


class ChatBody(ShortChatBody, Generation):
    """POST /v1/chat/completions."""

    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: list[Tool] = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    response_format: ResponseFormat | None = None
    modalities: list[Literal["text"]] | None = None
    store: Literal[False] = False


def read_chat(backend: Backend, tree: Any, rung: Rung) -> Answer:
    return ChatAnswer(backend, chat_job(backend, parse_body(ChatBody, tree), rung))


def read_short_chat(backend: Backend, tree: Any, rung: Rung) -> Answer:
    body = parse_body(ShortChatBody, tree)
    fields = {name: getattr(body, name) for name in body.model_fields_set}
    return ShortAnswer(backend, chat_job(backend, ChatBody.model_construct(**fields), rung))


def chat_job(backend: Backend, body: ChatBody, rung: Rung, prefix: str = "chatcmpl") -> Job:
    """The engine request of a conversation. Raises `ApiError` or `UserError` for what cannot be done."""
    use = tool_use(body.tools, body.tool_choice)
    ids = backend.check_ids(backend.prompts.chat(body.messages, use.offered), "messages")
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise FieldError("max_tokens", "contradicts max_completion_tokens; give one of them")
    if body.top_logprobs and not body.logprobs:
        raise FieldError("top_logprobs", "needs logprobs=true")
    return backend.job(
        prefix,
        body,
        rung,
        [ids],
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        logprobs=body.logprobs,
        turn_ends=backend.prompts.turn_ends,
        shape=answer_grammar(use, body.response_format, body.parallel_tool_calls),
        reads_calls=bool(use.offered),
        top_logprobs=body.top_logprobs or 0,
    )


class ChatAnswer(ChunkedAnswer):
    """Writes a chat completion."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, backend: Backend, job: Job) -> None:
        super().__init__(backend, job)
        self._num_calls = [0] * job.num_choices

    def whole(self, done: Sequence[Completion]) -> dict[str, Any]:
        ids = {"prompt_token_ids": list(done[0].prompt)} if self.job.body.return_token_ids else {}
        return super().whole(done) | ids

    def _choice(self, index: int, done: Completion) -> dict[str, Any]:
        content, calls = read_answer(done.text) if self.job.reads_calls else (done.text, [])
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else "")}
        if calls:
            message["tool_calls"] = [call.body() for call in calls]
        reason = "tool_calls" if calls else done.finish_reason
        return {"message": message, "logprobs": self._logprobs(self._sampled(done)), "finish_reason": reason}

    def start(self) -> Iterator[bytes]:
        for index in range(self.job.num_choices):
            yield self._chunk(index, {"delta": {"role": "assistant", "content": ""}})

    def _token(self, index: int, event: TokenEvent) -> Iterator[bytes]:
        deltas = self._deltas(index, self._readers[index].push(event.text))
        logprobs = self._logprobs([(event.token, event.logprob, event.top)])
        extra: dict[str, Any] = {"token_ids": [event.token]} if self.job.body.return_token_ids else {}
        if not deltas and (extra or logprobs):
            deltas = [{}]
        for delta in deltas:
            yield self._chunk(index, {"delta": delta}, logprobs, **extra)
            logprobs, extra = None, {}  # they come with the first

    def _end(self, index: int, done: Completion, rest: str) -> Iterator[bytes]:
        reader = self._readers[index]
        for delta in self._deltas(index, [*reader.push(rest), *reader.finish()]):
            yield self._chunk(index, {"delta": delta})
        reason = "tool_calls" if self._num_calls[index] else done.finish_reason
        yield self._chunk(index, {"delta": {}}, finish_reason=reason, **self._end_fields(done))

    def _logprobs(self, tokens: Iterable[Sampled]) -> dict[str, Any] | None:
        return {"content": [self._entry(*each) for each in tokens], "refusal": None} if self.job.logprobs else None

    def _deltas(self, index: int, pieces: Sequence[str | Call]) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        for piece in pieces:
            if isinstance(piece, Call):
                deltas.append({"tool_calls": [{"index": self._num_calls[index], **piece.body()}]})
                self._num_calls[index] += 1
            elif piece.strip() or not self._num_calls[index]:  # white space between calls is no content
                deltas.append({"content": piece})
        return deltas


class ShortAnswer(ChatAnswer):
    """The text and nothing else."""

    def whole(self, done: Sequence[Completion]) -> dict[str, Any]:
        return {"text": done[0].text}
