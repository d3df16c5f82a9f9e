"""Snapshots of one rank; `test_ranks` has those of several."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from stretto.base.config import check_unchanged
from stretto.base.errors import UserError
from stretto.base.records import Meter
from stretto.model.parallel import join
from stretto.model.spec import ModelConfig, Subnet
from stretto.model.transformer import Context, Transformer, build
from stretto.optim.build import build_optimizers
from stretto.optim.schedule import OptimConfig
from stretto.train.snapshot import LAYOUT, SnapshotMeta, Snapshots, SnapshotWriter, _state

CONFIG = ModelConfig(
    vocab_size=17, hidden_size=8, num_layers=3, num_heads=2, num_kv_heads=1, head_dim=4, num_experts=4, top_k=2,
    expert_intermediate_size=4,
)  # fmt: skip


def meta(step: int, recipe: dict[str, object] | None = None) -> SnapshotMeta:
    return SnapshotMeta(
        step=step, loader={}, receipt=Meter("pretrain", "cpu", 1).receipt(None), run_id="r", layer_order=(0, 1, 2),
        tokens_by_kind={}, recipe=recipe or {}, data_hash="d",
    )  # fmt: skip


def train(model: Transformer, optimizers: tuple[torch.optim.Optimizer, ...], subnet: Subnet, seed: int) -> None:
    ids_BT = torch.randint(17, (2, 6), generator=torch.Generator().manual_seed(seed))
    model(ids_BT, subnet, Context.plain(ids_BT)).hidden_BTD.square().sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_what_had_no_gradient_yet_starts_afresh_after_a_resume(tmp_path: Path, optim: str) -> None:
    """A layer that no step has run has no optimiser state to save; its first step must be a first step."""
    ranks, snapshots = join("cpu"), Snapshots(tmp_path, keep=2)
    settings = OptimConfig.model_validate({"lr": 1e-2, "name": optim})
    shallow = CONFIG.full().replace(layers=(0, 2), experts=(4, 4), top_k=(2, 2))
    models = [build(CONFIG, seed) for seed in (0, 1)]
    optimizers = [build_optimizers(settings, model) for model in models]
    train(models[0], optimizers[0], shallow, 0)
    snapshots.save(models[0], optimizers[0], meta(1), ranks)
    snapshots.load(snapshots.path(1), models[1], optimizers[1], ranks)
    for model, own in zip(models, optimizers, strict=True):
        train(model, own, CONFIG.full(), 1)
    left, right = (model.state_dict() for model in models)
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_what_a_killed_save_left_is_swept_away(tmp_path: Path) -> None:
    model, snapshots = build(CONFIG, 0), Snapshots(tmp_path, keep=1)
    for step in (1, 2):
        (tmp_path / f".step-{step:07d}.partial").mkdir()
        (tmp_path / f".step-{step:07d}.partial" / "__0_0.distcp").write_bytes(b"torn")
    assert snapshots.latest() is None
    snapshots.save(model, build_optimizers(OptimConfig(lr=1e-2), model), meta(2), join("cpu"))
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000002"]


def test_one_rank_hears_no_warning(tmp_path: Path) -> None:
    model, snapshots = build(CONFIG, 0), Snapshots(tmp_path, keep=1)
    optimizers = build_optimizers(OptimConfig(lr=1e-2), model)
    train(model, optimizers, CONFIG.full(), 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        snapshots.save(model, optimizers, meta(1), join("cpu"))
        snapshots.load(snapshots.path(1), model, optimizers, join("cpu"))


def read_back(path: Path) -> dict[str, torch.Tensor]:
    """Weights and moments of a snapshot, by name."""
    model = build(CONFIG, 9)
    optimizers = build_optimizers(OptimConfig(lr=1e-2), model)
    Snapshots(path.parent, 9).load(path, model, optimizers, join("cpu"))
    moments = {
        f"{name} {key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizers[0].state[parameter].items()
    }
    return {**model.state_dict(), **moments}


@pytest.mark.parametrize("writes", ["background", "blocking"])
def test_a_snapshot_holds_the_state_of_its_step_while_training_goes_on(
    tmp_path: Path, writes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, snapshots = build(CONFIG, 0), Snapshots(tmp_path, 9)
    optimizers, write = build_optimizers(OptimConfig(lr=1e-2), model), Snapshots.write

    def slowly(*arguments: Any) -> None:
        deadline_s = time.monotonic() + 60.0
        while not writer.is_waited_for:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        write(*arguments)

    monkeypatch.setattr(Snapshots, "write", slowly)
    writer = SnapshotWriter(snapshots, join("cpu"), writes)
    train(model, optimizers, CONFIG.full(), 0)
    writer.reserve(model, optimizers)
    for step in (1, 2):
        train(model, optimizers, CONFIG.full(), step)
        writer.save(model, optimizers, meta(step))
        if step == 1 and writes == "background":
            assert snapshots.latest() is None, "the step did not wait for the disk"
    writer.wait()
    writer.close()
    assert snapshots.latest() == snapshots.path(2) and not writer.is_waited_for

    plain, again = Snapshots(tmp_path / "plain", 9), build(CONFIG, 0)
    others = build_optimizers(OptimConfig(lr=1e-2), again)
    train(again, others, CONFIG.full(), 0)
    for step in (1, 2):
        train(again, others, CONFIG.full(), step)
        write(plain, _state(again, others), meta(step), join("cpu"))
        expected, found = read_back(plain.path(step)), read_back(snapshots.path(step))
        assert expected.keys() == found.keys() and all(torch.equal(expected[name], found[name]) for name in expected)


def test_a_failed_snapshot_is_known_before_the_next(tmp_path: Path) -> None:
    model, folder = build(CONFIG, 0), tmp_path / "snapshots"
    folder.write_text("a file where the folder should be")
    optimizers = build_optimizers(OptimConfig(lr=1e-2), model)
    writer = SnapshotWriter(Snapshots(folder, 2), join("cpu"), "background")
    assert not writer.has_failed
    writer.save(model, optimizers, meta(1))
    writer.close()
    assert writer.has_failed
    with pytest.raises(UserError, match=r"step-0000001: cannot be written: .*there is no earlier snapshot.*--resume"):
        writer.wait()
    assert not writer.has_failed


def test_a_resume_may_lay_experts_out_anew_but_change_nothing_else() -> None:
    saved = meta(1, {"train": {"ep": 1, "steps": 4}})
    check_unchanged(saved.recipe, {"train": {"ep": 2, "steps": 4}}, Path("run"), LAYOUT)
    with pytest.raises(UserError, match=r"train\.steps: was 4"):
        check_unchanged(saved.recipe, {"train": {"ep": 1, "steps": 5}}, Path("run"), LAYOUT)
