"""Structural counts: parameters, FLOPs and cache bytes of a Subnet, derived from its shape.

One multiply-add is two FLOPs. The derivations are checked against the operations that a real forward and backward
execute (tests/model/test_count.py), so a receipt that adds them up states executed work.
"""

from __future__ import annotations

from dataclasses import dataclass

from stretto.model.spec import ModelConfig, Subnet


@dataclass(frozen=True)
class Counts:
    """Sizes of one Subnet of one network."""

    total_params: int
    """Parameters held in memory: what a checkpoint of the extracted Subnet stores (balance biases excluded)."""
    active_params: int
    """Parameters one token uses: everything but the experts it did not choose."""
    linear_flops: int
    """Forward FLOPs a token in matrix products with weights (embedding look-up excluded, output head included)."""
    score_flops: int
    """Forward FLOPs a token for each key it attends to (scores and weighted sum, all layers)."""
    kv_elements: int
    """Cache elements a token (keys and values, all kept layers); times bytes per element."""

    def forward_flops(self, num_tokens: int, attended: float) -> int:
        """FLOPs of a forward pass over ``num_tokens`` that attend to ``attended`` keys each, on average."""
        return int(num_tokens * (self.linear_flops + self.score_flops * attended))


def count(config: ModelConfig, subnet: Subnet) -> Counts:
    """Count ``subnet`` of ``config``."""
    hidden, head = config.hidden_size, config.head_dim
    q_dim, kv_dim = config.num_heads * head, config.num_kv_heads * head
    attention_weights = hidden * (q_dim + 2 * kv_dim) + q_dim * hidden
    attention_extra = (q_dim + 2 * kv_dim if config.attention_bias else 0) + (2 * head if config.qk_norm else 0)
    expert = 3 * hidden * config.expert_intermediate_size
    shared = config.num_shared_experts * expert
    dense = 3 * hidden * config.dense_intermediate_size

    num_layers = len(subnet.layers)
    num_dense = sum(layer in config.dense_layers for layer in subnet.layers)
    routers = sum(experts * hidden for experts in subnet.experts)
    always = num_layers * attention_weights + num_dense * dense + routers + len(subnet.experts) * shared
    chosen = sum(subnet.top_k) * expert
    norms = num_layers * (2 * hidden + attention_extra) + hidden
    embedding = config.vocab_size * hidden
    tables = embedding if config.tie_embeddings else 2 * embedding
    return Counts(
        total_params=always + sum(subnet.experts) * expert + norms + tables,
        active_params=always + chosen + norms + tables,
        linear_flops=2 * (always + chosen + embedding),
        score_flops=num_layers * 4 * q_dim,
        kv_elements=num_layers * 2 * kv_dim,
    )
