"""``stretto rl``: a start if none is given, then the run, then where to look at it."""

from __future__ import annotations

from pathlib import Path

import rich

from stretto.base.errors import UserError
from stretto.base.paths import checkpoint_folder
from stretto.base.track import progress
from stretto.report.rl import report_rl_run
from stretto.rl.algorithms import load_algorithm
from stretto.rl.launch import Job
from stretto.rl.recipe import START, RlRecipe
from stretto.rl.run import Result, has_begun, run_rl, start_of


def rl_command(
    recipe: RlRecipe,
    folder: Path,
    model: Path | None,
    *,
    resume: bool = False,
    device: str = "auto",
    wandb_project: str | None = None,
    stage: str = "rl",
) -> Result:
    """Run ``recipe`` in ``folder``, from ``model`` or from the start that the recipe describes, as a stage of that name.

    Raises:
        UserError: bad input, or a run that cannot go on.
    """
    console = rich.get_console()
    load_algorithm(recipe.loss.advantage)  # whoever has none is to hear of it before anything is written
    if resume and not folder.is_dir():
        raise UserError(f"{folder}: --resume: there is no such run; start it without --resume")
    has_begun(folder, resume)
    start = checkpoint_folder(model) if model is not None else (start_of(folder) if resume else None)
    if start is None or (recipe.start is not None and recipe.start.model is None):
        start = made_start(recipe, folder, start, device)
    devices = _devices(device)
    job = Job(recipe, folder, start, resume, devices, wandb_project, stage)
    with progress(stage, recipe.train.steps) as advance:
        result = run_rl(job, advance, lambda text: console.print(text))
    console.print(
        f"held-out reward {result.first_reward:.3f} → {result.last_reward:.3f}, "
        f"{result.moved:.3g} nats a token (KL) from its start\ncheckpoint: {result.checkpoint}\n"
        f"who was busy when: {folder / 'trace.json'} (ui.perfetto.dev, chrome://tracing)\n"
        f"next: stretto chat {result.checkpoint}; tensorboard --logdir {folder}"
    )
    console.print(f"report: {report_rl_run(folder)}")
    return result


def made_start(recipe: RlRecipe, folder: Path, origin: Path | None = None, device: str = "auto") -> Path:
    """The recipe's own start in the run's folder, trained (of the checkpoint ``origin``, where it describes no network) unless
    it is there."""
    out = folder / START
    if out.is_dir():
        return out
    if recipe.start is None:
        raise UserError("--model: missing, and the recipe has no [start]; name a run or checkpoint to begin with")
    from stretto.model.parallel import join
    from stretto.post.sft import sft
    from stretto.rl.launch import SourceTables

    with SourceTables(dict(recipe.sources), recipe.sandbox).opened() as sources:
        for source in sources.values():
            source.validate()
        return sft(recipe, sources, out, origin=origin, ranks=join(device))


def _devices(name: str) -> tuple[str, ...]:
    """All that a run may use."""
    import torch

    from stretto.model.parallel import join

    device = join(name).device
    if device.type == "cpu":
        return ("cpu",)
    return tuple(f"{device.type}:{number}" for number in range(torch.cuda.device_count()))
