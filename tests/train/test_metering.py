"""Forward passes outside training steps are counted as they are executed."""

from __future__ import annotations

import torch

from stretto.base.receipt import Meter
from stretto.model.spec import ModelConfig, count, executed
from stretto.model.transformer import Context, build
from stretto.train.step import metered

CONFIG = ModelConfig(
    vocab_size=64, hidden_size=16, num_layers=4, num_heads=2, num_kv_heads=1, head_dim=8,
    num_experts=4, top_k=2, expert_intermediate_size=8,
)  # fmt: skip


def test_every_pass_in_the_block_counts_and_none_after_it() -> None:
    model = build(CONFIG, 0)
    ids_BT = torch.zeros(3, 10, dtype=torch.int64)
    small = CONFIG.subnet(depth=4, experts=2, top_k=1)
    meter = Meter("search", "cpu")
    with metered(model, meter, world=2):
        model(ids_BT, CONFIG.full(), Context.plain(ids_BT))
        model(ids_BT, small, Context.plain(ids_BT))
    model(ids_BT, small, Context.plain(ids_BT))

    passes = [count(CONFIG, CONFIG.full()), count(CONFIG, executed(CONFIG, small))]
    assert meter.receipt().flops == 2 * sum(each.forward_flops(30, 10) for each in passes)
    assert meter.receipt().tokens == 2 * 60


def test_a_masked_pass_scores_all_experts() -> None:
    small = CONFIG.subnet(depth=4, experts=2, top_k=1)
    assert executed(CONFIG, small).experts == (4, 4, 4, 4)
    assert executed(CONFIG, small).top_k == small.top_k
