"""Whether scores say what they claim, where the truth is known because it was planted.

    python -m bench.scores_truth [--trials 400] [--problems 60] [--mutant samples|unpaired|uncorrected]

Made-up models answer made-up problems: each problem has its own chance of a right answer, drawn anew in every trial, as if other
problems of the same kind had been asked. Counted over trials: how often the 95 % ranges of score, pass@2, pass^2 and pass^4 hold
their true values; how often a planted difference between two models on the same problems is found; how often one is found that is
not there, in one domain and in any of six. A range may miss by what a percentile bootstrap of so few problems misses (5 points)
and by five standard deviations of the count. Mutants, of which each must end with exit code 1: ``samples`` resamples answers instead
of problems, ``unpaired`` resamples problems for each model by itself, ``uncorrected`` leaves out Holm. Takes seconds; ``--trials 4000`` is long.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from rich.console import Console

from bench.common.measure import table
from stretto.evals.scores import LEVEL, Interval, flip_p, holm, interval, pass_at_k, pass_hat_k, resampled

SAMPLES, RESAMPLINGS, DOMAINS = 4, 400, 6
HARD, EASY = 1.2, 1.8
"""Beta distribution of the problems' chances."""
GAIN = 0.08
"""That the better model has on every problem, as far as there is room."""
POWER = 0.35
"""How often the planted difference must be found, at least; two models that are resampled each by itself find it far less often."""
SHORT = 0.05
"""A percentile range of 60 problems holds the truth less often than it says, of pass^4, which is mostly 0, most: 90 to 93 % measured here."""
FLIPS = 2000


@dataclass(frozen=True, slots=True)
class Row:
    what: str
    found: float
    low: float
    high: float

    @property
    def ok(self) -> bool:
        return self.low <= self.found <= self.high


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=400)
    parser.add_argument("--problems", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mutant", choices=["samples", "unpaired", "uncorrected"])
    options = parser.parse_args()
    rng = np.random.default_rng(options.seed)
    rows = [*coverage(options, rng), *differences(options, rng)]
    made = table("Known truth", "what", "found", "allowed", "")
    for row in rows:
        made.add_row(row.what, f"{row.found:.1%}", f"{row.low:.1%} to {row.high:.1%}", "" if row.ok else "FAILS")
    Console().print(made)
    sys.exit(0 if all(row.ok for row in rows) else 1)


def answers(chances_P: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Right or wrong [P, S]."""
    return rng.random((len(chances_P), SAMPLES)) < chances_P[:, None]


def coverage(options: argparse.Namespace, rng: np.random.Generator) -> list[Row]:
    """How often ranges hold the true value, by what is scored."""
    measures: dict[str, tuple[Callable[[np.ndarray], np.ndarray], Callable[[np.ndarray], np.ndarray]]] = {
        "score": (lambda right_PS: right_PS.mean(1), lambda chance: chance),
        "pass@2": (lambda right_PS: pass_at_k(right_PS, 2), lambda chance: 1 - (1 - chance) ** 2),
        "pass^2": (lambda right_PS: pass_hat_k(right_PS, 2), lambda chance: chance**2),
        "pass^4": (lambda right_PS: pass_hat_k(right_PS, 4), lambda chance: chance**4),
    }
    many = np.random.default_rng(1).beta(HARD, EASY, 1_000_000)
    held = dict.fromkeys(measures, 0)
    for trial in range(options.trials):
        right_PS = answers(rng.beta(HARD, EASY, options.problems), rng).astype(float)
        for name, (scored, truth) in measures.items():
            if options.mutant == "samples":
                picks = rng.integers(0, SAMPLES, (RESAMPLINGS // 10, *right_PS.shape))  # a slow loop
                drawn = [scored(np.take_along_axis(right_PS, pick, 1)).mean() for pick in picks]
                found = interval(np.array([scored(right_PS).mean(), *drawn]))
            else:
                found = interval(resampled({name: scored(right_PS)[None]}, RESAMPLINGS, trial)[name][:, 0])
            held[name] += found.low <= truth(many).mean() <= found.high
    slack = 5 * (LEVEL * (1 - LEVEL) / options.trials) ** 0.5
    low, high = LEVEL - SHORT - slack, min(1.0, LEVEL + slack)
    return [Row(f"95 % ranges of {name} that hold it", num / options.trials, low, high) for name, num in held.items()]


def differences(options: argparse.Namespace, rng: np.random.Generator) -> list[Row]:
    """How often a difference is found that was planted, and one that was not."""
    counts = dict.fromkeys(("range, planted", "test, planted", "range, none", "test, none", "any of six, none"), 0)
    for trial in range(options.trials):
        for name, gain in (("planted", GAIN), ("none", 0.0)):
            values_MP = pair(options.problems, gain, rng)
            found = gap(values_MP, trial, options.mutant == "unpaired")
            counts[f"range, {name}"] += not found.low <= 0 <= found.high
            counts[f"test, {name}"] += flip_p(values_MP[1] - values_MP[0], FLIPS, trial) < 1 - LEVEL
        family = [pair(options.problems, 0.0, rng) for _ in range(DOMAINS)]
        ps = [flip_p(each[1] - each[0], FLIPS, trial) for each in family]
        counts["any of six, none"] += min(ps if options.mutant == "uncorrected" else holm(ps)) < 1 - LEVEL
    chance, num = 1 - LEVEL, options.trials
    slack = 5 * (chance * LEVEL / num) ** 0.5
    found = {name: count / num for name, count in counts.items()}
    return [
        Row("planted differences found by range", found["range, planted"], POWER, 1.0),
        Row("planted differences found by flipping signs", found["test, planted"], POWER, 1.0),
        Row("differences found by range where there is none", found["range, none"], 0.0, chance + SHORT + slack),
        Row("differences found by flipping signs where there is none", found["test, none"], 0.0, chance + slack),
        Row("any found in six domains where there is none, Holm", found["any of six, none"], 0.0, chance + slack),
    ]


def pair(num: int, gain: float, rng: np.random.Generator) -> np.ndarray:
    """Scores [2, P] of two models on the same problems."""
    chances_P = rng.beta(HARD, EASY, num)
    return np.stack([answers(each, rng).mean(1) for each in (chances_P, np.minimum(1.0, chances_P + gain))])


def gap(values_MP: np.ndarray, seed: int, is_unpaired: bool) -> Interval:
    if is_unpaired:
        means = [resampled({str(model): values_MP[[model]]}, RESAMPLINGS, seed)[str(model)][:, 0] for model in (0, 1)]
        return interval(means[1] - means[0])
    means_RM = resampled({"d": values_MP}, RESAMPLINGS, seed)["d"]
    return interval(means_RM[:, 1] - means_RM[:, 0])


if __name__ == "__main__":
    main()
