"""Problems from generators of the reasoning-gym package.

The prompt is the generator's question, then the line of the answer format (`stretto.tasks.task`); the default format
is ``plain``: question in, bare answer out, what a small network with no habit of talking can do. Chat models: ``tags``.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from stretto.base.config import Config
from stretto.base.errors import UserError, nearest
from stretto.base.trajectory import Outcome
from stretto.sandbox.isolate import Sandbox
from stretto.tasks.task import Answer, AnswerFormat, Problem, Score, TaskSource, find_answer

_SEED_STRIDE = 1 << 24
"""Generators seed item i with seed + i: neighbouring seeds share all problems but one. Ours are this far apart, and
beyond whatever small seeds a pre-training corpus was generated with."""
_RIGHT = 1 - 1e-9


class GymArgs(Config):
    """Of kind ``gym``."""

    dataset: str
    """Name in reasoning-gym, ``chain_sum`` say."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Of that generator; without ``seed`` and ``size``, which are below."""
    seed: int = Field(default=0, ge=0, lt=255)
    """Problems of two seeds are different ones, as far as the generator has enough."""
    size: int | None = Field(default=None, gt=0, le=_SEED_STRIDE)
    """Problems. None: endless; some generators draw from a list and need it."""
    format: AnswerFormat = "plain"
    credit: Literal["exact", "graded"] = "exact"
    """``graded``: the generator's own partial marks, some of which reward a long list of guesses, or any answer."""


class GymSource(TaskSource):
    """Problems of one generator. The generator's own scorer judges what `find_answer` finds."""

    args_kind = GymArgs
    args: GymArgs

    def __init__(self, name: str, args: GymArgs, sandbox: Sandbox | None = None) -> None:
        super().__init__(name, args, sandbox)
        import reasoning_gym  # takes seconds

        where, known = f"sources.{name}.args", reasoning_gym.factory.DATASETS
        if args.dataset not in known:
            near = nearest(args.dataset, known)
            raise UserError(f"{where}: dataset: reasoning-gym has no {args.dataset!r}{near}; choose one of its")
        if reserved := {"seed", "size"} & set(args.config):
            raise UserError(f"{where}: config.{min(reserved)}: it has a field of its own; set it beside config")
        size = {} if args.size is None else {"size": args.size}
        seed = (args.seed + 1) * _SEED_STRIDE
        try:
            self._dataset = reasoning_gym.create_dataset(args.dataset, seed=seed, **size, **args.config)
        except (TypeError, ValueError, AssertionError) as error:  # all three are how its configurations refuse
            problem = f"{args.dataset!r} refuses it: {error}"
            raise UserError(f"{where}: config: {problem}; see that generator's own fields") from None

    @property
    def num_items(self) -> int | None:
        return self.args.size

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
        if not found.text:  # generators that give marks for trying give them for nothing, too
            return Score.of(False, parts, "no answer")
        # The entry is made again: its metadata holds sets, tuples and objects that no wire keeps.
        marks = self._dataset.score_answer(found.text, self._entry(problem.item))
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
