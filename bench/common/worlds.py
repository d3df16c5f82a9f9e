"""What benches of generated worlds have in common: a network learns from rewards, and is asked problems of a part."""

from __future__ import annotations

import asyncio
from pathlib import Path

from stretto.base.paths import CHECKPOINT, remove
from stretto.base.track import progress
from stretto.flow.plain import run_plainly
from stretto.learning.metrics import StepReport
from stretto.learning.recipe import RlRecipe
from stretto.post.suite import EvalOptions, Evaluation, SuiteConfig, evaluate


def train(recipe: RlRecipe, folder: Path, start: Path, device: str = "cpu") -> Path:
    """The checkpoint in ``folder`` after reinforcement learning from ``start``, unless it is there."""
    run, checkpoint = folder / "rl", folder / CHECKPOINT
    if checkpoint.is_dir():
        return checkpoint
    remove(run)  # of a run that was cut short nothing is to stay
    with progress(f"{folder.name}: rewards", recipe.train.steps) as advance:

        def report(step: StepReport) -> None:
            advance(1, f"reward {step.scalars['reward/mean']:.2f}")

        asyncio.run(run_plainly(recipe, run, start, checkpoint, report, device=device))
    remove(run)
    return checkpoint


def ask(
    recipe: RlRecipe, checkpoint: Path, part: str, problems: int, *, samples: int = 4, device: str = "cpu"
) -> Evaluation:
    """What ``checkpoint`` answers to problems of ``part`` of the recipe's one source, at temperature 1; kept beside it."""
    ((name, source),) = recipe.sources.items()
    suite = SuiteConfig(
        sources={name: source.replace(args={**source.args, "part": part})},
        problems=problems,
        max_tokens=recipe.rollout.max_tokens,
        max_turns=recipe.rollout.max_turns,
    )
    told = EvalOptions(samples=samples, max_batch=recipe.rollout.max_batch)
    out = checkpoint.with_name(f"{checkpoint.name}.{part}")
    return evaluate(checkpoint, {name: suite}, out, told, name=checkpoint.parent.name, device=device)
