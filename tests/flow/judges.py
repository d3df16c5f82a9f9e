"""Task sets for verifiers in processes of their own: in a module that another process imports quickly."""

from __future__ import annotations

import time
from collections.abc import Collection

from stretto.base.config import Config
from stretto.base.trajectory import Outcome
from stretto.tasks.task import Answer, Problem, Score, TaskSource

AT_ONCE = {"toy": 1, "judge": 4, "other": 4}


class Slow(TaskSource):
    """Any answer is as good as it is long; item 8 takes for ever."""

    def __init__(self, at_once: int):
        super().__init__("slow", Config())
        self._at_once = at_once

    @property
    def at_once(self) -> int:
        return self._at_once

    def problem(self, item: int) -> Problem:
        return Problem(item, ({"role": "user", "content": f"the cat {item}"},), "dog")

    def score(self, problem: Problem, answer: Answer) -> Score:
        time.sleep(60.0 if problem.item == 8 else 0.0)
        return Score(float(len(answer.text)), Outcome.OK)


def sources(names: Collection[str] = tuple(AT_ONCE)) -> dict[str, Slow]:
    """By name."""
    return {name: Slow(AT_ONCE[name]) for name in names}
