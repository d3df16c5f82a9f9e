"""Sizes and FLOPs of a Subnet, derived from shapes. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from stretto.model.spec import ModelConfig, Subnet


@dataclass(frozen=True)
class Counts:
    """Sizes of a Subnet, derived from shapes. One multiply-add is two FLOPs.

    A test compares them with the operations that a forward and backward pass executes on rows of one document. Attention on packed
    rows executes fewer. The FLOPs of receipts count it as if every row were one document.
    """

    total_params: int
    """Number of parameters of the extracted Subnet, without balance biases."""
    active_params: int
    """Number of parameters that one token uses: all but those of the experts it does not choose."""
    linear_flops: int
    """Forward FLOPs per token of matrix products with weights (with the output head, without the embedding look-up)."""
    head_flops: int
    """The output head's part of ``linear_flops``."""
    score_flops: int
    """Forward FLOPs per token and attended key (scores and weighted sum, all layers). Sliding layers count like others, because the
    trainer's kernels also compute the scores outside the window."""
    kv_elements: int
    """Number of cache elements per token over all layers: keys and values, or the latent vector and the rotated key of MLA."""

    def forward_flops(self, num_tokens: int, attended: float) -> int:
        """FLOPs of a forward pass over ``num_tokens`` tokens that attend to ``attended`` keys on average."""
        return int(num_tokens * (self.linear_flops + self.score_flops * attended))

    def trained_flops(self, num_tokens: int, attended: float, recompute: bool, head_tokens: int | None = None) -> int:
        """FLOPs of a forward and a backward pass in which all weights are trained. The head is applied to ``head_tokens`` of the tokens
        (None: all), and is not recomputed."""
        head = num_tokens * self.head_flops
        body = self.forward_flops(num_tokens, attended) - head
        return (4 if recompute else 3) * body + 3 * (head if head_tokens is None else head_tokens * self.head_flops)


def count(config: ModelConfig, subnet: Subnet) -> Counts:
    """Sizes of ``subnet`` of ``config``."""
    hidden = config.hidden_size
    attention, cached = _count_attention(config)
    expert = _count_swiglu(hidden, config.expert_intermediate_size, config.expert_bias)
    num_layers, num_experts, num_chosen = len(subnet.layers), sum(subnet.experts), sum(subnet.top_k)
    parts = [  # all but the experts, with their number
        (attention, num_layers),
        (
            _count_swiglu(hidden, config.dense_intermediate_size, config.mlp_bias),
            sum(layer in config.dense_layers for layer in subnet.layers),
        ),
        ((hidden, int(config.router_bias)), num_experts),
        ((0, hidden), 2 * num_layers + 1),  # norms
    ]
    if config.num_shared_experts:
        shared_width = config.num_shared_experts * config.expert_intermediate_size
        parts.append((_count_swiglu(hidden, shared_width, config.mlp_bias), len(subnet.experts)))
    matrices, vectors = (sum(part[kind] * times for part, times in parts) for kind in (0, 1))
    embedding = config.vocab_size * hidden
    always = matrices + vectors + (embedding if config.tie_embeddings else 2 * embedding)
    # if values are narrower than keys, kernels receive both at the wider width
    width = config.head_dim if config.latent is None else max(config.head_dim, config.latent.value_dim)
    return Counts(
        total_params=always + num_experts * sum(expert),
        active_params=always + num_chosen * sum(expert),
        linear_flops=2 * (matrices + num_chosen * expert[0] + embedding),
        head_flops=2 * embedding,
        score_flops=num_layers * 4 * config.num_heads * width,
        kv_elements=num_layers * cached,
    )


_Weights = tuple[int, int]
"""Numbers of parameters of a part: of matrices, each of which costs a multiply-add per token, and of vectors (norms, biases and sinks),
whose FLOPs are not counted."""


def _count_swiglu(hidden: int, width: int, bias: bool) -> _Weights:
    return 3 * hidden * width, 2 * width + hidden if bias else 0


def _count_attention(config: ModelConfig) -> tuple[_Weights, int]:
    """Weights of the attention of one layer, and the number of elements that it caches per token."""
    hidden, heads, head, latent = config.hidden_size, config.num_heads, config.head_dim, config.latent
    q_dim, kv_dim = heads * head, config.num_kv_heads * head
    vectors = (hidden if config.attention_out_bias else 0) + (heads if config.attention_sinks else 0)
    if latent is None:
        vectors += q_dim + 2 * kv_dim if config.attention_bias else 0
        vectors += (2 * head if config.qk_norm else 0) + (q_dim + kv_dim if config.qk_norm_wide else 0)
        return (hidden * (q_dim + 2 * kv_dim) + q_dim * hidden, vectors), 2 * kv_dim
    q_rank, kv_down = latent.query_rank or 0, latent.kv_rank + latent.rope_dim
    queries = (hidden + q_dim) * q_rank if q_rank else hidden * q_dim
    keys_values = hidden * kv_down + latent.kv_rank * heads * (head - latent.rope_dim + latent.value_dim)
    vectors += q_rank + latent.kv_rank + (q_rank + kv_down if config.attention_bias else 0)
    return (queries + keys_values + heads * latent.value_dim * hidden, vectors), kv_down
