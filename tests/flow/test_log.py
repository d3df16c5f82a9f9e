"""From counters to the numbers of a log line, and spans that viewers can draw."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from stretto.engine.request import EngineStats
from stretto.flow.agent import AgentStats
from stretto.flow.log import Counts, Logbook, RoleScalars, Span, Trace, read_spans, write_trace
from stretto.flow.reward import RewardStats
from stretto.learning.recipe import SPANS_FILE
from tests.flow.samples import group

ENGINE = EngineStats(3, 2, 100, 40, 10, 1600, 1 << 20, True, 7, output_tokens=500, num_preemptions=1, busy_s=4.0)
AGENT = AgentStats(
    num_samples=16, groups_finished=9, tokens_resumed=24, cached_tokens=300, computed_tokens=100,
    engine_s=20.0, queued_s=5.0, troubles={"engine": 2}, sessions_lost={"toy": 1},
)  # fmt: skip
REWARD = RewardStats(6, 1, {"ok": 6, "wrong": 2}, 1.0, 0)


def told(
    at_s: float, engine: EngineStats = ENGINE, agent: AgentStats = AGENT, reward: RewardStats = REWARD
) -> tuple[Any, ...]:
    return at_s, {"engine-0": engine}, {"agent-0": agent}, {"reward-0": reward}


def test_shares_are_of_the_time_since_the_last_answer() -> None:
    roles = RoleScalars(started_s=100.0)
    roles.update(*told(105.0))
    first = roles.scalars()
    assert first["bubble/engine-0"] == pytest.approx(0.2), "4 of 5 s"
    assert first["bubble/rewards"] == pytest.approx(0.8)
    assert first["engines/tokens_per_s"] == 100.0
    assert first["engines/cached_share"] == 0.75
    assert first["wait/engine_queue_share"] == 0.25
    assert (first["verdicts/ok"], first["verdicts/wrong"]) == (0.75, 0.25)
    assert (
        first["queue/engine_running"],
        first["queue/engine_waiting"],
        first["queue/verifiers"],
        first["queue/samples"],
    ) == (3, 2, 6, 16)
    assert (first["failures/tokens_resumed"], first["failures/troubles"]) == (24, 2)
    assert first["failures/sessions_lost/toy"] == 1
    several = RoleScalars(started_s=100.0)
    several.update(*told(105.0, reward=replace(REWARD, busy_s=8.0, num_slots=4)))
    assert several.scalars()["bubble/rewards"] == pytest.approx(0.6), "8 of 20 s"
    later = replace(ENGINE, busy_s=5.0, output_tokens=520)
    roles.update(*told(109.0, later, reward=replace(REWARD, outcomes={"ok": 6, "wrong": 2, "infra": 1})))
    second = roles.scalars()
    assert second["bubble/engine-0"] == pytest.approx(0.75)
    assert second["engines/tokens_per_s"] == 5.0
    assert second["verdicts/infra"] == 1.0
    assert second["failures/tokens_resumed"] == second["failures/troubles"] == 0
    assert "engines/cached_share" not in second, "no prompt was asked for meanwhile"


def test_nothing_is_said_twice() -> None:
    roles = RoleScalars(started_s=0.0)
    assert roles.scalars() == {}
    roles.update(*told(5.0))
    assert roles.scalars()
    assert roles.scalars() == {}


def test_a_role_that_is_started_again_counts_from_zero() -> None:
    roles = RoleScalars(started_s=0.0)
    roles.update(*told(5.0))
    roles.scalars()
    roles.update(*told(10.0, replace(ENGINE, output_tokens=50, busy_s=0.5)))
    again = roles.scalars()
    assert again["engines/tokens_per_s"] == 10.0
    assert again["bubble/engine-0"] == pytest.approx(0.9)


def test_a_dead_engine_leaves_no_numbers_and_a_busy_one_no_negative_ones() -> None:
    roles = RoleScalars(started_s=0.0)
    roles.update(5.0, {}, {}, {})
    assert not [name for name in roles.scalars() if name.startswith(("bubble/", "engines/", "verdicts/"))]
    roles.update(*told(6.0, replace(ENGINE, busy_s=6.0)))  # 5 s of it before it could answer
    assert roles.scalars()["bubble/engine-0"] == 0.0


def test_counts_grow() -> None:
    counts = Counts()
    assert [counts.grown("a", value) for value in (3, 5, 5, 2)] == [3, 2, 0, 2]
    assert counts.grown("b", 1) == 1


def test_overlapping_spans_lie_in_lanes_of_their_own(tmp_path: Path) -> None:
    with Trace(tmp_path) as trace:
        with trace.span("agents", "group", ordinal=1), trace.span("agents", "group", ordinal=2):
            pass
        with trace.span("agents", "group", ordinal=3):
            pass
        trace.add(Span("trainer", "step", 10.0, 12.5))
        assert trace.busy_s["trainer/step"] == 2.5
    lanes = {span.facts["ordinal"]: span.lane for span in read_spans(tmp_path) if span.facts}
    assert lanes == {1: 0, 2: 1, 3: 0}


def test_a_run_that_goes_on_after_a_kill_loses_one_line_at_most(tmp_path: Path) -> None:
    with Trace(tmp_path) as trace:
        trace.add(Span("trainer", "step", 1.0, 2.0))
    with (tmp_path / SPANS_FILE).open("ab") as file:
        file.write(b'["trainer","s\xf4')
    with Trace(tmp_path) as trace:
        trace.add(Span("trainer", "step", 3.0, 5.0))
    assert [span.seconds for span in read_spans(tmp_path)] == [1.0, 2.0]


def test_viewers_get_processes_threads_and_microseconds(tmp_path: Path) -> None:
    with Trace(tmp_path) as trace:
        trace.add(Span("trainer", "step", 100.0, 100.5))
        trace.add(Span("agents", "group", 100.25, 101.0, 3, {"ordinal": 7}))
    tree = json.loads(write_trace(tmp_path).read_text())
    named = {event["pid"]: event["args"]["name"] for event in tree["traceEvents"] if event["ph"] == "M"}
    work = [event for event in tree["traceEvents"] if event["ph"] == "X"]
    assert [(named[event["pid"]], event["tid"], event["ts"], event["dur"]) for event in work] == [
        ("trainer", 0, 0, 500_000),
        ("agents", 3, 250_000, 750_000),
    ]
    assert work[1]["args"] == {"ordinal": 7}


def test_a_status_file_that_cannot_be_made_is_told_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    book = Logbook.__new__(Logbook)
    book.say = said.append

    async def broken(self: Logbook, state: str) -> None:
        raise ZeroDivisionError("no roles")

    monkeypatch.setattr(Logbook, "_write_status", broken)
    asyncio.run(book._watch())
    assert said == ["status file: ZeroDivisionError: no roles; stretto top shows nothing newer of this run"]


def test_an_evaluation_that_breaks_is_told_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    book = Logbook.__new__(Logbook)
    book.say = said.append

    async def broken(self: Logbook, step: int) -> None:
        raise ZeroDivisionError("no prompts")

    monkeypatch.setattr(Logbook, "_evaluate", broken)
    book._controller = SimpleNamespace(oldest_engine_version=3)  # type: ignore[assignment]
    asyncio.run(book._evaluate_beside(3))
    assert said == ["step     3  held-out reward not measured: ZeroDivisionError: no prompts"]


def test_an_evaluation_waits_for_the_weights_of_its_step_and_a_skipped_one_is_told() -> None:
    """Samples that continue under newer weights are named."""
    said: list[str] = []
    logged: list[tuple[int, dict[str, float]]] = []
    asked: list[int] = []
    book = Logbook.__new__(Logbook)
    book.say, book._evaluation, book._metrics = said.append, None, {}
    engines = SimpleNamespace(oldest_engine_version=2)
    parts = {
        "_controller": engines,
        "_recipe": SimpleNamespace(train=SimpleNamespace(eval_prompts=2)),
        "_tracker": SimpleNamespace(log=lambda step, scalars, line: logged.append((step, scalars))),
    }
    for name, part in parts.items():
        setattr(book, name, part)

    async def held_out(number: int) -> Any:
        asked.append(number)
        return group(np.random.default_rng(number), [0.5], versions=(3, 4), longest=40)

    book._held_out = held_out  # type: ignore[method-assign]

    async def run() -> None:
        book._start_evaluation(3)
        await asyncio.sleep(0.1)
        assert not asked, "an engine still samples with the weights of step 2"
        book._start_evaluation(4)
        engines.oldest_engine_version = 3
        assert book._evaluation is not None
        await book._evaluation

    asyncio.run(run())
    assert asked == [0, 1]
    assert logged == [(3, {"eval/reward": 0.5, "eval/oldest_version": 3, "eval/newest_version": 4})]
    assert said == [
        "step     4  held-out reward not measured: the last evaluation still runs; raise train.eval_every, or lower "
        "train.eval_prompts",
        "step     3  held-out reward 0.500  (2 problems, weights of steps 3 to 4)",
    ]
