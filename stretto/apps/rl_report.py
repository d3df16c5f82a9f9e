"""The report of a reinforcement-learning run: gather what it left in its folder, and hand it to `stretto.evals.rl_report`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stretto.base.config import validate
from stretto.base.paths import CHECKPOINT, read_json
from stretto.base.records import git_commit, read_lineage
from stretto.base.track import progress, read_metrics
from stretto.evals.rl_data import RlData, Work
from stretto.evals.rl_report import pictures, write_rl_report
from stretto.rl.log import Span, read_spans
from stretto.rl.recipe import JOURNAL_FILE, RECIPE_FILE, RlRecipe

_NUMBER = {"step": "step", "group": "ordinal", "activate": "version"}
"""Of a span's facts, the one that says which it is."""


def is_rl_run(run: Path) -> bool:
    """Whether ``stretto rl`` made the folder."""
    return (run / RECIPE_FILE).is_file() and (run / JOURNAL_FILE).is_file()


def rl_report_command(run: Path) -> Path:
    """Write ``report/`` into the run folder; returns the page.

    Raises:
        UserError: the run has logged nothing yet, or its files are damaged.
    """
    data = gather(run)
    with progress("report", len(pictures())) as advance:
        return write_rl_report(data, run, advance)


def gather(run: Path) -> RlData:
    """What the run folder holds."""
    path = run / RECIPE_FILE
    recipe = validate(RlRecipe, read_json(path), str(path))
    return RlData(
        name=run.resolve().name,
        rows=tuple(read_metrics(run)),
        bound=recipe.staleness,
        num_steps=recipe.train.steps,
        works=tuple(_work(span) for span in read_spans(run)),
        shape=_shape(recipe),
        environment=_environment(run),
        recipe=json.dumps(recipe.model_dump(mode="json"), indent=2),
    )


def _work(span: Span) -> Work:
    facts: dict[str, Any] = span.facts or {}
    number = facts.get(_NUMBER.get(span.name, ""))
    if span.name == "step" and number is not None:
        number += 1  # as metrics count: the version that the step makes
    ordinals = tuple(facts.get("ordinals", ()))
    return Work(span.role, span.name, span.started_s, span.finished_s, span.lane, number, ordinals)


def _shape(recipe: RlRecipe) -> tuple[str, ...]:
    train, rollout, loss = recipe.train, recipe.rollout, recipe.loss
    sources = ", ".join(f"{name} ({source.kind})" for name, source in recipe.sources.items())
    correction = "no correction" if loss.correction == "none" else loss.correction
    return (
        f"problems: {sources}",
        f"{train.prompts} groups of {rollout.group} samples a step, {rollout.max_tokens} tokens at most, staleness {recipe.staleness}",
        f"{loss.policy} with {loss.advantage} advantages and {correction}, routes {recipe.replay}, "
        f"rollout in {recipe.precision.rollout}, training in {recipe.precision.train}",
    )


def _environment(run: Path) -> str:
    """The device, once the run has written its checkpoint; and the commit of the code that draws."""
    folder = run / CHECKPOINT
    device = f"{read_lineage(folder).receipt.device}, " if (folder / "lineage.json").is_file() else ""
    return f"{device}commit {git_commit() or 'unknown'}"
