"""Conversion of tokens to text during generation: incomplete characters and stop strings are held back.

The library's `tokenizers.decoders.DecodeStream` does not always give the text of `Tokenizer.decode`: it raises for a byte token
behind text that was already returned, holds back a real U+FFFD, and never returns the text that it holds at the end (with random
ids that include byte tokens, four texts in five differ). The tests compare this implementation with `Tokenizer.decode`.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Sequence

from tokenizers import decoders

from stretto.base.errors import UserError
from stretto.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
"""Replaces bytes that are not UTF-8."""
_BYTE_TOKEN = re.compile("<0x..>")
"""A single byte in a sentencepiece vocabulary. A run of byte tokens is decoded as a whole, so its text is unknown before its end."""
_CONTEXT_IDS = 4
"""Number of last prompt tokens searched for the one before the text: it decides whether the text starts with a space."""
_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
BYTE_OF_CHARACTER = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + index): byte for index, byte in enumerate(sorted({*range(256)} - _PRINTABLE))
}
"""Byte for each character of a byte-level vocabulary (GPT-2): the character's own code if it is printable, else codes from 256 up."""


def bytes_of_token(token: str) -> bytes:
    """Bytes of a token of a byte-level vocabulary. A token that is not spelled in bytes, such as an added one, is its own text."""
    try:
        return bytes(map(BYTE_OF_CHARACTER.__getitem__, token))
    except KeyError:
        return token.encode()


class Detokenizer:
    """Text of one sequence, token by token.

    The concatenation of all results of `push` and `finish` is `Tokenizer.decode` of all ids except special ones, for any division of
    the ids. Text that a later token could change is not returned.
    """

    def __init__(self, tokenizer: Tokenizer, shown: frozenset[int] = frozenset(), after: Sequence[int] = ()) -> None:
        """Args:
        shown: special tokens that are part of the text.
        after: ids before the first one: the prompt. A tokenizer that drops the space before a first word then keeps it, since the
            word is not the first.
        """
        self._rust = tokenizer.rust
        self._special = tokenizer.special_ids - shown
        is_byte_level = isinstance(tokenizer.rust.decoder, decoders.ByteLevel)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace") if is_byte_level else None
        last = after[-_CONTEXT_IDS:]
        self._context = [i for i in last if i not in self._special and not self._is_byte(i)][-1:]
        self._pending: list[int] = []

    def push(self, ids: Iterable[int]) -> str:
        """The text that these tokens complete."""
        visible = [i for i in ids if i not in self._special]
        if self._utf8 is not None:
            return self._utf8.decode(b"".join(map(self._bytes, visible)))
        self._pending += [i for i in visible if self._rust.id_to_token(i) is not None]
        is_incomplete = not self._pending or self._is_byte(self._pending[-1])
        return "" if is_incomplete else self._flush(is_last=False)

    def finish(self) -> str:
        """The text held back so far; bytes of an incomplete character are U+FFFD."""
        return self._flush(is_last=True) if self._utf8 is None else self._utf8.decode(b"", final=True)

    def _bytes(self, token_id: int) -> bytes:
        token = self._rust.id_to_token(token_id)
        return b"" if token is None else bytes_of_token(token)  # None: a row of the embedding without a token

    def _is_byte(self, token_id: int) -> bool:
        return _BYTE_TOKEN.fullmatch(self._rust.id_to_token(token_id) or "") is not None

    def _flush(self, is_last: bool) -> str:
        """Text of the pending tokens. One token of context tells the library that they are not the first."""
        prefix: str = self._rust.decode(self._context, skip_special_tokens=False)
        text: str = self._rust.decode(self._context + self._pending, skip_special_tokens=False)
        assert text.startswith(prefix), f"{prefix!r} is not a prefix of {text!r}"
        if text.endswith(REPLACEMENT) and not is_last:
            return ""
        self._context = self._pending[-1:] or self._context
        self._pending = []
        return text[len(prefix) :]


class StopStrings:
    """Searches a growing text for the first of several strings, and returns the text before it.

    The first is the one whose end comes first; of several with the same end, the longest. The result does not depend on how the text
    is divided.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises `UserError`: one of the strings is empty."""
        if "" in stops:
            raise UserError("request: stop: an empty string would end every completion; remove it")
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.matched: str | None = None
        """The string that was found. Text after it is dropped."""

    def push(self, text: str, search: bool = True) -> str:
        """The text that may be shown. With ``search`` False (before the minimum length) all of it, and no match starts in it."""
        if self.matched is not None:
            return ""
        text = self._held + text
        self._held = ""
        if not search or not self._stops:
            return text
        if ends := [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]:
            _, start, self.matched = min(ends)
            return text[:start]
        # hold back the longest suffix of the text that may be the start of a stop string
        starts = range(max(0, len(text) - self._longest + 1), len(text))
        end = next((at for at in starts if any(stop.startswith(text[at:]) for stop in self._stops)), len(text))
        self._held = text[end:]
        return text[:end]

    def finish(self) -> str:
        """The text held back so far."""
        rest, self._held = self._held, ""
        return rest
