"""The study of kept keys: the search, the reported seeds, and the aims that follow from them."""

from __future__ import annotations

from typing import Any

import pytest

from bench.common.measure import NO_INTERVAL
from bench.common.rl_curves import best_rate
from bench.keep_cache import ARMS, Study, name, of_seed, report

STUDY = Study((1e-3, 3e-3), (0, 1, 2), 10, 4, ())


def run(last: float, seconds: float) -> dict[str, Any]:
    rewards = [last * (step + 1) / 10 for step in range(10)]
    facts = {"samples": 100, "waits": 0.1, "staleness_mean": 1.0, "held_out": last}
    return {"rewards": rewards, "ended_s": [seconds], **facts}


def results(kept: float, seconds: float) -> dict[str, dict[str, Any]]:
    """All runs; the second rate is the best. Recomputing ends at 0.5 after 100 seconds."""
    return {
        name(arm, rate, seed): run(last - 0.1 * (rate == 1e-3) + 0.001 * seed, each)
        for arm, last, each in (("again", 0.5, 100.0), ("kept", kept, seconds))
        for seed in STUDY.seeds
        for rate in STUDY.rates
    }


@pytest.mark.parametrize(
    ("kept", "seconds", "missed"),
    [(0.5, 80.0, []), (0.5, 120.0, ["kept has 0.83 times"]), (0.3, 80.0, ["kept has -0.19"])],
)
def test_verdicts_follow_speed_and_reward(kept: float, seconds: float, missed: list[str]) -> None:
    failures = report(results(kept, seconds), 0)
    assert len(failures) == len(missed)
    assert all(failure.startswith(start) for failure, start in zip(failures, missed, strict=True))


def test_other_seeds_are_planned_once_the_search_is_complete(tmp_path: Any) -> None:
    done = results(0.5, 80.0)
    assert best_rate(of_seed(done, "kept", 0), STUDY.rates) == 3e-3
    searched = {run: found for run, found in done.items() if run.endswith("-0")}
    partly = {run: found for run, found in searched.items() if "0.003" not in run}
    assert {each.name for each in STUDY.runs(partly, tmp_path)} == {"start", *searched}
    planned = {each.name for each in STUDY.runs(searched, tmp_path)}
    assert planned - searched.keys() == {"start", *(name(arm, 3e-3, seed) for arm in ARMS for seed in (1, 2))}


def test_the_arms_differ_in_the_keys_alone() -> None:
    again, kept = (STUDY.recipe(arm, 1e-3, 1) for arm in ARMS)
    assert (again.rollout.keep_cache, kept.rollout.keep_cache) == (False, True)
    assert again.replace(rollout=again.rollout.replace(keep_cache=True)) == kept


def test_without_reported_seeds_the_report_says_what_is_missing() -> None:
    searched = {run: found for run, found in results(0.5, 80.0).items() if run.endswith("-0")}
    assert report(searched, 0) == ["no reported seed is complete: run the command again"]


def test_one_reported_seed_gives_no_interval_and_no_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    two = {run: found for run, found in results(0.5, 80.0).items() if not run.endswith("-2")}
    assert report(two, 0) == [NO_INTERVAL]
    assert "inf" not in capsys.readouterr().out
