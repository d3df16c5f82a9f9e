"""Multiple choice: layouts of files, orders of options, and reading the choice from an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from stretto.base.errors import UserError
from stretto.tasks.choice import ChoiceArgs, ChoiceSource, chosen_letter
from stretto.tasks.task import Answer, Problem

CITIES = ["Paris", "Rome", "Oslo", "Bern", "Riga", "Kyiv", "Lima", "Doha", "Baku", "Cairo"]


def source(path: Path, **args: Any) -> ChoiceSource:
    return ChoiceSource("mcq", ChoiceArgs.model_validate({"path": path, **args}))


def pro(tmp_path: Path, num: int = 12) -> Path:
    """MMLU-Pro's layout, with ten options or fewer."""
    records = [
        {
            "question": f"Capital {at}?",
            "options": CITIES[: 10 - at % 3],
            "answer": "ABCDEFGHIJ"[at % 7],
            "answer_index": at % 7,
        }
        for at in range(num)
    ]
    path = tmp_path / "pro.jsonl"
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def gpqa(tmp_path: Path, num: int = 40) -> Path:
    lines = [f"Which {at}?,right {at},wrong a{at},wrong b{at},wrong c{at}" for at in range(num)]
    path = tmp_path / "gpqa.csv"
    path.write_text(
        "\n".join(["Question,Correct Answer,Incorrect Answer 1,Incorrect Answer 2,Incorrect Answer 3", *lines])
    )
    return path


def shown(problem: Problem) -> list[str]:
    lines = str(problem.messages[0]["content"]).splitlines()
    return [line[3:] for line in lines if line[1:3] == ") "]


def test_both_layouts_validate(tmp_path: Path) -> None:
    for path, num in ((pro(tmp_path), 12), (gpqa(tmp_path), 40)):
        made = source(path)
        made.validate()
        assert (made.num_items, made.variants) == (4 * num, 4)


def test_every_option_stands_in_every_place_once(tmp_path: Path) -> None:
    made = source(pro(tmp_path), rotations=10)
    orders = np.array([[CITIES.index(option) for option in shown(made.problem(item))] for item in range(10)])
    assert (np.sort(orders, 0) == np.arange(10)[:, None]).all() and (np.sort(orders, 1) == np.arange(10)).all()
    # A preference for one letter scores no more than guessing.
    policies = [made.baselines(made.problem(item)) for item in range(10)]
    for letter in "ABCDEFGHIJ":
        texts = [policy[f"always {letter}"][-1]["content"] for policy in policies]
        assert sum(made.score(made.problem(item), Answer(text)).ok for item, text in enumerate(texts)) == 1


def test_gpqas_right_answer_has_no_place(tmp_path: Path) -> None:
    made = source(gpqa(tmp_path), rotations=1)
    places = [shown(made.problem(item)).index(f"right {item}") for item in range(40)]
    assert min(places.count(place) for place in range(4)) >= 3  # 10 each: P < .01 for less than 3 somewhere
    assert places == [
        shown(source(gpqa(tmp_path), rotations=1).problem(item)).index(f"right {item}") for item in range(40)
    ]
    assert places != [
        shown(source(gpqa(tmp_path), rotations=1, seed=1).problem(item)).index(f"right {item}") for item in range(40)
    ]


def test_equal_choices_are_read_alike_in_every_order(tmp_path: Path) -> None:
    made = source(pro(tmp_path))
    problems = [made.problem(item) for item in range(4)]
    assert len({problem.gold for problem in problems}) > 1
    assert {made.read(problem, problem.gold).text for problem in problems} == {"0"}
    assert [made.read(problem, problem.gold).place for problem in problems] == [problem.gold[7] for problem in problems]


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("\\boxed{B}", "B"),
        ("\\boxed{(b)}", "B"),
        ("\\boxed{\\text{B}}", "B"),
        ("It cannot be A. So \\boxed{B}.", "B"),
        ("\\boxed{B) Rome}", "B"),
        ("\\boxed{B - Rome}", "B"),
        ("\\boxed{**B** — Rome}", "B"),
        ("\\boxed{B) Rome (not A)}", "B"),
        ("\\boxed{B) or C)}", None),
        ("\\boxed{(A) Paris, (B) Rome, (C) Bern}", None),
        ("\\boxed{B) Rome; C) is wrong}", "B"),
        ("\\boxed{B) Rome, since A) and C) are wrong}", "B"),
        ("B. Rome, (C) is too cold", "B"),
        ("\\boxed{B) or C}", None),
        ("\\boxed{A) & B)}", None),
        ("\\boxed{A) Paris B) Rome}", None),
        ("\\boxed{A - D}", None),
        ("\\boxed{B – C – D}", None),
        ("The answer is B.\n\nA — in contrast to C — is wrong.", "B"),
        ("\\boxed{A - wrong. So the answer is B.}", "B"),
        ("\\boxed{B) x" + "," * 200_000 + "x}", "B"),  # in linear time
        ("\\boxed{B) x" + ", " * 200_000 + "x}", "B"),
        ("\\boxed{rome}", "B"),
        ("<think>Answer: C</think>\n**B**", "B"),
        ("The answer is (B).", "B"),
        ("First A, then Answer: C\nNo, the correct answer is B because it is.", "B"),
        ("ANSWER: **B**", "B"),
        ("The answer is A", "A"),
        ("\\boxed{\\text{B) Rome}}", "B"),
        ("\\boxed{\\textbf{B. Rome}}", "B"),
        ("\\boxed{\\text{Rome}}", "B"),
        ("\\boxed{\\textbf{(B) }\\text{Rome}}", "B"),
        ("\\boxed{**Rome**}", "B"),
        ("\\boxed{Option B}", "B"),
        ("\\boxed{Option B: Rome}", "B"),
        ("The answer is \\textbf{A}", "A"),
        ("The answer is \\textbf{B}, not A", "B"),
        ("The answer is B. Option D is wrong.", "B"),
        ("Answer: B\n\nExplanation: Rome it is. Option D is wrong.", "B"),
        ("The correct answer is (B) Rome, because option D is wrong.", "B"),
        ("**Answer:** Option B", "B"),
        ("The answer is option B, and choice C is for others.", "B"),
        ("The correct option is B because option C is false.", "B"),
        ("I choose option B because it is.", "B"),
        ("Option A is correct. Option D is false.", "A"),
        ("So it must be option B.", "B"),
        ("Option D is wrong.", None),
        ("the answer is a city", None),
        ("The answer is I think unknown", None),
        ("I think so", None),
        ("A city", None),
        ("\\boxed{K}", None),
        ("\\boxed{Atlantis}", None),
        ("\\boxed{}", None),
        ("", None),
        ("A\nB\nC\nD or so", None),
    ],
)
def test_what_is_a_choice(text: str, letter: str | None) -> None:
    assert chosen_letter(text, "boxed", CITIES) == letter


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("<answer>Option C</answer>", "C"),
        ("<answer>Option C - blue</answer>", "C"),
        ("<answer>The answer is A</answer>", "A"),
        ("Option B is the answer.", "B"),
        ("Option B is true.", "B"),
        ("So option B is the one.", "B"),
        ("Therefore option C matches the data", "C"),
        ("I would go with option C because it fits", "C"),
        ("Choice C it is", "C"),
        ("The answer is B? No: that is refuted. The correct option is C.", "C"),
        ("I first thought the answer is B. Checking again, option C is correct.", "C"),
        ("Some answer: B. The correct choice is D.", "D"),
        ("The answer is B. Option D is true of others.", "B"),
        ("Option A is the best known colour, yet wrong.", None),
        ("Option B is one of many.", None),
    ],
)
def test_a_statement_counts_by_its_place_and_a_mention_only_without_one(text: str, letter: str | None) -> None:
    assert chosen_letter(text, "tags", ["red", "green", "blue", "yellow"]) == letter


@pytest.mark.parametrize(
    ("text", "letter"), [("E. coli", "B"), ("C. elegans", "A"), ("C. yeast", "C"), ("D", "D"), ("E. albertii", None)]
)
def test_a_species_is_no_letter_before_a_text(text: str, letter: str | None) -> None:
    assert chosen_letter(f"\\boxed{{{text}}}", "boxed", ["C. elegans", "E. coli", "yeast", "none"]) == letter


@pytest.mark.parametrize(
    ("options", "text", "letter"),
    [
        (["Paris", "Rome", "Bern", "Both (A) and (B)"], "D) Both (A) and (B)", "D"),
        (["Paris", "Rome", "Bern", "Both (A) and (B)"], "(D) Both (A) and (B)", "D"),
        (["(A, D]", "[A, D)", "f(x, A) = 3", "x and (C) y"], "B) [A, D)", "B"),
        (["(A, D]", "[A, D)", "f(x, A) = 3", "x and (C) y"], "C) f(x, A) = 3", "C"),
        (["(A, D]", "[A, D)", "f(x, A) = 3", "x and (C) y"], "D) x and (C) y", "D"),
        (["O", "A", "AB", "B"], "B) A", "B"),
        (["O", "A", "AB", "B"], "A) O or B) A", None),
    ],
)
def test_letters_in_the_text_of_an_option_are_no_list(options: list[str], text: str, letter: str | None) -> None:
    assert chosen_letter(f"\\boxed{{{text}}}", "boxed", options) == letter


def test_options_that_differ_in_typography_alone_are_told_apart() -> None:
    options = ["3", "'3'", "=", "."]
    assert [chosen_letter(f"\\boxed{{{each}}}", "boxed", options) for each in options] == ["A", "B", "C", "D"]
    assert {chosen_letter(f"\\boxed{{{empty}}}", "boxed", options) for empty in ("", "**")} == {None}


def test_what_nobody_can_read_is_wrong_and_says_so(tmp_path: Path) -> None:
    made = source(pro(tmp_path))
    score = made.score(made.problem(0), Answer("Well, it depends."))
    assert (score.ok, score.parts, score.detail) == (False, {"marked": 0.0}, "no option can be read")


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"options": ["a", "b"], "answer": "A"}, "line 1: no field question or Question; it has options, answer"),
        ({"question": "?", "answer": "A"}, "line 1: no field options or choices or Correct Answer"),
        ({"question": "?", "options": ["a", "b"]}, "record 1: answer: None is none of 2 options"),
        ({"question": "?", "options": ["a", "b"], "answer": "C"}, "record 1: answer: 'C' is none of 2 options"),
        ({"question": "?", "options": ["a", None], "answer": "A"}, "record 1: option 2 is missing; write it"),
        ({"question": "?", "options": ["a"], "answer": 0}, "2 to 26 options are required, it has 1"),
        ({"question": "?", "options": "['a' 'b']", "answer": 0}, "options: no list in JSON"),
    ],
)
def test_bad_records_are_one_line(tmp_path: Path, record: dict[str, Any], said: str) -> None:
    (tmp_path / "bad.jsonl").write_text(json.dumps(record))
    with pytest.raises(UserError, match=said):
        source(tmp_path / "bad.jsonl")
    with pytest.raises(UserError, match=r"none\.jsonl: no such file"):
        source(tmp_path / "none.jsonl")


def test_other_spellings_of_a_record(tmp_path: Path) -> None:
    """MMLU's choices and number; options as JSON in CSV; MMLU-Pro's lists of ten, filled up; Parquet."""
    rows = {"question": ["Which?"], "choices": [["x", "y", "z"]], "answer": [2]}
    parquet.write_table(pyarrow.table(rows), tmp_path / "a.parquet")
    (tmp_path / "b.csv").write_text('question,options,answer\nWhich?,"[""x"", ""y"", ""z""]",C\n')
    record = {"question": "Which?", "options": ["x", "y", "z", "N/A", "N/A"], "answer": "C"}
    (tmp_path / "c.jsonl").write_text(json.dumps(record))
    for name in ("a.parquet", "b.csv", "c.jsonl"):
        problem = source(tmp_path / name, rotations=1).problem(0)
        assert (shown(problem), problem.gold) == (["x", "y", "z"], "\\boxed{C}"), name
