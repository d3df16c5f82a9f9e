"""Packing of documents into rows of equal length, with no token lost and little padding.

A document longer than a row is cut into pieces. Pieces are placed best-fit decreasing (each into the fullest row that still has
room for it), so no other document is cut (Ding et al., "Fewer Truncations Improve Language Modeling", 2024). Every token is an
input exactly once. Its target is the next token of its document, also across a cut. The last token of a document has no target.

Shapes: B rows, T positions, D documents, P pieces.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IGNORED = -100
"""Target of a position without a target, as in torch's cross-entropy."""
PADDING = -1
"""Document number of a position without a token."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens ``start`` to ``start + length`` of a document, all inputs. Written by `cut`."""

    document: int
    start: int
    length: int
    is_last: bool
    """The piece ends its document, so its last token has no target."""

    @property
    def num_targets(self) -> int:
        return self.length - self.is_last


Row = tuple[Piece, ...]
Lengths = Callable[[NDArray[np.int64]], NDArray[np.int64]]
"""Number of tokens of each of some documents."""
_BLOCK = 2**20
"""Documents whose lengths are read at once."""


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows as arrays. Written by `fill_rows`."""

    tokens_BT: NDArray[np.int64]
    targets_BT: NDArray[np.int64]
    """Next token of the same document; `IGNORED` if there is none or no loss is taken of it."""
    documents_BT: NDArray[np.int64]
    """Number of the piece within its row, or `PADDING`. Attention stays within equal numbers."""
    positions_BT: NDArray[np.int64]
    """Position from the start of the piece; 0 for padding."""


def piece_ends(lengths: Lengths, num_documents: int, seq_len: int) -> NDArray[np.int64]:
    """Number of pieces of all documents up to each one, included. Pieces are numbered in the order of the documents."""
    counts = np.zeros(num_documents, np.int64)
    for first in range(0, num_documents, _BLOCK):
        documents = np.arange(first, min(first + _BLOCK, num_documents))
        counts[documents] = -(-lengths(documents) // seq_len)
    return np.cumsum(counts)


def cut(numbers_P: NDArray[np.int64], ends_D: NDArray[np.int64], lengths: Lengths, seq_len: int) -> list[Piece]:
    """The pieces with these numbers, of at most ``seq_len`` tokens each.

    Args:
        ends_D: result of `piece_ends`.
        lengths: returns the number of tokens of documents.
    """
    documents_P = np.searchsorted(ends_D, numbers_P, side="right")
    tokens_P = lengths(documents_P)
    first_P = ends_D[documents_P] - -(-tokens_P // seq_len)  # number of the document's first piece
    starts_P = (numbers_P - first_P) * seq_len
    columns = documents_P, starts_P, np.minimum(seq_len, tokens_P - starts_P), starts_P + seq_len >= tokens_P
    return [Piece(*values) for values in zip(*(column.tolist() for column in columns), strict=True)]


def plan_rows(pieces: Sequence[Piece], seq_len: int) -> list[Row]:
    """Place ``pieces`` best-fit decreasing into rows of ``seq_len`` tokens. Ties go to the earlier piece."""
    rows: list[list[Piece]] = []
    rows_by_gap: dict[int, list[int]] = {}
    gaps: list[int] = []  # keys of rows_by_gap, rising
    for piece in sorted(pieces, key=lambda piece: -piece.length):
        assert 0 < piece.length <= seq_len, f"piece of {piece.length} tokens in rows of {seq_len}"
        place = bisect_left(gaps, piece.length)
        if place == len(gaps):
            row, gap = len(rows), seq_len
            rows.append([])
        else:
            gap = gaps[place]
            row = rows_by_gap[gap].pop()
            if not rows_by_gap[gap]:
                del rows_by_gap[gap], gaps[place]
        rows[row].append(piece)
        gap -= piece.length
        if gap and gap not in rows_by_gap:
            gaps.insert(bisect_left(gaps, gap), gap)
        if gap:
            rows_by_gap.setdefault(gap, []).append(row)
    return [tuple(row) for row in rows]


def fill_rows(
    rows: Sequence[Row],
    seq_len: int,
    read: Callable[[int, int], NDArray[np.unsignedinteger]],
    learnt: Callable[[int, int], NDArray[np.bool_] | None] = lambda row, document: None,
) -> PackedRows:
    """Read the tokens of planned rows.

    Args:
        rows: one per row of the result; an empty one is all padding.
        seq_len: positions of a row.
        read: returns all tokens of a document; called with the row and the document's number.
        learnt: returns for each token of a document whether it is a target; None: all are.
    """
    tokens_BT, targets_BT, documents_BT, positions_BT = (
        np.full((len(rows), seq_len), value, np.int64) for value in (0, IGNORED, PADDING, 0)
    )
    for index, row in enumerate(rows):
        at = 0
        for number, piece in enumerate(row):
            tokens = read(index, piece.document)
            here = slice(at, at + piece.length)
            tokens_BT[index, here] = tokens[piece.start : piece.start + piece.length]
            targets = tokens[piece.start + 1 :][: piece.num_targets].astype(np.int64)
            if (is_target := learnt(index, piece.document)) is not None:
                targets[~is_target[piece.start + 1 :][: piece.num_targets]] = IGNORED
            targets_BT[index, at : at + piece.num_targets] = targets
            documents_BT[index, here] = number
            positions_BT[index, here] = np.arange(piece.length)
            at += piece.length
    return PackedRows(tokens_BT, targets_BT, documents_BT, positions_BT)
