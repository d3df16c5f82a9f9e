"""Verifier role: lets a task score answers, and returns verdicts.

An error of the verification itself gives the outcome INFRA and names the task; it is never a reward. Imports no torch.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from stretto.base.errors import InfraError, one_line
from stretto.base.trajectory import Outcome, Verdict
from stretto.flow.clients import RewardRequest, Threads, infra
from stretto.tasks.task import Answer, Score, TaskSource, close_sources, score_fault

_MAX_DETAIL = 300
"""Largest number of characters of a verdict's detail."""


@dataclass(slots=True)
class RewardStats:
    """Counters since the start of the role. Written by `RewardRole`, which returns copies; read by metrics."""

    num_waiting: int = 0
    """Requests in flight now, ``num_judged`` included."""
    num_judged: int = 0
    """Requests being judged now."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """Number of verdicts by outcome."""
    busy_s: float = 0.0
    """Seconds spent judging; concurrent requests are summed."""
    num_stuck: int = 0
    """Requests that missed their deadline and still occupy a thread. If there is any, the role is restarted."""
    num_slots: int = 1
    """Requests that the role judges at once: of its sources, the largest `TaskSource.at_once`."""


class RewardRole:
    """Verifies samples: ``TaskSource.at_once`` requests of a source at the same time, mostly one."""

    def __init__(self, open_sources: Callable[[], Mapping[str, TaskSource]], deadline_s: float = 60.0):
        """``open_sources`` is called once, here. ``deadline_s``: deadline of one verification, its queue not counted."""
        self._sources, self._deadline_s = open_sources(), deadline_s
        self._turns = {name: asyncio.Semaphore(source.at_once) for name, source in self._sources.items()}
        num_slots = max((source.at_once for source in self._sources.values()), default=1)
        self._threads, self._stats = Threads(), RewardStats(num_slots=num_slots)

    async def score(self, request: RewardRequest) -> Verdict:
        """The verdict on a sample. INFRA, with the reason, for an unknown source, a task that raises or hangs, and a
        reward that is not a finite number."""
        return (await self._verdicts([request], False))[0]

    async def compare(self, requests: Sequence[RewardRequest]) -> tuple[Verdict, ...]:
        """The verdicts on the samples of a group, which the task judges together. INFRA as in `score`."""
        return await self._verdicts(requests, True)

    async def _verdicts(self, requests: Sequence[RewardRequest], compares: bool) -> tuple[Verdict, ...]:
        name, stats = requests[0].source, self._stats
        source = self._sources.get(name)
        if source is None:
            why = f"no such source here; there are {', '.join(sorted(self._sources))}"
            verdicts = tuple(infra(request, why) for request in requests)
        else:
            stats.num_waiting += 1
            try:
                async with self._turns[name]:
                    verdicts = await self._judge(source, requests, compares)
            finally:
                stats.num_waiting -= 1
        stats.outcomes.update(verdict.outcome.value for verdict in verdicts)
        return verdicts

    async def stats(self) -> RewardStats:
        return copy.deepcopy(self._stats)

    async def close(self) -> None:
        """Close the sources and end the threads."""
        await self._threads.close_after(partial(close_sources, self._sources.values()))

    def end_threads(self) -> None:
        """In place of `close`, where the sources belong to the caller."""
        self._threads.close()

    async def _judge(
        self, source: TaskSource, requests: Sequence[RewardRequest], compares: bool
    ) -> tuple[Verdict, ...]:
        started_s = time.perf_counter()
        self._stats.num_judged += 1
        try:
            return await self._threads.run(lambda: _verdicts(source, requests, compares), self._deadline_s, "score")
        except InfraError as trouble:
            self._stats.num_stuck += 1
            return tuple(infra(request, str(trouble)) for request in requests)
        finally:
            self._stats.num_judged -= 1
            self._stats.busy_s += time.perf_counter() - started_s


def _verdicts(source: TaskSource, requests: Sequence[RewardRequest], compares: bool) -> tuple[Verdict, ...]:
    """Verdicts on answers to one problem, which the task ``compares`` or scores one by one. INFRA if the task raises."""
    started_s = time.perf_counter()
    try:
        problem = source.problem(requests[0].item)
        answers = [Answer(each.text, each.messages, each.seed) for each in requests]
        scores = (
            list(source.compare(problem, answers)) if compares else [source.score(problem, each) for each in answers]
        )
        if len(scores) != len(requests):
            raise ValueError(f"compare() gave {len(scores)} scores for {len(requests)} answers")
    except (Exception, SystemExit) as error:  # tasks are foreign code that may raise anything
        return tuple(infra(request, _short(f"raised {type(error).__name__}: {error}")) for request in requests)
    seconds = time.perf_counter() - started_s
    return tuple(_verdict(request, score, seconds) for request, score in zip(requests, scores, strict=True))


def _verdict(request: RewardRequest, score: Score, seconds: float) -> Verdict:
    if fault := score_fault(score):
        return infra(request, _short(fault))
    if score.outcome is Outcome.INFRA:
        return infra(request, _short(score.detail or "the verifier could not do its work"))
    return Verdict(
        reward=float(score.reward),
        outcome=score.outcome,
        seconds=seconds,
        sandbox_s=float(score.sandbox_s),
        detail=_short(score.detail),
        parts={name: float(value) for name, value in score.parts.items()},
        steps=tuple(replace(step, reward=float(step.reward)) for step in score.steps),
    )


def _short(text: str) -> str:
    line = one_line(text.encode(errors="replace").decode())  # a lone surrogate could not be stored
    return line if len(line) <= _MAX_DETAIL else line[: _MAX_DETAIL - 1] + "…"
