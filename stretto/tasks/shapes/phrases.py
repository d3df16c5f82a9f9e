"""Noun phrases of a parsed request, with what spaCy's parse takes for nouns taken out again."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from stretto.tasks.shapes.words import COLOURS, NOUNS_IN_ING, QUALITIES, VERBS, word_set

_GERUNDS: Final = word_set(
    "cutting racing rocking flying hunting playing fishing boxing bowling baking cooking frying ironing running jogging riding skating "
    "writing reading training landing loading warning boarding hiking climbing washing welding measuring mixing serving changing waiting "
    "meeting operating rolling folding sleeping skiing surfing walking knitting drinking batting shooting smoking smiling talking teaching "
    "watching working wrapping eating"
)
"""Words in -ing that say what the noun behind them is for: "a marble cutting board"."""
_ACTS: Final = word_set("lays kneels waits looks leans rests poses crouches perches")


@dataclass(frozen=True, slots=True)
class NounPhrases:
    """Noun phrases of a request, by positions of tokens."""

    spans: tuple[tuple[int, int], ...]
    """First token, and the one behind the last."""
    acts: tuple[int, ...]
    """Verbs that the parse took for the head of the noun before them."""
    deeds: tuple[int, ...]
    """Words in -ing between two nouns that the parse took for one."""

    @classmethod
    def of(cls, doc: Any) -> NounPhrases:
        """The noun phrases of ``doc``, a text that spaCy has parsed."""
        acts, deeds = list[int](), list[int]()
        spans = [span for run in _runs(doc) for span in _divided(doc, *run, acts, deeds)]
        return cls(tuple(spans), tuple(acts), tuple(deeds))


def _runs(doc: Any) -> Iterator[tuple[int, int]]:
    """Noun phrases: runs of determiners, numbers, adjectives and nouns that end with a noun or began with a determiner."""
    start = None
    for at, token in enumerate(doc):
        is_first = (
            token.pos_ == "DET"
            or (token.pos_ == "PRON" and token.dep_ == "poss")
            or (
                token.pos_ == "NUM"
                and not re.search(r"[-\u2011][a-z]", token.lower_)  # "a blue 2-door car"
                and not is_noun(token)
                and not (at and is_noun(doc[at - 1]))
            )
        )
        joins = (
            token.text.lower() == "and"
            and start is not None
            and {doc[at - 1].lower_, doc[min(at + 1, len(doc) - 1)].lower_} <= COLOURS
        )
        fits = (
            is_first
            or joins
            or token.tag_ == "POS"
            or token.pos_ in ("ADJ", "NOUN", "PROPN", "X", "NUM", "ADV")
            or token.dep_ == "amod"
        )
        if token.tag_ in ("WDT", "WP", "EX") or token.text == "§" or (token.pos_ == "ADV" and token.dep_ != "advmod"):
            fits = False
        if start is not None and (not fits or (is_first and doc[at - 1].pos_ != "DET")):
            yield start, at
            start = None
        if fits and start is None:
            start = at
    if start is not None:
        yield start, len(doc)


def _divided(doc: Any, start: int, end: int, acts: list[int], deeds: list[int]) -> Iterator[tuple[int, int]]:
    """The noun phrases of one run, without the verbs at its end and between them; these go to ``acts`` and ``deeds``."""
    while end > start and not is_noun(doc[end - 1]):
        end -= 1
    if (
        end > start + 1
        and doc[end - 1].text.endswith("ing")
        and doc[end - 1].lower_ not in NOUNS_IN_ING
        and is_noun(doc[end - 2])
    ):
        end -= 1  # "a balloon landing"
    last = doc[end - 1]
    if (
        end > start + 2
        and last.tag_ in ("NNS", "NNPS")
        and last.lower_ in VERBS.keys() | _ACTS
        and doc[start].lower_ in ("a", "an")
        and is_noun(doc[end - 2])
    ):
        end -= 1  # "an airplane flies", parsed as one noun
        acts.append(end)
    for at in range(start + 1, end - 1):
        if _is_deed(doc, start, at):  # "a dragon breathing fire", parsed as one noun
            deeds.append(at)
            yield start, at
            start = at + 1
    if end > start:
        yield start, end


def _is_deed(doc: Any, start: int, at: int) -> bool:
    """Whether a word in -ing inside of a noun phrase is what the noun before it does."""
    word, before, after = doc[at], doc[at - 1], doc[at + 1]
    return (
        word.lower_.endswith("ing")
        and word.lower_ not in NOUNS_IN_ING | _GERUNDS
        and doc[start].pos_ in ("DET", "NUM")
        and before.pos_ in ("NOUN", "PROPN")
        and after.pos_ in ("NOUN", "PROPN", "ADJ")
        and before.lower_ not in QUALITIES | COLOURS
    )


def is_noun(token: Any) -> bool:
    """Whether ``token`` can be the last word of a noun phrase."""
    is_determined = (token.i > 0 and token.nbor(-1).pos_ in ("DET", "NUM")) or token.pos_ == "X"
    if (
        token.i > 0
        and token.pos_ == "ADJ"
        and token.nbor(-1).pos_ == "NOUN"
        and token.dep_ == "amod"
        and token.head.i < token.i
    ):
        # "a fire hydrant", read as an adjective
        return token.lower_ not in COLOURS | QUALITIES and re.search("^a|[bn]le$|ed$", token.lower_) is None
    if token.pos_ == "NUM" and token.i > 0 and token.nbor(-1).pos_ == "PROPN":  # "a Porsche 911"
        return True
    return (
        token.pos_ in ("NOUN", "PROPN")
        or (token.lower_ in ("one", "ones") and token.i > 0 and token.nbor(-1).pos_ in ("ADJ", "DET"))
        or (
            is_determined
            and token.pos_ in ("ADJ", "X", "VERB")
            and token.lower_ not in COLOURS | QUALITIES
            and not (token.tag_ == "VBG" and token.nbor(-1).pos_ == "NUM")  # "a family of four posing"
        )
    )
