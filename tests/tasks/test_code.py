from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from stretto.base.errors import UserError
from stretto.base.trajectory import Outcome
from stretto.sandbox.isolate import Sandbox
from stretto.sandbox.outcome import Limits
from stretto.tasks.code import Check, CodeArgs, CodeSource, _passes, _program, _split, find_code
from stretto.tasks.task import Answer

RIGHT = "def digit_sum(n):\n    return sum(int(digit) for digit in str(n))"


@pytest.fixture(scope="module")
def source(sandbox: Sandbox) -> CodeSource:
    return CodeSource("c", CodeArgs(), sandbox)


def test_every_problem_that_comes_with_the_package_validates(source: CodeSource) -> None:
    source.validate(source.num_items)


@pytest.mark.parametrize(
    ("text", "code", "is_marked"),
    [
        ("x = 1", "x = 1", False),
        ("Try:\n```python\nx = 1\n```\nor\n```\nx = 2\n```\nbye", "x = 2\n", True),
        ("```py\nx = 1", "x = 1", True),
        ("<think>```python\nx = 0\n```</think>```python\nx = 1\n```", "x = 1\n", True),
        ("```python\nx = '```'\n```", "x = '```'\n", True),
        ("```python3\nx = 1\n```\n", "x = 1\n", True),
        ("```Python\nx = 1\n```", "x = 1\n", True),
        ("```bash\npip install a\n```\nThen:\n```python\nx = 1\n```\nDone.", "x = 1\n", True),
        ("```python\nx = 1\n```\nIt prints\n```text\n5\n```\nDone.", "x = 1\n", True),
        ("Run ```pip install a``` first.\n```python\nx = 1\n``` Done.", "x = 1\n", True),
        ("````python\nx = 1\n```\ny = 2\n````\n", "x = 1\n```\ny = 2\n", True),
        ("```c\nint x;\n```", "int x;\n", True),
        ("First:\n```python\nx = 1\nThen:\n```python\nx = 2\n```", "x = 2\n", True),
        ("1. So:\n   ```python\n   if x:\n       y = 1\n   ```\n", "if x:\n    y = 1\n", True),
        ("```python\nx = 1```\n", "x = 1", True),
        ("`" * 8000, "`" * 8000, False),
    ],
)
def test_where_the_program_is(text: str, code: str, is_marked: bool) -> None:
    assert find_code(text) == (code, is_marked)


@pytest.mark.parametrize(
    "after",
    [
        "Output:\n```\n10\n```",
        "Example:\n```python\nprint(digit_sum(1234))\n```",
        "Its type:\n```python\ndigit_sums: list[int]\n```",
    ],
)
def test_a_block_after_the_function_is_not_the_program(source: CodeSource, after: str) -> None:
    assert find_code(f"```python\n{RIGHT}\n```\n{after}", ["digit_sum"]) == (f"{RIGHT}\n", True)
    assert source.score(source.problem(0), Answer(f"```python\n{RIGHT}\n```\n{after}")).ok


@pytest.mark.parametrize(
    "blocks",
    [
        ["def f(x): return x", "f = lambda x: g(x + 1)"],
        ["def g(x): return 0", "def f(x): return g(x + 1)\ndef g(x): return x", "def g(x): return 1"],
        ["class g: pass\ndef f(x): return x", "def f(x): return g(x)\nclass g(int): pass", "f == g"],
    ],
)
def test_the_last_block_that_defines_most_of_the_called_names_is_the_program(blocks: list[str]) -> None:
    text = "\nCorrected:\n".join(f"```python\n{block}\n```" for block in blocks)
    assert find_code(text, ["f", "g"]) == (f"{blocks[1]}\n", True)


def test_of_two_functions_the_last_is_the_program(source: CodeSource) -> None:
    wrong = RIGHT.replace("int(digit)", "1")
    for first, last, right in ((wrong, RIGHT, True), (RIGHT, wrong, False)):
        answer = Answer(f"```python\n{first}\n```\nCorrected:\n```\n{last}\n```")
        assert source.score(source.problem(0), answer).ok is right


@pytest.mark.parametrize(
    "text", [RIGHT, f"```python\n{RIGHT}\n```", f"Sure:\n```\n{RIGHT}\n```\nDone.", f"{RIGHT}\nprint('x', end='')"]
)
def test_right_programs_are_right_however_they_are_written(source: CodeSource, text: str) -> None:
    score = source.score(source.problem(0), Answer(text))
    assert (score.reward, score.outcome, score.parts["passed"]) == (1.0, Outcome.OK, 1.0)


@pytest.mark.parametrize(
    "text",
    [
        "def digit_sum(n): return 0",
        "def digit_sum(n): return 10",
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "raise SystemExit",
        "class Same:\n    def __eq__(self, other): return True\ndef digit_sum(n): return Same()",
        "class Same(int):\n    def __eq__(self, other): return True\n    __hash__ = None\ndef digit_sum(n): return Same(n)",
        "def digit_sum(n): return 'x' * n",
        "def digit_sum(n): return 1 / 0",
        "import atexit\natexit.register(lambda: print('\\x1evalue 0 True'))\ndef digit_sum(n): return True",
        "_stretto_show = lambda *_: None",
        "import builtins\nbuiltins.repr = lambda value: '0'\ndef digit_sum(n): return 0",
        "def digit_sum(n): return float('nan')",
    ],
)
def test_shortcuts_are_refused(source: CodeSource, text: str) -> None:
    score = source.score(source.problem(0), Answer(text))
    assert score.reward == 0.0 and score.outcome in (Outcome.WRONG, Outcome.CRASH)


def test_what_a_program_writes_as_a_value_is_read_with_care() -> None:
    """Values that are very long, or that make Python's parser warn, are wrong; correct values are parsed."""
    script = (
        "from stretto.tasks.code import Check, _passes\n"
        "_equals = lambda written, expected: _passes(written, Check('f()', expected))\n"
        "print(_equals('1if 1else ' * 50 + '1', 1), _equals('1,' * 200_000, 1), _equals('-' * 900 + '1', 1),\n"
        " _equals('[1, 2.0]', [1, 2]), _equals(str(int(1e300)), 1e300))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("False False False True True\n", "")


def test_half_a_surrogate_pair_in_an_answer_raises_nothing(source: CodeSource) -> None:
    assert source.score(source.problem(0), Answer(f"{RIGHT} # \ud800")).ok
    assert source.score(source.problem(0), Answer("digit_sum = \ud800")).outcome is Outcome.CRASH


def test_the_answers_own_failures_are_named(source: CodeSource, sandbox: Sandbox) -> None:
    crash = source.score(source.problem(0), Answer("x = ("))
    assert crash.outcome is Outcome.CRASH and "SyntaxError" in crash.detail
    sandbox_limits, sandbox.limits = sandbox.limits, Limits(wall_s=0.5)
    try:
        endless = source.score(source.problem(0), Answer("while True: pass"))
    finally:
        sandbox.limits = sandbox_limits
    assert endless.outcome is Outcome.TIMEOUT and endless.sandbox_s > 0


def test_what_tests_expect_is_not_in_the_sandbox(source: CodeSource) -> None:
    tests = source.problem(0).payload["tests"]
    assert "36" in tests[2]
    assert "36" not in _program("", "", [_split(test) for test in tests])


def test_shares_are_paid_only_where_the_recipe_says_so(sandbox: Sandbox) -> None:
    source = CodeSource("c", CodeArgs(reward="share"), sandbox)
    score = source.score(source.problem(0), Answer("def digit_sum(n): return 10"))
    assert (score.reward, score.outcome) == (
        pytest.approx(1 / 2),
        Outcome.WRONG,
    )  # one of the two tests that the prompt does not show
    assert score.parts["passed"] == pytest.approx(1 / 3)


def test_tests_are_held_back_and_decide(sandbox: Sandbox) -> None:
    source = CodeSource("c", CodeArgs(reward="share"), sandbox)
    problem = source.problem(0)
    question = problem.messages[-1]["content"]
    tests = problem.payload["tests"]
    assert tests[0] in question and not any(test in question for test in tests[1:])
    by_heart = source.score(problem, Answer("def digit_sum(n): return 0"))
    assert (by_heart.reward, by_heart.ok) == (0.0, False)
    assert (by_heart.parts["passed"], by_heart.parts["unseen"]) == (pytest.approx(1 / 3), 0.0)
    assert source.score(problem, Answer(RIGHT)).reward == 1.0


def test_how_many_tests_are_shown(sandbox: Sandbox) -> None:
    for shown in (0, 2, 3, 9):
        source = CodeSource("c", CodeArgs(shown=shown), sandbox)
        problem = source.problem(0)
        question, tests = problem.messages[-1]["content"], problem.payload["tests"]
        assert [test in question for test in tests] == [place < shown for place in range(3)]
        assert ("digit_sum" in question) and ("must pass these tests" in question) == (shown >= 3)
        assert source.score(problem, Answer(RIGHT)).ok and not source.score(problem, Answer("digit_sum = len")).ok
    assert "Name it digit_sum." in CodeSource("c", CodeArgs(shown=0), sandbox).problem(0).messages[-1]["content"]


def test_values_of_subclasses_equal_what_they_equal_in_python(source: CodeSource) -> None:
    problem = source.problem(2)
    assert "count_words" in problem.gold and "Counter" in problem.gold
    assert source.score(problem, Answer(problem.gold)).ok


@pytest.mark.parametrize(
    ("value", "equal", "unequal"),
    [
        ("Fraction(2, 2)", "1", "2"),
        ("[Fraction(1, 2)]", "[0.5]", "[0.25]"),
        ("Decimal('1.0')", "1", "1.5"),
        ("Decimal('0.1')", "Decimal('0.1')", "0.1"),
        ("{1: 2}.keys()", "{1}", "{2}"),
        ("{1: 2}.items()", "{(1, 2)}", "{(1, 3)}"),
        ("bytearray(b'a')", "b'a'", "b'b'"),
    ],
)
def test_values_of_other_types_equal_what_they_equal_in_python(
    value: str, equal: str, unequal: str, tmp_path: Path, sandbox: Sandbox
) -> None:
    solution = f"from decimal import Decimal\nfrom fractions import Fraction\ndef f():\n    return {value}"
    tests = [f"assert f() == {equal}", f"assert f() == {unequal}"]
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps({"text": "One.", "code": solution, "test_list": tests}))
    source = CodeSource("c", CodeArgs(path=path, shown=0), sandbox)
    assert source.score(source.problem(0), Answer(solution)).parts["passed"] == 0.5


def test_an_assertion_of_another_shape_is_its_own_condition() -> None:
    check = _split("assert abs(f(2) - g(2)) < 1e-9")
    assert (check.call, check.expected) == ("bool(abs(f(2) - g(2)) < 1e-09)", True)
    assert _split("assert f(1) == {'a': (1, 2)}").expected == {"a": (1, 2)}


@pytest.mark.parametrize(
    ("test", "call", "passing", "failing"),
    [
        ("set(f(3)) == set([1, 2])", "set(f(3))", ["{2, 1}"], ["[1, 2]", "{1}", "True"]),
        ("frozenset(f(3)) == frozenset((1,))", "frozenset(f(3))", ["{1}"], ["(1,)"]),
        ("f(3) == sorted([2, 1])", "f(3)", ["[1, 2]"], ["[2, 1]"]),
        ("f(3) == float('-inf')", "f(3)", ["-inf"], ["inf", "nan", "'-inf'"]),
        (
            "abs(f(3) - 2) < 1",
            "_stretto_float(f(3))",
            ["2", "2.9"],
            ["3", "1", "True", "inf", "nan", "'2'", "[2]", "9" * 999],
        ),
        ("abs(f(3) - 2) <= 1", "_stretto_float(f(3))", ["3", "True"], ["3.1", "<A object>", "None"]),
        (
            "math.isclose(f(3), 0.3333, rel_tol=0.01)",
            "_stretto_float(f(3))",
            ["0.333", "0.335"],
            ["0.34", "True", "2j", "[]"],
        ),
        ("math.isclose(f(3), 1.0)", "_stretto_float(f(3))", ["1", "1.0000000001"], ["1.001", "nan", "!TypeError"]),
    ],
)
def test_an_assertion_with_a_literal_is_decided_outside_the_sandbox(
    test: str, call: str, passing: list[str], failing: list[str]
) -> None:
    check = _split(f"assert {test}")
    assert check.call == call
    assert [value for value in [*passing, *failing] if _passes(value, check)] == passing


@pytest.mark.parametrize(
    "test",
    [
        "math.isclose(f(1), g(1))",
        "math.isclose(f(1), 2.0, rel_tol=g(1))",
        "math.isclose(f(1), 2.0, **{'rel_tol': 0.1})",
        "np.isclose(f(1), 2.0)",
        "isclose(f(1), 2.0, rtol=0.001)",
        "isclose(f(1), 2.0)",
        "set(f(1)) == set([[]])",
    ],
)
def test_an_assertion_that_has_no_literal_is_its_own_condition(test: str) -> None:
    assert _split(f"assert {test}") == Check(f"bool({test})", True)


def test_the_setup_defines_what_is_close(tmp_path: Path, sandbox: Sandbox) -> None:
    setup = "def isclose(a, b, rtol=1e-3):\n    return abs(a - b) <= rtol * b"
    tests = ["assert isclose(f(1), 1.0)", "assert isclose(f(1), 1.0, rtol=0.001)", "assert isclose(f(3), 1.0)"]
    path = tmp_path / "one.jsonl"
    path.write_text(
        json.dumps({"text": "x", "code": "def f(x): return x", "test_setup_code": setup, "test_list": tests})
    )
    source = CodeSource("c", CodeArgs(path=path), sandbox)
    score = source.score(source.problem(0), Answer("def f(x): return x + 1e-5"))
    assert score.parts["passed"] == pytest.approx(2 / 3)


def test_printing_results_without_computing_them_earns_nothing(tmp_path: Path, sandbox: Sandbox) -> None:
    tests = ["assert abs(f(1) - 0.3333) < 1e-3", "assert math.isclose(f(6), 2.0)", "assert set([f(3)]) == set([1.0])"]
    solution = "def f(x):\n    return x / 3"
    path = tmp_path / "one.jsonl"
    path.write_text(
        json.dumps({"text": "x / 3", "code": solution, "test_setup_code": "import math", "test_list": tests})
    )
    source = CodeSource("c", CodeArgs(path=path), sandbox)
    source.validate()
    exact = "from fractions import Fraction\ndef f(x):\n    return Fraction(x, 3)"
    assert source.score(source.problem(0), Answer(exact)).ok
    says_true = "print(*['\\x1evalue %d True' % i for i in range(9)], sep='\\n', flush=True)\nimport os; os._exit(0)"
    pleases = "class A:\n    __sub__ = lambda s, o: s\n    __abs__ = lambda s: s\n    __lt__ = lambda s, o: True\nf = lambda x: A()"
    for text in (says_true, pleases):
        score = source.score(source.problem(0), Answer(text))
        assert (score.reward, score.ok, score.parts["passed"]) == (0.0, False, 0.0)


def test_files_in_mbpp_layout(tmp_path: Path, sandbox: Sandbox) -> None:
    records = [
        {
            "text": f"Add {n}.",
            "code": f"def add(x):\r\n    return x + {n} + ZERO",
            "test_setup_code": "ZERO = 0",
            "test_list": [f"assert add(1) == {n + 1}", "assert add(0.5) > 0", "assert add(float('inf')) == add(1e999)"],
        }
        for n in range(1, 4)
    ]
    path = tmp_path / "mbpp.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    CodeSource("c", CodeArgs(path=path), sandbox).validate(3)
    records[1]["test_list"] = ["print(1)"]
    path.write_text("\n".join(map(json.dumps, records)))
    with pytest.raises(UserError, match="is not one assertion"):
        CodeSource("c", CodeArgs(path=path), sandbox)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("test_list", [], "test_list: must be a list of one or more assertions, is '[]'; correct it"),
        (
            "test_list",
            "assert f() == 1",
            "test_list: must be a list of one or more assertions, is 'assert f() == 1'; correct it",
        ),
        ("test_list", [None], "test_list: must be a list of one or more assertions, is '[None]'; correct it"),
        (
            "test_list",
            ["f() == 1"],
            "test_list: 'f() == 1' is not one assertion; write each assertion as a text of its own",
        ),
        ("text", None, "text: must be a text, is None; write one"),
        ("code", " ", "code: must be a text, is ' '; write one"),
        ("test_setup_code", 3, "test_setup_code: must be a text, is 3; write one"),
        ("text", ["word " * 9] * 9, f"text: must be a text, is {['word ' * 9] * 9!r:.60}; write one"),
    ],
)
def test_a_hole_in_a_file_names_the_record(
    field: str, value: object, said: str, tmp_path: Path, sandbox: Sandbox
) -> None:
    record = {"text": "One.", "code": "def f():\n    return 1", "test_list": ["assert f() == 1"]}
    path = tmp_path / "one.jsonl"
    path.write_text("\n".join(map(json.dumps, [record, record, record | {field: value}])))
    CodeSource("c", CodeArgs(path=path, first=1, limit=1), sandbox)
    with pytest.raises(UserError) as caught:
        CodeSource("c", CodeArgs(path=path, first=1), sandbox)
    assert str(caught.value) == f"{path}: record 3: {said}"


def test_null_as_setup_is_none(tmp_path: Path, sandbox: Sandbox) -> None:
    record = {"text": "1.", "code": "def f(): return 1", "test_list": ["assert f() == 1"], "test_setup_code": None}
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps(record))
    CodeSource("c", CodeArgs(path=path), sandbox).validate()


def test_without_a_sandbox_it_does_not_open() -> None:
    with pytest.raises(UserError, match="open it with a sandbox"):
        CodeSource("c", CodeArgs())


def test_mbpp_itself(sandbox: Sandbox) -> None:
    """Runs where a data folder lies beside the repository."""
    paths = [folder / "shared/data/code/mbpp.jsonl" for folder in Path(__file__).parents]
    if not (found := [path for path in paths if path.is_file()]):
        pytest.skip("MBPP is not here")
    CodeSource("c", CodeArgs(path=found[0]), sandbox).validate(12)
