"""A dense network becomes experts and computes what it did; what cannot is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM

from stretto.base.errors import UserError
from stretto.evals.neurons import plan_layer
from stretto.model.checkpoint import read_checkpoint, write_checkpoint
from stretto.model.elastic import extract
from stretto.model.spec import ModelConfig, Subnet, extracted_config
from stretto.model.transformer import Transformer, build, load_state, skeleton
from stretto.model.upcycle import ROUTER_SCALE, UpcycledState, Upcycling, upcycled_config, upcycled_presets

VOCAB, HIDDEN, WIDTH, LAYERS = 61, 32, 64, 6
SPLIT = Upcycling(experts=8, top_k=3)
COPY = Upcycling(method="copy", experts=4, top_k=2)
EPS = torch.finfo(torch.float32).eps


def dense_config(**changes: Any) -> ModelConfig:
    shape: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_layers": LAYERS, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
        "num_experts": 1, "top_k": 1, "expert_intermediate_size": 1, "dense_layers": tuple(range(LAYERS)),
        "dense_intermediate_size": WIDTH, "tie_embeddings": True,
    }  # fmt: skip
    return ModelConfig.model_validate(shape | changes)


def dense_network(**changes: Any) -> Transformer:
    model = build(dense_config(**changes), seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    return model


def upcycled(dense: Transformer, how: Upcycling, with_text: bool = True) -> tuple[ModelConfig, UpcycledState]:
    """Planned on inputs that every layer could have: normed vectors, times the norm's weight."""
    config = upcycled_config(dense.config, how)
    x_ND = 3.0 * torch.randn(200, HIDDEN, generator=torch.Generator().manual_seed(1)) if with_text else None
    plans = []
    for layer, block in enumerate(dense.blocks):
        plans.append(plan_layer(layer, block.mlp.gate_up.weight.detach(), block.mlp.down.weight.detach(), x_ND, how))
    return config, UpcycledState(config, how, plans, dense.state_dict())


def ids() -> torch.Tensor:
    return torch.randint(0, VOCAB, (3, 20), generator=torch.Generator().manual_seed(2))


def error(model: Transformer, subnet: Subnet, dense: Transformer) -> float:
    """Largest distance of two networks' logits, as a share of the largest logit."""
    with torch.no_grad():
        expected, logits = dense.logits(ids()), model.logits(ids(), subnet)
    return float((logits - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("with_text", [True, False])
@pytest.mark.parametrize("shared", [0, 1, 2])
def test_all_parts_together_are_the_dense_network(shared: int, with_text: bool) -> None:
    dense = dense_network(qk_norm=True, attention_bias=True)
    config, state = upcycled(dense, SPLIT.replace(shared=shared), with_text)
    model = load_state(skeleton(config), state.items())
    assert (config.num_experts, config.num_shared_experts) == (8 - shared, shared)
    # a gate is off by z / 2: five deviations of the router's logits, in every layer
    assert error(model, config.full(), dense) < LAYERS * 5 * ROUTER_SCALE / 2
    assert error(model, config.subnet(top_k=2), dense) > 0.01


@pytest.mark.parametrize("with_text", [True, False])
def test_copies_are_the_dense_network_at_every_size(with_text: bool) -> None:
    dense = dense_network()
    config, state = upcycled(dense, COPY, with_text)
    model = load_state(skeleton(config), state.items())
    for experts, top_k in ((4, 2), (4, 1), (2, 2), (1, 1)):
        # sums of at most WIDTH rounded products a layer, in another order
        assert error(model, config.subnet(experts=experts, top_k=top_k), dense) < LAYERS * WIDTH * EPS


def test_noise_makes_copies_differ_in_that_share_of_neurons() -> None:
    dense = dense_network()
    config, state = upcycled(dense, COPY.replace(noise=0.5))
    original, copies = dense.blocks[1].mlp, state["blocks.1.mlp.gate_up"]
    kept_EF = (copies == original.gate_up.weight).all(dim=-1)
    assert torch.equal(kept_EF[:, :WIDTH], kept_EF[:, WIDTH:])  # gate and up of one neuron are drawn together
    assert torch.equal(kept_EF[:, :WIDTH], (state["blocks.1.mlp.down"] == original.down.weight).all(dim=1))
    assert (kept_EF.sum(1) == WIDTH).all()
    assert len({tuple(row.tolist()) for row in kept_EF}) == COPY.experts
    assert float(copies.std().detach()) == pytest.approx(float(original.gate_up.weight.detach().std()), rel=0.05)
    assert error(load_state(skeleton(config), state.items()), config.full(), dense) > 0.01


def test_every_neuron_has_one_place() -> None:
    dense = dense_network()
    _, state = upcycled(dense, SPLIT)
    for layer, block in enumerate(dense.blocks):
        parts = [*state[f"blocks.{layer}.mlp.down"], state[f"blocks.{layer}.mlp.shared.down.weight"]]
        columns = {tuple(column.tolist()) for part in parts for column in part.T}
        assert columns == {tuple(column.tolist()) for column in block.mlp.down.weight.T}


def test_one_layer_is_made_at_a_time() -> None:
    asked: list[str] = []

    class Noted(dict[str, torch.Tensor]):
        def __getitem__(self, name: str) -> torch.Tensor:
            asked.append(name)
            return super().__getitem__(name)

    dense = dense_network()
    config, state = upcycled(dense, SPLIT)
    state._dense = Noted(dense.state_dict())
    assert set(state) == set(skeleton(config).state_dict()) and len(state) == len(list(state))
    for name in state:
        assert state[name].shape == skeleton(config).state_dict()[name].shape
    assert len(asked) == len(set(asked)) == len(dense.state_dict())


def test_the_router_is_not_rounded_to_the_dtype_of_the_neurons() -> None:
    _, state = upcycled(dense_network().half(), SPLIT)
    assert state["blocks.1.mlp.down"].dtype == torch.float16
    gate_ED = state["blocks.1.mlp.gate"]
    assert gate_ED.dtype == torch.float32 and torch.equal(gate_ED, state._plans[1].gate_ED)


@pytest.mark.parametrize("how", [SPLIT, COPY])
def test_transformers_computes_the_same(how: Upcycling, tmp_path: Path) -> None:
    dense = dense_network(qk_norm=True, attention_bias=True)
    config, state = upcycled(dense, how)
    write_checkpoint(tmp_path / "moe", state, config, presets=upcycled_presets(config, how))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "moe", dtype=torch.float32)
    read = read_checkpoint(tmp_path / "moe")
    with torch.no_grad():
        expected = read.model.logits(ids())
        assert float((theirs(ids()).logits - expected).abs().max()) < 1e-4 * float(expected.abs().max())
    assert read.config == config and set(read.presets) == {"half", "corner"}


def test_sizes_with_fewer_experts_choose_as_they_do_when_cut_out() -> None:
    config, state = upcycled(dense_network(), SPLIT)
    model = load_state(skeleton(config), state.items())
    tokens = torch.randint(0, VOCAB, (8, 256), generator=torch.Generator().manual_seed(3))
    subnet = config.subnet(experts=5, top_k=3)
    cut = extract(model, subnet)
    with torch.no_grad():  # their routers have another number of rows, so that products may round otherwise
        masked, own = model.logits(tokens, subnet), cut.logits(tokens, cut.config.full())
    assert float((masked - own).abs().max()) < 64 * EPS * float(masked.abs().max())


def test_sizes_that_come_with_it_lie_inside() -> None:
    for how in (SPLIT, COPY, Upcycling(experts=4, top_k=1, shared=0), Upcycling(method="copy", experts=2, top_k=1)):
        config = upcycled_config(dense_config(), how)
        for choice in upcycled_presets(config, how).values():
            subnet = choice.of(config)
            assert all(experts in config.widths for experts in subnet.experts)


@pytest.mark.parametrize(
    ("changes", "how", "message"),
    [
        ({}, Upcycling(experts=7, top_k=2), r"--experts 7: does not divide the 64 neurons .* choose 2, 4, 8$"),
        ({"dense_layers": (0,), "num_experts": 4}, SPLIT, r"--experts: the network has 5 MoE layers already"),
        ({"mlp_bias": True}, SPLIT, r"--experts: glm4_moe cannot express the result: .*bias"),
        ({"attention_out_bias": True}, COPY, r"--experts: glm4_moe cannot .*: .*bias"),
        ({"sliding_layers": (1,), "sliding_window": 8}, SPLIT, r"--experts: glm4_moe cannot .*: .*(sliding|window)"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(changes: dict[str, Any], how: Upcycling, message: str) -> None:
    with pytest.raises(UserError, match=message) as refusal:
        upcycled_config(dense_config(**changes), how)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"experts": 8, "top_k": 8}, "top_k: 8 exceeds the 7 routed experts"),
        ({"experts": 8, "top_k": 1, "shared": 7}, "leave fewer than two routed experts"),
        ({"method": "copy", "experts": 4, "top_k": 5}, "top_k: 5 exceeds the 4 routed experts"),
        ({"method": "copy", "experts": 4, "top_k": 2, "shared": 1}, "shared: a shared copy"),
        ({"experts": 8, "top_k": 4, "noise": 0.5}, "noise: parts are not copies"),
        ({"experts": 1, "top_k": 1}, "experts"),
    ],
)
def test_options_that_contradict_each_other(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Upcycling.model_validate(fields)


def test_a_network_of_parts_is_known_by_its_gates_at_every_size() -> None:
    split, copies = (upcycled_config(dense_config(), how) for how in (SPLIT, COPY))
    assert split.only_ranks and not copies.only_ranks and not dense_config().only_ranks
    for choice in upcycled_presets(split, SPLIT).values():
        assert extracted_config(split, choice.of(split)).only_ranks
