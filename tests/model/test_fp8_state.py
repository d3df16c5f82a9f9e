"""Weights shipped as FP8 bytes: an FP8 network cannot tell the difference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from stretto.base.errors import UserError
from stretto.model.fp8_state import is_quantised, pack_state, unpack_state
from stretto.model.spec import ModelConfig
from stretto.model.transformer import Context, build
from stretto.ops.matmul import Arithmetic

CONFIG = ModelConfig(
    vocab_size=31, hidden_size=24, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, num_experts=5, top_k=2,
    expert_intermediate_size=12, num_shared_experts=1, dense_layers=(1,), dense_intermediate_size=20, qk_norm=True,
    attention_bias=True,
)  # fmt: skip


def test_an_fp8_network_computes_the_same_bits_from_shipped_bytes() -> None:
    model, other = build(CONFIG, 0).requires_grad_(False), build(CONFIG, 1).requires_grad_(False)
    state = model.state_dict()
    shipped = unpack_state(pack_state(state))
    assert shipped.keys() == state.keys()
    other.load_state_dict(shipped)
    ids_BT = torch.randint(0, 31, (2, 9))
    ctx = replace(Context.plain(ids_BT), operators=Arithmetic("fp8", True).operators)
    assert torch.equal(model.logits(ids_BT, ctx=ctx), other.logits(ids_BT, ctx=ctx))
    assert not torch.equal(model.logits(ids_BT), other.logits(ids_BT))  # in fp32 the quantisation does show


def test_matrices_of_blocks_travel_as_a_quarter_and_all_else_as_it_is() -> None:
    state = build(CONFIG, 0).state_dict()
    packed = pack_state(state)
    quantised = [name for name in state if is_quantised(name)]
    assert len(quantised) == 3 * 2 + 2 * 4 + 2  # attention, MoE layers with a shared expert, a dense layer
    for name, tensor in state.items():
        if name in quantised:
            assert packed[name + ":fp8"].nbytes * 4 == tensor.nbytes
        else:
            assert packed[name] is tensor


def test_bytes_without_scales_are_refused() -> None:
    packed = pack_state(build(CONFIG, 0).state_dict())
    del packed["blocks.0.mlp.down:scale"]
    with pytest.raises(UserError, match=r"blocks\.0\.mlp\.down: FP8 bytes without scales"):
        unpack_state(packed)
