from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from stretto.base.errors import UserError
from stretto.flow.log import RoleRow, RunStatus, read_status, write_status
from stretto.report.top import SHOWN, limiting_part, picture, sparkline

STATUS = RunStatus(
    updated_s=1000.0,
    step=7,
    num_steps=40,
    state="training",
    counts={"alive": 12, "in_flight": 9},
    metrics={"reward/mean": 0.625, "mismatch/same_k3_mean": 3.2e-7},
    rewards=[0.1, 0.5, 0.625],
    roles=[RoleRow(name="engine-0", state="restarting", load=3, waiting=1, restarts=2)],
    waits=["group 3, sample 1: an engine, 12 s"],
)


def shown(status: RunStatus, now_s: float, width: int = 140) -> str:
    console = Console(width=width, record=True, file=StringIO())
    console.print(picture(Path("runs/x"), status, now_s, width))
    return console.export_text()


def test_the_screen_says_who_waits_and_how_it_goes() -> None:
    text = shown(STATUS, 1001.0)
    for part in ("step 7 of 40", "training", "engine-0", "restarting", "0.625", "3.2e−7", "group 3, sample 1"):
        assert part in text, text
    assert "silent" not in text
    assert "no update for 60 s" in shown(STATUS, 1060.0)


def test_a_status_survives_the_disk_and_other_folders_are_refused(tmp_path: Path) -> None:
    write_status(tmp_path, STATUS)
    assert read_status(tmp_path) == STATUS
    with pytest.raises(UserError, match="is not a run of stretto rl"):
        read_status(tmp_path / "nothing")
    (tmp_path / "status.json").write_text("[]")
    with pytest.raises(UserError, match="damaged"):
        read_status(tmp_path)


def test_a_sparkline_has_one_bar_a_value_until_there_is_no_room() -> None:
    assert sparkline([0.0, 0.5, 1.0], 60) == "▁▅█"
    assert sparkline([0.0] * 50 + [1.0] * 50, 2) == "▁█"
    assert sparkline([3.0], 60) == "▁"


BUSY = STATUS.model_copy(
    update={
        "counts": {
            "alive": 40, "in_flight": 31, "ready": 9, "training": 8, "free_slots": 0, "engine_lag": 1, "max_staleness": 4,
            "expired": 2, "late": 1, "failed_attempts": 12, "trained": 123_456, "filtered": 45_678, "stale": 0,
            "failed": 3, "cancelled": 0,
        },
        "metrics": {name: 1.23456e-7 for _, name in SHOWN},
        "rewards": [step / 1024 for step in range(900)],  # sums of these are exact
        "roles": [
            RoleRow(name="engine-0", state="alive", load=64, waiting=31, restarts=0, note="version 9,999, 12,039 of 20,048 pages free"),
            RoleRow(name="rewards", state="alive", load=12, waiting=9, restarts=4, note="3 of 1 to 8 workers, waits of 0.31 s (p95), " * 2),
            RoleRow(name="agent-0", state="restarting", load=0, waiting=0, restarts=1, note="12,345 groups"),
        ],
        "waits": ["group 123456, sample 7: a verdict of the sandboxed verifier, 1,234.5 s, 12,345 tokens so far " * 2],
    }
)  # fmt: skip


def test_everything_that_matters_fits_into_eighty_columns() -> None:
    text = shown(BUSY, 1001.0, width=80)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 24, "one screen"
    for part in (
        "123,456 trained",
        "45,678 filtered",
        "3 failed",
        "12 failed attempts",
        "31 in flight",
        "1 engine lag",
    ):
        assert part in text, text
    assert "0 stale" not in text and "cancelled" not in text, "what did not happen is left out"
    for heading, _ in SHOWN:
        assert heading in text, heading
    assert text.count("1.2e−7") + text.count("0.0%") == len(SHOWN), "no number is cut off"
    for part in ("engine-0", "rewards", "agent-0", "running", "waiting", "restarting"):
        assert part in text, "a long note takes nothing from the others"
    assert "4 restarts  3 of 1 to 8 workers" in text, "trouble stands before the note, whose end may be cut off"
    assert "restarting  1 restart" in text
    for line in lines:
        before, cut, _ = line.partition("…")
        assert not cut or before.endswith(" "), "a line ends behind a word, not in a number"


def test_the_curve_is_of_the_whole_run_at_any_width() -> None:
    for width, mean in ((80, "0.869"), (140, "0.874")):
        line = next(line for line in shown(BUSY, 1001.0, width).splitlines() if "reward by step" in line)
        bars = [character for character in line if character in "▁▂▃▄▅▆▇█"]
        assert (bars[0], bars[-1]) == ("▁", "█")
        assert bars == sorted(bars), "a reward that only grows"
        assert f"to {mean}" in line, "the mean of the last bar"


def test_why_a_run_stopped_is_shown_whole() -> None:
    why = "sources.digits: item 3: score() raised KeyError: 'gold'; correct the task or take it out of the recipe"
    text = shown(STATUS.model_copy(update={"state": why}), 1001.0, width=80)
    assert why.replace(" ", "") in "".join(text.replace("│", "").replace("━", "").split())


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({}, ""),
        ({"bubble/trainer": 0.05, "bubble/engine-0": 0.4}, "the trainer: busy 95% of the last step"),
        (
            {"bubble/trainer": 0.7, "bubble/engine-0": 0.1, "bubble/engine-1": 0.3, "bubble/rewards": 0.9},
            "the engines: busy 80% of the last step",
        ),
        ({"bubble/trainer": 0.7, "bubble/engine-0": 0.6, "bubble/rewards": 0.0}, "the verifiers: busy 100%"),
        (
            {"bubble/trainer": 0.7, "bubble/engine-0": 0.6},
            "the number of groups in flight, or their tools: the engines",
        ),
    ],
)
def test_the_part_that_limits_the_run_is_named(metrics: dict[str, float], expected: str) -> None:
    status = STATUS.model_copy(update={"metrics": metrics})
    assert limiting_part(status).startswith(expected) and (expected or not limiting_part(status))
    assert ("limited by" in shown(status, 1001.0)) == bool(expected)


def test_a_role_on_a_cluster_shows_its_node() -> None:
    role = RoleRow("engine-0", "alive", 3, 1, 0, note="version 2", node="10.0.0.7")
    assert "version 2, on 10.0.0.7" in shown(STATUS.model_copy(update={"roles": [role]}), 1001.0)
