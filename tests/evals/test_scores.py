"""Scores against enumeration, closed forms and simulated truth."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, product

import numpy as np
import pytest
import scipy

from stretto.base.errors import UserError
from stretto.evals.scores import (
    flip_p,
    group_draws,
    holm,
    interval,
    judged,
    majority_at_k,
    mean_interval,
    norm,
    pass_at_k,
    pass_hat_k,
    resampling_weights,
    retention,
    student_interval,
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


def coverage(draw: Callable[[], dict[str, np.ndarray]], truth: float, bounds: tuple[float, float] = (0, 1)) -> float:
    """Share of 400 simulated evaluations whose interval contains the true mean."""
    found = [mean_interval(draw(), seed, bounds) for seed in range(400)]
    assert all(each.low <= each.value <= each.high for each in found)
    return float(np.mean([each.low <= truth <= each.high for each in found]))


@pytest.mark.slow
@pytest.mark.parametrize("num_problems", [2, 5, 20, 60])
def test_intervals_cover_the_true_score_with_any_number_of_problems(num_problems: int) -> None:
    rng = np.random.default_rng(num_problems)
    draws = {
        "rare": (0.02, (0, 1), lambda: rng.binomial(1, 0.02, num_problems)),
        "one sample": (0.5, (0, 1), lambda: rng.binomial(1, 0.5, num_problems)),
        "four samples": (0.4, (0, 1), lambda: rng.binomial(4, rng.beta(2, 3, num_problems)) / 4),
        "difference": (0.1, (-1, 1), lambda: rng.binomial(1, 0.6, num_problems) - rng.binomial(1, 0.5, num_problems)),
    }
    for name, (truth, bounds, draw) in draws.items():
        # 380 of 400 are expected at least; three standard deviations are 13
        assert coverage(lambda draw=draw: {"d": draw()}, truth, bounds) >= 0.95 - 3 * (0.05 * 0.95 / 400) ** 0.5, name


def test_resampling_the_problems_alone_would_not_cover() -> None:
    rng, num_covered = np.random.default_rng(0), 0
    for seed in range(400):
        right_P = rng.binomial(1, 0.25, 2)
        found = interval(resampling_weights(2, 400, seed) @ right_P / 2)
        num_covered += found.low <= 0.25 <= found.high
    assert num_covered / 400 < 0.5


@pytest.mark.parametrize(("sizes", "shares"), [((2,) * 4, (0.05, 0.2, 0.3, 0.6)), ((2, 20) * 3, (0, 1) * 3)])
def test_the_mean_of_domains_is_covered(sizes: tuple[int, ...], shares: tuple[float, ...]) -> None:
    rng = np.random.default_rng(1)

    def draw() -> dict[str, np.ndarray]:
        pairs = enumerate(zip(sizes, shares, strict=True))
        return {f"{name}": rng.binomial(1, share, size) for name, (size, share) in pairs}

    assert coverage(draw, float(np.mean(shares))) >= 0.95 - 3 * (0.05 * 0.95 / 400) ** 0.5


def test_domains_of_two_problems_that_agree_have_an_interval_with_a_width() -> None:
    found = mean_interval({"a": [1.0, 1.0], "b": [0.0, 0.0], "c": [0.0, 0.0], "d": [0.0, 0.0]})
    assert found.value == 0.25 and found.low < 0.1 and found.high > 0.5


@pytest.mark.parametrize(("num_right", "num"), [(0, 50), (50, 50), (25, 50), (1, 8), (10, 20)])
def test_the_interval_of_one_sample_a_problem_is_clopper_and_pearsons(num_right: int, num: int) -> None:
    found, other = (mean_interval({name: [1.0] * num_right + [0.0] * (num - num_right)}) for name in "de")
    beta = scipy.special.betaincinv
    low = beta(num_right, num - num_right + 1, 0.025) if num_right else 0.0
    high = beta(num_right + 1, num - num_right, 0.975) if num_right < num else 1.0
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-12)
    assert other == found


def test_a_reward_may_exceed_the_bounds() -> None:
    found = mean_interval({"d": [-0.5, 1.5, 2.0]})
    assert found.value == 1 and found.low < 0 and found.high < 2


def test_measures_without_bounds_have_students_interval() -> None:
    found = student_interval([1.0, 2.0, 3.0, NAN])
    margin = 4.3027 / 3**0.5  # a table's quantile for two degrees of freedom
    assert (found.low, found.value, found.high) == pytest.approx((2 - margin, 2, 2 + margin), abs=1e-3)
    assert (student_interval([2.0]).low, student_interval([2.0]).high) == (-np.inf, np.inf)


def test_differences_are_paired() -> None:
    difficulty_P = np.random.default_rng(2).uniform(0, 1, 400)
    alone = mean_interval({"d": difficulty_P})
    difference = mean_interval({"d": np.full(400, 0.05)}, bounds=(-1, 1))  # the same gain on every problem
    assert difference.high - difference.low < (alone.high - alone.low) / 2
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
    values_P = np.random.default_rng(0).random(30)
    assert mean_interval({"b": values_P}) == mean_interval({"b": values_P})
    assert len({mean_interval({"b": values_P}, seed) for seed in range(3)}) == 3
    assert mean_interval({"a": values_P}) != mean_interval({"b": values_P})


def test_members_of_a_group_are_drawn_together() -> None:
    members = [np.array([0, 3]), np.array([1]), np.array([2, 4, 5])]
    whole, *draws = group_draws(members, np.random.default_rng(0), num=200)
    assert whole.tolist() == [0, 1, 2, 3, 4, 5] and len(draws) == 200
    counts = np.array([np.bincount(draw, minlength=6) for draw in draws])
    assert (counts[:, 0] == counts[:, 3]).all() and (counts[:, [2, 2]] == counts[:, 4:]).all()
    assert (counts[:, :3].sum(1) == 3).all() and len({tuple(row) for row in counts[:, :3].tolist()}) == 10


def test_a_problem_that_one_model_lacks_counts_for_none() -> None:
    np.testing.assert_array_equal(judged("d", np.array([[1.0, 0.0, 0.5], [1.0, NAN, 0.5]])), [[1.0, 0.5]] * 2)
    with pytest.raises(UserError, match="d: no problem"):
        mean_interval({"d": [NAN]})


def test_the_norm_of_a_teacher_is_one_and_of_the_start_nothing() -> None:
    rng = np.random.default_rng(3)
    start_P, teacher_P = rng.binomial(1, 0.4, (2, 200)) + 0.0
    teacher_P = np.maximum(teacher_P, start_P)
    half_P = (start_P + teacher_P) / 2
    values = {name: np.stack([start_P, teacher_P, half_P]) for name in ("a", "b")}
    for model, share in ((1, 1.0), (0, 0.0), (2, 0.5)):
        found = norm(values, model, 0, {"a": 1, "b": 1}).mean
        assert found.value == pytest.approx(share) and share - 0.2 < found.low < share < found.high < share + 0.2


@pytest.mark.slow
def test_retention_covers_the_ratio_of_two_models() -> None:
    rng, num_covered = np.random.default_rng(4), 0
    for seed in range(200):
        values_MP = rng.binomial(1, [[0.6], [0.3]], (2, 40)) + 0.0
        found = retention({"d": values_MP}, 1, 0, seed)
        num_covered += found.low <= 0.5 <= found.high
    assert num_covered >= 181  # 190 expected; three standard deviations are 9
    few = retention({"d": np.array([[0.0, 0.0, 1.0], [1.0, 0.0, 1.0]])}, 1, 0)
    assert few.value == 2 and few.high == np.inf  # the reference's score may be 0


def test_the_worst_domain_is_named() -> None:
    start_P, teacher_P = np.repeat([0.2, 0.6], 50).reshape(2, 50)
    values = {"good": np.stack([start_P, teacher_P, teacher_P]), "bad": np.stack([start_P, teacher_P, start_P - 0.1])}
    found = norm(values, student=2, start=0, teachers={"good": 1, "bad": 1})
    assert found.worst == "bad"
    assert found.mean.value == pytest.approx((1.0 - 0.25) / 2)
    assert found.domains["bad"].value == pytest.approx(-0.25)


def test_a_teacher_without_a_lead_is_refused() -> None:
    values = {"sums": np.array([[0.5, 0.5], [0.5, 0.5], [0.7, 0.7]])}
    with pytest.raises(UserError, match=r"sums: its teacher scores 0\.500 and the start 0\.500"):
        norm(values, 2, 0, {"sums": 1})


def test_a_lead_within_the_noise_bounds_nothing() -> None:
    start_P = np.repeat([1.0, 0.0], 20)
    teacher_P = np.concatenate([np.repeat([1.0, 0.0], [10, 10]), np.repeat([1.0, 0.0], [11, 9])])
    found = norm({"d": np.stack([start_P, teacher_P, teacher_P])}, 2, 0, {"d": 1})
    assert (found.mean.low, found.mean.high) == (-np.inf, np.inf)
