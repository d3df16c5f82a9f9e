from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stretto.data.pack import IGNORED, PADDING, Piece, cut, fill_rows, piece_ends, plan_rows

LENGTHS = st.lists(st.integers(1, 90), min_size=1, max_size=60)


def documents_of(lengths: list[int]) -> list[np.ndarray]:
    """Every token differs from every other, so that a lost or doubled one shows."""
    starts = np.cumsum([1, *lengths])
    return [np.arange(start, start + length) for start, length in zip(starts, lengths, strict=False)]


def all_pieces(lengths: Sequence[int], seq_len: int) -> list[Piece]:
    lengths_D = np.asarray(lengths)
    ends_D = piece_ends(lengths_D.__getitem__, len(lengths_D), seq_len)
    return cut(np.arange(ends_D[-1]), ends_D, lengths_D.__getitem__, seq_len)


@given(LENGTHS, st.integers(1, 40))
def test_every_token_is_an_input_once_and_predicts_its_successor(lengths: list[int], seq_len: int) -> None:
    documents = documents_of(lengths)
    rows = plan_rows(all_pieces(lengths, seq_len), seq_len)
    packed = fill_rows(rows, seq_len, lambda _, document: documents[document])
    real = packed.documents_BT != PADDING
    assert sorted(packed.tokens_BT[real]) == list(range(1, sum(lengths) + 1))
    successor = {int(a): int(b) for document in documents for a, b in pairwise(document)}
    for token, target in zip(packed.tokens_BT[real], packed.targets_BT[real], strict=True):
        assert target == successor.get(int(token), IGNORED)
    assert (packed.targets_BT[~real] == IGNORED).all()
    assert (packed.tokens_BT[~real] == 0).all() and (packed.positions_BT[~real] == 0).all()
    assert (packed.targets_BT != IGNORED).sum() == sum(piece.num_targets for row in rows for piece in row)


@given(LENGTHS, st.integers(1, 40))
def test_pieces_stay_contiguous_and_count_from_zero(lengths: list[int], seq_len: int) -> None:
    documents = documents_of(lengths)
    packed = fill_rows(plan_rows(all_pieces(lengths, seq_len), seq_len), seq_len, lambda _, d: documents[d])
    for tokens, numbers, positions in zip(packed.tokens_BT, packed.documents_BT, packed.positions_BT, strict=True):
        used = numbers[numbers != PADDING]
        assert (np.diff(used) >= 0).all() and (np.diff(used) <= 1).all() and (numbers[len(used) :] == PADDING).all()
        for number in set(used.tolist()):
            here = numbers == number
            assert (positions[here] == np.arange(here.sum())).all()
            assert (np.diff(tokens[here]) == 1).all()


@given(LENGTHS, st.integers(1, 40))
def test_only_documents_longer_than_a_row_are_cut(lengths: list[int], seq_len: int) -> None:
    pieces = all_pieces(lengths, seq_len)
    assert len(pieces) == sum(-(-length // seq_len) for length in lengths)
    rows = plan_rows(pieces, seq_len)
    assert sorted(map(id, pieces)) == sorted(id(piece) for row in rows for piece in row)
    assert all(sum(piece.length for piece in row) <= seq_len for row in rows)


@given(LENGTHS, st.integers(1, 40))
def test_placement_is_best_fit_decreasing(lengths: list[int], seq_len: int) -> None:
    """Against the definition, one scan over all rows for each piece."""
    pieces = all_pieces(lengths, seq_len)
    gaps: list[int] = []
    for length in sorted((piece.length for piece in pieces), reverse=True):
        fitting = [gap for gap in gaps if gap >= length]
        gaps.append((min(fitting) if fitting else seq_len) - length)
        if fitting:
            gaps.remove(min(fitting))
    rows = plan_rows(pieces, seq_len)
    assert sorted(seq_len - sum(piece.length for piece in row) for row in rows) == sorted(gaps)


def test_realistic_lengths_waste_less_than_one_percent() -> None:
    lengths = np.random.default_rng(0).lognormal(6, 1.3, 4000).astype(int) + 1  # web text: median 400 tokens, long tail
    for seq_len in (512, 2048):
        rows = plan_rows(all_pieces(lengths.tolist(), seq_len), seq_len)
        assert lengths.sum() > 0.99 * len(rows) * seq_len
