"""``stretto rl`` from a recipe to a checkpoint: what a run leaves behind, and how it goes on."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from stretto.base.config import read_recipe
from stretto.base.paths import RECIPES
from stretto.base.records import read_lineage
from stretto.base.track import read_metrics
from stretto.engine.loading import open_engine
from stretto.engine.request import EngineConfig
from stretto.flow.launch import Job
from stretto.flow.ledger import read_events
from stretto.flow.log import read_status
from stretto.flow.run import run_rl, start_of
from stretto.learning.recipe import JOURNAL_FILE, RlRecipe
from stretto.model.checkpoint import read_checkpoint
from tests.api.conftest import Run, refused
from tests.api.rl_recipes import PROMPTS, STEPS


@pytest.fixture
def again(finished: Path, tmp_path: Path) -> Path:
    """The same, to be changed."""
    shutil.copytree(finished, tmp_path / "again")
    return tmp_path / "again"


def journal(run: Path) -> list[dict[str, Any]]:
    return [{"kind": event.kind, **event.facts} for event in read_events(run / JOURNAL_FILE)]


def weights_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    return read_checkpoint(checkpoint).model.state_dict()


def test_the_checkpoint_opens_in_the_engine_and_knows_where_it_comes_from(finished: Path) -> None:
    opened = open_engine(finished, EngineConfig(cache_bytes=1 << 20, max_batch=2))
    assert opened.engine.tokenizer is not None and opened.lineage is not None
    lineage, start = opened.lineage, read_checkpoint(finished / "sft").lineage
    assert start is not None and (start.stage, lineage.stage) == ("sft", "rl")
    assert [parent.weights_hash for parent in lineage.parents] == [start.weights_hash]
    assert lineage.receipt.flops > 0 and start.receipt.flops > 0 and lineage.receipt.tokens > 0
    moved = [
        not torch.equal(each, weights_of(finished / "sft")[name])
        for name, each in weights_of(finished / "checkpoint").items()
    ]
    assert any(moved)


def test_a_run_tells_of_itself(finished: Path) -> None:
    rows = read_metrics(finished)
    assert [int(row["step"]) for row in rows if "reward/mean" in row] == [1, 2, 3, 4]
    assert [int(row["step"]) for row in rows if "eval/reward" in row] == [0, STEPS]
    assert all(row["staleness/max"] <= 1 for row in rows if "staleness/max" in row)
    status = read_status(finished)
    assert (status.state, status.step, len(status.rewards)) == ("done", STEPS, STEPS)
    events = json.loads((finished / "trace.json").read_text())["traceEvents"]
    roles = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert {"trainer", "agents", "engine-0"} <= roles
    assert sum(event["name"] == "step" for event in events) == STEPS
    assert list((finished / "tensorboard").iterdir())


def test_a_moved_run_knows_the_start_that_moved_with_it(again: Path) -> None:
    assert start_of(again) == again.resolve() / "sft"


def test_sft_without_conversations_is_on_the_sources_own_answers(
    stretto: Run, tiny: Path, finished: Path, tmp_path: Path
) -> None:
    told = ("sft", tiny, "--model", finished / "sft", "-o", tmp_path / "out", "--device", "cpu", "--steps", 2)
    refused(stretto(*told), "start.model", "leave one out")
    refused(stretto(*told, "--lora", 4), "--lora", "--data")
    refused(stretto("sft", RECIPES / "sft.toml", *told[2:]), "sft.toml", "--data")
    text, _, rest = tiny.read_text().partition("[start.model]")
    tiny.write_text(text + rest[rest.index("[start.optim]") :])
    made = stretto(*told)
    assert made.code == 0 and str(tmp_path / "out/sft") in made.out
    lineage = read_checkpoint(tmp_path / "out/sft").lineage
    assert lineage is not None and lineage.parents == (read_checkpoint(finished / "sft").lineage,)
    assert lineage.config["start"]["steps"] == 2


def test_every_group_that_was_handed_out_ended_once(finished: Path) -> None:
    lines = journal(finished)
    assert lines[0]["kind"] == "opened"
    handed = Counter(line["ordinal"] for line in lines if line["kind"] == "dispatched")
    trained = [ordinal for line in lines if line["kind"] == "trained" for ordinal in line["ordinals"]]
    others = [line["ordinal"] for line in lines if line["kind"] == "ended"]
    assert sorted(trained + others) == sorted(handed) == list(range(len(handed)))
    assert len(trained) == STEPS * PROMPTS and set(handed.values()) == {1}
    assert not (finished / "tokens").exists(), "token logs of groups that have ended"


@pytest.mark.slow
def test_a_finished_run_resumed_is_the_same_run(stretto: Run, tiny: Path, again: Path) -> None:
    before = weights_of(again / "checkpoint")
    result = stretto("rl", tiny, "--out", again, "--resume", "--device", "cpu")
    assert result.code == 0, result.err
    after = weights_of(again / "checkpoint")
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert sum(line["kind"] == "trained" for line in journal(again)) == STEPS
    assert [int(row["step"]) for row in read_metrics(again) if "reward/mean" in row] == [1, 2, 3, 4]


@pytest.mark.slow
def test_a_finished_run_goes_on_to_more_steps_and_its_lineage_says_so(stretto: Run, tiny: Path, again: Path) -> None:
    told = ("rl", tiny, "--out", again, "--resume", "--device", "cpu", "--set")
    refused(stretto(*told, "train.steps=3"), "train.steps: 3 is less than the 4 steps that are done")
    result = stretto(*told, "train.steps=6")
    assert result.code == 0, result.err
    assert f"resumes after step {STEPS} of 6" in result.out
    assert [int(row["step"]) for row in read_metrics(again) if "reward/mean" in row] == [1, 2, 3, 4, 5, 6]
    changes = read_lineage(again / "checkpoint").config["changes"]
    assert changes == [{"step": STEPS, "field": "train.steps", "before": STEPS, "after": 6}]


@pytest.mark.slow
def test_ctrl_c_ends_a_run_and_resume_goes_on_with_what_it_began_with(
    stretto: Run, tiny: Path, finished: Path, tmp_path: Path
) -> None:
    run, done = tmp_path / "run", 0
    recipe = read_recipe(tiny, RlRecipe)

    def interrupt(num: int, status: str | None) -> None:
        nonlocal done
        done += num
        if done == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run_rl(Job(recipe, run, finished / "sft"), interrupt, lambda text: None)
    assert read_status(run).state == "interrupted" and not (run / "checkpoint").exists()

    refused(stretto("rl", tiny, "--out", run, "--device", "cpu"), "run", "holds a run already", "--resume")
    changed = ("--resume", "--set", "optim.weight_decay=0.5")
    refused(stretto("rl", tiny, "--out", run, "--device", "cpu", *changed), "optim.weight_decay: was ", "is 0.5 now")
    refused(
        stretto("rl", tiny, "--out", run, "--model", finished, "--resume", "--device", "cpu"),
        "--model",
        "not the checkpoint",
    )

    result = stretto("rl", tiny, "--out", run, "--resume", "--device", "cpu")  # the start is known
    assert result.code == 0, result.err
    assert not (run / "sft").exists(), "a start of its own, though it began with another"
    assert [int(row["step"]) for row in read_metrics(run) if "reward/mean" in row] == [1, 2, 3, 4]
    by_step = {line["step"]: line["ordinals"] for line in journal(run) if line["kind"] == "trained"}
    ordinals = [ordinal for step in by_step.values() for ordinal in step]
    assert sorted(by_step) == [0, 1, 2, 3] and len(set(ordinals)) == len(ordinals) == STEPS * PROMPTS


def test_a_start_that_has_moved_is_asked_for(stretto: Run, tiny: Path, again: Path) -> None:
    (again / "start.json").write_text(json.dumps({"checkpoint": str(again / "gone")}))
    refused(stretto("rl", tiny, "--out", again, "--resume", "--device", "cpu"), "gone", "--model")
