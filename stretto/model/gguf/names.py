"""Names in GGUF files: settings and tensors of each llama.cpp architecture and their Hugging Face names.

`stretto.model.gguf.read` and `stretto.model.gguf.write` use this table in both directions. Its source is llama.cpp's ``src/models`` and
converter. "Hub" stands for the Hugging Face format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gguf import ExpertGatingFuncType

EMBEDDING, NORM, HEAD = "token_embd.weight", "output_norm.weight", "output.weight"
OUTSIDE = {EMBEDDING: "model.embed_tokens.weight", NORM: "model.norm.weight", HEAD: "lm_head.weight"}
"""Tensors outside the layers: hub name by GGUF name."""
ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of rotary frequencies; GGUF has no other record of Llama 3's scaling."""

_SETTINGS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_DENSE = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_SHARED = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
FUSED = "mlp.experts.gate_up_proj"
"""Hub name of gpt-oss's experts: one tensor for all experts of a layer, whose matrices are transposed."""
LATENT_UP, LATENT_KEYS, LATENT_VALUES = "self_attn.kv_b_proj", "attn_k_b", "attn_v_b"
"""Projection from the latent vector of MLA. The hub has one tensor with the rows of keys and values, head by head. GGUF has two: keys,
transposed for each head, and values."""
OF_LATENT = (
    *("attention.head_count_kv", "attention.key_length", "attention.value_length"),
    *("attention.key_length_mla", "attention.value_length_mla", "attention.q_lora_rank"),
)
"""Metadata of MLA, which llama.cpp runs as attention with a single key/value head."""
_SOFTMAX, _SIGMOID = int(ExpertGatingFuncType.SOFTMAX), int(ExpertGatingFuncType.SIGMOID)


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture of llama.cpp and its family."""

    name: str
    """llama.cpp's name, in ``general.architecture``."""
    family: str
    """``model_type`` on the hub."""
    class_name: str
    """Class in transformers."""
    layer: Mapping[str, str]
    """Hub name by GGUF name of the modules of a layer; ``{}`` is the number of an expert, whose tensors GGUF stacks."""
    tensors: Mapping[str, str] = field(default_factory=dict)
    """Hub name by GGUF name of the tensors in a layer whose suffix differs too."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Field of config.json by key of the metadata (without the architecture's prefix), in addition to `_SETTINGS`."""
    given: Mapping[str, Any] = field(default_factory=dict)
    """Metadata with a single supported value, which is also llama.cpp's default."""
    implied: Mapping[str, Any] = field(default_factory=dict)
    """Fields of config.json that follow from the architecture."""
    pairs_neighbours: bool = False
    """Whether rotated rows of queries and keys are stored as neighbours; the hub pairs halves of a head."""
    is_latent: bool = False
    """Whether the attention is MLA, with the widths in `OF_LATENT`."""

    def setting_names(self) -> dict[str, str]:
        """Field of config.json by key of the metadata."""
        names = {**_SETTINGS, **self.settings}
        return {key: name for key, name in names.items() if not (self.is_latent and key in OF_LATENT)}


_GLM = Architecture(
    "glm4moe",
    "glm4_moe",
    "Glm4MoeForCausalLM",
    {
        **_ATTENTION,
        **_HEAD_NORMS,
        **_DENSE,
        **_EXPERTS,
        **_SHARED,
        "post_attention_norm": "post_attention_layernorm",
    },
    tensors={"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"},
    settings={
        "expert_count": "n_routed_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_count": "n_shared_experts",
        "expert_weights_scale": "routed_scaling_factor",
        "expert_weights_norm": "norm_topk_prob",
        "leading_dense_block_count": "first_k_dense_replace",
        "nextn_predict_layers": "num_nextn_predict_layers",
        "expert_group_count": "n_group",
        "expert_group_used_count": "topk_group",
    },
    given={"expert_gating_func": _SIGMOID},
)
ARCHITECTURES = (
    Architecture("llama", "llama", "LlamaForCausalLM", {**_ATTENTION, **_DENSE}, pairs_neighbours=True),
    Architecture(
        "llama",  # llama.cpp uses this name for both
        "mixtral",
        "MixtralForCausalLM",
        {
            **_ATTENTION,
            "ffn_gate_inp": "block_sparse_moe.gate",
            "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
            "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
            "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
        },
        settings={"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
        implied={"sliding_window": None},
        pairs_neighbours=True,
    ),
    Architecture("qwen2", "qwen2", "Qwen2ForCausalLM", {**_ATTENTION, **_DENSE}, implied={"use_sliding_window": False}),
    Architecture(
        "qwen3",
        "qwen3",
        "Qwen3ForCausalLM",
        {**_ATTENTION, **_HEAD_NORMS, **_DENSE},
        implied={"use_sliding_window": False},
    ),
    Architecture(
        "qwen3moe",
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        {**_ATTENTION, **_HEAD_NORMS, **_EXPERTS},
        settings={
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        given={"expert_gating_func": _SOFTMAX, "expert_weights_scale": 1.0, "expert_weights_norm": True},
        implied={"norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1, "use_sliding_window": False},
    ),
    Architecture(
        "olmoe",
        "olmoe",
        "OlmoeForCausalLM",
        {**_ATTENTION, **_HEAD_NORMS, **_EXPERTS},
        settings={
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "attention.clamp_kqv": "clip_qkv",
        },
        implied={"norm_topk_prob": False},
    ),
    _GLM,
    Architecture(
        "gpt-oss",
        "gpt_oss",
        "GptOssForCausalLM",
        {
            **{name: module for name, module in _ATTENTION.items() if name != "ffn_norm"},
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.router",
            "ffn_gate_exps": FUSED,  # rows of gate and up alternate
            "ffn_up_exps": FUSED,
            "ffn_down_exps": "mlp.experts.down_proj",
        },
        tensors={"attn_sinks.weight": "self_attn.sinks"},
        settings={
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "intermediate_size",
            "attention.sliding_window": "sliding_window",
        },
        implied={"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
    ),
    Architecture(
        "deepseek2",
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        {
            **{name: _ATTENTION[name] for name in ("attn_norm", "attn_q", "attn_output", "ffn_norm")},
            "attn_q_a": "self_attn.q_a_proj",
            "attn_q_a_norm": "self_attn.q_a_layernorm",
            "attn_q_b": "self_attn.q_b_proj",
            "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
            "attn_kv_a_norm": "self_attn.kv_a_layernorm",
            "attn_kv_b": LATENT_UP,  # in older files
            **_DENSE,
            **_EXPERTS,
            **_SHARED,
        },
        tensors=_GLM.tensors,
        settings={**_GLM.settings, "attention.kv_lora_rank": "kv_lora_rank"},
        given=_GLM.given,
        implied={"n_group": 1, "topk_group": 1},  # llama.cpp's default
        is_latent=True,
    ),
    Architecture("ernie4_5", "ernie4_5", "Ernie4_5ForCausalLM", {**_ATTENTION, **_DENSE}),
    Architecture(
        "ernie4_5-moe",
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        {**_ATTENTION, **_DENSE, **_EXPERTS, **_SHARED},
        tensors={"exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"},
        settings={
            "expert_count": "moe_num_experts",
            "expert_used_count": "moe_k",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_count": "moe_num_shared_experts",
            "leading_dense_block_count": "moe_layer_start_index",
            "interleave_moe_layer_step": "moe_layer_interval",
        },
        given={"expert_gating_func": _SOFTMAX, "expert_weights_scale": 1.0, "expert_weights_norm": True},
    ),
)


def architecture_of(name: str, has_experts: bool) -> Architecture | None:
    """The entry for an architecture of llama.cpp; None: it is not supported."""
    found = [each for each in ARCHITECTURES if each.name == name]
    return min(found, key=lambda each: ("expert_count" in each.settings) != has_experts, default=None)
