"""/v1/completions: texts or token ids in, text out; echoed prompts, and OpenAI's older form of log-probabilities."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, zip_longest
from typing import Any

from pydantic import Field

from stretto.engine.request import Completion, TokenEvent, TopLogprob
from stretto.serve.elastic import Rung
from stretto.serve.generate import MAX_CHOICES, Answer, Backend, ChunkedAnswer, Generation, Job, finite
from stretto.serve.limits import parse_body
from stretto.serve.messages import FieldError

_Row = tuple[str, float | None, dict[str, float] | None]
"""A token's text, its log-probability, and its alternatives' by their text."""


class CompletionBody(Generation):
    """POST /v1/completions."""

    prompt: str | list[int] | list[str] | list[list[int]] = Field(union_mode="left_to_right")
    max_tokens: int = 16
    echo: bool = False
    logprobs: int | None = None
    best_of: int | None = None
    parse_special: bool = True
    """Whether spellings of special tokens in a text prompt are those tokens, as clients that render templates expect."""


def read_completion(backend: Backend, tree: Any, rung: Rung) -> Answer:
    """A `stretto.serve.generate.Reader`: one engine request for each prompt."""
    body = parse_body(CompletionBody, tree)
    if body.best_of not in (None, body.n):
        raise FieldError("best_of", "only the value of n is supported; sample n and choose yourself")
    prompt = body.prompt
    is_one = isinstance(prompt, str) or (bool(prompt) and isinstance(prompt[0], int))
    parts: list[Any] = [prompt] if is_one else list(prompt)
    if not parts:
        raise FieldError("prompt", "is empty; give at least one")
    if len(parts) > MAX_CHOICES:
        raise FieldError("prompt", f"{len(parts)} lies outside 1..{MAX_CHOICES}")
    ids = [backend.prompts.text(part, body.parse_special) if isinstance(part, str) else part for part in parts]
    prompts = [backend.check_ids(each, "prompt") for each in ids]
    only_prompt = body.max_tokens == 0 and body.echo
    job = backend.job(
        "cmpl",
        body,
        rung,
        prompts,
        max_tokens=1 if only_prompt else body.max_tokens,
        logprobs=body.logprobs is not None,
        top_logprobs=body.logprobs or 0,
        prompt_logprobs=body.echo and body.logprobs is not None,
    )
    tokenizer = backend.model.tokenizer
    echo = ["" if tokenizer is None else tokenizer.decode(ids) for ids in prompts] if body.echo else None
    return TextAnswer(backend, job, echo, only_prompt)


class TextAnswer(ChunkedAnswer):
    """Writes a completion."""

    kind = chunk_kind = "text_completion"

    def __init__(self, backend: Backend, job: Job, echo: Sequence[str] | None, only_prompt: bool) -> None:
        super().__init__(backend, job, only_prompt)
        # Text of the prompt before each choice, where it is part of the answer.
        self._echo = None if echo is None else [text for text in echo for _ in range(job.body.n)]
        self._offsets = [0] * job.num_choices  # where the next token begins in the text, echo included

    def _choice(self, index: int, done: Completion) -> dict[str, Any]:
        text = ("" if self._echo is None else self._echo[index]) + ("" if self._only_prompt else done.text)
        tokens = () if self._only_prompt else self._sampled(done)
        rows = chain(self._prompt_rows(done), (self._row(*each) for each in tokens))
        return {"text": text, "logprobs": self._table(rows, 0), "finish_reason": done.finish_reason}

    def _token(self, index: int, event: TokenEvent) -> Iterator[bytes]:
        """An echo comes with the first token: its log-probabilities are not there before the prompt is computed."""
        if self._only_prompt:
            return
        text = self._first_echo(index) + event.text
        logprobs = self._table(map(self._row, [event.token], [event.logprob], [event.top]), self._offsets[index])
        if logprobs is not None:
            self._offsets[index] += len(logprobs["tokens"][0])
        extra: dict[str, Any] = {"token_ids": [event.token]} if self.job.body.return_token_ids else {}
        if text or extra or logprobs:
            yield self._chunk(index, {"text": text}, logprobs, **extra)

    def _end(self, index: int, done: Completion, rest: str) -> Iterator[bytes]:
        fields: dict[str, Any] = {"finish_reason": done.finish_reason, **self._end_fields(done)}
        if self.job.logprobs and self._echo is not None:
            fields["prompt_logprobs"] = self._table(self._prompt_rows(done), 0)
        yield self._chunk(index, {"text": self._first_echo(index) if self._only_prompt else rest}, **fields)

    def _first_echo(self, index: int) -> str:
        """The prompt before a choice's first text, nothing later."""
        if self._echo is None or self._offsets[index]:
            return ""
        self._offsets[index] = len(self._echo[index])
        return self._echo[index]

    def _row(self, token: int, logprob: float | None, top: Sequence[TopLogprob] | None) -> _Row:
        others = None if top is None else {self._spell(each.token)[0]: finite(each.logprob) for each in top}
        return self._spell(token)[0], None if logprob is None else finite(logprob), others

    def _prompt_rows(self, done: Completion) -> Iterator[_Row]:
        """Of an echo. The first token has no log-probability; alternatives are not known."""
        if self._echo is not None:
            known = [None, *([] if done.prompt_logprobs is None else done.prompt_logprobs.tolist())]
            for token, logprob in zip_longest(done.prompt, known):
                yield self._row(token, logprob, None)

    def _table(self, rows: Iterable[_Row], offset: int) -> dict[str, Any] | None:
        """The four parallel lists of ``logprobs``, where they are wanted; the first row's text begins at ``offset``."""
        if not self.job.logprobs:
            return None
        table: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for row in rows:
            for column, value in zip(table.values(), (*row, offset), strict=True):
                column.append(value)
            offset += len(row[0])
        return table
