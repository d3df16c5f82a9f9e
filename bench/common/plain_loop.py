"""The plain synchronous RL loop: the reference for an asynchronous run with a staleness of 0, equal to the bit.

It samples, trains, publishes and activates in sequence, without controller, ledger, leases or retries. It shares only the roles with
the asynchronous run that is compared with it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from torch import Tensor

from stretto.base.errors import UserError
from stretto.base.trajectory import GroupRef, Task, WeightVersion
from stretto.flow.agent import AgentRole
from stretto.flow.clients import Clients
from stretto.flow.prompts import SourceTables, prompts_of
from stretto.flow.reward import RewardRole
from stretto.flow.rollout import EngineRole, open_rollout_engine
from stretto.learning.metrics import StepReport
from stretto.learning.recipe import RlRecipe
from stretto.learning.trainer import TrainerRole
from stretto.learning.weights import fetch
from stretto.model.parallel import join
from stretto.runtime.store import FolderStore
from stretto.text.tokenizer import load_tokenizer

_PATIENCE = 50
"""Limit of dropped groups in a step for each group that the step needs."""


async def run_plainly(
    recipe: RlRecipe,
    folder: Path,
    start: Path,
    checkpoint: Path,
    report: Callable[[StepReport], None] = lambda report: None,
    taken_over: Callable[[WeightVersion], Mapping[str, Tensor]] = fetch,
    device: str = "cpu",
    open_trainer: Callable[..., TrainerRole] = TrainerRole,
) -> list[StepReport]:
    """`run_synchronously` in ``folder`` from the checkpoint ``start``, all roles in this process and on ``device``; writes
    ``checkpoint``. For each version the engine activates the weights that ``taken_over`` returns.
    Raises UserError: as `run_synchronously`, or a role refuses to start."""
    tables = SourceTables(dict(recipe.sources), recipe.sandbox)
    with tables.opened() as sources:
        prompts = prompts_of(recipe, sources)
    engine = EngineRole(partial(open_rollout_engine, recipe, start, device), taken_over)
    try:
        clients = Clients([engine], RewardRole(tables, recipe.runtime.rewards.deadline_s))
        agent = AgentRole(recipe, FolderStore(folder), load_tokenizer(start), tables, lambda caller: clients)
        trainer = open_trainer(recipe, folder, start, ranks=join(device))
        reports = await run_synchronously(recipe, prompts.task, agent, [engine], trainer, report)
        trainer.write(checkpoint)
    finally:
        engine.close()
    return reports


async def run_synchronously(
    recipe: RlRecipe,
    task_of: Callable[[int], Task],
    agent: AgentRole,
    engines: Sequence[EngineRole],
    trainer: TrainerRole,
    report: Callable[[StepReport], None] = lambda report: None,
) -> list[StepReport]:
    """Train ``recipe`` from the trainer's weights to its last step, or the first after its time; ``agent`` samples from ``engines``.

    Raises:
        GroupFailed: a group could not be sampled.
        UserError: nothing to learn from: all rewards are equal, group after group.
    """
    train, ordinal = recipe.train, 0
    reports: list[StepReport] = []
    stop_s = time.monotonic() + (recipe.runtime.stop_s or math.inf)
    await _activate(trainer, engines)
    for step in range(train.steps):
        refs: list[GroupRef] = []
        num_dropped = 0
        # take ordinals in order; replace dropped groups until the step has enough
        while num_missing := train.prompts - len(refs):
            if reports and time.monotonic() > stop_s:
                return reports
            tasks = [task_of(each) for each in range(ordinal, ordinal + num_missing)]
            ordinal += num_missing
            groups = await asyncio.gather(*(agent.run_group(task, 0) for task in tasks))
            kept = [ref for ref in groups if not (recipe.loss.drop_uniform and ref.is_uniform)]
            refs, num_dropped = refs + kept, num_dropped + len(groups) - len(kept)
            if num_dropped > _PATIENCE * train.prompts:
                raise UserError(
                    f"loss.drop_uniform: {num_dropped} groups of step {step} had rewards that were all equal; take problems "
                    "that the network solves now and then, or set it to false"
                )
        reports.append(await asyncio.to_thread(trainer.step, refs, step))
        report(reports[-1])
        await _activate(trainer, engines)
    return reports


async def _activate(trainer: TrainerRole, engines: Sequence[EngineRole]) -> None:
    await asyncio.to_thread(trainer.copy_weights)
    version = await trainer.publish()
    assert version is not None, "the plain loop supports one rank"
    for engine in engines:
        await engine.activate(version)
