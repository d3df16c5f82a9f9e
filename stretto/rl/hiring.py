"""Starts the roles of a run, each where it belongs: in pools, threads or processes, or on the driver's loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from stretto.rl.factories import Factories
from stretto.rl.recipe import PoolConfig, RlRecipe
from stretto.rl.roles import Roles
from stretto.runtime.pool import ElasticPool, Limits
from stretto.runtime.runtime import Placement, Runtime

_AGENT_GROUPS = 64
"""Groups of one isolated agent, unless the largest pool could not hold all of the run's then: what keeps a core busy
with small models' tokens. More than that and there should be another agent."""


@asynccontextmanager
async def hired(
    runtime: Runtime, factories: Factories, recipe: RlRecipe, at_once: Mapping[str, int], start_s: float
) -> AsyncIterator[Roles]:
    """All roles of an attempt; at the end its pools are closed, and the other roles are left to the runtime.

    Args:
        at_once: answers of each source that one verifier judges at once.

    Raises:
        UserError: a role refused to start. RuntimeFailure: it died, or hangs.
    """
    config = recipe.runtime
    is_together = config.kind == "local" and config.isolate != "all"
    place = Placement.THREAD if config.kind == "local" and config.isolate == "none" else Placement.PROCESS
    options: dict[str, Any] = {"restarts": recipe.failures.restarts, "deadline_s": start_s}
    rewards = _reward_pools(runtime, factories, config.rewards, at_once, start_s) if is_together else {}
    num_fixed = 0 if is_together else config.rewards.max
    verifier = factories.reward(tuple(at_once))
    async with AsyncExitStack() as stack:
        # the trainer is not restarted alone: its weights and the ledger go back to a snapshot together
        trainer, engines, fixed, _ = await _together(
            runtime.spawn(factories.trainer, name="trainer", placement=place, deadline_s=start_s),
            _together(
                *(
                    runtime.spawn(factory, name=f"engine-{number}", placement=place, **options)
                    for number, factory in enumerate(factories.engines)
                )
            ),
            _together(
                *(
                    runtime.spawn(verifier, name=f"reward-{number}", placement=Placement.PROCESS, **options)
                    for number in range(num_fixed)
                )
            ),
            _together(*(stack.enter_async_context(pool) for pool in rewards.values())),
        )
        by_source = {source: rewards[_pool_name(num)] for source, num in at_once.items()} if is_together else None
        agent = factories.agent(tuple(engines), tuple(fixed) if by_source is None else by_source)
        agents = ElasticPool(
            runtime,
            agent,
            name="agent",
            placement=Placement.ASYNC if is_together else Placement.PROCESS,
            limits=_agent_limits(recipe, is_together),
            deadline_s=start_s,
            drain_s=recipe.failures.lease_s,
            hangs_whole=True,
        )
        await stack.enter_async_context(agents)
        yield Roles(runtime, trainer, {handle.name: handle for handle in engines}, agents, rewards, tuple(fixed))


def _reward_pools(
    runtime: Runtime, factories: Factories, config: PoolConfig, at_once: Mapping[str, int], start_s: float
) -> dict[str, ElasticPool]:
    """By name; sources of which as many are judged at once share one."""
    return {
        _pool_name(num): ElasticPool(
            runtime,
            factories.reward([source for source, each in at_once.items() if each == num]),
            name=_pool_name(num),
            placement=Placement.PROCESS,
            limits=Limits(min=config.min, max=config.max, utilisation=config.utilisation, slots=num),
            deadline_s=start_s,
            hangs_whole=True,
        )
        for num in sorted(set(at_once.values()))
    }


def _pool_name(at_once: int) -> str:
    return "reward" if at_once == 1 else f"reward-x{at_once}"


def _agent_limits(recipe: RlRecipe, is_together: bool) -> Limits:
    config = recipe.runtime.agents
    most = (recipe.staleness + 1) * recipe.train.prompts + recipe.train.eval_prompts
    if is_together:
        return Limits(min=1, max=1, slots=most)
    slots = max(_AGENT_GROUPS, -(-most // config.max))
    return Limits(min=config.min, max=config.max, utilisation=config.utilisation, slots=slots)


async def _together(*work: Coroutine[Any, Any, Any]) -> list[Any]:
    """All results, in order. The first failure ends the others before it is raised."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
