from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from stretto.apps.top import picture, sparkline
from stretto.base.errors import UserError
from stretto.rl.status import RoleRow, RunStatus, read_status, write_status

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


def shown(status: RunStatus, now_s: float) -> str:
    console = Console(width=140, record=True, file=StringIO())
    console.print(picture(Path("runs/x"), status, now_s))
    return console.export_text()


def test_the_screen_says_who_waits_and_how_it_goes() -> None:
    text = shown(STATUS, 1001.0)
    for part in ("step 7 of 40", "training", "engine-0", "restarting", "0.625", "3.20e-07", "group 3, sample 1"):
        assert part in text, text
    assert "silent" not in text
    assert "silent for 60 s" in shown(STATUS, 1060.0)


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
