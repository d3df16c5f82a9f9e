"""Lengths of training side by side: what is compared, and what counts as missed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench import study
from bench.common.study import write_record
from bench.study_lengths import draw, missed, read_lengths
from stretto.base.errors import UserError


def record(path: Path, tokens: int, at_equal_flops: float, parameters: int = 2000) -> Path:
    """Record of one reported seed, whose full network is 0.01 behind at equal tokens and whose corner was not trained alone."""

    def arm(loss: float) -> dict[str, Any]:
        return {"report": {"full": loss, "half": 4.0}, "parameters": parameters, "tokens": tokens, "flops": 1.0}

    runs = {
        "elastic-1": arm(3.01),
        "ordinary-1": arm(3.0),
        "ordinary+-1": arm(3.01 - at_equal_flops),
        "scratch-half-1": arm(3.99),
    }
    write_record(path, {"mutant": None, "seeds": [0, 1], "rates": list(study.RATES)}, runs)
    return path


def test_the_longest_training_meets_the_aims_or_says_which_not(tmp_path: Path) -> None:
    short, long = record(tmp_path / "a.json", 2000, 0.2), record(tmp_path / "b.json", 8000, 0.025)
    lengths = read_lengths([long, short])
    assert list(lengths) == [1.0, 4.0]
    assert not missed(lengths)
    draw(lengths, tmp_path / "lengths.png")
    assert (tmp_path / "lengths.png").stat().st_size > 1000
    dear = record(tmp_path / "c.json", 8000, 0.3)
    assert missed(read_lengths([short, dear])) == [
        "full network − ordinary, equal executed FLOPs: +0.3000, aim at most 0.03",
        "equal executed FLOPs: the distance does not fall with length",
    ]


def test_records_that_cannot_be_compared_are_refused(tmp_path: Path) -> None:
    first = record(tmp_path / "a.json", 2000, 0.2)
    for other in (record(tmp_path / "same.json", 2000, 0.1), record(tmp_path / "large.json", 8000, 0.1, 4000)):
        with pytest.raises(UserError, match=rf"{other.name}: its network is another, or its length the same"):
            read_lengths([first, other])
    write_record(tmp_path / "none.json", {"mutant": None, "seeds": [0, 1], "rates": [1]}, {})
    with pytest.raises(UserError, match=r"none\.json: runs: no ordinary network"):
        read_lengths([tmp_path / "none.json"])
