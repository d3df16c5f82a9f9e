"""A mutant for `bench.kill_roles`: agents that keep what an earlier attempt had finished and begin the rest anew, as if there
were no token logs.

It comes into an agent's process with its task set. Begun anew, a sample is another one: where an engine draws from its own
state and not from the sample's seed, nothing else could be.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stretto.base.trajectory import Task
from stretto.flow import agent
from stretto.learning.samples import Sample, open_samples, remove_logs
from stretto.tasks.strings import StringsSource

_seed = agent._seed


class Forgetful(StringsSource):
    """Ordinary problems; the process that opens it is the mutant from then on."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        agent.open_samples, agent._seed = _finished, _seed_of_attempt


def _finished(folder: Path, task: Task, attempt: int) -> tuple[Sample, ...]:
    before = open_samples(folder, task, attempt)
    remove_logs(folder, task.ordinal)
    samples = open_samples(folder, task, attempt)
    for old, new in zip(before, samples, strict=True):
        if old.verdict is not None:
            for part in old.parts:
                new.append(part)
            new.close(old.finish_reason, old.verdict)
    return samples


def _seed_of_attempt(sample: Sample) -> int:
    return _seed(sample) ^ sample.attempt
