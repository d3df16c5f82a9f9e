"""Sessions: a state that calls change, reached again from what was said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from stretto.base.config import Config
from stretto.base.trajectory import Outcome
from stretto.sandbox.outcome import ToolResult
from stretto.tasks.session import Diverged, SessionSource, replay, use
from stretto.tasks.task import Answer, Problem, Score, Session, Tool


class Counter(Session):
    def __init__(self, start: int) -> None:
        self.value = start

    @property
    def tools(self) -> tuple[Tool, ...]:
        return (Tool("add", "Adds to the counter.", {"type": "object"}, self._add),)

    def _add(self, arguments: Mapping[str, Any]) -> ToolResult:
        self.value += int(arguments["by"])
        return ToolResult(str(self.value), Outcome.OK, 0.0)

    def reply(self, messages: Sequence[Mapping[str, Any]]) -> str | None:
        return None

    def score(self, answer: Answer) -> Score:
        return Score.of(self.value == 10)

    def digest(self) -> str:
        return str(self.value)


class Counters(SessionSource):
    def problem(self, item: int) -> Problem:
        return Problem.of(item, "Make it 10.", "done", "plain", start=item)

    def open(self, problem: Problem, seed: int | None = None) -> Session:
        return Counter(problem.payload["start"])


def turn(by: int, told: str | None = None, state: str | None = None) -> tuple[Mapping[str, Any], ...]:
    call = {"type": "function", "function": {"name": "add", "arguments": {"by": by}}}
    answer = {"role": "tool", "name": "add"} | ({} if told is None else {"content": told})
    return {"role": "assistant", "content": "", "tool_calls": [call]}, answer | (
        {} if state is None else {"state": state}
    )


def test_an_answer_is_judged_by_the_state_that_its_calls_lead_to() -> None:
    source = Counters("counters", Config())
    problem = source.problem(3)
    assert source.score(problem, Answer("done", (*turn(4, "7", "7"), *turn(3)))).ok
    assert not source.score(problem, Answer("done", turn(4))).ok
    assert not source.score(problem, Answer("done")).ok


@pytest.mark.parametrize("told", [turn(4, "8"), turn(4, "7", "8")])
def test_a_result_or_a_state_that_is_another_one_is_not_passed_over(told: Any) -> None:
    with pytest.raises(Diverged, match="add"):
        replay(Counter(3), told)


def test_calls_of_nothing_change_nothing() -> None:
    session = Counter(3)
    assert "there is no tool 'sub'; there are add" in use(session, "sub", {}).text
    assert "not a JSON object" in use(session, "add", None).text
    assert session.value == 3
