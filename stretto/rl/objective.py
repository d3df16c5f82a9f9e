"""The recipe's policy loss as an objective of the optimisation step, and what the trainer says about it.

Shape letters: N tokens of the rows of one pass, M of them with a target.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.ops.logprob import IGNORED, chosen_logprobs
from stretto.ops.matmul import PLAIN, Arithmetic
from stretto.rl.recipe import LossConfig
from stretto.train.losses import PolicyLoss, cispo, gspo, icepop_weights, kl_k2, ppo, tis_weights
from stretto.train.step import Measured


@dataclass(frozen=True, slots=True, eq=False)
class PolicyObjective:
    """A policy loss on one rank's rows of a batch. The streams are those of `stretto.rl.batches.Batch`, flat."""

    config: LossConfig
    temperature: float
    """At which the tokens were sampled: the policy that is trained is the one that sampled."""
    advantages_N: Tensor
    weights_N: Tensor
    behaviour_N: Tensor
    proximal_N: Tensor | None
    """Log-probabilities of the trust region's centre; the behaviour's own for naive PPO. None: those of this pass."""
    samples_N: Tensor
    reference_N: Tensor | None = None
    """Log-probabilities of the reference network, where there is a KL to it."""
    arithmetic: Arithmetic = PLAIN

    def __call__(self, hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor) -> Measured:
        """Sum of weight·(correction·policy loss + kl_weight·k2) over the targets."""
        logp_N, entropy_N = chosen_logprobs(hidden_ND, head_VD, targets_N, self.temperature, arithmetic=self.arithmetic)
        kept_N = targets_N != IGNORED
        proximal_N = logp_N.detach() if self.proximal_N is None else self.proximal_N
        policy, correction_M = self._policy(logp_N[kept_N], proximal_N[kept_N], kept_N)
        loss_M = correction_M * policy.loss_N
        if self.config.kl_weight:
            assert self.reference_N is not None, "a KL needs the reference's log-probabilities"
            loss_M = loss_M + self.config.kl_weight * kl_k2(logp_N[kept_N], self.reference_N[kept_N])
        # what the correction cut off or left out, as far as there is one
        is_cut_M = correction_M != (proximal_N - self.behaviour_N)[kept_N].exp()
        found = {"ratio": policy.ratio_N, "clipped": policy.clipped_N, "correction": correction_M}
        found["cut"] = is_cut_M & (self.config.correction != "none")
        streams_N = {name: torch.zeros_like(entropy_N) for name in found}
        for name, value_M in found.items():
            streams_N[name][kept_N] = value_M.float()
        streams_N |= {"logp": logp_N.detach(), "entropy": entropy_N}
        return Measured((self.weights_N[kept_N] * loss_M).sum(), -logp_N.detach(), streams_N)

    def _policy(self, logp_M: Tensor, proximal_M: Tensor, kept_N: Tensor) -> tuple[PolicyLoss, Tensor]:
        """The loss of each target, and its factor: what the rollout did otherwise than the proximal policy."""
        config, advantages_M = self.config, self.advantages_N[kept_N]
        bounds = (config.clip_low, config.clip_high)
        if config.policy == "gspo":
            policy = gspo(logp_M, proximal_M, advantages_M, self.samples_N[kept_N], *bounds)
        else:
            token_loss = ppo if config.policy == "ppo" else cispo
            policy = token_loss(logp_M, proximal_M, advantages_M, *bounds)
        behaviour_M = self.behaviour_N[kept_N]
        if config.correction == "tis":
            return policy, tis_weights(proximal_M, behaviour_M, config.tis_cap)
        if config.correction == "icepop":
            return policy, icepop_weights(proximal_M, behaviour_M, *config.icepop_range)
        return policy, torch.ones_like(behaviour_M)
