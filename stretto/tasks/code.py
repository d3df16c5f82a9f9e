"""Python functions with tests, in the layout of MBPP: ``text``, ``code``, ``test_list``, ``test_setup_code``.

Expected values never enter the sandbox. Of a test ``assert call == literal`` the program evaluates the call and prints its value; this
process compares. So an early exit, an object that equals everything, and reading the program's own text gain nothing. Tests with
``set(literal)``, ``math.isclose(call, literal)`` or ``abs(call - literal) < literal`` are checked in the same way. Of any other assertion
the program evaluates the whole condition, and ``True`` is expected: a program that prints this result without computing it passes.

A prompt shows the first tests only, and the other tests decide: an answer with the shown values hard-coded earns nothing. Published MBPP
scores use prompts with all three tests (``shown = 3``) and three solved problems as examples.
"""

from __future__ import annotations

import ast
import math
import operator
import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from textwrap import dedent
from typing import Any, Literal

from pydantic import Field

from stretto.base.errors import UserError
from stretto.base.trajectory import Outcome
from stretto.sandbox.isolate import Sandbox
from stretto.tasks.task import Answer, Problem, Range, Score, TaskSource, read_records, without_thoughts

_BUILTIN = Path(__file__).with_name("builtin.jsonl")
"""A few problems, enough to try a run without a download."""
_FENCED = re.compile(
    r"```[^\n`]++```|(?<!`)(?P<fence>`{3,}+)(?P<info>[^\n`]*+)\n(?P<code>.*?)"
    r"(?:^[ \t]*+(?P=fence)`*+(?!\S)|(?=^[ \t]*+(?P=fence)[^\s`])|(?P=fence)\s*+\Z|\Z)",
    re.DOTALL | re.MULTILINE,
)
"""Code within a line, which has no group, or a block in fences, which may end where the next one begins. The last fence of an answer may
stand behind the last statement."""
_PYTHON = re.compile(r"py(?:thon)?[\d.]*", re.IGNORECASE)
_CALLED = re.compile(r"\b([^\W\d]\w*)\(")
"""A name that a test calls."""
_MAX_LONGER = 1000
"""A value longer than four times the expected one plus this many characters counts as wrong without being parsed."""
_MAKERS: Mapping[str, Callable[[Any], Any]] = {"set": set, "frozenset": frozenset, "sorted": sorted, "float": float}
_VALUE = re.compile(r"^\x1evalue (\d+) (.*)$", re.MULTILINE)
# ast.literal_eval prints warnings about the values of untrusted programs.
warnings.filterwarnings("ignore", category=SyntaxWarning, module="<unknown>")
# Appended to the answer, with names that an answer is unlikely to use. Values of other types (a Counter, a named tuple, a Fraction) are
# printed as the built-in value that they are equal to.
_HARNESS = """
import collections.abc as _stretto_abc, numbers as _stretto_numbers
def _stretto_plain(value):
    for kind in (bool, int, float, complex, str, bytes):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, dict):
        return {_stretto_plain(key): _stretto_plain(item) for key, item in value.items()}
    for kind, plain in ((list, list), (tuple, tuple), (_stretto_abc.Set, set)):
        if isinstance(value, kind):
            return plain(_stretto_plain(item) for item in value)
    if isinstance(value, bytearray):
        return bytes(value)
    if isinstance(value, _stretto_numbers.Number):
        return next((kind(value) for kind in (float, int) if kind(value) == value), value)
    return value
def _stretto_float(value):
    is_other = isinstance(value, _stretto_numbers.Number) and not isinstance(value, (int, float, complex))
    return float(value) if is_other else value
def _stretto_show(number, call):
    import sys
    try:
        line = repr(_stretto_plain(call()))
    except Exception as error:
        line = "!" + type(error).__name__
    sys.__stdout__.write("\\n\\x1evalue %d %s\\n" % (number, line))
    sys.__stdout__.flush()
"""


class CodeArgs(Range):
    """Arguments of kind ``code``."""

    path: Path | None = None
    """JSONL file; None: a few problems that come with the package."""
    shown: int = Field(default=1, ge=0)
    """Largest number of tests in the prompt, which contain the function's name; 0: the prompt only states the name."""
    reward: Literal["all", "share"] = "all"
    """``all``: 1 if all tests pass, else 0. ``share``: share of the tests not in the prompt that pass (of all tests if all are in the
    prompt); correct still means that all tests pass."""


@dataclass(frozen=True, slots=True)
class Check:
    """One assertion, split into an expression and its expected value."""

    call: str
    """Expression that the program evaluates."""
    expected: Any
    """Value of the literal that it is compared with."""
    agrees: Callable[[Any, Any], bool] = operator.eq
    """Whether a value of the call and the expected value pass the test."""


class CodeSource(TaskSource):
    """Prompt: the task and the first of its tests. Answer: the last block of code in fences, which need not be closed
    (`find_code`); without a fence, the text."""

    args_kind = CodeArgs
    args: CodeArgs

    def __init__(self, name: str, args: CodeArgs, sandbox: Sandbox | None = None) -> None:
        super().__init__(name, args, sandbox)
        if sandbox is None:
            raise UserError(f"sources.{name}: kind: code runs programs; open it with a sandbox")
        self._programs = sandbox
        self._records = read_records(args.path or _BUILTIN, args, [("text",), ("code",), ("test_list",)])
        self.num_items = len(self._records)
        for number, record in enumerate(self._records, args.first + 1):
            _check(record, f"{args.path or _BUILTIN}: record {number}")

    def problem(self, item: int) -> Problem:
        record = self._records[item]
        tests, setup = record["test_list"], record.get("test_setup_code") or ""
        shown = "\n".join(tests[: self.args.shown])
        if len(tests) <= self.args.shown:
            rest = f"Your code must pass these tests:\n```python\n{shown}\n```"
        elif shown:
            rest = f"Your code must pass tests like these:\n```python\n{shown}\n```"
        else:
            rest = f"Name it {_function(tests[0], record['code'])}."
        question = f"{record['text']}\n{rest}"
        gold = "```python\n{}\n```".format(record["code"].replace("\r\n", "\n").strip())
        return Problem.of(item, question, gold, "plain", tests=list(tests), setup=setup)

    def score(self, problem: Problem, answer: Answer) -> Score:
        code, is_marked = find_code(answer.text, _CALLED.findall("\n".join(problem.payload["tests"])))
        parts = {"marked": float(is_marked), "passed": 0.0, "unseen": 0.0}
        if not code.strip():
            return Score.of(False, parts, "no code")
        tests = list(map(_split, problem.payload["tests"]))
        done = self._programs.run(_program(code, problem.payload["setup"], tests))
        if done.outcome is Outcome.INFRA:
            return Score(0.0, Outcome.INFRA, parts, done.why, done.cpu_s)
        written = dict(_VALUE.findall(done.stdout.decode("utf-8", "replace")))  # the last value of a test counts
        values = [written.get(str(number)) for number in range(len(tests))]
        passed = [_passes(value, test) for value, test in zip(values, tests, strict=True)]
        num_passed, unseen = sum(passed), passed[self.args.shown :] or passed
        parts |= {"passed": num_passed / len(tests), "unseen": sum(unseen) / len(unseen)}
        if all(passed):
            return Score(1.0, Outcome.OK, parts, "", done.cpu_s)
        reward = parts["unseen"] if self.args.reward == "share" else 0.0
        # With all values printed, some are wrong. Otherwise the program ended early, for the sandbox's reason.
        outcome = Outcome.WRONG if done.outcome is Outcome.OK or None not in values else done.outcome
        detail = done.why or f"{num_passed} of {len(tests)} tests passed"
        return Score(reward, outcome, parts, detail, done.cpu_s)


def find_code(text: str, called: Collection[str] = ()) -> tuple[str, bool]:
    """The program in ``text``, and whether it stood in a block in fences. Of several blocks: among those that are labelled as Python
    or have no label, the last of those that define most of the names ``called``; without such blocks, the last one."""
    text = without_thoughts(text)
    blocks = [((match["info"].split() or [""])[0], match["code"]) for match in _FENCED.finditer(text) if match["fence"]]
    if not blocks:
        return text, False
    python = [code for language, code in blocks if not language or _PYTHON.fullmatch(language)]
    name = rf"(?:{'|'.join(called)})\b"
    defines = re.compile(rf"^[ \t]*(?:(?:(?:async +)?def|class) +({name})|({name}) *=(?!=))", re.MULTILINE)
    if called and python:
        code = max(reversed(python), key=lambda code: len({one or other for one, other in defines.findall(code)}))
    else:
        code = (python or [code for _, code in blocks])[-1]
    return dedent(code) if code[:1].isspace() else code, True


def _check(record: Mapping[str, Any], place: str) -> None:
    """Raises `UserError`: the record has no task, no solution, no tests, or a test that is not one assertion."""
    needed = {
        "text": record["text"],
        "code": record["code"],
        "test_setup_code": record.get("test_setup_code") or "pass",
    }
    for name, value in needed.items():
        if not isinstance(value, str) or not value.strip():
            raise UserError(f"{place}: {name}: must be a text, is {value!r:.60}; write one")
    tests = record["test_list"]
    if not tests or not isinstance(tests, list) or not all(isinstance(test, str) for test in tests):
        raise UserError(
            f"{place}: test_list: must be a list of one or more assertions, is {str(tests)[:60]!r}; correct it"
        )
    for test in tests:
        try:
            _split(test)
        except ValueError as error:
            raise UserError(f"{place}: test_list: {test[:60]!r} {error}") from None


@lru_cache(maxsize=1 << 14)
def _split(assertion: str) -> Check:
    """The check of an assertion. Raises ValueError: the text is not one assertion."""
    try:
        body = ast.parse(assertion.strip()).body
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"is no Python: {error}; write an assertion") from None
    if len(body) != 1 or not isinstance(body[0], ast.Assert):
        raise ValueError("is not one assertion; write each assertion as a text of its own")
    condition = body[0].test
    with suppress(ValueError, TypeError):  # an expected value is an expression, no literal
        match condition:
            case ast.Compare(left=call, ops=[ast.Eq()], comparators=[gold]):
                return Check(ast.unparse(call), _literal(gold))
            case ast.Compare(
                left=ast.Call(func=ast.Name(id="abs"), args=[ast.BinOp(left=call, op=ast.Sub(), right=gold)]),
                ops=[ast.Lt() | ast.LtE() as op],
                comparators=[bound],
            ):
                is_below = operator.lt if isinstance(op, ast.Lt) else operator.le
                near = partial(_is_near, is_below, _literal(bound))
                return Check(f"_stretto_float({ast.unparse(call)})", _literal(gold), near)
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="math"), attr="isclose"), args=[call, gold], keywords=options
            ) if {option.arg for option in options} <= {"rel_tol", "abs_tol"}:
                near = partial(math.isclose, **{str(option.arg): _literal(option.value) for option in options})
                return Check(f"_stretto_float({ast.unparse(call)})", _literal(gold), near)
    return Check(f"bool({ast.unparse(condition)})", True)


def _literal(node: ast.expr) -> Any:
    """Value of a literal, or of a set, a sorted list or a float that is made from one. Raises ValueError or TypeError: another expression."""
    match node:
        case ast.Call(func=ast.Name(id=name), args=[inner], keywords=[]) if name in _MAKERS:
            return _MAKERS[name](ast.literal_eval(inner))
    return ast.literal_eval(node)


def _is_near(is_below: Callable[[Any, Any], bool], bound: Any, value: Any, expected: Any) -> bool:
    return is_below(abs(value - expected), bound)


def _function(assertion: str, code: str) -> str:
    """Name of the function or class of the solution that the assertion calls."""
    defined = {node.name for node in ast.walk(ast.parse(code)) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    called = [node.id for node in ast.walk(ast.parse(assertion)) if isinstance(node, ast.Name) and node.id in defined]
    return called[0] if called else ", ".join(sorted(defined))


def _program(code: str, setup: str, tests: Sequence[Check]) -> str:
    shows = [f"_stretto_show({number}, lambda: ({test.call}))" for number, test in enumerate(tests)]
    return "\n".join([code, setup, _HARNESS, *shows, ""])


def _passes(written: str | None, test: Check) -> bool:
    if written is None or len(written) > 4 * len(repr(test.expected)) + _MAX_LONGER:
        return False
    try:
        # Infinities are not Python literals.
        value = float(written) if written in ("inf", "-inf", "nan") else ast.literal_eval(written)
        return bool(test.agrees(value, test.expected))
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError, OverflowError):
        return False  # no literal, text made to break the parser, or a value of a type that cannot be compared
