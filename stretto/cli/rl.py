"""The commands of reinforcement learning. They import their stages late, so that ``stretto --help`` needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stretto.cli.options import Recipe, Resume, RunOut, Wandb


def rl(
    recipe: Recipe,
    model: Annotated[
        Path | None, typer.Option(help="Run or checkpoint to begin with; without it, the recipe's own start.")
    ] = None,
    out: RunOut = None,
    runtime: Annotated[str | None, typer.Option(help="local or ray; --set runtime.kind.")] = None,
    address: Annotated[str | None, typer.Option(help="Of the Ray cluster; --set runtime.address.")] = None,
    settings: Annotated[list[str], typer.Option("--set", help="Override one recipe key: staleness=4.")] = [],  # noqa: B006
    resume: Resume = False,
    device: Annotated[
        str,
        typer.Option(
            help="cpu, cuda (every GPU there is: of several the trainer has the first, engines share the others) or auto."
        ),
    ] = "auto",
    wandb: Wandb = None,
) -> None:
    """Train a policy with reinforcement learning: engines, agents, verifiers and a trainer, all at once."""
    from stretto.base.config import read_recipe
    from stretto.learning.recipe import RlRecipe

    chosen = {"runtime.kind": runtime, "runtime.address": address}
    flags = [f"{key}={value}" for key, value in chosen.items() if value is not None]
    parsed = read_recipe(recipe, RlRecipe, [*settings, *flags])
    from stretto.api.rl import rl_command

    rl_command(parsed, out or Path("runs") / recipe.stem, model, resume=resume, device=device, wandb_project=wandb)


def top(
    run: Annotated[Path, typer.Argument(help="A run folder of stretto rl.", show_default=False)],
    once: Annotated[bool, typer.Option("--once", help="Print it as it is and return.")] = False,
) -> None:
    """Watch a reinforcement-learning run: who works, who waits, and for whom."""
    from stretto.report.top import top_command

    top_command(run, once)
