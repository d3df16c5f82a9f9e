"""`stretto.plan` and the command `stretto plan`: memory, speed, limit and cost of a recipe on a cluster, before anything runs. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stretto.base.config import Config, read_recipe, read_tree, source_name
from stretto.base.errors import UserError, user_errors
from stretto.base.paths import checkpoint_folder, read_json
from stretto.learning.recipe import RlRecipe
from stretto.model.families import from_hf
from stretto.model.spec import ModelConfig
from stretto.planner.hardware import parse_cluster
from stretto.planner.plans import Plan, Workload, plan_pretrain, plan_rl
from stretto.train.recipe import Recipe


@user_errors
def plan(
    recipe: str | os.PathLike[str] | Mapping[str, Any] | Recipe | RlRecipe,
    gpus: str,
    *,
    model: str | os.PathLike[str] | None = None,
    sweep: bool = False,
    price: float | None = None,
    workload: Workload | None = None,
    settings: Sequence[str] = (),
) -> Plan:
    """Predict memory, speed, limit and cost of a recipe of `stretto pretrain` or `stretto rl` (docs/CLUSTER.md).

    Args:
        recipe: a TOML file, the name of a shipped recipe, a mapping or a recipe object.
        gpus: number and kind of accelerators: ``64xH100``; ``2xcpu`` are two cores.
        model: run or checkpoint that an RL run begins with; None: the recipe's ``[start]``.
        sweep: try all layouts; False: the recipe's own.
        price: dollars of one accelerator for one hour.
        workload: facts about the answers and verdicts of an RL run.
        settings: overrides of single recipe keys: ``["train.rows=8"]``.

    Raises:
        UserError: a bad recipe, unknown hardware, or a layout that cannot be divided.
    """
    cluster, name = parse_cluster(gpus), Path(source_name(recipe)).name
    if price is not None and price < 0:
        raise UserError(f"--price {price:g}: give dollars per accelerator and hour, 0 or more")
    if _is_rl(recipe):
        parsed = read_recipe(recipe, RlRecipe, settings)
        return plan_rl(parsed, _network(parsed, name, model), name, cluster, sweep, price, workload or Workload())
    if model is not None:
        raise UserError(
            f"--model: {name} is a recipe of {Recipe.command}, which has its own [model]; leave --model out"
        )
    return plan_pretrain(read_recipe(recipe, Recipe, settings), name, cluster, sweep, price)


def _is_rl(recipe: Any) -> bool:
    """Whether ``recipe`` has sources of problems, as every recipe of RL, and no other recipe, has."""
    if isinstance(recipe, Config):
        return isinstance(recipe, RlRecipe)
    return "sources" in (recipe if isinstance(recipe, Mapping) else read_tree(Path(source_name(recipe))))


def _network(recipe: RlRecipe, name: str, model: str | os.PathLike[str] | None) -> ModelConfig:
    if model is not None:
        path = checkpoint_folder(os.fspath(model)) / "config.json"
        return from_hf(read_json(path), str(path))[0]
    if recipe.start is None or recipe.start.model is None:
        raise UserError(
            f"{name}: has no [start.model], so the network is unknown; name a run or checkpoint with --model"
        )
    return recipe.start.model
