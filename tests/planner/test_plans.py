"""Plans of whole recipes: the sweep, what fits, and layouts that cannot be divided."""

from __future__ import annotations

import json
import random
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

import stretto
from stretto.base.config import read_recipe
from stretto.base.errors import UserError
from stretto.base.paths import write_json
from stretto.learning.recipe import RlRecipe
from stretto.model.checkpoint import write_checkpoint
from stretto.model.counts import count
from stretto.model.families import default_family, from_hf, to_hf
from stretto.model.spec import ModelConfig
from stretto.model.transformer import build
from stretto.planner.fit import fitted, peak
from stretto.planner.hardware import HARDWARE, parse_cluster
from stretto.planner.memory import Layout
from stretto.planner.plan import Plan
from stretto.planner.rl import Workload, _lognormal, _mean_before_cut
from stretto.planner.speed import exchange_s, gather_s, step_time
from stretto.train.recipe import Recipe

RECIPE = read_recipe("small", Recipe)


def test_the_sweep_is_at_least_as_fast_as_the_own_layout() -> None:
    own = stretto.plan("small", "4xH100")
    swept = stretto.plan("small", "4xH100", sweep=True)
    assert len(own.predictions) == 1 and swept.num_tried > 10
    assert swept.best.step_s <= own.best.step_s
    assert [each.step_s for each in swept.predictions] == sorted(each.step_s for each in swept.predictions)


@pytest.mark.parametrize("elastic", ["joint=true", "joint=false", "sampler='off'"])
def test_a_plan_of_smaller_sizes_is_an_upper_bound(elastic: str) -> None:
    notes = stretto.plan("small", "1xH100", settings=[f"elastic.{elastic}"]).notes
    assert any("an upper bound of their time" in note for note in notes) == (elastic != "sampler='off'")


def test_the_sweep_tries_the_own_layout_where_it_computes_padding() -> None:
    """6 accelerators do not divide 100 rows, and neither do 3."""
    rows = ["train.rows=100", "train.micro_batches=1"]
    own, swept = (stretto.plan("small", "6xH100", sweep=sweep, settings=rows) for sweep in (False, True))
    assert (swept.best, swept.num_tried) == (own.best, 1)
    assert own.notes == swept.notes and any("padding" in note for note in own.notes)


def test_a_sweep_names_padding_only_where_it_shows_a_layout_that_computes_it() -> None:
    own, swept = (stretto.plan("small", "16xH100", sweep=sweep) for sweep in (False, True))
    assert own.best.layout not in [each.layout for each in swept.predictions]
    assert any("padding" in note for note in own.notes) and not any("padding" in note for note in swept.notes)


def test_a_layout_of_a_sweep_is_planned_as_if_the_recipe_named_it() -> None:
    joint = ["elastic.joint=true"]
    swept = stretto.plan("small", "8xH100", sweep=True, settings=joint)
    recomputed = next(each for each in swept.predictions if each.layout.recompute and each.layout.ranks == 8)
    rows = [f"train.micro_batches={recomputed.layout.micro_batches}", f"train.ep={recomputed.layout.ep}"]
    own = stretto.plan("small", "8xH100", settings=[*joint, *rows, "train.recompute=true"]).best
    assert (own.layout, own.step_s) == (recomputed.layout, recomputed.step_s)


def test_the_copy_for_snapshots_is_counted_where_it_lies() -> None:
    written = {
        writes: stretto.plan("small", "2xcpu", settings=[f"train.snapshot_writes={writes}"]).best
        for writes in ("background", "blocking")
    }
    state = written["blocking"].memory.weights + written["blocking"].memory.optimiser
    assert written["background"].peak - written["blocking"].peak == state > 0
    on_gpu = stretto.plan("small", "2xH100")
    assert on_gpu.best.memory.snapshot == 0 and any("host's memory" in note for note in on_gpu.notes)


def test_a_plan_computes_in_the_data_type_of_the_run() -> None:
    settings = ["optim.name=adamw", "optim.master=split", "optim.moments=bf16"]
    assert stretto.plan("small", "1xcpu", settings=settings).dtype == "bfloat16"
    assert stretto.plan("small", "1xcpu").dtype == "float32"
    assert stretto.plan("small", "1xcpu", settings=["train.dtype=bfloat16"]).dtype == "bfloat16"


def test_pretraining_is_planned_with_the_states_that_fit_into_its_memory() -> None:
    wide = [
        "model.hidden_size=2048", "model.num_experts=64", "model.expert_intermediate_size=1024", "model.num_layers=16",
        "optim.name=adamw", "train.recompute=true", "train.micro_batches=1", "train.memory=auto",
    ]  # fmt: skip
    found = stretto.plan("small", "1xH100", settings=wide)
    own = read_recipe("small", Recipe, wide)
    fitting, line = fitted(own, own.network(), HARDWARE["H100"].usable, on_gpu=True)
    assert fitting.optim.moments == "bf16" and line in found.notes
    assert found.best.fits and found.best.peak == peak(fitting, own.network(), on_gpu=True).total


@pytest.mark.parametrize(
    ("gpus", "memory", "sweep", "words"),
    [
        ("1xcpu", "0.05", False, "train.memory: int8 moments.* need"),
        ("2xH100", "auto", False, "gpus 2xH100: train.memory"),
        ("1xH100", "auto", True, "sweep=True: train.memory"),
    ],
)
def test_memory_that_a_run_would_refuse_is_refused(gpus: str, memory: str, sweep: bool, words: str) -> None:
    settings = ["optim.name=adamw", "train.micro_batches=1", f"train.memory={memory}"]
    with pytest.raises(UserError, match=words):
        stretto.plan("small", gpus, sweep=sweep, settings=settings)


def test_costs_are_of_all_accelerators() -> None:
    found = stretto.plan("small", "4xH100", price=2.0)
    hours = RECIPE.train.steps * found.best.step_s / 3600
    assert found.best.gpu_hours == pytest.approx(4 * hours)
    assert found.best.dollars == pytest.approx(8 * hours)


def test_a_network_too_large_does_not_fit_and_says_how_much_it_lacks() -> None:
    found = stretto.plan("small", "1xL40S", settings=["model.num_experts=2048", "model.expert_intermediate_size=4096"])
    assert not found.best.fits
    assert any("No layout fits" in note for note in found.notes)


@pytest.mark.parametrize(
    ("gpus", "settings", "words"),
    [
        ("4xH100", ["train.ep=8"], "ep 8 does not divide 4 ranks"),
        ("6xH100", ["train.rows=24", "train.ep=2"], "copies cannot split"),
    ],
)
def test_a_layout_that_cannot_be_divided_is_refused(gpus: str, settings: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        stretto.plan("small", gpus, settings=settings)


LARGE_STEPS = ["train.rows=4096", "train.micro_batches=1"]
"""Settings under which computing takes longer than launching kernels."""


def test_nothing_is_called_measured_that_was_not() -> None:
    assert stretto.plan("small", "1xH100", settings=LARGE_STEPS).is_measured
    for gpus in ("1xB200", "2xH100", "1xMI300X"):
        assert not stretto.plan("small", gpus, settings=LARGE_STEPS).is_measured


def test_a_step_as_long_as_its_launches_is_predicted() -> None:
    found = stretto.plan("small", "1xH100")
    assert found.best.limit == "kernel launches"
    assert not found.is_measured and found.sources["launches of a training step"] == ""
    assert "launches of a training step" not in stretto.plan("small", "1xH100", settings=LARGE_STEPS).sources


def test_rl_names_the_part_that_limits() -> None:
    def limit(**workload: Any) -> str:
        found = stretto.plan("rl_gym", "4xH100", workload=Workload(**workload))
        json.dumps(found.tree())
        return found.best.limit

    assert limit(verdict_s=30.0) == "verifiers"
    assert limit(verdict_s=30.0, verifiers=100_000) == "staleness bound"


@pytest.mark.parametrize("mean", [512.0, 400.0, 50.0])
def test_answers_that_are_cut_have_the_mean_that_was_asked_for(mean: float) -> None:
    rng, uncut = random.Random(0), _mean_before_cut(mean, 512.0)
    assert fmean(min(512.0, _lognormal(rng, uncut)) for _ in range(20_000)) == pytest.approx(mean, rel=0.01)


def test_the_precision_of_rl_follows_the_hardware_unless_the_recipe_chooses() -> None:
    found = [stretto.plan("rl_gym", cluster, settings=chosen) for cluster, chosen in (
        ("1xcpu", []), ("4xH100", []), ("4xH100", ['precision.train="fp32"']),
    )]  # fmt: skip
    assert [each.dtype for each in found] == ["float32", "bfloat16", "float32"]
    exact, rounded = found[2].best, found[1].best
    assert exact.engine_memory is not None and rounded.engine_memory is not None
    assert exact.engine_memory.weights == 2 * rounded.engine_memory.weights


def test_an_engine_in_fp8_keeps_the_values_beside_the_copy_that_decoding_reads() -> None:
    half, eighth = (
        stretto.plan("rl_gym", "4xH100", settings=[f'precision.rollout="{each}"']).best for each in ("bf16", "fp8")
    )
    assert half.engine_memory is not None and eighth.engine_memory is not None
    assert eighth.engine_memory.weights == 5 / 4 * half.engine_memory.weights


def test_the_rl_sweep_tries_splits_between_trainer_and_engines() -> None:
    found = stretto.plan("rl_gym", "8xH100", sweep=True)
    splits = {(each.layout.ranks, each.engines) for each in found.predictions}
    assert len(splits) > 1
    assert all(ranks + engines <= 8 for ranks, engines in splits)


PADDED = ModelConfig(
    vocab_size=512, hidden_size=64, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16, num_experts=8, top_k=2,
    expert_intermediate_size=32, num_shared_experts=0, tie_embeddings=True,
)  # fmt: skip
"""A network that its family, glm4_moe, pads on the disk."""


def test_a_run_is_planned_as_its_own_network(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint", build(PADDED, 0), PADDED)
    found = stretto.plan("elasticize", "1xH100", model=tmp_path, settings=["train.memory=auto"])
    assert found.params == count(PADDED, PADDED.full()).total_params


def test_elasticizing_computes_one_pass_of_the_teacher_and_three_or_four_of_the_trained_network(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint", build(PADDED, 0), PADDED)

    def compute(*settings: str) -> float:
        return stretto.plan("elasticize", "1xH100", model=tmp_path, settings=settings).best.step.compute

    forward = compute("cached_logits=64") / 3
    passes = [compute(), compute("train.recompute=true"), compute("train.recompute=true", "cached_logits=64")]
    assert [each / forward for each in passes] == pytest.approx([4, 5, 4])


def test_elasticizing_has_no_layouts_to_sweep(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="sweep=True: elasticize"):
        stretto.plan("elasticize", "1xH100", model=tmp_path, sweep=True)


def test_the_network_of_an_rl_recipe_must_be_known() -> None:
    with pytest.raises(UserError, match=r"name a run or checkpoint with `model`$"):
        stretto.plan("service_smol", "8xH100")


def test_links_within_a_node_are_faster() -> None:
    h100 = HARDWARE["H100"]
    assert gather_s(1e9, 8, 8, h100) < gather_s(1e9, 16, 8, h100) < gather_s(1e9, 16, 1, h100)
    assert exchange_s(1e9, 1, h100) == 0 < exchange_s(1e9, 8, h100) < exchange_s(1e9, 16, h100)


def test_the_measured_step_is_predicted() -> None:
    """The H100's training step from which the efficiencies come: 98,400 tokens/s in bf16, 14,684 in fp32."""
    config = RECIPE.model.replace(
        vocab_size=32768, hidden_size=2048, num_layers=8, num_heads=16, num_kv_heads=4, head_dim=128, num_experts=32, top_k=4,
        expert_intermediate_size=1024, max_positions=2048, qk_norm=True, tie_embeddings=False, widths=(), num_branches=0,
    )  # fmt: skip
    hardware = parse_cluster("1xH100").hardware
    for dtype, measured in (("bfloat16", 98_400), ("float32", 14_684)):
        step = step_time(config, Layout(1, 1, 8, 1), 2048, dtype, "adamw", hardware)  # type: ignore[arg-type]
        assert 16_384 / step.total == pytest.approx(measured, rel=0.05)


def test_ranks_that_do_not_divide_the_rows_compute_padding() -> None:
    divided, padded = stretto.plan("small", "8xH100"), stretto.plan("small", "12xH100")
    assert padded.best.layout.rows == divided.best.layout.rows == 1
    assert any("padding" in note for note in padded.notes) and not any("padding" in note for note in divided.notes)


def test_the_trainer_ranks_of_an_rl_recipe_count() -> None:
    one, four = (stretto.plan("rl_gym", "8xH100", settings=[f"trainer.ranks={num}"]).best for num in (1, 4))
    assert (one.layout.ranks, one.engines, four.layout.ranks, four.engines) == (1, 7, 4, 4)
    with pytest.raises(UserError, match="leave 0"):
        stretto.plan("rl_gym", "8xH100", settings=["trainer.ranks=8"])


def test_teachers_are_counted_by_their_own_size(tmp_path: Path) -> None:
    """Teachers of other sizes: one whose checkpoint is here, one that its family pads, one that is not here; and a server, which needs
    no memory here."""
    policy = read_recipe("rl_gym", RlRecipe)
    assert policy.start is not None and policy.start.model is not None
    config = policy.start.model
    doubled = config.replace(num_layers=2 * config.num_layers)
    tree = to_hf(doubled, default_family(doubled), "float32")
    large = from_hf(tree, "a checkpoint")[0]
    write_json(tmp_path / "config.json", tree)
    teacher = {"domains": [next(iter(policy.sources))]}
    rest = list(policy.sources)[1:]

    def planned(**teachers: dict[str, Any]) -> Plan:
        distill = {"form": "sampled", "untaught": rest, "outcome_weight": 1.0, "teachers": teachers}
        return stretto.plan(policy.replace(distill=distill) if teachers else policy, "8xH100")

    alone = planned()
    here = planned(large={**teacher, "checkpoint": str(tmp_path)})
    away = planned(away={**teacher, "checkpoint": str(tmp_path / "away")})
    served = planned(served={**teacher, "url": "http://10.0.0.1:8000"})
    write_checkpoint(tmp_path / "padded", build(PADDED, 0), PADDED)
    padded = planned(padded={**teacher, "checkpoint": str(tmp_path / "padded")})
    sizes = [found.best.memory.teacher * found.best.layout.ranks for found in (alone, served, here, away, padded)]
    assert sizes == [0, 0, *(4 * count(each, each.full()).total_params for each in (large, config, PADDED))]
    assert alone.best.step.compute == served.best.step.compute < away.best.step.compute < here.best.step.compute
    assert any("Teacher away is not here" in note for note in away.notes) and not any(
        "Teacher" in n for n in here.notes
    )
