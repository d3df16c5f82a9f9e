"""Who may start and what is trained next, as AReaL, SkyRL and TitanRL describe it, and as Stretto does.

Written anew from their descriptions; none of the systems runs here:

- AReaL (2505.24298 and its staleness manager): (η + version + 1)·P minus all groups accepted or running may still be started;
  the oldest of the finished ones are trained.
- SkyRL (its fully asynchronous trainer): (max staleness + step)·P with steps from 1, which is the same number; finished
  groups are trained in the order in which they finish. What is too old is reported, not dropped.
- Discarding: AReaL's capacity, and a finished group that is too old is thrown away and replaced.
- TitanRL (after MiniMax, 2605.26494): (η + 1)·P slots, freed once the engines have the new weights; oldest first among the
  groups in a window that starts at the oldest one not trained, here P + 1 wide. Its bound is η + 1.
  "At η" has one step's slots less, so that its bound is ours.
- Ours: `stretto.flow.controller` and `stretto.flow.ledger`, with the default window and with the narrowest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from stretto.base.trajectory import GroupRef
from stretto.flow.controller import Limits, default_window
from stretto.flow.ledger import State as Groups


@dataclass(frozen=True, slots=True)
class Trace:
    """Delays; a second is the trainer's mean step."""

    prompts: int
    staleness: int
    capacity: int
    num_steps: int
    activate_s: float
    durations_s: tuple[float, ...]
    """Of the n-th group, once an engine has it."""
    steps_s: tuple[float, ...]


@dataclass(slots=True)
class State:
    """What a rule may look at."""

    trace: Trace
    version: int = 0
    engine_version: int = 0
    num_started: int = 0
    num_trained: int = 0
    num_discarded: int = 0
    waiting: dict[int, int | None] = field(default_factory=dict)
    """Groups alive and in no batch, ascending; the version of each that has finished."""
    finished: list[int] = field(default_factory=list)
    """In the order in which they did."""

    @property
    def alive(self) -> int:
        return self.num_started - self.num_trained - self.num_discarded


class Rule(ABC):
    """Admission and choice of one system."""

    def may_start(self, state: State) -> bool:
        trace = state.trace
        room = (trace.staleness + state.engine_version + 1) * trace.prompts
        return state.num_started - state.num_discarded < room

    @abstractmethod
    def choose(self, state: State) -> list[int] | None: ...

    def stale(self, state: State) -> list[int]:
        """Finished groups to be thrown away."""
        return []


class Areal(Rule):
    def choose(self, state: State) -> list[int] | None:
        return _full(sorted(state.finished)[: state.trace.prompts], state)


class SkyRl(Rule):
    def choose(self, state: State) -> list[int] | None:
        return _full(state.finished[: state.trace.prompts], state)


class Discarding(Areal):
    def stale(self, state: State) -> list[int]:
        oldest = state.version - state.trace.staleness
        return [ordinal for ordinal in state.finished if (state.waiting[ordinal] or 0) < oldest]


class TitanRl(Rule):
    def __init__(self, num_less: int = 0) -> None:
        self.num_less = num_less

    def may_start(self, state: State) -> bool:
        room = (state.trace.staleness - self.num_less + state.engine_version + 1) * state.trace.prompts
        return state.num_started - state.num_discarded < room

    def choose(self, state: State) -> list[int] | None:
        left, chosen = sorted(state.waiting), []
        for _ in range(state.trace.prompts):
            end = left[0] + state.trace.prompts + 1 if left else 0
            ready = [each for each in left if each < end and state.waiting[each] is not None]
            if not ready:
                return None
            chosen.append(ready[0])
            left.remove(ready[0])
        return chosen


class Ours(Rule):
    def __init__(self, trace: Trace, window: int | None = None) -> None:
        window = default_window(trace.prompts, trace.staleness, trace.capacity) if window is None else window
        self.gate = Limits(trace.prompts, trace.staleness, window)
        self.groups = Groups()

    def may_start(self, state: State) -> bool:
        return self.gate.may_dispatch(state.alive, state.version, state.engine_version)

    def choose(self, state: State) -> list[int] | None:
        groups = self.groups
        for ordinal, version in state.waiting.items():
            if ordinal == groups.num_dispatched:
                groups.dispatched(ordinal, 0, 0.0)
            if version is not None and groups.alive[ordinal].ref is None:
                groups.ready(asdict(GroupRef(ordinal, 0, "", 1, 1, version, 0.0, False)))
        refs = groups.choose(state.trace.prompts, self.gate.window)
        if refs is None:
            return None
        ordinals = [ref.ordinal for ref in refs]
        groups.batch(groups.version, ordinals)
        groups.trained(groups.version, ordinals, [])
        return ordinals


def _full(ordinals: list[int], state: State) -> list[int] | None:
    return ordinals if len(ordinals) == state.trace.prompts else None


RULES: dict[str, Callable[[Trace], Rule]] = {
    "AReaL": lambda trace: Areal(),
    "SkyRL": lambda trace: SkyRl(),
    "discarding": lambda trace: Discarding(),
    "TitanRL": lambda trace: TitanRl(),
    "TitanRL at η": lambda trace: TitanRl(num_less=1),
    "ours": Ours,
    "ours, narrowest window": lambda trace: Ours(trace, 1),
}
