"""Problems that need a tool: a calculator, Python, a database. Several turns, one final answer.

Only the answer in the last turn is scored, by default in the format ``tags``. Calls are not scored: a correct answer without a call counts.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

from pydantic import Field

from stretto.base.config import Config
from stretto.base.errors import UserError
from stretto.base.trajectory import Outcome
from stretto.sandbox.isolate import Sandbox
from stretto.sandbox.outcome import ToolResult
from stretto.sandbox.tools import TableTool, calculate, run_python
from stretto.tasks.math import as_number, number_with_unit
from stretto.tasks.session import calling
from stretto.tasks.task import Answer, AnswerFormat, Problem, Score, TaskSource, Tool, bare, find_answer

ToolKind = Literal["calculator", "python", "database"]
_TOOLS: Mapping[ToolKind, tuple[str, str, str]] = {
    "calculator": ("expression", "for example 12 * (3 + 4)", "Evaluates an arithmetic expression."),
    "python": ("code", "the whole program", "Runs a Python program and gives what it prints."),
    "database": ("query", "one SELECT", "Reads the table cities(name, country, population, area) with SQL."),
}
"""Name and description of each tool's argument, and description of the tool."""
_COUNTRIES = ("Ardal", "Belmora", "Corvia", "Dunmar", "Estrel")
_NAMES = ("Al", "Bri", "Cor", "Del", "Fen", "Gar", "Hol", "Is", "Jor", "Kel"), ("ford", "mere", "ton", "vik", "wick")
_EQUALS = re.compile("(?<![<>!=])=+")
"""Between a calculation and its result; not the end of ``>=`` or ``!=``."""
_PERCENT = re.compile(r"%|\bper\s?cent\b|\bpct\b", re.IGNORECASE)


class ToolsArgs(Config):
    """Arguments of kind ``tools``."""

    tools: tuple[ToolKind, ...] = Field(default=("calculator", "python", "database"), min_length=1)
    """Tools of every problem; problem i needs tool i modulo their number."""
    offered: bool = True
    """Whether the tools are offered; False: the same problems without tools, for comparison."""
    digits: int = Field(default=4, gt=0, le=12)
    """Largest number of digits in calculations."""
    rows: int = Field(default=40, gt=0, le=50)
    """Number of rows in the database's table."""
    seed: int = 0
    format: AnswerFormat = "tags"


class _City(NamedTuple):
    name: str
    country: str
    population: int
    area: int


class _Task(NamedTuple):
    question: str
    answer: str
    argument: str
    """Argument of the call that finds the answer."""


class ToolsSource(TaskSource):
    """Endless source. All problems of the database use one table of cities, generated from the seed."""

    args_kind = ToolsArgs
    args: ToolsArgs

    def __init__(self, name: str, args: ToolsArgs, sandbox: Sandbox | None = None) -> None:
        super().__init__(name, args, sandbox)
        self._cities = _cities(args.rows, args.seed)
        self._tools = {kind: self._tool(kind) for kind in args.tools}

    def problem(self, item: int) -> Problem:
        task = self._task(item)
        return Problem.of(item, task.question, task.answer, self.args.format, answer=task.answer)

    def score(self, problem: Problem, answer: Answer) -> Score:
        found = find_answer(answer.text, self.args.format)
        gold = problem.payload["answer"]
        value = as_number(gold)
        text = _EQUALS.split(found.text)[-1] if found.is_marked else found.text
        if value is None:
            right = bare(found.text).casefold() == gold.casefold()
        else:
            number = number_with_unit(text) if found.is_marked else None
            right = not _PERCENT.search(text) and value in (as_number(text), number)
        parts = {"marked": float(found.is_marked)}
        if answer.messages:
            parts["calls"] = float(sum(message.get("role") == "tool" for message in answer.messages))
        return Score.of(right, parts)

    def tools(self) -> tuple[Tool, ...]:
        return tuple(self._tools.values()) if self.args.offered else ()

    def demonstration(self, problem: Problem) -> tuple[Mapping[str, Any], ...]:
        """A call, its result, and the answer; without tools, the answer alone."""
        if not self.args.offered:
            return ({"role": "assistant", "content": problem.gold},)
        kind = self._kind(problem.item)
        arguments = {_TOOLS[kind][0]: self._task(problem.item).argument}
        result = self._tools[kind].call(arguments)
        assert result.outcome is Outcome.OK, f"{kind} on its own demonstration: {result}"
        return (
            calling(kind, arguments),
            {"role": "tool", "name": kind, "content": result.text},
            {"role": "assistant", "content": problem.gold},
        )

    def _kind(self, item: int) -> ToolKind:
        return self.args.tools[item % len(self.args.tools)]

    def _task(self, item: int) -> _Task:
        draw = random.Random(f"tools/{self.args.seed}/{item}")
        kind = self._kind(item)
        if kind == "calculator":
            return _calculation(draw, self.args.digits)
        return _counting(draw) if kind == "python" else _lookup(draw, self._cities)

    def _tool(self, kind: ToolKind) -> Tool:
        if kind == "calculator":
            return text_tool(kind, calculate)
        if kind == "python":
            if self.sandbox is None:
                raise UserError(f"sources.{self.name}: tools: python runs programs; open it with a sandbox")
            return text_tool(kind, partial(run_python, self.sandbox))
        rows = ", ".join(str(tuple(city)) for city in self._cities)
        table = "cities (name TEXT PRIMARY KEY, country TEXT, population INTEGER, area INTEGER)"
        return text_tool(kind, TableTool(f"CREATE TABLE {table}; INSERT INTO cities VALUES {rows};"))


def text_tool(kind: ToolKind, run: Callable[[str], ToolResult]) -> Tool:
    """The tool ``kind``, which has one string argument; ``run`` gets its value."""
    field, what, description = _TOOLS[kind]
    fields = {field: {"type": "string", "description": what}}
    return string_tool(kind, description, fields, lambda arguments: run(arguments[field]), additionalProperties=False)


def string_tool(
    name: str,
    description: str,
    fields: Mapping[str, Mapping[str, Any]],
    run: Callable[[Mapping[str, str]], ToolResult],
    **schema: Any,
) -> Tool:
    """A tool whose arguments are all required strings. ``fields``: their JSON schemas; ``schema``: further keys of the object's schema."""

    def call(arguments: Mapping[str, Any]) -> ToolResult:
        if arguments.keys() != fields.keys() or not all(isinstance(value, str) for value in arguments.values()):
            return ToolResult(f"error: {name} takes string arguments: {', '.join(fields) or 'none'}", Outcome.WRONG)
        return run(arguments)

    return Tool(name, description, {"type": "object", "properties": fields, "required": list(fields), **schema}, call)


def _calculation(draw: random.Random, digits: int) -> _Task:
    a, b, c = (draw.randrange(1, 10**digits) for _ in range(3))
    sign = draw.choice("+-")
    expression = f"{a} * {b} {sign} {c}"
    value = a * b + (c if sign == "+" else -c)
    return _Task(f"What is {expression}?", str(value), expression)


def _counting(draw: random.Random) -> _Task:
    last, divisor, digit = draw.randrange(100, 1000), draw.randrange(3, 14), draw.randrange(10)
    question = f"How many of the integers from 1 to {last} are divisible by {divisor} or have the digit {digit}?"
    answer = sum(i % divisor == 0 or str(digit) in str(i) for i in range(1, last + 1))
    code = f"print(sum(i % {divisor} == 0 or '{digit}' in str(i) for i in range(1, {last} + 1)))"
    return _Task(question, str(answer), code)


def _lookup(draw: random.Random, cities: tuple[_City, ...]) -> _Task:
    country = draw.choice(sorted({city.country for city in cities}))
    there = [city for city in cities if city.country == country]
    match draw.choice(["count", "total", "largest"]):
        case "count":
            least = draw.randrange(1, 900) * 1000
            question = f"How many cities of {country} have more than {least} inhabitants?"
            answer = str(sum(city.population > least for city in there))
            query = f"SELECT count(*) FROM cities WHERE country = '{country}' AND population > {least}"
        case "total":
            most = draw.randrange(50, 400)
            question = f"What is the total population of the cities of {country} with an area of at most {most}?"
            answer = str(sum(city.population for city in there if city.area <= most))
            query = f"SELECT coalesce(sum(population), 0) FROM cities WHERE country = '{country}' AND area <= {most}"
        case _:
            question = f"Which city of {country} has the largest population?"
            answer = max(there, key=lambda city: city.population).name
            query = f"SELECT name FROM cities WHERE country = '{country}' ORDER BY population DESC LIMIT 1"
    return _Task(question, answer, query)


def _cities(rows: int, seed: int) -> tuple[_City, ...]:
    draw = random.Random(f"cities/{seed}")
    names = draw.sample([first + last for first in _NAMES[0] for last in _NAMES[1]], rows)
    populations = draw.sample(range(1, 1000), rows)  # all different, so that one city is the largest
    return tuple(
        _City(name, draw.choice(_COUNTRIES), 1000 * people + draw.randrange(1000), draw.randrange(10, 500))
        for name, people in zip(names, populations, strict=True)
    )
