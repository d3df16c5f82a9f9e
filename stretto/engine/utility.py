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
SETTLE = 6
"""Measurements of which the least is taken before a mean begins: the first of a kind allocates and compiles."""
OUTLIER = 0.5
"""Plain steps by which a measurement may differ from the mean and count in full: the machine does other things too."""
GROWTH = 0.75
"""Verifying n drafts adds n to this power times what one adds: tokens share experts (5 and 9 tokens on a CPU: 0.7)."""
MEMORY = 512.0
"""Verified drafts that a mean acceptance looks back on."""
LOOKUPS = (3, 8)
"""Kinds of lookup, by the least number of equal tokens: a long match is right far more often than a short one."""


@dataclass(frozen=True, slots=True)
class Draft:
    """What the next cycle drafts."""

    subnet: Subnet | None
    """None: tokens are looked up in the sequence itself."""
    num_tokens: int
    min_match: int = 0
    """Of a lookup: equal tokens that it takes, one of `LOOKUPS`."""


@dataclass(slots=True)
class _Candidate:
    subnet: Subnet | None
    min_match: int = 0
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
class _Pause:
    """Drafting that did not pay waits, and is then tried again."""

    wait: int = 0
    """Plain steps left before the next attempt."""
    next_wait: int = FIRST_WAIT
    attempts: int = 0
    """Cycles left of an attempt after a wait."""

    def is_over(self) -> bool:
        """One more step has come."""
        if self.wait == 0:
            return True
        self.wait -= 1
        self.attempts = TRIALS if self.wait == 0 else 0
        return False

    def allows(self, utility: float) -> bool:
        """Whether to draft at this utility; begins to wait where it does not pay and no attempt is left."""
        if utility > 1.0:
            self.next_wait = FIRST_WAIT
            return True
        if self.attempts > 0:
            self.attempts -= 1
            return True
        self.wait, self.next_wait = self.next_wait, min(2 * self.next_wait, LONGEST_WAIT)
        return False


@dataclass(slots=True)
class _Cost:
    """A mean of seconds that bad measurements hardly move."""

    mean_s: float = 0.0
    num: int = 0

    def add(self, new_s: float, scale_s: float) -> None:
        """Count one more measurement; ``scale_s``: differences beyond it are cut off."""
        self.num += 1
        if self.num <= SETTLE:
            self.mean_s = new_s if self.num == 1 else min(self.mean_s, new_s)
        else:
            self.mean_s += COST_RATE * max(-scale_s, min(scale_s, new_s - self.mean_s))


@dataclass(slots=True)
class _Costs:
    """Seconds at about one batch size."""

    plain: _Cost = field(default_factory=_Cost)
    since_plain: int = 0
    draft: dict[int, _Cost] = field(default_factory=dict)
    """By candidate: one drafting step."""
    extra: _Cost = field(default_factory=_Cost)
    """What verifying one draft adds to a plain step."""
    pauses: dict[int, _Pause] = field(default_factory=dict)
    """By the first candidate of a group."""

    def num_trials(self, index: int) -> int:
        return self.draft[index].num if index in self.draft else 0


class Watch:
    """Chooses draft Subnet and length for the next step from what earlier steps cost and yielded.

    Costs are kept by batch size (in powers of two), acceptance by candidate. No clock in here: the engine measures.
    """

    def __init__(self, candidates: Sequence[Subnet], max_draft: int, *, lookup: bool = False):
        """``lookup``: tokens found in the sequence itself are candidates too."""
        assert (candidates or lookup) and max_draft > 0, f"{len(candidates)} candidates, {max_draft} drafts"
        self.candidates = tuple(candidates)
        self.lookups = LOOKUPS if lookup else ()
        self._candidates = [_Candidate(subnet) for subnet in candidates]
        self._candidates += [_Candidate(None, min_match) for min_match in self.lookups]
        # Subnets are weighed against each other; a match is there or not, so each kind of lookup waits for itself
        first = len(candidates)
        self._groups = [range(first), *(range(index, index + 1) for index in range(first, len(self._candidates)))]
        self._max_draft = max_draft
        self._costs: dict[int, _Costs] = {}

    def choose(self, num_rows: int, shares: Sequence[float] | None = None) -> Draft | None:
        """What to draft in a decoding step of ``num_rows`` sequences; None for a plain step.

        Args:
            shares: for each candidate, then for each kind of lookup, the share of rows it can draft for; None: all for
                the candidates, nothing found. The others get one token a cycle.
        """
        costs = self._at(num_rows)
        shares = [1.0] * len(self.candidates) + [0.0] * len(self.lookups) if shares is None else shares
        assert len(shares) == len(self._candidates), f"{len(shares)} shares of {len(self._candidates)} candidates"
        if not any(shares) or costs.plain.num < WARM_STEPS or costs.since_plain >= PLAIN_EVERY:
            return None
        for index, candidate in enumerate(self._candidates):
            num_trials = costs.num_trials(index)
            if shares[index] > 0 and num_trials < TRIALS:  # short and long, since costs need not grow in proportion
                num_tokens = self._max_draft if num_trials % 2 else min(2, self._max_draft)
                return Draft(candidate.subnet, num_tokens, candidate.min_match)
        offers: list[tuple[float, Draft]] = []
        for group in self._groups:
            pause = costs.pauses.setdefault(group.start, _Pause())
            if not any(shares[group.start : group.stop]) or not pause.is_over():
                continue
            offer = self._best(costs, group, shares)
            if pause.allows(offer[0]):
                offers.append(offer)
        return max(offers, key=lambda offer: offer[0])[1] if offers else None

    def utility(self, num_rows: int) -> tuple[float, Draft] | None:
        """Expected tokens over cost in plain steps, of the best choice as known now; None before any was tried."""
        costs = self._at(num_rows)
        if not costs.plain.num or not costs.draft:
            return None
        return self._best(costs, range(len(self._candidates)), [1.0] * len(self._candidates))

    def plain(self, num_rows: int, seconds: float) -> None:
        """A plain step of ``num_rows`` sequences took ``seconds``."""
        costs = self._at(num_rows)
        costs.since_plain = 0
        costs.plain.add(seconds, OUTLIER * costs.plain.mean_s)

    def cycle(
        self, num_rows: int, draft: Draft, draft_s: float, verify_s: float, num_accepted: int, num_rejected: int
    ) -> None:
        """A cycle took ``draft_s`` for all its drafting steps together and ``verify_s``; counts are over all rows."""
        costs, index = self._at(num_rows), self._index(draft)
        plain_s = costs.plain.mean_s
        costs.since_plain += 1
        costs.draft.setdefault(index, _Cost()).add(draft_s / draft.num_tokens, OUTLIER * plain_s)
        costs.extra.add(max(0.0, verify_s - plain_s) / draft.num_tokens**GROWTH, OUTLIER * plain_s)
        self._candidates[index].observe(num_accepted, num_rejected)

    def _at(self, num_rows: int) -> _Costs:
        return self._costs.setdefault(num_rows.bit_length(), _Costs())

    def _index(self, draft: Draft) -> int:
        for index, candidate in enumerate(self._candidates):
            if candidate.subnet is draft.subnet and candidate.min_match == draft.min_match:
                return index
        raise AssertionError(f"{draft} is not of this watch")

    def _best(self, costs: _Costs, group: range, shares: Sequence[float]) -> tuple[float, Draft]:
        """The best draft of those in ``group`` that can draft for any row, and its utility."""
        best: tuple[float, int, int] | None = None
        for index in group:
            if not shares[index] or index not in costs.draft:
                continue
            acceptance, gain = self._candidates[index].acceptance, 0.0
            for num_tokens in range(1, self._max_draft + 1):
                gain = acceptance * (1.0 + gain)
                draft_s = num_tokens * costs.draft[index].mean_s
                verify_s = costs.plain.mean_s + num_tokens**GROWTH * costs.extra.mean_s
                utility = (1.0 + shares[index] * gain) * costs.plain.mean_s / (draft_s + verify_s)
                if best is None or utility > best[0]:
                    best = utility, index, num_tokens
        assert best is not None, f"none of {group} was tried"
        candidate = self._candidates[best[1]]
        return best[0], Draft(candidate.subnet, best[2], candidate.min_match)
