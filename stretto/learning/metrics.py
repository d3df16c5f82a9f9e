"""Metrics of a training step: mismatch between engine and trainer, update, rewards, lengths, staleness.

Imports no torch.

Shape letters: N tokens with a target of a whole step, over all ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stretto.base.trajectory import Group, Outcome

Stream = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StepReport:
    """A step that is done. Written by `TrainerRole.step`."""

    step: int
    """Steps completed, this one included: the version of the weights it made."""
    num_samples: int
    num_tokens: int
    """Sampled tokens, each trained once."""
    scalars: Mapping[str, float]
    """For the log, by name."""


def mismatch(
    logp_N: Stream, behaviour_N: Stream, ages_N: NDArray[np.integer], samples_N: NDArray[np.integer]
) -> dict[str, Any]:
    """How far the trainer's policy is from what the engine sampled, before the update.

    Apart for samples whose tokens are all of this very version, where any difference is the two implementations'; for
    stale tokens, where it is also what was learnt since; and for tokens of this version behind stale ones of their
    sample, whose context was computed anew, by other routes than those on record.

    Args:
        ages_N: in versions.
        samples_N: a number for the sample of each.
    """
    oldest = np.zeros(int(samples_N.max()) + 1, ages_N.dtype)
    np.maximum.at(oldest, samples_N, ages_N)
    is_stale_N, is_whole_N = ages_N > 0, oldest[samples_N] == 0
    scalars = {"mismatch/same_share": is_whole_N.mean()}
    delta_N = logp_N - behaviour_N
    estimates = {"k1": -delta_N, "k2": 0.5 * delta_N**2, "k3": np.expm1(delta_N) - delta_N}
    for kind, mask_N in (("same", is_whole_N), ("stale", is_stale_N), ("mixed", ~is_whole_N & ~is_stale_N)):
        if mask_N.any():
            for name, k_N in estimates.items():
                size_N = np.abs(k_N[mask_N])
                scalars[f"mismatch/{kind}_{name}_mean"] = k_N[mask_N].mean()
                scalars[f"mismatch/{kind}_{name}_p99"] = np.quantile(size_N, 0.99)
                scalars[f"mismatch/{kind}_{name}_max"] = size_N.max()
    # cut off where one token would be all of the sum
    ratio_N = np.exp(np.minimum(delta_N, 20.0))
    scalars["policy/ess"] = ratio_N.sum() ** 2 / (len(ratio_N) * (ratio_N**2).sum())
    scalars["policy/chi2"] = (ratio_N**2).mean() - 1.0
    return scalars


def update(streams: Mapping[str, Stream]) -> dict[str, Any]:
    """What the updates did, from the streams of `stretto.learning.objective.PolicyObjective`, as far as there was one."""
    scalars = {
        "policy/ratio_max": streams["ratio"].max(),
        "policy/ratio_mean": streams["ratio"].mean(),
        "policy/entropy": streams["entropy"].mean(),
        "policy/nll": -streams["logp"].mean(),
    }
    if "clipped" in streams:
        scalars |= {
            "policy/clip_fraction": streams["clipped"].mean(),
            "policy/correction_fraction": streams["cut"].mean(),
            "policy/correction_mean": streams["correction"].mean(),
        }
    if "kl_reference" in streams:
        scalars["policy/kl_reference"] = streams["kl_reference"].mean()
    return scalars


def samples(groups: Sequence[Group]) -> dict[str, Any]:
    """Rewards and shapes of what was trained."""
    flat = [trajectory for group in groups for trajectory in group.trajectories]
    rewards = np.array([each.verdict.reward for each in flat])
    lengths = np.array([each.num_sampled for each in flat])
    latencies_s = np.array([each.verdict.latency_s for each in flat])
    spreads = [np.ptp([each.verdict.reward for each in group.trajectories]) for group in groups]
    named: dict[str, list[float]] = defaultdict(list)
    for group in groups:
        for each in group.trajectories:
            named[f"reward/source/{group.task.source}"].append(each.verdict.reward)
            for name, value in each.verdict.parts.items():
                named[f"reward/part/{name}"].append(value)
    scalars = {
        "reward/mean": rewards.mean(),
        "reward/std": rewards.std(),
        "reward/ok": np.mean([each.verdict.outcome is Outcome.OK for each in flat]),
        "reward/uniform_groups": np.mean([spread == 0 for spread in spreads]),
        "reward/latency_p50_s": np.quantile(latencies_s, 0.5),
        "reward/latency_p95_s": np.quantile(latencies_s, 0.95),
        "samples/tokens_mean": lengths.mean(),
        "samples/tokens_p95": np.quantile(lengths, 0.95),
        "samples/tokens_max": lengths.max(),
        "samples/truncated": np.mean([each.finish_reason == "length" for each in flat]),
        "samples/turns_mean": np.mean([each.num_turns for each in flat]),
        "samples/partial_groups": np.mean([len(group.trajectories) < group.task.group for group in groups]),
        "samples/attempts_mean": np.mean([each.attempt for each in flat]),
    }
    return scalars | {name: np.mean(values) for name, values in sorted(named.items())}


def staleness(groups: Sequence[Group], version: int) -> dict[str, Any]:
    """Age of the trained tokens in versions, and under how many versions a sample was written."""
    ages, spans = [], []
    for group in groups:
        for trajectory in group.trajectories:
            versions = np.concatenate([part.versions for part in trajectory.segments if part.is_sampled])
            ages.append(version - versions)
            spans.append(len(np.unique(versions)))
    every = np.concatenate(ages)
    assert every.min() >= 0, f"a token of version {version - every.min()} before step {version}"
    return {
        "staleness/max": every.max(),
        "staleness/mean": every.mean(),
        "staleness/versions_per_sample": np.mean(spans),
    }
