"""Small records for the tests of the controller and its parts."""

from __future__ import annotations

from typing import Any

from stretto.base.trajectory import GroupRef, Task
from stretto.flow.ledger import State


def ref(ordinal: int, attempt: int = 0, *, version: int = 0, **values: Any) -> GroupRef:
    given: dict[str, Any] = {
        "location": f"group-{ordinal}-{attempt}",
        "num_samples": 2,
        "num_tokens": 10,
        "mean_reward": 0.5,
        "is_uniform": False,
    }
    return GroupRef(ordinal=ordinal, attempt=attempt, oldest_version=version, **(given | values))


def task(ordinal: int) -> Task:
    return Task(ordinal, source="test", item=ordinal, group=2, seed=ordinal, max_tokens=8)


def check(state: State) -> None:
    """No group of ``state`` was lost, or counted twice."""
    ended = sum(state.endings.values())
    assert state.num_dispatched == len(state.alive) + ended, (state.num_dispatched, len(state.alive), state.endings)
    chosen = [ordinal for ordinals in state.batches.values() for ordinal in ordinals]
    assert len(set(chosen)) == len(chosen) and set(chosen) <= set(state.alive), (chosen, list(state.alive))
