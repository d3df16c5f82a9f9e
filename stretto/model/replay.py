"""Experts chosen elsewhere and taken again (2510.11370), and what routers choose by themselves written down.

Both stand in `Context.routing`: a function from the MoE row (of the *maximum* network) and the router's own choice there
[B, T, K] to the choice that counts, −1 for no expert. Recomputed layers ask again and get the same answer.

Shape letters: B rows, T positions, L MoE layers of the maximum network, K route slots.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stretto.model.spec import ModelConfig

Routing = Callable[[int, Tensor], Tensor]


class Replay:
    """Recorded experts, in their recorded order, instead of the routers' choice."""

    def __init__(self, routes_BTLK: Tensor):
        """``routes_BTLK``: of any integer type. Where the slots of a top-k begin with −1 the router chooses freely."""
        self.routes_BTLK = routes_BTLK

    def __call__(self, row: int, own_BTK: Tensor) -> Tensor:
        B, T, K = own_BTK.shape
        assert self.routes_BTLK.shape[:2] == (B, T) and self.routes_BTLK.shape[3] >= K, (
            f"routes are {tuple(self.routes_BTLK.shape)}, these tokens choose {tuple(own_BTK.shape)}"
        )
        recorded_BTK = self.routes_BTLK[:, :, row, :K].long()
        return torch.where(recorded_BTK[:, :, :1] < 0, own_BTK, recorded_BTK)


class Recorder:
    """What the routers choose, or would have chosen where ``inner`` takes others' choices."""

    def __init__(self, config: ModelConfig, ids_BT: Tensor, inner: Routing | None = None):
        num_slots = max((config.top_k, *config.top_k_by_layer))
        shape = (*ids_BT.shape, config.num_moe_layers, num_slots)
        self.own_BTLK = torch.full(shape, -1, dtype=torch.int16, device=ids_BT.device)
        """As `Replay` takes it; −1 for layers and slots that did not run."""
        self._inner = inner

    def __call__(self, row: int, own_BTK: Tensor) -> Tensor:
        self.own_BTLK[:, :, row, : own_BTK.shape[-1]] = own_BTK
        return own_BTK if self._inner is None else self._inner(row, own_BTK)
