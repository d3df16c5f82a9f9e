"""What a training step says about itself: names and numbers for the log. Imports no torch.

Shape letters: N tokens with a target of a whole step, over all ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
    seconds: float
    """Wall time."""
    scalars: Mapping[str, float]
    """For the log, by name."""


def mismatch(logp_N: Stream, behaviour_N: Stream, is_same_N: NDArray[np.bool_]) -> dict[str, float]:
    """How far the trainer's policy is from what the engine sampled, before the update.

    Apart for tokens of this very version, where any difference is the two implementations', and for stale ones, where
    it is also what was learnt since.
    """
    scalars = {"mismatch/same_share": float(is_same_N.mean())}
    delta_N = logp_N - behaviour_N
    estimates = {"k1": -delta_N, "k2": 0.5 * delta_N**2, "k3": np.expm1(delta_N) - delta_N}
    for kind, mask_N in (("same", is_same_N), ("stale", ~is_same_N)):
        if mask_N.any():
            for name, k_N in estimates.items():
                size_N = np.abs(k_N[mask_N])
                scalars[f"mismatch/{kind}_{name}_mean"] = float(k_N[mask_N].mean())
                scalars[f"mismatch/{kind}_{name}_p99"] = float(np.quantile(size_N, 0.99))
                scalars[f"mismatch/{kind}_{name}_max"] = float(size_N.max())
    # cut off where one token would be all of the sum
    ratio_N = np.exp(np.minimum(delta_N, 20.0))
    scalars["policy/ess"] = float(ratio_N.sum() ** 2 / (len(ratio_N) * (ratio_N**2).sum()))
    scalars["policy/chi2"] = float((ratio_N**2).mean() - 1.0)
    return scalars


def update(streams: Mapping[str, Stream], reference_N: Stream | None) -> dict[str, float]:
    """What the updates did, from the streams of `stretto.rl.objective.PolicyObjective`."""
    scalars = {
        "policy/clip_fraction": float(streams["clipped"].mean()),
        "policy/correction_fraction": float(streams["cut"].mean()),
        "policy/correction_mean": float(streams["correction"].mean()),
        "policy/ratio_max": float(streams["ratio"].max()),
        "policy/ratio_mean": float(streams["ratio"].mean()),
        "policy/entropy": float(streams["entropy"].mean()),
        "policy/nll": float(-streams["logp"].mean()),
    }
    if reference_N is not None:
        delta_N = reference_N - streams["logp"]
        scalars["policy/kl_reference"] = float((np.expm1(delta_N) - delta_N).mean())
    return scalars


def samples(groups: Sequence[Group]) -> dict[str, float]:
    """Rewards and shapes of what was trained."""
    flat = [trajectory for group in groups for trajectory in group.trajectories]
    rewards = np.array([each.verdict.reward for each in flat])
    lengths = np.array([each.num_sampled for each in flat])
    latencies_s = np.array([each.verdict.latency_s for each in flat])
    spreads = [np.ptp([each.verdict.reward for each in group.trajectories]) for group in groups]
    by_source: dict[str, list[float]] = defaultdict(list)
    parts: dict[str, list[float]] = defaultdict(list)
    for group in groups:
        by_source[group.task.source] += [each.verdict.reward for each in group.trajectories]
    for each in flat:
        for name, value in each.verdict.parts.items():
            parts[name].append(value)
    scalars = {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/ok": float(np.mean([each.verdict.outcome is Outcome.OK for each in flat])),
        "reward/uniform_groups": float(np.mean([spread == 0 for spread in spreads])),
        "reward/latency_p50_s": float(np.quantile(latencies_s, 0.5)),
        "reward/latency_p95_s": float(np.quantile(latencies_s, 0.95)),
        "samples/tokens_mean": float(lengths.mean()),
        "samples/tokens_p95": float(np.quantile(lengths, 0.95)),
        "samples/tokens_max": float(lengths.max()),
        "samples/truncated": float(np.mean([each.finish_reason == "length" for each in flat])),
        "samples/turns_mean": float(np.mean([each.num_turns for each in flat])),
        "samples/attempts_mean": float(np.mean([each.attempt for each in flat])),
    }
    scalars |= {f"reward/source/{name}": float(np.mean(values)) for name, values in sorted(by_source.items())}
    return scalars | {f"reward/part/{name}": float(np.mean(values)) for name, values in sorted(parts.items())}


def staleness(groups: Sequence[Group], version: int) -> dict[str, float]:
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
        "staleness/max": float(every.max()),
        "staleness/mean": float(every.mean()),
        "staleness/versions_per_sample": float(np.mean(spans)),
    }
