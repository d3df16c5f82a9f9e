"""Reader of English for the picture ledger by rules over closed classes of words: determiners, numbers, colours, prepositions, common verbs.

Every other word is part of a noun: "sparkling teddy bear" is an object of that whole name, which suffices to see whether a rewritten prompt still
names it. `read` reads back exactly what `stretto.tasks.shapes.ledger.describe` writes, and `unkept` lists the requirements that a text lost, bound
to another object, or added.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from stretto.base.errors import UserError
from stretto.tasks.shapes.ledger import BETWEEN, INVERSE, OWN_WORDS, Fault, Ledger, Relation, Thing, Unkept, bind, refer
from stretto.tasks.shapes.scope import scoped
from stretto.tasks.shapes.words import (
    ABSENT,
    BORROWED,
    COLOURS,
    COPULAS,
    DEFINITE,
    ELIDED,
    ENDS,
    FOREIGN,
    INDEFINITE,
    MEDIA,
    NAMES,
    NOUNS_IN_ING,
    NUMBER_WORDS,
    NUMBERS,
    QUALITIES,
    RELATIONS,
    SHADES,
    STOPS,
    VACUOUS,
    VAGUE,
    VERBS,
    names_no_thing,
    plural,
    singular,
)

QUOTED = re.compile(
    r"\"([^\"]+)\"|“([^”]+)”|«([^»]+)»|「([^」]+)」|『([^』]+)』|(?<!\w)'([^']+)'(?!\w)|(?<!\w)‘([^’]+)’"
)
_SIZE = re.compile(r"\b(\d{2,5})\s*[x×]\s*(\d{2,5})\s*(?:px|pixels)?\b")
_LEAD = re.compile(
    r"^\s*(?:(?:please|kindly|(?:can|could|would|will) you|i(?:['’]d| would)? (?:want|need|like|love)(?: you)?(?: to(?: see)?)?|draw|create|generate|"
    r"add|include|insert|give|(?:paint|make|render|design|show)(?=(?: me| us)? "
    rf"(?:an?|the|some|several|\d+|{'|'.join(NUMBER_WORDS)})\b))(?: me| us)?(?=[\s,:]|$)[\s,:]*)+",
    re.I,
)
"""Openings of requests that name no object: "please draw me"."""
_WORD = re.compile(r"[^\W\d_]+(?:['’-][^\W\d_]+)*|\d+[^\W\d_]*(?:-[^\W\d_]+)*|\S")
_DIGITS = 6
"""Largest number of digits that is read of a number."""
MOST_CHARS = 8000
"""Largest length of a text that is read."""
MARK = "§"
"""Stands for words in quotation marks."""
_WORDS_BEFORE = re.compile(rf"\b(?:(?:the|an?) )?(?:words?|text|phrase) (?=\s*{MARK})", re.I)
"""Nouns that name the quoted words, which are no thing beside them."""


@dataclass(slots=True)
class _Mention:
    """A noun phrase of a text."""

    noun: str = ""
    count: int | None = 1
    colours: list[str] = field(default_factory=list)
    qualities: list[str] = field(default_factory=list)
    is_definite: bool = False
    is_absent: bool = False


def check_language(text: str) -> None:
    """Raises `UserError`: the text is empty, too long, or not in English outside of quotation marks."""
    if not text.strip():
        raise UserError("prompt: it is empty; describe the picture")
    if len(text) > MOST_CHARS:
        raise UserError(f"prompt: {len(text):,} characters are more than {MOST_CHARS:,}; write a shorter text")
    bare = QUOTED.sub(" ", text)
    letters = [letter for letter in bare if letter.isalpha()]
    words = [word.lower().replace("’", "'") for word in _WORD.findall(bare)]
    foreign = sum(
        1.0 if word in FOREIGN or word.startswith(ELIDED) else 0.5 if word in BORROWED else 0.0 for word in words
    )
    native = sum(word in INDEFINITE | DEFINITE | COPULAS | ENDS | RELATIONS.keys() | NUMBERS.keys() for word in words)
    if sum(not letter.isascii() for letter in letters) > 0.3 * len(letters) or foreign > max(native, 0.5):
        raise UserError(
            "prompt: only English can be read; write it in English, and words of other languages to be shown in quotation marks"
        )


def read(text: str, known: Ledger | None = None, first_id: int = 0) -> Ledger:
    """The ledger of a text, by rules.

    Args:
        known: Earlier requirements, to which "the cube" may refer. The result contains all of them.
        first_id: Id of the first new thing.

    Raises:
        UserError: The text is empty, or in another language.
    """
    check_language(text)
    return _RuleReader(Request.of(text), known or Ledger(), first_id).ledger()


@dataclass(frozen=True, slots=True)
class Request:
    """A request, prepared for a reader."""

    own: str
    """The user's own words."""
    plain: str
    """Without opening words, size and scopes that stay unread; quoted words are a mark."""
    texts: tuple[str, ...]
    size: tuple[int, int] | None
    unread: tuple[str, ...]
    """As in `Ledger`."""

    @classmethod
    def of(cls, text: str) -> Request:
        asked, _, own = text.partition(OWN_WORDS)
        texts = tuple(next(filter(None, found.groups())) for found in QUOTED.finditer(asked))
        bare = _LEAD.sub("", QUOTED.sub(f" {MARK} ", asked))
        size = _SIZE.search(bare)
        plain, unread = scoped(bare)
        quoted = [_with_quotes(each, texts[bare[: bare.find(each)].count(MARK) :]) for each in unread]
        return cls(
            " ".join(asked.split()),
            _WORDS_BEFORE.sub("", _SIZE.sub(" ", plain)),
            tuple(dict.fromkeys(texts)),
            (int(size[1]), int(size[2])) if size else None,
            (*(" ".join(each.split()) for each in quoted), *filter(None, own.split(BETWEEN))),
        )

    def ledger(self, known: Ledger, things: Sequence[Thing], relations: Sequence[Relation], absent: Sequence[str], medium: Sequence[str],
               unread: Sequence[str] = ()) -> Ledger:  # fmt: skip
        """The demands of a reader, with what is read from the text itself, beside those of ``known``."""
        return Ledger(
            tuple(things),
            tuple(dict.fromkeys(relations)),
            tuple(dict.fromkeys((*known.texts, *self.texts))),
            tuple(dict.fromkeys(absent)),
            tuple(medium),
            self.size or known.size,
            tuple(dict.fromkeys((*known.unread, *self.unread, *unread))),
        )


def _head(noun: str) -> tuple[str, bool]:
    """Last word of a noun before its "of", and whether other words stand before it."""
    words = noun.partition(" of ")[0].split()
    return words[-1], len(words) > 1


def _with_quotes(sentence: str, texts: Sequence[str]) -> str:
    for each in texts:
        sentence = sentence.replace(MARK, f'"{each}"', 1)
    return sentence


class _RuleReader:
    """One pass over the words of a text."""

    def __init__(self, request: Request, known: Ledger, first_id: int) -> None:
        self.request, self.known, self.next_id = request, known, first_id
        self.words = [word.lower().replace("’", "'") for word in _WORD.findall(request.plain)]
        self.at = 0
        self.things, self.relations = list(known.things), list(known.relations)
        self.absent, self.medium, self.unread = list(known.absent), list(known.medium), list[str]()
        self.subject: int | None = None
        """Thing that the next relation, copula or verb belongs to."""
        self.opener: int | None = None
        """First subject of the sentence: the cube of "a cube left of a ball and above a box"."""
        self.pending: tuple[int, str] | None = None
        """Subject and kind of a relation whose object follows."""
        self.after_and = False
        """Whether "and", "or" or a comma precedes the word."""
        self.bare_end = 0
        """End of the last run of colours without a noun, which is not read again from each of its words."""
        self.is_absent = False
        """Whether the word before names an absent thing, so that "or" continues the list: "no cars or trees"."""

    def ledger(self) -> Ledger:
        while self.at < len(self.words):
            word, before = self.words[self.at], self._peek(-1)
            if word in ("and", "or", ","):
                self.after_and = True
                self.is_absent &= word == "or"
                self.at += 1
            elif self._read_link(word, before):
                self.after_and = self.is_absent = False
            elif (mention := self._phrase()) is not None:
                self._read_mention(mention, before)
            else:
                self.after_and = self.is_absent = False
                self.at += 1
        return self.request.ledger(self.known, self.things, self.relations, self.absent, self.medium, self.unread)

    def _read_link(self, word: str, before: str) -> bool:
        """Consume the end of a sentence, a preposition, a copula or a verb; False: there is none here."""
        if word in ".;!?":
            self.subject = self.opener = self.pending = None
            self.at += 1
        elif kind := self._relation():
            first = self.opener if self.after_and and self.opener is not None else self.subject
            self.pending = (first, kind) if first is not None else None
        elif word in COPULAS and self.subject is not None:
            if before not in ("that", "which", "who") and self.opener is not None:
                self.subject = self.opener  # "the hat on the wall is red", but "a hat on a wall that is red"
            self.at += 1
            bind(self.things, self.subject, *self._predicate())
        elif self.subject is not None and (verb := self._verb()):
            if self._begins_phrase():
                self.pending = (self.subject, verb)
            elif verb != "with" and self._peek() != MARK:  # "a sign saying" some words
                bind(self.things, self.subject, (), (verb,))
        else:
            return False
        return True

    def _read_mention(self, mention: _Mention, before: str) -> None:
        """Record the medium, the absent thing or the thing that a noun phrase names. ``before``: the word before the phrase."""
        if mention.noun.split()[-1] in MEDIA and self._peek() in ("of", "showing") and not self.things:
            self.medium.append(" ".join((*mention.qualities, *mention.colours, mention.noun)))
            self.at += 1
        elif mention.is_absent or (self.is_absent and self.after_and):
            if mention.colours or mention.qualities:  # no red cars, but perhaps others
                self.unread.append(self.request.own)
            else:
                self.absent.append(mention.noun)
            self.subject = self.pending = None
            self.is_absent, self.after_and = True, False
            return
        elif names_no_thing(*_head(mention.noun), bool(mention.colours)):
            self.pending = None
            return
        else:
            self._add_thing(mention, before)
        self.after_and = self.is_absent = False

    def _add_thing(self, mention: _Mention, before: str) -> None:
        if mention.noun == "one" and self.things:  # "a green apple next to a red one"
            mention.noun = [*self.things, *(each for each in self.things if each.colours)][-1].noun
        thing = refer(self.things, mention.noun, mention.colours) if mention.is_definite else None
        if thing is None:
            thing = Thing(self.next_id, mention.noun, mention.count)
            self.things.append(thing)
            self.next_id += 1
        bind(self.things, thing.id, mention.colours, mention.qualities)  # "the quiet shop" makes a known shop quiet
        if self.pending is not None and self.pending[0] != thing.id:
            self.relations.append(Relation(self.pending[0], self.pending[1], thing.id))
        elif self.pending is None and before != "of":  # "the roof of the house is red"
            self.opener = thing.id
        if self.pending is None or self.pending[1] != "between":
            self.pending = None
        self.subject = thing.id

    def _peek(self, offset: int = 0) -> str:
        return self.words[self.at + offset] if 0 <= self.at + offset < len(self.words) else ""

    def _relation(self) -> str | None:
        """Consume a preposition; None: there is none here."""
        for length in (5, 4, 3, 2, 1):
            phrase = " ".join(self.words[self.at : self.at + length])
            if phrase in RELATIONS and self.at + length <= len(self.words):
                self.at += length
                return RELATIONS[phrase]
        return None

    def _verb(self) -> str | None:
        word = self._peek()
        if word in VERBS or (word.endswith("ing") and word not in NOUNS_IN_ING and len(word) > 4):
            self.at += 1
            return VERBS.get(word, word)
        return None

    def _begins_phrase(self) -> bool:
        word = self._peek()
        return word in INDEFINITE | DEFINITE | COLOURS or word in NUMBERS or word.isdecimal()

    def _predicate(self) -> tuple[list[str], list[str]]:
        """Consume colours and qualities after a copula."""
        colours: list[str] = []
        qualities: list[str] = []
        while True:
            if colour := self._colour():
                colours.append(colour)
            elif self._peek() in QUALITIES and not self._begins_noun():
                qualities.append(self._peek())
                self.at += 1
            elif self._peek() in ("and", ",") and self._peek(1) in QUALITIES:
                self.at += 1
            else:
                return colours, qualities

    def _begins_noun(self) -> bool:
        after = self._peek(1)
        return bool(after) and not self._ends(after) and not self._at_relation(1)

    def _colour(self) -> str:
        """Consume a colour with its shade and a second colour behind "and"; empty: there is none here."""
        shaded = self._peek() in SHADES and self._peek(1) in COLOURS
        if not shaded and self._peek() not in COLOURS:
            return ""
        words = [self._peek(), self._peek(1)] if shaded else [self._peek()]
        self.at += len(words)
        if self._peek() == "and" and self._peek(1) in COLOURS and self._peek(2) not in ("and", ",", ".", ""):
            words += ["and", self._peek(1)]
            self.at += 2
        return " ".join(words)

    def _ends(self, word: str) -> bool:
        """Whether a noun phrase ends before this word."""
        return word in STOPS or not word[-1].isalpha()  # "1960s" is a word

    def _phrase(self) -> _Mention | None:
        """Consume a noun phrase; None: there is none here."""
        is_shade = self._peek() in SHADES and self._peek(1) in COLOURS
        if self.at < self.bare_end and (self._peek() in COLOURS or is_shade) and self._peek() != "orange":
            return None
        start, found = self.at, _Mention()
        determiner = ""
        if self._peek() in ABSENT:
            found.is_absent = True
            self.at += 1
        if self._peek() in INDEFINITE | DEFINITE:
            determiner = self._peek()
            found.is_definite = determiner in DEFINITE
            self.at += 1
        found.count, is_counted = self._count(determiner)
        nouns: list[str] = []
        while word := self._peek():
            if not nouns and (self._begins_noun() or word != "orange") and (colour := self._colour()):
                found.colours.append(colour)
                continue
            if word in ("one", "ones") and found.colours and not nouns:
                nouns.append("one")
                self.at += 1
                break
            if nouns and word in COLOURS and word != "orange" and (not self._peek(1) or self._ends(self._peek(1))):
                found.colours.append(self._colour())  # "make the triangle green"
                break
            if self._ends(word) or (nouns and self._at_relation()):
                break
            if word.endswith("ing") and word not in NOUNS_IN_ING and len(word) > 4:
                if nouns:
                    break
                found.qualities.append(word)
            elif not nouns and word in VACUOUS and self._begins_noun():
                pass
            elif (
                not nouns and (word in QUALITIES or word.endswith("ly")) and self._begins_noun() and not self._is_name()
            ):
                found.qualities += [] if word.endswith("ly") else [word]
            elif not nouns and self._at_relation():
                break
            else:
                nouns.append(word)
            self.at += 1
        if not nouns:
            if found.qualities and not found.colours:  # a noun that the tables list as a quality
                nouns, found.qualities = [found.qualities[-1]], found.qualities[:-1]
            else:
                self.at, self.bare_end = start, self.at
                return None
        head = len(nouns) - 1
        if self._peek() == "of" and nouns[-1] not in MEDIA and self._peek(1) not in DEFINITE:
            nouns += self._of()
        single = singular(nouns[head])
        is_plural = single != nouns[head]
        if (is_counted and found.count != 1) or (
            not is_counted and is_plural and determiner not in ("a", "an", "another")
        ):
            nouns[head] = single
            found.count = found.count if is_counted else None
        found.noun = " ".join(nouns)
        return found

    def _of(self) -> list[str]:
        """Consume "of tea" of "a cup of tea"; empty where the words after "of" are an object of their own."""
        taken, place = ["of"], 1
        while (word := self._peek(place)) and not (self._ends(word) or self._at_relation(place) or word in COLOURS):
            taken.append(word)
            place += 1
        if len(taken) == 1:
            return []
        self.at += place
        return taken

    def _count(self, determiner: str) -> tuple[int | None, bool]:
        """Consume a number: its value, and whether the text names it. "Two more" are two."""
        word = self._peek()
        if word in ("pair", "couple") and self._peek(1) == "of":
            self.at += 2
            return 2, True
        number, is_told = (None if determiner in VAGUE else 1), False
        if word in NUMBERS or word.isdecimal():
            self.at += 1
            number, is_told = NUMBERS[word] if word in NUMBERS else int(word[:_DIGITS]), True
            if self._peek() == "of" and self._peek(1) in DEFINITE:
                self.at += 2
        self.at += self._peek() == "more"
        return number, is_told

    def _at_relation(self, offset: int = 0) -> bool:
        place = self.at
        self.at += offset
        found = self._relation()
        self.at = place
        return found is not None

    def _is_name(self) -> bool:
        return (self._peek(), singular(self._peek(1))) in NAMES


def unkept(ledger: Ledger, text: str, reader: Callable[[str], Ledger] = read) -> tuple[Unkept, ...]:
    """Requirements of a ledger that ``text`` lost or bound to another object, and objects of the ledger's nouns that it added.

    Objects with other nouns may be added, since a scene contains some. ``reader`` reads the text.
    """
    found = reader(text)
    faults: list[Unkept] = []
    partner: dict[int, Thing] = {}
    free = list(found.things)

    def lacks(kind: Fault, says: str, thing: Thing | None = None) -> None:
        faults.append(Unkept(kind, says, None if thing is None else thing.id))

    for thing in ledger.things:
        same = [each for each in free if each.noun == thing.noun]
        if not same:
            lacks("object", f"no {thing.noun}", thing)
            continue
        best = max(same, key=lambda each: _likeness(thing, each))
        free.remove(best)
        partner[thing.id] = best
        if thing.count != best.count:
            lacks("count", f"{best.count or 'some'} {plural(thing.noun)}, not {thing.count or 'some'}", thing)
        if {*best.colours} != {*thing.colours} and thing.colours:
            shown = " ".join(best.colours) or "of no colour"
            lacks("colour", f"the {thing.noun} is {shown}, not {' '.join(thing.colours)}", thing)
        for each in sorted({*thing.qualities} - {*best.qualities}):
            lacks("quality", f"the {thing.noun} is not {each}", thing)
    for other in free:
        for thing in ledger.things:
            if thing.noun == other.noun:
                lacks("extra", f"another {other.noun}: {other.name}")
            elif f" {thing.noun} " in f" {other.noun} " and {*other.colours} - {*thing.colours}:  # "a white dog face"
                lacks("colour", f"{other.name} beside {thing.name}", thing)
    stated = {(each.subject, each.kind, each.other) for each in found.relations}
    stated |= {(each.other, INVERSE[each.kind], each.subject) for each in found.relations if each.kind in INVERSE}
    for relation in ledger.relations:
        ends = partner.get(relation.subject), partner.get(relation.other)
        if None in ends or (ends[0].id, relation.kind, ends[1].id) not in stated:  # type: ignore[union-attr]
            subject, object_ = ledger.thing(relation.subject), ledger.thing(relation.other)
            lacks("relation", f"the {subject.noun} is not {relation.kind} the {object_.noun}", subject)
    faults += [Unkept("text", f"the words {each!r} are missing") for each in ledger.texts if each not in found.texts]
    faults += [Unkept("absent", f"there is a {each}") for each in ledger.absent if refer(found.things, each)]
    faults += [Unkept("medium", f"it is no {each}") for each in ledger.medium if each not in text.lower()]
    faults += [
        Unkept("words", f"{each!r} is missing word for word")
        for each in ledger.unread
        if _spelled(each) not in _spelled(text)
    ]
    return tuple(faults)


def _spelled(text: str) -> str:
    """The words of ``text`` without sizes, quotation marks and marks at its end."""
    words = _WORD.findall(_SIZE.sub(" ", text.lower()).replace("’", "'"))
    return " ".join(word for word in words if word not in "\"'“”‘«»「」『』").rstrip(".!? ")


def _likeness(thing: Thing, other: Thing) -> tuple[int, int, int]:
    return (
        int({*thing.colours} == {*other.colours}),
        int(thing.count == other.count),
        len({*thing.qualities} & {*other.qualities}),
    )
