"""From what a client sends to token ids: messages under the chat template, texts, lists of ids; and how a token is spelled.

A message that spells ``<|im_end|>`` must not end its own turn. Spellings of special tokens in contents are swapped for
marks while the template renders, and encoded as the ordinary text they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from stretto.base.errors import UserError
from stretto.serve.bodies import Message, Tool
from stretto.serve.errors import ApiError, bad
from stretto.text.chat import render
from stretto.text.tokenizer import Tokenizer

_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end_of_sentence|>", "<|observation|>", "<|user|>")
"""Special tokens that end an assistant's turn in the templates of the families we read (and of their relatives)."""
_MARK = "\ue000{}\ue001"
_MARKED = re.compile("\ue000(\\d+)\ue001")


class Prompts:
    """Turns messages and texts into ids with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        added = tokenizer.rust.get_added_tokens_decoder()
        self._special = sorted((token.content for token in added.values() if token.special), key=len, reverse=True)
        self._spelled = re.compile("|".join(map(re.escape, self._special))) if self._special else None
        special_ids = tokenizer.special_ids()
        ends = (tokenizer.rust.token_to_id(spelling) for spelling in _TURN_ENDS)
        self.turn_ends = tuple(end for end in ends if end is not None and end in special_ids)

    def chat(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), generation_prompt: bool = True
    ) -> list[int]:
        """Ids of a conversation, ending with the header of the turn to be written.

        Raises:
            UserError: the checkpoint has no chat template, or it refuses these messages.
            ApiError: a content that is not text.
        """
        template = self.tokenizer.chat_template
        if template is None:
            raise UserError(
                "messages: this checkpoint has no chat template; use /v1/completions, or put a chat_template.jinja beside its tokenizer.json"
            )
        swapped: list[str] = []
        turns = [self._turn(message, f"messages.{place}", swapped) for place, message in enumerate(messages)]
        offered = [self._swap(tool.model_dump(exclude_none=True), swapped) for tool in tools]
        text = render(template, turns, offered, add_generation_prompt=generation_prompt)
        return self._encode(text, swapped)

    def text(self, text: str, parse_special: bool) -> list[int]:
        """Ids of a text; ``parse_special``: spellings of special tokens are those tokens."""
        return self.tokenizer.encode_rendered(text) if parse_special else self.tokenizer.encode(text)

    def _encode(self, text: str, swapped: list[str]) -> list[int]:
        pieces = _MARKED.split(text)
        ids: list[int] = []
        for number, piece in enumerate(pieces):
            if number % 2:
                ids += self.tokenizer.encode(swapped[int(piece)])
            elif piece:
                ids += self.tokenizer.encode_rendered(piece)
        return ids

    def _turn(self, message: Message, where: str, swapped: list[str]) -> dict[str, Any]:
        turn: dict[str, Any] = {
            "role": "system" if message.role == "developer" else message.role,
            "content": self._swap(_text_of(message, where), swapped),
        }
        for name in ("name", "tool_call_id", "reasoning_content"):
            if getattr(message, name) is not None:
                turn[name] = self._swap(getattr(message, name), swapped)
        if message.tool_calls:
            turn["tool_calls"] = [
                {
                    "type": "function",
                    "function": {
                        "name": self._swap(call.function.name, swapped),
                        "arguments": self._swap(_arguments(call.function.arguments, where), swapped),
                    },
                }
                for call in message.tool_calls
            ]
        return turn

    def _swap(self, value: Any, swapped: list[str]) -> Any:
        """``value`` with special spellings (and our own marks) in its strings replaced by marks."""
        if isinstance(value, dict):
            return {self._swap(key, swapped): self._swap(item, swapped) for key, item in value.items()}
        if isinstance(value, list):
            return [self._swap(item, swapped) for item in value]
        if not isinstance(value, str):
            return value
        if "\ue000" not in value and (self._spelled is None or not self._spelled.search(value)):
            return value

        def mark(match: re.Match[str]) -> str:
            swapped.append(match.group())
            return _MARK.format(len(swapped) - 1)

        return re.sub("|".join(["\ue000", *map(re.escape, self._special)]), mark, value)


def _text_of(message: Message, where: str) -> str:
    if message.content is None:
        if message.role != "assistant":
            raise bad(f"{where}.content", "is missing")
        return ""
    if isinstance(message.content, str):
        return message.content
    texts = []
    for place, part in enumerate(message.content):
        if part.type not in ("text", "input_text", "output_text") or part.text is None:
            raise bad(f"{where}.content.{place}", f"this model reads text only, not {part.type!r}")
        texts.append(part.text)
    return "".join(texts)


def _arguments(arguments: str | dict[str, Any], where: str) -> Any:
    """As an object: templates write it as JSON themselves."""
    if isinstance(arguments, dict):
        return arguments
    try:
        return json.loads(arguments or "{}")
    except (json.JSONDecodeError, RecursionError):
        raise bad(f"{where}.tool_calls", "arguments are not JSON") from None


class Spelling:
    """Text and bytes of single tokens, for the entries of ``logprobs``."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = tokenizer.special_ids()
        decoder = json.loads(tokenizer.rust.to_str()).get("decoder") or {}
        self._byte_of = _byte_alphabet() if decoder.get("type") == "ByteLevel" else None
        self.token = lru_cache(maxsize=1 << 16)(self._token)

    def _token(self, token: int) -> tuple[str, tuple[int, ...]]:
        """Text of ``token`` (``bytes:\\x…`` where it is part of a character, as OpenAI spells it) and its bytes."""
        stored = self._tokenizer.rust.id_to_token(token)
        if stored is None:  # a row of the embedding without a token
            return f"<{token}>", ()
        if token in self._special or self._byte_of is None or any(each not in self._byte_of for each in stored):
            text = stored if token in self._special else self._tokenizer.decode([token])
            return text, tuple(text.encode())
        spelled = bytes(self._byte_of[each] for each in stored)
        try:
            return spelled.decode(), tuple(spelled)
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{each:02x}" for each in spelled), tuple(spelled)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's: printable Latin-1 characters stand for their own byte, the rest for 256 and up in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


def check_ids(ids: Sequence[int], vocab_size: int, param: str) -> tuple[int, ...]:
    """``ids`` if each has a row in the embedding.

    Raises:
        ApiError: 400 otherwise, or where there are none.
    """
    if not ids:
        raise ApiError(400, f"{param}: is empty; give at least one token", param=param)
    if not 0 <= min(ids) <= max(ids) < vocab_size:
        wrong = min(ids) if min(ids) < 0 else max(ids)
        raise bad(param, f"token id {wrong} lies outside 0..{vocab_size - 1}")
    return tuple(ids)
