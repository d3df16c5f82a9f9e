"""Checks of a picture against its ledger: shapes exactly, words by OCR, other requirements by a vision model where the user names one.

Each verifier judges its part of a ledger and leaves the rest to the next one. Requirements that no verifier judged are reported as unchecked,
and never count as failed; neither does a question that a vision model does not answer with a valid score.
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
    """Result of checking a picture. Written by a verifier."""

    faults: tuple[Unkept, ...] = ()
    left: Ledger = field(default_factory=Ledger)
    """The part of the ledger that this verifier did not judge."""
    right: tuple[Box, ...] = ()
    """Boxes of objects that were requested and are right."""
    troubles: tuple[str, ...] = ()
    """Reasons why requirements could not be judged, one line each."""

    @property
    def unchecked(self) -> str:
        """Message about unchecked requirements, with the reasons; empty: everything was checked."""
        lines = [f"not checked: {describe(self.left).rstrip('.')}"] if self.left.num_constraints else []
        lines += ["words are read with rapidocr: pip install 'stretto[pictures]'"] if self.left.texts else []
        return "; ".join((*lines, *self.troubles))


class Verifier(Protocol):
    def judge(self, ledger: Ledger, picture: Image.Image) -> Verdict:
        """Check the part of ``ledger`` that this verifier can check. Obstacles are listed in `Verdict.troubles`."""
        ...


class Verifiers:
    """A chain of verifiers: each one gets the part of the ledger that those before it left."""

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
    """Exact check of pictures that consist of coloured shapes on white. Things with qualities are also left to the next verifier."""

    def judge(self, ledger: Ledger, picture: Image.Image) -> Verdict:
        if not is_of_shapes(ledger):
            return Verdict(left=ledger)
        faults, right = judged(ledger, see(picture))
        left = Ledger(tuple(thing for thing in ledger.things if thing.qualities))
        return Verdict(faults, left, tuple(body.box for body in right))


def is_of_shapes(ledger: Ledger) -> bool:
    """Whether every requirement of ``ledger``, qualities aside, can be drawn as a shape and read back exactly."""
    try:
        return drawable(ledger).num_constraints == ledger.num_constraints
    except UserError:
        return False


# Words


class TextVerifier:
    """Check of words by OCR with rapidocr (small PP-OCR networks inside its wheel; nothing is downloaded).

    A text passes if consecutive whole words of the picture have its letters, digits and symbols in order. Case, spaces and punctuation outside
    of numbers are ignored; one wrong, missing or additional letter fails.
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
            Unkept("text", f"the words {text!r} are missing; the picture says {read!r}")
            for text, span in spans.items()
            if span is None
        )
        right = tuple(lines[at][1] for span in spans.values() if span is not None for at in span)
        return Verdict(faults, replace(ledger, texts=()), right)

    def _read(self, image: Image.Image) -> list[tuple[str, Box]]:
        """Lines of text and their boxes, from top left to bottom right. Raises ImportError: rapidocr is not installed."""
        with self._lock:
            if self._reader is None:
                from rapidocr import RapidOCR  # takes a second to import, and is an optional extra

                self._reader = RapidOCR(params={"Global.log_level": "critical"})
            pixels_HWC = np.asarray(image.convert("RGB"))[:, :, ::-1]  # rapidocr expects BGR
            result = self._reader(np.ascontiguousarray(pixels_HWC))
        if result.boxes is None or result.txts is None:
            return []
        share = np.array([image.width, image.height])
        corners = [np.asarray(box) / share for box in result.boxes]
        return [
            (text, (*map(float, each.min(0)), *map(float, each.max(0))))  # type: ignore[misc]
            for text, each in zip(result.txts, corners, strict=True)
        ]


_MARK: Final = r"[\s.,;:!?'\"`´‘’‚“”„«»‹›()\-‐‑–—−…·]"
"""Spaces and punctuation, which OCR confuses."""
_DASH: Final = r"[\-‐‑–—−]"
_NAMES: Final = {".": "\ue000", ",": "\ue001", ":": "\ue002"}
"""Marks inside and before numbers, which are compared as letters of no alphabet; all others there are a dash. "10.5" is not "105"."""
_LETTER: Final = r"[\w\ue000-\ue003]"
_LOOSE: Final = {
    "\ue000": r"[\ue000.]",
    "\ue001": r"[\ue001,]",
    "\ue002": r"[\ue002:]",
    "\ue003": rf"(?:\ue003|{_DASH})",
}
"""What a mark of the text may be in the picture, where a space or a new line may part it from its number."""
_IN_NUMBER: Final = re.compile(rf"(?<=\d)[.,:](?=\d)|(?<!\w)(?:\.|{_DASH})(?=\d)|(?<=\d) ?{_DASH} ?(?=\d)")


def lines_with(text: str, lines: Sequence[str]) -> range | None:
    """Indices of the lines that contain ``text``; None: they do not contain it."""
    read = "\n".join(_folded(line) for line in lines)
    letters = re.sub(_MARK, "", _folded(text)) or _folded(text)
    pattern = f"{_MARK}*".join(_LOOSE.get(each) or re.escape(each) for each in letters)
    found = re.search(f"(?<!{_LETTER}){pattern}(?!{_LETTER})", read)
    return None if found is None else range(read.count("\n", 0, found.start()), read.count("\n", 0, found.end()) + 1)


def _folded(text: str) -> str:
    plain = unicodedata.normalize("NFKC", text).casefold()
    return _IN_NUMBER.sub(lambda found: _NAMES.get(found[0], "\ue003"), plain)


# Everything else


_ASK: Final = (
    "Look at the picture and judge one statement about it, whatever else is there: {statement}\n"
    'Answer in JSON: {{"seen": what you see of it, in a few words, "score": 0 (certainly false) to {most} (certainly true)}}.'
)
_MOST: Final = 10
"""Largest score of a statement. More than half of it means true."""
_SCHEMA: Final = {
    "type": "object",
    "properties": {"seen": {"type": "string"}, "score": {"type": "integer", "enum": list(range(_MOST + 1))}},
    "required": ["seen", "score"],
    "additionalProperties": False,
}
_BODY: Final = {"temperature": 0.0, "max_tokens": 256}
_FORM: Final = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": _SCHEMA, "strict": True}}
_TIMEOUT_S, _PATIENCE_S = 60.0, 180.0
"""Seconds for one question, and for all questions about a picture."""


class EndpointVerifier:
    """A vision model behind a chat API, which gets one question per requirement."""

    def __init__(self, named: str, calls: int = 16) -> None:
        """
        Args:
            named: ``URL``, which ends in ``/v1``, or ``MODEL@URL``. Without a name, the first model that the server lists.
            calls: Largest number of questions about one picture. Further requirements stay unchecked.

        Raises:
            UserError: The URL is not valid, or the server does not list its models.
        """
        model, at, address = named.rpartition("@http")
        url = f"http{address}" if at else named
        if not url.startswith(("http://", "https://")):
            raise UserError(f"--verifier {named}: this is not the address of a server; write http://127.0.0.1:8000/v1")
        model = model or served_name(url)
        self._name, self._calls = f"{model} at {url}", calls
        settings = {"url": url, "model": model, "timeout_s": _TIMEOUT_S, "retries": 1, "body": _BODY}
        config = validate(ChatConfig, settings, "--verifier")
        self._strict = Chat(config.replace(body=_BODY | {"response_format": _FORM}), "refused")
        self._plain = Chat(config, "refused")
        self._at_once = config.at_once

    def judge(self, ledger: Ledger, picture: Image.Image) -> Verdict:
        asked = [*statements(ledger)]
        image = f"data:image/png;base64,{base64.b64encode(png(picture)).decode()}"
        stop_s = time.monotonic() + _PATIENCE_S
        with ThreadPoolExecutor(self._at_once) as pool:
            scores = [*pool.map(lambda each: self._asked(each.says, image, stop_s), asked[: self._calls])]
        scores += [f"more than {self._calls} questions about a picture"] * (len(asked) - len(scores))
        pairs = [*zip(asked, scores, strict=True)]
        faults = tuple(
            replace(each, says=f"not so: {each.says} ({self._name}: {score.points:g} of {_MOST}, {score.seen!r})")
            for each, score in pairs
            if isinstance(score, _Score) and score.points <= _MOST / 2
        )
        troubles = []
        for why in dict.fromkeys(each for each in scores if isinstance(each, str)):
            unjudged = " ".join(each.says for each, score in pairs if score == why)
            troubles.append(f"not checked: {unjudged} ({self._name}: {why})")
        return Verdict(faults, troubles=tuple(troubles))

    def _asked(self, statement: str, image: str, stop_s: float) -> _Score | str:
        """Score of a statement, or the reason why there is none."""
        parts = [
            {"type": "image_url", "image_url": {"url": image}},
            {"type": "text", "text": _ASK.format(statement=statement, most=_MOST)},
        ]
        question = [{"role": "user", "content": parts}]
        try:
            try:
                answer = self._strict.said(question, stop_s)
            except (
                UserError
            ):  # not every server supports JSON schemas; a request that is wrong for another reason fails again
                answer = self._plain.said(question, stop_s)
        except (UserError, Unanswered) as error:
            return f"it did not answer ({error})"
        return _score(answer)

    def close(self) -> None:
        self._strict.close()
        self._plain.close()


@dataclass(frozen=True, slots=True)
class _Score:
    points: float
    seen: str


def _score(answer: str) -> _Score | str:
    """The score in an answer, or what is wrong with the answer."""
    shown = one_line(answer, 80)
    found = re.search(r"\{.*\}", answer, re.S)  # some models put the JSON into a code fence
    tree = arguments_of(found[0]) if found else None
    if tree is None or "score" not in tree:
        return f"it answered {shown!r}, which is not JSON with a score"
    points = tree["score"]
    if isinstance(points, bool) or not isinstance(points, int | float) or not 0 <= points <= _MOST:
        return f"it answered {shown!r}, whose score is not from 0 to {_MOST}"
    return _Score(points, one_line(tree.get("seen", ""), 80))


def statements(ledger: Ledger) -> Iterator[Unkept]:
    """Every requirement as a statement about the picture. One statement covers the presence and the number of a thing."""
    for thing in ledger.things:
        bare = replace(thing, count=None if thing.count != 1 else 1, colours=(), qualities=())
        parts: list[tuple[Fault, Thing]] = [("object", bare) if thing.count is None else ("count", thing)]
        parts += [("colour", replace(bare, colours=(each,))) for each in thing.colours]
        parts += [("quality", replace(bare, qualities=(each,))) for each in thing.qualities]
        for kind, each in parts:
            verb, exactly = "is" if each.count == 1 else "are", "exactly " if kind == "count" else ""
            yield Unkept(kind, f"There {verb} {exactly}{with_number(each)}.", thing.id)
    for relation in ledger.relations:
        ends = ledger.thing(relation.subject), ledger.thing(relation.other)
        yield Unkept("relation", describe(Ledger(ends, (relation,))).partition(". ")[2], relation.subject)
    yield from (Unkept("text", describe(Ledger(texts=(each,)))) for each in ledger.texts)
    yield from (Unkept("absent", f"There are no {plural(each)}.") for each in ledger.absent)
    yield from (Unkept("medium", f"It is a kind of {each}.") for each in ledger.medium)
    yield from (Unkept("words", f"It shows this, as it was requested: {each}") for each in ledger.unread)
