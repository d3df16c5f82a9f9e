from __future__ import annotations

from dataclasses import replace

import pytest

from stretto.engine.request import EngineStats
from stretto.rl.agent import AgentStats
from stretto.rl.gauges import Counts, Gauges, Told
from stretto.rl.reward import RewardStats

ENGINE = EngineStats(3, 2, 100, 40, 10, 7, output_tokens=500, num_preemptions=1, busy_s=4.0)
AGENT = AgentStats(
    num_samples=16,
    groups_finished=9,
    tokens_resumed=24,
    cached_tokens=300,
    computed_tokens=100,
    engine_s=20.0,
    queued_s=5.0,
    troubles={"engine": 2},
)
REWARD = RewardStats(6, 1, {"ok": 6, "wrong": 2}, 1.0, 0)


def told(at_s: float, engine: EngineStats = ENGINE, agent: AgentStats = AGENT, reward: RewardStats = REWARD) -> Told:
    return Told(at_s, {"engine-0": engine}, {"agent-0": agent}, {"reward-0": reward})


def test_shares_are_of_the_time_since_the_last_answer() -> None:
    gauges = Gauges(started_s=100.0)
    gauges.tell(told(105.0))
    first = gauges.scalars()
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
    later = replace(ENGINE, busy_s=5.0, output_tokens=520)
    gauges.tell(told(109.0, later, reward=replace(REWARD, outcomes={"ok": 6, "wrong": 2, "infra": 1})))
    second = gauges.scalars()
    assert second["bubble/engine-0"] == pytest.approx(0.75)
    assert second["engines/tokens_per_s"] == 5.0
    assert second["verdicts/infra"] == 1.0
    assert second["failures/tokens_resumed"] == second["failures/troubles"] == 0
    assert "engines/cached_share" not in second, "no prompt was asked for meanwhile"


def test_nothing_is_said_twice() -> None:
    gauges = Gauges(started_s=0.0)
    assert gauges.scalars() == {}
    gauges.tell(told(5.0))
    assert gauges.scalars()
    assert gauges.scalars() == {}


def test_a_role_that_is_started_again_counts_from_zero() -> None:
    gauges = Gauges(started_s=0.0)
    gauges.tell(told(5.0))
    gauges.scalars()
    gauges.tell(told(10.0, replace(ENGINE, output_tokens=50, busy_s=0.5)))
    again = gauges.scalars()
    assert again["engines/tokens_per_s"] == 10.0
    assert again["bubble/engine-0"] == pytest.approx(0.9)


def test_a_dead_engine_leaves_no_numbers_and_a_busy_one_no_negative_ones() -> None:
    gauges = Gauges(started_s=0.0)
    gauges.tell(Told(5.0, {}, {}, {}))
    assert not [name for name in gauges.scalars() if name.startswith(("bubble/", "engines/", "verdicts/"))]
    gauges.tell(told(6.0, replace(ENGINE, busy_s=6.0)))  # 5 s of it before it could answer
    assert gauges.scalars()["bubble/engine-0"] == 0.0


def test_counts_grow() -> None:
    counts = Counts()
    assert [counts.grown("a", value) for value in (3, 5, 5, 2)] == [3, 2, 0, 2]
    assert counts.grown("b", 1) == 1
