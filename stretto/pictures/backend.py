"""Who paints: one request, one picture. Backends are given prompts; none of them sees the ledger."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from PIL import Image

from stretto.base.errors import UserError

MOST_PIXELS = 4096
"""Of a side."""


@dataclass(frozen=True, slots=True)
class Lora:
    """An adapter, by the name or path that the backend knows it under."""

    name: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Control:
    """A picture that steers the new one: its edges, depths or poses."""

    kind: str
    """``canny``, ``depth``, … as the backend names it."""
    image: Image.Image
    strength: float = 1.0


@dataclass(frozen=True, slots=True)
class PaintRequest:
    """What is to be painted. Written by the agent or the command line."""

    prompt: str
    width: int
    """Pixels; a multiple of `Backend.multiple`, as ``height``."""
    height: int
    seed: int
    negative: str = ""
    steps: int | None = None
    """Of sampling; None: the backend's own. As ``guidance``."""
    guidance: float | None = None
    loras: tuple[Lora, ...] = ()
    controls: tuple[Control, ...] = ()
    base: Image.Image | None = None
    """To be changed where ``mask`` is white, and nowhere else; of the same size. Only where `Backend.edits`."""
    mask: Image.Image | None = None


def png(image: Image.Image) -> bytes:
    """As a file of that format."""
    held = io.BytesIO()
    image.save(held, format="PNG")
    return held.getvalue()


class Backend(Protocol):
    """Paints, one request at a time. `closing` ends what it holds."""

    @property
    def name(self) -> str:
        """As messages call it: ``renderer``, ``diffusers:FOLDER``, ``comfy:URL``."""
        ...

    @property
    def multiple(self) -> int:
        """Width and height are multiples of it: how much smaller latents are."""
        ...

    @property
    def edits(self) -> bool:
        """Whether a request may have a ``base`` and a ``mask``."""
        ...

    def paint(self, request: PaintRequest, tell: Callable[[float], None] = lambda done: None) -> Image.Image:
        """The picture, RGB and of the size asked for. Blocks until it is painted.

        Args:
            tell: how much of it is done, 0 to 1, now and then.

        Raises:
            UserError: it cannot paint this: size, adapter, control, or nobody is there. Nothing was started.
            RuntimeError: it failed on the way.
        """
        ...

    def close(self) -> None: ...


def check_request(backend: Backend, request: PaintRequest) -> None:
    """What every backend refuses. Raises `UserError`."""
    if not request.prompt.strip():
        raise UserError("prompt: it is empty; say what is to be painted")
    for field, pixels in (("width", request.width), ("height", request.height)):
        if pixels > MOST_PIXELS:
            raise UserError(f"--size: {field} {pixels} is more than {MOST_PIXELS}; ask for a smaller picture")
        if pixels <= 0 or pixels % backend.multiple:
            near = max(backend.multiple, round(pixels / backend.multiple) * backend.multiple)
            raise UserError(f"--size: {field} {pixels} is no multiple of {backend.multiple}; {near} is the nearest")
    if abs(request.seed) >= 2**63:
        raise UserError(f"--seed: {request.seed} has more than 64 bits; give a smaller number")
    if (request.base is None) != (request.mask is None):
        raise UserError("an edit wants a picture and a mask of where to change it; give both")
    if request.base is not None:
        if not backend.edits:
            raise UserError(f"{backend.name}: it cannot change a part of a picture; paint a new one")
        assert request.mask is not None
        sizes = {request.base.size, request.mask.size, (request.width, request.height)}
        if len(sizes) > 1:
            raise UserError(f"an edit keeps the size, and these differ: {sorted(sizes)}; give one size")
