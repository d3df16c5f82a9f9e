"""How a conversation changes a ledger: add, remove, recolour, move, count, replace, resize, undo.

A turn is read against what was asked for before: "the cube" and "it" are things of the ledger, everything else is new. Where two
relations of one pair differ, the newer counts. A turn after which the ledger contradicts itself, or that speaks of what is not
there, changes nothing: it comes back as questions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from stretto.base.errors import UserError
from stretto.tasks.shapes.ledger import (
    COLOURS,
    NUMBER_WORDS,
    QUOTED,
    RELATIONS,
    Ledger,
    Relation,
    Thing,
    check_language,
    contradictions,
    plural,
    read,
)

_NUMBER = rf"(?:\d+|{'|'.join(NUMBER_WORDS)})"
_COLOUR = rf"(?:(?:light|dark|pale|deep|bright) )?(?:{'|'.join(sorted(COLOURS))})"
_COLOURS = rf"{_COLOUR}(?: (?:and )?{_COLOUR})*"
_FIRST_SIGN = 0x13000
"""Egyptian hieroglyphs, for words in quotation marks: letters that nobody asks for."""
_VALUES: Final = {word: number for number, word in enumerate(NUMBER_WORDS)}
_POLITE = re.compile(
    r"^(?:now|then|ok(?:ay)?|no|well|hm+|please|also|and|actually|could you|can you|would you|i (?:want|need) you to|i'd like you to|"
    r"i (?:think|feel|guess)(?: that)?|maybe|perhaps|let's)\b[, ]+",
    re.I,
)
_CLAUSES = re.compile(
    r";\s*|\.\s+|,? and then |, then |,? and (?=(?:make|move|put|place|add|remove|delete|change|turn|replace)\b)"
    rf"|(?:{'|'.join(f'(?<= {colour})' for colour in sorted(COLOURS))}),? and (?=the (?:[\w-]+ ){{1,4}}?{_COLOUR}(?:$|[,.;]))",
    re.I,
)
"""The last: "make the cube red and the sphere blue"."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """The ledgers of a conversation, one a change. Made anew by every turn."""

    states: tuple[Ledger, ...] = (Ledger(),)
    last: int | None = None
    """The thing that "it" speaks of."""
    next_id: int = 0

    @property
    def now(self) -> Ledger:
        return self.states[-1]


@dataclass(frozen=True, slots=True)
class Told:
    """What a turn came to."""

    conversation: Conversation
    notes: tuple[str, ...] = ()
    """What was done, for people."""
    questions: tuple[str, ...] = ()
    """Where there are any, nothing has changed."""


def tell(conversation: Conversation, text: str) -> Told:
    """The conversation after a user's turn.

    Raises:
        UserError: it is empty, in another language, or undoes more than there is.
    """
    check_language(text)
    hidden = {_FIRST_SIGN + at: next(filter(None, each.groups())) for at, each in enumerate(QUOTED.finditer(text))}
    if not hidden:
        return _told(conversation, text)
    signs = map(chr, hidden)
    told = _told(conversation, QUOTED.sub(lambda _: f'"{next(signs)}"', text))
    if told.questions:
        return replace(told, questions=tuple(each.translate(hidden) for each in told.questions))
    now = told.conversation.now
    now = replace(now, texts=tuple(dict.fromkeys(each.translate(hidden) for each in now.texts)))
    after = replace(told.conversation, states=(*told.conversation.states[:-1], now))
    return Told(after, tuple(each.translate(hidden) for each in told.notes))


def _told(conversation: Conversation, text: str) -> Told:
    """`tell`, of a turn whose words in quotation marks are a sign each: nothing is read in them."""
    plain = _bare(text.strip())
    if _UNDO.search(plain) and not list(_spoken(conversation.now, plain)):
        found = re.search(rf"\b{_NUMBER}\b", plain, re.I)
        num = _number(found[0]) if found else 1
        if not 0 < num < len(conversation.states):
            raise UserError(f"undo: {num} changes, and there were {len(conversation.states) - 1}; undo fewer")
        return Told(replace(conversation, states=conversation.states[:-num], last=None), (f"{num} taken back",))
    after, notes = conversation, list[str]()
    if found := _ANEW.match(plain):
        plain = plain[found.end() :]
        after = replace(after, states=(*after.states, Ledger()), last=None)
        notes.append("a new picture")
    ledger = after.now
    plain = re.sub(r"\bso (?:that )?(?:it|they) (?:is|are)\b", "", plain, flags=re.I)
    for clause in filter(None, map(_bare, _CLAUSES.split(plain))):
        try:
            step = _clause(ledger, clause, after.last, after.next_id)
        except _Unclear as unclear:
            return Told(conversation, (), (str(unclear),))
        ledger = step.ledger
        next_id = max((after.next_id, *(thing.id + 1 for thing in ledger.things)))
        after = replace(after, last=step.last, next_id=next_id)
        notes.append(step.note)
    if questions := contradictions(ledger):
        return Told(conversation, (), questions)
    return Told(replace(after, states=(*after.states, ledger)), tuple(notes))


class _Unclear(Exception):  # noqa: N818 - a question
    """Nothing can be done before the user has answered."""


@dataclass(frozen=True, slots=True)
class _Step:
    ledger: Ledger
    note: str
    last: int | None


def _clause(ledger: Ledger, clause: str, last: int | None, next_id: int) -> _Step:
    for pattern, change in _CHANGES:
        if found := pattern.fullmatch(clause):
            return change(ledger, found, last, next_id)
    return _slotted(ledger, clause, last, next_id) or _added(ledger, clause, last, next_id)


def _added(ledger: Ledger, clause: str, last: int | None, next_id: int) -> _Step:
    """Anything else adds what it names, and says of known things where they are."""
    text = re.sub(rf"^{_PUT}\s+", "", clause, flags=re.I)
    text = _named(ledger, text, last)
    if not re.search(r"\w", text):
        raise _Unclear(f"What is to be added by {clause!r}?")
    found = read(text, ledger, next_id)
    new = [thing for thing in found.things if thing.id >= next_id]
    moved = found.relations[len(ledger.relations) :]
    stray = [each for each in new if ledger.things and not _is_introduced(each, clause)]
    if stray:
        missing = [
            each.noun for each in stray if re.search(rf"\bthe (?:[\w-]+ )*?{re.escape(each.noun)}", clause, re.I)
        ]
        raise _Unclear(
            f"There is no {missing[0]}; is one to be added?" if missing else f"What is to change by {clause!r}?"
        )
    if found == ledger and not re.search(r"\b(?:the|these|those|this|that)\b", text, re.I):
        raise _Unclear(f"What is to change by {clause!r}?")
    if re.match(rf"{_PUT}\s+(?:the|it|them)\b", clause, re.I) and new and not (moved and moved[0].subject < next_id):
        raise _Unclear(f"There is no {new[0].noun}; is one to be added?")
    relations = _latest(ledger.relations, moved)
    touched = new[0].id if new else moved[-1].subject if moved else last
    told = [f"added {thing.name}" for thing in new]
    told += [f"{found.thing(each.subject).name} {each.kind} {found.thing(each.other).name}" for each in moved]
    told += [f"{thing.name}" for thing in found.things if thing.id < next_id and thing not in ledger.things]
    told += [f"the words {text!r}" for text in found.texts if text not in ledger.texts]
    return _Step(replace(found, relations=relations), "; ".join(told) or "it is so already", touched)


@dataclass(frozen=True, slots=True)
class _Spoken:
    """A known thing in a turn, and where it stands."""

    thing: Thing
    start: int
    end: int
    number: str | None


def _spoken(ledger: Ledger, text: str) -> Iterator[_Spoken]:
    """The things of a ledger that a text speaks of; not what it calls another one, or by a colour that none has."""
    forms = {
        form: each.noun for each in ledger.things for form in (each.noun, plural(each.noun), each.noun.split()[-1])
    }
    if not forms:
        return
    nouns = "|".join(re.escape(form) for form in sorted(forms, key=len, reverse=True))
    words = {word for each in ledger.things for word in (*each.colours, *each.qualities)} | COLOURS
    said = "|".join(sorted(words, key=len, reverse=True))
    number = rf"(?:(?P<number>{_NUMBER})\s+(?:of (?:the|these|those)\s+)?)?"
    phrase = rf"\b{number}(?P<other>(?:an?|another)\s+)?(?P<said>(?:(?:{said})\s+)*)(?P<noun>{nouns}|ones?)\b"
    for found in re.finditer(phrase, text, re.I):
        told = {*re.findall(said, found["said"].lower())} if found["said"] else set()
        noun = found["noun"].lower()
        fitting = [
            each
            for each in ledger.things
            if told <= {*each.colours, *each.qualities}
            and (forms.get(noun) == each.noun or (noun in ("one", "ones") and told))
        ]
        if fitting and not found["other"]:
            yield _Spoken(fitting[-1], found.start(), found.end(), found["number"])


def _is_introduced(thing: Thing, clause: str) -> bool:
    """Whether a clause brings in a new thing: by an article, a number, a colour or a verb right before it."""
    own = "|".join(re.escape(each) for each in (*" ".join(thing.colours).split(), *thing.qualities, "very", "more"))
    first = re.escape(thing.noun.split()[0])
    before = rf"(?:an?|another|some|several|many|few|its|his|her|their|my|your|with|{_NEW}|{_NUMBER}|{_COLOUR}|no|of|in|on|at)"
    return re.search(rf"\b{before}\s+(?:(?:the|{own})\s+)*{first}", clause, re.I) is not None


def _apart(ledger: Ledger, spoken: _Spoken, next_id: int) -> tuple[Ledger, Thing]:
    """The thing that is spoken of; of "one of the three circles" that one, which is a thing of its own now."""
    thing, number = spoken.thing, None if spoken.number is None else _number(spoken.number)
    if number is None or thing.count is None or not 0 < number < thing.count:
        return ledger, thing
    part = replace(thing, id=next_id, count=number)
    rest = replace(thing, count=thing.count - number)
    things = tuple(rest if each.id == thing.id else each for each in ledger.things)
    copies = [replace(each, subject=next_id) for each in ledger.relations if each.subject == thing.id]
    copies += [replace(each, other=next_id) for each in ledger.relations if each.other == thing.id]
    return replace(ledger, things=(*things, part), relations=(*ledger.relations, *copies)), part


def _slotted(ledger: Ledger, clause: str, last: int | None, next_id: int) -> _Step | None:
    """What becomes of known things by a colour, a number or a place that a clause names, in whatever words; None: it names none."""
    text, spoken = clause, list(_spoken(ledger, clause))
    # "make it three cubes" speaks of cubes, "move it above the cubes" of two things
    if not spoken or _PLACE.search(text):
        text = _named(ledger, text, last)
        spoken = list(_spoken(ledger, text))
    if not spoken or re.match(rf"(?:{_NEW})\b", clause, re.I):
        return None
    rest = "".join(
        " " if any(each.start <= at < each.end for each in spoken) else letter for at, letter in enumerate(text)
    )
    if len(spoken) > 1 and spoken[0].thing.id != spoken[1].thing.id:
        place = _PLACE.search(text, spoken[0].end, spoken[1].start)
        if place is None or re.search(r"\b(?:an?|another)\b", rest, re.I):
            return None
        moved = Relation(spoken[0].thing.id, RELATIONS[place[0].lower()], spoken[1].thing.id)
        note = f"{spoken[0].thing.name} {moved.kind} {spoken[1].thing.name}"
        return _Step(replace(ledger, relations=_latest(ledger.relations, (moved,))), note, moved.subject)
    thing = spoken[0].thing
    colours, number = re.search(_COLOURS, rest, re.I), spoken[0].number
    if number is None and (found := re.search(rf"\b{_NUMBER}\b", rest, re.I)):
        number = found[0]
    if colours is None and number is None:
        return None
    if number is not None and (count := _number(number) + (thing.count or 1) * ("more" in text.lower().split())) == 0:
        return _without(ledger, thing)
    changed = replace(thing, count=count) if number is not None else thing
    if colours is not None:
        ledger, part = _apart(ledger, spoken[0], next_id)
        thing = part if part.id == next_id else changed
        changed = replace(thing, colours=read(f"a {colours[0]} thing").things[0].colours)
    return _changed(ledger, changed)


def _removed(ledger: Ledger, found: re.Match[str], last: int | None, next_id: int) -> _Step:
    text = _of_them(ledger, found["what"], last)
    spoken = _found(ledger, text)
    listed = spoken[:1]  # "the cube and the cone" are two to be removed, of "the cube left of the cone" it is one
    for before, each in pairwise(spoken):
        if not re.fullmatch(r"[\s,]*(?:and\s+)?(?:(?:the|all|both)\s+)*", text[before.end : each.start], re.I):
            break
        listed.append(each)
    notes = list[str]()
    for place, each in enumerate({each.thing.id: each for each in listed}.values()):
        ledger, gone = _apart(ledger, each, next_id + place)
        step = _without(ledger, gone)
        ledger = step.ledger
        notes.append(step.note)
    return _Step(ledger, "; ".join(notes), None)


def _replaced(ledger: Ledger, found: re.Match[str], last: int | None, next_id: int) -> _Step:
    ledger, thing = _apart(ledger, _found(ledger, _of_them(ledger, found["what"], last))[0], next_id)
    new = read(found["other"]).things
    if len(new) != 1:
        raise _Unclear(f"What is to stand for the {thing.name}?")
    given = new[0]
    return _changed(ledger, replace(given, id=thing.id, colours=given.colours or thing.colours))


def _resized(ledger: Ledger, found: re.Match[str], last: int | None, next_id: int) -> _Step:
    size = int(found["width"]), int(found["height"])
    return _Step(replace(ledger, size=size), f"{size[0]}x{size[1]}", last)


def _reworded(ledger: Ledger, found: re.Match[str], last: int | None, next_id: int) -> _Step:
    return _Step(replace(ledger, texts=(found["text"],)), f"the words {found['text']!r}", last)


def _changed(ledger: Ledger, thing: Thing) -> _Step:
    things = tuple(thing if each.id == thing.id else each for each in ledger.things)
    return _Step(replace(ledger, things=things), f"now {thing.count or 'some'} {thing.name}", thing.id)


def _without(ledger: Ledger, thing: Thing) -> _Step:
    things = tuple(each for each in ledger.things if each.id != thing.id)
    relations = tuple(each for each in ledger.relations if thing.id not in (each.subject, each.other))
    return _Step(replace(ledger, things=things, relations=relations), f"removed {thing.name}", None)


def _of_them(ledger: Ledger, phrase: str, last: int | None) -> str:
    """A phrase in which "it" has a name, and "a cube" is one of those that there are."""
    return re.sub(r"\ban?\s+", "one ", _named(ledger, phrase, last), flags=re.I)


def _found(ledger: Ledger, phrase: str) -> list[_Spoken]:
    """The things of the ledger that a phrase speaks of, one at least."""
    spoken = list(_spoken(ledger, phrase))
    if not spoken:
        bare = re.sub(r"^(?:the|an?|one|that|this|those|these|all)\s+(?:the\s+)?", "", phrase.strip(), flags=re.I)
        raise _Unclear(f"There is no {bare}; is one to be added?")
    return spoken


def _named(ledger: Ledger, text: str, last: int | None) -> str:
    """``text`` with the name of the last thing for "it" and "them"."""
    if last is None or not any(thing.id == last for thing in ledger.things):
        return text
    return re.sub(r"\b(?:it|them|that one)\b", f"the {ledger.thing(last).name}", text, flags=re.I)


def _latest(before: tuple[Relation, ...], new: tuple[Relation, ...]) -> tuple[Relation, ...]:
    pairs = {frozenset((each.subject, each.other)) for each in new}
    return tuple(each for each in before if frozenset((each.subject, each.other)) not in pairs) + new


def _bare(text: str) -> str:
    """Without politeness in front and marks at the end."""
    text = re.sub(r",? please$", "", text.strip().rstrip(".!? "), flags=re.I)
    while found := _POLITE.match(text):
        text = text[found.end() :]
    return text


def _number(word: str) -> int:
    return _VALUES.get(word.lower(), 0) if not word.isdecimal() else int(word[:6])


_NEW = r"add|include|insert|draw|also"
_PLACE = re.compile(rf"\b(?:{'|'.join(sorted(RELATIONS, key=len, reverse=True))})\b", re.I)
_PUT = r"(?:move|put|place|shift|set)"
_UNDO = re.compile(
    r"\b(?:undo|revert|cancel|never mind|as it was|as before)\b|\b(?:go|take|step) (?:\w+ ){0,3}?back\b", re.I
)
_ANEW = re.compile(r"(?:start over|start again|new picture|forget (?:it|everything|all that))(?:\s*[:,;.]\s*|$)", re.I)
_Change = Callable[[Ledger, re.Match[str], int | None, int], _Step]
_CHANGES: Final[tuple[tuple[re.Pattern[str], _Change], ...]] = tuple(
    (re.compile(pattern, re.I), change)
    for pattern, change in (
        (
            r"(?:make|let|set|render|resize)?(?: it| the (?:picture|image|size))*(?: be)?(?: to)?\s*"
            r"(?P<width>\d{1,5})\s*[x×]\s*(?P<height>\d{1,5})\s*(?:px|pixels)?", _resized,
        ),
        (
            r"(?:change|let|make|set)?\s*(?:the (?:text|words?|sign|caption|title))(?: (?:should|must|to|so that it))*\s*"
            r"(?:say|says|read|be|to)?\s*[\"“'](?P<text>[^\"”']+)[\"”']", _reworded,
        ),
        (r"(?:remove|delete|take away|take out|drop|get rid of|erase) (?P<what>.+)", _removed),
        (r"(?:replace|swap|exchange) (?P<what>.+?) (?:with|by|for) (?P<other>.+)", _replaced),
        (r"(?:change|turn) (?P<what>.+?) into (?P<other>(?:an?|\d+|one|two|three) .+)", _replaced),
    )
)  # fmt: skip
