"""A hang ends the process with the stacks of its threads, and slow ranks are named. `tests/cli/test_launch.py` has real ranks."""

from __future__ import annotations

import faulthandler
import os
import re
import threading
import time

import pytest
import torch
from torch import Tensor

from stretto.model.parallel import Ranks
from stretto.model.transformer import Context, Transformer, build
from stretto.train import watch
from stretto.train.watch import OwnTime, watched
from tests.train.test_snapshot import CONFIG

TWO = Ranks(0, 2, torch.device("cpu"))


class WithOthers(Ranks):
    """The first of several ranks. ``others``: seconds in attention and number of rows of the others; None: those of this one."""

    others: tuple[tuple[float, float] | None, ...]

    def gather(self, value: Tensor) -> Tensor:
        return torch.stack([value, *(value if other is None else value.new_tensor(other) for other in self.others)])


def ranks_with(*others: tuple[float, float] | None) -> WithOthers:
    ranks = WithOthers(0, 1 + len(others), torch.device("cpu"))
    object.__setattr__(ranks, "others", others)
    return ranks


def run(model: Transformer) -> None:
    ids_BT = torch.zeros(1, 4, dtype=torch.int64)
    model(ids_BT, CONFIG.full(), Context.plain(ids_BT))


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Exit codes with which the watchdog would have ended this process."""
    codes: list[int] = []

    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(watch, "GRACE_S", 0.0)
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *_, **options: None)
    return codes


@pytest.mark.slow
def test_a_hang_prints_the_stacks_and_ends_the_process(ends: list[int], capfd: pytest.CaptureFixture[str]) -> None:
    def the_place_that_hangs() -> None:
        deadline_s = time.monotonic() + 30.0
        while not ends and time.monotonic() < deadline_s:
            time.sleep(0.01)

    model = build(CONFIG, 0)
    run(model)
    others = [
        threading.Thread(target=the_place_that_hangs, daemon=True) for _ in range(120)
    ]  # more than faulthandler shows
    for thread in others:
        thread.start()
    with watched(model, TWO, 1.0):
        the_place_that_hangs()
    assert ends == [1]
    printed = capfd.readouterr().err
    assert "rank 0 of 2: no forward pass ended in 1 s; the stacks of its threads:" in printed
    _, _, stacks = printed.partition("the stacks of its threads:\n")
    assert stacks.startswith("Thread MainThread:") and stacks.count("in the_place_that_hangs") > 120


@pytest.mark.parametrize("world", [1, 2])
def test_forward_passes_and_a_lone_rank_are_no_hang(ends: list[int], world: int) -> None:
    model = build(CONFIG, 0)
    with watched(model, Ranks(0, world, torch.device("cpu")), 5.0 if world > 1 else 0.01) as goes_on:
        for _ in range(5):
            run(model)
            goes_on(1)
            time.sleep(0.02)
    assert ends == [] and not model._forward_hooks


def test_a_wait_for_the_disk_is_no_hang(ends: list[int]) -> None:
    waits = True
    with watched(build(CONFIG, 0), TWO, 0.5, lambda: waits):
        time.sleep(1.5)
        assert ends == []
        waits = False
        deadline_s = time.monotonic() + 30.0
        while not ends and time.monotonic() < deadline_s:
            time.sleep(0.01)
    assert ends == [1]


def test_a_slow_rank_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    model, ranks = build(CONFIG, 0), ranks_with(None, (50.0, 3.0))
    own = OwnTime(model, ranks)
    run(model)
    assert own.report(10)["speed/slowest_over_median"] > 10.0
    assert "step 10: rank 2 is slow: 50.00 s in attention" in capsys.readouterr().out
    run(model)
    object.__setattr__(ranks, "others", (None, (0.0, 3.0)))
    assert own.report(20)["speed/slowest_over_median"] >= 1.0
    assert "slow" not in capsys.readouterr().out
    assert OwnTime(build(CONFIG, 0), Ranks(0, 1, torch.device("cpu"))).report(1) == {}


@pytest.mark.parametrize(
    ("others", "slow"),
    [
        (((2.0, 1.0), (1.0, 1.0)), [1]),
        (((2.0, 2.0), (1.0, 1.0)), []),  # the same time for each row
        (((6.0, 2.0), (1.0, 1.0)), [1]),
        (((1.6, 1.0),), [1]),
        (((1.4, 1.0),), []),
    ],
)
def test_times_are_compared_by_row_and_two_ranks_with_each_other(
    capsys: pytest.CaptureFixture[str], others: tuple[tuple[float, float], ...], slow: list[int]
) -> None:
    own = OwnTime(build(CONFIG, 0), ranks_with(*others))
    own._seconds, own._num_rows = 1.0, 1
    own.report(1)
    named = re.findall(r"step 1: rank (\d) is slow", capsys.readouterr().out)
    assert [int(rank) for rank in named] == slow
