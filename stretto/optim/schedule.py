"""Settings of the optimiser, and the learning rate as a pure function of the step, so that a resume restores no state of it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from stretto.base.config import Config


class OptimConfig(Config):
    """Optimiser and learning-rate schedule: warm-up, stable, decay (WSD, 2404.06395). ``decay_fraction = 1`` without warm-up is a
    linear decay."""

    lr: float = Field(gt=0)
    """Peak learning rate."""
    warmup_steps: int = Field(default=0, ge=0)
    decay_fraction: float = Field(default=0.2, ge=0, le=1)
    """Share of all steps, at the end, in which the learning rate falls."""
    final_lr_fraction: float = Field(default=0.0, ge=0, le=1)
    """Learning rate after the last step, divided by the peak."""
    decay_shape: Literal["linear", "sqrt"] = "linear"
    """Shape of the decay; ``sqrt`` is 1 − √progress (2405.18392), which falls faster at first."""

    name: Literal["adamw", "muon"] = "adamw"
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled weight decay of matrices and expert stacks; norms and biases have none."""
    clip_norm: float = Field(default=1.0, gt=0)
    """Largest global gradient norm; larger gradients are scaled down."""
    muon_lr_factor: float = Field(default=10.0, gt=0)
    """Muon's learning rate divided by AdamW's; Muon's orthogonalised updates have unit scale."""
    router_lr_factor: float = Field(default=1.0, ge=0)
    """The routers' learning rate divided by that of other parameters; 0 freezes them. The weights of upcycled routers are tiny
    (`stretto.model.upcycle`) and need a rate of their own scale."""


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
