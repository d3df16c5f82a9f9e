"""State of a sequence from admission to its end: request, cache pages, sampled tokens, finish reason.

Positions count from the first prompt token. Imports no torch.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from stretto.base.errors import UserError
from stretto.engine.grammar import GrammarCompiler, GrammarState
from stretto.engine.request import (
    Completion,
    FinishReason,
    Request,
    Sampling,
    TokenEvent,
    TopLogprob,
    Usage,
)
from stretto.model.spec import ModelConfig, Subnet, check_subnet
from stretto.text.stream import Detokenizer, StopStrings
from stretto.text.tokenizer import Tokenizer

SEED_MASK = (1 << 64) - 1
NOT_FINITE = "the network's output is not a finite number"
_NEVER = 1 << 62
"""Position of an event that has not happened yet."""
_log = logging.getLogger(__name__)


class SubnetTable:
    """Numbers of the Subnets of an engine's requests. Caches use the number as key, because hashing or comparing Subnets takes as
    long as computing a layer."""

    def __init__(self) -> None:
        self._numbers: dict[Subnet, int] = {}
        self._subnets: list[Subnet] = []

    def number(self, subnet: Subnet) -> int:
        """Number of ``subnet``; equal Subnets have equal numbers."""
        if subnet not in self._numbers:
            self._numbers[subnet] = len(self._subnets)
            self._subnets.append(subnet)
        return self._numbers[subnet]

    def __getitem__(self, number: int) -> Subnet:
        return self._subnets[number]

    def since(self, number: int) -> list[Subnet]:
        """Subnets with ``number`` and larger numbers, in order."""
        return self._subnets[number:]


class TokenCounts:
    """Distinct tokens of a sequence, with the number of occurrences of each in the output, for penalties."""

    def __init__(self, tokens: Sequence[int], num_prompt: int) -> None:
        ids = np.unique(np.array(tokens[:num_prompt], dtype=np.int64))
        self._slot = {token: slot for slot, token in enumerate(ids.tolist())}
        self._table = np.zeros((2 * len(ids) + 16, 2), dtype=np.int64)  # with spare rows
        self._table[: len(ids), 0] = ids
        self._num_counted = num_prompt
        self.extend(tokens)

    @property
    def table(self) -> np.ndarray:
        """int64 [distinct tokens, 2]: token id, number of occurrences in the output."""
        return self._table[: len(self._slot)]

    def extend(self, tokens: Sequence[int]) -> None:
        """Count the tokens that the sequence got since the last call; ``tokens`` is the whole sequence."""
        for token in tokens[self._num_counted :]:
            slot = self._slot.setdefault(token, len(self._slot))
            if slot == len(self._table):
                self._table = np.concatenate([self._table, np.zeros_like(self._table)])
            self._table[slot, 0] = token
            self._table[slot, 1] += 1
        self._num_counted = len(tokens)


@dataclass(slots=True, eq=False)
class SequenceState:
    """One choice of one request while it is in the engine. Owned by the engine's thread; compared by identity.

    The scheduler writes ``num_computed`` and all fields about pages and preemption, the engine writes the others. ``tokens`` only
    grows. Times are seconds of the engine's clock; None: not yet.
    """

    request: Request
    subnets: tuple[int, int, int]
    """Numbers of the Subnets of prompt, thinking and answer."""
    index: int = 0
    """Index of the choice within the request."""
    sampling: Sampling = None  # type: ignore[assignment]  # default: that of the request
    """Sampling parameters with this choice's seed."""
    is_streamed: bool = True
    """Whether to report an event for every token."""
    arrived_s: float = 0.0
    first_scheduled_s: float | None = None
    first_token_s: float | None = None

    tokens: list[int] = field(init=False)
    """Prompt and output."""
    num_prompt: int = field(init=False)
    limit: int = _NEVER
    """Length, including the prompt, at which the sequence ends with reason ``length``."""
    end_ids: frozenset[int] = frozenset()
    """Tokens that end the sequence."""
    min_length: int = field(init=False)
    """Length, including the prompt, before which end tokens and stop strings have no effect."""
    temperature: float | None = field(init=False)
    """`Sampling.plain_temperature`."""

    num_computed: int = 0
    """Number of leading tokens whose keys and values are in ``pages``."""
    pages: list[int] = field(default_factory=list)
    """Cache pages in order of positions."""
    table: tuple[int, ...] = ()
    """``pages`` as a tuple, for chunks."""
    page_hashes: list[bytes] = field(default_factory=list)
    """Chain hashes of the leading sealed pages."""
    is_sealing: bool = True
    """False after a change of weights that kept computed tokens: such pages are never reused by other sequences."""
    prefix_key: bytes = b""
    """Equal for sequences whose prompts have the same full pages; empty if the prompt has no full page to share."""
    num_cached: int = 0
    """Prompt tokens found in the prefix cache when the sequence was first scheduled."""
    order: tuple[int, int] = (-1, -1)
    """Rank: turn of the client, and number of arrival."""
    num_preemptions: int = 0
    lost_pages: tuple[int, ...] = ()
    """Pages of the sequence when it was last preempted or finished. Their contents are valid until the next forward pass."""
    lost_tokens: int = 0
    """Number of computed tokens in ``lost_pages``."""

    log_probs: list[float] = field(default_factory=list)
    """Processed log-probability of each output token, nats."""
    versions: list[int] = field(default_factory=list)
    """Weight version with which each output token was sampled."""
    top_log_probs: list[tuple[TopLogprob, ...]] = field(default_factory=list)
    prompt_log_probs: list[float] = field(default_factory=list)
    """Log-probabilities of prompt tokens 1, 2, …, as far as computed: the logits at position i give entry i."""
    prompt_top: list[tuple[TopLogprob, ...]] = field(default_factory=list)
    routes: np.ndarray | None = None
    """[T, L, K] routes of the first T tokens, saved at a preemption. A recomputation does not replace them."""
    finish_reason: FinishReason | None = None
    stop: str | int | None = None
    """The stop string or token id that ended the sequence."""
    error: str | None = None
    is_refused: bool = False
    """Whether the request caused the error."""
    flops: int = 0
    """FLOPs so far, including recomputation."""
    grammar: GrammarState | None = None
    detokenizer: Detokenizer | None = None
    """Incremental text of the output."""
    stops: StopStrings | None = None
    text: str = ""
    """Visible text so far."""

    mask: np.ndarray | None = None
    """Tokens that the grammar allows in this step; None without a grammar."""

    _num_scanned: int = field(init=False, repr=False)
    """Number of tokens that were searched for the end of thinking."""
    _answer_start: int = field(init=False, repr=False)
    _counts: TokenCounts | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        assert self.request.prompt, f"request {self.request.id} has an empty prompt"
        self.sampling = self.sampling or self.request.sampling
        self.tokens = list(self.request.prompt)
        self.num_prompt = self._num_scanned = len(self.tokens)
        self.min_length = self.num_prompt + self.sampling.min_tokens
        self.temperature = self.sampling.plain_temperature
        self._answer_start = _NEVER if self.request.phases.thinking_end is not None else self.num_prompt

    @property
    def num_pending(self) -> int:
        """Number of tokens to compute before the next one can be sampled."""
        return len(self.tokens) - self.num_computed

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def seed_bits(self) -> int:
        """The seed as uint64."""
        return (self.sampling.seed or 0) & SEED_MASK

    @property
    def counts(self) -> TokenCounts | None:
        """Token counts, updated from step to step; None without penalties."""
        if self._counts is None and self.temperature is None and self.sampling.has_penalties:
            self._counts = TokenCounts(self.tokens, self.num_prompt)
        return self._counts

    @property
    def subnet(self) -> int:
        """Number of the Subnet that computes the next token."""
        if self.num_computed >= self._answer_start:  # a shortcut, since this is called for every token
            return self.subnets[2]
        return self.subnet_at(self.num_computed)

    def subnet_at(self, position: int) -> int:
        """Number of the Subnet that computes the token at ``position``; after the last token, that of the current phase."""
        return self.subnets[self._phase_at(position)]

    def phase_end(self, position: int) -> int:
        """First position after ``position`` with another Subnet; the number of tokens if there is none."""
        phase = self._phase_at(position)
        borders = (self.num_prompt, self._answer_start, _NEVER)
        while phase < 2 and self.subnets[phase + 1] == self.subnets[phase]:
            phase += 1
        return min(borders[phase], len(self.tokens))

    def _phase_at(self, position: int) -> int:
        """Phase of ``position``: 0 prompt, 1 thinking, 2 answer."""
        if self._answer_start == _NEVER and self._num_scanned < len(self.tokens):
            try:
                end = self.tokens.index(self.request.phases.thinking_end, self._num_scanned)  # type: ignore[arg-type]
                self._answer_start = end + 1
            except ValueError:
                self._num_scanned = len(self.tokens)
        if position < self.num_prompt:
            return 0
        return 1 if position < self._answer_start else 2

    def key(self, start: int, end: int) -> bytes:
        """Encoding of the Subnets that computed tokens ``start`` to ``end``: equal only for equal Subnets at equal offsets."""
        parts = []
        while start < end:
            stop = min(self.phase_end(start), end)
            assert stop > start, f"key up to {end} of {len(self.tokens)} tokens"
            parts.append(self.subnet_at(start).to_bytes(4, "little") + (stop - start).to_bytes(4, "little"))
            start = stop
        return b"".join(parts)

    def page_salt(self, number: int, page_size: int, weight_version: int) -> bytes:
        """Everything that the contents of page ``number`` depend on, except its tokens and the pages before it.

        Pages of requests without routes differ from those with routes, because they may contain none.
        """
        key = self.key(number * page_size, (number + 1) * page_size)
        return key + bytes([self.request.want_routes]) + weight_version.to_bytes(8, "little", signed=True)

    def push(
        self, token: int, logprob: float, version: int, top: tuple[TopLogprob, ...], now_s: float
    ) -> TokenEvent | None:
        """Append a sampled token, and set the finish reason if it is the last. Returns its event if the sequence is streamed."""
        if not math.isfinite(logprob):
            self.fail(NOT_FINITE)
            return None
        self.tokens.append(token)
        self.log_probs.append(logprob)
        self.versions.append(version)
        if self.sampling.top_logprobs:
            self.top_log_probs.append(top)
        if self.first_token_s is None:
            self.first_token_s = now_s
        is_long, reads_text = len(self.tokens) >= self.min_length, self._reads_text
        is_end = token in self.end_ids and is_long
        text = ""
        if reads_text and not is_end:
            text = self.detokenizer.push([token])  # type: ignore[union-attr]
            if self.stops is not None:
                text = self.stops.push(text, search=is_long)
                self.stop = self.stops.matched
        if is_end:
            self.finish_reason, self.stop = "stop", token
        elif self.stop is not None:  # a stop string in the text
            self.finish_reason = "stop"
        elif self.grammar is not None:
            if not self.grammar.accept(token):
                # the mask allowed the token, so the grammar must name the end token as part of its text
                self.fail(f"grammar: token {token} does not follow; do not name the end token", is_refused=True)
            elif self.grammar.is_finished:
                self.finish_reason = "stop"
        if self.error is not None:
            return None
        if self.finish_reason is None and len(self.tokens) >= self.limit:
            self.finish_reason = "length"
        if reads_text:
            if self.finish_reason is not None:
                text += self._rest()
                if self.finish_reason == "length" and self.stops is not None and self.stops.matched is not None:
                    self.finish_reason, self.stop = "stop", self.stops.matched  # found in the withheld text
            self.text += text
        if not self.is_streamed:
            return None
        return TokenEvent(self.request.id, self.index, token, logprob, text, version, top)

    def may_choose(self) -> bool:
        """Compute the grammar's mask for the next token; False if the sequence has ended or the grammar allows no token."""
        if self.grammar is not None and self.finish_reason is None:
            with self.guarded():
                self.mask = self.grammar.mask()
                if not self.mask.any():
                    self.fail("grammar: no token of the vocabulary can follow", is_refused=True)
        return self.finish_reason is None

    def forget_prompt(self) -> None:
        """Drop results of the prompt, which will be computed from its first token with other weights."""
        self.routes = None
        self.prompt_log_probs.clear()
        self.prompt_top.clear()

    def end_early(self) -> None:
        """End the sequence with reason ``abort``, and append withheld text."""
        self.finish_reason = "abort"
        if self._reads_text:
            with self.guarded():
                self.text += self._rest()

    def fail(self, reason: str, *, is_refused: bool = False) -> None:
        """End this choice with the error message ``reason``."""
        self.finish_reason, self.error, self.is_refused = "error", reason, is_refused

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Context for work that depends on one request only: an exception in it ends this choice and no other."""
        try:
            yield
        except UserError as error:
            self.fail(str(error), is_refused=True)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in a Rust library is not an Exception
            _log.exception("request %s, choice %d has failed", self.request.id, self.index)
            self.fail(f"the engine could not finish this request: {type(error).__name__}")

    def time_out(self, waited_s: float) -> None:
        """End the sequence with reason ``timeout`` after a wait of ``waited_s`` for its first step."""
        self.finish_reason = "timeout"
        self.error = f"no place in the batch came free within {waited_s:.0f} s; ask again later"

    def complete(self, routes: np.ndarray | None, now_s: float) -> Completion:
        """The result of a sequence with a finish reason."""
        request, output = self.request, self.output
        assert self.finish_reason is not None, f"{request.id}[{self.index}] has not ended"
        if self.detokenizer is not None and not self._reads_text:
            visible = output[:-1] if isinstance(self.stop, int) else output
            with self.guarded():
                self.text = self.detokenizer.push(visible) + self.detokenizer.finish()
        prompt_logprobs = np.array(self.prompt_log_probs, np.float32) if self.sampling.prompt_logprobs else None
        return Completion(
            request_id=request.id,
            index=self.index,
            prompt=request.prompt,
            tokens=tuple(output),
            logprobs=np.array(self.log_probs, dtype=np.float32),
            versions=np.array(self.versions, dtype=np.int64),
            text=self.text,
            finish_reason=self.finish_reason,
            stop=self.stop,
            seed=self.sampling.seed or 0,
            usage=Usage(
                prompt_tokens=self.num_prompt,
                cached_tokens=self.num_cached,
                output_tokens=len(output),
                flops=self.flops,
                subnet=request.phases.answer.label(),
                queued_s=(now_s if self.first_scheduled_s is None else self.first_scheduled_s) - self.arrived_s,
                first_token_s=(now_s if self.first_token_s is None else self.first_token_s) - self.arrived_s,
                total_s=now_s - self.arrived_s,
                num_preemptions=self.num_preemptions,
            ),
            top=tuple(self.top_log_probs),
            prompt_logprobs=prompt_logprobs,
            prompt_top=tuple(self.prompt_top),
            routes=routes,
            error=self.error,
            is_refused=self.is_refused,
        )

    @property
    def _reads_text(self) -> bool:
        """Whether tokens are decoded one by one; otherwise all are decoded at the end, which takes less time."""
        return self.detokenizer is not None and (self.is_streamed or self.stops is not None)

    def _rest(self) -> str:
        """Withheld text at the end of the sequence."""
        if isinstance(self.stop, str):
            return ""  # text after a stop string is dropped
        rest = self.detokenizer.finish()  # type: ignore[union-attr]
        if self.stops is not None:
            rest = self.stops.push(rest, search=len(self.tokens) >= self.min_length) + self.stops.finish()
        return rest


@dataclass(slots=True)
class Chunk:
    """Tokens of one sequence that the runner computes in one step. Written by the scheduler.

    Treated as immutable. A frozen dataclass takes three times as long to create, and there is one chunk per token.
    """

    tokens: tuple[int, ...]
    start: int
    """Position of the first token."""
    pages: tuple[int, ...]
    """Page table up to the last token of the chunk."""
    subnet: int
    """Number of the Subnet."""
    num_logits: int
    """Number of last tokens whose logits are returned; 0 for a chunk before the end of a prompt."""

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of the whole batch. Written by the scheduler."""

    chunks: tuple[Chunk, ...]
    sequences: tuple[SequenceState, ...]
    """The sequence of each chunk."""
    preempted: tuple[SequenceState, ...] = ()
    """Sequences that this plan preempted; see ``lost_pages``."""


class Admission:
    """Checks requests and creates their sequences, so every error in a request is reported before it joins a batch."""

    def __init__(
        self,
        config: ModelConfig,
        subnets: SubnetTable,
        tokenizer: Tokenizer | None,
        end_ids: tuple[int, ...],
        *,
        most_positions: int,
        has_routes: bool,
        seeds: Callable[[], int],
    ):
        self._config, self._subnets, self._tokenizer, self._end_ids = config, subnets, tokenizer, end_ids
        self._grammars: GrammarCompiler | None = None  # created for the first grammar, which takes about a second
        self._lock = threading.Lock()  # for that creation
        self._most_positions, self._has_routes, self._seeds = most_positions, has_routes, seeds

    def sequences(
        self, request: Request, grammar: GrammarState | None, now_s: float, *, is_streamed: bool
    ) -> list[SequenceState]:
        """One sequence for each choice.

        Args:
            grammar: the result of `grammar`.

        Raises:
            UserError: the request needs something that this network or engine does not have.
        """
        self._check(request)
        sampling, subnets = request.sampling, self._numbers(request)
        first_seed = self._seeds() if sampling.seed is None else sampling.seed
        limit = min(len(request.prompt) + sampling.max_tokens, self._most_positions)
        end_ids = self._ends(sampling)
        sequences = []
        for index in range(sampling.n):
            own = sampling.model_copy(update={"seed": first_seed + index, "n": 1})
            seq = SequenceState(request, subnets, index, own, is_streamed, now_s, limit=limit, end_ids=end_ids)
            seq.grammar = None if grammar is None else grammar.fresh()
            if self._tokenizer is not None:
                seq.detokenizer = Detokenizer(self._tokenizer, request.visible_ids, after=request.prompt)
                seq.stops = StopStrings(sampling.stop) if sampling.stop else None
            sequences.append(seq)
        return sequences

    def _check(self, request: Request) -> None:
        name, vocab = f"request {request.id}", self._config.vocab_size
        if not request.prompt:
            raise UserError(f"{name}: prompt: empty; give at least one token")
        low, high = min(request.prompt), max(request.prompt)
        if low < 0 or high >= vocab:
            wrong = low if low < 0 else high
            raise UserError(f"{name}: prompt: {wrong} is not a token id; they go from 0 to {vocab - 1}")
        sampling = request.sampling
        sampling.check(vocab, name)
        if sampling.min_tokens and len(self._ends(sampling)) >= vocab:
            raise UserError(f"{name}: min_tokens: every token of the vocabulary would end it; leave one of them out")
        if self._tokenizer is None and sampling.stop:
            raise UserError(f"{name}: stop: needs text, and this engine has no tokenizer; use stop_ids")
        if request.want_routes and not self._has_routes:
            raise UserError(f"{name}: want_routes: this engine keeps no routes; open it with routes")

    def _ends(self, sampling: Sampling) -> frozenset[int]:
        """Tokens that end a sequence."""
        return frozenset((*sampling.stop_ids, *(() if sampling.ignore_eos else self._end_ids)))

    def _numbers(self, request: Request) -> tuple[int, int, int]:
        """Numbers of the Subnets of prompt, thinking and answer."""
        phases = request.phases
        thinking = phases.thinking or phases.answer
        prefill = phases.prefill or thinking
        for subnet in (prefill, thinking, phases.answer):
            check_subnet(self._config, subnet)
        for name, earlier, later in (("thinking", prefill, thinking), ("answer", thinking, phases.answer)):
            missing = sorted(set(later.layers) - set(earlier.layers))
            if missing:
                raise UserError(
                    f"request {request.id}: phases.{name}: layers {missing} were left out in the phase before, so they "
                    "have no keys of the tokens so far; give the earlier phase all layers of the later ones"
                )
        number = self._subnets.number
        return number(prefill), number(thinking), number(phases.answer)

    def grammar(self, request: Request) -> GrammarState | None:
        """The request's compiled grammar, see `GrammarCompiler.compile`. Thread-safe."""
        grammar, name = request.sampling.grammar, f"request {request.id}"
        if grammar is None:
            return None
        if self._tokenizer is None:
            raise UserError(f"{name}: grammar: needs text, and this engine has no tokenizer; leave it out")
        with self._lock:
            if self._grammars is None:
                self._grammars = GrammarCompiler(self._tokenizer)
        ends = self._end_ids + request.sampling.stop_ids
        known = tuple(token for token in ends if 0 <= token < self._tokenizer.vocab_size)
        return self._grammars.compile(grammar, known, name)
