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

from stretto.api import rl as api_rl
from stretto.base.errors import UserError
from stretto.base.trajectory import Outcome, WeightVersion
from stretto.flow import prompts, rollout
from stretto.flow.agent import AgentRole
from stretto.flow.clients import PooledRewards, RemoteRewards, RewardRequest, Verifiers, connect
from stretto.flow.files import open_files
from stretto.flow.launch import Factories, Gang, Job, Roles, TrainerLost, make_factories, spread, start_roles
from stretto.flow.log import pool_rows, pool_scalars
from stretto.flow.prompts import SourceTables, check_source
from stretto.flow.reward import RewardRole
from stretto.flow.rollout import EngineRole
from stretto.learning.channel import open_channel
from stretto.learning.recipe import RlRecipe, SourceConfig
from stretto.learning.roles import SandboxConfig
from stretto.model.parallel import Ranks
from stretto.runtime.actor import LocalCaller
from stretto.runtime.local import LocalRuntime
from stretto.runtime.pool import ElasticPool, Limits
from stretto.runtime.runtime import Handle, Placement
from tests.engine.engines import engine
from tests.flow.agents import MODEL, TASK, tokenizer
from tests.flow.agents import recipe as agent_recipe
from tests.flow.judges import AT_ONCE, sources
from tests.flow.policies import checkpoint
from tests.flow.policies import recipe as policy_recipe
from tests.runtime.roles import Worker


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
        clients = partial(connect, engines, rewards, score_s, 300.0)
        return partial(AgentRole, agent_recipe(), folder, tokenizer(), sources, clients)

    opened = partial(engine, MODEL)
    return Factories(
        trainers=[Idle],
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


def test_the_trainer_sends_weights_from_the_address_of_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalCaller, "host", "127.0.0.2")
    job = Job(policy_recipe(channel="gloo"), tmp_path / "run", checkpoint(tmp_path / "start"))
    files = open_files(job.recipe, job.folder, job.start)
    (factory,) = make_factories(job, SourceTables({}, SandboxConfig()), tokenizer(), files).trainers
    trainer = factory(caller=LocalCaller({}))
    trainer.copy_weights()
    version = asyncio.run(trainer.publish())
    assert version.location.startswith("gloo://127.0.0.2:")
    fetched = open_channel("gloo", files.store, job.folder).fetch(version)
    assert all(torch.equal(fetched[name], each) for name, each in trainer._model.state_dict().items())


STUCK = """
import threading
from stretto.tasks.task import Problem, TaskSource

class Stuck(TaskSource):
    num_items = 8
    def problem(self, item):
        return Problem(item, ({"role": "user", "content": str(item)},), str(item))
    def score(self, problem, answer):
        threading.Event().wait()
    def close(self):
        raise RuntimeError("Cannot close a running event loop")
"""


def test_a_source_is_not_closed_while_its_score_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text(STUCK)
    monkeypatch.setattr(prompts, "_CHECK_S", 0.1)
    short = recipe(rewards={"min": 1, "max": 3, "deadline_s": 0.1})
    tables = SourceTables({"own": SourceConfig(kind=f"{tmp_path / 'own.py'}:Stuck")}, SandboxConfig())
    with (
        pytest.raises(UserError, match=r"sources.own: item 0: score\(\) has not returned after 0.1 s; correct"),
        tables.opened() as sources,
    ):
        check_source(sources["own"], short)
    with pytest.raises(RuntimeError, match="Cannot close"), tables.opened():
        pass  # at any other end it is closed


def test_each_role_has_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert spread(("cpu",), 1, 2) == (["cpu"], ["cpu", "cpu"])
    assert spread(("cuda:0", "cuda:1"), 1, 1) == (["cuda:0"], ["cuda:1"])
    assert spread(("cuda:0", "cuda:1", "cuda:2"), 1, 3) == (["cuda:0"], ["cuda:1", "cuda:2", "cuda:1"])
    assert spread(("cuda:0", "cuda:1", "cuda:2"), 2, 2) == (["cuda:0", "cuda:1"], ["cuda:2", "cuda:2"])
    assert spread(("cuda:0", "cuda:1"), 2, 1) == (["cuda:0", "cuda:1"], ["cuda:0"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # and yet nobody asked for it
    start = checkpoint(tmp_path / "start")
    job = Job(policy_recipe(), tmp_path / "run", start, devices=("cpu",))
    files = open_files(job.recipe, job.folder, job.start)
    made = make_factories(job, SourceTables({}, SandboxConfig()), tokenizer(), files)
    (trainer,) = made.trainers
    assert trainer(caller=LocalCaller({}))._ranks == Ranks(0, 1, torch.device("cpu"))
    asked = []
    monkeypatch.setattr(
        rollout, "open_rollout_engine", lambda recipe, start, device: asked.append(device) or engine(MODEL)
    )
    several = policy_recipe(rollout__engines=3)
    job = replace(job, recipe=several, devices=("meta", "cpu:1", "cpu:2"))
    made = make_factories(job, SourceTables({}, SandboxConfig()), tokenizer(), files)
    for factory in made.engines:
        factory().close()
    assert asked == ["cpu:1", "cpu:2", "cpu:1"] and made.trainers[0].args[-1] == "meta"


def test_on_a_cluster_only_roles_that_reserve_a_gpu_have_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The GPUs of this machine, played by what it would answer, say nothing about those of other machines."""
    num_gpus = 2
    monkeypatch.setattr(api_rl, "join", lambda name: Ranks(0, 1, torch.device("cuda:0")))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    assert api_rl._devices("auto", policy_recipe()) == ("cuda:0", "cuda:1")
    ray = policy_recipe(runtime={"kind": "ray"})
    assert api_rl._devices("auto", ray) == ("cpu",) and "all roles compute on CPUs: " in capsys.readouterr().out
    with pytest.raises(
        UserError, match=r"--device cuda: on a cluster, resources\.trainer\.gpus and .*; set them, or use"
    ):
        api_rl._devices("cuda", ray)
    num_gpus = 1
    reserved = policy_recipe(runtime={"kind": "ray"}, resources={"trainer": {"gpus": 1}}, trainer={"ranks": 2})
    devices = api_rl._devices("cuda", reserved)
    api_rl.check_ranks(reserved, None, devices)  # which are more than this machine's GPUs
    assert devices == ("cpu",) and not capsys.readouterr().out


@pytest.mark.slow
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


@pytest.mark.slow
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


def test_deadlines_grow_with_the_checkpoint(tmp_path: Path) -> None:
    start, asked = checkpoint(tmp_path / "start"), list[float]()
    num_bytes = (start / "model.safetensors").stat().st_size
    with (start / "model-2.safetensors").open("wb") as file:
        file.truncate(50_000_000_000 - num_bytes)  # takes no place on the disk
    job = Job(policy_recipe(), tmp_path / "run", start)
    files = open_files(job.recipe, job.folder, job.start)
    made = make_factories(job, SourceTables({}, SandboxConfig()), tokenizer(), files)
    assert made.checkpoint_s == 1000.0
    mixed = replace(factories(tmp_path, 30.0), checkpoint_s=made.checkpoint_s)

    async def run() -> None:
        async with LocalRuntime() as local:
            spawn, call = local.spawn, local.call

            async def spied(*args: Any, **options: Any) -> Any:
                if options["name"] in ("trainer", "engine-0"):
                    asked.append(options["deadline_s"])
                return await spawn(*args, **options)

            async def called(handle: Handle, method: str, *args: Any, **options: Any) -> Any:
                asked.append(options["deadline_s"])

            local.spawn = spied  # type: ignore[method-assign]
            async with start_roles(local, mixed, recipe(), AT_ONCE) as roles:
                local.call = called  # type: ignore[method-assign]
                await roles.activate("engine-0", WeightVersion(1, "", "", 0))
                local.call = call  # type: ignore[method-assign]

    asyncio.run(run())
    assert len(asked) == 3 and min(asked) > 1000.0


def test_a_restart_says_why(caplog: pytest.LogCaptureFixture) -> None:
    """The server of an engine that died in the middle of an update, say: until it answers again, the run waits."""

    async def work() -> None:
        async with LocalRuntime() as runtime:
            handle = await runtime.spawn(Worker, name="engine-0", placement=Placement.THREAD, restarts=1)
            agents = ElasticPool(runtime, Worker, name="agent", placement=Placement.THREAD, limits=Limits())
            roles = Roles(runtime, Gang(runtime, ()), {"engine-0": handle}, agents, {}, ())
            await roles.restart(handle, "engine-0: rollout.address: vllm at http://10.0.0.7:8000: gone")
            assert roles.restarts("engine-0") == 1
            with pytest.raises(UserError, match=r"engine-0: cannot be started again: .*continue with --resume"):
                await roles.restart(handle, "gone again")

    asyncio.run(work())
    assert " engine-0: rollout.address: vllm at http://10.0.0.7:8000: gone; it is started again" in caplog.text


def test_an_agent_that_cannot_be_rewound_is_replaced_and_says_why() -> None:
    async def work() -> None:
        async with LocalRuntime() as runtime:
            limits, place = Limits(min=1, max=1), Placement.ASYNC
            async with ElasticPool(runtime, Worker, name="agent", placement=place, limits=limits, restarts=0) as agents:
                await Roles(runtime, Gang(runtime, ()), {}, agents, {}, ())._rewind()
                assert "Worker has no 'rewind'" in str(agents.error)

    asyncio.run(work())


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


class Rank:
    """A trainer's rank that records its calls, and answers, raises or dies as it is told."""

    def __init__(self, number: int, behaviour: str = ""):
        self._number, self._behaviour = number, behaviour
        self.seen: list[object] = []

    async def meet(self) -> tuple[str, int]:
        return "host", self._number

    async def join(self, address: tuple[str, int]) -> None:
        self.seen.append(address)

    async def step(self, text: str) -> tuple[int, list[object]]:
        self.seen.append(text)
        if self._behaviour == "waits for a rank that died":
            await asyncio.sleep(0.3)
            raise ConnectionError("connection closed by peer")
        if self._behaviour == "hangs":
            await asyncio.sleep(60)
        if self._behaviour == "refuses":
            raise UserError("group-7: damaged")
        if self._behaviour == "fails":
            raise ZeroDivisionError("a bug")
        return self._number, self.seen


def gang_of(*behaviours: str, killed: int | None = None) -> object:
    """Answer of a gang with these ranks to ``join`` and ``step``; rank ``killed`` is killed during the step."""

    async def run() -> object:
        async with asyncio.timeout(30), LocalRuntime() as local:
            handles = [
                await local.spawn(Rank, number, each, name=f"trainer-{number}", placement=Placement.ASYNC)
                for number, each in enumerate(behaviours)
            ]
            gang = await Gang(local, tuple(handles)).join()
            step = asyncio.ensure_future(gang.call("step", "refs", deadline_s=20.0))
            if killed is not None:
                await asyncio.sleep(0.1)
                await local.kill(handles[killed], hard=True)
            return await step

    return asyncio.run(run())


def test_a_gang_meets_at_its_first_rank_and_answers_as_it() -> None:
    assert gang_of("", "", "") == (0, [("host", 0), "refs"])
    assert gang_of("") == (0, ["refs"])  # a single rank meets nobody


def test_the_death_of_any_rank_loses_the_gang() -> None:
    with pytest.raises(TrainerLost, match="trainer-1: it was killed"):
        gang_of("hangs", "hangs", killed=1)
    with pytest.raises(TrainerLost, match="trainer-1: it was killed"):  # whatever the others say of it
        gang_of("waits for a rank that died", "", killed=1)


def test_an_error_of_a_rank_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"^group-7: damaged$"):
        gang_of("refuses", "refuses")
    monkeypatch.setattr("stretto.flow.launch._DEATH_S", 0.2)
    with pytest.raises(UserError, match=r"^trainer: step: ZeroDivisionError: a bug; .*--resume"):
        gang_of("hangs", "fails")
    with pytest.raises(UserError, match=r"^group-7: damaged$"):
        gang_of("hangs", "refuses")
