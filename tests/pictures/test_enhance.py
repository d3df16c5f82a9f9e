from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest

from stretto.base.errors import UserError
from stretto.base.records import Receipt, new_lineage
from stretto.pictures.enhance import Enhanced, Wording, enhance, is_enhancer, repaired, suffixed
from stretto.tasks.shapes.fields import EXAMPLE, FIELDS, PLAIN, fields_of
from stretto.tasks.shapes.rules import read, unkept

REQUEST = "two red cubes left of a blue sphere"
WRITTEN = {
    "subject": "two red cubes to the left of a blue sphere",
    "scene": "an empty room with a wooden floor",
    "style": "minimalist illustration",
    "lighting": "soft light from above",
    "composition": "centered with negative space",
    "camera": "wide shot at eye level",
}


def made(content: str, prompt: str = REQUEST) -> tuple[Enhanced, Mapping[str, Any]]:
    asked: list[Mapping[str, Any]] = []

    async def ask(body: Mapping[str, Any]) -> Any:
        asked.append(body)
        usage = {"completion_tokens": 7, "elastic": {"subnet": "half"}}
        return {"choices": [{"message": {"content": content}}], "usage": usage}

    return asyncio.run(enhance(ask, prompt, 1024, 768)), asked[0]


def test_what_is_kept_stays_as_it_was_written() -> None:
    enhanced, body = made(json.dumps(WRITTEN))
    assert enhanced.fields == WRITTEN and enhanced.notes == ()
    assert enhanced.prompt.startswith("Two red cubes to the left of a blue sphere. An empty room")
    assert (enhanced.subnet, body["temperature"], body["seed"]) == ("half", 0, 0)
    assert json.loads(body["messages"][-1]["content"]) == {"prompt": REQUEST, "width": 1024, "height": 768}


@pytest.mark.parametrize(
    ("field", "text", "said"),
    [
        ("subject", "two blue cubes left of a red sphere", "not red"),
        ("subject", "a red cube left of a blue sphere", "1 cubes, not 2"),
        ("subject", "two red cubes and a blue sphere", "not left of"),
        ("scene", "a field with a green sphere", "another sphere"),
        ("style", "photograph where the sphere is yellow", "blue yellow"),
        ("style", "photograph with a white sphere cover", "white sphere cover"),
        ("camera", "shot of glass of glass of glass", "repetitive"),
        ("camera", "", "empty"),
        ("subject", ".", "it is empty"),
    ],
)
def test_what_is_lost_or_bound_to_another_is_put_right_and_told(field: str, text: str, said: str) -> None:
    fields, notes = repaired(read(REQUEST), REQUEST, WRITTEN | {field: text})
    assert len(notes) == 1 and notes[0].startswith(field) and said in notes[0]
    assert {name: fields[name] for name in FIELDS if name != field} == {
        name: WRITTEN[name] for name in FIELDS if name != field
    }
    assert fields[field] == REQUEST if field == "subject" else fields[field] not in (text, "")


@pytest.mark.parametrize(
    ("prompt", "field", "text"),
    [
        ("a crowded beach at noon", "lighting", "sunset light over the water"),
        ("an oil painting of a cat", "style", "soft watercolor style"),
        ("a cat in a coffee shop", "scene", "a quiet beach with palms and sky"),
        ("an aerial view of a city", "camera", "close-up shot"),
    ],
)
def test_a_field_agrees_with_time_place_medium_and_view(prompt: str, field: str, text: str) -> None:
    fields, notes = repaired(read(prompt), prompt, {"subject": prompt, **PLAIN, field: text})
    assert fields == {"subject": prompt, **PLAIN} and len(notes) == 1 and "contradicts the request" in notes[0]


def test_after_two_wrong_fields_all_are_neutral() -> None:
    fields, notes = repaired(read(REQUEST), REQUEST, WRITTEN | {"scene": "a green sphere field", "camera": ""})
    assert fields == {"subject": WRITTEN["subject"], **PLAIN} and "2 of them were wrong" in notes[-1]


def test_one_and_the_same_object_is_spoken_of_with_the() -> None:
    fields, notes = repaired(
        read("a cat in a coffee shop"),
        "a cat in a coffee shop",
        WRITTEN | {"subject": "a cat in a coffee shop", "scene": "a quiet coffee shop with a window"},
    )
    assert fields["scene"] == "the quiet coffee shop with a window" and not notes


@pytest.mark.parametrize("content", ["", "no JSON", "[1]", '{"subject": 3}', '{"subject": "two red', "null"])
def test_an_answer_that_cannot_be_read_leaves_the_users_own_words(content: str) -> None:
    enhanced, _ = made(content)
    assert (
        enhanced.prompt.startswith("Two red cubes left of a blue sphere. ")
        and unkept(read(REQUEST), enhanced.prompt) == ()
    )
    assert enhanced.notes[0] == "the model's answer is not valid JSON; neutral phrases were added"


def test_a_size_alone_is_kept_whatever_is_written() -> None:
    assert made(json.dumps(WRITTEN | {"subject": "."}), "512x512")[0].prompt.startswith("512x512. An empty room")


def test_a_scope_that_is_not_read_stays_word_for_word() -> None:
    enhanced, _ = made(json.dumps(WRITTEN | {"subject": "five ducks"}), "at least five ducks on a pond")
    assert enhanced.prompt.startswith("At least five ducks on a pond. ")
    assert enhanced.notes[0].startswith("subject: replaced by the words of the request")
    assert "word for word" in enhanced.notes[0]
    assert enhanced.notes[-1] == "not understood, and passed on in your own words: at least five ducks on a pond"


@pytest.mark.parametrize(
    "prompt", [REQUEST, "a wolf at night, no moon", "at least five ducks on a pond", 'a sign that says "OPEN 24h"']
)
def test_the_suffix_keeps_every_request_word_for_word(prompt: str) -> None:
    enhanced = suffixed(f"  {prompt}.")
    assert enhanced.prompt.lower().startswith(f"{prompt.lower()}. ") and unkept(read(prompt), enhanced.prompt) == ()
    assert enhanced.fields == {"subject": prompt, **PLAIN} and enhanced.writer is Wording.SUFFIX
    assert bool(enhanced.notes) == ("at least" in prompt)


def test_a_lineage_shows_whether_the_network_was_trained_for_this_task() -> None:
    counts = {"name": "x", "total_params": 1, "active_params": 1, "receipt": Receipt(stage="online", device="cpu")}
    trained = new_lineage(
        stage="online", config={"sources": {"a": {"kind": "math"}, "b": {"kind": "shapes"}}}, **counts
    )
    other = new_lineage(stage="online", config={"sources": {"a": {"kind": "math"}}}, **counts)
    healed = new_lineage(stage="heal", config={"sources": [["text", 1.0]]}, parents=(trained,), **counts)
    assert [*map(is_enhancer, (trained, healed, other, None))] == [True, True, False, False]


def test_words_to_be_rendered_are_never_rewritten() -> None:
    prompt = 'a sign that says "OPEN  24h – 日夜" above a door'
    enhanced, body = made(json.dumps(WRITTEN | {"subject": "a sign that says open above a door"}), prompt)
    assert '"OPEN  24h – 日夜"' in enhanced.prompt
    assert unkept(read(prompt), enhanced.prompt) == ()
    patterns = [each["pattern"] for each in body["response_format"]["json_schema"]["schema"]["properties"].values()]
    assert len(patterns) == len(FIELDS) and not any(mark in pattern for pattern in patterns for mark in '"“«「')


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("", "empty"),
        ("a red blue cube", "red or blue"),
        ("ein rotes Haus mit einer Tür und das Auto", "English"),
        ("…!", "nothing"),
    ],
)
def test_a_request_that_cannot_be_kept_is_refused_before_anything_is_asked(prompt: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        made("{}", prompt)


def test_the_example_is_one() -> None:
    fields, notes = repaired(
        read(str(EXAMPLE[0]["prompt"])), str(EXAMPLE[0]["prompt"]), fields_of(json.dumps(EXAMPLE[1]))
    )
    assert fields == EXAMPLE[1] and not notes
