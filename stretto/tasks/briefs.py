"""Writing prompts with constraints that can be checked: length, person, required and forbidden words.

Recipes mix such prompts with prompts that a judge rates. A judged prompt may have constraints, too: answers that violate one earn nothing.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Final, Literal, Self

from pydantic import Field, model_validator

from stretto.base.config import Config
from stretto.base.trajectory import Outcome
from stretto.tasks.task import Answer, Problem, Score, TaskSource, spoken
from stretto.text.similar import words

_QUOTED = re.compile(r"[\"“«][^\"”»]*[\"”»]|(?<!\w)['‘][^'’]*['’](?!\w)")
_FIRST: Final = frozenset(("i", "me", "my", "mine", "myself", "we", "us", "our", "ours", "ourselves"))
_THIRD: Final = frozenset(("he", "him", "his", "she", "her", "hers", "they", "them", "their", "theirs", "it", "its"))
_FORMS = ("a story", "a scene", "a letter home", "a diary entry", "a portrait", "a memory", "a fable", "a news report")
_TOPICS: Final = (
    "a ferry that comes late", "a house that is for sale", "two sisters and a debt", "the last day of a market", "a dog nobody owns",
    "a teacher's first winter", "a bridge in fog", "an old radio", "a wedding without music", "a harvest that failed",
    "a stranger at the table", "a key that fits nothing", "a night train", "the bakery before dawn", "an unfinished map",
    "a flood and a piano", "a lighthouse keeper's guest", "a promise kept too long", "a garden under snow", "a boy who counts birds",
)  # fmt: skip
_WORDS = words("lantern copper thimble orchard ladder harbour velvet compass kettle ribbon gravel mirror")
_LENGTHS: Final = ((30, 60), (50, 90), (80, 130))


class Constraints(Config):
    """Checkable constraints on a text."""

    words: tuple[int, int] | None = None
    """Smallest and largest number of words."""
    person: Literal["first", "third"] | None = None
    """Grammatical person of the narrator, outside of quoted speech."""
    include: tuple[str, ...] = ()
    """Required words, phrases, and characters such as ``—``."""
    exclude: tuple[str, ...] = ()
    """Forbidden ones."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.words is not None and not 0 <= self.words[0] <= self.words[1]:
            raise ValueError(f"words: {self.words[0]} to {self.words[1]} is not a range; the fewest first")
        for name, entries in (("include", self.include), ("exclude", self.exclude)):
            if not all(map(str.strip, entries)):
                raise ValueError(f"{name}: an entry is empty; leave it out")
        return self

    def kept(self, text: str) -> dict[str, bool]:
        """Whether ``text`` meets each constraint, by the constraint's name."""
        written = words(text)
        found = {} if self.words is None else {"words": self.words[0] <= len(written) <= self.words[1]}
        if self.person is not None:
            narrated = words(_QUOTED.sub(" ", text))  # "we'll" counts as "we" and "ll"
            num_first, num_third = sum(each in _FIRST for each in narrated), sum(each in _THIRD for each in narrated)
            found["person"] = num_first > 0 if self.person == "first" else num_first == 0 < num_third
        found |= {f"include {each}": _stands(each, text, written) for each in self.include}
        return found | {f"exclude {each}": not _stands(each, text, written) for each in self.exclude}


def _stands(entry: str, text: str, written: Sequence[str]) -> bool:
    """Whether the words of ``entry`` follow each other in those of ``text``; an entry without words is looked for as it is."""
    wanted = words(entry)
    if not wanted:
        return entry.strip() in text
    return any(list(written[at : at + len(wanted)]) == list(wanted) for at in range(len(written) - len(wanted) + 1))


class BriefsArgs(Config):
    """Arguments of kind ``briefs``."""

    seed: int = Field(default=0, ge=0)
    """Seed of the prompts."""


class BriefsSource(TaskSource):
    """Endless. An answer is correct when it meets all constraints. Its reward is the share of length, person and required words that
    it meets, less as much for each forbidden word: a text of all words that prompts ask for earns no more than one of none."""

    args_kind = BriefsArgs
    args: BriefsArgs

    def problem(self, item: int) -> Problem:
        rng = random.Random(f"{self.args.seed} {item}")
        chosen = tuple(rng.sample(_WORDS, 4))
        include, exclude = chosen[:2], chosen[2:]
        (least, most), person = rng.choice(_LENGTHS), rng.choice(("first", "third"))
        prompt = (
            f"Write {rng.choice(_FORMS)} about {rng.choice(_TOPICS)}, in the {person} person and in {least} to {most} words. "
            f"It must have the words {' and '.join(include)}, and neither {' nor '.join(exclude)}."
        )
        narrator = "I" if person == "first" else "She"
        gold = f"{narrator} saw the {include[0]} and the {include[1]}."
        while len(words(gold)) < least:
            gold += f" {narrator} looked at the {rng.choice(include)} for a while, and said nothing."
        asked = Constraints(words=(least, most), person=person, include=include, exclude=exclude)
        return Problem(item, ({"role": "user", "content": prompt},), gold, {"constraints": asked.model_dump()})

    def score(self, problem: Problem, answer: Answer) -> Score:
        text = spoken(answer.text)
        asked = Constraints.model_validate(problem.payload["constraints"])
        kept = asked.kept(text)
        broken = [name for name, is_kept in kept.items() if not is_kept]
        share = max(0.0, 1 - len(broken) / (len(kept) - len(asked.exclude))) if words(text) else 0.0
        if broken:
            return Score(share, Outcome.WRONG, detail=f"not kept: {', '.join(broken)}")
        return Score.of(True)
