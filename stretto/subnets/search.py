"""The search: the best Subnet within limits on memory, compute and measured latency.

Additive sensitivities predict the loss of candidates: of all candidates if there are few enough, else of those that NSGA-II
proposes along the front of predicted loss against cost. The best ones are evaluated, optionally a few of these are healed, and
one is chosen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence, Set

import numpy as np
import scipy
from pydantic import Field

from stretto.base.config import Config
from stretto.base.errors import UserError
from stretto.base.track import progress
from stretto.evals.loss import EvalBatch, evaluate_many
from stretto.model.spec import Subnet, check_subnet
from stretto.model.transformer import Transformer
from stretto.subnets.candidate import Candidate, Limits, Scorer, Third, pareto_front, require_feasible
from stretto.subnets.evolution import evolve, score_grids
from stretto.subnets.latency import LatencyTable, Workload, require_match
from stretto.subnets.sensitivity import Sensitivities, measure_sensitivities
from stretto.subnets.space import SearchSpace

ENUMERATED = 20_000
"""Spaces of at most this many choices are predicted completely, in seconds; larger ones are searched by evolution."""


class SearchOptions(Config):
    """Effort of a search."""

    enumerated: int = Field(default=ENUMERATED, ge=0)
    """Spaces of at most this many choices are predicted completely."""
    num_trials: int = Field(default=1000, ge=0)
    """Proposals of NSGA-II in a larger space. They are only predicted, so thousands take seconds."""
    population: int = Field(default=40, ge=2)
    num_evaluated: int = Field(default=16, gt=0)
    """Number of candidates within the limits, best predicted first, that are evaluated."""
    num_nested: int = Field(default=4, ge=0)
    """Number of further evaluated candidates with layers of the nested order, best predicted first: training drew layers in that order,
    which the additive prediction ignores.
    """
    num_spread: int = Field(default=8, ge=0)
    """Number of evaluated candidates spread along the predicted front, within the limits or not. They are needed for the figure of the
    front and for a meaningful rank correlation.
    """
    num_healed: int = Field(default=3, ge=0)
    """Number of evaluated candidates, best first, that are healed if healing is requested."""
    each_layer: bool = False
    """Also measure numbers of experts and k layer by layer; always done if numbers may differ by layer."""
    seed: int = Field(default=0, ge=0, lt=2**32)


class Correlations(Config):
    """Spearman rank correlations; None for fewer than three candidates or if all values are equal."""

    predicted_true: float | None
    """Predicted and evaluated loss, all evaluated candidates."""
    predicted_true_within: float | None
    """The same for candidates within the limits, from which the choice is made."""
    before_after_healing: float | None
    """Evaluated loss before and after healing."""


class SearchResult(Config):
    """Result of a search. The caller writes it to ``search.json``."""

    limits: Limits
    space: SearchSpace
    options: SearchOptions
    third: Third
    workload: Workload | None
    """Workload of ``latency_ms``; None without a latency table."""
    sensitivities: Sensitivities
    num_predicted: int
    """Number of different candidates with a predicted loss."""
    is_complete: bool = False
    """Whether all choices of the space were predicted."""
    num_tokens: int
    """Held-out tokens of each evaluation."""
    candidates: tuple[Candidate, ...]
    """All evaluated ones: the full network first, then by loss."""
    front: tuple[int, ...]
    """Indices in ``candidates`` of the Pareto front in loss, total and active parameters (or latency)."""
    chosen: Candidate
    """Lowest loss within the limits; after healing, if any were healed."""
    correlations: Correlations
    wall_s: float

    def label(self, subnet: Subnet) -> str:
        """`Subnet.label`; after a search over any layers, with the numbers of the dropped ones: ``5 layers (without 3), …``."""
        layers, comma, widths = subnet.label().partition(",")
        dropped = sorted(set(self.candidates[0].subnet.layers) - set(subnet.layers))
        without = f" (without {', '.join(map(str, dropped))})" if dropped and self.space.layers == "free" else ""
        return f"{layers}{without}{comma}{widths}"

    def summary(self) -> list[str]:
        """Lines for a console."""
        best = self.chosen
        parts = [self.label(best.subnet), f"total {best.total_share:.1%}", f"active {best.active_share:.1%}"]
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
            f"{'all ' * self.is_complete}{self.num_predicted:,} candidates predicted, {len(self.candidates)} evaluated ({within} within the limits)",
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
    heal: Callable[[Subnet], float] | None = None,
) -> SearchResult:
    """Find the Subnet of lowest held-out loss within ``limits``.

    Args:
        batches: held-out tokens; every evaluation uses all of them.
        space: the choices; None: `SearchSpace.of` the network.
        presets: Subnets that are always evaluated, by name (the anchors, the corner).
        table: latency table of this machine; its first workload is used. Required by a limit on latency.
        heal: heals a Subnet for a short while and returns its held-out loss; the best few are compared by it.

    Raises:
        UserError: nothing fits the limits, or a limit on latency without a valid table.
    """
    start_s = time.perf_counter()
    config, options = model.config, options or SearchOptions()
    space = space or SearchSpace.of(config)
    if table is not None:
        require_match(table, model, "latency table")
    elif limits.max_latency_ms is not None:
        raise UserError("--max-latency-ms: there is no latency table; run `stretto latency` first")
    workload = table.timings[0].workload if table else None
    scorer = Scorer(config, table, workload)
    # sizes need no evaluation, so impossible limits are refused at once
    require_feasible([scorer.sized(subnet) for subnet in space.grid(config)], limits)
    each_layer = options.each_layer or space.widths == "per_layer"
    sensitivities = measure_sensitivities(model, batches, space.experts, space.top_k, each_layer=each_layer)
    third: Third = "active" if table is None else "latency"
    scorer.sensitivities = sensitivities
    for name, subnet in {"full": config.full(), **(presets or {})}.items():
        scorer.score(check_subnet(config, subnet), name)
    is_complete = space.num_choices(config) <= options.enumerated
    if is_complete:
        with progress("predict all sizes", space.num_choices(config)) as advance:
            for subnet in space.every(config):
                scorer.score(subnet)
                advance(1)
    else:
        score_grids(scorer, space)
        evolve(
            scorer,
            space,
            limits,
            third,
            num_trials=options.num_trials,
            population=options.population,
            seed=options.seed,
        )
    candidates, num_tokens = _evaluate(
        model, _shortlist(scorer.all(), set(space.grid(config)), limits, options, third), batches
    )
    if heal is not None:
        candidates = _heal(candidates, limits, options.num_healed, heal)
    within = [candidate for candidate in candidates if candidate.fits(limits)]
    healed = [candidate for candidate in within if candidate.healed_nll is not None]
    return SearchResult(
        limits=limits,
        space=space,
        options=options,
        third=third,
        workload=workload,
        sensitivities=sensitivities,
        num_predicted=len(scorer.all()),
        is_complete=is_complete,
        num_tokens=num_tokens,
        candidates=tuple(candidates),
        front=pareto_front([candidate.objectives(third) for candidate in candidates]),
        chosen=min(healed, key=_healed_nll) if healed else min(within, key=_nll),
        correlations=Correlations(
            predicted_true=spearman([c.predicted_nll for c in candidates], [_nll(c) for c in candidates]),
            predicted_true_within=spearman([c.predicted_nll for c in within], [_nll(c) for c in within]),
            before_after_healing=spearman([_nll(c) for c in healed], [_healed_nll(c) for c in healed]),
        ),
        wall_s=time.perf_counter() - start_s,
    )


def spearman(left: Sequence[float], right: Sequence[float]) -> float | None:
    """Rank correlation; ties get their mean rank. None for fewer than three pairs, or if one side is constant."""
    assert len(left) == len(right), f"{len(left)} against {len(right)} values"
    if len(left) < 3 or len(set(left)) == 1 or len(set(right)) == 1:
        return None
    return float(scipy.stats.spearmanr(left, right).statistic)


def _shortlist(
    scored: Sequence[Candidate], nested: Set[Subnet], limits: Limits, options: SearchOptions, third: Third
) -> list[Candidate]:
    """Candidates to evaluate: the presets, the best predicted ones within the limits, and some along the front."""
    presets = [candidate for candidate in scored if candidate.name is not None]
    best = sorted((candidate for candidate in scored if candidate.fits(limits)), key=lambda c: c.predicted_nll)
    best_nested = [candidate for candidate in best if candidate.subnet in nested]
    front = [scored[index] for index in pareto_front([candidate.objectives(third) for candidate in scored])]
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
    """The candidates with evaluated losses, the full network first, then by loss; and the number of tokens of an evaluation."""
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
    """The same candidates; the best few within the limits get their loss after healing."""
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


def _nll(candidate: Candidate) -> float:
    assert candidate.nll is not None, f"{candidate.subnet.label()} was not evaluated"
    return candidate.nll


def _healed_nll(candidate: Candidate) -> float:
    assert candidate.healed_nll is not None, f"{candidate.subnet.label()} was not healed"
    return candidate.healed_nll


def _shown(correlation: float | None) -> str:
    return "not ranked" if correlation is None else f"{correlation:.2f}"
