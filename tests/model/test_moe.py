"""The MoE layer: rows that use fewer experts, and the counts that steer balance."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stretto.model.spec import ModelConfig
from stretto.model.transformer import MoeLayer, RowWidths
from stretto.ops.grouped import experts_reference

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
