"""Time of a training step and of a decoding step, by part: the slowest part is what limits.

The forward and backward passes overlap with FSDP's gathers and with reading weights, so the slowest of the three counts; the
all-to-all of expert parallelism and the optimiser wait for nothing and add to it. Shape letters as in `stretto.planner.memory`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from stretto.model.counts import count
from stretto.model.spec import ModelConfig
from stretto.planner.hardware import DECODE_SHARE, LATENCY_S, LINK_SHARE, Dtype, Hardware
from stretto.planner.memory import BYTES, WIDE, Layout, sizes

UPDATE_BYTES = 52
"""Bytes that clipping, casts and AdamW move for each parameter of a rank: 12 + 12 + 28 (Muon's momentum moves about as many)."""
NEWTON_SCHULZ = 5
"""Iterations of Muon's orthogonalisation (`stretto.optim.build`)."""

PARTS = {
    "compute": "compute",
    "weights": "memory bandwidth",
    "gathers": "FSDP gathers",
    "launches": "kernel launches",
    "exchange": "all-to-all",
    "update": "optimiser",
}
"""Names of the fields of `StepTime` in tables and figures."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one training step by part."""

    compute: float
    """Forward and backward passes."""
    weights: float
    """Reading the weights from the accelerator's memory, once a pass; overlaps with ``compute``."""
    gathers: float
    """FSDP's gathers of weights and sums of gradients; overlaps with ``compute``."""
    launches: float
    """Starting the kernels, as long as a decoding step takes for its layers; overlaps with ``compute``."""
    exchange: float
    """All-to-all of expert parallelism."""
    update: float
    """Clipping and optimiser."""

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of the parts that add up to the step, by the names of `PARTS`: the longest of those that overlap, and the others."""
        longest = max(("compute", "weights", "gathers", "launches"), key=lambda name: getattr(self, name))
        return {PARTS[name]: getattr(self, name) for name in (longest, "exchange", "update")}

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def limit(self) -> str:
        """Name of the part that takes the longest."""
        parts = self.parts
        return max(parts, key=lambda name: parts[name])


def gather_s(num_bytes: float, group: int, in_node: int, hardware: Hardware) -> float:
    """Time of an all-gather (or reduce-scatter) of ``num_bytes`` over ``group`` ranks, ``in_node`` of which share a node.

    Within a node the links limit. Between nodes, each node receives nearly all bytes once, through the network cards of the group's
    ranks there.
    """
    if group == 1:
        return 0.0
    seconds = num_bytes * (1 - 1 / group) / (hardware.link * LINK_SHARE)
    if group > in_node:
        seconds = max(seconds, num_bytes * (1 - in_node / group) / (in_node * hardware.network * LINK_SHARE))
    return seconds + LATENCY_S * math.log2(group)


def exchange_s(num_bytes: float, ep: int, hardware: Hardware) -> float:
    """Time of an all-to-all in which every rank sends ``num_bytes`` in equal parts to ``ep`` neighbouring ranks."""
    if ep == 1:
        return 0.0
    near = min(ep, hardware.per_node)
    inside = num_bytes * (near - 1) / ep / (hardware.link * LINK_SHARE)
    outside = num_bytes * (ep - near) / ep / (hardware.network * LINK_SHARE)
    return max(inside, outside) + LATENCY_S * math.log2(ep)


def step_time(
    config: ModelConfig,
    layout: Layout,
    length: int,
    dtype: Dtype,
    optimiser: str,
    hardware: Hardware,
    *,
    extra_forwards: float = 0.0,
) -> StepTime:
    """Time of a step of the full network.

    Args:
        extra_forwards: forward passes beside the trained one, of teachers and references, per micro-batch.
    """
    parts, each, num_layers = sizes(config), BYTES[dtype], config.num_layers
    ranks, ep, num = layout.ranks, layout.ep, layout.micro_batches
    num_tokens, passes = layout.rows * length, (4 if layout.recompute else 3) + extra_forwards
    flops = count(config, config.full()).forward_flops(num_tokens, length)
    weights = each * (parts.total - parts.all_experts + parts.all_experts / ep)
    exchanges, token = 6 if layout.recompute else 4, config.hidden_size * each  # bytes of a token
    update = UPDATE_BYTES * parts.held(ranks) / hardware.bandwidth
    if optimiser == "muon":
        update += _muon_s(config, ranks, hardware)
    return StepTime(
        compute=num * passes * flops / hardware.rate(dtype),
        weights=num * passes * weights / hardware.bandwidth,
        gathers=num * _gathers_s(config, layout, dtype, hardware),
        launches=num * passes * num_layers * hardware.layer_s.value,
        exchange=num * exchanges * sum(exchange_s(num_tokens * k * token, ep, hardware) for k in config.top_k_by_layer),
        update=update,
    )


def _gathers_s(config: ModelConfig, layout: Layout, dtype: Dtype, hardware: Hardware) -> float:
    """Time of FSDP's collectives in one pass: it gathers the matrices of blocks in the forward and in the backward pass and sums their
    gradients in fp32; embedding and head it gathers once, in fp32."""
    if layout.ranks == 1:
        return 0.0
    parts, num_layers = sizes(config), config.num_layers
    ranks, copies, near = layout.ranks, layout.ranks // layout.ep, min(hardware.per_node, layout.ranks)
    width = 2 * BYTES[dtype] + WIDE
    blocks = parts.dense_block * len(config.dense_layers) + parts.moe_block * config.num_moe_layers
    whole = width * blocks + 2 * WIDE * parts.outer
    experts = width * parts.all_experts / layout.ep
    seconds = gather_s(whole, ranks, near, hardware) + gather_s(experts, copies, max(1, near // layout.ep), hardware)
    return seconds + 3 * num_layers * LATENCY_S * math.log2(ranks)


def _muon_s(config: ModelConfig, ranks: int, hardware: Hardware) -> float:
    """Time in which each rank gathers all hidden matrices and orthogonalises them, as `stretto.optim.build.orthogonal` does."""
    hidden, inner = config.hidden_size, config.expert_intermediate_size
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    shapes = [(config.num_layers, heads, hidden), (config.num_layers, hidden, config.num_heads * config.head_dim)]
    for width, num in (
        (inner, sum(config.experts_by_layer)),
        (config.dense_intermediate_size, len(config.dense_layers)),
        (config.num_shared_experts * inner, config.num_moe_layers),
    ):
        shapes += [(num, 2 * width, hidden), (num, hidden, width)]
    flops = sum(NEWTON_SCHULZ * num * (4 * min(m, n) ** 2 * max(m, n) + 2 * min(m, n) ** 3) for num, m, n in shapes)
    num_bytes = sum(WIDE * num * m * n for num, m, n in shapes)
    seconds = gather_s(num_bytes, ranks, min(hardware.per_node, ranks), hardware)
    return seconds + flops / hardware.rate("bfloat16" if hardware.is_gpu else "float32")


def decode_s(
    config: ModelConfig, batch: int, context: float, num_bytes: int, hardware: Hardware, gpus: int = 1
) -> float:
    """Time of an engine's step that adds one token to each of ``batch`` sequences of ``context`` tokens on average.

    Launches take a time of their own for each layer. Weights (of the experts that the batch touches) and cached keys and values
    are read at a share of the bandwidth, from ``gpus`` accelerators at once.

    Args:
        num_bytes: bytes of a weight.
    """
    counts = count(config, config.full())
    layers = zip(config.experts_by_layer, config.top_k_by_layer, strict=True)
    untouched = sum(experts * (1 - k / experts) ** batch for experts, k in layers)
    weights = counts.total_params - untouched * sizes(config).expert
    moved = num_bytes * (weights + batch * context * counts.kv_elements)
    products = batch * counts.forward_flops(1, context) / hardware.rate(_dtype_of(num_bytes))
    launches = config.num_layers * (hardware.layer_s.value + hardware.slot_s * batch)
    reduces = 2 * config.num_layers * LATENCY_S * math.log2(gpus)
    return launches + max(moved / (hardware.bandwidth * DECODE_SHARE), products) / gpus + reduces


def prefill_s(config: ModelConfig, num_tokens: int, num_bytes: int, hardware: Hardware, gpus: int = 1) -> float:
    """Time in which an engine computes a prompt of ``num_tokens``."""
    flops = count(config, config.full()).forward_flops(num_tokens, num_tokens)
    return flops / (hardware.rate(_dtype_of(num_bytes)) * gpus)


def _dtype_of(num_bytes: int) -> Dtype:
    """The products' data type in an engine with weights of ``num_bytes``; FP8 is taken as fast as bf16."""
    return "float32" if num_bytes == WIDE else "bfloat16"
