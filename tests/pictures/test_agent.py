from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from stretto.base.errors import UserError
from stretto.pictures.agent import Dialogue, PaintOptions, Reply, painted, respond
from stretto.pictures.backend import PaintRequest, check_request
from stretto.pictures.renderer import Renderer
from stretto.pictures.verify import ShapesVerifier
from stretto.tasks.shapes.draw import see, unmet
from stretto.tasks.shapes.rules import read
from tests.pictures.erring import misreading

OPTIONS = PaintOptions(width=96, height=96, images=8)


def talk(*turns: str, faults: float = 0.0, options: PaintOptions = OPTIONS) -> Reply:
    reply = Reply(Dialogue(), "")
    for turn in turns:
        reply = respond(reply.dialogue, turn, Renderer(misreading(faults)), ShapesVerifier(), options)
    return reply


def test_a_turn_paints_what_stands_and_undo_shows_the_picture_of_then() -> None:
    first = talk("two red circles left of a blue square")
    third = talk("two red circles left of a blue square", "make the square green", "undo")
    assert [version.num_images for version in third.dialogue.versions] == [1, 1]  # nothing is painted to take back
    assert third.dialogue.shown == third.dialogue.versions[0]
    assert first.dialogue.shown is not None and third.dialogue.shown is not None
    assert first.dialogue.shown.picture.tobytes() == third.dialogue.shown.picture.tobytes()


@pytest.mark.slow
def test_what_is_painted_wrongly_is_painted_again_within_the_budget() -> None:
    request = "two red circles left of a blue square"
    seeds = range(0, 400, 8)
    replies = [talk(request, faults=0.3, options=OPTIONS.replace(seed=seed)) for seed in seeds]
    versions = [reply.dialogue.versions[0] for reply in replies]
    assert all(not unmet(read(request), see(each.picture)) for each in versions if not each.verdict.faults)
    assert max(each.num_images for each in versions) > 1 and all(
        each.num_images == 8 for each in versions if each.verdict.faults
    )
    alone = [talk(request, faults=0.3, options=OPTIONS.replace(seed=seed, images=1)) for seed in seeds]
    assert sum(bool(each.dialogue.versions[0].verdict.faults) for each in alone) > sum(
        bool(each.verdict.faults) for each in versions
    )
    told = next(each for each in alone if each.dialogue.versions[0].verdict.faults)
    assert (told.dialogue.versions[0].verdict.faults)[0].says in told.message


def test_it_asks_only_where_the_ledger_contradicts_itself() -> None:
    reply = talk("a red circle", "make the circle red blue")
    assert reply.is_question and "red or blue" in reply.message and len(reply.dialogue.versions) == 1
    assert not talk("a red circle", "add two squares", "put them above the circle", "remove the circle").is_question


def test_a_size_that_is_named_counts() -> None:
    shown = talk("a red circle", "make it 128x64").dialogue.shown
    assert shown is not None and shown.picture.size == (128, 64)


def test_what_nobody_can_judge_is_said_and_painted_once() -> None:
    reply = talk("a red circle in a coffee shop")
    assert "not checked" in reply.message and [each.num_images for each in reply.dialogue.versions] == [1]


class Sign(Renderer):
    def paint(self, request: PaintRequest, tell: Callable[[float], None] = lambda done: None) -> Image.Image:
        return Image.new("RGB", (request.width, request.height))


def test_words_alone_can_be_painted() -> None:
    reply = respond(Dialogue(), 'a poster of "HELLO"', Sign(), ShapesVerifier(), OPTIONS)
    assert reply.dialogue.shown is not None and "not checked: A poster of the words" in reply.message


def test_what_is_left_of_nothing_is_told() -> None:
    assert "the picture has no content yet" in talk("a red circle", "remove the circle").message


def pixels(picture: Image.Image) -> np.ndarray:
    return np.asarray(picture, dtype=int)


def test_a_turn_changes_what_it_speaks_of_and_leaves_the_rest_to_the_bit() -> None:
    turns = ("two red circles left of a blue square", "make the square green")
    before, after = (version.picture for version in talk(*turns).dialogue.versions)
    is_red_HW = pixels(before)[:, :, 0] > pixels(before)[:, :, 2] + 40
    assert is_red_HW.any() and (pixels(before)[is_red_HW] == pixels(after)[is_red_HW]).all()
    assert not unmet(read("two red circles left of a green square"), see(after))
    anew = Reply(Dialogue(), "")
    for turn in turns:
        anew = respond(anew.dialogue, turn, Renderer(edits=False), ShapesVerifier(), OPTIONS)
    assert anew.dialogue.shown is not None and not anew.dialogue.shown.verdict.faults


def test_what_is_shown_already_is_not_painted_again() -> None:
    dialogue = talk("a red circle left of a blue square", "put the circle left of the square").dialogue
    assert [each.num_images for each in dialogue.versions] == [1]
    assert dialogue.conversation.states[-1] == dialogue.conversation.states[-2]
    gone = talk("a circle left of a blue square", "make the circle red", options=OPTIONS.replace(seed=0))
    seen = see(gone.dialogue.versions[0].picture)
    was_red = any((body.form, body.colour) == ("circle", "red") for body in seen)
    assert gone.dialogue.versions[-1].num_images == (0 if was_red else 1)


class Noting(Renderer):
    """Which requests were edits."""

    def __init__(self, faults: float) -> None:
        super().__init__(misreading(faults))
        self.were_edits: list[bool] = []

    def paint(self, request: PaintRequest, tell: Callable[[float], None] = lambda done: None) -> Image.Image:
        self.were_edits.append(request.base is not None)
        return super().paint(request, tell)


def test_what_is_wrong_is_changed_within_the_budget_and_after_a_vain_change_all_is_painted_anew() -> None:
    request = "two red circles left of a blue square, a green triangle"
    runs = []
    for seed in range(0, 320, 8):
        backend = Noting(0.3)
        made = painted(read(request), PaintRequest(request, 96, 96, seed), backend, ShapesVerifier(), 8)
        assert made.num_images == len(backend.were_edits) <= 8 and not backend.were_edits[0]
        assert (made.num_images == 8) or not made.verdict.faults
        runs.append(tuple(backend.were_edits))
    assert (False, True) in runs  # mended by one change
    vain = [run for run in runs if len(run) > 2 and run[1]]
    assert any(not each for run in vain for each in run[2:])


def test_a_painter_that_fails_on_the_way_leaves_what_it_has_painted() -> None:
    class Tiring(Noting):
        def paint(self, request: PaintRequest, tell: Callable[[float], None] = lambda done: None) -> Image.Image:
            if len(self.were_edits) == 2:
                raise RuntimeError("no memory")
            return super().paint(replace(request, prompt="a blue circle", base=None, mask=None), tell)

    made = painted(read("a red circle"), PaintRequest("a red circle", 64, 64, 0), Tiring(0.0), ShapesVerifier(), 4)
    assert made.num_images == 2 and made.verdict.faults and made.verdict.unchecked.endswith("painted: no memory")
    tired = Tiring(0.0)
    tired.were_edits = [False, False]
    with pytest.raises(RuntimeError, match="no memory"):
        painted(read("a red circle"), PaintRequest("a red circle", 64, 64, 0), tired, ShapesVerifier(), 4)


class Coarse(Renderer):
    multiple = 16

    def __init__(self) -> None:
        super().__init__(edits=False)


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (PaintRequest(" ", 64, 64, 0), "empty"),
        (PaintRequest("a cube", 100, 64, 0), "width 100 is not a multiple of 16; 96"),
        (PaintRequest("a cube", 64, 64_000, 0), "height 64000 is more than"),
        (PaintRequest("a cube", 64, 7, 0), "height 7 .*; 16 is the nearest"),
        (PaintRequest("a cube", 64, 64, 0, mask=Image.new("L", (64, 64))), "give both"),
        (PaintRequest("a cube", 64, 64, 0, base=Image.new("RGB", (64, 64)), mask=Image.new("L", (64, 64))), "renderer"),
    ],
)
def test_what_every_backend_refuses(request_: PaintRequest, said: str) -> None:
    with pytest.raises(UserError, match=said):
        check_request(Coarse(), request_)
