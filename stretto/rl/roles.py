"""The roles of a run and where they live: engines, agents, verifiers and the trainer, behind one runtime."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stretto.base.errors import UserError
from stretto.base.trajectory import Group, Task, WeightVersion
from stretto.rl.agent import AgentStats, Wait
from stretto.rl.reward import RewardStats
from stretto.rl.status import RoleRow
from stretto.runtime.pool import ElasticPool
from stretto.runtime.runtime import (
    DeadlinePassed,
    Handle,
    RoleDied,
    RoleError,
    RoleState,
    Runtime,
    RuntimeFailure,
)

_ASK_S = 10.0
"""For a role to say how it is."""
_LOAD_S = 120.0
"""For an engine to fetch and take over new weights."""
_EVALUATIONS, _PAUSE_S = 5, 0.2
"""Tries at one held-out problem, and the wait between: agents, engines and verifiers may die under it."""


class TrainerLost(RuntimeError):  # noqa: N818 - data for whoever starts the run again
    """The trainer died, or hangs: the run goes on from its last snapshot."""


@dataclass(frozen=True, slots=True)
class Roles:
    """All roles of one attempt. Made by `stretto.rl.hiring.hired`."""

    runtime: Runtime
    trainer: Handle
    engines: Mapping[str, Handle]
    agents: ElasticPool
    """Leased for a group each."""
    rewards: Mapping[str, ElasticPool]
    """Verifiers by pool name; empty where there is a fixed number."""
    fixed_rewards: tuple[Handle, ...]
    """Those that agents elsewhere call directly."""

    @property
    def engine_names(self) -> tuple[str, ...]:
        return tuple(self.engines)

    @property
    def pools(self) -> tuple[ElasticPool, ...]:
        return (self.agents, *self.rewards.values())

    def restarts(self, engine: str) -> int:
        return self.runtime.status(self.engines[engine]).restarts

    def num_restarts(self) -> int:
        """Of all roles of this attempt, so far."""
        alone = (self.trainer, *self.engines.values(), *self.fixed_rewards)
        return sum(self.runtime.status(handle).restarts for handle in alone) + sum(
            pool.stats().num_replaced for pool in self.pools
        )

    async def activate(self, engine: str, weights: WeightVersion) -> None:
        await self.runtime.call(self.engines[engine], "activate", weights, deadline_s=_LOAD_S)

    async def restart_engine(self, name: str) -> None:
        await self._restart(self.engines[name])

    async def call_trainer(self, method: str, *args: Any, deadline_s: float) -> Any:
        """What the trainer's method returns.

        Raises:
            TrainerLost: it died, or hangs. UserError: it refuses, or its method raised anything else.
        """
        try:
            return await self.runtime.call(self.trainer, method, *args, deadline_s=deadline_s)
        except (RoleDied, DeadlinePassed) as lost:
            raise TrainerLost(str(lost)) from lost
        except RoleError as error:
            raise UserError(
                f"trainer: {method}: {error.kind}: {error.message}; see the log, then continue with --resume"
            ) from error

    def check(self) -> None:
        """
        Raises:
            TrainerLost: the trainer died. UserError: another role that only starts again so many times did.
        """
        for handle in (self.trainer, *self.engines.values(), *self.fixed_rewards):
            status = self.runtime.status(handle)
            if status.state is RoleState.DEAD and handle == self.trainer:
                raise TrainerLost(f"{handle.name}: {status.why}")
            if status.state is RoleState.DEAD:
                raise UserError(
                    f"{handle.name}: {status.why}; failures.restarts: it was started again {status.restarts} times; "
                    "continue with --resume"
                )

    async def evaluate(self, tasks: Sequence[Task], temperature: float, deadline_s: float) -> list[Group]:
        """One sample of each task, outside of the run.

        Raises:
            UserError: a task refuses, or kept failing.
        """

        async def one(task: Task) -> Group:
            for failures in range(1, _EVALUATIONS + 1):
                try:
                    group: Group = await self.agents.call("evaluate", task, temperature, deadline_s=deadline_s + _ASK_S)
                    return group
                except RuntimeFailure as failure:
                    if failures == _EVALUATIONS:
                        what = failure.message if isinstance(failure, RoleError) else failure
                        raise UserError(
                            f"evaluation: {what} ({failures} tries); mend that, then continue with --resume"
                        ) from failure
                await asyncio.sleep(_PAUSE_S * failures)
            raise AssertionError(f"{_EVALUATIONS} tries")

        return list(await asyncio.gather(*(one(task) for task in tasks)))

    def forget(self, ordinals: Sequence[int]) -> None:
        """Delete the token logs of groups that are stored, or have ended."""
        agents = [agent for agent in self.agents.handles() if self._is_alive(agent)]
        if ordinals and agents:
            self.runtime.cast(agents[0], "forget", tuple(ordinals))

    async def mend(self) -> None:
        """Start verifiers again whose threads are stuck in a task, and engines that have died inside.

        Raises:
            UserError: a pool cannot start workers any more.
        """
        for pool in self.pools:
            if pool.error is not None:
                raise UserError(f"{pool.name}: no worker can be started: {pool.error}; continue with --resume")
        for handle, stats in await self.reward_stats():
            if stats.num_stuck and handle in self.fixed_rewards:
                await self._restart(handle)
            elif stats.num_stuck:
                for pool in self.rewards.values():
                    pool.replace(handle, hard=False)  # what else it judges may well end
        engines = tuple(self.engines.values())
        failures = await asyncio.gather(*(self._ask(engine, "failure") for engine in engines))
        for engine, failure in zip(engines, failures, strict=True):
            if failure:
                await self._restart(engine)

    async def waits(self) -> list[Wait]:
        """Samples in flight over all agents, longest wait first."""
        told = await asyncio.gather(*(self._ask(agent, "waits") for agent in self.agents.handles()))
        return sorted((wait for waits in told for wait in waits or ()), key=lambda wait: -wait.seconds)

    async def agent_stats(self) -> list[tuple[Handle, AgentStats]]:
        return await self._all_stats(self.agents.handles())

    async def reward_stats(self) -> list[tuple[Handle, RewardStats]]:
        pooled = [handle for pool in self.rewards.values() for handle in pool.handles()]
        return await self._all_stats([*self.fixed_rewards, *pooled])

    async def engine_stats(self) -> Mapping[str, Any]:
        """By engine; those that do not answer are left out."""
        return {handle.name: stats for handle, stats in await self._all_stats(tuple(self.engines.values()))}

    def row(self, handle: Handle, load: float, waiting: float, note: str = "") -> RoleRow:
        """A role for the status file."""
        status = self.runtime.status(handle)
        return RoleRow(
            name=handle.name,
            state=status.state.value,
            load=load,
            waiting=waiting,
            restarts=status.restarts,
            pid=status.pid,
            note=note,
        )

    def pool_rows(self) -> list[RoleRow]:
        """Pools for the status file; those that cannot change are left out."""
        rows = []
        for pool in self.pools:
            stats, limits = pool.stats(), pool.limits
            if limits.max > limits.min:
                note = (
                    f"{stats.size} of {limits.min} to {limits.max} workers, waits of {stats.load.p95_wait_s:.2f} s (p95), "
                    f"{stats.worker_s:,.0f} worker-seconds"
                )
                state = "alive" if pool.error is None else "dead"
                load, waiting = stats.num_leased + stats.load.num_waiting, stats.load.num_waiting
                rows.append(
                    RoleRow(
                        name=f"{pool.name}s",
                        state=state,
                        load=load,
                        waiting=waiting,
                        restarts=stats.num_replaced,
                        note=note,
                    )
                )
        return rows

    def pool_scalars(self) -> dict[str, float]:
        """Pools for the log."""
        scalars: dict[str, float] = {}
        for pool in self.pools:
            stats = pool.stats()
            values = {
                "size": stats.size,
                "queue": stats.load.num_waiting,
                "p95_wait_s": stats.load.p95_wait_s,
                "mean_service_s": stats.load.mean_service_s,
                "worker_s": stats.worker_s,
                "replaced": stats.num_replaced,
            }
            scalars |= {f"pool/{pool.name}/{name}": float(value) for name, value in values.items()}
        return scalars

    async def _all_stats(self, handles: Sequence[Handle]) -> list[tuple[Handle, Any]]:
        found = await asyncio.gather(*(self._ask(handle, "stats") for handle in handles))
        return [(handle, stats) for handle, stats in zip(handles, found, strict=True) if stats is not None]

    async def _ask(self, handle: Handle, method: str) -> Any:
        """What the role says; None where it is dead, busy or being started again."""
        if not self._is_alive(handle):
            return None
        try:
            return await self.runtime.call(handle, method, deadline_s=_ASK_S)
        except RuntimeFailure:
            return None

    def _is_alive(self, handle: Handle) -> bool:
        return self.runtime.status(handle).state is RoleState.ALIVE

    async def _restart(self, handle: Handle) -> None:
        if not self._is_alive(handle):
            return  # it has died meanwhile, which its runtime mends
        try:
            await self.runtime.restart(handle)
        except RuntimeFailure as failure:
            raise UserError(f"{handle.name}: cannot be started again: {failure}; continue with --resume") from failure
