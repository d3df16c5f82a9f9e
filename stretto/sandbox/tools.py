"""Functions behind tools: a calculator, Python in the sandbox, and a small database. Calls share no state."""

from __future__ import annotations

import ast
import math
import operator
import sqlite3
import time
from collections.abc import Callable, Mapping

from stretto.base.trajectory import Outcome
from stretto.sandbox.isolate import Sandbox
from stretto.sandbox.outcome import ToolResult

MAX_EXPRESSION = 500
"""Longest expression in characters, which also bounds the parser's depth."""
MAX_BITS = 4096
"""Largest size of an integer in the calculator."""
MAX_TEXT = 4000
"""Longest result of a tool in characters: the model reads all of it."""
_LEFT_OUT = "\n[… {:,} characters left out …]\n"
_TABLE_STEPS = 1000
"""Number of steps of SQLite's virtual machine between checks of the time limit."""
_MAX_VALUE_BYTES = 1 << 16
"""Largest value or row in a query, unless a stored row is longer. The time limit is checked between two functions only, and the time of
some of them, such as instr, grows with the square of their values' size: at this size to some hundredths of a second."""

# fmt: off
_SQL_FUNCTIONS = frozenset({
    "abs", "avg", "cast", "ceil", "coalesce", "count", "cume_dist", "date", "datetime", "dense_rank",
    "first_value", "floor", "glob", "group_concat", "hex", "ifnull", "iif", "instr", "julianday", "lag",
    "last_value", "lead", "length", "like", "lower", "ltrim", "max", "min", "nth_value", "ntile", "nullif",
    "percent_rank", "pow", "quote", "rank", "replace", "round", "row_number", "rtrim", "sign", "sqrt",
    "strftime", "string_agg", "substr", "substring", "sum", "time", "total", "trim", "typeof", "unicode",
    "unixepoch", "upper",
})
# fmt: on
"""Allowed functions; without those, such as printf, that make a long text before SQLite checks the limit on values."""

_Number = int | float
_OPERATORS: Mapping[type[ast.AST], Callable[..., _Number]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv, ast.Mod: operator.mod,
    ast.FloorDiv: operator.floordiv, ast.Pow: operator.pow, ast.UAdd: operator.pos, ast.USub: operator.neg,
}  # fmt: skip
_FUNCTIONS: Mapping[str, Callable[..., _Number]] = {
    **{each.__name__: each for each in (math.sqrt, math.exp, math.log, math.log2, math.log10, math.gcd, math.lcm)},
    **{each.__name__: each for each in (math.sin, math.cos, math.tan, math.floor, math.ceil, abs, min, max, round)},
}
_CONSTANTS = {"pi": math.pi, "e": math.e}


def calculate(expression: str) -> ToolResult:
    """Evaluate arithmetic: ``+ - * / // % **``, parentheses, common functions. The outcome of anything else is WRONG, with the reason."""
    try:
        if len(expression) > MAX_EXPRESSION:
            raise ValueError(f"longer than {MAX_EXPRESSION} characters")
        return ToolResult(repr(_value(ast.parse(expression.strip(), mode="eval").body)), Outcome.OK)
    except (ValueError, TypeError, SyntaxError, ArithmeticError, RecursionError, MemoryError) as error:
        return ToolResult(f"error: {error}", Outcome.WRONG)


def _value(node: ast.expr) -> _Number:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(number)
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            first, second = _value(left), _value(right)
            is_whole_power = isinstance(op, ast.Pow) and isinstance(first, int) and isinstance(second, int)
            if is_whole_power and int(first).bit_length() * abs(second) > MAX_BITS:  # before Python computes it
                raise ValueError(f"the power has more than {MAX_BITS} bits")
            return _bounded(_OPERATORS[type(op)](first, second))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            values = [_value(each) for each in arguments]
            # Python would compute that power of ten.
            if name == "round" and any(abs(digits) > MAX_BITS for digits in values[1:]):
                raise ValueError(f"more than {MAX_BITS} digits")
            return _bounded(_FUNCTIONS[name](*values))
    raise ValueError(f"{ast.unparse(node)[:40]!r} is not arithmetic")


def _bounded(value: _Number) -> _Number:
    if not isinstance(value, int | float):
        raise ValueError("the result is not a real number")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ValueError(f"a number has more than {MAX_BITS} bits")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("the result is not finite")
    return value


def run_python(sandbox: Sandbox, code: str) -> ToolResult:
    """The output of a Python program. No state is kept between calls."""
    finished = sandbox.run(code)
    text = finished.stdout.decode("utf-8", "replace")
    if finished.outcome != Outcome.OK:
        text += f"\nerror: {finished.why}" if text else f"error: {finished.why}"
    return ToolResult(shorten(text), finished.outcome, finished.cpu_s)


class TableTool:
    """A read-only database in memory, with the same contents in every call."""

    def __init__(self, script: str, *, max_rows: int = 50, wall_s: float = 1.0) -> None:
        """
        Args:
            script: trusted SQL that creates and fills the tables.
            max_rows: largest number of rows in a result.
            wall_s: time limit of a query, seconds.
        """
        self._max_rows = max_rows
        self._wall_s = wall_s
        filled = sqlite3.connect(":memory:")
        filled.executescript(script)
        self._image = filled.serialize()
        self._most_bytes = max(_MAX_VALUE_BYTES, _longest_row(filled))
        filled.close()

    def __call__(self, query: str) -> ToolResult:
        """Run one SELECT. WRONG, with SQLite's reason: a refused query; TIMEOUT: a query over the time limit."""
        deadline = time.perf_counter() + self._wall_s
        base = sqlite3.connect(":memory:")  # one per call, because calls come from any thread
        try:
            base.deserialize(self._image)
            base.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, self._most_bytes)
            base.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
            base.set_authorizer(_authorise)
            base.set_progress_handler(lambda: time.perf_counter() > deadline, _TABLE_STEPS)
            cursor = base.execute(query)
            rows = cursor.fetchmany(self._max_rows + 1)
            lines = [" | ".join(column[0] for column in cursor.description or ())]
            for row in rows[: self._max_rows]:
                lines.append(" | ".join("NULL" if value is None else str(value) for value in row))
            lines += [f"(more than {self._max_rows} rows)"] * (len(rows) > self._max_rows)
            if time.perf_counter() > deadline:
                return self._late()
            return ToolResult(shorten("\n".join(lines)), Outcome.OK)
        except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
            if time.perf_counter() > deadline:
                return self._late()
            return ToolResult(shorten(f"error: {error}"), Outcome.WRONG)
        finally:
            base.close()

    def _late(self) -> ToolResult:
        return ToolResult(f"error: took longer than {self._wall_s:g} s", Outcome.TIMEOUT)


def _longest_row(base: sqlite3.Connection) -> int:
    """Bytes of the longest row of any table, at least."""
    names = [name for (name,) in base.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    rows = (row for name in names for row in base.execute(f'SELECT * FROM "{name}"'))
    return max((sum(len(str(value).encode()) + 9 for value in row) for row in rows), default=0)


def _authorise(action: int, _: str | None, name: str | None, *__: str | None) -> int:
    if action == sqlite3.SQLITE_FUNCTION:
        is_allowed = (name or "").lower() in _SQL_FUNCTIONS
    else:
        is_allowed = action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE)
    return sqlite3.SQLITE_OK if is_allowed else sqlite3.SQLITE_DENY


def shorten(text: str, max_text: int = MAX_TEXT) -> str:
    """At most ``max_text`` characters of ``text``: its beginning and its end, where errors stand, around a line that states how many are
    left out. Idempotent."""
    if len(text) <= max_text:
        return text
    room = max(0, max_text - len(_LEFT_OUT.format(len(text))))
    head = room - room // 2
    return text[:head] + _LEFT_OUT.format(len(text) - room) + text[len(text) - room // 2 :]
