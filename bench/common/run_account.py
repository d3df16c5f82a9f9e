"""What a reinforcement-learning run has trained, read from outside while it runs: its journal and its groups."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from stretto.base.trajectory import Trajectory
from stretto.flow.ledger import Event, read_events
from stretto.learning.recipe import JOURNAL_FILE, LOGS
from stretto.learning.samples import load_group, logged_ordinals, read_logs

Key = tuple[int, int]
"""Ordinal and sample."""


@dataclass(slots=True)
class Account:
    """Follows a run's journal. A run forgets events and groups that it will not need again; `look` often enough."""

    run: Path
    kept: Path
    """Folder for links to the groups' files."""
    events: dict[int, Event] = field(default_factory=dict)
    """By number."""

    def look(self) -> int:
        """Read what is new; the number of the last event."""
        if (self.run / JOURNAL_FILE).exists():
            for event in read_events(self.run / JOURNAL_FILE)[1:]:
                if event.number not in self.events:
                    self.events[event.number] = event
                    if event.kind == "ready":
                        self._keep(Path(event.facts["group"]["location"]))
        return max(self.events, default=0)

    def trained(self) -> dict[int, list[str]]:
        """Where the groups lie that made each step, by step: of a step that was made again, the last time.

        Raises:
            AssertionError: a step was skipped, made twice without a snapshot between, or made again from other groups.
        """
        found: dict[int, list[str]] = {}
        following, may_go_back = 0, False
        for _, event in sorted(self.events.items()):
            if event.kind == "resumed":
                may_go_back = True
            elif event.kind == "trained":
                step, locations = event.facts["step"], event.facts["locations"]
                assert step == following or (may_go_back and step < following), f"step {step} after {following - 1}"
                assert found.setdefault(step, locations) == locations, (found[step], event)
                following, may_go_back = step + 1, False
        return found

    def num_rolled_back(self) -> int:
        """Steps that were made again."""
        return sum(event.kind == "trained" for event in self.events.values()) - len(self.trained())

    def samples(self) -> tuple[dict[Key, Trajectory], Counter[Key]]:
        """The trained samples, and how often each was trained."""
        found: dict[Key, Trajectory] = {}
        times: Counter[Key] = Counter()
        for locations in self.trained().values():
            for location in locations:
                for each in load_group(self.kept / Path(location).name).trajectories:
                    found[each.ordinal, each.sample] = each
                    times[each.ordinal, each.sample] += 1
        return found, times

    def _keep(self, path: Path) -> None:
        self.kept.mkdir(exist_ok=True)
        if path.exists() and not (self.kept / path.name).exists():
            os.link(path, self.kept / path.name)


def logged(run: Path) -> dict[Key, np.ndarray]:
    """The log-probabilities so far of every sample in flight with any: they identify the work that a log holds."""
    found: dict[Key, np.ndarray] = {}
    for ordinal in logged_ordinals(run / LOGS):
        for path in sorted((run / LOGS).glob(f"{ordinal:08d}-*.log")):  # attempts rise
            try:
                logs = read_logs(path)
            except FileNotFoundError:
                continue  # its group has ended meanwhile
            for sample, log in enumerate(logs):
                if log.num_sampled:
                    found[ordinal, sample] = sampled(log.segments())
    return found


def sampled(segments: Sequence[Any]) -> np.ndarray:
    """Log-probabilities of the sampled tokens."""
    return np.concatenate([segment.logprobs for segment in segments if segment.is_sampled])


def is_kept(before: np.ndarray, trajectory: Trajectory) -> bool:
    """Whether what had been sampled is the beginning of what was trained."""
    now = sampled(trajectory.segments)
    return len(now) >= len(before) and np.array_equal(now[: len(before)], before)


def paired_difference(differences: ArrayLike, num_draws: int = 9_999) -> tuple[float, float]:
    """Mean of independent differences, and how often one as far from 0 comes of drawing the sign of each anew."""
    found = np.asarray(differences, np.float64)
    signs = np.random.default_rng(0).choice([-1.0, 1.0], (num_draws, np.count_nonzero(found)))
    is_as_far = np.abs(signs @ found[found != 0]) >= abs(found.sum()) - 1e-9
    return float(found.mean()), float((1 + is_as_far.sum()) / (1 + num_draws))
