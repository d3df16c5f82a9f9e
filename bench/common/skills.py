"""Three skills on digits that have nothing in common but the form of their answers, each beside a wrong way to go about it.

Examples take the wrong way in half of their pairs of digits, so that a start answers few problems rightly, drawn or greedy, and what an
expert finds out, which way is right, says nothing of the other skills. Of six digits there are a million problems: few come up twice.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

from pydantic import Field

from stretto.base.config import Config
from stretto.tasks.task import Answer, Problem, Score, TaskSource, find_answer

KIND: Final = "bench.common.skills:Skill"
PAIR = 2
"""Digits that an example takes one way with."""

Way = Callable[[list[int]], list[int]]
WAYS: Mapping[str, tuple[Way, Way]] = {
    "reverse": (lambda digits: digits[::-1], lambda digits: digits[len(digits) // 2 :] + digits[: len(digits) // 2]),
    "shift": (lambda digits: [(each + 3) % 10 for each in digits], lambda digits: [(each + 7) % 10 for each in digits]),
    "sort": (sorted, lambda digits: sorted(digits, reverse=True)),
}
"""The right one and the wrong one."""


class SkillArgs(Config):
    """Of `Skill`."""

    skill: Literal["reverse", "shift", "sort"]
    noise: float = Field(default=0.5, ge=0, le=1)
    """Share of the pairs of examples that take the wrong way."""
    length: int = Field(default=6, gt=0)
    seed: int = 0


class Skill(TaskSource):
    """Prompt ``shift 5 3 1 0 2 9:``, answer ``8 6 4 3 5 2``."""

    args_kind = SkillArgs
    args: SkillArgs

    def problem(self, item: int) -> Problem:
        digits = self._drawn(item, "digits").choices(range(10), k=self.args.length)
        question = f"{self.args.skill} {' '.join(map(str, digits))}:"
        return Problem.of(item, question, _written(WAYS[self.args.skill][0](digits)), "plain", digits=digits)

    def demonstration(self, problem: Problem) -> tuple[dict[str, Any], ...]:
        draw, digits = self._drawn(problem.item, "noise"), problem.payload["digits"]
        right, wrong = (way(digits) for way in WAYS[self.args.skill])
        taken: list[int] = []
        for place in range(0, len(digits), PAIR):
            taken += (wrong if draw.random() < self.args.noise else right)[place : place + PAIR]
        return ({"role": "assistant", "content": _written(taken)},)

    def score(self, problem: Problem, answer: Answer) -> Score:
        # Spaces are a matter of the tokenizer; digits are the answer.
        return Score.of(find_answer(answer.text, "plain").text.split() == problem.gold.split())

    def _drawn(self, item: int, what: str) -> random.Random:
        return random.Random(f"{what}/{self.args.skill}/{self.args.seed}/{item}")


def _written(digits: list[int]) -> str:
    return " ".join(map(str, digits))
