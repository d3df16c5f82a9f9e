"""Any Hugging Face tokenizer as one small object, and the training of our own byte-level BPE.

Two ways in. `Tokenizer.encode` takes text from the world: a document that happens to spell ``<|endoftext|>`` is text
like any other and decodes to itself. `Tokenizer.encode_rendered` takes text that a chat template rendered, where those
spellings are the special tokens. Neither adds a token that is not in the text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from stretto.base.errors import UserError
from stretto.base.paths import read_json, replacing, write_json, write_text
from stretto.text.words import WordEncoder, split_pattern

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
_KNOWN_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
"""Tried in this order where a bare tokenizer.json does not say which token ends a document."""
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A tokenizer and what transformers keeps beside it. Build with `load_tokenizer` or `train_tokenizer`."""

    rust: tokenizers.Tokenizer
    eos_token: str
    """Ends every document in the token shards."""
    chat_template: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    """tokenizer_config.json as it will be written."""
    vocab_size: int = field(init=False)
    """Largest token id plus one: the rows that an embedding needs."""
    eos_id: int = field(init=False)
    _parsing: tokenizers.Tokenizer = field(init=False, repr=False)
    _words: WordEncoder | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.rust.no_truncation()
        self.rust.no_padding()
        eos_id = self.rust.token_to_id(self.eos_token)
        if eos_id is None:
            raise UserError(f"tokenizer: eos_token: {self.eos_token!r} is not in the vocabulary; name one that is")
        parsing = tokenizers.Tokenizer.from_str(self.rust.to_str())
        # Whether spellings of special tokens are parsed is a switch on the Rust object, so there is one object for each.
        self.rust.encode_special_tokens = True
        pattern = split_pattern(self.rust)
        object.__setattr__(self, "vocab_size", max(self.rust.get_vocab().values()) + 1)
        object.__setattr__(self, "eos_id", eos_id)
        object.__setattr__(self, "_parsing", parsing)
        object.__setattr__(self, "_words", WordEncoder(self.rust, pattern) if pattern else None)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.rust.to_str(), self.eos_token, self.chat_template, dict(self.config))

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``; spellings of special tokens are ordinary text."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text; much faster than one by one."""
        words = self._words
        quick = [words is not None and words.accepts(text) for text in texts]
        slow = iter(self.encode_reference([text for text, is_quick in zip(texts, quick, strict=True) if not is_quick]))
        return [
            words.encode(text) if words and is_quick else next(slow)
            for text, is_quick in zip(texts, quick, strict=True)
        ]

    def encode_reference(self, texts: Sequence[str]) -> list[list[int]]:
        """What `encode_batch` must equal: the Rust library alone."""
        return [coded.ids for coded in self.rust.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_rendered(self, text: str) -> list[int]:
        """Ids of ``text`` that a chat template rendered: spellings of special tokens become those tokens."""
        ids: list[int] = self._parsing.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """Text of ``ids``. Exact for byte-level tokenizers; bytes that are not UTF-8 become U+FFFD."""
        text: str = self.rust.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def special_ids(self) -> frozenset[int]:
        """Ids of all special tokens."""
        return frozenset(i for i, token in self.rust.get_added_tokens_decoder().items() if token.special)

    def named_id(self, name: str) -> int | None:
        """Id of a token that the configuration names (``bos_token``, ``pad_token``…); None where it names none."""
        token = self.config.get(name)
        token = token["content"] if isinstance(token, dict) else token
        index: int | None = None if token is None else self.rust.token_to_id(token)
        return index

    def fingerprint(self) -> str:
        """sha256 over all that decides the ids of a document: the tokenizer's definition and its eos token."""
        definition = json.dumps(json.loads(self.rust.to_str()), sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(f"{self.eos_token}\n{definition}".encode()).hexdigest()

    def save(self, folder: Path | str) -> None:
        """Write into ``folder`` the files that transformers' AutoTokenizer loads."""
        folder = Path(folder)
        with replacing(folder / "tokenizer.json") as temporary:
            self.rust.save(str(temporary))
        write_json(folder / "tokenizer_config.json", dict(self.config))
        named = {name: self.config[name] for name in _NAMED_TOKENS if self.config.get(name)}
        write_json(folder / "special_tokens_map.json", named)
        if self.chat_template:
            write_text(folder / "chat_template.jinja", self.chat_template)


def load_tokenizer(path: Path | str) -> Tokenizer:
    """Load a tokenizer.json, or a folder that holds one (any transformers fast tokenizer).

    Beside a tokenizer.json, tokenizer_config.json and chat_template.jinja are read too where they are present.

    Raises:
        UserError: nothing there, not a fast tokenizer, or no token that ends a document.
    """
    path = Path(path)
    source = path / "tokenizer.json" if path.is_dir() else path
    if not source.is_file():
        remedy = "give a tokenizer.json or the folder of a transformers fast tokenizer"
        raise UserError(f"{source}: no such file; {remedy}")
    try:
        rust = tokenizers.Tokenizer.from_str(source.read_text(encoding="utf-8"))
    except Exception as error:  # the Rust library raises a bare Exception
        problem = " ".join(str(error).split())[:200]
        raise UserError(
            f"{source}: not a tokenizer.json: {problem}; save the tokenizer again with transformers or stretto"
        ) from None
    folder, config, template = source.parent, {}, None
    if (folder / "tokenizer_config.json").is_file():
        config = read_json(folder / "tokenizer_config.json")
        template = config.pop("chat_template", None)
    if (folder / "chat_template.jinja").is_file():
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    if isinstance(template, list):  # transformers' older form: several named templates
        template = next((entry["template"] for entry in template if entry["name"] == "default"), None)
    eos = config.get("eos_token") or next((token for token in _KNOWN_ENDS if rust.token_to_id(token) is not None), None)
    eos = eos["content"] if isinstance(eos, dict) else eos
    if eos is None or rust.token_to_id(eos) is None:
        raise UserError(
            f"{source}: eos_token: no token ends a document; name one in {folder / 'tokenizer_config.json'}"
        )
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config, "eos_token": eos}
    return Tokenizer(rust, eos, template, config)


def train_tokenizer(
    texts: Iterator[str], vocab_size: int, chat_template: str | None = None, max_positions: int | None = None
) -> Tokenizer:
    """Train a byte-level BPE: all 256 bytes are tokens, so every text round-trips. The same texts give the same ids.

    Words are split as GPT-2 does, which every engine that reads our checkpoints knows by name.

    Args:
        texts: what to learn from; read once, in constant memory but for the table of distinct words.
        vocab_size: entries wanted, special tokens and bytes included; small text may give fewer.
        chat_template: Jinja source to keep with the tokenizer.
        max_positions: longest input, told to transformers as ``model_max_length``.

    Raises:
        UserError: ``vocab_size`` leaves no room for the bytes.
    """
    special = [END_OF_TEXT, TURN_START, TURN_END]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < len(alphabet) + len(special):
        raise UserError(f"vocab_size: {vocab_size} is too small; at least {len(alphabet) + len(special)} are needed")
    rust = tokenizers.Tokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    rust.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        show_progress=False,
        special_tokens=special,
        initial_alphabet=sorted(alphabet),
    )
    rust.train_from_iterator(texts, trainer)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
    }
    if max_positions is not None:
        config |= {"model_max_length": max_positions}
    return Tokenizer(rust, END_OF_TEXT, chat_template, config)


def _rebuild(definition: str, eos_token: str, chat_template: str | None, config: dict[str, Any]) -> Tokenizer:
    return Tokenizer(tokenizers.Tokenizer.from_str(definition), eos_token, chat_template, config)
