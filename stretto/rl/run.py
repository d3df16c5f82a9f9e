"""A reinforcement-learning run, start to end: roles hired, groups drawn and trained, a checkpoint written.

The main path: `run_rl` → `_attempt` → `stretto.rl.driver.Driver` → the roles. Imports no torch: that happens where the
trainer and the engines live.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stretto.base.errors import UserError
from stretto.base.trajectory import WeightVersion
from stretto.rl.buffer import GroupRef
from stretto.rl.checks import Checked, checked
from stretto.rl.controller import Controller
from stretto.rl.driver import Driver, Plan, Waits
from stretto.rl.factories import Factories, SourceTables, make_factories, needs_sandbox
from stretto.rl.folder import JOURNAL_FILE, claimed, remember_start, sweep, take_up
from stretto.rl.hiring import hired
from stretto.rl.logbook import Logbook
from stretto.rl.measures import StepReport
from stretto.rl.prompts import Prompts
from stretto.rl.recipe import RlRecipe
from stretto.rl.roles import Roles, TrainerLost
from stretto.rl.throttle import Limits, default_window
from stretto.rl.trace import Trace, write_trace
from stretto.rl.watchdog import Watchdog
from stretto.runtime.local import open_runtime
from stretto.runtime.runtime import RoleDied, Runtime, RuntimeFailure
from stretto.text.tokenizer import load_tokenizer

CHECKPOINT = "checkpoint"
_START_S = 300.0
"""For a role to be made: reading a checkpoint, starting an interpreter that imports torch."""
_STEP_S = 3600.0
"""A trainer that hangs; the watchdog speaks up earlier for everybody else."""
_WRITE_S = 600.0


@dataclass(frozen=True, slots=True)
class Job:
    """What a run is told."""

    recipe: RlRecipe
    folder: Path
    start: Path
    """Checkpoint folder of the policy to begin with."""
    resume: bool = False
    device: str = "cpu"
    """Of engines and trainer."""
    wandb_project: str | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """What a finished run hands on."""

    checkpoint: Path
    first_reward: float
    """Mean held-out reward before the first step."""
    last_reward: float
    num_attempts: int


def run_rl(job: Job, advance: Callable[[int, str | None], None], say: Callable[[str], None]) -> Result:
    """Run ``job``.

    Args:
        advance: moves a progress bar on by steps, with a short text behind it.
        say: prints a line.

    Raises:
        UserError: a task that fails its own check, a resume that does not fit, or a run that cannot go on.
    """
    gc.freeze()  # the collector would look through all modules again and again, for a tenth of the loop's time
    try:
        return asyncio.run(_run(job, advance, say))
    finally:
        gc.unfreeze()


async def _run(job: Job, advance: Callable[[int, str | None], None], say: Callable[[str], None]) -> Result:
    recipe, folder = job.recipe, job.folder
    tables = SourceTables(dict(recipe.sources), recipe.sandbox)
    tokenizer = load_tokenizer(job.start)
    found = await asyncio.to_thread(checked, recipe, tables, tokenizer, say)
    with claimed(folder):
        async with await open_runtime(recipe.runtime.kind, recipe.runtime.address) as runtime:
            resumes = take_up(recipe, folder, job.resume)
            factories = make_factories(recipe, folder, job.start, tables, tokenizer, job.device)
            return await _attempts(job, runtime, factories, found, resumes, advance, say)


async def _attempts(
    job: Job,
    runtime: Runtime,
    factories: Factories,
    found: Checked,
    resumes: bool,
    advance: Callable[[int, str | None], None],
    say: Callable[[str], None],
) -> Result:
    """As many as it takes: each ends with the run, or with the death of its trainer."""
    recipe, folder = job.recipe, job.folder
    num_attempts = 0
    with Trace(folder) as trace, Logbook(folder, recipe, resumes, job.wandb_project, advance, say) as logbook:
        while True:
            num_attempts += 1
            try:
                async with hired(runtime, factories, recipe, found.at_once, _START_S) as roles:
                    await _attempt(job, roles, found.prompts, trace, logbook, resumes)
                break
            except (TrainerLost, RoleDied) as lost:  # the latter: before everybody had come
                if num_attempts > recipe.failures.restarts:
                    raise UserError(
                        f"{lost}; failures.restarts: {num_attempts} attempts were lost; continue with --resume"
                    ) from lost
                say(f"{lost}; going on from the last snapshot")
                await _dismiss(runtime)
                resumes = (folder / JOURNAL_FILE).exists()
    write_trace(folder)
    return Result(folder / CHECKPOINT, logbook.first_reward, logbook.last_reward, num_attempts)


async def _attempt(job: Job, roles: Roles, prompts: Prompts, trace: Trace, logbook: Logbook, resumes: bool) -> None:
    """From the last snapshot, or the start, to the recipe's last step; ends with a checkpoint."""
    controller = await _controller(job, roles, prompts, resumes)
    try:
        await _train(job, roles, controller, prompts, trace, logbook)
    finally:
        controller.close()


async def _train(
    job: Job, roles: Roles, controller: Controller, prompts: Prompts, trace: Trace, logbook: Logbook
) -> None:
    recipe, folder = job.recipe, job.folder
    weights: WeightVersion = await roles.call_trainer("publish", deadline_s=_STEP_S)
    watchdog = Watchdog(recipe.failures.stuck_s)
    logbook.begins(roles, controller, trace)

    def stepped(report: StepReport, refs: tuple[GroupRef, ...], waits: Waits) -> None:
        logbook.stepped(report, refs, waits)
        if report.step % recipe.train.eval_every == 0 and report.step < recipe.train.steps:
            logbook.evaluate_beside(prompts, report.step)

    train = recipe.train
    plan = Plan(
        train.steps, train.snapshot_every, train.keep_snapshots, train.prompts, recipe.failures.lease_s, _STEP_S
    )
    async with logbook.watching():
        async with Driver(plan, roles.runtime, roles, controller, weights, trace, watchdog, stepped) as driver:
            if controller.version == 0:
                await logbook.evaluate(prompts, 0)
            await driver.run()
            await logbook.evaluate(prompts, controller.version)
            await roles.call_trainer("write", folder / CHECKPOINT, deadline_s=_WRITE_S)
        controller.finish()


async def _controller(job: Job, roles: Roles, prompts: Prompts, resumes: bool) -> Controller:
    """The controller, standing where the trainer stands."""
    recipe = job.recipe
    rollout = recipe.rollout
    # Slow tools and verifiers hold groups up outside of the engines: then none of them may wait for its turn.
    is_fast = rollout.max_turns == 1 and not needs_sandbox(recipe.sources.values())
    capacity = max(1, rollout.engines * rollout.max_batch // rollout.group) if is_fast else None
    limits = Limits(
        prompts=recipe.train.prompts,
        staleness=recipe.staleness,
        window=recipe.window or default_window(recipe.train.prompts, recipe.staleness, capacity),
        drop_uniform=recipe.loss.drop_uniform,
        lease_s=recipe.failures.lease_s,
        max_attempts=recipe.failures.max_attempts,
        num_steps=recipe.train.steps,
    )
    journal = job.folder / JOURNAL_FILE
    if not resumes:
        remember_start(job.folder, job.start)
        return Controller.start(limits, prompts.task, journal)
    cut = await roles.call_trainer("resume", deadline_s=_WRITE_S)
    controller = Controller.resume(limits, prompts.task, journal, cut)
    remember_start(job.folder, job.start)  # the trainer has found it to be the same; it may have moved
    await asyncio.to_thread(sweep, job.folder, controller)
    return controller


async def _dismiss(runtime: Runtime) -> None:
    """End all roles of an attempt; those that are dead already are no trouble."""
    for handle in reversed(runtime.handles()):
        try:
            await runtime.kill(handle, hard=True)
        except RuntimeFailure:
            continue
