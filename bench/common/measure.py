"""Shared code of the benches: arguments, exit status, tables, and timing on a machine that other jobs use too.

Timed steps take turns, a fixed matrix product beside each shows whether the machine was slow, and results are ratios of one run.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean, median, stdev

import torch
from rich.table import Table
from scipy import stats
from torch import Tensor

from stretto.base.errors import UserError

SLOW = 1.25
"""A sample is dropped if the matrix product beside it took this many times the product's shortest time."""
CALIBRATION_SIZE = 1024
"""Rows and columns of the fixed fp32 matrix product."""

NO_INTERVAL = "one reported seed has no interval, so no verdict: name another one in --seeds"
"""What a study says whose verdict needs an interval."""

Step = Callable[[], object]
"""The work that is timed."""


def bench_parser(docstring: str | None) -> argparse.ArgumentParser:
    """The parser of a bench; ``--help`` shows the module's docstring."""
    return argparse.ArgumentParser(description=docstring, formatter_class=argparse.RawDescriptionHelpFormatter)


def finish(failures: Sequence[str]) -> None:
    """Print each failure in a line and end the process with exit code 1; without failures, return."""
    for failure in failures:
        print(f"FAILED  {failure}")
    if failures:
        sys.exit(1)


@contextmanager
def refusing() -> Iterator[None]:
    """A `UserError` in this block ends the process with its one line and exit code 2."""
    try:
        yield
    except UserError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None


@dataclass(frozen=True, slots=True)
class Sample:
    """One timed step."""

    wall_s: float
    processor_s: float
    calibration_s: float
    """The slower of the two matrix products around it."""


def half_width(values: Sequence[float]) -> float:
    """Half of the 95 % confidence interval of the mean of ``values``, by Student's t; infinite for a single value."""
    if len(values) < 2:
        return math.inf
    return float(stats.t.ppf(0.975, len(values) - 1)) * stdev(values) / len(values) ** 0.5


def shown_half(half: float, form: str) -> str:
    """Half of an interval in a table; empty if it is infinite: a single value has none."""
    return form.format(half) if math.isfinite(half) else ""


def shown_mean(values: Sequence[float], sign: str = "") -> str:
    """Mean of ``values`` in a table, with half of its 95 % interval if there are several. ``sign``: of a format."""
    return f"{fmean(values):{sign}.3f}{shown_half(half_width(values), ' ± {:.3f}')}"


class Calibration:
    """The fixed matrix product, whose time shows the speed of the machine at the moment."""

    def __init__(self) -> None:
        self._operand = torch.randn(CALIBRATION_SIZE, CALIBRATION_SIZE)

    def seconds(self) -> float:
        start = time.perf_counter()
        self._operand @ self._operand
        return time.perf_counter() - start

    def sample(self, step: Step) -> Sample:
        """Time one call of ``step``."""
        before, wall, processor = self.seconds(), time.perf_counter(), time.process_time()
        step()
        wall_s, processor_s = time.perf_counter() - wall, time.process_time() - processor
        return Sample(wall_s, processor_s, max(before, self.seconds()))


def measure(
    steps: Mapping[str, Step],
    rounds: int,
    advance: Callable[[int], None] = lambda num: None,
    warm_up: int = 2,
    prepare: Mapping[str, Step] | None = None,
) -> dict[str, list[Sample]]:
    """Time ``rounds`` calls of each step, after ``warm_up`` untimed ones. ``prepare`` is called before each, untimed.

    The steps take turns in a random order, so that the state that one leaves (caches, threads, freed memory) affects all alike.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in steps}
    calibration, rng = Calibration(), random.Random(0)
    for index in range(-warm_up, rounds):
        for name in rng.sample(list(steps), len(steps)):
            if prepare is not None:
                prepare[name]()
            sample = calibration.sample(steps[name])
            if index >= 0:
                samples[name].append(sample)
            advance(1)
    return samples


def fastest_calibration(samples: Iterable[Sequence[Sample]]) -> float:
    """The shortest time of the calibration in a run, in seconds."""
    return min(sample.calibration_s for each in samples for sample in each)


def quiet(samples: Sequence[Sample], best_s: float) -> list[Sample]:
    """The samples taken while the machine was not slow; ``best_s`` is the shortest calibration of the run, in seconds."""
    return [sample for sample in samples if sample.calibration_s <= SLOW * best_s]


@dataclass(frozen=True, slots=True)
class Ratio:
    """Time of one step over time of another that took turns with it."""

    wall: float | None
    """Median over the rounds in which the machine was slow for neither step; None: there was no such round."""
    spread: Interval | None
    """95 % confidence interval of that median; None: too few rounds."""
    processor: float
    """Median over all rounds."""
    num_quiet: int
    num_rounds: int

    @property
    def rounds(self) -> str:
        """Number of quiet rounds, as a cell of a table."""
        return f"{self.num_quiet} of {self.num_rounds}"


def quiet_pairs(first: Sequence[Sample], second: Sequence[Sample]) -> list[tuple[Sample, Sample]]:
    """The samples of each round in which the machine was slow for neither step.

    A sample's calibration is compared with the shortest of its own step: with fewer threads the matrix product is slower.
    """
    limits_s = [SLOW * fastest_calibration([each]) for each in (first, second)]
    pairs = zip(first, second, strict=True)
    return [pair for pair in pairs if all(each.calibration_s <= s for each, s in zip(pair, limits_s, strict=True))]


def ratio(samples: Mapping[str, Sequence[Sample]], over: str, under: str) -> Ratio:
    """Time of ``over`` divided by time of ``under`` in each round, so that a slow moment affects both."""
    calm = quiet_pairs(samples[over], samples[under])
    walls = [a.wall_s / b.wall_s for a, b in calm]
    return Ratio(
        wall=median(walls) if walls else None,
        spread=Interval.of(walls),
        processor=median(a.processor_s / b.processor_s for a, b in zip(samples[over], samples[under], strict=True)),
        num_quiet=len(calm),
        num_rounds=len(samples[over]),
    )


@dataclass(frozen=True, slots=True)
class Interval:
    """A median with its 95 % confidence interval."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval | None:
        """The interval for independent values of any distribution; None: too few values.

        The number of values below the true median has a binomial distribution with p = 1/2.
        """
        num, ordered = len(values), sorted(values)
        outside = num_below = 0  # the interval leaves out ``num_below`` values at each end
        while 2 * (outside + math.comb(num, num_below)) <= 0.05 * 2**num:
            outside += math.comb(num, num_below)
            num_below += 1
        return cls(median(ordered), ordered[num_below - 1], ordered[-num_below]) if num_below else None

    def __str__(self) -> str:
        return f"{self.median:+.1%} [{self.low:+.1%}, {self.high:+.1%}]"


def times(value: float | None) -> str:
    """``1.37x``; a dash for None."""
    return "–" if value is None else f"{value:.2f}x"


def table(title: str, *headings: str) -> Table:
    """A table whose first column is text and whose others are numbers."""
    made = Table(title=title, title_justify="left")
    for index, heading in enumerate(headings):
        made.add_column(heading, justify="right" if index else "left")
    return made


def random_prompts(num: int, length: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Random token ids without the lowest ones, which tokenizers use for special tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids_NT: Tensor = torch.randint(min(8, vocab_size // 2), vocab_size, (num, length), generator=generator)
    return ids_NT.tolist()
