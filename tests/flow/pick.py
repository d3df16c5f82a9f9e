"""A task with ten good answers, one of which is liked a little better."""

from __future__ import annotations

import random

from stretto.base.trajectory import Outcome
from stretto.tasks.task import Answer, Problem, Score, TaskSource

FAVOURITE = "7"


class Pick(TaskSource):
    """Any digit."""

    is_verifiable = False

    def problem(self, item: int) -> Problem:
        return Problem(item, ({"role": "user", "content": "say a digit:"},), str(random.Random(item).randrange(10)))

    def score(self, problem: Problem, answer: Answer) -> Score:
        text = answer.text.strip()
        if len(text) != 1 or not text.isdecimal():
            return Score.of(False)
        return Score(1.0 if text == FAVOURITE else 0.8, Outcome.OK)
