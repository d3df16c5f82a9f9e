"""Mixtral; OLMoE, which normalises queries and keys over all heads and may clip queries, keys and values."""

from __future__ import annotations

from dataclasses import replace

from stretto.model.families.table import (
    MoeNames,
    Table,
    all_experts,
    no_windows,
    num_experts,
    one_window,
    plain,
)
from stretto.model.spec import ModelConfig

MIXTRAL = Table(
    family="mixtral",
    architecture="MixtralForCausalLM",
    parts=(
        all_experts(),
        one_window(None),
        num_experts("num_local_experts|num_experts"),
        plain("num_experts_per_tok", "top_k"),
    ),
    always={"router": "softmax", "selection_bias": False, "normalize_gates": True},
    num_kv_heads=8,
    rope_theta=1_000_000.0,
    engines_tie=False,
    moe=MoeNames(
        router="block_sparse_moe.gate",
        experts="block_sparse_moe.experts",
        projections=("w1", "w3", "w2"),
        router_aliases=("mlp.gate",),
    ),
)


def _why_not(config: ModelConfig) -> str | None:
    if config.head_dim * config.num_heads == config.hidden_size:
        return None
    return f"its {config.num_heads} heads of {config.head_dim} do not make up the hidden size, as {{family}}'s must"


OLMOE = Table(
    family="olmoe",
    architecture="OlmoeForCausalLM",
    parts=(
        all_experts(),
        no_windows(),
        replace(plain("clip_qkv", "qkv_clip", None), why_not=_why_not),
        num_experts("num_experts|num_local_experts"),
        plain("num_experts_per_tok", "top_k"),
        plain("norm_topk_prob", "normalize_gates", False),
    ),
    always={"router": "softmax", "selection_bias": False, "qk_norm_wide": True},
    switches={"attention_bias": (("attention_bias", "attention_out_bias"), False)},
    engines_tie=False,
)
