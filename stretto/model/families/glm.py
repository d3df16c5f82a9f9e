"""GLM 4.5 and later: a sigmoid router with a selection bias, so that layers with fewer experts can be padded exactly."""

from __future__ import annotations

from stretto.model.families.table import Table, groups, leading_dense, no_windows, num_experts, plain

GLM_MOE = Table(
    family="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    parts=(
        leading_dense(1),
        no_windows(),
        num_experts("n_routed_experts|num_local_experts"),
        plain("num_experts_per_tok", "top_k"),
        plain("n_shared_experts", "num_shared_experts", 1),
        plain("use_qk_norm", "qk_norm", False),
        plain("norm_topk_prob", "normalize_gates", True),
        plain("routed_scaling_factor", "routed_scaling", 1.0),
        groups(1, 1),
    ),
    always={"router": "sigmoid", "selection_bias": True},
    switches={"attention_bias": (("attention_bias",), False)},
    num_kv_heads=8,
    rotary_fraction=0.5,
    engines_tie=False,
    pads=True,
    min_experts=2,  # group routing in transformers and vLLM uses the two best experts of a group
    min_shared_experts=1,  # required by llama.cpp
)
