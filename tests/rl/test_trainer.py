"""The trainer as a role: steps, what it reports, and that a resumed run is the uninterrupted one."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from stretto.base.errors import UserError
from stretto.base.trajectory import Group
from stretto.model.hub import read_checkpoint
from stretto.model.parallel import join
from stretto.rl import log as measures
from stretto.rl.groups import store_group
from stretto.rl.ledger import GroupRef
from stretto.rl.log import StepReport
from stretto.rl.trainer import TrainerRole
from stretto.rl.weights import fetch
from stretto.train.step import NonFiniteError
from tests.rl.policies import checkpoint, groups, network, recipe


@pytest.fixture
def start(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "start")


def role(run: Path, start: Path, **changes: Any) -> TrainerRole:
    return TrainerRole(recipe(**changes), run, start, ranks=join("cpu"))


def stored(folder: Path, made: list[Group]) -> list[GroupRef]:
    return [store_group(folder, each) for each in made]


def refs_of(step: int, folder: Path) -> list[GroupRef]:
    """Four groups of a step, partly of the versions before."""
    made = groups(network(), seed=step, versions=(max(0, step - 1), step), noise=0.1)
    return stored(folder / f"groups-{step}", made)


def weights(trainer: TrainerRole, folder: Path) -> dict[str, Tensor]:
    version = trainer.publish(folder)
    assert version is not None
    return fetch(version)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def untimed(report: StepReport) -> dict[str, float]:
    return {name: value for name, value in report.scalars.items() if not name.startswith("time/")}


def test_a_step_reports_what_it_did(tmp_path: Path, start: Path) -> None:
    trainer = role(tmp_path / "run", start, loss__kl_weight=0.1)
    assert trainer.version == 0
    first = trainer.step(refs_of(0, tmp_path), 0)
    refs = refs_of(1, tmp_path)
    report = trainer.step(refs, 1)
    assert (first.step, report.step, trainer.version) == (1, 2, 2)
    assert report.num_samples == 16 and report.num_tokens == sum(ref.num_tokens for ref in refs)
    scalars = report.scalars
    assert all(math.isfinite(value) for value in scalars.values()), scalars
    assert first.scalars["mismatch/same_share"] == 1.0 and "mismatch/stale_k3_mean" not in first.scalars
    assert 0.3 < scalars["mismatch/same_share"] < 0.7
    assert {"mismatch/same_k3_mean", "mismatch/stale_k3_mean", "mismatch/stale_k1_p99"} <= scalars.keys()
    assert scalars["staleness/max"] == 1.0 and 0 < scalars["staleness/mean"] < 1
    assert scalars["reward/mean"] == pytest.approx(0.375) and scalars["reward/source/digits"] == pytest.approx(0.375)
    assert scalars["reward/part/format"] == 1.0 and scalars["reward/uniform_groups"] == 0.0
    assert first.scalars["policy/ratio_max"] == 1.0 and first.scalars["policy/clip_fraction"] == 0.0
    assert first.scalars["routes/flips"] == 0.0 and "routes/flips" not in scalars
    assert abs(first.scalars["policy/kl_reference"]) < 1e-6 < 1e-4 < scalars["policy/kl_reference"]
    assert 0.9 < first.scalars["policy/ess"] < 1.0 and scalars["optim/grad_norm"] > 1e-3


def test_a_single_update_finds_what_a_pass_before_it_would(
    tmp_path: Path, start: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {}
    for every in (1, 10):
        monkeypatch.setattr("stretto.rl.trainer.FLIPS_EVERY", every)
        trainer = role(tmp_path / str(every), start)
        reports = [trainer.step(refs_of(step, tmp_path), step) for step in range(2)]
        made[every] = weights(trainer, tmp_path / "weights" / str(every)), untimed(reports[1])
    assert 0 < made[1][1].pop("routes/flips") < 0.5
    assert same(made[1][0], made[10][0])
    assert made[1][1] == made[10][1]


def test_steps_are_numbered_and_taken_in_order_of_ordinals(tmp_path: Path, start: Path) -> None:
    forth, back = (role(tmp_path / name, start) for name in ("forth", "back"))
    refs = refs_of(0, tmp_path)
    forth.step(refs, 0)
    back.step(refs[::-1], 0)
    assert same(weights(forth, tmp_path / "a"), weights(back, tmp_path / "b"))
    with pytest.raises(AssertionError, match="step 0 was asked for, 1 is next"):
        forth.step(refs, 0)


def test_several_updates_a_step_move_out_of_the_trust_region(tmp_path: Path, start: Path) -> None:
    one, two = (role(tmp_path / str(n), start, train__minibatches=n, loss__clip_low=0.01) for n in (1, 2))
    refs = refs_of(0, tmp_path)
    assert one.step(refs, 0).scalars["policy/ratio_max"] == 1.0
    report = two.step(refs, 0)
    assert report.step == 1 and report.scalars["policy/ratio_max"] > 1.0 and report.scalars["policy/clip_fraction"] > 0


@pytest.mark.parametrize(
    "change",
    [
        {},
        pytest.param({"replay": "r2"}, marks=pytest.mark.slow),
        pytest.param({"loss__proximal": "behaviour"}, marks=pytest.mark.slow),
        pytest.param({"loss__kl_weight": 0.05}, marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, start: Path, change: dict[str, Any]) -> None:
    straight = role(tmp_path / "straight", start, **change)
    reports = [straight.step(refs_of(step, tmp_path), step) for step in range(3)]
    broken = role(tmp_path / "broken", start, **change)
    assert broken.resume() is None
    for step in range(2):
        broken.step(refs_of(step, tmp_path), step)
    broken.save({"next": 7, "ready": [1, 2]})
    broken.step(refs_of(2, tmp_path), 2)  # done, but lost
    again = role(tmp_path / "broken", start, **change)
    assert again.resume() == {"next": 7, "ready": [1, 2]}
    assert again.version == 2
    report = again.step(refs_of(2, tmp_path), 2)
    assert untimed(report) == untimed(reports[2])
    assert same(weights(again, tmp_path / "a"), weights(straight, tmp_path / "b"))


def test_a_resume_under_another_recipe_or_start_is_refused(tmp_path: Path, start: Path) -> None:
    trainer = role(tmp_path / "run", start)
    trainer.step(refs_of(0, tmp_path), 0)
    trainer.save({})
    with pytest.raises(UserError, match=r"loss.clip_high: was 0.2 when this run started, is 0.3 now") as caught:
        role(tmp_path / "run", start, loss__clip_high=0.3).resume()
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="--model: not the checkpoint that"):
        role(tmp_path / "run", checkpoint(tmp_path / "other", seed=1)).resume()
    assert role(tmp_path / "run", start, runtime__kind="ray", failures__lease_s=5.0).resume() == {}


def test_a_non_finite_step_stops_and_changes_nothing(tmp_path: Path, start: Path) -> None:
    trainer = role(tmp_path / "run", start)
    trainer.step(refs_of(0, tmp_path), 0)
    before = weights(trainer, tmp_path / "a")
    made = groups(network(), seed=1)
    sample = made[0].trajectories[0]
    poisoned = replace(sample.segments[1], logprobs=np.full_like(sample.segments[1].logprobs, np.nan))
    sample = replace(sample, segments=(sample.segments[0], poisoned, *sample.segments[2:]))
    made[0] = replace(made[0], trajectories=(sample, *made[0].trajectories[1:]))
    with pytest.raises(NonFiniteError, match="the gradient is not finite") as caught:
        trainer.step(stored(tmp_path / "poisoned", made), 1)
    assert "\n" not in str(caught.value)
    assert trainer.version == 1 and same(before, weights(trainer, tmp_path / "b"))


def test_routes_of_another_network_are_one_line(tmp_path: Path, start: Path) -> None:
    made = groups(network())
    sample = made[2].trajectories[1]
    assert sample.routes is not None
    narrow = replace(sample, routes=sample.routes[:, :, :1].copy())
    made[2] = replace(made[2], trajectories=(made[2].trajectories[0], narrow, *made[2].trajectories[2:]))
    refs = stored(tmp_path / "groups", made)
    trainer = role(tmp_path / "run", start)
    with pytest.raises(UserError, match="routes of sample 1: 2 layers of 1 experts, the trained network has 2 of 2"):
        trainer.step(refs, 0)
    assert trainer.version == 0


@pytest.mark.parametrize(("rollout", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_publishing(tmp_path: Path, start: Path, rollout: str, dtype: torch.dtype) -> None:
    trainer = role(tmp_path / "run", start, precision__rollout=rollout)
    trainer.step(refs_of(0, tmp_path), 0)
    version = trainer.publish()
    assert version is not None and version.number == 1
    assert Path(version.location).parent == tmp_path / "run" / "weights"
    state = fetch(version)
    assert {state[f"blocks.1.{name}"].dtype for name in ("attention.qkv.weight", "mlp.down")} == {dtype}
    others = ("embedding.weight", "norm.weight", "blocks.1.mlp.gate", "blocks.1.mlp.bias_WE")
    assert {state[name].dtype for name in others} == {torch.float32}
    for step in range(1, 6):
        trainer.step(refs_of(step, tmp_path), step)
        trainer.publish()
    assert len(list((tmp_path / "run" / "weights").iterdir())) == 4


def test_the_result_is_a_checkpoint_with_its_cost(tmp_path: Path, start: Path) -> None:
    trainer = role(tmp_path / "run", start)
    report = trainer.step(refs_of(0, tmp_path), 0)
    trainer.write(tmp_path / "result")
    result = read_checkpoint(tmp_path / "result")
    assert same(dict(result.model.state_dict()), weights(trainer, tmp_path / "a"))
    assert result.lineage is not None and result.lineage.stage == "rl"
    assert result.lineage.receipt.tokens == report.num_tokens and result.lineage.receipt.flops > 0
    assert result.lineage.config["loss"]["policy"] == "ppo"


def test_learning_makes_the_rewarded_more_likely(tmp_path: Path, start: Path) -> None:
    """The sign of everything: the same groups again and again, naive PPO with a wide region."""
    trainer = role(tmp_path / "run", start, optim__lr=3e-3, loss__clip_high=10.0, loss__clip_low=0.9)
    made = groups(network())
    for step in range(6):
        trainer.step(stored(tmp_path / "groups", made), step)
    before, after = network(), network()
    after.load_state_dict(weights(trainer, tmp_path / "a"))
    gains = []
    for model in (before, after):
        again = groups(model)  # the same tokens, as this network would score them
        sums = np.array(
            [[sum(part.logprobs.sum() for part in one.segments) for one in each.trajectories] for each in again]
        )
        gains.append(sums)
    change = gains[1] - gains[0]
    assert (change[:, 0] > change[:, 1]).all() and (change[:, 0] > change[:, 2]).all()


def test_mismatch_by_hand_apart_by_age() -> None:
    behaviour = np.array([-1.0, -1.0, -1.0, -1.0])
    logp = behaviour + np.array([0.1, -0.1, 0.5, 0.0])
    found = measures.mismatch(logp, behaviour, np.array([True, True, False, False]))
    k3 = np.expm1([0.1, -0.1, 0.5]) - [0.1, -0.1, 0.5]
    assert found["mismatch/same_share"] == 0.5
    assert found["mismatch/same_k1_mean"] == pytest.approx(0.0) and found["mismatch/stale_k1_mean"] == pytest.approx(
        -0.25
    )
    assert found["mismatch/same_k2_mean"] == pytest.approx(0.005)
    assert found["mismatch/same_k3_mean"] == pytest.approx(k3[:2].mean())
    assert found["mismatch/stale_k3_max"] == pytest.approx(k3[2])
    ratio = np.exp([0.1, -0.1, 0.5, 0.0])
    assert found["policy/ess"] == pytest.approx(ratio.sum() ** 2 / (4 * (ratio**2).sum()))
    assert found["policy/chi2"] == pytest.approx((ratio**2).mean() - 1)
