"""A small world: a counter that calls change, with options for the faults that worlds can have."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stretto.base.config import Config
from stretto.base.trajectory import Outcome, StepReward
from stretto.sandbox.outcome import ToolResult
from stretto.tasks.session import SessionSource, recorded
from stretto.tasks.task import Answer, Problem, Score, Session, Tool


class Counter(Session):
    def __init__(self, world: Counters, start: int) -> None:
        self.world, self.value, self.is_stopped, self.is_closed = world, start, False, False

    @property
    def tools(self) -> tuple[Tool, ...]:
        stop = Tool("stop", "Ends it.", {"type": "object"}, self._stop)
        return (Tool("add", f"Adds to {self.world.name}.", {"type": "object"}, self._add), stop)

    def _add(self, arguments: Mapping[str, Any]) -> ToolResult:
        assert not self.is_closed, "used after its end"
        if not isinstance(arguments.get("by"), int):
            return ToolResult("error: by: a whole number", Outcome.WRONG, 0.0)
        self.value += arguments["by"]
        told = self.world.before(self)
        return ToolResult(str(self.value) if told is None else told, Outcome.OK, 0.0)

    def _stop(self, arguments: Mapping[str, Any]) -> ToolResult:
        self.is_stopped = True
        return ToolResult("over", Outcome.OK, 0.0)

    @property
    def is_over(self) -> bool:
        return self.is_stopped

    def reply(self, messages: Sequence[Mapping[str, Any]]) -> str | None:
        return None if messages[-1]["content"] == "done" else f"{self.value}?"

    def score(self, answer: Answer) -> Score:
        score = Score.of(self.value == 10)
        return Score(score.reward, score.outcome, steps=(StepReward(0, 0.5),))

    def digest(self) -> str:
        return str(self.value) if self.world.has_digest else ""

    def close(self) -> None:
        self.is_closed = True


class Counters(SessionSource):
    """Problem i starts at i modulo 10; the goal is 10."""

    def __init__(self, before: Callable[[Counter], str | None] = lambda session: None, has_digest: bool = True) -> None:
        """``before``: a further action of each call, which may return the result."""
        super().__init__("toy", Config())
        self.before, self.has_digest = before, has_digest
        self.sessions: list[Counter] = []
        self.seeds: list[int | None] = []

    def problem(self, item: int) -> Problem:
        return Problem(item, ({"role": "user", "content": "make it 10"},), "done", {"start": item % 10})

    def open(self, problem: Problem, seed: int | None = None) -> Session:
        self.sessions.append(Counter(self, problem.payload["start"]))
        self.seeds.append(seed)
        return self.sessions[-1]

    def demonstration(self, problem: Problem) -> tuple[Mapping[str, Any], ...]:
        by = 10 - problem.payload["start"]
        return recorded(self.open(problem), (calling(by), {"role": "assistant", "content": "done"}))


def calling(*by: Any) -> dict[str, Any]:
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"by": each}}} for each in by]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def once(work: Callable[[], Any], at: int = 1) -> Callable[[Counter], str | None]:
    """An action that runs ``work`` at call number ``at``, counted over all sessions."""
    numbers, lock = itertools.count(1), threading.Lock()

    def before(session: Counter) -> str | None:
        with lock:
            number = next(numbers)
        if number == at:
            work()
        return None

    return before
