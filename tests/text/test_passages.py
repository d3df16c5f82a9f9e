"""Passages and their damages: what each does, what it leaves alone, and that length does not tell."""

from __future__ import annotations

from statistics import mean

import pytest

from stretto.text.passages import (
    DAMAGES,
    Part,
    bulleted,
    damaged,
    fillers,
    part_of,
    passages,
    plain,
    scripts,
    sentences,
    spaced,
)
from tests.text.books import books

PARTS: tuple[Part, ...] = ("reward", "evaluation", "held_out")


def test_no_author_is_in_two_parts_and_the_same_draws_come_again() -> None:
    found = {part: passages(books(), part, 30) for part in PARTS}
    authors = [{each.author for each in own} for own in found.values()]
    assert all(authors) and not authors[0] & authors[1] and not (authors[0] | authors[1]) & authors[2]
    assert all(part_of(each.author) == part for part, own in found.items() for each in own)
    assert found["reward"] == passages(books(), "reward", 30) != passages(books(), "reward", 30, seed=1)
    text = dict(books())[found["reward"][0].author]
    one = found["reward"][0]
    assert f"{one.prompt} {one.text} {one.rest}" in plain(text.replace("## A chapter", ""))


def test_what_each_damage_does() -> None:
    found = passages(books(), "held_out", 30)
    for own, told in zip(found, damaged(found, "held_out"), strict=True):
        said = sentences(own.text)
        assert tuple(told) == tuple(DAMAGES) and own.text not in told.values()
        assert sorted(sentences(told["shuffled"])) == sorted(said) and told["shuffled"] != own.text
        assert set(sentences(told["loops"])) < set(said)
        whole = f"{own.text} {own.rest}"
        assert not told["truncated"].endswith((".", "!", "?")) and whole.startswith(told["truncated"])
        assert told["swapped"] in {each.text for each in found if each.author != own.author}
        assert set(sentences(told["padded"])) & set(fillers("held_out")) and said[0] in told["padded"]
        assert told["copied"].startswith(own.prompt)
    assert not set(fillers("held_out")) & set(fillers("reward"))


def test_length_does_not_tell_which_is_damaged() -> None:
    found = passages(books(), "reward", 200)
    told = damaged(found, "reward")
    for name in DAMAGES:
        ratio = mean(len(each[name].split()) / len(own.text.split()) for each, own in zip(told, found, strict=True))
        assert ratio == pytest.approx(1.0, abs=0.12), name


def test_layout_is_not_read() -> None:
    text = 'He said: "Go." She went. It was over?'
    assert sentences(text) == ['He said: "Go."', "She went.", "It was over?"]
    for other in (bulleted(text), f"1. {text}", f"**{text}**", f"> {text}\n\n***\n", spaced(text)):
        assert plain(other) == plain(text) == text
    assert sentences("从前有一个人。他走了。") == ["从前有一个人。", "他走了。"]


def test_scripts() -> None:
    assert scripts("abcd 12") == {"LATIN": 1.0} and scripts("") == {}
    assert scripts("ab東京")["CJK"] == 0.5
