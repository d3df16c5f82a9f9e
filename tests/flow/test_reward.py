"""Verification: what a bad task does never becomes a reward."""

from __future__ import annotations

import asyncio
import math
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.base.trajectory import Outcome, StepReward, Verdict
from stretto.flow.clients import RewardRequest
from stretto.flow.reward import RewardRole
from stretto.flow.reward import _verdict as verdict_of
from stretto.learning.samples import load_group, store_group
from stretto.runtime.store import FolderStore
from stretto.tasks.task import Answer, Problem, Score
from tests.flow.agents import Toy, agent
from tests.flow.samples import group

ASK = RewardRequest("toy", 7, "dog", ({"role": "assistant", "content": "dog"},))


class Judge(Toy):
    def __init__(self, judged: Callable[[Problem, Answer], Any], at_once: int = 1):
        super().__init__()
        self._judged = judged
        self._at_once = at_once

    @property
    def at_once(self) -> int:
        return self._at_once

    def score(self, problem: Problem, answer: Answer) -> Score:
        return self._judged(problem, answer)


def verdict(judged: Callable[[Problem, Answer], Any], ask: RewardRequest = ASK, deadline_s: float = 60.0) -> Verdict:
    role = RewardRole(lambda: {"toy": Judge(judged)}, deadline_s)
    return asyncio.run(role.score(ask))


def test_a_verdict_is_the_tasks() -> None:
    seen: list[Any] = []

    def judged(problem: Problem, answer: Answer) -> Score:
        seen.append((problem.item, answer))
        return Score(0.5, Outcome.WRONG, {"places": 0.5}, "two\nlines", 0.25)

    found = verdict(judged)
    assert seen == [(7, Answer("dog", ASK.messages))]
    assert (found.reward, found.outcome, found.parts, found.sandbox_s) == (0.5, Outcome.WRONG, {"places": 0.5}, 0.25)
    assert found.detail == "two lines" and found.seconds >= 0


def raising(problem: Problem, answer: Answer) -> Score:
    raise ZeroDivisionError("division\nby zero")


def exiting(problem: Problem, answer: Answer) -> Score:
    sys.exit(3)


@pytest.mark.parametrize(
    ("judged", "why"),
    [
        (exiting, "raised SystemExit: 3"),
        (lambda problem, answer: Score(math.nan, Outcome.OK), "nan"),
        (lambda problem, answer: Score(-math.inf, Outcome.OK), "inf"),
        (lambda problem, answer: Score("1", Outcome.OK), "not an int or float"),
        (lambda problem, answer: Score(1.0, Outcome.OK, {"places": math.nan}), "places"),
        (lambda problem, answer: 1.0, "not a Score"),
        (lambda problem, answer: None, "not a Score"),
        (raising, "raised ZeroDivisionError: division by zero"),
        (lambda problem, answer: Score(0.0, Outcome.INFRA, detail="no sandbox"), "no sandbox"),
    ],
)
def test_what_is_no_verdict_is_ours(judged: Callable[[Problem, Answer], Any], why: str) -> None:
    found = verdict(judged)
    assert found.outcome is Outcome.INFRA and why in found.detail
    assert found.detail.startswith("sources.toy: item 7: ") and "\n" not in found.detail


ODD: Any = st.sampled_from(
    [None, "x", 1, 1.5, True, np.int64(1), np.float32(0.5), math.nan, 10**400, [], {}, {1: 2.0}, ("a",)]
)
STEPS = st.builds(StepReward, st.integers(-2, 2) | ODD, st.floats() | ODD, st.none() | st.integers(-2, 9) | ODD)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    reward=st.floats() | ODD,
    parts=st.dictionaries(st.text(), st.floats() | ODD, max_size=2) | ODD,
    detail=st.text() | ODD,
    sandbox_s=st.floats() | ODD,
    steps=st.lists(STEPS, max_size=2) | st.lists(STEPS, max_size=2).map(tuple) | ODD,
)
def test_any_score_is_refused_or_can_be_stored(tmp_path_factory: pytest.TempPathFactory, **fields: Any) -> None:
    found = verdict_of(ASK, Score(outcome=Outcome.OK, **fields), 0.0)
    if found.outcome is Outcome.INFRA:
        assert found.detail and "\n" not in found.detail
        return
    made = group(np.random.default_rng(0), [1.0])
    made = replace(made, trajectories=(replace(made.trajectories[0], verdict=found),))
    stored = store_group(FolderStore(tmp_path_factory.getbasetemp() / "scores"), made)
    assert load_group(stored.location).trajectories[0].verdict == found


def test_an_unknown_source_is_ours() -> None:
    found = verdict(raising, RewardRequest("tyo", 7, ""))
    assert found.outcome is Outcome.INFRA and "sources.tyo: item 7: no such source here; there are toy" in found.detail


def test_what_hangs_is_left_behind() -> None:
    free = threading.Event()
    calls: list[int] = []

    def judged(problem: Problem, answer: Answer) -> Score:
        calls.append(1)
        if len(calls) == 1:
            free.wait(60)
        return Score.of(True)

    async def work() -> None:
        role = RewardRole(lambda: {"toy": Judge(judged)}, 0.1)
        first, second = await asyncio.gather(role.score(ASK), role.score(ASK))
        assert (first.outcome, second.outcome) == (Outcome.INFRA, Outcome.OK)
        assert "sources.toy: item 7: score: no answer within 0.1 s" in first.detail
        stats = await role.stats()
        assert (stats.num_stuck, stats.num_waiting, stats.num_judged) == (1, 0, 0)
        assert stats.outcomes == {"infra": 1, "ok": 1}

    asyncio.run(work())
    free.set()


def test_as_many_at_once_as_the_source_says() -> None:
    crowd = threading.Barrier(3, timeout=20)  # broken, and INFRA, unless three come at once

    def judged(problem: Problem, answer: Answer) -> Score:
        crowd.wait()
        return Score.of(True)

    async def work() -> None:
        role = RewardRole(lambda: {"toy": Judge(judged, 3), "other": Judge(raising)})
        found = await asyncio.gather(*(role.score(ASK) for _ in range(6)))
        assert {each.outcome for each in found} == {Outcome.OK} and (await role.stats()).num_slots == 3

    asyncio.run(work())


class Noted:
    """Stands for a sandbox."""

    def __init__(self, closed: list[str]):
        self._closed = closed

    def close(self) -> None:
        self._closed.append("sandbox")


class Closing(Toy):
    def __init__(self, closed: list[str]):
        super().__init__()
        self.sandbox, self._closed = Noted(closed), closed  # type: ignore[assignment]

    def close(self) -> None:
        self._closed.append("source")


def test_roles_close_their_sources_and_the_sandbox(tmp_path: Path) -> None:
    closed: list[str] = []
    asyncio.run(RewardRole(lambda: {"toy": Closing(closed)}).close())
    assert closed == ["source", "sandbox"]
    asyncio.run(agent(tmp_path, [object()], source=Closing(closed)).close())
    assert closed == 2 * ["source", "sandbox"]


def test_the_seed_is_the_samples() -> None:
    seeds: list[int | None] = []

    def judged(problem: Problem, answer: Answer) -> Score:
        seeds.append(answer.seed)
        return Score.of(True)

    verdict(judged)
    verdict(judged, RewardRequest("toy", 7, "dog", seed=5))
    assert seeds == [None, 5]


def test_one_at_a_time() -> None:
    at_once: list[int] = []
    lock = threading.Lock()

    def judged(problem: Problem, answer: Answer) -> Score:
        assert lock.acquire(blocking=False), "two at once"
        at_once.append(1)
        lock.release()
        return Score.of(True)

    async def work() -> None:
        role = RewardRole(lambda: {"toy": Judge(judged)})
        found = await asyncio.gather(*(role.score(ASK) for _ in range(20)))
        assert {each.outcome for each in found} == {Outcome.OK}

    asyncio.run(work())
    assert len(at_once) == 20
