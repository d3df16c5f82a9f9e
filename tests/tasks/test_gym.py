from __future__ import annotations

import pytest

from stretto.base.errors import UserError
from stretto.base.trajectory import Outcome
from stretto.tasks.gym import _SEED_STRIDE, GymArgs, GymSource
from stretto.tasks.task import Answer

CORPUS_SEED = 7001
"""reasoning-gym texts of this seed may be in a pre-training corpus; its items are generated with seed + item."""


@pytest.mark.parametrize("dataset", ["chain_sum", "letter_counting", "number_sorting", "spell_backward", "countdown"])
def test_generators_validate(dataset: str) -> None:
    GymSource("g", GymArgs(dataset=dataset)).validate(4)


def test_seeds_share_no_problem_with_each_other_or_the_corpus() -> None:
    first, second = (GymSource("g", GymArgs(dataset="chain_sum", seed=seed)) for seed in (0, 1))
    assert CORPUS_SEED + 10**6 < _SEED_STRIDE
    # Neighbouring seeds of the package share problems, so this project's seeds are far apart:
    entries = first._dataset
    entries_next = type(entries)(type(entries.config)(seed=entries.seed + 1))
    assert entries[1]["question"] == entries_next[0]["question"]
    ours = [{source.problem(i).messages[0]["content"] for i in range(50)} for source in (first, second)]
    assert len(ours[0] & ours[1]) <= 1


@pytest.mark.parametrize(("form", "marked"), [("plain", 1.0), ("tags", 0.0), ("line", 1.0), ("boxed", 0.0)])
def test_a_base_model_that_writes_no_marks_is_right_when_it_is_right(form: str, marked: float) -> None:
    source = GymSource("g", GymArgs.model_validate({"dataset": "chain_sum", "format": form}))
    plain = GymSource("g", GymArgs(dataset="chain_sum"))
    score = source.score(source.problem(5), Answer(plain.problem(5).gold))
    assert (score.reward, score.outcome, score.parts["marked"]) == (1.0, Outcome.OK, marked)


def test_marks_around_a_wrong_answer_are_worth_nothing() -> None:
    source = GymSource("g", GymArgs(dataset="chain_sum", format="tags"))
    score = source.score(source.problem(5), Answer("<answer>no idea</answer>"))
    assert (score.reward, score.outcome, score.parts["marked"]) == (0.0, Outcome.WRONG, 1.0)


def test_trying_is_paid_only_where_the_recipe_says_so() -> None:
    guess = "1 + 1"
    exact, graded = (
        GymSource("g", GymArgs.model_validate({"dataset": "countdown", "credit": c})) for c in ("exact", "graded")
    )
    assert exact.score(exact.problem(0), Answer(guess)).reward == 0.0
    paid = graded.score(graded.problem(0), Answer(guess))
    assert 0.0 < paid.reward < 1.0 and paid.outcome is Outcome.WRONG
    assert graded.score(graded.problem(0), Answer("")).reward == 0.0


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"dataset": "chain_sums"}, "did you mean 'chain_sum'?"),
        ({"dataset": "chain_sum", "config": {"seed": 3}}, "config.seed: is a field beside config"),
        ({"dataset": "chain_sum", "config": {"min_term": 3}}, "min_term"),
        ({"dataset": "chain_sum", "config": {"min_terms": -3}}, "'chain_sum' refuses it"),
    ],
)
def test_bad_arguments_are_one_line(args: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=r"^sources\.g\.args: .*; ") as caught:
        GymSource("g", GymArgs.model_validate(args))
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_generator_that_draws_from_a_list_asks_for_its_size() -> None:
    with pytest.raises(UserError, match="set size"):
        GymSource("g", GymArgs(dataset="word_ladder")).validate()
    GymSource("g", GymArgs(dataset="word_ladder", size=20)).validate(3)


def test_a_generator_without_answers_is_refused() -> None:
    with pytest.raises(UserError, match="no answer that can be written down"):
        GymSource("g", GymArgs(dataset="rush_hour")).validate()
