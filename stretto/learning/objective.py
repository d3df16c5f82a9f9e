"""Policy losses over token log-probabilities, and the choice among them by the recipe.

The losses are per token, without weights and sums. The objective multiplies each by its share of the whole update and sums up,
so that the split over micro-batches, rows and ranks does not change the gradient. π is the network being trained, the proximal
policy is the centre of the trust region, μ is the policy that sampled the tokens. All are given as processed log-probabilities
in fp32.

Shape letters: N tokens (in the objective: of the rows of one pass, M of them with a target).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.learning.recipe import LossConfig
from stretto.ops.logprob import chosen_logprobs, target_places
from stretto.ops.operators import ORDINARY, Operators
from stretto.train.step import Measured


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Policy loss of each token."""

    loss_N: Tensor
    """Loss to minimise; differentiable in the log-probabilities of π."""
    ratio_N: Tensor
    """π over the proximal policy, by token or by sample; detached."""
    clipped_N: Tensor
    """Whether the trust region removed the token's gradient (CISPO: bounded its weight); bool."""


def ppo(logp_N: Tensor, proximal_N: Tensor, advantages_N: Tensor, clip_low: float, clip_high: float) -> PolicyLoss:
    """−min(u·A, clip(u, 1 − low, 1 + high)·A), u = π/proximal (1707.06347; unequal bounds: DAPO, 2503.14476).

    With μ as the proximal policy this is PPO. With the trainer's own recomputation, weighted by `tis_weights`, it is the
    decoupled form (2110.00641, AReaL 2505.24298). Both are equal where the proximal policy is μ.
    """
    return _clipped((logp_N - proximal_N).exp(), advantages_N, clip_low, clip_high)


def gspo(
    logp_N: Tensor, proximal_N: Tensor, advantages_N: Tensor, samples_N: Tensor, clip_low: float, clip_high: float
) -> PolicyLoss:
    """`ppo` with one ratio for all tokens of a sample, the geometric mean of their ratios (GSPO, 2507.18071). ``samples_N``:
    number of each token's sample, from 0; all tokens of a sample must be included."""
    num_samples = int(samples_N.max()) + 1 if len(samples_N) else 0
    delta_N = logp_N - proximal_N
    sums = delta_N.new_zeros(num_samples).index_add(0, samples_N, delta_N)
    lengths = torch.bincount(samples_N, minlength=num_samples).clamp_min(1)
    return _clipped((sums / lengths).exp()[samples_N], advantages_N, clip_low, clip_high)


def cispo(logp_N: Tensor, proximal_N: Tensor, advantages_N: Tensor, clip_low: float, clip_high: float) -> PolicyLoss:
    """−sg(clip(u))·A·log π (CISPO, 2506.13585): the ratio is clipped, and every token keeps its gradient."""
    ratio_N = (logp_N.detach() - proximal_N).exp()
    bounded_N = ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high)
    return PolicyLoss(-bounded_N * advantages_N * logp_N, ratio_N, bounded_N != ratio_N)


def icepop(logp_N: Tensor, proximal_N: Tensor, advantages_N: Tensor, clip_low: float, clip_high: float) -> PolicyLoss:
    """−sg(u)·A·log π within the bounds, and 0 outside (IcePop, 2510.18855)."""
    ratio_N = (logp_N.detach() - proximal_N).exp()
    kept_N = icepop_weights(logp_N, proximal_N, 1.0 - clip_low, 1.0 + clip_high)
    return PolicyLoss(-kept_N * advantages_N * logp_N, ratio_N, kept_N != ratio_N)


def _clipped(ratio_N: Tensor, advantages_N: Tensor, clip_low: float, clip_high: float) -> PolicyLoss:
    bounded_N = ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high)
    plain_N, clipped_N = ratio_N * advantages_N, bounded_N * advantages_N
    return PolicyLoss(-torch.minimum(plain_N, clipped_N), ratio_N.detach(), clipped_N < plain_N)


def tis_weights(proximal_N: Tensor, behaviour_N: Tensor, cap: float) -> Tensor:
    """min(proximal/μ, ``cap``): truncated importance weights for the difference to the rollout. No gradient."""
    return (proximal_N - behaviour_N).detach().exp().clamp(max=cap)


def icepop_weights(proximal_N: Tensor, behaviour_N: Tensor, low: float, high: float) -> Tensor:
    """proximal/μ within [``low``, ``high``], and 0 outside (IcePop). No gradient."""
    ratio_N = (proximal_N - behaviour_N).detach().exp()
    return torch.where((ratio_N >= low) & (ratio_N <= high), ratio_N, 0.0)


_MAX_KL_WEIGHT = 10.0
"""Largest weight of a token's KL, so that one token does not dominate the gradient."""


def kl_weights(logp_N: Tensor, behaviour_N: Tensor) -> Tensor:
    """π/μ: importance weights with which a mean over tokens of μ estimates one over tokens of π, for `kl_k2`. No gradient."""
    return (logp_N - behaviour_N).detach().exp().clamp(max=_MAX_KL_WEIGHT)


def kl_k2(logp_N: Tensor, reference_N: Tensor) -> Tensor:
    """½(log π − log reference)². Its expected gradient over tokens of π is the gradient of KL(π ‖ reference).

    The gradient of log π − log reference (k1) is zero in expectation. The gradient of reference/π − 1 − log(reference/π) (k3) is
    that of the other direction, KL(reference ‖ π).
    """
    return 0.5 * (logp_N - reference_N).square()


@dataclass(frozen=True, slots=True, eq=False)
class PolicyObjective:
    """Policy loss on one rank's rows of a batch."""

    config: LossConfig
    temperature: float
    """Temperature of sampling, which is also applied to the trained policy."""
    streams: Mapping[str, Tensor]
    """Arrays of `stretto.learning.batch.Batch` by name."""
    proximal_BT: Tensor
    """Log-probabilities of the proximal policy: those of μ, or recomputed ones."""
    reference_BT: Tensor | None = None
    """Log-probabilities of the reference network, if there is a KL to it."""
    operators: Operators = ORDINARY

    def __call__(self, hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor) -> Measured:
        """Sum of weight·(correction·policy loss + kl_weight·π/μ·k2) over the targets."""
        all_N, entropy_N = chosen_logprobs(hidden_ND, head_VD, targets_N, self.temperature, operators=self.operators)
        return self.measured(all_N, entropy_N, targets_N, self.streams["advantages_BT"].flatten())

    def measured(self, all_N: Tensor, entropy_N: Tensor, targets_N: Tensor, advantages_N: Tensor) -> Measured:
        """The same from given log-probabilities of the targets and entropies under π, and any advantages."""
        config, at_M = self.config, target_places(targets_N)
        names = ("behaviour_BT", "weights_BT", "samples_BT")
        behaviour_M, weights_M, samples_M = (self.streams[name].flatten()[at_M] for name in names)
        advantages_M, logp_M, proximal_M = advantages_N[at_M], all_N[at_M], self.proximal_BT.flatten()[at_M]
        bounds = (config.clip_low, config.clip_high)
        if config.policy == "gspo":
            policy = gspo(logp_M, proximal_M, advantages_M, samples_M, *bounds)
        else:
            policy = {"ppo": ppo, "cispo": cispo, "icepop": icepop}[config.policy](
                logp_M, proximal_M, advantages_M, *bounds
            )
        correction_M = torch.ones_like(behaviour_M)  # weight for the difference between rollout and proximal policy
        if config.correction == "tis":
            assert config.tis_cap is not None, "checked by the recipe"
            correction_M = tis_weights(proximal_M, behaviour_M, config.tis_cap)
        elif config.correction == "icepop":
            assert config.icepop_range is not None, "checked by the recipe"
            correction_M = icepop_weights(proximal_M, behaviour_M, *config.icepop_range)
        loss_M = correction_M * policy.loss_N
        values = {"ratio": policy.ratio_N, "clipped": policy.clipped_N, "correction": correction_M}
        values["cut"] = (correction_M != (proximal_M - behaviour_M).exp()) & (config.correction != "none")
        if config.kl_weight:
            assert self.reference_BT is not None, "a KL needs the reference's log-probabilities"
            reference_M, stale_M = self.reference_BT.flatten()[at_M], kl_weights(logp_M, behaviour_M)
            loss_M = loss_M + config.kl_weight * stale_M * kl_k2(logp_M, reference_M)
            delta_M = reference_M - logp_M.detach()
            values["kl_reference"] = stale_M * (torch.expm1(delta_M) - delta_M)
        streams_N = {name: torch.zeros_like(entropy_N) for name in values}
        for name, value_M in values.items():
            streams_N[name][at_M] = value_M.float()
        streams_N |= {"logp": all_N.detach(), "entropy": entropy_N}
        # `chosen_logprobs` computes the logits again in its backward pass
        return Measured((weights_M * loss_M).sum(), -all_N.detach(), streams_N, num_extra_head_products=1)
