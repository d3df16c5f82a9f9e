"""The decoder: documents are isolated, recomputation changes nothing, widths hold through all layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.model.spec import ModelConfig
from stretto.model.transformer import Context, MoeLayer, RowWidths, Transformer, build
from stretto.ops.logprob import IGNORED, head_loss

VOCAB, ROWS, LENGTH = 41, 2, 24
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 24, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "head_dim": 6,
    "num_experts": 8, "top_k": 3, "expert_intermediate_size": 16, "num_shared_experts": 1, "qk_norm": True,
    "dense_layers": (1,), "dense_intermediate_size": 20, "widths": (8, 4),
}  # fmt: skip


def network(seed: int = 0, **changes: Any) -> Transformer:
    model = build(ModelConfig(**{**SHAPE, **changes}), seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
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
        assert counts_WE.sum() == ROWS * LENGTH * 3


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
