"""Verifier role: has a problem's task score an answer, and returns a verdict.

Whatever goes wrong with judging itself is INFRA and names the task: it is never a reward. Imports no torch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from stretto.base.errors import InfraError, one_line
from stretto.base.trajectory import Outcome, Verdict
from stretto.flow.clients import RewardRequest, Threads, infra
from stretto.tasks.task import Answer, Problem, Score, TaskSource, score_fault

_How = Callable[[TaskSource, Problem, Sequence[Answer]], Sequence[Score]]
_MAX_DETAIL = 300
"""Characters."""


@dataclass(slots=True)
class RewardStats:
    """Counts since the start. Written by `RewardRole`, which hands out copies; read by metrics."""

    num_waiting: int = 0
    """In flight now, the next included."""
    num_judged: int = 0
    """Being judged now."""
    outcomes: dict[str, int] = field(default_factory=dict)
    """Verdicts by outcome."""
    busy_s: float = 0.0
    """Spent judging, summed over those that were judged at once."""
    num_stuck: int = 0
    """Judgements that did not return and were left behind in their threads; with any, start the role again."""


class RewardRole:
    """Verifies samples: of each source as many at once as it says (`TaskSource.at_once`), mostly one."""

    def __init__(self, open_sources: Callable[[], Mapping[str, TaskSource]], deadline_s: float = 60.0):
        """``open_sources`` is called once, here; ``deadline_s``: of one verification, its queue not counted."""
        self._sources, self._deadline_s = open_sources(), deadline_s
        self._turns = {name: asyncio.Semaphore(source.at_once) for name, source in self._sources.items()}
        self._threads, self._stats = Threads(), RewardStats()

    async def score(self, request: RewardRequest) -> Verdict:
        """The verdict on a sample; INFRA, with the reason, for an unknown source, a task that raises or hangs, and a
        reward that is no finite number."""
        return (await self._verdicts([request], _score))[0]

    async def compare(self, requests: Sequence[RewardRequest]) -> tuple[Verdict, ...]:
        """The verdicts on the samples of a group, which its task judges beside each other; INFRA as `score`."""
        return await self._verdicts(requests, _compare)

    async def _verdicts(self, requests: Sequence[RewardRequest], judge: _How) -> tuple[Verdict, ...]:
        name, stats = requests[0].source, self._stats
        source = self._sources.get(name)
        if source is None:
            why = f"no such source here; there are {', '.join(sorted(self._sources))}"
            verdicts = tuple(infra(request, why) for request in requests)
        else:
            stats.num_waiting += 1
            try:
                async with self._turns[name]:
                    verdicts = await self._judge(source, requests, judge)
            finally:
                stats.num_waiting -= 1
        for verdict in verdicts:
            outcome = verdict.outcome.value
            stats.outcomes[outcome] = stats.outcomes.get(outcome, 0) + 1
        return verdicts

    async def stats(self) -> RewardStats:
        return replace(self._stats, outcomes=dict(self._stats.outcomes))

    async def close(self) -> None:
        self._threads.close()

    async def _judge(self, source: TaskSource, requests: Sequence[RewardRequest], judge: _How) -> tuple[Verdict, ...]:
        started_s = time.perf_counter()
        self._stats.num_judged += 1
        try:
            return await self._threads.run(lambda: _verdicts(source, requests, judge), self._deadline_s, "score")
        except InfraError as trouble:
            self._stats.num_stuck += 1
            return tuple(infra(request, str(trouble)) for request in requests)
        finally:
            self._stats.num_judged -= 1
            self._stats.busy_s += time.perf_counter() - started_s


def _score(source: TaskSource, problem: Problem, answers: Sequence[Answer]) -> Sequence[Score]:
    return [source.score(problem, answer) for answer in answers]


def _compare(source: TaskSource, problem: Problem, answers: Sequence[Answer]) -> Sequence[Score]:
    return source.compare(problem, answers)


def _verdicts(source: TaskSource, requests: Sequence[RewardRequest], judge: _How) -> tuple[Verdict, ...]:
    started_s = time.perf_counter()
    try:
        problem = source.problem(requests[0].item)
        scores = list(judge(source, problem, [Answer(each.text, each.messages, each.seed) for each in requests]))
        if len(scores) != len(requests):
            raise ValueError(f"compare() gave {len(scores)} scores for {len(requests)} answers")
    except Exception as error:  # a task is code of others: whatever it raises is no verdict
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
    line = one_line(text.encode(errors="replace").decode())  # half a surrogate pair would not be stored
    return line if len(line) <= _MAX_DETAIL else line[: _MAX_DETAIL - 1] + "…"
