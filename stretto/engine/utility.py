"""Whether drafting pays on this machine, and how far ahead: watched while running. Imports no torch.

A cycle of self-speculation drafts γ tokens with a small Subnet and verifies them with the target in one pass. Its
utility is the tokens it is expected to yield, over what it costs in plain steps (Cascade, 2506.20675, watches the same
ratio): verifying several tokens of an MoE layer loads more experts than one token does, so it can lie below one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from stretto.model.spec import Subnet

WARM_STEPS = 3
"""Plain steps before the first draft: the first of a kind also allocates and compiles."""
TRIALS = 6
"""Cycles that each candidate is tried for; the output is exact meanwhile, so live requests can carry the trial."""
PLAIN_EVERY = 96
"""Cycles between two plain steps that keep the plain cost fresh; it grows with the context (costs about 1 %)."""
FIRST_WAIT, LONGEST_WAIT = 32, 2048
"""Plain steps before drafting that did not pay is tried again; the wait doubles each time."""
COST_RATE = 0.1
"""Weight of the newest measurement in a mean cost."""
OUTLIER = 3.0
"""A measurement counts as at most so many times the mean: the machine was busy with something else."""
MEMORY = 512.0
"""Verified drafts that a mean acceptance looks back on."""


@dataclass(frozen=True, slots=True)
class Draft:
    """What the next cycle drafts."""

    subnet: Subnet
    num_tokens: int


def expected_tokens(acceptance: float, num_drafted: int) -> float:
    """Tokens a cycle yields when each draft is accepted with the same probability (Leviathan, 2211.17192, eq. 1)."""
    return sum(acceptance**power for power in range(num_drafted + 1))


@dataclass(slots=True)
class _Candidate:
    subnet: Subnet
    accepted: float = 0.0
    rejected: float = 0.0
    """Both decayed; a draft behind a rejected one was not tested."""

    @property
    def acceptance(self) -> float:
        return (self.accepted + 0.5) / (self.accepted + self.rejected + 1.0)

    def observe(self, num_accepted: int, num_rejected: int) -> None:
        keep = max(0.0, 1.0 - (num_accepted + num_rejected) / MEMORY)
        self.accepted = self.accepted * keep + num_accepted
        self.rejected = self.rejected * keep + num_rejected


@dataclass(slots=True)
class _Costs:
    """Seconds at about one batch size."""

    plain_s: float | None = None
    num_plain: int = 0
    since_plain: int = 0
    draft_s: dict[int, float] = field(default_factory=dict)
    """By candidate: one drafting step."""
    verify_s: dict[int, float] = field(default_factory=dict)
    """By number of drafted tokens."""
    trials: dict[int, int] = field(default_factory=dict)
    """By candidate: cycles so far."""
    wait: int = 0
    """Plain steps left before the next attempt."""
    next_wait: int = FIRST_WAIT
    attempts: int = 0
    """Cycles left of an attempt after a wait."""

    def verification(self, num_drafted: int) -> float:
        """Seconds to verify so many drafts; from the nearest number measured where this one never was."""
        assert self.plain_s is not None and self.verify_s, "nothing measured yet"
        near = min(self.verify_s, key=lambda known: (abs(known - num_drafted), known))
        if near == num_drafted:
            return self.verify_s[near]
        return self.plain_s + max(0.0, self.verify_s[near] - self.plain_s) * num_drafted / near


class Watch:
    """Chooses draft Subnet and length for the next step from what earlier steps cost and yielded.

    Costs are kept by batch size (in powers of two), acceptance by candidate. No clock in here: the engine measures.
    """

    def __init__(self, candidates: Sequence[Subnet], max_draft: int):
        assert candidates and max_draft > 0, f"{len(candidates)} candidates, {max_draft} drafts"
        self._candidates = [_Candidate(subnet) for subnet in candidates]
        self._index = {id(subnet): index for index, subnet in enumerate(candidates)}
        self._max_draft = max_draft
        self._costs: dict[int, _Costs] = {}

    @property
    def candidates(self) -> Sequence[Subnet]:
        return [candidate.subnet for candidate in self._candidates]

    def choose(self, num_rows: int, shares: Sequence[float] | None = None) -> Draft | None:
        """What to draft in a decoding step of ``num_rows`` sequences; None for a plain step.

        Args:
            shares: for each candidate, the share of rows it can draft for; None: all. The others get one token a cycle.
        """
        costs = self._at(num_rows)
        shares = [1.0] * len(self._candidates) if shares is None else shares
        if not any(shares) or costs.num_plain < WARM_STEPS or costs.since_plain >= PLAIN_EVERY:
            return None
        for index, candidate in enumerate(self._candidates):
            if shares[index] > 0 and costs.trials.get(index, 0) < TRIALS:
                return Draft(candidate.subnet, min(2, self._max_draft))
        if costs.wait > 0:
            costs.wait -= 1
            costs.attempts = TRIALS if costs.wait == 0 else 0
            return None
        utility, best = self._best(costs, shares)
        if utility > 1.0:
            costs.next_wait = FIRST_WAIT
            return best
        if costs.attempts > 0:
            costs.attempts -= 1
            return best
        costs.wait, costs.next_wait = costs.next_wait, min(2 * costs.next_wait, LONGEST_WAIT)
        return None

    def utility(self, num_rows: int) -> tuple[float, Draft] | None:
        """Expected tokens over cost in plain steps, of the best choice as known now; None before any was tried."""
        costs = self._at(num_rows)
        if costs.plain_s is None or not costs.trials:
            return None
        return self._best(costs, [1.0] * len(self._candidates))

    def plain(self, num_rows: int, seconds: float) -> None:
        """A plain step of ``num_rows`` sequences took ``seconds``."""
        costs = self._at(num_rows)
        costs.num_plain += 1
        costs.since_plain = 0
        costs.plain_s = _mean(costs.plain_s if costs.num_plain > WARM_STEPS else None, seconds)

    def cycle(
        self, num_rows: int, draft: Draft, draft_s: float, verify_s: float, num_accepted: int, num_rejected: int
    ) -> None:
        """A cycle took ``draft_s`` for all its drafting steps together and ``verify_s``; counts are over all rows."""
        costs, index = self._at(num_rows), self._index[id(draft.subnet)]
        costs.since_plain += 1
        costs.trials[index] = costs.trials.get(index, 0) + 1
        is_first = costs.trials[index] == 1  # of its kind: slower than those to come
        step_s = draft_s / draft.num_tokens
        if is_first:
            costs.draft_s[index] = step_s
            costs.verify_s.setdefault(draft.num_tokens, verify_s)
        else:
            fresh = costs.trials[index] == 2
            costs.draft_s[index] = _mean(None if fresh else costs.draft_s[index], step_s)
            costs.verify_s[draft.num_tokens] = _mean(costs.verify_s.get(draft.num_tokens), verify_s)
        self._candidates[index].observe(num_accepted, num_rejected)

    def _at(self, num_rows: int) -> _Costs:
        return self._costs.setdefault(num_rows.bit_length(), _Costs())

    def _best(self, costs: _Costs, shares: Sequence[float]) -> tuple[float, Draft]:
        assert costs.plain_s is not None
        best: tuple[float, Draft] | None = None
        for index, candidate in enumerate(self._candidates):
            if index not in costs.draft_s or not shares[index]:
                continue
            for num_tokens in range(1, self._max_draft + 1):
                cost_s = num_tokens * costs.draft_s[index] + costs.verification(num_tokens)
                gain = expected_tokens(candidate.acceptance, num_tokens) - 1.0
                utility = (1.0 + shares[index] * gain) * costs.plain_s / cost_s
                if best is None or utility > best[0]:
                    best = utility, Draft(candidate.subnet, num_tokens)
        assert best is not None
        return best


def _mean(old: float | None, new: float) -> float:
    return new if old is None else old + COST_RATE * (min(new, OUTLIER * old) - old)
