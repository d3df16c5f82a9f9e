"""The commands for pictures. They import what they need late, so that ``stretto --help`` needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stretto.cli.options import Device
from stretto.cli.serve import Model, ServedDtype, ServedSubnet, Server, Temperature

Prompt = Annotated[str, typer.Argument(help="What is asked for, in English.", show_default=False)]
Size = Annotated[str, typer.Option(help="Width and height in pixels.")]
Backend = Annotated[str, typer.Option(help="renderer (exact, shapes only), diffusers:FOLDER, or comfy:URL.")]
Verifier = Annotated[
    str | None,
    typer.Option(
        help="URL or MODEL@URL of a chat API that takes pictures: it judges what is neither shapes nor words."
    ),
]


def enhance(
    prompt: Prompt,
    size: Size = "1024x1024",
    model: Model = None,
    server: Server = None,
    subnet: ServedSubnet = None,
    as_json: Annotated[bool, typer.Option("--json", help="Fields, what was put right and the time as well.")] = False,
    temperature: Temperature = 0.0,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    device: Device = "auto",
    dtype: ServedDtype = None,
) -> None:
    """Write a request for a picture out as a prompt: nothing asked for is lost, style, light and camera are added."""
    from stretto.api.pictures import Writer, enhance_command, parse_size
    from stretto.api.serve import ServeOptions

    serving = ServeOptions(device=device, dtype=dtype, max_batch=1)
    writer = Writer(model, server, subnet, temperature, seed, serving)
    enhance_command(prompt, parse_size(size), writer, as_json=as_json)


def paint(
    prompt: Prompt,
    backend: Backend = "renderer",
    size: Annotated[
        str | None,
        typer.Option(
            help="Width and height in pixels: 1024x1024. Default: the prompt's, or 512x512.", show_default=False
        ),
    ] = None,
    out: Annotated[Path, typer.Option("-o", "--out", help="PNG to write.")] = Path("picture.png"),
    images: Annotated[
        int, typer.Option(min=1, help="Pictures at most, until one shows what was asked and can be checked.")
    ] = 1,
    verifier: Verifier = None,
    lora: Annotated[list[str], typer.Option(help="Adapter: NAME or NAME@WEIGHT.", show_default=False)] = [],  # noqa: B006
    control: Annotated[
        list[str], typer.Option(help="Picture that steers: canny=reference.png.", show_default=False)
    ] = [],  # noqa: B006
    negative: Annotated[str, typer.Option(help="What is to be avoided.")] = "",
    steps: Annotated[int | None, typer.Option(min=1, help="Of sampling; the backend's own by default.")] = None,
    guidance: Annotated[float | None, typer.Option(help="The same.")] = None,
    as_is: Annotated[
        bool, typer.Option("--as-is", help="Do not read the prompt: any language, and nothing is checked.")
    ] = False,
    model: Model = None,
    server: Server = None,
    subnet: ServedSubnet = None,
    seed: Annotated[int, typer.Option(help="Of the first picture; the next have the next.")] = 0,
    device: Device = "auto",
    dtype: ServedDtype = None,
) -> None:
    """Paint a picture; with --model or --server the request is written out first, as by `stretto enhance`."""
    from stretto.api.pictures import Writer, paint_command, parse_control, parse_lora, parse_size
    from stretto.api.serve import ServeOptions
    from stretto.base.errors import UserError
    from stretto.pictures.backend import PaintRequest

    if as_is and (model is not None or server is not None):
        raise UserError("--as-is: a prompt that is not read cannot be written out; leave --model and --server away")
    if as_is and verifier is not None:
        raise UserError("--as-is: a prompt that is not read cannot be checked; leave --verifier away")
    width, height = parse_size(size or "512x512")
    loras, controls = tuple(map(parse_lora, lora)), tuple(map(parse_control, control))
    request = PaintRequest(prompt, width, height, seed, negative, steps, guidance, loras, controls)
    writer = Writer(model, server, subnet, serving=ServeOptions(device=device, dtype=dtype, max_batch=1))
    paint_command(request, backend, writer, images, out, device, verifier, as_is=as_is, is_sized=size is not None)


def studio(
    backend: Backend = "renderer",
    size: Size = "512x512",
    images: Annotated[int, typer.Option(min=1, help="Pictures a turn, at most, until one shows what was asked.")] = 4,
    verifier: Verifier = None,
    server: Server = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Folder for every version and the conversation.")
    ] = None,
    port: Annotated[int, typer.Option(help="0: any free one.")] = 8010,
    seed: Annotated[int, typer.Option(help="Of the first picture of a turn.")] = 0,
    device: Device = "auto",
) -> None:
    """Talk about a picture on a page: what was said, what must be there, versions side by side, undo."""
    from stretto.api.pictures import parse_size, studio_command

    studio_command(backend, parse_size(size), images, server, seed, out, port, device, verifier)
