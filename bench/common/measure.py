"""Honest timing on a machine that others use too: turns, a fixed product beside every sample, ratios from one run."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, stdev

import torch
from rich.console import Console
from rich.table import Table
from scipy import stats
from torch import Tensor

SLOW = 1.25
"""A sample is dropped when the matrix product beside it took this many times its best."""
CALIBRATION_SIZE = 1024
"""Rows and columns of the fixed fp32 matrix product."""
PIPE_COLUMNS = 120

Step = Callable[[], object]
"""The work that is timed."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One timed step."""

    wall_s: float
    processor_s: float
    calibration_s: float
    """The slower of the two matrix products around it."""


def half_width(values: Sequence[float]) -> float:
    """Half of the 95 % interval of the mean of ``values``, by Student's t; one value alone has no bound."""
    if len(values) < 2:
        return math.inf
    return float(stats.t.ppf(0.975, len(values) - 1)) * stdev(values) / len(values) ** 0.5


class Calibration:
    """The fixed matrix product: how fast the machine is just now."""

    def __init__(self) -> None:
        self._operand = torch.randn(CALIBRATION_SIZE, CALIBRATION_SIZE)

    def seconds(self) -> float:
        start = time.perf_counter()
        self._operand @ self._operand
        return time.perf_counter() - start


def measure(
    steps: Mapping[str, Step],
    rounds: int,
    advance: Callable[[int], None] = lambda num: None,
    warm_up: int = 2,
    prepare: Mapping[str, Step] | None = None,
) -> dict[str, list[Sample]]:
    """Time ``rounds`` steps of each, taking turns, in another order each round, after ``warm_up`` untimed ones: what a step
    leaves to the next (caches, threads, freed memory) meets all alike. ``prepare`` comes before each, untimed."""
    samples: dict[str, list[Sample]] = {name: [] for name in steps}
    calibration, rng = Calibration(), random.Random(0)
    for index in range(-warm_up, rounds):
        for name in rng.sample(list(steps), len(steps)):
            if prepare is not None:
                prepare[name]()
            before = calibration.seconds()
            wall, processor = time.perf_counter(), time.process_time()
            steps[name]()
            wall, processor = time.perf_counter() - wall, time.process_time() - processor
            after = calibration.seconds()
            if index >= 0:
                samples[name].append(Sample(wall, processor, max(before, after)))
            advance(1)
    return samples


def fastest_calibration(samples: Iterable[Sequence[Sample]]) -> float:
    """The calibration's best of a run, seconds."""
    return min(sample.calibration_s for each in samples for sample in each)


def quiet(samples: Sequence[Sample], best_s: float) -> list[Sample]:
    """The samples taken while the machine was not slow; ``best_s`` is the calibration's best of the run."""
    return [sample for sample in samples if sample.calibration_s <= SLOW * best_s]


@dataclass(frozen=True, slots=True)
class Ratio:
    """How two things that took turns compare, as time of the first over time of the second."""

    wall: float | None
    """Median over the rounds in which both were quiet; None: there was none."""
    spread: Interval | None
    """Where that median lies; None: too few rounds to tell."""
    processor: float
    """Median over all rounds."""
    num_quiet: int
    num_rounds: int


def ratio(samples: Mapping[str, Sequence[Sample]], over: str, under: str) -> Ratio:
    """Time of ``over`` divided by time of ``under``, round by round, so that a slow spell meets both.

    Each is measured against its own best calibration: one that takes fewer threads has a slower one.
    """
    best_s = {name: fastest_calibration([samples[name]]) for name in (over, under)}
    pairs = list(zip(samples[over], samples[under], strict=True))
    calm = [pair for pair in pairs if all(quiet([each], best_s[name]) for each, name in zip(pair, best_s, strict=True))]
    walls = [a.wall_s / b.wall_s for a, b in calm]
    return Ratio(
        wall=median(walls) if walls else None,
        spread=Interval.of(walls),
        processor=median(a.processor_s / b.processor_s for a, b in pairs),
        num_quiet=len(calm),
        num_rounds=len(pairs),
    )


@dataclass(frozen=True, slots=True)
class Interval:
    """Where a median lies, with 95 % confidence."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval | None:
        """From independent values of any distribution: so many of them lie below their median as heads are thrown. None: too
        few of them."""
        num, ordered = len(values), sorted(values)
        outside = num_below = 0  # the interval leaves out ``num_below`` values at each end
        while 2 * (outside + math.comb(num, num_below)) <= 0.05 * 2**num:
            outside += math.comb(num, num_below)
            num_below += 1
        return cls(median(ordered), ordered[num_below - 1], ordered[-num_below]) if num_below else None

    def __str__(self) -> str:
        return f"{self.median:+.1%} [{self.low:+.1%}, {self.high:+.1%}]"


def times(value: float | None) -> str:
    """``1.37x``; a dash where nothing was measured."""
    return "–" if value is None else f"{value:.2f}x"


def wide_console() -> Console:
    """A console that does not squeeze tables into the 80 columns of a pipe."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, PIPE_COLUMNS))


def table(title: str, *headings: str) -> Table:
    """A table whose first column is text and whose others are numbers."""
    made = Table(title=title, title_justify="left")
    for index, heading in enumerate(headings):
        made.add_column(heading, justify="right" if index else "left")
    return made


def random_prompts(num: int, length: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Token ids that end nothing: the lowest ids, where tokenizers keep their marks, are left out."""
    generator = torch.Generator().manual_seed(seed)
    ids_NT: Tensor = torch.randint(min(8, vocab_size // 2), vocab_size, (num, length), generator=generator)
    return ids_NT.tolist()
