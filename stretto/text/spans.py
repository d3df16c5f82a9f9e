"""Translation of tokens between two tokenizers, with the spans of text on which both agree.

A span is the shortest run of bytes that starts and ends at a token boundary of both tokenizers: one token on each side where both
split equally, else several; the bytes of a character stay together. An added token (special or not) is a span by itself: it
becomes the other tokenizer's token of the same spelling, or that spelling as text. The end of a turn becomes the other
tokenizer's end of a turn, whatever its spelling. (TRL's GOLD also merges the probabilities of tokens between common byte offsets,
but leaves the end out.)
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray
from tokenizers import decoders

from stretto.base.errors import UserError
from stretto.text.stream import BYTE_OF_CHARACTER, REPLACEMENT, bytes_of_token
from stretto.text.tokenizer import Tokenizer

_NOT_UTF8 = re.compile("([\udc80-\udcff]+)")
"""Bytes that are not UTF-8, as decoded with surrogateescape."""


class Spelling:
    """Conversion between the tokens of a byte-level BPE and bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises `UserError`: not a byte-level BPE with a token for every byte."""
        self.tokenizer, self._rust = tokenizer, tokenizer.rust
        self.added = {token: added.content for token, added in self._rust.get_added_tokens_decoder().items()}
        vocabulary = self._rust.get_vocab()
        self._token_of = {byte: vocabulary[char] for char, byte in BYTE_OF_CHARACTER.items() if char in vocabulary}
        if not isinstance(self._rust.decoder, decoders.ByteLevel) or len(self._token_of) < len(BYTE_OF_CHARACTER):
            raise UserError("only a byte-level BPE that has all bytes can be aligned with another tokenizer")

    def bytes_of(self, token: int) -> bytes:
        """Bytes of a token, never empty: an id without a token is U+FFFD."""
        if token in self.added:
            return self.added[token].encode()
        return bytes_of_token(self._rust.id_to_token(token) or REPLACEMENT)

    def ids_of(self, data: bytes) -> list[int]:
        """Tokens that spell ``data``: encoded as text; byte by byte where it is not text, or where encoding would change it (NFC)."""
        ids: list[int] = []
        for piece in _NOT_UTF8.split(data.decode("utf-8", "surrogateescape")):
            raw = piece.encode("utf-8", "surrogateescape")
            encoded = [] if _NOT_UTF8.fullmatch(piece) else self.tokenizer.encode(piece)
            is_exact = b"".join(map(self.bytes_of, encoded)) == raw
            ids += encoded if is_exact else [self._token_of[byte] for byte in raw]
        return ids


@dataclass(frozen=True, slots=True, eq=False)
class Translated:
    """A turn of T tokens as K tokens of another tokenizer. Written by `Translation`."""

    ids_K: NDArray[np.int32]
    theirs_K: NDArray[np.int64]
    """Number of the span of each of the other tokenizer's tokens, from 0. Every span has tokens on both sides."""
    own_T: NDArray[np.int64]
    """Number of the span of each of the turn's own tokens."""

    @property
    def num_spans(self) -> int:
        return int(self.own_T[-1]) + 1


class Translation:
    """Translation from the tokens of one tokenizer to those of another."""

    def __init__(self, own: Tokenizer, other: Tokenizer, ends: Collection[int], end: int) -> None:
        """``ends``: own tokens that end a turn; ``end``: the other tokenizer's. Raises `UserError`: one is not a byte-level BPE."""
        self._own, self._other = Spelling(own), Spelling(other)
        by_spelling = {spelling: token for token, spelling in self._other.added.items()}
        self._added = {
            token: [by_spelling[spelling]] if spelling in by_spelling else self._other.ids_of(spelling.encode())
            for token, spelling in self._own.added.items()
        }
        self._added |= {token: [end] for token in ends}

    def __call__(self, turn: Sequence[int]) -> Translated:
        """Translate a turn, which may contain special tokens and bytes that are not text."""
        ids: list[int] = []
        own, theirs = [], []
        num_spans = 0
        for is_added, run in groupby(turn, self._added.__contains__):
            tokens = list(run)
            for group in [[token] for token in tokens] if is_added else [tokens]:
                spellings = [*map(self._own.bytes_of, group)]
                others = self._added[group[0]] if is_added else self._other.ids_of(b"".join(spellings))
                ends = np.cumsum([*map(len, spellings)])
                other_ends = np.cumsum([*map(len, map(self._other.bytes_of, others))])
                assert is_added or ends[-1] == other_ends[-1], f"{others} does not spell {spellings}"
                common = ends[:0] if is_added else np.intersect1d(ends, other_ends)
                own.append(num_spans + np.searchsorted(common, ends))
                theirs.append(num_spans + np.searchsorted(common, other_ends))
                ids += others
                num_spans += max(1, len(common))
        return Translated(np.array(ids, np.int32), np.concatenate(theirs), np.concatenate(own))
