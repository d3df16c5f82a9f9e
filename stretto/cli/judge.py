"""The commands of local judges of writing. They import their stages late."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Option

from stretto.base.errors import UserError
from stretto.cli.options import Command, Device, Out

judge = typer.Typer(
    help="Local judge of text, trained on damaged passages or on readers' ratings: train, calibrate, serve.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Books = Annotated[
    list[Path],
    Option(help="Books: JSONL, CSV or Parquet with text and author, or a folder of them.", show_default=False),
]
Passages = Annotated[int, Option(min=1, help="Number of passages to take from the books.")]
Seed = Annotated[int, Option(help="Random seed.")]


@judge.command(cls=Command)
def train(
    model: Path,
    out: Out,
    data: Books = [],
    rated: Path | None = None,
    part: str = "reward",
    passages: Passages = 1000,
    seed: Seed = 0,
    device: Device = "auto",
) -> None:
    """Train a judge on a network's hidden states.

    With --data, a detector that tells passages of books from perturbed copies; its scores do not follow readers' ratings. With --rated, a
    model of the ratings, for texts like those; the judge records its correlation on held-out authors, beside length and compression.

    Args:
        model: Run or checkpoint whose hidden states are used.
        out: Folder to write.
        rated: Instead of --data: texts with readers' ratings (text, author, rating) in JSONL, CSV or Parquet.
        part: Authors to learn from: reward or evaluation. A judge that rewards must not evaluate.
    """
    from stretto.api.judge import train_command, train_on_ratings

    if bool(data) == (rated is not None):
        raise UserError("judge train: needs either --data, books to perturb, or --rated, texts with readers' ratings")
    if part not in ("reward", "evaluation"):
        raise UserError(f"--part {part}: unknown; use reward or evaluation")
    kind: Literal["reward", "evaluation"] = "reward" if part == "reward" else "evaluation"
    if rated is not None:
        train_on_ratings(model, rated, out, kind, device)
    else:
        train_command(model, data, out, kind, passages, seed, device)


@judge.command(cls=Command)
def calibrate(
    judge: str,
    data: Books,
    passages: Passages = 100,
    name: str | None = None,
    seed: Seed = 0,
    device: Device = "auto",
) -> None:
    """Measure how reliable a judge is: six perturbations, layout, length, order of the pair, identical texts.

    Args:
        judge: Judge folder, or URL of an API: http://…/v1.
        name: Name of the model at the URL. Default: the first one it lists.
    """
    from stretto.api.judge import calibrate_command

    calibrate_command(judge, data, passages, name, seed, device)


@judge.command(cls=Command)
def serve(
    judge: Path, host: str = "127.0.0.1", port: int = 8100, allowed_host: list[str] = [], device: Device = "auto"
) -> None:
    """Serve a local judge (a detector of damaged text, or a model of ratings) at an OpenAI-compatible URL.

    Args:
        judge: Judge folder.
        host: Address to listen on.
        port: Port; 0: any free port.
        allowed_host: Host name to answer, beside localhost. Default: with a loopback --host only localhost, else any name.
    """
    from stretto.api.judge import serve_command

    serve_command(judge, host, port, allowed_host, device)
