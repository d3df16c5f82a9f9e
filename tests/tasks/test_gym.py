from __future__ import annotations

import inspect
import re
from pathlib import Path

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


@pytest.mark.parametrize(
    "dataset", ["simple_integration", "intermediate_integration", "polynomial_multiplication", "puzzle24", "composite"]
)
def test_a_generator_that_would_run_answers_is_refused(dataset: str) -> None:
    with pytest.raises(
        UserError, match=f"the scorer of '{dataset}' may run a model's answer as Python code; choose another"
    ):
        GymSource("g", GymArgs(dataset=dataset))


def test_every_scorer_that_evaluates_is_refused_or_guarded() -> None:
    """Over all generators of the package, whatever it calls its functions."""
    import reasoning_gym

    evaluates = re.compile(r"\b(?:eval|exec|parse_expr|sympify)\((?!entry|metadata)")
    known = reasoning_gym.factory.DATASETS
    found = {name for name, (kind, _) in known.items() if evaluates.search(inspect.getsource(kind.score_answer))}
    guarded = {"binary_matrix", "n_queens", "spiral_matrix", "string_insertion", "countdown"}
    assert found == guarded | {
        "simple_integration",
        "intermediate_integration",
        "polynomial_multiplication",
        "puzzle24",
    }


@pytest.mark.parametrize(
    "dataset", ["binary_matrix", "n_queens", "spiral_matrix", "string_insertion", "countdown", "coin_flip"]
)
def test_an_answer_is_never_run(dataset: str, tmp_path: Path) -> None:
    source = GymSource("g", GymArgs(dataset=dataset))
    source.validate(4)
    problem, path = source.problem(5), tmp_path / "made"
    opening = f"open({str(path)!r},'w')"
    for text in (
        f"[{opening}]",
        opening,
        f"1 + {opening}",
        "9**9**9**9",
        "9* *9",
        "[1]*9",
        "1e999999999",
        "().__class__",
    ):
        score = source.score(problem, Answer(text))
        assert (score.reward, score.outcome) == (0.0, Outcome.WRONG)
        assert "could not safely read" in score.detail
    assert not path.exists()


def test_python_lists_still_earn_the_generators_partial_credit() -> None:
    source = GymSource("g", GymArgs(dataset="spiral_matrix", credit="graded"))
    problem = source.problem(5)
    assert source.score(problem, Answer(str([int(digit) for digit in problem.gold.split()]))).reward == pytest.approx(
        0.1
    )


def test_an_answer_on_which_a_scorer_raises_is_wrong() -> None:
    source = GymSource("g", GymArgs(dataset="prime_factorization"))
    source.validate()
    score = source.score(source.problem(0), Answer("no idea"))
    assert (score.reward, score.outcome) == (0.0, Outcome.WRONG) and "cannot read it" in score.detail
