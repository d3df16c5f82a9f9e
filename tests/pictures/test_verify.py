"""What pictures are held against: shapes, words drawn here, and a model over real HTTP that says what a test tells it to."""

from __future__ import annotations

import base64
import io
import json
import sys
from typing import Any

import pytest
from PIL import Image, ImageDraw, ImageFont

from stretto.base.errors import UserError
from stretto.pictures import verify
from stretto.pictures.backend import PaintRequest
from stretto.pictures.renderer import Renderer
from stretto.pictures.verify import (
    EndpointVerifier,
    ShapesVerifier,
    TextVerifier,
    Verifiers,
    is_of_shapes,
    lines_with,
    statements,
)
from stretto.tasks.shapes.ledger import Ledger
from stretto.tasks.shapes.rules import read
from tests.tasks.judges import judging

BLANK = Image.new("RGB", (32, 32), "white")


def test_only_shapes_are_judged_exactly() -> None:
    assert is_of_shapes(read("two red cubes above a ball")) and not is_of_shapes(read("a red cube in a room"))
    assert not is_of_shapes(read("a pink cube")) and not is_of_shapes(read("a cat"))
    assert ShapesVerifier().judge(read("a cat"), BLANK).left == read("a cat")
    verdict = ShapesVerifier().judge(read("a cube"), BLANK)
    assert verdict.faults and not verdict.left.num_constraints and not verdict.unchecked


def test_sizes_and_materials_of_shapes_are_left_to_the_next_verifier() -> None:
    asked = read("a big red circle and a blue square")
    picture = Renderer().paint(PaintRequest("a small red circle and a blue square", 128, 128, 0))
    verdict = ShapesVerifier().judge(asked, picture)
    assert not verdict.faults and len(verdict.right) == 2
    assert verdict.left.things == asked.things[:1] and verdict.unchecked == "not checked: A big red circle"


def test_where_something_is_right() -> None:
    asked = read("a red circle left of a blue square")
    picture = Renderer().paint(PaintRequest("a red circle left of a green square", 128, 128, 3))
    verdict = ShapesVerifier().judge(asked, picture)
    assert {fault.kind for fault in verdict.faults} >= {"object", "extra"} and len(verdict.right) == 1
    left, top, right, bottom = (round(128 * each) for each in verdict.right[0])
    inside = picture.crop((left + 2, top + 2, right - 2, bottom - 2)).resize((1, 1)).getpixel((0, 0))
    assert isinstance(inside, tuple) and inside[0] > 200 > inside[1]


def written(*lines: str) -> Image.Image:
    image = Image.new("RGB", (256, 160), "white")
    for number, line in enumerate(lines):
        ImageDraw.Draw(image).text((16, 20 + 50 * number), line, "navy", ImageFont.load_default(32))
    return image


@pytest.fixture(scope="module")
def reader() -> TextVerifier:
    return TextVerifier()


@pytest.mark.parametrize(
    ("lines", "right"),
    [(("we are", "OPEN", "24 h!"), 2), (("OPEM 24h",), None), pytest.param((), None, marks=pytest.mark.slow)],
)
def test_words_are_read_from_the_picture(reader: TextVerifier, lines: tuple[str, ...], right: int | None) -> None:
    verdict = reader.judge(read('a door with a sign that says "OPEN 24h"'), written(*lines))
    assert [fault.kind for fault in verdict.faults] == ([] if right else ["text"])
    assert len(verdict.right) == (right or 0)
    assert right or repr(lines[0] if lines else "nothing") in verdict.faults[0].says
    assert verdict.left == read("a door with a sign")
    assert verdict.unchecked.startswith("not checked: A door and a sign")


@pytest.mark.parametrize(
    ("text", "lines", "found"),
    [
        ("Open 24h", ["the", "OPEN", "24 H!", "shop"], range(1, 3)),
        ("It’s “free” – now", ["IT'S 'FREE' - NOW"], range(1)),
        ("ＡＢ１", ["ab1"], range(1)),
        ("日夜", ["日 夜"], range(1)),
        ("!?", ["what!?"], None),
        ("Hello", ["Hallo"], None),
        ("open", ["reopened"], None),
        ("24h", ["124h"], None),
        ("100%", ["100"], None),
        ("a", [], None),
        ("10.5", ["105"], None),
        ("$5.00", ["now $5.00!"], range(1)),
        ("$5.00", ["$500"], None),
        ("-5", ["5"], None),
        ("5", ["-5"], None),
        ("3:45", ["3:45 pm"], range(1)),
        ("3:45", ["3.45"], None),
        ("1,000", ["1000"], None),
        ("9–17", ["9 - 17"], range(1)),
        ("9-5", ["9  - 5"], range(1)),
        ("3:45", ["3: 45"], range(1)),
        ("-5", ["–5"], range(1)),
        ("–5", ["-5"], range(1)),
        ("555-1234", ["call", "555-", "1234 now"], range(1, 3)),
        ("Sale -50%", ["SALE - 50%"], range(1)),
        ("10.5", ["10. 5"], range(1)),
        ("Room 5: 20 beds", ["ROOM 5", "20 BEDS"], range(2)),
        ("5.5", ["5 point 5"], None),
        ("10", ["10.5"], None),
        ("Room 5, 2 p.m.", ["ROOM 5", "2 PM"], range(2)),
    ],
)
def test_words_are_there_up_to_case_spaces_and_punctuation(text: str, lines: list[str], found: range | None) -> None:
    assert lines_with(text, lines) == found


def test_what_nothing_is_asked_to_read_is_not_read() -> None:
    assert TextVerifier().judge(read("a cat"), BLANK).left == read("a cat")


def test_without_a_reader_words_are_left_and_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rapidocr", None)
    verdict = Verifiers(ShapesVerifier(), TextVerifier()).judge(read('a sign that says "OPEN"'), written("OPEN"))
    assert not verdict.faults and verdict.left.texts == ("OPEN",)
    assert verdict.unchecked.endswith("words are read with rapidocr: pip install 'stretto[pictures]'")
    with judging(lambda body: scored(10)) as (url, asked):
        judged = Verifiers(TextVerifier(), EndpointVerifier(url)).judge(read('a sign that says "OPEN"'), BLANK)
    assert not judged.unchecked and len(asked) == 2


REQUEST = 'an oil painting of two red cats on a wooden table, no dogs, a sign that says "HI"'
ASKED = {
    "There are exactly two red cats.": "count",
    "There are some red cats.": "colour",
    "There is exactly a wooden table.": "count",
    "There is a wooden table.": "quality",
    "There is exactly a sign.": "count",
    "The red cats are on the wooden table.": "relation",
    'The words "HI" can be read.': "text",
    "There are no dogs.": "absent",
    "It is a kind of oil painting.": "medium",
}


def test_every_constraint_is_a_statement_of_its_own() -> None:
    ledger = read(REQUEST)
    assert {each.says: each.kind for each in statements(ledger)} == ASKED
    assert [*statements(Ledger())] == []


def question(body: dict[str, Any]) -> str:
    return str(body["messages"][0]["content"][1]["text"])


def scored(score: Any, seen: str = "") -> str:
    return json.dumps({"seen": seen, "score": score})


def test_a_model_is_asked_about_each_constraint_and_shown_the_picture() -> None:
    def said(body: dict[str, Any]) -> str:
        return scored(2, "one cat") if "exactly two" in question(body) else f"```json\n{scored(9)}\n```"

    with judging(said) as (url, asked):
        verifier = EndpointVerifier(f"eyes@{url}")
        verdict = verifier.judge(read(REQUEST), BLANK)
        verifier.close()
    assert [fault.kind for fault in verdict.faults] == ["count"] and not verdict.unchecked
    assert "2 of 10, 'one cat'" in verdict.faults[0].says and "eyes at http" in verdict.faults[0].says
    assert len(asked) == len(ASKED) and all(any(each in question(body) for body in asked) for each in ASKED)
    body = asked[0]
    assert body["model"] == "eyes" and body["response_format"]["json_schema"]["strict"] and body["temperature"] == 0
    image = base64.b64decode(body["messages"][0]["content"][0]["image_url"]["url"].partition(",")[2])
    assert Image.open(io.BytesIO(image)).size == (32, 32)


def test_a_server_that_refuses_the_form_is_asked_without_it() -> None:
    with judging(lambda body: 400 if "response_format" in body else scored(10)) as (url, asked):
        verdict = EndpointVerifier(url).judge(read("a cat"), BLANK)
    assert not verdict.faults and not verdict.unchecked
    assert [each["model"] for each in asked] == ["double"] * 2


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("It looks fine to me.", "not JSON with a score"),
        (scored(11), "score is not from 0 to 10"),
        (scored(-1), "score is not from 0 to 10"),
        (scored("high"), "score is not from 0 to 10"),
        (scored(True), "score is not from 0 to 10"),
        ('{"seen": "a cat"}', "not JSON with a score"),
        ('{"score": NaN}', "score is not from 0 to 10"),
        ("", "not JSON with a score"),
        (400, "400"),
        (503, "503"),
        (None, "Timeout"),
    ],
)
def test_what_is_no_judgement_is_told_and_never_counts(
    monkeypatch: pytest.MonkeyPatch, said: str | int | None, told: str
) -> None:
    monkeypatch.setattr(verify, "_TIMEOUT_S", 0.1)
    with judging(lambda body: said) as (url, _):
        verdict = EndpointVerifier(url).judge(read("a cat"), BLANK)
    assert verdict.faults == () and told in verdict.unchecked
    assert verdict.unchecked.startswith("not checked: There is exactly a cat. (double at http")
    assert "\n" not in verdict.unchecked


def test_the_budget_of_questions_is_kept_and_what_it_leaves_is_told() -> None:
    with judging(lambda body: scored(10)) as (url, asked):
        verdict = EndpointVerifier(url, calls=4).judge(read(REQUEST), BLANK)
    assert len(asked) == 4 and all(each in verdict.unchecked for each in [*ASKED][4:])
    assert "more than 4 questions about a picture" in verdict.unchecked


def test_who_is_no_address_or_not_there_is_refused() -> None:
    for named, problem in (("eyes", "not the address"), ("http://127.0.0.1:9/v1", "cannot list its models")):
        with pytest.raises(UserError, match=problem):
            EndpointVerifier(named)


@pytest.mark.slow
def test_each_has_its_part() -> None:
    with judging(lambda body: scored(0 if "door" in question(body) else 10)) as (url, asked):
        eyes = EndpointVerifier(url)
        parts = Verifiers(ShapesVerifier(), TextVerifier(), eyes)
        verdict = parts.judge(read('a door and a sign that says "OPEN"'), written("OPEN"))
        shapes = parts.judge(read("a red cube"), BLANK)
        eyes.close()
    assert [fault.kind for fault in verdict.faults] == ["count"] and not verdict.unchecked and verdict.right
    assert shapes.faults and len(asked) == 2  # shapes are nobody else's business
