from __future__ import annotations

import json
import pickle
import re
from itertools import pairwise
from pathlib import Path

import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from stretto.base.errors import UserError
from stretto.text import tokenizer as module
from stretto.text.chat import CHATML
from stretto.text.tokenizer import (
    SETTLED_RANGES,
    Tokenizer,
    WordEncoder,
    load_tokenizer,
    split_pattern,
    train_tokenizer,
)
from tests.starts import llama_like

TEXT = [
    Path(module.__file__).read_text(),
    Path(pytest.__file__).read_text(),
    "Ελληνικά, 中文 and “quotes” … it's 1234 \r\n\n",
] * 2


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(iter(TEXT), 600, chat_template=CHATML)


@given(st.text())
def test_any_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.lists(st.text(st.sampled_from("aB1'²s ſK\t\r\n.\u00a0\u2028é中٣<|>_im\U0001f600\u0558"))))
@settings(max_examples=300)
def test_fast_path_equals_the_rust_library(tokenizer: Tokenizer, texts: list[str]) -> None:
    assert tokenizer.encode_batch(texts) == tokenizer.encode_reference(texts)


SETTLED = [chr(code) for low, high in SETTLED_RANGES for code in range(low, high + 1)]


@pytest.mark.parametrize("pattern", module._PATTERNS)
@pytest.mark.parametrize(
    "characters",
    [
        pytest.param([ch for ch in SETTLED if ch < "\u3100"] + SETTLED[::32], id="most"),
        pytest.param(SETTLED, marks=pytest.mark.slow, id="all"),
    ],
)
def test_fast_path_splits_settled_characters_as_rust_does(characters: list[str], pattern: str) -> None:
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rust = tokenizers.Tokenizer(tokenizers.models.BPE())
    rust.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, byte_level])
    assert split_pattern(rust) == pattern
    encoder = WordEncoder(rust, pattern)
    for index in range(0, len(characters), 256):  # each beside letters, digits, points, spaces and itself
        text = "".join(f"a{ch}1{ch}. {ch}{ch} x{ch}'{ch}s \n{ch}" for ch in characters[index : index + 256])
        ends = [end for _, (_, end) in split.pre_tokenize_str(text)]
        assert encoder.accepts(text)
        assert encoder._split(text) == [text[start:end] for start, end in pairwise([0, *ends])], repr(text)


def test_fast_path_refuses_what_it_cannot_split(tokenizer: Tokenizer) -> None:
    encoder = WordEncoder(tokenizer.rust, module._GPT2)
    assert encoder.accepts("plain, “quoted” and 中文")
    assert not encoder.accepts("newly assigned \u088f")


def test_added_tokens_that_are_not_special_are_left_to_rust(tokenizer: Tokenizer) -> None:
    rust = tokenizers.Tokenizer.from_str(tokenizer.rust.to_str())
    rust.add_tokens(["<call>"])
    with_added = Tokenizer(rust, tokenizer.eos_token)
    assert with_added.encode("x <call> y") == with_added.encode_reference(["x <call> y"])[0]
    assert with_added.vocab_size == tokenizer.vocab_size + 1
    assert with_added.vocab_size - 1 in with_added.encode("x <call> y")


@given(
    text=st.text()
    | st.text(st.sampled_from("ad ef\n<|>_im\u0301é中")).map(lambda text: text * 9)
    | st.sampled_from(TEXT)
)
def test_a_text_has_no_fewer_tokens_than_its_length_says(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.least_tokens(text) <= min(len(tokenizer.encode(text)), len(tokenizer.encode_rendered(text)))
    assert tokenizer.least_tokens("x" * 1000 * tokenizer._longest_token) == 1000


def change(tokenizer: Tokenizer, what: str) -> Tokenizer:
    """A tokenizer that removes characters, by one of the ways to do so."""
    rust = tokenizers.Tokenizer.from_str(tokenizer.rust.to_str())
    match what:
        case "normaliser":
            rust.normalizer = tokenizers.normalizers.Replace("aa", "")
        case "pre-tokenizer":
            rust.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        case "white space around a token":
            rust.add_special_tokens([tokenizers.AddedToken("<gap>", lstrip=True, rstrip=True)])
        case "bytes without a token":
            tree = json.loads(rust.to_str())
            del tree["model"]["vocab"]["a"]
            tree["model"]["merges"] = [pair for pair in tree["model"]["merges"] if "a" not in "".join(pair)]
            rust = tokenizers.Tokenizer.from_str(json.dumps(tree))
    return Tokenizer(rust, tokenizer.eos_token)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("normaliser", "a" * 10_000),
        ("pre-tokenizer", " " * 10_000),
        ("white space around a token", " " * 10_000 + "<gap>"),
        ("bytes without a token", "a" * 10_000),
    ],
)
def test_where_characters_may_be_removed_the_length_says_nothing(tokenizer: Tokenizer, what: str, text: str) -> None:
    other = change(tokenizer, what)
    assert len(other.encode_rendered(text)) <= 1 and other.least_tokens(text) == 0
    assert tokenizer.least_tokens(text) > 100


def test_special_tokens_are_parsed_in_rendered_text_only(tokenizer: Tokenizer) -> None:
    text = "a<|endoftext|>b"
    assert tokenizer.eos_id not in tokenizer.encode(text)
    assert tokenizer.encode_rendered(text).count(tokenizer.eos_id) == 1
    assert tokenizer.decode(tokenizer.encode_rendered(text)) == tokenizer.decode(tokenizer.encode(text)) == text


class HoldsNoLock:
    """A tokenizer of the Rust library without the method that holds Python's lock."""

    def __init__(self, rust: tokenizers.Tokenizer) -> None:
        self.encode_batch_fast = rust.encode_batch_fast


LETTERS = ["▁", *"abs<>/[]CLS"]
SPELLINGS = ["a", "b", " ", "s", "</s>", "[CLS]", "<s>", "<behind>", "<plain>", "<unk>", "\ufdd0</s>\ufdd1"]


def looking_up(kind: str) -> tokenizers.Tokenizer:
    """A tokenizer that finds words or pieces in a vocabulary with special tokens, and has others behind it."""
    pieces = ["<unk>", "<s>", "</s>", "[CLS]", *LETTERS, "ab"]
    if kind == "unigram":
        model: models.Model = models.Unigram([(piece, 0.0 if len(piece) > 2 else -3.0) for piece in pieces], 0)
    elif kind == "merges":
        merges = [("a", "b"), ("[", "]")]
        vocab = {piece: number for number, piece in enumerate([*pieces, "[]"])}
        model = models.BPE(vocab, merges, unk_token="<unk>", ignore_merges=True)
    else:
        make = models.WordLevel if kind == "words" else models.WordPiece
        model = make({piece: number for number, piece in enumerate(pieces)}, unk_token="<unk>")
    rust = tokenizers.Tokenizer(model)
    rust.pre_tokenizer = pre_tokenizers.WhitespaceSplit() if kind != "unigram" else pre_tokenizers.Metaspace()
    rust.add_special_tokens(["<unk>", "<s>", "</s>", "[CLS]", "<behind>"])
    rust.add_tokens(["<plain>"])
    return rust


@pytest.mark.parametrize("kind", ["unigram", "words", "pieces", "merges"])
@given(texts=st.lists(st.lists(st.sampled_from(SPELLINGS)).map("".join)))
@settings(derandomize=True, max_examples=30)
def test_text_has_no_special_tokens_where_the_vocabulary_holds_them(kind: str, texts: list[str]) -> None:
    tokenizer = Tokenizer(looking_up(kind), "</s>")
    unknown = {0}
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert not (tokenizer.special_ids - unknown).intersection(ids), text
        assert "<plain>" not in text or tokenizer.rust.token_to_id("<plain>") in ids
        if not re.search("[<[]", text):
            assert ids == tokenizer.encode_rendered(text)
    assert pickle.loads(pickle.dumps(tokenizer)).encode_batch(texts) == tokenizer.encode_batch(texts)
    assert tokenizer.encode_rendered("</s>")[-1] == 2


def test_special_tokens_that_merges_make_stay_pieces_of_words() -> None:
    """Without the piece, a BPE could not spell the longer ones."""
    vocab = {piece: number for number, piece in enumerate(["</s>", "!", "a", "!!", "!!a"])}
    rust = tokenizers.Tokenizer(models.BPE(vocab, [("!", "!"), ("!!", "a")], ignore_merges=True))
    rust.add_special_tokens(["</s>", "!"])
    assert Tokenizer(rust, "</s>").encode_batch(["!!a", "!a", "a!!"]) == [[4], [1, 2], [2, 3]]


def test_only_models_that_find_special_tokens_are_copied(tokenizer: Tokenizer) -> None:
    apart = models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>")
    rust = tokenizers.Tokenizer(apart)
    rust.add_special_tokens(["</s>"])
    for each in (tokenizer, Tokenizer(rust, "</s>")):
        assert each._plain is each.rust


def test_a_long_text_does_not_hold_pythons_lock(tokenizer: Tokenizer) -> None:
    """`encode` would stop all other threads of a server for seconds."""
    long = "a<|im_end|>é " * 4000 + "x" * 40_000
    rendered, plain = tokenizer._parsing.encode(long, add_special_tokens=False).ids, tokenizer.encode(long)
    copy = pickle.loads(pickle.dumps(tokenizer))
    vars(copy).update(_parsing=HoldsNoLock(copy._parsing))
    vars(copy._words).update(_rust=HoldsNoLock(copy.rust))
    assert copy.encode_rendered(long) == rendered
    assert copy.encode("x" * 40_000) == tokenizer.encode_reference(["x" * 40_000])[0]
    assert plain == tokenizer.encode_reference([long])[0]


def test_training_is_deterministic_and_bounded(tokenizer: Tokenizer) -> None:
    assert train_tokenizer(iter(TEXT), 600).fingerprint() == tokenizer.fingerprint()
    assert train_tokenizer(iter(TEXT[:1]), 600).fingerprint() != tokenizer.fingerprint()
    assert tokenizer.vocab_size == 600
    with pytest.raises(UserError, match="vocab_size: 100 is too small"):
        train_tokenizer(iter(TEXT), 100)
    with pytest.raises(UserError, match="vocab_size: 99999999999 is too large; at most"):
        train_tokenizer(iter(TEXT), 99999999999)


def test_saved_folder_loads_here_and_in_transformers(tokenizer: Tokenizer, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer.save(tmp_path / "tok")
    loaded = load_tokenizer(tmp_path / "tok")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "tok")
    text = "def f(x): return 'it''s' + x  # 中文\n"
    assert loaded.encode(text) == theirs(text)["input_ids"] == tokenizer.encode(text)
    assert (loaded.fingerprint(), loaded.chat_template, loaded.config) == (
        tokenizer.fingerprint(),
        CHATML,
        tokenizer.config,
    )
    assert (theirs.eos_token_id, theirs.chat_template, len(theirs)) == (tokenizer.eos_id, CHATML, tokenizer.vocab_size)
    theirs.save_pretrained(tmp_path / "again")
    assert load_tokenizer(tmp_path / "again").encode(text) == tokenizer.encode(text)


def test_pickle_keeps_everything(tokenizer: Tokenizer) -> None:
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.fingerprint() == tokenizer.fingerprint()
    assert copy.encode("a <|endoftext|>") == tokenizer.encode("a <|endoftext|>")


def test_bad_tokenizers_are_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match="no such file"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(UserError, match=r"tokenizer\.json: not a tokenizer\.json"):
        load_tokenizer(tmp_path)
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="eos_token: no token ends a document"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config.json", b"[]", r"tokenizer_config\.json: .*not a JSON object"),
        ("tokenizer_config.json", b'{"eos_token": 7}', "eos_token: no token ends a document"),
        ("tokenizer_config.json", b'{"eos_token": {"id": 7}}', "eos_token: no token ends a document"),
        ("tokenizer_config.json", b'{"chat_template": {"default": "x"}}', "chat_template: not a text"),
        (
            "tokenizer_config.json",
            b'{"chat_template": [{"name": "default", "template": 1}]}',
            "chat_template: not a text",
        ),
        ("chat_template.jinja", b"\xff\xfe", r"chat_template\.jinja: not UTF-8"),
    ],
)
def test_files_beside_a_tokenizer_that_are_damaged(
    tmp_path: Path, tokenizer: Tokenizer, name: str, content: bytes, message: str
) -> None:
    tokenizer.save(tmp_path)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert str(tmp_path / name) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("index", [2**32 - 1, 2**63, -1])
def test_an_id_that_no_vocabulary_has(tmp_path: Path, tokenizer: Tokenizer, index: int) -> None:
    tokenizer.save(tmp_path)
    tree = json.loads((tmp_path / "tokenizer.json").read_text())
    tree["model"]["vocab"]["!"] = index  # read, but not read again as it is written
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    with pytest.raises(UserError, match=r"tokenizer\.json: not a tokenizer\.json: "):
        load_tokenizer(tmp_path)


def test_named_tokens_that_are_none(tmp_path: Path, tokenizer: Tokenizer) -> None:
    tokenizer.save(tmp_path)
    config = {"eos_token": tokenizer.eos_token, "bos_token": {"id": 3}, "pad_token": 4, "chat_template": ["x"]}
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = load_tokenizer(tmp_path)
    assert loaded.named_id("bos_token") is loaded.named_id("pad_token") is loaded.chat_template is None


@pytest.mark.parametrize(
    ("single", "start"),
    [
        ("<|im_start|> $A", [1]),
        ("<|im_start|> <|endoftext|> $A <|endoftext|>", [1, 0]),
        ("$A <|endoftext|>", []),
        (None, []),
    ],
)
def test_a_document_begins_as_in_transformers(
    tokenizer: Tokenizer, tmp_path: Path, single: str | None, start: list[int]
) -> None:
    """Behind other post-processors, too, and never ended by them."""
    other = tokenizer if single is None else llama_like(tokenizer, single)
    offsets = tokenizers.processors.ByteLevel(trim_offsets=False)
    if single is not None:
        other.rust.post_processor = tokenizers.processors.Sequence([offsets, other.rust.post_processor])
    other.save(tmp_path)
    loaded = pickle.loads(pickle.dumps(load_tokenizer(tmp_path)))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    num_after = 0 if single is None else single.partition("$A")[2].count("<|")
    for text in ("x", "the text of <|im_start|>", " "):
        ids = theirs(text, split_special_tokens=True).input_ids
        assert loaded.document(text) == ids[: len(ids) - num_after]
        assert loaded.encode(text) == tokenizer.encode(text)
    assert list(loaded.start) == start and loaded.document("") == (start or [tokenizer.eos_id])


def test_the_tokens_before_a_text_need_no_token_of_the_text() -> None:
    rust = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "</s>": 1, "b": 2}))
    rust.post_processor = tokenizers.processors.RobertaProcessing(("</s>", 1), ("<s>", 0))
    assert Tokenizer(rust, "</s>").start == (0,)
