"""The commands of reinforcement learning. They import their stages late."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

import stretto
from stretto.cli.options import Recipe, Resume, RunOut, Settings, Start, Wandb

RlDevice = Annotated[
    str,
    Option(help="Device: cpu, auto, or cuda (all GPUs: the trainer takes the first, the engines share the others)."),
]


def rl(
    recipe: Recipe,
    model: Start = None,
    out: RunOut = None,
    runtime: Annotated[str | None, Option(help="local or ray; short for --set runtime.kind.")] = None,
    address: Annotated[str | None, Option(help="Address of the Ray cluster; short for --set runtime.address.")] = None,
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
    from stretto.model.headers import check_files

    settings = overriding(settings, {"runtime.kind": runtime, "runtime.address": address})
    read_recipe(recipe, RlRecipe, settings)  # before torch is imported, which takes seconds
    if model is not None:
        check_files(model)
    stretto.rl(recipe, model, out, settings=settings, resume=resume, device=device, wandb=wandb)


def top(
    run: Annotated[Path, Argument(help="Run folder of stretto rl.", show_default=False)],
    once: Annotated[bool, Option("--once", help="Print the state once and return.")] = False,
) -> None:
    """Monitor an RL run: throughput, queue lengths, and the component that limits it."""
    from stretto.report.top import top_command

    top_command(run, once)
