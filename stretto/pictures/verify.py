"""What a picture shows of what it must show: shapes exactly, words by reading them, the rest by a model that sees, where one is given.

Each verifier judges its part of a ledger and leaves the rest to the next; what nobody has judged is told, and never counts as wrong. A model
that is down, says no score or one that there is not has judged nothing.
"""

from __future__ import annotations

import base64
import re
import threading
import time
import unicodedata
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

import numpy as np
from PIL import Image

from stretto.base.config import validate
from stretto.base.endpoint import Chat, ChatConfig, Unanswered, served_name
from stretto.base.errors import UserError, one_line
from stretto.pictures.backend import png
from stretto.tasks.session import arguments_of
from stretto.tasks.shapes.draw import Box, drawable, judged, see
from stretto.tasks.shapes.ledger import Fault, Ledger, Thing, Unkept, describe, with_number
from stretto.tasks.shapes.words import plural


@dataclass(frozen=True, slots=True)
class Verdict:
    """On a picture. Written by a verifier."""

    faults: tuple[Unkept, ...] = ()
    left: Ledger = field(default_factory=Ledger)
    """What of the ledger is another's to judge."""
    right: tuple[Box, ...] = ()
    """Where something lies that was asked for and is as it should be."""
    troubles: tuple[str, ...] = ()
    """Why something was not judged that could have been, a line each."""

    @property
    def unchecked(self) -> str:
        """For people: what nobody has judged, and why; empty: all was."""
        told = [f"nobody has checked: {describe(self.left).rstrip('.')}"] if self.left.num_constraints else []
        told += ["words are read with rapidocr: pip install 'stretto[pictures]'"] if self.left.texts else []
        return "; ".join((*told, *self.troubles))


class Verifier(Protocol):
    def judge(self, ledger: Ledger, picture: Image.Image) -> Verdict:
        """What of ``ledger`` it can; what keeps it from more is among the troubles."""
        ...


class Verifiers:
    """One after the other: each has what those before it left."""

    def __init__(self, *parts: Verifier) -> None:
        self._parts = parts

    def judge(self, ledger: Ledger, picture: Image.Image) -> Verdict:
        so_far = Verdict(left=ledger)
        for part in self._parts:
            if so_far.left.num_constraints:
                new = part.judge(so_far.left, picture)
                so_far = Verdict(
                    so_far.faults + new.faults, new.left, so_far.right + new.right, so_far.troubles + new.troubles
                )
        return so_far


class ShapesVerifier:
    """Exact, for coloured shapes on white and nothing else."""

    def judge(self, ledger: Ledger, picture: Image.Image) -> Verdict:
        if not is_of_shapes(ledger):
            return Verdict(left=ledger)
        faults, right = judged(ledger, see(picture))
        return Verdict(faults, right=tuple(body.box for body in right))


def is_of_shapes(ledger: Ledger) -> bool:
    """Whether all that is asked for can be drawn and read back exactly."""
    try:
        return drawable(ledger).num_constraints == ledger.num_constraints
    except UserError:
        return False


# Words


class TextVerifier:
    """Reads what must be read, with rapidocr (PP-OCR's small networks, which are in its wheel: nothing is fetched).

    Words are there if whole words on the picture, line after line, have their letters, figures and signs in their order, whatever the case,
    spaces and punctuation. One letter more, less or other is wrong.
    """

    def __init__(self) -> None:
        self._reader: Any = None
        self._lock = threading.Lock()

    def judge(self, ledger: Ledger, picture: Image.Image) -> Verdict:
        if not ledger.texts:
            return Verdict(left=ledger)
        try:
            lines = self._read(picture)
        except ImportError:
            return Verdict(left=ledger)
        spans = {text: lines_with(text, [line for line, _ in lines]) for text in ledger.texts}
        read = " / ".join(line for line, _ in lines) or "nothing"
        faults = tuple(
            Unkept("text", f"the words {text!r} are not there; what can be read is {read!r}")
            for text, span in spans.items()
            if span is None
        )
        right = tuple(lines[at][1] for span in spans.values() if span is not None for at in span)
        return Verdict(faults, replace(ledger, texts=()), right)

    def _read(self, image: Image.Image) -> list[tuple[str, Box]]:
        """Lines from top left to bottom right. Raises ImportError: there is nothing to read with."""
        with self._lock:
            if self._reader is None:
                from rapidocr import RapidOCR  # a second, and an extra

                self._reader = RapidOCR(params={"Global.log_level": "critical"})
            pixels_HWC = np.asarray(image.convert("RGB"))[:, :, ::-1]  # it takes blue first
            made = self._reader(np.ascontiguousarray(pixels_HWC))
        if made.boxes is None or made.txts is None:
            return []
        share = np.array([image.width, image.height])
        corners = [np.asarray(box) / share for box in made.boxes]
        return [
            (text, (*map(float, each.min(0)), *map(float, each.max(0))))  # type: ignore[misc]
            for text, each in zip(made.txts, corners, strict=True)
        ]


_MARK: Final = r"[\s.,;:!?'\"`´‘’‚“”„«»‹›()\-‐‑–—−…·]"
"""Spaces and marks, which readers miss and mistake."""


def lines_with(text: str, lines: Sequence[str]) -> range | None:
    """The lines on which ``text`` stands; None: it does not."""
    read = "\n".join(_folded(line) for line in lines)
    letters = re.sub(_MARK, "", _folded(text)) or _folded(text)
    found = re.search(rf"(?<!\w){rf'{_MARK}*'.join(map(re.escape, letters))}(?!\w)", read)
    return None if found is None else range(read.count("\n", 0, found.start()), read.count("\n", 0, found.end()) + 1)


def _folded(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold()


# Whatever else


_ASK: Final = (
    "Look at the picture and judge one statement about it, whatever else is there: {statement}\n"
    'Answer in JSON: {{"seen": what you see of it, in a few words, "score": 0 (certainly false) to {most} (certainly true)}}.'
)
_MOST: Final = 10
"""Score; more than half of it is true."""
_SCHEMA: Final = {
    "type": "object",
    "properties": {"seen": {"type": "string"}, "score": {"type": "integer", "enum": list(range(_MOST + 1))}},
    "required": ["seen", "score"],
    "additionalProperties": False,
}
_BODY: Final = {"temperature": 0.0, "max_tokens": 256}
_FORM: Final = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": _SCHEMA, "strict": True}}
_TIMEOUT_S, _PATIENCE_S = 60.0, 180.0
"""Of one question; of all about a picture."""


class EndpointVerifier:
    """A model behind the chat API that takes pictures, asked about each constraint by itself."""

    def __init__(self, named: str, calls: int = 16) -> None:
        """
        Args:
            named: ``URL`` up to and with ``/v1``, or ``MODEL@URL``; the first model that it lists otherwise.
            calls: questions about one picture, at most; what they leave nobody has checked.

        Raises:
            UserError: that is no address, or nobody says there what is served.
        """
        model, at, address = named.rpartition("@http")
        url = f"http{address}" if at else named
        if not url.startswith(("http://", "https://")):
            raise UserError(f"--verifier {named}: no address of a server; write http://127.0.0.1:8000/v1")
        model = model or served_name(url)
        self._name, self._calls = f"{model} at {url}", calls
        told = {"url": url, "model": model, "timeout_s": _TIMEOUT_S, "retries": 1, "body": _BODY}
        config = validate(ChatConfig, told, "--verifier")
        self._strict = Chat(config.replace(body=_BODY | {"response_format": _FORM}), "refused")
        self._plain = Chat(config, "refused")
        self._at_once = config.at_once

    def judge(self, ledger: Ledger, picture: Image.Image) -> Verdict:
        asked = [*statements(ledger)]
        image = f"data:image/png;base64,{base64.b64encode(png(picture)).decode()}"
        stop_s = time.monotonic() + _PATIENCE_S
        with ThreadPoolExecutor(self._at_once) as pool:
            told = [*pool.map(lambda each: self._asked(each.says, image, stop_s), asked[: self._calls])]
        told += [f"more than {self._calls} questions about a picture"] * (len(asked) - len(told))
        pairs = [*zip(asked, told, strict=True)]
        faults = tuple(
            replace(each, says=f"not so: {each.says} ({self._name}: {score.points:g} of {_MOST}, {score.seen!r})")
            for each, score in pairs
            if isinstance(score, _Score) and score.points <= _MOST / 2
        )
        troubles = []
        for why in dict.fromkeys(each for each in told if isinstance(each, str)):
            unjudged = " ".join(each.says for each, score in pairs if score == why)
            troubles.append(f"nobody has checked: {unjudged} ({self._name}: {why})")
        return Verdict(faults, troubles=tuple(troubles))

    def _asked(self, statement: str, image: str, stop_s: float) -> _Score | str:
        """The score of a statement, or why there is none."""
        parts = [
            {"type": "image_url", "image_url": {"url": image}},
            {"type": "text", "text": _ASK.format(statement=statement, most=_MOST)},
        ]
        question = [{"role": "user", "content": parts}]
        try:
            try:
                said = self._strict.said(question, stop_s)
            except UserError:  # not every server knows the form; what else it refuses it refuses again
                said = self._plain.said(question, stop_s)
        except (UserError, Unanswered) as error:
            return f"it did not answer ({error})"
        return _score(said)

    def close(self) -> None:
        self._strict.close()
        self._plain.close()


@dataclass(frozen=True, slots=True)
class _Score:
    points: float
    seen: str


def _score(said: str) -> _Score | str:
    """Of an answer; of one that has none, what is wrong with it."""
    shown = one_line(said, 80)
    found = re.search(r"\{.*\}", said, re.S)  # some write a fence around it
    tree = arguments_of(found[0]) if found else None
    if tree is None or "score" not in tree:
        return f"it answered {shown!r}, which is no JSON with a score"
    points = tree["score"]
    if isinstance(points, bool) or not isinstance(points, int | float) or not 0 <= points <= _MOST:
        return f"it answered {shown!r}, whose score is not from 0 to {_MOST}"
    return _Score(points, one_line(tree.get("seen", ""), 80))


def statements(ledger: Ledger) -> Iterator[Unkept]:
    """Every constraint as a sentence that is to be true; that there is a thing is part of how many there are."""
    for thing in ledger.things:
        bare = replace(thing, count=None if thing.count != 1 else 1, colours=(), qualities=())
        told: list[tuple[Fault, Thing]] = [("object", bare) if thing.count is None else ("count", thing)]
        told += [("colour", replace(bare, colours=(each,))) for each in thing.colours]
        told += [("quality", replace(bare, qualities=(each,))) for each in thing.qualities]
        for kind, each in told:
            verb, exactly = "is" if each.count == 1 else "are", "exactly " if kind == "count" else ""
            yield Unkept(kind, f"There {verb} {exactly}{with_number(each)}.", thing.id)
    for relation in ledger.relations:
        ends = ledger.thing(relation.subject), ledger.thing(relation.other)
        yield Unkept("relation", describe(Ledger(ends, (relation,))).partition(". ")[2], relation.subject)
    yield from (Unkept("text", describe(Ledger(texts=(each,)))) for each in ledger.texts)
    yield from (Unkept("absent", f"There are no {plural(each)}.") for each in ledger.absent)
    yield from (Unkept("medium", f"It is a kind of {each}.") for each in ledger.medium)
    yield from (Unkept("words", f"It shows this, as it was requested: {each}") for each in ledger.unread)
