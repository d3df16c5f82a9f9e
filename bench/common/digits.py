"""Digits, each replaced by a rule: answers as long as one likes, and a start that knows the rule and a wrong one.

The wrong rule has most places of the examples, so that what an expert finds out is which of the two is right, of each source for
itself: to be surer of what it says already would be wrong everywhere. The score is the share of right places, so that long and
short answers begin with the same score and have the same to gain.
"""

from __future__ import annotations

import random
from typing import Any, Final

from pydantic import Field

from stretto.base.config import Config
from stretto.base.trajectory import Outcome
from stretto.tasks.task import Answer, Problem, Score, TaskSource, find_answer

KIND: Final = "bench.common.digits:Digits"


class DigitsArgs(Config):
    """Of `Digits`."""

    name: str
    """What the prompt begins with."""
    rule: tuple[int, int]
    """Times and plus, modulo 10."""
    wrong: tuple[int, int]
    length: int = Field(gt=0)
    noise: float = Field(default=0.6, ge=0, le=1)
    """Share of the places of examples that follow the wrong rule."""
    seed: int = 0


class Digits(TaskSource):
    """Prompt ``cat 5 3 1:``, answer ``4 6 8``."""

    args_kind = DigitsArgs
    args: DigitsArgs
    is_verifiable = False
    """Answers are right in part."""

    def problem(self, item: int) -> Problem:
        digits = self._drawn(item, "digits").choices(range(10), k=self.args.length)
        question = f"{self.args.name} {' '.join(map(str, digits))}:"
        return Problem.of(item, question, _written(digits, self.args.rule), "plain", digits=digits)

    def demonstration(self, problem: Problem) -> tuple[dict[str, Any], ...]:
        draw, right = self._drawn(problem.item, "noise"), problem.gold.split()
        wrong = _written(problem.payload["digits"], self.args.wrong).split()
        places = [w if draw.random() < self.args.noise else r for w, r in zip(wrong, right, strict=True)]
        return ({"role": "assistant", "content": " ".join(places)},)

    def score(self, problem: Problem, answer: Answer) -> Score:
        written, right = find_answer(answer.text, "plain").text.split(), problem.gold.split()
        share = sum(map(str.__eq__, written, right)) / max(len(written), len(right))
        return Score(share, Outcome.OK if share == 1.0 else Outcome.WRONG)

    def _drawn(self, item: int, what: str) -> random.Random:
        return random.Random(f"{what}/{self.args.name}/{self.args.seed}/{item}")


def _written(digits: list[int], rule: tuple[int, int]) -> str:
    return " ".join(str((rule[0] * digit + rule[1]) % 10) for digit in digits)
