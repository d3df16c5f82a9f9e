from __future__ import annotations

import json
import random

import pytest

from stretto.tasks.shapes.fields import EXAMPLE, PLAIN, SYSTEM, spoken
from stretto.tasks.shapes.rules import read
from stretto.tasks.shapes.source import ShapesArgs, ShapesSource, request_of, sample_ledger
from stretto.tasks.task import Answer, Score


@pytest.mark.slow
def test_its_own_answers_are_right_and_others_are_not() -> None:
    ShapesSource("shapes", ShapesArgs()).validate(16)
    ShapesSource("shapes", ShapesArgs(things=3, count=4, pixels=72)).validate(100)
    with pytest.raises(ValueError, match="3 kinds of 4 shapes need 72 pixels to be read back; draw larger"):
        ShapesArgs(things=3, count=4, pixels=64)


def test_a_request_in_one_sentence_is_read_back() -> None:
    rng = random.Random(0)
    for _ in range(200):
        ledger = sample_ledger(rng, ShapesArgs(things=5, count=9, pixels=180))
        assert read(request_of(ledger)) == ledger and "." not in request_of(ledger)


def test_keeping_earns_half_and_aspects_the_rest_but_only_then() -> None:
    source = ShapesSource("shapes", ShapesArgs(seed=1))
    problem = next(each for each in map(source.problem, range(99)) if len(read(each.payload["request"]).relations) == 2)
    assert problem.messages[0]["content"] == SYSTEM
    asked = json.loads(problem.messages[-1]["content"])["prompt"]

    def scored(**fields: str) -> Score:
        return source.score(problem, Answer(json.dumps(fields)))

    assert scored(subject=asked).reward == 0.5 and scored(subject=asked, scene="a paper wall").reward == 0.6
    assert source.score(problem, Answer(problem.gold)).reward == pytest.approx(1)
    first, _, rest = asked.partition(" of ") if " of " in asked else asked.partition(" above ")
    lost = scored(subject=f"{first.removesuffix(' left').removesuffix(' right')} and {rest}", **PLAIN)
    assert not lost.ok and 0 < lost.reward < 0.5 and lost.parts["aspects"] == 1 and "is not" in lost.detail
    bound = scored(subject=asked, **{**PLAIN, "camera": "shot of another pink circle"})
    assert not bound.ok
    long = f'{{"subject": {"1" * 5000}}}'  # a number of more digits than Python reads
    for unread in ("", asked, "[1]", json.dumps({"scene": "a room"}), json.dumps({"subject": "a cat"}), long):
        assert source.score(problem, Answer(unread)).reward == 0


@pytest.mark.parametrize("form", ["```json\n{}\n```", "Here it is:\n{}", "{}\nDone.", "<think>{{}}</think>{}"])
def test_thoughts_fences_and_sentences_around_the_json_are_ignored(form: str) -> None:
    source = ShapesSource("shapes", ShapesArgs())
    problem = source.problem(0)
    assert source.score(problem, Answer(form.format(problem.gold))).ok


def test_a_field_counts_that_the_grammar_would_take_and_that_is_nobody_elses() -> None:
    assert spoken(PLAIN) == tuple(PLAIN) and spoken({}) == ()
    assert spoken({name: EXAMPLE[1][name] for name in PLAIN}) == ()
    wrong = {"scene": "a nice thing", "style": "style style", "lighting": "light, and more of it", "camera": "shot"}
    assert spoken(wrong) == ("camera",)
