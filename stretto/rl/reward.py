"""Verification as a role: finds the problem, has its task judge the answer, and lets nothing but a verdict out.

Whatever goes wrong with judging itself is INFRA and names the task: it is never a reward. Imports no torch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from stretto.base.trajectory import Outcome, Verdict
from stretto.rl.clients import RewardRequest, Threads, Trouble, infra
from stretto.tasks.task import Answer, TaskSource, score_fault

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
        source, stats = self._sources.get(request.source), self._stats
        if source is None:
            verdict = infra(request, f"no such source here; there are {', '.join(sorted(self._sources))}")
        else:
            stats.num_waiting += 1
            try:
                async with self._turns[request.source]:
                    verdict = await self._judge(source, request)
            finally:
                stats.num_waiting -= 1
        outcome = verdict.outcome.value
        stats.outcomes[outcome] = stats.outcomes.get(outcome, 0) + 1
        return verdict

    async def stats(self) -> RewardStats:
        return replace(self._stats, outcomes=dict(self._stats.outcomes))

    async def close(self) -> None:
        self._threads.close()

    async def _judge(self, source: TaskSource, request: RewardRequest) -> Verdict:
        started_s = time.perf_counter()
        self._stats.num_judged += 1
        try:
            return await self._threads.run(lambda: _verdict(source, request), self._deadline_s, "score")
        except Trouble as trouble:
            self._stats.num_stuck += 1
            return infra(request, str(trouble))
        finally:
            self._stats.num_judged -= 1
            self._stats.busy_s += time.perf_counter() - started_s


def _verdict(source: TaskSource, request: RewardRequest) -> Verdict:
    started_s = time.perf_counter()
    try:
        problem = source.problem(request.item)
        score = source.score(problem, Answer(request.text, request.messages, request.seed))
    except Exception as error:  # a task is code of others: whatever it raises is no verdict
        return infra(request, _short(f"raised {type(error).__name__}: {error}"))
    if fault := score_fault(score):
        return infra(request, _short(fault))
    if score.outcome is Outcome.INFRA:
        return infra(request, _short(score.detail or "the verifier could not do its work"))
    return Verdict(
        reward=float(score.reward),
        outcome=score.outcome,
        seconds=time.perf_counter() - started_s,
        sandbox_s=float(score.sandbox_s),
        detail=_short(score.detail),
        parts={name: float(value) for name, value in score.parts.items()},
        steps=tuple(replace(step, reward=float(step.reward)) for step in score.steps),
    )


def _short(text: str) -> str:
    line = " ".join(text.encode(errors="replace").decode().split())  # half a surrogate pair would not be stored
    return line if len(line) <= _MAX_DETAIL else line[: _MAX_DETAIL - 1] + "…"
