"""Hugging Face tokenizers as one small class, and the training of a byte-level BPE.

`Tokenizer.encode` is for text of users and data: a document that spells ``<|endoftext|>`` is ordinary text and decodes to itself.
`Tokenizer.encode_rendered` is for text that a chat template rendered: such spellings become special tokens. Neither adds a token
that is not in the text. `Tokenizer.document` is for a text that is a whole document or begins one: it starts with the tokens that the
post-processor adds, as the BOS of Llama and Mistral.

Fast path of byte-level BPE: words repeat, and each is encoded separately. Splitting with the ``regex`` module and looking up the
ids of each word in a table is several times faster than the Rust pipeline. The ids are equal:

- only the pre-tokenizers in `_PATTERNS` qualify: `split_pattern` returns None for all others, and Rust encodes everything;
- the two regex engines use different Unicode versions, so a text with a character outside `SETTLED_RANGES` (blocks whose letters
  and numbers have not changed since Unicode 12) is encoded by Rust; the tests compare every character inside;
- a text that spells an added token that is not special is encoded by Rust.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any

import regex  # type: ignore[import-untyped]
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from stretto.base.errors import UserError, one_line
from stretto.base.paths import read_json, write_json, write_text

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_KNOWN_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
"""End-of-text tokens, tried in this order if a tokenizer.json comes without a configuration."""
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
_PATTERNS = (_GPT2, LLAMA3_PATTERN, QWEN2_PATTERN)
"""With each of these, a word of the split is itself split into that one word, so words can be encoded separately."""

SETTLED_RANGES = (0x0, 0x530), (0x2000, 0x206F), (0x20A0, 0x20BF), (0x2100, 0x2BFF), (0x3000, 0x9FFF), (0xAC00, 0xD7A3)
_UNSETTLED = regex.compile("[^" + "".join(f"\\u{low:04x}-\\u{high:04x}" for low, high in SETTLED_RANGES) + "]")
_MAX_WORDS = 1 << 17
"""Entries of the table before it is cleared: limits memory to a few tens of MB."""
_MAX_LENGTH = 64
"""Longest word, in characters, that is stored. Longer ones (rulers, base64) rarely repeat."""
_MAX_VOCAB = 1 << 22
"""Largest vocabulary that can be trained. Those of large models have a few hundred thousand entries."""
_LONG_WORD = regex.compile(r"\S{1000,}")
_LONG_TEXT = 1 << 15
"""Characters from which on a text is encoded without Python's lock, so that the other threads of a server continue."""


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A tokenizer and the settings that transformers stores beside it. Created by `load_tokenizer` or `train_tokenizer`."""

    rust: tokenizers.Tokenizer
    eos_token: str
    """Ends every document in the token shards."""
    chat_template: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    """Content of tokenizer_config.json."""
    vocab_size: int = field(init=False)
    """Largest token id plus one: the number of rows that an embedding needs."""
    eos_id: int = field(init=False)
    start: tuple[int, ...] = field(init=False)
    """Ids that the post-processor adds before a text, mostly the BOS token; empty for most tokenizers."""
    _parsing: tokenizers.Tokenizer = field(init=False, repr=False)
    _words: WordEncoder | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.rust.no_truncation()
        self.rust.no_padding()
        eos_id = self.rust.token_to_id(self.eos_token)
        if eos_id is None:
            raise UserError(f"tokenizer: eos_token: {self.eos_token!r} is not in the vocabulary; name one that is")
        parsing = tokenizers.Tokenizer.from_str(self.rust.to_str())
        # the parsing of special tokens is an attribute of the Rust object, so there are two objects
        self.rust.encode_special_tokens = True
        words = WordEncoder(self.rust, pattern) if (pattern := split_pattern(self.rust)) else None
        vocab_size = max(self.rust.get_vocab().values()) + 1
        start = _added_before(self.rust)
        self.__dict__.update(vocab_size=vocab_size, eos_id=eos_id, start=start, _parsing=parsing, _words=words)

    def __reduce__(self) -> tuple[Any, ...]:
        return Tokenizer, (self.rust, self.eos_token, self.chat_template, dict(self.config))

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``. Spellings of special tokens are ordinary text."""
        return self.encode_batch([text])[0]

    def document(self, text: str) -> list[int]:
        """Ids of ``text`` at the beginning of a document: `start`, then `encode`. Never empty: without both, the end-of-text token."""
        return [*self.start, *self.encode(text)] or [self.eos_id]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text; much faster than separate calls."""
        words = self._words
        if words is None:
            return self.encode_reference(texts)
        fast = [words.encode(text) if words.accepts(text) else None for text in texts]
        slow = iter(self.encode_reference([text for text, ids in zip(texts, fast, strict=True) if ids is None]))
        return [next(slow) if ids is None else ids for ids in fast]

    def encode_reference(self, texts: Sequence[str]) -> list[list[int]]:
        """Reference for `encode_batch`: the Rust library alone."""
        return [encoding.ids for encoding in self._plain.encode_batch_fast(list(texts), add_special_tokens=False)]

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """The tokenizer of ordinary text: `rust`, or a copy in which special tokens have spellings that no text has. A model that looks words
        or their pieces up in its vocabulary may find special tokens there: all do, except a BPE without ``ignore_merges``."""
        model = self.rust.model
        if isinstance(model, models.BPE) and not model.ignore_merges:
            return self.rust
        special = {token.content for token in self.rust.get_added_tokens_decoder().values() if token.special}
        special &= self.rust.get_vocab(with_added_tokens=False).keys()
        if not special:
            return self.rust
        tree = json.loads(self.rust.to_str())
        special -= {tree["model"].get("unk_token")}
        for first, second in tree["model"].get("merges", ()):
            special -= {first, second, first + second}  # merges need these pieces: "!" may be for padding
        mark = secrets.token_hex(16)  # no text can guess it; the ids do not depend on it

        def renamed(piece: str) -> str:
            return f"{mark}{piece}" if piece in special else piece

        vocab = tree["model"]["vocab"]
        if isinstance(vocab, dict):
            tree["model"]["vocab"] = {renamed(piece): number for piece, number in vocab.items()}
        else:
            tree["model"]["vocab"] = [[renamed(piece), score] for piece, score in vocab]
        for token in tree["added_tokens"]:
            token["content"] = renamed(token["content"])
        plain = tokenizers.Tokenizer.from_str(json.dumps(tree))
        plain.encode_special_tokens = True
        return plain

    def encode_rendered(self, text: str) -> list[int]:
        """Ids of ``text`` that a chat template rendered. Spellings of special tokens become these tokens."""
        return _ids_of(self._parsing, text)

    def least_tokens(self, text: str) -> int:
        """A lower bound of the number of ids of ``text``, from its number of bytes alone; 0 if the tokenizer may drop characters."""
        return -(-len(text.encode()) // self._longest_token) if self._longest_token else 0

    @cached_property
    def _longest_token(self) -> int:
        """Most bytes of a text that one token stands for; 0: no limit is known, because a normaliser, a pre-tokenizer, a token that
        takes the white space around it, or a byte without a token may remove characters."""
        added = self.rust.get_added_tokens_decoder().values()
        vocab = self.rust.get_vocab(with_added_tokens=False)
        keeps_bytes = self._words is not None and all(byte in vocab for byte in pre_tokenizers.ByteLevel.alphabet())
        if not keeps_bytes or any(token.lstrip or token.rstrip for token in added):
            return 0
        # a byte-level token has one character for each byte
        return max(chain(map(len, vocab), (len(token.content.encode()) for token in added)))

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """Text of ``ids``. Exact for byte-level tokenizers; bytes that are not UTF-8 become U+FFFD."""
        return self.rust.decode(list(ids), skip_special_tokens=skip_special_tokens)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of all special tokens."""
        return frozenset(i for i, token in self.rust.get_added_tokens_decoder().items() if token.special)

    def named_id(self, name: str) -> int | None:
        """Id of a token named in the configuration (``bos_token``, ``pad_token`` etc.); None if it is not named."""
        token = spelling(self.config.get(name))
        return None if token is None else self.rust.token_to_id(token)

    def fingerprint(self) -> str:
        """sha256 of everything that decides the ids of a document: the tokenizer's definition and its eos token."""
        definition = json.dumps(json.loads(self.rust.to_str()), sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(f"{self.eos_token}\n{definition}".encode()).hexdigest()

    def save(self, folder: Path | str) -> None:
        """Write the files that transformers' AutoTokenizer loads into ``folder``."""
        folder = Path(folder)
        write_text(
            folder / "tokenizer.json", self.rust.to_str(pretty=True)
        )  # Rust's save would hide errors of the disk
        write_json(folder / "tokenizer_config.json", dict(self.config))
        write_json(folder / "special_tokens_map.json", {n: self.config[n] for n in _NAMED_TOKENS if self.config.get(n)})
        if self.chat_template:
            write_text(folder / "chat_template.jinja", self.chat_template)


def _added_before(rust: tokenizers.Tokenizer) -> tuple[int, ...]:
    """Ids that the post-processor of ``rust`` adds before a text."""
    if rust.post_processor is None:
        return ()
    probe = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))  # has a token for the text, unlike some
    probe.post_processor = rust.post_processor
    encoding = probe.encode("a")
    added = takewhile(lambda pair: pair[1] is None, zip(encoding.ids, encoding.sequence_ids, strict=True))
    return tuple(token for token, _ in added)


def _ids_of(rust: tokenizers.Tokenizer, text: str) -> list[int]:
    """Ids of ``text``, without the tokens that a post-processor adds."""
    if len(text) < _LONG_TEXT:  # in this thread: the library's own threads may all be busy with long texts
        return list(rust.encode(text, add_special_tokens=False).ids)  # holds Python's lock
    return list(rust.encode_batch_fast([text], add_special_tokens=False)[0].ids)


def load_tokenizer(path: Path | str, settings: Mapping[str, Any] = MappingProxyType({})) -> Tokenizer:
    """Load a tokenizer.json, or a folder that contains one (any fast tokenizer of transformers).

    tokenizer_config.json and chat_template.jinja beside it are read if they exist; ``settings`` are used without a tokenizer_config.json.

    Raises:
        UserError: no such file, not a fast tokenizer, or no token ends a document.
    """
    source = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
    if not source.is_file():
        raise UserError(f"{source}: no such file; give a tokenizer.json or the folder of a transformers fast tokenizer")
    with _problem_of(source):
        rust = tokenizers.Tokenizer.from_str(source.read_text(encoding="utf-8"))
    folder = source.parent
    place = folder / "tokenizer_config.json"
    config = read_json(place) if place.is_file() else dict(settings)
    if not isinstance(config, dict):
        raise UserError(f"{place}: not a JSON object; the file is damaged")
    template = _template(folder, config.pop("chat_template", None))
    guesses = (token for token in _KNOWN_ENDS if rust.token_to_id(token) is not None)
    eos = spelling(config.get("eos_token") or next(guesses, None))
    if eos is None or rust.token_to_id(eos) is None:
        raise UserError(f"{source}: eos_token: no token ends a document; name one in {place}")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config, "eos_token": eos}
    with _problem_of(source):  # the constructor serialises and parses it again
        return Tokenizer(rust, eos, template, config)


@contextmanager
def _problem_of(source: Path) -> Iterator[None]:
    """Convert exceptions of the Rust library into a `UserError`. It raises bare Exceptions, and panics are BaseExceptions."""
    try:
        yield
    except (UserError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        remedy = "save the tokenizer again with transformers or stretto"
        raise UserError(f"{source}: not a tokenizer.json: {one_line(error, 200)}; {remedy}") from None


def spelling(token: Any) -> str | None:
    """Spelling of a token in tokenizer_config.json, where it is a string or an object; None if it is neither."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _template(folder: Path, configured: Any) -> str | None:
    """The chat template in ``folder``: its own file, or ``configured``, the value in tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: not UTF-8 ({error}); save it again as UTF-8") from None
    if isinstance(configured, list):  # older format of transformers: several named templates
        by_name = {entry.get("name"): entry.get("template") for entry in configured if isinstance(entry, dict)}
        configured = by_name.get("default")
    if configured is not None and not isinstance(configured, str):
        raise UserError(f"{folder / 'tokenizer_config.json'}: chat_template: not a text; remove it or write one")
    return configured


def train_tokenizer(texts: Iterator[str], vocab_size: int, chat_template: str | None = None) -> Tokenizer:
    """Train a byte-level BPE. All 256 bytes are tokens, so every text round-trips. Equal texts give equal ids. Words are split as in
    GPT-2, a pre-tokenizer that every engine supports.

    Args:
        texts: training text; read once, in constant memory except for the table of distinct words.
        vocab_size: number of entries, special tokens and bytes included; a small text may give fewer.
        chat_template: Jinja source to store with the tokenizer.

    Raises:
        UserError: ``vocab_size`` is smaller than the number of bytes and special tokens, or larger than any vocabulary.
    """
    special = [END_OF_TEXT, TURN_START, TURN_END]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size < len(alphabet) + len(special):
        raise UserError(f"vocab_size: {vocab_size} is too small; at least {len(alphabet) + len(special)} are needed")
    if vocab_size > _MAX_VOCAB:  # the library reserves memory for all entries at once
        raise UserError(f"vocab_size: {vocab_size} is too large; at most {_MAX_VOCAB} are possible")
    rust = tokenizers.Tokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    rust.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, min_frequency=2, show_progress=False, special_tokens=special, initial_alphabet=alphabet
    )
    rust.train_from_iterator(map(_with_long_words_cut, texts), trainer)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT}
    return Tokenizer(rust, END_OF_TEXT, chat_template, config | {"clean_up_tokenization_spaces": False})


def _with_long_words_cut(text: str) -> str:
    """``text`` for training, with very long words cut: every merge searches the whole word, so a word of megabytes would take hours."""

    def cut(match: regex.Match[str]) -> str:
        word = match.group()
        return "\n".join(word[start : start + _MAX_LENGTH] for start in range(0, len(word), _MAX_LENGTH))

    return str(_LONG_WORD.sub(cut, text))


def split_pattern(rust: tokenizers.Tokenizer) -> str | None:
    """Regular expression with which ``rust`` splits words; None if the fast path would not be exact."""
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


class WordEncoder(dict[str, list[int]]):
    """Encoder of texts word by word. The dictionary maps words to ids; a new word is encoded when it is looked up."""

    def __init__(self, rust: tokenizers.Tokenizer, pattern: str) -> None:
        super().__init__()
        self._rust = rust
        self._split = regex.compile(pattern).findall
        plain = [token.content for token in rust.get_added_tokens_decoder().values() if not token.special]
        self._added = regex.compile("|".join(map(regex.escape, plain))) if plain else None

    def accepts(self, text: str) -> bool:
        """Whether `encode` is exact for ``text``."""
        settled = text.isascii() or _UNSETTLED.search(text) is None
        return settled and (self._added is None or self._added.search(text) is None)

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, for which `accepts` must be true."""
        if len(self) > _MAX_WORDS:
            self.clear()
        return list(chain.from_iterable(map(self.__getitem__, self._split(text))))

    def __missing__(self, word: str) -> list[int]:
        ids = _ids_of(self._rust, word)
        if len(word) <= _MAX_LENGTH:
            self[word] = ids
        return ids
