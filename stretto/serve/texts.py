"""Answers of /v1/completions: text, echoed prompts, and OpenAI's older form of log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stretto.engine.request import Completion, Event, TokenEvent, TopLogprob
from stretto.serve.answers import DONE, raise_for, sse, token_fields, usage
from stretto.serve.errors import ApiError
from stretto.serve.openai import Job
from stretto.serve.prompts import Spelling


class TextWriter:
    """Writes a completion, whole or as it comes."""

    def __init__(self, job: Job, spelling: Spelling | None) -> None:
        self._job = job
        self._spelling = spelling
        self._num_sent = [0] * job.num_choices  # characters of the answer so far
        self._offsets = [0] * job.num_choices  # where the next token begins in the text, echo included
        self._done: list[Completion] = []
        self._head = {"id": job.id, "object": "text_completion", "created": job.created, "model": job.model}

    def whole(self, done: Sequence[Completion]) -> dict[str, Any]:
        """The body of an answer that is not streamed; ``done`` in the order of choices."""
        choices = []
        for index, completion in enumerate(done):
            raise_for(completion)
            table = self._table(index)
            echoed = self._echo(completion, table)
            if not self._job.only_prompt:
                tops = completion.top or [()] * len(completion.tokens)
                for token, logprob, top in zip(completion.tokens, completion.logprobs.tolist(), tops, strict=True):
                    table.add(token, logprob, top)
            text = echoed if self._job.only_prompt else echoed + completion.text
            choices.append(
                {"index": index, "text": text, "logprobs": table.body(), "finish_reason": completion.finish_reason}
                | token_fields(self._job, completion)
            )
        return {**self._head, "choices": choices, "usage": usage(self._job, done)}

    def start(self) -> list[bytes]:
        """Chunks that precede every token: none, as the log-probabilities of an echo are not there yet."""
        return []

    def push(self, event: Event) -> list[bytes]:
        """Chunks that ``event`` gives rise to; an echo comes with the first."""
        job = self._job
        index = job.choice(event.request_id, event.index)
        if isinstance(event, TokenEvent):
            if job.only_prompt:
                return []
            text = self._first_echo(index) + event.text
            self._num_sent[index] += len(event.text)
            table = self._table(index)
            table.add(event.token, event.logprob, event.top)
            self._offsets[index] = table.offset
            extra: dict[str, Any] = {"token_ids": [event.token]} if job.token_ids else {}
            if not text and not extra and not job.logprobs:
                return []
            return [self._chunk(index, text, table.body(), extra)]
        raise_for(event)
        self._done.append(event)
        rest = self._first_echo(index) if job.only_prompt else event.text[self._num_sent[index] :]
        fields = token_fields(job, event)
        fields.pop("token_ids", None)  # each came with its own chunk
        extra = {"finish_reason": event.finish_reason} | fields
        if job.logprobs and job.echo is not None:  # of the prompt: known since its last token
            table = _Table(self._spelling, True, 0)
            self._echo(event, table)
            return [self._chunk(index, rest, None, extra | {"prompt_logprobs": table.body()})]
        return [self._chunk(index, rest, None, extra)]

    def finish(self) -> list[bytes]:
        """Chunks behind the last token."""
        if not self._job.include_usage:
            return [DONE]
        return [sse(self._head | {"choices": [], "usage": usage(self._job, self._done)}), DONE]

    def fail(self, error: ApiError) -> list[bytes]:
        """What ends a stream that cannot go on."""
        return [sse(error.body())]

    def _table(self, index: int) -> _Table:
        return _Table(self._spelling, self._job.logprobs, self._offsets[index])

    def _first_echo(self, index: int) -> str:
        """The prompt before a choice's first text, nothing later."""
        if self._job.echo is None or self._offsets[index]:
            return ""
        prompt = self._job.echo[index // self._job.requests[0].sampling.n]
        self._offsets[index] = len(prompt)
        return prompt

    def _echo(self, completion: Completion, table: _Table) -> str:
        """Text of the prompt where it is echoed, with its log-probabilities added to ``table``."""
        if self._job.echo is None:
            return ""
        known: list[float | None] = [None] * len(completion.prompt)  # the first token has none
        if completion.prompt_logprobs is not None:
            known[1:] = completion.prompt_logprobs.tolist()
        for token, logprob in zip(completion.prompt, known, strict=True):
            table.add(token, logprob, None)
        return self._job.echo[int(completion.request_id.rpartition("-")[2])]

    def _chunk(self, index: int, text: str, logprobs: dict[str, Any] | None, extra: dict[str, Any]) -> bytes:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None} | extra
        chunk: dict[str, Any] = self._head | {"choices": [choice]}
        return sse(chunk | {"usage": None} if self._job.include_usage else chunk)


class _Table:
    """The four parallel lists of ``logprobs``."""

    def __init__(self, spelling: Spelling | None, wanted: bool, offset: int) -> None:
        self._spelling = spelling
        self._wanted = wanted
        self.offset = offset
        self._rows: list[tuple[str, float | None, dict[str, float] | None, int]] = []

    def add(self, token: int, logprob: float | None, top: Sequence[TopLogprob] | None) -> None:
        """Append one token; ``top`` is None where alternatives are not known (prompts)."""
        if not self._wanted:
            return
        text = self._spell(token)
        value = None if logprob is None else max(logprob, -9999.0)
        others = None if top is None else {self._spell(each.token): max(each.logprob, -9999.0) for each in top}
        self._rows.append((text, value, others, self.offset))
        self.offset += len(text)

    def body(self) -> dict[str, Any] | None:
        if not self._wanted:
            return None
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        return {name: [row[place] for row in self._rows] for place, name in enumerate(names)}

    def _spell(self, token: int) -> str:
        return f"token_id:{token}" if self._spelling is None else self._spelling.token(token)[0]
