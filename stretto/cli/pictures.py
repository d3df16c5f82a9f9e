"""The commands for pictures. They import what they need late."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from stretto.cli.options import Device, OptionalOut, Out, check_ending
from stretto.cli.serve import Model, PromptWriter, ServedDtype, ServedSubnet, Server, Temperature

Prompt = Annotated[str, Argument(help="Description of the picture, in English.", show_default=False)]
Size = Annotated[str, Option(help="Width and height in pixels.")]
Backend = Annotated[str, Option(help="Image generator: renderer (exact, shapes only), diffusers:FOLDER, or comfy:URL.")]
Verifier = Annotated[
    str | None,
    Option(help="URL, or MODEL@URL, of a chat API that accepts pictures; it checks everything but shapes and words."),
]


def enhance(
    prompt: Prompt,
    size: Size = "1024x1024",
    model: Model = None,
    server: Server = None,
    writer: PromptWriter = None,
    subnet: ServedSubnet = None,
    as_json: Annotated[bool, Option("--json")] = False,
    temperature: Temperature = 0.0,
    seed: int = 0,
    device: Device = "auto",
    dtype: ServedDtype = None,
) -> None:
    """Expand a request for a picture into a prompt that keeps everything requested: with neutral fixed phrases, or a model's words.

    Reads the request, and the language model of --model or --server where it writes; prints the prompt.

    Args:
        as_json: Print fields, corrections and seconds as JSON instead of the prompt.
        seed: Random seed of the sampling.
    """
    from stretto.api.pictures import Writer, enhance_command, parse_size
    from stretto.api.serve import ServeOptions
    from stretto.pictures.enhance import Wording

    serving = ServeOptions(device=device, dtype=dtype, max_batch=1)
    author = Writer(model, server, subnet, temperature, seed, serving, Wording.of(writer))
    enhance_command(prompt, parse_size(size), author, as_json=as_json)


def paint(
    prompt: Prompt,
    backend: Backend = "renderer",
    size: str | None = None,
    out: Out = Path("picture.png"),
    images: Annotated[int, Option(min=1)] = 1,
    verifier: Verifier = None,
    lora: list[str] = [],
    control: list[str] = [],
    negative: str = "",
    steps: Annotated[int | None, Option(min=1)] = None,
    guidance: float | None = None,
    as_is: bool = False,
    model: Model = None,
    server: Server = None,
    writer: PromptWriter = None,
    subnet: ServedSubnet = None,
    seed: int = 0,
    device: Device = "auto",
    dtype: ServedDtype = None,
) -> None:
    """Paint a picture and check it against the request; --model, --server or --writer expands the request first.

    Reads the request; writes a PNG file.

    Args:
        size: Width and height in pixels: 1024x1024. Default: the prompt's, or 512x512.
        out: File to write (.png).
        images: Largest number of pictures to try until one passes the checks.
        lora: Adapter: NAME or NAME@WEIGHT.
        control: Control picture, KIND=FILE: canny=reference.png.
        negative: Negative prompt.
        steps: Number of sampling steps. Default: the backend's own.
        guidance: Guidance scale. Default: the backend's own.
        as_is: Send the prompt unchanged, in any language, and check nothing.
        seed: Random seed of the first picture; later ones count up.
    """
    check_ending(out, ".png")
    from stretto.api.pictures import Writer, paint_command, parse_control, parse_lora, parse_size
    from stretto.api.serve import ServeOptions
    from stretto.base.errors import UserError
    from stretto.pictures.backend import PaintRequest
    from stretto.pictures.enhance import Wording

    author = Writer(
        model, server, subnet, serving=ServeOptions(device=device, dtype=dtype, max_batch=1), wording=Wording.of(writer)
    )
    if as_is and author.is_there:
        raise UserError(
            "--as-is: a prompt that is not read cannot be expanded; leave --model, --server and --writer out"
        )
    if as_is and verifier is not None:
        raise UserError("--as-is: a prompt that is not read cannot be checked; leave --verifier away")
    width, height = parse_size(size or "512x512")
    loras, controls = tuple(map(parse_lora, lora)), tuple(map(parse_control, control))
    request = PaintRequest(prompt, width, height, seed, negative, steps, guidance, loras, controls)
    paint_command(request, backend, author, images, out, device, verifier, as_is=as_is, is_sized=size is not None)


def studio(
    backend: Backend = "renderer",
    size: Size = "512x512",
    images: Annotated[int, Option(min=1)] = 4,
    verifier: Verifier = None,
    server: str | None = None,
    writer: PromptWriter = None,
    out: OptionalOut = None,
    port: int = 8010,
    seed: int = 0,
    device: Device = "auto",
) -> None:
    """Open a web page for a conversation about a picture: requirements, versions side by side, undo.

    Args:
        images: Largest number of pictures to try per turn until one passes the checks.
        server: URL of a running server whose model words the prompts.
        out: Folder to write every version and the conversation to.
        port: Port; 0: any free port.
        seed: Random seed of the first picture of a turn.
    """
    from stretto.api.pictures import Writer, parse_size, studio_command
    from stretto.pictures.enhance import Wording

    author = Writer(server=server, wording=Wording.of(writer))
    studio_command(backend, parse_size(size), images, author, seed, out, port, device, verifier)
