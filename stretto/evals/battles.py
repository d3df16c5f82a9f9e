"""Win rates and Bradley-Terry strengths of models from the verdicts of a judge.

In the model of Bradley and Terry, i beats j with probability 1 / (1 + exp(s_j − s_i)); a tie is half a win for both. Intervals are over
problems, as in `stretto.evals.scores`: all battles of a problem are resampled together.

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
"""Number of bootstrap resamplings without and with covariates; each one is a fit."""
_PRIOR = 0.05
"""Weight of the squared strengths (nats²) in the loss: worth about one win and one loss in a hundred battles."""
ELO = 400 / log(10)
"""Elo points per nat of strength: 400 points are ten wins for each loss."""


@dataclass(frozen=True, slots=True)
class Battles:
    """Result of the battles between models. Written by `fight`."""

    models: list[str]
    rates: list[list[Interval | None]]
    """Win rate of each model (row) against each other model (column); a tie counts half. None on the diagonal."""
    strengths: list[Interval]
    """Elo points above the reference; undetermined if a model never loses, because no finite strength explains that."""
    itself: Interval | None
    """Win rate of the reference's answers against its own next samples; an unbiased judge gives one half. None: one sample per problem."""
    num_problems: int
    verdicts: Verdicts
    controlled: list[Interval] | None = None
    """Strengths after controlling for the `COVARIATES`; None: not computed."""
    effects: dict[str, Interval] = field(default_factory=dict)
    """Elo points that the judge gives for one unit of each covariate."""


COVARIATES = ("twice the words", "all lines layout")
"""Covariates of `Duel.differences`, named by their units."""


@dataclass(frozen=True, slots=True)
class Duel:
    """One comparison of two models' answers. Written by `stretto.post.battle`."""

    problem: int
    first: int
    second: int
    """``first`` and ``second`` are indices of models."""
    won: float
    """1: the first answer won; ½: tie; 0: the second won."""
    differences: tuple[float, ...]
    """First minus second answer in each of the `COVARIATES`."""


@dataclass(frozen=True, slots=True)
class Verdicts:
    """Statistics of the judge's verdicts. Written by `stretto.post.battle`."""

    num: int
    contradicted: float
    """Share of pairs with contradictory verdicts in the two orders; they count as ties."""
    num_infra: int
    """Number of comparisons without a verdict."""


def fight(
    models: Sequence[str], wins_PMM: np.ndarray, itself_P: np.ndarray, reference: int, verdicts: Verdicts, seed: int = 0
) -> Battles:
    """Win rates and strengths.

    Args:
        wins_PMM: by problem, mean result of model i against model j, 0 to 1; NaN: not compared.
        itself_P: the same for the reference against itself.

    Raises:
        UserError: two models were never compared.
    """
    num_problems = len(wins_PMM)

    def rate(i: int, j: int) -> Interval | None:
        return None if i == j else mean_interval({f"{models[i]} against {models[j]}": wins_PMM[:, i, j]}, seed)

    rates = [[rate(i, j) for j in range(len(models))] for i in range(len(models))]
    wins_RMM = np.tensordot(resampling_weights(num_problems, _FITS, seed), np.nan_to_num(wins_PMM), 1)
    points_RM = ELO * np.stack([strengths(wins_MM) for wins_MM in wins_RMM])
    gains_RM = points_RM - points_RM[:, [reference]]
    itself = None if np.isnan(itself_P).all() else mean_interval({"the reference against itself": itself_P}, seed)
    return Battles(list(models), rates, [interval(gains_R) for gains_R in gains_RM.T], itself, num_problems, verdicts)


def controlled(
    duels: Sequence[Duel], num_models: int, reference: int, seed: int = 0
) -> tuple[list[Interval], list[Interval]]:
    """Strengths above the reference and effects of the covariates, in Elo points (style control as in Chatbot Arena).

    A weak prior keeps the strength of a model finite that never loses. If all answers of a model are longer than all others, length and
    strength cannot be distinguished; the prior then divides the effect between them.
    """
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
    """Maximum-likelihood strengths [M] in nats, with mean 0; NaN without a maximum: the graph of wins is not strongly connected."""
    import choix  # late: it imports scipy.stats, which takes most of a second

    if scipy.sparse.csgraph.connected_components(wins_MM > 0, connection="strong")[0] > 1:
        return np.full(len(wins_MM), np.nan)
    return choix.ilsr_pairwise_dense(wins_MM)
