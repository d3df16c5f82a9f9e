"""Endpoints /v1/chat/completions, /api/ernie-5.1/chat (its short form) and /v1/completions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, chain, zip_longest
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from stretto.engine.request import Completion, TokenEvent, TopLogprob
from stretto.server.calls.answers import read_answer
from stretto.server.calls.dialect import Call, Piece, Thought
from stretto.server.elastic import Elastic, Rung
from stretto.server.generate import (
    MAX_CHOICES,
    Answer,
    Backend,
    Generation,
    Job,
    OnlyFalse,
    OnlyTrue,
    Sampled,
    finite,
    is_cut,
    sse,
)
from stretto.server.limits import ApiError, parse_body
from stretto.server.messages import (
    Allowed,
    Body,
    FieldError,
    Message,
    NamedTool,
    ResponseFormat,
    TokenId,
    Tool,
    ToolChoice,
    named_by_client,
    tool_use,
)
from stretto.text.stream import Detokenizer


class ChunkedAnswer(Answer):
    """Base of the answers of OpenAI's two older endpoints: choices, whole or in chunks, and the usage."""

    kind: str
    """Field ``object`` of whole answers."""
    chunk_kind: str
    """Field ``object`` of chunks."""

    def __init__(self, backend: Backend, job: Job, only_prompt: bool = False) -> None:
        super().__init__(backend, job)
        self._only_prompt = only_prompt  # max_tokens is 0: leave out the one token that the engine samples
        self._head = {"id": job.id, "object": self.chunk_kind, "created": job.created, "model": job.model}

    def whole(self, done: Sequence[Completion]) -> dict[str, Any]:
        choices = [
            {"index": index, **self._choice(index, completion), **self._token_fields(completion)}
            for index, completion in enumerate(done)
        ]
        return {**self._head, "object": self.kind, "choices": choices, "usage": self._usage(done)}

    @abstractmethod
    def _choice(self, index: int, done: Completion) -> dict[str, Any]:
        """A choice of an answer that is not streamed."""

    def finish(self) -> Iterator[bytes]:
        if self.job.body.stream_options.include_usage:
            yield sse(self._head | {"choices": [], "usage": self._usage(self._done)})
        yield b"data: [DONE]\n\n"

    def fail(self, error: ApiError) -> bytes:
        return sse(error.body())

    def _chunk(self, index: int, content: dict[str, Any], logprobs: Any = None, **extra: Any) -> bytes:
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": None} | extra
        chunk = self._head | {"choices": [choice]}
        return sse(chunk | {"usage": None} if self.job.body.stream_options.include_usage else chunk)

    def _last_chunk(self, index: int, content: dict[str, Any], done: Completion, **extra: Any) -> bytes:
        """The chunk that ends a choice, with `_token_fields`. Token ids are left out: earlier chunks brought them."""
        fields = {"finish_reason": done.finish_reason, **self._token_fields(done), **extra}
        fields.pop("token_ids", None)
        return self._chunk(index, content, **fields)

    def _usage(self, done: Sequence[Completion]) -> dict[str, Any]:
        """OpenAI's usage, summed over the choices, and the cost of the Subnet (``elastic``)."""
        uses = [completion.usage for completion in done]
        num_output = 0 if self._only_prompt else sum(use.output_tokens for use in uses)
        num_prompt = sum(len(request.prompt) for request in self.job.requests)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": self._num_cached(done)},
            "elastic": self._elastic_usage(uses),
        }

    def _num_cached(self, done: Sequence[Completion]) -> int:
        """Prompt tokens found in the cache. Each prompt counts once, with its choice of the fewest cached tokens: the other choices
        found the tokens that this one computed."""
        fewest: dict[str, int] = {}
        for each in sorted(done, key=lambda each: each.usage.cached_tokens):
            fewest.setdefault(each.request_id, each.usage.cached_tokens)
        return sum(fewest.values())


NoStore = Annotated[bool, Allowed((False,), "this server stores nothing; send store=false")]


class ShortChatBody(Body):
    """POST /api/ernie-5.1/chat."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = None
    seed: int | None = None
    elastic: Elastic | None = None
    add_special_tokens: OnlyFalse = False


class ChatBody(ShortChatBody, Generation):
    """POST /v1/chat/completions."""

    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: list[Tool] = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template, for example ``{"enable_thinking": false}``."""
    modalities: list[Literal["text"]] | None = None
    store: NoStore = False
    continue_final_message: OnlyFalse = False
    separate_reasoning: OnlyTrue = True
    stream_reasoning: OnlyTrue = True
    include_reasoning: OnlyTrue = True


def read_chat(backend: Backend, tree: Any, rung: Rung) -> Answer:
    return ChatAnswer(backend, chat_job(backend, parse_body(ChatBody, tree), rung))


def read_short_chat(backend: Backend, tree: Any, rung: Rung) -> Answer:
    body = parse_body(ShortChatBody, tree)
    fields = {name: getattr(body, name) for name in body.model_fields_set}
    return ShortAnswer(backend, chat_job(backend, ChatBody.model_construct(**fields), rung))


def chat_job(
    backend: Backend, body: ChatBody, rung: Rung, prefix: str = "chatcmpl", format_field: str = "response_format"
) -> Job:
    """The engine request of a conversation. ``format_field``: the client's name of ``response_format``. Raises `ApiError` or
    `UserError` for a request that cannot be served."""
    use, prompts = tool_use(body.tools, body.tool_choice), backend.prompts
    most = backend.model.max_len
    rendered = prompts.chat(body.messages, use.offered, variables=body.chat_template_kwargs, max_len=most)
    ids = backend.check_ids(rendered, "messages")
    # A client's own grammar constrains the whole text, reasoning included.
    reads_thoughts = body.regex is None and body.grammar is None
    is_thinking = reads_thoughts and prompts.thinks(ids)
    schemas = use.schemas() if use.offered else None
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise FieldError("max_tokens", "contradicts max_completion_tokens; give one of them")
    if body.top_logprobs and not body.logprobs:
        raise FieldError("top_logprobs", "needs logprobs=true")
    parallel = body.parallel_tool_calls and not isinstance(body.tool_choice, NamedTool)
    limit = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    with named_by_client({"prompt": "messages", "max_tokens": limit}):
        return backend.job(
            prefix,
            body,
            rung,
            [ids],
            max_tokens=getattr(body, limit),
            logprobs=body.logprobs,
            turn_ends=prompts.turn_ends,
            shape=prompts.grammar(use, body.response_format, parallel, ids, format_field),
            reader=partial(prompts.reader, schemas, reads_thoughts, is_thinking, None if parallel else 1),
            visible_ids=prompts.visible_ids,
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
        answer = read_answer(self._readers[index], done.text, is_cut(done))
        message: dict[str, Any] = {"role": "assistant", "content": answer.content or (None if answer.calls else "")}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["tool_calls"] = [call.body() for call in answer.calls]
        reason = _reason(done, len(answer.calls))
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
            logprobs, extra = None, {}  # only the first delta carries them

    def _end(self, index: int, done: Completion, rest: str) -> Iterator[bytes]:
        reader = self._readers[index]
        for delta in self._deltas(index, [*reader.push(rest), *reader.finish(is_cut(done))]):
            yield self._chunk(index, {"delta": delta})
        yield self._last_chunk(index, {"delta": {}}, done, finish_reason=_reason(done, self._num_calls[index]))

    def _logprobs(self, tokens: Iterable[Sampled]) -> dict[str, Any] | None:
        return {"content": [self._entry(*each) for each in tokens], "refusal": None} if self.job.logprobs else None

    def _deltas(self, index: int, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        for piece in pieces:
            if isinstance(piece, Thought):
                deltas.append({"reasoning_content": piece.text})
            elif isinstance(piece, Call):
                deltas.append({"tool_calls": [{"index": self._num_calls[index], **piece.body()}]})
                self._num_calls[index] += 1
            else:
                deltas.append({"content": piece})
        return deltas


def _reason(done: Completion, num_calls: int) -> str:
    """``finish_reason`` of a chat choice: ``tool_calls`` for an answer with calls that was not cut."""
    return "tool_calls" if num_calls and done.finish_reason == "stop" else done.finish_reason


class ShortAnswer(ChatAnswer):
    """Writes the short form: the text of the answer."""

    def whole(self, done: Sequence[Completion]) -> dict[str, Any]:
        return {"text": read_answer(self._readers[0], done[0].text).content}


_Row = tuple[str, float | None, dict[str, float] | None]
"""Text and log-probability of a token, and the log-probabilities of its alternatives by their text."""


class CompletionBody(Generation):
    """POST /v1/completions."""

    prompt: (
        str
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=MAX_CHOICES)]
    ) = Field(union_mode="left_to_right")
    max_tokens: int = Field(default=16, ge=0)
    echo: bool = False
    logprobs: int | None = None
    best_of: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    parse_special: bool = True
    """Whether spellings of special tokens in a text prompt are those tokens, as clients that render templates expect."""
    add_special_tokens: bool = True
    """Whether a text prompt gets the tokens that the tokenizer adds before a text (BOS), unless it begins with them."""

    @field_validator("prompt", mode="before")
    @classmethod
    def _check_prompt(cls, prompt: Any) -> Any:
        """One clear message in place of the union's four."""
        if isinstance(prompt, list) and (not prompt or [] in prompt):
            raise ValueError("is empty; give at least one token")
        return prompt


def read_completion(backend: Backend, tree: Any, rung: Rung) -> Answer:
    """One engine request for each prompt."""
    body = parse_body(CompletionBody, tree)
    if body.best_of not in (None, body.n):
        raise FieldError("best_of", "only the value of n is supported; sample n and choose yourself")
    if body.max_tokens == 0 and not body.echo:
        raise FieldError("max_tokens", "0 needs echo=true")
    is_one = isinstance(body.prompt, str) or isinstance(body.prompt[0], int)
    parts: list[Any] = [body.prompt] if is_one else list(body.prompt)
    most = backend.model.max_len
    texts = [backend.prompts.text(part, body.parse_special, most) if isinstance(part, str) else part for part in parts]
    starts = [
        backend.prompts.missing_start(ids) if isinstance(part, str) and body.add_special_tokens else ()
        for part, ids in zip(parts, texts, strict=True)
    ]
    prompts = [backend.check_ids((*start, *ids), "prompt") for start, ids in zip(starts, texts, strict=True)]
    only_prompt = body.max_tokens == 0
    with named_by_client({"top_logprobs": "logprobs"}):
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
    echo = ["" if tokenizer is None else tokenizer.decode(ids) for ids in texts] if body.echo else None
    return TextAnswer(backend, job, echo, [len(start) for start in starts], only_prompt)


class TextAnswer(ChunkedAnswer):
    """Writes a completion."""

    kind = chunk_kind = "text_completion"

    def __init__(
        self, backend: Backend, job: Job, echo: Sequence[str] | None, num_added: Sequence[int], only_prompt: bool
    ) -> None:
        """``echo``: text of each prompt, None: none is asked for; ``num_added``: its tokens before this text."""
        super().__init__(backend, job, only_prompt)
        self._num_added = [num for num in num_added for _ in range(job.body.n)]  # by choice
        self._echo = None if echo is None else [text for text in echo for _ in range(job.body.n)]  # by choice
        self._offsets = [0] * job.num_choices  # place in the text, echo included, where the next token begins
        self._places: dict[int, Detokenizer | None] = {}  # by choice, of streams

    def _choice(self, index: int, done: Completion) -> dict[str, Any]:
        text = ("" if self._echo is None else self._echo[index]) + ("" if self._only_prompt else done.text)
        tokens = () if self._only_prompt else self._sampled(done)
        rows = chain(self._prompt_rows(done), (self._row(*each) for each in tokens))
        texts: list[str] = []
        if self.job.logprobs:
            texts = [*self._prompt_texts(index, done), *([] if self._only_prompt else self._texts(done))]
        return {"text": text, "logprobs": self._table(rows, texts), "finish_reason": done.finish_reason}

    def _token(self, index: int, event: TokenEvent) -> Iterator[bytes]:
        """The first token's chunk brings the echo, whose log-probabilities are known once the prompt is computed."""
        if self._only_prompt:
            return
        text = self._first_echo(index) + event.text
        row = self._row(event.token, event.logprob, event.top)
        logprobs = self._table([row], [], self._offsets[index])
        if self.job.logprobs:  # the event's text lags behind where it may become a stop string
            if index not in self._places:
                self._places[index] = self._detokenizer(self.job.requests[index // self.job.body.n].prompt)
            detokenizer = self._places[index]
            self._offsets[index] += len(detokenizer.push([event.token])) if detokenizer else 0
        extra: dict[str, Any] = {"token_ids": [event.token]} if self.job.body.return_token_ids else {}
        if text or extra or logprobs:
            yield self._chunk(index, {"text": text}, logprobs, **extra)

    def _end(self, index: int, done: Completion, rest: str) -> Iterator[bytes]:
        text = self._first_echo(index) if self._only_prompt else rest
        table = None if self._echo is None else self._table(self._prompt_rows(done), self._prompt_texts(index, done))
        yield self._last_chunk(index, {"text": text}, done, **{} if table is None else {"prompt_logprobs": table})

    def _first_echo(self, index: int) -> str:
        """The prompt's text at the first call for a choice with echo; empty at later calls."""
        if self._echo is None or self._offsets[index]:
            return ""
        self._offsets[index] = len(self._echo[index])
        return self._echo[index]

    def _row(self, token: int, logprob: float | None, top: Sequence[TopLogprob] | None) -> _Row:
        others: dict[str, float] | None = None if top is None else {}
        for each in top or ():  # of tokens with the same text, the most probable one is kept
            others.setdefault(self._spell(each.token)[0], finite(each.logprob))  # type: ignore[union-attr]
        return self._spell(token)[0], None if logprob is None else finite(logprob), others

    def _prompt_texts(self, index: int, done: Completion) -> list[str]:
        """Text that each token of the prompt completes, for an echo; empty for tokens that were added before the client's text."""
        tokenizer = self._tokenizer
        if self._echo is None or tokenizer is None:
            return [""] * (0 if self._echo is None else len(done.prompt))
        detokenizer = Detokenizer(tokenizer, tokenizer.special_ids)  # an echo shows special tokens
        num = self._num_added[index]
        texts = [*[""] * num, *(detokenizer.push([token]) for token in done.prompt[num:])]
        texts[-1] += detokenizer.finish()  # of a prompt that ends within a character
        return texts

    def _prompt_rows(self, done: Completion) -> Iterator[_Row]:
        """Rows of the prompt's tokens for an echo. The first token has no log-probability."""
        if self._echo is not None:
            known = [] if done.prompt_logprobs is None else done.prompt_logprobs.tolist()
            tops = done.prompt_top or [()] * len(known)
            for token, logprob, top in zip_longest(done.prompt, [None, *known], [None, *tops]):
                yield self._row(token, logprob, top)

    def _table(self, rows: Iterable[_Row], texts: Sequence[str], offset: int = 0) -> dict[str, Any] | None:
        """The four parallel lists of ``logprobs``; None if not requested. ``texts``: what each row's token completes; ``offset``: place
        of the first row in the text."""
        if not self.job.logprobs:
            return None
        tokens, logprobs, others = map(list, zip(*rows, strict=True))
        offsets = list(accumulate(map(len, texts[:-1]), initial=offset))
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": others, "text_offset": offsets}
