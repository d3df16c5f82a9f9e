"""Arguments and options that several commands have, worded once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Recipe = Annotated[Path, typer.Argument(help="A recipe (TOML).", show_default=False)]
RunOut = Annotated[Path | None, typer.Option("-o", "--out", help="Run folder; runs/ and the recipe's name by default.")]
Settings = Annotated[list[str], typer.Option("--set", help="Override one recipe key: train.steps=100.")]
Steps = Annotated[int | None, typer.Option(help="Shorthand for --set train.steps.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the newest snapshot.")]
Device = Annotated[str, typer.Option(help="cpu, cuda or auto.")]
Wandb = Annotated[str | None, typer.Option(help="Log to this W&B project too.")]
