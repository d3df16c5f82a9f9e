"""Credit: advantages by hand, and weights that know the whole update."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.base.trajectory import Group, Outcome
from stretto.rl.credit import advantages, assign, token_weights
from stretto.rl.recipe import LossConfig
from tests.rl.samples import group

KINDS = ["grpo", "dr_grpo", "rloo"]


def test_advantages_by_hand() -> None:
    rewards = np.array([1.0, 0.0, 0.0, 0.0])
    assert advantages(rewards, "dr_grpo") == pytest.approx([0.75, -0.25, -0.25, -0.25])
    assert advantages(rewards, "grpo") == pytest.approx(np.array([0.75, -0.25, -0.25, -0.25]) / (0.5 + 1e-4))
    # against the mean of the other three
    assert advantages(rewards, "rloo") == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])


@pytest.mark.parametrize("kind", KINDS)
@given(rewards=st.lists(st.floats(-10, 10), min_size=2, max_size=9), shift=st.floats(-5, 5))
def test_advantages_add_up_to_nothing_and_do_not_see_a_shift(kind: str, rewards: list[float], shift: float) -> None:
    plain = advantages(np.array(rewards), kind)
    scale = 1.0 + np.abs(plain).max()
    assert abs(plain.sum()) <= 1e-6 * scale
    if max(rewards) - min(rewards) > 1e-3:  # less than that drowns in the shift's own rounding
        assert advantages(np.array(rewards) + shift, kind) == pytest.approx(plain, abs=1e-6 * scale)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3])
def test_equal_rewards_teach_exactly_nothing(kind: str, reward: float) -> None:
    assert not advantages(np.full(7, reward), kind).any()


@pytest.mark.parametrize("rewards", [[1.0, np.nan], [np.inf, 0.0]])
def test_a_reward_that_is_no_finite_number_never_gets_this_far(rewards: list[float]) -> None:
    with pytest.raises(AssertionError, match="rewards of a group"):
        advantages(np.array(rewards), "grpo")


def test_an_infrastructure_failure_never_gets_this_far() -> None:
    whole = group(np.random.default_rng(0), [1.0, 0.0])
    verdict = replace(whole.trajectories[1].verdict, outcome=Outcome.INFRA)
    broken = Group(whole.task, (whole.trajectories[0], replace(whole.trajectories[1], verdict=verdict)))
    with pytest.raises(AssertionError, match="failure of ours"):
        assign([broken], LossConfig())


@pytest.mark.parametrize("kind", ["token", "sequence", "constant"])
def test_weights_of_an_update_are_its_normaliser(kind: str) -> None:
    lengths = [1, 5, 14]
    weights = token_weights(lengths, kind, max_tokens=20)
    total = sum(weight * length for weight, length in zip(weights, lengths, strict=True))
    assert total == pytest.approx({"token": 1.0, "sequence": 1.0, "constant": 20 / 60}[kind])
    means = [weight * length for weight, length in zip(weights, lengths, strict=True)]
    expected = {"token": [1 / 20, 5 / 20, 14 / 20], "sequence": [1 / 3] * 3, "constant": [1 / 60, 5 / 60, 14 / 60]}
    assert means == pytest.approx(expected[kind])


def test_only_sampled_tokens_get_credit() -> None:
    rng = np.random.default_rng(3)
    groups = [group(rng, [1.0, 0.0, 0.5], ordinal=ordinal) for ordinal in range(3)]
    streams = assign(groups, LossConfig(normaliser="token"))
    assert [len(each) for each in streams] == [3, 3, 3]
    total = 0.0
    for each, credits in zip(groups, streams, strict=True):
        gains = advantages(np.array([1.0, 0.0, 0.5]), "grpo")
        for sample, credit, gain in zip(each.trajectories, credits, gains, strict=True):
            is_sampled = np.concatenate([np.full(len(part.tokens), part.is_sampled) for part in sample.segments])
            assert not is_sampled[0] and np.array_equal(credit.mask_S, is_sampled[1:])
            assert credit.mask_S.sum() == sample.num_sampled
            assert not credit.advantages_S[~credit.mask_S].any() and not credit.weights_S[~credit.mask_S].any()
            assert credit.advantages_S[credit.mask_S] == pytest.approx(gain)
            total += credit.weights_S.sum()
    assert total == pytest.approx(1.0)
