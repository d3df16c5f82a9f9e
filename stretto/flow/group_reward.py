"""Rewards over a group of answers: quality × diversity, length, guards against reward hacking.

Pure functions of a whole group, applied after its last verdict and before it is stored, so that every attempt and every resumed
run computes the same rewards and a stored group has its final rewards. The task's own reward is kept as the part ``quality``.
Imports no torch.

Shape letters: G answers of a group.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from stretto.base.trajectory import Outcome, Verdict
from stretto.learning.recipe import RewardConfig
from stretto.tasks.task import spoken
from stretto.text.similar import clusters_N, copied, distinct, similarity_NN, words

_MAX_CONTRAST = 4.0
"""Largest diversity factor of one answer."""


@dataclass(frozen=True, slots=True)
class Written:
    """An answer, as input of `group_rewards`. Written by the agent."""

    text: str
    """The model's last turn."""
    num_tokens: int
    """Sampled tokens, over all turns."""
    verdict: Verdict
    """Verdict of the task."""


def group_rewards(config: RewardConfig, prompt: str, reference: str, answers: Sequence[Written]) -> tuple[Verdict, ...]:
    """The verdicts of a group with rewards by ``config``.

    reward = quality × length × diversity. Factors apply to positive rewards only. An answer that a guard refuses gets the
    outcome WRONG and no positive reward. For a single answer the guards, ``enough_words`` and a ``length_budget`` below 1
    apply.

    Args:
        prompt: text of the problem's messages.
        reference: an answer that must not be copied, or empty.
    """
    texts = [spoken(each.text) for each in answers]
    quality_G = np.array([each.verdict.reward for each in answers], np.float64)
    lengths_G = np.array([each.num_tokens for each in answers], np.float64)
    refusals = [refusal(config, text, prompt, reference) for text in texts]
    is_refused_G = np.array([bool(why) for why in refusals])
    is_right_G = ~is_refused_G & np.array([each.verdict.outcome is Outcome.OK for each in answers])
    parts_G = {"quality": quality_G, "refused": is_refused_G.astype(np.float64)}
    earned_G = quality_G
    if config.length_control:
        earned_G = parts_G["controlled"] = length_controlled(quality_G, lengths_G, ~is_refused_G)
    factor_G = np.ones(len(answers))
    if config.enough_words is not None:
        factor_G = np.array([min(1.0, len(words(text)) / config.enough_words) for text in texts])
    if config.length_budget is not None:
        parts_G["length"] = within_budget(lengths_G, is_right_G, config.length_budget)
        factor_G = factor_G * parts_G["length"]
    if config.diversity is not None:
        alike_GG = similarity_NN(texts, config.diversity)
        if config.contrast is not None:
            parts_G["diversity"] = contrast(alike_GG, config.contrast)
        else:
            clusters_G = clusters_N(alike_GG, config.same_at)
            parts_G["cluster"] = clusters_G.astype(np.float64)
            parts_G["diversity"] = diversity(clusters_G)
        factor_G = factor_G * np.maximum(config.floor, parts_G["diversity"])
    earned_G = np.minimum(earned_G, 0.0) + np.maximum(earned_G, 0.0) * factor_G
    earned_G = np.where(is_refused_G, np.minimum(earned_G, 0.0), earned_G)
    return tuple(
        replace(
            each.verdict,
            reward=float(earned_G[place]),
            outcome=Outcome.WRONG if why and each.verdict.outcome is Outcome.OK else each.verdict.outcome,
            detail=why or each.verdict.detail,
            parts={**each.verdict.parts, **{name: float(value_G[place]) for name, value_G in parts_G.items()}},
        )
        for place, (each, why) in enumerate(zip(answers, refusals, strict=True))
    )


def refusal(config: RewardConfig, text: str, prompt: str, reference: str) -> str:
    """The reason for which a guard refuses an answer; empty if none does."""
    if not text.strip():
        return "an empty answer"
    if config.format is not None and not re.search(config.format, text):
        return f"not of the form {config.format}"
    if config.distinct_at is not None and (share := distinct(text)) < config.distinct_at:
        return f"repeats itself: {share:.0%} of its word pairs are different ones"
    if config.copy_at is not None:
        for original, name in ((prompt, "prompt"), (reference, "reference")):
            if (share := copied(text, original)) >= config.copy_at:
                return f"{share:.0%} of it is copied from the {name}"
    return ""


def length_controlled(
    quality_G: NDArray[np.float64], lengths_G: NDArray[np.float64], counts_G: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Quality minus the share that the group's own length trend predicts for answers longer than the median.

    The trend is the least-squares line of quality over log length, for the answers in ``counts_G``; a falling trend is ignored.
    Length-controlled win rates (2404.04475) subtract such a trend over a whole test set and in both directions. Here no answer
    gains, and a long answer that is better for another reason loses too.
    """
    logs_G = np.log(np.maximum(lengths_G, 1.0))
    x, y = logs_G[counts_G], quality_G[counts_G]
    if len(x) < 2 or np.ptp(x) == 0:
        return quality_G
    centred = x - x.mean()
    slope = max(0.0, float(centred @ y / (centred @ centred)))
    return quality_G - slope * np.maximum(0.0, logs_G - np.median(x))


def within_budget(lengths_G: NDArray[np.float64], is_right_G: NDArray[np.bool_], share: float) -> NDArray[np.float64]:
    """Factor [G]: 1 up to ``share`` times the median length of the right answers, 0 from twice that, linear between. All 1 if no
    answer is right."""
    if not is_right_G.any():
        return np.ones(len(lengths_G))
    return np.clip(2.0 - lengths_G / (share * float(np.median(lengths_G[is_right_G]))), 0.0, 1.0)


def contrast(alike_GG: NDArray[np.float64], power: float) -> NDArray[np.float64]:
    """Factor [G]: an answer's mean dissimilarity to the others, divided by the group's mean, to ``power``, bounded by
    `_MAX_CONTRAST`. 1 if all answers are the same, and for a single answer."""
    num = len(alike_GG)
    unlike_G = (num - alike_GG.sum(1)) / max(1, num - 1)
    mean = unlike_G.mean()
    if mean <= 1e-9:
        return np.ones(num)
    return np.minimum(np.maximum(unlike_G / mean, 0.0) ** power, _MAX_CONTRAST)


def diversity(clusters_G: NDArray[np.int32]) -> NDArray[np.float64]:
    """Factor [G]: share of the other answers that are in other clusters (DARLING, 2509.02534, whose clusters come from a
    trained classifier); 1 for a single answer."""
    num = len(clusters_G)
    if num == 1:
        return np.ones(1)
    return (num - np.bincount(clusters_G)[clusters_G]) / (num - 1)
