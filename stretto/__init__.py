"""Train one Mixture-of-Experts language model that contains every smaller version of itself.

The names below are loaded when they are first used: ``import stretto`` reads neither torch nor any stage.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from stretto.base.errors import UserError
from stretto.base.openmp import wait_briefly

if TYPE_CHECKING:
    from stretto.api.evaluate import Compared, Evaluated, compare, evaluate
    from stretto.api.model import Generation, Model, Score, Scores, Sizes, load
    from stretto.api.pipeline import run
    from stretto.api.post import Server, merge, serve, sft
    from stretto.api.report import Costs, ModelCost, cost, write_report
    from stretto.api.rl import RlRun, distill, online, rl
    from stretto.api.search import Search
    from stretto.api.stages import adopt, elasticize, extract, heal, latency, pretrain, quantise, search, tokenize
    from stretto.model.spec import Subnet
    from stretto.planner.plan import plan

__version__ = "0.1.0"

_PLACES = {
    "stretto.api.evaluate": ("Compared", "Evaluated", "compare", "evaluate"),
    "stretto.api.model": ("Generation", "Model", "Score", "Scores", "Sizes", "load"),
    "stretto.api.pipeline": ("run",),
    "stretto.api.post": ("Server", "merge", "serve", "sft"),
    "stretto.api.report": ("Costs", "ModelCost", "cost", "write_report"),
    "stretto.api.rl": ("RlRun", "distill", "online", "rl"),
    "stretto.api.search": ("Search",),
    "stretto.api.stages": (
        "adopt",
        "elasticize",
        "extract",
        "heal",
        "latency",
        "pretrain",
        "quantise",
        "search",
        "tokenize",
    ),
    "stretto.model.spec": ("Subnet",),
    "stretto.planner.plan": ("plan",),
}
_MODULE_OF = {name: module for module, names in _PLACES.items() for name in names}

__all__ = [
    "Compared",
    "Costs",
    "Evaluated",
    "Generation",
    "Model",
    "ModelCost",
    "RlRun",
    "Score",
    "Scores",
    "Search",
    "Server",
    "Sizes",
    "Subnet",
    "UserError",
    "adopt",
    "compare",
    "cost",
    "distill",
    "elasticize",
    "evaluate",
    "extract",
    "heal",
    "latency",
    "load",
    "merge",
    "online",
    "plan",
    "pretrain",
    "quantise",
    "rl",
    "run",
    "search",
    "serve",
    "sft",
    "tokenize",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'stretto' has no attribute {name!r}")
    wait_briefly(os.environ)  # before torch is imported, unless the caller has imported it
    found = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = found  # the next look-up does not come here
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
