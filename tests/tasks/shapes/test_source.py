from __future__ import annotations

import pytest

from stretto.tasks.shapes.ledger import read, unkept
from stretto.tasks.shapes.source import ShapesArgs, ShapesSource
from stretto.tasks.task import Answer


def test_its_own_answers_are_right_and_others_are_not() -> None:
    ShapesSource("shapes", ShapesArgs()).validate(16)


def test_keeping_earns_half_and_aspects_the_rest_but_only_then() -> None:
    source = ShapesSource("shapes", ShapesArgs(seed=1))
    problem = next(each for each in map(source.problem, range(99)) if len(read(each.payload["request"]).relations) == 2)
    request = problem.payload["request"]
    assert source.score(problem, Answer(request)).reward == 0.5
    assert source.score(problem, Answer(problem.gold)).reward == pytest.approx(1)
    lost = (
        request.rpartition(" The ")[0]
        + " Soft light, balanced composition, close-up camera shot, photo style, paper background."
    )
    assert [each.kind for each in unkept(read(request), lost)] == ["relation"]
    score = source.score(problem, Answer(lost))
    assert not score.ok and 0 < score.reward < 0.5 and score.parts["aspects"] == 1
    assert source.score(problem, Answer("")).reward == 0
