"""The commands for pictures. They import what they need late, so that ``stretto --help`` needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stretto.apps.cli_serve import ServedDtype, ServedSubnet, Temperature
from stretto.apps.options import Device

Prompt = Annotated[str, typer.Argument(help="What is asked for, in English.", show_default=False)]
Size = Annotated[str, typer.Option(help="Width and height in pixels.")]
Model = Annotated[Path | None, typer.Option(help="A run or a checkpoint, served in this process.")]
Server = Annotated[str | None, typer.Option(help="Address of a running server instead; its chat API is asked.")]


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
    from stretto.apps.pictures import enhance_command, parse_size
    from stretto.apps.serve import ServeOptions

    serving = ServeOptions(device=device, dtype=dtype, max_batch=1)
    pixels = parse_size(size)
    enhance_command(
        prompt, pixels, model, server, subnet, as_json=as_json, temperature=temperature, seed=seed, serving=serving
    )
