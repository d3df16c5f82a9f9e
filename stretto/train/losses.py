"""Policy losses on streams: functions of the log-probabilities of N sampled tokens, a loss for each token.

Every function is free of weights and sums: the caller multiplies by each token's share of the whole update and adds up,
so that no split over micro-batches, rows or ranks changes a gradient. π is the network being trained, the proximal
policy is the centre of the trust region, μ is what sampled the tokens; all are log-probabilities, processed, fp32.

Shape letters: N tokens, M of them in one sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A loss for each token."""

    loss_N: Tensor
    """To be minimised; differentiable in the log-probabilities of π."""
    ratio_N: Tensor
    """π over the proximal policy, of tokens or of whole samples; detached."""
    clipped_N: Tensor
    """The trust region took the gradient of this token away (CISPO: bounded its weight); bool."""


def ppo(logp_N: Tensor, proximal_N: Tensor, advantages_N: Tensor, clip_low: float, clip_high: float) -> PolicyLoss:
    """−min(u·A, clip(u, 1 − low, 1 + high)·A), u = π/proximal (1707.06347; unequal bounds: DAPO, 2503.14476).

    With μ as the proximal policy this is PPO; with the trainer's own recomputation, weighted by `tis_weights`, it is
    the decoupled form (2110.00641, AReaL 2505.24298). The two are the same where the proximal policy is μ.
    """
    ratio_N = (logp_N - proximal_N).exp()
    return _clipped(ratio_N, advantages_N, clip_low, clip_high)


def gspo(
    logp_N: Tensor, proximal_N: Tensor, advantages_N: Tensor, samples_N: Tensor, clip_low: float, clip_high: float
) -> PolicyLoss:
    """`ppo` with one ratio for all tokens of a sample: the geometric mean of theirs (GSPO, 2507.18071).

    ``samples_N`` numbers the sample of each token, from 0; all tokens of a sample must be there.
    """
    num_samples = int(samples_N.max()) + 1 if len(samples_N) else 0
    delta_N = logp_N - proximal_N
    sums = delta_N.new_zeros(num_samples).index_add(0, samples_N, delta_N)
    lengths = torch.bincount(samples_N, minlength=num_samples).clamp_min(1)
    return _clipped((sums / lengths).exp()[samples_N], advantages_N, clip_low, clip_high)


def cispo(logp_N: Tensor, proximal_N: Tensor, advantages_N: Tensor, clip_low: float, clip_high: float) -> PolicyLoss:
    """−sg(clip(u))·A·log π (CISPO, 2506.13585): a ratio out of bounds is bounded, and no token loses its gradient."""
    ratio_N = (logp_N.detach() - proximal_N).exp()
    bounded_N = ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high)
    return PolicyLoss(-bounded_N * advantages_N * logp_N, ratio_N, bounded_N != ratio_N)


def _clipped(ratio_N: Tensor, advantages_N: Tensor, clip_low: float, clip_high: float) -> PolicyLoss:
    bounded_N = ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high)
    plain_N, clipped_N = ratio_N * advantages_N, bounded_N * advantages_N
    return PolicyLoss(-torch.minimum(plain_N, clipped_N), ratio_N.detach(), clipped_N < plain_N)


def tis_weights(proximal_N: Tensor, behaviour_N: Tensor, cap: float) -> Tensor:
    """min(proximal/μ, ``cap``): truncated importance sampling of what the rollout did otherwise. No gradient."""
    return (proximal_N - behaviour_N).detach().exp().clamp(max=cap)


def icepop_weights(proximal_N: Tensor, behaviour_N: Tensor, low: float, high: float) -> Tensor:
    """proximal/μ within [``low``, ``high``], and 0 outside: such tokens are left out (IcePop). No gradient."""
    ratio_N = (proximal_N - behaviour_N).detach().exp()
    return torch.where((ratio_N >= low) & (ratio_N <= high), ratio_N, 0.0)


def kl_k2(logp_N: Tensor, reference_N: Tensor) -> Tensor:
    """½(log π − log reference)²: over tokens of π, its gradient is that of KL(π ‖ reference).

    Not log π − log reference (k1), whose gradient is zero in expectation, and not reference/π − 1 − log(reference/π)
    (k3), whose gradient is that of the other direction, KL(reference ‖ π).
    """
    return 0.5 * (logp_N - reference_N).square()


def cross_entropy(logp_N: Tensor) -> Tensor:
    """−log π of each token: the loss of supervised training, in this form for a mixture with a policy loss."""
    return -logp_N


@dataclass(frozen=True, slots=True)
class Divergences:
    """How far π is from the μ that sampled the tokens, three estimates of KL(μ ‖ π) for each token."""

    k1_N: Tensor
    """−Δ, Δ = log π − log μ."""
    k2_N: Tensor
    """½Δ²."""
    k3_N: Tensor
    """exp(Δ) − 1 − Δ: never negative, and of the least variance."""


def divergences(logp_N: Tensor, behaviour_N: Tensor) -> Divergences:
    """For the log, no gradients."""
    delta_N = (logp_N - behaviour_N).detach().double()  # expm1(Δ) − Δ cancels to a tenth of an fp32 digit near 1e-4
    return Divergences(-delta_N, 0.5 * delta_N.square(), torch.expm1(delta_N) - delta_N)
