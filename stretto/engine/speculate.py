"""Self-speculation: a Subnet of the same weights drafts, or the text so far does; the target verifies all in one pass.

The draft Subnet's layers are among the target's. It reads the target's keys and values of the layers they share and
writes its own at the drafted positions; verification computes those positions again with the target and so overwrites
them. Drafts are accepted by rejection sampling on the processed distributions (Leviathan 2211.17192, Chen 2302.01318):
what comes out is distributed exactly as without drafts, and greedy tokens are the same.

Which random number decides a token depends on whether the token was drafted, which depends on the watch's clock. So a
request that names a seed and samples is never drafted for: it gets the same tokens every time.

Where the compiled kernels run and nothing but temperatures are set, a whole draft is one call and so is its decision.

Shape letters: M rows of logits, V vocabulary, R drafting sequences, S drafting steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stretto.engine.judge import Proposal, Verified, history, judge
from stretto.engine.native import NativeForward
from stretto.engine.runner import Runner
from stretto.engine.sampler import (
    Purpose,
    SamplerCache,
    is_greedy,
    probabilities,
    process,
    sample,
)
from stretto.engine.sampler_state import SEED_MASK
from stretto.engine.sequence import Chunk, SequenceState
from stretto.engine.utility import Draft
from stretto.model.spec import ModelConfig, Subnet


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
        elif self._runner.native is not None and all([p.is_plain for p in proposals]):
            distributions = self._run(self._runner.native, proposals, draft.subnet)
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

    def _run(self, native: NativeForward, proposals: Sequence[Proposal], subnet: Subnet) -> list[Tensor]:
        """Let ``subnet`` decode in one call."""
        active = [proposal for proposal in proposals if self._goes_on(proposal, 0)]
        if not active:
            return []
        ends = [proposal.seq.request.phases.thinking_end for proposal in active]
        drafted_RS, probs_SRV = native.draft(
            [self._draft_chunk(proposal, subnet, proposal.most) for proposal in active],
            [proposal.most for proposal in active],
            [-1 if end is None else end for end in ends],
            self._end_ids,
            [proposal.temperature or 0.0 for proposal in active],
            [proposal.seq.seed & SEED_MASK for proposal in active],
        )
        for row, (proposal, tokens) in enumerate(zip(active, drafted_RS.tolist(), strict=True)):
            proposal.tokens = [token for token in tokens if token >= 0]
            proposal.rows = [(step, row) for step in range(len(proposal.tokens))]
        num_steps = max([len(proposal.tokens) for proposal in active])
        return [torch.empty(0)] * num_steps if probs_SRV is None else list(probs_SRV[:num_steps])

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
                [history(proposal, step) for proposal in active],
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
        logits_MV = self._runner.forward(chunks, want_routes).logits_MV
        native = self._runner.native
        plain = [proposal.is_plain and native is not None for proposal in proposals]
        if native is not None and all(plain):
            return self._choose(native, proposals, distributions, logits_MV)
        if not any(plain):
            return judge(proposals, distributions, logits_MV, self._end_ids, self._cache)
        # how a token is chosen depends on its own sequence's settings alone, or a seed would not be kept its promise
        found = Verified([[]] * len(proposals), [[]] * len(proposals), [None] * len(proposals))
        rows_of = torch.arange(len(logits_MV), device=logits_MV.device).split([len(chunk.tokens) for chunk in chunks])
        for is_plain in (True, False):
            places = [at for at, flag in enumerate(plain) if flag == is_plain]
            part, own_MV = [proposals[at] for at in places], logits_MV[torch.cat([rows_of[at] for at in places])]
            if is_plain and native is not None:
                mine = self._choose(native, part, distributions, own_MV)
            else:
                mine = judge(part, distributions, own_MV, self._end_ids, self._cache)
            for at, ids, logprobs, logp in zip(places, mine.ids, mine.logprobs, mine.logp, strict=True):
                found.ids[at], found.logprobs[at], found.logp[at] = ids, logprobs, logp
        return found

    def _choose(
        self, native: NativeForward, proposals: Sequence[Proposal], distributions: Sequence[Tensor], logits_MV: Tensor
    ) -> Verified:
        """Decide by the kernels."""
        sizes = [0 if table.numel() == 0 else table.stride(0) * table.element_size() for table in distributions]
        chosen = native.choose(
            logits_MV,
            [len(proposal.seq.tokens) for proposal in proposals],
            [proposal.temperature or 0.0 for proposal in proposals],
            [proposal.seq.seed & SEED_MASK for proposal in proposals],
            [proposal.tokens for proposal in proposals],
            [
                distributions[step].data_ptr() + row * sizes[step] if sizes[step] and proposal.temperature else 0
                for proposal in proposals
                for step, row in proposal.rows
            ],
        )
        return Verified(chosen.ids, chosen.logprobs, [None] * len(proposals))

    def _goes_on(self, proposal: Proposal, step: int) -> bool:
        if step >= proposal.most or (proposal.masks and not proposal.masks[step].any()):
            return False
        last = proposal.tokens[-1] if step else proposal.seq.tokens[-1]
        # the token that ends thinking is computed by the thinking Subnet, what follows it by another
        return last not in self._end_ids and last != proposal.seq.request.phases.thinking_end

    def _draft_chunk(self, proposal: Proposal, subnet: Subnet, ahead: int = 1) -> Chunk:
        """The newest token, with pages for ``ahead`` positions from its own on."""
        seq, step = proposal.seq, len(proposal.tokens)
        start = seq.num_computed + step
        token = proposal.tokens[-1] if step else seq.tokens[-1]
        return Chunk((token,), start, self._table(seq, start + ahead), subnet, 1)

    def _verify_chunk(self, proposal: Proposal) -> Chunk:
        seq = proposal.seq
        tokens = (seq.tokens[-1], *proposal.tokens)
        start = seq.num_computed
        return Chunk(tokens, start, self._table(seq, start + len(tokens)), seq.subnet, len(tokens))

    def _table(self, seq: SequenceState, end: int) -> tuple[int, ...]:
        num_pages = -(-end // self._page_size)
        assert num_pages <= len(seq.table), f"drafts up to {end} need {num_pages} pages, {len(seq.table)} are there"
        return seq.table[:num_pages]
