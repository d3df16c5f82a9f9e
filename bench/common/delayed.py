"""A task set whose verdicts take their time: what a judge over the network, or a long test run, is to a run."""

from __future__ import annotations

import math
import random
import threading
import time
from typing import Any

from pydantic import Field

from stretto.base.config import Config, validate
from stretto.learning.recipe import SUPERVISED
from stretto.sandbox.isolate import Sandbox
from stretto.tasks.registry import source_kind
from stretto.tasks.task import Answer, Problem, Score, TaskSource


class DelayedArgs(Config):
    """Of kind ``bench.common.delayed:Delayed``."""

    kind: str
    """Of the task set whose problems and verdicts these are."""
    args: dict[str, Any] = Field(default_factory=dict)
    median_s: float = Field(ge=0)
    """Of the delay, lognormal."""
    sigma: float = Field(ge=0)
    """Of its logarithm."""
    cut_s: float = Field(gt=0)
    """Longest delay."""
    at_once: int = Field(default=512, gt=0)


class Delayed(TaskSource):
    """Another task set behind a delay, which is a function of the sample's seed alone: two runs of the same recipe meet
    the same delays. Answers of no run, and held-out ones, are judged at once."""

    args_kind = DelayedArgs

    def __init__(self, name: str, args: DelayedArgs, sandbox: Sandbox | None = None) -> None:
        super().__init__(name, args, sandbox)
        kind = source_kind(name, args.kind)
        self._inner = kind(name, validate(kind.args_kind, args.args, f"sources.{name}.args.args"), sandbox)
        self._args = args
        self._turn = threading.Lock()

    @property
    def at_once(self) -> int:
        return self._args.at_once

    @property
    def num_items(self) -> int | None:
        return self._inner.num_items

    def problem(self, item: int) -> Problem:
        with self._turn:
            return self._inner.problem(item)

    def score(self, problem: Problem, answer: Answer) -> Score:
        if answer.seed is not None and problem.item < SUPERVISED:
            time.sleep(self.delay_s(answer.seed))
        with self._turn:
            return self._inner.score(problem, answer)

    def delay_s(self, seed: int) -> float:
        args = self._args
        if args.median_s == 0:
            return 0.0
        return min(args.cut_s, random.Random(seed).lognormvariate(math.log(args.median_s), args.sigma))
