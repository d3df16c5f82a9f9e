"""From engine events to OpenAI's answers: whole bodies, and the chunks of a stream. Pure functions of the events."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np

from stretto.engine.request import Completion, Event, TokenEvent, TopLogprob
from stretto.engine.request import Usage as ChoiceUsage
from stretto.model.spec import Subnet
from stretto.serve.errors import ApiError
from stretto.serve.openai import Job
from stretto.serve.prompts import Spelling
from stretto.serve.tools import Call, CallReader, read_answer

DONE = b"data: [DONE]\n\n"


def sse(payload: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(payload, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def usage(job: Job, done: Sequence[Completion]) -> dict[str, Any]:
    """OpenAI's usage, summed over the choices, and what the elastic network spent (``elastic``)."""
    uses = [completion.usage for completion in done]
    num_output = 0 if job.only_prompt else sum(use.output_tokens for use in uses)
    num_prompt = sum(len(request.prompt) for request in job.requests)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": sum(use.cached_tokens for use in uses)},
        "elastic": elastic_usage(job, uses),
    }


def elastic_usage(job: Job, uses: Sequence[ChoiceUsage]) -> dict[str, Any]:
    """What the request asked for, what it got and why, and what that cost."""
    answer = job.given.phases.answer
    report = {
        **_axes(answer),
        "subnet": job.given.name,
        "flops": sum(use.flops for use in uses),
        "milliseconds": round(1e3 * max((use.total_s for use in uses), default=0.0), 3),
        "queued_milliseconds": round(1e3 * max((use.queued_s for use in uses), default=0.0), 3),
        "asked": job.given.asked,
        "given_reason": job.given.reason,
    }
    phases = {"prefill": job.given.phases.prefill, "thinking": job.given.phases.thinking}
    return report | {name: _axes(subnet) for name, subnet in phases.items() if subnet is not None}


def _axes(subnet: Subnet) -> dict[str, Any]:
    """Numbers where all layers agree, else a list by layer."""

    def short(values: tuple[int, ...]) -> Any:
        return values[0] if len(set(values)) == 1 else list(values)

    return {"layers": len(subnet.layers), "experts": short(subnet.experts), "top_k": short(subnet.top_k)}


def packed(array: np.ndarray) -> dict[str, Any]:
    """An array as base64 of its little-endian bytes in C order: a list of numbers would be several times larger."""
    plain = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return {
        "data": base64.b64encode(plain.tobytes()).decode(),
        "dtype": array.dtype.name,
        "shape": list(array.shape),
    }


def token_fields(job: Job, completion: Completion) -> dict[str, Any]:
    """What an RL client reads of a finished choice; version spans are ``[version, number of tokens]``."""
    fields: dict[str, Any] = {}
    if job.token_ids:
        versions = completion.versions.tolist()
        spans: list[list[int]] = []
        for version in versions:
            if spans and spans[-1][0] == version:
                spans[-1][1] += 1
            else:
                spans.append([version, 1])
        fields |= {
            "prompt_token_ids": list(completion.prompt),
            "token_ids": list(completion.tokens),
            "weight_version": versions[-1] if versions else None,
            "weight_versions": spans,
            "seed": completion.seed,
        }
    if job.routes:
        fields["routed_experts"] = None if completion.routes is None else packed(completion.routes)
    return fields


def raise_for(completion: Completion) -> None:
    """Raises `ApiError` where a choice ended by no wish of the client."""
    if completion.finish_reason == "error":
        raise ApiError(500, completion.error or "the engine could not finish this request")
    if completion.finish_reason == "abort":
        raise ApiError(503, "the request was aborted by the server; ask again", code="aborted")


def logprob_entry(
    spelling: Spelling | None, token: int, logprob: float, top: Iterable[TopLogprob], with_id: bool
) -> dict[str, Any]:
    """One entry of ``logprobs.content``."""

    def spell(token: int, logprob: float) -> dict[str, Any]:
        text, raw = (f"token_id:{token}", ()) if spelling is None else spelling.token(token)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(raw)}

    entry = spell(token, logprob) | {"top_logprobs": [spell(each.token, each.logprob) for each in top]}
    return entry | {"token_id": token} if with_id else entry


def _finite(logprob: float) -> float:
    """JSON has no minus infinity; OpenAI writes this number for it."""
    return max(float(logprob), -9999.0)


class ChatWriter:
    """Writes a chat completion, whole or as it comes."""

    object: Literal["chat.completion"] = "chat.completion"

    def __init__(self, job: Job, spelling: Spelling | None) -> None:
        self._job = job
        self._spelling = spelling
        self._readers = [CallReader() if job.reads_calls else None for _ in range(job.num_choices)]
        self._num_calls = [0] * job.num_choices
        self._num_sent = [0] * job.num_choices  # characters of the text so far
        self._done: list[Completion] = []
        self._head = {
            "id": job.id,
            "object": "chat.completion.chunk",
            "created": job.created,
            "model": job.model,
        }

    def whole(self, done: Sequence[Completion]) -> dict[str, Any]:
        """The body of an answer that is not streamed; ``done`` in the order of choices."""
        job = self._job
        choices = []
        for index, completion in enumerate(done):
            raise_for(completion)
            content, calls = read_answer(completion.text) if job.reads_calls else (completion.text, [])
            message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else "")}
            if calls:
                message["tool_calls"] = [call.body() for call in calls]
            logprobs = {"content": self._entries(completion), "refusal": None} if job.logprobs else None
            reason = "tool_calls" if calls else completion.finish_reason
            choices.append(
                {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}
                | token_fields(job, completion)
            )
        body = {**self._head, "object": self.object, "choices": choices, "usage": usage(job, done)}
        return body | ({"prompt_token_ids": list(job.requests[0].prompt)} if job.token_ids else {})

    def start(self) -> list[bytes]:
        """Chunks that precede every token."""
        return [
            self._chunk(index, {"role": "assistant", "content": ""}, None) for index in range(self._job.num_choices)
        ]

    def push(self, event: Event) -> list[bytes]:
        """Chunks that ``event`` gives rise to."""
        job = self._job
        index = job.choice(event.request_id, event.index)
        if isinstance(event, TokenEvent):
            self._num_sent[index] += len(event.text)
            deltas = self._deltas(index, event.text)
            extra: dict[str, Any] = {"token_ids": [event.token]} if job.token_ids else {}
            logprobs = None
            if job.logprobs:
                entry = logprob_entry(self._spelling, event.token, event.logprob, event.top, job.token_ids)
                logprobs = {"content": [entry], "refusal": None}
            if not deltas and not extra and logprobs is None:
                return []
            first, *rest = deltas or [{}]
            return [self._chunk(index, first, logprobs, extra), *(self._chunk(index, delta, None) for delta in rest)]
        raise_for(event)
        self._done.append(event)
        deltas = self._deltas(index, event.text[self._num_sent[index] :], last=True)
        reason = "tool_calls" if self._num_calls[index] else event.finish_reason
        fields = token_fields(job, event)
        fields.pop("token_ids", None)  # each came with its own chunk
        return [
            *(self._chunk(index, delta, None) for delta in deltas),
            self._chunk(index, {}, None, {"finish_reason": reason} | fields),
        ]

    def finish(self) -> list[bytes]:
        """Chunks behind the last token."""
        if not self._job.include_usage:
            return [DONE]
        return [sse(self._head | {"choices": [], "usage": usage(self._job, self._done)}), DONE]

    def fail(self, error: ApiError) -> list[bytes]:
        """What ends a stream that cannot go on."""
        return [sse(error.body())]

    def _deltas(self, index: int, text: str, last: bool = False) -> list[dict[str, Any]]:
        reader = self._readers[index]
        if reader is None:
            return [{"content": text}] if text else []
        deltas: list[dict[str, Any]] = []
        for piece in [*reader.push(text), *(reader.finish() if last else [])]:
            if isinstance(piece, Call):
                deltas.append({"tool_calls": [piece.body(self._num_calls[index])]})
                self._num_calls[index] += 1
            elif piece.strip() or not self._num_calls[index]:  # white space between calls is no content
                deltas.append({"content": piece})
        return deltas

    def _entries(self, completion: Completion) -> list[dict[str, Any]]:
        tops: Sequence[tuple[TopLogprob, ...]] = completion.top or [()] * len(completion.tokens)
        return [
            logprob_entry(self._spelling, token, logprob, top, self._job.token_ids)
            for token, logprob, top in zip(completion.tokens, completion.logprobs.tolist(), tops, strict=True)
        ]

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None, extra: dict[str, Any] | None = None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None} | (extra or {})
        chunk: dict[str, Any] = self._head | {"choices": [choice]}
        return sse(chunk | {"usage": None} if self._job.include_usage else chunk)
