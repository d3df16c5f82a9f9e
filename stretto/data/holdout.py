"""What of a source is held out of training: whole documents where there are enough, else the last part of each.

Whole documents are chosen by a hash of their text, so that one stays on its side when others come or go, and copies never
end up on both. Of a few books, or of one file, no such choice is a fair sample of the rest; there every document is cut, at
a line's end or a word's, and what follows the cut is held out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from stretto.base import numbers
from stretto.base.errors import UserError
from stretto.data.files import LeftOut
from stretto.data.sources import Document, cut_before

VAL_FRACTION = 0.01
"""Held out where nobody says how much (ours)."""
VAL_BYTES = 100_000
"""Of a small source more is held out, up to `MAX_VAL_FRACTION`, until there is so much: on less, a loss says little (ours)."""
MAX_VAL_FRACTION = 0.1
MANY_DOCUMENTS = 1000
"""From so many on, a hundredth of them by their hashes is about ten: near enough to a hundredth of the text."""
FEW_DOCUMENTS = 20
_HASHES = 2**64
_COMPARED = 1 << 20
"""Held-out documents that training documents are compared with: bounds memory to a hundred MB."""

By = Literal["documents", "position"]


@dataclass(frozen=True, slots=True)
class Holdout:
    """How a source is divided; written by `choose_holdout`."""

    by: By
    fraction: float
    """Of documents: those whose hash lies below this share of all hashes. By position: of each document's characters."""

    def divide(self, document: Document) -> Iterator[tuple[str, Document]]:
        """``document``, or its two parts, with their splits: ``train`` or ``val``."""
        if self.by == "documents":
            is_held = text_hash(document.text.encode()) < self.fraction * _HASHES
            yield "val" if is_held else "train", document
            return
        for split, text in zip(("train", "val"), split_text(document.text, self.fraction), strict=True):
            if text:
                yield split, Document(text, document.domain)

    def __str__(self) -> str:
        if self.by == "documents":
            return "documents chosen by hash"
        return f"the last {numbers.percent(self.fraction)} of each document"


def text_hash(text: bytes) -> int:
    """64 bits that decide on which side a document comes."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=16).digest()[:8], "little")


def choose_holdout(documents: Iterable[Document], fraction: float | None, by_position: bool = True) -> Holdout:
    """Reads at most `MANY_DOCUMENTS` of ``documents``; ``fraction``: how much the user wants held out, None: what is usual.

    Without ``by_position`` documents stay whole, and of a few at least one is held out.

    Raises:
        UserError: there is too little text to divide.
    """
    sizes: dict[int, int] = {}
    total = 0
    for document in documents:
        text = document.text.encode()
        total += len(text)
        sizes[text_hash(text)] = sizes.get(text_hash(text), 0) + len(text)
        if len(sizes) == MANY_DOCUMENTS:
            return Holdout("documents", fraction or VAL_FRACTION)
    fraction = fraction or min(max(VAL_FRACTION, VAL_BYTES / max(1, total)), MAX_VAL_FRACTION)
    held, hashes = 0, sorted(sizes)
    for place, each in enumerate(hashes[:-1]):
        held += sizes[each]
        if held >= fraction * total:
            if by_position and (len(sizes) < FEW_DOCUMENTS or held > 2 * fraction * total):
                break
            return Holdout("documents", (each + hashes[place + 1]) / 2 / _HASHES)
    if not by_position:
        raise UserError("too few conversations to hold any out; give more, or name some with --val")
    return Holdout("position", fraction)


def split_text(text: str, fraction: float) -> tuple[str, str]:
    """``text`` without about its last ``fraction``, and that; the second is empty where there is no place to cut."""
    end = round(len(text) * (1 - fraction))
    slack = min(len(text) - end, end) // 2
    place = cut_before(text, end, end - slack)
    return (text[:place], text[place:]) if text[:place].strip() and text[place:].strip() else (text, "")


def without_held_out(
    sources: Mapping[str, Iterable[Document]], left_out: LeftOut, held: set[int] | None = None
) -> dict[str, Iterable[Document]]:
    """``sources`` in the order in which they must be read: held-out text first, then the rest without its documents.

    Args:
        held: hashes of more held-out text, to which those of ``val`` are added.

    Raises:
        UserError: while they are read: nothing is left to train on.
    """
    hashes = set() if held is None else held

    def noted(documents: Iterable[Document]) -> Iterator[Document]:
        for document in documents:
            if len(hashes) < _COMPARED:
                hashes.add(text_hash(document.text.encode()))
            yield document

    def others(documents: Iterable[Document]) -> Iterator[Document]:
        num_kept = num_held = 0
        for document in documents:
            if hashes and text_hash(text := document.text.encode()) in hashes:
                num_held += 1
                left_out.add("documents that are held out", " ".join(document.text[:40].split()), len(text))
            else:
                num_kept += 1
                yield document
        if num_held and not num_kept:
            raise UserError("--val: all of the training text is held out, too; name other text")

    ordered = sorted(sources.items(), key=lambda each: each[0] != "val")
    return {split: noted(documents) if split == "val" else others(documents) for split, documents in ordered}
