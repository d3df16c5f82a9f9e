"""Choice of held-out text: whole documents if there are enough of them, else the last part of each document.

Whole documents are selected by a hash of their text: a document keeps its split when others are added or removed, and copies
are in the same split. For a few books, or one file, whole documents are not a fair sample. Then every document is cut at the end
of a line or word, and the text behind the cut is held out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from typing import Literal

from stretto.base import numbers
from stretto.base.errors import UserError
from stretto.data.files import LeftOut
from stretto.data.sources import Document, cut_before

VAL_FRACTION = 0.01
"""Default share of held-out text (ours)."""
VAL_BYTES = 100_000
"""Smallest amount of held-out text, in bytes, up to the share `MAX_VAL_FRACTION` of a small source: a loss on less text is too noisy
(ours).
"""
MAX_VAL_FRACTION = 0.1
MAX_SAMPLED_DOCUMENTS = 1000
"""With this many documents, a hundredth of them by hash is about ten: close to a hundredth of the text."""
MIN_HASHED_DOCUMENTS = 20
_HASHES = 2**64
_MAX_HASHES = 1 << 20
"""Number of documents whose hashes are kept for a comparison: limits memory to about 100 MB."""

By = Literal["documents", "position"]


@dataclass(frozen=True, slots=True)
class Holdout:
    """Division of a source. Written by `choose_holdout` and, for several sources, `agreed`."""

    by: By
    fraction: float
    """By documents: those whose hash lies below this share of the hash range. By position: this share of the characters of
    each document.
    """
    shared: Mapping[int, Holdout] = field(default_factory=dict)
    """Rules of documents, by `text_hash`, that replace this one."""

    def divide(self, document: Document) -> Iterator[tuple[str, Document]]:
        """``document``, or its two parts, each with its split: ``train`` or ``val``."""
        hashed = text_hash(document.text.encode())
        if hashed in self.shared:
            yield from self.shared[hashed].divide(document)
            return
        if self.by == "documents":
            yield "val" if hashed < self.fraction * _HASHES else "train", document
            return
        for split, text in zip(("train", "val"), split_text(document.text, self.fraction), strict=True):
            if text:
                yield split, Document(text, document.domain)

    def holds(self, document: Document) -> bool:
        """Whether ``document`` or a part of it is held out."""
        return any(split == "val" for split, _ in self.divide(document))

    def __str__(self) -> str:
        if self.by == "documents":
            return "documents chosen by hash"
        return f"the last {numbers.percent(self.fraction)} of each document"


def text_hash(text: bytes) -> int:
    """64-bit hash that decides the split of a document."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=16).digest()[:8], "little")


def hashes_of(documents: Iterable[Document]) -> set[int]:
    """Hashes of at most `_MAX_HASHES` documents."""
    return {text_hash(document.text.encode()) for document in islice(documents, _MAX_HASHES)}


def choose_holdout(documents: Iterable[Document], fraction: float | None, by_position: bool = True) -> Holdout:
    """Choose the held-out text. Reads `MAX_SAMPLED_DOCUMENTS` of ``documents``, and more until a share of `VAL_FRACTION` is `VAL_BYTES`.

    Args:
        fraction: share requested by the user; None: `VAL_FRACTION`, more for small sources.
        by_position: documents may be cut. Otherwise they stay whole, and at least one is held out.

    Raises:
        UserError: there is too little text to divide.
    """
    sizes: dict[int, int] = {}
    total = 0
    for document in documents:
        text = document.text.encode()
        total += len(text)
        sizes[text_hash(text)] = sizes.get(text_hash(text), 0) + len(text)
        is_enough = fraction is not None or VAL_FRACTION * total >= VAL_BYTES
        if len(sizes) >= MAX_SAMPLED_DOCUMENTS and is_enough:
            return Holdout("documents", fraction or VAL_FRACTION)
    fraction = fraction or min(max(VAL_FRACTION, VAL_BYTES / max(1, total)), MAX_VAL_FRACTION)
    num_held, hashes = 0, sorted(sizes)
    for below, above in pairwise(hashes):
        num_held += sizes[below]
        if num_held >= fraction * total:
            if by_position and (len(sizes) < MIN_HASHED_DOCUMENTS or num_held > 2 * fraction * total):
                break
            return Holdout("documents", (below + above) / 2 / _HASHES)
    if not by_position:
        raise UserError("too few conversations to hold any out; give more, or name held-out ones with --val")
    return Holdout("position", fraction)


def agreed(
    holdouts: Sequence[Holdout], sources: Sequence[Callable[[], Iterable[Document]]], fraction: float | None
) -> list[Holdout]:
    """``holdouts`` of several sources, changed so that a document of two sources is divided in the same way in both.

    Sources with much text have one rule already. A document of a source with little text has that source's rule in all sources; of several
    such rules, one that cuts documents comes first, then the one that holds out the larger share.

    Args:
        sources: each reads the documents that the holdout was chosen for.
        fraction: as for `choose_holdout`.
    """
    usual = Holdout("documents", fraction or VAL_FRACTION)
    shared: dict[int, Holdout] = {}
    own = [pair for pair in zip(holdouts, sources, strict=True) if pair[0] != usual]
    for holdout, read in sorted(own, key=lambda pair: (pair[0].by == "documents", -pair[0].fraction)):
        shared = dict.fromkeys(hashes_of(read()), holdout) | shared
    return [replace(holdout, shared=shared) for holdout in holdouts]


def split_text(text: str, fraction: float) -> tuple[str, str]:
    """``text`` cut before about its last ``fraction``, as two parts; the second is empty if there is no place for a cut."""
    end = round(len(text) * (1 - fraction))
    slack = min(len(text) - end, end) // 2
    place = cut_before(text, end, end - slack)
    return (text[:place], text[place:]) if text[:place].strip() and text[place:].strip() else (text, "")


def without_held_out(
    sources: Mapping[str, Iterable[Document]], left_out: LeftOut, hashes: set[int] | None = None
) -> dict[str, Iterable[Document]]:
    """``sources`` in the order in which they must be read: held-out text first, then training text without the held-out documents.

    Args:
        hashes: hashes of further held-out text, to which those of ``val`` are added.

    Raises:
        UserError: during reading: no training text is left.
    """
    held_out = set() if hashes is None else hashes

    def recorded(documents: Iterable[Document]) -> Iterator[Document]:
        for document in documents:
            if len(held_out) < _MAX_HASHES:
                held_out.add(text_hash(document.text.encode()))
            yield document

    def filtered(documents: Iterable[Document]) -> Iterator[Document]:
        num_kept = num_held = 0
        for document in documents:
            if held_out and text_hash(text := document.text.encode()) in held_out:
                num_held += 1
                left_out.add("documents held out", " ".join(document.text[:40].split()), len(text))
            else:
                num_kept += 1
                yield document
        if num_held and not num_kept:
            raise UserError("--val: all of the training text is also held out; name other text")

    ordered = sorted(sources.items(), key=lambda item: item[0] != "val")
    return {split: (recorded if split == "val" else filtered)(documents) for split, documents in ordered}
