"""Bradley and Terry's strengths against closed forms and planted ones."""

from __future__ import annotations

import math

import numpy as np
import pytest

from stretto.evals.battles import ELO, Battles, Duel, Verdicts, controlled, fight, strengths

TOLD = Verdicts(0, 0.0, 0)


def test_two_models_have_the_odds_that_were_counted() -> None:
    found = strengths(np.array([[0.0, 9.0], [3.0, 0.0]]))
    assert found[0] - found[1] == pytest.approx(math.log(3))
    assert found.sum() == pytest.approx(0)


def fought(truth_M: np.ndarray, num_problems: int, seed: int) -> Battles:
    """A battle of each pair on each problem, by Bradley and Terry's chances; the reference against itself: a fair coin."""
    rng, num = np.random.default_rng(seed), len(truth_M)
    wins_PMM = np.full((num_problems, num, num), np.nan)
    for i in range(num):
        for j in range(i + 1, num):
            wins_PMM[:, i, j] = rng.random(num_problems) < 1 / (1 + np.exp(truth_M[j] - truth_M[i]))
            wins_PMM[:, j, i] = 1 - wins_PMM[:, i, j]
    names = [f"m{place}" for place in range(num)]
    return fight(names, wins_PMM, (rng.random(num_problems) < 0.5) + 0.0, 0, TOLD, seed)


@pytest.mark.slow
def test_planted_strengths_are_found() -> None:
    truth_M, num_held, num_even = np.array([0.0, 0.5, -1.0]), 0, 0
    for seed in range(10):
        found = fought(truth_M, 150, seed)
        assert (found.strengths[0].low, found.strengths[0].high) == (0, 0)
        num_held += sum(
            [each.low <= ELO * true <= each.high for each, true in zip(found.strengths, truth_M, strict=True)][1:]
        )
        assert found.itself is not None
        num_even += found.itself.low <= 0.5 <= found.itself.high
    assert num_held >= 16 and num_even >= 7  # of 20 and 10; P(less at 95 %) = 0.003 and 0.001
    assert found.rates[0][0] is None
    assert found.rates[0][1].value + found.rates[1][0].value == pytest.approx(1)  # type: ignore[union-attr]


def test_who_never_loses_has_no_finite_strength_but_a_bounded_rate() -> None:
    always = np.full((40, 2, 2), np.nan)
    always[:, 0, 1], always[:, 1, 0] = 1.0, 0.0
    found = fight(["a", "b"], always, np.full(40, np.nan), 1, TOLD)
    assert math.isnan(found.strengths[0].value) and found.strengths[0].high == np.inf
    rate = found.rates[0][1]
    assert rate is not None and (rate.value, rate.high) == (1, 1) and rate.low == pytest.approx(0.912, abs=0.01)
    assert found.itself is None


def test_length_is_told_from_strength() -> None:
    """A model that is no better and writes three times as much, before a judge who likes length: 60 Elo points for each doubling."""
    rng, duels = np.random.default_rng(0), []
    for problem in range(200):
        for _ in range(4):
            longer = math.log2(3) + rng.normal(0, 1.5)
            won = float(rng.random() < 1 / (1 + math.exp(-60 * longer / ELO)))
            duels.append(Duel(problem, 1, 0, won, (longer, 0.0)))
    points, effects = controlled(duels, 2, 0)
    assert np.mean([duel.won for duel in duels]) > 0.58  # what it wins as it stands
    assert points[0].value == 0 and points[1].low < 0 < points[1].high
    assert effects[0].low < 60 < effects[0].high and effects[1].value == pytest.approx(0, abs=1e-6)
