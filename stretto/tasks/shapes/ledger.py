"""The picture ledger: what a picture must show. Objects, counts, colours bound to objects, relations, words to be read.

`describe` writes a text that `stretto.tasks.shapes.rules.read` reads back as the same ledger. `stretto.tasks.shapes.syntax` reads free English with a
parser; `stretto.tasks.shapes.turns` changes a ledger in a conversation.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Final, Literal

from stretto.base.numbers import listed
from stretto.tasks.shapes.words import NUMBER_WORDS, plural, singular

INVERSE: Final = {
    "left of": "right of", "right of": "left of", "above": "below", "below": "above", "in front of": "behind",
    "behind": "in front of", "next to": "next to",
}  # fmt: skip
OWN_WORDS, BETWEEN = "As requested: ", " / "
"""What `describe` writes before and between the sentences of `Ledger.unread`."""


@dataclass(frozen=True, slots=True)
class Thing:
    """An object, or several of one kind."""

    id: int
    """Number in order of appearance. It stays the same in a conversation, and is never used twice."""
    noun: str
    """Singular, in lower case."""
    count: int | None = 1
    """Number of objects. None: several, in any number."""
    colours: tuple[str, ...] = ()
    """Requested colours. "red and blue" is one entry; several entries contradict each other."""
    qualities: tuple[str, ...] = ()
    """Sizes, materials and actions, sorted."""

    @property
    def name(self) -> str:
        """Qualities, colours and noun, in the plural where there are several."""
        noun = self.noun if self.count == 1 else plural(self.noun)
        return " ".join((*self.qualities, *self.colours, noun))


@dataclass(frozen=True, slots=True)
class Relation:
    subject: int
    kind: str
    """A value of `RELATIONS`, or a verb in -ing: ``holding``."""
    other: int


@dataclass(frozen=True, slots=True)
class Ledger:
    """Requirements on a picture. Immutable: a conversation is a list of ledgers."""

    things: tuple[Thing, ...] = ()
    relations: tuple[Relation, ...] = ()
    texts: tuple[str, ...] = ()
    """Words that must be legible in the picture, letter by letter."""
    absent: tuple[str, ...] = ()
    """Nouns of objects that must not be in the picture."""
    medium: tuple[str, ...] = ()
    """"oil painting", where the text begins with one."""
    size: tuple[int, int] | None = None
    """Width and height in pixels."""
    unread: tuple[str, ...] = ()
    """Sentences of the user with a negation, quantifier or comparison that no demand expresses. They go beside the ledger as they are."""

    def thing(self, id: int) -> Thing:
        return next(thing for thing in self.things if thing.id == id)

    def along(self, kind: str) -> list[Relation]:
        """Relations of ``kind``, and those of its inverse with subject and object exchanged."""
        return [
            each if each.kind == kind else Relation(each.other, kind, each.subject)
            for each in self.relations
            if each.kind in (kind, INVERSE[kind])
        ]

    @property
    def num_constraints(self) -> int:
        """Number of requirements that a text can keep or lose."""
        bound = sum(1 + (thing.count is not None) + len(thing.colours) + len(thing.qualities) for thing in self.things)
        rest = (self.relations, self.texts, self.absent, self.medium, self.unread)
        return bound + sum(map(len, rest))


Fault = Literal["object", "count", "colour", "quality", "relation", "text", "absent", "medium", "extra", "words"]


@dataclass(frozen=True, slots=True)
class Unkept:
    """A requirement that a text or a picture does not keep."""

    kind: Fault
    says: str
    """Message for the user."""
    thing: int | None = None
    """Id of the thing that it concerns; None: the whole picture."""


def refer(things: Sequence[Thing], noun: str, colours: Iterable[str] = ()) -> Thing | None:
    """The last thing of ``things`` with this noun, or with its last word, and with these colours; None: there is none."""
    wanted = noun.partition(" of ")[0]
    names, colours = {wanted, singular(wanted)}, {*colours}

    def fits(thing: Thing) -> bool:
        name = thing.noun.partition(" of ")[0]
        return (thing.noun == noun or bool(names & {name, name.split()[-1]})) and colours <= {*thing.colours}

    found = [thing for thing in things if fits(thing)]
    fitting = [thing for thing in found if thing.noun == noun] or found
    return fitting[-1] if fitting else None


def bind(things: list[Thing], id: int, colours: Iterable[str], qualities: Iterable[str]) -> None:
    """Add colours and qualities to the thing ``id``, in its place in the list."""
    at = next(place for place, thing in enumerate(things) if thing.id == id)
    colours = tuple(dict.fromkeys((*things[at].colours, *colours)))
    things[at] = replace(things[at], colours=colours, qualities=tuple(sorted({*things[at].qualities, *qualities})))


# Writing


def describe(ledger: Ledger) -> str:
    """English text that `read` reads back as the same ledger, ids aside, also where the ledger contradicts itself."""
    shown = [with_number(thing) for thing in ledger.things] + [f"no {plural(noun)}" for noun in ledger.absent]
    words = [f'the words "{text}"' for text in ledger.texts]
    if ledger.medium and not shown:
        shown, words = words or ["it"], []
    medium = "".join(f"{_with_article(each)} of " for each in ledger.medium)
    sentences = [medium + listed(shown)] if shown else []
    for relation in ledger.relations:
        subject, other = ledger.thing(relation.subject), ledger.thing(relation.other)
        verb = ("is", "has") if subject.count == 1 else ("are", "have")
        predicate = verb[1] if relation.kind == "with" else f"{verb[0]} {relation.kind}"
        sentences.append(f"the {subject.name} {predicate} the {other.name}")
    sentences += [f"{each} can be read" for each in words]
    written = [f"{sentence[0].upper()}{sentence[1:]}." for sentence in sentences]
    return " ".join((*written, OWN_WORDS + BETWEEN.join(ledger.unread)) if ledger.unread else written)


def with_number(thing: Thing) -> str:
    """ "a red cube", "two red cubes", "some red cubes"."""
    if thing.count is None:
        return f"some {thing.name}"
    if thing.count == 1:
        return _with_article(thing.name)
    return f"{NUMBER_WORDS[thing.count] if thing.count < len(NUMBER_WORDS) else thing.count} {thing.name}"


def _with_article(name: str) -> str:
    is_vowel = re.match(r"[aeiou8]|1[18](?!\d)|hour", name) and not re.match(r"one\b|uni[cfoqtv]|us(?:ed|ual)|eu", name)
    return f"{'an' if is_vowel else 'a'} {name}"


# Comparison


def contradictions(ledger: Ledger) -> tuple[str, ...]:
    """Contradictions of a ledger, each as a question to the user."""
    asked = [
        f"Is the {thing.noun} to be {' or '.join(thing.colours)}?" for thing in ledger.things if len(thing.colours) > 1
    ]
    asked += [f"Is there to be no {noun}, or one?" for noun in ledger.absent if refer(ledger.things, noun)]
    for kind in ("left of", "above", "behind"):
        if (knot := _knot(ledger, kind)) is not None:
            subject, other = ledger.thing(knot.subject), ledger.thing(knot.other)
            asked.append(f"Is the {subject.name} to be {kind} the {other.name}, or {INVERSE[kind]} it?")
    return tuple(asked)


def _knot(ledger: Ledger, kind: str) -> Relation | None:
    """A relation of ``kind`` or its inverse that lies on a cycle; None: there is no cycle."""
    turned = ledger.along(kind)
    try:
        before: TopologicalSorter[int] = TopologicalSorter()
        for each in turned:
            before.add(each.other, each.subject)
        before.prepare()
    except CycleError as error:
        links = {*pairwise(error.args[1])}  # the cycle, its first thing once more at the end
        return next(each for each in reversed(turned) if (each.subject, each.other) in links)
    return None
