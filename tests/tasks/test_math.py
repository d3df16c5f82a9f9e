from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from stretto.base.errors import UserError
from stretto.base.trajectory import Outcome
from stretto.tasks.math import ArithmeticArgs, ArithmeticSource, MathArgs, MathSource, as_number, number_with_unit
from stretto.tasks.task import Answer, Problem, Score

RECORDS = [
    {"question": "Two and two apples?", "answer": "2 + 2 = <<2+2=4>>4 apples.\n#### 4"},
    {"question": "A thousand and a half?", "answer": "Simply so.\n#### 1,000.50"},
    {"problem": "Roots of $x^2=2$?", "answer": "\\pm\\sqrt{2}", "solution": "Take the root: $\\boxed{\\pm\\sqrt{2}}$."},
    {"problem": "Half of a half?", "answer": "\\frac{1}{4}", "solution": "Halve it."},
    {"problem": "Where is $f$ defined?", "answer": "[0,\\infty)", "solution": "Not below 0."},
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("math") / "math.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    return path


@pytest.fixture(scope="module")
def source(path: Path) -> Iterator[MathSource]:
    source = MathSource("m", MathArgs(path=path))
    yield source
    source.close()


@given(st.lists(st.sampled_from("+-*"), min_size=1, unique=True), st.integers(2, 5), st.integers(0, 10**6))
def test_sums_are_right(operators: list[str], terms: int, item: int) -> None:
    args = ArithmeticArgs.model_validate({"operators": operators, "terms": terms})
    problem = ArithmeticSource("a", args).problem(item)
    expression = problem.messages[0]["content"].removesuffix(" =")
    assert int(problem.gold) == eval(expression)


def test_sums_validate() -> None:
    ArithmeticSource("a", ArithmeticArgs(operators=("+", "-", "*"), terms=3, format="tags")).validate()


@given(st.integers(), st.integers(1, 10**9))
def test_numbers_are_read_exactly(top: int, bottom: int) -> None:
    assert as_number(f"{top}") == (top if abs(top) < 10**40 else None)
    assert as_number(f"{top % 10**12}/{bottom}") == Fraction(top % 10**12, bottom)
    assert as_number(f"${top % 10**15:,}.") == top % 10**15


@pytest.mark.parametrize("text", ["**53**", "$53$", "= 53", "53%", "€53", "\\(53\\)", "£53.00"])
def test_typography_around_a_number_is_ignored(text: str) -> None:
    source = ArithmeticSource("a", ArithmeticArgs())
    problem = replace(source.problem(0), gold="53")
    assert source.score(problem, Answer(text)).ok and not source.score(problem, Answer(f"{text} or 54")).ok


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("−53", -53), ("–53", -53), ("‑53", -53), ("−$53", -53), ("7⁄4", Fraction(7, 4)), ("1 3/4", Fraction(7, 4)), ("-1 3/4", Fraction(-7, 4)),
        ("43 548 701", 43548701), ("-1 234.5", Fraction(-2469, 2)), ("1'234'567", 1234567), ("53\u200b", 53),
    ],
)  # fmt: skip
def test_other_characters_and_spellings_of_a_number(text: str, value: Fraction) -> None:
    assert as_number(text) == value


@pytest.mark.parametrize("text", ["12 34", "12345 678", "1 234 56", "1 1.5/2", "1 5/0", "3–5", "1.5 234"])
def test_two_numbers_are_no_number(text: str) -> None:
    assert as_number(text) is None


@pytest.mark.parametrize("text", ["", ".", "1/0", "1,2", "x", "1 2", "--1", "1e9", "9" * 50, "٣ apples", "\\boxed{3}"])
def test_what_is_no_plain_number_is_none(text: str) -> None:
    assert as_number(text) is None


@pytest.mark.slow
def test_both_layouts_validate(source: MathSource) -> None:
    source.validate()
    assert (source.num_items, source.problem(0).gold) == (5, "\\boxed{4}")


@pytest.mark.parametrize(
    ("item", "text", "right"),
    [
        (0, "\\boxed{4}", True),
        (0, "\\boxed{4.0}", True),
        (0, "so we get 4 apples", True),
        (0, "\\boxed{5}", False),
        (1, "\\boxed{\\$1000.5}", True),
        (2, "\\boxed{\\pm 2^{1/2}}", True),
        (2, "\\boxed{\\sqrt{2}}", False),
        (3, "\\boxed{0.25}", True),
        (3, "The answer is $\\frac{2}{8}$.", True),
        (4, "\\boxed{x\\in[0,\\infty)}", True),
        (4, "\\boxed{(0,\\infty)}", False),
        (0, "\\boxed{4 apples}", True),
        (0, "\\boxed{$4 left.}", True),
        (0, "\\boxed{She has 4 left}", False),
        (3, "\\boxed{2 eighths}", False),
        (0, "\\boxed{4 is wrong}", False),
        (0, "\\boxed{less than 4}", False),
        (0, "\\boxed{2+2}", True),
        (0, "\\boxed{**4**}", True),
        (0, "\\boxed{5 apples}", False),
        (0, "\\boxed{3 or 4}", False),
        (0, "\\boxed{minus 4}", False),
        (0, "\\boxed{4 million}", False),
        (0, "\\boxed{4x}", False),
        (0, "\\boxed{4 x}", False),
        (0, "\\boxed{\\neq 4}", False),
        (0, "\\boxed{\\ge 4}", False),
        (0, "\\boxed{$> 4$}", False),
        (2, "\\boxed{±√2}", True),
        (2, "\\boxed{±√3}", False),
    ],
)
def test_answers_are_compared_by_what_they_mean(source: MathSource, item: int, text: str, right: bool) -> None:
    assert source.score(source.problem(item), Answer(text)).ok is right


@pytest.mark.parametrize(("gold", "right"), [("0.5", False), ("\\sqrt{1.5}", True)])
def test_a_root_covers_the_digits_after_the_point(source: MathSource, gold: str, right: bool) -> None:
    assert source.score(Problem.of(0, "", gold, "boxed", answer=gold), Answer("\\boxed{√1.5}")).ok is right


@pytest.mark.parametrize("bound", ["\\geq 5", "> 5", "\\neq 5"])
@pytest.mark.parametrize("form", ["${}$", "\\({}\\)"])
def test_a_bound_is_right_where_the_gold_is_one(source: MathSource, bound: str, form: str) -> None:
    gold = form.format(bound)
    problem = Problem.of(0, "", gold, "boxed", answer=gold)
    assert source.score(problem, Answer(f"\\boxed{{{bound}}}")).ok


@pytest.mark.parametrize(
    "text",
    [
        "(> 5)", "{\\ge 5}", "\\; > 5", "\\, \\ge 5", "\\(\\ge 5\\)", "\\[> 5\\]", "**> 5**", "\\displaystyle > 5", "\\left> 5\\right.",
        "\\nleq 5", "\\ngeq 5", "\\geqq 5", "\\gneq 5", "\\notin 5", "\\geqslant 5", "=> 5", "< 5",
    ],
)  # fmt: skip
def test_a_bound_is_no_value_in_any_spelling(source: MathSource, text: str) -> None:
    problem = Problem.of(0, "", "5", "boxed", answer="5")
    assert not source.score(problem, Answer(f"\\boxed{{{text}}}")).ok


def test_a_vector_in_angles_is_no_bound(source: MathSource) -> None:
    problem = Problem.of(0, "", "<1,2>", "boxed", answer="\\langle 1,2 \\rangle")
    assert source.score(problem, Answer("\\boxed{<1,2>}")).detail != "a bound, not a value"


@pytest.mark.parametrize(
    "text",
    [
        "65 miles per hour", "65 dollars per week", "65 dollars a week", "65 m^2", "65 cm^{2}", "65 km²", "65 m/s", "65 m/s^2", "65 cm^3/s", "65 miles/hour",
        "65 dollars/person", "65 miles/gallon", "65 mg/mL", "$65 per week", "$65 a week", "\\$65/week", "65/week",
        "\\text{65 dollars}", "65\\text{ miles per hour}", "65\\,\\mathrm{cm}", "65 pieces of cake", "65 students in total", "€65", "£65",
    ],
)  # fmt: skip
def test_a_unit_may_follow_a_marked_number(source: MathSource, text: str) -> None:
    gold, other = (Problem.of(0, "", number, "boxed", answer=number) for number in ("65", "66"))
    assert source.score(gold, Answer(f"\\boxed{{{text}}}")).ok
    assert (
        not source.score(gold, Answer(text + " or 66")).ok and not source.score(other, Answer(f"\\boxed{{{text}}}")).ok
    )


@pytest.mark.parametrize(
    "text", ["4 pi^2", "4 x^2", "4 parts per million", "4 thousands of cats", "4 per", "4 a b c", "4 pi/h", "4 ab^2", "4 xy^2", "4 xy²", "4 ab/cd",
     "4 cm^{2", "4 cm^2}", "4 per 100", "4 per hundred", "4 a hundred", "4 a bc", "4/hundred"],
)  # fmt: skip
def test_what_may_change_the_value_is_no_unit(text: str) -> None:
    assert number_with_unit(text) is None


@pytest.mark.parametrize(
    "text", ["1\\,234,567", "1{,}234{,}567", "1,\\!234,\\!567", "1\\ 234\\ 567", "1\u202f234\u202f567"]
)
def test_spaces_between_thousands_are_ignored(text: str) -> None:
    assert as_number(text) == 1_234_567


def test_a_worked_gold_answer_ends_in_the_answer(path: Path) -> None:
    source = MathSource("m", MathArgs(path=path, worked=True))
    assert source.problem(0).gold == "2 + 2 = 4 apples.\n\\boxed{4}"
    assert source.problem(3).gold == "Halve it.\n\\boxed{\\frac{1}{4}}"


def test_without_a_solution_the_gold_answer_is_the_answer(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"problem": "2 + 3", "answer": "5", "solution": null}\n')
    assert MathSource("m", MathArgs(path=tmp_path / "a.jsonl", worked=True)).problem(0).gold == "\\boxed{5}"


@pytest.mark.slow
def test_the_layouts_of_aime(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(
        'ID,Year,Question,Answer\n2024-I-1,2024,"Find m, n.",073\n2024-I-2,2024,Find n.,25\n'
    )
    rows = {"ID": ["I-1", "I-2"], "Problem": ["Find m, n.", "Find n."], "Solution": ["", ""], "Answer": [73, 25]}
    parquet.write_table(pyarrow.table(rows), tmp_path / "b.parquet")
    for name in ("a.csv", "b.parquet"):
        source = MathSource("aime", MathArgs(path=tmp_path / name))
        source.validate()
        assert source.problem(0).messages[0]["content"].startswith("Find m, n.")
        for text, right in (("So \\boxed{73}", True), ("\\boxed{073}", True), ("\\boxed{25}", False)):
            assert source.score(source.problem(0), Answer(text)).ok is right
        source.close()


def test_ranges_are_apart(path: Path) -> None:
    train, held_out = (
        MathSource("m", MathArgs.model_validate({"path": path, **part})) for part in ({"limit": 3}, {"first": 3})
    )
    assert (train.num_items, held_out.num_items) == (3, 2)
    assert held_out.problem(0).messages[0]["content"].startswith("Half of a half?")


@pytest.mark.slow
def test_an_endless_comparison_is_the_answers_fault_and_the_next_one_works(path: Path) -> None:
    with closing(MathSource("m", MathArgs(path=path, check_s=1.0))) as source:

        def check(gold: str, answer: str) -> Score:
            return source.score(Problem.of(0, "", gold, "boxed", answer=gold), Answer(f"\\boxed{{{answer}}}"))

        assert check("x+1", "1+x").ok
        checked = check("x+1", "9^{9^{9^{9}}}")
        assert checked.outcome in (Outcome.TIMEOUT, Outcome.CRASH) and not checked.ok and checked.detail
        assert check("\\frac{x}{2}", "0.5x").ok


@pytest.mark.parametrize("answer", ["((((", "\\frac{", "\x00", "\\boxed{" * 300, "a" * 10_000, "{}" * 200])
def test_rubbish_is_wrong_and_nothing_breaks(source: MathSource, answer: str) -> None:
    assert not source.score(source.problem(2), Answer(answer)).ok


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", r"line 1: not JSON"),
        ('{"question": "?"}', r"line 1: no field answer or Answer; it has question"),
        ("[1]", r"line 1: a JSON array"),
        ("", r"bad\.jsonl: empty"),
        ('{"question": "q", "answer": null}', r"bad\.jsonl: record 1: answer: None is no text and no number; write it"),
        ('{"question": "q", "answer": " "}', r"record 1: answer: ' ' is no text and no number; write it"),
        ('{"question": "q", "answer": "So.\\n####"}', r"record 1: answer: nothing follows ####; write it"),
        ('{"question": "q", "answer": [1, 2]}', r"record 1: answer: \[1, 2\] is no text and no number"),
        ('{"question": "q", "answer": true}', r"record 1: answer: True is no text and no number"),
        ('{"question": "q", "answer": NaN}', r"record 1: answer: nan is no text and no number; write it"),
        ('{"question": null, "answer": "1"}', r"record 1: question: None is no text and no number; write it"),
        ('{"problem": "", "answer": "1"}', r"record 1: problem: '' is no text and no number; write it"),
    ],
)
def test_bad_files_are_one_line(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "bad.jsonl").write_text(text)
    with pytest.raises(UserError, match=said):
        MathSource("m", MathArgs(path=tmp_path / "bad.jsonl"))
    with pytest.raises(UserError, match=r"none\.jsonl: no such file"):
        MathSource("m", MathArgs(path=tmp_path / "none.jsonl"))
