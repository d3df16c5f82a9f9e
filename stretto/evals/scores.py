"""Scores of sampled answers: pass@k, pass^k, maj@k, bootstrap intervals over problems, paired tests, normalised scores.

A model is measured by S samples of each of P problems. What is uncertain is which problems were asked, so problems are
resampled, with all of their samples, and the same ones for every model: differences between models are paired.

Shape letters: M models, P problems of a domain, S samples, R resamplings behind the estimate itself, which is row 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb
from zlib import crc32

import numpy as np

from stretto.base.errors import UserError

RESAMPLINGS = 2000
LEVEL = 0.95
"""Of every interval."""
MOST_INFRA = 0.05
"""Share of a domain's samples that may go unjudged (ours): 1 in 20 hides in the interval of a hundred problems."""
_MOST_SUBSETS = 256
"""Of the samples, for one problem's maj@k: more than that are drawn."""


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its confidence interval of level `LEVEL`."""

    value: float
    low: float
    high: float


def pass_at_k(right_PS: np.ndarray, k: int) -> np.ndarray:
    """By problem, the probability that at least one of ``k`` samples is correct: 1 − C(n − c, k) / C(n, k), unbiased (2107.03374).

    Args:
        right_PS: 1 or 0; NaN for a sample that nobody could judge, which is none.

    Returns: float64 [P], NaN where fewer than ``k`` samples were judged.
    """
    judged_P, right_P = _counts(right_PS)
    pairs = zip(judged_P, right_P, strict=True)
    return np.array([1 - comb(num - right, k) / comb(num, k) if num >= k else np.nan for num, right in pairs])


def pass_hat_k(right_PS: np.ndarray, k: int) -> np.ndarray:
    """By problem, the probability that all of ``k`` samples are correct, pass^k: C(c, k) / C(n, k), unbiased (τ-bench, 2406.12045).

    Args and result: as of `pass_at_k`.
    """
    pairs = zip(*_counts(right_PS), strict=True)
    return np.array([comb(right, k) / comb(num, k) if num >= k else np.nan for num, right in pairs])


def _counts(right_PS: np.ndarray) -> tuple[list[int], list[int]]:
    """By problem: samples that were judged, and those that were right."""
    return (~np.isnan(right_PS)).sum(1).tolist(), np.nansum(right_PS, 1).astype(int).tolist()


def majority_at_k(
    right_PS: np.ndarray, answers_PS: Sequence[Sequence[str | None]], k: int, seed: int = 0
) -> np.ndarray:
    """By problem, the probability that the most frequent answer of ``k`` samples is correct (self-consistency, 2203.11171).

    The mean over all choices of ``k`` samples, or over some of them where they are too many. Of answers that are equally
    frequent, each counts for its share; an answer that cannot be read (None) has no vote.

    Returns: float64 [P], NaN where fewer than ``k`` samples were judged.
    """
    found = np.full(len(right_PS), np.nan)
    for place, (right_S, answers) in enumerate(zip(right_PS, answers_PS, strict=True)):
        judged = np.flatnonzero(~np.isnan(right_S))
        if len(judged) < k:
            continue
        if comb(len(judged), k) <= _MOST_SUBSETS:
            subsets = [list(subset) for subset in combinations(judged.tolist(), k)]
        else:
            draw = np.random.default_rng((seed, place))
            subsets = [draw.choice(judged, k, replace=False).tolist() for _ in range(_MOST_SUBSETS)]
        found[place] = np.mean([_majority(right_S, answers, subset) for subset in subsets])
    return found


def _majority(right_S: np.ndarray, answers: Sequence[str | None], subset: Sequence[int]) -> float:
    votes: dict[str, list[float]] = {}
    for sample in subset:
        if (answer := answers[sample]) is not None:
            votes.setdefault(answer, []).append(float(right_S[sample]))
    most = max(map(len, votes.values()), default=0)
    return float(np.mean([np.mean(each) for each in votes.values() if len(each) == most])) if votes else 0.0


def resampled(values: Mapping[str, np.ndarray], num: int = RESAMPLINGS, seed: int = 0) -> dict[str, np.ndarray]:
    """Means of each domain's ``values`` [M, P] over problems, [R + 1, M]: as measured, then of problems drawn anew.

    A domain's draws come from ``seed`` and its name alone, whatever other domains there are. A problem that is NaN for any
    model is left out for all.

    Raises:
        UserError: a domain has no problem that all models answered.
    """
    means = {}
    for name, values_MP in values.items():
        kept_MP = np.asarray(values_MP, np.float64)
        kept_MP = kept_MP[:, ~np.isnan(kept_MP).any(0)]
        num_problems = kept_MP.shape[1]
        if not num_problems:
            raise UserError(f"{name}: no problem has enough samples with a verdict; increase --samples")
        weights_RP = resampling_weights(num_problems, num, (seed, crc32(name.encode())))
        means[name] = weights_RP @ kept_MP.T / num_problems
    return means


def resampling_weights(num_problems: int, num: int, seed: int | tuple[int, int]) -> np.ndarray:
    """How often each problem counts, [R + 1, P]: once as measured, then as often as it is drawn."""
    counts_RP = np.random.default_rng(seed).multinomial(num_problems, np.full(num_problems, 1 / num_problems), num)
    return np.concatenate([np.ones((1, num_problems)), counts_RP])


def interval(draws_R: np.ndarray) -> Interval:
    """Of a statistic of `resampled` means: its value, and percentiles of its draws. A draw that is NaN is undetermined: it
    might lie anywhere, so it counts at both ends."""
    tail = (1 - LEVEL) / 2
    low = np.quantile(np.where(np.isnan(draws_R[1:]), -np.inf, draws_R[1:]), tail, method="lower")
    high = np.quantile(np.where(np.isnan(draws_R[1:]), np.inf, draws_R[1:]), 1 - tail, method="higher")
    return Interval(float(draws_R[0]), float(low), float(high))


def share_interval(draws_R: np.ndarray, num_problems: int) -> Interval:
    """`interval` of a share. Where all problems came out alike resampling sees no spread at all; the end is then that of
    Clopper and Pearson: 0 of 50 says that less than 7 % are right, not that none is."""
    found = interval(draws_R)
    slack = 1 - ((1 - LEVEL) / 2) ** (1 / num_problems)
    low, high = found.low, found.high
    if low == high and found.value in (0.0, 1.0):
        low, high = (0.0, slack) if found.value == 0.0 else (1.0 - slack, 1.0)
    return Interval(found.value, low, high)


def mean_interval(name: str, values_P: Sequence[float] | np.ndarray, seed: int = 0) -> Interval:
    """The mean of shares over the problems of the domain ``name``, NaN left out. Raises `UserError`: all are."""
    kept_P = np.asarray(values_P, np.float64)
    draws_R = resampled({name: kept_P[None]}, seed=seed)[name][:, 0]
    return share_interval(draws_R, int((~np.isnan(kept_P)).sum()))


def flip_p(differences_P: np.ndarray, num: int = 10 * RESAMPLINGS, seed: int = 0) -> float:
    """Two-sided p of a paired permutation test: how often problems differ by this much on average, or more, if which of two models is
    which were a coin's throw on each. Never 0: as measured is one of the ``num`` + 1 ways. NaN: no difference; it is left out."""
    kept_P = np.asarray(differences_P, np.float64)
    kept_P = kept_P[~np.isnan(kept_P) & (kept_P != 0)]  # what is equal is so whichever is which
    limit, draw, num_as_far = abs(kept_P.sum()) - 1e-9, np.random.default_rng(seed), 0
    for _ in range(0, num, RESAMPLINGS):
        signs_RP = draw.integers(0, 2, (RESAMPLINGS, len(kept_P)), np.int8) * np.int8(2) - np.int8(1)
        num_as_far += int((np.abs(signs_RP @ kept_P) >= limit).sum())
    return (1 + num_as_far) / (num + 1)


def holm(ps: Sequence[float]) -> list[float]:
    """p values of several tests, so that one in twenty of such families has any below 5 % where nothing differs (Holm 1979)."""
    order, raised, highest = np.argsort(ps), np.ones(len(ps)), 0.0
    for rank, place in enumerate(order.tolist()):
        highest = max(highest, min(1.0, (len(ps) - rank) * ps[place]))
        raised[place] = highest
    return raised.tolist()


@dataclass(frozen=True, slots=True)
class Norm:
    """Normalised score: share of the teachers' gain that a student recovers."""

    mean: Interval
    """Over domains."""
    domains: dict[str, Interval]
    worst: str
    """The domain with the lowest normalised score."""


def norm(means: Mapping[str, np.ndarray], student: int, start: int, teachers: Mapping[str, int]) -> Norm:
    """The mean over domains of (student − start) / (teacher − start), MOPD's measure (2606.30406).

    Args:
        means: `resampled` scores; a model is named by its place among the M.
        start: where student and teachers began.
        teachers: by domain.

    Raises:
        UserError: a teacher does not lead: there is nothing of it that the student could have.
    """
    draws = {}
    for name, teacher in teachers.items():
        start_R, lead_R = means[name][:, start], means[name][:, teacher] - means[name][:, start]
        if lead_R[0] <= 0:
            raise UserError(
                f"{name}: its teacher scores {means[name][0, teacher]:.3f} and the start {start_R[0]:.3f}: there is no gain to "
                "recover; leave the domain out, or train its teacher further"
            )
        # of problems on which the teacher happens not to lead, the share is undetermined
        gain_R = means[name][:, student] - start_R
        draws[name] = np.divide(gain_R, lead_R, out=np.full_like(gain_R, np.nan), where=lead_R > 0)
    domains = {name: interval(draws_R) for name, draws_R in draws.items()}
    worst = min(domains, key=lambda name: domains[name].value)
    return Norm(interval(np.mean(list(draws.values()), axis=0)), domains, worst)
