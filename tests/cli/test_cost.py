"""The ledger by the command: each model once, tokens alike everywhere, and what elasticity cost."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from stretto.base.records import read_lineage
from stretto.base.track import read_metrics
from stretto.train.loop import _Window
from tests.api.conftest import Run, refused


@pytest.mark.slow
def test_each_model_once_and_elasticity_beside_its_control(
    stretto: Run, recipe: Path, text: Path, tmp_path: Path
) -> None:
    assert stretto("tokenize", "--data", text, "--vocab-size", 320, "-o", tmp_path / "tokens").code == 0
    told = ("pretrain", recipe, "--data", tmp_path / "tokens", "--set", "train.dtype=float32")
    off = ("--set", "elastic.sampler=off", "--set", "elastic.anchors={}", "--set", "elastic.anchor_share=0")
    runs = tmp_path / "runs"
    assert stretto(*told, "-o", runs / "elastic", "--set", "elastic.joint=true").code == 0
    assert "no control was trained" in stretto("cost", runs / "elastic").out
    assert stretto(*told, *off, "-o", runs / "plain").code == 0
    elastic, plain = (read_lineage(runs / name / "checkpoint").receipt for name in ("elastic", "plain"))
    assert elastic.tokens == plain.tokens  # joint passes train the same tokens twice: they count once
    assert elastic.flops > plain.flops
    said = " ".join(stretto("cost", runs / "elastic").out.split())
    losses = [read_metrics(runs / name)[-1]["loss/full"] for name in ("elastic", "plain")]
    difference = f"{losses[0] - losses[1]:+.3f}".replace("-", "−")
    ratio = f"{elastic.flops / plain.flops:.2f}x its FLOPs"
    assert f"against the control plain, at equal tokens and {ratio}, {difference} nats" in said
    assert f"The elastic run used {elastic.flops / plain.flops:.2f}x the FLOPs of an ordinary run" in said
    shutil.copytree(runs / "elastic", tmp_path / "renamed")
    assert stretto("export", runs / "elastic", "-o", tmp_path / "exported").code == 0
    many = stretto("cost", runs / "elastic", tmp_path / "renamed", tmp_path / "exported").out
    assert many.count("Cost by stage") == 1 and "together" not in many
    two = stretto("cost", runs / "elastic", runs / "plain").out
    assert all(f"Cost by stage: {name}" in two for name in ("elastic", "plain"))
    refused(stretto("cost", runs / "elastic", "--control", tmp_path / "renamed"), "--control", "not an ordinary run")
    moved = shutil.copytree(runs / "plain", tmp_path / "elsewhere" / "control")
    said = " ".join(stretto("cost", tmp_path / "renamed", "--control", moved).out.split())
    assert f"against the control control, at equal tokens and {ratio}, {difference} nats" in said


def test_a_token_that_two_passes_train_is_one_in_the_speed_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    window = _Window(started_s=0.0)
    monkeypatch.setattr("stretto.train.loop.time.perf_counter", lambda: 2.0)
    window.tokens_by_kind.update({"full": 100, "corner": 100})
    window.num_tokens += 100
    assert window.scalars()["speed/tokens_per_s"] == 50
