"""What one tokenizer wrote, in the tokens of another, and the spans on which the two agree.

A span is the shortest run of bytes that begins and ends where both have a boundary between tokens: one token on either side
where they split alike, several where they do not, a character's bytes together where one of them splits it. A token that the
one tokenizer has added (special or not) is a span by itself: the other's token of the same spelling, or else that spelling as
text. So is the end of a turn: the other's own, whatever it is called. (As in TRL's GOLD, which merges probabilities of tokens
between common byte offsets, but leaves the end out.)
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
from stretto.text.stream import BYTE_OF_CHARACTER, REPLACEMENT
from stretto.text.tokenizer import Tokenizer

_BROKEN = re.compile("([\udc80-\udcff]+)")
"""Bytes that are not UTF-8, as they are decoded here."""


class Spelling:
    """The tokens of a byte-level BPE as bytes, and bytes as tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises UserError: it is none."""
        self.tokenizer, self._rust = tokenizer, tokenizer.rust
        self.added = {token: each.content for token, each in self._rust.get_added_tokens_decoder().items()}
        vocabulary = self._rust.get_vocab()
        self._token_of = {byte: vocabulary[each] for each, byte in BYTE_OF_CHARACTER.items() if each in vocabulary}
        if not isinstance(self._rust.decoder, decoders.ByteLevel) or len(self._token_of) < len(BYTE_OF_CHARACTER):
            raise UserError("only a byte-level BPE that has all bytes can be aligned with another tokenizer")

    def bytes_of(self, token: int) -> bytes:
        """Never empty: an id that no token has is U+FFFD."""
        spelt = self.added.get(token) or self._rust.id_to_token(token) or REPLACEMENT
        if token in self.added or not all(map(BYTE_OF_CHARACTER.__contains__, spelt)):
            return spelt.encode()
        return bytes(map(BYTE_OF_CHARACTER.__getitem__, spelt))

    def ids_of(self, data: bytes) -> list[int]:
        """Tokens that spell ``data``: as text is encoded; byte by byte what is no text, or would come out as another (NFC)."""
        ids: list[int] = []
        for piece in _BROKEN.split(data.decode("utf-8", "surrogateescape")):
            raw = piece.encode("utf-8", "surrogateescape")
            own = [] if _BROKEN.fullmatch(piece) else self.tokenizer.encode(piece)
            is_whole = b"".join(map(self.bytes_of, own)) == raw
            ids += own if is_whole else [self._token_of[byte] for byte in raw]
        return ids


@dataclass(frozen=True, slots=True, eq=False)
class Translated:
    """A turn of T tokens as K of another tokenizer. Written by `Translation`."""

    ids_K: NDArray[np.int32]
    theirs_K: NDArray[np.int64]
    """Which span of the turn each is of, from 0; every span has tokens on both sides."""
    own_T: NDArray[np.int64]
    """The same of the turn's own tokens."""

    @property
    def num_spans(self) -> int:
        return int(self.own_T[-1]) + 1


class Translation:
    """From the tokens of one tokenizer to those of another."""

    def __init__(self, own: Tokenizer, other: Tokenizer, ends: Collection[int], end: int) -> None:
        """``ends``: own tokens that end a turn; ``end``: the other's. Raises UserError: the two cannot be aligned."""
        self._own, self._other = Spelling(own), Spelling(other)
        known = {spelt: token for token, spelt in self._other.added.items()}
        self._marks = {
            token: [known[spelt]] if spelt in known else self._other.ids_of(spelt.encode())
            for token, spelt in self._own.added.items()
        }
        self._marks |= {token: [end] for token in ends}

    def __call__(self, turn: Sequence[int]) -> Translated:
        """Of a turn, special tokens and bytes that are no text included."""
        ids: list[int] = []
        own, theirs = [], []
        num = 0
        for is_mark, run in groupby(turn, self._marks.__contains__):
            tokens = list(run)
            for some in [[token] for token in tokens] if is_mark else [tokens]:
                spelt = [*map(self._own.bytes_of, some)]
                others = self._marks[some[0]] if is_mark else self._other.ids_of(b"".join(spelt))
                ends = np.cumsum([*map(len, spelt)])
                other_ends = np.cumsum([*map(len, map(self._other.bytes_of, others))])
                assert is_mark or ends[-1] == other_ends[-1], f"{others} does not spell {spelt}"
                common = ends[:0] if is_mark else np.intersect1d(ends, other_ends)
                own.append(num + np.searchsorted(common, ends))
                theirs.append(num + np.searchsorted(common, other_ends))
                ids += others
                num += max(1, len(common))
        return Translated(np.array(ids, np.int32), np.concatenate(theirs), np.concatenate(own))
