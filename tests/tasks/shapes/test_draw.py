from __future__ import annotations

import random
from dataclasses import replace

import pytest
from PIL import Image, ImageFilter

from stretto.base.errors import UserError
from stretto.tasks.shapes.draw import draw, place, see, unmet
from stretto.tasks.shapes.rules import read
from stretto.tasks.shapes.source import ShapesArgs, sample_ledger


@pytest.mark.parametrize(
    ("things", "count", "pixels", "blur"),
    [(2, 1, 32, 1.2), (1, 3, 32, 0.8), (3, 3, 64, 0), pytest.param(5, 5, 256, 0, marks=pytest.mark.slow)],
)
def test_what_is_drawn_is_read_back_and_another_picture_is_not_it(
    things: int, count: int, pixels: int, blur: float
) -> None:
    rng = random.Random(0)
    args = ShapesArgs(things=things, count=count, pixels=256)
    ledgers = [sample_ledger(rng, args) for _ in range(40)]
    pictures = [
        draw(place(ledger, seed), pixels, pixels).filter(ImageFilter.GaussianBlur(blur))
        for seed, ledger in enumerate(ledgers)
    ]
    assert [unmet(ledger, see(picture)) for ledger, picture in zip(ledgers, pictures, strict=True)] == [()] * 40
    others = [unmet(ledger, see(pictures[at - 1])) for at, ledger in enumerate(ledgers) if ledger != ledgers[at - 1]]
    assert all(others)


def test_each_fault_is_named() -> None:
    ledger = read("two red circles left of a blue square")
    scene = place(ledger, 3)
    circles = [body for body in scene if body.form == "circle"]
    square = next(body for body in scene if body.form == "square")

    def kinds(*bodies: object) -> set[str]:
        return {each.kind for each in unmet(ledger, bodies)}  # type: ignore[arg-type]

    assert kinds(*scene) == set()
    assert kinds(*circles) == {"object", "relation"}
    assert kinds(circles[0], square) == {"count"}
    assert kinds(*circles, replace(square, colour="green")) == {"object", "extra", "relation"}
    assert kinds(*circles, replace(square, x=0.01)) == {"relation"}
    assert kinds(*scene, replace(square, form="triangle")) == {"extra"}


def test_things_that_look_alike_are_told_apart_by_number() -> None:
    ledger = read("a circle and two red circles")
    shown = [unmet(ledger, see(draw(place(ledger, seed), 128, 128))) for seed in range(20)]
    assert shown == [()] * 20
    assert unmet(read("a circle and three red circles"), place(ledger, 1))


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("a dog", "not a shape"),
        ("a pink cube", "unknown colour"),
        ("a red blue cube", "one colour"),
        ("a red cube behind a blue ball", "behind"),
        ("40 red cubes", "at most"),
        ("a red cube left of a blue ball. The blue ball is left of the red cube.", "contradict"),
    ],
)
def test_what_cannot_be_drawn_is_refused(prompt: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        place(read(prompt), 0)


def test_an_empty_picture_shows_nothing() -> None:
    blank = Image.new("RGB", (64, 64), "white")
    assert see(blank) == ()
    assert {each.kind for each in unmet(read("a red cube"), see(blank))} == {"object"}
