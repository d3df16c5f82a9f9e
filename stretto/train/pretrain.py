"""Pre-training: every step draws Subnets of the maximum network and trains them together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stretto.base.errors import UserError
from stretto.base.receipt import Meter
from stretto.base.records import new_run_id
from stretto.base.track import Tracker
from stretto.data.loader import Loader
from stretto.model.parallel import Ranks, compute_dtype, device_name, shard
from stretto.model.transformer import Transformer, build
from stretto.optim.build import build_optimizers
from stretto.train.loop import Job, Observe, Plan, State, run_loop
from stretto.train.metering import metered
from stretto.train.recipe import Recipe
from stretto.train.sampler import Sampler
from stretto.train.snapshot import check_same_run, read_meta
from stretto.train.step import Distil

RankLayers = Callable[[Transformer], tuple[int, ...]]
"""Measures the layer order, most important first."""


@dataclass(frozen=True, slots=True)
class Trained:
    """What a finished stage hands on."""

    model: Transformer
    meter: Meter
    run_id: str
    tokens_by_kind: dict[str, int]


def pretrain(
    recipe: Recipe,
    run: Path,
    loader: Loader,
    data_hash: str,
    ranks: Ranks,
    *,
    observe: Observe,
    rank_layers: RankLayers | None = None,
    tracker: Callable[[int], Tracker] | None = None,
    resume: bool = False,
) -> Trained:
    """Train ``recipe`` in ``run`` and return the maximum network.

    ``tracker`` opens the log at a first step; only rank 0 has one. With ``resume`` the newest snapshot of ``run``
    goes on; the result is bit for bit that of an uninterrupted run.

    Raises:
        UserError: a resume without a snapshot or under another recipe or data.
        NonFiniteError: a loss or gradient was not finite; the last snapshot is good.
    """
    config = recipe.network()
    dtype = compute_dtype(recipe.train.dtype, ranks.device)
    model = shard(build(config, recipe.train.seed, ranks.device), ranks, dtype)
    optimizers = build_optimizers(recipe.optim, model)
    plain = recipe.model_dump(mode="json")
    job = Job("pretrain", run, recipe.train, recipe.optim, plain, data_hash, new_run_id(), ranks)
    meter = Meter("pretrain", device_name(ranks.device), ranks.world)
    state = State(model, optimizers, loader, meter)
    if resume:
        job, state = resumed(job, state)
    log = tracker(state.step) if tracker is not None and ranks.is_first else None
    try:
        planner = _planner(recipe, state)
        run_loop(job, state, planner, observe, log, _layer_ranker(recipe, state, ranks, rank_layers))
    finally:
        if log is not None:
            log.close()
    return Trained(state.model, state.meter, job.run_id, dict(state.tokens_by_kind))


def resumed(job: Job, state: State) -> tuple[Job, State]:
    """``state`` as the newest snapshot left it, and the job under that run's id."""
    path = job.snapshots.latest()
    if path is None:
        raise UserError(f"{job.run}: --resume: there is no snapshot in it; start the run without --resume")
    meta = read_meta(path)
    check_same_run(meta, job.recipe, job.data_hash, job.run)
    job.snapshots.load(path, state.model, state.optimizers, job.ranks)
    state.model.config = state.model.config.replace(layer_order=meta.layer_order)
    state.loader.restore(meta.loader)
    meter = Meter(job.stage, meta.receipt.device, job.ranks.world, spent=meta.receipt)
    job = Job(job.stage, job.run, job.train, job.optim, job.recipe, job.data_hash, meta.run_id, job.ranks)
    return job, State(state.model, state.optimizers, state.loader, meter, meta.step, Counter(meta.tokens_by_kind))


def _planner(recipe: Recipe, state: State) -> Callable[[int], Plan]:
    """Plans from the sampler; the layer order in force is the model's."""
    train, elastic = recipe.train, recipe.elastic
    decay_starts = train.steps - round(recipe.optim.decay_fraction * train.steps)

    def plan(step: int) -> Plan:
        config = state.model.config
        sampler = Sampler(config, elastic, train.micro_rows, train.micro_batches, train.steps, train.seed)
        micro = sampler.draw(step)
        teacher = Distil(state.model, config.full(), elastic.anchor_ce_weight, elastic.joint)
        full = config.full()
        taught = [plan.is_anchor or (elastic.joint and plan.subnet != full) for plan in micro]
        distil = {index: teacher for index, is_taught in enumerate(taught) if is_taught}
        return Plan(micro, distil, elastic.balance_final_rate if step >= decay_starts else elastic.balance_rate)

    return plan


def _layer_ranker(recipe: Recipe, state: State, ranks: Ranks, rank_layers: RankLayers | None) -> Callable[[int], None]:
    """Measures the layer order anew at the recipe's points of the run, and counts what that costs."""
    if not recipe.elastic.rank_layers_at:
        return lambda step: None
    assert rank_layers is not None, "elastic.rank_layers_at needs something that ranks layers"
    measure = rank_layers
    at = {max(1, round(share * recipe.train.steps)) for share in recipe.elastic.rank_layers_at}

    def refresh(step: int) -> None:
        if step in at:
            with state.meter, metered(state.model, state.meter, ranks.world):
                order = ranks.agree(measure(state.model))  # each rank saw rows of its own
            state.model.config = state.model.config.replace(layer_order=order)

    return refresh
