"""Who has made no progress for how long, and whom that one waits for. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stuck:
    """A wait without progress. Written by `Watchdog`."""

    role: str
    """Who waits: ``trainer``, ``agent-0``."""
    ordinal: int | None
    """The group it is about, where it is about one."""
    waits_for: str
    """What it waits for, best the name of a role."""
    quiet_s: float
    """Since it last made progress."""

    def __str__(self) -> str:
        about = "" if self.ordinal is None else f" (group {self.ordinal})"
        return f"{self.role}{about} has waited for {self.waits_for} for {self.quiet_s:.0f} s"


class Watchdog:
    """Waits that are open now. A role says what it waits for with `waits`, once more at every progress, and `done` after."""

    def __init__(self, stuck_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            stuck_s: a wait without progress for longer is stuck.
        """
        self.stuck_s = stuck_s
        self._clock = clock
        self._waits: dict[tuple[str, int | None], tuple[str, float]] = {}

    def waits(self, role: str, waits_for: str, ordinal: int | None = None) -> None:
        """``role`` begins to wait, or has come a step further and waits on, for something else maybe."""
        self._waits[role, ordinal] = (waits_for, self._clock())

    def done(self, role: str, ordinal: int | None = None) -> None:
        """It waits no more; nothing where it did not."""
        self._waits.pop((role, ordinal), None)

    def gone(self, role: str) -> None:
        """The role has ended, with all its waits."""
        self._waits = {key: wait for key, wait in self._waits.items() if key[0] != role}

    def stuck(self) -> list[Stuck]:
        """Waits without progress for too long, the longest first."""
        found = [wait for wait in self._all() if wait.quiet_s > self.stuck_s]
        return sorted(found, key=lambda wait: -wait.quiet_s)

    def chain(self, wait: Stuck) -> list[Stuck]:
        """``wait``, what the one it waits for waits for, and so on: the last names the cause, or closes a circle.

        A role that waits for several things is followed by the wait about the same group, else by its longest.
        """
        found = [wait]
        while True:
            waits = [each for each in self._all() if each.role == found[-1].waits_for]
            if not waits:
                return found
            ordinal = found[-1].ordinal
            following = max(waits, key=lambda each: (ordinal is not None and each.ordinal == ordinal, each.quiet_s))
            circle = any((each.role, each.ordinal) == (following.role, following.ordinal) for each in found)
            found.append(following)
            if circle:
                return found

    def report(self) -> str | None:
        """One line about the longest stuck wait and its causes; None where all goes on."""
        stuck = self.stuck()
        return "; ".join(str(wait) for wait in self.chain(stuck[0])) if stuck else None

    def _all(self) -> list[Stuck]:
        now = self._clock()
        return [Stuck(*key, waits_for, now - since) for key, (waits_for, since) in self._waits.items()]
