"""Battles: whose answer a judge prefers, model against model, and how strong that makes each.

Bradley and Terry: i beats j with a chance of 1 / (1 + exp(s_j − s_i)); a tie is half a win for both. As in `stretto.evals.scores`
problems are what is resampled, with all their battles.

Shape letters: M models, P problems, R resamplings behind the estimate itself, which is row 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log

import choix
import numpy as np
from scipy.sparse.csgraph import connected_components

from stretto.evals.scores import Interval, interval, resampled, share_interval

_FITS = 500
"""Resamplings; each is a fit."""
ELO = 400 / log(10)
"""Points for each nat of strength: 400 more is ten wins for each loss."""


@dataclass(frozen=True, slots=True)
class Battles:
    """What models won against each other. Written by `fight`."""

    models: list[str]
    rates: list[list[Interval | None]]
    """Share of its battles with each other model that a model won, a tie half; None: with itself."""
    strengths: list[Interval]
    """Elo points above the reference; undetermined where some never lose to others: no finite strength explains that."""
    itself: Interval | None
    """Share that the reference's first answers won against its second ones: half, if the judge is fair. None: it has one each."""
    num_problems: int
    verdicts: Verdicts


@dataclass(frozen=True, slots=True)
class Verdicts:
    """What the judge was asked, and how it did. Written by whoever asks it."""

    num: int
    contradicted: float
    """Share in which it said something else when shown the other order: ties, which say nothing of the answers."""
    num_infra: int
    """Battles that could not be judged."""


def fight(
    models: Sequence[str], wins_PMM: np.ndarray, itself_P: np.ndarray, reference: int, verdicts: Verdicts, seed: int = 0
) -> Battles:
    """Rates and strengths from ``wins_PMM``, by problem the mean of what model i got against j (NaN: they did not meet), and
    ``itself_P``, the same of the reference against itself. Raises `UserError`: two models never met."""
    num_problems, places = len(wins_PMM), range(len(models))

    def rate(name: str, got_P: np.ndarray) -> Interval:
        return share_interval(resampled({name: got_P[None]}, seed=seed)[name][:, 0], int((~np.isnan(got_P)).sum()))

    rates = [
        [None if i == j else rate(f"{models[i]} against {models[j]}", wins_PMM[:, i, j]) for j in places]
        for i in places
    ]
    even = np.full(num_problems, 1 / num_problems)
    counts_RP = np.random.default_rng(seed).multinomial(num_problems, even, _FITS)
    weights_RP = np.concatenate([np.ones((1, num_problems)), counts_RP])
    wins_RMM = np.tensordot(weights_RP, np.nan_to_num(wins_PMM), 1)
    points_RM = ELO * np.stack([strengths(wins_MM) for wins_MM in wins_RMM])
    gains_RM = points_RM - points_RM[:, [reference]]
    itself = rate(f"{models[reference]} against itself", itself_P) if not np.isnan(itself_P).all() else None
    return Battles(list(models), rates, [interval(gains_R) for gains_R in gains_RM.T], itself, num_problems, verdicts)


def strengths(wins_MM: np.ndarray) -> np.ndarray:
    """Maximum likelihood, in nats, of mean 0; NaN where there is none: not every model can be reached from every other by wins."""
    if connected_components(wins_MM > 0, connection="strong")[0] > 1:
        return np.full(len(wins_MM), np.nan)
    return choix.ilsr_pairwise_dense(wins_MM)
