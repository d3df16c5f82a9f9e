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
    """A completed step. Written by `TrainerRole.step`."""

    step: int
    """Number of completed steps, this one included, and version of its weights."""
    num_samples: int
    num_tokens: int
    """Number of sampled tokens, which were each trained once."""
    scalars: Mapping[str, float]
    """Scalars of the log, by name."""


def mismatch(
    logp_N: Stream, behaviour_N: Stream, ages_N: NDArray[np.integer], samples_N: NDArray[np.integer]
) -> dict[str, Any]:
    """Differences between the trainer's log-probabilities before the update and those that the engine recorded.

    There are three classes of tokens. ``same``: tokens of samples that were sampled with this version only, where any difference
    comes from the two implementations. ``stale``: tokens of older versions, where the updates since then add to it. ``mixed``:
    tokens of this version after stale tokens of their sample, whose context the engine computed again, with other routes than
    recorded.

    Args:
        logp_N: log-probabilities by the trainer.
        behaviour_N: log-probabilities by the engine.
        ages_N: age of each token in versions.
        samples_N: number of each token's sample.
    """
    oldest = np.zeros(int(samples_N.max()) + 1, ages_N.dtype)
    np.maximum.at(oldest, samples_N, ages_N)
    is_stale_N, is_same_N = ages_N > 0, oldest[samples_N] == 0
    scalars = {"mismatch/same_share": is_same_N.mean()}
    delta_N = logp_N - behaviour_N
    estimates = {"k1": -delta_N, "k2": 0.5 * delta_N**2, "k3": np.expm1(delta_N) - delta_N}
    for kind, mask_N in (("same", is_same_N), ("stale", is_stale_N), ("mixed", ~is_same_N & ~is_stale_N)):
        if mask_N.any():
            for name, k_N in estimates.items():
                size_N = np.abs(k_N[mask_N])
                scalars[f"mismatch/{kind}_{name}_mean"] = k_N[mask_N].mean()
                scalars[f"mismatch/{kind}_{name}_p99"] = np.quantile(size_N, 0.99)
                scalars[f"mismatch/{kind}_{name}_max"] = size_N.max()
    # clipped, so that one token does not dominate the sum
    ratio_N = np.exp(np.minimum(delta_N, 20.0))
    scalars["policy/ess"] = ratio_N.sum() ** 2 / (len(ratio_N) * (ratio_N**2).sum())
    scalars["policy/chi2"] = (ratio_N**2).mean() - 1.0
    return scalars


_MEANS = {
    "policy/ratio_mean": "ratio",
    "policy/entropy": "entropy",
    "policy/clip_fraction": "clipped",
    "policy/correction_fraction": "cut",
    "policy/correction_mean": "correction",
    "policy/kl_reference": "kl_reference",
}
"""Scalars that are the mean of a stream."""


def update(streams: Mapping[str, Stream]) -> dict[str, Any]:
    """Scalars of the updates, from the streams of `stretto.learning.objective.PolicyObjective` that exist."""
    scalars = {name: streams[stream].mean() for name, stream in _MEANS.items() if stream in streams}
    return scalars | {"policy/ratio_max": streams["ratio"].max(), "policy/nll": -streams["logp"].mean()}


def samples(groups: Sequence[Group]) -> dict[str, Any]:
    """Rewards, lengths and other properties of the trained samples."""
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
        "samples/truncated": np.mean([each.finish_reason in ("length", "turns") for each in flat]),
        "samples/turns_mean": np.mean([each.num_turns for each in flat]),
        "samples/partial_groups": np.mean([len(group.trajectories) < group.task.group for group in groups]),
        "samples/attempts_mean": np.mean([each.attempt for each in flat]),
    }
    return scalars | {name: np.mean(values) for name, values in sorted(named.items())}


def staleness(groups: Sequence[Group], version: int) -> dict[str, Any]:
    """Age of the trained tokens in versions, and mean number of versions per sample."""
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
