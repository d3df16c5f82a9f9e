"""Interface of image generators: one request in, one picture out. A backend sees the prompt only, never the ledger."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from PIL import Image

from stretto.base.errors import UserError

MOST_PIXELS = 4096
"""Largest width or height of a picture, in pixels."""


@dataclass(frozen=True, slots=True)
class Lora:
    """A LoRA adapter, under the name or path by which the backend finds it."""

    name: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Control:
    """A ControlNet reference: a picture whose edges, depths or poses the new picture follows."""

    kind: str
    """Kind of the ControlNet in the backend's words: ``canny``, ``depth``, …"""
    image: Image.Image
    strength: float = 1.0


@dataclass(frozen=True, slots=True)
class PaintRequest:
    """A request for one picture. Written by `stretto.pictures.agent` or the command line."""

    prompt: str
    width: int
    """Pixels. ``width`` and ``height`` are multiples of `Backend.multiple`."""
    height: int
    seed: int
    negative: str = ""
    steps: int | None = None
    """Number of sampling steps; None: the backend's default. None means the same for ``guidance``."""
    guidance: float | None = None
    loras: tuple[Lora, ...] = ()
    controls: tuple[Control, ...] = ()
    base: Image.Image | None = None
    """Picture to change where ``mask`` is white, and nowhere else. All three sizes are equal. Only for backends with `Backend.edits`."""
    mask: Image.Image | None = None


def png(image: Image.Image) -> bytes:
    """The image as the bytes of a PNG file."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


class Backend(Protocol):
    """An image generator. It handles one request at a time; `close` releases models and connections."""

    @property
    def name(self) -> str:
        """Name in messages: ``renderer``, ``diffusers:FOLDER``, ``comfy:URL``."""
        ...

    @property
    def multiple(self) -> int:
        """Divisor of width and height: the factor by which latents are smaller than the picture."""
        ...

    @property
    def edits(self) -> bool:
        """Whether a request may have a ``base`` and a ``mask``."""
        ...

    def paint(self, request: PaintRequest, tell: Callable[[float], None] = lambda done: None) -> Image.Image:
        """The picture, in RGB and of the requested size. Blocks until it is painted.

        Args:
            tell: Called with the share that is done, 0 to 1.

        Raises:
            UserError: The backend does not support the size, adapter or control, or no server answers. Nothing was started.
            RuntimeError: Painting started and failed.
        """
        ...

    def close(self) -> None: ...


def check_request(backend: Backend, request: PaintRequest) -> None:
    """Raises `UserError` for a request that no backend accepts, and for an edit where ``backend`` has no `Backend.edits`."""
    if not request.prompt.strip():
        raise UserError("prompt: it is empty; describe the picture")
    for field, pixels in (("width", request.width), ("height", request.height)):
        if pixels > MOST_PIXELS:
            raise UserError(f"--size: {field} {pixels} is more than {MOST_PIXELS}; ask for a smaller picture")
        if pixels <= 0 or pixels % backend.multiple:
            near = max(backend.multiple, round(pixels / backend.multiple) * backend.multiple)
            raise UserError(f"--size: {field} {pixels} is not a multiple of {backend.multiple}; {near} is the nearest")
    if abs(request.seed) >= 2**63:
        raise UserError(f"--seed: {request.seed} has more than 64 bits; give a smaller number")
    if (request.base is None) != (request.mask is None):
        raise UserError("edit: a base picture and a mask are needed; give both")
    if request.base is not None:
        if not backend.edits:
            raise UserError(f"{backend.name}: this backend cannot change a part of a picture; paint a new one")
        assert request.mask is not None
        sizes = {request.base.size, request.mask.size, (request.width, request.height)}
        if len(sizes) > 1:
            raise UserError(f"edit: base, mask and request must have one size, and have {sorted(sizes)}; give one size")
