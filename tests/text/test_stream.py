from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import decoders, models

from stretto.base.errors import UserError
from stretto.text.stream import BYTE_OF_CHARACTER, REPLACEMENT, Detokenizer, StopStrings
from stretto.text.tokenizer import Tokenizer, train_tokenizer

TEXT = ["Streams of text, Ελληνικά, 中文 and “quotes” 😀 it's 1234 \r\n\n  indented"] * 3
PIECES = ["▁", "▁▁", "a", "▁a", "▁word", "é", "中", REPLACEMENT, "</s>", "<s>"]


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    tokenizer = train_tokenizer(iter(TEXT), 320)
    tokenizer.rust.add_tokens(["<call>", " é spelt"])
    return Tokenizer(tokenizer.rust, tokenizer.eos_token)


def sentencepiece(decoder: decoders.Decoder) -> Tokenizer:
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocabulary |= {piece: 256 + index for index, piece in enumerate(PIECES)}
    rust = tokenizers.Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="a"))
    rust.add_special_tokens(["</s>", "<s>"])
    rust.decoder = decoder
    return Tokenizer(rust, "</s>")


LLAMA = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)
METASPACE = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()])
PLAIN_METASPACE = decoders.Metaspace(prepend_scheme="always")


@pytest.fixture(scope="module", params=["byte_level", "llama", "metaspace", "plain"])
def tokenizer(request: pytest.FixtureRequest, byte_level: Tokenizer) -> Tokenizer:
    makers = {"llama": LLAMA, "metaspace": METASPACE, "plain": PLAIN_METASPACE}
    return byte_level if request.param == "byte_level" else sentencepiece(makers[request.param])


def pieces(stream: Detokenizer, ids: Sequence[int], cuts: Sequence[int]) -> list[str]:
    bounds = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    shown = [stream.push(ids[start:end]) for start, end in pairwise(bounds)]
    return [*shown, stream.finish()]


@given(ids=st.lists(st.integers(0, 325), max_size=30), cuts=st.lists(st.integers(0, 30)))
def test_pieces_of_any_tokens_make_the_whole_decode(tokenizer: Tokenizer, ids: list[int], cuts: list[int]) -> None:
    # Ids at random are mostly invalid bytes, specials, added tokens and, past the vocabulary, nothing at all.
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    assert "".join(pieces(Detokenizer(tokenizer), ids, cuts)) == whole
    assert "".join(pieces(Detokenizer(tokenizer), ids, range(len(ids)))) == whole


@given(data=st.binary(max_size=12))
@example(data=b"\xf0\x9f\x98\xf0\x9f\x98\x80\xe4\xb8")
def test_bytes_become_text_only_when_certain(byte_level: Tokenizer, data: bytes) -> None:
    character = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}
    stream = Detokenizer(byte_level)
    text = ""
    for num, byte in enumerate(data, start=1):
        text += stream.push([byte_level.rust.token_to_id(character[byte])])
        # Certain: the same whatever follows. A continuation byte, a letter and the end are all there is to follow.
        ends = [(data[:num] + tail).decode(errors="replace") for tail in (b"", b"a", b"\x80", b"\x80\x80", b"\xbf\xbf")]
        assert all([end.startswith(text) for end in ends])
        if data[:num].decode(errors="ignore").encode() == data[:num]:
            assert text == data[:num].decode(), "nothing is held back after whole characters"
    assert text + stream.finish() == data.decode(errors="replace")


@given(text=st.text())
def test_whole_characters_are_shown_at_once(byte_level: Tokenizer, text: str) -> None:
    stream = Detokenizer(byte_level)
    assert stream.push([byte_level.eos_id, *byte_level.encode(text)]) == text
    assert stream.finish() == ""


@pytest.mark.parametrize("decoder", [LLAMA, METASPACE, PLAIN_METASPACE], ids=["llama", "metaspace", "plain"])
def test_leading_space_goes_only_at_the_beginning(decoder: decoders.Decoder) -> None:
    tokenizer = sentencepiece(decoder)
    word, bos, space = (tokenizer.rust.token_to_id(piece) for piece in ("▁word", "<s>", "▁"))
    assert Detokenizer(tokenizer).push([bos, word]) == "word"
    stream = Detokenizer(tokenizer)
    assert [stream.push([word]), stream.push([bos]), stream.push([word])] == ["word", "", " word"]
    assert Detokenizer(tokenizer, after=[bos, word]).push([word]) == " word"
    assert Detokenizer(tokenizer, after=[bos]).push([word]) == "word"
    assert Detokenizer(tokenizer, after=[space]).push([word]) == " word"


def test_a_run_of_byte_tokens_waits_for_its_end() -> None:
    tokenizer = sentencepiece(LLAMA)
    a = tokenizer.rust.token_to_id("a")
    stream = Detokenizer(tokenizer)
    assert [stream.push([byte]) for byte in "中".encode()] == ["", "", ""]
    assert stream.push([a]) == "中a"  # a fourth byte instead would have made the library discard the character


def reference(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """Grow the text by a character until it ends in a stop string."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    text=st.text("ab", max_size=20),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    cuts=st.lists(st.integers(0, 20)),
)
def test_stop_strings_equal_the_reference_for_any_split(text: str, stops: list[str], cuts: list[int]) -> None:
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    finder, shown = StopStrings(stops), ""
    for start, end in pairwise(bounds):
        shown += finder.push(text[start:end])
        assert reference(text, stops)[0].startswith(shown), "showed a piece of what may be a stop string"
        if finder.matched is None:  # no more is held back than may begin a stop string
            held = text[len(shown) : end]
            assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)
    assert (shown + finder.finish(), finder.matched) == reference(text, stops)


def test_nothing_begins_to_match_before_the_least_length() -> None:
    finder = StopStrings(["end"])
    assert finder.push("the end, en", search=False) == "the end, en"
    assert finder.push("d en") == "d " and finder.matched is None
    assert finder.push("d more") == "" and finder.matched == "end"
    assert finder.push("more") == finder.finish() == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(UserError, match="request: stop: an empty string"):
        StopStrings(["x", ""])
