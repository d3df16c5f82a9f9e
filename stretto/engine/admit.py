"""From a request to its sequences: everything that can be wrong with it is said here, before it joins a batch."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace

from stretto.base.errors import UserError
from stretto.engine.grammar import GrammarCompiler, GrammarState
from stretto.engine.request import Phases, Request
from stretto.engine.sampler import check_sampling, is_greedy
from stretto.engine.sequence import SequenceState
from stretto.model.spec import ModelConfig, Subnet, check_subnet
from stretto.text.stream import Detokenizer, StopStrings
from stretto.text.tokenizer import Tokenizer

_SEED_BITS = 63
_CONTEXT = 4
"""Prompt tokens that the detokenizer looks at: whether a space comes first depends on what is before it."""
_MAX_SUBNETS = 1024
"""Subnets remembered; a client may name one of its own in every request."""


def draw_seed() -> int:
    """A seed for a request that names none."""
    return secrets.randbits(_SEED_BITS)


class Admission:
    """Checks requests and makes their sequences."""

    def __init__(
        self,
        config: ModelConfig,
        tokenizer: Tokenizer | None,
        end_ids: tuple[int, ...],
        *,
        has_routes: bool,
        seeds: Callable[[], int] = draw_seed,
    ):
        self._config = config
        self._tokenizer = tokenizer
        self._special_ids = frozenset() if tokenizer is None else tokenizer.special_ids()
        self._end_ids = end_ids
        self._grammars: GrammarCompiler | None = None  # made at the first grammar: it takes a while
        self._has_routes = has_routes
        self._seeds = seeds
        self._subnets: dict[Subnet, Subnet] = {}

    def sequences(self, request: Request, now_s: float) -> list[SequenceState]:
        """One sequence for each choice; each with a request of its own that holds its seed and n = 1.

        Raises:
            UserError: something in the request that this network or engine does not have.
        """
        self._check(request)
        sampling = request.sampling
        first_seed = self._seeds() if sampling.seed is None else sampling.seed
        phases = self._phases(request)
        sequences = []
        for index in range(sampling.n):
            # Always an object of its own: the sampler knows sequences by the identity of their settings.
            own = sampling.model_copy(update={"seed": first_seed + index, "n": 1})
            seq = SequenceState(replace(request, sampling=own, phases=phases), index, arrived_s=now_s)
            seq.seed = first_seed + index
            seq.grammar = self._grammar(request)
            if self._tokenizer is not None:
                seq.detokenizer = Detokenizer(self._tokenizer, self._special_ids, after=request.prompt[-_CONTEXT:])
                seq.stops = StopStrings(sampling.stop) if sampling.stop else None
            sequences.append(seq)
        return sequences

    def subnet(self, subnet: Subnet) -> Subnet:
        """The one object that stands for all equal Subnets: what is kept for a Subnet is found by identity."""
        if len(self._subnets) >= _MAX_SUBNETS:
            self._subnets.clear()
        return self._subnets.setdefault(subnet, subnet)

    def _check(self, request: Request) -> None:
        name, vocab = f"request {request.id}", self._config.vocab_size
        if not request.prompt:
            raise UserError(f"{name}: prompt: empty; give at least one token")
        low, high = min(request.prompt), max(request.prompt)
        if low < 0 or high >= vocab:
            wrong = low if low < 0 else high
            raise UserError(f"{name}: prompt: {wrong} is not a token id; they go from 0 to {vocab - 1}")
        check_sampling(request.sampling, vocab, name)
        if self._tokenizer is None and (request.sampling.stop or request.sampling.grammar):
            field = "stop" if request.sampling.stop else "grammar"
            raise UserError(f"{name}: {field}: needs text, and this engine has no tokenizer; use stop_ids")
        if request.want_routes and not self._has_routes:
            raise UserError(f"{name}: want_routes: this engine keeps no routes; open it with routes")

    def _phases(self, request: Request) -> Phases:
        phases = request.phases
        for subnet in (phases.prefill, phases.thinking, phases.answer):
            if subnet is not None and subnet not in self._subnets:
                check_subnet(self._config, subnet)
        prefill = self.subnet(phases.prefill or phases.thinking or phases.answer)
        thinking, answer = self.subnet(phases.thinking or phases.answer), self.subnet(phases.answer)
        for name, earlier, later in (("thinking", prefill, thinking), ("answer", thinking, answer)):
            missing = sorted(set(later.layers) - set(earlier.layers))
            if missing:
                raise UserError(
                    f"request {request.id}: phases.{name}: layers {missing} were left out in the phase before, so they "
                    "have no keys of the tokens so far; give the earlier phase all layers of the later ones"
                )
        return Phases(
            answer=answer,
            prefill=prefill,
            thinking=None if phases.thinking is None else thinking,
            thinking_end=phases.thinking_end,
        )

    def _grammar(self, request: Request) -> GrammarState | None:
        grammar = request.sampling.grammar
        if grammar is None:
            return None
        assert self._tokenizer is not None
        if self._grammars is None:
            self._grammars = GrammarCompiler(self._tokenizer)
        ends = self._end_ids + request.sampling.stop_ids
        known = tuple(token for token in ends if token < self._tokenizer.vocab_size)
        return self._grammars.compile(grammar, known, f"request {request.id}")


def may_draft(request: Request) -> bool:
    """Whether drafting leaves a request what it was promised: a named seed promises the same tokens every time."""
    return request.sampling.seed is None or is_greedy(request.sampling)
