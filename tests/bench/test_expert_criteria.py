"""Criteria for keeping experts: by saliency an expert without output goes first, and REAP's two forms differ by the selection bias."""

from __future__ import annotations

import torch

from bench.common.expert_criteria import NUM_RANDOM, orders_by_criterion
from stretto.evals.loss import EvalBatch
from stretto.evals.order import rank_experts
from stretto.model.parallel import join, random_network
from stretto.model.spec import ModelConfig
from stretto.model.transformer import Context, Transformer

CONFIG = ModelConfig(
    vocab_size=64, hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=16, num_experts=8, top_k=2,
    expert_intermediate_size=16,
)  # fmt: skip
DEAD = 5


def network() -> Transformer:
    model = random_network(CONFIG, seed=0).place(CONFIG, join("cpu"), torch.float32, torch.float32)
    for block in model.blocks:
        block.mlp.down.data[DEAD] = 0.0  # type: ignore[union-attr]
    return model


def test_orders_of_each_criterion() -> None:
    ids_BT = torch.randint(0, 64, (4, 40), generator=torch.Generator().manual_seed(1))
    batches = [EvalBatch(ids_BT[:, :-1], ids_BT[:, 1:], Context.plain(ids_BT[:, :-1]))]
    model = network()
    orders = orders_by_criterion(model, batches, seed=0)
    assert len(orders) == 4 + NUM_RANDOM and orders["ours"] == rank_experts(model, batches).orders
    assert all(sorted(order) == list(range(8)) for each in orders.values() for order in each)
    assert {orders[name][0][-1] for name in ("reap", "published")} == {DEAD}
    assert orders["reap"] == orders["published"], "no bias sends tokens"
    assert orders_by_criterion(model, batches, seed=0)["random-0"] == orders["random-0"] != orders["random-1"]
    for block in model.blocks:
        torch.nn.init.normal_(block.mlp.bias_WE, std=0.3)  # type: ignore[union-attr]
    biased = orders_by_criterion(model, batches, seed=0)
    assert biased["reap"] != biased["published"], "published: experts that the router prefers without the bias"
