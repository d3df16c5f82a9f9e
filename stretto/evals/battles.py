"""Win rates and Bradley-Terry strengths of models from the verdicts of a judge.

Bradley and Terry: i beats j with a chance of 1 / (1 + exp(s_j − s_i)); a tie is half a win for both. As in `stretto.evals.scores`
problems are what is resampled, with all their battles.

Shape letters: M models, P problems, R resamplings behind the estimate itself, which is row 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log

import numpy as np
import scipy

from stretto.evals.scores import Interval, interval, mean_interval, resampling_weights

_FITS, _CONTROLLED_FITS = 500, 100
"""Resamplings; each is a fit."""
_PRIOR = 0.05
"""Of squared nats: a win and a loss more, about, in a hundred battles."""
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
    controlled: list[Interval] | None = None
    """Strengths if all answers were as long and as plain: Bradley and Terry with these differences as covariates. None: not asked for."""
    effects: dict[str, Interval] = field(default_factory=dict)
    """Elo points that each of `COVARIATES` was worth to the judge."""


COVARIATES = ("twice the words", "all lines layout")
"""Units of what `Duel.differences` counts."""


@dataclass(frozen=True, slots=True)
class Duel:
    """One answer against another model's. Written by whoever asks the judge."""

    problem: int
    first: int
    second: int
    """Models, by place."""
    won: float
    """By the first: 1, ½ or 0."""
    differences: tuple[float, ...]
    """First less second, of `COVARIATES`."""


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

    rates = [
        [None if i == j else mean_interval(f"{models[i]} against {models[j]}", wins_PMM[:, i, j], seed) for j in places]
        for i in places
    ]
    wins_RMM = np.tensordot(resampling_weights(num_problems, _FITS, seed), np.nan_to_num(wins_PMM), 1)
    points_RM = ELO * np.stack([strengths(wins_MM) for wins_MM in wins_RMM])
    gains_RM = points_RM - points_RM[:, [reference]]
    itself = (
        mean_interval(f"{models[reference]} against itself", itself_P, seed) if not np.isnan(itself_P).all() else None
    )
    return Battles(list(models), rates, [interval(gains_R) for gains_R in gains_RM.T], itself, num_problems, verdicts)


def controlled(
    duels: Sequence[Duel], num_models: int, reference: int, seed: int = 0
) -> tuple[list[Interval], list[Interval]]:
    """Strengths above the reference and effects of the covariates, Elo points, with intervals over problems (style control, as Chatbot
    Arena does it). A faint prior keeps those finite who never lose; where every answer of a model is longer than every other's, length
    and strength cannot be told apart, and it shares what was won between them."""
    seen = sorted({duel.problem for duel in duels})
    place_D = np.searchsorted(seen, [duel.problem for duel in duels])
    x_DX = np.zeros((len(duels), num_models + len(COVARIATES)))
    for row, duel in enumerate(duels):
        x_DX[row, duel.first], x_DX[row, duel.second] = 1.0, -1.0
        x_DX[row, num_models:] = duel.differences
    won_D, found = np.array([duel.won for duel in duels]), []
    for weight_P in resampling_weights(len(seen), _CONTROLLED_FITS, seed):
        weight_D = weight_P[place_D]

        def loss(b_X: np.ndarray, weight_D: np.ndarray = weight_D) -> tuple[float, np.ndarray]:
            logit_D = x_DX @ b_X
            value = weight_D @ (np.logaddexp(0, logit_D) - won_D * logit_D) + _PRIOR * b_X @ b_X
            return float(value), x_DX.T @ (weight_D * (scipy.special.expit(logit_D) - won_D)) + 2 * _PRIOR * b_X

        found.append(ELO * scipy.optimize.minimize(loss, np.zeros(x_DX.shape[1]), jac=True, method="L-BFGS-B").x)
    points_RX = np.stack(found)
    gains_RM = points_RX[:, :num_models] - points_RX[:, [reference]]
    return [interval(each) for each in gains_RM.T], [interval(each) for each in points_RX[:, num_models:].T]


def strengths(wins_MM: np.ndarray) -> np.ndarray:
    """Maximum likelihood, in nats, of mean 0; NaN where there is none: not every model can be reached from every other by wins."""
    import choix  # brings scipy.stats: most of a second that only battles need

    if scipy.sparse.csgraph.connected_components(wins_MM > 0, connection="strong")[0] > 1:
        return np.full(len(wins_MM), np.nan)
    return choix.ilsr_pairwise_dense(wins_MM)
