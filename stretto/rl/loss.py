"""The settings of a policy loss, by the names that the papers use. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from stretto.base.config import Config


class LossConfig(Config):
    """The policy loss: names as in the papers that METHODS cites."""

    advantage: Literal["grpo", "dr_grpo", "rloo"] = "grpo"
    """``grpo`` divides by the group's standard deviation, ``dr_grpo`` does not, ``rloo`` leaves the sample itself out."""
    policy: Literal["ppo", "gspo", "cispo"] = "ppo"
    clip_low: float = Field(default=0.2, gt=0)
    clip_high: float = Field(default=0.2, gt=0)
    """0.28 with a low of 0.2 is DAPO's."""
    normaliser: Literal["token", "sequence", "constant"] = "token"
    """Of the loss, over the whole global batch: its tokens (DAPO), its sequences' own means (GRPO), or samples times
    ``max_tokens`` (Dr.GRPO)."""
    proximal: Literal["recompute", "behaviour"] = "recompute"
    """Where the trust region's centre comes from: the trainer's own forward before the update (decoupled PPO), or the
    rollout's log-probabilities (naive PPO)."""
    correction: Literal["none", "tis", "icepop"] = "tis"
    """What the ratio trainer/rollout does: cut off at ``tis_cap``, or drop tokens outside ``icepop_range``."""
    tis_cap: float = Field(default=2.0, gt=0)
    icepop_range: tuple[float, float] = (0.5, 5.0)
    kl_weight: float = Field(default=0.0, ge=0)
    """Weight of the KL to the reference network (k2 as a loss, whose gradient is right)."""
    drop_uniform: bool = True
    """Groups whose rewards are all equal teach nothing: they are dropped and others drawn (DAPO)."""
