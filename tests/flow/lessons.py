"""What tests of teachers share beside `tests.learning.lessons`: a recipe of two sources, and their samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from stretto.base.trajectory import Group
from stretto.learning.recipe import RlRecipe
from stretto.model.transformer import Transformer
from tests.flow.policies import groups, network, recipe
from tests.learning.lessons import SOURCES


def taught(teachers: dict[str, Any], distill: dict[str, Any] | None = None, **changes: Any) -> RlRecipe:
    """A run on both sources; ``teachers``: their checkpoints, or their tables."""
    tables = {name: each if isinstance(each, dict) else {"checkpoint": str(each)} for name, each in teachers.items()}
    sources = {name: {"kind": "strings"} for name in SOURCES}
    table = {"top_k": 7, "teachers": tables, **(distill or {})}
    return recipe(sources=sources, distill=table, optim__clip_norm=1e9, **changes)


def two_sources(seed: int = 0, model: Transformer | None = None) -> list[Group]:
    """Four groups, the sources in turn, all as the student sampled them."""
    made = groups(model or network(), seed=seed)
    return [replace(each, task=replace(each.task, source=SOURCES[number % 2])) for number, each in enumerate(made)]
