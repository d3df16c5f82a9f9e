"""A reinforcement-learning run, start to end: roles hired, groups drawn and trained, a checkpoint written.

The main path: `run_rl` → `_attempt` → `stretto.rl.driver.Driver` → the roles. Imports no torch: that happens where the
trainer and the engines live.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stretto.base.errors import UserError
from stretto.base.paths import write_json
from stretto.base.trajectory import WeightVersion
from stretto.rl.buffer import GroupRef
from stretto.rl.controller import Controller
from stretto.rl.driver import Driver, Plan, TrainerLost, Waits
from stretto.rl.factories import SourceTables, make_factories, needs_sandbox
from stretto.rl.logbook import Logbook
from stretto.rl.measures import StepReport
from stretto.rl.prompts import Prompts, plan_prompts
from stretto.rl.recipe import RlRecipe
from stretto.rl.roles import Roles, hired
from stretto.rl.throttle import Limits, default_window
from stretto.rl.trace import Trace, write_trace
from stretto.rl.watchdog import Watchdog
from stretto.runtime.open import open_runtime
from stretto.runtime.runtime import Runtime, RuntimeFailure
from stretto.text.tokenizer import load_tokenizer

JOURNAL_FILE = "groups.jsonl"
RECIPE_FILE = "recipe.json"
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
    return asyncio.run(_run(job, advance, say))


async def _run(job: Job, advance: Callable[[int, str | None], None], say: Callable[[str], None]) -> Result:
    recipe, folder = job.recipe, job.folder
    tables = SourceTables(dict(recipe.sources), recipe.sandbox)
    sizes, at_once = await asyncio.to_thread(_checked, tables, say)
    prompts = plan_prompts(recipe, sizes)
    if not job.resume and (folder / JOURNAL_FILE).exists():
        raise UserError(
            f"{folder}: holds a run already; continue it with --resume, or choose another folder with --out"
        )
    write_json(folder / RECIPE_FILE, recipe.model_dump(mode="json"))
    factories = make_factories(recipe, folder, job.start, tables, load_tokenizer(job.start), job.device)
    runtime = await open_runtime(recipe.runtime.kind, recipe.runtime.address)
    num_attempts, resumes = 0, job.resume
    try:
        with Trace(folder) as trace, Logbook(folder, recipe, job.resume, job.wandb_project, advance, say) as logbook:
            while True:
                num_attempts += 1
                try:
                    async with hired(runtime, factories, recipe, at_once, _START_S) as roles:
                        await _attempt(job, roles, prompts, trace, logbook, resumes)
                    break
                except TrainerLost as lost:
                    if num_attempts > recipe.failures.restarts:
                        raise UserError(
                            f"trainer: {lost}; it has died {num_attempts} times; continue with --resume"
                        ) from lost
                    say(f"{lost}; going on from the last snapshot")
                    await _dismiss(runtime)
                    resumes = True
    finally:
        await runtime.close()
        if (folder / JOURNAL_FILE).exists():
            write_trace(folder)
    return Result(folder / CHECKPOINT, logbook.first_reward, logbook.last_reward, num_attempts)


async def _attempt(job: Job, roles: Roles, prompts: Prompts, trace: Trace, logbook: Logbook, resumes: bool) -> None:
    """From the last snapshot, or the start, to the recipe's last step; ends with a checkpoint."""
    recipe, folder, runtime = job.recipe, job.folder, roles.runtime
    controller = await _controller(job, roles, prompts, resumes)
    weights: WeightVersion = await runtime.call(roles.trainer, "publish", deadline_s=_STEP_S)
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
    driver = Driver(plan, runtime, roles, controller, weights, trace, watchdog, stepped)
    watch = asyncio.create_task(logbook.watch())
    state = "stopped"
    try:
        await driver.begin()
        if controller.version == 0:
            await logbook.evaluate(prompts, 0)
        await driver.run()
        await logbook.evaluate(prompts, controller.version)
        await runtime.call(roles.trainer, "write", folder / CHECKPOINT, deadline_s=_WRITE_S)
        controller.finish()
        state = "done"
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        await logbook.ends(state)


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
        return Controller.start(limits, prompts.task, journal)
    cut = await roles.runtime.call(roles.trainer, "resume", deadline_s=_WRITE_S)
    return Controller.resume(limits, prompts.task, journal, cut)


def _checked(tables: SourceTables, say: Callable[[str], None]) -> tuple[dict[str, int | None], dict[str, int]]:
    """Validate every source, before anything is started; how many problems each has, and how many answers one worker judges at once."""
    sources = tables()
    try:
        for source in sources.values():
            source.validate()
        say(tables.describe(sources))
        sizes = {name: source.num_items for name, source in sources.items()}
        return sizes, {name: source.at_once for name, source in sources.items()}
    finally:
        for source in sources.values():
            source.close()


async def _dismiss(runtime: Runtime) -> None:
    """End all roles of an attempt; those that are dead already are no trouble."""
    for handle in reversed(runtime.handles()):
        try:
            await runtime.kill(handle, hard=True)
        except RuntimeFailure:
            continue
