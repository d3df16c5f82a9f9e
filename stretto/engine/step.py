"""One step of the batch: from a plan to the tokens it yields, with drafts or without.

Shape letters: M rows of logits, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stretto.base.errors import UserError
from stretto.engine.judge import Proposal
from stretto.engine.ledger import FlopCounter, Totals
from stretto.engine.lookup import NO_MATCH, Lookup, Match, continuation
from stretto.engine.native import NativeForward
from stretto.engine.request import TopLogprob
from stretto.engine.runner import Runner
from stretto.engine.sampler import Purpose, SamplerCache, process, sample, top_log_probs
from stretto.engine.sampler_state import SEED_MASK
from stretto.engine.sequence import Chunk, SequenceState, StepPlan
from stretto.engine.speculate import Speculator, can_draft
from stretto.engine.utility import Draft, Watch
from stretto.model.spec import Subnet


class Yield(NamedTuple):
    """What a step found for one sequence."""

    seq: SequenceState
    num_computed: int
    """Tokens that were computed, drafts included."""
    ids: Sequence[int]
    """Tokens chosen; none while a prompt is unfinished."""
    logprobs: Sequence[float]
    tops: Sequence[tuple[TopLogprob, ...]]
    """One for each token where the request asks for alternatives, else empty."""
    error: str | None = None
    """Why nothing could be chosen for it."""


Found = tuple[Sequence[int], Sequence[float], Sequence[tuple[TopLogprob, ...]], str | None]
"""The last four of `Yield`."""


class Stepper:
    """Computes plans. Keeps totals and what drafting costs; the sequences' tokens are the engine's to change."""

    def __init__(
        self,
        runner: Runner,
        flops: FlopCounter,
        totals: Totals,
        watch: Watch | None,
        page_size: int,
        end_ids: tuple[int, ...],
        clock: Callable[[], float],
    ):
        self._runner = runner
        self._flops = flops
        self._totals = totals
        self._watch = watch
        self._end_ids = end_ids
        self._clock = clock
        self._cache = SamplerCache()
        self._speculator = Speculator(runner, page_size, end_ids, self._cache)
        self._able: dict[tuple[int, int], bool] = {}
        self._lookups: dict[SequenceState, Lookup] = {}
        self._matches: dict[SequenceState, Match] = {}

    def choose_draft(
        self, running: Sequence[SequenceState], may_draft: Callable[[SequenceState], bool]
    ) -> Draft | None:
        """What to draft in a step that decodes ``running``; None where it does not pay, or a prompt is under way."""
        if self._watch is None or not running or not all([seq.is_decoding for seq in running]):
            return None
        able = [seq for seq in running if may_draft(seq)]
        targets = Counter(id(seq.subnet) for seq in able)
        subnet_of = {id(seq.subnet): seq.subnet for seq in running}
        shares = [
            sum(num for target, num in targets.items() if self._can_draft(draft, subnet_of[target])) / len(running)
            for draft in self._watch.candidates
        ]
        return self._watch.choose(len(running), shares + self._look_up(able, len(running)))

    def _look_up(self, able: Sequence[SequenceState], num_rows: int) -> list[float]:
        """Find each sequence's newest match; the share of rows that have one of each kind."""
        assert self._watch is not None
        if not self._watch.lookups:
            return []
        self._lookups = {seq: self._lookups.get(seq) or Lookup() for seq in able}
        limit = max(self._watch.lookups)
        self._matches = {seq: lookup.find(seq.tokens, limit) for seq, lookup in self._lookups.items()}
        lengths = [match.length for match in self._matches.values()]
        return [sum([length >= least for length in lengths]) / num_rows for least in self._watch.lookups]

    def plain(self, plan: StepPlan, want_routes: bool) -> list[Yield]:
        """Compute ``plan`` as it is."""
        started_s = self._clock()
        logits_MV = self._runner.forward(plan.chunks, want_routes).logits_MV
        rows: list[int] = []
        sampled: list[SequenceState] = []
        end_row = 0
        for chunk, seq in zip(plan.chunks, plan.sequences, strict=True):
            self._charge(seq, chunk)
            end_row += chunk.num_logits
            if chunk.start < seq.num_prompt:
                self._totals.prompt_tokens += min(chunk.end, seq.num_prompt) - chunk.start
                if seq.request.sampling.prompt_logprobs and chunk.num_logits:
                    score_prompt(seq, chunk.end, logits_MV[end_row - chunk.num_logits : end_row])
            if chunk.num_logits and chunk.end == len(seq.tokens):
                rows.append(end_row - 1)
                sampled.append(seq)
        if len(rows) < len(logits_MV):
            logits_MV = logits_MV[torch.tensor(rows, dtype=torch.int64, device=logits_MV.device)]
        found = self._sample(sampled, logits_MV)
        if self._watch is not None and all([len(chunk.tokens) == 1 for chunk in plan.chunks]):
            self._watch.plain(len(plan.chunks), self._clock() - started_s)
        return [
            Yield(seq, len(chunk.tokens), *found.get(seq, ((), (), (), None)))
            for chunk, seq in zip(plan.chunks, plan.sequences, strict=True)
        ]

    def drafted(self, proposals: Sequence[Proposal], draft: Draft, want_routes: bool) -> list[Yield]:
        """Draft for a batch that decodes, and verify."""
        started_s = self._clock()
        distributions = self._speculator.draft(proposals, draft)
        drafted_s = self._clock()
        verified = self._speculator.verify(proposals, distributions, want_routes)
        verified_s = self._clock()
        num_accepted = num_rejected = 0
        result: list[Yield] = []
        for at, proposal in enumerate(proposals):
            seq, num = proposal.seq, len(proposal.tokens)
            ids = verified.ids[at]
            num_accepted += len(ids) - 1
            num_rejected += len(ids) - 1 < num
            seq.num_drafted += num
            seq.num_accepted += len(ids) - 1
            self._totals.drafted_tokens += num
            if draft.subnet is not None:
                for step in range(num):
                    self._charge(seq, Chunk((0,), seq.num_computed + step, (), draft.subnet, 1))
            self._charge(seq, Chunk((0,) * (num + 1), seq.num_computed, (), seq.subnet, num + 1))
            logp_MV = verified.logp[at]
            tops = [] if logp_MV is None else self._tops([seq] * len(ids), logp_MV[: len(ids)])
            result.append(Yield(seq, num + 1, ids, verified.logprobs[at], tops))
        self._totals.accepted_tokens += num_accepted
        if distributions:
            assert self._watch is not None
            measured = replace(draft, num_tokens=len(distributions))
            self._watch.cycle(
                len(proposals), measured, drafted_s - started_s, verified_s - drafted_s, num_accepted, num_rejected
            )
        return result

    def _sample(self, sampled: list[SequenceState], logits_MV: Tensor) -> dict[SequenceState, Found]:
        if not sampled:
            return {}
        native = self._runner.native
        rows = [seq.request.sampling for seq in sampled]
        plain = [self._cache.plain(row) for row in rows] if native is not None else [None]
        if native is not None and None not in plain:
            return self._choose(native, sampled, logits_MV, plain)
        if any([temperature is not None for temperature in plain]):
            # apart, so that a token is chosen alike whatever else is in the batch
            parts = [[at for at, one in enumerate(plain) if (one is None) == is_none] for is_none in (True, False)]
            pieces = [self._sample([sampled[at] for at in part], logits_MV[torch.tensor(part)]) for part in parts]
            return pieces[0] | pieces[1]
        masks: list[np.ndarray | None] | None = None
        failed: dict[SequenceState, str] = {}
        if any([seq.grammar is not None for seq in sampled]):
            masks = [self._mask(seq, failed) for seq in sampled]
        logp_MV = process(
            logits_MV,
            rows,
            [seq.tokens for seq in sampled],
            [seq.num_prompt for seq in sampled],
            masks,
            end_ids=self._end_ids,
            cache=self._cache,
        )
        positions = [len(seq.tokens) for seq in sampled]
        ids_M, chosen_M = sample(logp_MV, rows, positions, Purpose.SAMPLE, cache=self._cache)
        tops = self._tops(sampled, logp_MV)
        found = zip(sampled, ids_M.tolist(), chosen_M.tolist(), strict=True)
        return {
            seq: ((), (), (), failed[seq]) if seq in failed else ([token], [logprob], tops[row : row + 1], None)
            for row, (seq, token, logprob) in enumerate(found)
        }

    @staticmethod
    def _choose(
        native: NativeForward, sampled: list[SequenceState], logits_MV: Tensor, temperatures: Sequence[float | None]
    ) -> dict[SequenceState, Found]:
        chosen = native.choose(
            logits_MV,
            [len(seq.tokens) for seq in sampled],
            [temperature or 0.0 for temperature in temperatures],
            [seq.seed & SEED_MASK for seq in sampled],
            [()] * len(sampled),
        )
        return {
            seq: (ids, logprobs, (), None)
            for seq, ids, logprobs in zip(sampled, chosen.ids, chosen.logprobs, strict=True)
        }

    @staticmethod
    def _mask(seq: SequenceState, failed: dict[SequenceState, str]) -> np.ndarray | None:
        """What the sequence's grammar allows; where it allows nothing it is in ``failed``, and its row is not masked."""
        if seq.grammar is None:
            return None
        try:
            mask: np.ndarray = seq.grammar.mask()
        except UserError as error:
            failed[seq] = str(error)
            return None
        if not mask.any():
            failed[seq] = "grammar: no token of the vocabulary can follow"
            return None
        return mask

    def _tops(self, sequences: Sequence[SequenceState], logp_MV: Tensor) -> list[tuple[TopLogprob, ...]]:
        """Alternatives of each row, as many as its request wants; [] where none wants any."""
        wanted = [seq.request.sampling.top_logprobs for seq in sequences]
        most = max(wanted, default=0)
        if most == 0:
            return []
        return [top[:num] for num, top in zip(wanted, top_log_probs(logp_MV, most), strict=True)]

    def _charge(self, seq: SequenceState, chunk: Chunk) -> None:
        seq.flops += self._flops.of(chunk)

    def _can_draft(self, draft: Subnet, target: Subnet) -> bool:
        key = id(draft), id(target)  # both are interned, so their identities last
        if key not in self._able:
            self._able[key] = can_draft(draft, target)
        return self._able[key]

    def proposals(self, plan: StepPlan, draft: Draft, most: Callable[[SequenceState], int]) -> list[Proposal] | None:
        """Empty proposals for a plan that only decodes; None where it does something else, or nobody may draft."""
        if plan.preempted or not all([seq.is_decoding for seq in plan.sequences]):
            return None
        proposals = [self._proposal(seq, draft, most(seq)) for seq in plan.sequences]
        failed: dict[SequenceState, str] = {}
        for proposal in proposals:
            mask = self._mask(proposal.seq, failed)
            if mask is not None:
                proposal.masks.append(mask)
        return proposals if not failed and any([proposal.most > 0 for proposal in proposals]) else None

    def _proposal(self, seq: SequenceState, draft: Draft, most: int) -> Proposal:
        most, temperature = min(most, draft.num_tokens), self._cache.plain(seq.request.sampling)
        if draft.subnet is not None:
            return Proposal(seq, most if self._can_draft(draft.subnet, seq.subnet) else 0, temperature=temperature)
        match = self._matches.get(seq, NO_MATCH)
        if most <= 0 or match.length < draft.min_match:
            return Proposal(seq, 0, temperature=temperature)
        return Proposal(seq, most, continuation(seq.tokens, match.start, most), temperature=temperature)


def score_prompt(seq: SequenceState, end: int, logits_MV: Tensor) -> None:
    """Add what the logits of the positions before ``end`` say about the prompt tokens that follow them."""
    first = end - len(logits_MV)
    known = len(seq.prompt_log_probs)
    positions = range(max(first, known), min(end, seq.num_prompt - 1))
    if not positions:
        return
    assert positions.start == known, f"prompt log-probabilities {known} to {positions.start} were left out"
    rows_MV = logits_MV[positions.start - first : positions.stop - first]
    ids_M = torch.tensor([seq.tokens[position + 1] for position in positions], device=logits_MV.device)
    seq.prompt_log_probs += rows_MV.log_softmax(-1).gather(-1, ids_M[:, None]).squeeze(-1).tolist()
