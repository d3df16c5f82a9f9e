"""Sessions under the agent loop: one a sample, reached again after a kill, given up after a failure, lost honestly."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stretto.base.trajectory import Group, Outcome, Trajectory
from stretto.flow.agent import AgentRole, GroupFailed
from stretto.flow.clients import RewardRequest
from stretto.flow.reward import RewardRole
from stretto.tasks.user import STOP as OVER
from stretto.tasks.user import ModelUser, UserConfig
from tests.flow.agents import LONG, ONE, Rewards, Spoken, agent, log_of, spoken_turn, tokenizer, tokens_of
from tests.flow.samples import read_logs
from tests.tasks.counting import Counter, Counters, once
from tests.tasks.judges import judging

TASK = replace(ONE, max_tokens=1200, item=3)
LIMITS = {**LONG, "max_len": 2500, "max_turns": 6}


def add(*by: int) -> str:
    return "".join(f'<tool_call>{{"name": "add", "arguments": {{"by": {each}}}}}</tool_call>' for each in by)


STOP = '<tool_call>{"name": "stop", "arguments": {}}</tool_call>'


def subject(folder: Path, turns: Sequence[str], source: Counters, rewards: Any = None, **limits: Any) -> AgentRole:
    engine = Spoken([spoken_turn(turn) for turn in turns])
    return agent(folder, [engine], rewards, source, **{**LIMITS, **limits})


def run(
    folder: Path, turns: Sequence[str], source: Counters, rewards: Any = None, attempt: int = 0, **limits: Any
) -> Trajectory:
    """A sample of an agent whose engine has only these turns."""

    async def work() -> Group:
        role = subject(folder, turns, source, rewards, **limits)
        try:
            return await role._within_lease(TASK, attempt)
        finally:
            async with asyncio.timeout(10):  # sessions are closed beside the loop, but for those that hang
                while not (limits or all([session.is_closed for session in source.sessions])):
                    await asyncio.sleep(0.001)

    (found,) = asyncio.run(work()).trajectories
    return found


def killed(folder: Path, turns: Sequence[str], source: Counters, attempt: int = 0) -> None:
    """The engine has nothing more to say, which no agent survives."""
    with pytest.raises(IndexError):
        run(folder, turns, source, attempt=attempt)


def test_each_sample_has_a_session_and_is_judged_elsewhere_by_its_calls(tmp_path: Path) -> None:
    source, elsewhere = Counters(), Counters()

    async def work() -> Group:
        rewards = RewardRole(lambda: {"toy": elsewhere})
        role = subject(tmp_path, [add(4), add(3), "done", add(7), "done"], source, rewards)
        first = await role._within_lease(replace(TASK, group=1), 0)
        second = await role._within_lease(replace(TASK, group=1, ordinal=9), 0)
        await rewards.close()
        return replace(first, trajectories=(*first.trajectories, *second.trajectories))

    first, second = asyncio.run(work()).trajectories
    assert (first.verdict.reward, second.verdict.reward) == (1.0, 1.0)
    assert first.finish_reason == "stop" and [step.reward for step in first.verdict.steps] == [0.5]
    prompt = tokenizer().decode(first.segments[0].tokens.tolist())
    assert "Adds to toy." in prompt, "the tools of the problem's session"
    assert [session.value for session in elsewhere.sessions] == [10, 10]
    seeds = [seed for seed in source.seeds if seed is not None]
    assert elsewhere.seeds == seeds and len(set(seeds)) == 1, "a sample's own, wherever it is opened"


def test_the_log_says_what_state_each_call_left(tmp_path: Path) -> None:
    rewards, source = Rewards(), Counters()
    run(tmp_path, [add(4, 1), "well", "done"], source, rewards)
    _, one, two, _, user, _ = rewards.requests[0].messages
    assert one == {"role": "tool", "name": "add", "content": "7", "outcome": "ok", "state": "7"}
    assert (two["content"], two["state"], user) == ("8", "8", {"role": "user", "content": "8?"})
    assert all([session.is_closed for session in source.sessions])


def test_a_call_may_end_the_sample(tmp_path: Path) -> None:
    """What comes behind it in the same turn is not done, and the verifier hears of the call that ended it."""
    rewards, source = Rewards(), Counters()
    done = run(tmp_path, [add(4), STOP + add(5)], source, rewards)
    assert (done.finish_reason, done.num_turns, done.segments[-1].is_sampled) == ("tool", 2, True)
    assert done.routes is not None and len(done.routes) == done.num_tokens - 1
    assert [message.get("content") for message in rewards.requests[0].messages][-1] == "over"
    assert source.sessions[-1].value == 7


@pytest.mark.parametrize("turns", [[add(4)], [add(4), "well"], [add(4), add(2), "well"]])
def test_a_killed_agents_successor_comes_to_the_same_state(tmp_path: Path, turns: list[str]) -> None:
    rest = [add(1), "done"]
    whole = run(tmp_path / "whole", [*turns, *rest], Counters())
    killed(tmp_path, turns, Counters())
    source, rewards = Counters(), Rewards()
    done = run(tmp_path, rest, source, rewards, attempt=1)
    assert tokens_of(done) == tokens_of(whole)
    assert source.sessions[-1].value == (10 if len(turns) == 3 else 8)
    assert rewards.requests[0].messages[1]["state"] == "7"
    assert sum(message["role"] == "user" for message in rewards.requests[0].messages) == len(turns) // 2


def test_an_end_that_was_not_judged_yet_is_one_for_the_successor_too(tmp_path: Path) -> None:
    dead = Rewards(lambda request: 1 / 0)  # type: ignore[arg-type, return-value]
    with pytest.raises(ZeroDivisionError):
        run(tmp_path, [add(4), STOP], Counters(), dead)
    done = run(tmp_path, [], Counters(), attempt=1)
    assert (done.finish_reason, done.num_turns) == ("tool", 2)


def test_a_state_that_is_lost_is_begun_anew_and_counted(tmp_path: Path) -> None:
    numbers = itertools.count()
    killed(tmp_path, [add(4)], Counters(lambda session: f"at {next(numbers)}"))
    source = Counters(lambda session: f"at {next(numbers)}")

    async def work() -> tuple[Trajectory, AgentRole]:
        role = subject(tmp_path, [add(7), "done"], source)
        return (await role._within_lease(TASK, 1)).trajectories[0], role

    done, role = asyncio.run(work())
    assert asyncio.run(role.stats()).sessions_lost == {"toy": 1}
    assert done.num_turns == 2 and done.routes is not None and len(done.routes) == done.num_tokens - 1
    assert [session.value for session in source.sessions[-2:]] == [7, 10], "one that was lost, and one from the start"
    (log,) = read_logs(log_of(tmp_path, attempt=1).read_bytes())
    assert log.num_lost == 1 and log.tokens().tolist() == tokens_of(done)


def test_a_state_that_is_lost_again_and_again_fails_the_group(tmp_path: Path) -> None:
    numbers = itertools.count()
    for attempt in range(3):
        killed(tmp_path, [add(4)], Counters(lambda session: f"at {next(numbers)}"), attempt=attempt)
    with pytest.raises(
        GroupFailed, match=r"session: add: returned 'at \d+', and 'at \d+' before \(restarted 2 times\)"
    ):
        run(tmp_path, [], Counters(lambda session: f"at {next(numbers)}"), attempt=3)
    (log,) = read_logs(log_of(tmp_path, attempt=3).read_bytes())
    assert log.verdict is None, "no reward of any kind"


def test_a_verifier_that_comes_to_another_state_has_judged_nothing() -> None:
    numbers = itertools.count()
    source = Counters(lambda session: f"at {next(numbers)}")
    turns = source.demonstration(source.problem(3))

    async def work() -> None:
        rewards = RewardRole(lambda: {"toy": source})
        verdict = await rewards.score(RewardRequest("toy", 3, "done", turns))
        assert verdict.outcome is Outcome.INFRA and "raised Diverged: add: returned 'at 1'" in verdict.detail
        await rewards.close()

    asyncio.run(work())


def test_after_a_failure_calls_are_repeated_in_another_session(tmp_path: Path) -> None:
    """The tool has changed half of the state when it raises."""

    def fail() -> None:
        raise OSError("no more processes")

    source, rewards = Counters(once(fail, at=2)), Rewards()
    run(tmp_path, [add(4, 3), "done"], source, rewards)
    assert [message["state"] for message in rewards.requests[0].messages if message["role"] == "tool"] == ["7", "10"]
    broken, mended = source.sessions[-2:]
    assert (broken.value, mended.value) == (10, 10) and broken.is_closed and mended.is_closed


def test_what_hangs_is_left_to_its_thread_which_closes_it(tmp_path: Path) -> None:
    free = threading.Event()
    source = Counters(once(lambda: free.wait(30), at=2))

    async def work() -> Counter:
        role = subject(tmp_path, [add(4), add(3), "done"], source, deadline_s=0.2)
        await role._within_lease(TASK, 0)
        assert (await role.stats()).troubles == {"tool add": 1}
        hung = source.sessions[-2]
        assert not hung.is_closed, "a thread is at it"
        free.set()
        async with asyncio.timeout(10):
            while not hung.is_closed:
                await asyncio.sleep(0.01)
        return hung

    hung = asyncio.run(work())
    assert hung is not source.sessions[-1] and source.sessions[-1].value == 10


def test_a_user_who_does_not_answer_is_a_failure_of_ours(tmp_path: Path) -> None:
    class Silent(Counters):
        def open(self, problem: Any, seed: int | None = None) -> Any:
            session = super().open(problem, seed)
            session.reply = lambda messages: threading.Event().wait(30)  # type: ignore[method-assign, assignment, return-value]
            return session

    with pytest.raises(
        GroupFailed, match=r"environment: sources\.toy: reply\(\): no answer within 0\.05 s \(3 attempts\)"
    ):
        run(tmp_path, ["well"], Silent(), deadline_s=0.05)


def test_a_user_who_never_stops_is_ended_by_turns_or_by_room(tmp_path: Path) -> None:
    source = Counters()
    assert run(tmp_path / "turns", ["well"] * 6, source).finish_reason == "turns"
    source.sessions.clear()

    class Loud(Counters):
        def open(self, problem: Any, seed: int | None = None) -> Any:
            session = super().open(problem, seed)
            session.reply = lambda messages: "word " * 2_000_000  # type: ignore[method-assign, assignment]
            return session

    assert run(tmp_path / "room", ["well"], Loud()).finish_reason == "length"


def test_a_call_whose_result_leaves_no_room_was_made_all_the_same(tmp_path: Path) -> None:
    rewards = Rewards()
    done = run(tmp_path, [add(7)], Counters(lambda session: "x" * 10_000_000), rewards)
    assert (done.finish_reason, done.num_turns) == ("length", 1)
    _, told = rewards.requests[0].messages
    assert told["state"] == "10" and len(told["content"]) < 200_000


def test_what_a_model_said_as_the_user_is_not_asked_for_again(tmp_path: Path) -> None:
    with judging(lambda body: OVER if len(body["messages"]) > 4 else "more") as (url, asked):
        user = ModelUser(UserConfig(url=url, model="m"), "sources.toy")

        class Talking(Counters):
            def open(self, problem: Any, seed: int | None = None) -> Any:
                session = super().open(problem, seed)
                session.reply = lambda messages: user.reply("a user", messages)  # type: ignore[method-assign]
                return session

        killed(tmp_path, [add(4), "well?"], Talking())
        done = run(tmp_path, [add(3), "so?"], Talking(), attempt=1)
        user.close()
    assert (done.finish_reason, done.num_turns, len(asked)) == ("stop", 4, 2)


def test_what_began_anew_is_sent_to_the_engine_from_its_start(tmp_path: Path) -> None:
    """The engine has tokens of this very sample, which are not those that it goes on from."""
    numbers, calls = itertools.count(), itertools.count(1)

    def before(session: Counter) -> str:
        if next(calls) == 2:
            raise OSError("no more processes")
        return f"at {next(numbers)}"

    engine = Spoken([spoken_turn(turn) for turn in (add(4), add(1), "done")])
    role = agent(tmp_path, [engine], Rewards(), Counters(before), **LIMITS)
    (done,) = asyncio.run(role._within_lease(TASK, 0)).trajectories
    assert asyncio.run(role.stats()).sessions_lost == {"toy": 1} and done.num_turns == 1
    first, again = (request.tokens.tolist() for request in engine.requests if request.num_kept == 0)
    assert first == again == done.segments[0].tokens.tolist()
