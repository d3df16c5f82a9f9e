"""Unrelated skills on digits with the same form of answer; each has a right and a wrong way.

Demonstrations take the wrong way for half of the pairs of digits, so that a network after SFT answers few problems right. RL on one
skill says nothing about the right way of the others. Six digits give a million problems, so few occur twice. The judge can be made to
err, like one that judges answers that cannot be verified.
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
"""Consecutive digits of a demonstration that are written in the same way."""

Way = Callable[[list[int]], list[int]]
WAYS: Mapping[str, tuple[Way, Way]] = {
    "reverse": (lambda digits: digits[::-1], lambda digits: digits[len(digits) // 2 :] + digits[: len(digits) // 2]),
    "shift": (lambda digits: [(each + 3) % 10 for each in digits], lambda digits: [(each + 7) % 10 for each in digits]),
    "sort": (sorted, lambda digits: sorted(digits, reverse=True)),
    "rotate": (lambda digits: digits[1:] + digits[:1], lambda digits: digits[-1:] + digits[:-1]),
    "fold": (lambda digits: [9 - each for each in digits], lambda digits: [(each + 5) % 10 for each in digits]),
    "add": (
        lambda digits: [sum(digits[: place + 1]) % 10 for place in range(len(digits))],
        lambda digits: [sum(digits[place:]) % 10 for place in range(len(digits))],
    ),
}
"""By skill: the right way and the wrong way."""


class SkillArgs(Config):
    """Arguments of `Skill`."""

    skill: Literal["reverse", "shift", "sort", "rotate", "fold", "add"]
    noise: float = Field(default=0.5, ge=0, le=1)
    """Share of the pairs in demonstrations that are written in the wrong way."""
    length: int = Field(default=6, gt=0)
    error: float = Field(default=0.0, ge=0, lt=0.5)
    """Share of the verdicts that say the contrary of the truth; the same answer to a problem always gets the same verdict."""
    seed: int = 0


class Skill(TaskSource):
    """Prompt ``shift 5 3 1 0 2 9:``, answer ``8 6 4 3 5 2``."""

    args_kind = SkillArgs
    args: SkillArgs

    def problem(self, item: int) -> Problem:
        digits = self._drawn(item, "digits").choices(range(10), k=self.args.length)
        question = f"{self.args.skill} {' '.join(map(str, digits))}:"
        return Problem.of(item, question, _text(WAYS[self.args.skill][0](digits)), "plain", digits=digits)

    def demonstration(self, problem: Problem) -> tuple[dict[str, Any], ...]:
        draw, digits = self._drawn(problem.item, "noise"), problem.payload["digits"]
        right, wrong = (way(digits) for way in WAYS[self.args.skill])
        written: list[int] = []
        for place in range(0, len(digits), PAIR):
            written += (wrong if draw.random() < self.args.noise else right)[place : place + PAIR]
        return ({"role": "assistant", "content": _text(written)},)

    def score(self, problem: Problem, answer: Answer) -> Score:
        # Only digits count: spaces depend on the tokenizer.
        written = find_answer(answer.text, "plain").text.split()
        errs = self._drawn(problem.item, f"judge/{' '.join(written)}").random() < self.args.error
        return Score.of((written == problem.gold.split()) != errs)

    def _drawn(self, item: int, stream: str) -> random.Random:
        return random.Random(f"{stream}/{self.args.skill}/{self.args.seed}/{item}")


def _text(digits: list[int]) -> str:
    return " ".join(map(str, digits))
