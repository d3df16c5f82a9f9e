"""What the scheduler, the runner and the engine tell each other: a sequence's state, a chunk of it, one step's plan.

Positions count from the first prompt token. Imports no torch.
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stretto.base.errors import UserError
from stretto.engine.request import FinishReason, Request, TopLogprob
from stretto.model.spec import Subnet

_NEVER = 1 << 62
"""Position of something that has not happened yet."""


def subnet_key(subnet: Subnet) -> bytes:
    """16 bytes that two Subnets share only if they are equal."""
    text = repr((subnet.layers, subnet.experts, subnet.top_k))
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


@dataclass(slots=True, eq=False)
class SequenceState:
    """One choice of one request while it is in the engine. Owned by the engine's thread; compared by identity.

    The scheduler writes ``num_computed`` and everything about pages and preemption; the engine writes the rest.
    ``tokens`` holds final tokens only: it grows at the end and is never shortened, drafted tokens stay outside.
    """

    request: Request
    index: int = 0
    """Which of the request's n choices."""
    tokens: list[int] = field(default_factory=list)
    """Prompt and output; filled with the prompt where nothing is given."""
    arrived_s: float = 0.0
    """The four times are the engine's clock, seconds; None: not yet."""
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None

    num_prompt: int = field(init=False)
    num_computed: int = 0
    """Leading tokens whose keys and values are in ``pages``."""
    pages: list[int] = field(default_factory=list)
    """Cache pages in the order of positions; may reach beyond the tokens (room for drafts)."""
    table: tuple[int, ...] = ()
    """The same, as chunks carry it."""
    page_hashes: list[bytes] = field(default_factory=list)
    """Chain hashes of the leading pages that are full and final."""
    is_sealing: bool = True
    """False after weights changed under computed tokens: such pages are never offered to others."""
    prefix_key: bytes = b""
    """Equal for sequences whose prompts have the same full pages; empty for those that share none."""
    num_cached: int = 0
    """Prompt tokens that came from the prefix cache when it was first scheduled."""
    order: int = -1
    """Rank of arrival, written by the scheduler."""
    num_preemptions: int = 0
    lost_pages: tuple[int, ...] = ()
    """Pages it held when it was last preempted or finished. Their contents last until the next forward pass."""
    lost_tokens: int = 0
    """Tokens that were computed then."""

    seed: int = 0
    log_probs: list[float] = field(default_factory=list)
    """Of each output token, nats, processed."""
    versions: list[int] = field(default_factory=list)
    """Weight version each output token was sampled under."""
    top_log_probs: list[tuple[TopLogprob, ...]] = field(default_factory=list)
    prompt_log_probs: list[float] = field(default_factory=list)
    """Of prompt tokens 1, 2, …, in order, as far as known: the logits at position i gave entry i."""
    routes: np.ndarray | None = None
    """[T, L, K] rows saved at a preemption, of the first T tokens; they stand whatever a recomputation chooses."""
    finish_reason: FinishReason | None = None
    stop: str | int | None = None
    """The stop string or id that ended it."""
    error: str | None = None
    flops: int = 0
    """Spent so far, recomputation and rejected drafts included."""
    num_drafted: int = 0
    num_accepted: int = 0
    """Of the drafted ones."""
    grammar: Any = None
    """State of its grammar, where it has one."""
    detokenizer: Any = None
    """Incremental text of its output."""
    stops: Any = None
    """Search for its stop strings."""
    text: str = ""
    """Visible text so far."""

    _subnets: tuple[Subnet, Subnet, Subnet] = field(init=False, repr=False)
    """Of the prompt, of thinking, of the answer."""
    _keys: tuple[bytes, bytes, bytes] = field(init=False, repr=False)
    _num_scanned: int = field(init=False, repr=False)
    """Tokens searched for the end of thinking."""
    _answer_start: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        assert self.request.prompt, f"request {self.request.id} has an empty prompt"
        self.tokens = self.tokens or list(self.request.prompt)
        self.num_prompt = self._num_scanned = len(self.request.prompt)
        phases = self.request.phases
        thinking = phases.thinking or phases.answer
        self._subnets = (phases.prefill or thinking, thinking, phases.answer)
        keys = {id(subnet): subnet_key(subnet) for subnet in self._subnets}
        self._keys = tuple(keys[id(subnet)] for subnet in self._subnets)  # type: ignore[assignment]
        self._answer_start = _NEVER if phases.thinking_end is not None else self.num_prompt

    @property
    def num_pending(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return len(self.tokens) - self.num_computed

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def is_decoding(self) -> bool:
        """All but the token sampled last is computed."""
        return self.num_computed >= self.num_prompt and self.num_pending == 1

    @property
    def subnet(self) -> Subnet:
        """Of the next token to compute."""
        if self.num_computed >= self._answer_start:  # asked for every token
            return self._subnets[2]
        return self.subnet_at(self.num_computed)

    def subnet_at(self, position: int) -> Subnet:
        """The Subnet that computes the token at ``position``.

        A position beyond the tokens belongs to the phase that the known tokens leave open, so a draft that contains the
        end of thinking must stop there.
        """
        return self._subnets[self._phase_at(position)]

    def phase_end(self, position: int) -> int:
        """First later position that another Subnet computes, or the number of tokens where there is none."""
        phase = self._phase_at(position)
        borders = (self.num_prompt, self._answer_start, _NEVER)
        while phase < 2 and self._keys[phase + 1] == self._keys[phase]:
            phase += 1
        return min(borders[phase], len(self.tokens))

    def key(self, start: int, end: int) -> bytes:
        """Which Subnets computed tokens ``start`` to ``end``; equal only for the same Subnets at the same offsets."""
        parts = []
        while start < end:
            stop = min(self.phase_end(start), end)
            assert stop > start, f"key up to {end} of {len(self.tokens)} tokens"
            parts.append(self._keys[self._phase_at(start)] + (stop - start).to_bytes(4, "little"))
            start = stop
        return b"".join(parts)

    def key_of(self, num_tokens: int) -> bytes:
        """Of the first tokens of the prompt: equal only where their pages would be the same."""
        text = array("q", self.tokens[:num_tokens]).tobytes() + self.page_salt(0, num_tokens, b"")
        return hashlib.blake2b(text, digest_size=32).digest()

    def page_salt(self, number: int, page_size: int, weights: bytes) -> bytes:
        """What page ``number`` depends on beside its tokens and the pages before it.

        Those who want no routes have pages of their own, which may lack them.
        """
        # The key says itself where it ends, so no two triples are the same bytes.
        key = self.key(number * page_size, (number + 1) * page_size)
        return key + bytes([self.request.want_routes]) + weights

    def _phase_at(self, position: int) -> int:
        """0 prompt, 1 thinking, 2 answer."""
        if self._answer_start == _NEVER and self._num_scanned < len(self.tokens):
            self._find_answer()
        if position < self.num_prompt:
            return 0
        return 1 if position < self._answer_start else 2

    def _find_answer(self) -> None:
        thinking_end = self.request.phases.thinking_end
        assert thinking_end is not None
        try:
            self._answer_start = self.tokens.index(thinking_end, self._num_scanned) + 1
        except ValueError:
            self._num_scanned = len(self.tokens)


@dataclass(slots=True, unsafe_hash=True)
class Chunk:
    """What the runner computes for one sequence in one step. Written by the scheduler; by the engine for drafts.

    Never changed once made; not declared frozen because that triples the time to make one, and every token has its own.
    """

    tokens: tuple[int, ...]
    start: int
    """Position of the first token."""
    pages: tuple[int, ...]
    """The whole table up to the last token of the chunk."""
    subnet: Subnet
    num_logits: int
    """Logits are wanted for so many of the last tokens; 0 for a prompt that goes on."""

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of the whole batch. Written by the scheduler."""

    chunks: tuple[Chunk, ...]
    sequences: tuple[SequenceState, ...]
    """Whose chunks they are, in the same order."""
    preempted: tuple[SequenceState, ...] = ()
    """Lost their pages in this plan: see ``lost_pages``."""


def check_fits(seq: SequenceState, num_pages: int, page_size: int, max_len: int, draft_tokens: int) -> None:
    """Refuse a sequence that the cache could not hold to its last token.

    Raises:
        UserError: the prompt leaves no room in ``max_len``, or prompt and completion need more pages than there are.
    """
    name, num_new = f"request {seq.request.id}", seq.request.sampling.max_tokens
    if seq.num_prompt >= max_len:
        raise UserError(
            f"{name}: prompt: {seq.num_prompt} tokens leave no room for a completion in {max_len} positions; shorten it"
        )
    most = min(seq.num_prompt + num_new, max_len) - 1  # the token sampled last is never computed
    end = min(most + draft_tokens + 1, max_len) if draft_tokens else most
    if end > num_pages * page_size:
        raise UserError(
            f"{name}: max_tokens: {seq.num_prompt} prompt and {num_new} new tokens do not fit in "
            f"{num_pages} cache pages of {page_size} tokens; lower it, shorten the prompt or give "
            "the cache more memory"
        )
