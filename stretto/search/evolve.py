"""NSGA-II over Subnets: candidates spread along the front of predicted loss, total parameters and a third cost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import optuna

from stretto.base.track import progress
from stretto.model.spec import ModelConfig, Subnet
from stretto.search.latency import LatencyTable, Workload
from stretto.search.rank import Sensitivities
from stretto.search.space import Candidate, Limits, SearchSpace, Sizes, Third


class Scorer:
    """Sizes and predicts candidates; remembers each Subnet once."""

    def __init__(self, config: ModelConfig, table: LatencyTable | None, workload: Workload | None):
        self.config = config
        self.sensitivities: Sensitivities | None = None
        """Set once measured; sizes need none."""
        self._table, self._workload = table, workload
        self._sizes = Sizes(config)
        self._known: dict[Subnet, Candidate] = {}

    def sized(self, subnet: Subnet, predicted_nll: float = float("nan"), name: str | None = None) -> Candidate:
        """``subnet`` with its sizes and its latency."""
        latency_ms = None
        if self._table is not None:
            assert self._workload is not None
            latency_ms = self._table.predict_ms(self.config, subnet, self._workload)
        return self._sizes.candidate(subnet, predicted_nll, latency_ms, name)

    def score(self, subnet: Subnet, name: str | None = None) -> Candidate:
        """``subnet`` with its sizes and its predicted loss; ``name`` holds only where it is new."""
        if subnet not in self._known:
            assert self.sensitivities is not None, "scored before sensitivities were measured"
            self._known[subnet] = self.sized(subnet, self.sensitivities.predict(self.config, subnet), name)
        return self._known[subnet]

    def all(self) -> list[Candidate]:
        """Every candidate scored so far, oldest first."""
        return list(self._known.values())


def score_grids(scorer: Scorer, space: SearchSpace) -> None:
    """Score all Subnets of equal widths that drop layers in the nested order or, where the space lets them, by cost.

    While only layers are chosen and widths are equal, dropping the cheapest is the best that an additive predictor
    can see; the search goes on from there.
    """
    sensitivities = scorer.sensitivities
    assert sensitivities is not None, "scored before sensitivities were measured"
    for subnet in space.grid(scorer.config):
        scorer.score(subnet)
    if space.layers == "free":
        by_cost = sorted(space.droppable, key=lambda layer: -sensitivities.drop[layer])
        for subnet in space.grid(scorer.config, by_cost):
            scorer.score(subnet)


def evolve(
    scorer: Scorer,
    space: SearchSpace,
    limits: Limits,
    third: Third,
    *,
    num_trials: int,
    population: int,
    seed: int,
) -> None:
    """Score ``num_trials`` proposals of NSGA-II; the first generation is the best of what ``scorer`` knows already.

    The same seed proposes the same candidates.
    """
    config = scorer.config
    start = sorted(scorer.all(), key=lambda one: (not one.fits(limits), one.predicted_nll))
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
    """The Subnet a trial stands for. Every gene is drawn in every trial, since crossover needs a fixed set of them."""
    if space.layers == "nested":
        drops = space.drops(config.layer_ranking)
        dropped = drops[trial.suggest_int("num_dropped", 0, len(drops) - 1)]
    else:
        dropped = tuple(layer for layer in space.droppable if trial.suggest_int(f"drop_{layer}", 0, 1))
    last = len(space.experts) - 1
    if space.widths == "uniform":
        experts = [space.experts[trial.suggest_int("experts", 0, last)]] * config.num_moe_layers
    else:
        rows = range(config.num_moe_layers)
        experts = [space.experts[trial.suggest_int(f"experts_{row}", 0, last)] for row in rows]
    top_k = space.top_k[trial.suggest_int("top_k", 0, len(space.top_k) - 1)]
    return space.subnet(config, dropped, experts, top_k)


def _encode(config: ModelConfig, space: SearchSpace, subnet: Subnet) -> dict[str, int] | None:
    """The genes `_decode` turns into ``subnet``; None where the space does not hold it."""
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
    """optuna announces each study on stderr, in the middle of progress bars."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)
