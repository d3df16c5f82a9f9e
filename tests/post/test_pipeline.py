"""A pipeline is its stages' own recipes, complete before anything runs."""

from __future__ import annotations

import tomllib
from itertools import islice
from typing import Any

import pytest

from stretto.base.config import read_recipe, validate
from stretto.base.errors import UserError
from stretto.base.paths import RECIPES
from stretto.flow.prompts import SourceTables, prompts_of
from stretto.learning.recipe import RlRecipe
from stretto.post.pipeline import PipelineRecipe, Step, merged, plan
from stretto.post.sft import examples, fill_rows, learn_tokenizer
from tests.api.rl_recipes import TINY

PARTS = tomllib.loads(TINY)
START, SOURCE = PARTS.pop("start"), PARTS.pop("sources")["flip"]


def recipe(**changes: Any) -> PipelineRecipe:
    tree = {
        "domains": {"a": {"sources": {"one": SOURCE, "two": SOURCE}}, "b": {"sources": {"three": SOURCE}}},
        "common": PARTS,
        "sft": {"recipe": {"start": START}},
        "experts": {},
        "distill": {"distill": {"form": "full"}},
        "online": {"train": {"steps": 2}},
    }
    return validate(PipelineRecipe, {**tree, **changes}, "p.toml")


def named(steps: tuple[Step, ...]) -> dict[str, Step]:
    return {step.name: step for step in steps}


def test_stages_follow_each_other_and_begin_where_the_earlier_ones_ended() -> None:
    steps = plan(recipe(), "p.toml")
    assert [step.name for step in steps] == ["sft", "experts/a", "experts/b", "distill", "online", "evaluate"]
    arguments = {name: step.arguments for name, step in named(steps).items()}
    assert arguments["experts/b"] == ("rl", "{recipe}", "--model", "{sft}")
    assert arguments["distill"][-1] == "{sft}" and arguments["online"][-1] == "{distill}"
    assert arguments["evaluate"][:6] == ("compare", "{sft}", "{distill}", "{online}", "--reference", "{sft}")
    assert "two={experts/a}" in arguments["evaluate"] and "three={experts/b}" in arguments["evaluate"]


def test_experts_have_their_own_sources_and_teach_them() -> None:
    steps = named(plan(recipe(), "p.toml"))
    assert set(steps["experts/a"].recipe.sources) == {"one", "two"}  # type: ignore[union-attr]
    distilled = steps["distill"].recipe
    assert isinstance(distilled, RlRecipe) and distilled.distill is not None
    assert set(distilled.sources) == {"one", "two", "three"}
    assert distilled.distill.teacher_of() == {"one": "a", "two": "a", "three": "b"}
    assert distilled.distill.teachers["b"].checkpoint == "{experts/b}"


def test_controls_draw_what_experts_and_distillation_draw() -> None:
    steps = named(plan(recipe(controls={"mixed": {}, "cascade": {}}), "p.toml"))
    mixed, first, second = (steps[f"controls/{name}"] for name in ("mixed", "cascade/a", "cascade/b"))
    taught = sum(steps[name].num_samples for name in ("experts/a", "experts/b", "distill"))
    assert 0 <= mixed.num_samples - taught < steps["distill"].num_samples
    assert set(mixed.recipe.sources) == {"one", "two", "three"}  # type: ignore[union-attr]
    assert (first.recipe, first.arguments) == (steps["experts/a"].recipe, steps["experts/a"].arguments)
    assert second.recipe == steps["experts/b"].recipe and second.arguments[-1] == "{controls/cascade/a}"
    compared = steps["evaluate"].arguments
    assert compared[4:6] == ("{controls/mixed}", "{controls/cascade/b}")
    own = named(plan(recipe(controls={"mixed": {"train": {"steps": 3}}}), "p.toml"))
    assert own["controls/mixed"].recipe.train.steps == 3  # type: ignore[union-attr]
    assert "controls/cascade/a" not in own


def test_a_stage_says_what_it_has_of_its_own() -> None:
    a = {"sources": {"one": SOURCE}, "expert": {"optim": {"lr": 5e-4}}}
    told = recipe(domains={"a": a, "b": {"sources": {"two": SOURCE}}}, experts={"recipe": {"train": {"steps": 7}}})
    steps = named(plan(told, "p.toml"))
    a_expert, b_expert, online = (steps[name].recipe for name in ("experts/a", "experts/b", "online"))
    assert isinstance(a_expert, RlRecipe) and isinstance(b_expert, RlRecipe) and isinstance(online, RlRecipe)
    assert (a_expert.optim.lr, b_expert.optim.lr) == (5e-4, PARTS["optim"]["lr"])
    assert (a_expert.train.steps, online.train.steps) == (7, 2)
    assert a_expert.train.prompts == online.train.prompts == PARTS["train"]["prompts"]


def test_no_stage_trains_on_what_the_last_one_asks() -> None:
    held = {"kind": "strings", "held_out": 70}
    domains = {"a": {"sources": {"one": SOURCE}}, "b": {"sources": {"two": held}}}
    steps = plan(recipe(domains=domains, evaluate={"problems": 50}), "p.toml")
    for step in steps:
        assert isinstance(step.recipe, RlRecipe)
        found = {name: source.held_out for name, source in step.recipe.sources.items()}
        assert found.items() <= {"one": 50, "two": 70}.items()
    assert "--max-batch" in steps[-1].arguments


def test_without_sft_all_begin_with_the_model() -> None:
    steps = named(plan(recipe(sft=None), "p.toml"))
    assert steps["experts/a"].arguments[-1] == steps["distill"].arguments[-1] == "{model}"


def test_sft_on_the_sources_own_answers_trains_the_model_where_no_network_is_described() -> None:
    start = {key: value for key, value in START.items() if key != "model"}
    steps = named(plan(recipe(sft={"recipe": {"start": start}}), "p.toml"))
    assert steps["sft"].arguments == ("sft", "{recipe}", "--model", "{model}")
    assert named(plan(recipe(), "p.toml"))["sft"].arguments == ("sft", "{recipe}")
    assert steps["experts/a"].arguments[-1] == "{sft}"
    assert steps["evaluate"].arguments[:3] == ("compare", "{model}", "{sft}")  # what SFT gained is shown, too


def test_what_the_online_stage_has_of_its_own_is_evaluated_as_well() -> None:
    online = {"sources": {"open": SOURCE}, "rollout": {"max_tokens": 20}}
    asked = named(plan(recipe(online=online), "p.toml"))["evaluate"].recipe
    assert isinstance(asked, RlRecipe)
    assert set(asked.sources) == {"one", "two", "three", "open"} and asked.rollout.max_tokens == 20


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"experts": {"recipe": {"train": {"stpes": 3}}}}, r"p.toml: experts, a: train\.stpes: unknown key"),
        ({"online": {"loss": {"policy": "ppoo"}}}, "p.toml: online: loss.policy"),
        ({"sft": {}}, "p.toml: sft: neither data nor recipe.start"),
        ({"experts": None}, "distill: its teachers are the experts"),
        ({"experts": None, "distill": None, "controls": {}}, "controls: they draw as many samples as the experts"),
        ({"domains": {"a/b": {"sources": {"one": SOURCE}}}}, "domains.a/b: a name has letters, digits"),
        ({"distill": {"distill": {"form": "top_kk"}}}, "p.toml: distill: distill.form"),
        (
            {"domains": {"a": {"sources": {"one": SOURCE}}, "b": {"sources": {"one": SOURCE}}}},
            "domains.b.sources.one: domain 'a' has a source with this name",
        ),
    ],
)
def test_an_impossible_stage_is_refused_before_the_first_begins(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem) as told:
        plan(recipe(**changes), "p.toml")
    assert "\n" not in str(told.value)


def test_later_tables_win_key_by_key() -> None:
    assert merged({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 4}, "e": 5}) == {"a": {"b": 4, "c": 2}, "d": 3, "e": 5}


@pytest.mark.parametrize("name", ["pipeline.toml", "pipeline_smol.toml", "demo_pipeline.toml"])
def test_a_shipped_recipe_is_possible(name: str) -> None:
    path = RECIPES / name
    assert plan(read_recipe(path, PipelineRecipe), str(path))


@pytest.mark.slow
def test_the_shipped_recipe_has_room_for_its_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts and answers of its sources, in the rows and the tokens that it gives them."""
    path = RECIPES / "pipeline.toml"
    told = plan(read_recipe(path, PipelineRecipe), str(path))[0].recipe
    assert isinstance(told, RlRecipe) and told.start is not None
    monkeypatch.setattr("stretto.post.sft._TOKENIZER_PROBLEMS", 200)
    with SourceTables(dict(told.sources), told.sandbox).opened() as sources:
        prompts = prompts_of(told, sources)
        tokenizer = learn_tokenizer(sources, prompts, told.start.model.vocab_size)
        some = list(islice(examples(sources, prompts, tokenizer, told.start.noise), 600))
    assert list(fill_rows(iter(some), told.start.rows, told.train.seq_len))
    too_long = sum(each.is_learnt.sum() > told.rollout.max_tokens for each in some)
    assert too_long <= 0.02 * len(some)
