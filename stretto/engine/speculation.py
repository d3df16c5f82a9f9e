"""Self-speculation: a Subnet of the same weights drafts, or the text so far does; the target verifies all in one pass.

The draft Subnet's layers are among the target's. It reads the target's keys and values of the layers they share and
writes its own at the drafted positions; verification computes those positions again with the target and so overwrites
them. Drafts are accepted by rejection sampling on the processed distributions (Leviathan 2211.17192, Chen 2302.01318):
what comes out is distributed exactly as without drafts, and greedy tokens are the same.

- Which random number decides a token depends on whether the token was drafted, which depends on the watch's clock. So a
  request that names a seed and samples is never drafted for: it gets the same tokens every time.
- Drafts that cost nothing are looked up: what followed the last time that the text's newest tokens stood in it. Code,
  quotations and lists repeat themselves, and small networks more so (prompt lookup, Saxena 2023; LLMA, 2304.04487).
- Whether drafting pays is watched while running. A cycle drafts γ tokens and verifies them in one pass; its utility is
  the tokens it is expected to yield, over what it costs in plain steps (Cascade, 2506.20675, watches the same ratio):
  verifying several tokens of an MoE layer loads more experts than one token does, so it can lie below one.

Shape letters: M rows of logits, V vocabulary, R drafted rows of sampled requests, N drafting sequences, S drafting steps.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stretto.engine.runner import Runner
from stretto.engine.sampling import Purpose, SamplerCache, acceptance, probabilities, process, residual, sample, uniform
from stretto.engine.sequence import Chunk, SequenceState, StepPlan, SubnetTable
from stretto.model.spec import ModelConfig, Subnet
from stretto.ops.native import choose_tokens

_log = logging.getLogger(__name__)
ORDER = 3
"""Tokens that must be equal before the rest is looked at; of two, too many stand together by chance."""
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


class Lookup:
    """Where each run of `ORDER` tokens of one growing sequence stood last."""

    __slots__ = ("_num_read", "_starts", "length", "start")

    def __init__(self) -> None:
        self._starts: dict[tuple[int, ...], int] = {}
        self._num_read = ORDER
        self.length = 0
        """Equal tokens, counted up to a limit, of the newest earlier place that ends as the sequence does; 0: none does."""
        self.start = 0
        """Position of what followed them."""

    def find(self, tokens: Sequence[int], limit: int) -> None:
        """Look again: ``tokens`` are those of the last call and more; the length is at most ``limit``."""
        for start in range(self._num_read, len(tokens)):
            self._starts[tuple(tokens[start - ORDER : start])] = start
        self._num_read = max(ORDER, len(tokens))
        start, length = self._starts.get(tuple(tokens[-ORDER:]), 0), 0
        if start:
            length = ORDER
            while length < min(limit, start) and tokens[start - 1 - length] == tokens[-1 - length]:
                length += 1
        self.length, self.start = length, start


def continuation(tokens: Sequence[int], start: int, step: int) -> int:
    """The token ``step`` after ``start``; where the sequence ends first, it goes on as it repeats itself."""
    return tokens[start + step % (len(tokens) - start)]


@dataclass(frozen=True, slots=True)
class Draft:
    """What the next cycle drafts."""

    subnet: int | None
    """Its number; None: tokens are looked up in the sequence itself."""
    num_tokens: int
    min_match: int = 0
    """Of a lookup: equal tokens that it takes, one of `LOOKUPS`."""


_Candidate = tuple[int | None, int]
"""The first and the last field of a `Draft`."""


@dataclass(slots=True)
class _Acceptance:
    """Of one candidate's drafts."""

    accepted: float = 0.0
    rejected: float = 0.0
    """Both decayed; a draft behind a rejected one was not tested."""

    @property
    def mean(self) -> float:
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
    draft: dict[_Candidate, _Cost] = field(default_factory=dict)
    """One drafting step."""
    extra: _Cost = field(default_factory=_Cost)
    """What verifying one draft adds to a plain step."""
    pauses: dict[_Candidate, _Pause] = field(default_factory=dict)
    """By the first candidate of a group."""


class Watch:
    """Chooses draft Subnet and length for the next step from what earlier steps cost and yielded.

    Costs are kept by batch size (in powers of two), acceptance by candidate. No clock in here: the engine measures.
    """

    def __init__(self, candidates: Sequence[int], max_draft: int, *, lookup: bool = False):
        """``candidates`` are numbers of Subnets; ``lookup``: tokens found in the sequence itself are candidates too."""
        assert (candidates or lookup) and max_draft > 0, f"{len(candidates)} candidates, {max_draft} drafts"
        self.candidates = tuple(candidates)
        self.lookups = LOOKUPS if lookup else ()
        drafters: list[_Candidate] = [(subnet, 0) for subnet in candidates]
        found: list[_Candidate] = [(None, min_match) for min_match in self.lookups]
        self._acceptance = {candidate: _Acceptance() for candidate in (*drafters, *found)}
        # Subnets are weighed against each other; a match is there or not, so each kind of lookup waits for itself
        self._groups = [group for group in (drafters, *([candidate] for candidate in found)) if group]
        self._max_draft = max_draft
        self._costs: dict[int, _Costs] = {}

    def choose(self, num_rows: int, shares: Sequence[float]) -> Draft | None:
        """What to draft in a decoding step of ``num_rows`` sequences; None for a plain step.

        Args:
            shares: for each candidate, then for each kind of lookup, the share of rows it can draft for. The others get
                one token a cycle.
        """
        costs = self._at(num_rows)
        able = {one: share for one, share in zip(self._acceptance, shares, strict=True) if share}
        if not able or costs.plain.num < WARM_STEPS or costs.since_plain >= PLAIN_EVERY:
            return None
        for subnet, min_match in able:
            known = costs.draft.get((subnet, min_match))
            num_trials = 0 if known is None else known.num
            if num_trials < TRIALS:  # short and long, since costs need not grow in proportion
                return Draft(subnet, self._max_draft if num_trials % 2 else min(2, self._max_draft), min_match)
        offers: list[tuple[float, Draft]] = []
        for group in self._groups:
            pause = costs.pauses.setdefault(group[0], _Pause())
            members = {one: able[one] for one in group if one in able}
            if members and pause.is_over():
                offer = self._best(costs, members)
                if pause.allows(offer[0]):
                    offers.append(offer)
        return max(offers, key=lambda offer: offer[0])[1] if offers else None

    def plain(self, num_rows: int, seconds: float) -> None:
        """A plain step of ``num_rows`` sequences took ``seconds``."""
        costs = self._at(num_rows)
        costs.since_plain = 0
        costs.plain.add(seconds, OUTLIER * costs.plain.mean_s)

    def cycle(
        self, num_rows: int, draft: Draft, draft_s: float, verify_s: float, num_accepted: int, num_rejected: int
    ) -> None:
        """A cycle took ``draft_s`` for all its drafting steps together and ``verify_s``; counts are over all rows."""
        costs, candidate = self._at(num_rows), (draft.subnet, draft.min_match)
        plain_s = costs.plain.mean_s
        costs.since_plain += 1
        costs.draft.setdefault(candidate, _Cost()).add(draft_s / draft.num_tokens, OUTLIER * plain_s)
        costs.extra.add(max(0.0, verify_s - plain_s) / draft.num_tokens**GROWTH, OUTLIER * plain_s)
        self._acceptance[candidate].observe(num_accepted, num_rejected)

    def _at(self, num_rows: int) -> _Costs:
        return self._costs.setdefault(num_rows.bit_length(), _Costs())

    def _best(self, costs: _Costs, shares: Mapping[_Candidate, float]) -> tuple[float, Draft]:
        """The best draft of the tried candidates in ``shares``, and its expected tokens over its cost in plain steps."""
        offers: list[tuple[float, Draft]] = []
        for (subnet, min_match), share in shares.items():
            cost, gain = costs.draft[subnet, min_match], 0.0
            for num_tokens in range(1, self._max_draft + 1):
                gain = self._acceptance[subnet, min_match].mean * (1.0 + gain)
                verify_s = costs.plain.mean_s + num_tokens**GROWTH * costs.extra.mean_s
                utility = (1.0 + share * gain) * costs.plain.mean_s / (num_tokens * cost.mean_s + verify_s)
                offers.append((utility, Draft(subnet, num_tokens, min_match)))
        return max(offers, key=lambda offer: offer[0])


def draft_candidates(config: ModelConfig, named: Sequence[Subnet]) -> list[Subnet]:
    """Subnets worth trying as a draft: the ``named`` ones, and small nested ones."""
    half, quarter = max(1, config.num_layers // 2), max(1, config.num_layers // 4)
    least = min(config.experts_by_layer, default=1)
    own = (
        config.subnet(top_k=1),
        config.subnet(depth=half, top_k=1),
        config.subnet(depth=quarter, top_k=1),
        config.subnet(depth=half, experts=config.holding(least // 4, 1), top_k=1),
    )
    return [subnet for subnet in dict.fromkeys((*named, *own)) if subnet != config.full()]


def can_draft(draft: Subnet, target: Subnet) -> bool:
    """Whether ``draft`` finds its keys and values in the target's cache, and is another network at all."""
    return draft != target and set(draft.layers) <= set(target.layers)


class Verdict(NamedTuple):
    """What a step makes final of one sequence."""

    ids: list[int]
    """Accepted drafts, then one of the target's own."""
    logprobs: list[float]
    """Of those, under the target."""
    logp_MV: Tensor | None
    """Processed log-probabilities of their rows; None where no alternatives are wanted."""


class Speculator:
    """Chooses what to draft, drafts, verifies and decides; a plain step is one without drafts. Changes nothing but the
    cache pages beyond each sequence's computed tokens, and what the sequences keep of the drafts of one step."""

    def __init__(self, runner: Runner, subnets: SubnetTable, end_ids: tuple[int, ...], watch: Watch | None):
        self.watch = watch
        """None: nothing is ever drafted."""
        self._runner, self._subnets, self._end_ids, self._cache = runner, subnets, end_ids, SamplerCache()
        self._page_size = runner.pool.keys_LPZGC.shape[2]
        self._able: dict[tuple[int, int], bool] = {}

    def choose(self, running: Sequence[SequenceState]) -> Draft | None:
        """What to draft in a step that decodes ``running``; None where it does not pay, or a prompt is under way."""
        if self.watch is None or not running or not all([seq.is_decoding for seq in running]):
            return None
        num_rows, able = len(running), [seq for seq in running if seq.may_draft]
        shares = [
            sum([self._can_draft(draft, seq.subnet) for seq in able]) / num_rows for draft in self.watch.candidates
        ]
        if self.watch.lookups:
            for seq in able:
                seq.lookup = seq.lookup or Lookup()
                seq.lookup.find(seq.tokens, max(self.watch.lookups))
            shares += [sum([seq.lookup.length >= least for seq in able]) / num_rows for least in self.watch.lookups]
        return self.watch.choose(num_rows, shares)

    def prepare(self, plan: StepPlan, draft: Draft) -> bool:
        """Make the sequences ready to be drafted for; False where the plan does more than decode, or nobody may draft."""
        if plan.preempted or not all([seq.is_decoding for seq in plan.sequences]):
            return False
        for seq in plan.sequences:
            if not seq.begin_drafts():
                return False  # a plain step ends the sequence
            most = min(seq.limit - len(seq.tokens) - 1, draft.num_tokens) if seq.may_draft else 0
            if draft.subnet is None:
                is_able = seq.lookup is not None and seq.lookup.length >= draft.min_match
            else:
                is_able = self._can_draft(draft.subnet, seq.subnet)
            seq.most_drafts = most if is_able else 0
        return any([seq.most_drafts > 0 for seq in plan.sequences])

    def draft(self, sequences: Sequence[SequenceState], draft: Draft) -> list[Tensor]:
        """Draft for sequences that were prepared; returns the distributions [M, V] of each drafting step.

        Grammars end where they began. A sequence stops early where it would end, where its thinking would (another
        Subnet goes on there), and where its grammar allows nothing more. Where drafting fails, the step goes on without:
        should it be the device, verification meets it too.
        """
        try:
            return self._draft(sequences, draft)
        except Exception:
            _log.exception("drafting has failed; the step goes on without drafts")
            for seq in sequences:
                _end_drafts(seq)
                seq.drafts, seq.draft_rows = [], []
                del seq.draft_masks[1:]
            return []

    def _draft(self, sequences: Sequence[SequenceState], draft: Draft) -> list[Tensor]:
        is_compiled = self._runner.native is not None and all([seq.temperature is not None for seq in sequences])
        if draft.subnet is not None and is_compiled:
            return self._run(sequences, draft.subnet)
        distributions: list[Tensor] = []
        for step in range(draft.num_tokens):
            if not (active := [seq for seq in sequences if self._goes_on(seq, step)]):
                break
            if draft.subnet is None:
                ids, probs_MV = self._look_up(active, step)
            else:
                ids, probs_MV = self._compute(active, draft.subnet, step)
            distributions.append(probs_MV)
            for row, (seq, token) in enumerate(zip(active, ids, strict=True)):
                with seq.guarded():
                    seq.draft(token, (step, row))
        for seq in sequences:
            _end_drafts(seq)
        return distributions

    def _look_up(self, active: Sequence[SequenceState], step: int) -> tuple[list[int], Tensor]:
        """Propose what was found. Such a draft was certain of itself: all its probability is on one token."""
        ids = [continuation(seq.tokens, seq.lookup.start, step) for seq in active]
        if all([seq.sampling.is_greedy for seq in active]):
            return ids, torch.empty(0)  # greedy rows are compared token by token
        ids_M = torch.tensor(ids, device=self._runner.pool.keys_LPZGC.device)
        return ids, torch.nn.functional.one_hot(ids_M, self._runner.config.vocab_size).float()

    def _compute(self, active: Sequence[SequenceState], subnet: int, step: int) -> tuple[list[int], Tensor]:
        """Let ``subnet`` decode one token."""
        chunks = [self._chunk(seq, (seq.drafts or seq.tokens)[-1:], subnet, step) for seq in active]
        rows = [seq.sampling for seq in active]
        logp_MV = self._process(self._runner.forward(chunks, False), [(seq, step) for seq in active])
        drawn_M = sample(logp_MV, rows, [chunk.end for chunk in chunks], Purpose.DRAFT, cache=self._cache)
        is_drawn = any([not row.is_greedy for row in rows])
        return drawn_M.tolist(), probabilities(logp_MV, rows, cache=self._cache) if is_drawn else logp_MV

    def _run(self, sequences: Sequence[SequenceState], subnet: int) -> list[Tensor]:
        """Let ``subnet`` decode in one call."""
        if not (active := [seq for seq in sequences if self._goes_on(seq, 0)]):
            return []
        ends = [seq.request.phases.thinking_end for seq in active]
        assert self._runner.native is not None
        drafted_NS, probs_SNV = self._runner.native.draft(
            [self._chunk(seq, seq.tokens[-1:], subnet, 0, seq.most_drafts) for seq in active],
            [seq.most_drafts for seq in active],
            [-1 if end is None else end for end in ends],
            self._end_ids,
            [seq.temperature or 0.0 for seq in active],
            [seq.seed_bits for seq in active],
        )
        for row, (seq, tokens) in enumerate(zip(active, drafted_NS.tolist(), strict=True)):
            seq.drafts = [token for token in tokens if token >= 0]
            seq.draft_rows = [(step, row) for step in range(len(seq.drafts))]
        num_steps = max([len(seq.drafts) for seq in active])
        return [torch.empty(0)] * num_steps if probs_SNV is None else list(probs_SNV[:num_steps])

    def verify(self, sequences: Sequence[SequenceState], want_routes: bool) -> Tensor:
        """Compute all drafts with their sequences' own Subnets; logits [M, V] for `decide`."""
        chunks = [self._chunk(seq, (seq.tokens[-1], *seq.drafts), seq.subnet, 0) for seq in sequences]
        return self._runner.forward(chunks, want_routes)

    def decide(
        self, sequences: Sequence[SequenceState], distributions: Sequence[Tensor], logits_MV: Tensor
    ) -> dict[SequenceState, Verdict]:
        """The next tokens of each sequence, from a row of logits for each of its drafts and one more.

        A sequence whose settings make that fail ends, and is left out.
        """
        try:
            return self._decide(sequences, distributions, logits_MV)
        except Exception:  # no row depends on its neighbours, so whichever it was fails alone, too
            rows = logits_MV.split([len(seq.drafts) + 1 for seq in sequences])
        found: dict[SequenceState, Verdict] = {}
        for seq, rows_MV in zip(sequences, rows, strict=True):
            has_settings = seq.temperature is None  # without any, it is the engine that is broken
            with seq.guarded() if has_settings else nullcontext():
                found |= self._decide([seq], distributions, rows_MV)
        return found

    def _decide(
        self, sequences: Sequence[SequenceState], distributions: Sequence[Tensor], logits_MV: Tensor
    ) -> dict[SequenceState, Verdict]:
        if not sequences:
            return {}
        is_compiled = self._runner.native is not None
        plain = [is_compiled and seq.temperature is not None for seq in sequences]
        if all(plain):
            return self._choose(sequences, distributions, logits_MV)
        if not any(plain):
            return self._judge(sequences, distributions, logits_MV)
        # apart: how a token is chosen depends on its own sequence's settings alone, whatever else is in the batch
        rows_of = torch.arange(len(logits_MV)).split([len(seq.drafts) + 1 for seq in sequences])
        found: dict[SequenceState, Verdict] = {}
        for is_plain in (True, False):
            places = [at for at, flag in enumerate(plain) if flag == is_plain]
            rows_M = torch.cat([rows_of[at] for at in places])
            found |= self._decide([sequences[at] for at in places], distributions, logits_MV[rows_M])
        return found

    def _choose(
        self, sequences: Sequence[SequenceState], distributions: Sequence[Tensor], logits_MV: Tensor
    ) -> dict[SequenceState, Verdict]:
        """By the kernels, where nothing but a temperature is set."""
        assert self._runner.native is not None
        sizes = [0 if table.numel() == 0 else table.stride(0) * table.element_size() for table in distributions]
        chosen = choose_tokens(
            self._runner.native.library,
            logits_MV,
            [len(seq.tokens) for seq in sequences],
            [seq.temperature or 0.0 for seq in sequences],
            [seq.seed_bits for seq in sequences],
            [seq.drafts for seq in sequences],
            [
                distributions[step].data_ptr() + row * sizes[step] if sizes[step] and seq.temperature else 0
                for seq in sequences
                for step, row in seq.draft_rows
            ],
        )
        found = zip(sequences, chosen.ids, chosen.logprobs, strict=True)
        return {seq: Verdict(ids, logprobs, None) for seq, ids, logprobs in found}

    def _judge(
        self, sequences: Sequence[SequenceState], distributions: Sequence[Tensor], logits_MV: Tensor
    ) -> dict[SequenceState, Verdict]:
        """By torch, whatever the settings."""
        places = [(seq, step) for seq in sequences for step in range(len(seq.drafts) + 1)]
        logp_MV = self._process(logits_MV, places)
        rows, positions = [seq.sampling for seq, _ in places], [len(seq.tokens) + step for seq, step in places]
        own_ids = sample(logp_MV, rows, positions, cache=self._cache).tolist()
        replaced = self._replacements(places, distributions, logp_MV) if distributions else {}
        tokens: list[int] = []
        stands: list[bool] = []
        for row, (seq, step) in enumerate(places):
            draft = seq.drafts[step] if step < len(seq.drafts) else None
            # a greedy row takes what it would have chosen; a sampled one has its verdict already
            tokens.append(own_ids[row] if draft is None or seq.sampling.is_greedy else replaced.get(row, draft))
            stands.append(tokens[row] == draft and row not in replaced)
        logprobs = logp_MV.gather(1, torch.tensor(tokens, device=logp_MV.device)[:, None])[:, 0].tolist()
        found: dict[SequenceState, Verdict] = {}
        first = 0
        for seq in sequences:
            end = stands.index(False, first) + 1  # a row without a draft never stands
            rows_MV = logp_MV[first:end] if seq.sampling.top_logprobs else None
            found[seq] = Verdict(tokens[first:end], logprobs[first:end], rows_MV)
            first += len(seq.drafts) + 1
        return found

    def _replacements(
        self, places: Sequence[tuple[SequenceState, int]], distributions: Sequence[Tensor], logp_MV: Tensor
    ) -> dict[int, int]:
        """Row -> the token instead of its draft, for every rejected draft of a sampled request."""
        found = [
            (row, seq, step)
            for row, (seq, step) in enumerate(places)
            if step < len(seq.drafts) and not seq.sampling.is_greedy
        ]
        if not found:
            return {}
        device = logp_MV.device
        rows_R = torch.tensor([row for row, _, _ in found], device=device)
        target_RV = probabilities(logp_MV[rows_R], [seq.sampling for _, seq, _ in found])
        drawn_from = [seq.draft_rows[step] for _, seq, step in found]
        draft_RV = torch.stack([distributions[step][row] for step, row in drawn_from])
        drafted_R = torch.tensor([seq.drafts[step] for _, seq, step in found], device=device)
        seeds_R = np.array([seq.seed_bits for _, seq, _ in found], dtype=np.uint64)
        positions_R = np.array([len(seq.tokens) + step for _, seq, step in found])
        is_kept_R = acceptance(target_RV, draft_RV, drafted_R).cpu().numpy() > uniform(
            seeds_R, positions_R, Purpose.ACCEPT
        )
        lost = np.flatnonzero(~is_kept_R)
        if not len(lost):
            return {}
        lost_R = torch.from_numpy(lost).to(device)
        other_RV = residual(target_RV[lost_R], draft_RV[lost_R]).log()
        settings = [found[at][1].sampling for at in lost]
        instead_R = sample(other_RV, settings, positions_R[lost], Purpose.RESIDUAL)
        return {found[at][0]: token for at, token in zip(lost, instead_R.tolist(), strict=True)}

    def _process(self, logits_MV: Tensor, places: Sequence[tuple[SequenceState, int]]) -> Tensor:
        """`process` for sequences after so many of their drafts."""
        return process(
            logits_MV,
            [seq.sampling for seq, _ in places],
            [_history(seq, num) for seq, num in places],
            [seq.num_prompt for seq, _ in places],
            [seq.draft_masks[num_drafts] if seq.draft_masks else None for seq, num_drafts in places],
            end_ids=self._end_ids,
            counts=[seq.counts for seq, _ in places],
            cache=self._cache,
        )

    def _can_draft(self, draft: int, target: int) -> bool:
        if (draft, target) not in self._able:
            self._able[draft, target] = can_draft(self._subnets[draft], self._subnets[target])
        return self._able[draft, target]

    def _goes_on(self, seq: SequenceState, step: int) -> bool:
        if step != len(seq.drafts) or step >= seq.most_drafts or seq.finish_reason is not None:
            return False  # it stopped at an earlier step, it ends here, or it has failed
        if seq.draft_masks and not seq.draft_masks[step].any():
            return False
        last = (seq.drafts or seq.tokens)[-1]
        # the token that ends thinking is computed by the thinking Subnet, what follows it by another
        return last not in self._end_ids and last != seq.request.phases.thinking_end

    def _chunk(self, seq: SequenceState, tokens: Sequence[int], subnet: int, ahead: int, reach: int = 0) -> Chunk:
        """``tokens``, so far ``ahead`` of what is computed, with pages for as many positions, or for ``reach``."""
        start = seq.num_computed + ahead
        end = start + (reach or len(tokens))
        num_pages = -(-end // self._page_size)
        assert num_pages <= len(seq.table), f"drafts up to {end} need {num_pages} pages, {len(seq.table)} are there"
        return Chunk(tuple(tokens), start, seq.table[:num_pages], subnet, len(tokens))


def _end_drafts(seq: SequenceState) -> None:
    """The grammar back where the drafts began."""
    if seq.grammar is not None:
        with seq.guarded():
            seq.grammar.rollback(len(seq.drafts))


def _history(seq: SequenceState, num_drafts: int) -> Sequence[int]:
    """Tokens before the one to choose. Copied only for settings that read them."""
    if num_drafts and (seq.sampling.has_penalties or seq.sampling.min_tokens):
        return [*seq.tokens, *seq.drafts[:num_drafts]]
    return seq.tokens
