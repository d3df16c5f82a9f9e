"""The trainer: the policy gradient, whole however it is split; what a step reports; a resumed run is the uninterrupted one."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from stretto.base.errors import UserError
from stretto.base.records import read_lineage
from stretto.base.trajectory import Group, GroupRef, WeightVersion
from stretto.learning.algorithms import Streams, give_credit, unroll
from stretto.learning.batch import pack
from stretto.learning.metrics import StepReport, mismatch
from stretto.learning.passes import Pass, place, score
from stretto.learning.recipe import PRESETS, LossConfig
from stretto.learning.samples import load_group, pack_routes, store_group
from stretto.learning.trainer import TrainerRole, give_pass_credit, micro_batch, recompute
from stretto.learning.weights import fetch
from stretto.model.checkpoint import read_checkpoint, write_checkpoint
from stretto.model.parallel import join
from stretto.model.spec import ModelConfig
from stretto.model.transformer import MoeLayer, Replay, Transformer, build
from stretto.ops import matmul
from stretto.ops.matmul import PLAIN, Arithmetic
from stretto.ops.native import training
from stretto.runtime.store import FolderStore
from stretto.train.step import NonFiniteError, StepResult, optimisation_step
from tests.flow.policies import SHAPE, checkpoint, groups, network, recipe
from tests.learning.lessons import Catch, distance


@pytest.fixture
def start(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "start")


def role(run: Path, start: Path, **changes: Any) -> TrainerRole:
    return TrainerRole(recipe(**changes), run, start, ranks=join("cpu"))


def stored(folder: Path, made: list[Group]) -> list[GroupRef]:
    return [store_group(FolderStore(folder), each) for each in made]


def refs_of(step: int, folder: Path) -> list[GroupRef]:
    """Four groups of a step, partly of the versions before."""
    made = groups(network(), seed=step, versions=(max(0, step - 1), step), noise=0.1)
    return stored(folder / f"groups-{step}", made)


def published(trainer: TrainerRole) -> WeightVersion:
    trainer.copy_weights()
    version = asyncio.run(trainer.publish())
    assert version is not None
    return version


def weights(trainer: TrainerRole) -> dict[str, Tensor]:
    return fetch(published(trainer))


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
    assert scalars["mismatch/same_share"] < 0.1, "all but the shortest samples were begun under the version before"
    assert {"mismatch/mixed_k3_mean", "mismatch/stale_k3_mean", "mismatch/stale_k1_p99"} <= scalars.keys()
    assert scalars["staleness/max"] == 1.0 and 0 < scalars["staleness/mean"] < 1
    assert scalars["reward/mean"] == pytest.approx(0.375) and scalars["reward/source/digits"] == pytest.approx(0.375)
    assert scalars["reward/part/format"] == 1.0 and scalars["reward/uniform_groups"] == 0.0
    assert first.scalars["policy/ratio_max"] > 1.0, "π/μ: of noise in the first step"
    refs = [load_group(ref.location) for ref in refs]
    packed = [len(pack_routes(one.routes)) / len(one.routes) for each in refs for one in each.trajectories]
    assert min(packed) < scalars["routes/bytes_per_token"] < max(packed)
    assert first.scalars["routes/flips"] == 0.0 and "routes/flips" not in scalars
    assert abs(first.scalars["policy/kl_reference"]) < 1e-6 < 1e-4 < scalars["policy/kl_reference"]
    assert 0.9 < first.scalars["policy/ess"] < 1.0 and scalars["optim/grad_norm"] > 1e-3


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc")
def test_memory_that_a_step_frees_is_kept_for_the_next_one(
    tmp_path: Path, start: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To return it, and to have the system clear its pages again, took a sixth of the time of a small network's step."""
    returned = list[bool]()
    monkeypatch.setattr("stretto.ops.memory.trim", lambda: returned.append(True))
    trainer = role(tmp_path / "run", start)
    for step in range(2):
        trainer.step(refs_of(step, tmp_path), step)
    assert not returned
    trainer.close()
    assert returned


def test_a_single_update_finds_what_a_pass_before_it_would(
    tmp_path: Path, start: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {}
    for every in (1, 10):
        monkeypatch.setattr("stretto.learning.trainer.FLIPS_EVERY", every)
        trainer = role(tmp_path / str(every), start)
        reports = [trainer.step(refs_of(step, tmp_path), step) for step in range(2)]
        made[every] = weights(trainer), untimed(reports[1])
    assert 0 < made[1][1].pop("routes/flips") < 0.5
    assert same(made[1][0], made[10][0])
    assert made[1][1] == made[10][1]


def test_steps_are_numbered_and_taken_in_order_of_ordinals(tmp_path: Path, start: Path) -> None:
    forth, back = (role(tmp_path / name, start) for name in ("forth", "back"))
    refs = refs_of(0, tmp_path)
    forth.step(refs, 0)
    back.step(refs[::-1], 0)
    assert same(weights(forth), weights(back))
    with pytest.raises(AssertionError, match="step 0 was asked for, 1 is next"):
        forth.step(refs, 0)


DECOUPLED: dict[str, Any] = {"loss__preset": "decoupled", "train__minibatches": 2}
FIELDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "preset": ({}, {"loss__preset": "icepop"}),
    "advantage": ({}, {"loss__advantage": "rloo"}),
    "policy": ({"loss__clip_low": 0.2, "loss__clip_high": 0.2}, {"loss__policy": "ppo"}),
    "clip_low": ({"loss__policy": "gspo"}, {"loss__clip_low": 0.3}),
    "clip_high": ({}, {"loss__clip_high": 0.2}),
    "normaliser": ({}, {"loss__normaliser": "sequence"}),
    "proximal": ({"train__minibatches": 2}, {"loss__proximal": "recompute"}),
    "correction": (DECOUPLED, {"loss__correction": "none"}),
    "tis_cap": (DECOUPLED | {"loss__correction": "tis"}, {"loss__tis_cap": 1.1}),
    "icepop_range": (DECOUPLED, {"loss__icepop_range": (0.9, 1.1)}),
    "kl_weight": ({}, {"loss__kl_weight": 0.5}),
    "overlong_share": ({}, {"loss__overlong_share": 0.5}),
    "overlong_filter": ({}, {"loss__overlong_filter": True}),
}
"""Of the loss: a run in which it acts, and another value of it. What it does not act in, the recipe refuses."""
BOUNDED = {
    f"{policy} {bound}": ({"loss__policy": policy}, {f"loss__clip_{bound}": 0.1})
    for policy in ("ppo", "gspo", "cispo", "icepop")
    for bound in ("low", "high")
}


@cache
def sampled(seed: int) -> list[Group]:
    """The first sample of each group is truncated."""
    made = groups(network(), seed=seed, noise=0.5)
    cut = [replace(each.trajectories[0], finish_reason="length") for each in made]
    return [replace(each, trajectories=(first, *each.trajectories[1:])) for each, first in zip(made, cut, strict=True)]


def test_every_setting_of_the_loss_is_asked() -> None:
    assert {*FIELDS, "drop_uniform"} == set(LossConfig.model_fields), "that one chooses groups: test_plain"


@pytest.mark.parametrize("case", [*FIELDS, *BOUNDED])
def test_every_setting_of_the_loss_acts(tmp_path: Path, start: Path, case: str) -> None:
    """In a run with stale samples: other weights after a second step, the first that a KL to the start acts in."""
    common, change = (FIELDS | BOUNDED)[case]
    found = []
    for name, changes in (("one", common), ("other", common | change)):
        trainer = role(tmp_path / name, start, **changes)
        for step in range(2):
            trainer.step(stored(tmp_path / f"{name}-{step}", sampled(step)), step)
        found.append(weights(trainer))
    assert not same(*found)


def test_several_updates_a_step_move_out_of_the_trust_region(tmp_path: Path, start: Path) -> None:
    trainer = role(tmp_path, start, train__minibatches=2, loss__preset="decoupled", loss__clip_low=0.01)
    report = trainer.step(refs_of(0, tmp_path), 0)
    assert report.step == 1 and report.scalars["policy/ratio_max"] > 1.0 and report.scalars["policy/clip_fraction"] > 0


@pytest.mark.parametrize(
    "change",
    [
        {},
        pytest.param({"replay": "r2", "train__minibatches": 2}, marks=pytest.mark.slow),
        pytest.param({"loss__preset": "decoupled", "train__minibatches": 2}, marks=pytest.mark.slow),
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
    assert same(weights(again), weights(straight))


def test_a_resume_from_another_start_is_refused(tmp_path: Path, start: Path) -> None:
    trainer = role(tmp_path / "run", start)
    trainer.step(refs_of(0, tmp_path), 0)
    trainer.save({})
    with pytest.raises(UserError, match="--model: not the checkpoint that"):
        role(tmp_path / "run", checkpoint(tmp_path / "other", seed=1)).resume()
    assert role(tmp_path / "run", start, runtime__kind="ray", failures__lease_s=5.0).resume() == {}


def test_a_non_finite_step_stops_and_changes_nothing(tmp_path: Path, start: Path) -> None:
    trainer = role(tmp_path / "run", start)
    trainer.step(refs_of(0, tmp_path), 0)
    before = weights(trainer)
    made = groups(network(), seed=1)
    sample = made[0].trajectories[0]
    poisoned = replace(sample.segments[1], logprobs=np.full_like(sample.segments[1].logprobs, np.nan))
    sample = replace(sample, segments=(sample.segments[0], poisoned, *sample.segments[2:]))
    made[0] = replace(made[0], trajectories=(sample, *made[0].trajectories[1:]))
    with pytest.raises(NonFiniteError, match="the gradient is not finite") as caught:
        trainer.step(stored(tmp_path / "poisoned", made), 1)
    assert "\n" not in str(caught.value)
    assert trainer.version == 1 and same(before, weights(trainer))


def test_weights_that_say_nothing_finite_are_not_handed_on(tmp_path: Path, start: Path) -> None:
    """Though loss, gradient and weights are all finite."""
    trainer = role(tmp_path / "run", start, optim__lr=1e38)
    with pytest.raises(
        NonFiniteError, match=r"^step 1: the output of the new weights is not finite; lower optim"
    ) as told:
        trainer.step(refs_of(0, tmp_path), 0)
    assert told.value.exit_code == 3 and trainer.version == 0


def test_how_far_it_is_from_its_start(tmp_path: Path, start: Path) -> None:
    """KL to the start over the whole vocabulary, of the tokens that the policy wrote, however they lie in rows."""
    trainer, made = role(tmp_path / "run", start, optim__lr=1e-2), groups(network())
    assert trainer.moved(made) == 0.0
    trainer.step(stored(tmp_path / "groups", made), 0)
    models, kls = (trainer._model, read_checkpoint(start).model), []
    for each in unroll(made):
        for sample in each:
            ids = torch.from_numpy(sample.tokens[:-1]).long()[None]
            own_SV, start_SV = (model.logits(ids, model.config.full())[0].log_softmax(-1) for model in models)
            kls.append((own_SV.exp() * (own_SV - start_SV)).sum(-1)[torch.from_numpy(sample.mask_S)])
    expected = torch.cat(kls).mean().item()
    assert expected > 1e-3 and trainer.moved(made) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(("measured", "shown"), [(-3e-6, 0.0), (math.nan, math.nan)])
def test_a_kl_below_zero_by_rounding_is_zero(
    tmp_path: Path, start: Path, monkeypatch: pytest.MonkeyPatch, measured: float, shown: float
) -> None:
    trainer = role(tmp_path / "run", start)
    monkeypatch.setattr("stretto.learning.trainer.taught_loss", lambda *_, **__: (torch.tensor(measured), None))
    assert trainer.moved(groups(network())) == pytest.approx(shown, abs=0.0, nan_ok=True)


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
    version = published(trainer)
    assert version.number == 1
    assert Path(version.location).parent == tmp_path / "run" / "weights"
    state = fetch(version)
    assert {state[f"blocks.1.{name}"].dtype for name in ("attention.qkv.weight", "mlp.down")} == {dtype}
    others = ("embedding.weight", "norm.weight", "blocks.1.mlp.gate", "blocks.1.mlp.bias_WE")
    assert {state[name].dtype for name in others} == {torch.float32}
    for step in range(1, 6):
        trainer.step(refs_of(step, tmp_path), step)
        published(trainer)
    assert len(list((tmp_path / "run" / "weights").iterdir())) == 4


def test_the_result_is_a_checkpoint_with_its_cost(tmp_path: Path, start: Path) -> None:
    trainer = role(tmp_path / "run", start)
    report = trainer.step(refs_of(0, tmp_path), 0)
    trainer.write(tmp_path / "result")
    result = read_checkpoint(tmp_path / "result")
    assert same(dict(result.model.state_dict()), weights(trainer))
    assert result.lineage is not None and result.lineage.stage == "rl"
    assert result.lineage.receipt.tokens == report.num_tokens and result.lineage.receipt.flops > 0
    assert result.lineage.config["loss"]["preset"] == "tis"


def test_learning_makes_the_rewarded_more_likely(tmp_path: Path, start: Path) -> None:
    """The sign of everything: the same groups again and again, naive PPO with a wide region."""
    trainer = role(tmp_path / "run", start, optim__lr=3e-3, loss__clip_high=10.0)
    made = groups(network())
    for step in range(6):
        trainer.step(stored(tmp_path / "groups", made), step)
    before, after = network(), network()
    after.load_state_dict(weights(trainer))
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
    """Sample 0 is of this version; sample 1 began under the one before and has ended under this one."""
    behaviour = np.full(5, -1.0)
    delta = np.array([0.1, -0.1, 0.5, 0.0, 0.3])
    found = mismatch(behaviour + delta, behaviour, np.array([0, 0, 1, 1, 0]), np.array([0, 0, 1, 1, 1]))
    k3 = np.expm1(delta) - delta
    assert found["mismatch/same_share"] == 0.4
    assert found["mismatch/same_k1_mean"] == pytest.approx(0.0)
    assert found["mismatch/same_k2_mean"] == pytest.approx(0.005)
    assert found["mismatch/same_k3_mean"] == pytest.approx(k3[:2].mean())
    assert found["mismatch/stale_k1_mean"] == pytest.approx(-0.25)
    assert found["mismatch/stale_k3_max"] == pytest.approx(k3[2])
    assert found["mismatch/mixed_k3_mean"] == pytest.approx(k3[4])
    ratio = np.exp(delta)
    assert found["policy/ess"] == pytest.approx(ratio.sum() ** 2 / (5 * (ratio**2).sum()))
    assert found["policy/chi2"] == pytest.approx((ratio**2).mean() - 1)


CENTRED = LossConfig(policy="ppo", proximal="recompute", correction="tis")
"""Decoupled: its first update stands at the centre, which is what it is asked about here."""
SAME = 4e-6
"""Relative difference that another order of summation may make: a few dozen fp32 roundings of 6e-8."""


def passes(
    made: Sequence[Group],
    loss: LossConfig,
    seq_len: int = 48,
    rows: int = 2,
    replay: str = "r3",
    arithmetic: Arithmetic = PLAIN,
) -> list[Pass]:
    samples = unroll(made, loss.overlong_share)
    placed = [place(batch, join("cpu"), arithmetic, replays=replay == "r3") for batch in pack(samples, seq_len, rows)]
    return given_credit(placed, samples, loss)


def given_credit(placed: list[Pass], samples: list[list[Streams]], loss: LossConfig) -> list[Pass]:
    credits = give_credit(samples, loss.advantage, loss.normaliser, 18)
    for each in placed:
        give_pass_credit(each, credits, join("cpu"))
    return placed


def gradient(
    model: Transformer,
    made: Sequence[Group],
    loss: LossConfig,
    replay: str = "r3",
    temperature: float = 1.0,
    **how: Any,
) -> tuple[dict[str, Tensor], StepResult, list[Pass]]:
    flat = passes(made, loss, replay=replay, **how)
    for each in flat:
        recompute(model, each, temperature, replay)
        if loss.kl_weight:
            each.scores["reference"] = score(network(7), each, temperature)
    catch = Catch(model)
    batches = [micro_batch(each, loss, temperature, model.config.full()) for each in flat]
    result = optimisation_step(
        model, [catch], batches, join("cpu"), clip_norm=1e9, balance_rate=0.0, dtype=torch.float32
    )
    return catch.caught, result, flat


@pytest.mark.parametrize(
    "loss",
    [
        *(LossConfig(preset=preset) for preset in PRESETS),
        LossConfig(normaliser="sequence", advantage="rloo", policy="icepop"),
        LossConfig(normaliser="constant", advantage="dr_grpo", kl_weight=0.1),
        LossConfig(policy="gspo", normaliser="sequence", clip_low=1e-3, clip_high=1e-3),
    ],
    ids=[*PRESETS, "rloo", "kl", "wide gspo"],
)
def test_the_normaliser_is_global(loss: LossConfig) -> None:
    """Micro-batches of any size, and any packing, are one and the same gradient."""
    model = network()
    made = groups(model, noise=0.3)
    whole, result, flat = gradient(model, made, loss, seq_len=48, rows=64)
    assert len(flat) == 1 and len(flat[0].batch.tokens_BT) >= 4 and result.grad_norm > 1e-4
    for seq_len, rows in [(48, 1), (48, 2), (30, 3), (200, 1)]:
        split, other, parts = gradient(model, made, loss, seq_len=seq_len, rows=rows)
        assert len(parts) > 1 or seq_len > 48
        assert distance(whole, split) <= SAME, (seq_len, rows)
        assert other.nll == pytest.approx(result.nll, rel=SAME) and other.num_tokens == result.num_tokens


@pytest.mark.parametrize("replay", ["off", "r2", "r3"])
def test_a_shared_prompt_is_the_gradient_of_its_copies(replay: str) -> None:
    """Also where a sample shares a part of it only."""
    model, loss = network(), CENTRED
    made = groups(None, num=3, rewards=(1.0, 0.0, 0.0, 0.5, 1.0, 0.0))
    shared, result, flat = gradient(model, made, loss, replay=replay, seq_len=200)
    samples = unroll(made)
    batches = pack([[one] for each in samples for one in each], 200, 2)
    assert sum(each.batch.num_inputs for each in flat) < 0.9 * sum(each.num_inputs for each in batches)
    placed = [place(batch, join("cpu"), PLAIN, replays=replay == "r3") for batch in batches]
    copies = given_credit(placed, samples, loss)
    for each in copies:
        recompute(model, each, 1.0, replay)
    catch = Catch(model)
    whole = [micro_batch(each, loss, 1.0, model.config.full()) for each in copies]
    other = optimisation_step(model, [catch], whole, join("cpu"), clip_norm=1e9, balance_rate=0.0, dtype=torch.float32)
    assert distance(shared, catch.caught) <= SAME and other.nll == pytest.approx(result.nll, rel=SAME)


def test_shared_prompts_change_no_bit_of_exact_log_probs() -> None:
    model, exact = network(), Arithmetic("fp32", batch_invariant=True)
    made = groups(None, num=2)
    whole = unroll(made)
    alone = [[one] for each in whole for one in each]
    found = []
    for batches in (pack(whole, 200, 2), pack(alone, 200, 2)):
        by_sample: dict[int, list[float]] = {}
        for batch in batches:
            placed = place(batch, join("cpu"), exact, replays=True)
            logp_BT = score(model, placed, 1.0, placed.ctx.routing).numpy()
            for number in range(8):
                at = (batch.samples_BT == number) & (batch.targets_BT >= 0)
                by_sample.setdefault(number, []).extend(logp_BT[at].tolist())
        found.append(by_sample)
    assert found[0] == found[1] and all(found[0].values())


def test_a_normaliser_of_each_micro_batch_would_be_another_gradient() -> None:
    """What the test above could not see if micro-batches happened to be alike."""
    model = network()
    made = groups(model, noise=0.3)
    whole, _, _ = gradient(model, made, LossConfig(), rows=64)
    halves = [gradient(model, half, LossConfig())[0] for half in (made[:1], made[1:])]
    mean = {name: (halves[0][name] + halves[1][name]) / 2 for name in whole}
    assert distance(whole, mean) > 1e-2


@pytest.mark.parametrize("replay", ["off", "r2", "r3"])
def test_the_update_sees_what_the_recomputation_saw(replay: str) -> None:
    """To the bit: with equal routes both passes are one network, so every ratio is exactly one."""
    model = network()
    made = groups(None)
    _, result, flat = gradient(model, made, CENTRED, replay=replay, rows=3)
    for each, streams in zip(flat, result.streams_N, strict=True):
        kept_BT = each.mine["targets_BT"] >= 0
        assert torch.equal(streams["logp"].view_as(kept_BT.float()), each.scores["policy"])
        assert (streams["ratio"].view_as(kept_BT)[kept_BT] == 1.0).all() and not streams["clipped"].any()
        assert not streams["logp"].view_as(kept_BT)[~kept_BT].any()


def test_replay_is_of_the_engines_routes_in_r3_only() -> None:
    model = network()
    made = groups(None)  # recorded routes are random
    scored = {}
    for replay in ("off", "r2", "r3"):
        _, _, flat = gradient(model, made, LossConfig(), replay=replay)
        scored[replay] = flat
        assert sum(each.num_flips for each in flat) > 0.5 * sum(each.num_recorded for each in flat) > 0
    for off, r2, r3 in zip(*scored.values(), strict=True):
        assert torch.equal(off.scores["policy"], r2.scores["policy"])
        assert not torch.equal(off.scores["policy"], r3.scores["policy"])
        assert off.ctx.routing is None and isinstance(r2.ctx.routing, Replay)
        assert isinstance(r3.ctx.routing, Replay) and r3.ctx.routing.routes_BTLK is r3.mine["routes_BTLK"]


def test_recorded_routes_give_the_recorded_log_probs_whatever_the_router_would_do_now() -> None:
    """The engine's routes follow the permutation of the tokens: replayed, they undo a changed router, and only they do."""
    model = network()
    made = groups(model)
    with torch.no_grad():  # the selection changes, the gates do not: what a rounding near a tie does, but everywhere
        for layer in (block.mlp for block in model.blocks if isinstance(block.mlp, MoeLayer)):
            layer.bias_WE[0].copy_(torch.randn(8, generator=torch.Generator().manual_seed(5)))
    for replay, closest in (("r3", 1e-5), ("off", None)):
        for each in passes(made, LossConfig(), replay=replay):
            recompute(model, each, 1.0, replay)
            gap = (each.scores["policy"] - each.mine["behaviour_BT"]).abs().max()
            assert gap < closest if closest else gap > 1e-2
            assert each.num_flips > 0.2 * each.num_recorded


def test_gradients_reach_the_router_through_replayed_routes() -> None:
    model = network()
    caught, _, _ = gradient(model, groups(None), LossConfig(clip_high=1e9))
    gates = [grad for name, grad in caught.items() if name.endswith("mlp.gate")]
    assert len(gates) == 2 and all(grad.norm() > 1e-5 for grad in gates)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.4])
def test_log_probs_are_those_of_the_temperature_that_sampled(temperature: float) -> None:
    model = network()
    made = groups(model, temperature=temperature)
    for each in passes(made, LossConfig()):
        at_it = score(model, each, temperature, each.ctx.routing)
        beside = score(model, each, temperature * 1.1, each.ctx.routing)
        assert torch.allclose(at_it, each.mine["behaviour_BT"], atol=2e-5)
        assert (beside - each.mine["behaviour_BT"]).abs().max() > 1e-2


def test_decoupled_ppo_at_age_zero_is_ppo() -> None:
    """Tokens of these very weights, by this very arithmetic: the trust region's centre is what sampled them."""
    model = network()
    made = groups(model)
    decoupled, _, _ = gradient(model, made, CENTRED)
    plain, _, _ = gradient(model, made, LossConfig(policy="ppo"))
    assert distance(decoupled, plain) < 1e-4, (
        "of batched against single rows: the log-probabilities differ by roundings"
    )
    stale = groups(model, noise=0.5)
    assert distance(gradient(model, stale, CENTRED)[0], gradient(model, stale, LossConfig(policy="ppo"))[0]) > 1e-2


def test_tokens_that_nobody_sampled_take_no_part() -> None:
    """Log-probabilities and rewards sit on sampled tokens; another prompt's recorded values change nothing."""
    model = network()
    made = groups(model)
    prompts = [
        replace(
            each,
            trajectories=tuple(
                replace(
                    one,
                    segments=tuple(
                        part if part.is_sampled else replace(part, logprobs=part.logprobs - 5.0)
                        for part in one.segments
                    ),
                )
                for one in each.trajectories
            ),
        )
        for each in made
    ]
    (one, result, _), (other, _, _) = (gradient(model, some, LossConfig()) for some in (made, prompts))
    assert all(torch.equal(grad, other[name]) for name, grad in one.items())
    assert result.num_tokens == sum(sample.num_sampled for each in made for sample in each.trajectories)


def test_batch_invariant_arithmetic_packs_to_the_bit() -> None:
    model = network()
    made = groups(model)
    exact = Arithmetic("fp32", batch_invariant=True)
    by_sample: list[dict[int, list[float]]] = []
    for seq_len, rows in [(48, 2), (90, 1)]:
        found: dict[int, list[float]] = {}
        for each in passes(made, LossConfig(), seq_len, rows, arithmetic=exact):
            logp_BT = score(model, each, 0.8, each.ctx.routing)
            for sample in each.mine["samples_BT"].unique().tolist():
                found[sample] = logp_BT[each.mine["samples_BT"] == sample].tolist()
        by_sample.append({sample: values for sample, values in found.items() if sample >= 0})
    assert by_sample[0] == by_sample[1]


DISTILLED = """
import numpy as np

def distilled(groups):
    return [[np.clip(one.scores["maths"] - one.scores["policy"], -5, 5) for one in group] for group in groups]
"""
"""Towards a teacher, by the log-probabilities of what was sampled (METHODS 8)."""


def test_an_algorithm_sees_teachers(tmp_path: Path, start: Path) -> None:
    """A teacher equal to the policy teaches nothing but roundings; another one does."""
    (tmp_path / "mine.py").write_text(DISTILLED, encoding="utf-8")
    made = groups(network())
    norms = []
    for name, seed in (("same", 0), ("other", 1)):
        teachers = {"maths": str(checkpoint(tmp_path / name, seed))}
        trainer = role(
            tmp_path / f"run-{name}", start, loss__advantage=f"{tmp_path / 'mine.py'}:distilled", teachers=teachers
        )
        report = trainer.step(stored(tmp_path / f"groups-{name}", made), 0)
        norms.append(report.scalars["optim/grad_norm"])
    assert norms[0] < 1e-5 * norms[1] and norms[1] > 0.1


def test_teachers_of_another_vocabulary_are_refused(tmp_path: Path, start: Path) -> None:
    model = build(ModelConfig(**{**SHAPE, "vocab_size": 40}), 0)
    write_checkpoint(tmp_path / "wide", model, model.config)
    with pytest.raises(UserError, match=r"^teachers\.wide: a vocabulary of 40, the policy's is 31"):
        role(
            tmp_path / "run",
            start,
            loss__advantage="stretto.learning.algorithms:advantages",
            teachers={"wide": str(tmp_path / "wide")},
        )


def test_a_dense_network_is_trained(tmp_path: Path) -> None:
    """It has no routes, and no top-k by layer."""
    shape = {**SHAPE, "dense_layers": (0, 1, 2), "num_experts": 1, "top_k": 1, "num_shared_experts": 0}
    model = build(ModelConfig(**shape, selection_bias=False), 0)
    write_checkpoint(tmp_path / "start", model, model.config)
    made = [
        replace(each, trajectories=tuple(replace(one, routes=None) for one in each.trajectories))
        for each in groups(network())
    ]
    trainer = role(tmp_path / "run", tmp_path / "start", replay="off")
    before = weights(trainer)
    report = trainer.step(stored(tmp_path / "groups", made), 0)
    assert report.num_samples == 16 and not same(before, weights(trainer))


def test_routers_that_only_rank_stay_fixed(tmp_path: Path) -> None:
    model = build(ModelConfig(**SHAPE, normalize_gates=False, routed_scaling=2.0), 0)
    write_checkpoint(tmp_path / "start", model, model.config)
    trainer = role(tmp_path / "run", tmp_path / "start", replay="off")
    before = weights(trainer)
    trainer.step(stored(tmp_path / "groups", groups(model)), 0)
    after = weights(trainer)
    still = {name for name, tensor in before.items() if torch.equal(tensor, after[name])}
    assert {name for name in before if name.endswith("mlp.gate")} <= still
    assert "blocks.1.mlp.gate_up" not in still


def test_weights_and_moments_are_in_fp32_when_the_step_computes_in_bf16(tmp_path: Path, start: Path) -> None:
    trainers = {
        name: role(tmp_path / str(name), start, precision={} if name is None else {"train": name})
        for name in (None, "fp32", "bf16")
    }
    for trainer in trainers.values():
        trainer.step(refs_of(0, tmp_path), 0)
    default, exact, rounded = (weights(trainer) for trainer in trainers.values())
    assert same(default, exact) and not same(rounded, exact), "this is a CPU"
    trainer = trainers["bf16"]
    moments = [each for optim in trainer._optimizers for kept in optim.state.values() for each in kept.values()]
    kept = [each for each in (*trainer._model.parameters(), *moments) if each.is_floating_point()]
    assert {each.dtype for each in kept} == {torch.float32}
    assert (len(moments) > 0 and trainer._recipe.precision.engines == "bf16") and rounded[
        "norm.weight"
    ].dtype == torch.float32
    trainer.write(tmp_path / "out")
    settings = read_lineage(tmp_path / "out").config
    assert settings["precision"] == {"train": "bf16", "rollout": "bf16", "batch_invariant": False}


def test_bf16_on_a_gpu_is_that_of_sft(tmp_path: Path, start: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Autocast with torch's own operators, in all passes of a step: they find the same, and what the rounded operators find within k3."""
    monkeypatch.setattr(training, "has_bf16_kernels", lambda: False)  # where a CPU's rounds less than a GPU
    reports = {}
    for is_gpu in (False, True):
        monkeypatch.setattr(matmul, "trains_in_bf16", lambda device, is_gpu=is_gpu: is_gpu)
        trainer = role(tmp_path / str(is_gpu), start, precision={"train": "bf16"}, replay="r3")
        reports[is_gpu] = trainer.step(refs_of(0, tmp_path), 0).scalars
        (update,) = trainer._plan([load_group(ref.location) for ref in refs_of(0, tmp_path)])
        for micro in update.passes:
            assert (micro.dtype, micro.ctx.operators.is_plain) == (
                (torch.bfloat16, True) if is_gpu else (torch.float32, False)
            )
    for name in ("mismatch/same_k3_mean", "optim/grad_norm"):
        assert reports[True][name] != reports[False][name]
    assert reports[True]["mismatch/same_k3_mean"] < reports[False]["mismatch/same_k3_mean"] + 1e-3
    assert reports[True]["policy/ratio_max"] == pytest.approx(reports[False]["policy/ratio_max"], rel=0.05)
    assert Arithmetic("bf16", batch_invariant=True).training(torch.device("cpu"))[1] == torch.float32
