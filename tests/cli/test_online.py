"""``stretto online``: the shipped recipe on a network that can say next to nothing, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto.base.config import read_recipe
from stretto.base.paths import RECIPES
from stretto.base.track import read_metrics
from stretto.flow.prompts import SourceTables
from stretto.learning.recipe import RlRecipe
from stretto.model.checkpoint import read_checkpoint, write_checkpoint
from tests.api.conftest import Run, refused
from tests.flow.agents import MODEL, tokenizer

SMALL = [
    f"--set={setting}"
    for setting in (
        "train.steps=2", "train.prompts=2", "train.eval_prompts=2", "rollout.group=4", "rollout.max_tokens=12",
        "sources.writing.args.enough_words=8", "sources.writing.args.limit=8", "runtime.isolate=none",
        "runtime.rewards.max=1", "loss.drop_uniform=false",
    )
]  # fmt: skip


def test_the_shipped_recipe_is_sound() -> None:
    recipe = read_recipe(RECIPES / "online.toml", RlRecipe)
    with SourceTables(recipe.sources, recipe.sandbox).opened() as sources:
        for source in sources.values():
            source.validate()
    assert recipe.rewards.keys() == {"writing"} and recipe.loss.kl_weight > 0


@pytest.mark.slow
def test_the_shipped_recipe_runs_and_goes_on(stretto: Run, finished: Path, tmp_path: Path) -> None:
    told = ("online", RECIPES / "online.toml", "--out", tmp_path / "run", "--device", "cpu", *SMALL)
    done = stretto(*told, "--model", finished / "sft")
    assert done.code == 0, done.err
    limits = "a KL penalty to the start of weight 0.02 and the verifiable sources sums"
    assert f"judged sources: writing; the policy is held near its start by {limits}" in " ".join(done.out.split())
    lineage = read_checkpoint(tmp_path / "run" / "checkpoint").lineage
    assert lineage is not None and lineage.stage == "online"
    assert [parent.stage for parent in lineage.parents] == ["sft"]
    rows = [row for row in read_metrics(tmp_path / "run") if "reward/mean" in row]
    assert len(rows) == 2 and all(0 <= row["reward/part/diversity"] <= 1 for row in rows)
    assert all(row["policy/kl_reference"] >= 0 for row in rows)
    assert stretto(*told, "--resume").code == 0
    refused(stretto(*told, "--resume", "--set", "rewards.writing.floor=0.5"), "rewards.writing.floor: was 0.1")


@pytest.mark.slow
def test_the_start_may_teach_what_can_be_verified(stretto: Run, finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    told = ("online", RECIPES / "online.toml", "--out", run, "--device", "cpu", *SMALL, "--self-teacher")
    told = (*told, "--set", "sources.sums.weight=6")  # in a few groups there is to be one
    done = stretto(*told, "--model", finished / "sft")
    assert done.code == 0, done.err
    assert "the teachers start" in " ".join(done.out.split())
    rows = [row for row in read_metrics(run) if "reward/mean" in row]
    assert "distill/kl/sums" in set().union(*rows) and "distill/kl/writing" not in set().union(*rows)
    assert stretto(*told, "--resume").code == 0  # the same start, found by itself


def test_what_is_no_recipe_of_this_stage(stretto: Run, tiny: Path, tmp_path: Path) -> None:
    start = tmp_path / "start"
    write_checkpoint(start, MODEL, MODEL.config)
    tokenizer().save(start)
    out = ("--out", tmp_path / "run", "--device", "cpu")
    online = RECIPES / "online.toml"
    refused(stretto("online", tiny, *out), "tiny.toml: sources: none has a judge, and there is no [rewards]")
    refused(stretto("online", online, *out), "--model: missing")
    refused(stretto("online", online, *out, "--self-teacher", "--set", "train.steps=1"), "--model: missing")
    only = (
        "--model",
        start,
        "--set",
        "sources.sums.kind=judged",
        "--set",
        "sources.sums.args={judge='scripted'}",
    )
    refused(
        stretto("online", online, *out, *only, "--self-teacher"), "--self-teacher: needs --model, a verifiable source"
    )
    warm = ("--model", start, "--self-teacher", "--set", "rollout.temperature=0.8")
    refused(stretto("online", online, *out, *warm), "online.toml: rollout.temperature 0.8: distillation compares")
    endpoint = "sources.writing.args.judge={url='http://127.0.0.1:9/v1', model='none', retries=0}"
    dead = ("--model", start, "--set", endpoint)
    refused(
        stretto("online", online, *out, *dead), "sources.writing: item 0: score() raised JudgeFailed", "ConnectError"
    )
    slow = ("--set", "sources.writing.args.judge={url='http://127.0.0.1:9/v1', model='none', verdict_s=90}")
    refused(
        stretto("online", online, *out, *dead, *slow), "sources.writing: a verdict may take 90 s", "deadline_s is 60"
    )
    assert not (tmp_path / "run").exists()
