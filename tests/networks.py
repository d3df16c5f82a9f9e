"""Small networks of random weights for tests."""

from __future__ import annotations

import torch

from stretto.model.spec import ModelConfig
from stretto.model.transformer import Transformer, build


def sharpened(config: ModelConfig, seed: int = 0, factor: float = 3.0, *, matrices: bool = False) -> Transformer:
    """A network whose fresh weights are multiplied by ``factor``, so that its choices are as decided as those of a trained one.

    ``matrices``: leave vectors (norms and biases) as they are.
    """
    model = build(config, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 or not matrices:
                parameter.mul_(factor)
    return model
