"""Time of a training step and of a decoding step, by part: the slowest part is what limits.

The forward and backward passes overlap with FSDP's gathers and with reading weights, so the slowest of the three counts; the
all-to-all of expert parallelism and the optimiser wait for nothing and add to it. Shape letters as in `stretto.planner.memory`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from stretto.model.spec import ModelConfig, count
from stretto.planner.hardware import DECODE_SHARE, LATENCY_S, LINK_SHARE, Dtype, Hardware
from stretto.planner.memory import WIDE, Layout, sizes

UPDATE_BYTES = 52
"""Bytes that clipping, casts and AdamW move for each parameter of a rank: 12 + 12 + 28 (Muon's momentum moves about as many)."""
NEWTON_SCHULZ = 5
"""Iterations of Muon's orthogonalisation (`stretto.optim.build`)."""


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
    def total(self) -> float:
        return max(self.compute, self.weights, self.gathers, self.launches) + self.exchange + self.update

    @property
    def limit(self) -> str:
        """Name of the part that takes the longest."""
        names = {"compute": "compute", "weights": "memory bandwidth", "gathers": "FSDP gathers"}
        names |= {"launches": "kernel launches", "exchange": "all-to-all", "update": "optimiser"}
        return names[max(names, key=lambda name: getattr(self, name))]


def gather_s(num_bytes: float, group: int, in_node: int, hardware: Hardware) -> float:
    """Time of an all-gather (or reduce-scatter) of ``num_bytes`` over ``group`` ranks, ``in_node`` of which share a node.

    Within a node the links limit. Between nodes, each node receives nearly all bytes once, through the network cards of the group's
    ranks there.
    """
    if group == 1:
        return 0.0
    share = LINK_SHARE.value
    seconds = num_bytes * (1 - 1 / group) / (hardware.link * share)
    if group > in_node:
        seconds = max(seconds, num_bytes * (1 - in_node / group) / (in_node * hardware.network * share))
    return seconds + LATENCY_S.value * math.log2(group)


def exchange_s(num_bytes: float, ep: int, hardware: Hardware) -> float:
    """Time of an all-to-all in which every rank sends ``num_bytes`` in equal parts to ``ep`` neighbouring ranks."""
    if ep == 1:
        return 0.0
    near, share = min(ep, hardware.per_node), LINK_SHARE.value
    inside = num_bytes * (near - 1) / ep / (hardware.link * share)
    outside = num_bytes * (ep - near) / ep / (hardware.network * share)
    return max(inside, outside) + LATENCY_S.value * math.log2(ep)


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
    counts, parts = count(config, config.full()), sizes(config)
    ranks, ep, num = layout.ranks, layout.ep, layout.micro_batches
    each, num_layers = (WIDE if dtype == "float32" else 2), config.num_layers
    rate = hardware.flops[dtype] * hardware.share[dtype].value
    num_tokens, passes = layout.rows * length, (4 if layout.recompute else 3) + extra_forwards
    compute = num * passes * counts.forward_flops(num_tokens, length) / rate
    experts = parts.experts * config.num_moe_layers
    dense = parts.total - experts
    weights = num * passes * each * (dense + experts / ep) / hardware.bandwidth
    # matrices of blocks are gathered in the forward and in the backward pass, embedding and head once, in fp32
    near = min(hardware.per_node, ranks)
    copies, near_copies = ranks // ep, max(1, min(hardware.per_node, ranks) // ep)
    blocks = parts.block * num_layers
    gathers = (2 * each + WIDE) * blocks, (2 * each + WIDE) * experts / ep, 2 * WIDE * parts.outer
    gathered = gather_s(gathers[0] + gathers[2], ranks, near, hardware) + gather_s(
        gathers[1], copies, near_copies, hardware
    )
    if ranks > 1:
        gathered += 3 * num_layers * LATENCY_S.value * math.log2(ranks)
    slots = num_tokens * config.top_k * config.hidden_size * each
    exchanges = (6 if layout.recompute else 4) * config.num_moe_layers
    held = parts.replicated + (parts.total - parts.replicated) / ranks
    update = UPDATE_BYTES * held / hardware.bandwidth
    if optimiser == "muon":
        update += _muon_s(config, ranks, near, hardware)
    launches = num * passes * num_layers * hardware.layer_s.value
    exchange = num * exchanges * exchange_s(slots, ep, hardware)
    return StepTime(compute, weights, num * gathered, launches, exchange, update)


def _muon_s(config: ModelConfig, ranks: int, near: int, hardware: Hardware) -> float:
    """Time in which each rank gathers all hidden matrices and orthogonalises them, as `stretto.optim.build.orthogonal` does."""
    dtype: Dtype = "float32" if hardware.name == "cpu" else "bfloat16"
    hidden, inner = config.hidden_size, config.expert_intermediate_size
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    num_experts = sum(config.experts_by_layer)
    shapes = [(num_experts, 2 * inner, hidden), (num_experts, hidden, inner)]
    shapes += [(config.num_layers, heads, hidden), (config.num_layers, hidden, config.num_heads * config.head_dim)]
    for width, num in (
        (config.dense_intermediate_size, len(config.dense_layers)),
        (config.num_shared_experts * inner, config.num_moe_layers),
    ):
        shapes += [(num, 2 * width, hidden), (num, hidden, width)]
    flops = sum(NEWTON_SCHULZ * num * (4 * min(m, n) ** 2 * max(m, n) + 2 * min(m, n) ** 3) for num, m, n in shapes)
    gathered = gather_s(sum(WIDE * num * m * n for num, m, n in shapes), ranks, near, hardware)
    return gathered + flops / (hardware.flops[dtype] * hardware.share[dtype].value)


def decode_s(
    config: ModelConfig, batch: int, context: float, num_bytes: int, hardware: Hardware, gpus: int = 1
) -> float:
    """Time of an engine's step that adds one token to each of ``batch`` sequences of ``context`` tokens on average.

    Launches take a time of their own for each layer. Weights (of the experts that the batch touches) and cached keys and values
    are read at a share of the bandwidth, from ``gpus`` accelerators at once.
    """
    counts, parts = count(config, config.full()), sizes(config)
    touched = 1 - (1 - config.top_k / config.num_experts) ** batch
    experts = parts.experts * config.num_moe_layers
    moved = num_bytes * (counts.total_params - experts * (1 - touched) + batch * context * counts.kv_elements)
    dtype: Dtype = "float32" if num_bytes == WIDE else "bfloat16"
    products = batch * counts.forward_flops(1, context) / (hardware.flops[dtype] * hardware.share[dtype].value)
    launches = config.num_layers * (hardware.layer_s.value + hardware.slot_s.value * batch)
    reduces = 2 * config.num_layers * LATENCY_S.value * math.log2(gpus) if gpus > 1 else 0.0
    return launches + max(moved / (hardware.bandwidth * DECODE_SHARE.value), products) / gpus + reduces


def prefill_s(config: ModelConfig, num_tokens: int, num_bytes: int, hardware: Hardware, gpus: int = 1) -> float:
    """Time in which an engine computes a prompt of ``num_tokens``."""
    dtype: Dtype = "float32" if num_bytes == WIDE else "bfloat16"
    flops = count(config, config.full()).forward_flops(num_tokens, num_tokens)
    return flops / (hardware.flops[dtype] * hardware.share[dtype].value * gpus)


def sources_of(hardware: Hardware, dtype: Dtype, *, engines: bool, ranks: int) -> Mapping[str, str]:
    """Every efficiency that a prediction uses, with its entry in the log; empty where nobody measured it."""
    used = {"share of products": hardware.share[dtype].source}
    if ranks > 1:
        used["share of links"] = LINK_SHARE.source
    if engines:
        used |= {"launches of a decoding step": hardware.layer_s.source, "bandwidth of decoding": DECODE_SHARE.source}
    return used
