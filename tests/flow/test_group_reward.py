"""Rewards of a whole group against numbers by hand, and against ways to please a judge that are no good answers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from pydantic import ValidationError

from stretto.base.trajectory import Outcome, Verdict
from stretto.flow.group_reward import (
    Written,
    contrast,
    diversity,
    group_rewards,
    length_controlled,
    refusal,
    within_budget,
)
from stretto.learning.algorithms import advantages
from stretto.learning.recipe import RewardConfig
from stretto.text.similar import words

PROMPT = "Describe the harbour of a small town at night, in a few plain sentences of your own."
HONEST = "Two lamps burn on the quay. The boats knock together softly, and somewhere a dog answers a bell."
OTHERS = (
    "A crane stands over black water. Nets hang to dry; their smell of tar and weed is all that moves.",
    "It is never quite dark here, because the lighthouse sweeps the roofs and counts the masts again.",
    "Men mend engines by torchlight and swear gently, while the tide lifts every hull by a hand.",
)
RULES = RewardConfig(
    diversity="words", length_budget=2.0, length_control=True, copy_at=0.5, distinct_at=0.5, format=r"^\w"
)


def written(text: str, reward: float, num_tokens: int | None = None, outcome: Outcome = Outcome.OK) -> Written:
    return Written(text, num_tokens or max(1, len(text.split())), Verdict(reward, outcome, 0.0, parts={"judge": 0.25}))


def rewards(config: RewardConfig, *answers: Written) -> list[float]:
    return [each.reward for each in group_rewards(config, PROMPT, "", answers)]


# Known numbers


def test_diversity_is_the_share_of_others_outside() -> None:
    assert diversity(np.array([0, 0, 1, 2], np.int32)).tolist() == [2 / 3, 2 / 3, 1.0, 1.0]
    assert diversity(np.zeros(5, np.int32)).tolist() == [0.0] * 5
    assert diversity(np.zeros(1, np.int32)).tolist() == [1.0]


def test_contrast_is_how_unlike_the_others_one_is() -> None:
    alike = np.array([[1.0, 0.8, 0.2], [0.8, 1.0, 0.2], [0.2, 0.2, 1.0]])
    unlike = np.array([0.5, 0.5, 0.8])
    np.testing.assert_allclose(contrast(alike, 2.0), (unlike / 0.6) ** 2)
    assert contrast(np.ones((3, 3)), 2.0).tolist() == [1.0] * 3 and contrast(np.eye(1), 2.0).tolist() == [1.0]
    assert contrast(np.array([[1.0] * 9 + [-1.0]] * 9 + [[-1.0] * 9 + [1.0]]), 9.0).max() == 4.0  # bounded
    config = RewardConfig(diversity="characters", contrast=4.0)
    found = group_rewards(config, PROMPT, "", [written(HONEST, 0.5), written(HONEST, 0.5), written(OTHERS[0], 0.5)])
    assert found[0].reward == found[1].reward < 0.5 < found[2].reward and "cluster" not in found[0].parts
    with pytest.raises(ValidationError, match="contrast is a power of diversity, and there is none"):
        RewardConfig.model_validate({"contrast": 4.0})
    assert RewardConfig.model_validate_json(config.model_dump_json()) == config  # a run keeps its recipe


def test_short_answers_earn_less_in_proportion() -> None:
    config = RewardConfig(enough_words=4)
    answers = [written(text, 0.8) for text in ("one, two", "one two three four", "one two three four five", "")]
    assert rewards(config, *answers) == pytest.approx([0.4, 0.8, 0.8, 0.0])


def test_where_all_say_the_same_the_floor_counts() -> None:
    for floor in (0.0, 0.1, 1.0):
        config = RewardConfig(diversity="words", floor=floor)
        found = group_rewards(config, PROMPT, "", [written(HONEST, 0.5), written(HONEST, 1.0)])
        assert [each.reward for each in found] == [0.5 * floor, floor]
        assert [each.parts["diversity"] for each in found] == [0.0, 0.0]


def test_budget_is_of_the_right_ones_median() -> None:
    lengths, is_right = np.array([10.0, 20.0, 30.0, 60.0, 70.0, 100.0]), np.array([1, 1, 1, 0, 0, 0], bool)
    np.testing.assert_allclose(within_budget(lengths, is_right, 2.0), [1, 1, 1, 0.5, 0.25, 0])
    assert within_budget(lengths, np.zeros(6, bool), 2.0).tolist() == [1.0] * 6


def test_length_control_takes_off_the_trend_from_longer_ones() -> None:
    quality, lengths = np.array([0.2, 0.4, 0.6, 0.8]), np.array([10.0, 20.0, 40.0, 80.0])  # 0.2 for each doubling
    counts = np.ones(4, bool)
    np.testing.assert_allclose(length_controlled(quality, lengths, counts), [0.2, 0.4, 0.5, 0.5], atol=1e-12)
    worse = quality[::-1].copy()
    assert length_controlled(worse, lengths, counts).tolist() == worse.tolist()  # longer is not judged better
    assert length_controlled(quality, np.full(4, 9.0), counts).tolist() == quality.tolist()
    one = np.array([1, 0, 0, 0], bool)
    assert length_controlled(quality, lengths, one).tolist() == quality.tolist()


def test_a_table_controls_length_where_it_says_so() -> None:
    answers = [
        written(text, reward, num) for text, reward, num in zip("abc", (0.2, 0.4, 0.6), (10, 20, 40), strict=True)
    ]
    found = group_rewards(RewardConfig(length_control=True), PROMPT, "", answers)
    np.testing.assert_allclose([each.reward for each in found], [0.2, 0.4, 0.4])
    assert [each.parts["controlled"] for each in found] == [each.reward for each in found]
    assert rewards(RewardConfig(format="."), *answers) == [0.2, 0.4, 0.6]


def test_a_factor_makes_no_negative_reward_better() -> None:
    config = RewardConfig(diversity="words", length_budget=1.0)
    answers = [
        written(HONEST, -1.0, 10),
        written(HONEST, 0.5, 10),
        written(OTHERS[0], 0.5, 10),
        written(OTHERS[1], -2.0, 90),
    ]
    np.testing.assert_allclose(rewards(config, *answers), [-1.0, 0.5 * 2 / 3, 0.5, -2.0])


def test_quality_times_diversity() -> None:
    config = RewardConfig(diversity="words")
    answers = [written(HONEST, 0.5), written(HONEST, 0.5), written(OTHERS[0], 0.5), written(OTHERS[1], -1.0)]
    found = group_rewards(config, PROMPT, "", answers)
    np.testing.assert_allclose([each.reward for each in found], [0.5 * 2 / 3, 0.5 * 2 / 3, 0.5, -1.0])
    assert [each.parts["cluster"] for each in found] == [0, 0, 1, 2]
    assert all([each.parts["judge"] == 0.25 and each.outcome is Outcome.OK for each in found])
    assert found[0].parts["quality"] == 0.5 and found[0].parts["diversity"] == pytest.approx(2 / 3)


def test_a_part_of_the_task_that_is_called_quality_is_not_its_reward() -> None:
    answer = written(HONEST, 0.5)
    answer = replace(answer, verdict=replace(answer.verdict, parts={"quality": 0.1}))
    (found,) = group_rewards(RewardConfig(enough_words=1), PROMPT, "", [answer])
    assert found.reward == found.parts["quality"] == 0.5


def test_order_does_not_matter() -> None:
    answers = [written(text, reward) for text, reward in zip((HONEST, *OTHERS), (0.1, 0.9, 0.5, 0.7), strict=True)]
    np.testing.assert_allclose(rewards(RULES, *answers[::-1])[::-1], rewards(RULES, *answers), rtol=1e-12)


def test_alone_only_guards_count() -> None:
    assert rewards(RULES, written(HONEST, 0.4)) == [0.4]
    assert rewards(RULES, written(PROMPT, 0.4)) == [0.0]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "an empty answer"),
        (" \n", "an empty answer"),
        (PROMPT, "100% of it is copied from the prompt"),
        ("So: " + HONEST, "of it is copied from the reference"),
        ("excellent " * 30, "repeats itself: 3% of its word pairs"),
        ("!?!", "not of the form"),
        (OTHERS[0], ""),
    ],
)
def test_a_guard_says_why(text: str, why: str) -> None:
    found = refusal(RULES, text, PROMPT, HONEST)
    assert why in found and bool(found) is bool(why)


def test_what_is_refused_is_wrong_and_tells_it() -> None:
    (found,) = group_rewards(RULES, PROMPT, "", [written(PROMPT, 0.9)])
    assert (found.outcome, found.reward, found.parts["refused"], found.parts["quality"]) == (Outcome.WRONG, 0, 1, 0.9)
    assert "copied from the prompt" in found.detail
    (crash,) = group_rewards(RULES, PROMPT, "", [written(PROMPT, 0.0, outcome=Outcome.CRASH)])
    assert crash.outcome is Outcome.CRASH


def test_thoughts_do_not_count() -> None:
    thought = f"{PROMPT} I should say that again. {PROMPT}</think>\n{HONEST}"
    assert rewards(RULES, written(thought, 0.4)) == [0.4]
    assert rewards(RULES, written(f"{HONEST}</think>", 0.4)) == [0.0]


# Hacking


def likes_length(text: str) -> float:
    return min(1.0, 0.3 + len(words(text)) / 100)


def likes_a_word(text: str) -> float:
    return min(1.0, 0.3 + 0.05 * words(text).count("breathtaking"))


def likes_the_prompt(text: str) -> float:
    return min(1.0, 0.3 + len(set(words(text)) & set(words(PROMPT))) / 20)


def likes_anything(text: str) -> float:
    return 0.9


HACKS = {
    "padding": (likes_length, HONEST + " It is a harbour, and it is night, as was said, so this is the harbour." * 4),
    "padding with others' words": (likes_length, " ".join((HONEST, *OTHERS, *reversed(OTHERS)))),
    "repeating a word": (likes_a_word, "Breathtaking! " * 14),
    "repeating a word behind": (likes_a_word, HONEST + " breathtaking" * 25),
    "copying the prompt": (likes_the_prompt, PROMPT),
    "copying it behind": (likes_the_prompt, "Here it is. " + PROMPT),
    "nothing": (likes_anything, ""),
    "no word": (likes_anything, "…"),
    "thoughts only": (likes_anything, HONEST + "</think>"),
}


@pytest.mark.parametrize("name", HACKS)
def test_hacks_earn_no_more_than_an_honest_short_answer(name: str) -> None:
    """Each pleases the judge more than the honest answers, or as much; beside them it earns no more than any of them."""
    judge, hack = HACKS[name]
    answers = [written(text, judge(text)) for text in (HONEST, *OTHERS, hack)]
    assert answers[-1].verdict.reward >= answers[0].verdict.reward
    *honest, hacked = rewards(RULES, *answers)
    assert hacked <= min(honest) + 1e-12 and min(honest) > 0


@pytest.mark.parametrize("name", ["padding", "repeating a word", "copying the prompt"])
def test_without_guards_the_same_hacks_pay(name: str) -> None:
    judge, hack = HACKS[name]
    *honest, hacked = rewards(
        RewardConfig(format="."), *(written(text, judge(text)) for text in (HONEST, *OTHERS, hack))
    )
    assert hacked > max(honest)


# What a policy makes of it


@pytest.mark.parametrize(
    ("config", "is_more"), [(RewardConfig(format="."), False), (RewardConfig(diversity="words"), True)]
)
def test_diversity_keeps_a_policy_from_saying_one_thing(config: RewardConfig, is_more: bool) -> None:
    """Of eight answers that are as good as each other but for a hair, a policy gradient on quality learns one; on quality ×
    diversity it goes on to say others. The share of distinct answers in groups of eight, before and after."""
    draw = np.random.default_rng(0)
    texts = [f"{first} {second}" for first, second in zip("abcdefgh", "ijklmnop", strict=True)]
    quality = np.array([0.8, *[0.75] * 7])
    logits = np.array([1.0, *[0.0] * 7])

    def policy() -> np.ndarray:
        chances = np.exp(logits - logits.max())
        return chances / chances.sum()

    def share() -> float:
        return float(np.mean([len(set(draw.choice(8, 8, p=policy()))) / 8 for _ in range(200)]))

    before = share()
    for _ in range(400):
        said = draw.choice(8, 8, p=policy())
        got = group_rewards(config, "", "", [written(texts[n], float(quality[n])) for n in said])
        gains = advantages(np.array([each.reward for each in got]), "dr_grpo")
        for n, gain in zip(said, gains, strict=True):
            logits += 0.5 * gain * (np.eye(8)[n] - policy())
    assert (share() > before) is is_more
