"""The search: the best Subnet within limits on memory, compute and measured latency at once.

Additive sensitivities predict the loss of every candidate: of all there are while they can be counted, else of those
that NSGA-II spreads along the front of predicted loss against cost. The best are evaluated truly, a few may be healed, and
only then one is chosen.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Literal, Self

import numpy as np
import optuna
import scipy
from pydantic import Field, model_validator

from stretto.base.config import Config
from stretto.base.errors import UserError
from stretto.base.track import progress
from stretto.evals.loss import EvalBatch, evaluate_many, without_layers
from stretto.model.spec import ModelConfig, Subnet, check_subnet, count, droppable_layers, fixed_layers
from stretto.model.transformer import Transformer
from stretto.ops.tuning import rough_products
from stretto.subnets.latency import LatencyTable, Workload, require_match


class Sensitivities(Config):
    """Increase of the held-out loss over the full network's (nats per token) for one change at a time."""

    full_nll: float
    """Loss of the full network, nats per token."""
    drop: dict[int, float]
    """By layer left out alone."""
    depth: dict[int, float]
    """By number of layers kept, in the nested order."""
    experts: dict[int, float]
    """By number of experts kept in all MoE layers."""
    top_k: dict[int, float]
    """By k of all MoE layers."""
    experts_by_row: dict[int, dict[int, float]] = Field(default_factory=dict)
    """By MoE row and experts kept in that layer alone; empty where it was not asked for."""
    top_k_by_row: dict[int, dict[int, float]] = Field(default_factory=dict)
    """By MoE row and k of that layer alone; empty where it was not asked for."""

    def predict(self, config: ModelConfig, subnet: Subnet) -> float:
        """Held-out loss of ``subnet`` if the changes added up.

        A choice that was measured on its own axis is met exactly; another choice of layers, or counts that differ by
        layer, move away from it by the differences of the single-layer measurements.
        """
        kept = set(subnet.layers)
        nested = set(config.layer_ranking[: len(kept)])
        depth = _interpolate(self.depth, len(kept))
        depth += sum(self.drop.get(layer, 0.0) for layer in nested - kept)
        depth -= sum(self.drop.get(layer, 0.0) for layer in kept - nested)
        rows, num_rows = config.moe_rows(kept), config.num_moe_layers
        experts = _axis(self.experts, self.experts_by_row, rows, subnet.experts, num_rows)
        return self.full_nll + depth + experts + _axis(self.top_k, self.top_k_by_row, rows, subnet.top_k, num_rows)


def measure_sensitivities(
    model: Transformer,
    batches: Sequence[EvalBatch],
    experts: Sequence[int],
    top_ks: Sequence[int],
    *,
    each_layer: bool = False,
) -> Sensitivities:
    """Measure every layer left out, the given expert counts and k, and depths of the nested order: all, or of many an even choice.

    Args:
        experts, top_ks: the counts to measure; the full ones are known to cost nothing.
        each_layer: also measure them in one MoE layer at a time, which takes as many times longer.
    """
    config = model.config
    subnets: dict[tuple[str, int, int], Subnet] = {("full", 0, 0): config.full()}
    for layer in droppable_layers(config):
        subnets["drop", layer, 0] = without_layers(config, {layer})
    depths = range(len(fixed_layers(config.num_layers)), config.num_layers)
    for place in np.linspace(0, len(depths) - 1, min(len(depths), DEPTHS)).round().astype(int):
        subnets["depth", depths[place], 0] = config.subnet(depth=depths[place])
    rows = range(config.num_moe_layers)
    everywhere = set(rows)
    for name, counts in (("experts", experts), ("top_k", top_ks)):
        for num in counts:
            subnets[name, num, 0] = narrowed(config, name, everywhere, num)
            if each_layer:
                subnets |= {(f"{name}_by_row", num, row): narrowed(config, name, {row}, num) for row in rows}
    rough = rough_products(model.head_VD.device, config.hidden_size)
    with progress("sensitivities", len(subnets) * len(batches)) as advance, rough:
        reports = evaluate_many(model, list(subnets.values()), batches, advance=advance)
    full_nll = reports[0].nll
    increase = {key: report.nll - full_nll for key, report in zip(subnets, reports, strict=True)}

    def axis(name: str, full: Mapping[int, float]) -> dict[int, float]:
        return {**full, **{num: value for (axis, num, _), value in increase.items() if axis == name}}

    def by_row(name: str, full: Sequence[int]) -> dict[int, dict[int, float]]:
        found = {(num, row): value for (axis, num, row), value in increase.items() if axis == name}
        return {
            row: {full[row]: 0.0} | {num: v for (num, at), v in found.items() if at == row} for row in rows if found
        }

    return Sensitivities(
        full_nll=full_nll,
        drop=axis("drop", {}),
        depth=axis("depth", {config.num_layers: 0.0}),
        experts=axis("experts", {config.num_experts: 0.0}),
        top_k=axis("top_k", {config.top_k: 0.0}),
        experts_by_row=by_row("experts_by_row", config.experts_by_layer),
        top_k_by_row=by_row("top_k_by_row", config.top_k_by_layer),
    )


def narrowed(config: ModelConfig, axis: str, rows: set[int], num: int) -> Subnet:
    """The full network with ``num`` experts (or top-``num``) in the MoE layers ``rows``; k never exceeds what is to choose from."""
    full = config.full()
    counts = {
        name: tuple(min(num, value) if name == axis and row in rows else value for row, value in enumerate(values))
        for name, values in (("experts", full.experts), ("top_k", full.top_k))
    }
    top_k = tuple(min(config.choosable(kept), k) for kept, k in zip(counts["experts"], counts["top_k"], strict=True))
    return Subnet(layers=full.layers, experts=counts["experts"], top_k=top_k)


def _axis(
    uniform: Mapping[int, float],
    by_row: Mapping[int, Mapping[int, float]],
    rows: Sequence[int],
    counts: Sequence[int],
    num_rows: int,
) -> float:
    """Each kept layer's even share of the uniform cost, plus how much that layer differs from the average layer."""
    total = 0.0
    for row, num in zip(rows, counts, strict=True):
        total += _interpolate(uniform, num) / num_rows
        if by_row:
            own = {at: _interpolate(values, num) for at, values in by_row.items()}
            total += own[row] - sum(own.values()) / len(own)
    return total


def _interpolate(values: Mapping[int, float], at: int) -> float:
    if at in values:
        return values[at]
    known = sorted(values)
    return float(np.interp(at, known, [values[num] for num in known]))


DEPTHS = 8
"""Measured at most; losses between them are interpolated, as a deep network's hardly bend from one layer to the next (ours)."""
ENUMERATED = 20_000
"""Spaces of at most so many choices are predicted whole, in seconds; larger ones are evolved."""
Third = Literal["active", "latency"]
"""The third objective beside loss and total parameters."""


class Limits(Config):
    """What a chosen Subnet must stay within, all at once; None sets no limit."""

    max_total: float | None = Field(default=None, gt=0, le=1)
    """Total parameters (memory) over the full network's."""
    max_active: float | None = Field(default=None, gt=0, le=1)
    """Active parameters (compute) over the full network's."""
    max_latency_ms: float | None = Field(default=None, gt=0)
    """Milliseconds a step on the machine of the latency table."""

    def asked(self) -> dict[str, float]:
        """Those that are set, as ``total``, ``active`` and ``latency``."""
        limits = {"total": self.max_total, "active": self.max_active, "latency": self.max_latency_ms}
        return {name: limit for name, limit in limits.items() if limit is not None}


class Candidate(Config):
    """One Subnet with what it costs and what is known of its loss."""

    subnet: Subnet
    name: str | None = None
    """Its preset's name, if it is one."""
    total_params: int
    active_params: int
    total_share: float
    """Of the full network's total parameters."""
    active_share: float
    """Of the full network's active parameters."""
    latency_ms: float | None = None
    """Predicted by the latency table, milliseconds a step; None without a table."""
    predicted_nll: float
    """Held-out loss if sensitivities added up, nats per token."""
    nll: float | None = None
    """Held-out loss as evaluated; None if it was only predicted."""
    kl: float | None = None
    """KL(full ‖ Subnet) on the same tokens, nats per token."""
    healed_nll: float | None = None
    """Held-out loss after short healing; None if it was not healed."""

    def excess(self, limits: Limits) -> dict[str, float]:
        """By limit that is set: how far above it, as a share of it; 0 or less fits."""
        costs = {"total": self.total_share, "active": self.active_share, "latency": self.latency_ms}
        found = {}
        for name, limit in limits.asked().items():
            cost = costs[name]
            assert cost is not None, f"a limit on {name}, and nothing known about it"
            found[name] = (cost - limit) / limit  # a difference of floats has the right sign, a ratio less 1 may not
        return found

    def fits(self, limits: Limits) -> bool:
        return all(over <= 0 for over in self.excess(limits).values())

    def objectives(self, third: Third) -> tuple[float, float, float]:
        """Best known loss before healing, total share, and active share or latency; all the smaller the better."""
        loss = self.predicted_nll if self.nll is None else self.nll
        last = self.latency_ms if third == "latency" else self.active_share
        assert last is not None, "latency is an objective and there is no latency table"
        return loss, self.total_share, last


class SearchSpace(Config):
    """The choices. Layers that are never dropped stay in every Subnet; k is one number for all layers, as exports need."""

    droppable: tuple[int, ...]
    """Layers that may be left out."""
    experts: tuple[int, ...]
    """Expert counts a layer may keep, rising."""
    top_k: tuple[int, ...]
    """Values of k, rising; a layer with fewer experts takes all of them."""
    layers: Literal["nested", "free"] = "free"
    """``nested``: the first so many of the layer order; ``free``: any of the droppable layers may go."""
    widths: Literal["uniform", "per_layer"] = "uniform"
    """``per_layer``: counts may differ by layer, which not every export family can express."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name, values in (("experts", self.experts), ("top_k", self.top_k)):
            if not values or list(values) != sorted(set(values)) or values[0] < 1:
                raise ValueError(f"{name} {list(values)} must be rising counts from 1 up")
        return self

    @staticmethod
    def of(
        config: ModelConfig,
        *,
        layers: Literal["nested", "free"] = "free",
        widths: Literal["uniform", "per_layer"] = "uniform",
    ) -> SearchSpace:
        """The space of ``config``: all layers but the first and last two, eighths of the experts and every trained width, all k.
        Of a dense network, the layers alone.
        """
        if not config.moe_layers:
            only = {"experts": (config.num_experts,), "top_k": (config.top_k,)}
            return SearchSpace(droppable=droppable_layers(config), layers=layers, widths="uniform", **only)
        total = config.num_experts
        eighths = range(max(1, total // 8), total + 1, max(1, total // 8))
        least = min(config.top_k, 2)
        experts = sorted(num for num in {*config.widths, *eighths, total} if config.choosable(num) >= least)
        return SearchSpace(
            droppable=droppable_layers(config),
            experts=tuple(experts),
            top_k=tuple(range(1, config.top_k + 1)),
            layers=layers,
            widths=widths,
        )

    def subnet(self, config: ModelConfig, dropped: Sequence[int], experts: Sequence[int], top_k: int) -> Subnet:
        """The Subnet without ``dropped``, with ``experts[row]`` experts in each MoE row of the maximum network."""
        layers = tuple(layer for layer in range(config.num_layers) if layer not in dropped)
        rows = config.moe_rows(layers)
        kept = tuple(min(experts[row], config.experts_by_layer[row]) for row in rows)
        limits = [min(config.choosable(num), config.top_k_by_layer[row]) for num, row in zip(kept, rows, strict=True)]
        k = min((top_k, *limits))  # one k for all layers: an exported sub-model has only one
        return Subnet(layers=layers, experts=kept, top_k=(k,) * len(rows))

    def drops(self, order: Sequence[int]) -> list[tuple[int, ...]]:
        """Which layers go as ever more are dropped, following ``order`` (first kept to first dropped) backwards."""
        falling = [layer for layer in reversed(order) if layer in self.droppable]
        return [tuple(sorted(falling[:num])) for num in range(len(falling) + 1)]

    def num_choices(self, config: ModelConfig) -> int:
        """How many `every` goes through."""
        drops = len(self.droppable) + 1 if self.layers == "nested" else 2 ** len(self.droppable)
        widths = 1 if self.widths == "uniform" else config.num_moe_layers
        return drops * len(self.experts) ** widths * len(self.top_k)

    def every(self, config: ModelConfig) -> Iterator[Subnet]:
        """All that the space holds; some choices make the same Subnet."""
        drops: Iterable[tuple[int, ...]] = self.drops(config.layer_ranking)
        if self.layers == "free":
            drops = (
                left for num in range(len(self.droppable) + 1) for left in itertools.combinations(self.droppable, num)
            )
        rows = config.num_moe_layers
        for dropped in drops:
            if self.widths == "uniform":
                widths: Iterable[tuple[int, ...]] = ((num,) * rows for num in self.experts)
            else:
                widths = itertools.product(self.experts, repeat=rows)
            for experts in widths:
                for k in self.top_k:
                    yield self.subnet(config, dropped, experts, k)

    def grid(self, config: ModelConfig, order: Sequence[int] | None = None) -> Iterator[Subnet]:
        """Every Subnet with equal widths whose layers follow ``order``; None: the network's nested order.

        It holds the smallest Subnet of the space, so it decides what is feasible.
        """
        for dropped in self.drops(order or config.layer_ranking):
            for num in self.experts:
                for k in self.top_k:
                    if k <= config.choosable(num):
                        yield self.subnet(config, dropped, (num,) * config.num_moe_layers, k)


def reachable_limits(config: ModelConfig) -> Limits:
    """Limits to begin with: half-way between the full network and the least that a search can reach, in whole per cent."""
    full = count(config, config.full())
    sizes = [count(config, subnet) for subnet in SearchSpace.of(config).grid(config)]
    total = min(size.total_params for size in sizes) / full.total_params
    active = min(size.active_params for size in sizes) / full.active_params
    return Limits(max_total=math.ceil(50 * (1 + total)) / 100, max_active=math.ceil(50 * (1 + active)) / 100)


def require_feasible(candidates: Sequence[Candidate], limits: Limits) -> None:
    """Raise unless one of ``candidates`` meets ``limits``. Raises `UserError`: none does; names the nearest one (least
    summed excess), what it reaches and what to raise.
    """
    if any(candidate.fits(limits) for candidate in candidates):
        return

    def excess(candidate: Candidate) -> float:
        return sum(max(0.0, over) for over in candidate.excess(limits).values())

    nearest = min(candidates, key=excess)
    reached = {"total": f"{nearest.total_share:.3g}", "active": f"{nearest.active_share:.3g}"}
    if nearest.latency_ms is not None:
        reached["latency"] = f"{nearest.latency_ms:.3g} ms"
    asked, flags = limits.asked(), {"total": "--max-total", "active": "--max-active", "latency": "--max-latency-ms"}
    under = " and ".join(f"{name} {limit:g}{' ms' if name == 'latency' else ''}" for name, limit in asked.items())
    at = ", ".join(f"{name} {reached[name]}" for name in asked)
    broken = " and ".join(flags[name] for name, over in nearest.excess(limits).items() if over > 0)
    small = nearest.subnet
    choice = f"layers={len(small.layers)},experts={_one(small.experts)},top_k={_one(small.top_k)}"
    raise UserError(f"limits: nothing fits under {under}; the nearest is {choice} at {at}; raise {broken}")


def _one(values: tuple[int, ...]) -> str:
    low, high = min(values, default=0), max(values, default=0)
    return str(low) if low == high else f"{low}-{high}"


class Scorer:
    """Sizes and predicts candidates; remembers each Subnet once."""

    def __init__(self, config: ModelConfig, table: LatencyTable | None, workload: Workload | None):
        self.config = config
        self.sensitivities: Sensitivities | None = None
        """Set once measured; sizes need none."""
        self._table, self._workload = table, workload
        self._full = count(config, config.full())
        self._known: dict[Subnet, Candidate] = {}

    def sized(self, subnet: Subnet, predicted_nll: float = float("nan"), name: str | None = None) -> Candidate:
        """``subnet`` with its sizes and its latency."""
        latency_ms = None
        if self._table is not None:
            assert self._workload is not None
            latency_ms = self._table.predict_ms(self.config, subnet, self._workload)
        own = count(self.config, subnet)
        return Candidate(
            subnet=subnet,
            name=name,
            total_params=own.total_params,
            active_params=own.active_params,
            total_share=own.total_params / self._full.total_params,
            active_share=own.active_params / self._full.active_params,
            latency_ms=latency_ms,
            predicted_nll=predicted_nll,
        )

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


def enumerate_all(scorer: Scorer, space: SearchSpace) -> None:
    """Score everything there is."""
    with progress("predict all sizes", space.num_choices(scorer.config)) as advance:
        for subnet in space.every(scorer.config):
            scorer.score(subnet)
            advance(1)


def evolve(scorer: Scorer, space: SearchSpace, limits: Limits, third: Third, options: SearchOptions) -> None:
    """Score ``options.num_trials`` proposals of NSGA-II; the first generation is the best of what ``scorer`` knows already.

    The same seed proposes the same candidates.
    """
    config = scorer.config
    start = sorted(scorer.all(), key=lambda one: (not one.fits(limits), one.predicted_nll))
    with _quiet_optuna():
        sampler = optuna.samplers.NSGAIISampler(population_size=options.population, seed=options.seed)
        study = optuna.create_study(directions=["minimize"] * 3, sampler=sampler)
        for candidate in start[: options.population]:
            genes = _encode(config, space, candidate.subnet)
            if genes is not None:
                study.enqueue_trial(genes)
        with progress("search", options.num_trials) as advance:
            for _ in range(options.num_trials):
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


class SearchOptions(Config):
    """How hard to look."""

    enumerated: int = ENUMERATED
    """A space of at most so many choices is predicted whole."""
    num_trials: int = 1000
    """Of a larger one: candidates that NSGA-II proposes; only predicted, so thousands take seconds."""
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
    is_complete: bool = False
    """Those are all that the space holds."""
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
        table: latency table of this machine, for its first workload; required by a limit on latency.
        heal: heals a Subnet briefly and returns its held-out loss then; the best few are chosen among by it.

    Raises:
        UserError: nothing fits the limits, or a limit on latency without a table that holds here.
    """
    start = time.perf_counter()
    config, options = model.config, options or SearchOptions()
    space = space or SearchSpace.of(config)
    if table is not None:
        require_match(table, model, "latency table")
    elif limits.max_latency_ms is not None:
        raise UserError("--max-latency-ms: there is no latency table; run `stretto latency` first")
    workload = table.timings[0].workload if table else None
    scorer = Scorer(config, table, workload)
    # sizes are known without any evaluation: refuse the impossible before minutes are spent
    require_feasible([scorer.sized(subnet) for subnet in space.grid(config)], limits)
    each_layer = options.each_layer or space.widths == "per_layer"
    sensitivities = measure_sensitivities(model, batches, space.experts, space.top_k, each_layer=each_layer)
    third: Third = "active" if table is None else "latency"
    scorer.sensitivities = sensitivities
    for name, subnet in {"full": config.full(), **(presets or {})}.items():
        scorer.score(check_subnet(config, subnet), name)
    is_complete = space.num_choices(config) <= options.enumerated
    if is_complete:
        enumerate_all(scorer, space)
    else:
        score_grids(scorer, space)
        evolve(scorer, space, limits, third, options)
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
        wall_s=time.perf_counter() - start,
    )


def spearman(left: Sequence[float], right: Sequence[float]) -> float | None:
    """Rank correlation, ties sharing their mean rank; None for fewer than three pairs or where one side is constant."""
    assert len(left) == len(right), f"{len(left)} against {len(right)} values"
    if len(left) < 3 or len(set(left)) == 1 or len(set(right)) == 1:
        return None
    return float(scipy.stats.spearmanr(left, right).statistic)


def pareto_front(points: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """Indices of the points that no other point beats (nowhere larger, somewhere smaller), in order."""
    front = np.empty((0, len(points[0]) if points else 0))
    kept = []
    # in this order no point is beaten by one that comes after it, so each need only be held against the front so far
    for index in sorted(range(len(points)), key=lambda index: tuple(points[index])):
        own = np.asarray(points[index], dtype=np.float64)
        if not ((front <= own).all(axis=1) & (front < own).any(axis=1)).any():
            front = np.vstack([front, own])
            kept.append(index)
    return tuple(sorted(kept))


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


def _nll(candidate: Candidate) -> float:
    assert candidate.nll is not None, f"{candidate.subnet.label()} was not evaluated"
    return candidate.nll


def _healed_nll(candidate: Candidate) -> float:
    assert candidate.healed_nll is not None, f"{candidate.subnet.label()} was not healed"
    return candidate.healed_nll


def _shown(correlation: float | None) -> str:
    return "not ranked" if correlation is None else f"{correlation:.2f}"
