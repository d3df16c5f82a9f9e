"""The exact painter: reads the prompt as `stretto.tasks.shapes` does and draws what it says. For everything that wants a painter
and no network; with planted faults, for everything that wants a painter who errs."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace

from stretto.pictures.backend import PaintRequest, Picture, check_request
from stretto.tasks.shapes.draw import PALETTE, draw, drawable, place
from stretto.tasks.shapes.ledger import Ledger, Thing, read


class Renderer:
    """Draws coloured shapes, wherever nothing else was asked for in the same place for one seed."""

    name, multiple, edits = "renderer", 1, False

    def __init__(self, faults: float = 0.0) -> None:
        """``faults``: chance of each object and of each relation to be drawn wrongly, by the seed."""
        assert 0 <= faults < 1, faults
        self._faults = faults

    def paint(self, request: PaintRequest, tell: Callable[[float], None] = lambda done: None) -> Picture:
        check_request(self, request)
        started_s = time.perf_counter()
        ledger = drawable(read(request.prompt))
        meant = _misread(ledger, self._faults, random.Random(f"faults/{request.seed}")) if self._faults else ledger
        image = draw(place(meant, request.seed), request.width, request.height)
        tell(1.0)
        return Picture(image, request.seed, time.perf_counter() - started_s)

    def close(self) -> None:
        pass


def _misread(ledger: Ledger, faults: float, rng: random.Random) -> Ledger:
    things: list[Thing] = []
    for thing in ledger.things:
        if rng.random() >= faults:
            things.append(thing)
            continue
        kind = rng.choice(("gone", "colour", "count"))
        if kind == "colour":
            things.append(
                replace(thing, colours=(rng.choice([each for each in PALETTE if each not in thing.colours]),))
            )
        elif kind == "count" or len(ledger.things) == 1:
            things.append(replace(thing, count=(thing.count or 1) + 1))
    ids = {thing.id for thing in things}
    kept = [each for each in ledger.relations if rng.random() >= faults and {each.subject, each.other} <= ids]
    return Ledger(tuple(things) or ledger.things[:1], tuple(kept))
