from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from stretto.base.config import validate
from stretto.rl.recipe import RlRecipe, SourceConfig
from stretto.tasks.registry import KINDS, open_source

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "RL.md"
TEXT = GUIDE.read_text(encoding="utf-8")


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)
    return found


def test_the_recipe_of_the_guide_is_one() -> None:
    recipe = validate(RlRecipe, tomllib.loads(block("toml")), "docs/RL.md")
    for name, source in recipe.sources.items():
        open_source(name, source).validate(2)


def test_what_the_recipe_calls_the_default_is() -> None:
    tree = tomllib.loads(block("toml"))
    recipe = validate(RlRecipe, tree, "docs/RL.md")
    bare = validate(RlRecipe, {name: tree[name] for name in ("sources", "optim", "train")}, "docs/RL.md")
    assert recipe.loss == bare.loss
    assert (recipe.staleness, recipe.replay, recipe.precision, recipe.failures) == (
        bare.staleness, bare.replay, bare.precision, bare.failures,
    )  # fmt: skip


def test_the_task_of_the_guide_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = block("python")
    assert len(code.splitlines()) <= 25
    (tmp_path / "parity.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    source = open_source("ones", SourceConfig(kind="parity.py:Parity", args={"length": 12}))
    source.validate()
    assert len(source.problem(3).messages[0]["content"].split()) == 2 + 12 + 2


def test_every_kind_is_in_the_guide() -> None:
    assert [kind for kind in KINDS if f"`{kind}`" not in TEXT] == []
