"""Routes recorded elsewhere and taken again: which experts run, what weighs them, and where gradients go."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from stretto.model.spec import ModelConfig
from stretto.model.transformer import Context, Recorder, Replay, Routing, Transformer, build

B, T, K = 2, 12, 3
SHAPE: dict[str, Any] = {
    "vocab_size": 29, "hidden_size": 16, "num_layers": 4, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8,
    "num_experts": 8, "top_k": K, "expert_intermediate_size": 8, "dense_layers": (1,), "dense_intermediate_size": 16,
    "num_shared_experts": 1,
}  # fmt: skip
ROUTERS = ["sigmoid", "softmax"]


def network(router: str = "sigmoid", **changes: Any) -> Transformer:
    model = build(ModelConfig(**{**SHAPE, "router": router, **changes}), seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3.0)
    return model


def ids(seed: int = 0) -> Tensor:
    return torch.randint(0, 29, (B, T), generator=torch.Generator().manual_seed(seed))


def context(ids_BT: Tensor, **changes: Any) -> Context:
    return replace(Context.plain(ids_BT), **changes)


def random_routes(seed: int = 5) -> Tensor:
    """[B, T, 3 MoE layers, K]: distinct experts."""
    scores = torch.rand(B, T, 3, 8, generator=torch.Generator().manual_seed(seed))
    return scores.topk(K).indices.to(torch.int16)


def replay_everywhere(recorded_BTK: Tensor, caught: list[Tensor] | None = None) -> Routing:
    """``recorded_BTK`` in whatever layer asks; the routers' own choices go to ``caught``."""

    def take(row: int, own_BTK: Tensor) -> Tensor:
        if caught is not None:
            caught.append(own_BTK)
        return Replay(recorded_BTK[:, :, None])(0, own_BTK)

    return take


@pytest.mark.parametrize("router", ROUTERS)
def test_a_networks_own_routes_replayed_change_no_bit_forwards_or_backwards(router: str) -> None:
    grads = []
    routes_BTLK = None
    for _ in range(2):
        model = network(router)
        recorder = Recorder(model.config, ids(), None if routes_BTLK is None else Replay(routes_BTLK))
        output = model(ids(), model.config.full(), context(ids(), routing=recorder))
        output.hidden_BTD.square().sum().backward()
        grads.append([output.hidden_BTD.detach(), *(parameter.grad for parameter in model.parameters())])
        routes_BTLK = recorder.own_BTLK
        assert routes_BTLK.shape == (B, T, 3, K) and routes_BTLK.min() >= 0
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True) if a is not None)


@pytest.mark.parametrize("router", ROUTERS)
def test_the_experts_are_the_recorded_ones_and_the_weights_the_routers_own(router: str) -> None:
    model = network(router)
    layer = model.blocks[2].mlp
    x_BTD, recorded_BTK = torch.randn(B, T, 16), random_routes()[:, :, 0]
    routes, _ = layer.route(x_BTD, 8, K, None, routing=replay_everywhere(recorded_BTK, caught := []))
    assert torch.equal(routes.chosen_NK, recorded_BTK.flatten(0, 1).long())
    logits_NE = x_BTD.flatten(0, 1) @ layer.gate.T
    scores_NE = logits_NE.softmax(-1) if router == "softmax" else logits_NE.sigmoid()
    gates_NK = scores_NE.gather(-1, routes.chosen_NK)
    assert torch.allclose(routes.gates_NK, gates_NK / gates_NK.sum(-1, keepdim=True), atol=1e-6)
    free, _ = layer.route(x_BTD, 8, K, None)
    (own_BTK,) = caught
    assert torch.equal(own_BTK.flatten(0, 1), free.chosen_NK)
    assert not torch.equal(routes.chosen_NK, free.chosen_NK)


@pytest.mark.parametrize("router", ROUTERS)
def test_the_gradient_reaches_the_router_of_a_single_recorded_expert_without_renormalisation(router: str) -> None:
    """A gather from scores masked after the choice would leave the softmax nothing to differentiate."""
    model = network(router, normalize_gates=False)
    layer, x_BTD = model.blocks[0].mlp, torch.randn(B, T, 16)
    routes, _ = layer.route(x_BTD, 8, 1, None, routing=replay_everywhere(random_routes()[:, :, 0, :1]))
    routes.gates_NK.sum().backward()
    assert layer.gate.grad is not None
    touched_E = layer.gate.grad.abs().sum(1) > 0
    used_E = torch.zeros(8, dtype=torch.bool)
    used_E[routes.chosen_NK] = True
    assert torch.equal(touched_E, torch.ones_like(used_E) if router == "softmax" else used_E)


def test_rows_without_a_record_choose_freely_and_only_they() -> None:
    model, recorded_BTLK = network(), random_routes()
    recorded_BTLK[0, 3:7] = -1
    recorded_BTLK[1, -1, 2] = -1
    layer, x_BTD = model.blocks[3].mlp, torch.randn(B, T, 16)
    routes, _ = layer.route(x_BTD, 8, K, None, routing=Replay(recorded_BTLK))
    free, _ = layer.route(x_BTD, 8, K, None)
    missing_N = (recorded_BTLK[:, :, 2, 0] < 0).flatten()
    assert torch.equal(routes.chosen_NK[missing_N], free.chosen_NK[missing_N])
    assert torch.equal(routes.gates_NK[missing_N], free.gates_NK[missing_N])
    assert torch.equal(routes.chosen_NK[~missing_N], recorded_BTLK[:, :, 2].flatten(0, 1)[~missing_N].long())


def test_a_token_that_used_fewer_experts_is_the_narrower_network() -> None:
    layer, x_BTD = network().blocks[0].mlp, torch.randn(B, T, 16)
    recorded_BTK = random_routes()[:, :, 0]
    short_BTK = recorded_BTK.clone()
    short_BTK[:, :, 1:] = -1
    y_BTD, *_ = layer(x_BTD, 8, K, None, routing=replay_everywhere(short_BTK))
    expected_BTD, *_ = layer(x_BTD, 8, 1, None, routing=replay_everywhere(recorded_BTK[:, :, :1]))
    assert torch.allclose(y_BTD, expected_BTD, atol=1e-6)


def test_recomputed_activations_replay_the_same_routes_once_a_layer() -> None:
    grads = []
    for recompute in (False, True):
        model = network()
        ctx = context(ids(), routing=Replay(random_routes()), recompute=recompute)
        model(ids(), model.config.full(), ctx).hidden_BTD.square().sum().backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True) if a is not None)


def test_a_record_is_found_by_layer_though_the_subnet_leaves_layers_out() -> None:
    model, recorded_BTLK = network(), random_routes()
    subnet = model.config.subnet(depth=2, top_k=2)
    recorder = Recorder(model.config, ids(), Replay(recorded_BTLK))
    output = model(ids(), subnet, context(ids(), routing=recorder))
    other_BTLK = recorded_BTLK.clone()
    rows = [row for row, layer in enumerate(model.config.moe_layers) if layer not in subnet.layers]
    assert rows
    other_BTLK[:, :, rows] = 0  # of layers that do not run
    other_BTLK[..., 2] = 7  # past the Subnet's top-k
    same = model(ids(), subnet, context(ids(), routing=Replay(other_BTLK)))
    assert torch.equal(output.hidden_BTD, same.hidden_BTD)
    other_BTLK[:, :, [row for row in range(3) if row not in rows], :2] = torch.tensor([6, 5], dtype=torch.int16)
    assert not torch.equal(
        output.hidden_BTD, model(ids(), subnet, context(ids(), routing=Replay(other_BTLK))).hidden_BTD
    )
    assert (recorder.own_BTLK[:, :, rows] == -1).all() and (recorder.own_BTLK[..., 2] == -1).all()


def test_routes_of_the_wrong_length_are_refused() -> None:
    model = network()
    with pytest.raises(AssertionError, match=r"routes are \(2, 11, 3, 3\)"):
        model(ids(), model.config.full(), context(ids(), routing=Replay(random_routes()[:, :-1])))
