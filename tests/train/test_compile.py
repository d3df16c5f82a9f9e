"""``train.compile``: the compiled blocks compute what the plain ones do."""

from __future__ import annotations

import pytest
import torch

from stretto.model.spec import ModelConfig
from stretto.model.transformer import Context, Transformer, build
from stretto.ops.logprob import head_loss

CONFIG = ModelConfig(
    vocab_size=48, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8,
    num_experts=4, top_k=2, expert_intermediate_size=8, qk_norm=True,
)  # fmt: skip


def gradients(model: Transformer, ids_BT: torch.Tensor) -> dict[str, torch.Tensor]:
    hidden_BTD = model(ids_BT, CONFIG.full(), Context.plain(ids_BT)).hidden_BTD
    loss, _ = head_loss(hidden_BTD.flatten(0, 1), model.head_VD, ids_BT.flatten())
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.slow
def test_compiled_blocks_have_the_same_gradients() -> None:
    """fp32 included, in which torch.compile cannot trace the grouped product."""
    ids_BT = torch.randint(0, 48, (3, 12), generator=torch.Generator().manual_seed(0))
    plain, compiled = build(CONFIG, 0), build(CONFIG, 0)
    for block in compiled.blocks:
        block.compile()
    expected, found = gradients(plain, ids_BT), gradients(compiled, ids_BT)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        # fused kernels round in another order: a few units of fp32 at the gradient's own scale, over 36 tokens
        assert torch.allclose(found[name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max() + 1e-6)), name
