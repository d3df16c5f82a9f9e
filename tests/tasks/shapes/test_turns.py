from __future__ import annotations

import random

import pytest

from stretto.base.errors import UserError
from stretto.tasks.shapes.ledger import contradictions, describe
from stretto.tasks.shapes.turns import Conversation, Told, tell


def after(*turns: str) -> Conversation:
    conversation = Conversation()
    for turn in turns:
        told = tell(conversation, turn)
        assert not told.questions, told.questions
        conversation = told.conversation
    return conversation


START = "a red cube left of a blue sphere"


@pytest.mark.parametrize(
    ("turn", "expected"),
    [
        (
            "add two green triangles",
            "A red cube, a blue sphere and two green triangles. The red cube is left of the blue sphere.",
        ),
        (
            "Now please make the sphere yellow.",
            "A red cube and a yellow sphere. The red cube is left of the yellow sphere.",
        ),
        (
            "the cube should be dark green",
            "A dark green cube and a blue sphere. The dark green cube is left of the blue sphere.",
        ),
        ("move the cube above the sphere", "A red cube and a blue sphere. The red cube is above the blue sphere."),
        ("put it right of the sphere", "A red cube and a blue sphere. The red cube is right of the blue sphere."),
        ("make it three cubes", "Three red cubes and a blue sphere. The red cubes are left of the blue sphere."),
        (
            "change the number of spheres to 2",
            "A red cube and two blue spheres. The red cube is left of the blue spheres.",
        ),
        ("remove the blue one and then add a cone", "A red cube and a cone."),
        (
            "I'd rather have the sphere in green",
            "A red cube and a green sphere. The red cube is left of the green sphere.",
        ),
        ("four cubes would be better", "Four red cubes and a blue sphere. The red cubes are left of the blue sphere."),
        (
            "add two more spheres",
            "A red cube, a blue sphere and two spheres. The red cube is left of the blue sphere.",
        ),
        (
            "add a few more red cubes",
            "A red cube, a blue sphere and some red cubes. The red cube is left of the blue sphere.",
        ),
        ("get rid of the sphere", "A red cube."),
        ("take the sphere away", "A red cube."),
        (
            "add 2 dark blue knives",
            "A red cube, a blue sphere and two dark blue knives. The red cube is left of the blue sphere.",
        ),
        ("replace the cube with a cone", "A red cone and a blue sphere. The red cone is left of the blue sphere."),
        ("start over: a white dog", "A white dog."),
        ("make a cone", "A red cube, a blue sphere and a cone. The red cube is left of the blue sphere."),
        (
            "make a green cone above the cube",
            "A red cube, a blue sphere and a green cone. The red cube is left of the blue sphere. "
            "The green cone is above the red cube.",
        ),
        (
            "there should be exactly three cubes",
            "Three red cubes and a blue sphere. The red cubes are left of the blue sphere.",
        ),
        (
            "the sphere should really be yellow",
            "A red cube and a yellow sphere. The red cube is left of the yellow sphere.",
        ),
        (
            "the sphere needs to be entirely yellow",
            "A red cube and a yellow sphere. The red cube is left of the yellow sphere.",
        ),
        (
            "change the sphere's colour to yellow",
            "A red cube and a yellow sphere. The red cube is left of the yellow sphere.",
        ),
        (
            "the cube goes directly above the sphere",
            "A red cube and a blue sphere. The red cube is above the blue sphere.",
        ),
        (
            "the cube sits on the sphere",
            "A sitting red cube and a blue sphere. The sitting red cube is on the blue sphere.",
        ),
    ],
)
def test_a_turn_changes_what_it_speaks_of_and_nothing_else(turn: str, expected: str) -> None:
    assert describe(after(START, turn).now) == expected


@pytest.mark.parametrize(
    ("turn", "expected"),
    [
        ("remove one cube", "Two red cubes and a blue sphere. The red cubes are left of the blue sphere."),
        ("take away two of the cubes", "A red cube and a blue sphere. The red cube is left of the blue sphere."),
        ("delete a cube", "Two red cubes and a blue sphere. The red cubes are left of the blue sphere."),
        ("remove all cubes", "A blue sphere."),
        ("remove the cubes and the sphere", ""),
        ("remove the cubes left of the sphere", "A blue sphere."),
        (
            "make one of the cubes green",
            "Two red cubes, a blue sphere and a green cube. The red cubes are left of the blue sphere. "
            "The green cube is left of the blue sphere.",
        ),
        (
            "replace one cube with a yellow cone",
            "Two red cubes, a blue sphere and a yellow cone. The red cubes are left of the blue sphere. "
            "The yellow cone is left of the blue sphere.",
        ),
        (
            "make the red cubes blue and the blue sphere red",
            "Three blue cubes and a red sphere. The blue cubes are left of the red sphere.",
        ),
        (
            "move the sphere left of the cubes and make it green",
            "Three red cubes and a green sphere. The green sphere is left of the red cubes.",
        ),
    ],
)
def test_one_of_several_and_several_at_once(turn: str, expected: str) -> None:
    assert describe(after("three red cubes left of a blue sphere", turn).now) == expected


@pytest.mark.parametrize(
    ("turn", "expected"),
    [
        ("make one cube bigger", "Two red cubes and a big red cube."),
        ("make two of the cubes smaller", "A red cube and two small red cubes."),
        ("make one of them bigger", "Two red cubes and a big red cube."),
        ("make one bigger", "Two red cubes and a big red cube."),
        ("one of the cubes should be wooden", "Two red cubes and a wooden red cube."),
        ("make three cubes bigger", "Three big red cubes."),
        ("make the cubes a bit bigger", "Three big red cubes."),
    ],
)
def test_a_quality_of_some_keeps_the_others(turn: str, expected: str) -> None:
    assert describe(after("three red cubes", turn).now) == expected


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        (("make the red cubes blue",), "Two blue cubes and a big red cube."),
        (("make the red cube blue",), "Two red cubes and a big blue cube."),
        (("make the big cube blue",), "Two red cubes and a big blue cube."),
        (("make the cubes small", "the red cubes"), "Two small red cubes and a big red cube."),
        (("make the cubes small", "the big red cube"), "Two red cubes and a small red cube."),
        (("add two red cubes", "remove them"), "Two red cubes and a big red cube."),
    ],
)
def test_things_of_one_kind_are_told_apart(turns: tuple[str, ...], expected: str) -> None:
    assert describe(dialogue("three red cubes", "make one cube bigger", *turns).now) == expected


@pytest.mark.parametrize("turn", ["make the cubes small", "remove the cubes", "make the cubes green"])
def test_a_plural_that_fits_several_things_is_asked_about(turn: str) -> None:
    before = after("three red cubes", "make one cube bigger")
    told = tell(before, turn)
    assert told.questions == ("Which one: the red cubes or the big red cube?",)
    assert told.conversation.states is before.states


@pytest.mark.parametrize(
    "turn",
    [
        "make it any colour but red",
        "make it anything but blue",
        "the square should no longer be blue",
        "the square must stop being blue",
        "the circle should no longer be left of the square",
        "make the circle half as big",
        "make the circle less big",
        "make the circle less red",
        "make the circle a bit darker",
        "make the circle hardly red",
        "the circle is too red",
        "the circle is too big",
        "the circle should be a different colour",
        "half the circle should be green",
        "one circle less",
        "make four circles bigger",
        "make a circle bigger",
        "make a dog run",
        "make a dog green",
        "make a little room",
        "the circle should be asleep",
        "the circle should blink",
        "make both circles green",
        "undo the undo",
    ],
)
def test_a_turn_with_a_word_that_is_not_understood_is_asked_about(turn: str) -> None:
    before = after("a red circle right of a blue square")
    told = tell(before, turn)
    assert "is one to be added" not in "".join(told.questions)
    assert told.questions and told.conversation.states is before.states


@pytest.mark.parametrize(
    ("turn", "expected"),
    [
        ("make them all yellow", "A yellow circle, a yellow square and two yellow triangles."),
        ("make all of them yellow", "A yellow circle, a yellow square and two yellow triangles."),
        ("everything should be bigger", "A big red circle, a big blue square and two big green triangles."),
        ("make all shapes yellow", "A yellow circle, a yellow square and two yellow triangles."),
        ("make both triangles yellow", "A red circle, a blue square and two yellow triangles."),
    ],
)
def test_a_change_of_all_things_changes_each(turn: str, expected: str) -> None:
    assert describe(after("a red circle, a blue square and two green triangles", turn).now) == expected


def test_both_and_them_are_the_only_two_things() -> None:
    two = "a red circle and a blue square"
    assert describe(after(two, "make both green").now) == "A green circle and a green square."
    assert describe(after(two, "make all circles green").now) == "A green circle and a blue square."
    assert describe(after("a red circle", "two blue circles", "make all circles green").now).startswith(
        "A green circle"
    )
    assert describe(after(two, "put a dog between them").now) == (
        "A red circle, a blue square and a dog. The dog is between the red circle. The dog is between the blue square."
    )


@pytest.mark.parametrize(
    ("turn", "question"),
    [
        ("put a yellow square between them", "Which things"),
        ("put the triangle between the circle and the dog", "There is no dog"),
        ("put the triangle between the circle", "Between which things"),
        ("make both green", "What is to change"),
        ("make everything but the circle green", "What is to change"),
        ("remove them all", "Is everything to go?"),
    ],
)
def test_several_things_that_are_not_clear_are_asked_about(turn: str, question: str) -> None:
    before = after("a red circle, a blue square and a green triangle")
    told = tell(before, turn)
    assert question in told.questions[0] and told.conversation.states is before.states


def test_changes_are_undone_one_by_one_or_several() -> None:
    turns = (START, "make the cube yellow", "add a cone", "make the image 512x256")
    assert after(*turns).now.size == (512, 256)
    assert after(*turns, "undo").now == after(*turns[:3]).now
    assert after(*turns, "undo the last three changes").now == after(START).now
    with pytest.raises(UserError, match="undo fewer"):
        tell(after(START), "undo the last nine")
    assert after(*turns, "undo everything").now == Conversation().now
    with pytest.raises(UserError, match="nothing was changed yet"):
        tell(Conversation(), "undo everything")


def test_starting_over_without_a_picture_changes_nothing() -> None:
    told = tell(Conversation(), "start over")
    assert told == Told(Conversation(), ("the picture is empty already",))


@pytest.mark.parametrize(
    ("turn", "question"),
    [
        ("make the dog blue", "There is no dog"),
        ("paint the cube red blue", "red or blue"),
        ("move the pyramid above the cube", "There is no pyramid"),
    ],
)
def test_what_cannot_be_done_is_asked_and_changes_nothing(turn: str, question: str) -> None:
    before = after(START)
    told = tell(before, turn)
    assert question in told.questions[0] and told.conversation.states is before.states


SOUP = """make the a cube sphere cubes it one blue red green above left of undo back two 3 ² remove replace with by change number to
more add another cat dog it's "OPEN" text say 64x64 start over: . ; , then and please no dark x of in should be"""


@pytest.mark.slow
def test_any_turn_is_taken_or_asked_about_or_refused() -> None:
    rng, conversation = random.Random(0), after(START)
    for _ in range(3000):
        text = " ".join(rng.choices(SOUP.split(), k=rng.randint(1, 9)))
        try:
            told = tell(conversation, text)
        except UserError:
            continue
        now = told.conversation.now
        assert not told.questions or told.conversation.states is conversation.states, text
        assert len({each.id for each in now.things}) == len(now.things) and not contradictions(now), text
        ids = {each.id for each in now.things}
        assert all({each.subject, each.other} <= ids and each.subject != each.other for each in now.relations), text
    assert tell(conversation, "make it " + "9" * 5000 + " cubes").conversation.now.things[0].count == 999_999


def test_a_back_is_no_way_back() -> None:
    conversation = after(START, "add a cat lying on its back")
    assert [each.noun for each in conversation.now.things] == ["cube", "sphere", "cat", "back"]
    assert after(START, "make the cube yellow", "please go back").now == after(START).now


def test_what_is_so_already_is_a_turn_that_can_be_undone() -> None:
    told = tell(after(START), "put the cube left of the sphere")
    assert told.conversation.now == after(START).now and len(told.conversation.states) == 3
    assert tell(told.conversation, "no, undo that").conversation.now == after(START).now


def test_a_circle_of_places_is_asked_about() -> None:
    before = after("a cube left of a sphere", "add a cone right of the sphere")
    assert tell(before, "move the cone left of the cube").questions
    # between two things the newer place counts
    assert not tell(before, "move the cube right of the sphere").questions


def test_words_to_be_read_are_kept_letter_by_letter() -> None:
    conversation = after('a door with a sign that says "Open 24h"', 'the sign should say "CLOSED, sorry"')
    assert conversation.now.texts == ("CLOSED, sorry",)


@pytest.mark.parametrize(
    ("turns", "texts"),
    [
        (('add the words "HELLO"', "remove the words"), ()),
        (('add the words "HELLO"', 'remove "HELLO"'), ("OPEN",)),
        (('add "A" and "B"', 'delete the words "OPEN" and "b"'), ("A",)),
        (("remove the text",), ()),
        (("no text",), ()),
        (("no text", 'add "HELLO"'), ("HELLO",)),
        (("remove the words from the door",), ()),
        (("remove the text in the picture",), ()),
        (('add "HELLO"', 'remove the words "OPEN" on the door'), ("HELLO",)),
        (("I don't want any text",), ()),
        (("there should be no text",), ()),
    ],
)
def test_words_to_be_read_can_be_removed(turns: tuple[str, ...], texts: tuple[str, ...]) -> None:
    now = after('a door that shows "OPEN"', *turns).now
    assert now.texts == texts and [each.noun for each in now.things] == ["door"]
    is_forbidden = turns in (("no text",), ("I don't want any text",), ("there should be no text",))
    assert now.absent == (("text",) if is_forbidden else ())


@pytest.mark.parametrize(
    "turn",
    ["remove the words from the wall", 'remove the words "EXIT" from the door', "remove the words from the door"],
)
def test_words_at_a_thing_that_are_not_clear_are_asked_about_and_the_thing_stays(turn: str) -> None:
    before = after('a door that shows "OPEN"', 'add "HELLO"')
    told = tell(before, turn)
    assert told.questions and told.conversation.states is before.states


def test_letters_that_are_things_are_removed_as_things() -> None:
    now = after('a sign that says "OPEN" and two letters', "remove the letters").now
    assert now.texts == ("OPEN",) and [each.noun for each in now.things] == ["sign"]


def test_words_that_are_not_there_are_asked_about() -> None:
    before = after('a door that shows "OPEN"')
    assert tell(before, 'remove "EXIT"').questions and tell(before, "remove").questions


@pytest.mark.parametrize("words", ["Stop. Go now", "never mind", "two red cubes", "Come in; make it blue", "It's open"])
def test_nothing_is_read_in_words_to_be_shown(words: str) -> None:
    told = tell(after(START), f'add a sign that says "{words}"')
    assert told.conversation.now.texts == (words,) and words in told.notes[0]
    assert told.conversation.now.things[:2] == after(START).now.things
    assert tell(told.conversation, f'change the text to "{words}!"').conversation.now.texts == (f"{words}!",)
    assert words in tell(after(START), f"what about “{words}” on the dog").questions[0]


def dialogue(*turns: str) -> Conversation:
    """The conversation after turns of which some lead to questions."""
    conversation = Conversation()
    for turn in turns:
        conversation = tell(conversation, turn).conversation
    return conversation


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        (("make the cone green", "yes"), "A red cube, a blue sphere and a green cone."),
        (("make the cone green", "yes please"), "A red cube, a blue sphere and a green cone."),
        (("make the cone green", "no"), "A red cube and a blue sphere."),
        (("make the cone green", "no, the cube"), "A green cube and a blue sphere."),
        (("make the cone green", "I meant the sphere"), "A red cube and a green sphere."),
        (("make the cone green", "add a dog"), "A red cube, a blue sphere and a dog."),
        (("remove the cone", "yes"), "A red cube and a blue sphere."),
        (("add a green cube", "remove the cube", "the red one"), "A blue sphere and a green cube."),
        (("yes",), "A red cube and a blue sphere."),
        (("don't show the cube",), "A blue sphere."),
        (("no cubes please",), "A blue sphere and no cubes."),
        (("delete everything except the cube",), "A red cube."),
        (("remove everything", "yes"), ""),
        (("remove everything", "no"), "A red cube and a blue sphere."),
        (("remove the cube", "bring it back"), "A red cube and a blue sphere."),
        (("no cube", "put the cube back"), "A red cube and a blue sphere."),
        (("don't remove the cube",), "A red cube and a blue sphere."),
        (("at least six spheres", "seven"), "A red cube and seven blue spheres."),
        (("start over: a white dog", "undo"), "A red cube and a blue sphere."),
        (("swap the colours",), "A blue cube and a red sphere."),
        (("is the cube red?",), "A red cube and a blue sphere."),
        (("the cube should not hold the sphere",), "A red cube and a blue sphere."),
        (("add a cat that is not on the cube", "remove the cat"), "A red cube and a blue sphere."),
        (
            ("add a cat that is not on the cube", "put the cat on the cube"),
            "A red cube, a blue sphere and a cat. The cat is on the red cube.",
        ),
    ],
)
def test_a_question_can_be_answered_and_nothing_is_turned_round(turns: tuple[str, ...], expected: str) -> None:
    assert describe(dialogue("a red cube and a blue sphere", *turns).now) == expected


def test_what_is_not_read_is_passed_on_and_said() -> None:
    told = tell(after(START), "add at least five ducks")
    assert describe(told.conversation.now).endswith("As requested: at least five ducks")
    assert "not understood, and passed on in your own words: at least five ducks" in told.notes
