"""The fast path of byte-level BPE: split a text in Python, look every word's ids up in a table.

A byte-level BPE encodes the words that its split pattern finds, each on its own, and text repeats its words. Splitting
with the ``regex`` module and remembering each word's ids is several times faster than the Rust pipeline, which merges
most words again and tracks offsets nobody asked for. `WordEncoder.encode` must equal the Rust library's ids, always:

- only pre-tokenizers in `_PATTERNS` qualify: `split_pattern` returns None for any other, and the caller uses Rust;
- the two regex engines carry different Unicode versions, so a text with a character outside `_SETTLED` (blocks whose
  letters and numbers have not changed since Unicode 12) is not split here; the tests compare every character inside;
- a text that spells an added token that is not special is left to Rust too.
"""

from __future__ import annotations

import json
from itertools import chain
from typing import Any

import regex  # type: ignore[import-untyped]
import tokenizers

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_PATTERNS = (_GPT2, _LLAMA3, _QWEN2)
"""Each splits a word that it found into that same word, which is what lets a word be encoded apart from its text."""

SETTLED_RANGES = (
    (0x0, 0x530),
    (0x2000, 0x206F),
    (0x20A0, 0x20BF),
    (0x2100, 0x2BFF),
    (0x3000, 0x9FFF),
    (0xAC00, 0xD7A3),
)
_UNSETTLED = regex.compile("[^" + "".join(f"\\u{low:04x}-\\u{high:04x}" for low, high in SETTLED_RANGES) + "]")

_MAX_WORDS = 1 << 17
"""Table entries before it is emptied: bounds memory to a few tens of MB whatever the text."""
_MAX_LENGTH = 64
"""Characters of a word worth remembering: longer ones (rulers, base64) hardly ever come again."""


def split_pattern(rust: tokenizers.Tokenizer) -> str | None:
    """The regular expression that ``rust`` splits words with, or None where this file's shortcut would not be exact."""
    tree: dict[str, Any] = json.loads(rust.to_str())
    if tree["normalizer"] is not None or tree["model"]["type"] != "BPE" or tree["model"].get("dropout"):
        return None
    match tree["pre_tokenizer"]:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return _GPT2
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        } if pattern in _PATTERNS:
            return str(pattern)
    return None


class WordEncoder:
    """Encodes texts word by word; its only state is the table of words already seen."""

    def __init__(self, rust: tokenizers.Tokenizer, pattern: str) -> None:
        self._words = _Words(rust)
        self._split = regex.compile(pattern).findall
        plain = [token.content for token in rust.get_added_tokens_decoder().values() if not token.special]
        self._added = regex.compile("|".join(map(regex.escape, plain))) if plain else None

    def accepts(self, text: str) -> bool:
        """Whether `encode` is exact for ``text``."""
        settled = text.isascii() or _UNSETTLED.search(text) is None
        return settled and (self._added is None or self._added.search(text) is None)

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, of which `accepts` is true."""
        if len(self._words) > _MAX_WORDS:
            self._words.clear()
        return list(chain.from_iterable(map(self._words.__getitem__, self._split(text))))


class _Words(dict[str, list[int]]):
    """Ids by word; a word not seen before is encoded when it is looked up."""

    def __init__(self, rust: tokenizers.Tokenizer) -> None:
        super().__init__()
        self._rust = rust

    def __missing__(self, word: str) -> list[int]:
        ids: list[int] = self._rust.encode(word, add_special_tokens=False).ids
        if len(word) <= _MAX_LENGTH:
            self[word] = ids
        return ids
