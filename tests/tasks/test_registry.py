from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import Field

from stretto.base.config import Config
from stretto.base.errors import UserError
from stretto.tasks.registry import KINDS, open_source
from stretto.tasks.strings import StringsSource

OWN = """
from __future__ import annotations

from dataclasses import dataclass

from stretto.base.config import Config
from stretto.tasks.task import Answer, Problem, Score, TaskSource


@dataclass(frozen=True, slots=True)
class Pair:
    left: int
    right: int


class EchoArgs(Config):
    word: str = "echo"


class Echo(TaskSource):
    args_kind = EchoArgs

    def __init__(self, name, args, sandbox=None):
        super().__init__(name, args, sandbox)
        self.word = args.word

    def problem(self, item: int) -> Problem:
        pair = Pair(item, item)
        return Problem(item, ({"role": "user", "content": f"{self.word} {pair.left}"},), f"{self.word} {pair.right}")

    def score(self, problem: Problem, answer: Answer) -> Score:
        return Score.of(answer.text == problem.gold)
"""


class Table(Config):
    """A source table of a recipe."""

    kind: str
    args: dict[str, object] = Field(default_factory=dict)


def test_a_kind_opens_with_its_arguments() -> None:
    source = open_source("s", Table(kind="strings", args={"operation": "sort", "length": 3}))
    assert isinstance(source, StringsSource) and len(source.problem(0).gold) == 5


def test_a_class_of_ones_own_opens_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "echo.py").write_text(OWN)
    source = open_source("mine", Table(kind=f"{tmp_path}/echo.py:Echo", args={"word": "say"}))
    source.validate()
    assert source.problem(2).gold == "say 2"


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("problem", r"item 0: problem\(\) raised ZeroDivisionError: division by zero \(own\.py:11\); correct the task"),
        ("demonstration", r"item 0: demonstration\(\) raised TypeError: .* \(own\.py:11\); correct the task"),
        ("__init__", r"cannot be made: ZeroDivisionError: division by zero \(own\.py:11\); correct its constructor"),
    ],
)
def test_an_error_in_a_users_file_names_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, said: str
) -> None:
    wrong = "recorded(None, 3)" if method == "demonstration" else "1 / 0"  # the first one fails inside of stretto
    lines = [
        "from stretto.tasks.session import SessionSource, recorded", "from stretto.tasks.task import Problem, Score", "",
        "class Own(SessionSource):", "    def problem(self, item):",
        "        return Problem(item, ({'role': 'user', 'content': 'x'},), 'y')", "    def open(self, problem, seed=None):",
        "        return None", "", f"    def {method}(self, *args):", f"        return {wrong}",
    ]  # fmt: skip
    (tmp_path / "own.py").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=said):
        open_source("s", Table(kind="own.py:Own")).validate()


def test_a_class_opens_from_a_module() -> None:
    opened = open_source("s", Table(kind="stretto.tasks.strings:StringsSource", args={"operation": "reverse"}))
    assert isinstance(opened, StringsSource)


@pytest.mark.parametrize(
    ("kind", "args", "said"),
    [
        ("string", {}, r"^sources\.s: kind: no kind 'string' \(did you mean 'strings'\?\); "),
        (
            "strings",
            {"operation": "sort", "lenght": 3},
            r"^sources\.s\.args: lenght: unknown key \(did you mean 'length'\?\)",
        ),
        ("strings", {"operation": "shuffle"}, r"^sources\.s\.args: operation: "),
        ("strings", {}, r"^sources\.s\.args: operation: missing; add it"),
        ("math", {}, r"^sources\.s\.args: path: "),
        ("no.such.module:Thing", {}, r"cannot import 'no\.such\.module'"),
        ("none.py:Thing", {}, r"cannot import 'none\.py'"),
        ("stretto.tasks.strings:StringsArgs", {}, "not a subclass of TaskSource"),
        (
            "stretto.tasks.strings:StringSource",
            {},
            r"^sources\.s: kind: stretto\.tasks\.strings has no 'StringSource' \(did you mean 'StringsSource'\?\); name",
        ),
    ],
)
def test_bad_recipes_are_one_line(kind: str, args: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        open_source("s", Table(kind=kind, args=args))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import nothing_of_this_name", "No module named 'nothing_of_this_name'"),
        ("Thing = (", r"was never closed \(thing\.py, line 1\)"),
        ("raise ValueError('two\\nlines')", "cannot import .*: ValueError: two lines; check"),
        ("from stretto.tasks.task import TaskSource as Thing", "lacks problem, score; write"),
        (
            f"{OWN}\n\nclass Thing(Echo):\n    def __init__(self, *args):\n        1 / 0",
            "cannot be made: ZeroDivisionError: ",
        ),
    ],
)
def test_a_file_that_makes_no_source_is_one_line(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "thing.py").write_text(text)
    with pytest.raises(UserError, match=rf"^sources\.mine: kind: .*{said}") as caught:
        open_source("mine", Table(kind=f"{tmp_path}/thing.py:Thing"))
    assert "\n" not in str(caught.value)


def test_every_kind_checks_its_arguments() -> None:
    for kind, source in KINDS.items():
        assert source.args_kind is not Config, kind
        assert source.args_kind.model_config["extra"] == "forbid", kind
        assert source.args_kind.model_fields, kind
