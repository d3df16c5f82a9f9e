"""Roles behind a runtime: which are pools, who shares one, and what becomes of verifiers that are stuck."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from stretto.base.errors import UserError
from stretto.base.trajectory import Outcome
from stretto.flow import rollout
from stretto.flow.agent import AgentRole
from stretto.flow.clients import PooledRewards, RemoteRewards, RewardRequest, Verifiers, connect
from stretto.flow.files import open_files
from stretto.flow.launch import Factories, Job, Roles, SourceTables, make_factories, spread, start_roles
from stretto.flow.log import pool_rows, pool_scalars
from stretto.flow.reward import RewardRole
from stretto.flow.rollout import EngineRole
from stretto.learning.recipe import RlRecipe, SandboxConfig, SourceConfig
from stretto.model.parallel import Ranks
from stretto.runtime.local import LocalRuntime
from stretto.runtime.runtime import Handle
from tests.engine.engines import engine
from tests.flow.agents import MODEL, TASK, tokenizer
from tests.flow.agents import recipe as agent_recipe
from tests.flow.judges import AT_ONCE, sources
from tests.flow.policies import checkpoint
from tests.flow.policies import recipe as policy_recipe


class Idle:
    """A trainer that is never asked for anything."""


def recipe(**runtime: Any) -> RlRecipe:
    return RlRecipe.model_validate(
        {
            "sources": {name: {"kind": "strings", "args": {"operation": "sort"}} for name in AT_ONCE},
            "optim": {"name": "adamw", "lr": 1e-3},
            "train": {"steps": 1, "prompts": 2, "seq_len": 128},
            "runtime": {"isolate": "none", "rewards": {"min": 1, "max": 3}, **runtime},
        }
    )


def factories(folder: Path, score_s: float) -> Factories:
    def agent(engines: tuple[Handle, ...], rewards: Verifiers) -> Callable[..., Any]:
        clients = partial(connect, engines, rewards, score_s)
        return partial(AgentRole, agent_recipe(), folder, tokenizer(), sources, clients)

    opened = partial(engine, MODEL)
    return Factories(
        trainer=Idle,
        engines=[partial(EngineRole, opened)],
        reward=lambda names: partial(RewardRole, partial(sources, tuple(names)), score_s),
        agent=agent,
    )


def with_roles(folder: Path, work: Callable[[Roles], Awaitable[None]], score_s: float = 30.0, **runtime: Any) -> None:
    async def run() -> None:
        async with asyncio.timeout(120), LocalRuntime() as local:
            async with start_roles(local, factories(folder, score_s), recipe(**runtime), AT_ONCE) as roles:
                await work(roles)
            pooled = ("agent",) if runtime else ("agent", "reward")
            assert not [handle for handle in local.handles() if handle.name.startswith(pooled)]

    asyncio.run(run())


def test_each_role_has_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert spread(("cpu",), 2) == ("cpu", ["cpu", "cpu"])
    assert spread(("cuda:0", "cuda:1"), 1) == ("cuda:0", ["cuda:1"])
    assert spread(("cuda:0", "cuda:1", "cuda:2"), 3) == ("cuda:0", ["cuda:1", "cuda:2", "cuda:1"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # and yet nobody asked for it
    start = checkpoint(tmp_path / "start")
    job = Job(policy_recipe(), tmp_path / "run", start, devices=("cpu",))
    files = open_files(job.recipe, job.folder, job.start)
    made = make_factories(job, SourceTables({}, SandboxConfig()), tokenizer(), files)
    assert made.trainer()._ranks == Ranks(0, 1, torch.device("cpu"))
    asked = []
    monkeypatch.setattr(
        rollout, "open_rollout_engine", lambda recipe, start, device: asked.append(device) or engine(MODEL)
    )
    several = policy_recipe(rollout__engines=3)
    job = replace(job, recipe=several, devices=("meta", "cpu:1", "cpu:2"))
    made = make_factories(job, SourceTables({}, SandboxConfig()), tokenizer(), files)
    for factory in made.engines:
        factory().close()
    assert asked == ["cpu:1", "cpu:2", "cpu:1"] and made.trainer.args[-1] == "meta"


def test_sources_that_are_judged_alike_share_a_pool(tmp_path: Path) -> None:
    async def work(roles: Roles) -> None:
        assert {name: pool.limits.slots for name, pool in roles.rewards.items()} == {"reward": 1, "reward-x4": 4}
        assert not roles.fixed_rewards and roles.agents.limits.max == 1
        (agent,) = roles.agents.handles()
        group = await roles.runtime.call(agent, "evaluate", TASK, 1.0, deadline_s=60)
        assert len(group.trajectories) == TASK.group
        assert roles.rewards["reward"].stats().num_served == TASK.group
        await roles.runtime.call(agent, "evaluate", replace(TASK, source="judge"), 1.0, deadline_s=60)
        assert roles.rewards["reward-x4"].stats().num_served == TASK.group
        assert {row.name for row in pool_rows(roles)} == {"rewards", "reward-x4s"}
        scalars = pool_scalars(roles)
        assert scalars["pool/reward/size"] == 1.0 and scalars["pool/reward/worker_s"] > 0.0

    with_roles(tmp_path, work)


def test_a_stuck_verifier_makes_way_and_others_end_what_they_do(tmp_path: Path) -> None:
    async def work(roles: Roles) -> None:
        rewards = PooledRewards({"judge": roles.rewards["reward-x4"]}, 1.0)
        (first,) = roles.rewards["reward-x4"].handles()
        lost = await rewards.score(RewardRequest("judge", 8, "dog"))
        assert lost.outcome is Outcome.INFRA and "no answer within 1 s" in lost.detail
        await roles.mend()
        assert first not in roles.rewards["reward-x4"].handles()
        assert (await rewards.score(RewardRequest("judge", 7, "dog"))).reward == 3.0
        assert roles.rewards["reward-x4"].stats().num_replaced == 1

    with_roles(tmp_path, work, score_s=1.0)


@pytest.mark.slow
def test_isolated_agents_are_a_pool_and_call_their_verifiers_directly(tmp_path: Path) -> None:
    async def work(roles: Roles) -> None:
        assert not roles.rewards and len(roles.fixed_rewards) == 3
        assert (roles.agents.limits.min, roles.agents.limits.max, roles.agents.limits.slots) == (2, 4, 64)
        pids = {roles.runtime.status(handle).pid for handle in (*roles.agents.handles(), *roles.fixed_rewards)}
        assert len(pids) == 5
        rewards = RemoteRewards(roles.runtime, roles.fixed_rewards, 30.0)
        assert (await rewards.score(RewardRequest("judge", 7, "dog"))).reward == 3.0
        group = await roles.agents.call("evaluate", TASK, 1.0, deadline_s=60)
        assert len(group.trajectories) == TASK.group

    with_roles(tmp_path, work, isolate="all", agents={"min": 2, "max": 4})


def test_sources_are_closed_if_a_later_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from pathlib import Path\n"
        "from stretto.tasks.strings import StringsSource\n"
        "class Own(StringsSource):\n"
        "    def close(self):\n"
        f"        Path({str(tmp_path / 'closed')!r}).touch()\n"
    )
    args = {"operation": "sort"}
    own = SourceConfig(kind=f"{tmp_path / 'own.py'}:Own", args=args)
    refused = SourceConfig(kind="strings", args={"operation": "no such"})
    with pytest.raises(UserError, match=r"sources\.bad\.args: operation"):
        SourceTables({"own": own, "bad": refused}, SandboxConfig())()
    assert (tmp_path / "closed").exists()
    (tmp_path / "closed").unlink()
    with SourceTables({"own": own}, SandboxConfig()).opened():
        assert not (tmp_path / "closed").exists()
    assert (tmp_path / "closed").exists()
