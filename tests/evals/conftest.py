from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from stretto.data.loader import Batch
from stretto.evals.loss import EvalBatch
from stretto.model.spec import ModelConfig
from stretto.model.transformer import Transformer, build

VOCAB = 41


@pytest.fixture
def make_model() -> Callable[..., Transformer]:
    """A random network whose residual writes and balance biases are large enough to matter."""

    def make(seed: int = 0, **changes: object) -> Transformer:
        shape: dict[str, object] = {
            "vocab_size": VOCAB, "hidden_size": 24, "num_layers": 6, "num_heads": 4, "num_kv_heads": 2, "head_dim": 6,
            "num_experts": 6, "top_k": 3, "expert_intermediate_size": 16, "num_shared_experts": 1, "widths": (6, 3),
            "qk_norm": True,
        }  # fmt: skip
        model = build(ModelConfig.model_validate(shape | changes), seed)
        generator = torch.Generator().manual_seed(seed + 1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2.0)
            for name, buffer in model.named_buffers():
                if name.endswith("bias_WE"):
                    buffer.normal_(0.0, 0.05, generator=generator)
        return model

    return make


@pytest.fixture
def numpy_batches() -> list[Batch]:
    """Packed rows: two documents each, then padding; no loss across the border or on padding."""
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(2):
        tokens_BT = rng.integers(0, VOCAB, (3, 20))
        documents_BT = np.broadcast_to(np.repeat([0, 1, -1], [9, 7, 4]), (3, 20)).copy()
        positions_BT = np.broadcast_to(np.r_[np.arange(9), np.arange(7), np.arange(4)], (3, 20)).copy()
        targets_BT = np.roll(tokens_BT, -1, axis=1)
        targets_BT[:, [8, *range(15, 20)]] = -100
        num = int((targets_BT >= 0).sum())
        batches.append(Batch(tokens_BT, targets_BT, documents_BT, positions_BT, np.zeros(3, np.int64), num, num))
    return batches


@pytest.fixture
def batches(numpy_batches: list[Batch]) -> tuple[EvalBatch, ...]:
    return tuple(EvalBatch.of(batch, "cpu") for batch in numpy_batches)
