"""The commands of local judges of writing. They import their stages late."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from stretto.base.errors import UserError
from stretto.cli.options import Device

judge = typer.Typer(
    help="Local detector of damaged text (no measure of quality): train, calibrate, serve.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Books = Annotated[
    list[Path],
    Option(help="Books: JSONL, CSV or Parquet with text and author, or a folder of them.", show_default=False),
]
Passages = Annotated[int, Option(min=1, help="Number of passages from the books.")]
Seed = Annotated[int, Option(help="Random seed.")]


@judge.command()
def train(
    model: Annotated[Path, Argument(help="Run or checkpoint whose hidden states are used.", show_default=False)],
    data: Books,
    out: Annotated[Path, Option("-o", "--out", help="Folder to write.")],
    part: Annotated[
        str,
        Option(help="Authors to learn from: reward or evaluation. A judge that rewards must not evaluate."),
    ] = "reward",
    passages: Passages = 1000,
    seed: Seed = 0,
    device: Device = "auto",
) -> None:
    """Train a detector that tells passages of books from perturbed copies, on a network's hidden states.

    Reads a checkpoint and books; writes a judge folder. The scores do not follow readers' ratings of stories: use an LLM judge to improve
    or compare writing.
    """
    from stretto.api.judge import train_command

    if part not in ("reward", "evaluation"):
        raise UserError(f"--part {part}: unknown; use reward or evaluation")
    train_command(model, data, out, "reward" if part == "reward" else "evaluation", passages, seed, device)


@judge.command()
def calibrate(
    judge: Annotated[str, Argument(help="Judge folder, or URL of an API: http://…/v1.", show_default=False)],
    data: Books,
    passages: Passages = 100,
    name: Annotated[str | None, Option(help="Name of the model at the URL. Default: the first one it lists.")] = None,
    seed: Seed = 0,
    device: Device = "auto",
) -> None:
    """Measure how reliable a judge is: six perturbations, layout, length, order of the pair, identical texts."""
    from stretto.api.judge import calibrate_command

    calibrate_command(judge, data, passages, name, seed, device)


@judge.command()
def serve(
    judge: Annotated[Path, Argument(help="Judge folder.", show_default=False)],
    host: Annotated[str, Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, Option(help="Port; 0: any free port.")] = 8100,
    device: Device = "auto",
) -> None:
    """Serve a detector of damaged text to recipes and evaluations at an OpenAI-compatible URL."""
    from stretto.api.judge import serve_command

    serve_command(judge, host, port, device)
