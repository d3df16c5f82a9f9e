"""The exact painter: reads the prompt as `stretto.tasks.shapes` does and draws what it says. For everything that wants a painter
and no network."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from PIL import Image

from stretto.base.errors import UserError
from stretto.pictures.backend import PaintRequest, check_request
from stretto.tasks.shapes.draw import Body, draw, drawable, looks_like, place, placed, see, unmet
from stretto.tasks.shapes.ledger import Ledger, read

_TRIES = 200
"""Places for what is new beside what stays."""


class Renderer:
    """Draws coloured shapes, wherever nothing else was asked for in the same place for one seed; changes a part of such a picture."""

    name, multiple = "renderer", 1

    def __init__(
        self, misread: Callable[[Ledger, int], Ledger] = lambda ledger, seed: ledger, edits: bool = True
    ) -> None:
        """``misread``: what is drawn for a request and a seed, where a painter is wanted who errs."""
        self._misread, self.edits = misread, edits

    def paint(self, request: PaintRequest, tell: Callable[[float], None] = lambda done: None) -> Image.Image:
        check_request(self, request)
        for what in ("loras", "controls", "negative", "steps", "guidance"):
            if getattr(request, what):
                raise UserError(
                    f"renderer: {what.removesuffix('s')}: it has none; leave it out, or choose another backend"
                )
        ledger = drawable(read(request.prompt))
        meant = self._misread(ledger, request.seed)
        if request.base is not None and request.mask is not None:
            image = _edited(ledger, meant, request.base, request.mask, request.seed)
        else:
            image = draw(place(meant, request.seed), request.width, request.height)
        tell(1.0)
        return image

    def close(self) -> None:
        pass


def _edited(ledger: Ledger, meant: Ledger, base: Image.Image, mask: Image.Image, seed: int) -> Image.Image:
    """``base`` where ``mask`` is black; elsewhere what of ``ledger`` is not there yet, as it was ``meant``, in its place to what stays. Where
    that has no room it is drawn as if there were nothing else."""
    stays = see(Image.composite(Image.new("RGB", base.size, "white"), base, mask.convert("1")))
    there = {thing.id: tuple(body for body in stays if looks_like(body, thing)) for thing in ledger.things}
    wanted = {thing.id: thing for thing in meant.things} | {each.id: each for each in ledger.things if there[each.id]}
    both = Ledger(
        tuple(wanted.values()), tuple(each for each in meant.relations if {each.subject, each.other} <= {*wanted})
    )
    free_HW = np.asarray(mask.convert("L")) > 0
    for attempt in range(_TRIES):
        new = {id: bodies for id, bodies in placed(both, seed * _TRIES + attempt).items() if not there.get(id)}
        added = tuple(body for bodies in new.values() for body in bodies)
        if all(_fits(body, free_HW) for body in added) and not unmet(both, stays + added):
            break
    return Image.composite(draw(added, *base.size), base, mask.convert("1"))


def _fits(body: Body, free_HW: np.ndarray) -> bool:
    height, width = free_HW.shape
    left, top, right, bottom = body.box
    part = slice(int(top * height), int(bottom * height) + 2), slice(int(left * width), int(right * width) + 2)
    return bool(free_HW[part].all())
