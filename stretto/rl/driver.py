"""The driver: hands groups out, gives the trainer its batches, has engines change weights. It sees metadata only.

Everything happens on one asyncio loop. Groups are tasks of their own; the trainer takes one step at a time; each event
ends in `Driver._hand_out`; only what happens without telling anybody, a death or a lease that runs out, is polled for. A
dead trainer ends the attempt (`stretto.rl.roles.TrainerLost`): weights, optimiser and ledger go back to the last snapshot
together, with new roles.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Self

from stretto.base.errors import UserError
from stretto.base.trajectory import Ending, WeightVersion
from stretto.rl.buffer import GroupRef
from stretto.rl.controller import Controller
from stretto.rl.fleet import Fleet
from stretto.rl.ledger import Handout
from stretto.rl.measures import StepReport
from stretto.rl.roles import Roles
from stretto.rl.samples import discard
from stretto.rl.trace import Span, Trace
from stretto.rl.watchdog import Watchdog
from stretto.runtime.runtime import RoleDied, RoleError, Runtime, RuntimeFailure

_CALL_SLACK_S = 10.0
"""Between a group's lease and the deadline of the call that carries it."""
_GUARD_S = 0.2
"""Between two looks at what may have died or run out."""
_MOST_UNIFORM, _MOST_FAILED = 64, 2
"""Batches' worth of groups with equal rewards, or given up, without a step between them, after which the run is hopeless."""
TRACE_HINT = "`stretto top`"


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
    """One attempt at a run, from a controller that stands where the trainer does. An async context manager: inside, roles
    are looked after, and all engines have the weights that the attempt starts from."""

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
        self._fleet = Fleet(roles, controller, trace, weights, moved=self._moved, failed=self._fail)
        self._groups: dict[asyncio.Task[None], Handout] = {}
        self._guarding: asyncio.Task[None] | None = None
        self._reporting: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()
        self._waits = Waits()
        self._num_uniform = 0
        """Groups with equal rewards since the last step."""
        self._failed_before = 0
        """Groups given up until the last step."""
        self._last_loss = ""
        """Why the last attempt at a group came to nothing, since the last step."""
        self._cuts: deque[Mapping[str, Any]] = deque(maxlen=plan.keep_snapshots)

    async def __aenter__(self) -> Self:
        self._guarding = asyncio.create_task(self._guard())
        try:
            self._fleet.publish(self._weights)
            await self._unless_failed(self._fleet.settled())
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._end()

    async def run(self) -> None:
        """Train until the recipe's last step.

        Raises:
            TrainerLost: the trainer died.
            UserError: a role cannot go on, or nothing moves any more, and the watchdog says what.
        """
        while self._controller.version < self._plan.num_steps:
            await self._train(await self._next_batch())

    async def _end(self) -> None:
        tasks = [*self._groups, *filter(None, (self._guarding, self._reporting))]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._fleet.close()

    async def _unless_failed(self, work: Coroutine[Any, Any, None]) -> None:
        """Await ``work``, or what ends the attempt first."""
        task = asyncio.create_task(work)
        try:
            while not task.done():
                if self._failure is not None:
                    raise self._failure
                self._changed.clear()
                change = asyncio.create_task(self._changed.wait())
                await asyncio.wait([task, change], return_when=asyncio.FIRST_COMPLETED)
                change.cancel()
            task.result()
        finally:
            task.cancel()

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
        self._num_uniform, self._failed_before, self._last_loss = 0, self._num_failed, ""
        with self._trace.span("trainer", "publish", version=step + 1):
            self._fleet.publish(await self._call_trainer("publish"))
        self._waits.step_s += time.perf_counter() - started_s
        waits, self._waits = self._waits, Waits()
        self._hand_out()
        done = step + 1
        if self._reporting is not None:
            await self._reporting
        # told while the trainer is at the next step; what a snapshot holds is told before the trainer goes on
        self._reporting = asyncio.create_task(self._report(report, refs, waits))
        if done % self._plan.snapshot_every == 0 or done == self._plan.num_steps:
            await self._snapshot()
            await self._reporting

    async def _report(self, report: StepReport, refs: tuple[GroupRef, ...], waits: Waits) -> None:
        await asyncio.to_thread(discard, self._controller.unneeded())
        self._observe(report, refs, waits)

    async def _snapshot(self) -> None:
        """The trainer's state and the ledger's, of the same version, in one folder."""
        cut = self._controller.checkpoint_cut()
        with self._trace.span("trainer", "snapshot", version=self._controller.version):
            await self._call_trainer("save", cut)
        self._cuts.append(cut)
        if len(self._cuts) == self._plan.keep_snapshots:  # older ones have been deleted
            self._controller.covered(self._cuts[0])

    async def _call_trainer(self, method: str, *args: Any) -> Any:
        return await self._roles.call_trainer(method, *args, deadline_s=self._plan.step_deadline_s)

    def _hand_out(self) -> None:
        """Start whatever the controller admits. Called after every event."""
        for handout in self._controller.admit():
            task = asyncio.create_task(self._group(handout))
            self._groups[task] = handout
            task.add_done_callback(self._groups.pop)

    async def _group(self, handout: Handout) -> None:
        """One attempt at one group, from hand-out to report."""
        task, attempt = handout.task, handout.attempt
        self._watchdog.waits("agents", "an agent", task.ordinal)
        deadline_s = self._plan.lease_s + _CALL_SLACK_S
        try:
            async with self._roles.agents.lease(deadline_s) as agent:
                self._watchdog.waits("agents", agent.name, task.ordinal)
                with self._trace.span("agents", "group", ordinal=task.ordinal, attempt=attempt):
                    ref: GroupRef = await self._runtime.call(agent, "run_group", task, attempt, deadline_s=deadline_s)
            if self._controller.group_ready(ref):
                self._watchdog.waits("trainer", "agents")  # it came one group further
                self._roles.forget([task.ordinal])
                self._check_hope(ref)
        except UserError as error:
            self._fail(error)
        except RoleDied as died:
            self._lose(handout, str(died), counts=False)
        except RuntimeFailure as failure:
            self._lose(handout, failure.message if isinstance(failure, RoleError) else str(failure))
        except Exception as error:  # ours, not a role's: nothing would wait for it otherwise
            self._fail(error)
        finally:
            self._watchdog.done("agents", task.ordinal)
        self._changed.set()

    def _lose(self, handout: Handout, why: str, counts: bool = True) -> None:
        """An attempt came to nothing. Where that is the rule, the run would ask for ever."""
        self._last_loss = why
        self._controller.group_failed(handout.task.ordinal, handout.attempt, why, counts=counts)
        num_failed = self._num_failed - self._failed_before
        if num_failed > _MOST_FAILED * self._plan.prompts:
            self._fail(
                UserError(
                    f"sources: {num_failed} groups without a step between them were given up, the last one because of "
                    f"{why}; mend that, then continue with --resume"
                )
            )

    @property
    def _num_failed(self) -> int:
        return int(self._controller.counts()[Ending.FAILED.value])

    def _check_hope(self, ref: GroupRef) -> None:
        """A policy that never or always succeeds learns nothing, and would be asked for ever."""
        self._num_uniform += ref.is_uniform
        if self._num_uniform > _MOST_UNIFORM * self._plan.prompts:
            raise UserError(
                f"sources: {self._num_uniform} groups without a step between them had equal rewards, the last {ref.mean_reward:g}; "
                "start from a model that succeeds now and then, choose easier or harder problems, or set loss.drop_uniform = false"
            )

    def _moved(self, seconds: float) -> None:
        """An engine has other weights now."""
        self._waits.activate_s += seconds
        self._hand_out()
        self._changed.set()

    async def _guard(self) -> None:
        """Sees to what nobody tells: deaths, leases that run out, roles that are stuck. Ends with the attempt."""
        while self._failure is None:
            await asyncio.sleep(_GUARD_S)
            try:
                self._roles.check()
                self._fleet.tend()
                self._hand_out()
                await self._roles.mend()
                stuck = self._watchdog.report()
                if stuck is not None:
                    raise UserError(await self._stuck(stuck))
            except Exception as error:
                self._fail(error)
            self._changed.set()

    async def _stuck(self, report: str) -> str:
        """One line: who waits for whom, which sample waits longest, and what went wrong last."""
        waits = await self._roles.waits()
        longest = "".join(
            f"; sample {wait.sample} of group {wait.ordinal} has waited for {wait.waits_for} for {wait.seconds:.0f} s"
            for wait in waits[:1]
        )
        last = f"; the last attempt was lost by {self._last_loss}" if self._last_loss else ""
        return f"run: {report}{longest}{last}; see {TRACE_HINT}, then continue with --resume"

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._changed.set()
