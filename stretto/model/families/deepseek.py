"""DeepSeek-V3 and models of the same architecture (Kimi K2, Moonlight); GLM 4.7 Flash, in which any layer may be dense."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from stretto.model.families.table import (
    Part,
    Reader,
    Table,
    groups,
    leading_dense,
    no_windows,
    num_experts,
    plain,
    some_dense,
)
from stretto.model.spec import LatentAttention, ModelConfig


def _latent(query_rank: int) -> Part:
    def read(reader: Reader) -> dict[str, Any]:
        heads, rope_dim = reader.whole("num_attention_heads"), reader.whole("qk_rope_head_dim")
        reader.refuse_unless("num_key_value_heads", reader.get("num_key_value_heads", heads), heads)
        latent = {
            "query_rank": reader.tree.get("q_lora_rank", query_rank),
            "kv_rank": reader.get("kv_lora_rank"),
            "rope_dim": rope_dim,
            "value_dim": reader.get("v_head_dim"),
        }
        return {"latent": latent, "head_dim": reader.whole("qk_nope_head_dim") + rope_dim}

    def write(config: ModelConfig) -> dict[str, Any]:
        latent = config.latent
        assert latent is not None
        return {
            "q_lora_rank": latent.query_rank,
            "kv_lora_rank": latent.kv_rank,
            "qk_rope_head_dim": latent.rope_dim,
            "qk_nope_head_dim": config.head_dim - latent.rope_dim,
            "v_head_dim": latent.value_dim,
            "head_dim": latent.rope_dim,  # the rotated width, in transformers
        }

    def why_not(config: ModelConfig) -> str | None:
        if config.latent is None:
            return "its attention is not latent and {family}'s always is"
        if config.latent.rope_dim == config.head_dim:
            return "it rotates all channels of a head and {family} leaves some as they are"
        eps = LatentAttention.model_fields["norm_eps"].default
        if config.latent.norm_eps != eps:
            return f"the norms of its latent attention have an eps of {config.latent.norm_eps} and {{family}}'s {eps}"
        return None

    return Part(("latent",), read, write, why_not)


def _dense_layers(reader: Reader) -> Iterable[int]:
    num_layers = reader.num_layers
    kinds = reader.get("mlp_layer_types", None)
    if kinds is None:
        return range(min(reader.whole("first_k_dense_replace", 1, least=0), num_layers))
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or any(kind not in ("dense", "sparse") for kind in kinds)
    ):
        raise reader.problem("mlp_layer_types", f"not dense or sparse for each of the {num_layers} layers")
    return (layer for layer, kind in enumerate(kinds) if kind == "dense")


def _dense_fields(config: ModelConfig) -> dict[str, Any]:
    kinds = ["dense" if layer in config.dense_layers else "sparse" for layer in range(config.num_layers)]
    return {"mlp_layer_types": kinds, "num_nextn_predict_layers": 0}


_ROUTING = (
    no_windows(),
    num_experts("n_routed_experts|num_local_experts"),
    plain("num_experts_per_tok", "top_k"),
    plain("n_shared_experts", "num_shared_experts", 1),
    plain("norm_topk_prob", "normalize_gates", True),
)
DEEPSEEK = Table(
    family="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    parts=(
        leading_dense(3),
        _latent(1536),
        groups(8, 4),
        plain("routed_scaling_factor", "routed_scaling", 2.5),
        *_ROUTING,
    ),
    always={"router": "sigmoid", "selection_bias": True},
    switches={"attention_bias": (("attention_bias", "attention_out_bias"), False)},
    # transformers has the first field only; DeepSeek's code and engines have the others
    fixed={"rope_interleave": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
    norm_eps=1e-6,
    engines_tie=False,
    pads=True,
    min_experts=2,
    min_shared_experts=1,
)
GLM_LITE = replace(
    DEEPSEEK,
    family="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    parts=(
        some_dense(_dense_layers, _dense_fields),
        _latent(768),
        groups(1, 1),
        plain("routed_scaling_factor", "routed_scaling", 1.8),
        *_ROUTING,
    ),
    norm_eps=1e-5,
)
