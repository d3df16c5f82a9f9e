"""What studies of RL share: the supervised start of all runs, and the reward at the end of a run's curve."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from stretto.api.rl import made_start
from stretto.base.paths import CHECKPOINT
from stretto.learning.recipe import RlRecipe

FIFTH = 5


def start_once(recipe: RlRecipe, folder: Path) -> dict[str, Any]:
    """Work of a run that trains the recipe's start, on a CPU, into ``folder``; returns no results."""
    start = made_start(recipe, folder / "made", device="cpu")
    (folder / CHECKPOINT).symlink_to(start, target_is_directory=True)
    return {}


def fifth(run: Mapping[str, Any]) -> int:
    """Number of steps of a fifth of a run."""
    return max(1, len(run["rewards"]) // FIFTH)


def at_end(run: Mapping[str, Any]) -> float:
    """Mean reward of the last fifth."""
    return fmean(run["rewards"][-fifth(run) :])
