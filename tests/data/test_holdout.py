from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.base.errors import UserError
from stretto.data.files import LeftOut
from stretto.data.holdout import MAX_SAMPLED_DOCUMENTS, VAL_BYTES, Holdout, choose_holdout, split_text, without_held_out
from stretto.data.sources import Document
from tests.data.conftest import texts


def held_share(documents: list[Document], holdout: Holdout) -> float:
    parts = [part for document in documents for part in holdout.divide(document)]
    assert sum(len(part.text) for _, part in parts) == sum(len(document.text) for document in documents)
    return sum(len(part.text) for split, part in parts if split == "val") / sum(len(part.text) for _, part in parts)


def test_of_many_documents_a_hundredth_is_held_out_and_no_more_of_them_are_read() -> None:
    read: list[Document] = []

    def endless() -> Iterator[Document]:
        for document in texts(10**9):
            read.append(Document(document.text.ljust(11_000)))  # a hundredth of a thousand is more than VAL_BYTES
            yield read[-1]

    assert choose_holdout(endless(), None) == Holdout("documents", 0.01)
    assert len(read) == MAX_SAMPLED_DOCUMENTS


@pytest.mark.parametrize("num", [999, 1000, 5000])
def test_of_many_short_documents_a_tenth_is_held_out(num: int) -> None:
    share = held_share(documents := list(texts(num)), choose_holdout(documents, None))
    assert share == pytest.approx(min(0.1, VAL_BYTES / sum(len(document.text) for document in documents)), rel=0.1)


def test_of_some_documents_whole_ones_are_held_out() -> None:
    documents = list(texts(60))
    holdout = choose_holdout(documents, None)
    assert holdout.by == "documents"
    assert 0.1 <= held_share(documents, holdout) <= 0.2  # little text, so a tenth, up to the end of a document
    assert choose_holdout([*documents, *documents[:9]], None) == choose_holdout(documents[::-1] + documents[:9], None)


@pytest.mark.parametrize("sizes", [[400_000], [400_000] * 3, [900_000, *[1000] * 60], [50] * 5])
def test_of_few_or_uneven_documents_each_gives_its_end(sizes: list[int]) -> None:
    documents = [Document(f"{number} words of this line\n" * (size // 22)) for number, size in enumerate(sizes)]
    holdout = choose_holdout(documents, None)
    assert holdout.by == "position"
    total = sum(sizes)
    assert held_share(documents, holdout) == pytest.approx(min(0.1, max(0.01, VAL_BYTES / total)), rel=0.6)
    assert choose_holdout(documents, 0.25).fraction == 0.25


@pytest.mark.slow
@settings(max_examples=25)
@given(st.text(max_size=300), st.floats(0.01, 0.5))
def test_nothing_is_lost_at_a_cut(text: str, fraction: float) -> None:
    head, tail = split_text(text, fraction)
    assert head + tail == text
    assert not tail or (head.strip() and tail.strip())


@pytest.mark.parametrize(
    ("text", "end"),
    [("a line\n" * 100, "\n"), ("some words " * 100, " "), ("汉字句子。" * 100, "。"), ("x" * 1000, "x")],
)
def test_a_cut_is_behind_a_line_or_a_word(text: str, end: str) -> None:
    head, tail = split_text(text, 0.1)
    assert head.endswith(end)
    assert 0.1 * len(text) <= len(tail) <= 0.15 * len(text) + 1


def test_a_document_without_a_place_to_cut_is_trained_on() -> None:
    assert split_text("word", 0.1) == ("word", "") and split_text("", 0.1) == ("", "")


def test_held_out_documents_are_not_trained_on() -> None:
    documents, left_out = list(texts(20)), LeftOut()
    divided = without_held_out({"train": documents, "val": documents[:5]}, left_out)
    assert list(divided) == ["val", "train"]
    assert list(divided["val"]) == documents[:5] and list(divided["train"]) == documents[5:]
    assert str(left_out).startswith("5 documents held out (0, …)")
    with pytest.raises(UserError, match="--val: all of the training text is also held out"):
        [list(each) for each in without_held_out({"train": documents, "val": documents}, LeftOut()).values()]
