from __future__ import annotations

import pytest

from stretto.base.trajectory import Outcome
from stretto.tasks.strings import Operation, StringsArgs, StringsSource
from stretto.tasks.task import Answer


@pytest.mark.parametrize("operation", ["complement", "sort", "reverse"])
def test_problems_are_right(operation: Operation) -> None:
    source = StringsSource("s", StringsArgs(operation=operation))
    source.validate()
    problem = source.problem(3)
    name, *digits = problem.messages[0]["content"].removesuffix(":").split()
    expected = {"complement": [str(9 - int(d)) for d in digits], "sort": sorted(digits), "reverse": digits[::-1]}
    assert (name, problem.gold.split()) == (operation, expected[operation])


def test_seeds_and_operations_draw_different_problems() -> None:
    sources = [StringsSource("s", StringsArgs(operation="sort", seed=seed)) for seed in (0, 1)]
    sources.append(StringsSource("s", StringsArgs(operation="reverse")))
    assert len({tuple(s.problem(i).messages[0]["content"][8:] for i in range(5)) for s in sources}) == 3


def test_a_problem_does_not_depend_on_what_was_asked_before() -> None:
    args = StringsArgs(operation="sort")
    assert StringsSource("a", args).problem(7) == [StringsSource("b", args).problem(i) for i in range(8)][7]


@pytest.mark.parametrize("graded", [False, True])
def test_spaces_in_an_answer_are_ignored(graded: bool) -> None:
    source = StringsSource("s", StringsArgs(operation="sort", graded=graded))
    problem = source.problem(0)
    digits = "".join(problem.gold.split())
    for text in (digits, "  ".join(digits), f"{digits[:2]} {digits[2:]}"):
        assert source.score(problem, Answer(text)).reward == 1.0
    assert source.score(problem, Answer(f"{digits[:3]} x{digits[4:]}")).reward == (6 / 7 if graded else 0.0)


def test_partial_marks_do_not_make_an_answer_right() -> None:
    source = StringsSource("s", StringsArgs(operation="sort", length=4, graded=True))
    problem = source.problem(0)
    digits = problem.gold.split()
    score = source.score(problem, Answer(" ".join([*digits[:3], "x"])))
    assert (score.reward, score.outcome) == (0.75, Outcome.WRONG)
    longer = source.score(problem, Answer(problem.gold + " 1 1 1 1"))
    assert (longer.reward, longer.outcome) == (0.5, Outcome.WRONG)
