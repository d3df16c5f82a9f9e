"""Small networks of every family, and ways to read and damage a checkpoint; shared by the tests of the hub."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from stretto.model.families import Family
from stretto.model.spec import ModelConfig
from stretto.model.transformer import Transformer, build

SHAPE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 24,
    "num_experts": 8,
    "top_k": 2,
    "expert_intermediate_size": 16,
}
GLM = {"num_shared_experts": 2, "rotary_fraction": 0.5, "routed_scaling": 1.7}
QWEN = {"router": "softmax", "selection_bias": False, "qk_norm": True}
ERNIE = {"router": "softmax", "num_shared_experts": 1}
DENSE = {"dense_intermediate_size": 48}
NETWORKS: dict[str, tuple[Family, dict[str, Any]]] = {
    "glm": ("glm4_moe", {**GLM, "dense_layers": (0,), **DENSE}),
    "glm elastic": ("glm4_moe", {**GLM, "widths": (8, 4, 2), "num_branches": 4}),
    "glm with everything optional": (
        "glm4_moe",
        {**GLM, "qk_norm": True, "attention_bias": True, "normalize_gates": False},
    ),
    "glm tied, no shared expert": ("glm4_moe", {"tie_embeddings": True}),
    "glm, layers of different width": ("glm4_moe", {**GLM, "experts_per_layer": (8, 3, 5, 2)}),
    "glm, one expert": ("glm4_moe", {**GLM, "num_experts": 1, "top_k": 1}),
    "glm, all dense": ("glm4_moe", {"dense_layers": (0, 1, 2, 3), **DENSE}),
    "qwen": ("qwen3_moe", {**QWEN, "dense_layers": (2,), **DENSE}),
    "qwen with biases": (
        "qwen3_moe",
        {**QWEN, "attention_bias": True, "normalize_gates": False, "tie_embeddings": True},
    ),
    "ernie": ("ernie4_5_moe", {**ERNIE, "dense_layers": (0,), **DENSE, "tie_embeddings": True}),
    "ernie at an interval": ("ernie4_5_moe", {**ERNIE, "num_shared_experts": 0, "dense_layers": (0, 2), **DENSE}),
}
IDS = torch.randint(0, 300, (2, 24), generator=torch.Generator().manual_seed(0))
AGREEMENT = 1e-4
"""Largest difference of logits of order 1 in fp32 between implementations that add in different orders."""


def network(**changes: Any) -> Transformer:
    """A small network whose every tensor matters: norms are not one, biases are not zero, routes are uneven."""
    model = build(ModelConfig(**{**SHAPE, **changes}), seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith(("norm.weight", "q_norm", "k_norm")):
                tensor.add_(0.3 * noise)
            elif name.endswith("bias_WE"):
                tensor.add_(0.1 * noise * model.config.selection_bias)
            elif name.endswith("bias"):
                tensor.add_(0.3 * noise)
            else:
                tensor.mul_(3.0)
    return model


@torch.no_grad()
def logits(model: Transformer) -> torch.Tensor:
    return model.logits(IDS)


@torch.no_grad()
def their_logits(folder: Path) -> torch.Tensor:
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), f"transformers found {info}"
    return model(IDS).logits


def forget_ours(folder: Path) -> None:
    """Leave what other software would have written."""
    (folder / "stretto.json").unlink()
    (folder / "elastic.tensors").unlink(missing_ok=True)


def edit_tensors(path: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def drop(name: str) -> Callable[[Path], None]:
    return lambda folder: edit_tensors(folder / "model.safetensors", lambda tensors: tensors.pop(name))


def put(file: str, name: str, tensor: torch.Tensor) -> Callable[[Path], None]:
    return lambda folder: edit_tensors(folder / file, lambda tensors: tensors.update({name: tensor}))


def truncate(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])
