"""Credit: from the rewards of a group to a stream of advantages and weights for each token. Imports no torch.

An algorithm is a choice of two functions here and one in `train.losses`; the trainer reads only the streams.

Shape letters: G samples of a group, S tokens of a sample less one: entry t speaks of token t + 1, a target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stretto.base.trajectory import Group, Outcome, Trajectory
from stretto.rl.recipe import LossConfig

_STD_FLOOR = 1e-4
"""Added to a group's standard deviation, as TRL does."""


@dataclass(frozen=True, slots=True, eq=False)
class Credit:
    """Streams of one sample; written by `assign`. Zero where the model did not sample the target."""

    mask_S: NDArray[np.bool_]
    """The model sampled the target."""
    advantages_S: NDArray[np.float32]
    weights_S: NDArray[np.float32]
    """Share of the update's loss; with them, the loss of the update is a plain sum over its tokens."""


def advantages(rewards_G: NDArray[np.float64], kind: str) -> NDArray[np.float64]:
    """Advantage of each sample over its group.

    Args:
        rewards_G: at least two.
        kind: ``grpo`` (2402.03300): centred, over the sample standard deviation. ``dr_grpo`` (2503.20783): centred;
            dividing would weigh prompts by how even their answers are. ``rloo`` (2402.14740): against the mean of the
            others, which does not depend on the sample itself.
    """
    num = len(rewards_G)
    assert num > 1 and np.isfinite(rewards_G).all(), f"rewards of a group: {rewards_G}"
    centred_G = rewards_G - rewards_G.mean()
    if rewards_G.max() == rewards_G.min():
        return np.zeros(num)  # the mean of equal numbers may round to another one
    if kind == "grpo":
        return centred_G / (rewards_G.std(ddof=1) + _STD_FLOOR)
    if kind == "rloo":
        return centred_G * (num / (num - 1))
    assert kind == "dr_grpo", f"advantage {kind!r}"
    return centred_G


def token_weights(nums_sampled: Sequence[int], kind: str, max_tokens: int) -> list[float]:
    """Weight of every sampled token of each sample, over *all* samples of an update, whatever batches they go to.

    Args:
        nums_sampled: sampled tokens, by sample.
        kind: ``token``: every token the same (DAPO, 2503.14476). ``sequence``: every sample the same, its tokens share
            (GRPO). ``constant``: samples times ``max_tokens`` (Dr.GRPO): long answers are not weighed down.
        max_tokens: the longest that a sample could be.
    """
    if kind == "token":
        return [1.0 / sum(nums_sampled)] * len(nums_sampled)
    if kind == "sequence":
        return [1.0 / (len(nums_sampled) * num) for num in nums_sampled]
    assert kind == "constant", f"normaliser {kind!r}"
    return [1.0 / (len(nums_sampled) * max_tokens)] * len(nums_sampled)


def assign(groups: Sequence[Group], loss: LossConfig) -> list[list[Credit]]:
    """Streams by group and sample, for one update on all of ``groups``."""
    flat = [trajectory for group in groups for trajectory in group.trajectories]
    max_tokens = max(group.task.max_tokens for group in groups)
    weights = iter(token_weights([each.num_sampled for each in flat], loss.normaliser, max_tokens))
    result = []
    for group in groups:
        for trajectory in group.trajectories:
            failed = trajectory.verdict.outcome is Outcome.INFRA
            assert not failed, f"ordinal {group.task.ordinal}: a failure of ours reached the trainer as a reward"
        rewards_G = np.array([trajectory.verdict.reward for trajectory in group.trajectories], np.float64)
        gains_G = advantages(rewards_G, loss.advantage)
        pairs = zip(group.trajectories, gains_G, strict=True)
        result.append([_streams(trajectory, gain, next(weights)) for trajectory, gain in pairs])
    return result


def _streams(trajectory: Trajectory, advantage: float, weight: float) -> Credit:
    mask_S = np.concatenate([np.full(len(part.tokens), part.is_sampled) for part in trajectory.segments])[1:]
    assert mask_S.any(), f"ordinal {trajectory.ordinal}, sample {trajectory.sample}: not one sampled token"
    return Credit(mask_S, np.float32(advantage) * mask_S, np.float32(weight) * mask_S)
