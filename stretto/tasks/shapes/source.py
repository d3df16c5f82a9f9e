"""Task set `shapes`: a request for a picture of coloured shapes, to be written out as `stretto enhance` has it written out.

The answer is JSON of `stretto.tasks.shapes.fields`. The prompt made of it is judged twice: what the ledger of the request says must be
in it, bound as it was, and a picture drawn from it by the exact renderer, read back, must meet the ledger. What it adds of scene, style,
light, composition and camera counts beside that, and only where everything was kept. Endless; item and seed make the problem.
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
from stretto.tasks.shapes.ledger import Ledger, Relation, Thing, read, unkept, with_number
from stretto.tasks.task import Answer, Problem, Score, TaskSource

NOUNS: Final = ("circle", "square", "triangle")
_CELL = 12
"""Pixels that a shape lies in, at least: in 8 a tenth of all requests cannot be met, for what is drawn is read as something else."""


class ShapesArgs(Config):
    """Of kind ``shapes``."""

    things: int = Field(default=3, ge=1, le=5)
    """Kinds of shapes in a picture, at most."""
    count: int = Field(default=3, ge=1, le=9)
    """Of one kind, at most."""
    relations: float = Field(default=0.6, ge=0, le=1)
    """Share of neighbours in the list of things that are placed by each other."""
    pixels: int = Field(default=128, ge=32, le=1024)
    """Side of the picture that is drawn from an answer."""
    seed: int = 0

    @model_validator(mode="after")
    def _can_be_read(self) -> Self:
        least = _CELL * self.things * math.ceil(math.sqrt(self.count))
        if self.pixels < least:
            told = f"{self.things} kinds of {self.count} shapes need {least} pixels to be read back"
            raise ValueError(f"pixels: {self.pixels}: {told}; draw larger pictures, or ask for less")
        return self


def sample_ledger(rng: random.Random, args: ShapesArgs) -> Ledger:
    """A request that can be met: things that no two look alike, in a line of relations."""
    kinds = [(noun, colour) for noun in NOUNS for colour in PALETTE]
    chosen = rng.sample(kinds, rng.randint(1, args.things))
    things = tuple(Thing(id, noun, rng.randint(1, args.count), (colour,)) for id, (noun, colour) in enumerate(chosen))
    pairs = [(first, second) for first, second in pairwise(things) if rng.random() < args.relations]
    return Ledger(things, tuple(Relation(one.id, rng.choice(RELATIONS), two.id) for one, two in pairs))


def request_of(ledger: Ledger) -> str:
    """A `sample_ledger` in one sentence, as people ask: "two red circles left of a blue square, a green triangle"."""
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
        """1: all is kept and all aspects are there; 0.5 and up: all is kept; below: the share that is; 0: it cannot be read."""
        ledger = read(problem.payload["request"])
        fields = fields_of(answer.text)
        if "subject" not in fields:
            return Score.of(False, {"kept": 0.0, "aspects": 0.0, "marked": 0.0}, "no JSON with a subject")
        prompt = joined(fields)
        try:
            lost = unkept(ledger, prompt)
            picture = draw(place(read(prompt), problem.item), self.args.pixels, self.args.pixels)
            wrong = unmet(ledger, see(picture))
        except UserError as error:  # it asks for what cannot be drawn: the answer's fault
            return Score.of(False, {"kept": 0.0, "aspects": 0.0, "marked": 1.0}, str(error))
        kept = 1 - min(ledger.num_constraints, max(len(lost), len(wrong))) / ledger.num_constraints
        added = len(spoken(fields)) / len(ASPECTS)
        right = not (lost or wrong)
        parts = {"kept": kept, "aspects": added, "marked": 1.0}
        told = "; ".join(each.says for each in (*lost, *wrong))[:200]
        return Score(0.5 + added / 2 if right else kept / 2.5, Outcome.OK if right else Outcome.WRONG, parts, told)
