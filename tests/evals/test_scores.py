"""Scores against enumeration, closed forms and simulated truth."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest

from stretto.base.errors import UserError
from stretto.evals.scores import (
    Interval,
    flip_p,
    holm,
    interval,
    majority_at_k,
    norm,
    pass_at_k,
    pass_hat_k,
    resampled,
    share_interval,
)

NAN = float("nan")


def test_pass_at_k_and_pass_hat_k_are_means_over_all_choices_of_k_samples() -> None:
    rng = np.random.default_rng(0)
    right_PS = rng.integers(0, 2, (20, 6)).astype(float)
    for chance, of in ((pass_at_k, max), (pass_hat_k, min)):
        for k in (1, 2, 5, 6):
            expected = [np.mean([of(row[list(subset)]) for subset in combinations(range(6), k)]) for row in right_PS]
            np.testing.assert_allclose(chance(right_PS, k), expected, atol=1e-12)


def test_samples_that_nobody_judged_are_none() -> None:
    right_PS = np.array([[1.0, NAN, 0.0], [NAN, NAN, 1.0]])
    np.testing.assert_array_equal(pass_at_k(right_PS, 1), [0.5, 1.0])
    np.testing.assert_array_equal(pass_at_k(right_PS, 2), [1.0, NAN])
    np.testing.assert_array_equal(pass_hat_k(right_PS, 2), [0.0, NAN])
    np.testing.assert_array_equal(majority_at_k(right_PS, [["a", "b", "c"]] * 2, 2), [0.5, NAN])


def test_majority_votes() -> None:
    right_PS = np.array([[0.0, 0.0, 1.0], [1.0, 1.0, 0.0], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    answers = [["a", "a", "b"], ["b", "b", "a"], ["a", "b", "c"], ["b", None, None], [None] * 3]
    # outvoted; elected; a third of a draw; the only one that can be read; nobody votes
    np.testing.assert_allclose(majority_at_k(right_PS, answers, 3), [0, 1, 1 / 3, 1, 0])
    np.testing.assert_allclose(majority_at_k(right_PS, answers, 1), [1 / 3, 2 / 3, 1 / 3, 1 / 3, 0])


def test_majority_of_many_samples_is_drawn_and_repeats() -> None:
    right_PS = np.array([[1.0] * 30 + [0.0] * 20])
    answers = [["right"] * 30 + [f"wrong {number}" for number in range(20)]]
    first, again = (majority_at_k(right_PS, answers, 9) for _ in range(2))
    assert first == again
    assert first[0] > 0.95


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    rng = np.random.default_rng(1)
    num_held = 0
    for trial in range(300):
        scores_P = rng.binomial(4, rng.beta(2, 3, 60)) / 4  # of mean 0.4, problems of all kinds of difficulty
        found = interval(resampled({"d": scores_P[None]}, 400, trial)["d"][:, 0])
        assert found.value == pytest.approx(scores_P.mean())
        num_held += found.low <= 0.4 <= found.high
    # 285 expected; a percentile interval of 60 problems is a little short. Five standard deviations of 300 coins: 19
    assert 262 <= num_held <= 299


def test_differences_are_paired() -> None:
    difficulty_P = np.random.default_rng(2).uniform(0, 1, 50)
    means = resampled({"d": np.stack([difficulty_P * 0.9, difficulty_P * 0.9 + 0.05])})["d"]
    alone, difference = interval(means[:, 0]), interval(means[:, 1] - means[:, 0])
    assert alone.high - alone.low > 0.1
    assert difference.low == pytest.approx(0.05)
    assert difference.high == pytest.approx(0.05)
    assert difference.low > 0


def test_flipping_signs_is_exact_where_all_ways_can_be_told() -> None:
    differences_P = np.array([0.5, 0.25, 0.25, 0.0, -0.25, 0.75, NAN])
    kept_P = differences_P[[0, 1, 2, 4, 5]]
    ways = np.array(list(product((-1, 1), repeat=5))) @ kept_P
    exact = (np.abs(ways) >= kept_P.sum() - 1e-9).mean()
    assert flip_p(differences_P) == pytest.approx(exact, abs=5 * np.sqrt(exact * (1 - exact) / 20_000) + 1e-4)
    assert flip_p(np.zeros(9)) == flip_p(np.array([0.5])) == 1
    assert flip_p(np.ones(50)) == pytest.approx(1 / 20_001)


def test_holms_raised_p_values() -> None:
    assert holm([0.01, 0.04, 0.03, 0.5]) == pytest.approx([0.04, 0.09, 0.09, 0.5])  # 4·.01; max(3·.03, 2·.04); .5
    assert holm([0.6, 0.4]) == pytest.approx([0.8, 0.8])
    assert holm([]) == []


def test_draws_depend_on_seed_and_domain_alone() -> None:
    values = {"a": np.random.default_rng(0).random((1, 30)), "b": np.random.default_rng(1).random((1, 30))}
    both, alone, other = resampled(values), resampled({"b": values["b"]}), resampled(values, seed=1)
    np.testing.assert_array_equal(both["b"], alone["b"])
    assert not np.array_equal(both["b"][1:], other["b"][1:])


def test_a_problem_that_one_model_lacks_counts_for_none() -> None:
    means = resampled({"d": np.array([[1.0, 0.0, 0.5], [1.0, NAN, 0.5]])})["d"]
    np.testing.assert_allclose(means[0], [0.75, 0.75])
    with pytest.raises(UserError, match="d: no problem"):
        resampled({"d": np.array([[NAN]])})


def test_none_of_fifty_is_not_certainly_never() -> None:
    never = share_interval(resampled({"d": np.zeros((1, 50))})["d"][:, 0], 50)
    assert (never.value, never.low) == (0, 0)
    assert never.high == pytest.approx(0.0711, abs=1e-3)  # Clopper and Pearson's table
    always = share_interval(resampled({"d": np.ones((1, 50))})["d"][:, 0], 50)
    assert always.low == pytest.approx(1 - 0.0711, abs=1e-3)
    half = share_interval(resampled({"d": np.array([[0.0, 1.0] * 25])})["d"][:, 0], 50)
    assert 0.3 < half.low < 0.5 < half.high < 0.7


def test_the_norm_of_a_teacher_is_one_and_of_the_start_nothing() -> None:
    rng = np.random.default_rng(3)
    start_P, teacher_P = rng.binomial(1, 0.4, (2, 200)) + 0.0
    teacher_P = np.maximum(teacher_P, start_P)
    half_P = (start_P + teacher_P) / 2
    means = resampled({name: np.stack([start_P, teacher_P, half_P]) for name in ("a", "b")})
    teachers = {"a": 1, "b": 1}
    assert norm(means, 1, 0, teachers).mean == Interval(1.0, 1.0, 1.0)
    assert norm(means, 0, 0, teachers).mean == Interval(0.0, 0.0, 0.0)
    found = norm(means, 2, 0, teachers).mean
    assert (found.low, found.value, found.high) == pytest.approx((0.5, 0.5, 0.5))


def test_the_worst_domain_is_named() -> None:
    means = {"good": np.array([[0.2, 0.6, 0.6]] * 3), "bad": np.array([[0.2, 0.6, 0.1]] * 3)}
    found = norm(means, student=2, start=0, teachers={"good": 1, "bad": 1})
    assert found.worst == "bad"
    assert found.mean.value == pytest.approx((1.0 - 0.25) / 2)
    assert found.domains["bad"].value == pytest.approx(-0.25)


def test_a_teacher_without_a_lead_is_refused() -> None:
    means = {"sums": np.array([[0.5, 0.5, 0.7]] * 3)}
    with pytest.raises(UserError, match=r"sums: its teacher scores 0\.500 and the start 0\.500"):
        norm(means, 2, 0, {"sums": 1})


def test_a_lead_within_the_noise_bounds_nothing() -> None:
    start_P = np.repeat([1.0, 0.0], 20)
    teacher_P = np.concatenate([np.repeat([1.0, 0.0], [10, 10]), np.repeat([1.0, 0.0], [11, 9])])
    means = resampled({"d": np.stack([start_P, teacher_P, teacher_P])})
    found = norm(means, 2, 0, {"d": 1})
    assert (found.mean.low, found.mean.high) == (-np.inf, np.inf)
