from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.tasks.answers import AnswerFormat, Found, ask, find_answer, write_answer

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
