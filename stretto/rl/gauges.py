"""From what roles count since their start to the numbers of one log line: increments, shares, depths. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from stretto.engine.request import EngineStats
from stretto.rl.agent import AgentStats
from stretto.rl.reward import RewardStats


@dataclass(frozen=True, slots=True)
class Told:
    """What the roles said of themselves at one moment, by name. Written by the logbook."""

    at_s: float
    """On a clock that only goes forward."""
    engines: Mapping[str, EngineStats]
    agents: Mapping[str, AgentStats]
    rewards: Mapping[str, RewardStats]


class Counts:
    """Counters that only grow, and begin at 0 again with a role that is started again."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}

    def grown(self, name: str, value: float) -> float:
        """By how much since the last call; 0 before the first."""
        before = self._before.get(name, 0.0)
        self._before[name] = value
        return value - before if value >= before else value


class Gauges:
    """Of all roles, from one log line to the next: told something once a second, asked once a step."""

    def __init__(self, started_s: float):
        """
        Args:
            started_s: on the clock of `Told.at_s`.
        """
        self._counts = Counts()
        self._asked_s = started_s
        self._told: Told | None = None

    def tell(self, told: Told) -> None:
        self._told = told

    def scalars(self) -> dict[str, float]:
        """Between the moment of the last answer and what was told last; {} where nothing was told since."""
        told, self._told = self._told, None
        if told is None or told.at_s <= self._asked_s:
            return {}
        seconds, self._asked_s = told.at_s - self._asked_s, told.at_s
        return self._of_engines(told, seconds) | self._of_rewards(told, seconds) | self._of_agents(told)

    def _of_engines(self, told: Told, seconds: float) -> dict[str, float]:
        scalars = {
            f"bubble/{name}": _idle(self._grown(name, "busy_s", stats.busy_s), seconds)
            for name, stats in told.engines.items()
        }
        pages = sum(stats.num_pages for stats in told.engines.values())
        if pages:
            scalars |= {
                "queue/engine_running": sum(stats.num_running for stats in told.engines.values()),
                "queue/engine_waiting": sum(stats.num_waiting for stats in told.engines.values()),
                "engines/tokens_per_s": self._all(told.engines, "output_tokens") / seconds,
                "engines/preemptions": self._all(told.engines, "num_preemptions"),
                "engines/free_pages": sum(stats.num_free_pages for stats in told.engines.values()) / pages,
            }
        return scalars

    def _of_rewards(self, told: Told, seconds: float) -> dict[str, float]:
        if not told.rewards:
            return {}
        outcomes: Counter[str] = Counter()
        for name, stats in told.rewards.items():
            for outcome, num in stats.outcomes.items():
                outcomes[outcome] += int(self._grown(name, outcome, num))
        busy_s = self._all(told.rewards, "busy_s")
        scalars = {
            "bubble/rewards": _idle(busy_s, seconds * len(told.rewards)),
            "queue/verifiers": float(sum(stats.num_waiting for stats in told.rewards.values())),
        }
        return scalars | {
            f"verdicts/{name}": num / outcomes.total() for name, num in outcomes.items() if outcomes.total()
        }

    def _of_agents(self, told: Told) -> dict[str, float]:
        engine_s, queued_s = self._all(told.agents, "engine_s"), self._all(told.agents, "queued_s")
        cached, computed = self._all(told.agents, "cached_tokens"), self._all(told.agents, "computed_tokens")
        troubles = sum(
            self._grown(name, f"trouble {what}", num)
            for name, stats in told.agents.items()
            for what, num in stats.troubles.items()
        )
        scalars = {
            "queue/samples": float(sum(stats.num_samples for stats in told.agents.values())),
            "failures/tokens_resumed": self._all(told.agents, "tokens_resumed"),
            "failures/troubles": troubles,
        }
        if engine_s > 0:
            scalars["wait/engine_queue_share"] = min(1.0, queued_s / engine_s)
        if cached + computed > 0:
            scalars["engines/cached_share"] = cached / (cached + computed)
        return scalars

    def _all(self, roles: Mapping[str, object], counter: str) -> float:
        return sum(self._grown(name, counter, getattr(stats, counter)) for name, stats in roles.items())

    def _grown(self, role: str, counter: str, value: float) -> float:
        return self._counts.grown(f"{role}/{counter}", value)


def _idle(busy_s: float, seconds: float) -> float:
    """A role that was busy beyond the moment of its last answer cannot have been busy for more than all of the time."""
    return max(0.0, 1.0 - busy_s / seconds)
