from __future__ import annotations

import math
import operator
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.base.trajectory import Outcome
from stretto.sandbox.isolate import Sandbox
from stretto.sandbox.tools import MAX_TEXT, TableTool, calculate, run_python, shorten

FIXTURE = (
    "CREATE TABLE town (name TEXT, people INTEGER);\n"
    "INSERT INTO town VALUES ('Ulm', 126000), ('Jena', 111000), ('Hof', NULL);"
)


@given(st.integers(-(10**9), 10**9), st.sampled_from("+-*"), st.integers(-(10**9), 10**9))
def test_the_calculator_agrees_with_python(first: int, sign: str, second: int) -> None:
    expected = {"+": operator.add, "-": operator.sub, "*": operator.mul}[sign](first, second)
    assert calculate(f"({first}) {sign} ({second})").text == str(expected)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 ** 10 // 3", "341"), ("-7 % 3", "2"), ("sqrt(16) + abs(-1)", "5.0"), ("max(1, 2, 3)", "3"),
        ("round(pi, 3)", repr(round(math.pi, 3))), (" 1_000 * 2 ", "2000"), ("gcd(12, 18)", "6"),
        ("10 ** 1000 // 10 ** 999", "10"), ("round(1234, -2)", "1200"),
    ],
)  # fmt: skip
def test_calculator(expression: str, value: str) -> None:
    result = calculate(expression)
    assert (result.text, result.outcome) == (value, Outcome.OK)


@pytest.mark.parametrize(
    "expression",
    [
        "", "1 +", "1 / 0", "__import__('os')", "(1).__class__", "x", "'a' * 9", "[1] * 9", "True", "9 ** 9 ** 9", "2 ** 5000",
        "(" * 400, "1" * 501, "9 ** 0.5 ** -9999", "(-8) ** 0.5", "1 if 1 else 2", "lambda: 1", "1e308 * 10 // 1", "sqrt(-1)", "max()",
        "abs(x=1)", "1 << 9999999", "round(5, -10 ** 9)", "round(5.5, 10 ** 30)",
    ],
)  # fmt: skip
def test_calculator_refuses(expression: str) -> None:
    result = calculate(expression)
    assert result.outcome == Outcome.WRONG and result.text.startswith("error: "), result


def test_python_tool(sandbox: Sandbox) -> None:
    tool = partial(run_python, sandbox)
    assert tool("print(6 * 7)").text == "42\n"
    failed = tool("print('so far')\n1 / 0")
    assert failed.outcome == Outcome.CRASH and failed.text.startswith("so far\n") and "ZeroDivision" in failed.text
    assert tool("x = 1").text == ""
    assert "NameError" in tool("print(x)").text  # no state is kept
    text = tool("print('y' * 9000)").text
    assert len(text) <= MAX_TEXT and text.startswith("yyy") and " characters left out …]\nyyy" in text


def test_half_a_surrogate_pair_in_a_program_is_a_question_mark(sandbox: Sandbox) -> None:
    """It is no character, and JSON can contain it."""
    result = run_python(sandbox, "print('a\ud800') # \udcff")
    assert (result.text, result.outcome) == ("a?\n", Outcome.OK)


def test_table() -> None:
    tool = TableTool(FIXTURE)
    result = tool("SELECT name, people FROM town ORDER BY name")
    assert (result.text, result.outcome) == ("name | people\nHof | NULL\nJena | 111000\nUlm | 126000", Outcome.OK)
    assert tool("SELECT sum(people) AS s FROM town").text == "s\n237000"
    assert TableTool(FIXTURE, max_rows=1)("SELECT name FROM town").text.splitlines()[-1] == "(more than 1 rows)"


@pytest.mark.parametrize(
    "query",
    [
        "DELETE FROM town", "INSERT INTO town VALUES ('x', 1)", "DROP TABLE town", "PRAGMA writable_schema = 1", "SELEC", "",
        "ATTACH DATABASE '/tmp/x' AS x", "SELECT load_extension('x')", "SELECT zeroblob(1000000000)", "SELECT 1; SELECT 2",
        "CREATE TABLE x (y)", "VACUUM INTO '/tmp/x'", "SELECT printf('%.*c', 500000000, 'x')", "SELECT * FROM nowhere",
    ],
)  # fmt: skip
def test_a_table_cannot_be_changed(query: str) -> None:
    tool = TableTool(FIXTURE)
    result = tool(query)
    assert result.outcome == Outcome.WRONG or (query == "" and result.text == ""), result
    assert tool("SELECT count(*) FROM town").text.endswith("\n3")


def test_a_long_query_is_stopped() -> None:
    tool = TableTool(FIXTURE, wall_s=0.1)
    result = tool("WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n")
    assert result.outcome == Outcome.TIMEOUT and "longer than 0.1 s" in result.text


def test_a_query_that_ends_too_late_is_late_too() -> None:
    """The limit is checked between two functions only, which is why their values are short."""
    result = TableTool(FIXTURE, wall_s=0.0)("SELECT 1")
    assert result.outcome == Outcome.TIMEOUT and "longer than 0 s" in result.text
    doubled = "WITH RECURSIVE g(s) AS (SELECT 'a' UNION ALL SELECT s || s FROM g LIMIT {}) SELECT max(length(s)) FROM g"
    tool = TableTool(FIXTURE, wall_s=20.0)
    assert tool(doubled.format(16)).text.endswith("\n32768")
    assert "too big" in tool(doubled.format(18)).text


def test_shorten() -> None:
    text = "".join(f"{number:07}" for number in range(20_000))
    short = shorten(text, 1000)
    assert len(short) <= 1000 and shorten(short, 1000) == short and shorten("abc", 3) == "abc"
    head, mark, tail = short.split("\n")
    assert text.startswith(head) and text.endswith(tail) and abs(len(head) - len(tail)) <= 1
    assert mark == f"[… {len(text) - len(head) - len(tail):,} characters left out …]"
