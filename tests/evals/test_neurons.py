"""Neurons that work together end in one part, and the router finds the part that a token needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F

from stretto.base.errors import UserError
from stretto.evals.loss import EvalBatch
from stretto.evals.neurons import balanced_clusters, fit_router, plan_layer, plan_network
from stretto.model.spec import ModelConfig, interleaved_order
from stretto.model.transformer import Context, Transformer
from stretto.model.upcycle import ROUTER_SCALE, Upcycling
from stretto.ops.operators import ORDINARY
from tests.networks import sharpened

PARTS, SIZE, HIDDEN, VOCAB = 4, 8, 24, 41


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def separable() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A layer of ``PARTS`` groups of neurons, shuffled, of which a token's kind wakes one; kind 0 is the most frequent.
    Returns its two matrices, the inputs [N, D] and each neuron's group [W].
    """
    width = PARTS * SIZE
    directions = torch.linalg.qr(torch.randn(HIDDEN, HIDDEN, generator=generator(1))).Q[:PARTS]
    group_W = torch.arange(width)[torch.randperm(width, generator=generator(2))] % PARTS
    gate_WD = 3.0 * directions[group_W] + 0.02 * torch.randn(width, HIDDEN, generator=generator(3))
    up_WD = 3.0 * directions[group_W] + 0.02 * torch.randn(width, HIDDEN, generator=generator(4))
    down_DW = F.normalize(torch.randn(HIDDEN, width, generator=generator(5)), dim=0)
    kind_N = torch.cat([torch.full((num,), kind) for kind, num in enumerate((160, 120, 80, 40))])
    x_ND = 2.0 * directions[kind_N] + 0.05 * torch.randn(len(kind_N), HIDDEN, generator=generator(6))
    return torch.cat((gate_WD, up_WD)), down_DW, x_ND, group_W


def test_neurons_that_work_together_become_one_part_and_are_found() -> None:
    gate_up_FD, down_DW, x_ND, group_W = separable()
    how = Upcycling(experts=PARTS, top_k=1, shared=0)
    plan = plan_layer(0, gate_up_FD, down_DW, x_ND, how)
    assert plan.neurons_W is not None
    parts = group_W[plan.neurons_W].view(PARTS, SIZE)
    assert (parts == parts[:, :1]).all()
    # numbered so that worth, here how often they are needed, falls along the nested order
    assert [int(parts[expert, 0]) for expert in interleaved_order(PARTS)] == [0, 1, 2, 3]
    logits_NE = x_ND @ plan.gate_ED.T
    chosen_N = (logits_NE.sigmoid() + plan.bias_E).argmax(1)
    inner_NW = ORDINARY.swiglu(x_ND @ gate_up_FD.T)
    lengths = torch.stack(
        [(inner_NW[:, part] @ down_DW[:, part].T).norm(dim=1) for part in plan.neurons_W.view(PARTS, SIZE)], 1
    )
    assert torch.equal(chosen_N, lengths.argmax(1))
    assert float(logits_NE.std()) < 10 * ROUTER_SCALE


def test_what_every_token_needs_is_shared() -> None:
    gate_up_FD, down_DW, x_ND, group_W = separable()
    width = PARTS * SIZE
    always = group_W == 3
    x_ND = torch.cat((x_ND, torch.full((len(x_ND), 1), 2.0)), dim=1)  # a channel that never changes
    gate_up_FD = torch.cat((gate_up_FD, 3.0 * always.repeat(2)[:, None].float()), dim=1)
    down_DW = torch.cat((down_DW, torch.zeros(1, width)))
    plan = plan_layer(0, gate_up_FD, down_DW, x_ND, Upcycling(experts=PARTS, top_k=1))
    assert plan.neurons_W is not None
    assert always[plan.neurons_W[:SIZE]].all()


def test_clusters_are_of_one_size_and_close(monkeypatch: pytest.MonkeyPatch) -> None:
    centres = 5.0 * torch.randn(3, 8, generator=generator())
    truth = torch.arange(60) % 3
    members = centres[truth] + 0.1 * torch.randn(60, 8, generator=generator(1))
    whole = balanced_clusters(members, 3, generator(2))
    monkeypatch.setattr("stretto.evals.neurons.ASSIGNED_AT_ONCE", 13)  # dealt out in fives of four problems and a rest
    for cluster in (whole, balanced_clusters(members, 3, generator(2))):
        assert cluster.bincount().tolist() == [20, 20, 20]
    inside = [float((members[whole == one] - members[whole == one].mean(0)).square().sum()) for one in range(3)]
    assert sum(inside) < 60 * 8 * 0.1**2 * 1.5


def test_a_router_is_the_ridge_regression_written_out() -> None:
    x_ND = torch.randn(300, 10, generator=generator()) + 1.0
    worth_NE = torch.rand(300, 4, generator=generator(1))
    gate_ED, bias_E = fit_router(x_ND, worth_NE, 1e-3)
    target_NE = (worth_NE - worth_NE.mean(1, keepdim=True)).double()
    centred_ND = (x_ND - x_ND.mean(0)).double()
    squares_DD = centred_ND.T @ centred_ND
    squares_DD += 0.01 * squares_DD.diagonal().mean() * torch.eye(10)
    expected_ED = (torch.linalg.inv(squares_DD) @ centred_ND.T @ target_NE).T
    factor = gate_ED.norm() / expected_ED.norm()
    assert torch.allclose(gate_ED.double(), expected_ED * factor, rtol=1e-4, atol=1e-4 * float(gate_ED.abs().max()))
    assert float((x_ND @ gate_ED.T + 4 * bias_E).std()) == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("method", ["split", "copy"])
def test_equal_inputs_are_planned_and_those_that_are_not_finite_are_refused(method: str) -> None:
    """A norm of zeros, as pruned layers have, makes all inputs of a layer zero."""
    how = Upcycling(method=method, experts=4, top_k=2)
    gate_up_FD, down_DW = (torch.randn(shape, generator=generator()) for shape in ((64, 8), (8, 32)))
    plan = plan_layer(3, gate_up_FD, down_DW, torch.zeros(40, 8), how)
    assert not plan.gate_ED.any() and plan.bias_E.isfinite().all()
    broken_FD = gate_up_FD.index_fill(0, torch.tensor([5]), torch.nan)
    for weights_FD, x_ND in ((gate_up_FD, torch.full((40, 8), torch.inf)), (broken_FD, None)):
        with pytest.raises(UserError, match=r"layer 3: .* not finite; download"):
            plan_layer(3, weights_FD, down_DW, x_ND, how)


def dense_model() -> Transformer:
    config = ModelConfig(
        vocab_size=VOCAB, hidden_size=24, num_layers=5, num_heads=4, num_kv_heads=2, head_dim=6, num_experts=1, top_k=1,
        expert_intermediate_size=1, dense_layers=(0, 1, 2, 3, 4), dense_intermediate_size=64,
    )  # fmt: skip
    return sharpened(config)


@pytest.mark.parametrize("method", ["split", "copy"])
def test_layers_are_planned_with_what_they_are_given(method: str, batches: list[EvalBatch]) -> None:
    model, how = dense_model(), Upcycling(method=method, experts=4, top_k=2)
    inputs: dict[int, list[torch.Tensor]] = {layer: [] for layer in range(5)}
    hooks = [
        block.mlp.register_forward_pre_hook(lambda _, arguments, layer=layer: inputs[layer].append(arguments[0]))
        for layer, block in enumerate(model.blocks)
    ]
    with torch.no_grad():
        for batch in batches:
            model(batch.ids_BT, model.config.full(), batch.ctx)
    for hook in hooks:
        hook.remove()
    held: list[str] = []

    @contextmanager
    def hold(part: str) -> Iterator[None]:
        held.append(part)
        yield

    plans = plan_network(model, batches, how, hold=hold)
    assert held == ["embedding", *(f"blocks.{layer}" for layer in range(5))]
    for layer, (plan, block) in enumerate(zip(plans, model.blocks, strict=True)):
        x_ND = torch.cat([x_BTD[batch.real_BT] for x_BTD, batch in zip(inputs[layer], batches, strict=True)])
        expected = plan_layer(layer, block.mlp.gate_up.weight.detach(), block.mlp.down.weight.detach(), x_ND, how)
        assert torch.equal(plan.gate_ED, expected.gate_ED) and torch.equal(plan.bias_E, expected.bias_E)
        assert plan.neurons_W is expected.neurons_W is None or torch.equal(plan.neurons_W, expected.neurons_W)
    assert not any(block.mlp._forward_pre_hooks for block in model.blocks)


def test_text_too_short_for_a_router_is_refused(batches: list[EvalBatch]) -> None:
    short = [
        EvalBatch(batches[0].ids_BT[:1, :8], batches[0].targets_BT[:1, :8], Context.plain(batches[0].ids_BT[:1, :8]))
    ]
    with pytest.raises(
        UserError,
        match="--calibration: 8 tokens are fewer than the 24 inputs of a router; raise --calibration-tokens, or give more text",
    ):
        plan_network(dense_model(), short, Upcycling(experts=4, top_k=2))


def test_what_is_left_out_by_an_informed_router_is_worth_less() -> None:
    """Mutant: the same parts under a router with its rows in another order."""
    gate_up_FD, down_DW, x_ND, _ = separable()
    plan = plan_layer(0, gate_up_FD, down_DW, x_ND[::2], Upcycling(experts=PARTS, top_k=1, shared=0))
    assert plan.neurons_W is not None
    held_out = x_ND[1::2]
    inner_NW = ORDINARY.swiglu(held_out @ gate_up_FD.T)
    parts = plan.neurons_W.view(PARTS, SIZE)
    lengths_NE = torch.stack([(inner_NW[:, part] @ down_DW[:, part].T).norm(dim=1) for part in parts], 1)

    def kept(gate_ED: torch.Tensor) -> float:
        chosen_N1 = ((held_out @ gate_ED.T).sigmoid() + plan.bias_E).argmax(1, keepdim=True)
        return float(lengths_NE.gather(1, chosen_N1).square().sum() / lengths_NE.square().sum())

    assert kept(plan.gate_ED) > 0.9 > 0.5 > kept(plan.gate_ED.roll(1, 0))
