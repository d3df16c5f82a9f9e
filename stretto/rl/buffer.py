"""Groups that are ready to be trained, as metadata: what is where, never the tokens. Imports no torch."""

from __future__ import annotations

from bisect import bisect
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class GroupRef:
    """A finished group that lies stored. Written by `rl.groups.store_group`, at the agent loop's end of the edge."""

    ordinal: int
    attempt: int
    """Of the task's hand-outs, the one that made it, from 0."""
    location: str
    """Where the group is, as the batch edge understands it: a file under the run folder, say."""
    num_samples: int
    num_tokens: int
    """Sampled ones, over all samples."""
    oldest_version: int
    """Weight version of its oldest sampled token; staleness counts from it."""
    mean_reward: float
    is_uniform: bool
    """All rewards are equal, so that advantages within the group are zero."""
    finished_s: float
    """Unix seconds."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Facts for the log, plain JSON values."""


@dataclass(frozen=True, slots=True)
class _Taken:
    """A batch on its way through the trainer."""

    step: int
    refs: tuple[GroupRef, ...]
    overtaken: Mapping[int, int]
    """What `Buffer.overtaken` was before it was taken."""


class Buffer:
    """All groups alive: those that wait, in order of their ordinals (of their first hand-out), and those in a batch.

    Each that waits is ready or not, and knows how many younger groups were taken before it. Taking obeys the window W: while
    a group waits, at most W − 1 younger ones are taken. Dropped groups do not use the window up. This is MiniMax's windowed
    queue (2605.26494), whose window starts at the oldest group and moves on only when that one is taken, counted in groups
    trained instead of positions.
    """

    def __init__(self) -> None:
        self._overtaken: dict[int, int] = {}  # by ordinal, ascending
        self._ready: dict[int, GroupRef] = {}
        self._batches: deque[_Taken] = deque()

    def __len__(self) -> int:
        return len(self._overtaken) + self.num_taken

    @property
    def num_ready(self) -> int:
        """Those in a batch do not count."""
        return len(self._ready)

    @property
    def num_taken(self) -> int:
        """Groups in batches."""
        return sum(len(batch.refs) for batch in self._batches)

    @property
    def num_batches(self) -> int:
        return len(self._batches)

    def ordinals(self) -> list[int]:
        return sorted([*self._overtaken, *(ref.ordinal for batch in self._batches for ref in batch.refs)])

    def waiting(self) -> list[tuple[int, int]]:
        """Ordinals that are not ready, oldest first, each with the number of groups that were taken or are older."""
        first = self.num_taken
        return [(ordinal, place) for place, ordinal in enumerate(self._overtaken, first) if ordinal not in self._ready]

    def num_overtaken(self, ordinal: int) -> int:
        """How many younger groups were taken before this one."""
        return self._overtaken[ordinal]

    def overtaken(self) -> dict[int, int]:
        """The same by ordinal, as it was before the batches that are here were taken."""
        overtaken = dict(self._overtaken)
        for batch in reversed(self._batches):
            overtaken |= batch.overtaken
        return overtaken

    def add(self, ordinal: int, num_overtaken: int = 0) -> None:
        """A group that was handed out for the first time, younger than all that are here."""
        youngest = next(reversed(self._overtaken), -1)
        assert ordinal > youngest, f"group {ordinal} is added after {youngest}"
        self._overtaken[ordinal] = num_overtaken

    def put(self, ref: GroupRef) -> None:
        assert ref.ordinal in self._overtaken, f"group {ref.ordinal} does not wait"
        assert ref.ordinal not in self._ready, f"group {ref.ordinal} is ready twice"
        self._ready[ref.ordinal] = ref

    def drop(self, ordinal: int) -> None:
        del self._overtaken[ordinal]
        self._ready.pop(ordinal, None)

    def choose(self, num: int, window: int) -> tuple[GroupRef, ...] | None:
        """The oldest ``num`` ready groups that ``window`` lets by, by ordinal; None as long as there are fewer."""
        chosen: list[GroupRef] = []
        left = num  # how many may still be chosen without overtaking somebody too often
        for ordinal, num_overtaken in self._overtaken.items():
            if left == 0:
                break
            if ordinal in self._ready:
                chosen.append(self._ready[ordinal])
                left -= 1
            else:
                left = min(left, window - 1 - num_overtaken)
        return tuple(chosen) if len(chosen) == num else None

    def take(self, step: int, ordinals: Iterable[int]) -> tuple[GroupRef, ...]:
        """Make these ready groups the batch of a step, and count them against the older ones that stay."""
        before = dict(self._overtaken)
        refs = tuple(self._ready.pop(ordinal) for ordinal in sorted(ordinals))
        taken = [ref.ordinal for ref in refs]
        for ordinal in taken:
            del self._overtaken[ordinal]
        for ordinal in self._overtaken:
            self._overtaken[ordinal] += len(taken) - bisect(taken, ordinal)
        self._batches.append(_Taken(step, refs, before))
        return refs

    def trained(self, step: int) -> tuple[GroupRef, ...]:
        """The oldest batch leaves."""
        batch = self._batches.popleft()
        assert batch.step == step, f"the batch of step {batch.step} is trained as step {step}"
        return batch.refs
