"""From OpenAI's bodies to engine requests. What comes back is written by `stretto.serve.answers`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from stretto.base.errors import UserError
from stretto.engine.request import Grammar, Request, Sampling
from stretto.serve.bodies import ChatBody, CompletionBody, Generation, Prompted, one_of
from stretto.serve.elastic import Rung
from stretto.serve.errors import bad, from_validation
from stretto.serve.phases import Chooser, Given
from stretto.serve.prompts import Prompts, Spelling, check_ids
from stretto.serve.settings import ServedModel, ServeSettings
from stretto.serve.tools import ToolUse, answer_grammar, tool_use

_MAX_STOPS = 16
_SEEDS = 1 << 63
"""Any 64-bit integer is a seed to OpenAI; ours are not negative."""
_SAMPLING_FIELDS = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("min_tokens", "ignore_eos"),
)


@dataclass(frozen=True, slots=True)
class Job:
    """One HTTP request's worth of engine requests, and the form its answer takes. Written by `Desk`."""

    id: str
    created: int
    """Unix seconds."""
    model: str
    """The name the client used."""
    given: Given
    requests: tuple[Request, ...]
    """One a prompt."""
    stream: bool
    include_usage: bool
    logprobs: bool
    token_ids: bool
    routes: bool
    reads_calls: bool = False
    """Whether ``<tool_call>`` in an answer is a call."""
    echo: tuple[str, ...] | None = None
    """Text of each prompt, where it is part of the answer."""
    only_prompt: bool = False
    """max_tokens of 0: the one token the engine must sample is left out."""

    @property
    def num_choices(self) -> int:
        return sum(request.sampling.n for request in self.requests)

    def choice(self, request_id: str, index: int) -> int:
        """Place of one request's choice among all of them."""
        place = int(request_id.rpartition("-")[2])
        return place * self.requests[place].sampling.n + index


class Desk:
    """Reads bodies against one served model."""

    def __init__(self, model: ServedModel, settings: ServeSettings, chooser: Chooser) -> None:
        self.model = model
        self.settings = settings
        self.chooser = chooser
        self.prompts = None if model.tokenizer is None else Prompts(model.tokenizer)
        self.spelling = None if model.tokenizer is None else Spelling(model.tokenizer)

    def chat(self, body: ChatBody, rung: Rung, prefix: str = "chatcmpl") -> Job:
        """The job of a chat completion.

        Raises:
            ApiError, UserError: the body asks for what cannot be done.
        """
        use = tool_use(body.tools, body.tool_choice)
        ids = check_ids(self.need_prompts().chat(body.messages, use.offered), self.model.config.vocab_size, "messages")
        if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
            raise bad("max_tokens", "contradicts max_completion_tokens; give one of them")
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        if body.top_logprobs and not body.logprobs:
            raise bad("top_logprobs", "needs logprobs=true")
        sampling = self.sampling(
            body,
            num_prompt=len(ids),
            max_tokens=max_tokens,
            top_logprobs=body.top_logprobs or 0,
            grammar=self._grammar(body, use),
            stop_ids=(*self.need_prompts().turn_ends, *self.model.stop_ids),
        )
        return self._job(body, prefix, rung, [ids], sampling, logprobs=body.logprobs, reads_calls=bool(use.offered))

    def completion(self, body: CompletionBody, rung: Rung) -> Job:
        """The job of a completion: one engine request for each prompt.

        Raises:
            ApiError, UserError: the body asks for what cannot be done.
        """
        if body.best_of not in (None, body.n):
            raise bad("best_of", "only the value of n is supported; sample n and choose yourself")
        prompts = self._prompt_ids(body)
        only_prompt = body.max_tokens == 0 and body.echo
        sampling = self.sampling(
            body,
            num_prompt=max(map(len, prompts)),
            max_tokens=1 if only_prompt else body.max_tokens,
            top_logprobs=body.logprobs or 0,
            grammar=self._grammar(body, None),
            stop_ids=self.model.stop_ids,
            num_prompts=len(prompts),
            prompt_logprobs=body.echo and body.logprobs is not None,
        )
        job = self._job(body, "cmpl", rung, prompts, sampling, logprobs=body.logprobs is not None)
        if not body.echo:
            return job
        return replace(job, echo=tuple(self._decode(ids) for ids in prompts), only_prompt=only_prompt)

    def sampling(
        self,
        body: Generation,
        *,
        num_prompt: int,
        max_tokens: int | None,
        top_logprobs: int,
        grammar: Grammar | None,
        stop_ids: Sequence[int],
        num_prompts: int = 1,
        prompt_logprobs: bool = False,
    ) -> Sampling:
        """How to choose tokens; ``max_tokens`` None: to the end of the context.

        Raises:
            ApiError: a value outside its range, or a prompt that leaves no room.
        """
        vocab_size, room = self.model.config.vocab_size, self.model.max_len - num_prompt
        if room < 1 or (max_tokens or 1) > room:
            wanted = "" if max_tokens is None else f" and max_tokens {max_tokens}"
            raise bad(
                "max_tokens" if room > 0 else "prompt",
                f"a prompt of {num_prompt} tokens{wanted} do not fit into the {self.model.max_len} of this server; shorten it",
                "context_length_exceeded",
            )
        one_of("n", body.n, 1, max(1, self.settings.max_choices // num_prompts))
        if (body.min_tokens or 0) > (max_tokens or room):
            raise bad("min_tokens", f"{body.min_tokens} is more than max_tokens, {max_tokens or room}")
        stops = [body.stop] if isinstance(body.stop, str) else body.stop
        if len(stops) > _MAX_STOPS or not all(stops):
            raise bad("stop", f"give at most {_MAX_STOPS} strings, none of them empty")
        for name, ids in (("logit_bias", body.logit_bias), ("stop_token_ids", body.stop_token_ids)):
            if ids:
                check_ids(list(ids), vocab_size, name)
        if self.model.tokenizer is None and (stops or grammar):
            raise bad("stop" if stops else "grammar", "this server has no tokenizer; send token ids")
        given = {name: getattr(body, name) for name in _SAMPLING_FIELDS if getattr(body, name) is not None}
        fields: dict[str, Any] = {
            **given,
            "max_tokens": room if max_tokens is None else max_tokens,
            "logit_bias": body.logit_bias,
            "seed": None if body.seed is None else body.seed % _SEEDS,
            "n": body.n,
            "stop": tuple(stops),
            "stop_ids": tuple(dict.fromkeys([*body.stop_token_ids, *([] if body.ignore_eos else stop_ids)])),
            "top_logprobs": top_logprobs,
            "prompt_logprobs": prompt_logprobs,
            "grammar": grammar,
        }
        try:
            return Sampling.model_validate(fields)
        except ValidationError as error:
            raise from_validation(error, Sampling) from None

    def need_prompts(self) -> Prompts:
        """Raises `UserError` on a server of token ids only."""
        if self.prompts is None:
            raise UserError("messages: this checkpoint has no tokenizer; send token ids to /v1/completions")
        return self.prompts

    def _grammar(self, body: Generation, use: ToolUse | None) -> Grammar | None:
        asked: list[Grammar] = []
        if body.regex is not None:
            asked.append(Grammar(kind="regex", text=body.regex))
        if body.grammar is not None:
            asked.append(Grammar(kind="lark", text=body.grammar))
        if isinstance(body, Prompted):
            assert use is not None
            shaped = answer_grammar(use, body.response_format, body.parallel_tool_calls)
            if shaped is not None:
                asked.append(shaped)
        if len(asked) > 1:
            raise bad("grammar", "only one of regex, grammar, response_format and a forced tool can shape an answer")
        return asked[0] if asked else None

    def _prompt_ids(self, body: CompletionBody) -> list[tuple[int, ...]]:
        prompt = body.prompt
        is_one = isinstance(prompt, str) or (bool(prompt) and isinstance(prompt[0], int))
        parts: list[Any] = [prompt] if is_one else list(prompt)
        if not parts:
            raise bad("prompt", "is empty; give at least one")
        one_of("prompt", len(parts), 1, self.settings.max_choices)
        ids = [self.need_prompts().text(part, body.parse_special) if isinstance(part, str) else part for part in parts]
        return [check_ids(each, self.model.config.vocab_size, "prompt") for each in ids]

    def _decode(self, ids: Sequence[int]) -> str:
        return "" if self.model.tokenizer is None else self.model.tokenizer.decode(ids)

    def _job(
        self,
        body: Generation,
        prefix: str,
        rung: Rung,
        prompts: Sequence[tuple[int, ...]],
        sampling: Sampling,
        *,
        logprobs: bool,
        reads_calls: bool = False,
    ) -> Job:
        given = self.chooser.choose(body.model, body.elastic, rung)
        name = f"{prefix}-{secrets.token_hex(12)}"
        return Job(
            id=name,
            created=int(time.time()),
            model=body.model or self.model.name,
            given=given,
            requests=tuple(
                Request(f"{name}-{place}", ids, sampling, given.phases, body.return_routes)
                for place, ids in enumerate(prompts)
            ),
            stream=body.stream,
            include_usage=body.stream_options.include_usage,
            logprobs=logprobs,
            token_ids=body.return_token_ids,
            routes=body.return_routes,
            reads_calls=reads_calls,
        )
