"""What is drafted for a sequence, and the decision by torch how much of it stands, for settings of every kind.

Drafts are accepted by rejection sampling on the processed distributions (Leviathan 2211.17192, Chen 2302.01318). Where
nothing but a temperature is set, `stretto.ops.native.choose` decides by the same rule.

Shape letters: M rows of logits, V vocabulary, R rows to decide (drafted, of sampled requests).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from stretto.engine.request import Sampling
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
from stretto.engine.sequence import SequenceState


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
    temperature: float | None = None
    """See `SamplerCache.plain`."""
    masks: list[np.ndarray] = field(default_factory=list)
    """What the grammar allows after each number of drafted tokens, from none on; empty where there is no grammar."""

    @property
    def is_plain(self) -> bool:
        """Whether the kernels can choose its tokens."""
        return self.temperature is not None

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
    logp: list[Tensor | None]
    """Processed log-probabilities [M, V] of each sequence's rows; None where its settings are plain (no alternatives)."""


def judge(
    proposals: Sequence[Proposal],
    distributions: Sequence[Tensor],
    logits_MV: Tensor,
    end_ids: tuple[int, ...],
    cache: SamplerCache,
) -> Verified:
    """Decide how far each proposal is right, whatever its settings; ``distributions`` [M, V] are of each drafting step."""
    rows = [proposal.seq.request.sampling for proposal in proposals for _ in range(len(proposal.tokens) + 1)]
    places = [(proposal, step) for proposal in proposals for step in range(len(proposal.tokens) + 1)]
    logp_MV = process(
        logits_MV,
        rows,
        [history(proposal, step) for proposal, step in places],
        [proposal.seq.num_prompt for proposal, _ in places],
        [proposal.masks[step] if proposal.masks else None for proposal, step in places],
        end_ids=end_ids,
        cache=cache,
    )
    positions = [len(proposal.seq.tokens) + step for proposal, step in places]
    own = sample(logp_MV, rows, positions, Purpose.SAMPLE, cache=cache)
    own_ids = own.ids_M.tolist()
    kept = _decide(proposals, distributions, logp_MV, rows, own_ids)
    ids = [[*proposal.tokens[:num], last] for proposal, (num, last) in zip(proposals, kept, strict=True)]
    logp = list(logp_MV.split([len(proposal.tokens) + 1 for proposal in proposals]))
    logprobs = [
        own_MV[: len(tokens)].gather(1, torch.tensor(tokens, device=own_MV.device)[:, None])[:, 0].tolist()
        for own_MV, tokens in zip(logp, ids, strict=True)
    ]
    return Verified(ids, logprobs, [*logp])


def _decide(
    proposals: Sequence[Proposal],
    distributions: Sequence[Tensor],
    logp_MV: Tensor,
    rows: Sequence[Sampling],
    own_ids: Sequence[int],
) -> list[tuple[int, int]]:
    """For each proposal: how many drafts stand, and the token that follows them."""
    replaced = _replacements(proposals, distributions, logp_MV, rows)
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
    proposals: Sequence[Proposal], distributions: Sequence[Tensor], logp_MV: Tensor, rows: Sequence[Sampling]
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
    keep_R = acceptance(target_RV, draft_RV, drafted_R).cpu().numpy() > uniform(seeds_R, positions_R, Purpose.ACCEPT)
    lost = np.flatnonzero(~keep_R)
    if not len(lost):
        return {}
    lost_R = torch.from_numpy(lost).to(device)
    other_RV = residual(target_RV[lost_R], draft_RV[lost_R]).log()
    instead = sample(
        other_RV, [rows[found[index][0]] for index in lost], positions_R[lost], Purpose.RESIDUAL, cache=None
    )
    return {found[index][0]: token for index, token in zip(lost.tolist(), instead.ids_M.tolist(), strict=True)}


def history(proposal: Proposal, num_drafted: int) -> Sequence[int]:
    """Tokens before the one to choose. Copied only for settings that read them."""
    sampling = proposal.seq.request.sampling
    if num_drafted and (wants_penalties(sampling) or sampling.min_tokens):
        return [*proposal.seq.tokens, *proposal.tokens[:num_drafted]]
    return proposal.seq.tokens
