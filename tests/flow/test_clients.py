"""Engines and verifiers behind the local runtime, as a run has them, and threads for code that may hang."""

from __future__ import annotations

import asyncio
import functools
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stretto.base.errors import InfraError, UserError
from stretto.base.trajectory import Outcome, Verdict
from stretto.flow.agent import AgentRole, GroupFailed
from stretto.flow.clients import PooledRewards, RemoteRewards, RewardRequest, Threads, connect
from stretto.flow.reward import RewardRole
from stretto.flow.rollout import EngineRole
from stretto.learning.samples import load_group
from stretto.runtime.actor import LocalCaller
from stretto.runtime.local import LocalRuntime
from stretto.runtime.pool import ElasticPool, Limits
from stretto.runtime.runtime import Handle, Placement, RoleError
from stretto.runtime.store import FolderStore
from stretto.tasks.task import Answer, Problem, Score
from tests.engine.engines import engine
from tests.flow.agents import MODEL, TASK, Toy, assert_same, draw, recipe, tokenizer


class Deadly(Toy):
    """Judging item 8 ends the process that judges."""

    def score(self, problem: Problem, answer: Answer) -> Score:
        if problem.item == 8:
            os._exit(1)
        return super().score(problem, answer)


def sources() -> dict[str, Toy]:
    return {"toy": Deadly()}


def with_runtime(work: Callable[[LocalRuntime], Awaitable[None]]) -> None:
    async def run() -> None:
        runtime = LocalRuntime()
        try:
            await asyncio.wait_for(work(runtime), 120)
        finally:
            await runtime.close()

    asyncio.run(run())


def test_a_group_through_the_runtime(tmp_path: Path) -> None:
    direct = draw(tmp_path / "direct").trajectories

    async def work(runtime: LocalRuntime) -> None:
        opened = functools.partial(engine, MODEL)
        rollout = await runtime.spawn(functools.partial(EngineRole, opened), name="e0", placement=Placement.THREAD)
        reward = await runtime.spawn(functools.partial(RewardRole, sources), name="r0", placement=Placement.THREAD)
        clients = functools.partial(connect, (rollout,), (reward,), 60.0, 300.0)
        role = functools.partial(AgentRole, recipe(), FolderStore(tmp_path), tokenizer(), sources, clients)
        agent = await runtime.spawn(role, name="a0", placement=Placement.THREAD)
        ref = await runtime.call(agent, "run_group", TASK, 0, deadline_s=60)
        for one, other in zip(load_group(ref.location).trajectories, direct, strict=True):
            assert_same(one, other)
        await runtime.kill(rollout)
        hasty = functools.partial(AgentRole, recipe(lease_s=1.0), FolderStore(tmp_path), tokenizer(), sources, clients)
        other = await runtime.spawn(hasty, name="a1", placement=Placement.THREAD)
        with pytest.raises(RoleError, match="within its lease of 1 s") as told:  # an engine may come back until then
            await runtime.call(other, "run_group", replace(TASK, ordinal=4), 0, deadline_s=60)
        assert told.value.kind == GroupFailed.__name__
        with pytest.raises(UserError, match=r"sources\.other"):
            await runtime.call(agent, "run_group", replace(TASK, source="other"), 0, deadline_s=60)

    with_runtime(work)


def test_code_that_exits_fails_and_ends_nothing_else() -> None:
    async def work() -> None:
        threads = Threads()
        with pytest.raises(InfraError, match="raised SystemExit: 3"):
            await threads.run(lambda: sys.exit(3), 10.0, "x")
        assert await threads.run(lambda: 5, 10.0, "x") == 5
        threads.close()

    asyncio.run(work())


def test_verifiers_in_a_pool() -> None:
    async def work(runtime: LocalRuntime) -> None:
        role = functools.partial(RewardRole, sources)
        limits = Limits(min=1, max=2, utilisation=0.7)
        async with ElasticPool(runtime, role, name="r", placement=Placement.THREAD, limits=limits) as pool:
            rewards = PooledRewards({"toy": pool}, 30.0)
            found = await asyncio.gather(*(rewards.score(RewardRequest("toy", 7, "dog")) for _ in range(5)))
            assert [verdict.reward for verdict in found] == [3.0] * 5

    with_runtime(work)


@pytest.mark.slow
def test_a_verifier_that_dies_gives_no_reward() -> None:
    async def work(runtime: LocalRuntime) -> None:
        role = functools.partial(RewardRole, sources)
        handle = await runtime.spawn(role, name="r0", placement=Placement.PROCESS, restarts=3)
        rewards = RemoteRewards(runtime, [handle], 30.0)
        lost = await rewards.score(RewardRequest("toy", 8, "dog"))
        assert lost.outcome is Outcome.INFRA and "sources.toy: item 8: r0" in lost.detail
        assert (await rewards.score(RewardRequest("toy", 7, "dog"))).reward == 3.0

    with_runtime(work)


def test_a_verdict_may_wait_behind_the_requests_of_other_agents() -> None:
    deadlines = []

    class Slow(LocalCaller):
        async def call(self, handle: Handle, method: str, *args: Any, deadline_s: float, **kwargs: Any) -> Any:
            deadlines.append(deadline_s)
            return Verdict(1.0, Outcome.OK, 0.0)

    clients = connect([], (Handle("0", "r0", ""),), 60.0, 300.0, Slow({}))
    assert asyncio.run(clients.rewards.score(RewardRequest("toy", 7, "dog"))).reward == 1.0
    assert deadlines == [300.0]


def test_one_after_the_other_needs_one_thread_and_many_at_once_as_many() -> None:
    async def work() -> tuple[set[int], set[int]]:
        threads = Threads()
        serial = {await threads.run(threading.get_ident, 60, "who") for _ in range(5)}
        barrier = threading.Barrier(6)

        def meet() -> int:
            barrier.wait(60)
            return threading.get_ident()

        together = set(await asyncio.gather(*(threads.run(meet, 60, "meet") for _ in range(6))))
        threads.close()
        return serial, together

    serial, together = asyncio.run(work())
    assert len(serial) == 1 and len(together) == 6


def test_one_that_hangs_is_left_behind_and_comes_back_when_it_can() -> None:
    async def work() -> None:
        threads, gate = Threads(), threading.Event()
        with pytest.raises(InfraError, match=r"slow: no answer within 0\.05 s"):
            await threads.run(gate.wait, 0.05, "slow")
        assert await threads.run(lambda: 7, 60, "next") == 7
        gate.set()
        while len(threads._idle) < 2:
            await asyncio.sleep(0.001)
        threads.close()

    asyncio.run(asyncio.wait_for(work(), 60))


def test_what_it_raises_is_raised_here() -> None:
    def late() -> None:
        raise TimeoutError("its own")

    async def work() -> None:
        threads = Threads()
        with pytest.raises(TimeoutError, match="its own"):
            await threads.run(late, 60, "late")
        with pytest.raises(ZeroDivisionError):
            await threads.run(lambda: 1 // 0, 60, "wrong")
        assert await threads.run(lambda: "well", 60, "after") == "well"
        threads.close()

    asyncio.run(work())


def test_idle_ones_end_when_they_are_told() -> None:
    before = threading.active_count()

    async def work() -> None:
        threads = Threads()
        await asyncio.gather(*(threads.run(lambda: time.sleep(0.01), 60, "nap") for _ in range(12)))
        threads.close()

    asyncio.run(work())
    deadline = time.monotonic() + 60
    while threading.active_count() > before:
        assert time.monotonic() < deadline, "idle threads stay"
        time.sleep(0.01)


# Verification: what a bad task does never becomes a reward
