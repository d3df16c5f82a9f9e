"""The search: the best Subnet within limits on memory, compute and measured latency at once.

Additive sensitivities predict the loss of every candidate; NSGA-II spreads candidates along the front of predicted loss
against cost; the best are evaluated truly, a few may be healed, and only then one is chosen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence, Set

import numpy as np

from stretto.base.config import Config
from stretto.base.errors import UserError
from stretto.base.track import progress
from stretto.evals.loss import EvalBatch, evaluate_many
from stretto.model.spec import Subnet, check_subnet
from stretto.model.transformer import Transformer
from stretto.search.evolve import Scorer, evolve, score_grids
from stretto.search.latency import LatencyTable, Workload, require_match
from stretto.search.rank import Sensitivities, measure_sensitivities
from stretto.search.space import Candidate, Limits, SearchSpace, Third, require_feasible


class SearchOptions(Config):
    """How hard to look."""

    num_trials: int = 1000
    """Candidates that NSGA-II proposes; only predicted, so thousands take seconds."""
    population: int = 40
    num_evaluated: int = 16
    """Best predicted candidates within the limits that are evaluated truly."""
    num_nested: int = 4
    """Best predicted ones of the nested order within the limits that are evaluated beside those: training drew layers in
    that order, which an additive prediction does not know."""
    num_spread: int = 8
    """Candidates along the whole predicted front, within the limits or not, that are evaluated too: they make the
    picture of the front and the rank correlation mean something."""
    num_healed: int = 3
    """Best evaluated candidates that are healed, where healing is given."""
    each_layer: bool = False
    """Measure expert counts and k layer by layer as well; needed where counts may differ by layer."""
    seed: int = 0


class Correlations(Config):
    """Spearman rank correlations; None where fewer than three candidates, or only equal ones, can be ranked."""

    predicted_true: float | None
    """Predicted against evaluated loss, all evaluated candidates."""
    predicted_true_within: float | None
    """The same among those within the limits: the ones the choice is made from."""
    before_after_healing: float | None
    """Evaluated loss against loss after healing."""


class SearchResult(Config):
    """What a search found; the caller writes it to ``search.json``."""

    limits: Limits
    space: SearchSpace
    options: SearchOptions
    third: Third
    workload: Workload | None
    """What ``latency_ms`` is a step of; None without a latency table."""
    sensitivities: Sensitivities
    num_predicted: int
    """Different candidates whose loss was predicted."""
    num_tokens: int
    """Held-out tokens of each evaluation."""
    candidates: tuple[Candidate, ...]
    """All evaluated ones, the full network first, then by loss."""
    front: tuple[int, ...]
    """Indices in ``candidates`` of those that no other beats in loss, total and active parameters (or latency)."""
    chosen: Candidate
    """Lowest loss within the limits: after healing if any were healed."""
    correlations: Correlations
    wall_s: float

    def summary(self) -> list[str]:
        """Lines for a console."""
        best = self.chosen
        parts = [best.subnet.label(), f"total {best.total_share:.1%}", f"active {best.active_share:.1%}"]
        if best.latency_ms is not None:
            parts.append(f"{best.latency_ms:.3g} ms a step")
        assert best.nll is not None
        loss = f"loss {best.nll:.4f} (full {self.sensitivities.full_nll:.4f})"
        if best.healed_nll is not None:
            loss += f", healed {best.healed_nll:.4f}"
        within = sum(candidate.fits(self.limits) for candidate in self.candidates)
        rank = self.correlations
        return [
            f"chosen: {', '.join(parts)}, {loss}",
            f"{self.num_predicted:,} candidates predicted, {len(self.candidates)} evaluated ({within} within the limits)",
            f"rank correlation: predicted and evaluated {_shown(rank.predicted_true)}"
            f" (within the limits {_shown(rank.predicted_true_within)}),"
            f" before and after healing {_shown(rank.before_after_healing)}",
        ]


def search(
    model: Transformer,
    batches: Sequence[EvalBatch],
    limits: Limits,
    *,
    space: SearchSpace | None = None,
    options: SearchOptions | None = None,
    presets: Mapping[str, Subnet] | None = None,
    table: LatencyTable | None = None,
    workload: Workload | None = None,
    heal: Callable[[Subnet], float] | None = None,
    sensitivities: Sensitivities | None = None,
) -> SearchResult:
    """Find the Subnet of lowest held-out loss within ``limits``.

    Args:
        batches: held-out tokens; every evaluation uses all of them.
        space: the choices; None: `SearchSpace.of` the network.
        presets: Subnets that are always evaluated, by name (the anchors, the corner).
        table: latency table of this machine; required by a limit on latency.
        workload: which of the table's workloads latency is meant for; None: its first.
        heal: heals a Subnet briefly and returns its held-out loss then; the best few are chosen among by it.
        sensitivities: measured before on these batches; None measures them.

    Raises:
        UserError: nothing fits the limits, or a limit on latency without a table that holds here.
    """
    start = time.perf_counter()
    config, options = model.config, options or SearchOptions()
    space = space or SearchSpace.of(config)
    workload = _workload(model, limits, table, workload)
    scorer = Scorer(config, table, workload)
    # sizes are known without any evaluation: refuse the impossible before minutes are spent
    require_feasible([scorer.sized(subnet) for subnet in space.grid(config)], limits)
    if sensitivities is None:
        each_layer = options.each_layer or space.widths == "per_layer"
        sensitivities = measure_sensitivities(model, batches, space.experts, space.top_k, each_layer=each_layer)
    third: Third = "active" if table is None else "latency"
    scorer.sensitivities = sensitivities
    for name, subnet in {"full": config.full(), **(presets or {})}.items():
        scorer.score(check_subnet(config, subnet), name)
    score_grids(scorer, space)
    evolve(
        scorer, space, limits, third, num_trials=options.num_trials, population=options.population, seed=options.seed
    )
    candidates, num_tokens = _evaluate(
        model, _shortlist(scorer.all(), set(space.grid(config)), limits, options, third), batches
    )
    if heal is not None:
        candidates = _heal(candidates, limits, options.num_healed, heal)
    return SearchResult(
        limits=limits,
        space=space,
        options=options,
        third=third,
        workload=workload,
        sensitivities=sensitivities,
        num_predicted=len(scorer.all()),
        num_tokens=num_tokens,
        candidates=tuple(candidates),
        front=pareto_front([candidate.objectives(third) for candidate in candidates]),
        chosen=_choose(candidates, limits),
        correlations=_correlations(candidates, limits),
        wall_s=time.perf_counter() - start,
    )


def _workload(
    model: Transformer, limits: Limits, table: LatencyTable | None, workload: Workload | None
) -> Workload | None:
    """What latency means in this search; None without a table."""
    if table is not None:
        require_match(table, model, "latency table")
        return workload or table.timings[0].workload
    if limits.max_latency_ms is not None:
        raise UserError("--max-latency-ms: there is no latency table; run `stretto latency` first")
    return None


def _choose(candidates: Sequence[Candidate], limits: Limits) -> Candidate:
    """The lowest loss within the limits; among the healed, if there are any, after healing."""
    within = [candidate for candidate in candidates if candidate.fits(limits)]
    healed = [candidate for candidate in within if candidate.healed_nll is not None]
    return min(healed, key=_healed_nll) if healed else min(within, key=_nll)


def _correlations(candidates: Sequence[Candidate], limits: Limits) -> Correlations:
    within = [candidate for candidate in candidates if candidate.fits(limits)]
    healed = [candidate for candidate in within if candidate.healed_nll is not None]
    return Correlations(
        predicted_true=spearman([c.predicted_nll for c in candidates], [_nll(c) for c in candidates]),
        predicted_true_within=spearman([c.predicted_nll for c in within], [_nll(c) for c in within]),
        before_after_healing=spearman([_nll(c) for c in healed], [_healed_nll(c) for c in healed]),
    )


def spearman(left: Sequence[float], right: Sequence[float]) -> float | None:
    """Rank correlation, ties sharing their mean rank; None for fewer than three pairs or where one side is constant."""
    assert len(left) == len(right), f"{len(left)} against {len(right)} values"
    if len(left) < 3:
        return None
    ranks = [_ranks(np.asarray(values, dtype=np.float64)) for values in (left, right)]
    if any(np.ptp(rank) == 0 for rank in ranks):
        return None
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def pareto_front(points: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """Indices of the points that no other point beats (nowhere larger, somewhere smaller), in order."""
    if not points:
        return ()
    values = np.asarray(points, dtype=np.float64)
    front = []
    for index, own in enumerate(values):
        beaten = ((values <= own).all(axis=1) & (values < own).any(axis=1)).any()
        if not beaten:
            front.append(index)
    return tuple(front)


def _shortlist(
    known: Sequence[Candidate], nested: Set[Subnet], limits: Limits, options: SearchOptions, third: Third
) -> list[Candidate]:
    """Which candidates are evaluated truly: the presets, the best predicted within the limits, a spread of the front."""
    presets = [candidate for candidate in known if candidate.name is not None]
    best = sorted((candidate for candidate in known if candidate.fits(limits)), key=lambda c: c.predicted_nll)
    best_nested = [candidate for candidate in best if candidate.subnet in nested]
    front = [known[index] for index in pareto_front([candidate.objectives(third) for candidate in known])]
    front.sort(key=lambda candidate: candidate.total_share)
    places = np.linspace(0, len(front) - 1, min(options.num_spread, len(front))).round().astype(int)
    picked = [
        *presets,
        *best[: options.num_evaluated],
        *best_nested[: options.num_nested],
        *(front[place] for place in places),
    ]
    return list({candidate.subnet: candidate for candidate in picked}.values())


def _evaluate(
    model: Transformer, picked: Sequence[Candidate], batches: Sequence[EvalBatch]
) -> tuple[list[Candidate], int]:
    """The candidates with their true losses, the full network first, then by loss; and the tokens of an evaluation."""
    subnets = [candidate.subnet for candidate in picked]
    with progress("evaluate candidates", len(subnets) * len(batches)) as advance:
        reports = evaluate_many(model, subnets, batches, against_full=True, advance=advance)
    evaluated = [
        candidate.replace(nll=report.nll, kl=report.kl) for candidate, report in zip(picked, reports, strict=True)
    ]
    evaluated.sort(key=lambda candidate: (candidate.name != "full", _nll(candidate)))
    return evaluated, reports[0].num_tokens


def _heal(
    candidates: list[Candidate], limits: Limits, num_healed: int, heal: Callable[[Subnet], float]
) -> list[Candidate]:
    """The same candidates, the best few within the limits with their loss after healing."""
    within = sorted((candidate for candidate in candidates if candidate.fits(limits)), key=_nll)[:num_healed]
    healed = {}
    with progress("heal candidates", len(within)) as advance:
        for candidate in within:
            healed[candidate.subnet] = heal(candidate.subnet)
            advance(1)
    return [
        candidate.replace(healed_nll=healed[candidate.subnet]) if candidate.subnet in healed else candidate
        for candidate in candidates
    ]


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 0, equal values sharing their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts + 1) / 2)[inverse]


def _nll(candidate: Candidate) -> float:
    assert candidate.nll is not None, f"{candidate.subnet.label()} was not evaluated"
    return candidate.nll


def _healed_nll(candidate: Candidate) -> float:
    assert candidate.healed_nll is not None, f"{candidate.subnet.label()} was not healed"
    return candidate.healed_nll


def _shown(correlation: float | None) -> str:
    return "not ranked" if correlation is None else f"{correlation:.2f}"
