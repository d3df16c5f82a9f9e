"""gpt-oss: attention sinks, alternating windows, biases throughout the MoE layers, and a clamped SwiGLU."""

from __future__ import annotations

from typing import Any

from stretto.model.families.table import (
    MoeNames,
    Part,
    Reader,
    Table,
    all_experts,
    num_experts,
    plain,
    windows_by_layer,
)
from stretto.model.spec import ClampedSwiGlu, ModelConfig


def _clamped() -> Part:
    def read(reader: Reader) -> dict[str, Any]:
        clamped = {"alpha": reader.get("swiglu_alpha", 1.702), "limit": reader.get("swiglu_limit", 7.0)}
        return {"clamped_swiglu": clamped}

    def write(config: ModelConfig) -> dict[str, Any]:
        swiglu = config.clamped_swiglu or ClampedSwiGlu()
        return {"swiglu_alpha": swiglu.alpha, "swiglu_limit": swiglu.limit}

    def why_not(config: ModelConfig) -> str | None:
        return None if config.clamped_swiglu else "its SwiGLU is not clamped and {family}'s always is"

    return Part(("clamped_swiglu",), read, write, why_not)


GPT_OSS = Table(
    family="gpt_oss",
    architecture="GptOssForCausalLM",
    parts=(
        all_experts(),
        windows_by_layer(128, lambda reader, layer: layer % 2 == 0, switch=None, extra=lambda num_layers: {}),
        _clamped(),
        num_experts("num_local_experts|num_experts"),
        plain("num_experts_per_tok|experts_per_token", "top_k"),
    ),
    always={
        "router": "softmax",
        "selection_bias": False,
        "normalize_gates": True,
        "attention_sinks": True,
        "router_bias": True,
        "expert_bias": True,
    },
    switches={"attention_bias": (("attention_bias", "attention_out_bias"), True)},
    num_kv_heads=8,
    head_dim=64,
    rope_theta=150_000.0,
    rope={
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    engines_tie=False,
    pads=True,
    moe=MoeNames(router="mlp.router", is_fused=True),
)
