"""A conversation that changes a ledger, turn by turn, with questions, answers and undo.

A turn is read against the current ledger: "the cube" and "it" are things of the ledger, everything else is new. `stretto.tasks.shapes.changes`
has the changes. A turn after which the ledger contradicts itself, or that speaks of a thing that is not there, changes nothing: the
program asks, and remembers what it asked (`Question`), so that the next turn can be yes, no, or a correction.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from stretto.base.errors import UserError
from stretto.tasks.shapes.changes import CHANGES, HOW_MANY, WRITING, Turn, apply, bare
from stretto.tasks.shapes.ledger import Ledger, contradictions
from stretto.tasks.shapes.mentions import COLOUR, NUMBER, Question, Unclear, parse_number, spoken_of
from stretto.tasks.shapes.rules import QUOTED, check_language
from stretto.tasks.shapes.words import COLOURS, plural

_FIRST_SIGN = 0x13000
"""Code point of the first Egyptian hieroglyph. One rare letter stands for each text in quotation marks."""
_CLAUSES = re.compile(
    r";\s*|\.\s+|,? and then |, then |,? and (?=(?:make|move|put|place|add|remove|delete|change|turn|replace)\b)"
    rf"|(?:{'|'.join(f'(?<= {colour})' for colour in sorted(COLOURS))}),? and (?=the (?:[\w-]+ ){{1,4}}?{COLOUR}(?:$|[,.;]))",
    re.I,
)
"""Borders between the changes of a turn. The last alternative is for "make the cube red and the sphere blue"."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """The ledgers of a conversation, one a change. Every turn makes a new conversation."""

    states: tuple[Ledger, ...] = (Ledger(),)
    last: int | None = None
    """The thing that "it" stands for."""
    next_id: int = 0
    asked: Question | None = None
    """Question that the next turn may answer."""

    @property
    def now(self) -> Ledger:
        return self.states[-1]


@dataclass(frozen=True, slots=True)
class Told:
    """Result of a turn."""

    conversation: Conversation
    notes: tuple[str, ...] = ()
    """What was done, for the user."""
    questions: tuple[str, ...] = ()
    """Where there are any, the ledger has not changed."""


def tell(conversation: Conversation, text: str) -> Told:
    """The conversation after a user's turn.

    Raises:
        UserError: the text is empty, in another language, or undoes more changes than there are.
    """
    check_language(text)
    hidden = {_FIRST_SIGN + at: next(filter(None, each.groups())) for at, each in enumerate(QUOTED.finditer(text))}
    signs = map(chr, hidden)
    told = _told(conversation, QUOTED.sub(lambda _: f'"{next(signs)}"', text), hidden)
    after = told.conversation
    if after.asked is not None:
        asked = after.asked
        shown = (each.translate(hidden) for each in (asked.says, asked.yes, asked.turn, asked.phrase, asked.noun))
        after = replace(after, asked=Question(*shown))
    if hidden and not told.questions:
        now = after.now
        texts, unread = ([each.translate(hidden) for each in row] for row in (now.texts, now.unread))
        now = replace(now, texts=tuple(dict.fromkeys(texts)), unread=tuple(unread))
        after = replace(after, states=(*after.states[:-1], now))
    notes, questions = ([each.translate(hidden) for each in row] for row in (told.notes, told.questions))
    return Told(after, tuple(notes), tuple(questions))


def _told(conversation: Conversation, text: str, quoted: dict[int, str]) -> Told:
    """`tell`, of a turn in which a sign stands for each text in quotation marks."""
    asked, conversation = conversation.asked, replace(conversation, asked=None)
    if asked is not None and (answer := _answer(conversation.now, asked, text)) is not None:
        if not answer:
            return Told(conversation, ("left as it is",))
        told = _changed_by(conversation, answer, quoted)
        if (
            told.questions and answer == asked.yes
        ):  # without a second question: add the thing, and leave the rest of the turn
            return _changed_by(conversation, answer.partition("; ")[0], quoted)
        return told
    if _AGREED.fullmatch(text.strip(" .!,")):
        return Told(conversation, ("nothing to change",))
    return _changed_by(conversation, text, quoted)


def _answer(ledger: Ledger, asked: Question, text: str) -> str | None:
    """The turn that an answer to a question stands for; empty: change nothing; None: the text is not an answer, but a turn of its own."""
    plain = re.sub(r",? please$", "", text.strip(" .!?"), flags=re.I)
    if found := _YES.match(plain):
        rest = plain[found.end() :].strip(" ,.!")
        if not rest or re.fullmatch(r"(?:please )?(?:do|add) (?:it|so|that|one)|please", rest, re.I):
            return asked.yes or (f"add a {asked.noun}" if rest and asked.noun else "")
        return re.sub(r"^(?:add )?(.*?)\bones?$", rf"add \1{asked.noun}", rest, flags=re.I) if asked.noun else rest
    if asked.noun and re.fullmatch(r"(?:please )?add (?:it|one)", plain, re.I):
        return f"add a {asked.noun}"
    if re.fullmatch(r"never mind|cancel|forget it", plain, re.I):
        return ""
    if found := _NO.match(plain):
        plain = plain[found.end() :].strip(" ,.!")
        if not plain or _AGREED.fullmatch(plain):
            return ""
    plain = re.sub(
        r"^(?:but |rather |i (?:meant|mean|said) |make (?:it|that) (?=" + NUMBER + "$))+", "", plain, flags=re.I
    )
    is_number = re.fullmatch(NUMBER, plain, re.I) is not None
    spoken = list(spoken_of(ledger, plain))
    is_phrase = (
        len(spoken) == 1
        and not re.sub(
            r"\b(?:the|that|this|those|these)\b", "", plain[: spoken[0].start] + plain[spoken[0].end :]
        ).strip()
    )
    if asked.phrase and (is_number if asked.phrase in HOW_MANY else is_phrase):
        return re.sub(rf"\b{re.escape(asked.phrase)}\b", plain, asked.turn, count=1, flags=re.I)
    return None


def _changed_by(conversation: Conversation, text: str, quoted: dict[int, str]) -> Told:
    """The conversation after a turn that is not an answer."""
    plain = bare(text.strip())
    if _UNDO.search(plain) and not list(spoken_of(conversation.now, plain)):
        if re.search(r"\bundo\b.*\bundo\b", plain, re.I):
            return _asking(
                conversation, Question("What was undone cannot be brought back. What is to change?", turn=text)
            )
        found, there = re.search(rf"\b{NUMBER}\b", plain, re.I), len(conversation.states) - 1
        num = parse_number(found[0]) if found else there if re.search(r"\b(?:all|everything)\b", plain, re.I) else 1
        if there == 0:
            raise UserError("undo: nothing was changed yet; describe the picture")
        if not 0 < num <= there:
            raise UserError(f"undo: the number of changes is {there}, not {num}; undo fewer")
        return Told(replace(conversation, states=conversation.states[:-num], last=None), (f"{num} taken back",))
    after, notes, ledger = conversation, list[str](), conversation.now
    if found := _ANEW.match(plain):
        plain = plain[found.end() :]
        if not plain and ledger == Ledger():
            return Told(conversation, ("the picture is empty already",))
        if not plain:
            return _asking(conversation, Question("Is everything to go?", yes="remove everything at once", turn=text))
        ledger, after = Ledger(), replace(after, last=None)
        notes.append("a new picture")
    plain = re.sub(r"\bso (?:that )?(?:it|they) (?:is|are)\b", "", plain, flags=re.I)
    is_first = ledger == Ledger() and not any(pattern.fullmatch(plain) for pattern, _ in CHANGES)
    for clause in [plain] if is_first else filter(None, map(bare, _CLAUSES.split(plain))):
        try:
            step = apply(Turn(ledger, clause, after.last, after.next_id, conversation.states, quoted))
        except Unclear as unclear:
            return _asking(conversation, replace(unclear.question, turn=unclear.question.turn or clause))
        ledger = step.ledger
        next_id = max((after.next_id, *(thing.id + 1 for thing in ledger.things)))
        after = replace(after, last=step.last, next_id=next_id)
        notes += filter(None, [step.note])
    if {*ledger.texts} - {*conversation.now.texts}:  # after "no text", words that are added are wanted
        ledger = replace(ledger, absent=tuple(each for each in ledger.absent if not re.fullmatch(WRITING, each)))
    if questions := contradictions(ledger):
        return Told(replace(conversation, asked=Question(questions[0], turn=text)), (), questions)
    gone = [each.noun for each in conversation.now.things if each not in ledger.things]
    gone += [ledger.thing(each.subject).noun for each in ledger.relations if each not in conversation.now.relations]
    before = {*conversation.now.unread}
    unread = tuple(
        each for each in ledger.unread if each not in before or not any(_mentions(each, noun) for noun in gone)
    )
    notes += [f"not understood, and passed on in your own words: {each}" for each in unread if each not in before]
    ledger = replace(ledger, unread=unread)
    return Told(replace(after, states=(*after.states, ledger)), tuple(notes))


def _asking(conversation: Conversation, question: Question) -> Told:
    if len(spoken := {each.thing.id for each in spoken_of(conversation.now, question.turn)}) == 1:
        conversation = replace(conversation, last=spoken.pop())
    return Told(replace(conversation, asked=question), (), (question.says,))


def _mentions(sentence: str, noun: str) -> bool:
    return re.search(rf"\b(?:{re.escape(noun)}|{re.escape(plural(noun))})\b", sentence, re.I) is not None


_UNDO = re.compile(
    r"\b(?:undo|revert|cancel|never mind|as it was|as before)\b|\b(?:go|take|step) (?:\w+ ){0,3}?back\b", re.I
)
_ANEW = re.compile(r"(?:start over|start again|new picture|forget (?:it|everything|all that))(?:\s*[:,;.]\s*|$)", re.I)
_YES = re.compile(
    r"(?:yes|yeah|yep|yup|sure|ok(?:ay)?|please do|go ahead|do (?:it|so|that)|of course|correct|right|exactly)\b", re.I
)
_NO = re.compile(r"(?:no|nope|nah|not really|please don['’]t|don['’]t)(?=\s*(?:[,.;!:]|$))", re.I)
_AGREED = re.compile(
    r"(?:(?:yes|no|ok(?:ay)?|sure|yeah|nope|thanks?(?: you)?(?: very much| a lot)?|perfect|great|good|nice|lovely|fine|that['’]s (?:it|all|fine|good|right))"
    r"[,.! ]*)*(?:(?:leave|keep) (?:it|that|this)(?: as it is| like that| so)?|(?:do |add |change )?nothing(?: else| more)?|that is all)?",
    re.I,
)
