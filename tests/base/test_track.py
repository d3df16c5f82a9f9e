"""What a run logs can be read back, also after a kill and a resume."""

from __future__ import annotations

import io
import json
import math
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import rich
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from stretto.base.errors import UserError
from stretto.base.track import METRICS_FILE, Tracker, progress, read_metrics, say, wide_console


def plain() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=80)


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=100)


def output(console: Console) -> str:
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    """What TensorBoard shows for ``name``."""
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_scalars_reach_the_file_and_the_console(tmp_path: Path) -> None:
    console = plain()
    with Tracker(tmp_path / "run", tensorboard=False, console=console) as tracker:
        tracker.log(1, {"loss/full": 2.3456789, "tokens/s": 12345.6})
        tracker.log(2, {"loss/full": 2.0}, line=False)
        # Written at once: a kill after `log` loses nothing.
        assert read_metrics(tmp_path / "run") == [
            {"step": 1, "loss/full": 2.3456789, "tokens/s": 12345.6},
            {"step": 2, "loss/full": 2.0},
        ]
    assert output(console) == "step      1  loss/full 2.346  tokens/s 12,346\n"


def test_a_long_line_stays_one_line(tmp_path: Path) -> None:
    console = plain()
    with Tracker(tmp_path, tensorboard=False, console=console) as tracker:
        tracker.log(1, {f"loss/[{i}]": float(i) for i in range(40)})
    assert output(console).count("\n") == 1
    assert "loss/[39] 39" in output(console)


def test_scalars_reach_tensorboard(tmp_path: Path) -> None:
    with Tracker(tmp_path, console=plain()) as tracker:
        tracker.log(1, {"loss/full": 2.5})
        tracker.log(2, {"loss/full": 2.25})
    assert scalars(tmp_path, "loss/full") == [(1, 2.5), (2, 2.25)]


def test_a_resume_drops_what_came_after_its_snapshot(tmp_path: Path) -> None:
    with Tracker(tmp_path, console=plain()) as tracker:
        for step in range(5):
            tracker.log(step, {"loss": float(step)})
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"step": 5, "lo')  # a kill in the middle of a line
    with Tracker(tmp_path, first_step=3, console=plain()) as tracker:
        tracker.log(3, {"loss": 30.0})
    assert [(row["step"], row["loss"]) for row in read_metrics(tmp_path)] == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 30.0)]
    assert scalars(tmp_path, "loss") == [(0, 0), (1, 1), (2, 2), (3, 30)]


def test_a_fresh_run_forgets_the_old_one(tmp_path: Path) -> None:
    with Tracker(tmp_path, console=plain()) as tracker:
        tracker.log(7, {"loss": 2.0})
    (tmp_path / METRICS_FILE).write_text("damaged\n")
    with Tracker(tmp_path, console=plain()) as tracker:
        tracker.log(0, {"loss": 1.0})
    assert read_metrics(tmp_path) == [{"step": 0, "loss": 1.0}]
    assert scalars(tmp_path, "loss") == [(0, 1.0)]


def test_a_value_that_is_not_finite_is_still_json(tmp_path: Path) -> None:
    with Tracker(tmp_path, tensorboard=False, console=plain()) as tracker:
        tracker.log(0, {"loss": math.nan, "norm": math.inf})
    row = json.loads((tmp_path / METRICS_FILE).read_text(), parse_constant=pytest.fail)
    assert row == {"step": 0, "loss": None, "norm": None}
    assert math.isnan(read_metrics(tmp_path)[0]["loss"])


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    (tmp_path / METRICS_FILE).write_text('{"step": 0}\n{"st\n{"step": 2}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl: line 2: not a row of metrics"):
        read_metrics(tmp_path)
    with pytest.raises(UserError, match="line 2"):
        Tracker(tmp_path, first_step=1, tensorboard=False)


def test_a_folder_without_metrics_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"metrics\.jsonl: no such file"):
        read_metrics(tmp_path)


def test_wandb_is_asked_for_but_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # what an import of a missing package finds
    with pytest.raises(UserError, match=r"--wandb p: W&B is not installed; pip install"):
        Tracker(tmp_path, wandb_project="p", tensorboard=False)


def test_progress_without_a_terminal_is_two_lines() -> None:
    console = plain()
    with progress("counting", 3, console=console) as advance:
        for _ in range(3):
            advance(1, "status")
    start, end = output(console).splitlines()
    assert start == "counting …"
    assert end.startswith("counting: done, 3 of 3 in ")


def test_progress_that_counts_nothing_has_only_a_time() -> None:
    console = plain()
    with progress("looking", console=console, pauses_s=(0.001,)):
        while output(console).count("\n") < 2:
            time.sleep(0.001)
    start, tick, *_, end = output(console).splitlines()
    assert start == "looking …"
    assert re.fullmatch(r"looking: [\d.]+ s", tick) and re.fullmatch(r"looking: done in [\d.]+ s", end)


@pytest.mark.parametrize("make", [plain, terminal])
def test_progress_names_what_it_counts(make: Callable[[], Console]) -> None:
    console = make()
    with progress("train", 3000, "steps", console=console) as advance:
        advance(1500)
    with progress("write", unit="bytes", console=console) as advance:
        advance(1536)
    assert "1,500 of 3,000 steps" in output(console) and "1.5 KiB" in output(console)


def test_a_long_silence_is_broken_whether_or_not_anything_advances() -> None:
    console, last = plain(), time.monotonic() + 30
    with progress("counting", 3, console=console, pauses_s=(0.001, 0.002)) as advance:
        advance(1, "loss 2.5")
        # on a busy machine any number of ticks come before the advance, and one may be printed while it happens
        num_before = output(console).count("\n") + 1
        while output(console).count("\n") < num_before + 3 and time.monotonic() < last:
            time.sleep(0.001)
    *lines, end = output(console).splitlines()
    ticks = lines[num_before:]
    assert len(ticks) >= 3
    assert all(re.fullmatch(r"counting: 1 of 3 in [\d.]+ s, loss 2\.5", line) for line in ticks), ticks
    assert end.startswith("counting: done, 1 of 3 in ")


def test_the_line_of_the_end_is_the_last() -> None:
    """A tick that is being printed when the work ends, here the first, is waited for."""
    console, ticked = plain(), threading.Event()
    write = console.file.write

    def slowly(text: str) -> int:
        if " 0 of 3 in " in text and "done" not in text:
            ticked.set()
            time.sleep(0.2)
        return write(text)

    console.file.write = slowly  # type: ignore[method-assign]
    with progress("counting", 3, console=console, pauses_s=(0.001, 60.0)):
        assert ticked.wait(30)
    assert output(console).splitlines()[-1].startswith("counting: done, 0 of 3 in ")


def test_progress_that_is_not_shown_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("training", 2, is_shown=False) as advance:
        advance(1, "loss 1")
        advance()
    assert capsys.readouterr().out == ""


def test_brackets_in_a_status_are_text() -> None:
    console = terminal()
    with progress("read [/a]", console=console) as advance:
        advance(1, "open [/7] [bold")
    assert "read [/a]" in output(console) and "open [/7] [bold" in output(console)


def test_progress_says_when_it_was_stopped() -> None:
    console = plain()
    with pytest.raises(KeyboardInterrupt), progress("counting", 3, console=console) as advance:
        advance(2)
        raise KeyboardInterrupt
    assert "counting: stopped, 2 of 3 in " in output(console)


def test_bars_nest_on_a_terminal_and_lines_go_above_them(tmp_path: Path) -> None:
    console = terminal()
    with (
        progress("outer", 2, console=console) as outer,
        Tracker(tmp_path, tensorboard=False, console=console) as tracker,
    ):
        for step in range(2):
            with progress("inner", console=console) as inner:
                inner(5)
                tracker.log(step, {"loss": 1.0})
            outer(1, "going on")
    shown = output(console)
    for text in ("outer", "inner", "2 of 2", " 5 ", "going on", "step      1  loss 1"):
        assert text in shown, text


def test_a_line_is_printed_as_it_is() -> None:
    console, text = plain(), f"report: {'/a folder' * 20}[1]/index.html [/x]"
    say(text, console, style="dim")
    assert output(console) == text + "\n"


@pytest.mark.parametrize(("columns", "width"), [(None, 120), ("90", 90)])
def test_a_pipe_has_120_columns_or_those_of_the_environment(
    columns: str | None, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rich, "_console", None)
    monkeypatch.setenv("COLUMNS", columns) if columns else monkeypatch.delenv("COLUMNS", raising=False)
    assert wide_console().width == width and not wide_console().is_terminal
