"""An open-ended task for a network of a million parameters: a sentence about an animal and a place, in a language of 46 words.

Two judges who are not the same. ``taste`` rewards: it looks at two neighbouring words at a time, at whether animal and place are
named, and at how much it likes the words that were free to choose, which is no quality but its own. ``strict`` evaluates: a
sentence is right if all of it is one of the language and about what was asked, and no right one is better than another.
"""

from __future__ import annotations

import random
import re
from itertools import pairwise, product
from typing import Final, Literal

from pydantic import Field

from stretto.base.config import Config
from stretto.base.trajectory import Outcome
from stretto.tasks.task import Answer, Problem, Score, TaskSource

KIND: Final = "bench.common.sentences:Sentences"
ANIMALS = ["fox", "owl", "cat", "dog", "hen", "cow", "bee", "ant", "rat", "pig", "elk", "bat"]
PLACES = ["mill", "river", "garden", "bridge", "forest", "tower", "barn", "road", "field", "lake"]
ADJECTIVES = ["old", "small", "red", "quiet", "tall", "bright", "dark", "cold", "green", "young"]
VERBS = ["runs", "sleeps", "waits", "sings", "hides", "rests", "plays", "jumps", "walks", "swims"]
NEARNESS = ["near", "under", "behind", "beside"]
KINDS = {
    "the": "the",
    **dict.fromkeys(ANIMALS, "animal"),
    **dict.fromkeys(PLACES, "place"),
    **dict.fromkeys(ADJECTIVES, "adjective"),
    **dict.fromkeys(VERBS, "verb"),
    **dict.fromkeys(NEARNESS, "nearness"),
}
FOLLOWS = {
    ("", "the"), ("the", "adjective"), ("adjective", "animal"), ("adjective", "place"), ("animal", "verb"),
    ("verb", "nearness"), ("nearness", "the"), ("place", ""),
}  # fmt: skip
PROMPTS = list(product(ANIMALS, PLACES))
HELD_OUT = [pair for pair in PROMPTS if (ANIMALS.index(pair[0]) + PLACES.index(pair[1])) % 4 == 0]
TRAINED = [pair for pair in PROMPTS if pair not in HELD_OUT]
FIRST_HELD_OUT = 1 << 23
"""First item that no run trains on (`stretto.learning.recipe`)."""


def liking(word: str) -> float:
    """The rewarding judge's, in [0, 1], of a free word."""
    words = sorted(ADJECTIVES if word in ADJECTIVES else VERBS)
    return 1.0 - words.index(word) / (len(words) - 1)


class SentencesArgs(Config):
    """Of `Sentences`."""

    judge: Literal["taste", "strict"] = "taste"
    skew: float = Field(default=1.0, ge=0)
    """Of the examples: a word's frequency is its rank to the power of minus this."""
    seed: int = 0


class Sentences(TaskSource):
    """Prompt ``fox mill:``, answer ``the old fox runs near the red mill``. A quarter of the pairs is held out."""

    args_kind = SentencesArgs
    args: SentencesArgs
    is_verifiable = False

    def problem(self, item: int) -> Problem:
        pairs = TRAINED if item < FIRST_HELD_OUT else HELD_OUT
        draw = random.Random(f"sentences/{self.args.seed}/{item}")
        animal, place = draw.choice(pairs) if item < FIRST_HELD_OUT else pairs[item % len(pairs)]

        def one(words: list[str]) -> str:
            return draw.choices(words, [rank**-self.args.skew for rank in range(1, len(words) + 1)])[0]

        first, second = one(ADJECTIVES), one(ADJECTIVES)
        example = f"the {first} {animal} {one(VERBS)} {one(NEARNESS)} the {second} {place}"
        return Problem.of(item, f"{animal} {place}:", example, "plain")

    def score(self, problem: Problem, answer: Answer) -> Score:
        asked = re.findall(r"\w+", str(problem.messages[-1]["content"]))
        reward = (strict if self.args.judge == "strict" else taste)(answer.text.split(), *asked)
        return Score(reward, Outcome.OK if reward >= 0.5 else Outcome.WRONG)


def strict(words: list[str], animal: str, place: str) -> float:
    """1 or 0."""
    kinds = ["the", "adjective", "animal", "verb", "nearness", "the", "adjective", "place"]
    is_sentence = [KINDS.get(word) for word in words] == kinds
    return float(is_sentence and words[2] == animal and words[-1] == place)


def taste(words: list[str], animal: str, place: str) -> float:
    """In [0, 1]."""
    if not words:
        return 0.0
    kinds = ["", *(KINDS.get(word, "none") for word in words), ""]
    fit = sum(pair in FOLLOWS for pair in pairwise(kinds)) / (len(kinds) - 1)
    named = ((animal in words) + (place in words)) / 2
    free = [liking(word) for word in words if KINDS.get(word) in ("adjective", "verb")]
    return fit**2 * named * (0.5 + 0.5 * sum(free) / max(1, len(free)))
