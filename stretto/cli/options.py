"""Arguments and options that several commands share, and lines that several commands print."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

Recipe = Annotated[
    Path, typer.Argument(help="Recipe: a TOML file, or the name of a shipped recipe.", show_default=False)
]
Source = Annotated[Path, typer.Argument(help="Run or checkpoint folder.", show_default=False)]
RunFolder = Annotated[Path, typer.Argument(help="Run folder.", show_default=False)]
RunOut = Annotated[
    Path | None, typer.Option("-o", "--out", help="Run folder to write. Default: runs/ and the name of the recipe.")
]
Settings = Annotated[list[str], typer.Option("--set", help="Override of one recipe key, for example train.steps=100.")]
Steps = Annotated[int | None, typer.Option(help="Number of training steps; short for --set train.steps=N.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue from the newest snapshot.")]
Force = Annotated[bool, typer.Option("--force", help="Replace what the output folder or file holds.")]
Device = Annotated[str, typer.Option(help="Device: cpu, cuda or auto.")]
Wandb = Annotated[str | None, typer.Option(help="W&B project to log to, beside TensorBoard.")]
Data = Annotated[
    list[str],
    typer.Option(
        help="Text: a file, a folder of text, code, JSONL, CSV or Parquet, or a Hugging Face dataset. Repeat the option for a "
        "mixture: PATH@WEIGHT.",
        show_default=False,
    ),
]
Val = Annotated[
    str | None, typer.Option(help="Held-out text, in the same forms as --data. Default: a part of the data.")
]
ValFraction = Annotated[
    float | None, typer.Option(help="Share of the data to hold out, 0 to 0.5. Default: 0.01, up to 0.1 of little text.")
]
TextField = Annotated[str, typer.Option(help="Field that holds the text in JSONL, CSV, Parquet and datasets.")]


def say(text: str) -> None:
    """Print ``text`` on the first rank; under torchrun the other ranks would repeat it."""
    if os.environ.get("RANK", "0") == "0":
        sys.stdout.write(text + "\n")
