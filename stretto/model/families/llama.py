"""LLaMA and what is it under other names; Mistral, which adds a window and has no biases."""

from __future__ import annotations

from stretto.model.families.table import Table, all_dense, no_windows, one_window

LLAMA = Table(
    family="llama",
    architecture="LlamaForCausalLM",
    parts=(all_dense(), no_windows()),
    switches={
        "attention_bias": (("attention_bias", "attention_out_bias"), False),
        "mlp_bias": (("mlp_bias",), False),
    },
    norm_eps=1e-6,
)
MISTRAL = Table(
    family="mistral",
    architecture="MistralForCausalLM",
    parts=(all_dense(), one_window(4096)),
    num_kv_heads=8,
    norm_eps=1e-6,
)
