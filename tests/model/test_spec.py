"""Shapes and nested orders: properties that hold for every size, and one line for every impossible one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch.utils.flop_counter import FlopCounterMode

from stretto.base.errors import UserError
from stretto.learning.distillation import DistillObjective, Lesson
from stretto.learning.objective import PolicyObjective
from stretto.learning.recipe import DistillConfig, LossConfig
from stretto.model.elastic import extract
from stretto.model.parallel import join
from stretto.model.spec import (
    LatentAttention,
    ModelConfig,
    Subnet,
    SubnetChoice,
    check_subnet,
    count,
    extracted_config,
    interleaved_order,
    kept_experts,
    kept_order,
    parse_subnet,
    spaced_layer_order,
)
from stretto.model.transformer import Context, RowWidths, Transformer, build
from stretto.ops.logprob import IGNORED, Teacher, head_loss
from stretto.ops.native import training
from stretto.train.step import Distil, MicroBatch, Objective, optimisation_step

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


ROWS, LENGTH = 2, 12
COUNT_SHAPE: dict[str, Any] = {
    "vocab_size": 37, "hidden_size": 24, "num_layers": 5, "num_heads": 4, "num_kv_heads": 2, "head_dim": 6,
    "num_experts": 8, "top_k": 3, "expert_intermediate_size": 8, "widths": (8, 4),
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything": {
        "num_shared_experts": 2, "dense_layers": (0, 3), "dense_intermediate_size": 20, "qk_norm": True,
        "attention_bias": True,
    },
    "tied, softmax": {"tie_embeddings": True, "router": "softmax", "num_shared_experts": 1},
    "all dense": {"dense_layers": (0, 1, 2, 3, 4), "dense_intermediate_size": 20},
    "biases": {
        "dense_layers": (0,), "dense_intermediate_size": 20, "num_shared_experts": 1, "attention_bias": True,
        "attention_out_bias": True, "mlp_bias": True, "expert_bias": True, "router_bias": True, "qk_norm_wide": True,
        "sliding_window": 5, "sliding_layers": (1, 2),
    },
    "latent": {
        "num_kv_heads": 4, "attention_bias": True, "attention_out_bias": True,
        "latent": LatentAttention(query_rank=10, kv_rank=8, rope_dim=2, value_dim=5),
    },
    "latent, wide values": {"num_kv_heads": 4, "latent": LatentAttention(kv_rank=8, rope_dim=4, value_dim=9)},
}  # fmt: skip


@pytest.fixture(autouse=True)
def operators_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch counts the FLOPs of its own operators only, not those of the compiled kernels."""
    monkeypatch.setattr(training, "library", lambda: None)


@dataclass
class Executed:
    """FLOPs of matrix products with weights, and of attention's forward passes."""

    linear: int = 0
    scores: int = 0


@contextmanager
def counting() -> Iterator[Executed]:
    """Count what runs inside the block.

    Attention is counted by its forward passes alone: the fused backward kernels compute the scores a second time,
    which torch counts (2.5 forwards) and a receipt does not (2 forwards, the work of the plain derivative).
    """

    def grouped(a: Any, b: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        return 2 * a[0] * a[1] * b[-1]  # rows x inner x columns, whichever of the three the groups divide

    def in_place(into: Any, a: Any, b: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        return 2 * a[0] * a[1] * b[1]

    def attention(q: Any, k: Any, v: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        rows, heads, queries, width = q
        return 2 * rows * heads * queries * k[-2] * (width + v[-1])

    def nothing(*args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        return 0

    aten = torch.ops.aten
    forward = aten._scaled_dot_product_flash_attention_for_cpu
    formulas = {
        aten._grouped_mm: grouped,
        aten.addmm_: in_place,
        forward: attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: nothing,
    }
    executed = Executed()
    with FlopCounterMode(display=False, custom_mapping=formulas) as counter:
        yield executed
    executed.scores = counter.get_flop_counts()["Global"].get(forward, 0)
    executed.linear = counter.get_total_flops() - executed.scores


def count_network(name: str) -> Transformer:
    return build(ModelConfig(**{**COUNT_SHAPE, **SHAPES[name]}), seed=0)


def small(config: ModelConfig) -> Subnet:
    return config.subnet(depth=4, experts=4, top_k=2)


def ids(seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 37, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("part", ["full", "cut"])
def test_parameters_are_those_of_the_model(name: str, part: str) -> None:
    model = count_network(name)
    subnet = model.config.full() if part == "full" else small(model.config)
    own = model if part == "full" else extract(model, subnet)
    counts = count(model.config, subnet)
    assert counts.total_params == sum(parameter.numel() for parameter in own.parameters())
    # what one token does not use: the experts beyond its top-k
    config = own.config
    unused = sum(experts - k for experts, k in zip(config.experts_by_layer, config.top_k_by_layer, strict=True))
    one_expert = 3 * config.hidden_size * config.expert_intermediate_size
    one_expert += 2 * config.expert_intermediate_size + config.hidden_size if config.expert_bias else 0
    assert counts.total_params - counts.active_params == unused * one_expert
    assert counts == count(config, config.full()), "a Subnet counts as the count_network it becomes"


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("part", ["full", "cut"])
@pytest.mark.parametrize("documents", [False, True])
def test_rows_of_one_document_execute_what_is_counted(name: str, part: str, documents: bool) -> None:
    """With ``documents`` the one document of each row is numbered, and attention may be masked."""
    model = count_network(name)
    own = model if part == "full" else extract(model, small(model.config))
    counts, tokens = count(own.config, own.config.full()), ROWS * LENGTH
    ctx = Context(Context.plain(ids()).positions_BT, torch.zeros_like(ids()) if documents else None)
    with counting() as forward, torch.no_grad():
        own.logits(ids(), ctx=ctx)
    assert forward.linear == tokens * counts.linear_flops
    assert forward.scores == tokens * LENGTH * counts.score_flops, "masked or causal, every score counts"
    assert forward.linear + forward.scores == counts.forward_flops(tokens, LENGTH)
    with counting() as both:
        hidden_BTD = own(ids(), own.config.full(), ctx).hidden_BTD
        loss, _ = head_loss(hidden_BTD.flatten(0, 1), own.head_VD, ids(1).flatten())
        loss.backward()
    # every product has two gradients; the embedding is trained, so the first layer's input gradient is wanted too
    assert both.linear == 3 * forward.linear
    assert both.scores == forward.scores


def test_the_cache_holds_keys_and_values_of_the_kept_layers() -> None:
    config = count_network("everything").config
    assert count(config, config.full()).kv_elements == 5 * 2 * (2 * 6)
    assert count(config, small(config)).kv_elements == 4 * 2 * (2 * 6)
    latent = count_network("latent").config
    assert count(latent, latent.full()).kv_elements == 5 * (8 + 2), "the short vector, and the rotated key of all heads"


def test_a_sink_is_a_key_and_a_channel_more() -> None:
    """Which no count states: the kernels get both as padding."""
    model = build(ModelConfig(**{**COUNT_SHAPE, "attention_sinks": True}), seed=0)
    config = model.config
    counts = count(config, config.full())
    assert counts.total_params == sum(parameter.numel() for parameter in model.parameters())
    with counting() as forward, torch.no_grad():
        model.logits(ids())
    assert forward.linear == ROWS * LENGTH * counts.linear_flops
    assert forward.scores == ROWS * LENGTH * (LENGTH + 1) * counts.score_flops // 6 * 8


@pytest.mark.parametrize("name", SHAPES)
def test_a_step_on_rows_of_one_document_states_what_it_executed(name: str) -> None:
    """Full and narrowed micro-batches, an anchor with its teacher, and another count_network as teacher."""
    model, parent = count_network(name), count_network("plain")
    config, ranks = model.config, join("cpu")
    allowed_BE = torch.ones(ROWS, 8, dtype=torch.bool)
    allowed_BE[0, 4:] = False
    widths = RowWidths(torch.tensor([1, 0]), allowed_BE, torch.ones(ROWS, dtype=torch.bool))
    plain = Context.plain(ids())
    narrow = Context(plain.positions_BT, None, widths)

    def micro(kind: str, subnet: Subnet, ctx: Context = plain, distil: Distil | None = None) -> MicroBatch:
        return MicroBatch(kind, ids(), ids(1), ctx, subnet, ROWS * LENGTH, distil)

    batches = [
        micro("full", config.full()),
        micro("full", config.full(), narrow),
        micro("anchor", small(config), distil=Distil(model, config.full(), 0.5)),
        micro("anchor", small(config), distil=Distil(model, config.full(), 1.0)),  # no teacher runs
        micro("healed", config.full(), distil=Distil(parent, small(parent.config), 0.25)),
    ]
    adamw = torch.optim.AdamW(model.parameters())
    with counting() as executed:
        result = optimisation_step(
            model, [adamw], batches, ranks, clip_norm=1.0, balance_rate=1e-3, dtype=torch.float32
        )
    tokens = ROWS * LENGTH
    score = [count(config, subnet).score_flops for subnet in (config.full(), small(config))]
    students = tokens * LENGTH * (3 * score[0] + 2 * score[1])
    teachers = tokens * LENGTH * (score[0] + count(parent.config, small(parent.config)).score_flops)
    assert executed.scores == students + teachers
    assert result.flops == executed.linear + 3 * students + teachers
    with counting() as lessons, torch.no_grad():
        model.logits(ids())
        parent.logits(ids(), small(parent.config))
    assert teachers == lessons.scores


@pytest.mark.parametrize("name", SHAPES)
def test_a_step_counts_no_gradient_of_a_frozen_matrix(name: str) -> None:
    model = count_network(name)
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.dim() == 1 or parameter_name.endswith(("mlp.gate", "bias")))
    config, tokens = model.config, ROWS * LENGTH
    subnets = [config.full(), small(config)]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    batches = [MicroBatch("any", ids(), ids(1), Context.plain(ids()), subnet, tokens) for subnet in subnets]
    with counting() as executed:
        result = optimisation_step(
            model,
            [torch.optim.AdamW(trained)],
            batches,
            join("cpu"),
            clip_norm=1.0,
            balance_rate=0.0,
            dtype=torch.float32,
        )
    scores = tokens * LENGTH * sum(count(config, subnet).score_flops for subnet in subnets)
    assert result.flops == executed.linear + 3 * scores


def test_a_step_counts_the_head_at_the_tokens_it_is_applied_to() -> None:
    """Where few tokens have a target: those alone, but all of them if a teacher's distribution is given for each."""
    model = count_network("plain")
    config, targets = model.config, ids(1)
    targets[:, 2:] = IGNORED
    num = int((targets != IGNORED).sum())
    batch = MicroBatch("full", ids(), targets, Context.plain(ids()), config.full(), num)
    teacher = Distil(model, config.full(), 0.5)
    flops = []
    for each in (batch, replace(batch, distil=teacher), replace(batch, distil=replace(teacher, learns=True))):
        adamw = torch.optim.AdamW(model.parameters())
        with counting() as executed:
            result = optimisation_step(
                model, [adamw], [each], join("cpu"), clip_norm=1.0, balance_rate=0.0, dtype=torch.float32
            )
        flops.append((result.flops, executed))
    tokens, counts = ROWS * LENGTH, count(config, config.full())
    scores = tokens * LENGTH * counts.score_flops
    assert [stated - done.linear for stated, done in flops[:2]] == [3 * scores, 4 * scores]
    # a teacher that learns computes its logits a second time, for the student, which is not counted
    stated, done = flops[2]
    assert stated - done.linear == 6 * scores - tokens * counts.head_flops


@pytest.mark.parametrize("form", [None, "full", "sampled", "full with rewards"])
def test_a_policy_loss_counts_the_head_at_its_targets(form: str | None) -> None:
    """RL computes the logits of the targets once more in the backward pass; a distillation loss of whole distributions does not."""
    model = count_network("plain")
    config, targets = model.config, ids(1)
    targets[:, 3:] = IGNORED
    places_M = (targets.flatten() != IGNORED).nonzero()[:, 0]
    num, zeros_BT = len(places_M), torch.zeros(ids().shape)
    streams = {"weights_BT": zeros_BT + 1 / num, "behaviour_BT": zeros_BT - 3, "advantages_BT": zeros_BT + 1}
    objective: Objective = PolicyObjective(LossConfig(), 1.0, streams | {"samples_BT": zeros_BT.long()}, zeros_BT - 3)
    head_flops, of_teacher = count(config, config.full()).head_flops, 0
    if form is not None:
        scores: torch.Tensor | Teacher = zeros_BT.flatten()[places_M]
        if form != "sampled":
            scores, of_teacher = (
                Teacher(torch.zeros(num, config.hidden_size), torch.zeros(config.vocab_size, config.hidden_size)),
                num,
            )
        lessons = (Lesson(places_M, scores),)
        distil = DistillConfig(form=form.split()[0])
        objective = DistillObjective(distil, lessons, objective, has_policy=form == "full with rewards")
    batch = MicroBatch("policy", ids(), targets, Context.plain(ids()), config.full(), num, objective=objective)
    adamw = torch.optim.AdamW(model.parameters())
    with counting() as executed:
        result = optimisation_step(
            model, [adamw], [batch], join("cpu"), clip_norm=1.0, balance_rate=0.0, dtype=torch.float32
        )
    scores_flops = ROWS * LENGTH * LENGTH * count(config, config.full()).score_flops
    assert result.flops == executed.linear - of_teacher * head_flops + 3 * scores_flops


@pytest.mark.parametrize("name", SHAPES)
def test_recomputation_is_stated_as_a_whole_forward_pass_without_the_head(name: str) -> None:
    """An upper bound: what nothing reads, a block's last product, is not recomputed."""
    model = count_network(name)
    config, tokens = model.config, ROWS * LENGTH
    ctx = Context(Context.plain(ids()).positions_BT, None, None, recompute=True)
    batch = MicroBatch("full", ids(), ids(1), ctx, config.full(), tokens)
    adamw = torch.optim.AdamW(model.parameters())
    with counting() as executed:
        result = optimisation_step(
            model, [adamw], [batch], join("cpu"), clip_norm=1.0, balance_rate=0.0, dtype=torch.float32
        )
    counts = count(config, config.full())
    scores = tokens * LENGTH * counts.score_flops
    assert executed.scores == 2 * scores
    last = max(config.dense_intermediate_size, config.num_shared_experts * config.expert_intermediate_size)
    spared = result.flops - (executed.linear + 4 * scores)
    assert 0 <= spared <= 2 * tokens * config.num_layers * config.hidden_size * last
