"""Lengths of training side by side: what is compared, and what counts as missed."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import study
from bench.common.study import write_record
from bench.study_lengths import draw, main, missed, read_trainings
from stretto.base import track
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
        "2.00k, sizes from 0.5 in 0.4 of the passes: full network − ordinary, equal FLOPs: +0.3000, aim at most 0.03",
        "2.00k, sizes from 0.5 in 0.4 of the passes: equal FLOPs: the distance does not fall with length",
    ]


def test_records_that_cannot_be_compared_are_refused(tmp_path: Path) -> None:
    first, same = record(tmp_path / "a.json", 2000, 0.2), record(tmp_path / "same.json", 2000, 0.1)
    with pytest.raises(UserError, match=r"same\.json: network, schedule and length are those of a record before"):
        read_trainings([first, same])
    write_record(tmp_path / "none.json", {"mutant": None, "seeds": [0, 1], "rates": [1]}, {})
    with pytest.raises(UserError, match=r"none\.json: runs: no ordinary network"):
        read_trainings([tmp_path / "none.json"])


def test_the_table_of_the_documents_is_what_the_records_print(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    docs = Path(study.__file__).parents[1] / "docs"
    monkeypatch.setattr(sys, "argv", ["study_lengths", *map(str, sorted(docs.glob("evidence/study_*.json")))])
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(track, "PIPE_COLUMNS", 200)  # no cell is wrapped
    with pytest.raises(SystemExit, match="1"):
        main()
    rows, headings = dict[tuple[float, ...], dict[str, str]](), list[str]()
    for line in capsys.readouterr().out.splitlines():
        cells = [cell.strip() for cell in re.split("[┃│]", line)[1:-1]]
        if "┃" in line:
            # a size has the same heading in two tables, which differ in the aim
            headings = cells[4:]
        elif cells:
            rows.setdefault(_settings(*cells[:4]), {}).update(zip(headings, cells[4:], strict=True))
    columns = ("equal tokens (≤ 0.02)", "equal FLOPs (≤ 0.03)")
    columns += tuple(f"{size} (≤ {aim})" for size in ("half", "corner") for aim in ("0.03", "0"))
    table = re.findall(r"^\| [\d.]+M \|.*\|$", (docs / "EVIDENCE.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(table) == len(rows) == 8
    for line in table:
        parameters, tokens, schedule, seeds, *stated = (cell.strip() for cell in line.split("|")[1:-1])
        (per_parameter,) = re.findall(r"\((\d+)\)", tokens)
        printed = rows[_settings(parameters, per_parameter, *schedule.split(", "))]
        for column, cell in zip(columns, stated, strict=True):
            shown, _, num_seeds = printed.get(column, "").removesuffix(")").partition(" (")
            is_missed = bool(shown) and float(shown.split()[0]) > float(column.split()[-1][:-1])
            expected = shown.replace("-", "−")
            assert cell == (f"**{expected}**" if is_missed else expected), f"{parameters}, {tokens}: {column}"
            assert num_seeds in seeds


def _settings(parameters: str, per_parameter: str, starts_at: str, share: str) -> tuple[float, ...]:
    """Parameters in millions, tokens per parameter, and schedule."""
    millions = float(parameters[:-1]) * {"k": 1e-3, "M": 1.0}[parameters[-1]]
    return round(millions, 2), round(float(per_parameter)), float(starts_at), float(share)
