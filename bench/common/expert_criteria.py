"""Criteria by which the experts of a finished network are kept, for the same number of experts in every layer.

Shape letters: N tokens, K chosen experts, D hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from stretto.evals.loss import EvalBatch
from stretto.evals.order import expert_order, expert_orders, super_experts, survey
from stretto.evals.routing import LayerRouting, Watch
from stretto.model.transformer import Transformer
from stretto.ops.grouped import Experts
from stretto.ops.operators import Routes, route

Orders = tuple[tuple[int, ...], ...]
"""Experts of each MoE layer from the first that is kept to the first that is dropped."""
NUM_RANDOM = 3
"""Number of random orders."""


class _Published(Watch):
    """Saliency as REAP's published code computes it (2510.13999): over the experts that the router would choose without its selection
    bias."""

    def note(self, x_ND: Tensor, routes: Routes, weights: Experts) -> None:
        top_k = routes.chosen_NK.shape[1]
        free = route(self._logits_NE, None, None, top_k, softmax=True, normalize=False, scaling=1.0)
        super().note(x_ND, replace(routes, chosen_NK=free.chosen_NK), weights)


@torch.no_grad()
def _published(model: Transformer, batches: Sequence[EvalBatch]) -> list[LayerRouting]:
    watch = _Published(model.config, model.embedding.weight.device)
    for batch in batches:
        model(batch.ids_BT, model.config.full(), watch.over(batch))
    return [watch.noted(row) for row in range(model.config.num_moe_layers)]


def orders_by_criterion(model: Transformer, batches: Sequence[EvalBatch], seed: int) -> Mapping[str, Orders]:
    """Orders of the experts of ``model``, found on ``batches``: ours, by REAP without tokens that the selection bias alone sends (``reap``),
    by REAP as published, by number of tokens, and random ones from ``seed``."""
    config = model.config
    found = survey(model, batches, removal=True)
    theirs, rng = _published(model, batches), np.random.default_rng(seed)
    protected = super_experts(config, theirs)
    draws = {
        f"random-{draw}": tuple(tuple(rng.permutation(num).tolist()) for num in config.experts_by_layer)
        for draw in range(NUM_RANDOM)
    }
    return {
        "ours": expert_orders(config, found, "removal"),
        "reap": expert_orders(config, found, "reap"),
        "published": tuple(expert_order(layer.saliency, protected[layer.row]) for layer in theirs),
        "frequency": expert_orders(config, found, "frequency"),
        **draws,
    }
