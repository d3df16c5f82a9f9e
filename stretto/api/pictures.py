"""Functions behind `stretto enhance`, `stretto paint` and `stretto studio`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from PIL import Image

from stretto.api.agent import endpoint
from stretto.api.serve import ServeOptions, check_url
from stretto.base.errors import UserError, check_text, nearest, one_line
from stretto.base.paths import checkpoint_folder, claimed, replacing
from stretto.base.records import find_lineage
from stretto.base.track import progress, say
from stretto.model.parallel import join
from stretto.pictures.agent import PaintOptions, Version, painted, respond
from stretto.pictures.backend import Backend, Control, Lora, PaintRequest, check_request
from stretto.pictures.enhance import Enhanced, Wording, default_wording, enhance, is_enhancer, readable, suffixed
from stretto.pictures.renderer import Renderer
from stretto.pictures.studio import CONVERSATION_FILE, Studio, create_studio
from stretto.pictures.verify import EndpointVerifier, ShapesVerifier, TextVerifier, Verifier, Verifiers
from stretto.runtime.runtime import to_end
from stretto.server.client import ApiFailure, Client
from stretto.server.server import open_socket
from stretto.tasks.shapes.ledger import Ledger, describe

BACKENDS = ("renderer", "diffusers", "comfy")
_PLACES = {"diffusers": ("a folder", "FOLDER"), "comfy": ("an address", "http://127.0.0.1:8188")}
"""What follows the name of a backend, and an example."""
_SIZE = re.compile(r"(\d{1,5})[x×](\d{1,5})")


def parse_size(text: str) -> tuple[int, int]:
    """Width and height in ``1024x768``. Raises `UserError`: the text has another form."""
    found = _SIZE.fullmatch(text.strip().lower())
    if found is None or 0 in (size := (int(found[1]), int(found[2]))):
        raise UserError(f"--size: {text!r} is not a width and height in pixels; write 1024x1024")
    return size


@dataclass(frozen=True, slots=True)
class Writer:
    """The part that expands requests: a model or a server with its sampling options, or the fixed suffix."""

    model: Path | None = None
    server: str | None = None
    subnet: str | None = None
    temperature: float = 0.0
    seed: int = 0
    serving: ServeOptions = field(default_factory=ServeOptions)
    wording: Wording | None = None
    """None: the default of the checkpoint."""

    def __post_init__(self) -> None:
        if self.model is not None and self.server is not None:
            raise UserError("--model and --server: name one of the two, not both")
        if self.wording is Wording.MODEL and self.model is None and self.server is None:
            raise UserError("--writer model: name --model FOLDER or --server URL")
        if self.server is not None:
            check_url(self.server, "--server")

    @property
    def is_there(self) -> bool:
        """Whether the user chose a writer; else `paint` and `studio` leave requests as they are."""
        return self.model is not None or self.server is not None or self.wording is not None

    def says(self, enhanced: Enhanced) -> str:
        """Line for the user that names the author of the prompt in ``enhanced``."""
        if enhanced.writer is Wording.MODEL:
            return f"written by {self.model or self.server}"
        hint = "; --writer model has it written by the model" if self.wording is None and self.is_there else ""
        return f"the request and the fixed suffix{hint}"

    def enhanced(self, prompt: str, size: tuple[int, int]) -> Enhanced:
        """Enhance a prompt. Raises `UserError`: invalid input, or a server that refuses or does not answer."""
        try:
            return to_end(self._enhanced(prompt, size))
        except httpx.TransportError as error:
            problem = f"no answer ({type(error).__name__}); check the address"
            raise UserError(f"--server {self.server}: {problem}") from None
        except ApiFailure as failure:
            raise UserError(f"{self.model or self.server}: {failure.message}; see docs/PICTURES.md") from None

    async def _enhanced(self, prompt: str, size: tuple[int, int]) -> Enhanced:
        wording = self.wording
        if wording is None and self.server is None:
            wording = default_wording(
                self.model is not None and is_enhancer(find_lineage(checkpoint_folder(self.model)))
            )
        if wording is Wording.SUFFIX:
            return suffixed(prompt)
        async with endpoint(self.model, self.server, self.serving) as asked:
            own = {"model": asked.model, "temperature": self.temperature, "seed": self.seed}
            own |= {"elastic": self.subnet} if self.subnet else {}
            if wording is None and default_wording(await _serves_enhancer(asked.client)) is Wording.SUFFIX:
                return suffixed(prompt)

            async def ask(body: Mapping[str, Any]) -> Any:
                return await asked.client.chat({**body, **own})

            return await enhance(ask, prompt, *size)


async def _serves_enhancer(client: Client) -> bool:
    """As `is_enhancer`, of the model behind ``client``. Other servers than `stretto serve` do not say it."""
    try:
        return bool((await client.get("/api/info"))["is_enhancer"])
    except (ApiFailure, ValueError, KeyError, TypeError):
        return False


def enhance_command(prompt: str, size: tuple[int, int], writer: Writer, *, as_json: bool = False) -> None:
    """Print the enhanced ``prompt`` and the notes about replacements; or everything as JSON.

    Raises:
        UserError: As `Writer.enhanced`.
    """
    check_text(prompt, "prompt")
    readable(prompt)  # before a model is loaded
    enhanced = writer.enhanced(prompt, size)
    if as_json:
        result = {
            "prompt": enhanced.prompt,
            "fields": enhanced.fields,
            "notes": enhanced.notes,
            "writer": enhanced.writer,
            "subnet": enhanced.subnet,
        }
        print(json.dumps(result | {"ms": round(1e3 * enhanced.seconds)}, ensure_ascii=False))  # noqa: T201
        return
    print(enhanced.prompt)  # noqa: T201
    for note in (writer.says(enhanced), *enhanced.notes):
        say(note, style="dim")


def paint_command(
    request: PaintRequest,
    backend: str,
    writer: Writer,
    images: int,
    out: Path,
    device: str,
    verifier: str | None = None,
    *,
    as_is: bool = False,
    is_sized: bool = True,
) -> Version:
    """Paint ``request`` until a picture passes the checks, at most ``images`` times, and write the best picture to ``out``.

    Args:
        verifier: As in `open_verifier`.
        as_is: Send the prompt unchanged, in any language, and check nothing.
        is_sized: Whether the caller chose the size of the request. If not, a size in the prompt takes precedence.

    Raises:
        UserError: Invalid input, or a request that the backend does not support.
    """
    check_text(request.prompt, "prompt")
    ledger = Ledger() if as_is else readable(request.prompt)
    if out.is_dir():
        raise UserError(f"-o {out}: this is a folder; name a file in it")
    if ledger.size is not None and ledger.size != (request.width, request.height):
        if is_sized:
            asked = "x".join(map(str, ledger.size))
            raise UserError(
                f"--size {request.width}x{request.height}: the prompt asks for {asked}; remove one of the two"
            )
        request = replace(request, width=ledger.size[0], height=ledger.size[1])
    with open_verifier(verifier, backend) as judge, closing(open_backend(backend, device)) as painter:
        check_request(painter, request)
        order = replace(request, prompt=_written(writer, request.prompt, (request.width, request.height)))
        with progress("paint", 100) as advance:
            shown = 0

            def tell(done: float) -> None:
                nonlocal shown
                advance(round(100 * done) - shown)
                shown = round(100 * done)

            try:
                version = painted(ledger, order, painter, judge, images, tell)
                tell(1.0)  # also where an earlier picture passed
            except RuntimeError as error:  # the backend failed while it painted
                raise UserError(f"painting failed: {one_line(error)}") from error
    with replacing(out) as path:
        version.picture.save(path, format="PNG")
    say(f"{out}: {version.prompt}")
    if unchecked := "the picture was not checked" if as_is else version.verdict.unchecked:
        say(unchecked, style="dim")
    for fault in version.verdict.faults:
        say(f"after {version.num_images} pictures: {fault.says}", style="red")
    return version


def _written(writer: Writer, prompt: str, size: tuple[int, int]) -> str:
    """The prompt for the backend. Prints its author."""
    if not writer.is_there:
        return prompt
    enhanced = writer.enhanced(prompt, size)
    say(writer.says(enhanced), style="dim")
    return enhanced.prompt


@contextmanager
def open_verifier(named: str | None, backend: str) -> Iterator[Verifiers]:
    """Verifiers of words, and of the rest by a vision model at ``URL`` or ``MODEL@URL``. Raises `UserError`: no server answers.

    Only pictures of the renderer are checked for flat shapes on white: a ball that a model paints is no circle.
    """
    here: list[Verifier] = [ShapesVerifier(), TextVerifier()] if backend == "renderer" else [TextVerifier()]
    if named is None:
        yield Verifiers(*here)
        return
    with closing(EndpointVerifier(named)) as model:
        yield Verifiers(*here, model)


def open_backend(named: str, device: str) -> Backend:
    """The backend ``renderer``, ``diffusers:FOLDER`` or ``comfy:URL``.

    Raises `UserError`: unknown backend, no folder or address, or a package is missing.
    """
    kind, _, place = named.partition(":")
    if kind == "renderer" and place:
        raise UserError(f"--backend {named}: write renderer, without ':{place}'")
    if kind in _PLACES and not place:
        what, example = _PLACES[kind]
        raise UserError(f"--backend {kind}: needs {what}; write {kind}:{example}")
    if kind not in BACKENDS:
        known = "renderer, diffusers:FOLDER, comfy:http://127.0.0.1:8188"
        raise UserError(f"--backend {named}: unknown backend{nearest(kind, BACKENDS)}; one of {known}")
    if kind == "renderer":
        return Renderer()
    try:
        if kind == "comfy":
            from stretto.pictures.comfy import Comfy

            return Comfy(place)
        from stretto.pictures.diffusers import Diffusers
    except ModuleNotFoundError as error:
        raise UserError(f"--backend {named}: needs {error.name}; pip install 'stretto[pictures]'") from None
    return Diffusers(place, str(join(device).device))


def parse_lora(text: str) -> Lora:
    """The adapter ``NAME`` or ``NAME@WEIGHT``. Raises `UserError`: the weight is not a number."""
    name, _, weight = text.rpartition("@") if "@" in text else (text, "", "1")
    try:
        if not math.isfinite(number := float(weight)):
            raise ValueError
        return Lora(name, number)
    except ValueError:
        raise UserError(f"--lora {text}: {weight!r} is not a weight; write NAME or NAME@0.8") from None


def parse_control(text: str) -> Control:
    """The reference picture ``KIND=FILE``. Raises `UserError`: the kind is missing, or the file is not a picture."""
    kind, _, file = text.partition("=")
    if not kind or not file:
        raise UserError(f"--control {text}: kind or file is missing; write canny=reference.png")
    try:
        with Image.open(file) as image:
            return Control(kind, image.convert("RGB"))
    except (OSError, Image.DecompressionBombError) as error:
        problem = getattr(error, "strerror", None) or "not a picture that can be read"
        raise UserError(f"--control {text}: {file}: {problem}; name a PNG or JPEG file") from None


def studio_command(
    backend: str,
    size: tuple[int, int],
    images: int,
    writer: Writer,
    seed: int,
    out: Path | None,
    port: int,
    device: str,
    verifier: str | None = None,
) -> None:
    """Serve the studio on this machine until stopped.

    Raises:
        UserError: Invalid input, a port in use, or a folder that cannot be written or contains a conversation.
    """
    options = PaintOptions(width=size[0], height=size[1], images=images, seed=seed)
    with (
        nullcontext() if out is None else claimed(out),
        open_verifier(verifier, backend) as judge,
        closing(open_socket("127.0.0.1", port)) as listening,
        closing(open_backend(backend, device)) as painter,
    ):
        if out is not None and (out / CONVERSATION_FILE).exists():
            raise UserError(f"{out}: the folder contains a conversation; name another folder")
        check_request(painter, PaintRequest("a picture", *size, seed))

        def write(ledger: Ledger) -> str:
            return _written(writer, describe(ledger), ledger.size or size)

        studio = Studio(partial(respond, backend=painter, verifier=judge, options=options, write=write), out)
        say(f"http://127.0.0.1:{listening.getsockname()[1]}")
        uvicorn.Server(uvicorn.Config(create_studio(studio), log_level="warning")).run(sockets=[listening])
