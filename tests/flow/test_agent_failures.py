"""The agent loop when something of ours fails: what is kept, what is tried again, and what never becomes a reward."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stretto.base.errors import InfraError, UserError
from stretto.base.trajectory import Group, GroupRef, Outcome, Verdict
from stretto.flow.agent import GroupFailed, GroupUnfinished
from stretto.flow.clients import Generated, GenerateRequest, RewardRequest, infra
from stretto.flow.rollout import EngineRole
from stretto.learning.recipe import GROUPS
from stretto.learning.samples import load_group
from stretto.sandbox.outcome import ToolResult
from tests.flow.agents import (
    CALL,
    OTHER,
    TASK,
    Rewards,
    Spoken,
    Toy,
    Watched,
    agent,
    assert_same,
    calculator,
    draw,
    log_of,
    role,
    run_spoken,
    settled,
    stream,
    tokenizer,
    tokens_of,
    with_engines,
)
from tests.flow.samples import read_logs


def test_a_retry_goes_on_wherever_the_last_one_was_lost(tmp_path: Path) -> None:
    """Cut after any number of bytes, the next attempt gives the same sample under the same weights: lengths too."""
    whole = draw(tmp_path / "whole", chunk_tokens=5)
    content = log_of(tmp_path / "whole").read_bytes()
    resumed = set()
    for cut in (1, 4, 6, 8):
        folder = tmp_path / f"cut{cut}"
        path = log_of(folder)
        path.parent.mkdir(parents=True)
        path.write_bytes(content[: len(content) * cut // 9])

        async def work(engine: EngineRole, folder: Path = folder) -> Group:
            subject = agent(folder, [engine], chunk_tokens=5)
            group = await subject._within_lease(TASK, 1)
            resumed.add((await subject.stats()).tokens_resumed)
            return group

        for one, other in zip(whole.trajectories, with_engines(work, role()).trajectories, strict=True):
            assert_same(one, other)
    assert len(resumed) > 2  # some had more to begin with than others


def test_a_retry_under_new_weights_keeps_what_it_has(tmp_path: Path) -> None:
    draw(tmp_path, chunk_tokens=5)
    log = log_of(tmp_path)
    content = log.read_bytes()
    log.write_bytes(content[: len(content) * 2 // 3])
    lost = read_logs(log.read_bytes())[0]
    assert 0 < lost.num_sampled < 24
    after = draw(tmp_path, attempt=1, model=OTHER, chunk_tokens=5, engine={"version": 4})
    done = after.trajectories[0]
    assert tokens_of(done)[: lost.num_tokens] == lost.tokens().tolist()
    assert done.routes is not None and set(stream(done, "versions").tolist()) == {-1, 0, 4}
    rows = np.concatenate([part.routes for part in lost.parts if part.routes is not None])
    np.testing.assert_array_equal(done.routes[: len(rows)], rows)
    assert (stream(done, "versions")[: lost.num_tokens] <= 0).all()


_CHILD = """
import asyncio, os, signal, sys
from pathlib import Path
from tests.flow.agents import TASK, agent, role

class Deadly:
    name = "deadly"
    def __init__(self, inner): self.inner, self.num = inner, 0
    async def generate(self, request):
        self.num += 1
        if self.num == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        return await self.inner.generate(request)

asyncio.run(agent(Path(sys.argv[1]), [Deadly(role())], chunk_tokens=4).run_group(TASK, 0))
"""


@pytest.mark.slow
def test_killed_for_real(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    child = subprocess.run(
        [sys.executable, "-c", _CHILD, str(tmp_path)], env=environment, capture_output=True, text=True
    )
    assert child.returncode == -signal.SIGKILL, child.stderr
    held = read_logs(log_of(tmp_path).read_bytes())
    assert sum(log.num_sampled for log in held) > 0 and all(log.verdict is None for log in held)
    whole = draw(tmp_path / "whole", chunk_tokens=4)
    for one, other in zip(whole.trajectories, draw(tmp_path, attempt=1, chunk_tokens=4).trajectories, strict=True):
        assert_same(one, other)


def test_a_finished_sample_is_neither_drawn_nor_verified_again(tmp_path: Path) -> None:
    draw(tmp_path)
    rewards, engine = Rewards(), Spoken([])
    again = asyncio.run(agent(tmp_path, [engine], rewards)._within_lease(TASK, 1))
    assert not rewards.requests and not engine.requests
    assert [each.attempt for each in again.trajectories] == [1, 1, 1]


def test_a_failure_of_ours_is_never_a_reward(tmp_path: Path) -> None:
    broken = Rewards(lambda request: infra(request, "raised ZeroDivisionError: division by zero"))

    async def work(engine: EngineRole) -> None:
        with pytest.raises(GroupFailed, match=r"^ordinal 3, attempt 0: verifier: sources\.toy: item 7: raised Zero"):
            await agent(tmp_path, [engine], broken).run_group(TASK, 0)
        assert not (tmp_path / GROUPS).exists()
        # of the first that failed the next attempt has every token: it asks the verifier alone
        done = [log for log in read_logs(log_of(tmp_path).read_bytes()) if log.num_sampled == 24]
        mended, again = Rewards(), Watched(engine)
        ref = await agent(tmp_path, [again], mended).run_group(TASK, 1)
        assert done and again.num == 3 - len(done) and len(mended.requests) == 3 and ref.mean_reward > 0

    with_engines(work, role())


def test_verifiers_and_tools_are_tried_again(tmp_path: Path) -> None:
    verdicts = iter([infra(RewardRequest("toy", 7, ""), "worker died"), Verdict(2.0, Outcome.OK, 0.0)])
    results = [ToolResult("sandbox lost", Outcome.INFRA, 0.0), ToolResult("8", Outcome.OK, 0.0)]
    rewards = Rewards(lambda request: next(verdicts))
    done, _ = run_spoken(tmp_path, [CALL, "5"], Toy((calculator(results=results),)), rewards)
    assert done.verdict.reward == 2.0
    assert "tool\n8<" in tokenizer().decode(done.segments[2].tokens.tolist())


def test_a_tool_that_keeps_failing_fails_the_group(tmp_path: Path) -> None:
    def broken(arguments: Mapping[str, Any]) -> ToolResult:
        raise OSError("no more processes")

    tool = replace(calculator(), call=broken)
    with pytest.raises(GroupFailed, match=r"tool add: add raised OSError: no more processes \(3 attempts\)"):
        run_spoken(tmp_path, [CALL, "5"], Toy((tool,)))


def test_a_dead_engine_is_left_for_another(tmp_path: Path) -> None:
    whole = draw(tmp_path / "whole", chunk_tokens=5)

    async def work(living: EngineRole) -> Group:
        dying = role(name="dying")

        async def die(num: int, request: GenerateRequest) -> None:
            if num == 5:
                dying.close()

        dying_first = [living, living, living]  # ordinal 3 begins at the first of three
        dying_first[0] = Watched(dying, die)  # type: ignore[call-overload]
        subject = agent(tmp_path / "dead", dying_first, chunk_tokens=5)
        group = await subject._within_lease(TASK, 0)
        stats = await subject.stats()
        assert stats.troubles["engine"] > 0 and await dying.failure()
        assert subject._loads == [0, 0, 0]
        return group

    for one, other in zip(whole.trajectories, with_engines(work, role()).trajectories, strict=True):
        assert_same(one, other)


def test_wrong_rows_are_a_trouble_and_not_kept(tmp_path: Path) -> None:
    class Short(Watched):
        async def generate(self, request: GenerateRequest) -> Generated:
            done = await super().generate(request)
            assert done.routes is not None
            return replace(done, routes=done.routes[1:])

    async def work(engine: EngineRole) -> None:
        with pytest.raises(GroupFailed, match="rows of routes were returned"):
            await agent(tmp_path, [Short(engine)]).run_group(TASK, 0)

    with_engines(work, role())
    assert read_if_there(log_of(tmp_path)) == 0


def test_cancelling_leaves_nothing_in_the_engine(tmp_path: Path) -> None:
    async def work(engine: EngineRole) -> None:
        subject = agent(tmp_path, [engine], chunk_tokens=3)
        running = asyncio.create_task(subject.run_group(TASK, 0))
        while not read_if_there(log_of(tmp_path)):
            await asyncio.sleep(0)
        assert {wait.ordinal for wait in await subject.waits()} == {3}
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await settled(engine)
        assert await subject.waits() == () and (await subject.stats()).num_samples == 0
        await subject.run_group(TASK, 1)

    with_engines(work, role())


def test_a_trainer_that_returns_to_a_snapshot_ends_all_attempts(tmp_path: Path) -> None:
    async def work(engine: EngineRole) -> None:
        subject = agent(tmp_path, [engine], chunk_tokens=3)
        running = [asyncio.create_task(subject.run_group(TASK, 0)), asyncio.create_task(subject.evaluate(TASK))]
        while not read_if_there(log_of(tmp_path)):
            await asyncio.sleep(0)
        await subject.rewind()
        num = read_if_there(log_of(tmp_path))
        assert await subject.waits() == ()
        for each in running:
            with pytest.raises(InfraError, match="agent: dropped"):
                await each
        await settled(engine)
        assert read_if_there(log_of(tmp_path)) == num, "nothing more is written"
        await subject.run_group(TASK, 1)
        assert (await subject.stats()).tokens_resumed == num

    with_engines(work, role())


def read_if_there(path: Path) -> int:
    return sum(log.num_sampled for log in read_logs(path.read_bytes())) if path.exists() else 0


def test_a_lease_ends_what_hangs(tmp_path: Path) -> None:
    class Hanging:
        name = "hanging"

        async def generate(self, request: GenerateRequest) -> Generated:
            await asyncio.Event().wait()
            raise AssertionError

    async def work() -> None:
        subject = agent(tmp_path, [Hanging()], lease_s=0.2)
        running = asyncio.create_task(subject.run_group(TASK, 0))
        await asyncio.sleep(0.1)
        waits = await subject.waits()
        assert [(wait.sample, wait.waits_for) for wait in sorted(waits, key=lambda wait: wait.sample)] == [
            (0, "an engine"),
            (1, "an engine"),
            (2, "an engine"),
        ]
        with pytest.raises(GroupFailed, match=r"not finished within its lease of 0\.2 s"):
            await running

    asyncio.run(work())


def test_faults_of_the_code_are_not_tried_again(tmp_path: Path) -> None:
    class Faulty:
        name, num = "faulty", 0

        async def generate(self, request: GenerateRequest) -> Generated:
            Faulty.num += 1
            raise KeyError("a bug")

    with pytest.raises(KeyError):
        asyncio.run(agent(tmp_path, [Faulty()]).run_group(replace(TASK, group=1), 0))
    assert Faulty.num == 1
    with pytest.raises(UserError, match=r"sources\.other: no such source; there are toy"):
        asyncio.run(agent(tmp_path, [Faulty()]).run_group(replace(TASK, source="other"), 0))


def refusing(number: int) -> Any:
    async def refuse(num: int, request: GenerateRequest) -> None:
        if request.id.split(".")[1] == str(number):
            raise InfraError("it does not like this one")

    return refuse


def test_what_ended_of_a_group_is_trained_where_nothing_more_comes(tmp_path: Path) -> None:
    """One of three samples fails whatever is tried; the others go on, and are not lost with it."""

    async def work(engine: EngineRole) -> GroupRef:
        subject = agent(tmp_path, [Watched(engine, refusing(1))])
        with pytest.raises(GroupUnfinished, match="does not like this one"):
            await subject.run_group(TASK, 0, True)  # the attempt has brought it further
        with pytest.raises(GroupFailed) as caught:
            await subject.run_group(TASK, 1)  # this one has not, but it is not the last
        assert type(caught.value) is GroupFailed
        return await subject.run_group(TASK, 2, True)

    ref = with_engines(work, role())
    group = load_group(ref.location)
    assert ref.num_samples == 2 and [sample.sample for sample in group.trajectories] == [0, 2]
    whole = draw(tmp_path / "whole")
    for one, other in zip(group.trajectories, (whole.trajectories[0], whole.trajectories[2]), strict=True):
        assert_same(one, other)


def test_one_sample_is_no_group(tmp_path: Path) -> None:
    async def work(engine: EngineRole) -> None:
        subject = agent(tmp_path, [Watched(engine, refusing(1))])
        task = replace(TASK, group=2)
        for attempt in range(2):
            with pytest.raises(GroupFailed):
                await subject.run_group(task, attempt, True)

    with_engines(work, role())
    assert not (tmp_path / GROUPS).exists()


def test_a_long_group_goes_on_in_its_next_lease(tmp_path: Path) -> None:
    """Each attempt is over after four chunks: each says that it came further, until one finds the end."""

    async def stop(num: int, request: GenerateRequest) -> None:
        if num > 4:
            raise InfraError("the lease is nearly over")

    async def work(engine: EngineRole) -> int:
        for attempt in range(100):
            subject = agent(tmp_path, [Watched(engine, stop)], chunk_tokens=3)
            try:
                await subject.run_group(replace(TASK, group=2), attempt)
                return attempt
            except GroupUnfinished:
                continue
        raise AssertionError

    assert with_engines(work, role()) > 1
