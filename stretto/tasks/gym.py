"""Problems from generators of the reasoning-gym package.

The prompt is the generator's question, then the line that asks for the answer format (`stretto.tasks.task`). The default format ``plain``,
an answer alone, suits small networks; ``tags`` suits chat models.

Some generators' scorers run an answer as Python code. Answers to a few of them are first checked against an alphabet in which no function
can be called; the others are refused.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any, Final, Literal

from pydantic import Field

from stretto.base.config import Config
from stretto.base.errors import UserError, nearest, one_line
from stretto.base.trajectory import Outcome
from stretto.sandbox.isolate import Sandbox
from stretto.tasks.task import Answer, AnswerFormat, Problem, Score, TaskSource, find_answer

_SEED_STRIDE = 1 << 24
"""Distance between seeds. Generators seed item i with seed + i, so neighbouring seeds share all problems but one. Our seeds also lie
beyond the small seeds with which pre-training corpora were generated."""
_RIGHT = 1 - 1e-9
_EVALUATED = re.compile(r"\b(?:eval|exec|parse_expr|sympify)\(answer\b")
"""The call, in a scorer's source, that runs an answer as Python code."""
_LIST: Final = r"[0-9A-EQ_\s,'\"\[\].-]*"
_SUM: Final = r"(?!.*\* *\*)[0-9 +*/().-]{,500}"
"""Arithmetic without powers, whose values could be too large for the memory."""
_SAFE: Mapping[str, str] = {
    "binary_matrix": _LIST,
    "n_queens": _LIST,
    "spiral_matrix": _LIST,
    "string_insertion": _LIST,
    "countdown": _SUM,
    "coin_flip": r"[0-9 ,/.+-]*(?:[eE][+-]?[0-9]{1,2})?",  # its scorer computes the power of ten of any exponent
}
"""Answers that the scorers of these generators can safely read, as a regular expression. Any other answer is wrong."""


class GymArgs(Config):
    """Arguments of kind ``gym``."""

    dataset: str
    """Name of the generator in reasoning-gym, for example ``chain_sum``."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Settings of the generator, without ``seed`` and ``size``."""
    seed: int = Field(default=0, ge=0, lt=255)
    """Seed; two seeds have different problems, as far as the generator has enough."""
    size: int | None = Field(default=None, gt=0, le=_SEED_STRIDE)
    """Number of problems; None: endless. Generators that draw from a list need a size."""
    format: AnswerFormat = "plain"
    credit: Literal["exact", "graded"] = "exact"
    """``graded``: the generator's own partial credit; some generators reward a long list of guesses, or any answer."""


class GymSource(TaskSource):
    """Problems of one generator, whose own scorer judges the answer that `find_answer` finds."""

    args_kind = GymArgs
    args: GymArgs

    def __init__(self, name: str, args: GymArgs, sandbox: Sandbox | None = None) -> None:
        super().__init__(name, args, sandbox)
        self.num_items = args.size
        import reasoning_gym  # takes seconds

        where, known = f"sources.{name}.args", reasoning_gym.factory.DATASETS
        if args.dataset not in known:
            near = nearest(args.dataset, known)
            raise UserError(f"{where}: dataset: reasoning-gym has no {args.dataset!r}{near}; choose one of its")
        scorer = inspect.getsource(known[args.dataset][0].score_answer)
        # A composite passes answers on to the scorers of other generators.
        if args.dataset == "composite" or (args.dataset not in _SAFE and _EVALUATED.search(scorer)):
            problem = f"the scorer of {args.dataset!r} may run a model's answer as Python code"
            raise UserError(f"{where}: dataset: {problem}; choose another generator")
        if reserved := {"seed", "size"} & set(args.config):
            raise UserError(f"{where}: config.{min(reserved)}: is a field beside config; set it there")
        size = {} if args.size is None else {"size": args.size}
        seed = (args.seed + 1) * _SEED_STRIDE
        try:
            self._dataset = reasoning_gym.create_dataset(args.dataset, seed=seed, **size, **args.config)
        except (TypeError, ValueError, AssertionError) as error:  # generators refuse settings with any of these
            problem = f"{args.dataset!r} refuses it: {error}"
            raise UserError(f"{where}: config: {problem}; see that generator's own fields") from None

    def problem(self, item: int) -> Problem:
        size = self.args.size or _SEED_STRIDE
        assert 0 <= item < size, f"item {item} of {size}"
        entry = self._entry(item)
        if not isinstance(entry["answer"], str) or not entry["answer"].strip():
            problem = f"{self.args.dataset!r} gives item {item} no answer that can be written down"
            raise UserError(f"sources.{self.name}.args: dataset: {problem}; choose another, or another config")
        return Problem.of(item, entry["question"], entry["answer"], self.args.format)

    def score(self, problem: Problem, answer: Answer) -> Score:
        found = find_answer(answer.text, self.args.format)
        parts = {"marked": float(found.is_marked)}
        if not found.text:  # some generators give partial credit for any answer, even an empty one
            return Score.of(False, parts, "no answer")
        if not re.fullmatch(_SAFE.get(self.args.dataset, "(?s:.*)"), found.text):
            return Score.of(False, parts, "characters or powers that its scorer could not safely read")
        # Generated again, because its metadata has objects that JSON cannot carry.
        entry = self._entry(problem.item)
        try:
            marks = self._dataset.score_answer(found.text, entry)
        except Exception as error:  # on an answer of another form; `validate` has tried gold answers
            return Score.of(False, parts, f"the generator's scorer cannot read it: {one_line(error)}")
        right = marks >= _RIGHT
        if self.args.credit == "exact":
            return Score.of(right, parts)
        return Score(marks, Outcome.OK if right else Outcome.WRONG, parts)

    def _entry(self, item: int) -> dict[str, Any]:
        try:
            return self._dataset[item]
        except IndexError:
            problem = f"{self.args.dataset!r} draws from a list that has no item {item}"
            raise UserError(f"sources.{self.name}.args: size: {problem}; set size to what it has") from None
