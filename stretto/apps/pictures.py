"""`stretto enhance` and `stretto paint`: requests written out as prompts, and painted."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import httpx
import rich
from rich.markup import escape

from stretto.apps.agent import endpoint
from stretto.apps.serve import ServeOptions, check_text
from stretto.base.errors import UserError
from stretto.pictures.enhance import Enhanced, enhance, readable
from stretto.serve.client import ApiFailure

_SIZE = re.compile(r"(\d{1,5})[x×](\d{1,5})")


def parse_size(text: str) -> tuple[int, int]:
    """Width and height of ``1024x768``. Raises `UserError`: it is none."""
    found = _SIZE.fullmatch(text.strip().lower())
    if found is None or 0 in (size := (int(found[1]), int(found[2]))):
        raise UserError(f"--size: {text!r} is no width and height in pixels; write 1024x1024")
    return size


def enhance_command(
    prompt: str,
    size: tuple[int, int],
    model: Path | None,
    server: str | None,
    subnet: str | None,
    *,
    as_json: bool = False,
    temperature: float = 0.0,
    seed: int = 0,
    serving: ServeOptions | None = None,
) -> None:
    """Print the prompt that ``prompt`` was written out as; what was put right on standard error, or all of it as JSON.

    Raises:
        UserError: bad input, or a server that refuses or does not answer.
    """
    check_text(prompt, "prompt")
    readable(prompt)  # before a model is loaded
    if (model is None) == (server is None):
        raise UserError("stretto enhance: name either --model FOLDER or --server URL")
    made = asyncio.run(_enhanced(prompt, size, model, server, subnet, temperature, seed, serving or ServeOptions()))
    if as_json:
        told = {"prompt": made.prompt, "fields": made.fields, "notes": made.notes, "subnet": made.subnet}
        print(json.dumps(told | {"ms": round(1e3 * made.seconds)}, ensure_ascii=False))  # noqa: T201
        return
    print(made.prompt)  # noqa: T201
    for note in made.notes:
        rich.get_console().print(escape(note), style="dim")


async def _enhanced(
    prompt: str,
    size: tuple[int, int],
    model: Path | None,
    server: str | None,
    subnet: str | None,
    temperature: float,
    seed: int,
    serving: ServeOptions,
) -> Enhanced:
    try:
        async with endpoint(model, server, serving) as asked:

            async def ask(body: object) -> object:
                assert isinstance(body, dict)
                return await asked.client.post("/v1/chat/completions", {"model": asked.model, **body})

            return await enhance(ask, prompt, *size, size=subnet, temperature=temperature, seed=seed)
    except httpx.TransportError as error:
        problem = f"nobody answers there ({type(error).__name__}); check the address"
        raise UserError(f"--server {server}: {problem}") from None
    except ApiFailure as failure:
        raise UserError(f"{model or server}: {failure.message}; see docs/PICTURES.md") from None
