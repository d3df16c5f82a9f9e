"""The commands of post-training. They import their stages late, so that ``stretto --help`` needs no torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

Recipe = Annotated[Path, typer.Argument(help="A recipe (TOML).", show_default=False)]
Settings = Annotated[list[str], typer.Option("--set", help="Override one recipe key: train.steps=100.")]
RunOut = Annotated[Path | None, typer.Option("-o", "--out", help="Run folder; runs/ and the recipe's name by default.")]


def sft(recipe: Recipe, out: RunOut = None, settings: Settings = []) -> None:  # noqa: B006 - typer reads it once
    """Train the start of a reinforcement-learning recipe on its sources' own answers."""
    from stretto.base.config import read_recipe
    from stretto.rl.recipe import RlRecipe

    parsed = read_recipe(recipe, RlRecipe, settings)
    from stretto.apps.rl import made_start

    sys.stdout.write(f"checkpoint: {made_start(parsed, out or Path('runs') / recipe.stem)}\n")
