"""From the rewards of a group to a stream of advantages and weights for each token. Imports no torch.

An algorithm is a choice of two functions here and one in `rl.objective`; the trainer reads only the streams.

A sample of n tokens is n − 1 inputs, each with the token after it as its target.

Shape letters: G samples of a group, S inputs of a sample, L MoE layers of the maximum network, K route slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stretto.base.trajectory import Group, Outcome, Trajectory

_STD_FLOOR = 1e-4
"""Added to a group's standard deviation, as TRL does."""


@dataclass(frozen=True, slots=True, eq=False)
class Streams:
    """One sample as streams; written by `assign`."""

    number: int
    """Within the update."""
    where: str
    """For messages: its ordinal and its number in the group."""
    tokens: NDArray[np.int32]
    """[S + 1]."""
    logprobs_S: NDArray[np.float32]
    """Recorded when the target was sampled, as is the next."""
    versions_S: NDArray[np.int32]
    routes_SLK: NDArray[np.unsignedinteger] | None
    """Recorded for the input."""
    mask_S: NDArray[np.bool_]
    """The model sampled the target. Where it did not, the next two are zero."""
    advantages_S: NDArray[np.float32]
    weights_S: NDArray[np.float32]
    """Share of the update's loss; with them, the loss of the update is a plain sum over its tokens."""

    @property
    def num_inputs(self) -> int:
        return len(self.tokens) - 1


def advantages(rewards_G: NDArray[np.float64], kind: str) -> NDArray[np.float64]:
    """Advantage of each sample over its group of at least two.

    ``grpo`` (2402.03300): centred, over the sample standard deviation. ``dr_grpo`` (2503.20783): centred; dividing would
    weigh prompts by how even their answers are. ``rloo`` (2402.14740): against the mean of the others, which does not
    depend on the sample itself.
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

    ``token``: every token the same (DAPO, 2503.14476). ``sequence``: every sample the same, its tokens share (GRPO).
    ``constant``: samples times ``max_tokens``, the longest one could be (Dr.GRPO): long answers are not weighed down.
    """
    if kind == "token":
        return [1.0 / sum(nums_sampled)] * len(nums_sampled)
    if kind == "sequence":
        return [1.0 / (len(nums_sampled) * num) for num in nums_sampled]
    assert kind == "constant", f"normaliser {kind!r}"
    return [1.0 / (len(nums_sampled) * max_tokens)] * len(nums_sampled)


def assign(groups: Sequence[Group], advantage: str, normaliser: str) -> list[list[Streams]]:
    """Streams by group and sample, for one update on all of ``groups``; kinds as of `advantages` and `token_weights`."""
    flat = [trajectory for group in groups for trajectory in group.trajectories]
    max_tokens = max(group.task.max_tokens for group in groups)
    weights = enumerate(token_weights([each.num_sampled for each in flat], normaliser, max_tokens))
    result = []
    for group in groups:
        outcomes = {trajectory.verdict.outcome for trajectory in group.trajectories}
        assert Outcome.INFRA not in outcomes, f"ordinal {group.task.ordinal}: a failure of ours is taken for a reward"
        rewards_G = np.array([trajectory.verdict.reward for trajectory in group.trajectories], np.float64)
        pairs = zip(group.trajectories, advantages(rewards_G, advantage), strict=True)
        result.append([_streams(trajectory, gain, *next(weights)) for trajectory, gain in pairs])
    return result


def _streams(trajectory: Trajectory, advantage: float, number: int, weight: float) -> Streams:
    where = f"ordinal {trajectory.ordinal}, sample {trajectory.sample}"
    tokens, logprobs, versions = (
        np.concatenate([getattr(segment, name) for segment in trajectory.segments])
        for name in ("tokens", "logprobs", "versions")
    )
    mask_S = np.concatenate([np.full(len(part.tokens), part.is_sampled) for part in trajectory.segments])[1:]
    assert mask_S.any(), f"{where}: not one sampled token"
    gains_S, weights_S = np.float32(advantage) * mask_S, np.float32(weight) * mask_S
    return Streams(number, where, tokens, logprobs[1:], versions[1:], trajectory.routes, mask_S, gains_S, weights_S)
