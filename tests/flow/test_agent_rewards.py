"""Rewards of whole groups in the agent: made before the group is stored, once, whatever fails on the way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from stretto.base.errors import InfraError
from stretto.base.trajectory import Group, Outcome, Segment, StepReward, Verdict
from stretto.flow import agent as agents
from stretto.flow.agent import AgentRole, GroupFailed
from stretto.flow.clients import Clients, Generated, GenerateRequest, RewardRequest, infra
from stretto.flow.launch import CALL_SLACK_S
from stretto.flow.reward import RewardRole
from stretto.learning.recipe import RewardConfig
from stretto.learning.samples import load_group
from stretto.runtime.store import FolderStore
from stretto.tasks.registry import open_source
from stretto.tasks.task import Answer, Problem, Score, TaskSource
from tests.flow.agents import TASK, Rewards, Toy, log_of, recipe, spoken_turn, tokenizer
from tests.flow.samples import read_logs
from tests.tasks.judges import judging, shown

TEXTS = ("a dog sat", "a dog sat", "the log and the mat", "")
GROUP = replace(TASK, group=len(TEXTS))


class Choir:
    """An engine in which sample i of a group always says the i-th text, and some of them fail as often as told."""

    name = "choir"

    def __init__(self, failures: dict[int, int] | None = None, texts: Sequence[str] = TEXTS):
        self.num, self._texts = 0, texts
        self._failures = dict(failures or {})

    async def generate(self, request: GenerateRequest) -> Generated:
        self.num += 1
        number = int(request.id.split(".")[1])
        if self._failures.get(number, 0) > 0:
            self._failures[number] -= 1
            raise InfraError("out of memory")
        tokens = spoken_turn(self._texts[number])
        routes = np.zeros((len(request.tokens) + len(tokens) - 1, 1, 2), np.uint8)
        ones = np.full(len(tokens), -1.0, np.float32)
        segment = Segment(tokens, True, ones, np.zeros(len(tokens), np.int32))
        return Generated(segment, routes, "stop", 0, 0, 0, 0.0)


class Contest(Toy):
    """Answers of a group are ranked by length."""

    is_verifiable = False

    def __init__(self, broken: int = 0):
        super().__init__()
        self.broken, self.seen = broken, list[list[str]]()

    @property
    def compares(self) -> bool:
        return True

    def compare(self, problem: Problem, answers: Sequence[Answer]) -> Sequence[Score]:
        self.seen.append([answer.text for answer in answers])
        if len(self.seen) <= self.broken:
            raise RuntimeError("the judge is asleep")
        lengths = [len(answer.text) for answer in answers]
        steps = (StepReward(0, 0.5, 1),)
        return [Score(sum(n > other for other in lengths) / 3, Outcome.OK, steps=steps if n else ()) for n in lengths]


def singers(
    folder: Path,
    source: TaskSource,
    engine: Any = None,
    rewards: Any = None,
    config: RewardConfig | None = None,
    max_len: int = 150,
    lease_s: float = 60.0,
) -> AgentRole:
    told = recipe(lease_s, chunk_tokens=400, max_len=max_len).replace(rewards={} if config is None else {"toy": config})
    return AgentRole(
        told,
        FolderStore(folder),
        tokenizer(),
        lambda: {"toy": source},
        lambda caller: Clients([engine or Choir()], rewards or RewardRole(lambda: {"toy": source})),
        pauses_s=(0.001, 0.01),
    )


def stored(agent: AgentRole, attempt: int = 0, is_last: bool = False) -> Group:
    ref = asyncio.run(agent.run_group(GROUP, attempt, is_last))
    group = load_group(ref.location)
    rewards = [each.verdict.reward for each in group.trajectories]
    assert ref.mean_reward == pytest.approx(np.mean(rewards)) and not ref.is_uniform
    return group


def told(group: Group) -> list[Verdict]:
    return [replace(each.verdict, seconds=0.0, latency_s=0.0) for each in group.trajectories]


def test_a_stored_group_has_the_final_rewards(tmp_path: Path) -> None:
    agent = singers(tmp_path, Toy(), config=RewardConfig(diversity="words"))
    verdicts = told(stored(agent))
    np.testing.assert_allclose([each.reward for each in verdicts], [9 * 2 / 3, 9 * 2 / 3, 19, 0])
    assert [each.parts["quality"] for each in verdicts] == [9, 9, 19, 0]
    assert [each.outcome for each in verdicts] == [Outcome.OK] * 3 + [Outcome.WRONG]
    logged = [each.verdict for each in read_logs(log_of(tmp_path).read_bytes())]
    assert [each.reward for each in logged if each] == [9, 9, 19, 0]  # what another attempt would go on from


def test_other_sources_keep_their_own(tmp_path: Path) -> None:
    assert [each.reward for each in told(stored(singers(tmp_path, Toy())))] == [9, 9, 19, 0]


def test_a_gold_answer_that_is_right_is_no_copy(tmp_path: Path) -> None:
    class Gold(Toy):
        def problem(self, item: int) -> Problem:
            return Problem(item, ({"role": "user", "content": "say it"},), "the log and the mat")

    guard = RewardConfig(copy_at=0.5)
    assert told(stored(singers(tmp_path / "a", Gold(), config=guard)))[2].reward == 19
    Gold.is_verifiable = False
    assert told(stored(singers(tmp_path / "b", Gold(), config=guard)))[2].reward == 0


def test_an_attempt_that_goes_on_computes_the_same(tmp_path: Path) -> None:
    """Two samples end in the first attempt, two in the second: rewards, parts and order are those of one attempt."""
    config = RewardConfig(diversity="words", length_budget=1.0, length_control=True, distinct_at=0.2)
    whole = stored(singers(tmp_path / "whole", Toy(), config=config))
    engine, parts = Choir({1: 3, 2: 3}), tmp_path / "parts"
    with pytest.raises(GroupFailed):
        asyncio.run(singers(parts, Toy(), engine, config=config).run_group(GROUP, 0))
    asked = engine.num
    assert told(stored(singers(parts, Toy(), engine, config=config), 1)) == told(whole)
    assert engine.num == asked + 2, "those that had ended were sampled again"


def test_a_group_is_judged_once_and_whole(tmp_path: Path) -> None:
    source = Contest()
    verdicts = told(stored(singers(tmp_path, source, config=RewardConfig(diversity="words"))))
    assert source.seen == [list(TEXTS)]
    np.testing.assert_allclose([each.reward for each in verdicts], [1 / 3 * 2 / 3, 1 / 3 * 2 / 3, 1.0, 0.0])
    assert verdicts[0].steps == (StepReward(0, 0.5, 1),)


def test_a_judge_that_fails_is_no_reward_and_costs_no_sample(tmp_path: Path) -> None:
    source, engine = Contest(broken=6), Choir()
    for attempt in (0, 1):  # the last attempt too: no group without a judgement
        with pytest.raises(GroupFailed, match=r"item 7: raised RuntimeError: the judge is asleep"):
            asyncio.run(singers(tmp_path, source, engine).run_group(GROUP, attempt, is_last=attempt == 1))
    assert not list(tmp_path.rglob("*.group"))
    assert [each.reward for each in told(stored(singers(tmp_path, source, engine), 2))] == [1 / 3, 1 / 3, 1.0, 0.0]
    assert engine.num == len(TEXTS) and len(source.seen) == 7


def test_what_is_left_of_a_group_is_judged_as_one(tmp_path: Path) -> None:
    source, engine = Contest(), Choir({3: 100})
    for attempt in (0, 1):
        with pytest.raises(GroupFailed):
            asyncio.run(singers(tmp_path, source, engine).run_group(GROUP, attempt))
    group = stored(singers(tmp_path, source, engine), 2, is_last=True)
    assert [each.sample for each in group.trajectories] == [0, 1, 2] and source.seen == [list(TEXTS[:3])]


@pytest.mark.slow
def test_judging_what_is_left_of_a_group_ends_soon_after_the_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(Rewards):
        async def compare(self, requests: Sequence[RewardRequest]) -> tuple[Verdict, ...]:
            await asyncio.sleep(600)
            raise AssertionError("the agent was hung")

    assert agents._OVERTIME_S < CALL_SLACK_S
    monkeypatch.setattr(agents, "_OVERTIME_S", 0.1)
    engine = Choir({3: 100})
    for attempt in (0, 1):
        with pytest.raises(GroupFailed):
            asyncio.run(singers(tmp_path, Contest(), engine).run_group(GROUP, attempt))
    late = singers(tmp_path, Contest(), engine, Slow(), lease_s=1.0)
    with pytest.raises(GroupFailed, match="lease"):
        asyncio.run(late.run_group(GROUP, 2, is_last=True))


def test_held_out_answers_are_judged_alone_and_guarded(tmp_path: Path) -> None:
    source = Contest()
    agent = singers(tmp_path, source, config=RewardConfig(diversity="words", format="dog"))
    group = asyncio.run(agent.evaluate(GROUP))
    assert [each.verdict.reward for each in group.trajectories] == [9 * 2 / 3, 9 * 2 / 3, 0, 0] and not source.seen


@pytest.mark.parametrize("broken", ["raises", "short", "infra"])
def test_what_is_no_judgement_is_ours(broken: str) -> None:
    class Bad(Contest):
        def compare(self, problem: Problem, answers: Sequence[Answer]) -> Sequence[Score]:
            if broken == "raises":
                raise OSError("no\nroute")
            scores = [Score.of(True) for _ in answers]
            return scores[1:] if broken == "short" else [*scores[1:], Score(0.0, Outcome.INFRA, detail="tired")]

    asked = [RewardRequest("toy", 7, text) for text in ("a", "b")]
    verdicts = asyncio.run(RewardRole(lambda: {"toy": Bad()}).compare(asked))
    why = {"raises": "raised OSError: no route", "short": "gave 1 scores for 2 answers", "infra": "tired"}[broken]
    assert len(verdicts) == 2 and verdicts[1].outcome is Outcome.INFRA and why in verdicts[1].detail


def test_a_verifier_that_gives_up_on_a_group_is_asked_again(tmp_path: Path) -> None:
    class Tired(Rewards):
        async def compare(self, requests: Sequence[RewardRequest]) -> tuple[Verdict, ...]:
            self.requests += requests
            if len(self.requests) <= len(TEXTS):
                return (*(Verdict(1.0, Outcome.OK, 0.0) for _ in requests[1:]), infra(requests[-1], "died"))
            return tuple(Verdict(float(len(each.text)), Outcome.OK, 0.0) for each in requests)

    rewards = Tired()
    assert [each.reward for each in told(stored(singers(tmp_path, Contest(), rewards=rewards)))] == [9, 9, 19, 0]
    assert [each.text for each in rewards.requests] == [*TEXTS, *TEXTS]
    assert len({each.seed for each in rewards.requests}) == len(TEXTS)


HONEST = "a dog sat on the log"
SUNG = (
    HONEST,
    "the cat and the mat",
    "tell of the cat and the dog now",  # the prompt
    "cat " * 12,  # a word that the judge likes
    HONEST + " and" + " so the log is a log" * 6,  # padding
    "",
)


def naive(body: dict[str, Any]) -> str:
    """Points for length, for cats, and for what sounds like the request."""
    request, answer = ([*text.casefold().split()] for text in shown(body))
    points = min(3, len(answer) // 4) + min(4, answer.count("cat")) + (3 if len({*request} & {*answer}) > 4 else 0)
    return f"SCORES: {min(10, 1 + points)}"


def test_hacks_of_a_real_judge_earn_no_more_than_an_honest_short_answer(tmp_path: Path) -> None:
    """From sampled tokens over a verifier and HTTP to the stored group."""
    prompts = tmp_path / "prompts.jsonl"
    rubric = [{"criterion": "It is good", "points": 10}]
    prompts.write_text(json.dumps({"prompt": SUNG[2], "rubric": rubric}))
    config = RewardConfig(length_budget=2.0, length_control=True, copy_at=0.5, distinct_at=0.5)
    task = replace(TASK, item=0, group=len(SUNG), max_tokens=400)
    with judging(naive) as (url, asked):
        endpoint = {"url": url, "model": "m", "cache": str(tmp_path / "cache"), "timeout_s": 30.0}
        source = open_source("toy", SimpleNamespace(kind="judged", args={"path": str(prompts), "judge": endpoint}))
        agent = singers(tmp_path, source, Choir(texts=SUNG), config=config, max_len=900)
        group = load_group(asyncio.run(agent.run_group(task, 0)).location)
    qualities = [each.verdict.parts["quality"] for each in group.trajectories]
    honest, _, *hacks = (each.verdict.reward for each in group.trajectories)
    assert min(qualities[2:5]) > qualities[0] > 0, "each of them pleases the judge more"
    assert honest > 0 and max(hacks) <= honest, [each.verdict for each in group.trajectories]
    assert len(asked) == 5, "an empty answer is shown to nobody"
