"""``stretto distill``: a student that may be cut out of its own teacher, the run, and how near it came."""

from __future__ import annotations

from pathlib import Path

import rich
from rich.markup import escape

from stretto.apps.rl import rl_command
from stretto.apps.search import extract_command
from stretto.base.errors import UserError
from stretto.base.paths import checkpoint_folder
from stretto.post.distill import STAGE, gaps
from stretto.rl.recipe import RlRecipe
from stretto.rl.run import Result, has_begun
from stretto.rl.teachers import check_teachers

STUDENT = "student"
"""In the run's folder: a student that was cut out for it."""


def distill_command(
    recipe: RlRecipe,
    folder: Path,
    model: Path | None,
    *,
    subnet: str | None = None,
    resume: bool = False,
    device: str = "auto",
    wandb_project: str | None = None,
) -> Result:
    """Run ``recipe`` in ``folder`` from ``model``, or from its ``subnet``, which is cut out first.

    Raises:
        UserError: bad input, or a run that cannot go on.
    """
    if recipe.distill is None:
        raise UserError("recipe: distill: missing; name teachers in [distill.teachers], or with --teacher NAME=DIR")
    if subnet is not None and model is None:
        raise UserError("--subnet: of no network; name the one that it is cut out of with --model")
    if model is None and not resume and recipe.start is None:
        raise UserError("--model: missing; name the run or checkpoint that is to learn")
    if model is not None and subnet is None:
        check_teachers(recipe, checkpoint_folder(model))
    elif model is not None and subnet is not None and not has_begun(folder, resume):
        extract_command(model, subnet, folder / STUDENT, device)
    student = folder / STUDENT if subnet is not None else model
    result = rl_command(recipe, folder, student, resume=resume, device=device, wandb_project=wandb_project, stage=STAGE)
    for each in gaps(folder, recipe.distill):
        said = f"{each.source}: KL to {each.teacher} {each.first_kl:.3g} → {each.last_kl:.3g} nats a token"
        rich.print(escape(f"{said}, {each.share:.0%} of the gradient"))
    return result
