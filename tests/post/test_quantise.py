"""Networks with integer weights: files, slices for Subnets, and GPTQ."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stretto.base.errors import UserError
from stretto.model.checkpoint import read_checkpoint, read_integers, stores_integers, write_checkpoint
from stretto.model.elastic import extract, slice_integers, slice_state
from stretto.model.families import Family
from stretto.model.families.quantisation import quantisation
from stretto.model.spec import ModelConfig, Subnet
from stretto.model.streamed import StreamedState
from stretto.model.transformer import Context, Transformer
from stretto.model.weight_files import open_tensors
from stretto.ops.int_weights import IntScheme, IntWeight, fitted_grid, nearest_codes, quantise
from stretto.post.quantise import (
    Moments,
    compensated,
    gptq,
    moved_to_unquantised,
    part_of_weight,
    round_to_nearest,
    schemes_of,
    untie,
)
from tests.model.checkpoints import IDS, edit_tensors, logits, network

WIDE: dict[str, Any] = {"head_dim": 32, "expert_intermediate_size": 32}
GLM = {**WIDE, "num_shared_experts": 2, "dense_layers": (0,), "dense_intermediate_size": 96, "widths": (8, 4, 2)}
NETWORKS: dict[str, tuple[Family, dict[str, Any]]] = {
    "glm": ("glm4_moe", GLM),
    "glm, layers of different width": ("glm4_moe", {**WIDE, "experts_per_layer": (8, 3, 5, 2)}),
    "ernie, whose rows are in another order on disk": (
        "ernie4_5_moe",
        {**WIDE, "router": "softmax", "num_shared_experts": 1, "tie_embeddings": True},
    ),
    "llama": ("llama", {**WIDE, "dense_layers": (0, 1, 2, 3), "dense_intermediate_size": 96}),
}
SCHEMES = {"int8": IntScheme(8), "int4": IntScheme(4), "int4 with zeros": IntScheme(4, zeros=True)}
HALF = {"layers": (0, 1, 3), "experts": (4, 4), "top_k": (2, 1)}


def plan(scheme: IntScheme) -> dict[str, IntScheme]:
    return {"experts": scheme, "attention": scheme, "head": IntScheme(8)}


def rounded(model: Transformer, family: Family, scheme: IntScheme) -> dict[str, IntWeight]:
    return round_to_nearest(model.state_dict(), schemes_of(model.config, family, plan(scheme)))


def overwritten(model: Transformer, integers: dict[str, IntWeight]) -> Transformer:
    result = copy.deepcopy(model)
    state = result.state_dict()
    for name, weight in integers.items():
        state[name].copy_(weight.dequantise())
    return result


def equal(one: dict[str, IntWeight], other: dict[str, IntWeight]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].bits == other[name].bits
        and torch.equal(one[name].codes, other[name].codes)
        and torch.equal(one[name].scales, other[name].scales)
        and (one[name].zeros is None) == (other[name].zeros is None)
        and torch.equal(one[name].dequantise(), other[name].dequantise())
        for name in one
    )


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=list(SCHEMES))
@pytest.mark.parametrize("name", NETWORKS)
def test_a_checkpoint_holds_the_integers_and_is_read_as_their_values(
    name: str, scheme: IntScheme, tmp_path: Path
) -> None:
    family, changes = NETWORKS[name]
    model = network(**changes)
    untie(model)
    integers = rounded(model, family, scheme)
    parts = {part_of_weight(weight) for weight in integers}
    assert parts == {"experts", "attention", "head"}
    write_checkpoint(tmp_path / "c", model, model.config, family=family, integers=integers)
    assert stores_integers(tmp_path / "c") and equal(read_integers(tmp_path / "c"), integers)
    meant = overwritten(model, integers)
    for key, tensor in read_checkpoint(tmp_path / "c").model.state_dict().items():
        assert torch.equal(tensor, meant.state_dict()[key]), key
    with StreamedState(tmp_path / "c") as state:
        assert all(torch.equal(state[key], tensor) for key, tensor in meant.state_dict().items())
    assert not torch.equal(logits(meant), logits(model))


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=list(SCHEMES))
def test_slicing_a_quantised_network_equals_quantising_the_slice(scheme: IntScheme) -> None:
    model = network(**GLM)
    subnet = Subnet(**HALF)
    sliced = slice_integers(model.config, subnet, rounded(model, "glm4_moe", scheme))
    smaller = extract(model, subnet)
    assert equal(sliced, rounded(smaller, "glm4_moe", scheme))
    assert sliced["blocks.1.mlp.gate_up"].codes.shape == (4, 64, 64)


def test_slices_of_weights_by_gptq_are_slices_of_their_values() -> None:
    model = network(**GLM)
    integers = calibrated(model, IntScheme(4))
    subnet = Subnet(**HALF)
    sliced = slice_integers(model.config, subnet, integers)
    values = slice_state(model.config, subnet, {name: weight.dequantise() for name, weight in integers.items()})
    assert sliced.keys() == values.keys()
    assert all(torch.equal(sliced[name].dequantise(), value) for name, value in values.items())


def test_an_untied_head_has_the_values_of_the_embedding() -> None:
    model = network(**WIDE, tie_embeddings=True)
    before = logits(model)
    untie(model)
    assert torch.equal(logits(model), before) and not model.config.tie_embeddings
    with torch.no_grad():
        model.head_VD.zero_()
    assert model.embedding.weight.abs().max() > 0


def test_what_a_family_or_a_group_cannot_hold_is_refused() -> None:
    model = network(head_dim=24)
    with pytest.raises(UserError, match=r"--group 32: blocks\.0\.mlp\.down has 16 inputs.*choose one of 8, 16$"):
        schemes_of(model.config, "glm4_moe", plan(IntScheme(8)))
    config = ModelConfig(
        **{**GPT_OSS, "vocab_size": 300, "hidden_size": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2},
    )
    with pytest.raises(UserError, match=r"--experts: gpt_oss stores all experts .*add --experts none"):
        schemes_of(config, "gpt_oss", plan(IntScheme(8)))
    assert schemes_of(config, "gpt_oss", {"attention": IntScheme(8)})


GPT_OSS: dict[str, Any] = {
    "head_dim": 32, "num_experts": 4, "top_k": 2, "expert_intermediate_size": 32, "router": "softmax", "selection_bias": False,
    "attention_sinks": True, "router_bias": True, "expert_bias": True, "clamped_swiglu": {}, "attention_bias": True,
    "attention_out_bias": True,
}  # fmt: skip
CODES, SCALES = "lm_head.weight_packed", "lm_head.weight_scale"
DAMAGE: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "no scales": (lambda tensors: tensors.pop(SCALES), r"lm_head\.weight: quantised, and its scales .* are missing"),
    "codes of other bits": (
        lambda tensors: tensors.update({CODES: tensors[CODES][:, :3].clone()}),
        r"lm_head\.weight_packed: 3 columns for 64 inputs",
    ),
    "codes of another dtype": (
        lambda tensors: tensors.update({CODES: tensors[CODES].float()}),
        r"lm_head\.weight_packed: torch\.float32 of shape \[300, 16\] is not a packed matrix",
    ),
    "too few rows": (
        lambda tensors: tensors.update({CODES: tensors[CODES][:9].clone()}),
        r"lm_head\.weight_packed: shape \[9, 16\] where config\.json gives \[300, 16\]",
    ),
    "groups that do not divide": (
        lambda tensors: tensors.update({SCALES: torch.ones(300, 5)}),
        r"lm_head\.weight_scale: 5 groups do not divide 64 inputs",
    ),
    "one scale": (
        lambda tensors: tensors.update({SCALES: torch.ones(())}),
        r"lm_head\.weight_scale: torch\.float32 of shape \[\] is not a matrix of scales",
    ),
    "scales of another dtype": (
        lambda tensors: tensors.update({SCALES: tensors[SCALES].int()}),
        r"lm_head\.weight_scale: torch\.int32 of shape \[300, 2\] is not a matrix of scales",
    ),
    "zeros of another dtype": (
        lambda tensors: tensors.update({"lm_head.weight_zero_point": torch.zeros(75, 2, dtype=torch.uint8)}),
        r"lm_head\.weight_zero_point: torch\.uint8 in place of zeros packed in int32",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_integers_that_are_damaged_are_one_line(damage: str, tmp_path: Path) -> None:
    act, message = DAMAGE[damage]
    model = network(**WIDE)
    integers = round_to_nearest(model.state_dict(), {"head.weight": IntScheme(8)})
    write_checkpoint(tmp_path / "c", model, model.config, integers=integers)
    edit_tensors(tmp_path / "c" / "model.safetensors", act)
    with pytest.raises(UserError, match=f"model.safetensors: {message}") as caught:
        read_checkpoint(tmp_path / "c")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"num_bits": 3}, "num_bits 3 of packed weights"),
        ({"type": "float"}, "type 'float' of packed weights"),
        ({"strategy": "tensor"}, "strategy 'tensor' of packed weights"),
        ({"actorder": "group"}, "actorder 'group' of packed weights"),
    ],
)
def test_packed_weights_of_another_form_are_refused(weights: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = network(**WIDE)
    integers = round_to_nearest(model.state_dict(), {"head.weight": IntScheme(8)})
    write_checkpoint(tmp_path / "c", model, model.config, integers=integers)
    tree = json.loads((tmp_path / "c" / "config.json").read_text())
    tree["quantization_config"]["config_groups"]["group_0"]["weights"] |= weights
    with pytest.raises(UserError, match=message):
        quantisation(tree, "config.json")


def test_a_weight_of_which_only_a_part_is_integer_is_read_but_has_no_integers(tmp_path: Path) -> None:
    model = network(**WIDE)
    integers = rounded(model, "glm4_moe", IntScheme(8))
    write_checkpoint(tmp_path / "c", model, model.config, integers=integers)
    name = "model.layers.1.self_attn.k_proj.weight"
    with open_tensors(tmp_path / "c") as files:
        value = files.read(name, (64, 64))

    def plain(tensors: dict[str, torch.Tensor]) -> None:
        for ending in ("packed", "scale", "shape"):
            tensors.pop(f"{name}_{ending}")
        tensors[name] = value

    edit_tensors(tmp_path / "c" / "model.safetensors", plain)
    assert integers.keys() - read_integers(tmp_path / "c").keys() == {"blocks.1.attention.qkv.weight"}
    assert torch.equal(logits(read_checkpoint(tmp_path / "c").model), logits(overwritten(model, integers)))


# --- GPTQ ---------------------------------------------------------------------------------------------------------------


def calibrated(model: Transformer, scheme: IntScheme) -> dict[str, IntWeight]:
    schemes = schemes_of(model.config, "glm4_moe", plan(scheme))
    return gptq(copy.deepcopy(model), schemes, [(IDS, Context.plain(IDS))], [model.config.full(), Subnet(**HALF)])


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=list(SCHEMES))
def test_errors_on_correlated_inputs_are_made_up_for(scheme: IntScheme) -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(2, 24, 64, generator=generator)
    x = torch.randn(2, 400, 16, generator=generator) @ torch.randn(2, 16, 64, generator=generator)
    x += 0.1 * torch.randn(x.shape, generator=generator)
    found, nearest = compensated(weight, x.mT @ x, scheme), quantise(weight, scheme)
    error, plain = ((x @ (each.dequantise() - weight).mT).square().mean((1, 2)) for each in (found, nearest))
    assert (error < 0.5 * plain).all()


@pytest.mark.parametrize("hessian", [torch.zeros(64, 64), torch.eye(64)], ids=["no tokens", "independent inputs"])
def test_without_correlations_gptq_rounds_to_nearest_on_a_fitted_grid(hessian: torch.Tensor) -> None:
    weight = torch.randn(24, 64, generator=torch.Generator().manual_seed(4))
    for scheme in SCHEMES.values():
        found = compensated(weight, hessian, scheme)
        grouped = weight.unflatten(-1, (-1, 32))
        scales, zeros = fitted_grid(grouped, torch.ones(32), scheme)
        wide = None if zeros is None else zeros[..., None]
        codes = nearest_codes(grouped, scales[..., None], wide, scheme.bits).to(torch.int8).flatten(-2)
        assert equal({"w": found}, {"w": IntWeight(codes, scales, zeros, scheme.bits)})


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=list(SCHEMES))
def test_gptq_with_one_scale_per_output_takes_inputs_in_any_order(scheme: IntScheme) -> None:
    """Reordering the inputs reorders the codes: the method sorts them itself."""
    generator = torch.Generator().manual_seed(6)
    weight, x = torch.randn(24, 96, generator=generator), torch.randn(300, 96, generator=generator)
    x = x @ torch.randn(96, 96, generator=generator)
    whole = IntScheme(scheme.bits, 96, scheme.zeros)
    order = torch.randperm(96, generator=generator)
    one = compensated(weight, x.mT @ x, whole)
    other = compensated(weight[:, order], x[:, order].mT @ x[:, order], whole)
    share = (one.codes[:, order] == other.codes).float().mean()  # a rounding error of the factors may turn a few
    assert share > 0.98


def test_a_fitted_grid_is_nearer_where_it_matters() -> None:
    generator = torch.Generator().manual_seed(7)
    grouped, importance = torch.randn(50, 32, generator=generator), torch.rand(50, 32, generator=generator) ** 4

    def error(scheme: IntScheme, weights: torch.Tensor) -> torch.Tensor:
        scales, zeros = fitted_grid(grouped, weights, scheme)
        wide = None if zeros is None else zeros[..., None]
        values = nearest_codes(grouped, scales[..., None], wide, scheme.bits) - (0 if wide is None else wide.float())
        return ((values * scales[..., None].float() - grouped).square() * importance).sum(-1)

    for scheme in (SCHEMES["int4"], SCHEMES["int4 with zeros"]):
        plain = quantise(grouped, scheme).dequantise() - grouped
        fitted = error(scheme, importance)
        assert (fitted <= (plain.square() * importance).sum(-1)).all()
        assert fitted.mean() < error(scheme, torch.ones(32)).mean() < (plain.square() * importance).sum(-1).mean()


def test_a_moved_weight_gives_on_the_inputs_what_the_unquantised_network_gives() -> None:
    generator = torch.Generator().manual_seed(8)
    weight, x_ND = torch.randn(24, 16, generator=generator), torch.randn(400, 16, generator=generator)
    unquantised_ND = x_ND + 0.2 * x_ND @ torch.randn(16, 16, generator=generator)
    drift = (unquantised_ND - x_ND).mT @ x_ND

    def error(moved: torch.Tensor) -> float:
        return float((x_ND @ moved.mT - unquantised_ND @ weight.mT).square().mean())

    assert error(moved_to_unquantised(weight, x_ND.mT @ x_ND, drift)) < 0.7 * error(weight)  # a quarter of the way
    unmoved = moved_to_unquantised(weight, x_ND.mT @ x_ND, torch.zeros_like(drift))
    assert torch.equal(unmoved, weight) and torch.equal(moved_to_unquantised(weight, 0 * drift, 0 * drift), weight)


def test_each_expert_has_the_moments_of_its_own_tokens() -> None:
    model = network(**WIDE, num_shared_experts=1)
    layer = model.blocks[1].mlp
    x_BTD, change_BTD = torch.randn(2, 2, 24, 64, generator=torch.Generator().manual_seed(5))
    x_ND, unquantised_ND = x_BTD.flatten(0, 1), (x_BTD + change_BTD).flatten(0, 1)
    names = {"gate_up": layer.gate_up, "down": layer.down, "shared": layer.shared.gate_up.weight}
    moments = Moments(names)
    moments.unquantised = {"gate_up": unquantised_ND, "shared": unquantised_ND}
    with torch.no_grad():
        y_BTD, _ = layer(x_BTD, 8, 2, None, moments)
        assert torch.equal(y_BTD, layer(x_BTD, 8, 2, None)[0])
        routes, _ = layer.route(x_BTD, 8, 2, None)

        def expect(name: str, place: int | None, x_ND: torch.Tensor, unquantised_ND: torch.Tensor) -> None:
            found = [sums[name] if place is None else sums[name][place] for sums in (moments.hessians, moments.drifts)]
            torch.testing.assert_close(found[0], x_ND.mT @ x_ND)
            torch.testing.assert_close(found[1], (unquantised_ND - x_ND).mT @ x_ND, rtol=1e-4, atol=1e-4)

        for expert in range(8):
            is_own_N = (routes.chosen_NK == expert).any(1)
            gates_N = (routes.gates_NK * (routes.chosen_NK == expert)).sum(1)[is_own_N]

            def hidden(x_ND: torch.Tensor, expert: int = expert, gates_N: torch.Tensor = gates_N) -> torch.Tensor:
                gate_NI, up_NI = (x_ND @ layer.gate_up[expert].mT).chunk(2, -1)
                return gate_NI.sigmoid() * gate_NI * up_NI * gates_N[:, None]

            own, own_unquantised = x_ND[is_own_N], unquantised_ND[is_own_N]
            expect("gate_up", expert, own, own_unquantised)
            expect("down", expert, hidden(own), hidden(own_unquantised))
    expect("shared", None, x_ND, unquantised_ND)


def test_calibrated_weights_are_nearer_on_their_text_than_rounded_ones() -> None:
    model = network(**GLM)
    found, nearest = calibrated(model, IntScheme(4)), rounded(model, "glm4_moe", IntScheme(4))
    assert found.keys() == nearest.keys()
    before = logits(model)
    error, plain = (float((logits(overwritten(model, each)) - before).square().mean()) for each in (found, nearest))
    assert error < plain


def test_gptq_leaves_the_network_with_the_values_of_the_integers() -> None:
    model = network(**GLM)
    schemes = schemes_of(model.config, "glm4_moe", {"experts": IntScheme(4)})
    before = copy.deepcopy(model.state_dict())
    integers = gptq(model, schemes, [(IDS, Context.plain(IDS))], [model.config.full()])
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, integers[name].dequantise() if name in integers else before[name]), name


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused(number: float) -> None:
    model = network(**GLM)
    name = "blocks.1.mlp.gate_up"
    schemes = schemes_of(model.config, "glm4_moe", {"experts": IntScheme(8)})

    def by_gptq() -> None:
        gptq(model, schemes, [(IDS, Context.plain(IDS))], [model.config.full()])

    with torch.no_grad():
        model.blocks[1].attention_norm.weight[3] = number
    with pytest.raises(UserError, match="its inputs on the calibration text are not finite"):
        by_gptq()
    with torch.no_grad():
        model.state_dict()[name].view(-1)[5] = number
    for refused in (by_gptq, lambda: round_to_nearest(model.state_dict(), schemes)):
        with pytest.raises(UserError, match=f"{name}: holds numbers that are not finite"):
            refused()
