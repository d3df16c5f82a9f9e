"""`stretto judge`: the commands of local judges of writing. They import their stages late, so that `stretto --help` needs no torch"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stretto.base.errors import UserError
from stretto.cli.options import Device

judge = typer.Typer(
    help="A local judge of writing: train one, say how far to trust one, serve it.", no_args_is_help=True
)

Books = Annotated[
    list[Path],
    typer.Option(help="Books: JSONL, CSV or Parquet with text and author, or a folder of them.", show_default=False),
]
Passages = Annotated[int, typer.Option(min=1, help="Passages of the books.")]
Seed = Annotated[int, typer.Option(help="Of all draws.")]


@judge.command()
def train(
    model: Annotated[Path, typer.Argument(help="Run or checkpoint whose hidden states are read.", show_default=False)],
    data: Books,
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder to write.")],
    part: Annotated[
        str, typer.Option(help="Authors to learn from: reward or evaluation. The judge that rewards never evaluates.")
    ] = "reward",
    passages: Passages = 1000,
    seed: Seed = 0,
    device: Device = "auto",
) -> None:
    """Train a judge: passages of books against damaged ones, by what a network makes of them."""
    from stretto.api.judge import train_command

    if part not in ("reward", "evaluation"):
        raise UserError(f"--part {part}: unknown; use reward or evaluation")
    train_command(model, data, out, "reward" if part == "reward" else "evaluation", passages, seed, device)


@judge.command()
def calibrate(
    judge: Annotated[str, typer.Argument(help="A judge's folder, or an address: http://…/v1.", show_default=False)],
    data: Books,
    passages: Passages = 100,
    name: Annotated[str | None, typer.Option(help="Of the model at the address; the first there if left out.")] = None,
    seed: Seed = 0,
    device: Device = "auto",
) -> None:
    """How far to trust a judge: six damages, layout, length, the order, and a text against itself."""
    from stretto.api.judge import calibrate_command

    calibrate_command(judge, data, passages, name, seed, device)


@judge.command()
def serve(
    judge: Annotated[Path, typer.Argument(help="A judge's folder.", show_default=False)],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any free one.")] = 8100,
    device: Device = "auto",
) -> None:
    """Serve a local judge to recipes and evaluations, at an OpenAI-compatible address."""
    from stretto.api.judge import serve_command

    serve_command(judge, host, port, device)
