"""EMO's pools: all tokens of a document choose among as many experts as the pool has."""

from __future__ import annotations

from dataclasses import replace

import torch

from bench.common.document_pools import DocumentPools, trained_in_pools
from stretto.model.parallel import join, random_network
from stretto.model.spec import ModelConfig
from stretto.model.transformer import Context, Recorder, Transformer

CONFIG = ModelConfig(
    vocab_size=64, hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=16, num_experts=8, top_k=2,
    expert_intermediate_size=16,
)  # fmt: skip


def network() -> Transformer:
    return trained_in_pools(random_network(CONFIG, seed=0)).place(CONFIG, join("cpu"), torch.float32, torch.float32)


def packed(generator: torch.Generator) -> tuple[torch.Tensor, Context]:
    """Two rows: one of two documents, and one of a document and padding."""
    ids_BT = torch.randint(0, 64, (2, 40), generator=generator)
    documents_BT = torch.tensor([[0] * 25 + [1] * 15, [0] * 30 + [-1] * 10])
    return ids_BT, replace(Context.plain(ids_BT), documents_BT=documents_BT)


def test_a_document_uses_no_expert_outside_its_pool() -> None:
    model = network()
    ids_BT, ctx = packed(torch.Generator().manual_seed(1))
    for row in model.blocks:
        torch.nn.init.normal_(row.mlp.bias_WE, std=3.0)  # type: ignore[union-attr]  # a bias must not bring others in
    routes: dict[int, torch.Tensor] = {}
    for size in (3, 8):
        recorder = Recorder(CONFIG, ids_BT)
        pools = DocumentPools(ids_BT, ctx, range(size, size + 1))
        with torch.no_grad():
            model(ids_BT, CONFIG.full(), replace(ctx, operators=pools, routing=recorder))
        routes[size] = recorder.own_BTLK
    assert ctx.documents_BT is not None
    for row, number in ((0, 0), (0, 1), (1, 0)):
        used = [routes[3][row, ctx.documents_BT[row] == number, layer].unique() for layer in range(2)]
        assert all(2 <= len(experts) <= 3 for experts in used)
    recorder = Recorder(CONFIG, ids_BT)
    with torch.no_grad():
        model(ids_BT, CONFIG.full(), replace(ctx, routing=recorder))
    assert torch.equal(routes[8], recorder.own_BTLK)


def test_only_passes_with_gradients_use_pools() -> None:
    model = network()
    ids_BT, ctx = packed(torch.Generator().manual_seed(2))
    with torch.no_grad():
        plain = model(ids_BT, CONFIG.full(), ctx).hidden_BTD
    trained, again = (model(ids_BT, CONFIG.full(), ctx).hidden_BTD for _ in range(2))
    assert not torch.equal(plain, trained.detach())
    assert torch.equal(trained, again)
