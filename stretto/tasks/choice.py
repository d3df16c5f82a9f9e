"""Multiple choice from files in the layouts of GPQA, MMLU-Pro and MMLU. Each problem is asked with its options in several orders.

The orders are rotations and follow each other as items. A problem's score is the mean over its rotations, so a preference for one letter
scores no more than guessing.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase as LETTERS
from typing import Any

from pydantic import Field

from stretto.base.errors import UserError
from stretto.sandbox.isolate import Sandbox
from stretto.tasks.task import (
    Answer,
    AnswerFormat,
    Found,
    Problem,
    Range,
    Score,
    TaskSource,
    bare,
    find_answer,
    read_records,
    spoken,
    write_answer,
)

_RIGHT, _WRONG = "Correct Answer", "Incorrect Answer "
"""Column names of GPQA; the second is followed by a number."""
_NONE = "N/A"
"""Filler at the end of MMLU-Pro's lists of options."""
_ALONE = re.compile(r"[\W_]*([A-Za-z])[\W_]*")
_BEFORE_TEXT = re.compile(r"[\W_]*([A-Z])[).:*]+(?:\s.*|$)", re.DOTALL)
_DASHED = re.compile(r"[\W_]*([A-Z])\s+[-–—]+\s+(.*)", re.DOTALL)
_LIST = re.compile(r"(?:[\W_]|\b(?:[A-Z]|or|and)\b)*")
"""Nothing but letters, such as ``A) or B)``."""
_VERB = r"\s+(?:is|would be|should be|must be)"
_OPTION = r"\b(?:option|choice)\b"
_LETTER = r"[^\w\n]*([B-HJ-Z]\b|[AI]\b(?=[).:,*]|[^\w\n]*$))"
"""A and I are words, too, and count only before punctuation or the end of a line."""
_STATED = re.compile(
    rf"(?i:answer\b(?:(?:{_VERB}|[^\w\n:]*:)[^\w\n]*(?:the\s+)?{_OPTION}|{_VERB})?|{_OPTION}{_VERB}){_LETTER}"
    rf"|(?i:(?:choose|pick|select)\s+{_OPTION})[^\w\n]*([A-Z])\b"
    rf"|(?i:{_OPTION})[^\w\n]*([A-Z])\b(?=(?i:{_VERB}\s+"
    r"(?:(?:the\s+)?(?:correct|right|best)|the\s+(?:answer|one|choice|option))\b(?!\s+known)))",
    re.MULTILINE,
)
"""Statements that choose an option; the last one counts."""
_MENTIONED = re.compile(
    rf"(?i:{_OPTION})[^\w\n]*([A-Z])\b"
    r"(?=[).:,*]|\s+[-–—]|[^\w\n]*$|\s+(?i:it is|is true|because|since|fits|matches|seems)\b)",
    re.MULTILINE,
)
"""Mentions of an option, which choose it only where no statement does: after "the answer is C", "option D" is a remark."""


class ChoiceArgs(Range):
    """Arguments of kind ``choice``."""

    path: Path
    """JSONL, CSV or Parquet file with ``Question``, ``Correct Answer`` and ``Incorrect Answer 1``, …; or with ``question``, ``options`` or
    ``choices``, and ``answer_index`` or ``answer``, a letter or a number from 0."""
    rotations: int = Field(default=4, gt=0)
    """Number of orders per problem. With as many orders as options, every option stands in every place once."""
    format: AnswerFormat = "boxed"
    seed: int = 0
    """Seed of the first order where the file has none: GPQA lists the correct answer first."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A record of the file."""

    question: str
    options: tuple[str, ...]
    """Options in the order of the file; numbers of options count from 0."""
    right: int
    """Number of the correct option."""
    is_ordered: bool
    """Whether the file's order can be shown: it does not reveal the correct option."""


class ChoiceSource(TaskSource):
    """Item ``p * rotations + r`` is problem p of the file, with its options rotated by r / ``rotations`` of their number."""

    args_kind = ChoiceArgs
    args: ChoiceArgs

    def __init__(self, name: str, args: ChoiceArgs, sandbox: Sandbox | None = None) -> None:
        super().__init__(name, args, sandbox)
        groups = [("question", "Question"), ("options", "choices", _RIGHT)]
        records = read_records(args.path, args, groups)
        self._choices = [_choice(each, f"{args.path}: record {at}") for at, each in enumerate(records, args.first + 1)]
        self._letters = LETTERS[: max(len(choice.options) for choice in self._choices)]
        self.variants, self.num_items = args.rotations, len(records) * args.rotations

    def problem(self, item: int) -> Problem:
        number, turn = divmod(item, self.variants)
        choice = self._choices[number]
        order = list(range(len(choice.options)))
        if not choice.is_ordered:
            random.Random(f"choice/{self.args.seed}/{number}").shuffle(order)
        first = turn * len(order) // self.variants
        order = order[first:] + order[:first]
        shown = [f"{letter}) {choice.options[option]}" for letter, option in zip(LETTERS, order, strict=False)]
        question = "\n".join([choice.question, "", *shown, "", "Answer with the letter of the right option."])
        letter = LETTERS[order.index(choice.right)]
        return Problem.of(item, question, letter, self.args.format, order=order, right=choice.right)

    def read(self, problem: Problem, text: str) -> Found:
        """The number of the option that the answer chooses, by its letter or its text; marked: the answer chooses one."""
        order = problem.payload["order"]
        options = self._choices[problem.item // self.variants].options
        letter = chosen_letter(text, self.args.format, [options[option] for option in order])
        return Found("", False) if letter is None else Found(str(order[LETTERS.index(letter)]), True, letter)

    def score(self, problem: Problem, answer: Answer) -> Score:
        found = self.read(problem, answer.text)
        detail = "" if found.is_marked else "no option can be read"
        return Score.of(found.text == str(problem.payload["right"]), {"marked": float(found.is_marked)}, detail)

    def baselines(self, problem: Problem) -> Mapping[str, tuple[Mapping[str, Any], ...]]:
        """Agents that always choose the same letter."""
        answers = {letter: write_answer(letter, self.args.format) for letter in self._letters}
        return {f"always {letter}": ({"role": "assistant", "content": text},) for letter, text in answers.items()}


def chosen_letter(text: str, form: AnswerFormat, options: Sequence[str]) -> str | None:
    """The letter of the option that ``text`` chooses; ``options`` are shown as A, B, …. At the place of the format's answer: a letter alone,
    a letter before the option's text, or that text alone; else the last of `_STATED`, else of `_MENTIONED`. None: no option is chosen."""
    found = find_answer(text, form)
    answer = bare(found.text)
    if match := _ALONE.fullmatch(answer):
        letter = match[1].upper()
    elif named := _named(found.text, options):  # before the next: "E. coli" is not a choice of E
        letter = named
    elif match := _BEFORE_TEXT.match(answer):
        letter = "" if _is_list(answer, options) else match[1]
    elif (match := _DASHED.match(answer)) and _named(match[2], options) == match[1]:
        letter = match[1]
    else:
        said = "\n".join(map(bare, re.sub(r"</?answer>", "\n", spoken(text)).splitlines()))
        letters = ["".join(groups) for groups in _STATED.findall(said)] or _MENTIONED.findall(said)
        letter = letters[-1] if letters else ""
    return letter if letter and letter in LETTERS[: len(options)] else None


def _is_list(answer: str, options: Sequence[str]) -> bool:
    """Whether ``answer`` is nothing but several letters, each with or without the text of an option: ``A) or B)``, ``A) Paris, B) Rome``."""
    texts = "|".join(re.escape(each) for each in sorted(map(bare, options), key=len, reverse=True) if each)
    rest = re.sub(rf"([A-Z])\W+(?:{texts})(?!\w)", r"\1 ", answer) if texts else answer
    return _LIST.fullmatch(rest) is not None and len({*re.findall("[A-Z]", rest)}) > 1


def _named(text: str, options: Sequence[str]) -> str:
    """The letter of the one option that ``text`` repeats; empty: none or several. Typography counts only where it tells options apart."""
    for read in (str.strip, bare):
        folded = [read(option).casefold() for option in options]
        if (answer := read(text).casefold()) and folded.count(answer) == 1:
            return LETTERS[folded.index(answer)]
    return ""


def _choice(record: Mapping[str, Any], where: str) -> Choice:
    """The problem of a record. Raises UserError: no options, no question, or no valid answer."""
    question = str(record.get("question") or record.get("Question") or "").strip()
    if _RIGHT in record:
        wrong = [value for name, value in record.items() if name.startswith(_WRONG)]
        options, right, is_ordered = [record[_RIGHT], *wrong], 0, False
    else:
        options, right, is_ordered = _listed(record, where), -1, True
        while options and options[-1] == _NONE:
            options = options[:-1]
        names = ("answer_index", "answer", "Answer")
        answer = next((record[name] for name in names if record.get(name) is not None), None)
        letter = str(answer).strip().upper()
        right = int(letter) if letter.isdecimal() else LETTERS.find(letter) if len(letter) == 1 else -1
        if not 0 <= right < len(options):
            problem = f"{answer!r} is none of {len(options)} options"
            raise UserError(f"{where}: answer: {problem}; give a letter, or a number from 0")
    if not question or not 2 <= len(options) <= len(LETTERS):
        problem = f"a question and 2 to {len(LETTERS)} options are required, it has {len(options)}"
        raise UserError(f"{where}: {problem}; correct it")
    if None in options:
        raise UserError(f"{where}: option {options.index(None) + 1} is missing; write it")
    return Choice(question, tuple(str(option).strip() for option in options), right, is_ordered)


def _listed(record: Mapping[str, Any], where: str) -> list[Any]:
    options = record.get("options", record.get("choices"))
    if isinstance(options, str):  # CSV
        try:
            options = json.loads(options)
        except json.JSONDecodeError:
            raise UserError(f"{where}: options: no list in JSON; write one, or give JSONL or Parquet") from None
    if not isinstance(options, list):
        raise UserError(f"{where}: options: a {type(options).__name__}, not a list; write one")
    return options
