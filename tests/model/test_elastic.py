"""A Subnet inside the maximum network is the network that is cut out of it; balance state moves as it should."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.base.errors import UserError
from stretto.model.elastic import extract, load_balance, slice_state, update_balance
from stretto.model.spec import ClampedSwiGlu, LatentAttention, ModelConfig, RopeScaling, Subnet, extracted_config
from stretto.model.transformer import Context, MoeLayer, Transformer, build

VOCAB, ROWS, LENGTH = 41, 3, 16
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 24, "num_layers": 6, "num_heads": 4, "num_kv_heads": 2, "head_dim": 6,
    "num_experts": 8, "top_k": 4, "expert_intermediate_size": 12, "widths": (8, 5, 3),
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "sigmoid": {"num_shared_experts": 1, "routed_scaling": 1.7, "qk_norm": True},
    "softmax": {"router": "softmax", "dense_layers": (0, 3), "dense_intermediate_size": 20, "tie_embeddings": True},
    "raw gates": {"normalize_gates": False, "attention_bias": True, "num_shared_experts": 2},
    "softmax without a bias": {"router": "softmax", "selection_bias": False, "num_shared_experts": 1},
    "gpt-oss": {
        "router": "softmax",
        "selection_bias": False,
        "router_bias": True,
        "expert_bias": True,
        "attention_bias": True,
        "attention_out_bias": True,
        "attention_sinks": True,
        "sliding_window": 5,
        "sliding_layers": (0, 2, 3),
        "clamped_swiglu": ClampedSwiGlu(limit=0.6),
        "mlp_bias": True,
        "num_shared_experts": 1,
        "rope_scaling": RopeScaling(kind="yarn", factor=4.0, original_positions=8),
    },
    "olmoe": {
        "router": "softmax",
        "selection_bias": False,
        "qk_norm_wide": True,
        "qkv_clip": 0.7,
        "num_heads": 3,
        "num_kv_heads": 3,
    },
    "latent": {
        "num_kv_heads": 4,
        "attention_bias": True,
        "attention_scale": 0.5,
        "num_shared_experts": 1,
        "latent": LatentAttention(query_rank=10, kv_rank=8, rope_dim=2, value_dim=5),
    },
    "latent, queries at once": {"num_kv_heads": 4, "latent": LatentAttention(kv_rank=8, rope_dim=4, value_dim=9)},
}


def network(variant: str = "sigmoid", seed: int = 0, **changes: Any) -> Transformer:
    """Every tensor matters: biases are not zero, norms are not one, expert and layer orders are not the default."""
    generator = torch.Generator().manual_seed(seed)
    config = ModelConfig(**{**SHAPE, **VARIANTS[variant], **changes})
    orders = tuple(tuple(torch.randperm(num, generator=generator).tolist()) for num in config.experts_by_layer)
    model = build(config.replace(expert_order=orders), seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith(("norm.weight", "_norm")):
                tensor.add_(0.2 * noise)
            elif name.endswith("bias_WE"):
                tensor.add_(0.1 * noise)
            elif name.endswith(("bias", "sinks")):
                tensor.add_(0.2 * noise)
            else:
                tensor.mul_(3.0)
    return model


def ids(seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))


@st.composite
def subnets(draw: st.DrawFn, config: ModelConfig) -> Subnet:
    """Any legal Subnet: any layers, and experts and top-k that differ from layer to layer."""
    layers = tuple(sorted(draw(st.sets(st.integers(0, config.num_layers - 1), min_size=1))))
    kept = [row for row, layer in enumerate(config.moe_layers) if layer in layers]
    uneven = draw(st.booleans())
    shared = draw(st.integers(1, config.num_experts))
    experts = tuple(draw(st.integers(1, config.num_experts)) if uneven else shared for _ in kept)
    return Subnet(
        layers=layers, experts=experts, top_k=tuple(draw(st.integers(1, min(num, config.top_k))) for num in experts)
    )


def tolerance(logits: torch.Tensor, config: ModelConfig) -> float:
    """Bound on the difference of two fp32 evaluations that add the same terms in other groups.

    Each of the ~10 products a layer is off by at most eps·√(reduction length) relative to its output on average
    (rounding errors of random sign); layers add up, and pre-norm keeps them from growing. Ten standard deviations.
    """
    eps, longest = torch.finfo(torch.float32).eps, 2 * config.hidden_size
    return 10 * eps * (10 * config.num_layers * longest) ** 0.5 * max(1.0, float(logits.abs().max()))


@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=7)
@given(data=st.data())
def test_masked_logits_are_extracted_logits(variant: str, data: st.DataObject) -> None:
    model = network(variant)
    subnet = data.draw(subnets(model.config))
    documents_BT = torch.arange(LENGTH).expand(ROWS, LENGTH) // data.draw(st.integers(3, LENGTH))
    ctx = Context(torch.arange(LENGTH).expand(ROWS, LENGTH), documents_BT)
    with torch.no_grad():
        masked = model.logits(ids(), subnet, ctx)
        cut = extract(model, subnet)
        alone = cut.logits(ids(), ctx=ctx)
    assert cut.config == extracted_config(model.config, subnet)
    assert (masked - alone).abs().max() <= tolerance(masked, model.config)
    assert masked.std() > 0.1, "logits too flat to compare"


@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=4)
@given(data=st.data())
def test_extracting_twice_is_extracting_once(variant: str, data: st.DataObject) -> None:
    """Of networks whose layers are even; a cut of uneven layers keeps the balance state of its own widths alone."""
    config = network(variant).config
    depth, experts = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 8))
    top_k = data.draw(st.integers(1, min(4, experts)))
    inner_k = data.draw(st.integers(1, top_k))
    inner_experts = data.draw(st.integers(inner_k, experts))
    inner_depth = data.draw(st.integers(1, depth))
    model = network(variant)
    once = slice_state(config, config.subnet(inner_depth, inner_experts, inner_k), model.state_dict())
    middle = extract(model, config.subnet(depth, experts, top_k))
    twice = slice_state(middle.config, middle.config.subnet(inner_depth, inner_experts, inner_k), middle.state_dict())
    assert once.keys() == twice.keys()
    for name, tensor in once.items():
        assert torch.equal(tensor, twice[name]), name


GROUPED: dict[str, Any] = {
    "num_experts": 16, "expert_groups": 4, "top_groups": 2, "top_k": 4, "widths": (16, 8), "num_layers": 3,
}  # fmt: skip


def grouped_network(router: str) -> Transformer:
    """Expert orders that take from the groups in turn, at random: every prefix of a multiple of four is balanced."""
    generator = torch.Generator().manual_seed(0)
    orders = []
    for _ in range(3):
        places = torch.stack([torch.randperm(4, generator=generator) + 4 * group for group in range(4)], 1)
        orders.append(tuple(place for turn in places.tolist() for place in turn))
    model = build(ModelConfig(**{**SHAPE, **GROUPED, "router": router, "expert_order": tuple(orders)}), 0)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("bias_WE"):
                tensor.normal_(0.0, 0.1, generator=generator)
            else:
                tensor.mul_(3.0)
    return model


@pytest.mark.parametrize("router", ["sigmoid", "softmax"])
@pytest.mark.parametrize(("experts", "top_k"), [(16, 4), (12, 4), (8, 4), (8, 3)])
def test_groups_cut_evenly_choose_as_they_did(router: str, experts: int, top_k: int) -> None:
    model = grouped_network(router)
    subnet = model.config.subnet(2, experts, top_k)
    with torch.no_grad():
        masked, cut = model.logits(ids(), subnet), extract(model, subnet)
        assert (masked - cut.logits(ids())).abs().max() <= tolerance(masked, model.config)
        free = Transformer(cut.config.replace(expert_groups=1, top_groups=1))
        free.load_state_dict(cut.state_dict())
        assert (free.logits(ids()) - masked).abs().max() > 1e-2, "groups made no difference"


def test_a_cut_is_a_copy_and_refuses_what_is_not_inside() -> None:
    model = network()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    cut = extract(model, model.config.subnet(4, 5, 2))
    with torch.no_grad():
        for tensor in cut.state_dict().values():
            tensor.zero_()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(UserError, match="experts=9"):
        extract(model, model.config.full().replace(experts=(9,) * 6))


def counts_of(model: Transformer, counts_WE: list[list[int]]) -> dict[int, torch.Tensor]:
    return {row: torch.tensor(counts_WE) for row in range(model.config.num_moe_layers)}


def biases(model: Transformer) -> list[torch.Tensor]:
    return [block.mlp.bias_WE.clone() for block in model.blocks if isinstance(block.mlp, MoeLayer)]


def test_each_width_steers_its_own_experts_by_its_own_tokens() -> None:
    model = network(num_layers=2, num_experts=4, top_k=1, widths=(4, 2))
    before = biases(model)
    # the narrow branch has counts at masked experts, which must not matter; three of four full experts are below mean
    update_balance(model, counts_of(model, [[1, 2, 3, 10], [7, 7, 7, 7]]), rate=0.01)
    for layer, (old, new) in enumerate(zip(before, biases(model), strict=True)):
        moved = ((new - old) / 0.01).round().int()
        assert moved[0].tolist() == [1, 1, 1, -1]
        assert moved[1].tolist() == [0, 0, 0, 0], "balanced over its own two experts"
        kept = list(model.config.expert_orders[layer][:2])
        counts_WE = torch.zeros(2, 4, dtype=torch.int64)
        counts_WE[1, kept[0]] = 5
        update_balance(model, {layer: counts_WE}, rate=0.01)
        again = ((biases(model)[layer] - new) / 0.01).round().int()
        assert again[0].tolist() == [0, 0, 0, 0], "a branch without tokens is left alone"
        expected = [0] * 4
        expected[kept[0]], expected[kept[1]] = -1, 1
        assert again[1].tolist() == expected


def test_the_complement_steers_what_the_prefix_leaves_out() -> None:
    model = network(num_layers=1, num_experts=4, top_k=1, widths=(4, 2), num_branches=3)
    outer = list(model.config.expert_orders[0][2:])
    counts_WE = torch.zeros(3, 4, dtype=torch.int64)
    counts_WE[2, outer[0]], counts_WE[2, outer[1]] = 6, 4
    (before,) = biases(model)
    update_balance(model, {0: counts_WE}, rate=0.01)
    moved = ((biases(model)[0] - before) / 0.01).round().int()
    expected = [0] * 4
    expected[outer[0]], expected[outer[1]] = -1, 1
    assert moved.tolist() == [[0] * 4, [0] * 4, expected]


def test_no_bias_and_no_rate_mean_no_move() -> None:
    for variant, rate in (("softmax without a bias", 0.01), ("sigmoid", 0.0)):
        model = network(variant, num_layers=1)
        before = biases(model)
        update_balance(model, counts_of(model, [[9, 0, 0, 0, 0, 0, 0, 0]] * 3), rate)
        assert torch.equal(biases(model)[0], before[0])


def test_balance_is_the_largest_load_over_the_mean() -> None:
    assert load_balance(torch.tensor([2, 2, 2])) == pytest.approx(1.0)
    assert load_balance(torch.tensor([6, 0, 0])) == pytest.approx(3.0)
    assert load_balance(torch.zeros(3, dtype=torch.int64)) == 0.0  # no token, no overload


def test_layers_with_fewer_experts_steer_all_of_theirs() -> None:
    model = network(num_layers=2, experts_per_layer=(8, 4), widths=(8,), num_branches=1)
    before = biases(model)
    update_balance(model, {1: torch.tensor([[0, 0, 0, 8]])}, rate=0.01)
    after = biases(model)
    assert torch.equal(after[0], before[0])
    assert ((after[1] - before[1]) / 0.01).round().int().tolist() == [[1, 1, 1, -1]]


def test_overload_falls_in_a_short_run() -> None:
    """Fixed weights and inputs, biases alone move: the most loaded expert comes down to near the mean."""
    model = network(num_layers=1, widths=(8,), num_branches=1)
    with torch.no_grad():
        model.blocks[0].mlp.bias_WE.zero_()
    batch = torch.randint(0, VOCAB, (8, 64), generator=torch.Generator().manual_seed(1))

    @torch.no_grad()
    def loads() -> dict[int, torch.Tensor]:
        return model(batch, model.config.full(), Context.plain(batch)).counts

    start = load_balance(loads()[0][0])
    for _ in range(200):
        update_balance(model, loads(), rate=0.005)
    assert start > 1.4 and load_balance(loads()[0][0]) < 1.1
