"""Mentions of known things in a turn of a conversation: "the cube", "it", "two of the red ones"."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from stretto.tasks.shapes.ledger import Ledger, Thing
from stretto.tasks.shapes.words import COLOURS, NUMBER_WORDS, plural, singular

NUMBER = rf"(?:\d+|{'|'.join(NUMBER_WORDS)})"
COLOUR = rf"\b(?:(?:light|dark|pale|deep|bright) )?(?:{'|'.join(sorted(COLOURS))})\b"
COLOUR_LIST = rf"{COLOUR}(?: (?:and )?{COLOUR})*"
_VALUES: Final = {word: number for number, word in enumerate(NUMBER_WORDS)}


@dataclass(frozen=True, slots=True)
class Question:
    """A question to the user that a turn led to. Written by `apply` and `stretto.tasks.shapes.turns.tell`."""

    says: str
    yes: str = ""
    """Turn that the answer "yes" stands for; empty where the question has no such answer."""
    turn: str = ""
    """Turn that led to the question. A correction is put in the place of ``phrase``."""
    phrase: str = ""
    noun: str = ""
    """Thing that is not there, for answers with "it" or "one"."""


class Unclear(Exception):  # noqa: N818 - a question, not an error
    """Nothing can be done before the user has answered."""

    def __init__(self, says: str, yes: str = "", phrase: str = "", noun: str = "") -> None:
        super().__init__(says)
        self.question = Question(says, yes, "", phrase, noun)


@dataclass(frozen=True, slots=True)
class Spoken:
    """A mention of a known thing in a turn, and its place in the text."""

    thing: Thing
    start: int
    end: int
    number: str | None
    word: str
    """The noun as it stands in the text."""
    others: tuple[Thing, ...] = ()
    """Other things that the mention fits as well."""


def spoken_of(ledger: Ledger, text: str) -> Iterator[Spoken]:
    """Mentions in a text of things that the ledger has. Skips new things ("another cube") and colours that no such thing has."""
    forms = {
        form: each.noun for each in ledger.things for form in (each.noun, plural(each.noun), each.noun.split()[-1])
    }
    if not forms:
        return
    nouns = "|".join(re.escape(form) for form in sorted(forms, key=len, reverse=True))
    words = {word for each in ledger.things for word in (*each.colours, *each.qualities)} | COLOURS
    attribute = "|".join(sorted(words, key=len, reverse=True))
    number = rf"(?:(?P<number>{NUMBER})\s+(?:of (?:the|these|those)\s+)?)?"
    phrase = (
        rf"\b{number}(?P<other>(?:an?|another)\s+)?(?P<attributes>(?:(?:{attribute})\s+)*)(?P<noun>{nouns}|ones?)\b"
    )
    for found in re.finditer(phrase, text, re.I):
        attributes = {*re.findall(attribute, found["attributes"].lower())} if found["attributes"] else set()
        noun = found["noun"].lower()
        fitting = [
            each
            for each in ledger.things
            if attributes <= {*each.colours, *each.qualities}
            and (forms.get(noun) == each.noun or (noun in ("one", "ones") and attributes))
        ]
        if fitting and not found["other"]:
            if attributes and noun == singular(noun) and found["number"] is None:
                fitting = [each for each in fitting if each.count == 1] or fitting
            if attributes:  # of a red cube and a big red cube, "the red cube" is the one without another attribute
                fitting = [each for each in fitting if attributes == {*each.colours, *each.qualities}][-1:] or fitting
            is_all = text[: found.start()].lower().endswith("the ")
            others = tuple(fitting[:-1]) if is_all and found["number"] is None else ()
            yield Spoken(fitting[-1], found.start(), found.end(), found["number"], found["noun"], others)


def apart(ledger: Ledger, spoken: Spoken, next_id: int) -> tuple[Ledger, Thing]:
    """The thing that is mentioned. Of "one of the three circles" that one becomes a thing of its own, with the id ``next_id``."""
    thing, number = spoken.thing, None if spoken.number is None else parse_number(spoken.number)
    if number is None or thing.count is None or not 0 < number < thing.count:
        return ledger, thing
    part = replace(thing, id=next_id, count=number)
    rest = replace(thing, count=thing.count - number)
    things = tuple(rest if each.id == thing.id else each for each in ledger.things)
    copies = [replace(each, subject=next_id) for each in ledger.relations if each.subject == thing.id]
    copies += [replace(each, other=next_id) for each in ledger.relations if each.other == thing.id]
    return replace(ledger, things=(*things, part), relations=(*ledger.relations, *copies)), part


def the_one(spoken: Spoken) -> None:
    """Raises `Unclear` where a mention fits several things."""
    if spoken.others:
        which = " or ".join(f"the {each.name}" for each in (*spoken.others, spoken.thing))
        raise Unclear(f"Which one: {which}?", phrase=f"the {spoken.word}")


def of_them(ledger: Ledger, phrase: str, last: int | None) -> str:
    """A phrase in which "it" has a name, and "a cube" is one of those that there are."""
    return re.sub(r"\ban?\s+", "one ", named(ledger, phrase, last), flags=re.I)


def without_article(phrase: str) -> str:
    return re.sub(
        r"^(?:the|an?|one|that|this|those|these|all)\s+(?:the\s+)?|\s+(?:too|as well)$", "", phrase.strip(), flags=re.I
    )


def named(ledger: Ledger, text: str, last: int | None) -> str:
    """``text`` with the name of the last thing for "it" and "them". Of several things "them" is not a single one: there it stays, or are the only two."""
    thing = next((each for each in ledger.things if each.id == last), None)
    if thing is None:
        return text
    is_single = thing.count == 1 and len(ledger.things) > 1
    if is_single and len(ledger.things) == 2:
        both = " and ".join(f"the {each.name}" for each in ledger.things)
        text = re.sub(r"\bbetween (?:them|both)\b", f"between {both}", text, flags=re.I)
    return re.sub(rf"\b(?:it|that one{'' if is_single else '|them'})\b", f"the {thing.name}", text, flags=re.I)


def parse_number(word: str) -> int:
    return _VALUES.get(word.lower(), 0) if not word.isdecimal() else int(word[:6])
