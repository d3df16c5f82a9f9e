"""``stretto online``: reinforcement learning on what a judge has to judge, and what holds the policy meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import rich
from rich.markup import escape

from stretto.apps.rl import rl_command
from stretto.base.errors import UserError
from stretto.base.paths import checkpoint_folder
from stretto.rl.recipe import DistillConfig, RlRecipe, TeacherConfig
from stretto.rl.run import Result, start_of
from stretto.tasks.registry import source_kind

STAGE = "online"


def online_command(
    recipe: RlRecipe,
    folder: Path,
    model: Path | None,
    *,
    self_teacher: bool = False,
    resume: bool = False,
    device: str = "auto",
    wandb_project: str | None = None,
) -> Result:
    """Run ``recipe`` in ``folder`` from ``model``; with ``self_teacher`` the start teaches all verifiable sources too.

    Raises:
        UserError: bad input, or a run that cannot go on.
    """
    is_verifiable = {name: source_kind(name, each.kind).is_verifiable for name, each in recipe.sources.items()}
    judged, verifiable = ([name for name, each in is_verifiable.items() if each is kind] for kind in (False, True))
    if not judged and not recipe.rewards:
        raise UserError("recipe: sources: none is judged, and there is no [rewards]; add one, or use stretto rl")
    start = checkpoint_folder(model) if model is not None else start_of(folder) if resume else None
    if start is None and recipe.start is None:
        raise UserError("--model: missing; name the run or checkpoint that is to learn")
    if self_teacher:
        if not verifiable or start is None or recipe.distill is not None:
            raise UserError("--self-teacher: wants --model, a verifiable source and a recipe without [distill]")
        recipe = self_taught(recipe, start, verifiable, judged)
    held = [f"a KL of weight {recipe.loss.kl_weight:g} to the start"] if recipe.loss.kl_weight else []
    held += [f"{', '.join(verifiable)}, which can be verified"] if verifiable else []
    held += [f"the teachers {', '.join(recipe.distill.teachers)}"] if recipe.distill else []
    said = " and ".join(held) or "nothing: what pleases the judge is all that is left in the end; set loss.kl_weight"
    rich.print(escape(f"judged: {', '.join(judged) or 'nothing'}; the policy is held by {said}"))
    return rl_command(recipe, folder, start, resume=resume, device=device, wandb_project=wandb_project, stage=STAGE)


def self_taught(recipe: RlRecipe, start: Path, verifiable: Sequence[str], judged: Sequence[str]) -> RlRecipe:
    """``recipe`` with ``start`` as the teacher of its ``verifiable`` sources; those that are ``judged`` have their reward alone."""
    teacher = TeacherConfig(checkpoint=str(start.resolve()), domains=tuple(verifiable))
    told = DistillConfig(teachers={"start": teacher}, untaught=tuple(judged), outcome_weight=1.0, kl_floor=0.0)
    return recipe.replace(distill=told)
