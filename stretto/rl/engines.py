"""The engine that samples for a run, opened in the recipe's precision."""

from __future__ import annotations

from pathlib import Path

import torch

from stretto.engine.engine import Engine
from stretto.engine.open import open_engine
from stretto.engine.request import EngineConfig
from stretto.rl.recipe import PrecisionConfig, RolloutConfig

NO_WEIGHTS = -1
"""Version of an engine that has not been told the run's weights yet."""


def open_rollout_engine(
    start: Path, rollout: RolloutConfig, precision: PrecisionConfig, routes: bool, device: str
) -> Engine:
    """An engine of the network at ``start``; its weights are the checkpoint's until a version is activated."""
    torch.set_num_threads(rollout.threads)
    config = EngineConfig(
        cache_bytes=rollout.cache_bytes,
        max_batch=rollout.max_batch,
        max_step_tokens=max(1024, rollout.max_batch),
        precision=precision.rollout,
        batch_invariant=precision.batch_invariant,
    )
    opened = open_engine(start, config, device=device, with_tokenizer=False, routes=routes)
    opened.engine.weight_version = NO_WEIGHTS
    return opened.engine
