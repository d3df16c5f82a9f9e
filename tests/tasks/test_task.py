from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.base.config import Config
from stretto.base.errors import UserError
from stretto.base.paths import RECIPES
from stretto.base.trajectory import Outcome, StepReward
from stretto.learning.recipe import SourceConfig
from stretto.tasks.registry import open_source
from stretto.tasks.task import (
    Answer,
    AnswerFormat,
    Found,
    Problem,
    Range,
    Score,
    ScoreTimeoutError,
    TaskSource,
    Tool,
    ask,
    bare,
    find_answer,
    read_records,
    score_fault,
    write_answer,
)


class Doubles(TaskSource):
    """A correct source; each subclass below has one fault."""

    def __init__(self) -> None:
        super().__init__("doubles", Config())

    def problem(self, item: int) -> Problem:
        return Problem(item, ({"role": "user", "content": f"2 * {item}"},), str(2 * item))

    def score(self, problem: Problem, answer: Answer) -> Score:
        return Score.of(answer.text == problem.gold)


def refusal(source: TaskSource) -> str:
    with pytest.raises(UserError) as caught:
        source.validate()
    message = str(caught.value)
    assert "\n" not in message and message.startswith("sources.doubles: item ")
    return message


def test_a_good_source_passes() -> None:
    Doubles().validate()
    Doubles().validate(limit_s=60.0)


def test_a_score_that_takes_too_long_is_named() -> None:
    end = threading.Event()

    class Slow(Doubles):
        def score(self, problem: Problem, answer: Answer) -> Score:
            end.wait()
            return super().score(problem, answer)

    class SlowJudge(Slow):
        is_verifiable = False

    for source in (Slow(), SlowJudge()):
        with pytest.raises(
            ScoreTimeoutError, match=r"^sources.doubles: item 0: score\(\) has not returned after 0.1 s; "
        ):
            source.validate(limit_s=0.1)
    end.set()


def test_a_gold_answer_that_is_refused_is_named() -> None:
    class Bad(Doubles):
        def score(self, problem: Problem, answer: Answer) -> Score:
            return Score.of(answer.text == problem.gold and problem.item != 3, detail="I dislike 3")

    assert "item 3: its own gold answer '6' is refused (wrong: I dislike 3)" in refusal(Bad())


def test_a_source_that_is_judged_by_nobody_is_refused() -> None:
    class Bad(Doubles):
        @property
        def at_once(self) -> int:
            return 0

    with pytest.raises(UserError, match=r"^sources\.doubles: at_once: must be at least 1, is 0$"):
        Bad().validate()


@pytest.mark.parametrize("text", ["", " \n"])
def test_an_empty_answer_that_is_accepted_is_named(text: str) -> None:
    class Bad(Doubles):
        def score(self, problem: Problem, answer: Answer) -> Score:
            return Score.of(answer.text in (problem.gold, text))

    assert "an empty answer is accepted" in refusal(Bad())


def test_a_reward_for_nothing_is_refused_though_the_answer_is_called_wrong() -> None:
    class Bad(Doubles):
        def score(self, problem: Problem, answer: Answer) -> Score:
            return Score(1.0, Outcome.OK if answer.text == problem.gold else Outcome.WRONG)

    assert "an empty answer is accepted (reward 1)" in refusal(Bad())


def test_a_verifier_that_looks_at_the_form_alone_is_refused() -> None:
    class Bad(Doubles):
        def score(self, problem: Problem, answer: Answer) -> Score:
            return Score.of(answer.text.isdecimal())

    assert "the gold answer of item" in refusal(Bad())


def test_one_shared_right_answer_is_no_fault() -> None:
    class Yes(Doubles):
        def problem(self, item: int) -> Problem:
            return Problem(item, ({"role": "user", "content": f"Is {2 * item} even?"},), "yes")

    Yes().validate()


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (Score(float("nan"), Outcome.OK), "reward as nan, not a finite number"),
        (Score(float("inf"), Outcome.OK), "reward as inf"),
        (Score("1", Outcome.OK), "reward as '1', not an int or float; convert it with float()"),  # type: ignore[arg-type]
        (Score(True, Outcome.OK), "reward as True, not an int or float"),
        (Score(1.0, Outcome.OK, {"style": float("nan")}), "style as nan"),
        (Score(1.0, "ok"), "outcome as 'ok'"),  # type: ignore[arg-type]
        (Score(10**400, Outcome.OK), "reward as 1000"),
        (Score(np.float32(1), Outcome.OK), "reward as np.float32(1.0), not an int or float; convert it with float()"),  # type: ignore[arg-type]
        (Score(1.0, Outcome.OK, sandbox_s=float("nan")), "sandbox_s as nan"),
        (Score(1.0, Outcome.OK, sandbox_s=-1.0), "sandbox_s as -1.0, less than 0"),
        (Score(1.0, Outcome.OK, None), "parts as None, not numbers by name"),  # type: ignore[arg-type]
        (Score(1.0, Outcome.OK, {1: 2.0}), "parts as {1: 2.0}, not numbers by name"),  # type: ignore[dict-item]
        (Score(0.0, Outcome.WRONG, detail=ValueError("no")), "detail as ValueError('no'), not a text"),  # type: ignore[arg-type]
        (Score(1.0, Outcome.OK, steps=((0, 1.0),)), "steps as ((0, 1.0),), not a tuple of StepReward"),  # type: ignore[arg-type]
        (
            Score(1.0, Outcome.OK, steps=(StepReward(np.argmax([0, 1]), 1.0),)),
            "the turn of step 0 as np.int64(1), not an int",
        ),  # type: ignore[arg-type]
        (Score(1.0, Outcome.OK, steps=(StepReward(0, 1.0, end="x"),)), "the end of step 0 as 'x', not an int"),  # type: ignore[arg-type]
        ("1.0", "'1.0', not a Score"),
        (1.0, "1.0, not a Score"),
        (None, "None, not a Score"),
    ],
)
def test_what_is_no_score_is_named(returned: Any, said: str) -> None:
    class Bad(Doubles):
        def score(self, problem: Problem, answer: Answer) -> Score:
            return returned

    assert said in refusal(Bad())
    assert said in (score_fault(returned) or "")


def test_a_sound_score_has_no_fault() -> None:
    assert score_fault(Score(0, Outcome.WRONG, {"places": 0.5})) is None


def test_what_raises_is_named_with_its_cause() -> None:
    class Bad(Doubles):
        def score(self, problem: Problem, answer: Answer) -> Score:
            raise KeyError("units\nof measure")

    assert "score() raised KeyError" in refusal(Bad())

    class Worse(Doubles):
        def problem(self, item: int) -> Problem:
            return super().problem(item // (item - 1))

    assert "item 1: problem() raised ZeroDivisionError" in refusal(Worse())


def test_a_verifier_that_cannot_work_is_refused() -> None:
    class Bad(Doubles):
        def score(self, problem: Problem, answer: Answer) -> Score:
            return Score(0.0, Outcome.INFRA, detail="no compiler")

    assert "could not do its work: no compiler" in refusal(Bad())


def test_problems_must_be_the_same_when_asked_again() -> None:
    class Bad(Doubles):
        count = 0

        def problem(self, item: int) -> Problem:
            self.count += 1
            return Problem(item, ({"role": "user", "content": f"{self.count}"},), "1")

    assert "another problem" in refusal(Bad())


@pytest.mark.parametrize("gold", ["", "  ", None])
def test_a_problem_without_a_gold_answer_is_refused(gold: Any) -> None:
    class Bad(Doubles):
        def problem(self, item: int) -> Problem:
            return Problem(item, ({"role": "user", "content": "?"},), gold)

    assert "gold answer is" in refusal(Bad())


def test_finite_sources_are_tried_from_end_to_end() -> None:
    class Last(Doubles):
        seen: set[int] = set()  # noqa: RUF012

        @property
        def num_items(self) -> int:
            return 100

        def problem(self, item: int) -> Problem:
            self.seen.add(item)
            return super().problem(item)

    Last().validate(4)
    assert Last.seen == {0, 25, 50, 75}


def test_a_tool_shows_itself_as_templates_want_it() -> None:
    tool = Tool("add", "Adds.", {"type": "object"}, call=lambda arguments: pytest.fail(f"called with {arguments}"))
    shape = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
    assert json.loads(json.dumps(tool.schema())) == {"type": "function", "function": shape}


def test_importing_every_kind_loads_nothing_heavy() -> None:
    heavy = ["torch", "transformers", "reasoning_gym", "sympy", "math_verify", "verifiers", "numpy.testing"]
    code = f"import sys, stretto.tasks.registry; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


FORMATS = get_args(AnswerFormat)
WORDS = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1)


@pytest.mark.parametrize(
    ("form", "text", "found"),
    [
        ("plain", " 1 2 \n", Found("1 2", True)),
        ("line", "I think\n so: \n\n 42 \n", Found("42", True)),
        ("tags", "<answer>41</answer> no, <answer> 42 </answer>.", Found("42", True)),
        ("tags", "<answer>42", Found("42", True)),
        ("tags", "<answer>4\n2</answer>", Found("4\n2", True)),
        ("tags", "It is\n42", Found("42", False)),
        ("tags", "<answer>$\\boxed{42}$</answer>", Found("42", True)),
        ("tags", "<answer>1</answer> or <answer>", Found("", True)),
        ("boxed", "so \\boxed{1}, or \\boxed{\\frac{1}{2}}.", Found("\\frac{1}{2}", True)),
        ("boxed", "so \\boxed{\\frac{1}", Found("so \\boxed{\\frac{1}", False)),
        ("boxed", "42", Found("42", False)),
        ("plain", "<think>1, no, 2</think>3", Found("3", True)),
        ("tags", "<think><answer>1</answer></think>\n3", Found("3", False)),
        ("tags", "", Found("", False)),
    ],
)
def test_where_the_answer_is(form: AnswerFormat, text: str, found: Found) -> None:
    assert find_answer(text, form) == found


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("**Isford**", "Isford"),
        ("“Isford.”", "Isford"),
        ("= $\\textbf{65}$.", "65"),
        ("\\(65\\,\\text{ miles}\\)", "65 miles"),
        ("1\\,234\\,567", "1234567"),
        ("1{,}234\u202f567", "1234567"),
        ("1\\,23", "1 23"),
        (".5", ".5"),
        ("'", ""),
        ("\\frac{1}{2}", "\\frac{1}{2}"),
    ],
)
def test_typography_around_an_answer_is_ignored(text: str, plain: str) -> None:
    assert bare(text) == plain


@given(WORDS, st.sampled_from(FORMATS))
def test_what_is_written_is_found(answer: str, form: AnswerFormat) -> None:
    assert find_answer(write_answer(answer, form), form) == Found(answer, True)


@given(WORDS, st.sampled_from(FORMATS))
def test_a_network_that_knows_no_marks_still_has_an_answer(answer: str, form: AnswerFormat) -> None:
    assert find_answer(answer, form).text == answer


@given(st.text(), st.sampled_from(FORMATS))
def test_no_text_is_too_strange(text: str, form: AnswerFormat) -> None:
    found = find_answer(text, form)
    assert found.text == found.text.strip()


def test_the_prompt_asks_for_the_format() -> None:
    assert ask("1 + 1 =", "plain") == "1 + 1 ="
    assert ask("1 + 1 =", "tags").startswith("1 + 1 =\n\n") and "<answer>" in ask("1 + 1 =", "tags")


def test_a_record_may_hold_what_python_takes_for_ends_of_lines(tmp_path: Path) -> None:
    texts = ["a\u2028b", "c\x0b\x85d", "plain"]
    path = tmp_path / "records.jsonl"
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    path.write_bytes("\r\n".join([*lines, "", ""]).encode())
    assert [record["text"] for record in read_records(path, Range(), [("text",)])] == texts


def test_a_call_is_right_by_its_name_and_arguments(tmp_path: Path) -> None:
    def call(name: str, **arguments: Any) -> str:
        return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"

    path = tmp_path / "calls.jsonl"
    asked = [{"role": "user", "content": "A table in San Jose?"}, {"role": "assistant", "content": "For how many?"}]
    first, second = call("Find", city="San Jose", seats="2"), call("Book", place="71", seats=2)
    talk = [*asked, {"role": "user", "content": "2."}, {"role": "assistant", "content": first}]
    talk += [{"role": "tool", "content": "[]"}, {"role": "assistant", "content": second}]
    path.write_text(json.dumps({"messages": talk}))
    kind = f"{RECIPES / 'examples' / 'calls.py'}:Calls"
    source = open_source("calls", SourceConfig(kind=kind, args={"path": path}))
    source.validate()
    assert source.num_items == 2
    problem = source.problem(0)
    assert [message["content"] for message in problem.messages] == [each["content"] for each in talk[:3]]
    same, other = f" {call('Find', seats=2, city='san jose')}\n", call("Find", city="San Jose")
    scores = [
        source.score(problem, Answer(text)) for text in (same, other, second, "San Jose", "<tool_call>{</tool_call>")
    ]
    assert [score.ok for score in scores] == [True, False, False, False, False]
    assert [score.parts["named"] for score in scores] == [1.0, 1.0, 0.0, 0.0, 0.0]
