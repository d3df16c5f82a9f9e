"""The search: the best Subnet within limits on memory, compute and measured latency.

Additive sensitivities predict the loss of candidates: of all candidates if there are few enough, else of those that NSGA-II
proposes along the front of predicted loss against cost. The best ones are evaluated, optionally a few of these are healed, and
one is chosen.
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
    """Increase of the held-out loss over the full network's (nats per token), for one change at a time."""

    full_nll: float
    """Loss of the full network, nats per token."""
    drop: dict[int, float]
    """By layer, if it alone is dropped."""
    depth: dict[int, float]
    """By number of layers, in the nested order."""
    experts: dict[int, float]
    """By number of experts in all MoE layers."""
    top_k: dict[int, float]
    """By top-k of all MoE layers."""
    experts_by_row: dict[int, dict[int, float]] = Field(default_factory=dict)
    """By MoE row and number of experts in that layer alone; empty if not measured."""
    top_k_by_row: dict[int, dict[int, float]] = Field(default_factory=dict)
    """By MoE row and top-k of that layer alone; empty if not measured."""

    def predict(self, config: ModelConfig, subnet: Subnet) -> float:
        """Predicted held-out loss of ``subnet``: the sum of the measured changes.

        Changes on one axis that were measured together (nested depths, equal widths, equal top-k) use that measurement. Other layers,
        or counts that differ by layer, are corrected by the differences between the single-layer measurements.
        """
        kept = set(subnet.layers)
        nested = set(config.layer_ranking[: len(kept)])
        depth = _interpolated(self.depth, len(kept))
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
    """Measure the loss without each layer, for the given numbers of experts and k, and for depths of the nested order (at most `DEPTHS`).

    Args:
        experts, top_ks: values to measure; the full ones cost nothing by definition.
        each_layer: also measure them in one MoE layer at a time, which multiplies the time by the number of layers.
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
        values: dict[int, dict[int, float]] = {}
        for (axis, num, row), value in increase.items():
            if axis == name:
                values.setdefault(row, {full[row]: 0.0})[num] = value
        return values

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
    """The full network with at most ``num`` experts (or top-``num``) in the MoE layers ``rows``.

    k never exceeds the number of choosable experts.
    """
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
    """Cost of the counts on one axis: an even share of the uniform cost per layer, plus the deviation of each layer from the mean."""
    total = 0.0
    for row, num in zip(rows, counts, strict=True):
        total += _interpolated(uniform, num) / num_rows
        if by_row:
            costs = {at: _interpolated(values, num) for at, values in by_row.items()}
            total += costs[row] - sum(costs.values()) / len(costs)
    return total


def _interpolated(values: Mapping[int, float], at: int) -> float:
    if at in values:
        return values[at]
    measured = sorted(values)
    return float(np.interp(at, measured, [values[num] for num in measured]))


DEPTHS = 8
"""Largest number of measured depths; the losses between are interpolated, since in a deep network they change smoothly (ours)."""
ENUMERATED = 20_000
"""Spaces of at most this many choices are predicted completely, in seconds; larger ones are searched by evolution."""
Third = Literal["active", "latency"]
"""Third objective beside loss and total parameters."""


class Limits(Config):
    """Limits that a chosen Subnet must meet, all at once; None: no limit."""

    max_total: float | None = Field(default=None, gt=0, le=1)
    """Total parameters (memory), as a share of the full network's."""
    max_active: float | None = Field(default=None, gt=0, le=1)
    """Active parameters (compute), as a share of the full network's."""
    max_latency_ms: float | None = Field(default=None, gt=0)
    """Milliseconds per step on the machine of the latency table."""

    def asked(self) -> dict[str, float]:
        """The limits that are set, by ``total``, ``active`` and ``latency``."""
        limits = {"total": self.max_total, "active": self.max_active, "latency": self.max_latency_ms}
        return {name: limit for name, limit in limits.items() if limit is not None}


class Candidate(Config):
    """A Subnet with its cost and its losses."""

    subnet: Subnet
    name: str | None = None
    """Name of the preset, if it is one."""
    total_params: int
    active_params: int
    total_share: float
    """Of the full network's total parameters."""
    active_share: float
    """Of the full network's active parameters."""
    latency_ms: float | None = None
    """Milliseconds per step, predicted by the latency table; None without a table."""
    predicted_nll: float
    """Held-out loss predicted from sensitivities, nats per token."""
    nll: float | None = None
    """Evaluated held-out loss, nats per token; None if not evaluated."""
    kl: float | None = None
    """KL(full ‖ Subnet) on the same tokens, nats per token."""
    healed_nll: float | None = None
    """Held-out loss after short healing; None if not healed."""

    def excess(self, limits: Limits) -> dict[str, float]:
        """By limit that is set: relative amount by which it is exceeded; 0 or less if it is met."""
        costs = {"total": self.total_share, "active": self.active_share, "latency": self.latency_ms}
        excess = {}
        for name, limit in limits.asked().items():
            cost = costs[name]
            assert cost is not None, f"a limit on {name}, but no value for it"
            excess[name] = (
                cost - limit
            ) / limit  # the difference has the right sign in floats, cost / limit - 1 may not
        return excess

    def fits(self, limits: Limits) -> bool:
        return all(over <= 0 for over in self.excess(limits).values())

    def objectives(self, third: Third) -> tuple[float, float, float]:
        """Loss before healing (evaluated if known), total share, and active share or latency. Smaller is better."""
        loss = self.predicted_nll if self.nll is None else self.nll
        last = self.latency_ms if third == "latency" else self.active_share
        assert last is not None, "latency is an objective, but there is no latency table"
        return loss, self.total_share, last


class SearchSpace(Config):
    """The choices of a search. Fixed layers are in every Subnet; k is equal in all layers, as export requires."""

    droppable: tuple[int, ...]
    """Layers that may be dropped."""
    experts: tuple[int, ...]
    """Numbers of experts of a layer, rising."""
    top_k: tuple[int, ...]
    """Values of k, rising. A layer with fewer experts uses all of them."""
    layers: Literal["nested", "free"] = "free"
    """``nested``: layers are dropped in the layer order; ``free``: any droppable layers."""
    widths: Literal["uniform", "per_layer"] = "uniform"
    """``per_layer``: numbers of experts may differ by layer, which few export families support."""

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

        The space of a dense network has layers only.
        """
        if not config.moe_layers:
            only = {"experts": (config.num_experts,), "top_k": (config.top_k,)}
            return SearchSpace(droppable=droppable_layers(config), layers=layers, widths="uniform", **only)
        total = config.num_experts
        eighths = range(max(1, total // 8), total + 1, max(1, total // 8))
        min_k = min(config.top_k, 2)
        experts = sorted(num for num in {*config.widths, *eighths, total} if config.choosable(num) >= min_k)
        return SearchSpace(
            droppable=droppable_layers(config),
            experts=tuple(experts),
            top_k=tuple(range(1, config.top_k + 1)),
            layers=layers,
            widths=widths,
        )

    def subnet(self, config: ModelConfig, dropped: Sequence[int], experts: Sequence[int], top_k: int) -> Subnet:
        """The Subnet without the layers ``dropped``, with ``experts[row]`` experts in each MoE row of the maximum network."""
        layers = tuple(layer for layer in range(config.num_layers) if layer not in dropped)
        rows = config.moe_rows(layers)
        kept = tuple(min(experts[row], config.experts_by_layer[row]) for row in rows)
        limits = [min(config.choosable(num), config.top_k_by_layer[row]) for num, row in zip(kept, rows, strict=True)]
        k = min((top_k, *limits))  # one k for all layers, since an exported model has only one
        return Subnet(layers=layers, experts=kept, top_k=(k,) * len(rows))

    def drops(self, order: Sequence[int]) -> list[tuple[int, ...]]:
        """Sets of dropped layers of rising size, in the reverse of ``order`` (most important layer first)."""
        falling = [layer for layer in reversed(order) if layer in self.droppable]
        return [tuple(sorted(falling[:num])) for num in range(len(falling) + 1)]

    def num_choices(self, config: ModelConfig) -> int:
        """Number of choices that `every` returns."""
        drops = len(self.droppable) + 1 if self.layers == "nested" else 2 ** len(self.droppable)
        widths = 1 if self.widths == "uniform" else config.num_moe_layers
        return drops * len(self.experts) ** widths * len(self.top_k)

    def every(self, config: ModelConfig) -> Iterator[Subnet]:
        """All choices. Some give the same Subnet."""
        drops: Iterable[tuple[int, ...]] = self.drops(config.layer_ranking)
        if self.layers == "free":
            nums = range(len(self.droppable) + 1)
            drops = itertools.chain.from_iterable(itertools.combinations(self.droppable, num) for num in nums)
        rows = config.num_moe_layers
        for dropped in drops:
            uniform = ((num,) * rows for num in self.experts)
            widths = uniform if self.widths == "uniform" else itertools.product(self.experts, repeat=rows)
            for experts, k in itertools.product(widths, self.top_k):
                yield self.subnet(config, dropped, experts, k)

    def grid(self, config: ModelConfig, order: Sequence[int] | None = None) -> Iterator[Subnet]:
        """Every Subnet with equal widths whose layers are dropped in ``order``; None: the nested order of the network.

        It contains the smallest Subnet of the space, so it decides whether limits can be met.
        """
        for dropped, num, k in itertools.product(self.drops(order or config.layer_ranking), self.experts, self.top_k):
            if k <= config.choosable(num):
                yield self.subnet(config, dropped, (num,) * config.num_moe_layers, k)


def reachable_limits(config: ModelConfig) -> Limits:
    """Suggested limits: half-way between the full network and the smallest Subnet of a search, in whole per cent."""
    full = count(config, config.full())
    sizes = [count(config, subnet) for subnet in SearchSpace.of(config).grid(config)]
    total = min(size.total_params for size in sizes) / full.total_params
    active = min(size.active_params for size in sizes) / full.active_params
    return Limits(max_total=math.ceil(50 * (1 + total)) / 100, max_active=math.ceil(50 * (1 + active)) / 100)


def require_feasible(candidates: Sequence[Candidate], limits: Limits) -> None:
    """Raise `UserError` if no candidate meets ``limits``. The message names the nearest one (smallest summed excess), its values, and the
    limits to raise.
    """
    if any(candidate.fits(limits) for candidate in candidates):
        return

    def excess(candidate: Candidate) -> float:
        return sum(max(0.0, over) for over in candidate.excess(limits).values())

    nearest = min(candidates, key=excess)
    values = {"total": nearest.total_share, "active": nearest.active_share, "latency": nearest.latency_ms}
    flags = {"total": "--max-total", "active": "--max-active", "latency": "--max-latency-ms"}
    units, asked, subnet = {"latency": " ms"}, limits.asked(), nearest.subnet
    under = " and ".join(f"{name} {limit:g}{units.get(name, '')}" for name, limit in asked.items())
    at = ", ".join(f"{name} {values[name]:.3g}{units.get(name, '')}" for name in asked)
    exceeded = " and ".join(flags[name] for name, over in nearest.excess(limits).items() if over > 0)
    choice = f"layers={len(subnet.layers)},experts={_range(subnet.experts)},top_k={_range(subnet.top_k)}"
    raise UserError(f"limits: nothing fits under {under}; the nearest is {choice} at {at}; raise {exceeded}")


def _range(values: tuple[int, ...]) -> str:
    low, high = min(values, default=0), max(values, default=0)
    return str(low) if low == high else f"{low}-{high}"


class Scorer:
    """Sizes and predicted losses of candidates. Each Subnet is computed once."""

    def __init__(self, config: ModelConfig, table: LatencyTable | None, workload: Workload | None):
        self.config = config
        self.sensitivities: Sensitivities | None = None
        """Set once measured; sizes need none."""
        self._table, self._workload = table, workload
        self._full = count(config, config.full())
        self._scored: dict[Subnet, Candidate] = {}

    def sized(self, subnet: Subnet, predicted_nll: float = float("nan"), name: str | None = None) -> Candidate:
        """``subnet`` with its size and latency."""
        latency_ms = None
        if self._table is not None:
            assert self._workload is not None
            latency_ms = self._table.predict_ms(self.config, subnet, self._workload)
        size = count(self.config, subnet)
        return Candidate(
            subnet=subnet,
            name=name,
            total_params=size.total_params,
            active_params=size.active_params,
            total_share=size.total_params / self._full.total_params,
            active_share=size.active_params / self._full.active_params,
            latency_ms=latency_ms,
            predicted_nll=predicted_nll,
        )

    def score(self, subnet: Subnet, name: str | None = None) -> Candidate:
        """``subnet`` with size and predicted loss. ``name`` is used only if the Subnet is new."""
        if subnet not in self._scored:
            assert self.sensitivities is not None, "sensitivities must be measured before scoring"
            self._scored[subnet] = self.sized(subnet, self.sensitivities.predict(self.config, subnet), name)
        return self._scored[subnet]

    def all(self) -> list[Candidate]:
        """All scored candidates, oldest first."""
        return list(self._scored.values())


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


def evolve(scorer: Scorer, space: SearchSpace, limits: Limits, third: Third, options: SearchOptions) -> None:
    """Score ``options.num_trials`` proposals of NSGA-II. The first generation consists of the best scored candidates.

    The same seed gives the same proposals.
    """
    config = scorer.config
    start = sorted(scorer.all(), key=lambda candidate: (not candidate.fits(limits), candidate.predicted_nll))
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


class SearchOptions(Config):
    """Effort of a search."""

    enumerated: int = ENUMERATED
    """Spaces of at most this many choices are predicted completely."""
    num_trials: int = 1000
    """Proposals of NSGA-II in a larger space. They are only predicted, so thousands take seconds."""
    population: int = 40
    num_evaluated: int = 16
    """Number of candidates within the limits, best predicted first, that are evaluated."""
    num_nested: int = 4
    """Number of further evaluated candidates with layers of the nested order, best predicted first: training drew layers in that order,
    which the additive prediction ignores.
    """
    num_spread: int = 8
    """Number of evaluated candidates spread along the predicted front, within the limits or not. They are needed for the figure of the
    front and for a meaningful rank correlation.
    """
    num_healed: int = 3
    """Number of evaluated candidates, best first, that are healed if healing is requested."""
    each_layer: bool = False
    """Also measure numbers of experts and k layer by layer; always done if numbers may differ by layer."""
    seed: int = 0


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
        wall_s=time.perf_counter() - start_s,
    )


def spearman(left: Sequence[float], right: Sequence[float]) -> float | None:
    """Rank correlation; ties get their mean rank. None for fewer than three pairs, or if one side is constant."""
    assert len(left) == len(right), f"{len(left)} against {len(right)} values"
    if len(left) < 3 or len(set(left)) == 1 or len(set(right)) == 1:
        return None
    return float(scipy.stats.spearmanr(left, right).statistic)


def pareto_front(points: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """Indices of the points that no other point dominates (nowhere larger, somewhere smaller), in order."""
    front = np.empty((0, len(points[0]) if points else 0))
    kept = []
    # in sorted order no point is beaten by a later one, so each is compared with the current front only
    for index in sorted(range(len(points)), key=lambda index: tuple(points[index])):
        point = np.asarray(points[index], dtype=np.float64)
        if not ((front <= point).all(axis=1) & (front < point).any(axis=1)).any():
            front = np.vstack([front, point])
            kept.append(index)
    return tuple(sorted(kept))


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
