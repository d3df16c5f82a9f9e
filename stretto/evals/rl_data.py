"""What the report of a reinforcement-learning run shows, as plain records: an app fills them from the run's files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Work:
    """A stretch of work of one role."""

    role: str
    """``trainer``, ``agents``, or an engine's name."""
    name: str
    """``step``, ``publish``, ``snapshot`` and ``wait`` of the trainer; ``group`` of the agents; ``activate`` of an engine."""
    started_s: float
    """Unix seconds, as is the next."""
    finished_s: float
    lane: int = 0
    """Works of one role that overlap lie in different lanes."""
    number: int | None = None
    """The step that is made, the version that is activated, or the group's ordinal."""
    ordinals: tuple[int, ...] = ()
    """Groups that the step trains."""


@dataclass(frozen=True, slots=True)
class RlData:
    """Everything that the report shows."""

    name: str
    """Name of the run."""
    rows: tuple[Mapping[str, float], ...]
    """Rows of ``metrics.jsonl``, each with ``step``."""
    bound: int
    """On staleness, in versions."""
    num_steps: int
    """That the recipe asks for."""
    works: tuple[Work, ...] = ()
    shape: tuple[str, ...] = ()
    """The run in a few short lines."""
    environment: str = ""
    """Device and commit."""
    recipe: str = ""
    """The complete recipe, as text."""

    def series(self, metric: str) -> tuple[list[float], list[float]]:
        """Steps and the finite values of ``metric``."""
        found = {row["step"]: row[metric] for row in self.rows if math.isfinite(row.get(metric, math.nan))}
        return list(found), list(found.values())

    def values(self, metric: str) -> list[float]:
        return self.series(metric)[1]

    def has(self, *metrics: str) -> bool:
        """Whether one of them was logged."""
        return any(math.isfinite(row.get(metric, math.nan)) for row in self.rows for metric in metrics)

    def last(self, metric: str) -> float | None:
        """Its last finite value."""
        values = self.values(metric)
        return values[-1] if values else None

    def total(self, metric: str) -> float:
        """Sum over all steps; 0 where it was not logged."""
        return math.fsum(self.values(metric))

    def named(self, prefix: str) -> list[str]:
        """Metrics that begin with ``prefix``, in alphabetical order, without it."""
        found = {name.removeprefix(prefix) for row in self.rows for name in row if name.startswith(prefix)}
        return sorted(name for name in found if self.has(prefix + name))
