"""The decoder: documents are isolated, recomputation changes nothing, widths hold through all layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stretto.model.spec import ModelConfig
from stretto.model.transformer import (
    Context,
    MoeLayer,
    Recorder,
    Replay,
    Routing,
    RowWidths,
    Transformer,
    build,
    initial_state,
)
from stretto.ops.logprob import IGNORED, head_loss
from tests.networks import sharpened
from tests.ops.references import experts_reference

VOCAB, ROWS, LENGTH = 41, 2, 24
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 24, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "head_dim": 6,
    "num_experts": 8, "top_k": 3, "expert_intermediate_size": 16, "num_shared_experts": 1, "qk_norm": True,
    "dense_layers": (1,), "dense_intermediate_size": 20, "widths": (8, 4),
}  # fmt: skip


def network(seed: int = 0, **changes: Any) -> Transformer:
    model = sharpened(ModelConfig(**{**SHAPE, **changes}), seed)
    with torch.no_grad():
        for block in model.blocks:
            if isinstance(block.mlp, MoeLayer):
                block.mlp.bias_WE.normal_(0.0, 0.05, generator=torch.Generator().manual_seed(seed))
    return model


def ids(seed: int = 0, rows: int = ROWS) -> torch.Tensor:
    return torch.randint(0, VOCAB, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))


def packed(lengths: list[int]) -> Context:
    """Rows of documents of these lengths, then padding, as the loader numbers them."""
    documents, positions = torch.full((LENGTH,), -1), torch.zeros(LENGTH, dtype=torch.int64)
    start = 0
    for number, length in enumerate(lengths):
        documents[start : start + length] = number
        positions[start : start + length] = torch.arange(length)
        start += length
    return Context(positions.expand(ROWS, LENGTH), documents.expand(ROWS, LENGTH))


def narrow_row() -> RowWidths:
    """Row 0 full, row 1 on the first four experts of the order."""
    allowed_BE = torch.ones(ROWS, 8, dtype=torch.bool)
    allowed_BE[1, 4:] = False
    return RowWidths(torch.tensor([0, 1]), allowed_BE, torch.ones(ROWS, dtype=torch.bool))


@settings(max_examples=20)
@given(first=st.integers(1, LENGTH - 2), second=st.integers(1, LENGTH - 2), victim=st.integers(0, 1))
def test_tokens_of_one_document_never_reach_another(first: int, second: int, victim: int) -> None:
    """Also not through the padding. Experts group the tokens of all documents, so the last bits may differ."""
    model, lengths = network(), [first, min(second, LENGTH - 1 - first)]
    ctx = packed(lengths)
    assert ctx.documents_BT is not None
    mine = ctx.documents_BT[0] == victim
    changed = torch.where(mine, ids(), ids(1))
    with torch.no_grad():
        before, after = model.logits(ids(), ctx=ctx)[:, mine], model.logits(changed, ctx=ctx)[:, mine]
    # kernels for few and for many rows add in another order: rounding of ~40 products, each relative to its output
    assert (before - after).abs().max() <= 40 * torch.finfo(torch.float32).eps * float(before.abs().max()) * 4
    leak = torch.where(mine, ids(1), ids())
    with torch.no_grad():
        assert (model.logits(leak, ctx=ctx)[:, mine] - before).abs().max() > 1e-3 or torch.equal(leak, ids())


def test_a_packed_document_is_the_document_alone() -> None:
    model, lengths = network(), [10, 9]
    with torch.no_grad():
        together = model.logits(ids(), ctx=packed(lengths))
        first, second = model.logits(ids()[:, :10]), model.logits(ids()[:, 10:19])
    expected = torch.cat((first, second), 1)
    # positions restart, so even the rotations are the same; only the order of summation may differ
    assert (together[:, :19] - expected).abs().max() <= 160 * torch.finfo(torch.float32).eps * float(
        expected.abs().max()
    )


def test_the_future_never_reaches_the_past() -> None:
    model, changed = network(), ids()
    changed = changed.clone()
    changed[:, 12:] = ids(1)[:, 12:]
    with torch.no_grad():
        before, after = model.logits(ids()), model.logits(changed)
    assert (before[:, :12] - after[:, :12]).abs().max() <= 160 * torch.finfo(torch.float32).eps * float(
        before.abs().max()
    )
    assert (before[:, 12:] - after[:, 12:]).abs().max() > 1e-2


def gradients(model: Transformer, ctx: Context, dtype: torch.dtype = torch.float32) -> tuple[dict[str, Any], Any]:
    model.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        output = model(ids(), model.config.full(), ctx)
        targets = ids(1).flatten().clone()
        targets[::5] = IGNORED
        loss, _ = head_loss(output.hidden_BTD.flatten(0, 1), model.head_VD, targets)
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}, output.counts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recomputation_gives_the_same_gradients_and_counts_once(dtype: torch.dtype) -> None:
    model, ctx = network(), packed([10, 9])
    kept, counts = gradients(model, Context(ctx.positions_BT, ctx.documents_BT, narrow_row()), dtype)
    again, counts_again = gradients(model, Context(ctx.positions_BT, ctx.documents_BT, narrow_row(), True), dtype)
    for name, grad in kept.items():
        assert torch.equal(grad, again[name]), name
    assert counts.keys() == counts_again.keys()
    for row, counts_WE in counts.items():
        assert torch.equal(counts_WE, counts_again[row])
        assert counts_WE.sum() == ROWS * (10 + 9) * 3, "without padding"


def test_the_width_of_a_row_holds_through_all_layers() -> None:
    """One plan for the whole pass: in every layer, row 1 chose from that layer's own first four experts only."""
    generator = torch.Generator().manual_seed(0)
    orders = tuple(tuple(torch.randperm(8, generator=generator).tolist()) for _ in range(3))
    model = network(expert_order=orders)
    plain = Context.plain(ids())
    output = model(ids(), model.config.full(), Context(plain.positions_BT, None, narrow_row()))
    assert sorted(output.counts) == [0, 1, 2]
    for row, counts_WE in output.counts.items():
        used = set(counts_WE[1].nonzero().flatten().tolist())
        assert used <= set(orders[row][:4]), f"MoE layer {row}"
        assert counts_WE.sum(1).tolist() == [LENGTH * 3, LENGTH * 3]


def test_experts_outside_the_width_get_exactly_no_gradient() -> None:
    model = network()
    allowed_BE = (torch.arange(8) < 4).expand(ROWS, 8)
    widths = RowWidths(torch.ones(ROWS, dtype=torch.int64), allowed_BE, torch.ones(ROWS, dtype=torch.bool))
    grads, _ = gradients(model, Context(Context.plain(ids()).positions_BT, None, widths))
    outer = list(model.config.expert_orders[0][4:])
    for name, grad in grads.items():
        assert torch.isfinite(grad).all(), name
        if name.endswith((".mlp.gate", ".mlp.gate_up", ".mlp.down")):
            assert torch.count_nonzero(grad[outer]) == 0, name
            assert torch.count_nonzero(grad) > 0, name


def test_layers_outside_the_subnet_get_no_gradient_and_no_counts() -> None:
    model = network()
    subnet = model.config.subnet(depth=3)
    output = model(ids(), subnet, Context.plain(ids()))
    output.hidden_BTD.sum().backward()
    dropped = ({0, 1, 2, 3} - set(subnet.layers)).pop()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(
        (grad is None) == name.startswith(f"blocks.{dropped}.") or name == "head.weight" for name, grad in grads.items()
    )
    assert model.config.moe_layers.index(dropped) not in output.counts


def test_a_network_starts_with_a_stream_whose_size_does_not_grow_with_depth() -> None:
    config = ModelConfig(
        vocab_size=256, hidden_size=64, num_layers=8, num_heads=4, num_kv_heads=2, head_dim=16, num_experts=8, top_k=2,
        expert_intermediate_size=32,
    )  # fmt: skip
    for name, values in initial_state(config, 0):
        if values.ndim > 1 and values.numel() > 4000:  # 1/√(2·4000): a standard deviation is known to a few per cent
            expected = 0.5 / 8 * (0.25 if name.endswith(("out.weight", "down")) else 1.0)
            assert values.std().item() == pytest.approx(expected, rel=0.05), name


def test_the_same_seed_gives_the_same_network() -> None:
    one, same, other = network(0).state_dict(), network(0).state_dict(), network(1).state_dict()
    assert all(torch.equal(tensor, same[name]) for name, tensor in one.items())
    assert not torch.equal(one["embedding.weight"], other["embedding.weight"])
    fresh = build(ModelConfig(**SHAPE), 0)
    assert all(torch.isfinite(tensor).all() for tensor in fresh.state_dict().values())
    with torch.no_grad():
        loss, nll_N = head_loss(
            fresh(ids(), fresh.config.full(), Context.plain(ids())).hidden_BTD.flatten(0, 1),
            fresh.head_VD,
            ids(1).flatten(),
        )
    # an untrained network knows nothing: ln V, to within the spread of its small logits
    assert float(nll_N.mean()) == pytest.approx(torch.tensor(VOCAB).log().item(), abs=0.5)
    assert float(loss) == pytest.approx(float(nll_N.sum()), rel=1e-6)


B, T, D, E, K = 4, 10, 16, 8, 3
ROUTERS = ["sigmoid", "softmax"]


def layer(router: str = "sigmoid", **changes: Any) -> MoeLayer:
    shape: dict[str, Any] = {
        "vocab_size": 5, "hidden_size": D, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8,
        "num_experts": E, "top_k": K, "expert_intermediate_size": 8, "widths": (8, 4), "num_branches": 3,
        "router": router, "expert_order": ((5, 2, 7, 0, 1, 3, 4, 6),), "num_shared_experts": 1,
    }  # fmt: skip
    moe = MoeLayer(ModelConfig(**{**shape, **changes}), 0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in moe.state_dict().values():
            tensor.normal_(0.0, 0.3, generator=generator)
    return moe


def inputs() -> torch.Tensor:
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(1))


def prefix(*widths: int, counted: tuple[bool, ...] = (True,) * B) -> RowWidths:
    """Rows narrowed to the first so many experts of the order; 8 and 4 have branches 0 and 1."""
    branch_B = torch.tensor([0 if width == E else 1 for width in widths])
    allowed_BE = torch.arange(E)[None, :] < torch.tensor(widths)[:, None]
    return RowWidths(branch_B, allowed_BE, torch.tensor(counted))


@pytest.mark.parametrize("router", ROUTERS)
def test_the_output_is_the_routed_experts_and_the_shared_one(router: str) -> None:
    moe, x_BTD = layer(router), inputs()
    y_BTD, *_ = moe(x_BTD, E, K, None)
    routes, _ = moe.route(x_BTD, E, K, None)
    routed_ND = experts_reference(x_BTD.flatten(0, 1), routes.chosen_NK, routes.gates_NK, moe.gate_up, moe.down)
    assert moe.shared is not None
    expected_BTD = routed_ND.view(B, T, D) + moe.shared(x_BTD)
    assert torch.allclose(y_BTD, expected_BTD, rtol=0, atol=32 * 1.2e-7 * float(expected_BTD.detach().abs().max()))


@pytest.mark.parametrize("router", ROUTERS)
def test_a_narrowed_row_is_the_narrow_network_and_leaves_the_others_alone(router: str) -> None:
    moe, x_BTD = layer(router), inputs()
    mixed, _ = moe.route(x_BTD, E, K, prefix(8, 4, 8, 4))
    full, _ = moe.route(x_BTD, E, K, None)
    narrow, _ = moe.route(x_BTD, 4, K, None)
    for row, want in enumerate((full, narrow, full, narrow)):
        tokens = slice(row * T, (row + 1) * T)
        assert torch.equal(mixed.chosen_NK[tokens], want.chosen_NK[tokens])
        assert torch.equal(mixed.gates_NK[tokens], want.gates_NK[tokens])
    assert set(narrow.chosen_NK.flatten().tolist()) <= {5, 2, 7, 0}
    # the same tokens choose differently with all experts, or the test shows nothing
    assert not torch.equal(narrow.chosen_NK, full.chosen_NK)


@pytest.mark.parametrize("router", ROUTERS)
def test_a_large_bias_never_selects_a_masked_expert_and_never_weighs(router: str) -> None:
    moe, x_BTD = layer(router), inputs()
    with torch.no_grad():
        moe.bias_WE[1] = torch.tensor([-50.0, 50.0, -50.0, 50.0, 50.0, -50.0, 50.0, -50.0])  # high where masked
    routes, _ = moe.route(x_BTD, E, K, prefix(4, 4, 4, 4))
    assert set(routes.chosen_NK.flatten().tolist()) <= {5, 2, 7, 0}
    assert torch.allclose(routes.gates_NK.sum(-1), torch.ones(B * T))


@pytest.mark.parametrize("router", ROUTERS)
def test_experts_outside_get_no_gradient_and_the_router_a_finite_one(router: str) -> None:
    moe, x_BTD = layer(router), inputs().requires_grad_()
    y_BTD, *_ = moe(x_BTD, E, K, prefix(4, 4, 4, 4))
    y_BTD.square().sum().backward()
    outer, inner = [1, 3, 4, 6], [5, 2, 7, 0]
    for parameter in (moe.gate_up, moe.down, moe.gate):
        assert parameter.grad is not None and x_BTD.grad is not None
        assert torch.count_nonzero(parameter.grad[outer]) == 0
        assert all(torch.count_nonzero(parameter.grad[expert]) > 0 for expert in inner)
        assert torch.isfinite(parameter.grad).all() and torch.isfinite(x_BTD.grad).all()


@pytest.mark.parametrize("router", ROUTERS)
def test_router_gradients_stay_finite_at_extreme_logits(router: str) -> None:
    """Scores underflow to zero in every chosen expert; a renormalised zero must not become NaN."""
    moe = layer(router)
    x_BTD = (inputs() * 1e4).requires_grad_()
    y_BTD, *_ = moe(x_BTD, E, 1, prefix(8, 4, 8, 4))
    y_BTD.sum().backward()
    assert moe.gate.grad is not None and x_BTD.grad is not None
    assert torch.isfinite(y_BTD).all() and torch.isfinite(moe.gate.grad).all() and torch.isfinite(x_BTD.grad).all()


def test_counts_go_to_the_branch_of_the_row() -> None:
    moe, x_BTD = layer(), inputs()
    widths = prefix(8, 4, 4, 8)
    routes, counts_WE = moe.route(x_BTD, E, K, widths)
    chosen_BTK = routes.chosen_NK.view(B, T, K)
    for branch, rows in ((0, [0, 3]), (1, [1, 2])):
        assert torch.equal(counts_WE[branch], torch.bincount(chosen_BTK[rows].flatten(), minlength=E))
    assert counts_WE[2].sum() == 0
    assert counts_WE.sum() == B * T * K


def test_rows_that_do_not_count_are_not_counted() -> None:
    moe, x_BTD = layer(), inputs()
    _, counts_WE = moe.route(x_BTD, E, K, prefix(8, 4, 8, 4, counted=(True, False, False, True)))
    assert counts_WE.sum(1).tolist() == [T * K, T * K, 0]


@pytest.mark.parametrize("widths", [None, "mixed"])
def test_padding_is_not_counted(widths: str | None) -> None:
    moe, x_BTD = layer(), inputs()
    rows = None if widths is None else prefix(8, 4, 4, 8)
    is_real_BT = torch.ones(B, T, dtype=torch.bool)
    is_real_BT[1:, -2:] = False
    routes, counts_WE = moe.route(x_BTD, E, K, rows, is_real_BT=is_real_BT)
    chosen_BTK = routes.chosen_NK.view(B, T, K)
    for branch, of_branch in ((0, [0, 1, 2, 3]),) if rows is None else ((0, [0, 3]), (1, [1, 2])):
        chosen = torch.cat([chosen_BTK[row][is_real_BT[row]].flatten() for row in of_branch])
        assert torch.equal(counts_WE[branch], torch.bincount(chosen, minlength=E))
    assert counts_WE.sum() == is_real_BT.sum() * K
    whole, counts = moe.route(x_BTD, E, K, rows)
    assert torch.equal(whole.chosen_NK, routes.chosen_NK), "padding is routed as before"
    assert torch.equal(counts, moe.route(x_BTD, E, K, rows, is_real_BT=torch.ones_like(is_real_BT))[1])


def test_a_full_row_beside_a_narrow_one_is_the_row_alone() -> None:
    """Also in a layer with fewer experts than others, whose full width has another branch."""
    model, ids_BT = network(experts_per_layer=(8, 4, 8)), ids()
    for block in model.blocks:
        if isinstance(block.mlp, MoeLayer):
            block.mlp.bias_WE.mul_(20.0)
    allowed_BE = torch.arange(8) < torch.tensor([[8], [4]])
    widths = RowWidths(torch.tensor([0, 1]), allowed_BE, torch.tensor([True, True]))
    alone = model.logits(ids_BT)
    beside = model.logits(ids_BT, ctx=replace(Context.plain(ids_BT), widths=widths))
    assert torch.allclose(alone[0], beside[0], atol=1e-4) and not torch.allclose(alone[1], beside[1], atol=1e-2)


def test_a_narrow_subnet_feeds_the_branch_of_its_width() -> None:
    moe, x_BTD = layer(), inputs()
    _, counts_WE = moe.route(x_BTD, 4, K, None)
    assert counts_WE.sum(1).tolist() == [0, B * T * K, 0]


def test_a_width_without_a_branch_feeds_none() -> None:
    """Its masked experts would count as idle, and the larger width's bias would rise for them."""
    moe, x_BTD = layer(), inputs()
    _, counts_WE = moe.route(x_BTD, 6, K, None)
    assert counts_WE.sum() == 0


def test_the_branch_is_the_same_bias_in_the_masked_and_the_row_form() -> None:
    """One bias a width: a row of width 4 in a full batch reads what a whole batch of width 4 reads."""
    moe, x_BTD = layer(), inputs()
    with torch.no_grad():
        moe.bias_WE[0] = torch.linspace(-0.5, 0.5, E)
        moe.bias_WE[1] = torch.linspace(0.5, -0.5, E)
    rows, _ = moe.route(x_BTD, E, K, prefix(4, 4, 4, 4))
    whole, _ = moe.route(x_BTD, 4, K, None)
    assert torch.equal(rows.chosen_NK, whole.chosen_NK)
    with torch.no_grad():
        moe.bias_WE[1] = moe.bias_WE[0]
    other, _ = moe.route(x_BTD, 4, K, None)
    assert not torch.equal(other.chosen_NK, whole.chosen_NK)


@pytest.mark.parametrize("router", ROUTERS)
def test_the_sum_of_gates_does_not_depend_on_top_k(router: str) -> None:
    moe, x_BTD = layer(router, routed_scaling=2.5), inputs()
    for top_k in (1, 2, 5, 8):
        routes, _ = moe.route(x_BTD, E, top_k, None)
        assert torch.allclose(routes.gates_NK.sum(-1), torch.full((B * T,), 2.5), rtol=1e-6)


SMALL: dict[str, Any] = {
    "vocab_size": 29, "hidden_size": 16, "num_layers": 4, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8,
    "num_experts": 8, "top_k": K, "expert_intermediate_size": 8, "dense_layers": (1,), "dense_intermediate_size": 16,
    "num_shared_experts": 1,
}  # fmt: skip


def small_network(router: str = "sigmoid", **changes: Any) -> Transformer:
    return sharpened(ModelConfig(**{**SMALL, "router": router, **changes}), seed=3, matrices=True)


def small_ids(seed: int = 0) -> Tensor:
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
        model = small_network(router)
        recorder = Recorder(model.config, small_ids(), None if routes_BTLK is None else Replay(routes_BTLK))
        output = model(small_ids(), model.config.full(), context(small_ids(), routing=recorder))
        output.hidden_BTD.square().sum().backward()
        grads.append([output.hidden_BTD.detach(), *(parameter.grad for parameter in model.parameters())])
        routes_BTLK = recorder.own_BTLK
        assert routes_BTLK.shape == (B, T, 3, K) and routes_BTLK.min() >= 0
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True) if a is not None)


@pytest.mark.parametrize("router", ROUTERS)
def test_the_experts_are_the_recorded_ones_and_the_weights_the_routers_own(router: str) -> None:
    model = small_network(router)
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
    model = small_network(router, normalize_gates=False)
    layer, x_BTD = model.blocks[0].mlp, torch.randn(B, T, 16)
    routes, _ = layer.route(x_BTD, 8, 1, None, routing=replay_everywhere(random_routes()[:, :, 0, :1]))
    routes.gates_NK.sum().backward()
    assert layer.gate.grad is not None
    touched_E = layer.gate.grad.abs().sum(1) > 0
    used_E = torch.zeros(8, dtype=torch.bool)
    used_E[routes.chosen_NK] = True
    assert torch.equal(touched_E, torch.ones_like(used_E) if router == "softmax" else used_E)


def test_rows_without_a_record_choose_freely_and_only_they() -> None:
    model, recorded_BTLK = small_network(), random_routes()
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
    layer, x_BTD = small_network().blocks[0].mlp, torch.randn(B, T, 16)
    recorded_BTK = random_routes()[:, :, 0]
    short_BTK = recorded_BTK.clone()
    short_BTK[:, :, 1:] = -1
    y_BTD, *_ = layer(x_BTD, 8, K, None, routing=replay_everywhere(short_BTK))
    expected_BTD, *_ = layer(x_BTD, 8, 1, None, routing=replay_everywhere(recorded_BTK[:, :, :1]))
    assert torch.allclose(y_BTD, expected_BTD, atol=1e-6)


def test_recomputed_activations_replay_the_same_routes_once_a_layer() -> None:
    grads = []
    for recompute in (False, True):
        model = small_network()
        ctx = context(small_ids(), routing=Replay(random_routes()), recompute=recompute)
        model(small_ids(), model.config.full(), ctx).hidden_BTD.square().sum().backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True) if a is not None)


def test_a_record_is_found_by_layer_though_the_subnet_leaves_layers_out() -> None:
    model, recorded_BTLK = small_network(), random_routes()
    subnet = model.config.subnet(depth=2, top_k=2)
    recorder = Recorder(model.config, small_ids(), Replay(recorded_BTLK))
    output = model(small_ids(), subnet, context(small_ids(), routing=recorder))
    other_BTLK = recorded_BTLK.clone()
    rows = [row for row, layer in enumerate(model.config.moe_layers) if layer not in subnet.layers]
    assert rows
    other_BTLK[:, :, rows] = 0  # of layers that do not run
    other_BTLK[..., 2] = 7  # past the Subnet's top-k
    same = model(small_ids(), subnet, context(small_ids(), routing=Replay(other_BTLK)))
    assert torch.equal(output.hidden_BTD, same.hidden_BTD)
    other_BTLK[:, :, [row for row in range(3) if row not in rows], :2] = torch.tensor([6, 5], dtype=torch.int16)
    assert not torch.equal(
        output.hidden_BTD,
        model(small_ids(), subnet, context(small_ids(), routing=Replay(other_BTLK))).hidden_BTD,
    )
    assert (recorder.own_BTLK[:, :, rows] == -1).all() and (recorder.own_BTLK[..., 2] == -1).all()


def test_routes_of_the_wrong_length_are_refused() -> None:
    model = small_network()
    with pytest.raises(AssertionError, match=r"recorded routes \(4, 9, 3, 3\)"):
        model(small_ids(), model.config.full(), context(small_ids(), routing=Replay(random_routes()[:, :-1])))


@pytest.mark.slow
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("is_narrowed", [False, True])
def test_a_block_compiles_into_one_graph(layer: int, is_narrowed: bool) -> None:
    """A dense block and an MoE block, with whole rows, and with packed rows of which each may use experts of its own."""
    config = ModelConfig(
        vocab_size=48, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, num_experts=4, top_k=2,
        expert_intermediate_size=8, qk_norm=True, dense_layers=(0,), dense_intermediate_size=24,
    )  # fmt: skip
    model, ids_BT = build(config, 0), torch.arange(24).view(2, 12)
    ctx = Context.plain(ids_BT)
    if is_narrowed:
        row_B = torch.zeros(2, dtype=torch.int64)
        allowed_BE = torch.tensor([[True] * 4, [True, True, False, False]])
        documents_BT = (ctx.positions_BT > 4).long()
        ctx = replace(ctx, documents_BT=documents_BT, widths=RowWidths(row_B, allowed_BE, row_B == 0))
    arguments = (model.embedding(ids_BT), model.geometry(ctx), 4, 2, ctx)
    torch._dynamo.reset()
    with torch.autocast("cpu", torch.bfloat16, enabled=is_narrowed):
        explained = torch._dynamo.explain(model.blocks[layer].forward)(*arguments)
    assert explained.graph_break_count == 0, explained.break_reasons
