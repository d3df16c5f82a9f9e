"""`bench.gpu` runs on a CPU in its smallest form, continues after an interruption, and finds its mutant."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench import gpu
from bench.common.gpu_part import Setting
from bench.gpu_parts import checks

SMALL = ["--device", "cpu", "--size", "tiny", "--steps", "1", "--requests", "2"]


def test_parts_run_on_a_cpu_and_are_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*SMALL, "--out", str(tmp_path), "--part", "packed", "--part", "fp8"]
    gpu.main(arguments)
    stored = {path.stem: json.loads(path.read_text(encoding="utf-8"))["outcomes"] for path in tmp_path.glob("*.json")}
    assert {part: len(outcomes) for part, outcomes in stored.items()} == {"packed": 1, "fp8": 1}
    assert all(each["holds"] is None for outcomes in stored.values() for each in outcomes.values())
    capsys.readouterr()
    gpu.main([*arguments, "--minutes", "0"])  # nothing is left to run
    assert "time is up" not in capsys.readouterr().out


def test_the_mutant_fails_the_checks_that_pass_without_it() -> None:
    for mutant in (None, "tf32"):
        setting = Setting(torch.device("cpu"), "tiny", num_steps=1, num_requests=1, mutant=mutant)
        products = [case for case in checks.cases(setting) if "GPU to CPU" in case.name]
        assert [gpu.outcome_of(case).holds for case in products] == [mutant is None] * 3
