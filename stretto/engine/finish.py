"""What happens to a sequence once a token is chosen: record it, find its text, see whether it ends, report it.

Shape letters: T positions, L MoE layers, K chosen.
"""

from __future__ import annotations

import math

import numpy as np

from stretto.base.errors import UserError
from stretto.engine.request import Completion, TokenEvent, TopLogprob, Usage
from stretto.engine.sequence import SequenceState


class OpenChoice:
    """A sequence while it is computed, with what is asked of it for every token kept at hand."""

    __slots__ = ("_ends", "_has_text", "_min_length", "is_streamed", "limit", "may_draft", "seq")

    def __init__(
        self,
        seq: SequenceState,
        *,
        end_ids: frozenset[int],
        max_len: int,
        is_streamed: bool,
        may_draft: bool,
    ):
        sampling = seq.request.sampling
        self.seq = seq
        self.limit = min(seq.num_prompt + sampling.max_tokens, max_len)
        """Length, prompt included, at which it ends whatever it says."""
        self.is_streamed = is_streamed
        self.may_draft = may_draft
        """Whether tokens may be drafted for it."""
        self._ends = frozenset(sampling.stop_ids) | (frozenset() if sampling.ignore_eos else end_ids)
        self._min_length = seq.num_prompt + sampling.min_tokens
        self._has_text = seq.detokenizer is not None and (is_streamed or seq.stops is not None)

    @property
    def is_finished(self) -> bool:
        return self.seq.finish_reason is not None

    def push(
        self, token: int, logprob: float, version: int, top: tuple[TopLogprob, ...], now_s: float
    ) -> TokenEvent | None:
        """Record a chosen token and set the finish reason where it is the last; the event where one is wanted."""
        seq = self.seq
        if not math.isfinite(logprob):
            self.fail("the network's output is not a finite number")
            return None
        seq.tokens.append(token)
        seq.log_probs.append(logprob)
        seq.versions.append(version)
        if seq.request.sampling.top_logprobs:
            seq.top_log_probs.append(top)
        if seq.first_token_s is None:
            seq.first_token_s = now_s
        is_end = token in self._ends and len(seq.tokens) >= self._min_length
        text = self._read(token, is_end) if self._has_text else ""
        if is_end:
            seq.finish_reason, seq.stop = "stop", token
        elif seq.stop is not None:  # a stop string, found in the text
            seq.finish_reason = "stop"
        elif seq.grammar is not None and not self._follow(token):
            return None
        elif seq.grammar is not None and seq.grammar.is_finished:
            seq.finish_reason = "stop"
        elif len(seq.tokens) >= self.limit:
            seq.finish_reason = "length"
        if self._has_text:
            if seq.finish_reason is not None:
                text += self._rest()
            seq.text += text
        if not self.is_streamed:
            return None
        return TokenEvent(seq.request.id, seq.index, token, logprob, text, version, top)

    def end_early(self) -> None:
        """End it with reason ``abort``; text that was held back belongs to it now."""
        self.seq.finish_reason = "abort"
        if self._has_text:
            self.seq.text += self._rest()

    def fail(self, reason: str) -> None:
        """End this choice, and no other, for ``reason``."""
        self.seq.finish_reason, self.seq.error = "error", reason

    def complete(self, subnet_label: str, routes: np.ndarray | None, now_s: float) -> Completion:
        """The record of a choice that has a finish reason."""
        seq = self.seq
        request, sampling = seq.request, seq.request.sampling
        assert seq.finish_reason is not None, f"{request.id}[{seq.index}] has not ended"
        seq.finished_s = now_s
        if not self._has_text and seq.detokenizer is not None:
            output = seq.output
            seq.text = seq.detokenizer.push(output[:-1] if self._ended_by_id() else output) + seq.detokenizer.finish()
        started_s = now_s if seq.first_scheduled_s is None else seq.first_scheduled_s
        first_token_s = now_s if seq.first_token_s is None else seq.first_token_s
        return Completion(
            request_id=request.id,
            index=seq.index,
            prompt=request.prompt,
            tokens=tuple(seq.output),
            logprobs=np.array(seq.log_probs, dtype=np.float32),
            versions=np.array(seq.versions, dtype=np.int32),
            text=seq.text,
            finish_reason=seq.finish_reason,
            stop=seq.stop,
            seed=seq.seed,
            usage=Usage(
                prompt_tokens=seq.num_prompt,
                cached_tokens=seq.num_cached,
                output_tokens=seq.num_output,
                flops=seq.flops,
                subnet=subnet_label,
                queued_s=started_s - seq.arrived_s,
                first_token_s=first_token_s - seq.arrived_s,
                total_s=now_s - seq.arrived_s,
                num_preemptions=seq.num_preemptions,
                drafted_tokens=seq.num_drafted,
                accepted_tokens=seq.num_accepted,
            ),
            top=tuple(seq.top_log_probs),
            prompt_logprobs=np.array(seq.prompt_log_probs, np.float32) if sampling.prompt_logprobs else None,
            routes=routes,
            error=seq.error,
        )

    def _ended_by_id(self) -> bool:
        return isinstance(self.seq.stop, int)

    def _read(self, token: int, is_end: bool) -> str:
        """Visible text that ``token`` adds; finds stop strings."""
        seq = self.seq
        if is_end:
            return ""
        text: str = seq.detokenizer.push([token])
        if seq.stops is None:
            return text
        text = seq.stops.push(text, search=len(seq.tokens) >= self._min_length)
        seq.stop = seq.stops.matched
        return text

    def _rest(self) -> str:
        """Text that was held back, at the end."""
        seq = self.seq
        if isinstance(seq.stop, str):
            return ""  # what follows a stop string is not part of the text
        rest: str = seq.detokenizer.finish()
        if seq.stops is not None:
            rest = seq.stops.push(rest) + seq.stops.finish()
        return rest

    def _follow(self, token: int) -> bool:
        """Tell the grammar; False, and the choice has failed, where it cannot go on."""
        try:
            if self.seq.grammar.accept(token):
                return True
            self.fail(f"grammar: token {token} does not follow")
        except UserError as error:
            self.fail(str(error))
        return False
