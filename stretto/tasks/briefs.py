"""Writing prompts with constraints that can be checked: length, person, required words.

Such prompts stay in the mix where a judge rewards other ones; and a judge's own prompts may have a brief, as a gate to its points.
"""

from __future__ import annotations

import random
import re
from typing import Final, Literal, Self

from pydantic import Field, model_validator

from stretto.base.config import Config
from stretto.base.trajectory import Outcome
from stretto.tasks.task import Answer, Problem, Score, TaskSource, spoken
from stretto.text.similar import words

_QUOTED = re.compile(r"[\"“«][^\"”»]*[\"”»]|(?<!\w)['‘][^'’]*['’](?!\w)")
_FIRST: Final = frozenset(("i", "me", "my", "mine", "myself", "we", "us", "our", "ours", "ourselves"))
_THIRD: Final = frozenset(("he", "him", "his", "she", "her", "hers", "they", "them", "their", "theirs", "it", "its"))
_FORMS: Final = (
    "a story",
    "a scene",
    "a letter home",
    "a diary entry",
    "a portrait",
    "a memory",
    "a fable",
    "a news report",
)
_TOPICS: Final = (
    "a ferry that comes late", "a house that is for sale", "two sisters and a debt", "the last day of a market", "a dog nobody owns",
    "a teacher's first winter", "a bridge in fog", "an old radio", "a wedding without music", "a harvest that failed",
    "a stranger at the table", "a key that fits nothing", "a night train", "the bakery before dawn", "an unfinished map",
    "a flood and a piano", "a lighthouse keeper's guest", "a promise kept too long", "a garden under snow", "a boy who counts birds",
)  # fmt: skip
_WORDS: Final = (
    "lantern",
    "copper",
    "thimble",
    "orchard",
    "ladder",
    "harbour",
    "velvet",
    "compass",
    "kettle",
    "ribbon",
    "gravel",
    "mirror",
)
_LENGTHS: Final = ((30, 60), (50, 90), (80, 130))


class Constraints(Config):
    """What can be checked of an answer."""

    words: tuple[int, int] | None = None
    """Fewest and most."""
    person: Literal["first", "third"] | None = None
    """Who tells it, quoted speech aside."""
    include: tuple[str, ...] = ()
    """Words that must be there."""
    exclude: tuple[str, ...] = ()
    """Words that must not be there."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.words is not None and not 0 <= self.words[0] <= self.words[1]:
            raise ValueError(f"words: {self.words[0]} to {self.words[1]} is no range; the fewest first")
        return self

    def kept(self, text: str) -> dict[str, bool]:
        """Whether ``text`` keeps each of them, by name."""
        said = words(text)
        found = {} if self.words is None else {"words": self.words[0] <= len(said) <= self.words[1]}
        if self.person is not None:
            told = words(_QUOTED.sub(" ", text))  # of "we'll" both parts
            firsts, thirds = sum(each in _FIRST for each in told), sum(each in _THIRD for each in told)
            found["person"] = firsts > 0 if self.person == "first" else firsts == 0 < thirds
        found |= {f"include {each}": set(words(each)) <= set(said) for each in self.include}
        return found | {f"exclude {each}": not set(words(each)) <= set(said) for each in self.exclude}


class BriefsArgs(Config):
    """Of kind ``briefs``."""

    seed: int = Field(default=0, ge=0)
    """Of the prompts."""


class BriefsSource(TaskSource):
    """Endless. An answer is correct when it meets all constraints. Its reward is the share of length, person and required words that
    it meets, less as much for each forbidden word: a text of all words that prompts ask for earns no more than one of none."""

    args_kind = BriefsArgs
    args: BriefsArgs

    def problem(self, item: int) -> Problem:
        rng = random.Random(f"{self.args.seed} {item}")
        chosen = tuple(rng.sample(_WORDS, 4))
        told = Constraints(
            words=rng.choice(_LENGTHS), person=rng.choice(("first", "third")), include=chosen[:2], exclude=chosen[2:]
        )
        assert told.words is not None
        prompt = (
            f"Write {rng.choice(_FORMS)} about {rng.choice(_TOPICS)}, in the {told.person} person and in {told.words[0]} to {told.words[1]} "
            f"words. It must have the words {' and '.join(told.include)}, and neither {' nor '.join(told.exclude)}."
        )
        who = "I" if told.person == "first" else "She"
        gold = f"{who} saw the {told.include[0]} and the {told.include[1]}."
        while len(words(gold)) < told.words[0]:
            gold += f" {who} looked at the {rng.choice(told.include)} for a while, and said nothing."
        return Problem(item, ({"role": "user", "content": prompt},), gold, {"constraints": told.model_dump()})

    def score(self, problem: Problem, answer: Answer) -> Score:
        text = spoken(answer.text)
        asked = Constraints.model_validate(problem.payload["constraints"])
        kept = asked.kept(text)
        broken = [name for name, is_kept in kept.items() if not is_kept]
        share = max(0.0, 1 - len(broken) / (len(kept) - len(asked.exclude))) if words(text) else 0.0
        if broken:
            return Score(share, Outcome.WRONG, detail=f"not kept: {', '.join(broken)}")
        return Score.of(True)
