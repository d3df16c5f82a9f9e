"""Settings of the optimiser, and the learning rate as a pure function of the step, so that a resume restores no state of it."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from stretto.base.config import Config

Moments = Literal["fp32", "bf16", "int8"]
Master = Literal["fp32", "split", "bf16_stochastic"]

_LARGEST_BETA2 = 0.99
"""With moments in fewer bits: bf16 has 8, so that a decay of less than 2⁻⁸ would be rounded away and the second moment never fall."""


class OptimConfig(Config):
    """Optimiser and learning-rate schedule: warm-up, stable, decay (WSD, 2404.06395). ``decay_fraction = 1`` without warm-up is a
    linear decay."""

    lr: float = Field(gt=0)
    """Peak learning rate."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps in which the learning rate rises linearly from 0 to ``lr``."""
    decay_fraction: float = Field(default=0.2, ge=0, le=1)
    """Share of all steps, at the end, in which the learning rate falls."""
    final_lr_fraction: float = Field(default=0.0, ge=0, le=1)
    """Learning rate after the last step, divided by the peak."""
    decay_shape: Literal["linear", "sqrt"] = "linear"
    """Shape of the decay; ``sqrt`` is 1 − √progress (2405.18392), which falls faster at first."""

    name: Literal["adamw", "muon"] = "adamw"
    """``muon``: orthogonalised updates for hidden matrices, AdamW for all other parameters."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW: decay of the first moment per step."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """AdamW: decay of the second moment per step."""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW: added to the root of the second moment."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled weight decay of matrices and expert stacks; norms and biases have none."""
    clip_norm: float = Field(default=1.0, gt=0)
    """Largest global gradient norm; larger gradients are scaled down."""
    muon_lr_factor: float = Field(default=10.0, gt=0)
    """Muon's learning rate divided by AdamW's; Muon's orthogonalised updates have unit scale."""
    router_lr_factor: float = Field(default=1.0, ge=0)
    """The routers' learning rate divided by that of other parameters; 0 freezes them. The weights of routers that only rank experts are tiny
    (`stretto.model.upcycle`) and need a rate of their own scale: there, the default means 0."""
    moments: Moments = "fp32"
    """Storage of AdamW's two moments: 8, 4 or 2 bytes per parameter. ``int8``: codes with a scale for each block of 128 (2110.02861);
    tensors with fewer than 4,096 numbers stay in fp32. One rank only."""
    master: Master = "fp32"
    """Storage of the weights of attention and feed-forward layers. ``split``: the bf16 weight that products read, and its other 16 bits,
    together the exact fp32 weight in 4 bytes; gradients are bf16, 2 bytes. ``bf16_stochastic``: bf16 alone, 2 bytes; updates are rounded
    stochastically, which is right on average. Both compute in bf16. One rank only."""
    in_backward: bool = False
    """Update each parameter during the backward pass and free its gradient at once. Clips by the norm of the previous step, and the first
    step not at all. A step that is not finite has then changed other weights: continue from the newest snapshot. One rank and one
    micro-batch per step only."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.name == "muon" and self.is_compact:
            raise ValueError("name: muon keeps fp32 states; leave moments, master and in_backward out, or choose adamw")
        if self.moments != "fp32" and self.beta2 > _LARGEST_BETA2:
            raise ValueError(
                f"beta2: {self.beta2:g} is more than {_LARGEST_BETA2}, and moments in {self.moments} would round such a decay away; "
                "lower it, or keep moments in fp32"
            )
        return self

    @property
    def is_compact(self) -> bool:
        """Whether states or steps differ from those of torch's AdamW (`stretto.optim.compact`)."""
        return self.moments != "fp32" or self.master != "fp32" or self.in_backward


def learning_rate(config: OptimConfig, step: int, num_steps: int) -> float:
    """Rate of ``step`` (0-based) of a run of ``num_steps``."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    decay_steps = round(config.decay_fraction * num_steps)
    done = step - (num_steps - decay_steps)
    if done < 0:
        return config.lr
    progress = (done + 1) / (decay_steps + 1)
    remaining = 1.0 - (progress if config.decay_shape == "linear" else progress**0.5)
    return config.lr * (config.final_lr_fraction + (1.0 - config.final_lr_fraction) * remaining)
