"""`stretto.plan` and the command `stretto plan`: layouts of a recipe on a cluster, each with memory, speed, limit and cost. No torch."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal

from stretto.base.config import Config, RecipeLike, Settings, overridden, read_recipe, read_tree, source_name
from stretto.base.errors import UserError, user_errors
from stretto.base.numbers import counted, duration, listed, rounded, si, size_in_bytes
from stretto.base.numbers import params as params_text
from stretto.base.paths import checkpoint_folder, user_path
from stretto.base.table import NOTHING, Cell, Table, Tabled
from stretto.learning.recipe import RlRecipe
from stretto.model.counts import count
from stretto.model.spec import ModelConfig
from stretto.planner.fit import Trained, computes_in, fitted, peak
from stretto.planner.hardware import Cluster, Dtype, Hardware, parse_cluster
from stretto.planner.memory import Layout, Memory, training_memory
from stretto.planner.rl import RlRun, Workload, network_of
from stretto.planner.simulate import Simulated, simulate
from stretto.planner.speed import PARTS, StepTime, step_time
from stretto.train.recipe import ElasticConfig, ElasticizeRecipe, Recipe

MOST_SIMULATED = 3
"""Layouts that a sweep of an RL recipe simulates: those with the highest bound on their speed."""
MOST_SHOWN = 6
"""Layouts in the table and in the figure."""
_MOST_EP = 64


@dataclass(frozen=True, slots=True)
class Prediction:
    """One layout."""

    layout: Layout
    """Of the trainer."""
    memory: Memory
    """Of a trainer's rank."""
    available: float
    """Bytes of an accelerator that a rank can use."""
    step: StepTime
    step_s: float
    """Time from one step to the next; in RL with the waiting for samples."""
    slowest: str
    """Part that takes the longest."""
    tokens_per_s: float
    gpu_hours: float
    """Of the whole run, all accelerators of the cluster included, also idle ones."""
    dollars: float | None
    engines: int = 0
    """0: none, or they share the trainer's accelerator."""
    gpus_of_engine: int = 1
    engine_memory: Memory | None = None
    simulated: Simulated | None = None

    @property
    def peak(self) -> float:
        """Bytes on the fullest accelerator."""
        if self.engine_memory is None:
            return self.memory.total
        engine = self.engine_memory.total / self.gpus_of_engine
        return max(self.memory.total, engine) if self.engines else self.memory.total + engine

    @property
    def fits(self) -> bool:
        return self.peak <= self.available

    @property
    def limit(self) -> str:
        """What to change first: memory where it is lacking, else the slowest part."""
        if self.fits or self.engine_memory is None:
            return self.slowest if self.fits else "memory"
        is_engine = self.engine_memory.total / self.gpus_of_engine > self.available
        return "memory of an engine" if is_engine else "memory of the trainer"

    @property
    def name(self) -> str:
        """The layout in words, for tables."""
        if self.simulated is None:
            return str(self.layout)
        split = f" of {self.gpus_of_engine} GPUs" if self.gpus_of_engine > 1 else ""
        return f"trainer: {self.layout}; {counted(self.engines or 1, 'engine')}{split}"

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Row of the table of a plan."""
        return (
            Cell(self.name),
            Cell("yes" if self.fits else "NO"),
            Cell(self.limit),
            Cell(size_in_bytes(self.peak), self.peak, f"of {size_in_bytes(self.available)}"),
            Cell(duration(self.step_s), self.step_s),
            Cell(si(self.tokens_per_s), self.tokens_per_s),
            Cell(rounded(self.gpu_hours), self.gpu_hours),
            NOTHING if self.dollars is None else Cell(rounded(self.dollars), self.dollars),
        )


@dataclass(frozen=True, slots=True, repr=False)
class Plan(Tabled):
    """Layouts of a recipe on a cluster, the fastest that fits first. Layouts that are neither faster nor smaller are left out."""

    recipe: str
    kind: Literal["pretrain", "rl"]
    cluster: Cluster
    network: ModelConfig
    dtype: Dtype
    steps: int
    step_tokens: float
    """Trained tokens of one step."""
    price: float | None
    """Dollars of one accelerator for one hour."""
    predictions: tuple[Prediction, ...] = ()
    num_tried: int = 0
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> Prediction:
        return self.predictions[0]

    @property
    def params(self) -> int:
        return count(self.network, self.network.full()).total_params

    @property
    def active_params(self) -> int:
        return count(self.network, self.network.full()).active_params

    @property
    def sources(self) -> Mapping[str, str]:
        """Efficiencies by name, each with the log entry that measured it on this hardware; empty: assumed."""
        hardware = self.cluster.hardware
        used = {"share of products": hardware.share[self.dtype].source}
        if any(each.layout.ranks > 1 for each in self.predictions):
            used["share of links"] = ""
        if any(PARTS["launches"] in each.step.parts for each in self.predictions):
            used["launches of a training step"] = ""  # taken to be those of a decoding step
        if self.kind == "rl":
            used |= {"launches of a decoding step": hardware.layer_s.source, "bandwidth of decoding": ""}
        return used

    @property
    def is_measured(self) -> bool:
        """Whether all efficiencies were measured on this hardware; else the plan is a prediction."""
        return all(self.sources.values())

    @property
    def title(self) -> str:
        """The recipe, the cluster and the size of the network, in words."""
        sizes = f"{params_text(self.params)} parameters, {params_text(self.active_params)} active"
        status = "measured efficiencies" if self.is_measured else "predicted"
        return f"{self.recipe} on {self.cluster}: {status} ({sizes}, {self.dtype}, {self.steps:,} steps)"

    @property
    def origins(self) -> str:
        """The log entry behind each efficiency, in words."""
        known = [f"{name}: measured, “{source}”" for name, source in self.sources.items() if source]
        assumed = [name for name, source in self.sources.items() if not source]
        last = [f"assumed, never measured on this hardware: {listed(assumed)}"] if assumed else []
        return f"Efficiencies: {'; '.join(known + last)}."

    @property
    def hours_name(self) -> str:
        """What the hours of a prediction count."""
        return "GPU-hours" if self.cluster.hardware.is_gpu else "Core-hours"

    @property
    def table(self) -> Table:
        """The best layouts, fastest first."""
        columns: tuple[str, ...] = ("Layout", "Fits", "Limit", "Memory", "Step", "Tokens/s", self.hours_name)
        if self.price is not None:
            columns = (*columns, "Dollars")
        rows = tuple(each.cells[: len(columns)] for each in self.predictions[:MOST_SHOWN])
        return Table(self.title, columns, rows, note=" ".join([*self.notes, self.origins]), num_words=3)

    def tree(self) -> dict[str, Any]:
        """All figures as plain JSON values; sizes in bytes, times in seconds."""
        kept = ("recipe", "kind", "params", "active_params", "dtype", "steps", "num_tried", "sources", "notes")
        head = {name: getattr(self, name) for name in kept} | {"cluster": str(self.cluster)}
        head["status"] = "measured" if self.is_measured else "predicted"
        derived = ("name", "fits", "limit", "peak")
        rows = [asdict(each) | {name: getattr(each, name) for name in derived} for each in self.predictions]
        return head | {"layouts": rows}

    def predict(self, layout: Layout, memory: Memory, step: StepTime, step_s: float, slowest: str) -> Prediction:
        """One layout of this plan."""
        hours = self.steps * step_s / 3600 * self.cluster.num
        return Prediction(
            layout=layout,
            memory=memory,
            available=self.cluster.hardware.usable,
            step=step,
            step_s=step_s,
            slowest=slowest,
            tokens_per_s=self.step_tokens / step_s,
            gpu_hours=hours,
            dollars=None if self.price is None else self.price * hours,
        )

    def of(self, found: Sequence[Prediction], num_tried: int, notes: Sequence[str]) -> Plan:
        """This plan with those of ``found`` that are worth showing. Raises `UserError`: there are none."""
        if not found:
            raise UserError(
                f"--gpus {self.cluster}: no layout divides the recipe's rows and experts; change train.rows, or the number"
            )
        ordered = sorted(
            (each for each in found if each.fits), key=lambda each: (float(f"{each.step_s:.4g}"), each.peak)
        )
        if not ordered:  # by how little they lack
            ordered = sorted(found, key=lambda each: each.peak)
            needed, available = size_in_bytes(ordered[0].peak), size_in_bytes(ordered[0].available)
            notes = [*notes, f"No layout fits: the smallest needs {needed} of {available}."]
        elif self.kind == "pretrain":  # a slower layout is worth showing if it needs less memory than all faster ones
            least = [math.inf, *accumulate((each.peak for each in ordered), min)]
            ordered = [each for each, before in zip(ordered, least, strict=False) if each.peak < before]
        return replace(self, predictions=tuple(ordered), num_tried=num_tried, notes=tuple(notes))


@user_errors
def plan(
    recipe: RecipeLike,
    gpus: Annotated[str, "the number and kind of accelerators, such as 8xH100"],
    *,
    model: str | os.PathLike[str] | None = None,
    sweep: bool = False,
    price: float | None = None,
    workload: Workload | None = None,
    settings: Settings = (),
) -> Plan:
    """Predict memory, speed, limit and cost of a recipe of `stretto pretrain`, `stretto elasticize` or `stretto rl` (docs/CLUSTER.md).

    Args:
        recipe: a TOML file, the name of a shipped recipe, a mapping or a recipe object.
        gpus: number and kind of accelerators: ``64xH100``; ``2xcpu`` are two cores.
        model: run or checkpoint that an RL run begins with, or that is elasticized; None: the recipe's ``[start]``.
        sweep: try all layouts; False: the recipe's own. Not for elasticizing.
        price: dollars of one accelerator for one hour.
        workload: facts about the answers and verdicts of an RL run.
        settings: overrides of single recipe keys: ``["train.rows=8"]``.

    Raises:
        UserError: a bad recipe, unknown hardware, or a layout that cannot be divided.
    """
    cluster, name = parse_cluster(gpus), Path(source_name(recipe)).name
    if price is not None and price < 0:
        raise UserError(f"--price {price:g}: give dollars per accelerator and hour, 0 or more")
    if _is_rl(recipe):
        parsed = read_recipe(recipe, RlRecipe, settings)
        run = RlRun(parsed, _network(parsed, name, model), cluster, workload or Workload())
        empty = Plan(name, "rl", cluster, run.config, run.dtype, parsed.train.steps, run.step_tokens, price)
        return _plan_rl(run, empty, sweep)
    if workload is not None and (given_too := workload.model_dump(exclude_defaults=True)):
        option = f"--{next(iter(given_too)).replace('_', '-')}"
        raise UserError(
            f"{option}: only a plan of RL uses it, and {name} is not a recipe of `stretto rl`; leave {option} out"
        )
    tree = _tree(recipe) if model is not None else overridden(_tree(recipe), settings)  # which may give a [model]
    if "model" not in tree and (model is not None or "elastic" in tree):
        if sweep:
            raise UserError(f"--sweep: {name} is planned in its own layout, on one accelerator; leave --sweep out")
        parsed_too = read_recipe(recipe, ElasticizeRecipe, settings)
        if model is None:
            raise UserError("--model: missing; name the run or checkpoint to elasticize")
        return _plan_elasticize(parsed_too, _read_network(model), name, cluster, price)
    if model is not None:
        raise UserError(
            f"--model: {name} is a recipe of {Recipe.command}, which has its own [model]; leave --model out"
        )
    given = read_recipe(recipe, Recipe, settings)
    if given.train.memory is not None:
        if cluster.num > 1:
            one = f"1x{cluster.hardware.name}"
            raise UserError(
                f"--gpus {cluster}: train.memory chooses states for one rank; give {one}, or remove the key"
            )
        if sweep:
            raise UserError("--sweep: train.memory chooses states for the recipe's own layout; leave --sweep out")
    given, notes = _fitted(given, given.network(), cluster.hardware)
    train, dtype = given.train, computes_in(given, on_gpu=cluster.hardware.is_gpu)
    tokens = train.rows * train.seq_len
    empty = Plan(name, "pretrain", cluster, given.network(), dtype, train.steps, tokens, price, notes=notes)
    return _plan_pretrain(given, empty, sweep)


def _fitted(recipe: Trained, config: ModelConfig, hardware: Hardware) -> tuple[Trained, tuple[str, ...]]:
    """``recipe`` with the states that fit into its ``train.memory``, and the line about them; without that key, as it is."""
    memory = recipe.train.memory
    if memory is None:
        return recipe, ()
    available = hardware.usable if memory == "auto" else memory * 1e9
    fitting, line = fitted(recipe, config, available, on_gpu=hardware.is_gpu)
    return fitting, (line,)


def _is_rl(recipe: Any) -> bool:
    """Whether ``recipe`` has sources of problems, as every recipe of RL, and no other recipe, has."""
    if isinstance(recipe, Config):
        return isinstance(recipe, RlRecipe)
    return "sources" in _tree(recipe)


def _tree(recipe: Any) -> Mapping[str, Any]:
    """``recipe`` as plain data."""
    if isinstance(recipe, Config):
        return recipe.model_dump(mode="json")
    return recipe if isinstance(recipe, Mapping) else read_tree(Path(source_name(recipe)))


def _read_network(model: str | os.PathLike[str]) -> ModelConfig:
    return network_of(checkpoint_folder(user_path(model, "model")))


def _network(recipe: RlRecipe, name: str, model: str | os.PathLike[str] | None) -> ModelConfig:
    if model is not None:
        return _read_network(model)
    if recipe.start is None or recipe.start.model is None:
        raise UserError(
            f"{name}: has no [start.model], so the network is unknown; name a run or checkpoint with --model"
        )
    return recipe.start.model


def _plan_pretrain(recipe: Recipe, empty: Plan, sweep: bool) -> Plan:
    """``empty`` with the recipe's own layout on all accelerators, and (``sweep``) with all that divide."""
    train, elastic, config, cluster = recipe.train, recipe.elastic, empty.network, empty.cluster
    own = Layout(cluster.num, train.ep, train.micro_rows, train.micro_batches, train.recompute)
    layouts, notes = list[Layout](), [*empty.notes]
    if sweep:
        layouts += _pretrain_layouts(config, train.rows, cluster.num)
    else:
        _check(own, config, cluster)
    if own not in layouts and _why_undivided(config, own.ranks, own.ep) is None:
        layouts.append(own)
    is_elastic, on_gpu = elastic.sampler != "off", cluster.hardware.is_gpu
    taught = is_elastic and elastic.anchor_ce_weight < 1 and bool(elastic.anchors)
    if is_elastic:
        notes.insert(0, "Smaller Subnets are counted as the full network: an upper bound of their time.")
    tried = []
    for layout in layouts:
        shape = (config, layout, train.seq_len, empty.dtype)
        repeats = is_elastic and elastic.joint
        memory = training_memory(*shape, recipe.optim, taught=taught, repeats=repeats, on_gpu=on_gpu, rounds=not on_gpu)
        if train.snapshot_writes == "background" and not on_gpu:
            memory = replace(memory, snapshot=memory.weights + memory.optimiser)
        extra = _extra_forwards(elastic, layout.recompute, taught)
        step = step_time(*shape, recipe.optim.name, cluster.hardware, extra_forwards=extra)
        tried.append(empty.predict(layout, memory, step, step.total, step.limit))
    found = empty.of(tried, len(tried), notes)
    notes = [*found.notes]
    if train.micro_rows % cluster.num and any(each.layout == own for each in found.predictions):
        padded = f"{cluster.num} ranks do not divide the {train.micro_rows} rows of a micro-batch"
        notes.append(f"{padded}: some compute padding.")
    if train.snapshot_writes == "background" and on_gpu:
        copied = size_in_bytes(found.best.memory.weights + found.best.memory.optimiser)
        copy = f"a copy of its weights and optimiser state for snapshots, {copied}"
        notes.append(f"Each rank keeps {copy}, in the host's memory.")
    return replace(found, notes=tuple(notes))


def _plan_elasticize(
    recipe: ElasticizeRecipe, config: ModelConfig, name: str, cluster: Cluster, price: float | None
) -> Plan:
    """Plan of elasticizing ``config`` on one accelerator, with the states that `fitted` chooses if the recipe says so."""
    if cluster.num > 1:
        raise UserError(f"--gpus {cluster}: elasticizing is planned on one accelerator; give 1x{cluster.hardware.name}")
    train, hardware = recipe.train, cluster.hardware
    recipe, chosen = _fitted(recipe, config, hardware)
    notes = ["Smaller Subnets are counted as the full network: an upper bound of their time.", *chosen]
    dtype = computes_in(recipe, on_gpu=hardware.is_gpu)
    layout = Layout(1, 1, train.micro_rows, train.micro_batches, train.recompute)
    forwards = float(recipe.cached_logits is None)  # of the teacher; `step_time` counts those of recomputing
    step = step_time(config, layout, train.seq_len, dtype, recipe.optim.name, hardware, extra_forwards=forwards)
    empty = Plan(name, "pretrain", cluster, config, dtype, train.steps, train.rows * train.seq_len, price)
    memory = peak(recipe, config, on_gpu=hardware.is_gpu)
    return empty.of([empty.predict(layout, memory, step, step.total, step.limit)], 1, notes)


def _extra_forwards(elastic: ElasticConfig, recompute: bool, taught: bool) -> float:
    """Mean number of forward passes beside the trained one. A second trained pass counts as three, or four with ``recompute``."""
    if elastic.sampler == "off":
        return 0.0
    share = elastic.mean_factor
    if elastic.joint:
        smaller = elastic.anchor_share + elastic.depth_share + elastic.top_k_share + elastic.width_share
        return min(1.0, share * min(1.0, smaller)) * (4 if recompute else 3)
    return share * elastic.anchor_share if taught else 0.0


def _pretrain_layouts(config: ModelConfig, rows: int, num: int) -> Iterator[Layout]:
    """Layouts on ``num`` accelerators, or on a half, a quarter and so on of them."""
    ranks = num
    while True:
        for ep in _parallels(config, ranks):
            for micro_batches in _divisors(rows // ranks) if rows % ranks == 0 else ():
                for recompute in (False, True):
                    yield Layout(ranks, ep, rows // micro_batches, micro_batches, recompute)
        if ranks % 2:
            return
        ranks //= 2


def _divisors(num: int) -> list[int]:
    return [each for each in range(1, num + 1) if num % each == 0]


def _parallels(config: ModelConfig, ranks: int) -> list[int]:
    """Numbers of expert-parallel ranks that divide ranks, experts, and the rows of an expert."""
    return [ep for ep in range(1, min(ranks, _MOST_EP) + 1) if _why_undivided(config, ranks, ep) is None]


def _why_undivided(config: ModelConfig, ranks: int, ep: int) -> str | None:
    """Why ``ranks`` cannot share the network with ``ep``; None if they can."""
    if ranks % ep:
        return f"ep {ep} does not divide {ranks} ranks; choose one of its divisors"
    uneven = next((experts for experts in config.experts_by_layer if experts % ep), None)
    if uneven is not None:
        return f"ep {ep} does not divide the {uneven} experts of a layer; choose a divisor"
    copies, inner, hidden = ranks // ep, 2 * config.expert_intermediate_size, config.hidden_size
    if ep > 1 and (inner % copies or hidden % copies):
        return f"{copies} copies cannot split experts of {inner} x {hidden} evenly; choose a larger ep"
    return None


def _check(layout: Layout, config: ModelConfig, cluster: Cluster) -> None:
    """Raise `UserError` if ``layout`` cannot be divided."""
    if (problem := _why_undivided(config, layout.ranks, layout.ep)) is not None:
        raise UserError(f"--gpus {cluster}: {problem}, or let --sweep choose")


def _plan_rl(run: RlRun, empty: Plan, sweep: bool) -> Plan:
    """``empty`` with the recipe's own trainer ranks and engines on all other accelerators, or (``sweep``) with every split."""
    recipe, num, gpus = run.recipe, run.cluster.num, run.gpus_of_engine
    ranks, micro_rows = recipe.trainer.ranks, recipe.train.micro_rows
    own = Layout(ranks, recipe.trainer.ep, micro_rows, 1)
    layouts: Iterable[Layout] = [own]
    if sweep:
        layouts = _rl_layouts(run.config, micro_rows, num if run.is_shared else max(1, num - gpus))
    else:
        _check(own, run.config, run.cluster)
        if ranks > 1 if run.is_shared else run.engines(own) < 1:
            raise UserError(
                f"--gpus {run.cluster}: {ranks} trainer ranks leave {max(0, num - ranks)}, and an engine needs {gpus}; take more, or "
                "let --sweep choose"
            )
    tried = [run.passes(layout) for layout in layouts]
    # by ranks: whether memory is lacking, the bound of the time, and the place in ``tried``
    fastest: dict[int, tuple[bool, float, int]] = {}
    for place, layout in enumerate(tried):
        key = (run.memory(layout).total > run.hardware.usable, run.bound_s(layout), place)
        fastest[layout.ranks] = min(key, fastest.get(layout.ranks, key))
    best = [tried[place] for *_, place in sorted(fastest.values())[:MOST_SIMULATED]]
    notes = [*run.notes]
    if run.is_shared:
        notes.append("Trainer and engine share one accelerator, each at half its speed (assumed).")
    if run.workload.answer_tokens is None:
        most = recipe.rollout.max_tokens
        notes.append(f"Answers are taken to have rollout.max_tokens {most}, the most: give --answer-tokens.")
    if run.batch < recipe.rollout.max_batch:
        held = f"{run.batch} of the {recipe.rollout.max_batch} sequences"
        notes.append(f"The cache holds {held} of a batch: raise rollout.cache_bytes.")
    return empty.of([_simulated(run, empty, layout) for layout in best], len(tried), notes)


def _rl_layouts(config: ModelConfig, micro_rows: int, most: int) -> Iterator[Layout]:
    """Layouts of a trainer with up to ``most`` ranks."""
    for ranks in (2**power for power in range(most.bit_length())):
        for ep in _parallels(config, ranks):
            for rows in {max(ranks, micro_rows // 4), max(ranks, micro_rows), ranks * max(1, 4 * micro_rows // ranks)}:
                if rows % ranks == 0:
                    yield Layout(ranks, ep, rows, 1)


def _simulated(run: RlRun, empty: Plan, layout: Layout) -> Prediction:
    step, found = run.step(layout), simulate(run.roles(layout))
    step_s = run.recipe.train.prompts * run.recipe.rollout.group / found.samples_per_s
    slowest = f"trainer: {step.limit}" if found.limit == "trainer" else found.limit
    return replace(
        empty.predict(layout, run.memory(layout), step, step_s, slowest),
        engines=0 if run.is_shared else run.engines(layout),
        gpus_of_engine=run.gpus_of_engine,
        engine_memory=run.engine_memory,
        simulated=found,
    )
