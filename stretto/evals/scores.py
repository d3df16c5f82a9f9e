"""Scores of sampled answers: pass@k, pass^k, maj@k, confidence intervals over problems, paired tests, normalised scores.

A model answers P problems with S samples each. Intervals account for the choice of the problems: all samples of a problem stay
together, and differences between models are differences on the same problems.

Shape letters: M models, P problems of a domain, S samples, R random draws.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb
from zlib import crc32

import numpy as np
import scipy

from stretto.base.errors import UserError

RESAMPLINGS = 2000
_SWAPS = 10 * RESAMPLINGS
"""Number of draws of a permutation test."""
LEVEL = 0.95
"""Confidence level of every interval."""
TAIL = (1 - LEVEL) / 2
MOST_INFRA = 0.05
"""Largest share of a domain's samples without a verdict. One in 20 is within the interval of a hundred problems (our choice)."""
_MAX_SUBSETS = 256
"""Largest number of choices of samples for maj@k that are enumerated per problem; of more, this many are drawn."""


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its confidence interval of level `LEVEL`."""

    value: float
    low: float
    high: float


def pass_at_k(right_PS: np.ndarray, k: int) -> np.ndarray:
    """By problem, the probability that at least one of ``k`` samples is correct: 1 − C(n − c, k) / C(n, k), unbiased (2107.03374).

    Args:
        right_PS: 1 or 0; NaN for a sample without a verdict, which is left out.

    Returns: float64 [P], NaN where fewer than ``k`` samples were judged.
    """
    return 1 - pass_hat_k(1 - right_PS, k)


def pass_hat_k(right_PS: np.ndarray, k: int) -> np.ndarray:
    """By problem, the probability that all of ``k`` samples are correct, pass^k: C(c, k) / C(n, k), unbiased (τ-bench, 2406.12045).

    Args and result: as of `pass_at_k`.
    """
    counts = zip((~np.isnan(right_PS)).sum(1).tolist(), np.nansum(right_PS, 1).astype(int).tolist(), strict=True)
    return np.array([comb(right, k) / comb(num, k) if num >= k else np.nan for num, right in counts])


def majority_at_k(
    right_PS: np.ndarray, answers_PS: Sequence[Sequence[str | None]], k: int, seed: int = 0
) -> np.ndarray:
    """By problem, the probability that the most frequent answer of ``k`` samples is correct (self-consistency, 2203.11171).

    The result is the mean over all choices of ``k`` samples, or over `_MAX_SUBSETS` random ones if there are more. Equally frequent
    answers share the vote. An answer of None has no vote.

    Returns: float64 [P], NaN where fewer than ``k`` samples were judged.
    """
    found = np.full(len(right_PS), np.nan)
    for place, (right_S, answers) in enumerate(zip(right_PS, answers_PS, strict=True)):
        judged = np.flatnonzero(~np.isnan(right_S))
        if len(judged) < k:
            continue
        if comb(len(judged), k) <= _MAX_SUBSETS:
            subsets = [list(subset) for subset in combinations(judged.tolist(), k)]
        else:
            draw = np.random.default_rng((seed, place))
            subsets = [draw.choice(judged, k, replace=False).tolist() for _ in range(_MAX_SUBSETS)]
        found[place] = np.mean([_majority(right_S, answers, subset) for subset in subsets])
    return found


def _majority(right_S: np.ndarray, answers: Sequence[str | None], subset: Sequence[int]) -> float:
    votes: dict[str, list[float]] = {}
    for sample in subset:
        if (answer := answers[sample]) is not None:
            votes.setdefault(answer, []).append(float(right_S[sample]))
    most = max(map(len, votes.values()), default=0)
    return float(np.mean([np.mean(each) for each in votes.values() if len(each) == most])) if votes else 0.0


def mean_interval(
    values: Mapping[str, Sequence[float] | np.ndarray], seed: int = 0, bounds: tuple[float, float] = (0.0, 1.0)
) -> Interval:
    """Mean over domains of the mean over each domain's problems, for values that lie within ``bounds``; NaN values are left out.

    The interval is Gaffke's (2005; studied by Learned-Miller and Thomas, 1905.06208): problems get random weights from a flat Dirichlet
    distribution, as in the Bayesian bootstrap, and so does one unseen problem. Its value is the lower bound for the lower end and the upper
    bound for the upper end. For one domain with values 0 and 1, as with one sample per problem, the interval is Clopper and Pearson's,
    which is computed exactly. Resampling the problems alone has no width if all agree, and covers too seldom with few problems
    (2503.01747). Several domains share one unseen problem, which weighs as much as a problem of the smallest domain.

    The draws of a domain depend on ``seed`` and its name only. Raises `UserError`: a domain without values.
    """
    known = {name: judged(name, np.asarray(each, np.float64)[None])[0] for name, each in values.items()}
    if len(known) == 1 and bounds == (0.0, 1.0) and all(np.isin(x_P, bounds).all() for x_P in known.values()):
        return _clopper_pearson(next(iter(known.values())))
    smallest = min(known, key=lambda name: len(known[name]))
    low = min(bounds[0], *(x_P.min() for x_P in known.values()))  # a graded reward may exceed them
    high = max(bounds[1], *(x_P.max() for x_P in known.values()))
    sums_R, weights_R, unseen_R = np.zeros(RESAMPLINGS), np.zeros(RESAMPLINGS), np.zeros(RESAMPLINGS)
    for name, x_P in known.items():
        num, draw = len(x_P), np.random.default_rng((seed, crc32(name.encode())))
        draws_RP = draw.standard_exponential((RESAMPLINGS, num + 1)) / num  # the last one is the unseen problem's
        sums_R += draws_RP[:, :num] @ x_P
        weights_R += draws_RP[:, :num].sum(1)
        if name == smallest:
            unseen_R = draws_RP[:, num]
    value = float(np.mean([x_P.mean() for x_P in known.values()]))
    low_R, high_R = ((sums_R + unseen_R * bound) / (weights_R + unseen_R) for bound in (low, high))
    # the estimate lies within its interval, and the interval within the bounds, whatever the rounding
    ends = np.clip([np.quantile(low_R, TAIL), np.quantile(high_R, 1 - TAIL)], (low, value), (value, high)).tolist()
    return Interval(value, *ends)


def _clopper_pearson(right_P: np.ndarray) -> Interval:
    """Share of ones among ones and zeros, with its exact interval."""
    num, num_right, beta = len(right_P), int(right_P.sum()), scipy.special.betaincinv
    low = beta(num_right, num - num_right + 1, TAIL) if num_right else 0.0
    high = beta(num_right + 1, num - num_right, 1 - TAIL) if num_right < num else 1.0
    return Interval(num_right / num, float(low), float(high))


def student_interval(values_P: Sequence[float] | np.ndarray) -> Interval:
    """Mean of measures without bounds, such as a number of words, with Student's interval; NaN values are left out. The ends of a single
    value's interval are infinite. Raises `UserError`: no value."""
    (x_P,) = judged("measure", np.asarray(values_P, np.float64)[None])
    value, num = float(x_P.mean()), len(x_P)
    margin = scipy.special.stdtrit(num - 1, 1 - TAIL) * x_P.std(ddof=1) / num**0.5 if num > 1 else np.inf
    return Interval(value, value - float(margin), value + float(margin))


def judged(name: str, values_MP: np.ndarray) -> np.ndarray:
    """The columns without NaN: problems with a value of every model. Raises `UserError`: there is none."""
    values_MP = values_MP[:, ~np.isnan(values_MP).any(0)]
    if not values_MP.size:
        raise UserError(f"{name}: no problem has enough samples with a verdict; increase --samples")
    return values_MP


def resampling_weights(num_problems: int, num: int, seed: int | tuple[int, int]) -> np.ndarray:
    """Weights of a bootstrap [R + 1, P]: row 0 counts each problem once, the others as often as it is drawn."""
    counts_RP = np.random.default_rng(seed).multinomial(num_problems, np.full(num_problems, 1 / num_problems), num)
    return np.concatenate([np.ones((1, num_problems)), counts_RP])


def group_draws(members: Sequence[np.ndarray], rng: np.random.Generator, num: int = 1000) -> Iterator[np.ndarray]:
    """Indices of a bootstrap over groups, whose members are drawn together: first all N items, then those of each of ``num`` draws.
    ``members``: the indices in each group."""
    yield np.arange(sum(map(len, members)))
    for _ in range(num):
        yield np.concatenate([members[at] for at in rng.integers(0, len(members), len(members))])


def interval(low_R: np.ndarray, high_R: np.ndarray | None = None) -> Interval:
    """Interval of a bootstrapped statistic: its estimate (row 0), and percentiles of its draws. ``high_R``: draws for the upper end,
    if they differ. A NaN draw is undetermined and counts as infinitely low and infinitely high."""
    draws = low_R[1:], (low_R if high_R is None else high_R)[1:]
    low = np.quantile(np.where(np.isnan(draws[0]), -np.inf, draws[0]), TAIL, method="lower")
    high = np.quantile(np.where(np.isnan(draws[1]), np.inf, draws[1]), 1 - TAIL, method="higher")
    return Interval(float(low_R[0]), float(low), float(high))


def flip_p(differences_P: np.ndarray, seed: int = 0) -> float:
    """Two-sided p value of a paired permutation test on the differences between two models. NaN differences are left out.

    Each of `_SWAPS` draws swaps the models at random on each problem. The p value is the share of draws whose mean difference is at
    least as large as the measured one; the measured assignment counts as a draw, so p is never 0.
    """
    nonzero_P = np.asarray(differences_P, np.float64)
    nonzero_P = nonzero_P[~np.isnan(nonzero_P) & (nonzero_P != 0)]  # a swap changes nothing where both models are equal
    limit, draw, num_extreme = abs(nonzero_P.sum()) - 1e-9, np.random.default_rng(seed), 0
    for _ in range(0, _SWAPS, RESAMPLINGS):
        signs_RP = draw.integers(0, 2, (RESAMPLINGS, len(nonzero_P)), np.int8) * np.int8(2) - np.int8(1)
        num_extreme += int((np.abs(signs_RP @ nonzero_P) >= limit).sum())
    return (1 + num_extreme) / (_SWAPS + 1)


def holm(ps: Sequence[float]) -> list[float]:
    """p values of several tests, corrected by Holm's method (1979), which bounds the family-wise error rate."""
    corrected, highest = np.ones(len(ps)), 0.0
    for rank, test in enumerate(np.argsort(ps).tolist()):
        highest = max(highest, min(1.0, (len(ps) - rank) * ps[test]))
        corrected[test] = highest
    return corrected.tolist()


@dataclass(frozen=True, slots=True)
class Norm:
    """Normalised score: share of the teachers' gain that a student recovers."""

    mean: Interval
    """Mean over domains."""
    domains: dict[str, Interval]
    worst: str
    """Domain with the lowest normalised score."""


def _ratios(
    values: Mapping[str, tuple[np.ndarray, np.ndarray]],
    unseen: tuple[tuple[float, float], tuple[float, float]],
    seed: int,
) -> dict[str, np.ndarray]:
    """Ratios of the means of two measures of the problems, by domain: draws [2, R + 1] for both arguments of `interval`.

    Problems are resampled together with one unseen problem, whose two measures are the first pair of ``unseen`` for the lower end and the
    second pair for the upper end. The ratio is NaN where the divisor is not positive.
    """
    ratios = {}
    for name, measures in values.items():
        num = len(measures[0])
        weights_RP = resampling_weights(num + 1, RESAMPLINGS, (seed, crc32(name.encode())))
        weights_RP[0, num] = 0.0  # the estimate has no unseen problem
        ends = [
            [weights_RP @ np.append(each, one) for each, one in zip(measures, pair, strict=True)] for pair in unseen
        ]
        quotients = [np.divide(a_R, b_R, out=np.full_like(a_R, np.nan), where=b_R > 0) for a_R, b_R in ends]
        ratios[name] = np.stack(quotients)
    return ratios


def retention(values: Mapping[str, np.ndarray], model: int, reference: int, seed: int = 0) -> Interval:
    """Mean over domains of a model's score divided by the reference model's; undetermined where the latter may be 0.

    Args:
        values: scores [M, P] by domain, without NaN (`judged`); models are given by index.
    """
    pairs = {name: (values_MP[model], values_MP[reference]) for name, values_MP in values.items()}
    return interval(*np.mean(list(_ratios(pairs, ((0, 1), (1, 0)), seed).values()), axis=0))


def norm(
    values: Mapping[str, np.ndarray], student: int, start: int, teachers: Mapping[str, int], seed: int = 0
) -> Norm:
    """Mean over domains of (student − start) / (teacher − start), the measure of MOPD (2606.30406).

    Args:
        values: scores [M, P] by domain, without NaN (`judged`); models are given by index.
        start: the model from which student and teachers were trained.
        teachers: by domain.

    Raises:
        UserError: a teacher's score is not above the start's.
    """
    pairs = {}
    for name, teacher in teachers.items():
        values_MP = values[name]
        means_M = values_MP.mean(1)
        if means_M[teacher] <= means_M[start]:
            raise UserError(
                f"{name}: its teacher scores {means_M[teacher]:.3f} and the start {means_M[start]:.3f}: there is no gain to "
                "recover; leave the domain out, or train its teacher further"
            )
        pairs[name] = values_MP[student] - values_MP[start], values_MP[teacher] - values_MP[start]
    draws = _ratios(pairs, ((-1, 0), (1, 0)), seed)
    domains = {name: interval(*each) for name, each in draws.items()}
    worst = min(domains, key=lambda name: domains[name].value)
    return Norm(interval(*np.mean(list(draws.values()), axis=0)), domains, worst)
