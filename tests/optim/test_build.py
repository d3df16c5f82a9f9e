"""The optimisers: which parameters each takes, and Muon."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from stretto.model.lora import add_adapters
from stretto.model.spec import LoraConfig, ModelConfig
from stretto.model.transformer import Context, Transformer, build
from stretto.ops.logprob import head_loss
from stretto.optim.build import Muon, build_optimizers, orthogonal, set_learning_rate
from stretto.optim.schedule import OptimConfig

SHAPE: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 16, "num_layers": 3, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8,
    "num_experts": 4, "top_k": 2, "expert_intermediate_size": 8, "num_shared_experts": 1, "qk_norm": True,
    "attention_bias": True, "dense_layers": (1,), "dense_intermediate_size": 16,
}  # fmt: skip


def network(**changes: Any) -> Transformer:
    return build(ModelConfig(**{**SHAPE, **changes}), seed=0)


def groups_of(model: nn.Module, optimizers: tuple[Optimizer, ...]) -> dict[str, dict[str, Any]]:
    """The group of each parameter, by name; every parameter is in exactly one."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = [
        (names[id(parameter)], {**group, "kind": type(optimizer).__name__})
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert sorted(name for name, _ in found) == sorted(trained)
    return dict(found)


def test_matrices_decay_and_norms_and_biases_do_not() -> None:
    model = network()
    for name, group in groups_of(model, build_optimizers(OptimConfig(lr=1e-3, weight_decay=0.3), model)).items():
        plain = name.endswith(("norm.weight", "q_norm", "k_norm", "bias"))
        assert group["weight_decay"] == (0.0 if plain else 0.3), name


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_routers_have_a_rate_of_their_own(name: str) -> None:
    model = network()
    before = {each: tensor.clone() for each, tensor in model.state_dict().items()}
    optimizers = build_optimizers(
        OptimConfig.model_validate({"name": name, "lr": 1e-3, "router_lr_factor": 0.0}), model
    )
    set_learning_rate(optimizers, 1e-3)
    groups = groups_of(model, optimizers)
    assert {each for each, group in groups.items() if group["lr"] == 0.0} == {"blocks.0.mlp.gate", "blocks.2.mlp.gate"}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for optimizer in optimizers:
        optimizer.step()
    kept = {each for each, _ in model.named_parameters() if torch.equal(model.state_dict()[each], before[each])}
    assert kept == {"blocks.0.mlp.gate", "blocks.2.mlp.gate"}


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_rate_of_routers_is_also_that_of_their_biases_and_adapters(name: str) -> None:
    config = OptimConfig.model_validate({"name": name, "lr": 1e-3, "router_lr_factor": 0.0})
    biased = network(router_bias=True)
    adapted = network()
    add_adapters(adapted, "glm4_moe", LoraConfig(rank=2, targets=("attention", "router", "experts")), seed=0)
    for model, fixed in (
        (biased, {"gate", "gate_bias"}),
        (adapted, {f"parametrizations.gate.0.{each}.0" for each in "ab"}),
    ):
        trained = groups_of(model, build_optimizers(config, model))
        found = {each for each, group in trained.items() if group["lr_factor"] == 0.0}
        assert found == {f"blocks.{layer}.mlp.{each}" for layer in (0, 2) for each in fixed}
        assert {trained[each]["kind"] for each in found} == {"AdamW"}


def test_muon_alone_trains_adapters() -> None:
    model = network()
    add_adapters(model, "glm4_moe", LoraConfig(rank=2), seed=0)
    (muon,) = build_optimizers(OptimConfig(name="muon", lr=1e-3, muon_lr_factor=8.0), model)
    assert isinstance(muon, Muon) and [group["lr_factor"] for group in muon.param_groups] == [8.0]
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    assert {id(parameter) for group in muon.param_groups for parameter in group["params"]} == trained


@pytest.mark.parametrize("tied", [False, True])
def test_muon_takes_the_matrices_between_hidden_states(tied: bool) -> None:
    model = network(tie_embeddings=tied)
    config = OptimConfig(name="muon", lr=1e-3, weight_decay=0.3, muon_lr_factor=8.0)
    optimizers = build_optimizers(config, model)
    groups = groups_of(model, optimizers)
    chosen = {name for name, group in groups.items() if group["kind"] == "Muon"}
    linear = ("attention.qkv.weight", "attention.out.weight")
    dense = ("mlp.gate_up.weight", "mlp.down.weight")
    experts = ("mlp.gate_up", "mlp.down", "mlp.shared.gate_up.weight", "mlp.shared.down.weight")
    assert chosen == {
        f"blocks.{layer}.{name}" for layer in range(3) for name in (*linear, *(dense if layer == 1 else experts))
    }
    set_learning_rate(optimizers, 2e-4)
    for group in groups_of(model, optimizers).values():
        factor = 8.0 if group["kind"] == "Muon" else 1.0
        assert group["lr"] == pytest.approx(2e-4 * factor)
        # decoupled decay is rate times weight_decay: the same pull on every matrix, whichever optimiser has it
        assert group["lr"] * group["weight_decay"] in (0.0, pytest.approx(2e-4 * 0.3))


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_few_steps_lower_the_loss(name: str) -> None:
    model = network()
    optimizers = build_optimizers(OptimConfig.model_validate({"name": name, "lr": 3e-3}), model)
    ids = torch.randint(0, 40, (4, 16), generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(8):
        hidden_BTD = model(ids, model.config.full(), Context.plain(ids)).hidden_BTD
        loss, _ = head_loss(hidden_BTD[:, :-1].flatten(0, 1), model.head_VD, ids[:, 1:].flatten())
        (loss / ids.numel()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()) / ids.numel())
    assert losses[-1] < losses[0] - 0.3


def test_frozen_parameters_are_left_out() -> None:
    model = network()
    model.embedding.requires_grad_(False)
    (adamw,) = build_optimizers(OptimConfig(lr=1e-3), model)
    assert all(parameter.requires_grad for group in adamw.param_groups for parameter in group["params"])


@pytest.mark.parametrize("shape", [(24, 24), (48, 16), (16, 48), (5, 32, 20)])
def test_singular_values_come_close_to_one_and_directions_stay(shape: tuple[int, ...]) -> None:
    update = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    result = orthogonal(update)
    values = torch.linalg.svdvals(result)
    assert values.min() > 0.4 and values.max() < 1.3, values
    left, _, right = torch.linalg.svd(update, full_matrices=False)
    # in the update's own singular directions the result is diagonal: nothing was rotated
    inside = left.mT @ result @ right.mT
    off = inside - torch.diag_embed(inside.diagonal(dim1=-2, dim2=-1))
    assert off.abs().max() < 1e-4


def test_a_stack_is_its_matrices_one_by_one() -> None:
    stack = torch.randn(4, 12, 8, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(orthogonal(stack), torch.stack([orthogonal(each) for each in stack]), atol=1e-6)


def test_scale_of_the_gradient_does_not_matter() -> None:
    update = torch.randn(16, 12, generator=torch.Generator().manual_seed(0))
    # the norm is divided out up to its 1e-7 guard
    assert torch.allclose(orthogonal(update), orthogonal(1e3 * update), atol=1e-5)


def test_muon_leaves_experts_without_tokens_as_they_are() -> None:
    """And moves the others as it moves a stack without idle experts, to the bit."""
    generator = torch.Generator().manual_seed(0)
    start, gradients = (torch.randn(shape, generator=generator) for shape in ((3, 12, 8), (4, 3, 12, 8)))
    gradients[1:, 2] = 0
    whole, ordinary = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start[:2].clone())
    optimizers = [Muon([{"params": [each], "weight_decay": 0.1}], lr=0.02) for each in (whole, ordinary)]
    after = []
    for gradient in gradients:
        whole.grad, ordinary.grad = gradient.clone(), gradient[:2].clone()
        for optimizer in optimizers:
            optimizer.step()
        after.append(whole.detach().clone())
        assert torch.equal(whole[:2], ordinary)
    assert not torch.equal(after[0][2], start[2])
    assert all(torch.equal(each[2], after[0][2]) for each in after)


@pytest.mark.parametrize("shape", [(20, 20), (40, 16)])
def test_a_few_steps_equal_torchs_own_to_bf16(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(shape, generator=generator)
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    settings = {"lr": 0.02, "weight_decay": 0.1}
    optimizers = Muon([{"params": [ours], **settings}], lr=0.02), torch.optim.Muon([theirs], **settings)
    for _ in range(5):
        gradient = torch.randn(shape, generator=generator)
        for parameter, optimizer in zip((ours, theirs), optimizers, strict=True):
            parameter.grad = gradient.clone()
            optimizer.step()
    # torch iterates in bf16: 5 iterations of 8 bits, on steps of size lr
    assert (ours - theirs).abs().max() < 5 * 5 * 2**-8 * 0.02
    assert not torch.equal(ours, start)


def test_state_survives_a_round_trip() -> None:
    parameter = torch.nn.Parameter(torch.randn(8, 8, generator=torch.Generator().manual_seed(0)))
    optimizer = Muon([{"params": [parameter]}], lr=0.1)
    parameter.grad = torch.ones(8, 8)
    optimizer.step()
    other = Muon([{"params": [parameter]}], lr=0.1)
    other.load_state_dict(optimizer.state_dict())
    kept, restored = optimizer.state[parameter], other.state[parameter]
    assert torch.equal(kept["momentum_buffer"], restored["momentum_buffer"])
