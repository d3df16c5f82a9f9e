"""Sessions: a state that calls change, and its restoration from messages."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest

from stretto.base.errors import UserError
from stretto.base.trajectory import Outcome
from stretto.sandbox.outcome import ToolResult
from stretto.tasks.session import MOST_TEXT, Diverged, arguments_of, recorded, replay, schemas, tool_turn, use
from stretto.tasks.task import Answer, Problem, Score, Session, TaskSource, Tool
from tests.tasks.counting import Counter, Counters, calling

ADD = {"name": "add", "arguments": {"by": 4}}


def turn(by: int, told: str | None = None, state: str | None = None) -> tuple[Mapping[str, Any], ...]:
    answer = {"role": "tool", "name": "add"} | ({} if told is None else {"content": told})
    return calling(by), answer | ({} if state is None else {"state": state})


def test_an_answer_is_judged_by_the_state_that_its_calls_lead_to() -> None:
    source = Counters()
    problem = source.problem(3)
    assert source.score(problem, Answer("done", (*turn(4, "7", "7"), *turn(3)), seed=5)).ok
    assert not source.score(problem, Answer("done", turn(4))).ok
    assert not source.score(problem, Answer("done")).ok
    assert source.seeds == [5, None, None] and all([session.is_closed for session in source.sessions])


@pytest.mark.parametrize("told", [turn(4, "8"), turn(4, "7", "8")])
def test_a_result_or_a_state_that_is_another_one_is_not_passed_over(told: Any) -> None:
    source = Counters()
    with pytest.raises(Diverged, match="add"):
        source.score(source.problem(3), Answer("done", told))
    assert source.sessions[0].is_closed


def test_only_calls_that_were_answered_are_repeated() -> None:
    session = Counter(Counters(), 0)
    replay(session, (calling(1, 2, 4), {"role": "tool", "name": "add"}, calling(8), *turn(16)))
    assert session.value == 17


def test_no_call_is_made_behind_one_that_ends_the_episode() -> None:
    session = Counter(Counters(), 0)
    stop = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "stop", "arguments": {}}}]}
    replay(session, (stop, {"role": "tool", "name": "stop"}, *turn(16)))
    assert session.is_over and session.value == 0


def test_a_tool_that_cannot_do_its_work_is_no_divergence() -> None:
    class Failing(Counter):
        def _add(self, arguments: Mapping[str, Any]) -> ToolResult:
            return ToolResult("no sandbox", Outcome.INFRA, 0.0)

    with pytest.raises(RuntimeError, match="add: no sandbox") as failed:
        replay(Failing(Counters(), 3), turn(4, "7"))
    assert not isinstance(failed.value, Diverged)


def test_calls_of_nothing_change_nothing() -> None:
    session = Counter(Counters(), 3)
    assert "there is no tool 'sub'; there are add, stop" in use(session.tools, "sub", {}).text
    assert "not a JSON object" in use(session.tools, "add", None).text
    assert session.value == 3


def test_a_result_of_ten_megabytes_is_cut_for_all_to_see() -> None:
    session = Counter(Counters(lambda session: "x" * 10_000_000), 3)
    told = tool_turn(session, ADD)
    assert len(told["content"]) <= MOST_TEXT and "x\n[… 9,868,9" in told["content"]
    replay(Counter(session.world, 3), (calling(4), told))


def test_a_demonstration_says_what_its_calls_gave() -> None:
    said = {"role": "user", "content": "and?"}
    turns = recorded(Counter(Counters(), 3), (calling(4, "no"), {"role": "tool", "content": "old"}, said, calling(3)))
    assert [message.get("state") for message in turns] == [None, "7", "7", None, None, "10"]
    assert turns[1] == {"role": "tool", "name": "add", "content": "7", "outcome": "ok", "state": "7"}
    assert turns[2]["outcome"] == "wrong" and turns[3] == said
    assert "state" not in recorded(Counter(Counters(has_digest=False), 3), (calling(4),))[1]


def test_schemas_are_the_problems_own() -> None:
    source = Counters()
    assert [each["function"]["name"] for each in schemas(source, source.problem(3))] == ["add", "stop"]
    assert source.sessions[0].is_closed


# Faults of worlds that `validate` finds


def refused(source: TaskSource) -> str:
    with pytest.raises(UserError) as error:
        source.validate()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_world_is_tried_by_its_demonstrations() -> None:
    Counters().validate()


def test_a_demonstration_without_its_calls_is_refused() -> None:
    class Talking(Counters):
        def demonstration(self, problem: Problem) -> tuple[Mapping[str, Any], ...]:
            return TaskSource.demonstration(self, problem)

    assert "item 0: its own gold answer 'done' is refused (wrong)" in refused(Talking())


def test_a_world_where_doing_nothing_is_right_is_refused() -> None:
    class Idle(Counters):
        def problem(self, item: int) -> Problem:
            return Problem(item, ({"role": "user", "content": "make it 10"},), "done", {"start": 10})

    assert "item 0: an empty answer is accepted" in refused(Idle())


def test_a_world_where_any_calls_are_right_is_refused() -> None:
    class Lenient(Counter):
        def score(self, answer: Answer) -> Score:
            return Score.of(any(message["role"] == "tool" for message in answer.messages))

    class Any_(Counters):  # noqa: N801
        def open(self, problem: Problem, seed: int | None = None) -> Session:
            return Lenient(self, problem.payload["start"])

    assert "item 0: the gold answer of item 1, 'done', is accepted" in refused(Any_())


@pytest.mark.parametrize("where", ["result", "state"])
def test_a_world_that_goes_another_way_each_time_is_refused(where: str) -> None:
    numbers = itertools.count()

    class Drifting(Counter):
        def digest(self) -> str:
            return str(next(numbers))

    class Drift(Counters):
        def open(self, problem: Problem, seed: int | None = None) -> Session:
            return Drifting(self, problem.payload["start"])

    source = Drift() if where == "state" else Counters(lambda session: str(next(numbers)))
    said = refused(source)
    assert "item 0: score() raised Diverged: add: " in said and where.replace("result", "returned") in said


def test_a_stateless_source_gives_sessions_too() -> None:
    class Plain(TaskSource):
        def problem(self, item: int) -> Problem:
            return Counters().problem(item)

        def score(self, problem: Problem, answer: Answer) -> Score:
            return Score.of(answer.text == "10")

        def tools(self) -> tuple[Tool, ...]:
            return Counter(Counters(), 3).tools

    source = Plain("plain", Counters().args)
    assert tool_turn(source.open(source.problem(0)), ADD) == {
        "role": "tool", "name": "add", "content": "7", "outcome": "ok",
    }  # fmt: skip
    assert len(schemas(source, source.problem(0))) == 2


@pytest.mark.parametrize("text", ["", "[1]", '{"by": 1', "[" * 9999, f'{{"by": {"1" * 5000}}}'])
def test_what_a_model_writes_is_an_object_or_nothing(text: str) -> None:
    assert arguments_of('{"by": 4}') == {"by": 4} and arguments_of(text) is None
