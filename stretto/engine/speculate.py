"""Self-speculation: a Subnet of the same weights drafts, or the text so far does; the target verifies all in one pass.

The draft Subnet's layers are among the target's. It reads the target's keys and values of the layers they share and
writes its own at the drafted positions; verification computes those positions again with the target and so overwrites
them. Drafts are accepted by rejection sampling on the processed distributions (Leviathan 2211.17192, Chen 2302.01318):
what comes out is distributed exactly as without drafts, and greedy tokens are the same.

Which random number decides a token depends on whether the token was drafted, which depends on the watch's clock. So a
request that names a seed and samples is never drafted for: it gets the same tokens every time.

Shape letters: M rows of logits, V vocabulary, R rows to decide (drafted, of sampled requests).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from stretto.engine.request import Sampling
from stretto.engine.runner import Runner
from stretto.engine.sampler import (
    Purpose,
    SamplerCache,
    acceptance,
    is_greedy,
    probabilities,
    process,
    residual,
    sample,
    uniform,
)
from stretto.engine.sampler_state import wants_penalties
from stretto.engine.sequence import Chunk, SequenceState
from stretto.engine.utility import Draft
from stretto.model.spec import ModelConfig, Subnet


@dataclass(slots=True, eq=False)
class Proposal:
    """What was drafted for one sequence."""

    seq: SequenceState
    most: int
    """Tokens that may be drafted for it."""
    found: Sequence[int] = ()
    """Tokens that were looked up for it."""
    tokens: list[int] = field(default_factory=list)
    rows: list[tuple[int, int]] = field(default_factory=list)
    """For each token: the drafting step, and the row there that it was drawn from."""
    masks: list[np.ndarray] = field(default_factory=list)
    """What the grammar allows after each number of drafted tokens, from none on; empty where there is no grammar."""

    def add(self, token: int, row: tuple[int, int]) -> None:
        """Draft ``token``; one that the grammar cannot go on from is left out."""
        grammar = self.seq.grammar
        if grammar is not None:
            if not grammar.accept(token):
                self.most = len(self.tokens)
                return
            self.masks.append(grammar.mask())
        self.tokens.append(token)
        self.rows.append(row)


@dataclass(frozen=True, slots=True)
class Verified:
    """What the target makes of the proposals of a step."""

    ids: list[list[int]]
    """Final tokens of each sequence: accepted drafts, then one of the target's own."""
    logprobs: list[list[float]]
    """Of those, under the target."""
    logp_MV: Tensor
    """Processed log-probabilities of all rows, in the order of sequences and positions."""
    first_row: list[int]
    """Row of each sequence's first token."""


def draft_candidates(config: ModelConfig, named: Sequence[Subnet]) -> list[Subnet]:
    """Subnets worth trying as a draft: the ``named`` ones, and small nested ones."""
    half, quarter = max(1, config.num_layers // 2), max(1, config.num_layers // 4)
    least = min(config.experts_by_layer, default=1)
    own = (
        config.subnet(top_k=1),
        config.subnet(depth=half, top_k=1),
        config.subnet(depth=quarter, top_k=1),
        config.subnet(depth=half, experts=max(1, least // 4), top_k=1),
    )
    full = config.full()
    return [subnet for subnet in dict.fromkeys((*named, *own)) if subnet != full]


def can_draft(draft: Subnet, target: Subnet) -> bool:
    """Whether ``draft`` finds its keys and values in the target's cache, and is another network at all."""
    return draft != target and set(draft.layers) <= set(target.layers)


class Speculator:
    """Drafts and verifies. Changes nothing but the cache pages beyond each sequence's computed tokens."""

    def __init__(self, runner: Runner, page_size: int, end_ids: tuple[int, ...], cache: SamplerCache):
        self._runner = runner
        self._device = runner.pool.keys_LPZGC.device
        self._page_size = page_size
        self._end_ids = end_ids
        self._cache = cache

    def draft(self, proposals: Sequence[Proposal], draft: Draft) -> list[Tensor]:
        """Fill in the proposals; returns the distributions [M, V] of each drafting step.

        Grammars end where they began. A sequence stops early where it would end, where its thinking would (another
        Subnet goes on there), and where its grammar allows nothing more.
        """
        if draft.subnet is None:
            distributions = self._look_up(proposals)
        else:
            distributions = self._compute(proposals, draft.subnet, draft.num_tokens)
        for proposal in proposals:
            if proposal.seq.grammar is not None and proposal.tokens:
                proposal.seq.grammar.rollback(len(proposal.tokens))
        return distributions

    def _look_up(self, proposals: Sequence[Proposal]) -> list[Tensor]:
        """Propose what was found. Such a draft was certain of itself: all its probability is on one token."""
        distributions: list[Tensor] = []
        for step in range(max([len(proposal.found) for proposal in proposals])):
            active = [
                proposal for proposal in proposals if step < len(proposal.found) and self._goes_on(proposal, step)
            ]
            if not active:
                break
            for row, proposal in enumerate(active):
                proposal.add(proposal.found[step], (step, row))
            if any([not is_greedy(proposal.seq.request.sampling) for proposal in active]):
                ids_M = torch.tensor([proposal.found[step] for proposal in active], device=self._device)
                distributions.append(torch.nn.functional.one_hot(ids_M, self._runner.config.vocab_size).float())
            else:
                distributions.append(torch.empty(0))  # greedy rows are compared token by token
        return distributions

    def _compute(self, proposals: Sequence[Proposal], subnet: Subnet, num_tokens: int) -> list[Tensor]:
        """Let ``subnet`` decode."""
        distributions: list[Tensor] = []
        for step in range(num_tokens):
            active = [proposal for proposal in proposals if self._goes_on(proposal, step)]
            if not active:
                break
            chunks = [self._draft_chunk(proposal, subnet) for proposal in active]
            rows = [proposal.seq.request.sampling for proposal in active]
            logp_MV = process(
                self._runner.forward(chunks, False).logits_MV,
                rows,
                [_history(proposal, step) for proposal in active],
                [proposal.seq.num_prompt for proposal in active],
                [proposal.masks[step] if proposal.masks else None for proposal in active],
                end_ids=self._end_ids,
                cache=self._cache,
            )
            positions = [chunk.end for chunk in chunks]
            drawn = sample(logp_MV, rows, positions, Purpose.DRAFT, cache=self._cache)
            is_drawn = any([not is_greedy(row) for row in rows])
            distributions.append(probabilities(logp_MV, rows, cache=self._cache) if is_drawn else logp_MV)
            for row, (proposal, token) in enumerate(zip(active, drawn.ids_M.tolist(), strict=True)):
                proposal.add(token, (step, row))
        return distributions

    def verify(self, proposals: Sequence[Proposal], distributions: Sequence[Tensor], want_routes: bool) -> Verified:
        """Compute all proposals with their sequences' own Subnets, and decide how far each is right."""
        chunks = [self._verify_chunk(proposal) for proposal in proposals]
        rows = [proposal.seq.request.sampling for proposal in proposals for _ in range(len(proposal.tokens) + 1)]
        places = [(proposal, step) for proposal in proposals for step in range(len(proposal.tokens) + 1)]
        logp_MV = process(
            self._runner.forward(chunks, want_routes).logits_MV,
            rows,
            [_history(proposal, step) for proposal, step in places],
            [proposal.seq.num_prompt for proposal, _ in places],
            [proposal.masks[step] if proposal.masks else None for proposal, step in places],
            end_ids=self._end_ids,
            cache=self._cache,
        )
        positions = [len(proposal.seq.tokens) + step for proposal, step in places]
        own = sample(logp_MV, rows, positions, Purpose.SAMPLE, cache=self._cache)
        own_ids = own.ids_M.tolist()
        kept = self._decide(proposals, distributions, logp_MV, rows, own_ids)
        ids: list[list[int]] = []
        first_row: list[int] = []
        row = 0
        for proposal, (num_kept, last) in zip(proposals, kept, strict=True):
            ids.append([*proposal.tokens[:num_kept], last])
            first_row.append(row)
            row += len(proposal.tokens) + 1
        rows_R = [first + step for first, tokens in zip(first_row, ids, strict=True) for step in range(len(tokens))]
        flat = torch.tensor([token for tokens in ids for token in tokens], device=logp_MV.device)
        chosen = iter(logp_MV[torch.tensor(rows_R, device=logp_MV.device), flat].tolist())
        return Verified(ids, [[next(chosen) for _ in tokens] for tokens in ids], logp_MV, first_row)

    def _decide(
        self,
        proposals: Sequence[Proposal],
        distributions: Sequence[Tensor],
        logp_MV: Tensor,
        rows: Sequence[Sampling],
        own_ids: Sequence[int],
    ) -> list[tuple[int, int]]:
        """For each proposal: how many drafts stand, and the token that follows them."""
        replaced = self._replacements(proposals, distributions, logp_MV, rows)
        kept: list[tuple[int, int]] = []
        first = 0
        for proposal in proposals:
            num_kept, last = len(proposal.tokens), own_ids[first + len(proposal.tokens)]
            for step, token in enumerate(proposal.tokens):
                # a greedy row keeps what it would have chosen; a sampled one has its verdict already
                instead = replaced[first + step] if replaced is not None and first + step in replaced else None
                if is_greedy(rows[first]):
                    instead = own_ids[first + step] if own_ids[first + step] != token else None
                if instead is not None:
                    num_kept, last = step, instead
                    break
            kept.append((num_kept, last))
            first += len(proposal.tokens) + 1
        return kept

    def _replacements(
        self, proposals: Sequence[Proposal], distributions: Sequence[Tensor], logp_MV: Tensor, rows: Sequence[Sampling]
    ) -> dict[int, int]:
        """Row -> the token instead of its draft, for every rejected draft of a sampled request."""
        found: list[tuple[int, int, int, int, Proposal]] = []  # row of the target, drafting step, row there, token
        first = 0
        for proposal in proposals:
            if not is_greedy(proposal.seq.request.sampling):
                drafted = enumerate(zip(proposal.tokens, proposal.rows, strict=True))
                found += [(first + at, step, row, token, proposal) for at, (token, (step, row)) in drafted]
            first += len(proposal.tokens) + 1
        if not found:
            return {}
        device = logp_MV.device
        rows_R = torch.tensor([target for target, *_ in found], device=device)
        target_RV = probabilities(logp_MV[rows_R], [rows[target] for target, *_ in found], cache=None)
        draft_RV = torch.stack([distributions[step][row] for _, step, row, _, _ in found])
        drafted_R = torch.tensor([token for *_, token, _ in found], device=device)
        seeds_R = np.array([proposal.seq.seed for *_, proposal in found], dtype=np.uint64)
        positions_R = np.array([len(proposal.seq.tokens) + step for _, step, _, _, proposal in found])
        keep_R = acceptance(target_RV, draft_RV, drafted_R).cpu().numpy() > uniform(
            seeds_R, positions_R, Purpose.ACCEPT
        )
        lost = np.flatnonzero(~keep_R)
        if not len(lost):
            return {}
        lost_R = torch.from_numpy(lost).to(device)
        other_RV = residual(target_RV[lost_R], draft_RV[lost_R]).log()
        instead = sample(
            other_RV, [rows[found[index][0]] for index in lost], positions_R[lost], Purpose.RESIDUAL, cache=None
        )
        return {found[index][0]: token for index, token in zip(lost.tolist(), instead.ids_M.tolist(), strict=True)}

    def _goes_on(self, proposal: Proposal, step: int) -> bool:
        if step >= proposal.most or (proposal.masks and not proposal.masks[step].any()):
            return False
        last = proposal.tokens[-1] if step else proposal.seq.tokens[-1]
        # the token that ends thinking is computed by the thinking Subnet, what follows it by another
        return last not in self._end_ids and last != proposal.seq.request.phases.thinking_end

    def _draft_chunk(self, proposal: Proposal, subnet: Subnet) -> Chunk:
        seq, step = proposal.seq, len(proposal.tokens)
        start = seq.num_computed + step
        token = proposal.tokens[-1] if step else seq.tokens[-1]
        return Chunk((token,), start, self._table(seq, start + 1), subnet, 1)

    def _verify_chunk(self, proposal: Proposal) -> Chunk:
        seq = proposal.seq
        tokens = (seq.tokens[-1], *proposal.tokens)
        start = seq.num_computed
        return Chunk(tokens, start, self._table(seq, start + len(tokens)), seq.subnet, len(tokens))

    def _table(self, seq: SequenceState, end: int) -> tuple[int, ...]:
        num_pages = -(-end // self._page_size)
        assert num_pages <= len(seq.table), f"drafts up to {end} need {num_pages} pages, {len(seq.table)} are there"
        return seq.table[:num_pages]


def _history(proposal: Proposal, num_drafted: int) -> Sequence[int]:
    """Tokens before the one to choose. Copied only for settings that read them."""
    sampling = proposal.seq.request.sampling
    if num_drafted and (wants_penalties(sampling) or sampling.min_tokens):
        return [*proposal.seq.tokens, *proposal.tokens[:num_drafted]]
    return proposal.seq.tokens
