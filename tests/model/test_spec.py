"""Shapes and nested orders: properties that hold for every size, and one line for every impossible one."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from stretto.base.errors import UserError
from stretto.model.spec import (
    ModelConfig,
    SubnetChoice,
    check_subnet,
    extracted_config,
    interleaved_order,
    kept_experts,
    kept_order,
    parse_subnet,
    spaced_layer_order,
)

SHAPE = {
    "vocab_size": 40, "hidden_size": 16, "num_layers": 8, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4,
    "num_experts": 8, "top_k": 4, "expert_intermediate_size": 8,
}  # fmt: skip


def network(**changes: object) -> ModelConfig:
    return ModelConfig.model_validate(SHAPE | changes)


@given(bits=st.integers(0, 6), data=st.data())
def test_a_prefix_is_spread_evenly_over_contiguous_blocks(bits: int, data: st.DataObject) -> None:
    """Blocks are what expert parallelism puts on a rank: any power of two of them, for prefixes that they divide."""
    num_experts = 2**bits
    num_blocks = 2 ** data.draw(st.integers(0, bits))
    prefix = num_blocks * data.draw(st.integers(1, num_experts // num_blocks))
    kept = interleaved_order(num_experts)[:prefix]
    size = num_experts // num_blocks
    per_block = [sum(block * size <= expert < (block + 1) * size for expert in kept) for block in range(num_blocks)]
    assert set(per_block) == {prefix // num_blocks}


@given(num_experts=st.integers(1, 300), num_blocks=st.sampled_from([2, 3, 4, 8]), data=st.data())
def test_any_prefix_of_any_count_is_nearly_even(num_experts: int, num_blocks: int, data: st.DataObject) -> None:
    order = interleaved_order(num_experts)
    assert sorted(order) == list(range(num_experts))
    prefix = data.draw(st.integers(1, num_experts))
    bounds = [num_experts * block // num_blocks for block in range(num_blocks + 1)]
    share = prefix / num_experts
    # a bit-reversed (van der Corput) prefix of n points is off by at most log2(n) + 1 in any interval
    for low, high in pairwise(bounds):
        inside = sum(low <= expert < high for expert in order[:prefix])
        assert abs(inside - share * (high - low)) <= num_experts.bit_length() + 1


@given(size=st.integers(1, 12), num_groups=st.integers(1, 12), data=st.data())
def test_equal_groups_stay_equal_in_every_prefix_that_they_divide(
    size: int, num_groups: int, data: st.DataObject
) -> None:
    order = interleaved_order(size * num_groups, num_groups)
    assert sorted(order) == list(range(size * num_groups))
    kept = order[: num_groups * data.draw(st.integers(1, size))]
    assert len({sum(expert // size == group for expert in kept) for group in range(num_groups)}) == 1
    if size & (size - 1) == 0 and num_groups & (num_groups - 1) == 0:
        assert order == interleaved_order(size * num_groups), "powers of two were balanced already"


@given(data=st.data())
def test_the_least_count_that_holds_a_top_k_does_and_no_lesser_one(data: st.DataObject) -> None:
    num_groups = data.draw(st.sampled_from([1, 2, 4, 8]))
    top_groups, num, top_k = (data.draw(st.integers(1, most)) for most in (num_groups, 64, 8))
    config = network(num_experts=64, top_k=1, expert_groups=num_groups, top_groups=top_groups)
    least = config.holding(num, top_k)
    assert least >= num and config.choosable(least) >= top_k
    assert all(config.choosable(fewer) < top_k for fewer in range(num, least))


@pytest.mark.parametrize(
    ("experts", "top_k", "message"),
    [
        (6, 2, "experts=6 does not leave its 4 groups"),
        (4, 2, "keep a multiple of 4, 8 or more"),
        (8, 5, "top_k=5 is more than the 4"),
    ],
)
def test_a_subnet_with_unequal_groups_is_one_line(experts: int, top_k: int, message: str) -> None:
    config = network(num_experts=16, top_k=8, expert_groups=4, top_groups=2)
    assert config.subnet(experts=8, top_k=4) and config.subnet(experts=12, top_k=6)
    with pytest.raises(UserError, match=message) as caught:
        config.subnet(experts=experts, top_k=top_k)
    assert "\n" not in str(caught.value)


@given(num_layers=st.integers(1, 80), data=st.data())
def test_depth_never_drops_the_first_and_last_two_layers(num_layers: int, data: st.DataObject) -> None:
    order = spaced_layer_order(num_layers)
    assert sorted(order) == list(range(num_layers))
    fixed = {0, 1, num_layers - 2, num_layers - 1} & set(range(num_layers))
    depth = data.draw(st.integers(len(fixed), num_layers))
    config = network(num_layers=num_layers)
    kept = config.subnet(depth=depth).layers
    assert fixed <= set(kept) and len(kept) == depth
    if depth > len(fixed):
        assert set(config.subnet(depth=depth - 1).layers) < set(kept), "depths are nested"


def test_the_first_dropped_layers_lie_apart() -> None:
    dropped = sorted(spaced_layer_order(20)[-4:])
    assert all(high - low > 1 for low, high in pairwise(dropped))


@given(num_experts=st.integers(1, 32), data=st.data())
def test_kept_orders_are_nested(num_experts: int, data: st.DataObject) -> None:
    """The order of a cut-out layer names the same experts as the prefix of the order it was cut from."""
    order = tuple(data.draw(st.permutations(range(num_experts))))
    outer = data.draw(st.integers(1, num_experts))
    inner = data.draw(st.integers(1, outer))
    stored = kept_experts(order, outer)
    again = kept_experts(kept_order(order, outer), inner)
    assert [stored[index] for index in again] == list(kept_experts(order, inner))


@st.composite
def nested_choices(draw: st.DrawFn) -> tuple[ModelConfig, SubnetChoice, SubnetChoice]:
    num_layers = draw(st.integers(2, 8))
    dense = tuple(sorted(draw(st.sets(st.integers(0, num_layers - 1), max_size=2))))
    config = network(
        num_layers=num_layers, dense_layers=dense, dense_intermediate_size=12,
        widths=draw(st.sampled_from([(8,), (8, 4), (8, 6, 3)])), layer_order=draw(st.permutations(range(num_layers))),
        expert_order=tuple(tuple(draw(st.permutations(range(8)))) for _ in range(num_layers - len(dense))),
    )  # fmt: skip
    outer = SubnetChoice(
        layers=draw(st.integers(1, num_layers)), experts=draw(st.integers(1, 8)), top_k=draw(st.integers(1, 4))
    )
    assert outer.layers and outer.experts and outer.top_k
    if outer.top_k > outer.experts:
        outer = outer.replace(top_k=outer.experts)
        assert outer.top_k and outer.layers and outer.experts
    inner = SubnetChoice(
        layers=draw(st.integers(1, outer.layers)),
        top_k=(k := draw(st.integers(1, outer.top_k))),
        experts=draw(st.integers(k, outer.experts)),
    )
    return config, outer, inner


@given(nested_choices())
def test_cutting_twice_is_cutting_once(choices: tuple[ModelConfig, SubnetChoice, SubnetChoice]) -> None:
    config, outer, inner = choices
    once = extracted_config(config, inner.of(config))
    middle = extracted_config(config, outer.of(config))
    assert extracted_config(middle, inner.of(middle)) == once
    # and a whole network is its own extract, but for orders that are now written out
    assert extracted_config(once, once.full()) == once


def test_the_branch_is_the_smallest_width_that_holds_the_experts() -> None:
    config = network(widths=(8, 6, 3))
    assert [config.branch(num) for num in (8, 7, 6, 5, 4, 3, 2, 1)] == [0, 0, 1, 1, 1, 2, 2, 2]


def test_layers_that_differ_are_cut_as_they_are() -> None:
    config = network(num_layers=4, widths=(8, 4))
    subnet = check_subnet(config, config.full().replace(experts=(8, 4, 5, 4), top_k=(4, 2, 3, 4)))
    cut = extracted_config(config, subnet)
    assert (cut.experts_by_layer, cut.top_k_by_layer) == ((8, 4, 5, 4), (4, 2, 3, 4))
    assert cut.full() == subnet


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"top_k": 9}, "top_k 9 is larger than num_experts 8"),
        ({"head_dim": 3}, "must be an even number"),
        ({"dense_layers": (8,)}, "outside 0..7"),
        ({"dense_layers": (1,)}, "dense_intermediate_size must be set"),
        ({"dense_layers": (1, 0), "dense_intermediate_size": 8}, "sorted and unique"),
        ({"widths": (8, 8)}, "must fall strictly"),
        ({"widths": (4, 2)}, "must start with num_experts 8"),
        ({"widths": (8, 4), "num_branches": 1}, "less than the 2 widths"),
        ({"experts_per_layer": (8,)}, "one entry for each of the 8 MoE layers"),
        ({"experts_per_layer": (8,) * 7 + (3,)}, "top_k 4 of 3 experts"),
        ({"expert_order": ((0,) * 8,) * 8}, "not a permutation of 8 experts"),
        ({"layer_order": (0,) * 8}, "not a permutation of the layers"),
        ({"sliding_layers": (1,)}, "sliding_window must be set"),
        ({"qk_norm": True, "qk_norm_wide": True}, "one or the other"),
        ({"rope_scaling": {"kind": "yarn", "factor": 2.0}}, "original_positions must be set for yarn"),
        ({"latent": {"kv_rank": 4, "rope_dim": 2, "value_dim": 4}}, "num_kv_heads 2 must be num_heads 4"),
        (
            {"rope_theta": 1.0, "rope_scaling": {"kind": "yarn", "factor": 2.0, "original_positions": 9}},
            "must exceed 1 for yarn",
        ),
        (
            {"num_kv_heads": 4, "latent": {"kv_rank": 4, "rope_dim": 3, "value_dim": 4}},
            "latent.rope_dim must be an even number",
        ),
        ({"expert_groups": 3}, "experts=8 does not leave its 3 groups"),
        ({"expert_groups": 5}, "keep a multiple of 5, 10 or more"),
        ({"expert_groups": 2, "top_groups": 3}, "top_groups 3 exceeds expert_groups 2"),
        ({"top_groups": 2}, "top_groups 2 exceeds expert_groups 1"),
        ({"expert_groups": 8}, "does not leave its 8 groups"),
        ({"expert_groups": 4, "top_groups": 1}, "top_k=4 is more than the 2 experts that a token's 1 groups hold"),
        ({"expert_groups": 4, "top_groups": 2, "widths": (8, 4)}, "widths .*experts=4 does not leave its 4 groups"),
        (
            {"expert_groups": 2, "expert_order": ((0, 4, 1, 2, 5, 6, 3, 7),) * 8},
            r"expert_order: \(1, 2\) are not one of each of the 2 expert_groups",
        ),
    ],
)
def test_impossible_shapes_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        network(**changes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cornr", r"--subnet cornr: unknown preset \(did you mean 'corner'\?\); known: full, corner"),
        ("layer=3", r"unknown axis 'layer' \(did you mean 'layers'\?\)"),
        ("experts=0", "experts needs a whole number above 0"),
        ("experts=nine", "experts needs a whole number above 0"),
        ("experts=9", r"subnet: experts=9 lies outside 1\.\.8"),
        ("layers=9", r"subnet: layers=9 lies outside 1\.\.8"),
        ("experts=2", r"subnet: top_k=4 lies outside 1\.\.2"),
    ],
)
def test_a_subnet_outside_the_network_is_one_line(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        parse_subnet(text, network(), {"corner": SubnetChoice(layers=4)})
    assert "\n" not in str(caught.value)


def test_a_dense_network_has_no_experts_to_choose() -> None:
    config = network(dense_layers=tuple(range(8)), dense_intermediate_size=8)
    assert parse_subnet("layers=5", config, {}).experts == ()
    for text in ("experts=8", "layers=5,top_k=1"):
        with pytest.raises(UserError, match=f"--subnet {text}: the network has no experts"):
            parse_subnet(text, config, {})


def test_a_subnet_in_words() -> None:
    config = network()
    presets = {"corner": SubnetChoice(layers=5, experts=4, top_k=2)}
    assert parse_subnet("full", config, presets) == config.full()
    assert parse_subnet("corner", config, presets) == parse_subnet("layers=5, experts=4,top_k=2", config, {})
    assert parse_subnet("corner", config, presets).label() == "5 layers, 4 experts, top-2"
