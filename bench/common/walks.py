"""Walks over digits: answers as long as one likes, in which there is as much to learn however long they are.

Three digits are right after each digit and three others wrong, in each source others. A start mostly takes a wrong one; an expert knows
which are right, and takes one of these at random. The score is the share of digits that are right where they stand, so that long and
short answers begin with the same score, and a mistake spoils nothing behind it.
"""

from __future__ import annotations

import random
from functools import cached_property
from itertools import pairwise
from typing import Any, Final

from pydantic import Field

from stretto.base.config import Config
from stretto.base.trajectory import Outcome
from stretto.tasks.task import Answer, Problem, Score, TaskSource, find_answer

KIND: Final = "bench.common.walks:Walks"
DIGITS = "0123456789"
NUM_RIGHT = 3


class WalksArgs(Config):
    """Of `Walks`."""

    name: str
    """What the prompt begins with."""
    length: int = Field(gt=1)
    noise: float = Field(default=0.0, ge=0, le=1)
    """Share of the places of examples where a wrong digit stands."""
    seed: int = 0


class Walks(TaskSource):
    """Prompt ``cat:``, answer ``5 4 1 1 6``; whatever the item."""

    args_kind = WalksArgs
    args: WalksArgs
    is_verifiable = False
    """Answers are right in part."""

    def problem(self, item: int) -> Problem:
        return Problem.of(item, f"{self.args.name}:", self._walk(item, 0.0), "plain")

    def demonstration(self, problem: Problem) -> tuple[dict[str, Any], ...]:
        return ({"role": "assistant", "content": self._walk(problem.item, self.args.noise)},)

    def _walk(self, item: int, noise: float) -> str:
        draw = self._drawn("walk", item)
        walk = [draw.choice(DIGITS)]
        while len(walk) < self.args.length:
            right, wrong = self._after[walk[-1]]
            walk.append(draw.choice(wrong if draw.random() < noise else right))
        return " ".join(walk)

    def score(self, problem: Problem, answer: Answer) -> Score:
        words = find_answer(answer.text, "plain").text.split()
        places = [before in self._after and after in self._after[before][0] for before, after in pairwise(words)]
        share = sum(places) / max(1, len(places))
        return Score(share, Outcome.OK if share == 1.0 else Outcome.WRONG)

    @cached_property
    def _after(self) -> dict[str, tuple[list[str], list[str]]]:
        """By digit: what is right after it, and what examples have instead."""
        drawn = {digit: self._drawn("after", int(digit)).sample(DIGITS, 2 * NUM_RIGHT) for digit in DIGITS}
        return {digit: (each[:NUM_RIGHT], each[NUM_RIGHT:]) for digit, each in drawn.items()}

    def _drawn(self, what: str, number: int) -> random.Random:
        return random.Random(f"{what}/{self.args.name}/{self.args.seed}/{number}")
