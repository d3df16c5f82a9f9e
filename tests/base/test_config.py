"""A recipe is read whole and checked before anything is built."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Discriminator, Field, Tag, ValidationError

from stretto.base.config import Config, Problem, first_problem, read_recipe
from stretto.base.errors import UserError, nearest
from stretto.base.paths import RECIPES
from stretto.learning.recipe import RlRecipe
from stretto.train.recipe import HealRecipe
from stretto.train.recipe import Recipe as PretrainRecipe


class Inner(Config):
    steps: int = Field(default=10, gt=0)
    name: str = "books"


class Recipe(Config):
    train: Inner = Inner()
    seed: int = 0


class Aliased(Config):
    schema_: int = Field(default=0, alias="schema")


KIND = Discriminator(lambda value: value.get("kind", "inner") if isinstance(value, dict) else "inner")


class Whole(Config):
    """Fields of every form that a path can lead through."""

    either: str | list[int] | Inner = ""
    maybe: Inner | None = None
    several: list[Inner | Aliased] = Field(default_factory=list)
    by_number: dict[int, Inner] = Field(default_factory=dict)
    mode: Literal["fast", "exact"] | int = 0
    tagged: Annotated[
        Annotated[str, Tag("text")]
        | Annotated[
            list[Annotated[Annotated[Inner, Tag("inner")] | Annotated[Aliased, Tag("other")], KIND]], Tag("list")
        ],
        Discriminator(lambda value: "text" if isinstance(value, str) else "list"),
    ] = ""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text("seed = 3\n[train]\nsteps = 5\n")
    return path


@pytest.mark.parametrize(
    ("recipe", "setting", "message"),
    [
        ({}, "train.steps=1\nseed=2", r"recipe: train\.steps: must be .*'1\\nseed=2' \(from the setting .*\)"),
        ({}, "train.steps=1\n[train]", r"recipe: train\.steps: must be "),
        ({}, "a\nb", "--set a b: expected key.path=value"),
        ({}, "seed.a\nb=1", "recipe: seed: must be "),
        ({"seed": 1}, "seed.a=[1,\n2]", "--set .*: 'seed' is a value"),
        ({"a\nb": float("nan")}, "seed=1", "recipe: a b: nan is not a finite number"),
    ],
)
def test_line_breaks_in_settings_and_keys(recipe: dict[str, object], setting: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        read_recipe(recipe, Recipe, setting)
    assert "\n" not in str(caught.value)


def test_a_value_of_several_lines_is_one_value() -> None:
    assert read_recipe({}, Recipe, 'train.name="""\nbooks"""').train.name == "books"


def test_a_recipe_with_overrides(recipe: Path) -> None:
    read = read_recipe(recipe, Recipe, ["train.steps=7", "train.name=web", "seed=1"])
    assert read == Recipe(train=Inner(steps=7, name="web"), seed=1)


def test_a_mark_of_byte_order_and_line_ends_of_windows_are_no_content(tmp_path: Path) -> None:
    (tmp_path / "windows.toml").write_bytes(b"\xef\xbb\xbfseed = 3\r\n[train]\r\nsteps = 5\r\n")
    assert read_recipe(tmp_path / "windows.toml", Recipe) == Recipe(seed=3, train=Inner(steps=5))


def test_a_misspelt_table_is_named_before_the_missing_one(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("[modell]\n")
    with pytest.raises(UserError, match=r"bad\.toml: modell: unknown key \(did you mean 'model'\?\)"):
        read_recipe(tmp_path / "bad.toml", PretrainRecipe)


def test_an_override_may_open_a_table(tmp_path: Path) -> None:
    (tmp_path / "empty.toml").write_text("")
    assert read_recipe(tmp_path / "empty.toml", Recipe, ["train.steps=2"]).train.steps == 2


def test_a_recipe_that_a_run_kept_is_one(tmp_path: Path) -> None:
    kept = tmp_path / "recipe.json"
    kept.write_text(Recipe(seed=4).model_dump_json())
    assert read_recipe(kept, Recipe, ["train.steps=2"]) == Recipe(seed=4, train=Inner(steps=2))
    kept.write_text("[]")
    with pytest.raises(UserError, match="not a JSON object; name a recipe"):
        read_recipe(kept, Recipe)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.stesp=7", r"small\.toml: train\.stesp: unknown key \(did you mean 'steps'\?\)"),
        ("train.steps=0", r"small\.toml: train\.steps: .*greater than 0"),
        ("train.steps=many", r"small\.toml: train\.steps: .*valid integer"),
        ("train.steps", r"--set train\.steps: expected key\.path=value"),
        ("seed.x=1", r"--set seed\.x=1: 'seed' is a value, not a table"),
    ],
)
def test_a_bad_override_is_one_line(recipe: Path, override: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        read_recipe(recipe, Recipe, [override])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("tree", "field", "message", "is_unknown"),
    [
        ({"Maybe": 1}, "Maybe", "unknown field (did you mean 'maybe'?)", True),
        ({"": 1}, "''", "unknown field", True),
        ({"$ref": 1}, "$ref", "unknown field", True),
        ({"q\nz": 1}, r"'q\nz'", "unknown field", True),
        ({"x" * 5000: 1}, "x" * 80 + "…", "unknown field", True),
        ({"maybe": {"stesp": 1}}, "maybe.stesp", "unknown field (did you mean 'steps'?)", True),
        ({"maybe": {"steps": 0}}, "maybe.steps", "must be greater than 0, is 0", False),
        ({"either": {"web": 1}}, "either.web", "unknown field", True),
        ({"either": {"stesp": 1}}, "either.stesp", "unknown field (did you mean 'steps'?)", True),
        ({"either": {"steps": 0}}, "either.steps", "must be greater than 0, is 0", False),
        ({"either": [1, "x"]}, "either.1", "must be a valid integer, is 'x'", False),
        ({"either": 1.5}, "either", "must be a valid string, or a list, or an object, is 1.5", False),
        ({"several": [{"schema": "x"}]}, "several.0.schema", "must be a valid integer, is 'x'", False),
        ({"mode": "slow"}, "mode", "must be 'fast' or 'exact', or a valid integer, is 'slow'", False),
        ({"several": [{}, {"schem": 1, "steps": 1}]}, "several.1.schem", "unknown field", True),
        ({"by_number": {"7": {"name": 1}}}, "by_number.7.name", "must be a valid string, is 1", False),
        ({"by_number": {"x": {}}}, "by_number.x", "must be a valid integer, is 'x'", False),
        ({"tagged": [{"steps": 0}]}, "tagged.0.steps", "must be greater than 0, is 0", False),
        ({"tagged": [{"stesp": 1}]}, "tagged.0.stesp", "unknown field (did you mean 'steps'?)", True),
        ({"tagged": [{"kind": "x"}]}, "tagged.0", "its type must be one of 'inner', 'other', is 'x'", False),
        ({"tagged": 1}, "tagged", "must be a list, is 1", False),
        ([], None, "must be an object", False),
    ],
)  # fmt: skip
def test_a_problem_names_its_field(tree: object, field: str | None, message: str, is_unknown: bool) -> None:
    with pytest.raises(ValidationError) as caught:
        Whole.model_validate(tree)
    assert first_problem(caught.value, Whole) == Problem(field, message, is_unknown)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no such recipe"), (b"\xff\xfe", "cannot be read as UTF-8"), (b"a = = 1", "not valid TOML")],
)
def test_a_bad_file_is_one_line(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "bad.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=f"bad.toml: {message}") as caught:
        read_recipe(path, Recipe)
    assert "\n" not in str(caught.value)


def test_a_config_is_frozen_and_replace_validates() -> None:
    inner = Inner()
    with pytest.raises(ValidationError):
        inner.steps = 3  # type: ignore[misc]
    assert inner.replace(steps=3) == Inner(steps=3)
    with pytest.raises(ValidationError):
        inner.replace(steps=-1)


def test_nearest_says_nothing_when_nothing_is_near() -> None:
    assert nearest("stesp", ["steps", "seed"]) == " (did you mean 'steps'?)"
    assert nearest("zzz", ["steps", "seed"]) == nearest("tiny", ["writing", "small"]) == ""


@pytest.mark.parametrize("value", ["inf", "-inf", "nan"])
def test_numbers_of_a_recipe_are_finite(value: str) -> None:
    with pytest.raises(UserError, match=r"rl_gym\.toml: optim\.lr: -?(inf|nan) is not a finite number"):
        read_recipe("rl_gym", RlRecipe, [f"optim.lr={value}"])


@pytest.mark.parametrize(
    ("name", "kind", "setting", "message"),
    [
        ("rl_gym", RlRecipe, "train.steps=1_000_000_000_000", r"train\.steps: must be at most 1,000,000,000, is 1000"),
        ("small", PretrainRecipe, "train.rows=2e9", r"train\.rows: must be at most 1,000,000,000, is 2000000000"),
        ("heal", HealRecipe, "train.steps=1e24", r"train\.steps: must be a smaller number, is 1e\+24"),
    ],
)
def test_counts_of_a_recipe_are_bounded(name: str, kind: type[Config], setting: str, message: str) -> None:
    with pytest.raises(UserError, match=rf"{name}\.toml: {message}"):
        read_recipe(name, kind, [setting])


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("loss.policy='''x\ny'''", "loss.policy: must be 'ppo', 'gspo', 'cispo' or 'icepop', is 'x\\ny'"),
        ("sources={}", "sources: needs at least 1, has 0; add what is missing"),
    ],
)
def test_a_refused_setting_is_one_line(setting: str, message: str) -> None:
    with pytest.raises(UserError) as refused:
        read_recipe("rl_gym", RlRecipe, [setting])
    assert f"{message} (from the setting " in str(refused.value) and "\n" not in str(refused.value)


def test_seeds_and_bytes_are_no_counts() -> None:
    read = read_recipe("rl_gym", RlRecipe, ["train.seed=123456789012", "rollout.cache_bytes=20_000_000_000"])
    assert read.train.seed == 123456789012


@pytest.mark.parametrize("value", ["maybe", 2])
def test_a_switch_is_true_or_false(value: object) -> None:
    with pytest.raises(UserError, match=r"elastic\.joint: must be true or false, is '?(maybe|2)'? \("):
        read_recipe("small", PretrainRecipe, {"elastic.joint": value})


@pytest.mark.parametrize(("name", "kind"), [("small", PretrainRecipe), ("rl_gym", RlRecipe)])
@pytest.mark.parametrize(
    ("seed", "message"), [(2**64, "less than 18446744073709551616"), (-1, "greater than or equal to 0")]
)
def test_a_seed_has_64_bits(name: str, kind: type[Config], seed: int, message: str) -> None:
    with pytest.raises(UserError, match=rf"train\.seed: must be {message}"):
        read_recipe(name, kind, {"train.seed": seed})


@pytest.mark.parametrize("target", ["loop.toml", "gone.toml"])
def test_a_link_that_leads_nowhere_is_said_to_be_one(tmp_path: Path, target: str) -> None:
    link = tmp_path / "loop.toml"
    link.symlink_to(target)
    with pytest.raises(
        UserError, match=rf"loop\.toml: a symbolic link to {target}, which does not exist or leads back"
    ):
        read_recipe(link, RlRecipe)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        (
            "sft",
            RlRecipe,
            r"sft\.toml: a recipe of `stretto sft` with --data, not of `stretto rl`; name another recipe",
        ),
        ("rl_gym", PretrainRecipe, r"rl_gym\.toml: a recipe of `stretto rl`, not of `stretto pretrain`"),
        ("pipeline", HealRecipe, r"pipeline\.toml: a recipe of `stretto run`, not of `stretto heal`"),
    ],
)
def test_a_recipe_of_another_command_says_which(name: str, kind: type[Config], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_recipe(name, kind)
    with pytest.raises(UserError, match="recipe: sources: missing; add it"):
        read_recipe({"seed": 3}, RlRecipe)


def test_a_folder_named_like_a_shipped_recipe_does_not_hide_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("heal", "mine"):
        (tmp_path / name).mkdir()
    assert read_recipe("heal", HealRecipe) == read_recipe(RECIPES / "heal.toml", HealRecipe)
    for name in ("mine", ""):
        with pytest.raises(UserError, match="a folder, not a recipe; name a file"):
            read_recipe(name, HealRecipe)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("2026-01-01", "train.name: is a date or a time; write it as text in quotes"),
        ("[{a = 07:32:00}]", "train.name.a: is a date or a time"),
        ("9" * 5000, "--set train.name: has too many digits, or is nested too deeply"),
        ("[" * 3000, "--set train.name: has too many digits, or is nested too deeply"),
    ],
)
def test_dates_and_long_values_are_one_line(recipe: Path, text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        read_recipe(recipe, Recipe, [f"train.name={text}"])
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["seed = 2026-01-01", "seed = " + "9" * 5000, "seed = " + "[" * 3000])
def test_dates_and_long_values_in_a_file_are_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "long.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=r"long\.toml: ") as caught:
        read_recipe(path, Recipe)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300
