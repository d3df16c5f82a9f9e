from __future__ import annotations

import json
import math
import re
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

import stretto
from stretto.base.config import validate
from stretto.base.track import read_metrics
from stretto.base.trajectory import Outcome
from stretto.learning.recipe import PRESETS, RewardConfig, RlRecipe, SourceConfig
from stretto.post.pipeline import PipelineRecipe
from stretto.sandbox.outcome import ToolResult
from stretto.tasks.registry import KINDS, open_source
from stretto.tasks.session import use
from stretto.tasks.task import Answer, Range, Score
from stretto.train.recipe import SftRecipe
from tests.flow.extend import EXAMPLES, PARTS, Part, run

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


def defaults(kind: type[BaseModel], path: list[str]) -> Any:
    """The default of a key of ``kind``, ``...`` if it is required. NAME in ``path`` stands for any key of a table."""
    field = kind.model_fields[path[0]]
    rest = [name for name in path[1:] if name != "NAME"]
    default = ... if field.is_required() else field.get_default(call_default_factory=True)
    if not rest:
        return default
    if isinstance(default, BaseModel) and len(rest) == 1:
        return getattr(default, rest[0])
    found: Any = field.annotation
    while not (isinstance(found, type) and issubclass(found, BaseModel)):
        found = next(each for each in get_args(found) if each not in (str, type(None)))
    return defaults(found, rest)


@pytest.mark.parametrize(
    ("page", "recipe", "elsewhere"),
    [
        ("RL.md", RlRecipe, {"optim", "rewards", "teachers", "distill"}),
        ("SFT.md", SftRecipe, set()),
        ("PIPELINE.md", PipelineRecipe, set()),
        ("DISTILL.md", RlRecipe, RlRecipe.model_fields.keys() - {"distill"}),
    ],
)
def test_the_tables_show_the_defaults(page: str, recipe: type[BaseModel], elsewhere: set[str]) -> None:
    text = GUIDE.with_name(page).read_text(encoding="utf-8")
    tables = re.findall(r"^\| key \| default \| meaning \|\n\|-.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    rows = re.findall(r"^\| `([A-Za-z0-9_.]+)` \| ([^|]*) \| [^|]+ \|$", "".join(tables), re.MULTILINE)
    assert len(rows) == sum(table.count("\n") for table in tables)
    for key, told in rows:
        value = defaults(recipe, key.split("."))
        assert told == ("required" if value is ... else "none" if value is None else json.dumps(value)), key
    shown = {key.partition(".")[0] for key, _ in rows}
    assert recipe.model_fields.keys() - shown == elsewhere, "keys that the page leaves out"


def test_the_rewards_of_the_guide_are_some() -> None:
    (table,) = (each for each in re.findall(r"```ini\n(.*?)```", TEXT, re.DOTALL) if "[rewards" in each)
    told = RewardConfig.model_validate(tomllib.loads(table)["rewards"]["writing"])
    assert told.model_fields_set == RewardConfig.model_fields.keys() - {"contrast"}  # instead of same_at
    assert (told.same_at, told.floor) == (RewardConfig(format=".").same_at, RewardConfig(format=".").floor)


def test_the_task_of_the_guide_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, partial_credit = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len(code.splitlines()) <= 25
    (tmp_path / "parity.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    source = open_source("ones", SourceConfig(kind="parity.py:Parity", args={"length": 12}))
    named: dict[str, Any] = {"Score": Score, "Outcome": Outcome}
    exec(partial_credit, named)
    problem = source.problem(3)
    wrong = next(digit for digit in "012" if digit != problem.gold)
    for text, reward, outcome in (
        (problem.gold, 1.0, Outcome.OK),
        (wrong, 0.1, Outcome.WRONG),
        ("x", 0.0, Outcome.WRONG),
    ):
        score = named["score"](source, problem, Answer(text))
        assert (score.reward, score.outcome) == (reward, outcome)
    source.validate()
    assert len(source.problem(3).messages[0]["content"].split()) == 2 + 12 + 2


@pytest.mark.parametrize("name", ["guess.py:Guess", "brief.py:Brief"])
def test_the_example_tasks_are_sound(name: str) -> None:
    args = {"operation": "reverse"} if name.startswith("brief") else {}
    source = open_source("own", SourceConfig(kind=f"{EXAMPLES / name}", args=args))
    source.validate()
    problem = source.problem(3)
    turns = [*source.demonstration(problem)]
    assert source.score(problem, Answer(turns[-1]["content"], tuple(turns))).ok
    for place in (place for place, turn in enumerate(turns) if turn["role"] == "assistant"):
        told = source.reply(problem, turns[: place + 1])
        assert told == (turns[place + 1]["content"] if place + 1 < len(turns) else None)


@pytest.fixture
def lamps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The recipe of a world in docs/WORLDS.md; the current folder has the file of the page."""
    page = GUIDE.with_name("WORLDS.md").read_text(encoding="utf-8")
    (code,), (recipe,) = (re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL) for language in ("python", "toml"))
    assert code == (EXAMPLES / "lamps.py").read_text(encoding="utf-8")
    (tmp_path / "lamps.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    return tomllib.loads(recipe)


def test_the_world_of_the_guide_is_sound(lamps: dict[str, Any]) -> None:
    (table,) = validate(RlRecipe, lamps, "docs/WORLDS.md").sources.values()
    for args in ({}, {"lamps": 1}, {"lamps": 8}):
        open_source("lamps", table.replace(args=args)).validate()
    source = open_source("lamps", table)
    problem = next(each for each in map(source.problem, range(100)) if each.payload["on"])
    session = source.open(problem)
    assert use(session.tools, "press", {"lamp": problem.payload["wanted"]}) == ToolResult("pressed")
    assert not session.score(Answer("done")).ok, "another lamp is still on"
    before = session.digest()
    assert use(session.tools, "press", {"lamp": ["a"]}).outcome is Outcome.WRONG and session.digest() == before
    for lamp in problem.payload["on"]:
        use(session.tools, "press", {"lamp": lamp})
    assert session.score(Answer("")).ok
    assert use(session.tools, "look", {}) == ToolResult(f"on: {problem.payload['wanted']}")


@pytest.mark.slow
def test_the_world_of_the_guide_is_a_whole_run(lamps: dict[str, Any]) -> None:
    settings = ["start.steps=2", "start.rows=2", "train.steps=2", "train.prompts=2", "train.eval_prompts=2"]
    found = stretto.rl(lamps, out="out", settings=settings, device="cpu")
    rows = [row for row in read_metrics(found.folder) if "reward/mean" in row]
    assert len(rows) == 2 and all(math.isfinite(row["optim/grad_norm"]) for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS, ids=[part.what for part in PARTS])
def test_the_examples_are_whole_runs(tmp_path: Path, part: Part) -> None:
    found = run(part, 2, tmp_path, lambda num, status: None)
    assert found.is_well, found


def test_every_preset_is_in_the_guide() -> None:
    assert [preset for preset in PRESETS if f"| `{preset}` |" not in TEXT] == []


def test_every_kind_is_in_the_guide() -> None:
    assert [kind for kind in KINDS if f"`{kind}`" not in TEXT] == []


def test_the_arguments_of_every_kind_are_in_the_guide() -> None:
    section = TEXT.split("### Arguments of the tasks")[1].split("\n## ")[0]
    told: dict[str, dict[str, str]] = {kind: {} for kind in KINDS}
    for kind, name, default in re.findall(r"^\| `(\w+)` \| `(\w+)` \| ([^|]+) \| ", section, re.MULTILINE):
        told[kind][name] = default
    of_files = {*Range.model_fields}
    for kind, source in KINDS.items():
        fields = source.args_kind.model_fields
        own = fields.keys() - (of_files if issubclass(source.args_kind, Range) else set())
        assert told[kind].keys() == own, kind
        for name, default in told[kind].items():
            value = ... if fields[name].is_required() else fields[name].get_default(call_default_factory=True)
            assert default == ("required" if value is ... else "none" if value is None else json.dumps(value)), (
                kind,
                name,
            )
