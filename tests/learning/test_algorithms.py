"""Credit: advantages by hand, and weights that know the whole update."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.base.errors import UserError
from stretto.base.trajectory import Group, Outcome, StepReward
from stretto.learning.algorithms import (
    Streams,
    advantages,
    give_credit,
    load_algorithm,
    overlong_penalty,
    token_weights,
    unroll,
)
from tests.flow.samples import group, trajectory

EXAMPLES = Path(__file__).resolve().parents[2] / "stretto" / "recipes" / "examples"

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
    with pytest.raises(AssertionError, match="infrastructure error"):
        unroll([broken])


@pytest.mark.parametrize("kind", ["token", "sequence", "constant"])
def test_weights_of_an_update_are_its_normaliser(kind: str) -> None:
    lengths = [1, 5, 14]
    weights = token_weights(lengths, kind, max_tokens=20)
    total = sum(weight * length for weight, length in zip(weights, lengths, strict=True))
    assert total == pytest.approx({"token": 1.0, "sequence": 1.0, "constant": 20 / 60}[kind])
    means = [weight * length for weight, length in zip(weights, lengths, strict=True)]
    expected = {"token": [1 / 20, 5 / 20, 14 / 20], "sequence": [1 / 3] * 3, "constant": [1 / 60, 5 / 60, 14 / 60]}
    assert means == pytest.approx(expected[kind])


def test_a_sample_without_trained_tokens_takes_no_share_of_the_others() -> None:
    assert token_weights([0, 2, 5], "sequence", 20) == pytest.approx([0.0, 1 / 4, 1 / 10])


def test_only_sampled_tokens_get_credit() -> None:
    rng = np.random.default_rng(3)
    groups = [group(rng, [1.0, 0.0, 0.5], ordinal=ordinal) for ordinal in range(3)]
    streams = unroll(groups)
    credits = give_credit(streams, "grpo", "token", 18)
    gains = advantages(np.array([1.0, 0.0, 0.5]), "grpo").tolist() * 3
    samples = [sample for each in groups for sample in each.trajectories]
    flat = [one for each in streams for one in each]
    assert [one.number for one in flat] == [*range(9)]
    for sample, one, credit, gain in zip(samples, flat, credits, gains, strict=True):
        is_sampled = np.concatenate([np.full(len(part.tokens), part.is_sampled) for part in sample.segments])
        assert not is_sampled[0] and np.array_equal(one.mask_S, is_sampled[1:])
        assert one.mask_S.sum() == sample.num_sampled
        assert not credit.advantages_S[~one.mask_S].any() and not credit.weights_S[~one.mask_S].any()
        assert credit.advantages_S[one.mask_S] == pytest.approx(gain)
    assert sum(credit.weights_S.sum() for credit in credits) == pytest.approx(1.0)


def by_hand() -> Streams:
    """A prompt of 2, a turn of 3 (of which the first 2 tokens earn 0.5), a tool's turn of 1, a turn of 2 (that earns −1)."""
    made = trajectory(np.random.default_rng(0), [2, 3, 1, 2], reward=1.0)
    verdict = replace(made.verdict, steps=(StepReward(0, 0.5, end=2), StepReward(1, -1.0)))
    whole = group(np.random.default_rng(0), [1.0, 0.0])
    both = (replace(made, verdict=verdict), replace(made, sample=1))
    return unroll([Group(replace(whole.task, max_tokens=6), both)], overlong_share=0.5)[0][0]


def test_streams_say_which_turn_a_token_belongs_to_and_what_it_earned() -> None:
    one = by_hand()
    assert one.turns_S.tolist() == [-1, 0, 0, 0, -1, 1, 1]
    assert one.mask_S.tolist() == [turn >= 0 for turn in one.turns_S]
    assert one.steps_S.tolist() == [0.0, 0.0, 0.5, 0.0, 0.0, 0.0, -1.0]
    assert one.reward == pytest.approx(1.0 - 2 / 3), "5 tokens of 6, the last 3 are dear"


@pytest.mark.parametrize(("num", "penalty"), [(0, 0.0), (80, 0.0), (90, 0.5), (100, 1.0), (120, 1.0)])
def test_overlong_answers_lose_as_dapo_says(num: int, penalty: float) -> None:
    assert overlong_penalty(num, 100, 0.2) == pytest.approx(penalty)
    assert overlong_penalty(num, 100, 0.0) == 0.0


@given(st.lists(st.floats(0, 1), min_size=2, max_size=7))
def test_a_group_of_which_some_never_ended_has_credit(rewards: list[float]) -> None:
    whole = group(np.random.default_rng(0), [1.0] * 8)
    some = tuple(
        replace(one, verdict=replace(one.verdict, reward=reward))
        for one, reward in zip(whole.trajectories, rewards, strict=False)
    )
    for kind in KINDS:
        credits = give_credit(unroll([Group(whole.task, some)]), kind, "token", 18)
        expected = advantages(np.array(rewards), kind)
        assert [credit.advantages_S[credit.weights_S > 0][0] for credit in credits] == pytest.approx(expected, rel=1e-5)


def own(tmp_path: Path, body: str) -> str:
    path = tmp_path / "mine.py"
    head = "import numpy as np\nfrom stretto.learning.algorithms import Credit\n\n\n"
    path.write_text(f"{head}def mine(groups):\n    return [[{body} for one in group] for group in groups]\n")
    return f"{path}:mine"


def test_masked_tokens_count_in_no_normaliser(tmp_path: Path) -> None:
    """DAPO's overlong filter, say: of each sample only its first turn is trained here."""
    name = own(tmp_path, "Credit(1.0, mask_S=one.turns_S == 0)")
    streams = unroll([group(np.random.default_rng(3), [1.0, 0.0, 0.5])])
    for normaliser in ("token", "sequence"):
        credits = give_credit(streams, name, normaliser, 18)
        for one, credit in zip(streams[0], credits, strict=True):
            assert not credit.weights_S[one.turns_S != 0].any() and (credit.weights_S[one.turns_S == 0] > 0).all()
        assert sum(credit.weights_S.sum() for credit in credits) == pytest.approx(1.0)


@pytest.mark.parametrize("normaliser", ["token", "sequence"])
def test_the_overlong_filter_trains_nothing_of_a_truncated_answer(normaliser: str) -> None:
    whole = group(np.random.default_rng(3), [1.0, 0.0, 0.5])
    cut = (replace(whole.trajectories[0], finish_reason="length"), *whole.trajectories[1:])
    streams = unroll([Group(whole.task, cut)])
    plain, credits = (give_credit(streams, "dr_grpo", normaliser, 18, is_on) for is_on in (False, True))
    assert plain[0].weights_S.any() and not credits[0].weights_S.any()
    assert sum(credit.weights_S.sum() for credit in credits) == pytest.approx(1.0)
    assert np.array_equal(plain[1].advantages_S, credits[1].advantages_S), "its reward counts in the group's mean"


def test_an_algorithm_may_weigh_tokens_itself(tmp_path: Path) -> None:
    streams = unroll([group(np.random.default_rng(3), [1.0, 0.0])])
    credits = give_credit(streams, own(tmp_path, "Credit(one.reward, weights_S=0.5 * one.mask_S)"), "token", 18)
    assert all((credit.weights_S == 0.5 * one.mask_S).all() for one, credit in zip(streams[0], credits, strict=True))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("one.nothing", r"raised AttributeError: .*; correct it"),
        ("float('nan')", "is not a finite number; correct it"),
        ("np.zeros(3)", r"inputs of ordinal 0, sample 0; give a number, or one for each input"),
        ("'much'", "could not convert string to float"),
        ("10**400", "int too large to convert to float"),
        ("Credit(1.0, weights_S=one.mask_S) if one.number else 1.0", "gives weights for 1 samples of 2"),
    ],
)
def test_an_algorithm_of_ones_own_that_goes_wrong_is_named(tmp_path: Path, body: str, message: str) -> None:
    streams = unroll([group(np.random.default_rng(3), [1.0, 0.0])])
    with pytest.raises(UserError, match=message) as caught:
        give_credit(streams, own(tmp_path, body), "token", 18)
    assert str(caught.value).startswith("loss.advantage: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["nowhere.py:mine", "stretto.learning.algorithms:absent", "stretto.learning.algorithms:KINDS"]
)
def test_an_algorithm_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"^loss\.advantage: "):
        load_algorithm(name)


def test_the_example_gives_credit_by_turns() -> None:
    """What a turn and all after it earned, against the other samples that had a turn of that number."""
    one = by_hand()
    other = replace(one, number=1, reward=0.0, steps_S=np.zeros_like(one.steps_S), turns_S=np.where(one.turns_S, -1, 0))
    other = replace(other, mask_S=other.turns_S == 0)
    credits = give_credit([[one, other]], f"{EXAMPLES / 'turns.py'}:by_turns", "token", 18)
    reward = one.reward
    expected = {0: (reward - 0.5) - (reward - 0.5) / 2, 1: 0.0}  # of its own turn 1 it is the only one
    for turn, gain in expected.items():
        assert credits[0].advantages_S[one.turns_S == turn] == pytest.approx(gain)
    assert credits[1].advantages_S[other.mask_S] == pytest.approx(-(reward - 0.5) / 2)
