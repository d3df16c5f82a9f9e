"""The engine that samples for a run, opened in the recipe's precision."""

from __future__ import annotations

from pathlib import Path

import torch

from stretto.engine.engine import Engine
from stretto.engine.loading import open_engine
from stretto.engine.request import EngineConfig
from stretto.rl.recipe import PrecisionConfig, RolloutConfig

NO_WEIGHTS = -1
"""Version of an engine that has not been told the run's weights yet."""


def open_rollout_engine(
    start: Path, rollout: RolloutConfig, precision: PrecisionConfig, routes: bool, device: str
) -> Engine:
    """An engine of the network at ``start``; its weights are the checkpoint's until a version is activated.

    What it draws for a request is a function of weights, prompt and seed, to the bit, wherever there are operators for
    that: on a CPU by the compiled kernels, elsewhere where the recipe asks for batch-invariant ones. So a run without
    staleness repeats itself, whatever came in which order.
    """
    torch.set_num_threads(rollout.threads)
    config = EngineConfig(
        cache_bytes=rollout.cache_bytes,
        max_batch=rollout.max_batch,
        max_step_tokens=max(1024, rollout.max_batch),
        precision=precision.rollout,
        batch_invariant=precision.batch_invariant,
        compiled_prefill=True,
        page_size=rollout.page_size,
    )
    # fp32 is what the recipe says; without a word an engine on a GPU takes bf16
    dtype = torch.float32 if precision.rollout == "fp32" else None
    opened = open_engine(start, config, device=device, dtype=dtype, with_tokenizer=False, routes=routes)
    opened.engine.weight_version = NO_WEIGHTS
    return opened.engine
