"""The study of staleness: rewards at equal samples and at equal wall time, and the aims that follow from them."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from bench import async_speed
from bench.async_speed import RATES, Curves, Study, at_end, name, read_curves, report, reward_at
from bench.common.delayed import KIND

STUDY = Study((0, 4), (0, 1, 2), RATES, 10, 0.1, 1.2, 3.0, ())


def run(last: float, seconds: float) -> dict[str, Any]:
    """Ten steps whose reward rises to ``last``, one in ``seconds`` seconds."""
    rewards = [last * (step + 1) / 10 for step in range(10)]
    ended = [seconds * (step + 1) for step in range(10)]
    facts = {"waits": 0.1, "staleness_mean": 1.0, "staleness_max": 2, "held_out": last}
    return {"rewards": rewards, "ended_s": ended, "samples": 100, **facts}


def results(asynchronous: float, seconds: float) -> Curves:
    """All runs; the second rate is the best. The control ends at 0.5 after 100 seconds."""
    found: dict[str, dict[str, Any]] = {}
    for bound, last, each in ((0, 0.5, 10.0), (4, asynchronous, seconds)):
        for seed in STUDY.seeds:
            for place, rate in enumerate(RATES):
                found[name(bound, rate, seed)] = run(last - 0.1 * (place != 1), each)
    return Curves(found, RATES, 0)


def test_a_reward_at_a_time_is_that_of_the_steps_before_it() -> None:
    control = run(1.0, 10.0)
    assert reward_at(control, 55.0) == pytest.approx(0.3)  # steps 1 to 5
    assert reward_at(control, 1e9) == pytest.approx(0.8) and reward_at(control, 0.0) == pytest.approx(0.1)
    assert at_end(control) == pytest.approx(0.95)


def test_the_search_is_on_the_first_seed_and_not_reported() -> None:
    found = results(0.5, 2.0)
    assert found.best_rate(4) == RATES[1] and list(found.reported(4)) == [1, 2]
    assert Curves(found.results, (*RATES, 1e-2), 0).best_rate(4) is None, "a candidate has not run"


@pytest.mark.parametrize(
    ("asynchronous", "seconds", "missed"),
    [(0.5, 2.0, []), (0.5, 5.0, ["the fastest bound"]), (0.05, 2.0, ["staleness 4: reward"])],
)
def test_verdicts_follow_speed_and_reward(asynchronous: float, seconds: float, missed: list[str]) -> None:
    failures = report(results(asynchronous, seconds), (0, 4))
    assert len(failures) == len(missed)
    assert all(failure.startswith(start) for failure, start in zip(failures, missed, strict=True))


def test_one_reported_seed_has_no_interval(capsys: pytest.CaptureFixture[str]) -> None:
    found = {run: each for run, each in results(0.5, 2.0).results.items() if not run.endswith("-2")}
    report(Curves(found, RATES, 0), (0, 4))
    assert "inf" not in capsys.readouterr().out


def test_only_the_controls_search_has_no_delays() -> None:
    delays = {
        (bound, seed): STUDY.recipe(bound, 1e-3, seed).sources["backward"].args["median_s"]
        for bound in (0, 4) for seed in (0, 1)
    }  # fmt: skip
    assert delays == {(0, 0): 0.0, (0, 1): 0.1, (4, 0): 0.1, (4, 1): 0.1}
    assert STUDY.recipe(0, 1e-3, 1).train.threads == async_speed.SYNC_THREADS
    assert STUDY.recipe(4, 1e-3, 1).sources["backward"].kind == KIND


def test_the_committed_record_gives_the_figures_that_the_documents_state() -> None:
    docs = Path(async_speed.__file__).parents[1] / "docs"
    curves = read_curves(docs / "evidence" / "async_speed.json")
    assert report(curves, (0, 1, 4, 16)) == []
    stated = (docs / "EVIDENCE.md").read_text(encoding="utf-8")
    control = curves.reported(0)
    for bound in (1, 4, 16):
        own = curves.reported(bound)
        speed = fmean(control[seed]["ended_s"][-1] / own[seed]["ended_s"][-1] for seed in own)
        loss = fmean(at_end(own[seed]) - at_end(control[seed]) for seed in own)
        assert f"{speed:.2f}" in stated and f"{loss:+.3f}".replace("0.", ".").replace("-", "−") in stated, bound
