"""Qwen2, which always has biases on queries, keys and values; Qwen3 and its MoE, which normalise each head."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from stretto.model.families.table import (
    Reader,
    Table,
    all_dense,
    num_experts,
    one_window,
    plain,
    some_dense,
    windows_by_layer,
)


def _dense_layers(reader: Reader) -> Iterable[int]:
    step, only = reader.whole("decoder_sparse_step", 1), reader.get("mlp_only_layers", [])
    if not isinstance(only, list):
        raise reader.problem("mlp_only_layers", f"{only!r} is not a list of layers; the file is damaged")
    return (layer for layer in range(reader.num_layers) if layer in only or (layer + 1) % step != 0)


QWEN2 = Table(
    family="qwen2",
    architecture="Qwen2ForCausalLM",
    parts=(
        all_dense(),
        windows_by_layer(
            4096,
            lambda reader, layer: layer >= reader.whole("max_window_layers", 28, least=0),
            switch="use_sliding_window",
            extra=lambda num_layers: {"max_window_layers": num_layers},
        ),
    ),
    always={"attention_bias": True},
    num_kv_heads=32,
    norm_eps=1e-6,
)
QWEN3 = replace(
    QWEN2,
    family="qwen3",
    architecture="Qwen3ForCausalLM",
    always={"qk_norm": True},
    switches={"attention_bias": (("attention_bias", "attention_out_bias"), False)},
    head_dim=128,
)
QWEN3_MOE = replace(
    QWEN3,
    family="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    parts=(
        some_dense(
            _dense_layers, lambda config: {"mlp_only_layers": list(config.dense_layers), "decoder_sparse_step": 1}
        ),
        one_window(4096, switch="use_sliding_window"),
        num_experts("num_experts|num_local_experts"),
        plain("num_experts_per_tok", "top_k"),
        plain("norm_topk_prob", "normalize_gates", False),
    ),
    always={"router": "softmax", "selection_bias": False, "qk_norm": True},
    num_kv_heads=4,
    head_dim=None,
    engines_tie=False,
)
