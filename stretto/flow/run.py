"""An RL run from start to end in its run folder: claim, resume, train, clean up.

The main path: `opened`, `run_opened` → `_run` → `_attempt` → `stretto.flow.driver.Driver` → the roles. Imports no torch.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePath

from stretto.base.config import check_unchanged, completed
from stretto.base.errors import InfraError, UserError
from stretto.base.paths import (
    CHECKPOINT,
    RECIPE_FILE,
    checkpoint_folder,
    claimed,
    read_json,
    remove,
    stored_path,
    write_json,
    write_text,
)
from stretto.base.records import find_lineage
from stretto.base.track import read_metrics
from stretto.flow.controller import Controller, Limits, default_window
from stretto.flow.driver import Driver
from stretto.flow.files import RunFiles, check_store, open_files
from stretto.flow.launch import (
    CALL_SLACK_S,
    ERROR_FILE,
    Job,
    Roles,
    TrainerLost,
    check_servers,
    is_loss,
    make_factories,
    start_roles,
    with_precision,
)
from stretto.flow.ledger import Ledger
from stretto.flow.log import Advance, Logbook, Say, Trace, write_trace
from stretto.flow.prompts import Prompts, SourceTables, check_sources
from stretto.learning.recipe import (
    GROUPS,
    JOURNAL_FILE,
    LAYOUT,
    OLD_JOURNAL_FILE,
    SNAPSHOTS,
    START_FILE,
    STEERING,
    WEIGHTS,
    RlRecipe,
)
from stretto.learning.samples import logged_ordinals, remove_logs
from stretto.model.spec import ModelConfig
from stretto.runtime.local import open_runtime
from stretto.runtime.runtime import (
    DeadlinePassed,
    Restarts,
    RoleDied,
    RoleError,
    to_end,
)
from stretto.runtime.store import Store, complete_folders, remove_local_folder
from stretto.text.tokenizer import load_tokenizer

MOVED = "eval/kl_start"
"""Name of the metric `Result.moved`."""
_WRITE_S = 600.0
"""Deadline for the trainer to read a snapshot or to write a checkpoint. Longer for a large one, see `stretto.flow.launch.checkpoint_s`."""


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a finished run."""

    checkpoint: Path
    first_reward: float
    """Mean held-out reward before the first step."""
    last_reward: float
    moved: float
    """KL divergence of the policy to its start on the last held-out samples, in nats per token."""


@contextmanager
def opened(folder: Path, resume: bool) -> Iterator[bool]:
    """Claim a run folder until the end of the context, which gets whether the folder holds a run to resume. A run that was killed before
    its first group does not count.
    Raises UserError: there is no folder to resume, or it holds a run and ``resume`` is False, or an older version began that run."""
    if resume and not folder.is_dir():
        raise UserError(f"{folder}: --resume: there is no such run; start it without --resume")
    with claimed(folder):
        if (folder / OLD_JOURNAL_FILE).exists():
            raise UserError(
                f"{folder / OLD_JOURNAL_FILE}: written by an older version; end that run with it, or choose another folder with --out"
            )
        has_run = (folder / JOURNAL_FILE).exists() or any((folder / SNAPSHOTS).glob("step-*"))
        if has_run and not resume:
            raise UserError(
                f"{folder}: holds a run already; continue it with --resume, or choose another folder with --out"
            )
        yield has_run


def check_places(job: Job, config: ModelConfig) -> None:
    """Check, before the start of ``job`` is trained, which will have the shape ``config``, that the roles will find a cluster with room
    for them, their store, and the servers that sample for them. Leaves nothing behind.
    Raises UserError: one of them is missing, refuses, or does not fit."""

    async def check() -> None:
        recipe = job.recipe
        async with await open_runtime(recipe.runtime.kind, recipe.runtime.address) as runtime:
            await runtime.check(recipe.resources.needs())
            await asyncio.to_thread(check_store, recipe)
            if recipe.rollout.address:
                await check_servers(runtime, await with_precision(runtime, job, lambda text: None), config)

    try:
        to_end(check())
    except (RoleDied, DeadlinePassed) as failure:
        raise UserError(f"rollout.address: cannot be checked: {failure}") from failure


def run_rl(job: Job, advance: Advance, say: Say) -> Result:
    """`run_opened` in a folder that is opened first."""
    with opened(job.folder, job.resume) as has_run:
        return run_opened(job, has_run, advance, say)


def run_opened(job: Job, has_run: bool, advance: Advance, say: Say) -> Result:
    """Run ``job`` to its end in its folder, which is `opened`, from the last snapshot or the start.
    Raises UserError: a task fails its own check, the run in the folder does not match, or the run cannot continue."""
    # in a cluster, roles have other working directories
    placed = replace(job, folder=job.folder.resolve(), start=job.start.resolve())
    gc.freeze()  # else garbage collection scans all modules repeatedly, for a tenth of the loop's time
    try:
        found = to_end(_run(placed, has_run, advance, say))
        return replace(found, checkpoint=job.folder / CHECKPOINT)
    except InfraError as error:
        raise UserError(f"{error}; continue with --resume when it answers") from error
    except (RoleError, UserError) as error:
        inside = error if isinstance(error, RoleError) else error.__cause__
        if isinstance(inside, RoleError):
            write_text(job.folder / ERROR_FILE, inside.trace)
        if isinstance(error, RoleError):
            raise UserError(
                f"{error}; {job.folder / ERROR_FILE} has its traceback; then continue with --resume"
            ) from error
        raise
    finally:
        gc.unfreeze()


async def _run(job: Job, resumes: bool, advance: Advance, say: Say) -> Result:
    """Make attempts until one finishes the run. An attempt also ends when its trainer dies; the other roles go on in the next one."""
    if resumes:
        job = replace(job, recipe=in_order(job.recipe, job.folder))
    recipe, folder = job.recipe, job.folder
    tables, tokenizer = SourceTables(dict(recipe.sources), recipe.sandbox), load_tokenizer(job.start)
    prompts, at_once = await asyncio.to_thread(check_sources, recipe, tables, tokenizer, say)
    again = Restarts(recipe.failures.restarts, recipe.failures.restart_window_s)
    async with await open_runtime(recipe.runtime.kind, recipe.runtime.address) as runtime:
        await runtime.check(recipe.resources.needs())
        job = await with_precision(runtime, job, say)
        recipe = job.recipe
        if resumes:
            check_recipe(recipe, folder)
        files = await asyncio.to_thread(open_files, recipe, folder, job.start)
        if resumes:
            check_steps(recipe, files)
        write_json(folder / RECIPE_FILE, recipe.model_dump(mode="json"))
        factories = make_factories(job, tables, tokenizer, files)
        roles: Roles | None = None
        async with AsyncExitStack() as stack:
            trace = stack.enter_context(Trace(folder))
            log = Logbook(job, prompts, trace, advance, say)
            while True:
                try:
                    with trace.span("trainer", "start"):
                        if roles is None:
                            started = start_roles(runtime, factories, recipe, at_once)
                            roles = await stack.enter_async_context(started)
                        else:
                            roles = await roles.with_trainer(factories, recipe)
                    again.began()
                    await _attempt(job, files, roles, prompts, trace, log, resumes)
                    break
                except DeadlinePassed as late:
                    raise UserError(f"{late}; when the cluster has room for it, continue with --resume") from late
                except (TrainerLost, RoleDied, RoleError) as lost:  # the last two: while the roles were started
                    if isinstance(lost, RoleError) and not is_loss(lost):
                        raise
                    pause_s = again.next_pause_s()
                    if pause_s is None:
                        raise UserError(
                            f"{lost}, after {again} of the trainer; failures.restarts: correct the cause, or raise it; then continue "
                            "with --resume"
                        ) from lost
                    say(f"{lost}; resuming from the last snapshot" + (f" in {pause_s:.0f} s" if pause_s > 1 else ""))
                    if roles is None:  # some were not started: all begin anew
                        await asyncio.gather(*(runtime.kill(handle, hard=True) for handle in runtime.handles()))
                    await asyncio.sleep(pause_s)
                    resumes = (folder / JOURNAL_FILE).exists()
        await asyncio.to_thread(files.finish)  # no step will be repeated, and samples in flight are cancelled
        if not files.is_shared:
            await runtime.on_all_machines(partial(remove_local_folder, files.id))
    write_trace(folder)
    rows = read_metrics(folder)
    held_out = [row["eval/reward"] for row in rows if "eval/reward" in row]
    return Result(folder / CHECKPOINT, held_out[0], held_out[-1], [row[MOVED] for row in rows if MOVED in row][-1])


async def _attempt(
    job: Job, files: RunFiles, roles: Roles, prompts: Prompts, trace: Trace, log: Logbook, resumes: bool
) -> None:
    """Train from the last snapshot, or the start, to the recipe's last step, and write the checkpoint."""
    recipe, journal, write_s = job.recipe, job.folder / JOURNAL_FILE, _WRITE_S + roles.checkpoint_s
    with trace.span("trainer", "resume"):
        cut = await roles.call_trainer("resume", deadline_s=write_s) if resumes else None
    # the trainer has checked that a resumed run has the same start, but the folder may have moved
    place = str(stored_path(job.start, job.folder))
    write_json(job.folder / START_FILE, {"checkpoint": place, "teachers": teacher_weights(recipe)})
    ledger = Ledger.resume(journal, cut) if resumes else Ledger.start(journal)
    try:
        controller = Controller(controller_limits(recipe), prompts.task, ledger)
        if resumes:
            num_lost, num_forgotten = await asyncio.to_thread(take_up, job.folder, files.store, controller)
            if num_lost:
                log.say(f"{num_lost} finished groups are not in the store any more; they are sampled again")
            if num_forgotten:
                log.say(
                    f"{num_forgotten} groups, sampled with weights of steps that others replace, are sampled again too"
                )
        with trace.span("trainer", "publish", version=ledger.state.version):
            await roles.call_trainer("copy_weights")
            weights = await roles.call_trainer("publish")
        async with log.attempt(roles, controller, is_first=not resumes):
            async with Driver(recipe, roles, controller, weights, trace, log.stepped, files.store).at_work() as driver:
                if controller.version == 0:
                    await log.evaluate(0)
                await driver.run()
                held_out = await log.evaluate(controller.version)
                moved = await roles.call_trainer("moved", held_out, deadline_s=write_s)
                log.log(controller.version, {MOVED: moved})
                await roles.call_trainer("write", job.folder / CHECKPOINT, deadline_s=write_s)
            controller.finish()
    finally:
        ledger.close()


def controller_limits(recipe: RlRecipe) -> Limits:
    """The settings of ``recipe`` that the controller needs."""
    rollout, train = recipe.rollout, recipe.train
    # If groups wait for slow tools and verifiers, the engines have places for all of them.
    is_fast = rollout.max_turns == 1 and not SourceTables(recipe.sources, recipe.sandbox).are_slow
    capacity = max(1, rollout.engines * rollout.max_batch // rollout.group) if is_fast else None
    return Limits(
        prompts=train.prompts,
        staleness=recipe.staleness,
        window=recipe.window or default_window(train.prompts, recipe.staleness, capacity),
        drop_uniform=recipe.loss.drop_uniform,
        lease_s=recipe.failures.lease_s
        + 2 * CALL_SLACK_S,  # agents end their leases themselves and report their progress
        max_attempts=recipe.failures.max_attempts,
        num_steps=train.steps,
    )


def check_recipe(recipe: RlRecipe, folder: Path) -> None:
    """Raises UserError: ``recipe`` cannot resume the run in the folder, which has another one, or teachers with other weights. The folder
    of a teacher may have moved."""
    before, path, moved = completed(RlRecipe, read_json(folder / RECIPE_FILE)), folder / START_FILE, list[str]()
    known = read_json(path).get("teachers", {}) if path.exists() else {}
    for name, weights in teacher_weights(recipe).items():
        field = f"distill.teachers.{name}.checkpoint"
        if weights == known.get(name):
            moved.append(field)
        elif name in known:
            raise UserError(
                f"{folder}: {field}: its weights are not those with which this run started; name that teacher, or start a new run folder"
            )
    check_unchanged(before, recipe.model_dump(mode="json"), folder, (*LAYOUT, *STEERING, *moved))


def teacher_weights(recipe: RlRecipe) -> dict[str, str]:
    """Hashes of the weights of the distillation's teachers by name; without those that are servers or have no lineage."""
    teachers = {} if recipe.distill is None else recipe.distill.teachers
    folders = {
        name: checkpoint_folder(each.checkpoint)
        for name, each in teachers.items()
        if each.checkpoint is not None and each.url is None
    }
    return {name: lineage.weights_hash for name, each in folders.items() if (lineage := find_lineage(each)) is not None}


def check_steps(recipe: RlRecipe, files: RunFiles) -> None:
    """Raises UserError: the newest snapshot in ``files`` is of a later step than the last one of ``recipe``. The trainer checks again:
    the store may have lost snapshots that are on the trainer's disk."""
    if files.is_shared:
        places = [str(place) for place in (files.run / SNAPSHOTS).glob("step-*")]
    else:
        places = complete_folders(files.remote, SNAPSHOTS)
    num_done, steps = max((int(place.rpartition("step-")[2]) for place in places), default=0), recipe.train.steps
    if num_done > steps:
        raise UserError(f"{files.run}: train.steps: {steps} is less than the {num_done} steps that are done; raise it")


def in_order(recipe: RlRecipe, folder: Path) -> RlRecipe:
    """``recipe`` with its sources in the order of the run in the folder, on which the prompts of the run depend."""
    names = [name for name in read_json(folder / RECIPE_FILE)["sources"] if name in recipe.sources]
    return recipe.replace(sources={name: recipe.sources[name] for name in names} | recipe.sources)


def start_of(folder: Path) -> Path | None:
    """The checkpoint with which the run in ``folder`` began; None if it is not recorded.
    Raises UserError: the checkpoint does not exist any more."""
    path = folder / START_FILE
    if not path.exists():
        return None
    start = folder.resolve() / read_json(path)["checkpoint"]
    if not (start / "config.json").is_file():
        raise UserError(
            f"{start}: config.json: no such file, and {folder} began with it; give its new path with --model"
        )
    return start


def take_up(folder: Path, store: Store, controller: Controller) -> tuple[int, int]:
    """Compare the ledger of a resumed run with the files in ``store``. Returns the numbers of groups that the store has lost and of
    those that `Controller.forget_undone` drops. No agent may be sampling."""
    ready = controller.ledger.ready_groups()
    missing = store.missing([ref.location for ref in ready])
    if missing:
        controller.vanished([ref.ordinal for ref in ready if ref.location in missing])
    sweep(folder, store, controller.ledger)
    return len(missing), controller.forget_undone()


def sweep(folder: Path, store: Store, ledger: Ledger) -> None:
    """Delete files that killed processes left: partial files, groups that no step will train, logs of groups that have ended; all
    logs if they may have tokens of weights that are not made again. No agent may be sampling."""
    for place in (folder, folder / GROUPS, folder / WEIGHTS):
        for left in place.glob(".*.partial*"):
            remove(left)
    needed = {PurePath(location).name for location in ledger.kept_locations()}
    store.remove(name for name in store.names(GROUPS) if PurePath(name).name not in needed)
    unfinished = set[int]()
    if ledger.state.will_repeat:
        unfinished = {entry.ordinal for entry in ledger.state.alive.values() if entry.ref is None}
    for ordinal in logged_ordinals(store):
        if ordinal not in unfinished:
            remove_logs(store, ordinal)
