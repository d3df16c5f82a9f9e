from __future__ import annotations

from pathlib import Path

import pytest

from stretto.apps.rl_report import gather, is_rl_run
from stretto.base.config import read_recipe
from stretto.base.errors import UserError
from stretto.base.paths import RECIPES, write_json, write_text
from stretto.rl.log import Span, Trace
from stretto.rl.recipe import JOURNAL_FILE, RECIPE_FILE, RlRecipe


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """What a run of one step has left."""
    recipe = read_recipe(RECIPES / "rl_gym.toml", RlRecipe, ["staleness=2", "train.steps=1"])
    write_json(tmp_path / RECIPE_FILE, recipe.model_dump(mode="json"))
    write_text(tmp_path / JOURNAL_FILE, "")
    write_text(tmp_path / "metrics.jsonl", '{"step": 1, "reward/mean": 0.5, "policy/ess": null}\n')
    with Trace(tmp_path) as trace:
        trace.add(Span("agents", "group", 9.0, 10.0, 3, {"ordinal": 5, "attempt": 0}))
        trace.add(Span("trainer", "step", 10.0, 12.0, 0, {"step": 0, "ordinals": [5, 7]}))
        trace.add(Span("engine-0", "activate", 12.0, 12.5, 0, {"version": 1}))
    return tmp_path


def test_a_run_is_known_by_its_files_and_gathered_from_them(run: Path) -> None:
    assert is_rl_run(run) and not is_rl_run(run.parent)
    data = gather(run)
    assert (data.bound, data.num_steps, data.series("reward/mean"), data.has("policy/ess")) == (
        2,
        1,
        ([1], [0.5]),
        False,
    )
    group, step, activate = data.works
    assert (group.number, group.lane, group.started_s) == (5, 3, 9.0)
    assert (step.number, step.ordinals) == (1, (5, 7)), "steps count as metrics do: by the version they make"
    assert activate.number == 1
    assert "problems: backward (gym)" in data.shape
    assert '"staleness": 2' in data.recipe


def test_a_run_that_has_logged_nothing_is_refused(run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match="no such file"):
        gather(run)
