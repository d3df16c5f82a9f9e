"""The commands of reinforcement learning. They import their stages late."""

from __future__ import annotations

from pathlib import Path

import stretto
from stretto.cli.options import Recipe, Resume, RunOut, Settings, Start, Wandb


def rl(
    recipe: Recipe,
    model: Start = None,
    out: RunOut = None,
    runtime: str | None = None,
    address: str | None = None,
    settings: Settings = [],
    resume: Resume = False,
    device: str = "auto",
    wandb: Wandb = None,
) -> None:
    """Train a policy with reinforcement learning: engines, agents, verifiers and a trainer run asynchronously.

    Reads a recipe; writes a run folder with metrics, snapshots, an execution trace, a report and a checkpoint.

    Args:
        runtime: Runtime: local (this machine) or ray (a Ray cluster); short for --set runtime.kind. Default: the recipe's.
        address: Address of the Ray cluster; short for --set runtime.address.
        device: Device: cpu, auto, or cuda (all GPUs: the trainer takes the first, the engines share the others).
    """
    from stretto.base.config import overriding, read_recipe
    from stretto.learning.recipe import RlRecipe
    from stretto.model.headers import check_files

    settings = overriding(settings, {"runtime.kind": runtime, "runtime.address": address})
    read_recipe(recipe, RlRecipe, settings)  # before torch is imported, which takes seconds
    if model is not None:
        check_files(model)
    stretto.rl(recipe, model, out, settings=settings, resume=resume, device=device, wandb=wandb)


def top(run: Path, once: bool = False) -> None:
    """Monitor an RL run: throughput, queue lengths, and the component that limits it.

    Args:
        run: Run folder of stretto rl.
        once: Print the state once and return.
    """
    from stretto.report.top import top_command

    top_command(run, once)
