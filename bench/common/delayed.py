"""A task set whose verdicts arrive late: the verifier waits and does not compute, and no answer waits for the verdict of another."""

from __future__ import annotations

import math
import random
import threading
import time
from typing import Any, Final

from pydantic import Field

from stretto.base.config import Config, validate
from stretto.flow.prompts import SUPERVISED
from stretto.sandbox.isolate import Sandbox
from stretto.tasks.registry import source_kind
from stretto.tasks.task import Answer, Problem, Score, TaskSource

KIND: Final = "bench.common.delayed:Delayed"


class DelayedArgs(Config):
    """Arguments of `Delayed`."""

    kind: str
    """Kind of the task set that makes the problems and the verdicts."""
    args: dict[str, Any] = Field(default_factory=dict)
    median_s: float = Field(ge=0)
    """Median of the lognormal delay."""
    sigma: float = Field(ge=0)
    """Standard deviation of its logarithm."""
    cut_s: float = Field(gt=0)
    """Longest delay."""


class Delayed(TaskSource):
    """A task set with delayed verdicts. The delay is a function of the sample's seed. Held-out answers have no delay."""

    args_kind = DelayedArgs
    at_once = 512

    def __init__(self, name: str, args: DelayedArgs, sandbox: Sandbox | None = None) -> None:
        super().__init__(name, args, sandbox)
        kind = source_kind(name, args.kind)
        self._inner = kind(name, validate(kind.args_kind, args.args, f"sources.{name}.args.args"), sandbox)
        self._args = args
        self._lock = threading.Lock()

    @property
    def num_items(self) -> int | None:
        return self._inner.num_items

    def problem(self, item: int) -> Problem:
        with self._lock:
            return self._inner.problem(item)

    def score(self, problem: Problem, answer: Answer) -> Score:
        args = self._args
        if answer.seed is not None and problem.item < SUPERVISED and args.median_s > 0:
            delay_s = random.Random(answer.seed).lognormvariate(math.log(args.median_s), args.sigma)
            time.sleep(min(args.cut_s, delay_s))
        with self._lock:
            return self._inner.score(problem, answer)
