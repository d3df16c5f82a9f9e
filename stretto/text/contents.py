"""Text of clients and data in a conversation, kept apart from what a chat template writes.

Rendered text has characters with a meaning: marks around answers, and placeholders of spellings. A message that contains such a
character, or spells a special token, has a placeholder there while the template is rendered.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from stretto.text.tokenizer import Tokenizer

MARKS = {"generation_start": "\ufdd0", "generation_end": "\ufdd1"}
"""Marks around answers while a template with ``{% generation %}`` is rendered: noncharacters of Unicode."""
_PLACEHOLDER = "\ue000{}\ue001"
_PLACEHOLDERS = re.compile("\ue000(\\d+)\ue001")
_OWN_CHARACTERS = re.compile(f"[\ue000{''.join(MARKS.values())}]")
"""Characters that mean something in rendered text; a message may contain them too."""


@lru_cache(maxsize=8)
def _special_spelling(tokenizer: Tokenizer) -> re.Pattern[str]:
    """Pattern of the tokenizer's special tokens."""
    added = tokenizer.rust.get_added_tokens_decoder().values()
    special = sorted((token.content for token in added if token.special), key=len, reverse=True)
    return re.compile("|".join([_OWN_CHARACTERS.pattern, *map(re.escape, special)]))


class Contents:
    """Text of clients and data in one conversation. A message that spells ``<|im_end|>`` must not end its own turn.

    `hidden` replaces spellings of special tokens by placeholders for the template; `encode` encodes them as ordinary text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._spelling = tokenizer, _special_spelling(tokenizer)
        self._spellings: list[str] = []

    def hidden(self, value: Any, keeps_special: bool = False) -> Any:
        """``value`` with placeholders in its strings. With ``keeps_special`` its special tokens stay, and only the characters that rendering
        itself uses are replaced."""
        if isinstance(value, Mapping):
            kind = type(value) if isinstance(value, dict) else dict
            return kind(
                {self.hidden(key, keeps_special): self.hidden(item, keeps_special) for key, item in value.items()}
            )
        if isinstance(value, list):
            return [self.hidden(item, keeps_special) for item in value]
        pattern = _OWN_CHARACTERS if keeps_special else self._spelling
        return pattern.sub(self._hide, value) if isinstance(value, str) else value

    def encode(self, text: str) -> list[int]:
        """Ids of rendered ``text``. Only special tokens that the template wrote become special tokens."""
        ids: list[int] = []
        for number, piece in enumerate(_PLACEHOLDERS.split(text)):
            if number % 2:
                ids += self._tokenizer.encode(self._spellings[int(piece)])
            elif piece:
                ids += self._tokenizer.encode_rendered(piece)
        return ids

    def least_tokens(self, text: str) -> int:
        """A lower bound of the number of ids of rendered ``text`` (`Tokenizer.least_tokens`)."""
        return self._tokenizer.least_tokens(_PLACEHOLDERS.sub("", text))

    def _hide(self, match: re.Match[str]) -> str:
        self._spellings.append(match.group())
        return _PLACEHOLDER.format(len(self._spellings) - 1)
