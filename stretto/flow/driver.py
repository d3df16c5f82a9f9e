"""Driver: dispatches groups, feeds the trainer, has engines update weights. Metadata only.

Everything happens on one asyncio loop. Groups are tasks of their own; the trainer takes one step at a time, and publishes
the weights that it made while it is at the next; each event ends in `Driver._hand_out`; only what happens without telling
anybody, a death or a lease that runs out, is polled for. A dead trainer ends the attempt (`stretto.flow.launch.TrainerLost`):
weights, optimiser and ledger go back to the last snapshot together, with new roles.
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
from stretto.flow.controller import Controller, Handout, Watchdog
from stretto.flow.launch import CALL_SLACK_S, Roles
from stretto.flow.log import Span, Trace
from stretto.learning.metrics import StepReport
from stretto.learning.recipe import RlRecipe
from stretto.learning.samples import discard
from stretto.runtime.runtime import DeadlinePassed, RoleDied, RoleError, RuntimeFailure

_GUARD_S = 0.2
"""Between two looks at what may have died or run out."""
_MOST_UNIFORM, _MOST_FAILED = 64, 2
"""Batches' worth of groups with equal rewards, or given up, without a step between them, after which the run is hopeless."""


class Driver:
    """One attempt at a run, from a controller that stands where the trainer does."""

    def __init__(
        self,
        recipe: RlRecipe,
        roles: Roles,
        controller: Controller,
        weights: WeightVersion,
        trace: Trace,
        observe: Callable[[StepReport, tuple[GroupRef, ...]], None],
    ):
        """``weights`` are those that the trainer has now, published; ``observe`` is called after each step."""
        self._recipe, self._roles, self._controller = recipe, roles, controller
        self._weights, self._trace, self._observe = weights, trace, observe
        self._engines = EngineWeights(roles, controller, trace, moved=self._moved, failed=self._fail)
        self._watchdog = Watchdog(recipe.failures.stuck_s)
        self._groups: set[asyncio.Task[None]] = set()
        self._reporting: asyncio.Task[None] | None = None
        self._publishing: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()
        self._num_uniform = self._failed_before = (
            0  # groups with equal rewards since the last step; given up until then
        )
        self._last_loss = ""  # why the last attempt at a group came to nothing, since then
        self._cuts: deque[Mapping[str, Any]] = deque(maxlen=recipe.train.keep_snapshots)
        self._saved = controller.version  # in the newest snapshot
        self._saved_s = time.monotonic()

    @asynccontextmanager
    async def at_work(self) -> AsyncIterator[Self]:
        """Inside, roles are looked after, and all engines have the weights that the attempt starts from."""
        guarding = asyncio.create_task(self._guard())
        try:
            self._engines.publish(self._weights)
            await self._engines_are_current()
            yield self
        finally:
            await _end(guarding, *filter(None, [self._reporting, self._publishing]))  # these have engines move on
            await self._engines.close()  # and those have groups handed out
            await _end(*self._groups)

    async def run(self) -> None:
        """Train until the recipe's last step, or the first after its time; then all engines have those weights.

        Raises:
            TrainerLost: the trainer died.
            UserError: a role cannot go on, or nothing moves any more, and the watchdog says what.
        """
        stop_s = time.monotonic() + (self._recipe.runtime.stop_s or math.inf)
        while self._controller.version < self._recipe.train.steps:
            # the first step is waited for all the same: a run without one has nothing to hand on
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
        """None: it is ``stop_s`` on `time.monotonic`, or later."""
        started_s = time.time()
        self._watchdog.waits("trainer", "agents")
        while self._failure is None:
            if time.monotonic() >= stop_s:
                self._watchdog.done("trainer")
                return None
            self._hand_out()
            refs = self._controller.next_batch()
            if refs is not None:
                self._trace.add(Span("trainer", "wait", started_s, time.time()))
                self._watchdog.done("trainer")
                return refs
            await self._change(stop_s)
        raise self._failure

    async def _change(self, stop_s: float = math.inf) -> None:
        """Wait for the next event, or until ``stop_s`` on `time.monotonic`."""
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(None if stop_s == math.inf else stop_s - time.monotonic()):
                await self._changed.wait()

    async def _train(self, refs: tuple[GroupRef, ...]) -> None:
        """One step."""
        step, train = self._controller.version, self._recipe.train
        with self._trace.span("trainer", "step", step=step, ordinals=[ref.ordinal for ref in refs]):
            report: StepReport = await self._roles.call_trainer("step", refs, step)
        self._controller.trained(step)
        self._num_uniform, self._last_loss = 0, ""
        self._failed_before = self._controller.state.endings.get(Ending.FAILED, 0)
        with self._trace.span("trainer", "publish", version=step + 1):  # what of it the next step has to wait for
            await self._published()
            await self._roles.call_trainer("copy_weights")
        self._publishing = asyncio.create_task(self._publish(step + 1))
        self._hand_out()
        if self._reporting is not None:
            await self._reporting
        # told while the trainer is at the next step; what a snapshot holds is told before the trainer goes on
        self._reporting = asyncio.create_task(self._report(report, refs))
        is_due = time.monotonic() - self._saved_s >= 60 * train.snapshot_minutes
        if (step + 1) % train.snapshot_every == 0 or is_due:
            await self._save()

    async def _save(self) -> None:
        """The trainer's state and the ledger's, of the same version, in one folder."""
        self._saved, cut = self._controller.version, self._controller.checkpoint_cut()
        self._saved_s = time.monotonic()
        with self._trace.span("trainer", "snapshot", version=self._saved):
            await self._roles.call_trainer("save", cut)
        self._cuts.append(cut)
        if len(self._cuts) == self._recipe.train.keep_snapshots:  # older ones have been deleted
            self._controller.covered(self._cuts[0])
        if self._reporting is not None:
            await self._reporting

    async def _publish(self, version: int) -> None:
        """Beside the next step; what goes wrong ends the run before the one after."""
        try:
            with self._trace.span("weights", "publish", version=version):
                self._engines.publish(await self._roles.call_trainer("publish"))
        except Exception as error:
            self._fail(error)

    async def _published(self) -> None:
        """Versions come out in their order, and no more than one waits for that. Raises what went wrong."""
        if self._publishing is not None:
            await self._publishing
        if self._failure is not None:
            raise self._failure

    async def _report(self, report: StepReport, refs: tuple[GroupRef, ...]) -> None:
        await asyncio.to_thread(discard, self._controller.unneeded())
        self._observe(report, refs)

    def _hand_out(self) -> None:
        """Called after every event."""
        for handout in self._controller.admit():
            task = asyncio.create_task(self._group(handout))
            self._groups.add(task)
            task.add_done_callback(self._groups.discard)

    async def _group(self, handout: Handout) -> None:
        """An attempt at a group, to whatever end."""
        try:
            await self._attempt(handout)
        except Exception as error:  # a user's mistake, or ours: nothing would wait for it otherwise
            self._fail(error)
        finally:
            self._watchdog.done("agents", handout.task.ordinal)
        self._changed.set()

    async def _attempt(self, handout: Handout) -> None:
        task, attempt = handout.task, handout.attempt
        self._watchdog.waits("agents", "an agent", task.ordinal)
        deadline_s = self._recipe.failures.lease_s + CALL_SLACK_S
        try:
            async with self._roles.agents.lease(deadline_s) as agent:
                self._controller.attempt_begun(task.ordinal, attempt)
                self._watchdog.waits("agents", agent.name, task.ordinal)
                call = partial(self._roles.runtime.call, agent, "run_group", deadline_s=deadline_s)
                with self._trace.span("agents", "group", ordinal=task.ordinal, attempt=attempt):
                    ref: GroupRef = await call(task, attempt, handout.is_last)
            if self._controller.group_ready(ref):
                self._watchdog.waits("trainer", "agents")  # it came one group further
                self._roles.forget(task.ordinal)
                self._num_uniform += ref.is_uniform
                if self._num_uniform > _MOST_UNIFORM * self._recipe.train.prompts:
                    raise UserError(
                        f"sources: {self._num_uniform} groups without a step between them had equal rewards, the last "
                        f"{ref.mean_reward:g}; start from a model that succeeds now and then, choose easier or harder "
                        "problems, or set loss.drop_uniform = false"
                    )
        except RoleDied as died:
            self._lose(handout, str(died), counts=False)
        except RuntimeFailure as failure:
            said = failure.message if isinstance(failure, RoleError) else str(failure)
            is_further = isinstance(failure, RoleError) and failure.kind == GroupUnfinished.__name__
            if is_further:
                self._watchdog.waits("trainer", "agents")  # a long group that goes on is progress
            no_agent = isinstance(failure, DeadlinePassed) and failure.method == "lease"  # the group is not the reason
            self._lose(handout, said, counts=not (is_further or no_agent))

    def _lose(self, handout: Handout, why: str, counts: bool = True) -> None:
        """Where that is the rule, the run would ask for ever."""
        self._last_loss = why
        self._controller.group_failed(handout.task.ordinal, handout.attempt, why, counts=counts)
        num_failed = self._controller.state.endings.get(Ending.FAILED, 0) - self._failed_before
        if num_failed > _MOST_FAILED * self._recipe.train.prompts:
            said = f"{num_failed} groups in a row failed without a training step, the last one because of {why}"
            self._fail(UserError(f"sources: {said}; correct that, then continue with --resume"))

    def _moved(self) -> None:
        self._hand_out()
        self._changed.set()

    async def _guard(self) -> None:
        """Sees to what nobody tells: deaths, leases that run out, roles that are stuck. Ends with the attempt."""
        while self._failure is None:
            await asyncio.sleep(_GUARD_S)
            try:
                self._engines.tend()
                self._hand_out()
                await self._roles.mend()
                if stuck := self._watchdog.report():
                    for wait in (await self._roles.waits())[:1]:
                        stuck += f"; sample {wait.sample} of group {wait.ordinal} has waited for {wait.waits_for} for {wait.seconds:.0f} s"
                    stuck += f"; the last attempt was lost by {self._last_loss}" if self._last_loss else ""
                    raise UserError(f"run: {stuck}; see `stretto top`, then continue with --resume")
            except Exception as error:
                self._fail(error)
            self._changed.set()

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._changed.set()


async def _end(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EngineWeights:
    """Keeps every engine at the newest weights, whichever of them die and come back meanwhile: one that was started again
    samples nothing until it was given those."""

    def __init__(
        self,
        roles: Roles,
        controller: Controller,
        trace: Trace,
        *,
        moved: Callable[[], None],
        failed: Callable[[BaseException], None],
    ):
        """``moved`` is told after each change of weights, ``failed`` what no other attempt would mend."""
        self._roles, self._controller, self._trace = roles, controller, trace
        self._moved, self._failed = moved, failed
        self._weights: WeightVersion
        self._serving: dict[str, tuple[int, int]] = {}
        """The version that an engine computes with, and its restarts when it took that over."""
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def publish(self, weights: WeightVersion) -> None:
        """Let every engine change to ``weights``; requests go on meanwhile."""
        self._weights = weights
        self.tend()

    def tend(self) -> None:
        """See to engines that are behind: because of newer weights, a restart, or a change that came to nothing."""
        for name in self._roles.engines:
            running, serving = self._tasks.get(name), self._serving.get(name)
            if running is not None and not running.done():
                continue
            if serving is not None and serving[1] != self._roles.restarts(name):
                self._lost(name)  # nobody has given the new incarnation weights, since nobody is at it
            if not self._is_current(name):
                self._tasks[name] = asyncio.create_task(self._update(name))

    @property
    def are_current(self) -> bool:
        """Whether all engines have the newest weights."""
        return all(map(self._is_current, self._roles.engines))

    async def close(self) -> None:
        await _end(*self._tasks.values())

    def _is_current(self, name: str) -> bool:
        return name in self._serving and self._serving[name][0] == self._weights.number

    def _lost(self, name: str) -> None:
        self._serving.pop(name, None)
        self._controller.engine_gone(name)

    async def _update(self, name: str) -> None:
        """Until the engine has the newest weights, however many come meanwhile; what fails is left to the next `tend`.

        The controller must never believe an engine to have newer weights than any of its incarnations samples under.
        """
        try:
            if name not in self._serving:
                # It waits for its first weights. Groups that are handed out meanwhile may land on it, so they are charged
                # with these weights from now on, however new those are that other engines take over before it is done.
                self._controller.engine_active(name, self._weights.number)
            while not self._is_current(name):
                weights, restarts = self._weights, self._roles.restarts(name)
                try:
                    with self._trace.span(name, "activate", version=weights.number):
                        await self._roles.activate(name, weights)
                except RuntimeFailure as failure:
                    if not isinstance(failure, RoleDied):
                        # it hangs, or failed inside: until it is no more it may have whatever weights
                        await self._roles.restart(self._roles.engines[name])
                    self._lost(name)
                    return
                if self._roles.restarts(name) != restarts:
                    continue  # which incarnation answered is not known: this one may have these weights, or none
                self._serving[name] = (weights.number, restarts)
                self._controller.engine_active(name, weights.number)
                self._moved()
        except Exception as error:
            self._failed(error)
