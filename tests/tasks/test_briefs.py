"""Constraints on texts, and the source of prompts with constraints."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from stretto.tasks.briefs import Constraints
from stretto.tasks.registry import open_source
from stretto.tasks.task import Answer


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("I saw a lamp.", {"first": True, "third": False}),
        ("She saw a lamp.", {"first": False, "third": True}),
        ('"I saw it," she said.', {"first": False, "third": True}),  # quoted speech does not count
        ("“Mine,” he said. ‘I know.’", {"first": False, "third": True}),
        ("She thought I was late.", {"first": True, "third": False}),
        ("A lamp.", {"first": False, "third": False}),
        ("I’m late.", {"first": True, "third": False}),
        ("We've come, and she'll wait.", {"first": True, "third": False}),
        ("He's late.", {"first": False, "third": True}),
    ],
)
def test_who_tells_it(text: str, kept: dict[str, bool]) -> None:
    assert {who: Constraints.model_validate({"person": who}).kept(text)["person"] for who in kept} == kept


def test_words_and_length() -> None:
    told = Constraints(words=(3, 4), include=("Lamp", "night train"))
    assert told.kept("The lamp, at night, trains") == {
        "words": False,
        "include Lamp": True,
        "include night train": False,
    }
    assert all(told.kept("lamp night train here").values())
    assert Constraints().kept("") == {}


def test_phrases_and_characters_are_looked_for_as_they_stand() -> None:
    told = Constraints(include=("once upon a time", "!"), exclude=("in order to", "—"))
    assert list(told.kept("A time came upon us once. He went to town in good order.").values()) == [
        False,
        False,
        True,
        True,
    ]
    assert list(told.kept("Once upon a time! In order to win — he lost.").values()) == [True, True, False, False]
    for entries in (("",), ("a", "  ")):
        with pytest.raises(ValidationError, match="exclude: an entry is empty; leave it out"):
            Constraints(exclude=entries)


def test_the_source_is_valid_and_pays_by_shares() -> None:
    source = open_source("briefs", SimpleNamespace(kind="briefs", args={"seed": 3}))
    source.validate()
    problem = source.problem(5)
    assert problem == source.problem(5) != source.problem(6)
    told = Constraints.model_validate(problem.payload["constraints"])
    assert all(word in problem.messages[0]["content"] for word in told.include)
    half = source.score(problem, Answer(problem.gold.replace(told.include[0], "thing")))
    assert half.reward == 0.75 and not half.ok and half.detail == f"not kept: include {told.include[0]}"
    assert source.score(problem, Answer("")).reward == 0
    forbidden = source.score(problem, Answer(f"{problem.gold} {told.exclude[0]}"))
    assert forbidden.reward == 0.75 and forbidden.detail == f"not kept: exclude {told.exclude[0]}"
    every_word = " ".join(
        word for other in map(source.problem, range(99)) for word in other.payload["constraints"]["include"]
    )
    assert all(source.score(each, Answer(every_word)).reward <= 0.25 for each in map(source.problem, range(20)))
