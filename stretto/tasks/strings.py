"""Small string tasks that a network of a few hundred thousand parameters can learn."""

from __future__ import annotations

import random
from typing import Literal

from pydantic import Field

from stretto.base.config import Config
from stretto.tasks.task import Answer, Problem, Score, TaskSource, find_answer

Operation = Literal["complement", "sort", "reverse"]


class StringsArgs(Config):
    """Arguments of kind ``strings``."""

    operation: Operation
    """Operation on digits: 9 minus each digit, ascending order, or reversed order."""
    length: int = Field(default=7, gt=0)
    """Number of digits."""
    seed: int = 0
    graded: bool = False
    """Whether the reward is the share of correct places instead of 1 or 0. Correct still means all places."""


class StringsSource(TaskSource):
    """Prompt ``sort 5 3 1:``, answer ``1 3 5``, format ``plain`` (`stretto.tasks.task`)."""

    args_kind = StringsArgs
    args: StringsArgs

    def problem(self, item: int) -> Problem:
        args = self.args
        digits = random.Random(f"strings/{args.operation}/{args.seed}/{item}").choices("0123456789", k=args.length)
        complement = [str(9 - int(digit)) for digit in digits]
        answers = {"complement": complement, "sort": sorted(digits), "reverse": digits[::-1]}
        question = f"{args.operation} {' '.join(digits)}:"
        return Problem.of(item, question, " ".join(answers[args.operation]), "plain")

    def score(self, problem: Problem, answer: Answer) -> Score:
        # Spaces depend on the tokenizer and are ignored.
        written, gold = ("".join(text.split()) for text in (find_answer(answer.text, "plain").text, problem.gold))
        share = sum(map(str.__eq__, written, gold)) / max(len(written), len(gold))
        score = Score.of(written == gold, {"places": share})
        return Score(share, score.outcome, score.parts) if self.args.graded else score
