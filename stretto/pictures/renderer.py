"""Backend that draws coloured shapes exactly, without a model: it reads the prompt with `stretto.tasks.shapes.rules.read`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from PIL import Image

from stretto.base.errors import UserError
from stretto.pictures.backend import PaintRequest, check_request
from stretto.tasks.shapes.draw import (
    Body,
    NoShapeError,
    draw,
    drawable,
    looks_like,
    place,
    placed,
    see,
    unmet,
)
from stretto.tasks.shapes.ledger import Ledger
from stretto.tasks.shapes.rules import read

_TRIES = 200
"""Number of random layouts that are tried for new shapes beside those that stay."""


class Renderer:
    """Draws the shapes of a prompt at places that the seed decides, and can change a part of such a picture."""

    name, multiple = "renderer", 1

    def __init__(
        self, misread: Callable[[Ledger, int], Ledger] = lambda ledger, seed: ledger, edits: bool = True
    ) -> None:
        """``misread`` changes the ledger before it is drawn, by the seed: for tests that need a backend with errors."""
        self._misread, self.edits = misread, edits

    def paint(self, request: PaintRequest, tell: Callable[[float], None] = lambda done: None) -> Image.Image:
        check_request(self, request)
        for what in ("loras", "controls", "negative", "steps", "guidance"):
            if getattr(request, what):
                raise UserError(
                    f"renderer: {what.removesuffix('s')}: the renderer does not support it; leave it out, or choose another backend"
                )
        wanted = read(request.prompt)
        try:
            ledger = drawable(wanted)
        except NoShapeError as error:
            raise UserError(f"{error}; for other pictures, use --backend diffusers:FOLDER or comfy:URL") from None
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
    """``base`` where ``mask`` is black. Elsewhere, the shapes of ``ledger`` that ``base`` lacks, drawn as in ``meant`` and placed relative to those
    that stay. If no layout of `_TRIES` fits, the last one is drawn."""
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
