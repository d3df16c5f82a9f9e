"""Coloured shapes on white: layout and drawing of a ledger, recognition of the shapes in a picture, and comparison of both.

Recognition is exact for pictures that `draw` made, and tolerates the blur of a small autoencoder. It finds the connected parts that are not white. Each
part gets the palette's colour that is nearest to its core, and the form whose picture, sharp or blurred, is nearest to it.
Shape letters: H rows of pixels, W columns, C colour channels (red, green, blue).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from stretto.base.errors import UserError, nearest
from stretto.tasks.shapes.ledger import Ledger, Relation, Thing, Unkept
from stretto.tasks.shapes.words import plural

PALETTE: Final = {
    "red": (220, 40, 40), "green": (40, 160, 60), "blue": (40, 80, 220), "yellow": (240, 210, 40), "purple": (150, 50, 190),
    "orange": (245, 140, 30), "black": (20, 20, 20),
}  # fmt: skip
FORMS: Final = {
    "circle": "circle", "ball": "circle", "sphere": "circle", "disc": "circle", "dot": "circle",
    "square": "square", "cube": "square", "box": "square", "block": "square",
    "triangle": "triangle", "pyramid": "triangle", "cone": "triangle",
}  # fmt: skip
"""Nouns that can be drawn, and their forms."""
RELATIONS: Final = ("left of", "right of", "above", "below")
_WHITE = (255, 255, 255)
_GROUND = 110.0
"""Largest distance from white, in RGB units, of a background pixel: half the distance of the brightest colour of the palette."""
_LEAST_PIXELS, _LEAST_SHARE = 8, 0.0003
"""Smallest area of a shape, in pixels and as a share of the picture. Smaller parts are ignored."""
_FILLS: Final = {"circle": np.pi / 4, "square": 1.0, "triangle": 0.5}
"""Share of the bounding box that a form covers."""
_BLURS: Final = (0.0, 0.7, 1.2)
"""Standard deviations, in pixels, of the blur of the pictures with which a part is compared."""
_OVERSAMPLED = 4
"""Factor by which forms are drawn larger and then reduced, for smooth edges."""
_MOST = 9
"""Largest number of shapes of one kind in a picture."""


Box = tuple[float, float, float, float]
"""Left, top, right and bottom, as shares of the picture's width and height."""


@dataclass(frozen=True, slots=True)
class Body:
    """A shape in a picture. Positions and sizes are shares of the picture's width and height."""

    form: str
    colour: str
    x: float
    """Centre, from the left."""
    y: float
    """Centre, from the top."""
    width: float
    height: float

    @property
    def box(self) -> Box:
        return self.x - self.width / 2, self.y - self.height / 2, self.x + self.width / 2, self.y + self.height / 2


Scene = tuple[Body, ...]


class NoShapeError(UserError):
    """A prompt names nothing that can be drawn."""


def drawable(ledger: Ledger) -> Ledger:
    """The part of a ledger that consists of shapes and their relations, without the scene around them.

    Raises:
        NoShapeError: The ledger has no shape.
        UserError: A shape has a colour, number or relation that cannot be drawn.
    """
    things = tuple(thing for thing in ledger.things if thing.noun in FORMS)
    if not things:
        nouns = ", ".join(thing.noun for thing in ledger.things) or "nothing"
        raise NoShapeError(f"prompt: {nouns}: not a shape that can be drawn; ask for {', '.join(sorted(set(FORMS)))}")
    ids = {thing.id for thing in things}
    relations = tuple(each for each in ledger.relations if {each.subject, each.other} <= ids)
    for thing in things:
        if bad := [colour for colour in thing.colours if colour not in PALETTE]:
            raise UserError(
                f"prompt: {bad[0]} {thing.noun}: unknown colour{nearest(bad[0], PALETTE)}; one of {', '.join(PALETTE)}"
            )
        if len(thing.colours) > 1:
            raise UserError(f"prompt: the {thing.noun} is both {' and '.join(thing.colours)}; give it one colour")
        if (thing.count or 1) > _MOST:
            raise UserError(f"prompt: {thing.count} {plural(thing.noun)}: at most {_MOST} are drawn; ask for fewer")
    if bad_kinds := [each.kind for each in relations if each.kind not in RELATIONS]:
        raise UserError(f"prompt: shapes cannot be {bad_kinds[0]!r} each other; one of {', '.join(RELATIONS)}")
    return Ledger(things, relations)


def place(ledger: Ledger, seed: int) -> Scene:
    """The bodies of `placed` in one tuple."""
    return tuple(body for bodies in placed(ledger, seed).values() for body in bodies)


def placed(ledger: Ledger, seed: int) -> dict[int, Scene]:
    """A layout that keeps a `drawable` ledger: the bodies of every thing, by its id. The seed decides places, sizes and unspecified colours.

    Every thing has its own column and row, in an order that keeps the relations. Its bodies lie in separate parts of that cell, so no two bodies touch.

    Raises:
        UserError: As `drawable`, or no order keeps the relations.
    """
    ledger = drawable(ledger)
    rng = random.Random(f"shapes/{seed}")
    ids = [thing.id for thing in ledger.things]
    columns = _order(ids, ledger.along("left of"), rng)
    rows = _order(ids, ledger.along("above"), rng)
    return {
        thing.id: tuple(_bodies(thing, columns.index(thing.id), rows.index(thing.id), len(ids), rng))
        for thing in ledger.things
    }


def _order(ids: Sequence[int], before: Sequence[Relation], rng: random.Random) -> list[int]:
    """A random order of ``ids`` in which the subject of each relation comes before its object."""
    left, order = list(ids), list[int]()
    while left:
        free = [each for each in left if not any(known.other == each and known.subject in left for known in before)]
        if not free:
            raise UserError("prompt: its relations contradict each other; name each place once")
        order.append(rng.choice(free))
        left.remove(order[-1])
    return order


def _bodies(thing: Thing, column: int, row: int, num_cells: int, rng: random.Random) -> list[Body]:
    count = thing.count or rng.randint(2, 3)
    side = math.ceil(math.sqrt(count))
    cell = 1 / num_cells / side
    colour = thing.colours[0] if thing.colours else rng.choice(list(PALETTE))
    bodies = []
    for number in sorted(rng.sample(range(side * side), count)):
        size = cell * rng.uniform(0.6, 0.76)
        slack = (cell - size) / 2 * 0.6
        middle = ((number % side + 0.5) * cell, (number // side + 0.5) * cell)
        x, y = (
            middle[axis] + place / num_cells + rng.uniform(-slack, slack) for axis, place in enumerate((column, row))
        )
        bodies.append(Body(FORMS[thing.noun], colour, x, y, size, size))
    return bodies


def draw(scene: Scene, width: int, height: int) -> Image.Image:
    """The picture of a scene, RGB on white. Forms keep their proportions: a body that is not square is drawn as large as fits."""
    large = Image.new("RGB", (width * _OVERSAMPLED, height * _OVERSAMPLED), _WHITE)
    pen = ImageDraw.Draw(large)
    for body in scene:
        side = min(body.width * large.width, body.height * large.height)
        left, top = body.x * large.width - side / 2, body.y * large.height - side / 2
        _draw_form(pen, body.form, (left, top, left + side, top + side), PALETTE[body.colour])
    return large.resize((width, height), Image.Resampling.BOX)


def _draw_form(
    pen: ImageDraw.ImageDraw, form: str, box: tuple[float, float, float, float], fill: tuple[int, int, int] | int
) -> None:
    left, top, right, bottom = box
    if form == "circle":
        pen.ellipse(box, fill=fill)
    elif form == "square":
        pen.rectangle(box, fill=fill)
    else:
        pen.polygon([((left + right) / 2, top), (right, bottom), (left, bottom)], fill=fill)


def see(image: Image.Image) -> Scene:
    """The shapes in a picture, from top left to bottom right."""
    from scipy.ndimage import binary_dilation, find_objects, label  # takes 0.2 s to import, and only verifiers need it

    pixels_HWC = np.asarray(image.convert("RGB"), dtype=np.float32)
    height, width = pixels_HWC.shape[:2]
    from_white_HW = np.linalg.norm(pixels_HWC - np.array(_WHITE, dtype=np.float32), axis=-1)
    parts_HW, _ = label(from_white_HW > _GROUND)
    least = max(_LEAST_PIXELS, _LEAST_SHARE * height * width)
    bodies = []
    for number, (rows, columns) in enumerate(find_objects(parts_HW), 1):
        rows, columns = (slice(max(0, each.start - 1), each.stop + 1) for each in (rows, columns))
        mask_HW = parts_HW[rows, columns] == number
        if mask_HW.sum() < least:
            continue
        near_HWC, depth_HW = pixels_HWC[rows, columns], from_white_HW[rows, columns]
        core_HW = mask_HW & (depth_HW >= np.median(depth_HW[mask_HW]))
        colour = _nearest_colour(np.median(near_HWC[core_HW], axis=0))
        own_HW = binary_dilation(mask_HW) & (mask_HW | (parts_HW[rows, columns] == 0))
        tint_C = np.array(_WHITE, dtype=np.float32) - np.array(PALETTE[colour], dtype=np.float32)
        covered_HW = np.clip((255 - near_HWC) @ tint_C / (tint_C @ tint_C), 0, 1) * own_HW
        form, side = _form(covered_HW)
        x = float((columns.start + columns.stop) / 2) / width
        y = float((rows.start + rows.stop) / 2) / height
        bodies.append(Body(form, colour, x, y, side / width, side / height))
    return tuple(sorted(bodies, key=lambda body: (body.y, body.x)))


def _nearest_colour(pixel_C: np.ndarray) -> str:
    return min(PALETTE, key=lambda name: float(np.linalg.norm(pixel_C - np.array(PALETTE[name]))))


def _form(covered_HW: np.ndarray) -> tuple[str, float]:
    """The form whose picture with the same area and centre of mass, sharp or blurred, is nearest; and its side in pixels."""
    area = float(covered_HW.sum())
    rows, columns = np.indices(covered_HW.shape) + 0.5
    x, y = float((columns * covered_HW).sum()) / area, float((rows * covered_HW).sum()) / area
    best: list[tuple[float, str, float]] = []
    for form, fill in _FILLS.items():
        side = (area / fill) ** 0.5
        top = y - side * (
            2 / 3 if form == "triangle" else 1 / 2
        )  # a triangle's centre of mass is below the centre of its box
        box = tuple(each * _OVERSAMPLED for each in (x - side / 2, top, x + side / 2, top + side))
        large = Image.new("L", (covered_HW.shape[1] * _OVERSAMPLED, covered_HW.shape[0] * _OVERSAMPLED), 0)
        _draw_form(ImageDraw.Draw(large), form, box, 255)
        sharp = large.resize((covered_HW.shape[1], covered_HW.shape[0]), Image.Resampling.BOX)
        for blur in _BLURS:
            seen_HW = np.asarray(sharp.filter(ImageFilter.GaussianBlur(blur)), dtype=np.float32) / 255
            best.append((float(np.abs(seen_HW - covered_HW).sum()), form, side))
    _, form, side = min(best)
    return form, side


# Comparison


def unmet(ledger: Ledger, scene: Scene) -> tuple[Unkept, ...]:
    """Requirements of a `drawable` ledger that a picture does not meet, and shapes that were not requested. Raises as `drawable`."""
    return judged(ledger, scene)[0]


def judged(ledger: Ledger, scene: Scene) -> tuple[tuple[Unkept, ...], Scene]:
    """The faults of `unmet`, and the bodies that are right where they are."""
    ledger = drawable(ledger)
    free, faults = list(scene), list[Unkept]()
    shown: dict[int, list[Body]] = {}
    for thing in sorted(ledger.things, key=lambda each: -len(each.colours)):
        fitting = [body for body in free if looks_like(body, thing)]
        if not thing.colours and fitting:  # all of one colour
            fitting = [body for body in fitting if body.colour == fitting[0].colour]
        rivals = [each for each in ledger.things if each.id not in (thing.id, *shown) and _look_alike(each, thing)]
        taken = fitting[: thing.count] if rivals and thing.count else fitting
        free = [body for body in free if body not in taken]
        shown[thing.id] = taken
        if not taken:
            faults.append(Unkept("object", f"no {thing.name}", thing.id))
        elif len(taken) != thing.count if thing.count is not None else len(taken) < 2:
            faults.append(Unkept("count", f"{len(taken)} {thing.name}, not {thing.count or 'several'}", thing.id))
    faults += [Unkept("extra", f"another {body.colour} {body.form}") for body in free]
    wrong = {fault.thing for fault in faults}
    for relation in ledger.relations:
        if not _holds(relation, shown):
            subject, other = ledger.thing(relation.subject), ledger.thing(relation.other)
            faults.append(Unkept("relation", f"the {subject.name} is not {relation.kind} the {other.name}", subject.id))
            # both move: there may be no room on the other side of a shape that stays
            if shown[relation.subject] and shown[relation.other]:
                wrong |= {relation.subject, relation.other}
    return tuple(faults), tuple(body for id, bodies in shown.items() if id not in wrong for body in bodies)


def looks_like(body: Body, thing: Thing) -> bool:
    return body.form == FORMS[thing.noun] and (not thing.colours or body.colour in thing.colours)


def _look_alike(thing: Thing, other: Thing) -> bool:
    return FORMS[thing.noun] == FORMS[other.noun] and (not thing.colours or thing.colours == other.colours)


def _holds(relation: Relation, shown: dict[int, list[Body]]) -> bool:
    """Whether a relation holds between all bodies of both things, with a distance of at least a quarter of their mean size."""
    subjects, others = shown[relation.subject], shown[relation.other]
    if relation.kind in ("right of", "below"):
        subjects, others = others, subjects
    if relation.kind in ("left of", "right of"):
        apart = [(other.x - body.x) - (other.width + body.width) / 8 for body in subjects for other in others]
    else:
        apart = [(other.y - body.y) - (other.height + body.height) / 8 for body in subjects for other in others]
    return bool(apart) and min(apart) > 0
