"""The roles of a run and where they live: engines, agents, verifiers and the trainer, behind one runtime."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from stretto.base.errors import UserError
from stretto.base.trajectory import Group, Task, WeightVersion
from stretto.rl.agent import AgentStats, Wait
from stretto.rl.factories import Factories
from stretto.rl.reward import RewardStats
from stretto.rl.status import RoleRow
from stretto.runtime.runtime import Handle, Placement, Runtime, RuntimeFailure

_ASK_S = 10.0
"""For a role to say how it is."""
_LOAD_S = 120.0
"""For an engine to fetch and take over new weights."""


@dataclass(slots=True)
class Place:
    """An agent, and how many groups it runs."""

    handle: Handle
    load: int = 0

    def __enter__(self) -> Place:
        self.load += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.load -= 1


@dataclass(slots=True)
class Roles:
    """All roles of one attempt. Made by `hire`."""

    runtime: Runtime
    trainer: Handle
    engines: dict[str, Handle]
    rewards: tuple[Handle, ...]
    agents: tuple[Place, ...]

    @property
    def engine_names(self) -> tuple[str, ...]:
        return tuple(self.engines)

    def least_loaded_agent(self) -> Place:
        return min(self.agents, key=lambda place: place.load)

    def restarts(self, engine: str) -> int:
        return self.runtime.status(self.engines[engine]).restarts

    async def activate(self, engine: str, weights: WeightVersion) -> None:
        await self.runtime.call(self.engines[engine], "activate", weights, deadline_s=_LOAD_S)

    async def evaluate(self, tasks: Sequence[Task], temperature: float, deadline_s: float) -> list[Group]:
        """One sample of each task, outside of the run."""

        async def one(task: Task) -> Group:
            with self.least_loaded_agent() as place:
                group: Group = await self.runtime.call(
                    place.handle, "evaluate", task, temperature, deadline_s=deadline_s
                )
            return group

        return list(await asyncio.gather(*(one(task) for task in tasks)))

    def forget(self, ordinals: Sequence[int]) -> None:
        """Delete the token logs of groups that are stored, or have ended."""
        if ordinals:
            self.runtime.cast(self.agents[0].handle, "forget", tuple(ordinals))

    async def mend(self) -> None:
        """Start verifiers again whose threads are stuck in a task, and engines that have died inside."""
        for handle, stats in await self.reward_stats():
            if stats.num_stuck:
                await self._restart(handle)
        for handle in self.engines.values():
            if await self._ask(handle, "failure"):
                await self._restart(handle)

    async def waits(self) -> list[Wait]:
        """Samples in flight over all agents, longest wait first."""
        found = [wait for place in self.agents for wait in (await self._ask(place.handle, "waits") or ())]
        return sorted(found, key=lambda wait: -wait.seconds)

    async def agent_stats(self) -> list[tuple[Handle, AgentStats]]:
        return await self._all_stats([place.handle for place in self.agents])

    async def reward_stats(self) -> list[tuple[Handle, RewardStats]]:
        return await self._all_stats(self.rewards)

    async def engine_stats(self) -> Mapping[str, Any]:
        """By engine; those that do not answer are left out."""
        return {handle.name: stats for handle, stats in await self._all_stats(tuple(self.engines.values()))}

    def row(self, handle: Handle, load: float, waiting: float, note: str = "") -> RoleRow:
        """A role for the status file."""
        status = self.runtime.status(handle)
        return RoleRow(
            name=handle.name, state=status.state.value, load=load, waiting=waiting, restarts=status.restarts, note=note
        )

    async def _all_stats(self, handles: Sequence[Handle]) -> list[tuple[Handle, Any]]:
        found = [(handle, await self._ask(handle, "stats")) for handle in handles]
        return [(handle, stats) for handle, stats in found if stats is not None]

    async def _ask(self, handle: Handle, method: str) -> Any:
        """What the role says; None where it is dead, busy or being started again."""
        try:
            return await self.runtime.call(handle, method, deadline_s=_ASK_S)
        except RuntimeFailure:
            return None

    async def _restart(self, handle: Handle) -> None:
        try:
            await self.runtime.restart(handle)
        except RuntimeFailure as failure:
            raise UserError(f"{handle.name}: cannot be started again: {failure}; continue with --resume") from failure


async def hire(
    runtime: Runtime,
    factories: Factories,
    *,
    num_agents: int,
    num_rewards: int,
    isolate: bool,
    restarts: int,
    start_s: float,
) -> Roles:
    """Start all roles: verifiers in processes, the others in threads unless they are to be isolated.

    Raises:
        UserError: a role refused to start. RuntimeFailure: it died, or hangs.
    """
    place = Placement.PROCESS if isolate else Placement.THREAD
    options: dict[str, Any] = {"restarts": restarts, "deadline_s": start_s}

    async def reward(number: int) -> Handle:
        name = f"reward-{number}"
        return await runtime.spawn(factories.reward, name=name, placement=Placement.PROCESS, **options)

    # the trainer is not restarted alone: its weights and the ledger go back to a snapshot together
    trainer = runtime.spawn(factories.trainer, name="trainer", placement=place, deadline_s=start_s)
    engines = [
        runtime.spawn(factory, name=f"engine-{number}", placement=place, **options)
        for number, factory in enumerate(factories.engines)
    ]
    trainer_handle, *others = await asyncio.gather(trainer, *engines, *map(reward, range(num_rewards)))
    engine_handles, reward_handles = tuple(others[: len(engines)]), tuple(others[len(engines) :])
    agent = factories.agent(engine_handles, reward_handles)
    agents = await asyncio.gather(
        *(runtime.spawn(agent, name=f"agent-{number}", placement=place, **options) for number in range(num_agents))
    )
    named = {handle.name: handle for handle in engine_handles}
    return Roles(runtime, trainer_handle, named, reward_handles, tuple(Place(handle) for handle in agents))
