"""A fast part of `tests.cli.first_commands`: the kinds that are small, tokenised in this process, and that the bench can fail."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.api.conftest import Run
from tests.cli.first_commands import KINDS, Command, judge

FAST = [name for name in KINDS if not name.startswith("100 MB")]


def tokenising(command: Command) -> Command:
    """The command with the same text that only tokenises it."""
    arguments = command.arguments[2:] if command.arguments[0] == "pretrain" else command.arguments[1:]
    return replace(command, arguments=("tokenize", *arguments, "--vocab-size", "300"))


@pytest.mark.parametrize("name", FAST)
def test_first_commands_run_or_refuse_rightly(
    stretto: Run, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})  # no worker processes for a few kilobytes
    for number, command in enumerate(map(tokenising, KINDS[name](tmp_path, random.Random(1)))):
        out = tmp_path / f"out{number}"
        done = stretto(*command.arguments, "-o", out)
        outcome = judge(command, done.code, done.out, done.err, out)
        assert not outcome.problem and outcome.is_named, (outcome, done)
        if command.num_bytes is not None:  # a byte too few, or a silent command, is noticed
            assert judge(replace(command, num_bytes=command.num_bytes + 1), done.code, done.out, done.err, out).problem
            assert not judge(command, done.code, "", done.err, out).is_named
