"""Plans: layouts of a recipe on a cluster, each with its memory, speed, limit and cost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Any, Literal

from pydantic import Field

from stretto.base.config import Config
from stretto.base.errors import UserError
from stretto.base.numbers import counted, size_in_bytes
from stretto.flow.controller import Limits, default_window
from stretto.learning.recipe import ADVANTAGES, RlRecipe
from stretto.model.spec import ModelConfig, count
from stretto.planner.hardware import Cluster, Dtype, Hardware
from stretto.planner.memory import WIDE, Layout, Memory, engine_memory, training_memory
from stretto.planner.simulate import Roles, Simulated, simulate
from stretto.planner.speed import StepTime, decode_s, prefill_s, sources_of, step_time
from stretto.train.recipe import ElasticConfig, Recipe

HANDOVER = 5e9
"""Bytes per second at which weights reach an engine (assumed)."""
SIMULATED_STEPS = 4
"""Steps that a simulation counts, beside those that fill the pipeline."""
MOST_SIMULATED = 3
"""Layouts that a sweep of an RL recipe simulates: those with the highest bound on their speed."""
MOST_GPUS_OF_ENGINE = 8
_MOST_EP = 64


class Workload(Config):
    """Facts about an RL run that its recipe does not know."""

    answer_tokens: float | None = Field(default=None, gt=0)
    """Mean number of sampled tokens of an answer; None: ``rollout.max_tokens``, the most."""
    answer_spread: float = Field(default=0.5, ge=0)
    """Standard deviation of the logarithm of that number."""
    prompt_tokens: int | None = Field(default=None, gt=0)
    """Tokens of a prompt; None: what ``rollout.max_tokens`` leaves of ``train.seq_len``, the most."""
    verdict_s: float = Field(default=0.0, ge=0)
    """Mean time of a verdict, in seconds."""
    verdict_spread: float = Field(default=0.5, ge=0)
    verifiers: int | None = Field(default=None, gt=0)
    """Answers that are judged at once; None: ``runtime.rewards.max``."""


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


@dataclass(frozen=True, slots=True)
class Plan:
    """Layouts of a recipe on a cluster, the fastest that fits first. Layouts that are neither faster nor smaller are left out."""

    recipe: str
    kind: Literal["pretrain", "rl"]
    cluster: Cluster
    params: int
    active_params: int
    dtype: Dtype
    steps: int
    predictions: tuple[Prediction, ...]
    num_tried: int
    sources: Mapping[str, str]
    """Efficiencies by name, each with the log entry that measured it; empty: assumed."""
    notes: tuple[str, ...]

    @property
    def is_measured(self) -> bool:
        """Whether all efficiencies were measured on this hardware; else the plan is a prediction."""
        return all(self.sources.values())

    @property
    def best(self) -> Prediction:
        return self.predictions[0]

    def tree(self) -> dict[str, Any]:
        """All figures as plain JSON values; sizes in bytes, times in seconds."""
        kept = ("recipe", "kind", "params", "active_params", "dtype", "steps", "num_tried", "sources", "notes")
        head = {name: getattr(self, name) for name in kept} | {"cluster": str(self.cluster)}
        head["status"] = "measured" if self.is_measured else "predicted"
        derived = ("name", "fits", "limit", "peak")
        rows = [asdict(each) | {name: getattr(each, name) for name in derived} for each in self.predictions]
        return head | {"layouts": rows}


def plan_pretrain(recipe: Recipe, name: str, cluster: Cluster, sweep: bool, price: float | None) -> Plan:
    """The recipe's own layout on all accelerators, or (``sweep``) all that divide. Raises `UserError`: it cannot be divided."""
    train, config, hardware = recipe.train, recipe.network(), cluster.hardware
    dtype = _dtype(train.dtype, hardware)
    extra, repeats, taught = _extra_passes(recipe.elastic, train.recompute)
    own = Layout(cluster.num, train.ep, train.micro_rows, train.micro_batches, train.recompute)
    layouts: Iterable[Layout] = [own]
    if sweep:
        layouts = _pretrain_layouts(config, train.rows, cluster.num)
    else:
        _check(own, config, cluster)
    tried = []
    for layout in layouts:
        facts = (config, layout, train.seq_len, dtype, recipe.optim.name)
        memory = training_memory(*facts, taught=taught, repeats=repeats, on_gpu=hardware.name != "cpu")
        step = step_time(*facts, hardware, extra_forwards=extra)
        num_tokens = train.rows * train.seq_len
        tried.append(_prediction(layout, memory, step, step.total, step.limit, cluster, train.steps, num_tokens, price))
    notes = ["Smaller Subnets are counted as the full network: an upper bound of their time."] if extra else []
    if not sweep and own.micro_rows % own.ranks:
        notes.append(
            f"{own.ranks} ranks do not divide the {own.micro_rows} rows of a micro-batch: some compute padding."
        )
    return _plan(name, "pretrain", cluster, config, dtype, train.steps, tried, len(tried), notes)


def _extra_passes(elastic: ElasticConfig, recompute: bool) -> tuple[float, bool, bool]:
    """Mean number of forward passes beside the trained one, whether the network teaches itself in a second trained pass, and whether
    there are a teacher's logits."""
    if elastic.sampler == "off":
        return 0.0, False, False
    taught = elastic.anchor_ce_weight < 1 and bool(elastic.anchors)
    smaller = elastic.anchor_share + elastic.depth_share + elastic.top_k_share + elastic.width_share
    share = 1 - elastic.starts_at
    if elastic.joint:
        return share * min(1.0, smaller) * (4 if recompute else 3), True, taught
    return share * elastic.anchor_share if taught else 0.0, False, taught


def _pretrain_layouts(config: ModelConfig, rows: int, num: int) -> Iterator[Layout]:
    for ranks in _halves(num):
        for ep in _parallels(config, ranks):
            for micro_batches in _divisors(rows // ranks) if rows % ranks == 0 else ():
                for recompute in (False, True):
                    yield Layout(ranks, ep, rows // micro_batches, micro_batches, recompute)


def _halves(num: int) -> list[int]:
    """``num`` and its halves as long as they are whole."""
    return [num] + (_halves(num // 2) if num % 2 == 0 else [])


def _divisors(num: int) -> list[int]:
    return [each for each in range(1, num + 1) if num % each == 0]


def _parallels(config: ModelConfig, ranks: int) -> list[int]:
    """Numbers of expert-parallel ranks that divide ranks, experts, and the rows of an expert."""
    return [ep for ep in _divisors(min(ranks, _MOST_EP)) if _why_undivided(config, ranks, ep) is None]


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


def _dtype(asked: str, hardware: Hardware) -> Dtype:
    if asked == "bfloat16" or (asked == "auto" and hardware.name != "cpu"):
        return "bfloat16"
    return "float32"


def _prediction(
    layout: Layout,
    memory: Memory,
    step: StepTime,
    step_s: float,
    slowest: str,
    cluster: Cluster,
    steps: int,
    num_tokens: float,
    price: float | None,
) -> Prediction:
    """``num_tokens``: of one step."""
    hours, hardware = steps * step_s / 3600 * cluster.num, cluster.hardware
    dollars = None if price is None else price * hours
    available = hardware.memory * (1 - hardware.reserved)
    return Prediction(layout, memory, available, step, step_s, slowest, num_tokens / step_s, hours, dollars)


def _plan(
    name: str,
    kind: Literal["pretrain", "rl"],
    cluster: Cluster,
    config: ModelConfig,
    dtype: Dtype,
    steps: int,
    found: Sequence[Prediction],
    num_tried: int,
    notes: Sequence[str],
) -> Plan:
    counts = count(config, config.full())
    if not found:
        raise UserError(
            f"--gpus {cluster}: no layout divides the recipe's rows and experts; change train.rows, or the number"
        )
    fitting = [each for each in found if each.fits]
    ordered = sorted(fitting, key=lambda each: (float(f"{each.step_s:.4g}"), each.peak))
    if kind == "pretrain":  # a slower layout is worth showing if it needs less memory than all faster ones
        least = [math.inf, *accumulate((each.peak for each in ordered), min)]
        ordered = [each for each, before in zip(ordered, least, strict=False) if each.peak < before]
    ordered = ordered or sorted(found, key=lambda each: each.peak)  # what does not fit, by how little it lacks
    most_ranks = max(each.layout.ranks for each in ordered)
    sources = sources_of(cluster.hardware, dtype, engines=kind == "rl", ranks=most_ranks)
    if not fitting:
        needed = size_in_bytes(ordered[0].peak)
        notes = [*notes, f"No layout fits: the smallest needs {needed} of {size_in_bytes(ordered[0].available)}."]
    return Plan(
        recipe=name,
        kind=kind,
        cluster=cluster,
        params=counts.total_params,
        active_params=counts.active_params,
        dtype=dtype,
        steps=steps,
        predictions=tuple(ordered),
        num_tried=num_tried,
        sources=sources,
        notes=tuple(notes),
    )


@dataclass(frozen=True, slots=True)
class _Rl:
    """What all layouts of an RL recipe share."""

    recipe: RlRecipe
    config: ModelConfig
    cluster: Cluster
    workload: Workload
    price: float | None

    @property
    def alone(self) -> bool:
        """Whether trainer and engines share one accelerator."""
        return self.cluster.num == 1

    @property
    def usable(self) -> float:
        """Bytes of an accelerator."""
        return self.cluster.hardware.memory * (1 - self.cluster.hardware.reserved)

    @property
    def gpus_of_engine(self) -> int:
        """Accelerators over which an engine is split, until it fits."""
        needed = self.engine_memory().total / self.usable
        return next((each for each in (1, 2, 4) if needed <= each), MOST_GPUS_OF_ENGINE)

    def engines(self, layout: Layout) -> int:
        return self.recipe.rollout.engines if self.alone else (self.cluster.num - layout.ranks) // self.gpus_of_engine

    def decode_s(self, batch: int) -> float:
        hardware, gpus = self.cluster.hardware, self.gpus_of_engine
        seconds = decode_s(self.config, batch, self.context, self.engine_bytes, hardware, gpus)
        return 2 * seconds if self.alone else seconds

    def bound_s(self, layout: Layout) -> float:
        """A lower bound of the time of a step: that of the slower of trainer and engines."""
        num_tokens = self.recipe.train.prompts * self.recipe.rollout.group * self.answer
        rate = self.batch * self.engines(layout) / self.decode_s(self.batch)
        return max(self.step(layout).total, num_tokens / rate)

    @property
    def dtype(self) -> Dtype:
        return "float32" if self.recipe.precision.train == "fp32" else "bfloat16"

    @property
    def engine_bytes(self) -> int:
        return {"fp32": 4, "bf16": 2, "fp8": 1}[self.recipe.precision.rollout]

    @property
    def answer(self) -> float:
        return self.workload.answer_tokens or self.recipe.rollout.max_tokens

    @property
    def prompt(self) -> int:
        return self.workload.prompt_tokens or self.recipe.train.seq_len - self.recipe.rollout.max_tokens

    @property
    def context(self) -> float:
        """Mean number of tokens of a sequence in an engine."""
        return self.prompt + self.answer / 2

    @property
    def batch(self) -> int:
        """Sequences that an engine's cache and its batch hold."""
        rollout, counts = self.recipe.rollout, count(self.config, self.config.full())
        each = counts.kv_elements * max(2, self.engine_bytes)
        # samples of a group share their prompt
        cached = rollout.cache_bytes / (each * (self.prompt / rollout.group + self.answer))
        return max(1, min(rollout.max_batch, int(cached)))

    def engine_memory(self) -> Memory:
        rollout = self.recipe.rollout
        return engine_memory(self.config, self.engine_bytes, rollout.cache_bytes, rollout.max_batch, self.prompt)

    def passes(self, layout: Layout) -> Layout:
        """``layout`` with the number of passes of a step: shared prompts are packed once."""
        train, group = self.recipe.train, self.recipe.rollout.group
        num_tokens = train.prompts * (self.prompt + group * self.answer)
        return replace(layout, micro_batches=max(1, math.ceil(num_tokens / (train.seq_len * layout.micro_rows))))

    def step(self, layout: Layout) -> StepTime:
        recipe = self.recipe
        scores = recipe.train.minibatches > 1 or recipe.loss.advantage not in ADVANTAGES
        extra = scores + (recipe.loss.kl_weight > 0) + len(recipe.teachers)
        facts = (self.config, layout, recipe.train.seq_len, self.dtype, recipe.optim.name, self.cluster.hardware)
        step = step_time(*facts, extra_forwards=extra)
        return replace(step, update=step.update * recipe.train.minibatches)

    def memory(self, layout: Layout) -> Memory:
        recipe, total = self.recipe, count(self.config, self.config.full()).total_params
        facts = (self.config, layout, recipe.train.seq_len, self.dtype, recipe.optim.name)
        frozen = total * ((recipe.loss.kl_weight > 0) + len(recipe.teachers))
        memory = training_memory(*facts, teacher_params=frozen, packed=True)
        # on a CPU the copy of the weights that is being published is in the same memory
        return replace(memory, teacher=memory.teacher + (WIDE * total if self.cluster.hardware.name == "cpu" else 0))

    def roles(self, layout: Layout) -> Roles:
        recipe, workload, hardware, engines = self.recipe, self.workload, self.cluster.hardware, self.engines(layout)
        train, rollout, half = recipe.train, recipe.rollout, 2.0 if self.alone else 1.0
        capacity = engines * self.batch // rollout.group if rollout.max_turns == 1 and not workload.verdict_s else None
        window = recipe.window or default_window(train.prompts, recipe.staleness, capacity and max(1, capacity))
        steps = min(train.steps, recipe.staleness + 1 + SIMULATED_STEPS)
        limits = Limits(train.prompts, recipe.staleness, window, lease_s=math.inf, num_steps=steps)
        step_s = half * self.step(layout).total
        weights = count(self.config, self.config.full()).total_params * self.engine_bytes
        each = {batch: self.decode_s(batch) for batch in range(1, self.batch + 1)}
        answer, spread = self.answer, workload.answer_spread

        def tokens(rng: Any, ordinal: int) -> float:
            return max(1.0, min(rollout.max_tokens, rng.lognormvariate(math.log(answer) - spread**2 / 2, spread)))

        def verdict(rng: Any, ordinal: int) -> float:
            if not workload.verdict_s:
                return 0.0
            return rng.lognormvariate(
                math.log(workload.verdict_s) - workload.verdict_spread**2 / 2, workload.verdict_spread
            )

        return Roles(
            limits=limits,
            group=rollout.group,
            engines=engines,
            batch=self.batch,
            decode_s=each.__getitem__,
            tokens=tokens,
            step_s=lambda rng, step: step_s,
            prefill_s=half * prefill_s(self.config, self.prompt, self.engine_bytes, hardware, self.gpus_of_engine),
            verifiers=workload.verifiers or recipe.runtime.rewards.max,
            verdict_s=verdict,
            publish_s=2 * WIDE * weights / self.engine_bytes / hardware.bandwidth,
            deliver_s=weights / HANDOVER,
            activate_s=weights / HANDOVER,
        )


def plan_rl(
    recipe: RlRecipe,
    config: ModelConfig,
    name: str,
    cluster: Cluster,
    sweep: bool,
    price: float | None,
    workload: Workload,
) -> Plan:
    """The recipe's own trainer ranks with engines on all other accelerators, or (``sweep``) every split. Raises `UserError`: it cannot
    be divided."""
    facts = _Rl(recipe, config, cluster, workload, price)
    train, ranks, gpus = recipe.train, recipe.trainer.ranks, facts.gpus_of_engine
    own = Layout(ranks, recipe.trainer.ep, train.micro_rows, 1)
    layouts: Iterable[Layout] = [own]
    if sweep:
        layouts = _rl_layouts(config, train.micro_rows, cluster.num - (0 if facts.alone else gpus))
    else:
        _check(own, config, cluster)
        if not facts.alone and facts.engines(own) < 1:
            raise UserError(
                f"--gpus {cluster}: {ranks} trainer ranks leave {cluster.num - ranks}, and an engine needs {gpus}; take more, or let "
                "--sweep choose"
            )
    tried = [facts.passes(layout) for layout in layouts]
    # by ranks: whether memory is lacking, the bound of the time, and the place in ``tried``
    fastest: dict[int, tuple[bool, float, int]] = {}
    for place, layout in enumerate(tried):
        lacks = facts.memory(layout).total > facts.usable
        key = (lacks, facts.bound_s(layout), place)
        fastest[layout.ranks] = min(key, fastest.get(layout.ranks, key))
    best = [tried[place] for *_, place in sorted(fastest.values())[:MOST_SIMULATED]]
    found = [_simulated(facts, layout) for layout in best]
    notes = ["Trainer and engine share one accelerator, each at half its speed (assumed)."] if facts.alone else []
    if workload.answer_tokens is None:
        notes.append(
            f"Answers are taken to have rollout.max_tokens {recipe.rollout.max_tokens}, the most: give --answer-tokens."
        )
    if facts.batch < recipe.rollout.max_batch:
        notes.append(
            f"The cache holds {facts.batch} of the {recipe.rollout.max_batch} sequences of a batch: raise rollout.cache_bytes."
        )
    return _plan(name, "rl", cluster, config, facts.dtype, train.steps, found, len(tried), notes)


def _rl_layouts(config: ModelConfig, micro_rows: int, most: int) -> Iterator[Layout]:
    for ranks in (2**power for power in range(max(1, most).bit_length())):
        for ep in _parallels(config, ranks):
            for rows in {max(ranks, micro_rows // 4), max(ranks, micro_rows), ranks * max(1, 4 * micro_rows // ranks)}:
                if rows % ranks == 0 and ranks <= max(1, most):
                    yield Layout(ranks, ep, rows, 1)


def _simulated(facts: _Rl, layout: Layout) -> Prediction:
    recipe, engines, step = facts.recipe, facts.engines(layout), facts.step(layout)
    found = simulate(facts.roles(layout))
    step_s = recipe.train.prompts * recipe.rollout.group / found.samples_per_s
    slowest = f"trainer: {step.limit}" if found.limit == "trainer" else found.limit
    num_tokens = recipe.train.prompts * recipe.rollout.group * facts.answer
    base = _prediction(
        layout, facts.memory(layout), step, step_s, slowest, facts.cluster, recipe.train.steps, num_tokens, facts.price
    )
    return replace(
        base,
        engines=0 if facts.alone else engines,
        gpus_of_engine=facts.gpus_of_engine,
        engine_memory=facts.engine_memory(),
        simulated=found,
    )
