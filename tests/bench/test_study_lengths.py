"""Lengths of training side by side: what is compared, and what counts as missed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench import study
from bench.common.study import write_record
from bench.study_lengths import draw, missed, read_trainings
from stretto.base.errors import UserError


def record(path: Path, tokens: int, at_equal_flops: float, starts_at: float = 0.5) -> Path:
    """Record of one reported seed, whose full network is 0.01 behind at equal tokens and whose corner was not trained alone."""

    def arm(loss: float) -> dict[str, Any]:
        return {"report": {"full": loss, "half": 4.0}, "parameters": 2000, "tokens": tokens, "flops": 1.0}

    runs = {
        "elastic-1": arm(3.01),
        "ordinary-1": arm(3.0),
        "ordinary+-1": arm(3.01 - at_equal_flops),
        "scratch-half-1": arm(3.99),
    }
    recipe = {"elastic": {"starts_at": starts_at, "anchor_share": 0.4}}
    write_record(path, {"mutant": None, "seeds": [0, 1], "rates": list(study.RATES), "recipe": recipe}, runs)
    return path


def test_the_longest_training_of_a_series_meets_the_aims_or_says_which_not(tmp_path: Path) -> None:
    short, long = record(tmp_path / "a.json", 2000, 0.2), record(tmp_path / "b.json", 8000, 0.025)
    trainings = read_trainings([long, short])
    assert [each.per_parameter for each in trainings] == [1.0, 4.0]
    assert not missed(trainings)
    draw(trainings, tmp_path / "lengths.png")
    assert (tmp_path / "lengths.png").stat().st_size > 1000
    dear, early = record(tmp_path / "c.json", 8000, 0.3), record(tmp_path / "d.json", 2000, 0.01, 0.25)
    assert missed(read_trainings([short, dear, early])) == [
        "2.00k, sizes from 0.5 in 0.4 of the passes: full network − ordinary, equal executed FLOPs: +0.3000, aim at most 0.03",
        "2.00k, sizes from 0.5 in 0.4 of the passes: equal executed FLOPs: the distance does not fall with length",
    ]


def test_records_that_cannot_be_compared_are_refused(tmp_path: Path) -> None:
    first, same = record(tmp_path / "a.json", 2000, 0.2), record(tmp_path / "same.json", 2000, 0.1)
    with pytest.raises(UserError, match=r"same\.json: network, schedule and length are those of a record before"):
        read_trainings([first, same])
    write_record(tmp_path / "none.json", {"mutant": None, "seeds": [0, 1], "rates": [1]}, {})
    with pytest.raises(UserError, match=r"none\.json: runs: no ordinary network"):
        read_trainings([tmp_path / "none.json"])
