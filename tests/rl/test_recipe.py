from __future__ import annotations

from collections import Counter

import pytest

from stretto.base.errors import UserError
from stretto.optim.schedule import OptimConfig
from stretto.rl.recipe import RlRecipe, RlTrainConfig, SourceConfig, plan_prompts

RECIPE = RlRecipe(
    sources={"many": SourceConfig(kind="gym", weight=3.0), "few": SourceConfig(kind="math")},
    optim=OptimConfig(lr=1e-3),
    train=RlTrainConfig(steps=10, prompts=4, seq_len=128, eval_prompts=10),
)
SIZES = {"many": None, "few": 25}


def test_the_same_ordinal_is_the_same_task_in_every_process() -> None:
    one, other = plan_prompts(RECIPE, SIZES), plan_prompts(RECIPE, SIZES)
    assert [one.task(ordinal) for ordinal in range(50)] == [other.task(ordinal) for ordinal in range(50)]
    assert len({one.task(ordinal).seed for ordinal in range(1000)}) == 1000


def test_sources_come_by_weight_and_a_finite_one_is_shuffled_anew_each_time() -> None:
    prompts = plan_prompts(RECIPE, SIZES)
    tasks = [prompts.task(ordinal) for ordinal in range(4000)]
    shares = Counter(task.source for task in tasks)
    assert 0.72 < shares["many"] / 4000 < 0.78
    items = [task.item for task in tasks if task.source == "few"]
    assert set(items) == set(range(20))
    endless = [task.item for task in tasks if task.source == "many"]
    assert len(set(endless)) == len(endless)


def test_held_out_problems_are_never_trained_on() -> None:
    prompts = plan_prompts(RECIPE, SIZES)
    held_out = [prompts.held_out(number) for number in range(10)]
    assert len({(task.source, task.item) for task in held_out}) == 10
    assert {task.group for task in held_out} == {1} and all(task.ordinal < 0 for task in held_out)
    trained = {(task.source, task.item) for task in map(prompts.task, range(4000))}
    assert not trained & {(task.source, task.item) for task in held_out}


def test_a_source_too_small_to_hold_anything_out_is_refused() -> None:
    with pytest.raises(UserError, match=r"sources\.few: has 5 problems, and 5 are held out"):
        plan_prompts(RECIPE, {"many": None, "few": 5})
