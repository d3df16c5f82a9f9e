"""Whole small runs with rewards of groups: they repeat themselves, go on after kills, and keep a policy various."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.sync_equality import KILLED, plain_run, recipe, start_of, whole_run
from stretto.base.track import read_metrics
from stretto.flow.launch import Job
from stretto.flow.run import run_rl
from stretto.learning.recipe import RlRecipe

PICK = {"kind": f"{Path(__file__).with_name('pick.py')}:Pick", "args": {}}


def silent(num: int, status: str | None) -> None: ...


@pytest.mark.slow
def test_without_staleness_it_is_the_plain_loop_whoever_is_killed(tmp_path: Path) -> None:
    """A verifiable source with a table, and one that is judged by groups: the final weights are equal to the bit."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps({"prompt": f"{digit}:", "reference": "1 2 3 4 5 6 7 8"}) + "\n" for digit in range(20))
    )
    tables: dict[str, Any] = {
        "sources": {
            "digits": {"kind": "strings", "args": {"operation": "complement", "length": 3, "graded": True}},
            "open": {
                "kind": "judged",
                "args": {"path": str(prompts), "judge": "scripted", "by": "group", "enough_words": 8},
            },
        },
        "rewards": {
            "digits": {"diversity": "characters", "length_budget": 1.5, "length_control": True},
            "open": {"diversity": "characters", "distinct_at": 0.2},
        },
        "train": {"eval_prompts": 4},
    }
    threads, processes = (recipe(5, **tables, runtime={"isolate": isolate}) for isolate in ("none", "all"))
    start = start_of(threads, tmp_path / "sft")
    plain = plain_run(threads, tmp_path / "plain", start, silent)
    for name, chosen, kill_after in (("threads", threads, ()), (f"processes{KILLED}", processes, (1, 3))):
        found = whole_run(name, chosen, tmp_path / name, start, silent, kill_after)
        assert (found.checksum, found.rewards) == (plain.checksum, plain.rewards), name


def drawn(folder: Path, start: Path | None, kl_weight: float = 1e-6, **rewards: Any) -> tuple[Path, dict[str, float]]:
    """A run on `Pick`; its start, and means over its last steps."""
    chosen: RlRecipe = recipe(
        30,
        rollout={"group": 8, "max_tokens": 4, "chunk_tokens": 4},
        loss={"kl_weight": kl_weight, "advantage": "dr_grpo", "drop_uniform": False},
        optim={"lr": 5e-3, "decay_fraction": 0.0},
        train={"eval_every": 100, "snapshot_every": 100},
        runtime={"isolate": "none"},
    )
    tree = chosen.model_dump() | {
        "sources": {"pick": PICK},
        "rewards": {"pick": {"diversity": "characters", **rewards}},
    }
    chosen = RlRecipe.model_validate(tree)
    start = start or start_of(chosen, folder / "sft")
    run_rl(Job(chosen, folder / "run", start), silent, lambda text: None)
    rows = [row for row in read_metrics(folder / "run") if "reward/mean" in row]
    names = ("reward/part/diversity", "reward/part/quality", "policy/kl_reference", "policy/entropy")
    return start, {name: float(np.mean([row[name] for row in rows[-8:]])) for name in names}


@pytest.mark.slow
def test_rewarding_diversity_keeps_answers_various_and_the_anchor_holds(tmp_path: Path) -> None:
    """From one start, that has learnt to say any digit: a policy that is paid for quality alone says the favourite, one that
    is paid for diversity too says others, at no less quality than any digit has; one with an anchor stays nearer to the start."""
    start, alone = drawn(tmp_path / "alone", None, floor=1.0)
    _, various = drawn(tmp_path / "various", start, floor=0.1)
    _, anchored = drawn(tmp_path / "anchored", start, kl_weight=1.0, floor=1.0)
    assert alone["reward/part/diversity"] < 0.5 < various["reward/part/diversity"], (alone, various)
    assert various["reward/part/quality"] > 0.75 and alone["reward/part/quality"] > 0.9, (alone, various)
    assert anchored["policy/kl_reference"] < 0.5 * alone["policy/kl_reference"], (alone, anchored)
