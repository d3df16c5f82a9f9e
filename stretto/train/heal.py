"""Healing: an extracted network is trained for a short while, towards the data and towards its parent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from stretto.base.receipt import Meter
from stretto.base.records import new_run_id
from stretto.base.track import Tracker
from stretto.data.loader import Loader
from stretto.model.parallel import Ranks, compute_dtype, device_name, shard
from stretto.model.transformer import Transformer
from stretto.optim.build import build_optimizers
from stretto.train.loop import Job, Observe, Plan, State, run_loop
from stretto.train.pretrain import Trained, resumed
from stretto.train.recipe import HealRecipe
from stretto.train.sampler import MicroPlan
from stretto.train.step import Distil


def heal(
    recipe: HealRecipe,
    run: Path,
    model: Transformer,
    teacher: Transformer | None,
    loader: Loader,
    data_hash: str,
    ranks: Ranks,
    *,
    observe: Observe,
    tracker: Callable[[int], Tracker] | None = None,
    resume: bool = False,
) -> Trained:
    """Train ``model`` in place with a fresh optimiser; ``teacher`` is the frozen parent, run in full.

    The loss is CE where there is no teacher or ``ce_weight`` is 1, otherwise a blend with KL(teacher ‖ model).
    """
    if teacher is not None:
        teacher = teacher.to(ranks.device).requires_grad_(False)
    model = shard(model.to(ranks.device), ranks, compute_dtype(recipe.train.dtype, ranks.device))
    job = Job("heal", run, recipe.train, recipe.optim, recipe.model_dump(mode="json"), data_hash, new_run_id(), ranks)
    meter = Meter("heal", device_name(ranks.device), ranks.world)
    state = State(model, build_optimizers(recipe.optim, model), loader, meter)
    if resume:
        job, state = resumed(job, state)
    micro = [MicroPlan("full", model.config.full(), None, False)] * recipe.train.micro_batches
    distil = {}
    if teacher is not None and recipe.ce_weight < 1.0:
        lesson = Distil(teacher, teacher.config.full(), recipe.ce_weight)
        distil = dict.fromkeys(range(recipe.train.micro_batches), lesson)
    log = tracker(state.step) if tracker is not None and ranks.is_first else None
    try:
        run_loop(job, state, lambda step: Plan(micro, distil, recipe.balance_rate), observe, log)
    finally:
        if log is not None:
            log.close()
    return Trained(state.model, state.meter, job.run_id, dict(state.tokens_by_kind))
