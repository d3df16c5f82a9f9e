"""Peak memory of a training rank and of an engine, from shapes: what autograd keeps, what the optimiser holds, what travels.

The counts follow the operators of `stretto.ops` line by line, and ``python -m bench.plan`` compares them with measured peaks. Shape
letters: N tokens of a rank's micro-batch, K experts per token, D hidden, I expert width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from stretto.base.numbers import counted
from stretto.model.counts import count
from stretto.model.spec import ModelConfig
from stretto.optim.schedule import Moments, OptimConfig
from stretto.planner.hardware import Dtype

_CHUNK, _DEVICE_CHUNK, _CHUNK_LOGITS = 1024, 4096, 2**28


def chunk_tokens(vocab_size: int, on_gpu: bool) -> int:
    """Tokens whose logits are in memory at once: `stretto.ops.logprob.chunk_tokens`, which this room cannot import (it imports torch)."""
    return max(_DEVICE_CHUNK, 1 << (_CHUNK_LOGITS // vocab_size).bit_length() - 1) if on_gpu else _CHUNK


BYTES: Mapping[Dtype, int] = {"float32": 4, "bfloat16": 2}
WIDE = BYTES["float32"]
"""Bytes of each number of the weights, gradients, moments and residual stream, which are held in fp32."""
_MOMENTS: Mapping[Moments, float] = {"fp32": 8, "bf16": 4, "int8": 2 + 2 * WIDE / 128}
"""Bytes of a parameter's two moments; codes of 8 bits have a scale for each block (`stretto.optim.compact.BLOCK`)."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Division of a training step over ranks."""

    ranks: int
    ep: int
    micro_rows: int
    """Rows of one pass, over all ranks."""
    micro_batches: int
    """Passes of one step."""
    recompute: bool = False

    @property
    def rows(self) -> int:
        """Rows of one pass on one rank; the last rank's padding included."""
        return -(-self.micro_rows // self.ranks)

    def __str__(self) -> str:
        ranks, ep = counted(self.ranks, "rank"), f", ep {self.ep}" if self.ep > 1 else ""
        return f"{ranks}{ep}, {self.micro_batches} x {self.micro_rows} rows" + (", recompute" if self.recompute else "")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers of parameters of the full network by how they are divided over ranks."""

    outer: int
    """Embedding, head and final norm: gathered for the whole pass."""
    replicated: int
    """Norms, biases and routers: whole on each rank."""
    dense_block: int
    """Other weights of a block of ``dense_layers``, 0 without any: gathered while the block computes."""
    moe_block: int
    """Other weights of an MoE block without its routed experts, 0 without any: gathered too."""
    expert: int
    """One routed expert."""
    experts: int
    """Routed experts of the layer that has the most: gathered too, but only a rank's share under expert parallelism."""
    all_experts: int
    """Routed experts of all layers."""
    matrix: int
    """Largest stack of matrices that Muon updates at once."""
    total: int

    def held(self, ranks: int) -> float:
        """Parameters on each of ``ranks`` ranks."""
        return self.replicated + (self.total - self.replicated) / ranks


def sizes(config: ModelConfig) -> Sizes:
    hidden = config.hidden_size
    total = count(config, config.full()).total_params
    outer = config.vocab_size * hidden * (1 if config.tie_embeddings else 2) + hidden
    expert = 3 * hidden * config.expert_intermediate_size
    if config.expert_bias:
        expert += 2 * config.expert_intermediate_size + hidden
    experts = max(config.experts_by_layer, default=0) * expert
    routers = sum(config.experts_by_layer) * hidden
    norms = 2 * hidden * config.num_layers
    all_experts = sum(config.experts_by_layer) * expert
    others = total - outer - routers - norms - all_experts
    qkv = hidden * (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    num_dense, num_moe = len(config.dense_layers), config.num_moe_layers
    dense = 3 * hidden * config.dense_intermediate_size
    shared = 3 * hidden * config.num_shared_experts * config.expert_intermediate_size
    attention = (others - num_dense * dense - num_moe * shared) // config.num_layers
    dense_block, moe_block = (attention + dense) * bool(num_dense), (attention + shared) * bool(num_moe)
    matrix = max(experts * 2 // 3, 2 * hidden * config.dense_intermediate_size, qkv)
    return Sizes(outer, routers + norms, dense_block, moe_block, expert, experts, all_experts, matrix, total)


@dataclass(frozen=True, slots=True)
class Memory:
    """Peak memory of one rank or engine by part, in bytes."""

    weights: float
    gradients: float = 0.0
    optimiser: float = 0.0
    activations: float = 0.0
    """Kept for the backward pass of one micro-batch."""
    head: float = 0.0
    """Logits of a chunk, and the head's gradient before it is summed."""
    transient: float = 0.0
    """Temporary tensors of one layer's backward pass, or of the optimiser."""
    gathered: float = 0.0
    """Weights of blocks that FSDP gathers, and the buffers of their gradients."""
    exchanged: float = 0.0
    """Buffers of the all-to-all of expert parallelism."""
    teacher: float = 0.0
    snapshot: float = 0.0
    """Copy of weights and optimiser state from which `stretto.train.snapshot.SnapshotWriter` writes; 0 where the copy is in the memory
    of an accelerator's host."""
    cache: float = 0.0
    """Keys and values of an engine."""

    @property
    def total(self) -> float:
        return sum(getattr(self, each.name) for each in fields(self))


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """Activations of one layer, in bytes."""

    kept: float
    """Per token: what autograd keeps, on average over the layers."""
    temporary: float
    """Per token: temporary tensors of the backward pass."""
    exchanged: float
    """Per token at one of its experts: what the all-to-all of expert parallelism needs."""


def layer_bytes(config: ModelConfig, dtype: Dtype, ep: int) -> LayerBytes:
    each, hidden, latent = BYTES[dtype], config.hidden_size, config.latent
    heads, kv_heads, width = config.num_heads, config.num_kv_heads, config.head_dim
    is_mixed = dtype != "float32"
    kept: float = 2 * hidden * WIDE  # both norms keep the normed stream
    if latent is None:
        qkv, turned = (heads + 2 * kv_heads) * width, (heads + kv_heads) * width
        kept += each * (hidden + heads * width) + WIDE * heads
        if config.attention_sinks:  # kernels get, and give, wider heads (`stretto.ops.operators`)
            kept += each * (2 * heads + 2 * kv_heads) * (width // 8 + 1) * 8
        else:
            kept += each * (qkv + turned)
        if config.qkv_clip is not None:  # a copy of the values, and of queries and keys that were normed
            kept += each * (qkv if config.qk_norm or config.qk_norm_wide else kv_heads * width)
    else:
        value = max(width, latent.value_dim)
        keys = heads * (width - latent.rope_dim + latent.value_dim)
        kept += each * (hidden + (latent.query_rank or 0) + latent.kv_rank + keys + 4 * heads * value)
        turned = 0
    if config.qk_norm or config.qk_norm_wide:
        kept += turned * (WIDE + (each if is_mixed else 0)) + WIDE * (heads + kv_heads)
    temporary = each * 3 * (heads + 2 * kv_heads) * width
    slots, inner = config.top_k, config.expert_intermediate_size
    shared, num_dense, num_moe = config.num_shared_experts * inner, len(config.dense_layers), config.num_moe_layers
    swiglu = 4 if config.clamped_swiglu is None else 7  # tensors as wide as the layer; clamps keep three more
    in_dense = each * (swiglu * config.dense_intermediate_size + hidden)
    in_moe = hidden * WIDE + each * swiglu * shared + (each * hidden if is_mixed and shared else 0)
    in_scores = 2 * WIDE  # per expert; with the router's input, in fp32
    if ep == 1:  # the operator keeps gate-up outputs and indices (`stretto.ops.moe`), and a cast copy of its input
        in_moe += each * hidden if is_mixed else 0
        in_slot = each * 2 * inner + 44
    else:  # gates multiply the output, so that it is kept
        in_slot = each * (2 * hidden + 2 * inner) + 60
    moe = num_moe * in_moe + sum(config.experts_by_layer) * in_scores + sum(config.top_k_by_layer) * in_slot
    kept += (num_dense * in_dense + moe) / config.num_layers
    if num_dense:
        temporary = max(temporary, in_dense)
    if num_moe:
        temporary = max(temporary, slots * (each * (hidden + 3 * inner) + (WIDE + each) * hidden))
    return LayerBytes(kept, temporary, 2.0 * each * hidden if ep > 1 else 0.0)


def training_memory(
    config: ModelConfig,
    layout: Layout,
    length: int,
    dtype: Dtype,
    optim: OptimConfig,
    *,
    prefix_keys: float | None = None,
    taught: bool = False,
    repeats: bool = False,
    on_gpu: bool = True,
    rounds: bool = False,
) -> Memory:
    """Peak of one rank over a training step.

    Args:
        length: tokens per row.
        optim: names the optimiser and the storage of its states; those that are not in fp32 are of one rank.
        prefix_keys: rows hold several documents, as in RL and SFT, and for each of their tokens attention copies this number of keys
            of prefixes that documents share; None: every row is one document.
        taught: a chunk's logits of a teacher are in memory too.
        repeats: a micro-batch has several backward passes, so that gradients exist during the second.
        on_gpu: in fp32, CUDA's attention without a mask keeps all scores where query heads share a key head: no fused kernel has both.
        rounds: products in bf16 of one rank round operands that stay in fp32, as on a CPU with AMX or AVX512_BF16
            (`stretto.ops.native.training`).

    Rows of several documents attend by document, or through a mask [T, T] where `stretto.model.attention.Geometry.of` needs one.
    """
    is_rounded = rounds and dtype == "bfloat16" and layout.ranks == 1 and optim.master == "fp32"
    stored: Dtype = "float32" if is_rounded else dtype
    parts, each, bytes_of = sizes(config), BYTES[stored], layer_bytes(config, stored, layout.ep)
    ranks, num_tokens, num_layers = layout.ranks, layout.rows * length, config.num_layers
    is_mixed, is_packed = stored != "float32", prefix_keys is not None
    needs_mask = (
        dtype == "float32" or bool(config.sliding_layers) or config.attention_sinks or config.latent is not None
    )
    kept = bytes_of.kept
    if prefix_keys and not needs_mask:
        kept += each * 2 * config.num_kv_heads * config.head_dim * prefix_keys
    if on_gpu and not is_mixed and not is_packed and config.num_heads != config.num_kv_heads:
        kept += WIDE * config.num_heads * length
    # without FSDP, autocast keeps a bf16 copy of each weight for the backward pass
    has_casts = is_mixed and ranks == 1 and optim.master == "fp32"
    casts = (parts.total - parts.outer) / num_layers * each if has_casts else 0.0
    layer = num_tokens * kept + casts
    stream = num_tokens * config.hidden_size * WIDE
    # with recompute, a layer keeps its input, and all of its activations only during its own backward pass
    layers = num_layers * (stream if layout.recompute else layer)
    activations = layers + 3 * stream + num_tokens * (40 + (length if is_packed and needs_mask else 0))
    recomputed = layer if layout.recompute else 0.0

    vocabulary = config.vocab_size * config.hidden_size
    head = _head_bytes(config, num_tokens, stored, taught, on_gpu)
    outer = parts.outer * WIDE if ranks > 1 else 0.0
    # a block's weights and those of the next one, and its gradients before and during their sum in fp32
    largest = max(parts.dense_block, parts.moe_block + parts.experts / layout.ep)
    block = largest * (3 * each + WIDE) if ranks > 1 else 0.0
    backward = {
        "transient": num_tokens * bytes_of.temporary,
        "gathered": outer + block,
        "exchanged": num_tokens * config.top_k * bytes_of.exchanged,
    }

    one_by_one = optim.in_backward and not repeats
    stored_parts = _stored(parts, optim, ranks)
    gradients = stored_parts.gradients
    if one_by_one:  # on a CPU the norm of a gradient needs a copy in fp32
        narrow = WIDE if optim.master == "fp32" else BYTES["bfloat16"]
        copied = WIDE if narrow < WIDE and not on_gpu else 0
        gradients = max(parts.matrix * (narrow + copied), vocabulary * WIDE)
    is_first = layout.micro_batches == 1 and not repeats
    early = vocabulary * WIDE if is_first and not one_by_one else gradients
    moments = (  # one of them is the peak: logits, the last block's backward pass, the first block's, the optimiser
        {"gradients": 0.0 if is_first else gradients, "activations": activations, "head": head, "gathered": outer},
        {"gradients": early, "activations": activations + recomputed} | backward,
        {"gradients": gradients, "activations": layer} | backward,
        {"gradients": gradients, "transient": parts.matrix * WIDE * 4 if optim.name == "muon" else 0.0},
    )
    peak = max(moments, key=lambda moment: sum(moment.values()))
    return replace(stored_parts, **peak)


def _head_bytes(config: ModelConfig, num_tokens: int, dtype: Dtype, taught: bool, on_gpu: bool) -> float:
    """Bytes of a chunk's logits and of the head's gradient before it is summed."""
    is_mixed, vocabulary = dtype != "float32", config.vocab_size * config.hidden_size
    num_chunk = chunk_tokens(config.vocab_size, on_gpu)
    logits = float(min(num_chunk, num_tokens) * config.vocab_size)
    if on_gpu or is_mixed:  # the last chunk's are freed after the next one's product
        chunk = logits * (12 if is_mixed else 8) * (2 if taught else 1) / (2 if num_tokens <= num_chunk else 1)
    else:  # all chunks' are in one place (`stretto.ops.logprob.Room`); with a teacher: its logits, and the differences
        chunk = logits * WIDE * (3 if taught else 1)
    return vocabulary * WIDE + chunk + (vocabulary * BYTES[dtype] if is_mixed else 0)


def _stored(parts: Sizes, optim: OptimConfig, ranks: int) -> Memory:
    """Weights, gradients and states of the optimiser on one rank."""
    held = parts.held(ranks)
    matrices = (parts.total - parts.outer - parts.replicated) / ranks  # updated by Muon, or stored in bf16
    narrow = 0 if optim.master == "fp32" else WIDE - BYTES["bfloat16"]  # bytes saved per element of a gradient
    states = held * _MOMENTS[optim.moments] - (WIDE * matrices if optim.name == "muon" else 0.0)  # Muon has one moment
    weights = WIDE * held - (matrices * narrow if optim.master == "bf16_stochastic" else 0.0)
    return Memory(weights, gradients=WIDE * held - matrices * narrow, optimiser=states)


def engine_memory(
    config: ModelConfig, value_bytes: int, decoded_bytes: int, cache_bytes: float, max_batch: int, prefill: int
) -> Memory:
    """Memory of an engine: weights, the next version of the weights beside them while it is loaded, cache, and one step.

    Args:
        value_bytes: bytes of a weight's value.
        decoded_bytes: bytes of a weight that a decoding step reads; fewer than of its value: of a copy (FP8).
    """
    total = count(config, config.full()).total_params
    held_bytes = 2 * value_bytes + (decoded_bytes if decoded_bytes < value_bytes else 0)
    step = max(max_batch, prefill) * value_bytes * 8 * config.hidden_size + max_batch * config.vocab_size * 3 * WIDE
    return Memory(float(total * held_bytes), activations=step, cache=cache_bytes)
