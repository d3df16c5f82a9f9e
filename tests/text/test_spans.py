"""A turn in another tokenizer's tokens: the same bytes, span by span, whatever either tokenizer splits."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers

from stretto.base.errors import UserError
from stretto.text.spans import Spelling, Translation
from stretto.text.tokenizer import END_OF_TEXT, TURN_END, Tokenizer, train_tokenizer

TEXT = ["the cat sat on the mat: né, 中文, “quotes” 😀 12 345"] * 20
FINE, COARSE = train_tokenizer(iter(TEXT), 262), train_tokenizer(iter(TEXT), 330)
"""The first has hardly anything but bytes."""


def translation(own: Tokenizer, other: Tokenizer) -> Translation:
    ends = [own.rust.token_to_id(each) for each in (END_OF_TEXT, TURN_END)]
    return Translation(own, other, ends, other.rust.token_to_id(TURN_END))


def spans(spelling: Spelling, ids: Sequence[int], numbers: np.ndarray) -> list[bytes]:
    """What each span is on one side."""
    assert (np.diff(numbers) >= 0).all() and set(numbers) == set(range(numbers[-1] + 1))
    parts = [b""] * (int(numbers[-1]) + 1)
    for token, number in zip(ids, numbers.tolist(), strict=True):
        parts[number] += spelling.bytes_of(token)
    return parts


@given(data=st.one_of(st.binary(min_size=1, max_size=20), st.text("the cat né中😀“ 12", min_size=1).map(str.encode)))
@example(data="né 中文😀".encode())
@example(data=b"\xf0\x9f\x98the cat\xe4\xb8")
def test_spans_are_the_same_bytes_on_both_sides_and_as_short_as_can_be(data: bytes) -> None:
    for own, other in ((FINE, COARSE), (COARSE, FINE)):
        turn = Spelling(own).ids_of(data)
        made = translation(own, other)(turn)
        mine, theirs = (
            spans(Spelling(own), turn, made.own_T),
            spans(Spelling(other), made.ids_K.tolist(), made.theirs_K),
        )
        assert mine == theirs and b"".join(mine) == data
        ends = [set(np.cumsum([len(each.bytes_of(token)) for token in ids])) for each, ids in
                ((Spelling(own), turn), (Spelling(other), made.ids_K.tolist()))]  # fmt: skip
        assert made.num_spans == len(ends[0] & ends[1])
    same = translation(FINE, FINE)(Spelling(FINE).ids_of(data))
    assert np.array_equal(same.own_T, np.arange(len(same.ids_K))) and np.array_equal(same.own_T, same.theirs_K)


def test_a_character_that_one_side_splits_is_a_span() -> None:
    turn = [FINE.encode(each)[place] for each, place in (("中", 0), ("中", 1), ("中", 2), ("x", 0))]
    made = translation(FINE, COARSE)(turn)
    assert COARSE.encode("中") == made.ids_K[:1].tolist()
    assert made.own_T.tolist() == [0, 0, 0, 1] and made.theirs_K.tolist() == [0, 1]
    cut = translation(FINE, COARSE)(turn[:2])  # the answer was cut off within it
    assert cut.own_T.tolist() == cut.theirs_K.tolist() == [0, 1] and len(cut.ids_K) == 2


def test_ends_of_turns_and_added_tokens_are_spans_by_themselves() -> None:
    own, other = (Tokenizer(tokenizers.Tokenizer.from_str(each.rust.to_str()), END_OF_TEXT) for each in (FINE, COARSE))
    own.rust.add_tokens(["<call>", "<only mine>"])
    other.rust.add_special_tokens(["<call>"])
    own, other = Tokenizer(own.rust, END_OF_TEXT), Tokenizer(other.rust, END_OF_TEXT)
    call, mine, end = (own.rust.token_to_id(each) for each in ("<call>", "<only mine>", END_OF_TEXT))
    made = translation(own, other)([*own.encode("the"), call, mine, end])
    assert made.ids_K[-1] == other.rust.token_to_id(TURN_END), "its own, whatever the student wrote"
    assert other.rust.token_to_id("<call>") in made.ids_K
    assert other.decode(made.ids_K[made.theirs_K == made.num_spans - 2].tolist()) == "<only mine>"
    num_the = len(own.encode("the"))
    assert np.bincount(made.own_T)[-3:].tolist() == [1, 1, 1] and len(made.own_T) == num_the + 3
    assert np.bincount(made.theirs_K)[[-3, -1]].tolist() == [1, 1] and np.bincount(made.theirs_K)[-2] > 1
    spelt = own.encode(TURN_END)  # text that looks like the end of a turn is none
    assert other.rust.token_to_id(TURN_END) not in translation(own, other)(spelt).ids_K


def test_an_id_that_no_token_has_is_a_character() -> None:
    made = translation(FINE, COARSE)([FINE.vocab_size + 5, *FINE.encode("a")])
    assert COARSE.decode(made.ids_K.tolist()) == "\ufffda" and made.num_spans == 2


def test_what_a_normalizer_would_change_is_spelt_byte_by_byte() -> None:
    tree = json.loads(COARSE.rust.to_str())
    rust = tokenizers.Tokenizer.from_str(json.dumps(tree))
    rust.normalizer = normalizers.NFC()
    composing, decomposed = Tokenizer(rust, END_OF_TEXT), "ne\u0301".encode()
    assert b"".join(map(Spelling(composing).bytes_of, composing.encode("ne\u0301"))) != decomposed
    made = translation(FINE, composing)(Spelling(FINE).ids_of(decomposed))
    assert b"".join(map(Spelling(composing).bytes_of, made.ids_K.tolist())) == decomposed


def test_other_kinds_cannot_be_aligned() -> None:
    words = tokenizers.Tokenizer(models.WordLevel({"</s>": 0, "the": 1}, unk_token="</s>"))
    incomplete = tokenizers.Tokenizer(models.BPE({"a": 0, "</s>": 1}, []))
    incomplete.decoder = decoders.ByteLevel()
    for rust in (words, incomplete):
        with pytest.raises(UserError, match=r"^only a byte-level BPE that has all bytes can be aligned"):
            translation(FINE, Tokenizer(rust, "</s>"))
