"""How many workers a pool should have: what is measured, and pure functions of it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Of an elastic pool."""

    min: int = 1
    max: int = 2
    utilisation: float = 0.7
    """Aim of arrival rate × mean service time / (workers × slots)."""
    slots: int = 1
    """Calls that one worker takes at once."""
    wait_aim_s: float = 0.5
    """Of the 95th percentile of waits in the queue; above it, workers are added for the queue too."""
    window_s: float = 5.0
    """Over which rates and waits are taken."""
    patience_s: float = 5.0
    """Workers go when they were not wanted for so long."""

    def __post_init__(self) -> None:
        assert 0 < self.min <= self.max, f"a pool of {self.min} to {self.max} workers"
        assert 0 < self.utilisation <= 1, f"a utilisation of {self.utilisation}"


@dataclass(frozen=True, slots=True)
class Load:
    """What the last window showed. Written by the pool."""

    arrivals_per_s: float
    mean_service_s: float
    """Of finished calls, or of the age of running ones where that is more; 0 where there was none."""
    p95_wait_s: float
    """Of those who were served and those who still wait."""
    num_waiting: int


def target_size(load: Load, size: int, limits: Limits) -> int:
    """Little's law at the utilisation aimed at, and enough more to clear the queue within the wait aimed at.

    Workers in use = arrival rate × mean service time, whatever the distributions; see METHODS on elastic pools. The
    law knows only the mean over the window, so a burst is first seen by those who wait.

    Args:
        size: workers there are, those that are starting included.
    """
    busy = load.arrivals_per_s * load.mean_service_s / limits.slots
    wanted = math.ceil(busy / limits.utilisation - 1e-9)  # or 0.7 / 0.7 would ask for two
    if load.p95_wait_s > limits.wait_aim_s and load.num_waiting:
        behind = load.num_waiting * load.mean_service_s / (limits.wait_aim_s * limits.slots)
        wanted = max(wanted, math.ceil(busy + behind), size + 1)
    return min(max(wanted, limits.min), limits.max)


def settled_size(targets: Sequence[tuple[float, int]], size: int, now_s: float, patience_s: float) -> int:
    """``size`` raised to the latest target at once, or lowered to the highest one of the time of patience.

    Args:
        targets: (seconds, target), oldest first; one from before the time of patience shows that it is over.
    """
    assert targets, "no target yet"
    latest = targets[-1][1]
    if latest >= size:
        return latest
    if targets[0][0] > now_s - patience_s:
        return size
    return min(size, max(target for seconds, target in targets if seconds >= now_s - patience_s))


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least ``share`` of them do not exceed; 0 without any."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


_LATEST = 512
"""Waits and services that are remembered: they are looked through several times a second."""


class Meter:
    """Counts arrivals, waits and services over a sliding window. Times are seconds of the caller's clock."""

    def __init__(self, opened_s: float, window_s: float):
        self._opened_s = opened_s
        self._window_s = window_s
        self._arrivals: deque[float] = deque()
        self._waits: deque[tuple[float, float]] = deque(maxlen=_LATEST)
        """(when it ended, seconds); so are the services."""
        self._services: deque[tuple[float, float]] = deque(maxlen=_LATEST)
        self._running: dict[int, float] = {}
        """When each that is served began, by its number."""
        self._num_begun = 0
        self.num_served = 0
        self.busy_s = 0.0
        """Seconds of ended services."""

    @property
    def num_running(self) -> int:
        return len(self._running)

    def arrive(self, now: float) -> None:
        self._arrivals.append(now)

    def begin(self, came: float, now: float) -> int:
        """Someone's turn has come; returns the number to `end` it with."""
        self._waits.append((now, now - came))
        self._num_begun += 1
        self._running[self._num_begun] = now
        return self._num_begun

    def end(self, number: int, now: float) -> None:
        seconds = now - self._running.pop(number)
        self._services.append((now, seconds))
        self.num_served += 1
        self.busy_s += seconds

    def load(self, now: float, waiting: Sequence[float]) -> Load:
        """``waiting``: when each of those who wait came."""
        since = now - self._window_s
        while self._arrivals and self._arrivals[0] < since:
            self._arrivals.popleft()
        for each in (self._waits, self._services):
            while each and each[0][0] < since:
                each.popleft()
        ended = [seconds for _, seconds in self._services]
        ages = [now - began for began in self._running.values()]
        mean_s = _mean(ended)
        if ages:  # long calls are in no statistics of ended ones until they end
            mean_s = max(mean_s, _mean(ages + ended))
        waits = [*(now - came for came in waiting), *(seconds for _, seconds in self._waits)]
        # The first moments say little: one arrival at once is no endless rate.
        seen_s = min(max(now - self._opened_s, 1.0), self._window_s)
        return Load(len(self._arrivals) / seen_s, mean_s, percentile(waits, 0.95), len(waiting))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
