from __future__ import annotations

import json

import pytest

from stretto.base.errors import UserError
from stretto.base.trajectory import Outcome
from stretto.sandbox.isolate import Sandbox
from stretto.tasks.task import Answer
from stretto.tasks.tools import ToolsArgs, ToolsSource
from stretto.text.chat import CHATML, render


@pytest.fixture(scope="module")
def source(sandbox: Sandbox) -> ToolsSource:
    return ToolsSource("t", ToolsArgs(), sandbox)


def test_it_validates(source: ToolsSource) -> None:
    source.validate()


@pytest.mark.parametrize("seed", [0, 1])
def test_the_tools_find_the_gold_answers(sandbox: Sandbox, seed: int) -> None:
    source = ToolsSource("t", ToolsArgs(seed=seed), sandbox)
    for item in range(30):
        problem = source.problem(item)
        call, result, last = source.demonstration(problem)
        assert result["content"].split("\n")[-1 if result["name"] == "database" else 0] == problem.payload["answer"]
        assert call["tool_calls"][0]["function"]["name"] == result["name"]
        score = source.score(problem, Answer(last["content"], source.demonstration(problem)))
        assert score.ok and score.parts["calls"] == 1.0


def test_a_demonstration_renders_with_the_tools(source: ToolsSource) -> None:
    problem = source.problem(0)
    schemas = [tool.schema() for tool in source.tools()]
    text = render(CHATML, [*problem.messages, *source.demonstration(problem)], schemas)
    call = json.loads(text.partition("assistant\n<tool_call>")[2].partition("</tool_call>")[0])
    assert call["name"] == "calculator" and problem.gold in text


def test_a_right_answer_needs_no_call_and_no_marks(source: ToolsSource) -> None:
    problem = source.problem(0)
    score = source.score(problem, Answer(f"Easy.\n{problem.payload['answer']}"))
    assert score.ok and score.parts == {"marked": 0.0}


def test_typography_around_a_right_answer_is_ignored(source: ToolsSource) -> None:
    problems = {problem.payload["answer"].isdecimal(): problem for problem in map(source.problem, range(30))}
    assert set(problems) == {True, False}
    for problem in problems.values():
        gold = problem.payload["answer"]
        for text in (f"{gold}.", f'"{gold}"', f"**{gold}**", f"${gold}$", f"= {gold}", f"\\boxed{{{gold}}}"):
            assert source.score(problem, Answer(f"<answer>{text}</answer>")).ok, text
        assert not source.score(problem, Answer(f"<answer>**{gold}1**</answer>")).ok


def test_a_unit_and_the_calculation_may_stand_beside_a_right_number(source: ToolsSource) -> None:
    for item in (0, 1, 2):
        problem = source.problem(item)
        gold = problem.payload["answer"]
        assert gold.isdecimal()
        for text in (
            f"{gold} cities",
            f"{int(gold):,} inhabitants",
            f"1810 * 2 - 5 = {gold}",
            f"1810 * 2 - 5 == {gold}",
            f"a = **{gold} people**",
        ):
            assert source.score(problem, Answer(f"<answer>{text}</answer>")).ok, text
        for text in (
            f"{gold}%",
            f"{gold} hundred",
            f"{gold}1 cities",
            f"{gold} = 1",
            f"{gold} or {gold}",
            f"{gold}\\%",
            f"{gold} per cent",
            f"{gold} percent",
            f"{gold} pct",
            f"x >= {gold}",
            f"x != {gold}",
        ):
            assert not source.score(problem, Answer(f"<answer>{text}</answer>")).ok, text
        assert not source.score(problem, Answer(f"not sure, I guess it is = {gold}")).ok


def test_the_same_problems_without_tools(source: ToolsSource) -> None:
    args = ToolsArgs(tools=("calculator",), digits=2)
    without = ToolsSource("w", args.replace(offered=False))
    without.validate()
    problem = ToolsSource("t", args).problem(3)
    assert without.problem(3) == problem and without.tools() == ()
    (last,) = without.demonstration(problem)
    assert without.score(problem, Answer(last["content"])).ok


@pytest.mark.parametrize("arguments", [{}, {"expression": 3}, {"expression": "1", "more": 2}, {"code": "1"}])
def test_bad_arguments_are_answered_not_raised(source: ToolsSource, arguments: dict[str, object]) -> None:
    calculator = source.tools()[0]
    result = calculator.call(arguments)
    assert result.outcome is Outcome.WRONG and "string arguments: expression" in result.text


def test_bad_calls_are_the_models_mistake(source: ToolsSource) -> None:
    calculator, python, database = source.tools()
    assert calculator.call({"expression": "__import__('os')"}).outcome is Outcome.WRONG
    assert python.call({"code": "1 / 0"}).outcome is Outcome.CRASH
    assert database.call({"query": "DROP TABLE cities"}).outcome is Outcome.WRONG
    assert database.call({"query": "SELECT count(*) FROM cities"}).text.endswith("40")


def test_python_is_not_offered_without_a_sandbox() -> None:
    with pytest.raises(UserError, match="open it with a sandbox"):
        ToolsSource("t", ToolsArgs())
    ToolsSource("t", ToolsArgs(tools=("calculator", "database"))).validate()
