from __future__ import annotations

import random

import pytest

from stretto.base.errors import UserError
from stretto.tasks.shapes import rules
from stretto.tasks.shapes.ledger import Ledger, Relation, Thing, contradictions, describe
from stretto.tasks.shapes.rules import read, unkept
from stretto.tasks.shapes.source import ShapesArgs, sample_ledger
from stretto.tasks.shapes.syntax import parser, understand
from stretto.tasks.shapes.turns import Conversation, tell
from stretto.tasks.shapes.words import plural, singular


def said(
    text: str,
) -> tuple[list[tuple[str, int | None, tuple[str, ...], tuple[str, ...]]], list[tuple[str, str, str]]]:
    ledger = read(text)
    things = [(each.noun, each.count, each.colours, each.qualities) for each in ledger.things]
    named = [(ledger.thing(each.subject).noun, each.kind, ledger.thing(each.other).noun) for each in ledger.relations]
    return things, named


READINGS = {
    "A cat in a coffee shop": ([("cat", 1, (), ()), ("coffee shop", 1, (), ())], [("cat", "in", "coffee shop")]),
    "two red cubes to the left of a dark blue sphere": (
        [("cube", 2, ("red",), ()), ("sphere", 1, ("dark blue",), ())],
        [("cube", "left of", "sphere")],
    ),
    "a cat sleeping on a wooden table": (
        [("cat", 1, (), ("sleeping",)), ("table", 1, (), ("wooden",))],
        [("cat", "on", "table")],
    ),
    "an old man holding a green umbrella, and three ducks": (
        [("man", 1, (), ("old",)), ("umbrella", 1, ("green",), ()), ("duck", 3, (), ())],
        [("man", "holding", "umbrella")],
    ),
    "The cube is blue and left of the sphere. A red and white flag": (
        [("cube", 1, ("blue",), ()), ("sphere", 1, (), ()), ("flag", 1, ("red and white",), ())],
        [("cube", "left of", "sphere")],
    ),
    "a cube left of a sphere and above a triangle": (
        [("cube", 1, (), ()), ("sphere", 1, (), ()), ("triangle", 1, (), ())],
        [("cube", "left of", "sphere"), ("cube", "above", "triangle")],
    ),
    "a red 1960s car, a 3d render in 4k": (
        [("1960s car", 1, ("red",), ()), ("3d render", 1, (), ()), ("4k", 1, (), ())],
        [("3d render", "in", "4k")],
    ),
    "three people talking, a gold earring in soft lighting. A dog running": (
        [
            ("person", 3, (), ("talking",)),
            ("earring", 1, ("gold",), ()),
            ("dog", 1, (), ("running",)),
        ],
        [],
    ),
    "a cup of tea next to a bowl of fruit": (
        [("cup of tea", 1, (), ()), ("bowl of fruit", 1, (), ())],
        [("cup of tea", "next to", "bowl of fruit")],
    ),
    "an orange, a hot dog and an orange parking meter": (
        [("orange", 1, (), ()), ("hot dog", 1, (), ()), ("parking meter", 1, ("orange",), ())],
        [],
    ),
}


@pytest.mark.parametrize("text", READINGS)
def test_colours_counts_and_places_are_bound_to_their_objects(text: str) -> None:
    assert said(text) == READINGS[text]


@pytest.mark.parametrize(
    "lead",
    ["draw", "Please paint me", "show me", "I'd like you to make", "could you create", "I want to see", "Generate:"],
)
def test_how_a_request_begins_names_nothing(lead: str) -> None:
    assert said(f"{lead} a red cube") == said("a red cube")
    assert [thing.noun for thing in read("Show dogs, add-on cards").things] == ["show dog", "add-on card"]
    assert [thing.noun for thing in read("paint buckets, a make-up mirror").things] == [
        "paint bucket",
        "make-up mirror",
    ]


def test_words_to_be_read_sizes_media_and_what_must_not_be_there() -> None:
    ledger = read('An oil painting of a shop, no people, a sign that says "OPEN two red days", 640x480')
    assert ledger.texts == ("OPEN two red days",)
    assert (ledger.medium, ledger.absent, ledger.size) == (("oil painting",), ("person",), (640, 480))
    assert [thing.noun for thing in ledger.things] == ["shop", "sign"]  # nothing is read inside of quotation marks


@pytest.mark.parametrize("size", ["640x480", "640 × 480 pixels", "640x480px"])
def test_a_size_is_read_in_every_spelling(size: str) -> None:
    assert read(f"a cat, {size}").size == (640, 480) and len(read(f"a cat, {size}, a dog").things) == 2
    assert tell(Conversation(), f"make it {size}").conversation.now.size == (640, 480)


def test_what_is_described_is_read_back() -> None:
    rng = random.Random(0)
    for _ in range(200):
        ledger = sample_ledger(rng, ShapesArgs(things=5, count=9, pixels=180))
        assert read(describe(ledger)) == ledger


@pytest.mark.parametrize(
    ("text", "described"),
    [
        ('a poster of "HELLO"', 'A poster of the words "HELLO".'),
        ("a photo of a watercolor of two cats", "A photo of a watercolor of two cats."),
        ("painting of", "A painting of it."),
    ],
)
def test_a_medium_is_described_whatever_it_is_of(text: str, described: str) -> None:
    assert describe(read(text)) == described and read(described).medium == read(text).medium


def test_more_of_something_is_something_and_exactly_is_no_thing() -> None:
    assert said("exactly two red cubes and only one cat")[0] == [("cube", 2, ("red",), ()), ("cat", 1, (), ())]
    assert said("two more red cubes and a few more cats")[0] == [("cube", 2, ("red",), ()), ("cat", None, (), ())]


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("Two red cubes and a blue sphere. The red cubes are left of the blue sphere.", set()),
        ("Two blue cubes and a red sphere. The cubes are left of the sphere.", {"colour"}),  # every word is there
        ("A blue sphere left of two red cubes.", {"relation"}),
        ("A blue sphere right of two red cubes, in a field of flowers.", set()),
        ("Three red cubes left of a blue sphere.", {"count"}),
        ("Two red cubes left of a blue sphere and a green cube.", {"extra"}),
        ("Red cubes everywhere.", {"object", "count", "relation"}),
    ],
)
def test_a_text_is_held_against_the_ledger_by_binding(text: str, kinds: set[str]) -> None:
    ledger = read("two red cubes left of a blue sphere")
    assert {each.kind for each in unkept(ledger, text)} == kinds


def test_what_contradicts_itself_becomes_a_question() -> None:
    assert contradictions(read("a red blue cube")) == ("Is the cube to be red or blue?",)
    things = tuple(Thing(id, noun) for id, noun in enumerate(("ball", "box", "cone")))
    chain = [Relation(0, "left of", 1), Relation(2, "right of", 1), Relation(2, "left of", 0)]
    assert contradictions(Ledger(things, tuple(chain[:2]))) == ()
    assert "cone" in contradictions(Ledger(things, tuple(chain)))[0]
    assert contradictions(read("a dog, no dogs"))


@pytest.mark.parametrize(
    "text",
    [
        "", " \n", "a cat " * 2000, "咖啡店里的一只猫", "Eine Katze in einem Café mit einer roten Lampe", "zwei rote Würfel",
        "un chat noir", "trois cercles rouges au-dessus d’un carré bleu", "Dessine l'arbre à gauche de la maison", "ajoute deux carrés",
        "tres cubos rojos a la izquierda de una esfera azul", "due cubi rossi sopra la sfera", "um gato preto", "twee rode kubussen",
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_in_a_line(text: str) -> None:
    with pytest.raises(UserError, match=r"^prompt: .*; (describe|write)") as refused:
        read(text)
    assert len(str(refused.value)) < 200 and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        "film noir",
        "El Capitan",
        "Big Sur beach",
        "La Tour Eiffel",
        "a crème de la crème cake",
        "a café au lait",
        "six dice",
        "cubes",
    ],
)
def test_borrowed_words_are_english(text: str) -> None:
    assert read(text).things


def test_foreign_words_to_be_shown_are_kept() -> None:
    assert read('a poster that says "咖啡店"').texts == ("咖啡店",)


@pytest.mark.parametrize(
    "noun",
    [
        "cube", "box", "bus", "knife", "city", "person", "cup of tea", "glass", "sheep", "tomato", "cookie", "maze", "waltz", "lens",
        "shoe", "house",
    ],
)  # fmt: skip
def test_plurals_are_undone(noun: str) -> None:
    head, _, rest = plural(noun).partition(" of ")
    assert singular(head) + (f" of {rest}" if rest else "") == ("sheep" if noun == "sheep" else noun)


SOUP = """a an the no some two 3 red blue and red-hot dog cats tea cup of orange is are left to right on top in with holding
sleeping , . ; ? photo painting that says big hot 'x' § " 12x40 it 64x64 building one both pair dozen quickly — ² ٣ 99999999999"""


@pytest.mark.slow
def test_any_words_are_read_or_refused_and_what_is_read_is_kept() -> None:
    rng, words = random.Random(0), SOUP.split()
    for _ in range(3000):
        text = " ".join(rng.choices(words, k=rng.randint(1, 14)))
        try:
            ledger = read(text)
        except UserError:
            continue
        assert contradictions(ledger) or unkept(ledger, text) == (), text
        describe(ledger)


SCOPES = {  # things, absent things, and whether the user's own words go beside the ledger
    "neither a dog nor a cat, just an empty sofa": (["empty sofa"], ["dog", "cat"], False),
    "a kitchen at night, minus the lamp": (["kitchen"], ["lamp"], False),
    "at least five ducks": (["ducks"], [], True),
    "two dogs: one brown, one white": (["dogs"], [], True),
    "seven apples, one of them green": (["apples"], [], True),
    "a dog. the brown one is asleep, the white one is jumping over a fence": (["dog"], [], True),
    "a cat that is not on the sofa": (["cat"], [], True),
    "a green apple next to a red one": (["green apple", "red apple"], [], False),
    "the dog is not black but white": (["white dog"], [], False),
    "a street devoid of cars": (["street"], ["car"], False),
    "a bench, and nobody on it": (["bench"], ["person"], False),
    "a mouse that isn't scared": (["mouse"], [], True),
    "a gate and a lamp whose bulb is out": (["gate", "lamp", "bulb"], [], False),
    "an oil painting of a cat in the style of Monet": (["cat"], [], False),
    "a tower far away, no visible clouds at night": (["tower"], ["cloud"], False),
    "a letter for him": (["letter"], [], False),
    "a table without plates or glasses": (["table"], ["plate", "glass"], False),
    "more than two boats": (["boats"], [], True),
    "a dog bigger than a house": (["dog"], [], True),
    "no red cars": ([], [], True),
    "a room without plates, cups or glasses": (["room"], [], True),
    "either a red circle or a blue square": ([], [], True),
    "a lamp. a cat, a dog or a bird": (["lamp"], [], True),
    "a red or blue circle": (["circle"], [], True),
    "a red or blue or green car": (["car"], [], True),
    "a car, either red or orange, next to a lake": (["car", "lake"], [], True),
    "a dog wearing a hat or a scarf": (["dog"], [], True),
    "a man holding a red umbrella or a stick": (["man"], [], True),
    "a red 2 by 4 plank": (["red plank"], [], True),
    "a cat more or less on a sofa": (["cat", "sofa"], [], True),
    "a red circle on the left and a blue square on the right": (["red circle", "blue square"], [], True),
    "on the left a red circle, on the right a blue square": (["red circle", "blue square"], [], True),
    "a red circle in the top left corner": (["red circle"], [], True),
    "a sofa. to its right a lamp": (["sofa", "lamp"], [], True),
    "from left to right: a cat, a dog": (["cat", "dog"], [], True),
    "a cat in the middle of a field": (["cat", "field"], [], False),
    "a lamp on the left wall": (["lamp", "left wall"], [], False),
    "two dozen eggs": (["eggs"], [], True),
    "twenty one candles": (["candles"], [], True),
    "a hundred red balloons": (["red balloons"], [], True),
}


@pytest.mark.parametrize("reader", [read, understand])
@pytest.mark.parametrize("text", SCOPES)
def test_negations_quantifiers_and_comparisons_are_never_turned_round(text: str, reader) -> None:
    if reader is understand and parser() is None:
        pytest.skip("spacy is not installed: pip install 'stretto[pictures]'")
    things, absent, is_unread = SCOPES[text]
    ledger = reader(text)
    assert [each.name for each in ledger.things] == things and list(ledger.absent) == absent
    assert bool(ledger.unread) == is_unread and all(each.rstrip(".") in text for each in ledger.unread)
    assert is_unread == ("As requested: " in describe(ledger)) and read(describe(ledger)).unread == ledger.unread
    assert unkept(ledger, text, reader) == ()


@pytest.mark.parametrize(
    ("text", "relations"),
    [
        (
            "a teddy bear wearing a hat and standing behind a table",
            [("bear", "wearing", "hat"), ("bear", "behind", "table")],
        ),
        ("a table with a cup on it", [("table", "with", "cup"), ("cup", "on", "table")]),
        (
            "a table with a laptop, mouse, and cup of coffee on it",
            [
                ("table", "with", "laptop"),
                ("table", "with", "mouse"),
                ("table", "with", "cup of coffee"),
                ("coffee", "on", "table"),
            ],
        ),
        ("a man wearing a T-shirt and jeans", [("man", "wearing", "t-shirt"), ("man", "wearing", "jean")]),
        ("a bridge under which a boat passes", [("boat", "below", "bridge")]),
        ("a horse that a boy holds", [("boy", "holding", "horse")]),
        ("two red cubes left of a blue sphere", [("cube", "left of", "sphere")]),
        ("a fence painted by a man", [("man", "painting", "fence")]),
        (
            "a bottle with a red ribbon wrapped around it",
            [("bottle", "with", "ribbon"), ("ribbon", "around", "bottle")],
        ),
        (
            "a man next to a donkey with a lot of baggage on it",
            [("man", "next to", "donkey"), ("donkey", "with", "baggage"), ("baggage", "on", "donkey")],
        ),
        ("a plane on a runway with the sun behind it", [("plane", "on", "runway"), ("runway", "with", "sun")]),
        ("an owl gripping a squirrel in its talons", [("owl", "gripping", "squirrel"), ("squirrel", "in", "talon")]),
        ("an old photograph of an airship, floating over a field", [("airship", "above", "field")]),
        ("a doll wearing a white dress and brown boots", [("doll", "wearing", "dress"), ("doll", "wearing", "boot")]),
        ("a plant growing on the side of a brick wall", [("plant", "on", "brick wall")]),
        ("a lamp hanging from the ceiling", [("lamp", "below", "ceiling")]),
        ("a motorcycle parked by a door", [("motorcycle", "next to", "door")]),
        (
            "A woman stands in a garden holding an umbrella.",
            [("woman", "in", "garden"), ("woman", "holding", "umbrella")],
        ),
        ("A cat sits on a mat. A dog is next to it.", [("cat", "on", "mat"), ("dog", "next to", "cat")]),
        ("a teddy bear to the right of a toy car", [("bear", "right of", "toy car")]),
        ("a child doing a trick on a board", [("child", "on", "board")]),
        (
            "A beaver stands next to a tree in a park.",
            [("beaver", "next to", "tree"), ("beaver", "in", "park")],
        ),
        (
            "an airport lobby with a woman hauling baggage",
            [("woman", "hauling", "baggage"), ("lobby", "with", "woman")],
        ),
        ("A man is being handed a birthday cake.", []),
        ("A large white airplane flies in the gray sky.", [("airplane", "in", "sky")]),
        ("A boy walking through a room towards a cat.", [("boy", "through", "room"), ("boy", "towards", "cat")]),
        ("Two hold a ball", []),  # the subject names nothing
        ("Show me cats near a dog. There are 5 boxes", [("cat", "next to", "dog")]),
        ("Show me five cats to the right of a dog. There are five boxes!", [("cat", "right of", "dog")]),
        ("Please paint 5 grey knives to the left of three triangles.", [("knife", "left of", "triangle")]),
        ("a grey triangle over 5 yellow knives", [("triangle", "above", "knife")]),
        ("The balls are over 3 green boxes.", [("ball", "above", "box")]),
        ("There are over 3 green boxes.", []),
        ("a cat is over 3 years old", []),
        ("a cat under 12 lamps", [("cat", "below", "lamp")]),
        ("Three pink spheres above a cat", [("sphere", "above", "cat")]),
        ("two spheres right of a small dark blue circle", [("sphere", "right of", "circle")]),
    ],
)
def test_a_parse_finds_the_subject_of_a_place_and_of_a_verb(text: str, relations: list[tuple[str, str, str]]) -> None:
    if parser() is None:
        pytest.skip("spacy is not installed: pip install 'stretto[pictures]'")
    ledger = understand(text)
    found = [
        (ledger.thing(each.subject).noun.split()[-1], each.kind, ledger.thing(each.other).noun)
        for each in ledger.relations
    ]
    assert found == relations


@pytest.mark.parametrize("reader", [read, understand])
@pytest.mark.parametrize(
    ("text", "described"),
    [
        ('the word "HI" and a red circle', 'A red circle. The words "HI" can be read.'),
        ('a sign saying "OPEN"', 'A sign. The words "OPEN" can be read.'),
        (
            'a shop with a sign that reads "OPEN"',
            'A shop and a sign. The shop has the sign. The words "OPEN" can be read.',
        ),
        ("a dozen eggs and fifteen red candles", "Twelve eggs and fifteen red candles."),
        ("half a dozen eggs", "Six eggs."),
        ("hundreds of birds", "Some birds."),
        ("a 4 legged robot", "A 4-legged robot."),
        ("a two story house", "A two-story house."),
        ("a 5 star hotel", "A 5-star hotel."),
        ("a five star hotel", "A five-star hotel."),
        ("a 3 legged dog", "A 3-legged dog."),
        ("an 8 legged spider", "An 8-legged spider."),
        ("a one eyed cat", "A one-eyed cat."),
        ("a uniform and an umbrella", "A uniform and an umbrella."),
        ("a red-and-white striped tent", "A striped red and white tent."),
        ("a room with no windows and one door", "A room, a door and no windows."),
        ("no chairs and two stools", "Two stools and no chairs."),
        ("A room, no windows and no doors.", "A room, no windows and no doors."),
    ],
)
def test_both_readers_read_the_same(text: str, described: str, reader) -> None:
    if reader is understand and parser() is None:
        pytest.skip("spacy is not installed: pip install 'stretto[pictures]'")
    assert describe(reader(text)) == described


@pytest.mark.parametrize("reader", [read, understand])
@pytest.mark.parametrize(
    "text",
    [
        "a box holds over 20 apples",
        "a shelf that shows over 20 books",
        "a forest where over 20 deer live",
        "I see over 20 birds",
        "a sign says over 100 sold",
        "a shop with items under 20 dollars",
        "a shirt under 20 dollars",
        "children under 12",
        "two boxes, one holds over 20 apples",
    ],
)
def test_an_amount_is_no_place_and_stays_in_the_users_words(text: str, reader) -> None:
    if reader is understand and parser() is None:
        pytest.skip("spacy is not installed: pip install 'stretto[pictures]'")
    ledger = reader(text)
    assert ledger.unread == (text,) and not {each.kind for each in ledger.relations} & {"above", "below"}


@pytest.mark.parametrize("reader", [read, understand])
@pytest.mark.parametrize("text", ["a grey lamp over 20 cups", "two lamps over 20 cups"])
def test_an_object_over_many_others_has_a_place(text: str, reader) -> None:
    if reader is understand and parser() is None:
        pytest.skip("spacy is not installed: pip install 'stretto[pictures]'")
    ledger = reader(text)
    assert [each.count for each in ledger.things][1:] == [20] and not ledger.unread
    assert [each.kind for each in ledger.relations] == ["above"]


def test_a_wall_that_is_painted_has_a_colour() -> None:
    if parser() is None:
        pytest.skip("spacy is not installed: pip install 'stretto[pictures]'")
    ledger = understand("An old toilet painted red with a wooden lid.")
    assert [(each.noun, each.colours) for each in ledger.things] == [("toilet", ("red",)), ("lid", ())]


@pytest.mark.parametrize("colours", ["red", "light red"])
def test_a_run_of_colours_without_a_noun_is_read_once(colours: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, colour = [], rules._RuleReader._colour
    monkeypatch.setattr(rules._RuleReader, "_colour", lambda self: calls.append(self.at) or colour(self))
    assert read(f"{colours} " * 100) == Ledger() and len(calls) < 300
    assert read(f"{colours} " * 100 + "orange").things[0].noun == "orange"


def test_a_place_is_no_quality() -> None:
    if parser() is None:
        pytest.skip("spacy is not installed: pip install 'stretto[pictures]'")
    text = "A teacup behind 3 black squares. The black squares are next to two shiny spheres."
    assert {each.name for each in understand(text).things} == {"teacup", "black squares", "shiny spheres"}


def test_a_number_joined_to_a_word_keeps_the_colour_before_it() -> None:
    if parser() is None:
        pytest.skip("spacy is not installed: pip install 'stretto[pictures]'")
    assert describe(understand("a blue 2 door car and a man")) == "A 2-door blue car and a man."
