"""`bench.gpu` runs on a CPU in its smallest form, continues after an interruption, and finds its mutant."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench import gpu
from bench.common import kernel_checks
from bench.common.gpu_part import Setting
from bench.gpu_parts import checks, decode

SMALL = ["--device", "cpu", "--size", "tiny", "--steps", "1", "--requests", "2"]


@pytest.mark.slow
def test_parts_run_on_a_cpu_and_are_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*SMALL, "--out", str(tmp_path), "--part", "packed", "--part", "fp8", "--part", "moe"]
    gpu.main(arguments)
    stored = {path.stem: json.loads(path.read_text(encoding="utf-8"))["outcomes"] for path in tmp_path.glob("*.json")}
    assert {part: len(outcomes) for part, outcomes in stored.items()} == {"packed": 1, "fp8": 2, "moe": 4}
    assert all(each["holds"] is None for part in ("packed", "fp8") for each in stored[part].values())
    assert [each["holds"] for each in stored["moe"].values()] == [True, None, None, True]
    capsys.readouterr()
    gpu.main([*arguments, "--only", "loss", "--out", str(tmp_path / "other")])
    assert not json.loads((tmp_path / "other" / "fp8.json").read_text(encoding="utf-8"))["outcomes"].keys() - {
        "loss of a small network"
    }
    gpu.main([*arguments, "--minutes", "0"])  # nothing is left to run
    assert "time is up" not in capsys.readouterr().out


def test_the_mutant_fails_the_checks_that_pass_without_it() -> None:
    for mutant in (None, "tf32"):
        setting = Setting(torch.device("cpu"), "tiny", num_steps=1, num_requests=1, mutant=mutant)
        products = [case for case in checks.cases(setting) if "GPU to CPU" in case.name]
        assert [gpu.outcome_of(case).holds for case in products] == [mutant is None] * 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["experts, int4", "residual", "rotation", "choice of experts, sigmoid"])
def test_the_mutant_fails_the_checks_of_kernels(name: str) -> None:
    pytest.importorskip("triton")
    for mutant in (None, "tf32"):
        setting = Setting(torch.device("cpu"), "tiny", num_steps=1, num_requests=1, mutant=mutant)
        (case,) = [case for case in kernel_checks.cases(setting) if name in case.name]
        outcome = gpu.outcome_of(case)
        assert outcome.holds is (mutant is None) and "error" not in outcome.values


@pytest.mark.slow
def test_decoding_is_measured_on_a_cpu() -> None:
    setting = Setting(torch.device("cpu"), "tiny", num_steps=1, num_requests=1)
    measured = {
        case.name: case.run()
        for case in decode.cases(setting)
        if "time" not in case.name and ("batch 1" in case.name or "Subnets" in case.name)
    }
    assert len(measured) == 4 and all(outcome.values for outcome in measured.values())
    assert measured["tiny, 64 sequences of 8 Subnets"].values["graphs"] == 1
