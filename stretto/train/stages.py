"""Pre-training, elasticizing, healing and supervised fine-tuning: what each trains in every step, and towards which teacher.

Pre-training draws Subnets of the maximum network in every step and trains them together. Elasticizing does the same for a finished
network, with a frozen copy of that network as teacher. Healing trains an extracted network for a short while on the data and towards
its parent. `stretto.train.loop` takes the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from stretto.base.track import say
from stretto.model.parallel import Origin, copied, random_network
from stretto.model.spec import SubnetChoice
from stretto.model.transformer import Transformer
from stretto.ops.shards import is_shard
from stretto.ops.tuning import threads_kept
from stretto.train.loop import Job, Plan, RankAt, Trained, Training
from stretto.train.recipe import (
    ElasticizeRecipe,
    HealRecipe,
    MixtureConfig,
    Recipe,
    SelfTaughtConfig,
    SftRecipe,
    with_branches,
)
from stretto.train.sampler import MicroPlan, idle_widths
from stretto.train.step import Distil
from stretto.train.teacher import CacheKey, LogitCache, Lookup, hash_state


@threads_kept()
def pretrain(recipe: Recipe, job: Job, parent: Origin | None = None) -> Trained:
    """Pre-train the network of ``recipe``; returns the maximum network.

    Args:
        parent: network of the recipe's shape to start from; None: random weights.

    Raises:
        UserError: ``resume`` is set, and the recipe or the data changed.
        NonFiniteError: a loss or gradient was not finite. The newest snapshot is unaffected.
    """
    train, elastic, config = recipe.train, recipe.elastic, recipe.network()
    begun = parent or random_network(config, train.seed)
    rank_at = RankAt(elastic.rank_layers_at, elastic.rank_experts_at, first=1)
    training = Training("pretrain", recipe, job, replace(begun, config=config), elastic.anchors, rank_at)
    return training.run(_self_taught(training, elastic))


def _self_taught(training: Training, elastic: SelfTaughtConfig) -> Callable[[int], Plan]:
    """Plan of every step of a run that trains a mixture of Subnets with the current network as their teacher."""
    _note_idle_widths(training, elastic)

    def plan(step: int) -> Plan:
        full = training.model.config.full()
        teacher = Distil(training.model, full, elastic.anchor_ce_weight, elastic.joint)
        passes: list[tuple[MicroPlan, Distil | Lookup | None]] = []
        for micro in training.draw(elastic, step):
            is_smaller = micro.subnet != full or micro.num_narrow_rows > 0
            passes.append((micro, teacher if micro.is_anchor or (elastic.joint and is_smaller) else None))
        return Plan(passes, _balance_rate(training, elastic, step))

    return plan


def _note_idle_widths(training: Training, elastic: MixtureConfig) -> None:
    note = idle_widths(training.model.config, elastic)
    if note is not None and training.ranks.is_first:
        say(f"{training.stage}: {note}")


def _balance_rate(training: Training, elastic: MixtureConfig, step: int) -> float:
    """Step size of the balance biases in ``step``."""
    steps = training.train.steps
    decays = step >= steps - round(training.optim.decay_fraction * steps)
    return elastic.balance_final_rate if decays else elastic.balance_rate


@threads_kept()
def elasticize(
    recipe: ElasticizeRecipe,
    job: Job,
    parent: Origin,
    teacher: Origin | None = None,
) -> Trained:
    """Train the network ``parent`` so that its smaller Subnets work too; returns it.

    Every micro-batch, the full network's included, has a loss of cross-entropy and KL to a frozen teacher: the parent, or the network
    ``teacher``. Layers and experts are dropped in the parent's orders; an order that the parent lacks is measured
    before the first step. Raises the errors of `pretrain`.

    Args:
        recipe: completed for this network by `ElasticizeRecipe.for_network`.
    """
    elastic = recipe.elastic
    config = with_branches(parent.config, elastic)
    lacks_experts = config.expert_order is None and config.num_moe_layers
    rank_at = RankAt(
        ((0.0,) if config.layer_order is None else ()) + elastic.rank_layers_at,
        ((0.0,) if lacks_experts else ()) + elastic.rank_experts_at,
    )
    training = Training("elasticize", recipe, job, replace(parent, config=config), elastic.anchors, rank_at)
    taught_by = teacher or parent
    is_parents = training.step == 0 and recipe.optim.master != "bf16_stochastic"  # which rounds the weights
    if teacher is None and recipe.cached_logits is None and is_parents and job.ranks.world == 1:
        # its weights still are the parent's, which need not be read again
        taught_by = copied(training.model, parent.config)
    lesson = _elasticize_teacher(taught_by, recipe, training)
    _note_idle_widths(training, elastic)

    def plan(step: int) -> Plan:
        scheduled = max(step, training.past)
        mixture = recipe.mixture_at(training.model.config, scheduled)
        taught = replace(lesson, ce_weight=recipe.ce_weight_at(scheduled))
        passes = [(micro, taught) for micro in training.draw(mixture, step)]
        return Plan(passes, _balance_rate(training, elastic, step))

    return training.run(plan)


def _elasticize_teacher(origin: Origin, recipe: ElasticizeRecipe, training: Training) -> Distil | Lookup:
    """``origin`` as the source of distillation targets: in memory, or a cache of its logits on disk that this function fills."""
    train, ranks, job = recipe.train, training.ranks, training.job
    dtype = torch.bfloat16 if recipe.teacher_dtype == "bfloat16" else torch.float32
    teacher = training.frozen(origin, dtype)
    for parameter in teacher.parameters():  # balance biases stay in fp32
        if is_shard(parameter):  # FSDP keeps its buffers, in fp32
            parameter.to_local().copy_(parameter.to_local().to(dtype))
        else:
            parameter.data = parameter.data.to(dtype)
    if recipe.cached_logits is None:
        return Distil(teacher, teacher.config.full(), ce_weight=1.0)
    key = CacheKey(
        data_hash=job.data_hash,
        loader_seed=train.seed,
        seq_len=train.seq_len,
        top_k=recipe.cached_logits,
        teacher=hash_state(teacher, dtype),
        dtype=training.pace.dtype,
    )
    cache = LogitCache(job.run / "teacher", key, teacher.config.vocab_size)
    with training.meter:
        cache.fill(teacher, job.loader, train.steps * train.rows, train.micro_rows, ranks)
    return Lookup(cache, teacher.config, ce_weight=1.0)


@threads_kept()
def heal(recipe: HealRecipe, job: Job, student: Origin, teacher: Origin | None) -> Trained:
    """Train the network ``student`` with a new optimiser. ``teacher``: the frozen parent, which runs at full size.

    The loss is cross-entropy if there is no teacher or ``ce_weight`` is 1, else a weighted sum with KL(teacher ‖ student). Raises the
    errors of `pretrain`.
    """
    training = Training("heal", recipe, job, student, {}, RankAt())
    lesson = None
    if teacher is not None and recipe.ce_weight < 1.0:
        network = training.frozen(teacher)
        lesson = Distil(network, network.config.full(), recipe.ce_weight)
    return training.run(_full_network(training, lesson, recipe.balance_rate))


def _full_network(training: Training, lesson: Distil | None, balance_rate: float) -> Callable[[int], Plan]:
    """Plan of every step of a run that trains the full network alone."""
    micro = MicroPlan("full", training.model.config.full(), None, False)
    plan = Plan([(micro, lesson)] * training.train.micro_batches, balance_rate)
    return lambda step: plan


@threads_kept()
def finetune(
    recipe: SftRecipe,
    job: Job,
    parent: Origin,
    presets: Mapping[str, SubnetChoice],
    adapt: Callable[[Transformer], None] | None = None,
) -> Trained:
    """Fine-tune the network ``parent`` on the targets in the batches: the full network, or the recipe's mixture of
    its Subnets with the current network as their teacher. Raises the errors of `pretrain`.

    Args:
        recipe: completed for this network by `SftRecipe.for_network`.
        presets: Subnets whose held-out losses are logged.
        adapt: called with the network before its optimiser is created; freezes weights and adds adapters
            (`stretto.model.lora`).
    """
    elastic = recipe.elastic
    config = parent.config if elastic is None else with_branches(parent.config, elastic)
    training = Training("sft", recipe, job, replace(parent, config=config), presets, RankAt(), adapt)
    if elastic is None:
        return training.run(_full_network(training, None, recipe.balance_rate))
    return training.run(_self_taught(training, elastic))
