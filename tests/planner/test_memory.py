"""Predicted bytes against those that autograd and the optimisers really hold. Peaks of whole steps: ``bench/plan.py``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from stretto.model.counts import count
from stretto.model.spec import ClampedSwiGlu, ModelConfig
from stretto.model.transformer import Context, build
from stretto.ops import logprob
from stretto.ops.native import training
from stretto.optim.build import build_optimizers
from stretto.optim.schedule import OptimConfig
from stretto.planner.hardware import DECODE_SHARE, HARDWARE, Dtype
from stretto.planner.memory import Layout, chunk_tokens, layer_bytes, sizes, training_memory
from stretto.planner.speed import decode_s

BASE = ModelConfig(
    vocab_size=64, hidden_size=64, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16, num_experts=8, top_k=2,
    expert_intermediate_size=32,
)  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "norms and a shared expert": {"qk_norm": True, "num_shared_experts": 1},
    "dense": {"dense_layers": (0, 1, 2), "dense_intermediate_size": 48},
    "one wide dense layer": {"dense_layers": (0,), "dense_intermediate_size": 512, "num_shared_experts": 1},
    "biases": {"expert_bias": True, "router_bias": True, "attention_bias": True, "mlp_bias": True},
    "many experts": {"num_experts": 16, "top_k": 4},
    "clamped SwiGLU": {"dense_layers": (0,), "dense_intermediate_size": 96, "num_shared_experts": 1, "clamped_swiglu": ClampedSwiGlu()},
    "clipped values": {"qkv_clip": 1.0},
    "clipped norms": {"qkv_clip": 1.0, "qk_norm_wide": True},
    "sinks": {"attention_sinks": True},
    "layers that differ": {"experts_per_layer": (2, 8, 4), "top_k_per_layer": (1, 2, 1)},
}  # fmt: skip


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_the_parts_are_the_whole(changes: dict[str, Any]) -> None:
    config = BASE.replace(**changes, widths=())
    parts, total = sizes(config), count(config, config.full()).total_params
    blocks = len(config.dense_layers) * parts.dense_block + config.num_moe_layers * parts.moe_block
    others = blocks + parts.all_experts
    assert parts.total == total
    assert abs(parts.outer + parts.replicated + others - total) < 0.02 * total  # biases are counted with the block


def test_the_largest_block_is_gathered() -> None:
    """With ep, a wide dense layer is larger than a rank's part of an MoE layer."""
    config = BASE.replace(**SHAPES["one wide dense layer"], widths=())
    wide = sum(each.numel() for each in build(config, 0).blocks[0].parameters() if each.dim() > 1)
    memory = training_memory(config, Layout(8, 8, 8, 1), 16, "bfloat16", OptimConfig(lr=1))
    assert memory.gathered == 4 * sizes(config).outer + wide * (3 * 2 + 4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [
    "plain", "norms and a shared expert", "dense", "many experts", "clamped SwiGLU", "clipped values", "clipped norms", "sinks",
    "layers that differ",
])  # fmt: skip
def test_kept_activations_are_those_of_autograd(name: str, dtype: Dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "has_bf16_kernels", lambda: False)  # which would keep fp32
    config = BASE.replace(**SHAPES[name], widths=())
    model, rows, length = build(config, 0), 8, 128
    ids_BT = torch.randint(config.vocab_size, (rows, length))
    held = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            kept[storage.data_ptr()] = tensor
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"),
    ):
        model(ids_BT, config.full(), Context.plain(ids_BT))
    measured = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    each = layer_bytes(config, dtype, 1).kept
    weights = 2 * (count(config, config.full()).total_params - sizes(config).outer) if dtype == "bfloat16" else 0
    predicted = rows * length * (config.num_layers * each + 4 * config.hidden_size) + weights
    assert predicted == pytest.approx(measured, rel=0.06)


def test_a_matrix_unit_keeps_what_fp32_keeps() -> None:
    one, adamw = Layout(1, 1, 4, 2), OptimConfig(lr=1)
    wide = training_memory(BASE, one, 128, "float32", adamw, on_gpu=False)
    assert training_memory(BASE, one, 128, "bfloat16", adamw, on_gpu=False, rounds=True) == wide
    assert training_memory(BASE, one, 128, "bfloat16", adamw, on_gpu=False) != wide


@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
def test_the_optimisers_hold_what_is_predicted(optimiser: Any) -> None:
    model = build(BASE, 0)
    optimizers = build_optimizers(OptimConfig(lr=1e-3, name=optimiser), model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for optimizer in optimizers:
        optimizer.step()
    states = [value for optimizer in optimizers for state in optimizer.state.values() for value in state.values()]
    held = sum(each.numel() * 4 for each in states if isinstance(each, torch.Tensor) and each.numel() > 1)
    predicted = training_memory(
        BASE, Layout(1, 1, 1, 1), 8, "float32", OptimConfig.model_validate({"lr": 1, "name": optimiser})
    )
    assert predicted.optimiser == held
    assert predicted.weights == sum(parameter.numel() * 4 for parameter in model.parameters())


def test_ranks_and_recomputing_save_memory() -> None:
    one = Layout(1, 1, 8, 1)
    memory = {
        name: training_memory(BASE, layout, 512, "float32", OptimConfig(lr=1))
        for name, layout in {"one": one, "recompute": replace(one, recompute=True), "four": Layout(4, 1, 8, 1)}.items()
    }
    assert memory["recompute"].total < memory["one"].total
    assert memory["four"].total < memory["one"].total
    assert memory["four"].optimiser < memory["one"].optimiser / 3


def test_long_rows_of_documents_need_no_mask_in_bf16() -> None:
    length, optim = 1 << 15, OptimConfig(lr=1)
    whole, packed, sharing = (
        {
            dtype: training_memory(BASE, Layout(1, 1, 1, 1), length, dtype, optim, prefix_keys=keys, on_gpu=False).activations
            for dtype in ("float32", "bfloat16")
        }
        for keys in (None, 0.0, 0.5)
    )  # fmt: skip
    assert packed["bfloat16"] == whole["bfloat16"]
    assert packed["float32"] == sharing["float32"] == whole["float32"] + length**2
    # with a mask, keys are read where they lie; without one, a document's keys lie side by side, so that a shared prefix is copied
    copies = BASE.num_layers * length * 0.5 * 2 * BASE.num_kv_heads * BASE.head_dim * 2
    assert sharing["bfloat16"] == whole["bfloat16"] + copies


@pytest.mark.parametrize("vocab_size", [257, 32768, 50304, 151936])
def test_the_chunk_of_logits_is_that_of_the_loss(vocab_size: int) -> None:
    for device in ("cpu", "meta"):
        head_VD = torch.empty(vocab_size, 1, device=device)
        assert chunk_tokens(vocab_size, on_gpu=device != "cpu") == logprob.chunk_tokens(head_VD)


@pytest.mark.parametrize("batch", [1, 64])
def test_a_decoding_step_reads_the_experts_that_each_layer_has(batch: int) -> None:
    hardware = HARDWARE["L40S"]
    config = BASE.replace(
        experts_per_layer=(2, 8, 2), top_k_per_layer=(1, 2, 1), widths=(), expert_intermediate_size=2**14
    )
    full = count(config, config.full())
    launches = config.num_layers * (hardware.layer_s.value + hardware.slot_s * batch)
    read = (decode_s(config, batch, 0.0, 2, hardware) - launches) * hardware.bandwidth * DECODE_SHARE / 2
    assert read == pytest.approx(full.active_params if batch == 1 else full.total_params, rel=1e-2)
