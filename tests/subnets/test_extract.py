from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from stretto.base.errors import UserError
from stretto.evals.loss import EvalBatch
from stretto.evals.order import rank_experts
from stretto.model.elastic import extract
from stretto.model.spec import ModelConfig, Subnet
from stretto.model.transformer import Context, Transformer, build
from stretto.subnets.extract import ExtractionError, derived_tolerance, verified_extract, verify

UNEVEN = Subnet(layers=(0, 1, 3, 4, 5), experts=(6, 2, 3, 4, 5), top_k=(2, 2, 1, 3, 2))


@pytest.mark.parametrize(
    "changes",
    [{}, {"router": "softmax"}, {"dense_layers": (0,), "dense_intermediate_size": 20}, {"tie_embeddings": True}],
)
def test_the_gate_lets_a_true_extraction_pass(make_model, batches, changes):
    model = make_model(**changes)
    subnet = model.config.subnet(5, 3, 2)
    found = verified_extract(model, subnet, batches)
    assert found.difference <= found.tolerance
    assert found.num_tokens == 2 * 3 * 16
    assert found.model.config.num_layers == 5 and found.model.config.num_experts == 3


@torch.no_grad()
def test_experts_of_equal_scores_are_chosen_alike(make_model, batches):
    """Routers that cannot tell the experts apart but for a bias of three values."""
    model, generator = make_model(num_experts=12, widths=(12, 7)), torch.Generator().manual_seed(0)
    for block in model.blocks:
        block.mlp.gate.zero_()
        block.mlp.bias_WE.copy_(torch.randint(3, block.mlp.bias_WE.shape, generator=generator) * 0.1)
    found = verified_extract(model, model.config.subnet(5, 7, 3), batches)
    assert found.difference <= found.tolerance


@pytest.mark.slow
def test_scores_that_differ_by_one_rounding_are_no_reason_to_refuse():
    """The softmax of 128 and of 64 experts orders two scores of one token otherwise, and its logits then differ by 6e-3."""
    config = ModelConfig(
        vocab_size=997, hidden_size=64, num_layers=24, num_heads=4, num_kv_heads=2, head_dim=16, num_experts=128, top_k=8,
        expert_intermediate_size=16, router="softmax", selection_bias=False,
    )  # fmt: skip
    model, generator = build(config, 2), torch.Generator().manual_seed(2)
    for block in model.blocks:
        block.mlp.gate.data.mul_(3)
        torch.empty_like(block.mlp.bias_WE).normal_(generator=generator)
    ids = torch.randint(0, 997, (4, 256), generator=generator)
    found = verified_extract(model, config.subnet(experts=64), [EvalBatch(ids, ids, Context.plain(ids))])
    assert found.difference <= found.tolerance and found.num_tokens == 4 * 256


def test_a_router_that_chooses_other_experts_is_refused(make_model, batches):
    """Its selection bias has no part in the logits of the experts that are chosen."""
    model = make_model()
    subnet = model.config.subnet(5, 3, 2)
    smaller = extract(model, subnet)
    smaller.blocks[3].mlp.bias_WE[:, 0] += 1e-3
    with pytest.raises(ExtractionError, match="selection scores of experts differ by"):
        verify(model, subnet, smaller, batches)


def test_uneven_layers_pass(make_model, batches):
    model = make_model()
    found = verified_extract(model, UNEVEN, batches)
    assert found.difference <= found.tolerance
    assert found.model.config.experts_by_layer == UNEVEN.experts


def test_the_tolerance_is_far_below_what_one_wrong_expert_does(make_model, batches):
    model = make_model()
    subnet = model.config.subnet(5, 3, 2)
    smaller = extract(model, subnet)
    smaller.blocks[2].mlp.down.data[[0, 1]] = smaller.blocks[2].mlp.down.data[[1, 0]]
    with pytest.raises(ExtractionError, match="nothing was written"):
        verify(model, subnet, smaller, batches)
    wrong = verify(model, subnet, smaller, batches, tolerance=1e9)
    assert wrong.difference > 100 * derived_tolerance(model.config, subnet, 10.0)


@pytest.mark.parametrize(
    "name", ["blocks.3.mlp.gate", "blocks.1.attention.qkv.weight", "blocks.4.mlp.bias_WE", "norm.weight"]
)
def test_tampered_weights_are_refused(make_model, batches, name):
    model = make_model()
    subnet = model.config.subnet(5, 3, 2)
    smaller = extract(model, subnet)
    tensor = smaller.state_dict()[name]
    tensor.copy_(tensor.flip(-1) + 0.1 * torch.arange(tensor.shape[-1]))
    with pytest.raises(ExtractionError, match="differ by"):
        verify(model, subnet, smaller, batches)


def test_nan_is_refused(make_model, batches):
    model = make_model()
    model.blocks[0].attention.out.weight.data[0, 0] = float("nan")
    with pytest.raises(ExtractionError, match="nan"):
        verified_extract(model, model.config.subnet(5), batches)


def test_weights_stored_in_bf16_are_compared_in_fp32(make_model, batches):
    model = make_model().to(torch.bfloat16)
    subnet = model.config.subnet(5, 3, 2)
    found = verified_extract(model, subnet, batches)
    assert found.difference <= found.tolerance < 1e-3
    assert {tensor.dtype for tensor in found.model.state_dict().values()} == {torch.bfloat16}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_fp32_products_are_exact_within_the_gate_and_restored_after(make_model, batches):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        model = make_model()
        verified_extract(model, model.config.subnet(5, 3, 2), batches)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


def test_padding_takes_no_part(make_model, batches):
    model = make_model()
    padded = replace(batches[0], ctx=replace(batches[0].ctx, documents_BT=torch.full_like(batches[0].ids_BT, -1)))
    whole = verified_extract(model, model.config.subnet(5), [batches[1]])
    assert verified_extract(model, model.config.subnet(5), [batches[1], padded]).num_tokens == whole.num_tokens


def test_nothing_to_compare_on_is_refused(make_model):
    model = make_model()
    with pytest.raises(UserError, match="no tokens"):
        verified_extract(model, model.config.full(), [])


def test_a_foreign_subnet_is_refused(make_model, batches):
    model = make_model()
    with pytest.raises(UserError, match=r"outside 1\.\.6"):
        verified_extract(model, UNEVEN.replace(experts=(6, 2, 3, 4, 7)), batches)


def test_ranked_experts_extract_exactly(make_model, batches):
    model = make_model()
    orders = rank_experts(model, batches).orders
    chosen = Transformer(model.config.replace(expert_order=orders))
    chosen.load_state_dict(model.state_dict())
    subnet = chosen.config.subnet(experts=3, top_k=2)
    found = verified_extract(chosen, subnet, batches)
    kept = sorted(orders[2][:3])
    assert torch.equal(found.model.blocks[2].mlp.gate_up, model.blocks[2].mlp.gate_up[kept])


@pytest.mark.slow
def test_fifty_random_subnets(make_model, batches):
    model = make_model(num_layers=8, num_experts=16, top_k=4, widths=(16, 8, 4))
    generator = torch.Generator().manual_seed(0)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    for _ in range(50):
        layers = [layer for layer in range(8) if layer == 0 or draw(0, 2)]
        experts = [draw(4, 16) for _ in layers]
        subnet = Subnet(layers=tuple(layers), experts=tuple(experts), top_k=tuple(draw(1, 4) for _ in layers))
        found = verified_extract(model, subnet, batches)
        assert found.difference <= found.tolerance
