"""The commands of reinforcement learning. They import their stages late."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stretto.cli.options import Recipe, Resume, RunOut, Settings, Wandb

RlDevice = Annotated[
    str,
    typer.Option(
        help="Device: cpu, auto, or cuda (all GPUs: the trainer takes the first, the engines share the others)."
    ),
]


def rl(
    recipe: Recipe,
    model: Annotated[
        Path | None, typer.Option(help="Run or checkpoint to begin with. Default: the recipe's [start].")
    ] = None,
    out: RunOut = None,
    runtime: Annotated[str | None, typer.Option(help="local or ray; short for --set runtime.kind.")] = None,
    address: Annotated[
        str | None, typer.Option(help="Address of the Ray cluster; short for --set runtime.address.")
    ] = None,
    settings: Settings = [],  # noqa: B006 - typer reads it once
    resume: Resume = False,
    device: RlDevice = "auto",
    wandb: Wandb = None,
) -> None:
    """Train a policy with reinforcement learning: engines, agents, verifiers and a trainer run asynchronously.

    Reads a recipe; writes a run folder with metrics, snapshots, an execution trace, a report and a checkpoint.
    """
    from stretto.base.config import overriding, read_recipe
    from stretto.learning.recipe import RlRecipe

    parsed = read_recipe(recipe, RlRecipe, overriding(settings, {"runtime.kind": runtime, "runtime.address": address}))
    from stretto.api import post

    post.rl(parsed, model, out or Path("runs") / recipe.stem, resume=resume, device=device, wandb=wandb)


def top(
    run: Annotated[Path, typer.Argument(help="Run folder of stretto rl.", show_default=False)],
    once: Annotated[bool, typer.Option("--once", help="Print the state once and return.")] = False,
) -> None:
    """Monitor an RL run: throughput, queue lengths, and the component that limits it."""
    from stretto.report.top import top_command

    top_command(run, once)
