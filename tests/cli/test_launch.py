"""``--launch``: ranks that torchrun starts, and starts again when one dies, hangs or is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import typer
from torch.distributed.launcher.api import LaunchConfig

from stretto.base.errors import UserError
from stretto.base.track import METRICS_FILE, read_metrics
from stretto.cli import launch as cli_launch
from stretto.cli.launch import ENDED, SHUTDOWN_TIMEOUT, end_for_good, exit_if_ended, launch, ranks_arguments
from stretto.model.parallel import check_ranks
from tests.api.conftest import Run, refused


def test_ranks_get_the_command_without_the_options_of_the_launcher() -> None:
    told = ["pretrain", "r.toml", "--launch", "4", "-o", "x", "--resume", "--max-restarts=3", "--set", "a=1"]
    assert ranks_arguments(told) == ["pretrain", "r.toml", "-o", "x", "--set", "a=1", "--resume"]
    assert ranks_arguments(["sft", "s", "--launch=2"]) == ["sft", "s", "--resume"]


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (("--launch", "0"), ("--launch 0", "at least one rank")),
        (("--launch", "-2"), ("--launch -2", "at least one rank")),
        (("--launch", "2", "--max-restarts", "-1"), ("--max-restarts -1",)),
        (("--launch", "3", "--set", "train.ep=2"), ("train.ep: 2 does not divide the number of ranks, 3",)),
        (("--launch", "3", "--set", "train.ep=3"), ("train.ep 3 does not divide the 4 experts",)),
        (("--launch", "2", "--device", "gpu"), ("--device gpu: unknown",)),
    ],
)
def test_what_cannot_be_launched(
    stretto: Run, recipe: Path, text: Path, tmp_path: Path, told: tuple[str, ...], words: tuple[str, ...]
) -> None:
    refused(stretto("pretrain", recipe, "--data", text, "-o", tmp_path / "run", *told), *words)
    assert not (tmp_path / "run").exists()


def test_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert check_ranks("cuda", 1, 2, 2) == "cuda" and check_ranks("cpu", 2, 4, 4) == "cpu"
    for device in ("cuda", "auto"):
        with pytest.raises(UserError, match=r"2 CUDA devices, and this is its rank 3"):
            check_ranks(device, 1, 3, 3)


def test_an_end_for_good_is_no_failure_for_torchrun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    end_for_good("not launched", 2)
    exit_if_ended()
    monkeypatch.setenv(ENDED, str(tmp_path / "ended.json"))
    exit_if_ended()
    for message in ("the first", "the second"):
        with pytest.raises(SystemExit) as stop:
            end_for_good(message, 3)
        assert stop.value.code == 0
    assert "the first" in (tmp_path / "ended.json").read_text()
    with pytest.raises(SystemExit):
        exit_if_ended()


def test_torchrun_waits_for_a_snapshot_after_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    environments: list[dict[str, str]] = []
    monkeypatch.delenv(SHUTDOWN_TIMEOUT, raising=False)
    monkeypatch.setattr(cli_launch, "_run", lambda command, environment: environments.append(environment) or 0)
    for given in (None, "5"):
        if given is not None:
            monkeypatch.setenv(SHUTDOWN_TIMEOUT, given)
        with pytest.raises(typer.Exit):
            launch(1, 0, "cpu")
    assert [each[SHUTDOWN_TIMEOUT] for each in environments] == ["600", "5"]
    config = LaunchConfig(1, 1, 1)
    assert getattr(config, "shutdown_timeout", 5) == 5  # torch 2.11 has no such setting


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the ranks in /proc")
def test_a_second_signal_ends_the_ranks_at_once(tmp_path: Path) -> None:
    """The first one goes to torchrun, here a process that waits for its rank and writes how it ended; neither of them obeys it."""
    told = tmp_path / "code"
    rank = [sys.executable, "-c", "import time; time.sleep(20)"]
    waits = (
        "import pathlib, signal, subprocess; signal.signal(signal.SIGINT, signal.SIG_IGN); "
        f"pathlib.Path({str(told)!r}).write_text(str(subprocess.run({rank}).returncode))"
    )

    def press_twice() -> None:
        deadline_s = time.monotonic() + 60.0
        while not any(children(child) for child in children(os.getpid())) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)
        had_ended.append(told.exists())
        os.kill(os.getpid(), signal.SIGINT)

    had_ended: list[bool] = []
    thread = threading.Thread(target=press_twice)
    thread.start()
    assert cli_launch._run([sys.executable, "-c", waits], dict(os.environ)) == 130
    thread.join()
    assert had_ended == [False] and told.read_text() == "-9"


@pytest.mark.slow
def test_a_rank_imports_nothing_that_draws_or_serves() -> None:
    """A restarted rank pays for its imports, and the driver of an RL run imports the same."""
    unneeded = ("matplotlib", "scipy.stats", "starlette", "uvicorn", "pyarrow", "tensorboard")
    code = (
        f"import sys, stretto.api.stages, stretto.api.rl; print([name for name in {unneeded} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


class Launched:
    """`stretto pretrain --launch 2` in ``run``, in a process of its own."""

    def __init__(self, run: Path, recipe: Path, text: Path, *more: str):
        self.run, self.output = run, run.with_suffix(".txt")
        told = [str(recipe), "--data", str(text), "-o", str(run), "--device", "cpu", "--launch", "2", *more]
        with self.output.open("w") as output:
            command = [sys.executable, "-m", "stretto", "pretrain", *told]
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)

    def steps(self) -> int:
        return len(read_metrics(self.run)) if (self.run / METRICS_FILE).is_file() else 0

    def until(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + 240.0
        while not condition():
            assert self.process.poll() is None and time.monotonic() < deadline_s, self.output.read_text()
            time.sleep(0.05)

    def ranks(self) -> list[int]:
        return children(children(self.process.pid)[0])

    def end(self) -> str:
        self.process.wait(240.0)
        return self.output.read_text()

    def losses(self) -> list[dict[str, float]]:
        kept = ("step", "loss", "train", "optim")
        return [{name: value for name, value in row.items() if name.startswith(kept)} for row in read_metrics(self.run)]


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


LOGGED = ("--set", "train.log_every=1", "--set", "train.dtype=float32")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the ranks in /proc")
def test_a_killed_and_a_hung_rank(recipe: Path, text: Path, tmp_path: Path) -> None:
    told = (*LOGGED, "--steps", "40", "--set", "train.snapshot_every=5", "--set", "train.eval_every=20")
    whole = Launched(tmp_path / "whole", recipe, text, *told)
    whole.end()
    assert whole.process.returncode == 0, whole.output.read_text()

    broken = Launched(tmp_path / "broken", recipe, text, *told, "--set", "train.hang_minutes=0.1")
    broken.until(lambda: broken.steps() > 8)
    os.kill(broken.ranks()[1], signal.SIGKILL)
    broken.until(lambda: "resumes after step" in broken.output.read_text())
    broken.until(lambda: broken.steps() > 14)
    hung = broken.ranks()[1]
    os.kill(hung, signal.SIGSTOP)
    broken.until(lambda: "no forward pass ended" in broken.output.read_text())
    os.kill(hung, signal.SIGCONT)  # torchrun waits 30 s for a rank that does not take its SIGTERM
    printed = broken.end()
    assert broken.process.returncode == 0, printed
    assert "rank 0 of 2: no forward pass ended in 6 s; the stacks of its threads:" in printed
    assert broken.losses() == whole.losses()

    again = Launched(tmp_path / "broken", recipe, text, *told, "--set", "optim.weight_decay=0.5")
    printed = again.end()
    assert again.process.returncode == 2, printed
    lines = printed.splitlines()
    assert "torchrun --standalone --nproc-per-node=2 --max-restarts=20 -m stretto pretrain" in lines[0]
    assert len(lines) == 2 and "optim.weight_decay: was" in lines[1], printed


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the ranks in /proc")
def test_an_interrupt_ends_after_a_snapshot_and_restarts_end(recipe: Path, text: Path, tmp_path: Path) -> None:
    told = (*LOGGED, "--steps", "5000", "--set", "train.snapshot_every=5000", "--max-restarts", "0")
    launched = Launched(tmp_path / "run", recipe, text, *told)
    launched.until(lambda: launched.steps() > 3)
    launched.process.send_signal(signal.SIGINT)
    assert "interrupted; a training run continues with --resume" in launched.end()
    assert launched.process.returncode == 130
    assert len(list((tmp_path / "run" / "snapshots").glob("step-*"))) == 1

    launched = Launched(tmp_path / "run", recipe, text, *told)
    launched.until(lambda: "resumes after step" in launched.output.read_text())
    os.kill(launched.ranks()[0], signal.SIGKILL)
    assert "--launch: the ranks ended with errors, after at most 0 restarts" in launched.end()
    assert launched.process.returncode == 1
