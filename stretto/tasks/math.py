"""Arithmetic and word problems: a generator of sums, and files in the layouts of GSM8K, MATH and AIME.

math-verify compares formulas, in a `LimitedProcess`: an answer such as ``9^{9^{9^9}}`` takes unbounded time or memory, and math-verify's
own time limit is an alarm signal, which works only in a main thread and does not interrupt C code.
"""

from __future__ import annotations

import json
import logging
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from stretto.base.config import Config
from stretto.base.errors import UserError
from stretto.base.limited import LimitedProcess, Overrun, serve
from stretto.base.trajectory import Outcome
from stretto.sandbox.isolate import Sandbox
from stretto.tasks.task import Answer, AnswerFormat, Problem, Range, Score, TaskSource, bare, find_answer, read_records

_NUMBER = re.compile(r"([-+]?)(?:(\d{1,40}) )?(\d{1,40}(?:\.\d{1,40})?)(?:/(\d{1,40}))?")
"""Sign, whole part of a mixed number such as ``1 3/4``, numerator or value, and denominator."""
_TYPED = str.maketrans("−–‐‑⁄", "----/", "\u200b\u2060\ufeff")
"""Other characters for the minus sign and the fraction bar, and characters without width."""
_SPACED = re.compile(r"(?<![\d.])(\d{1,3}(?:[ '’]\d{3})+)(?![\d/])")
"""A number whose thousands are apart."""
_CURRENCY = re.compile(r"^([-+]?)\s*[$€£]")
_LENGTH = r"(?:[kcmdnµ]?m|in|ft|yd|mi|inch(?:es)?|feet|foot|yards?|miles?|(?:centi|milli|kilo)?met(?:er|re)s?|units?)"
_POWER = r"(?:\^(?:[23]|\{[23]\})|[²³])"
_UNIT = re.compile(
    rf"[^\W\d_²³]{{2,}}(?:['’-][^\W\d_²³]+)*(?:/(?:[hs]|sec|min|hrs?|day|kg|lb|m?[lL]|{_LENGTH}|[^\W\d_²³]{{4,}}))?"
    rf"|{_LENGTH}(?:{_POWER}(?:/[hs])?|/[hs]{_POWER}?)"
)
"""A word, or a unit such as ``cm^2``, ``m/s`` and ``miles/hour``. Other letters with a power or a quotient, and one letter alone, may be
variables."""
_BETWEEN = ("per", "a", "an", "of", "in")
"""Words that join two words of a unit, as in ``miles per hour``."""
_OF_VALUE = re.compile(
    "pi|sqrt|roots?|sin|cos|tan|log|ln|exp|mod|factorial|power|to|per|percent|over|below|less|more|than|least|most|plus|minus|times|negative|"
    "squared?|cubed?|(?:dozen|hundred|thousand|million|billion|trillion)s?|hal(?:f|ves)|thirds?|quarters?|fourths?|fifths?|sixths?|"
    "sevenths?|eighths?|ninths?|tenths?|hundredths?|thousandths?|twice|double|not|or|and|is|are",
    re.IGNORECASE,
)
"""Words that may change the value of the number before them."""
_RELATION = re.compile(
    r"[\s({]*(?:\\(?:displaystyle|left)\s*)?"
    r"(?:\\(?:neq?|not(?:in)?|n?(?:[gl](?:e|t|eqq?|eqslant)|less|gtr)|[gl]neqq?|gg|ll)(?![a-z])|[≠≤≥>≪≫]|<(?!.*>))"
)
"""Beginning of an answer, without typography, that bounds a value or excludes it, and is no vector ``<1, 2>``. math-verify reads ``\\neq 5`` as 5."""
_ROOT = re.compile(r"√\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+(?:\.\d+)?|[^\W\d_]))")
_WORKINGS = re.compile(r"<<[^<>]*>>")
"""Calculator annotations in GSM8K's solutions."""
_MEMORY_BYTES = 2 << 30
_MAX_CHARS = 2_000
"""Longest answer that is compared; the parser's time grows faster than linearly."""


class ArithmeticArgs(Config):
    """Arguments of kind ``arithmetic``."""

    operators: tuple[Literal["+", "-", "*"], ...] = Field(default=("+", "-"), min_length=1)
    terms: int = Field(default=2, gt=1)
    digits: int = Field(default=2, gt=0, le=12)
    """Largest number of digits per term. Start small networks with one or two: they do not learn to carry at first."""
    seed: int = 0
    format: AnswerFormat = "plain"


class ArithmeticSource(TaskSource):
    """Prompt ``17 + 4 =``, answer ``21``; scored as a number (`as_number`)."""

    args_kind = ArithmeticArgs
    args: ArithmeticArgs

    def problem(self, item: int) -> Problem:
        args = self.args
        draw = random.Random(f"arithmetic/{args.seed}/{item}")
        terms = [draw.randrange(10**args.digits) for _ in range(args.terms)]
        operators = [draw.choice(args.operators) for _ in terms[1:]]
        rest = "".join(f" {operator} {term}" for operator, term in zip(operators, terms[1:], strict=True))
        return Problem.of(item, f"{terms[0]}{rest} =", str(_value(terms, operators)), args.format)

    def score(self, problem: Problem, answer: Answer) -> Score:
        found = find_answer(answer.text, self.args.format)
        gold = as_number(find_answer(problem.gold, self.args.format).text)
        assert gold is not None, f"gold {problem.gold!r} is not a number"
        return Score.of(as_number(found.text) == gold, {"marked": float(found.is_marked)})


class MathArgs(Range):
    """Arguments of kind ``math``."""

    path: Path
    """JSONL, CSV or Parquet file."""
    format: AnswerFormat = "boxed"
    worked: bool = False
    """Whether gold answers contain the file's solutions before the answer."""
    check_s: float = Field(default=5.0, gt=0)
    """Time limit of one comparison of formulas, processor seconds. An answer that takes longer is a TIMEOUT."""


class MathSource(TaskSource):
    """Word problems from a file: ``question`` or ``problem``, and ``answer``; also capitalised, as in AIME's files.

    An ``answer`` with ``####`` has GSM8K's layout: the solution, ``####``, the number. Otherwise ``solution`` is the optional solution.
    Two plain numbers are compared exactly; everything else by math-verify in another process.
    """

    args_kind = MathArgs
    args: MathArgs

    def __init__(self, name: str, args: MathArgs, sandbox: Sandbox | None = None) -> None:
        super().__init__(name, args, sandbox)
        records = read_records(args.path, args, [("question", "problem", "Question", "Problem"), ("answer", "Answer")])
        self._records = [_checked(each, f"{args.path}: record {at}") for at, each in enumerate(records, args.first + 1)]
        self.num_items = len(records)
        # As a module: run as a script, this file named math.py would shadow Python's math.
        self._checker = LimitedProcess("stretto.tasks.math", limit_s=args.check_s)

    def problem(self, item: int) -> Problem:
        record = self._records[item]
        solution, mark, answer = map(str.strip, str(record["answer"]).rpartition("####"))
        solution = _WORKINGS.sub("", solution).strip() if mark else str(record.get("solution") or "")
        problem = Problem.of(item, str(record["question"]), answer, self.args.format, answer=answer)
        return replace(problem, gold=f"{solution}\n{problem.gold}") if self.args.worked and solution else problem

    def score(self, problem: Problem, answer: Answer) -> Score:
        found = find_answer(answer.text, self.args.format)
        parts = {"marked": float(found.is_marked)}
        if not found.text:
            return Score.of(False, parts, "no answer")
        gold = problem.payload["answer"]
        if found.text == gold:
            return Score.of(True, parts)
        value, gold_value = as_number(found.text), as_number(gold)
        if found.is_marked and gold_value is not None and number_with_unit(found.text) == gold_value:
            return Score.of(True, parts)
        if value is not None and gold_value is not None:
            return Score.of(value == gold_value, parts)
        if found.is_marked and _RELATION.match(bare(found.text)) and not _RELATION.match(bare(gold)):
            return Score.of(False, parts, "a bound, not a value")
        # An unmarked answer is prose in which math-verify finds the formula; a marked answer is the formula.
        return self._compared(f"${gold}$", f"${found.text}$" if found.is_marked else found.text, parts)

    def close(self) -> None:
        self._checker.close()

    def _compared(self, gold: str, answer: str, parts: Mapping[str, float]) -> Score:
        """Whether ``answer`` equals ``gold``: both are texts with formulas between ``$``, or numbers in prose. TIMEOUT or CRASH: the answer
        broke the comparison. Raises RuntimeError: the process does not start or does not answer, whatever the answer."""
        if len(answer) > _MAX_CHARS:
            return Score.of(False, parts, f"an answer of {len(answer)} characters")
        gold, answer = (
            _ROOT.sub(lambda root: f"\\sqrt{{{root[root.lastindex or 0]}}}", each) for each in (gold, answer)
        )
        try:
            return Score.of(json.loads(self._checker.ask(json.dumps([gold, answer]).encode())), parts)
        except Overrun as error:
            return Score(0.0, Outcome.TIMEOUT if error.is_late else Outcome.CRASH, parts, f"comparing it {error}")


def as_number(text: str) -> Fraction | None:
    """The number in ``text``, such as ``-1,234.50``, ``3/4``, ``1 1/2``, ``€12``, ``15%`` (as 15), ``**7**`` or ``= 7.``; None: not a plain
    number."""
    text = bare(text.translate(_TYPED))
    text = _CURRENCY.sub(r"\1", text.removesuffix("%").removesuffix("\\")).strip()
    text = _SPACED.sub(lambda spaced: re.sub("[ '’]", "", spaced[1]), text)
    text = re.sub(r"(?<=\d),(?=\d{3}(\D|$))", "", text)
    found = _NUMBER.fullmatch(text)
    if found is None:
        return None
    sign, whole, top, bottom = found.groups()
    if (bottom and not int(bottom)) or (whole and (not bottom or "." in top)):
        return None
    value = int(whole or 0) + Fraction(top) / int(bottom or 1)
    return -value if sign == "-" else value


def number_with_unit(text: str) -> Fraction | None:
    """The number in ``text`` if only a unit follows, such as ``72 clips``, ``18 dollars per week`` or ``$5/hour``; None: another text."""
    text = re.sub(r"(?<=\d)/(?=[^\W\d_]{3})", " per ", bare(text).replace("*", " "))
    number, *unit = text.split() or [""]
    if len(unit) == 2 and unit[0] in ("per", "a", "an") and len(unit[1]) > 2:
        del unit[0]
    elif unit[1:-1] and unit[-2] in _BETWEEN:
        del unit[-2]
    words = [part for each in unit for part in re.split(r"[/^²³]", each)]
    has_unit = len(unit) <= 2 and all(map(_UNIT.fullmatch, unit)) and not any(map(_OF_VALUE.fullmatch, words))
    return as_number(number) if has_unit else None


def _checked(record: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The record with names in lower case and its problem as ``question``. Raises UserError: the question or the answer is missing."""
    fields = {name.lower(): value for name, value in record.items()}
    names = [name for name in ("question", "problem") if name in fields]
    asked = next((name for name in names if fields[name]), names[0])
    for name in (asked, "answer"):
        value = fields.get(name)
        is_missing = value != value or not str(value).strip()  # a missing number of a table is NaN
        if is_missing or isinstance(value, bool) or not isinstance(value, str | int | float | Decimal):
            raise UserError(f"{where}: {name}: {value!r:.60} is no text and no number; write it")
    if not str(fields["answer"]).rpartition("####")[2].strip():
        raise UserError(f"{where}: answer: nothing follows ####; write it")
    return fields | {"question": fields[asked]}


def _value(terms: Sequence[int], operators: Sequence[str]) -> int:
    """Value of the expression, with the usual precedence."""
    summands = [terms[0]]
    for operator, term in zip(operators, terms[1:], strict=True):
        if operator == "*":
            summands[-1] *= term
        else:
            summands.append(term if operator == "+" else -term)
    return sum(summands)


def _compare(setup: bytes) -> Callable[[bytes], bytes]:
    """The function of the comparing process: from JSON ``[gold, answer]`` to ``true`` or ``false``."""
    from math_verify import parse, verify

    logging.disable(logging.WARNING)  # math-verify warns that its time limits are off

    def answer(question: bytes) -> bytes:
        gold, answer = (parse(text, parsing_timeout=None) for text in json.loads(question))
        return json.dumps(bool(verify(gold, answer, timeout_seconds=None))).encode()

    return answer


if __name__ == "__main__":
    serve(_compare, memory_bytes=_MEMORY_BYTES)
