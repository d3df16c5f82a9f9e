"""Healing: a cut network learns from its parent and the data, and goes on bit for bit."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stretto.base.errors import UserError
from stretto.base.track import Tracker, read_metrics
from stretto.data.loader import Loader
from stretto.data.shards import TokenSet
from stretto.model.elastic import extract
from stretto.model.parallel import join
from stretto.train.loop import Job, Trained, heal
from stretto.train.recipe import HealRecipe


@pytest.fixture
def heal_in(tmp_path: Path, tokens: TokenSet, reference: Trained) -> Callable[..., Trained]:
    """Heals the corner of the reference run in the folder of that name."""

    def train(name: str, resume: bool = False, teacher: bool = True, ce_weight: float = 0.5, steps: int = 8) -> Trained:
        recipe = HealRecipe.model_validate(
            {
                "optim": {"lr": 3e-3, "decay_fraction": 1.0},
                "train": {
                    "steps": steps, "rows": 4, "seq_len": 48, "micro_batches": 2, "snapshot_every": 3, "log_every": 1,
                    "dtype": "float32",
                },
                "ce_weight": ce_weight,
            }
        )  # fmt: skip
        config = reference.model.config
        job = Job(
            tmp_path / name,
            Loader([tokens], [1.0], recipe.train.micro_rows, recipe.train.seq_len, 1),
            (),
            tokens.manifest.data_hash,
            join("cpu"),
            tracker=lambda step: Tracker(tmp_path / name, first_step=step and step + 1, tensorboard=False),
            resume=resume,
        )
        student, parent = extract(reference.model, config.subnet(4, 4, 2)), extract(reference.model, config.full())
        return heal(recipe, job, student, parent if teacher else None)

    return train


def test_the_loss_falls_and_the_teacher_is_paid_for(heal_in: Callable[..., Trained], tmp_path: Path) -> None:
    alone, taught = heal_in("alone", teacher=False, steps=16), heal_in("taught", steps=16)
    for name in ("alone", "taught"):
        losses = [row["loss/train"] for row in read_metrics(tmp_path / name)]
        assert sum(losses[-3:]) < sum(losses[:3]) - 0.3
    assert taught.tokens_by_kind == alone.tokens_by_kind
    assert taught.meter.receipt().flops > alone.meter.receipt().flops
    weights, others = taught.model.state_dict(), alone.model.state_dict()
    assert any(not torch.equal(tensor, others[name]) for name, tensor in weights.items())


def test_no_weight_on_the_teacher_is_no_teacher(heal_in: Callable[..., Trained], assert_same: Any) -> None:
    assert_same(heal_in("alone", teacher=False, ce_weight=0.3), heal_in("ignored", ce_weight=1.0))


def test_a_resumed_healing_is_an_uninterrupted_one(
    heal_in: Callable[..., Trained], assert_same: Any, tmp_path: Path
) -> None:
    whole = heal_in("whole")
    heal_in("stopped")
    shutil.rmtree(tmp_path / "stopped" / "snapshots" / "step-0000008")
    assert_same(whole, heal_in("stopped", resume=True))
    with pytest.raises(UserError, match=r"ce_weight: was 0\.5 .* is 0\.4 now"):
        heal_in("stopped", resume=True, ce_weight=0.4)


def test_the_parent_is_left_as_it_was(heal_in: Callable[..., Trained], reference: Trained) -> None:
    before = {name: tensor.clone() for name, tensor in reference.model.state_dict().items()}
    heal_in("run")
    assert all(torch.equal(tensor, before[name]) for name, tensor in reference.model.state_dict().items())
