"""Judges of known faults, and what is said of them."""

from __future__ import annotations

import pytest

from stretto.base.errors import UserError
from stretto.post.calibrate import Trust, calibrate
from stretto.tasks.judge import JudgeFailed
from stretto.text.passages import damaged, passages
from tests.text.books import books

FOUND = passages(books(), "held_out", 20)
TOLD = damaged(FOUND, "held_out")
WHOLE = {each.text for each in FOUND}


class Of:
    """A judge that prefers what ``value`` is higher for; equals: ``equal``; every ``fails``-th time not at all."""

    def __init__(self, value, equal: float = 0.5, fails: int = 0):  # type: ignore[no-untyped-def]
        self._value, self._equal, self._fails, self._num = value, equal, fails, 0

    def __call__(self, prompt: str, first: str, second: str) -> float:
        self._num += 1
        if self._fails and self._num % self._fails == 0:
            raise JudgeFailed("it wrote a poem")
        one, other = self._value(first), self._value(second)
        return self._equal if one == other else float(one > other)


def trust(judge: Of) -> Trust:
    return calibrate(judge, FOUND, TOLD)


def test_a_judge_that_knows() -> None:
    found = trust(Of(lambda text: text in WHOLE))
    told = {name: each.value for name, each in found.damages.items()}
    assert told == dict.fromkeys(told, 1.0) | {"swapped": 0.5}  # which is a whole one, in the wrong place
    assert (found.itself.value, found.position.value, found.contradicted, found.num_infra) == (0.5, 0.5, 0.0, 0)


def test_a_judge_that_likes_what_is_shown_first() -> None:
    found = trust(Of(lambda text: 0, equal=1.0))
    assert all(each.value == 0.5 for each in (*found.damages.values(), *found.layouts.values()))
    assert (found.itself.value, found.position.value, found.contradicted) == (1.0, 1.0, 1.0)


def test_a_judge_that_likes_length_and_layout() -> None:
    found = trust(Of(len))
    assert found.longer.value == 1 and all(each.value == 1 for each in found.layouts.values())
    assert found.position.value == 0.5


def test_what_was_not_judged_is_counted_and_too_much_of_it_refused() -> None:
    found = trust(Of(len, fails=31))
    assert found.num_infra == 400 // 31 and found.longer.value == 1
    assert found.contradicted == 0 and found.position.value == pytest.approx(0.5, abs=0.01)  # of what was judged
    with pytest.raises(UserError, match=r"calibrate: 21 comparisons have no verdict: it wrote a poem; correct that"):
        trust(Of(len, fails=3))
