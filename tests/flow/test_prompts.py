"""The order of prompts: the same in every process, by weight, each item once an epoch, held-out ones never."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.base.errors import UserError
from stretto.flow.prompts import SUPERVISED, Prompts, SourceTables, check_sources, plan_prompts, prompts_of
from stretto.learning.recipe import RlRecipe, RlTrainConfig, SourceConfig
from stretto.optim.schedule import OptimConfig
from tests.flow.agents import tokenizer

RECIPE = RlRecipe(
    sources={"many": SourceConfig(kind="gym", weight=3.0), "few": SourceConfig(kind="math")},
    optim=OptimConfig(lr=1e-3),
    train=RlTrainConfig(steps=10, prompts=4, seq_len=128, eval_prompts=10),
)
SIZES = {"many": None, "few": 25}


def test_the_same_ordinal_is_the_same_task_in_every_process() -> None:
    one, other = plan_prompts(RECIPE, SIZES, {}), plan_prompts(RECIPE, SIZES, {})
    assert [one.task(ordinal) for ordinal in range(50)] == [other.task(ordinal) for ordinal in range(50)]
    assert len({one.task(ordinal).seed for ordinal in range(1000)}) == 1000


def test_sources_come_by_weight_and_a_finite_one_is_shuffled_anew_each_time() -> None:
    prompts = plan_prompts(RECIPE, SIZES, {})
    tasks = [prompts.task(ordinal) for ordinal in range(4000)]
    shares = Counter(task.source for task in tasks)
    assert 0.72 < shares["many"] / 4000 < 0.78
    items = [task.item for task in tasks if task.source == "few"]
    assert set(items) == set(range(20))
    endless = [task.item for task in tasks if task.source == "many"]
    assert len(set(endless)) == len(endless)


def test_held_out_problems_are_never_trained_on() -> None:
    prompts = plan_prompts(RECIPE, SIZES, {})
    held_out = [prompts.held_out(number) for number in range(10)]
    assert len({(task.source, task.item) for task in held_out}) == 10
    assert {task.group for task in held_out} == {1} and all(task.ordinal < 0 for task in held_out)
    trained = {(task.source, task.item) for task in map(prompts.task, range(4000))}
    assert not trained & {(task.source, task.item) for task in held_out}


def test_all_orders_of_a_held_out_multiple_choice_problem_are_held_out(tmp_path: Path) -> None:
    path = tmp_path / "quiz.jsonl"
    path.write_text(
        "".join(json.dumps({"question": f"{at}?", "options": ["x", "y"], "answer": "A"}) + "\n" for at in range(12))
    )
    recipe = RECIPE.replace(sources={"quiz": SourceConfig(kind="choice", args={"path": str(path)}, held_out=5)})
    recipe = recipe.replace(train=recipe.train.replace(eval_prompts=3))
    with SourceTables(recipe.sources, recipe.sandbox).opened() as sources:
        prompts = prompts_of(recipe, sources)
        asked = [divmod(prompts.held_out(number).item, 4) for number in range(5)]
        assert asked == [(7, 0), (8, 1), (9, 2), (10, 3), (11, 0)], "each held-out problem once, the orders in turn"
        trained = {
            sources["quiz"].problem(prompts.task(ordinal).item).messages[0]["content"][:2] for ordinal in range(400)
        }
    assert trained == {f"{at}?"[:2] for at in range(7)}, "an evaluation of 5 problems asks the other 5 in 4 orders"
    said: list[str] = []
    recipe = recipe.replace(train=recipe.train.replace(seq_len=1024))
    check_sources(recipe, SourceTables(recipe.sources, recipe.sandbox), tokenizer(), said.append)
    assert said == ["problems: quiz (12)"]


def test_a_source_too_small_to_hold_anything_out_is_refused() -> None:
    with pytest.raises(UserError, match=r"sources\.few: has 5 problems, and 5 are held out"):
        plan_prompts(RECIPE, {"many": None, "few": 5}, {})


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    sources=st.lists(
        st.tuples(st.floats(0.01, 10.0), st.one_of(st.none(), st.integers(1, 40))), min_size=1, max_size=5
    ),
    phase=st.sampled_from([0, SUPERVISED]),
    seed=st.integers(0, 2**40),
)
def test_an_epoch_sees_every_item_once_before_one_comes_again(
    sources: list[tuple[float, int | None]], phase: int, seed: int
) -> None:
    """Of each source by itself, whatever the mixture, and in supervised training too."""
    total = sum(weight for weight, _ in sources)
    names = tuple(map(str, range(len(sources))))
    shares, sizes = tuple(weight / total for weight, _ in sources), tuple(size for _, size in sources)
    prompts = Prompts(names, shares, sizes, (1,) * len(names), group=2, max_tokens=8, seed=seed)
    drawn: dict[str, list[int]] = {name: [] for name in names}
    for ordinal in range(phase, phase + 300):
        task = prompts.task(ordinal)
        drawn[task.source].append(task.item)
    for name, size, share in zip(names, sizes, shares, strict=True):
        assert abs(len(drawn[name]) - 300 * share) <= 64 + len(names), (
            "by weight, but for what the last deck still holds"
        )
        epoch = size or 300
        for start in range(0, len(drawn[name]), epoch):
            items = drawn[name][start : start + epoch]
            assert len(set(items)) == len(items), f"an item of {name} comes twice in an epoch of {epoch}"
            assert size is None or set(items) <= set(range(size))
    # as an agent of a resumed run asks: any ordinal, in any order
    again = Prompts(names, shares, sizes, (1,) * len(names), group=2, max_tokens=8, seed=seed)
    assert [again.task(phase + ordinal) for ordinal in (299, 7, 63, 64)] == [
        prompts.task(phase + ordinal) for ordinal in (299, 7, 63, 64)
    ]


def test_epochs_are_shuffled_each_in_its_own_way() -> None:
    prompts = Prompts(("few",), (1.0,), (20,), (1,), group=2, max_tokens=8, seed=0)
    epochs = [[prompts.task(20 * epoch + within).item for within in range(20)] for epoch in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_a_source_may_hold_out_more_than_the_run_looks_at() -> None:
    tree = RECIPE.model_dump()
    tree["sources"]["few"]["held_out"] = 20
    prompts = plan_prompts(RlRecipe.model_validate(tree), {"many": None, "few": 30}, {})
    assert prompts.sizes == (None, 10) and RECIPE.train.eval_prompts < 20
    trained = {task.item for task in map(prompts.task, range(200)) if task.source == "few"}
    assert trained == set(range(10))
