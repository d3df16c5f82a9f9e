"""How one clause changes a ledger: add, remove, keep only, bring back, recolour, move, count, replace, resize.

"The cube" and "it" are things of the ledger, everything else is new. Where two relations of one pair differ, the newer one counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from stretto.tasks.shapes.ledger import INVERSE, Ledger, Relation, Thing
from stretto.tasks.shapes.mentions import (
    COLOUR,
    COLOUR_LIST,
    NUMBER,
    Unclear,
    apart,
    named,
    of_them,
    parse_number,
    spoken_of,
    the_one,
    without_article,
)
from stretto.tasks.shapes.rules import read
from stretto.tasks.shapes.syntax import understand
from stretto.tasks.shapes.words import COLOURS, QUALITIES, RELATIONS, plural

_POLITE = re.compile(
    r"^(?:now|then|ok(?:ay)?|well|hm+|please|also|and|but|actually|could you|can you|would you|i (?:want|need) you to|i'd like you to|"
    r"i (?:think|feel|guess)(?: that)?|i(?:['’]ve)? changed my mind|maybe|perhaps|let's|no wait)\b[, ]+|^no, ",
    re.I,
)


@dataclass(frozen=True, slots=True)
class Turn:
    """A clause of a turn, with the state to which it applies."""

    ledger: Ledger
    clause: str
    last: int | None
    next_id: int
    states: tuple[Ledger, ...]
    quoted: dict[int, str]
    """Texts in quotation marks, by the code point that stands for each in ``clause``. Written by `stretto.tasks.shapes.turns.tell`."""


@dataclass(frozen=True, slots=True)
class Step:
    """Result of one clause."""

    ledger: Ledger
    note: str
    last: int | None


def apply(turn: Turn) -> Step:
    """The ledger after the clause of ``turn``. Raises Unclear: the user has to say more."""
    if re.match(r"(?:is|are|do|does|what|which|who|where|why|how)\b(?! about)(?! not)", turn.clause, re.I):
        named = re.search(r"\b(?:an?|any) ([\w -]+)", turn.clause)
        raise Unclear(f"What is to change? {turn.clause!r} asks about the picture.", noun=named[1] if named else "")
    for pattern, change in CHANGES:
        if (found := pattern.fullmatch(turn.clause)) and (step := change(turn, found)) is not None:
            return step
    return _each(turn) or _slotted(turn) or _added(turn)


def _absent_thing(noun: str, phrase: str, turn: str) -> Unclear:
    """The question about a thing that is not there. The answer "yes" adds it and then does what the turn said."""
    noun = noun.strip(" .!?")
    return Unclear(f"There is no {noun}; is one to be added?", f"add a {noun}; {turn}", phrase, noun)


def _added(turn: Turn) -> Step:
    """A clause of no other form adds the things that it names, and says of known things where they are."""
    ledger, clause, next_id = turn.ledger, turn.clause, turn.next_id
    if re.match(
        r"(?:do not|don['’]t|never|except|not|a bit|a little|much|slightly|somewhat|even)\b|.*\b(?:fewer|less)$",
        clause,
        re.I,
    ):
        raise Unclear(f"What is to change by {clause!r}?")
    text = re.sub(rf"^{_PUT}\s+", "", clause, flags=re.I)
    if (given := re.match(r"give (?:it|him|her|them) (?=an?\b|some\b|" + NUMBER + ")", text, re.I)) and (
        thing := _it(turn)
    ):
        text = f"the {thing.name} with {text[given.end() :]}"
    text = named(ledger, text, turn.last)
    if ledger != Ledger():  # 'the words "OPEN"' are a text, and no thing besides
        text = re.sub(
            rf"\b(?:the )?(?:{WRITING})(?: (?:that )?(?:says?|saying|reads?|reading))? (?=\")", "", text, flags=re.I
        )
    if re.search(r"\bthem\b", text, re.I) and ledger.things:
        raise Unclear(f"Which things are meant by 'them' in {clause!r}?")
    if not re.search(r"\w", text):
        raise Unclear(f"What is to be added by {clause!r}?")
    found = understand(text, next_id) if ledger == Ledger() else read(text, ledger, next_id)
    new = [thing for thing in found.things if thing.id >= next_id]
    moved = found.relations[len(ledger.relations) :]
    stray = [each for each in new if ledger.things and not _is_introduced(each, clause)]
    if stray:
        known = "|".join(re.escape(each.noun) for each in ledger.things) or "$"
        name = rf"\bthe (?:(?!(?:{known}|should|must|is|are)\b)[\w-]+ )*?(?!(?:{known})\b)"
        missing = [each.noun for each in stray if re.search(f"{name}{re.escape(each.noun)}", clause, re.I)]
        if missing:
            raise _absent_thing(missing[0], f"the {missing[0]}", clause)
        raise Unclear(f"What is to change by {clause!r}?")
    is_unread = replace(found, unread=ledger.unread) == ledger != Ledger()
    if is_unread or found == ledger or _is_guess(turn, found):
        raise Unclear(f"What is to change by {clause!r}?")
    if re.match(rf"{_PUT}\s+(?:the|it|them)\b", clause, re.I) and new and not (moved and moved[0].subject < next_id):
        raise _absent_thing(new[0].noun, f"the {new[0].noun}", clause)
    found = replace(found, absent=tuple(each for each in found.absent if each not in {thing.noun for thing in new}))
    _check_between(found, moved)
    relations = _latest(ledger.relations, moved)
    touched = new[0].id if new else moved[-1].subject if moved else turn.last
    notes = [f"added {thing.name}" for thing in new]
    notes += [f"{found.thing(each.subject).name} {each.kind} {found.thing(each.other).name}" for each in moved]
    notes += [f"{thing.name}" for thing in found.things if thing.id < next_id and thing not in ledger.things]
    notes += [f"the words {text!r}" for text in found.texts if text not in ledger.texts]
    notes += [f"no {plural(noun)}" for noun in found.absent if noun not in ledger.absent]
    return Step(replace(found, relations=relations), "; ".join(notes), touched)


def _is_guess(turn: Turn, found: Ledger) -> bool:
    """Whether a reader took words of a clause about known things for things, colours or qualities that the clause does not give them."""
    ledger, linked = turn.ledger, {id for each in found.relations for id in (each.subject, each.other)}
    if ledger == Ledger():
        return False
    new = [each for each in found.things if each.id >= turn.next_id]
    changed = [(ledger.thing(each.id), each) for each in found.things if each.id < turn.next_id]
    qualities = {word for before, now in changed for word in {*now.qualities} - {*before.qualities}}
    worn = " ".join(colour for each in found.things for colour in each.colours)
    is_change = re.match(r"(?:make|change|turn|let|resize|re-?colou?r)\b", turn.clause, re.I)
    return (
        bool(new and is_change and not _is_made(turn, new[0]))
        or bool(re.match(r"(?:the|it|they)\b", turn.clause, re.I) and any(each.id not in linked for each in new))
        or (found.unread == ledger.unread and any(before.colours != now.colours for before, now in changed))
        or any(word not in QUALITIES and not re.search("(?<!th)ing$", word) for word in qualities)
        or any(colour.lower() not in worn for colour in re.findall(COLOUR, turn.clause, re.I))
    )


def _is_made(turn: Turn, thing: Thing) -> bool:
    """Whether a turn such as "make a green triangle left of the circle" adds ``thing``; "make a dog run" and "make a circle bigger" do not."""
    made = rf"make (?:an?|another) (?!little\b){re.escape(thing.name)}(?: (?:and|with|{_PLACE.pattern}) .+)?"
    is_known = thing.noun in {each.noun for each in turn.ledger.things}
    return not is_known and " " not in thing.noun and re.fullmatch(made, turn.clause, re.I) is not None


def _is_introduced(thing: Thing, clause: str) -> bool:
    """Whether a clause introduces a new thing: by an article, a number, a colour or a verb right before its noun."""
    own = "|".join(re.escape(each) for each in (*" ".join(thing.colours).split(), *thing.qualities, "very", "more"))
    first = "|".join(re.escape(noun.split()[0]) for noun in (thing.noun, plural(thing.noun)))
    before = (
        rf"(?:an?|another|some|several|many|few|its|his|her|their|my|your|with|{_NEW}|{NUMBER}|{COLOUR}|no|of|in|on|at)"
    )
    return re.search(rf"\b{before}\s+(?:(?:the|{own})\s+)*(?:{first})", clause, re.I) is not None


def _each(turn: Turn) -> Step | None:
    """A change of several things at once: "make them all yellow", "both should be big", "make all circles green"."""
    things, known = turn.ledger.things, {each.id: each for each in turn.ledger.things}
    nouns = "|".join(re.escape(plural(each.noun)) for each in things)
    found = re.search(
        rf"(?<!after )(?<!between )\b(?:everything|(?:all|both) of (?:it|them|these|those)|(?:it|them|they|these|those) (?:all|both)|them"
        rf"|(?:all|both)(?: of)?(?: (?:the|these|those))?(?: (?:things|shapes|objects|(?P<noun>{nouns or '$'})))?)\b",
        turn.clause,
        re.I,
    )
    if found is None:
        return None
    phrase, last = found[0].lower(), known.get(turn.last) if turn.last is not None else None
    if found["noun"]:
        things = tuple(each for each in things if plural(each.noun) == found["noun"].lower())
    elif list(spoken_of(turn.ledger, turn.clause)) or (last is not None and last.count != 1 and phrase != "everything"):
        return None  # another mention says which, or "them" are the things last spoken of
    unclear = Unclear(f"What is to change by {turn.clause!r}?")
    if "both" in phrase and sum(each.count or 3 for each in things) != 2:
        raise unclear
    if len(things) < 2 or (phrase == "them" and len(things) > 2):
        return None
    clause, steps = turn.clause[: found.start()] + "it" + turn.clause[found.end() :], list[Step]()
    for thing in things:
        try:
            step = apply(replace(turn, ledger=Ledger((thing,)), clause=clause, last=thing.id))
        except Unclear:
            raise unclear from None
        if [each.id for each in step.ledger.things] != [thing.id] or replace(step.ledger, things=()) != Ledger():
            raise unclear
        known[thing.id] = step.ledger.things[0]
        steps.append(step)
    notes = "; ".join(step.note for step in steps)
    return Step(replace(turn.ledger, things=tuple(known.values())), notes, turn.last)


def _slotted(turn: Turn) -> Step | None:
    """A colour, number or place for known things. None where the clause names none, or has a word that is not understood."""
    ledger, text, spoken = turn.ledger, turn.clause, list(spoken_of(turn.ledger, turn.clause))
    # "make it three cubes" speaks of cubes, "move it above the cubes" of two things
    if not spoken or _PLACE.search(text):
        text = named(ledger, text, turn.last)
        spoken = list(spoken_of(ledger, text))
    if not spoken:
        return None
    rest = "".join(
        " " if any(each.start <= at < each.end for each in spoken) else letter for at, letter in enumerate(text)
    )
    if len(spoken) > 1 and spoken[0].thing.id != spoken[1].thing.id:
        place = _PLACE.search(text, spoken[0].end, spoken[1].start)
        if place is None or len(spoken) > 2 or not _FILLERS.fullmatch(_PLACE.sub(" ", rest, count=1)):
            return None
        return _moved(ledger, Relation(spoken[0].thing.id, RELATIONS[place[0].lower()], spoken[1].thing.id))
    thing, number = spoken[0].thing, spoken[0].number
    rest = re.sub(rf"\binstead of {COLOUR_LIST}$", " ", rest, flags=re.I)
    if colours := re.search(COLOUR_LIST, rest, re.I):
        rest = rest.replace(colours[0], " ", 1)
    step = None
    if number is None and (
        found := re.search(rf"\b({NUMBER})(?: (?:(?P<more>more)|(?P<fewer>fewer|less)))?\b", rest, re.I)
    ):
        number, step = found[1], found
        rest = rest.replace(found[0], " ", 1)
    if (colours is None and number is None) or not _FILLERS.fullmatch(rest):
        return None
    if text == turn.clause:
        the_one(spoken[0])
    if number is not None:
        count = parse_number(number)
        if step is not None and (step["more"] or step["fewer"]):
            count = (thing.count or 1) + (count if step["more"] else -count)
        if count <= 0:
            return _without(ledger, thing)
    changed = replace(thing, count=count) if number is not None else thing
    if colours is not None:
        ledger, part = apart(ledger, spoken[0], turn.next_id)
        thing = part if part.id == turn.next_id else changed
        changed = replace(thing, colours=read(f"a {colours[0]} thing").things[0].colours)
    return _changed(ledger, changed)


def _unwritten(turn: Turn, found: re.Match[str]) -> Step | None:
    """Words in the picture go: those in quotation marks, or all of them. "The letters" may be things."""
    if found["word"] and any(spoken_of(turn.ledger, f"the {found['word']}")):
        return None
    gone = {each.translate(turn.quoted).casefold() for each in re.findall(r'"([^"]+)"', found["texts"] or "")}
    kept = tuple(each for each in turn.ledger.texts if gone and each.casefold() not in gone)
    num_gone = len(turn.ledger.texts) - len(kept)
    is_clear, place = num_gone > 0 and num_gone == (len(gone) or num_gone), found["place"]
    if place and not re.search(r" (?:picture|image)$", place, re.I):
        is_here = place.endswith(" it") or any(spoken_of(turn.ledger, place))
        is_clear = is_clear and is_here and (bool(gone) or num_gone == 1)
    if not is_clear and place:
        raise Unclear(f"What is to change by {turn.clause!r}?")
    if not is_clear:
        return None
    removed = [each for each in turn.ledger.texts if each not in kept]
    note = "; ".join(f"removed the words {text!r}" for text in removed)
    absent = (*turn.ledger.absent, "text") if found["no"] and not gone else turn.ledger.absent
    return Step(replace(turn.ledger, texts=kept, absent=absent), note, turn.last)


def _removed(turn: Turn, found: re.Match[str]) -> Step:
    text = of_them(turn.ledger, found["what"], turn.last)
    spoken = list(spoken_of(turn.ledger, text))
    if not spoken:
        bare = without_article(found["what"])
        raise Unclear(f"There is no {bare}; what is to go?", phrase=found["what"], noun=bare)
    chosen = spoken[:1]  # "the cube and the cone" are two to be removed, of "the cube left of the cone" it is one
    for before, each in pairwise(spoken):
        if not re.fullmatch(r"[\s,]*(?:and\s+)?(?:(?:the|all|both)\s+)*", text[before.end : each.start], re.I):
            break
        chosen.append(each)
    if re.match(r"\s*too$|\s*$", text[chosen[-1].end :]) is None and not _PLACE.match(text[chosen[-1].end :].strip()):
        raise Unclear(
            f"Is the {chosen[-1].thing.noun} to go? {found['what']!r} was not understood.",
            f"remove the {chosen[-1].thing.name}",
        )
    ledger, gone = turn.ledger, list[Thing]()
    for place, each in enumerate({each.thing.id: each for each in chosen}.values()):
        if text == found["what"] or each.thing.id != turn.last:  # "them" are the things last spoken of
            the_one(each)
        ledger, part = apart(ledger, each, turn.next_id + place)
        gone.append(part)
    return _without(ledger, *gone)


def _forbidden(turn: Turn, found: re.Match[str]) -> Step | None:
    """ "No triangles": those that are there go, and none may appear."""
    what = re.sub(r"^(?:any|the|a|an)\s+", "", found["what"], flags=re.I)
    if re.search(rf"\b(?:more|fewer|less) than\b|^{NUMBER}\b", what, re.I):
        return None
    if re.fullmatch(COLOUR, what, re.I):  # "not black"
        painted = [each for each in turn.ledger.things if what.lower() in each.colours and turn.last in (None, each.id)]
        return _changed(turn.ledger, replace(painted[0], colours=())) if len(painted) == 1 else None
    meant = read(f"no {what}")
    if meant.things or meant.unread or not meant.absent:
        return None
    gone = {each.thing.id: each.thing for each in spoken_of(turn.ledger, what)}.values()
    step = _without(turn.ledger, *gone)
    absent = tuple(dict.fromkeys((*step.ledger.absent, *meant.absent)))
    return Step(replace(step.ledger, absent=absent), step.note if gone else f"no {what}", None)


def _only(turn: Turn, found: re.Match[str]) -> Step | None:
    """Every thing goes but those that are named."""
    kept = {each.thing.id for each in spoken_of(turn.ledger, of_them(turn.ledger, found["what"], turn.last))}
    if not kept:
        bare = without_article(found["what"])
        raise Unclear(f"There is no {bare}; what is to stay?", phrase=found["what"], noun=bare)
    return _without(turn.ledger, *(each for each in turn.ledger.things if each.id not in kept))


def _cleared(turn: Turn, found: re.Match[str]) -> Step:
    if found["sure"]:
        return Step(Ledger(), "an empty picture", None)
    raise Unclear("Is everything to go?", yes="remove everything at once")


def _brought_back(turn: Turn, found: re.Match[str]) -> Step | None:
    """Things of an earlier state that are not there now, with their relations to those that are."""
    what = next(filter(None, found.groups()))
    here = {each.id for each in turn.ledger.things}
    for state in reversed(turn.states[:-1]):
        gone = [each for each in state.things if each.id not in here]
        if not re.fullmatch("it|them|that|those|these|both|one", what, re.I):
            named = {each.thing.id for each in spoken_of(replace(state, things=tuple(gone)), what)}
            gone = [each for each in gone if each.id in named]
        if gone:
            there = here | {each.id for each in gone}
            links = [
                each
                for each in state.relations
                if {each.subject, each.other} <= there and each not in turn.ledger.relations
            ]
            absent = tuple(each for each in turn.ledger.absent if each not in {thing.noun for thing in gone})
            things = tuple(sorted((*turn.ledger.things, *gone), key=lambda each: each.id))
            ledger = replace(turn.ledger, things=things, relations=(*turn.ledger.relations, *links), absent=absent)
            return Step(ledger, "; ".join(f"{each.name} is back" for each in gone), gone[-1].id)
    return None


def _exchanged(turn: Turn, found: re.Match[str]) -> Step | None:
    """The colours, or else the places, of the only two things change sides."""
    if len(turn.ledger.things) != 2:
        return None
    first, second = turn.ledger.things
    turned = tuple(replace(each, kind=INVERSE[each.kind]) for each in turn.ledger.relations if each.kind in INVERSE)
    if turned and not found["colours"]:
        rest = [each for each in turn.ledger.relations if each.kind not in INVERSE]
        return Step(replace(turn.ledger, relations=(*rest, *turned)), "the places are exchanged", turn.last)
    things = replace(first, colours=second.colours), replace(second, colours=first.colours)
    return Step(replace(turn.ledger, things=things), "the colours are exchanged", turn.last)


def _how_many(turn: Turn, found: re.Match[str]) -> Step | None:
    spoken = list(spoken_of(turn.ledger, found["what"]))
    if not spoken:
        return None
    thing = spoken[0].thing
    question = Unclear(f"How many {plural(thing.noun)} are there to be?", phrase=HOW_MANY[0])
    question.question = replace(question.question, turn=f"make it {HOW_MANY[0]} {plural(thing.noun)}")
    raise question


def _one_more(turn: Turn, found: re.Match[str]) -> Step | None:
    """ "Two more cubes", or "one more" of the thing mentioned last. Only for things that the ledger describes by their number alone."""
    what = found["what"]
    spoken = list(spoken_of(turn.ledger, f"the {what}")) if what else []
    thing = spoken[0].thing if spoken else _it(turn) if not what else None
    if thing is None or thing.count is None or (what and (thing.colours or thing.qualities)):
        return None
    return _changed(turn.ledger, replace(thing, count=thing.count + parse_number(found["number"] or "one")))


def _counted(turn: Turn, found: re.Match[str]) -> Step | None:
    """A number alone: of the thing last spoken of."""
    thing, number = _it(turn), parse_number(found["number"])
    return None if thing is None or not number else _changed(turn.ledger, replace(thing, count=number))


def _recoloured(turn: Turn, found: re.Match[str]) -> Step | None:
    """A colour alone: of the thing last spoken of."""
    if (thing := _it(turn)) is None:
        return None
    return _changed(turn.ledger, replace(thing, colours=read(f"a {found['colour']} thing").things[0].colours))


def _qualified(turn: Turn, found: re.Match[str]) -> Step | None:
    """A size or other quality; its opposites go."""
    what = re.sub(rf"^({NUMBER})$", r"\1 of them", (found["what"] or "").strip(), flags=re.I)
    text = named(turn.ledger, what, turn.last)
    spoken = list(spoken_of(turn.ledger, text))
    word = found["quality"].lower()
    quality = _COMPARED.get(word, word)
    if quality not in QUALITIES:
        return None
    if not spoken and (bare := without_article(what)) and bare not in ("it", "them", "that"):
        raise _absent_thing(bare, what, turn.clause)
    if len(spoken) > 1 or (
        spoken and re.search(r"\b(?!(?:the|of|all)\b)\w", text[: spoken[0].start] + text[spoken[0].end :], re.I)
    ):
        raise Unclear(f"What is to change by {turn.clause!r}?")
    ledger, thing = turn.ledger, _it(turn)
    if spoken:
        if what and turn.clause.find(what) >= 0:
            the_one(spoken[0])
        ledger, thing = apart(ledger, spoken[0], turn.next_id)
        if spoken[0].number is not None and thing.count != parse_number(spoken[0].number):
            raise Unclear(
                f"What is to change by {turn.clause!r}? There are {thing.count or 'some'} {plural(thing.noun)}."
            )
    if thing is None or (what == "them" and thing.count == 1 and len(turn.ledger.things) > 1):
        return None
    opposite = next((each for pair in _OPPOSITES for each in (pair, pair[::-1]) if quality in each[0]), ((), ()))
    kept = [each for each in thing.qualities if each not in opposite[0] + opposite[1]]
    return _changed(ledger, replace(thing, qualities=tuple(sorted((*kept, quality)))))


def _aside(turn: Turn, found: re.Match[str]) -> Step | None:
    """ "On the right instead", "above it": another place beside the thing to which the ledger relates it."""
    spoken = list(spoken_of(turn.ledger, named(turn.ledger, found["what"] or "it", turn.last)))
    kind = f"{found['side'].lower()} of" if found["side"] else RELATIONS[found["place"].lower()]
    if not spoken:
        return None
    thing = spoken[0].thing
    for relation in turn.ledger.relations:
        if thing.id in (relation.subject, relation.other) and relation.kind in INVERSE:
            other = relation.other if relation.subject == thing.id else relation.subject
            return _moved(turn.ledger, Relation(thing.id, kind, other))
    return None


def _replaced(turn: Turn, found: re.Match[str]) -> Step | None:
    spoken = list(spoken_of(turn.ledger, of_them(turn.ledger, found["what"], turn.last)))
    new = read(found["other"]).things
    if len(new) != 1:
        raise Unclear(f"What is to be there instead of {found['what']}?")
    if not spoken:
        raise _absent_thing(without_article(found["what"]), found["what"], turn.clause)
    the_one(spoken[0])
    ledger, thing = apart(turn.ledger, spoken[0], turn.next_id)
    return _changed(ledger, replace(new[0], id=thing.id, colours=new[0].colours or thing.colours))


def _became(turn: Turn, found: re.Match[str]) -> Step | None:
    """ "Make it a bedroom": another noun, where the phrase has one that is not a colour or quality."""
    other = re.fullmatch(r"an? (?:[\w-]+ )*?([\w-]+)", found["other"], re.I)
    if (
        other is None
        or re.search("(?:er|bit|little|lot|more|less)$", other[1])
        or other[1] in COLOURS | QUALITIES
        or (thing := _it(turn)) is None
    ):
        return None
    return _changed(turn.ledger, replace(read(found["other"]).things[0], id=thing.id))


def _resized(turn: Turn, found: re.Match[str]) -> Step:
    size = int(found["width"]), int(found["height"])
    return Step(replace(turn.ledger, size=size), f"{size[0]}x{size[1]}", turn.last)


def _reworded(turn: Turn, found: re.Match[str]) -> Step:
    return Step(replace(turn.ledger, texts=(found["text"],)), f"the words {found['text']!r}", turn.last)


def _left(turn: Turn, found: re.Match[str]) -> Step:
    return Step(turn.ledger, "left as it is", turn.last)


def _changed(ledger: Ledger, thing: Thing) -> Step:
    things = tuple(thing if each.id == thing.id else each for each in ledger.things)
    return Step(replace(ledger, things=things), f"now {thing.count or 'some'} {thing.name}", thing.id)


def _without(ledger: Ledger, *gone: Thing, last: int | None = None) -> Step:
    """The ledger without some things and their relations."""
    ids = {each.id for each in gone}
    things = tuple(each for each in ledger.things if each.id not in ids)
    relations = tuple(each for each in ledger.relations if not ids & {each.subject, each.other})
    note = "; ".join(f"removed {each.name}" for each in gone) or "it is so already"
    return Step(replace(ledger, things=things, relations=relations), note, last)


def _moved(ledger: Ledger, relation: Relation) -> Step:
    _check_between(ledger, (relation,))
    note = f"{ledger.thing(relation.subject).name} {relation.kind} {ledger.thing(relation.other).name}"
    return Step(replace(ledger, relations=_latest(ledger.relations, (relation,))), note, relation.subject)


def _check_between(ledger: Ledger, moved: tuple[Relation, ...]) -> None:
    """Raises `Unclear` where a thing would be between one thing alone."""
    between = [each for each in moved if each.kind == "between"]
    for subject in {each.subject for each in between}:
        if sum(ledger.thing(each.other).count or 2 for each in between if each.subject == subject) < 2:
            raise Unclear(f"Between which things is the {ledger.thing(subject).name} to be?")


def _it(turn: Turn) -> Thing | None:
    """The thing last spoken of, or the only one."""
    found = [each for each in turn.ledger.things if each.id == turn.last] or turn.ledger.things
    return found[0] if len(found) == 1 else None


def _latest(before: tuple[Relation, ...], new: tuple[Relation, ...]) -> tuple[Relation, ...]:
    pairs = {frozenset((each.subject, each.other)) for each in new}
    return tuple(each for each in before if frozenset((each.subject, each.other)) not in pairs) + new


def bare(text: str) -> str:
    """``text`` without politeness before it and marks after it."""
    text = re.sub(r",? please$", "", text.strip().rstrip(".! "), flags=re.I)
    while found := _POLITE.match(text):
        text = text[found.end() :]
    return text.rstrip("? ") if not re.match(r"(?:is|are|do|does|what|which|who|where|why|how)\b", text, re.I) else text


_NEW = r"add|include|insert|draw|also"
_PLACE = re.compile(rf"\b(?:{'|'.join(sorted(RELATIONS, key=len, reverse=True))})\b", re.I)
_FILLERS = re.compile(
    r"(?:[^\w'’-]|\b(?:a|all|an|and|as|be|belongs?|better|both|bring|can|change|colou?r|completely|could|directly|do|enough|entirely|exactly|for|"
    r"give|go(?:es)?|has|have|i|i['’]?d|in|is|it|its|just|let|let['’]s|like|look|make|move|must|needs?|number|of|only|paint|place|prefer|put|rather|"
    r"really|re-?colou?r|relocate|see|set|shift|should|so|that|the|their|them|there|these|those|to|turn|use|want|will|with|would|"
    r"after all|as well|too$|instead(?! of)|are|at|now)\b|['’]s\b)*",
    re.I,
)
"""Words of a turn that do not change its meaning. With any other word beside the thing and its colour, number or place it is not understood."""
_PUT = r"(?:move|put|place|shift|set)"
HOW_MANY: Final = ("how many",)
_COMPARED: Final = {
    "bigger": "big",
    "larger": "large",
    "smaller": "small",
    "taller": "tall",
    "shorter": "short",
    "longer": "long",
    "wider": "wide",
}
_OPPOSITES: Final = (
    (("big", "large", "huge"), ("small", "little", "tiny")), (("tall", "long"), ("short",)), (("open",), ("closed",)), (("empty",), ("full",)),
)  # fmt: skip
_GO = r"(?:remove|delete|take away|take out|drop|get rid of|erase|hide|leave out|lose|never mind|(?:do not|don['’]t) (?:show|draw|paint|include))"
WRITING = "words?|text|texts|writing|letters|lettering|captions?"
_ALL = r"(?:everything|(?:all|both) of (?:it|them|that)|(?:it|them) (?:all|both)|all|both)"
_Change = Callable[[Turn, "re.Match[str]"], Step | None]
CHANGES: Final[tuple[tuple[re.Pattern[str], _Change], ...]] = tuple(
    (re.compile(pattern, re.I), change)
    for pattern, change in (
        (
            r"(?:make|let|set|render|resize)?(?: it| the (?:picture|image|size))*(?: be)?(?: to)?\s*"
            r"(?P<width>\d{1,5})\s*[x×]\s*(?P<height>\d{1,5})\s*(?:px|pixels)?", _resized,
        ),
        (
            r"(?:change|let|make|set)?\s*(?:it|the (?:text|words?|sign|caption|title))(?: (?:should|must|to|so that it))*\s*"
            r"(?:say|says|read|be|to)?\s*[\"“'](?P<text>[^\"”']+)[\"”']", _reworded,
        ),
        (r"(?:do not|don['’]t|never) (?:remove|delete|change|touch|hide) .+", _left),
        (rf"(?:{_GO}|clear) {_ALL}(?: else)? (?:but|except|besides|apart from)(?: for)? (?P<what>.+)", _only),
        (r"(?:keep |leave |show )?(?:just|only) (?P<what>(?:the|it|them)\b.*)", _only),
        (rf"(?:{_GO}|clear) {_ALL}(?P<sure> at once)?|clear(?P<now>)", _cleared),
        (r"(?:bring|put|add|get) back (?P<what>.+)|(?:put|bring|add|get|i (?:want|need)|i['’]d like) (.+?) back(?: in)?|show (.+?) again|"
         r"(?:leave|keep|put) (the .+?) in(?: again)?|with (it|them|one|the .+?) after all", _brought_back),
        (
            rf"(?:{_GO}|(?P<no>(?:there (?:should|must|may) be )?(?:no|without)|i (?:do not|don['’]t) (?:want|need)))(?: (?:the|any|all))?"
            rf"(?: (?:the|of the))?(?= ?(?:(?:{WRITING})\b|\"))(?: (?P<word>{WRITING}))?(?P<texts>(?:(?:,| and|, and)? ?\"[^\"]+\")+)?"
            r"(?P<place> (?:on|from|in) (?:it|the [\w -]+))?", _unwritten,
        ),
        (rf"{_GO} (?P<what>.+)", _removed),
        (r"take (?P<what>.+?) (?:away|out)", _removed),
        (r"(?P<what>the .+?) (?:should|must|need|is|are|does)(?: not|n['’]t) (?:be )?(?:there|shown|visible|necessary|needed|wanted|required|in it)", _removed),
        (r"i(?:['’]d| would) rather not have (?P<what>the .+)", _removed),
        (r"(?:(?:there (?:should|must|may) be )?(?:no|without|not)|i (?:do not|don['’]t) (?:want|need))(?: any)? (?P<what>.+)", _forbidden),
        (r"(?:swap|exchange|switch|flip|reverse)(?: (?:them|both|the two))?(?P<colours>(?: their| the)? colou?rs)?|the other way (?:a?round)", _exchanged),
        (r"(?:replace|swap|exchange) (?P<what>.+?) (?:with|by|for) (?P<other>.+)", _replaced),
        (r"(?:change|turn) (?P<what>.+?) into (?P<other>(?:an?|\d+|one|two|three) .+)", _replaced),
        (rf"(?:add )?(?:(?P<number>{NUMBER}) more|another|a second)(?: (?P<what>[a-z-]+))?", _one_more),
        (rf"(?:(?:make|have) (?:it|that|them) |just |only )?(?P<number>{NUMBER})(?: of (?:them|those))?", _counted),
        (
            rf"(?:(?:(?:i want|make|have) )?(?:some )?(?:more|fewer|less)|(?:at least|at most|no more than|more than|fewer than) {NUMBER}) "
            r"(?P<what>[\w -]+)", _how_many,
        ),
        (rf"(?:i said |rather |in |make (?:it|that) |not [\w-]+, )?(?P<colour>{COLOUR_LIST})(?: instead| rather| after all)?", _recoloured),
        (rf"(?:make |let )?(?P<what>(?:it|them|the [\w -]+?|{NUMBER}(?: [\w -]+?)?) )?(?:(?:should|must) be |be |is to be |has to be )?"
         r"(?:(?:even|much|far|slightly|somewhat|very|a (?:bit|little|lot)) |twice as )?"
         rf"(?P<quality>{'|'.join(_COMPARED)}|{'|'.join(sorted(QUALITIES))})", _qualified),
        (
            r"(?:put |move |place )?(?P<what>(?:it|them|the [\w -]+?) )?(?:(?:to|on) the (?P<side>left|right)(?: side)?|"
            r"(?P<place>above|below|under|behind|in front of|next to) it)(?: instead)?", _aside,
        ),
        (r"(?:make|let) (?:it|that)(?: be)? (?P<other>an? .+)", _became),
    )
)  # fmt: skip
