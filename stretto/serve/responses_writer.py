"""Answers of /v1/responses: the items of one response, and the events that tell of them as they grow."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from stretto.engine.request import Completion, Event, TokenEvent
from stretto.serve.answers import elastic_usage, logprob_entry, raise_for, token_fields
from stretto.serve.errors import ApiError
from stretto.serve.openai import Job
from stretto.serve.prompts import Spelling
from stretto.serve.responses import ResponsesBody
from stretto.serve.tools import Call, CallReader


class ResponsesWriter:
    """Writes a response, whole or as its events."""

    def __init__(self, job: Job, spelling: Spelling | None, body: ResponsesBody) -> None:
        self._job = job
        self._spelling = spelling
        self._body = body
        self._reader = CallReader() if job.reads_calls else None
        self._items: list[dict[str, Any]] = []
        self._message: dict[str, Any] | None = None  # the last item, while its text grows
        self._logprobs: list[dict[str, Any]] = []  # of tokens whose text is not out yet
        self._num_sent = 0
        self._sequence = 0
        self._done: Completion | None = None

    def whole(self, done: Sequence[Completion]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        [completion] = done
        tops = completion.top or [()] * len(completion.tokens)
        for token, logprob, top in zip(completion.tokens, completion.logprobs.tolist(), tops, strict=True):
            if self._job.logprobs:
                self._logprobs.append(logprob_entry(self._spelling, token, logprob, top, self._job.token_ids))
        self.push(completion)
        return self._response()

    def start(self) -> list[bytes]:
        """Events that precede every token."""
        return [self._event(f"response.{name}", response=self._response()) for name in ("created", "in_progress")]

    def push(self, event: Event) -> list[bytes]:
        """Events that an engine event gives rise to."""
        if isinstance(event, TokenEvent):
            if self._job.logprobs:
                entry = logprob_entry(self._spelling, event.token, event.logprob, event.top, self._job.token_ids)
                self._logprobs.append(entry)
            self._num_sent += len(event.text)
            return self._text(event.text, last=False)
        raise_for(event)
        frames = self._text(event.text[self._num_sent :], last=True)
        if not self._items:  # an answer without a word is still a message
            frames += self._begin_message()
        frames += self._end_message()
        if event.finish_reason == "length":
            self._items[-1]["status"] = "incomplete"
        self._done = event
        return frames

    def finish(self) -> list[bytes]:
        """The last event: completed, or incomplete where the tokens ran out."""
        response = self._response()
        return [self._event(f"response.{response['status']}", response=response)]

    def fail(self, error: ApiError) -> list[bytes]:
        """What ends a stream that cannot go on."""
        return [self._event("error", message=error.message, code=error.code or "server_error", param=error.param)]

    def _text(self, text: str, last: bool) -> list[bytes]:
        pieces: list[str | Call] = [text] if text else []
        if self._reader is not None:
            pieces = [*self._reader.push(text), *(self._reader.finish() if last else [])]
        frames: list[bytes] = []
        for piece in pieces:
            if isinstance(piece, Call):
                frames += self._end_message()
                frames += self._call(piece)
            elif self._message is not None or piece.strip() or not self._items:
                frames += self._delta(piece)
        return frames

    def _delta(self, text: str) -> list[bytes]:
        frames = [] if self._message is not None else self._begin_message()
        assert self._message is not None
        part = self._message["content"][0]
        part["text"] += text
        part["logprobs"] += self._logprobs
        frames.append(self._part_event("response.output_text.delta", delta=text, logprobs=self._logprobs))
        self._logprobs = []
        return frames

    def _begin_message(self) -> list[bytes]:
        part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "status": "in_progress"}
        self._message = item | {"content": [part]}
        self._items.append(self._message)
        added = self._item_event("response.output_item.added", item=item | {"content": []})
        return [added, self._part_event("response.content_part.added", part=part)]

    def _end_message(self) -> list[bytes]:
        if self._message is None:
            return []
        part = self._message["content"][0]
        part["logprobs"] += self._logprobs
        self._logprobs = []
        self._message["status"] = "completed"
        frames = [
            self._part_event("response.output_text.done", text=part["text"], logprobs=part["logprobs"]),
            self._part_event("response.content_part.done", part=part),
            self._item_event("response.output_item.done", item=self._message),
        ]
        self._message = None
        return frames

    def _call(self, call: Call) -> list[bytes]:
        item = {
            "id": f"fc_{secrets.token_hex(12)}",
            "type": "function_call",
            "call_id": call.id,
            "name": call.name,
            "arguments": "",
            "status": "in_progress",
        }
        whole = item | {"arguments": call.arguments, "status": "completed"}
        self._items.append(whole)
        place = {"item_id": item["id"], "output_index": len(self._items) - 1}
        return [
            self._item_event("response.output_item.added", item=item),
            self._event("response.function_call_arguments.delta", delta=call.arguments, **place),
            self._event("response.function_call_arguments.done", arguments=call.arguments, name=call.name, **place),
            self._item_event("response.output_item.done", item=whole),
        ]

    def _item_event(self, kind: str, item: Mapping[str, Any]) -> bytes:
        return self._event(kind, output_index=len(self._items) - 1, item=item)

    def _part_event(self, kind: str, **fields: Any) -> bytes:
        assert self._message is not None
        return self._event(
            kind, item_id=self._message["id"], output_index=len(self._items) - 1, content_index=0, **fields
        )

    def _event(self, kind: str, **fields: Any) -> bytes:
        payload = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        text = json.dumps(payload, ensure_ascii=False, separators=(",", ":"))
        return f"event: {kind}\ndata: {text}\n\n".encode()

    def _response(self) -> dict[str, Any]:
        done, body, job = self._done, self._body, self._job
        cut = done is not None and done.finish_reason == "length"
        sampling = job.requests[0].sampling
        response: dict[str, Any] = {
            "id": job.id,
            "object": "response",
            "created_at": job.created,
            "status": "in_progress" if done is None else "incomplete" if cut else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": job.model,
            "output": list(self._items),
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "store": False,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "text": {"format": body.text.format.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": body.tool_choice
            if isinstance(body.tool_choice, str)
            else body.tool_choice.model_dump(exclude_none=True),
            "tools": [tool.model_dump() for tool in body.tools],
            "truncation": body.truncation,
            "usage": None if done is None else self._usage(done),
        }
        return response | (token_fields(job, done) if done is not None else {})

    def _usage(self, done: Completion) -> dict[str, Any]:
        use = done.usage
        return {
            "input_tokens": use.prompt_tokens,
            "input_tokens_details": {"cached_tokens": use.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": use.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": use.prompt_tokens + use.output_tokens,
            "elastic": elastic_usage(self._job, [use]),
        }
