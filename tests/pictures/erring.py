"""Planted faults, for a painter who errs."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from stretto.tasks.shapes.draw import PALETTE
from stretto.tasks.shapes.ledger import Ledger, Thing


def misreading(faults: float) -> Callable[[Ledger, int], Ledger]:
    """What is drawn for a request and a seed: with chance ``faults`` each object and each relation is another one, or missing."""
    assert 0 <= faults < 1, faults

    def misread(ledger: Ledger, seed: int) -> Ledger:
        rng = random.Random(f"faults/{seed}")
        things: list[Thing] = []
        for thing in ledger.things:
            if rng.random() >= faults:
                things.append(thing)
                continue
            kind = rng.choice(("gone", "colour", "count"))
            if kind == "colour":
                others = [each for each in PALETTE if each not in thing.colours]
                things.append(replace(thing, colours=(rng.choice(others),)))
            elif kind == "count" or len(ledger.things) == 1:
                things.append(replace(thing, count=(thing.count or 1) + 1))
        ids = {thing.id for thing in things}
        kept = [each for each in ledger.relations if rng.random() >= faults and {each.subject, each.other} <= ids]
        return Ledger(tuple(things) or ledger.things[:1], tuple(kept))

    return misread
