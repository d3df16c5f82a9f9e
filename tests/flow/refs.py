"""Small records for the tests of the controller and its parts."""

from __future__ import annotations

from typing import Any

from stretto.base.trajectory import GroupRef, Task


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
