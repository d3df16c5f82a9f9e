"""Task set `shapes`: a request for a picture of coloured shapes, to be rewritten as a prompt that keeps and adds.

The answer is a prompt. It is judged twice: what the ledger of the request says must be in it, bound as it was, and a picture drawn
from it by the exact renderer, read back, must meet the ledger. What it adds of style, light, composition and camera counts beside
that, and only where everything was kept. Endless; item and seed make the problem.
"""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Final

from pydantic import Field

from stretto.base.config import Config
from stretto.base.errors import UserError
from stretto.tasks.shapes.draw import PALETTE, RELATIONS, draw, place, see, unmet
from stretto.tasks.shapes.ledger import Ledger, Relation, Thing, describe, read, unkept
from stretto.tasks.task import Answer, Problem, Score, TaskSource

NOUNS: Final = ("circle", "square", "triangle")
ASPECTS: Final = {
    "scene": ("background", "room", "table", "field", "sky", "wall", "floor", "street", "studio", "paper"),
    "style": ("style", "painting", "photo", "illustration", "render", "watercolor", "minimalist", "realistic", "cartoon", "sketch"),
    "lighting": ("light", "lighting", "lit", "shadow", "shadows", "glow", "sunlight", "sunset", "bright", "dim"),
    "composition": ("centered", "composition", "foreground", "symmetrical", "balanced", "framed", "framing", "space", "arranged"),
    "camera": ("camera", "shot", "close-up", "lens", "angle", "view", "focus", "macro", "wide-angle", "perspective"),
}  # fmt: skip
"""What a picture has besides its subject, and words that speak of it."""
_ASK = (
    "Rewrite this request as one prompt for an image model. Keep every object, number, colour and place exactly as asked; "
    "add a style, lighting, composition, camera and background. Answer with the prompt only.\n\nRequest: {request}"
)


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


def sample_ledger(rng: random.Random, args: ShapesArgs) -> Ledger:
    """A request that can be met: things that no two look alike, in a line of relations."""
    kinds = [(noun, colour) for noun in NOUNS for colour in PALETTE]
    chosen = rng.sample(kinds, rng.randint(1, args.things))
    things = tuple(Thing(id, noun, rng.randint(1, args.count), (colour,)) for id, (noun, colour) in enumerate(chosen))
    pairs = [(first, second) for first, second in pairwise(things) if rng.random() < args.relations]
    kinds_of = [rng.choice(RELATIONS) for _ in pairs]
    return Ledger(
        things, tuple(Relation(one.id, kind, two.id) for (one, two), kind in zip(pairs, kinds_of, strict=True))
    )


def aspects(text: str) -> tuple[str, ...]:
    """Of `ASPECTS`, what a text speaks of."""
    words = set(text.lower().replace(",", " ").replace(".", " ").split())
    return tuple(name for name, signs in ASPECTS.items() if words & {*signs})


class ShapesSource(TaskSource):
    args_kind = ShapesArgs
    args: ShapesArgs

    def problem(self, item: int) -> Problem:
        ledger = sample_ledger(random.Random(f"shapes/{self.args.seed}/{item}"), self.args)
        request = describe(ledger)
        gold = f"{request} Flat illustration on a plain paper background, soft light, balanced composition, straight camera view."
        return Problem(item, ({"role": "user", "content": _ASK.format(request=request)},), gold, {"request": request})

    def score(self, problem: Problem, answer: Answer) -> Score:
        """1: all is kept and all aspects are there; 0.5 and up: all is kept; below: the share that is."""
        ledger = read(problem.payload["request"])
        try:
            lost = unkept(ledger, answer.text)
            picture = draw(place(read(answer.text), problem.item), self.args.pixels, self.args.pixels)
            wrong = unmet(ledger, see(picture))
        except UserError as error:  # it asks for what cannot be drawn: the answer's fault
            return Score.of(False, {"kept": 0.0, "aspects": 0.0}, str(error))
        kept = 1 - min(ledger.num_constraints, max(len(lost), len(wrong))) / ledger.num_constraints
        added = len(aspects(answer.text)) / len(ASPECTS)
        right = not (lost or wrong)
        parts = {"kept": kept, "aspects": added}
        score = Score.of(right, parts, "; ".join(each.says for each in (*lost, *wrong))[:200])
        return Score(0.5 + added / 2 if right else kept / 2.5, score.outcome, parts, score.detail)
