"""The driver: hands groups out, gives the trainer its batches, has engines change weights. It sees metadata only.

Everything happens on one asyncio loop. Groups are tasks of their own; the trainer takes one step at a time; each event
ends in `Driver._hand_out`, so nothing polls. A dead trainer ends the attempt (`TrainerLost`): weights, optimiser and ledger
go back to the last snapshot together, with new roles.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from stretto.base.errors import UserError
from stretto.base.trajectory import WeightVersion
from stretto.rl.batches import discard
from stretto.rl.buffer import GroupRef
from stretto.rl.controller import Controller
from stretto.rl.ledger import Handout
from stretto.rl.measures import StepReport
from stretto.rl.roles import Roles
from stretto.rl.trace import Span, Trace
from stretto.rl.watchdog import Watchdog
from stretto.runtime.runtime import RoleDied, RoleError, Runtime, RuntimeFailure

_CALL_SLACK_S = 10.0
"""Between a group's lease and the deadline of the call that carries it."""
_RESTART_POLL_S = 0.2
_MOST_UNIFORM = 64
"""Batches' worth of groups with equal rewards, without a step between them, after which the task is hopeless."""
TRACE_HINT = "`stretto top`"


class TrainerLost(RuntimeError):  # noqa: N818 - data for whoever starts the run again
    """The trainer died: the run goes on from its last snapshot."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What the driver needs of the recipe."""

    num_steps: int
    snapshot_every: int
    keep_snapshots: int
    prompts: int
    """Groups of a step."""
    lease_s: float
    step_deadline_s: float
    """Of one call to the trainer."""


@dataclass(slots=True)
class Waits:
    """Seconds since the last log line. Written by the driver."""

    trainer_s: float = 0.0
    """The trainer had nothing to do."""
    step_s: float = 0.0
    """The trainer computed."""
    activate_s: float = 0.0
    """Longest engine, summed over versions."""


Observe = Callable[[StepReport, tuple[GroupRef, ...], Waits], None]
"""Called after each step."""


class Driver:
    """One attempt at a run, from a controller that stands where the trainer does."""

    def __init__(
        self,
        plan: Plan,
        runtime: Runtime,
        roles: Roles,
        controller: Controller,
        weights: WeightVersion,
        trace: Trace,
        watchdog: Watchdog,
        observe: Observe,
    ):
        """
        Args:
            weights: that the trainer has now, published.
        """
        self._plan, self._runtime, self._roles = plan, runtime, roles
        self._controller, self._trace, self._watchdog, self._observe = controller, trace, watchdog, observe
        self._weights = weights
        self._groups: dict[asyncio.Task[None], Handout] = {}
        self._activations: dict[str, asyncio.Task[None]] = {}
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()
        self._waits = Waits()
        self._num_uniform = 0
        """Groups with equal rewards since the last step."""
        self._cuts: deque[Mapping[str, Any]] = deque(maxlen=plan.keep_snapshots)

    async def begin(self) -> None:
        """Give all engines the weights that this attempt starts from; no token is sampled under others."""
        self._publish(self._weights)
        await self._settled()

    async def run(self) -> None:
        """Train until the recipe's last step.

        Raises:
            TrainerLost: the trainer died.
            UserError: what no further attempt would mend; or nothing moves any more, and the watchdog says what.
        """
        guard = asyncio.create_task(self._guard())
        try:
            self._publish(self._weights)
            await (
                self._settled()
            )  # no token is asked for before all engines have the weights that this attempt starts from
            while self._controller.version < self._plan.num_steps:
                refs = await self._next_batch()
                await self._train(refs)
        finally:
            tasks = [guard, *self._groups, *self._activations.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _next_batch(self) -> tuple[GroupRef, ...]:
        """Wait for the next step's groups."""
        started_s = time.time()
        self._watchdog.waits("trainer", "agents")
        while True:
            self._changed.clear()
            if self._failure is not None:
                raise self._failure
            self._hand_out()
            refs = self._controller.next_batch()
            if refs is not None:
                waited_s = time.time() - started_s
                self._waits.trainer_s += waited_s
                self._trace.add(Span("trainer", "wait", started_s, started_s + waited_s))
                self._watchdog.done("trainer")
                return refs
            await self._changed.wait()

    async def _train(self, refs: tuple[GroupRef, ...]) -> None:
        step = self._controller.version
        started_s = time.perf_counter()
        with self._trace.span("trainer", "step", step=step, ordinals=[ref.ordinal for ref in refs]):
            report: StepReport = await self._call_trainer("step", refs, step)
        self._controller.trained(step)
        self._num_uniform = 0
        with self._trace.span("trainer", "publish", version=step + 1):
            self._publish(await self._call_trainer("publish"))
        self._waits.step_s += time.perf_counter() - started_s
        done = step + 1
        if done % self._plan.snapshot_every == 0 or done == self._plan.num_steps:
            await self._snapshot()
        await self._tidy()
        self._observe(report, refs, self._waits)
        self._waits = Waits()
        self._hand_out()

    async def _snapshot(self) -> None:
        """The trainer's state and the ledger's, of the same version, in one folder."""
        cut = self._controller.checkpoint_cut()
        with self._trace.span("trainer", "snapshot", version=self._controller.version):
            await self._call_trainer("save", cut)
        self._cuts.append(cut)
        if len(self._cuts) == self._plan.keep_snapshots:  # older ones have been deleted
            self._controller.covered(self._cuts[0])

    async def _tidy(self) -> None:
        """Delete what nobody will read again."""
        await asyncio.to_thread(discard, self._controller.unneeded())

    async def _call_trainer(self, method: str, *args: Any) -> Any:
        try:
            return await self._runtime.call(self._roles.trainer, method, *args, deadline_s=self._plan.step_deadline_s)
        except RoleDied as died:
            raise TrainerLost(str(died)) from died
        except RoleError as error:
            raise UserError(
                f"trainer: {method}: {error.kind}: {error.message}; see the log, then continue with --resume"
            ) from error

    def _hand_out(self) -> None:
        """Start whatever the controller admits. Called after every event."""
        for handout in self._controller.admit():
            task = asyncio.create_task(self._group(handout))
            self._groups[task] = handout
            task.add_done_callback(self._groups.pop)

    async def _group(self, handout: Handout) -> None:
        """One attempt at one group, from hand-out to report."""
        task, attempt = handout.task, handout.attempt
        place = self._roles.least_loaded_agent()
        self._watchdog.waits("agents", place.handle.name, task.ordinal)
        try:
            with self._trace.span("agents", "group", ordinal=task.ordinal, attempt=attempt), place:
                ref: GroupRef = await self._runtime.call(
                    place.handle, "run_group", task, attempt, deadline_s=self._plan.lease_s + _CALL_SLACK_S
                )
            if self._controller.group_ready(ref):
                self._watchdog.waits("trainer", "agents")  # it came one group further
                self._roles.forget([task.ordinal])
                self._check_hope(ref)
        except UserError as error:
            self._fail(error)
        except RoleDied as died:
            self._controller.group_failed(task.ordinal, attempt, str(died), counts=False)
        except RuntimeFailure as failure:
            self._controller.group_failed(task.ordinal, attempt, str(failure))
        except Exception as error:  # ours, not a role's: nothing would wait for it otherwise
            self._fail(error)
        finally:
            self._watchdog.done("agents", task.ordinal)
        self._changed.set()

    def _check_hope(self, ref: GroupRef) -> None:
        """A policy that never or always succeeds learns nothing, and would be asked for ever."""
        self._num_uniform += ref.is_uniform
        if self._num_uniform > _MOST_UNIFORM * self._plan.prompts:
            raise UserError(
                f"sources: {self._num_uniform} groups without a step between them had equal rewards, the last {ref.mean_reward:g}; "
                "start from a model that succeeds now and then, choose easier or harder problems, or set loss.drop_uniform = false"
            )

    def _publish(self, weights: WeightVersion) -> None:
        """Let every engine change to ``weights``; requests go on meanwhile."""
        self._weights = weights
        self._controller.published(weights.number)
        for name in self._roles.engine_names:
            self._activate(name)

    def _activate(self, name: str) -> None:
        running = self._activations.get(name)
        if running is None or running.done():
            self._activations[name] = asyncio.create_task(self._bring_up_to_date(name))

    async def _bring_up_to_date(self, name: str) -> None:
        """Until the engine has the newest weights, however many come meanwhile."""
        active = -1
        while active < self._weights.number:
            weights, started_s = self._weights, time.perf_counter()
            try:
                with self._trace.span(name, "activate", version=weights.number):
                    await self._roles.activate(name, weights)
            except RuntimeFailure:
                self._controller.engine_gone(name)  # comes back through the guard
                return
            except Exception as error:
                self._fail(error)
                self._changed.set()
                return
            self._waits.activate_s += time.perf_counter() - started_s
            active = weights.number
            self._controller.engine_active(name, active)
            self._hand_out()
            self._changed.set()

    async def _settled(self) -> None:
        await asyncio.gather(*self._activations.values())
        if self._failure is not None:
            raise self._failure

    async def _guard(self) -> None:
        """Engines that came back get weights; leases that ran out are handed out again; what is stuck ends the run."""
        seen: dict[str, int] = {}
        while self._failure is None:
            await asyncio.sleep(_RESTART_POLL_S)
            try:
                for name in self._roles.engine_names:
                    restarts = self._roles.restarts(name)
                    if restarts != seen.setdefault(name, 0):
                        seen[name] = restarts
                        self._controller.engine_gone(name)
                        self._activate(name)
                self._hand_out()
                await self._roles.mend()
                stuck = self._watchdog.report()
                if stuck is not None:
                    raise UserError(f"run: {stuck}; see {TRACE_HINT}, then continue with --resume")
            except Exception as error:
                self._fail(error)
            self._changed.set()

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
