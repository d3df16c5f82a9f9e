"""Tokens to text while they are still being generated: half characters and half stop strings are held back.

The library's own stream, `tokenizers.decoders.DecodeStream`, gives other text than the whole decode where a model errs: a
byte token behind a run that was shown already raises, a real U+FFFD is held back, and what is held at the end never comes
(of random ids with byte tokens, four texts in five differ). So this is ours; the tests hold it to `Tokenizer.decode`.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Sequence

from tokenizers import decoders

from stretto.base.errors import UserError
from stretto.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
"""Stands for bytes that are not UTF-8."""
_BYTE_TOKEN = re.compile("<0x..>")
"""A single byte, as sentencepiece vocabularies spell it: whether a run of them is characters or not is decided for the run as
a whole, so it is not known before its end."""
_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
BYTE_OF_CHARACTER = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + index): byte for index, byte in enumerate(sorted({*range(256)} - _PRINTABLE))
}
"""Byte that each character of a byte-level vocabulary stands for (GPT-2): itself where it prints, else 256 and up."""


class Detokenizer:
    """Text of one sequence, token by token.

    All that `push` and `finish` return, joined, is `Tokenizer.decode` of all the ids but the special ones, however the
    ids were split. Nothing is returned that a later token could still change.
    """

    def __init__(
        self, tokenizer: Tokenizer, special_ids: frozenset[int] | None = None, after: Sequence[int] = ()
    ) -> None:
        """
        Args:
            special_ids: tokens that are no part of the text; None: all special ones of the tokenizer.
            after: ids that precede the first one, a few of the prompt's last. A tokenizer that drops the space before
                the first word then keeps it, because the word is not the first.
        """
        self._rust = tokenizer.rust
        self._special = tokenizer.special_ids() if special_ids is None else special_ids
        is_byte_level = isinstance(tokenizer.rust.decoder, decoders.ByteLevel)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace") if is_byte_level else None
        self._context = [i for i in after if i not in self._special and not self._is_byte(i)][-1:]
        self._pending: list[int] = []

    def push(self, ids: Iterable[int]) -> str:
        """What these tokens make certain."""
        visible = [i for i in ids if i not in self._special]
        if self._utf8 is not None:
            return self._utf8.decode(b"".join(map(self._bytes, visible)))
        self._pending += [i for i in visible if self._rust.id_to_token(i) is not None]
        is_open = not self._pending or self._is_byte(self._pending[-1])
        return "" if is_open else self._flush(is_last=False)

    def finish(self) -> str:
        """What was held back; bytes that never became a character are U+FFFD."""
        return self._flush(is_last=True) if self._utf8 is None else self._utf8.decode(b"", final=True)

    def _bytes(self, token_id: int) -> bytes:
        """Of a byte-level token. One that is not spelt in bytes, an added token say, is its own text."""
        token = self._rust.id_to_token(token_id)
        if token is None:  # rows of an embedding that no token uses
            return b""
        try:
            return bytes([BYTE_OF_CHARACTER[character] for character in token])
        except KeyError:
            return str(token).encode()

    def _is_byte(self, token_id: int) -> bool:
        return _BYTE_TOKEN.fullmatch(self._rust.id_to_token(token_id) or "") is not None

    def _flush(self, is_last: bool) -> str:
        """Text of the pending tokens. One token of context shows the library that they are not the first."""
        known: str = self._rust.decode(self._context, skip_special_tokens=False)
        text: str = self._rust.decode(self._context + self._pending, skip_special_tokens=False)
        assert text.startswith(known), f"{known!r} is not the beginning of {text!r}"
        if text.endswith(REPLACEMENT) and not is_last:
            return ""
        self._context = self._pending[-1:] or self._context
        self._pending = []
        return text[len(known) :]


class StopStrings:
    """Finds the first of several strings in a growing text and lets through what precedes it.

    The first is the one that is complete first; of those complete at the same character, the longest. So the result
    does not depend on how the text is split.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """
        Raises:
            UserError: one of them is empty.
        """
        if "" in stops:
            raise UserError("request: stop: an empty string would end every completion; leave it out")
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.matched: str | None = None
        """The string that was found. Text after it is dropped."""

    def push(self, text: str, search: bool = True) -> str:
        """What may be shown. With ``search`` false (before the least length) all of it, and no match begins in it."""
        if self.matched is not None:
            return ""
        text = self._held + text
        self._held = ""
        if not search or not self._stops:
            return text
        if ends := [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]:
            _, start, self.matched = min(ends)
            return text[:start]
        # Held back: the longest end of the text that may be the beginning of a stop string.
        starts = range(max(0, len(text) - self._longest + 1), len(text))
        held_from = next((at for at in starts if any(stop.startswith(text[at:]) for stop in self._stops)), len(text))
        self._held = text[held_from:]
        return text[:held_from]

    def finish(self) -> str:
        """What was held back, now that nothing can follow it."""
        held, self._held = self._held, ""
        return held
