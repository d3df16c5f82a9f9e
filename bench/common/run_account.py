"""What an RL run trains on, read from its journal and its groups while it runs, and the checksum of the weights that it ends with."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from stretto.base.paths import CHECKPOINT, read_json
from stretto.base.trajectory import Trajectory
from stretto.engine.runner import state_checksum
from stretto.flow.files import ID_FILE
from stretto.flow.ledger import Event, read_events
from stretto.learning.recipe import JOURNAL_FILE
from stretto.learning.samples import load_group
from stretto.model.checkpoint import read_checkpoint
from stretto.runtime.store import UrlStore

Key = tuple[int, int]
"""Ordinal of the group and number of the sample."""


def checksum(run: Path) -> str:
    """Checksum of the final weights of a run."""
    return state_checksum(read_checkpoint(run / CHECKPOINT).model.state_dict())


@dataclass(slots=True)
class Account:
    """Follows the journal of a run. A run deletes events and groups that it no longer needs, so call `look` often."""

    run: Path
    kept: Path
    """Folder for hard links to the files of groups, or copies of them."""
    store_url: str = ""
    """Object store with the groups; empty: the run folder."""
    events: dict[int, Event] = field(default_factory=dict)
    """Events by number."""

    def look(self) -> int:
        """Read new events; returns the number of the last one."""
        if (self.run / JOURNAL_FILE).exists():
            for event in read_events(self.run / JOURNAL_FILE)[1:]:
                if event.number not in self.events:
                    self.events[event.number] = event
                    if event.kind == "ready":
                        self._keep(event.facts["group"]["location"])
        return max(self.events, default=0)

    def trained(self) -> dict[int, list[str]]:
        """Locations of the groups of each step. A repeated step counts once.

        Raises:
            AssertionError: the run skipped a step, repeated one without resuming, or repeated one with other groups.
        """
        of_step: dict[int, list[str]] = {}
        following, may_go_back = 0, False
        for _, event in sorted(self.events.items()):
            if event.kind == "resumed":
                may_go_back = True
            elif event.kind == "trained":
                step, locations = event.facts["step"], event.facts["locations"]
                assert step == following or (may_go_back and step < following), f"step {step} after {following - 1}"
                assert of_step.setdefault(step, locations) == locations, (of_step[step], event)
                following, may_go_back = step + 1, False
        return of_step

    def num_rolled_back(self) -> int:
        """Number of repeated steps."""
        return sum(event.kind == "trained" for event in self.events.values()) - len(self.trained())

    def samples(self) -> tuple[dict[Key, Trajectory], Counter[Key]]:
        """The trained samples, and the number of steps that trained each."""
        trained: dict[Key, Trajectory] = {}
        times: Counter[Key] = Counter()
        for locations in self.trained().values():
            for location in locations:
                for each in load_group(str(self.kept / Path(location).name)).trajectories:
                    trained[each.ordinal, each.sample] = each
                    times[each.ordinal, each.sample] += 1
        return trained, times

    def _keep(self, location: str) -> None:
        self.kept.mkdir(exist_ok=True)
        path, kept = Path(location), self.kept / Path(location).name
        if kept.exists():
            return
        if self.store_url:
            with suppress(FileNotFoundError):  # deleted since
                kept.write_bytes(UrlStore(self.store_url, read_json(self.run / ID_FILE)["id"]).read(location))
        elif path.exists():
            os.link(path, kept)


def num_other(expected: dict[Key, Trajectory], found: dict[Key, Trajectory]) -> int:
    """Number of samples in both whose tokens differ."""
    pairs = [(each, found[key]) for key, each in expected.items() if key in found]
    return sum(
        len(one.segments) != len(other.segments)
        or not all(np.array_equal(a.tokens, b.tokens) for a, b in zip(one.segments, other.segments, strict=True))
        for one, other in pairs
    )
