"""Task set `shapes`: a request for a picture of coloured shapes, to be expanded into the fields of `stretto enhance`.

The answer is JSON with the fields of `stretto.tasks.shapes.fields`. Its prompt is checked twice: against the ledger of the request, and by the picture
that the exact renderer draws from it, which is read back. Fields for scene, style, lighting, composition and camera count only if every requirement
is kept. The set is endless: item and seed determine the problem.
"""

from __future__ import annotations

import json
import math
import random
from itertools import pairwise
from typing import Final, Self

from pydantic import Field, model_validator

from stretto.base.config import Config
from stretto.base.errors import UserError
from stretto.base.trajectory import Outcome
from stretto.tasks.shapes.draw import PALETTE, RELATIONS, draw, place, see, unmet
from stretto.tasks.shapes.fields import ASPECTS, PLAIN, fields_of, joined, messages, spoken
from stretto.tasks.shapes.ledger import Ledger, Relation, Thing, with_number
from stretto.tasks.shapes.rules import read, unkept
from stretto.tasks.task import Answer, Problem, Score, TaskSource

NOUNS: Final = ("circle", "square", "triangle")
_CELL = 12
"""Smallest side of a shape's cell, in pixels. With 8, a tenth of all requests cannot be met, because forms are confused."""


class ShapesArgs(Config):
    """Arguments of the task kind ``shapes``."""

    things: int = Field(default=3, ge=1, le=5)
    """Largest number of kinds of shapes in a picture."""
    count: int = Field(default=3, ge=1, le=9)
    """Largest number of shapes of one kind."""
    relations: float = Field(default=0.6, ge=0, le=1)
    """Share of neighbours in the list of shapes that get a relation."""
    pixels: int = Field(default=128, ge=32, le=1024)
    """Side, in pixels, of the picture that is drawn from an answer."""
    seed: int = 0

    @model_validator(mode="after")
    def _can_be_read(self) -> Self:
        least = _CELL * self.things * math.ceil(math.sqrt(self.count))
        if self.pixels < least:
            need = f"{self.things} kinds of {self.count} shapes need {least} pixels to be read back"
            raise ValueError(f"pixels: {self.pixels}: {need}; draw larger pictures, or ask for fewer shapes")
        return self


def sample_ledger(rng: random.Random, args: ShapesArgs) -> Ledger:
    """A random request that can be met: shapes that differ in form or colour, with relations between neighbours."""
    kinds = [(noun, colour) for noun in NOUNS for colour in PALETTE]
    chosen = rng.sample(kinds, rng.randint(1, args.things))
    things = tuple(Thing(id, noun, rng.randint(1, args.count), (colour,)) for id, (noun, colour) in enumerate(chosen))
    pairs = [(first, second) for first, second in pairwise(things) if rng.random() < args.relations]
    return Ledger(things, tuple(Relation(one.id, rng.choice(RELATIONS), two.id) for one, two in pairs))


def request_of(ledger: Ledger) -> str:
    """The request of a `sample_ledger` as people write it: "two red circles left of a blue square, a green triangle"."""
    places = {each.subject: f" {each.kind} " for each in ledger.relations}
    last = ledger.things[-1].id
    return "".join(with_number(each) + ("" if each.id == last else places.get(each.id, ", ")) for each in ledger.things)


class ShapesSource(TaskSource):
    args_kind = ShapesArgs
    args: ShapesArgs

    def problem(self, item: int) -> Problem:
        request = request_of(sample_ledger(random.Random(f"shapes/{self.args.seed}/{item}"), self.args))
        asked = messages(request, self.args.pixels, self.args.pixels)
        return Problem(item, tuple(asked), json.dumps({"subject": request, **PLAIN}), {"request": request})

    def score(self, problem: Problem, answer: Answer) -> Score:
        """1: every requirement is kept, and every aspect has a field. From 0.5: every requirement is kept. Below: share of kept ones. 0: invalid."""
        ledger = read(problem.payload["request"])
        fields = fields_of(answer.text)
        if "subject" not in fields:
            return Score.of(False, {"kept": 0.0, "aspects": 0.0, "marked": 0.0}, "no JSON with a subject")
        prompt = joined(fields)
        try:
            lost = unkept(ledger, prompt)
            picture = draw(place(read(prompt), problem.item), self.args.pixels, self.args.pixels)
            wrong = unmet(ledger, see(picture))
        except UserError as error:  # the answer asks for something that cannot be drawn
            return Score.of(False, {"kept": 0.0, "aspects": 0.0, "marked": 1.0}, str(error))
        kept = 1 - min(ledger.num_constraints, max(len(lost), len(wrong))) / ledger.num_constraints
        added = len(spoken(fields)) / len(ASPECTS)
        right = not (lost or wrong)
        parts = {"kept": kept, "aspects": added, "marked": 1.0}
        report = "; ".join(each.says for each in (*lost, *wrong))[:200]
        return Score(0.5 + added / 2 if right else kept / 2.5, Outcome.OK if right else Outcome.WRONG, parts, report)
