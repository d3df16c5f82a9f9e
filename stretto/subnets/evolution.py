"""Proposals for spaces with too many choices to predict them all: equal widths first, then NSGA-II."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import optuna

from stretto.base.track import progress
from stretto.model.spec import ModelConfig, Subnet
from stretto.subnets.candidate import Limits, Scorer, Third
from stretto.subnets.space import SearchSpace


def score_grids(scorer: Scorer, space: SearchSpace) -> None:
    """Score all Subnets of equal widths that drop layers in the nested order and, if the space allows it, by sensitivity.

    Among Subnets with equal widths, dropping the least sensitive layers is optimal for an additive predictor. The evolution starts
    from these.
    """
    sensitivities = scorer.sensitivities
    assert sensitivities is not None, "sensitivities must be measured before scoring"
    for subnet in space.grid(scorer.config):
        scorer.score(subnet)
    if space.layers == "free":
        by_cost = sorted(space.droppable, key=lambda layer: -sensitivities.drop[layer])
        for subnet in space.grid(scorer.config, by_cost):
            scorer.score(subnet)


def evolve(
    scorer: Scorer, space: SearchSpace, limits: Limits, third: Third, *, num_trials: int, population: int, seed: int
) -> None:
    """Score ``num_trials`` proposals of NSGA-II. The first generation consists of the best scored candidates.

    The same seed gives the same proposals.
    """
    config = scorer.config
    start = sorted(scorer.all(), key=lambda candidate: (not candidate.fits(limits), candidate.predicted_nll))
    with _quiet_optuna():
        sampler = optuna.samplers.NSGAIISampler(population_size=population, seed=seed)
        study = optuna.create_study(directions=["minimize"] * 3, sampler=sampler)
        for candidate in start[:population]:
            genes = _encode(config, space, candidate.subnet)
            if genes is not None:
                study.enqueue_trial(genes)
        with progress("search", num_trials) as advance:
            for _ in range(num_trials):
                trial = study.ask()
                candidate = scorer.score(_decode(config, space, trial))
                for name, over in candidate.excess(limits).items():
                    trial.set_constraint(name, over)
                study.tell(trial, candidate.objectives(third))
                advance(1)


def _decode(config: ModelConfig, space: SearchSpace, trial: optuna.Trial) -> Subnet:
    """The Subnet of a trial. Every gene is drawn in every trial, since crossover needs a fixed set."""
    if space.layers == "nested":
        drops = space.drops(config.layer_ranking)
        dropped = drops[trial.suggest_int("num_dropped", 0, len(drops) - 1)]
    else:
        dropped = tuple(layer for layer in space.droppable if trial.suggest_int(f"drop_{layer}", 0, 1))
    last, rows = len(space.experts) - 1, range(config.num_moe_layers)
    genes = ["experts" if space.widths == "uniform" else f"experts_{row}" for row in rows]
    drawn = {gene: space.experts[trial.suggest_int(gene, 0, last)] for gene in dict.fromkeys(genes)}
    experts = [drawn[gene] for gene in genes]
    top_k = space.top_k[trial.suggest_int("top_k", 0, len(space.top_k) - 1)]
    return space.subnet(config, dropped, experts, top_k)


def _encode(config: ModelConfig, space: SearchSpace, subnet: Subnet) -> dict[str, int] | None:
    """The genes that `_decode` maps to ``subnet``; None if the space does not contain it."""
    dropped = tuple(layer for layer in range(config.num_layers) if layer not in subnet.layers)
    if not subnet.experts or not set(subnet.experts) <= set(space.experts) or not set(subnet.top_k) <= set(space.top_k):
        return None
    genes = {"top_k": space.top_k.index(subnet.top_k[0])}
    if space.layers == "free":
        genes |= {f"drop_{layer}": int(layer in dropped) for layer in space.droppable}
    elif dropped in space.drops(config.layer_ranking):
        genes["num_dropped"] = len(dropped)
    else:
        return None
    if space.widths == "uniform":
        genes["experts"] = space.experts.index(subnet.experts[0])
    else:
        kept = [row for row, layer in enumerate(config.moe_layers) if layer not in dropped]
        of_row = dict(zip(kept, subnet.experts, strict=True))
        rows = range(config.num_moe_layers)
        genes |= {f"experts_{row}": space.experts.index(of_row.get(row, subnet.experts[0])) for row in rows}
    return genes


@contextmanager
def _quiet_optuna() -> Iterator[None]:
    """Suppress the messages of optuna, which would appear between progress bars."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)
