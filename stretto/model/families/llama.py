"""LLaMA; Mistral, which has a sliding window and no biases."""

from __future__ import annotations

from stretto.model.families.table import Part, Table, all_dense, no_windows, one_window
from stretto.model.spec import ModelConfig


def _why_not(config: ModelConfig) -> str | None:
    if config.hidden_size % config.num_heads == 0:
        return None
    return f"its {config.num_heads} heads do not divide the hidden size, as {{family}}'s must in transformers"


LLAMA = Table(
    family="llama",
    architecture="LlamaForCausalLM",
    parts=(all_dense(), no_windows(), Part((), lambda reader: {}, lambda config: {}, _why_not)),
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
