"""Driver: dispatches groups, feeds the trainer, has engines update weights. Metadata only.

Everything happens on one asyncio loop. Each group is a task of its own. The trainer makes one step at a time, while the weights
of the step before are published. Every event ends in `Driver._dispatch`; only deaths of roles and expired leases, which send no
event, are polled for. When the trainer dies, the attempt ends (`stretto.flow.launch.TrainerLost`): weights, optimiser and
ledger return to the last snapshot together, with a new trainer. The other roles go on (`Roles.with_trainer`).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Self

from stretto.base.errors import UserError
from stretto.base.trajectory import Ending, GroupRef, WeightVersion
from stretto.flow.agent import GroupUnfinished
from stretto.flow.controller import Controller, Dispatch, Watchdog
from stretto.flow.launch import CALL_SLACK_S, Roles, TrainerLost
from stretto.flow.log import Span, Trace
from stretto.learning.metrics import StepReport
from stretto.learning.recipe import RlRecipe
from stretto.runtime.runtime import DeadlinePassed, RoleDied, RoleError, RuntimeFailure, cancel_all
from stretto.runtime.store import Store

_GUARD_S = 0.2
"""Seconds between two checks for dead roles and expired leases."""
_MAX_UNIFORM, _MAX_FAILED = 64, 2
"""The run stops after this many batches' worth of groups with equal rewards, or of failed groups, without a training step."""


class Driver:
    """One attempt at a run, from the step at which controller and trainer stand."""

    def __init__(
        self,
        recipe: RlRecipe,
        roles: Roles,
        controller: Controller,
        weights: WeightVersion,
        trace: Trace,
        observe: Callable[[StepReport, tuple[GroupRef, ...]], None],
        store: Store,
    ):
        """``weights``: the trainer's current weights, published. ``observe`` is called after each step."""
        self._recipe, self._roles, self._controller = recipe, roles, controller
        self._weights, self._trace, self._observe, self._store = weights, trace, observe, store
        self._engines = EngineWeights(roles, controller, trace, moved=self._moved, failed=self._fail)
        self._watchdog = Watchdog(recipe.failures.stuck_s)
        self._groups: set[asyncio.Task[None]] = set()
        self._reporting: asyncio.Task[None] | None = None
        self._publishing: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()
        self._num_uniform = 0  # groups with equal rewards since the last step
        self._failed_before = 0  # groups that had failed at the last step
        self._last_loss = ""  # reason for which the last attempt at a group failed, since the last step
        self._cuts: deque[Mapping[str, Any]] = deque(maxlen=recipe.train.keep_snapshots)
        self._saved = controller.version  # version of the newest snapshot
        self._saved_s = time.monotonic()

    @asynccontextmanager
    async def at_work(self) -> AsyncIterator[Self]:
        """Context in which roles are monitored. On entry all engines have loaded the attempt's first weights."""
        guarding = asyncio.create_task(self._guard())
        try:
            self._engines.publish(self._weights)
            await self._engines_are_current()
            yield self
        finally:  # in this order: the first tasks start engine updates, and these dispatch groups
            await cancel_all([guarding, *filter(None, [self._reporting, self._publishing])])
            await self._engines.close()
            await cancel_all([*self._groups])

    async def run(self) -> None:
        """Train until the recipe's last step or its time limit; at the end all engines have the last weights.

        Raises:
            TrainerLost: the trainer died.
            UserError: a role cannot continue, or the watchdog found that nothing makes progress.
        """
        stop_s = time.monotonic() + (self._recipe.runtime.stop_s or math.inf)
        while self._controller.version < self._recipe.train.steps:
            # the first step is completed in any case, because a run without a step has no result
            refs = await self._next_batch(stop_s if self._controller.version else math.inf)
            if refs is None:
                break
            await self._train(refs)
        if self._controller.version > self._saved:
            await self._save()
        await self._published()
        await self._engines_are_current()

    async def _engines_are_current(self) -> None:
        while not self._engines.are_current and self._failure is None:
            await self._change()
        if self._failure is not None:
            raise self._failure

    async def _next_batch(self, stop_s: float) -> tuple[GroupRef, ...] | None:
        """Wait for the next batch; None at ``stop_s`` on `time.monotonic`."""
        started_s = time.time()
        self._watchdog.trainer_waits()
        while self._failure is None:
            if time.monotonic() >= stop_s:
                self._watchdog.trainer_works()
                return None
            self._dispatch()
            refs = self._controller.next_batch()
            if refs is not None and await self._are_stored(refs):
                self._trace.add(Span("trainer", "wait", started_s, time.time()))
                self._watchdog.trainer_works()
                return refs
            await self._change(stop_s)
        raise self._failure

    async def _are_stored(self, refs: tuple[GroupRef, ...]) -> bool:
        """Whether the store has all ``refs``. Those that it lost are dispatched again. Raises TrainerLost: they belong to a step that is
        repeated. Groups in flight may have tokens of weights that the run will not have then, so it must return to its snapshot."""
        lost = await asyncio.to_thread(self._store.missing, [ref.location for ref in refs])
        if lost and self._controller.repeats:
            raise TrainerLost(f"the store lost groups of step {self._controller.version + 1}, which is repeated")
        if lost:
            self._controller.vanished([ref.ordinal for ref in refs if ref.location in lost])
            self._changed.set()
        return not lost

    async def _change(self, stop_s: float = math.inf) -> None:
        """Wait for the next event, or until ``stop_s`` on `time.monotonic`."""
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(None if stop_s == math.inf else stop_s - time.monotonic()):
                await self._changed.wait()

    async def _train(self, refs: tuple[GroupRef, ...]) -> None:
        """Make one step."""
        step, train = self._controller.version, self._recipe.train
        with self._trace.span("trainer", "step", step=step, ordinals=[ref.ordinal for ref in refs]):
            try:
                report: StepReport = await self._roles.call_trainer("step", refs, step)
            except UserError as error:
                if await self._are_stored(refs):
                    raise
                raise TrainerLost(f"the store lost groups of step {step + 1}") from error
        self._controller.trained(step)
        self._num_uniform, self._last_loss = 0, ""
        self._failed_before = self._controller.state.endings.get(Ending.FAILED, 0)
        with self._trace.span("trainer", "publish", version=step + 1):  # the part for which the next step waits
            await self._published()
            await self._roles.call_trainer("copy_weights")
        self._publishing = asyncio.create_task(self._publish(step + 1))
        self._dispatch()
        if self._reporting is not None:
            await self._reporting
        # concurrent with the next step; a snapshot waits for the report of its step
        self._reporting = asyncio.create_task(self._report(report, refs))
        is_due = time.monotonic() - self._saved_s >= 60 * train.snapshot_minutes
        if (step + 1) % train.snapshot_every == 0 or is_due:
            await self._save()

    async def _save(self) -> None:
        """Write the states of trainer and ledger, of the same version, into one snapshot."""
        self._saved, cut = self._controller.version, self._controller.checkpoint_cut()
        self._saved_s = time.monotonic()
        with self._trace.span("trainer", "snapshot", version=self._saved):
            await self._roles.call_trainer("save", cut)
        self._cuts.append(cut)
        if len(self._cuts) == self._recipe.train.keep_snapshots:  # older snapshots have been deleted
            self._controller.covered(self._cuts[0])
        if self._reporting is not None:
            await self._reporting

    async def _publish(self, version: int) -> None:
        """Publish weights during the next step; an error ends the run before the step after that."""
        try:
            with self._trace.span("weights", "publish", version=version):
                self._engines.publish(await self._roles.call_trainer("publish"))
        except Exception as error:
            self._fail(error)

    async def _published(self) -> None:
        """Wait for the publication in progress, so that versions keep their order. Raises the error that ended the run."""
        if self._publishing is not None:
            await self._publishing
        if self._failure is not None:
            raise self._failure

    async def _report(self, report: StepReport, refs: tuple[GroupRef, ...]) -> None:
        await asyncio.to_thread(self._store.remove, self._controller.unneeded())
        self._observe(report, refs)

    def _dispatch(self) -> None:
        """Start all attempts that the controller admits. Called after every event."""
        for dispatch in self._controller.admit():
            task = asyncio.create_task(self._group(dispatch))
            self._groups.add(task)
            task.add_done_callback(self._groups.discard)

    async def _group(self, dispatch: Dispatch) -> None:
        """Run an attempt at a group to any end."""
        try:
            await self._attempt(dispatch)
        except Exception as error:  # nothing else awaits this task
            self._fail(error)
        finally:
            self._watchdog.group_ended(dispatch.task.ordinal)
        self._changed.set()

    async def _attempt(self, dispatch: Dispatch) -> None:
        task, attempt = dispatch.task, dispatch.attempt
        self._watchdog.group_waits(task.ordinal, "an agent")
        deadline_s = self._recipe.failures.lease_s + CALL_SLACK_S
        try:
            async with self._roles.agents.lease(deadline_s) as agent:
                self._controller.attempt_begun(task.ordinal, attempt)
                self._watchdog.group_waits(task.ordinal, agent.name)
                call = partial(self._roles.runtime.call, agent, "run_group", deadline_s=deadline_s)
                with self._trace.span("agents", "group", ordinal=task.ordinal, attempt=attempt):
                    ref: GroupRef = await call(task, attempt, dispatch.is_last)
            if self._controller.group_ready(ref):
                self._watchdog.progress()
                self._roles.forget(task.ordinal)
                self._num_uniform += ref.is_uniform
                if self._num_uniform > _MAX_UNIFORM * self._recipe.train.prompts:
                    raise UserError(
                        f"sources: {self._num_uniform} groups without a step between them had equal rewards, the last "
                        f"{ref.mean_reward:g}; start from a model that succeeds now and then, choose easier or harder "
                        "problems, or set loss.drop_uniform = false"
                    )
        except RuntimeFailure as failure:
            why = failure.message if isinstance(failure, RoleError) else str(failure)
            has_progress = isinstance(failure, RoleError) and failure.kind == GroupUnfinished.__name__
            if has_progress:
                self._watchdog.progress()
            got_no_agent = isinstance(failure, DeadlinePassed) and failure.method == "lease"
            self._lose(dispatch, why, counts=not (has_progress or got_no_agent or isinstance(failure, RoleDied)))

    def _lose(self, dispatch: Dispatch, why: str, counts: bool) -> None:
        """Report a failed attempt. Ends the run after too many failed groups without a step."""
        self._last_loss = why
        self._controller.group_failed(dispatch.task.ordinal, dispatch.attempt, why, counts=counts)
        num_failed = self._controller.state.endings.get(Ending.FAILED, 0) - self._failed_before
        if num_failed > _MAX_FAILED * self._recipe.train.prompts:
            problem = f"{num_failed} groups in a row failed without a training step, the last one because of {why}"
            self._fail(UserError(f"sources: {problem}; correct that, then continue with --resume"))

    def _moved(self) -> None:
        self._dispatch()
        self._changed.set()

    async def _guard(self) -> None:
        """Poll for dead roles, expired leases and stuck waits, until the attempt ends."""
        while self._failure is None:
            await asyncio.sleep(_GUARD_S)
            try:
                self._engines.tend()
                self._dispatch()
                await self._roles.mend()
                if stuck := self._watchdog.report():
                    stuck = "; ".join([stuck, *map(str, (await self._roles.waits())[:1])])
                    stuck += f"; the last attempt was lost by {self._last_loss}" if self._last_loss else ""
                    raise UserError(f"run: {stuck}; see `stretto top`, then continue with --resume")
            except Exception as error:
                self._fail(error)
            self._changed.set()

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._changed.set()


class EngineWeights:
    """Keeps every engine at the newest weights, also engines that die and restart. A restarted engine samples nothing before
    it has loaded them."""

    def __init__(
        self,
        roles: Roles,
        controller: Controller,
        trace: Trace,
        *,
        moved: Callable[[], None],
        failed: Callable[[BaseException], None],
    ):
        """``moved`` is called after each change of weights, ``failed`` with errors that a retry would not mend."""
        self._roles, self._controller, self._trace = roles, controller, trace
        self._moved, self._failed = moved, failed
        self._weights: WeightVersion
        self._serving: dict[str, tuple[int, int]] = {}
        """By engine: the version with which it computes, and its number of restarts when it loaded that version."""
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def publish(self, weights: WeightVersion) -> None:
        """Start the update of every engine to ``weights``; requests in flight continue."""
        self._weights = weights
        self.tend()

    def tend(self) -> None:
        """Start the update of engines that lack the newest weights: after a publication, a restart or a failed update."""
        for name in self._roles.engines:
            running, serving = self._tasks.get(name), self._serving.get(name)
            if running is not None and not running.done():
                continue
            if serving is not None and serving[1] != self._roles.restarts(name):
                self._lost(name)  # the new incarnation has no weights: only `_update` loads them
            if not self._is_current(name):
                self._tasks[name] = asyncio.create_task(self._update(name))

    @property
    def are_current(self) -> bool:
        """Whether all engines have the newest weights."""
        return all(map(self._is_current, self._roles.engines))

    async def close(self) -> None:
        await cancel_all([*self._tasks.values()])

    def _is_current(self, name: str) -> bool:
        return name in self._serving and self._serving[name][0] == self._weights.number

    def _lost(self, name: str) -> None:
        self._serving.pop(name, None)
        self._controller.engine_gone(name)

    async def _update(self, name: str) -> None:
        """Update the engine until it has the newest weights. A failed update is left to the next `tend`.

        The controller must never be told a version newer than the one with which any incarnation of the engine samples.
        """
        try:
            if name not in self._serving:
                # The engine waits for its first weights. Groups dispatched meanwhile may land on it, so they are charged
                # with these weights, even if other engines load newer ones before the update is complete.
                self._controller.engine_active(name, self._weights.number)
            while not self._is_current(name):
                weights, restarts = self._weights, self._roles.restarts(name)
                try:
                    with self._trace.span(name, "activate", version=weights.number):
                        await self._roles.activate(name, weights)
                except (RuntimeFailure, UserError) as failure:
                    if isinstance(failure, (RoleError, UserError)) and weights is not self._weights:
                        continue  # the channel may have dropped that version; the engine still has its old one
                    if isinstance(failure, UserError):
                        raise
                    if not isinstance(failure, RoleDied):
                        # the engine hangs or failed inside, and its version is unknown until it is restarted
                        await self._roles.restart(self._roles.engines[name], str(failure))
                    self._lost(name)
                    return
                if self._roles.restarts(name) != restarts:
                    continue  # either incarnation may have answered: the new one may have no weights
                self._serving[name] = (weights.number, restarts)
                self._controller.engine_active(name, weights.number)
                self._moved()
        except Exception as error:
            self._failed(error)
