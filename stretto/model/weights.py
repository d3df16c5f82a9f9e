"""Our tensors and their names on disk, as one table that is read in both directions.

On disk every expert and every projection is a tensor of its own; in memory q, k and v are one matrix, gate and up are
one matrix, and a layer's experts are stacked. ERNIE rotates neighbouring channels where we rotate halves, so its query
and key rows change places on the way.

Shape letters: D hidden, V vocabulary, E experts on disk, I expert width, F = 2·I, H heads, C head width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stretto.model.families import Family, stored_experts, stored_shared_experts, stored_tied
from stretto.model.spec import ModelConfig

NEVER_CHOSEN = -1e4
"""Selection bias of a padding expert: below any score plus any trained bias, and finite in fp16."""


@dataclass(frozen=True, slots=True)
class Alias:
    """Another place where software keeps a stored tensor."""

    name: str
    shape: tuple[int, ...]
    """Of the whole tensor of that name."""
    part: tuple[int | slice, ...] = ()
    """Where in it."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor on disk and its place in our state dict."""

    name: str
    shape: tuple[int, ...]
    ours: str | None
    """Name in our state dict; None for a constant, which has no place there."""
    part: tuple[int | slice, ...] = ()
    """Where in ours."""
    neighbours_of: int = 0
    """Width of a head whose rows pair neighbours on disk and halves in memory; 0 where the order is the same."""
    filling: float = 0.0
    """What a constant holds, and any rows beyond ours (padding experts)."""
    always_fp32: bool = False
    is_copy: bool = False
    """Holds what another stored tensor holds: need not be there, but must be equal."""
    aliases: tuple[Alias, ...] = ()

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Size on disk where the weights are of ``dtype``."""
        return math.prod(self.shape) * (torch.float32 if self.always_fp32 else dtype).itemsize


def stored_tensors(config: ModelConfig, family: Family) -> Iterator[Stored]:
    """Every tensor of a checkpoint of ``config`` in ``family``, in the order of the layers."""
    hidden = config.hidden_size
    yield Stored("model.embed_tokens.weight", (config.vocab_size, hidden), "embedding.weight")
    for layer in range(config.num_layers):
        theirs, ours = f"model.layers.{layer}", f"blocks.{layer}"
        yield Stored(f"{theirs}.input_layernorm.weight", (hidden,), f"{ours}.attention_norm.weight")
        yield from _attention(config, family, f"{theirs}.self_attn", f"{ours}.attention")
        yield Stored(f"{theirs}.post_attention_layernorm.weight", (hidden,), f"{ours}.mlp_norm.weight")
        if layer in config.dense_layers:
            yield from _swiglu(f"{theirs}.mlp", f"{ours}.mlp", hidden, config.dense_intermediate_size)
        else:
            yield from _moe(config, family, config.moe_layers.index(layer), f"{theirs}.mlp", f"{ours}.mlp")
    yield Stored("model.norm.weight", (hidden,), "norm.weight")
    if not config.tie_embeddings:
        yield Stored("lm_head.weight", (config.vocab_size, hidden), "head.weight")
    elif not stored_tied(config, family):
        yield tied_head(config)


def tied_head(config: ModelConfig) -> Stored:
    """The head of a network whose head is its embedding."""
    return Stored("lm_head.weight", (config.vocab_size, config.hidden_size), "embedding.weight", is_copy=True)


def _attention(config: ModelConfig, family: Family, theirs: str, ours: str) -> Iterator[Stored]:
    hidden, head = config.hidden_size, config.head_dim
    neighbours_of = head if family == "ernie4_5_moe" else 0
    start = 0
    for letter, num_heads in (("q", config.num_heads), ("k", config.num_kv_heads), ("v", config.num_kv_heads)):
        rows = num_heads * head
        part = (slice(start, start + rows),)
        pairs = 0 if letter == "v" else neighbours_of
        yield Stored(f"{theirs}.{letter}_proj.weight", (rows, hidden), f"{ours}.qkv.weight", part, pairs)
        if config.attention_bias:
            yield Stored(f"{theirs}.{letter}_proj.bias", (rows,), f"{ours}.qkv.bias", part, pairs)
        start += rows
    yield Stored(f"{theirs}.o_proj.weight", (hidden, config.num_heads * head), f"{ours}.out.weight")
    if config.attention_bias and family == "qwen3_moe":  # transformers gives the output a bias too; ours has none
        yield Stored(f"{theirs}.o_proj.bias", (hidden,), None)
    if config.qk_norm:
        yield Stored(f"{theirs}.q_norm.weight", (head,), f"{ours}.q_norm")
        yield Stored(f"{theirs}.k_norm.weight", (head,), f"{ours}.k_norm")


def _swiglu(theirs: str, ours: str, hidden: int, width: int) -> Iterator[Stored]:
    gate, up = (slice(0, width),), (slice(width, 2 * width),)
    yield Stored(f"{theirs}.gate_proj.weight", (width, hidden), f"{ours}.gate_up.weight", gate)
    yield Stored(f"{theirs}.up_proj.weight", (width, hidden), f"{ours}.gate_up.weight", up)
    yield Stored(f"{theirs}.down_proj.weight", (hidden, width), f"{ours}.down.weight")


def _moe(config: ModelConfig, family: Family, row: int, theirs: str, ours: str) -> Iterator[Stored]:
    hidden, width = config.hidden_size, config.expert_intermediate_size
    own, stored = config.experts_by_layer[row], stored_experts(config, family)
    yield Stored(f"{theirs}.gate.weight", (stored, hidden), f"{ours}.gate")
    bias = Stored("", (stored,), f"{ours}.bias_WE", (0,), filling=NEVER_CHOSEN, always_fp32=True)
    if family == "glm4_moe":
        yield replace(bias, name=f"{theirs}.gate.e_score_correction_bias")
    elif family == "ernie4_5_moe":
        in_memory = Alias(f"{theirs}.gate.moe_statics.e_score_correction_bias", (1, stored))
        name = f"{theirs}.moe_statics.e_score_correction_bias"
        yield replace(bias, name=name, shape=(1, stored), aliases=(in_memory,))
    for expert in range(stored):
        place = f"{theirs}.experts.{expert}"
        gate_up = f"{ours}.gate_up" if expert < own else None
        down = f"{ours}.down" if expert < own else None
        for name, rows in (("gate_proj", slice(0, width)), ("up_proj", slice(width, 2 * width))):
            fused = Alias(f"{theirs}.experts.gate_up_proj", (stored, 2 * width, hidden), (expert, rows))
            yield Stored(f"{place}.{name}.weight", (width, hidden), gate_up, (expert, rows), aliases=(fused,))
        fused = Alias(f"{theirs}.experts.down_proj", (stored, hidden, width), (expert,))
        yield Stored(f"{place}.down_proj.weight", (hidden, width), down, (expert,), aliases=(fused,))
    shared = width * stored_shared_experts(config, family)
    for tensor in _swiglu(f"{theirs}.shared_experts", f"{ours}.shared", hidden, shared) if shared else ():
        yield tensor if config.num_shared_experts else replace(tensor, ours=None, part=())


def to_stored(stored: Stored, state: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """The tensor ``stored`` as it goes to disk, on the CPU; ``state`` is our state dict."""
    dtype = torch.float32 if stored.always_fp32 else dtype
    if stored.ours is None:
        return torch.full(stored.shape, stored.filling, dtype=dtype)
    tensor = state[stored.ours].detach()[stored.part].to("cpu", dtype)
    if stored.neighbours_of:
        tensor = _swap_axes(tensor, 2, stored.neighbours_of // 2)
    missing = math.prod(stored.shape) // math.prod(tensor.shape[1:]) - tensor.shape[0]
    if missing:
        tensor = torch.cat((tensor, tensor.new_full((missing, *tensor.shape[1:]), stored.filling)))
    tensor = tensor.reshape(stored.shape).contiguous()
    return tensor.clone() if stored.is_copy else tensor  # safetensors refuses two names of one memory


def from_stored(stored: Stored, tensor: Tensor, state: Mapping[str, Tensor]) -> bool:
    """Copy ``tensor``, of ``stored.shape``, into its place in ``state``.

    False if it holds something that has no place there: a constant, a padding or a copy that is not what it should be.
    """
    if stored.ours is None:
        return bool((tensor.float() == stored.filling).all())
    place = state[stored.ours][stored.part]
    if stored.is_copy:
        return torch.equal(tensor.to(place), place)
    rows = tensor.reshape(-1, *place.shape[1:])
    own, padding = rows[: place.shape[0]], rows[place.shape[0] :]
    # one per cent: other software may have rounded the bias to bf16
    if ((padding.float() - stored.filling).abs() > 0.01 * abs(stored.filling)).any():
        return False
    place.copy_(_swap_axes(own, stored.neighbours_of // 2, 2) if stored.neighbours_of else own)
    return True


def _swap_axes(rows: Tensor, outer: int, inner: int) -> Tensor:
    """Within each head, row ``outer·inner`` read as a table of that shape and transposed: halves to neighbours or back."""
    heads = rows.view(-1, outer, inner, *rows.shape[1:])
    return heads.transpose(1, 2).reshape(rows.shape)
