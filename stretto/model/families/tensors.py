"""Tensors of a checkpoint: names and shapes on disk, and their places in our state dict.

On disk every expert and every projection is a tensor; in memory q, k and v are one matrix, gate and up are one matrix, and the experts
of a layer are stacked. Some families pair neighbouring channels for rotation instead of halves, so their query and key rows are
permuted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from stretto.model.families.table import Table
from stretto.model.spec import ModelConfig

NEVER_CHOSEN = -1e4
"""Bias of a padding expert, and neutral value of an attention sink: below any score plus any trained bias, and finite in fp16."""


@dataclass(frozen=True, slots=True)
class Alias:
    """Another name under which software stores a tensor, alone or as a part of a larger one."""

    name: str
    shape: tuple[int, ...]
    """Shape of the tensor of that name."""
    part: tuple[int | slice, ...] = ()
    """Index of the part; empty: the whole tensor."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor on disk and its place in our state dict."""

    name: str
    shape: tuple[int, ...]
    ours: str | None
    """Name in our state dict; None for a constant, which is not in it."""
    part: tuple[int | slice, ...] = ()
    """Index in our tensor; empty: the whole tensor."""
    neighbours_of: int = 0
    """Number of rows of a group (a head) whose rotated rows are neighbours on disk and halves in memory; 0: the same order."""
    neighbours_from: int = 0
    """First rotated row of each group."""
    is_stacked: bool = False
    """Whether the tensor has all experts of a layer, along dim 0, with each matrix transposed."""
    filling: float = 0.0
    """Value of a constant, and of rows that are not in our tensor (padding experts)."""
    always_fp32: bool = False
    is_copy: bool = False
    """Whether the tensor is a copy of another one: it is optional, but must be equal."""
    aliases: tuple[Alias, ...] = ()

    def of_expert(self, expert: int, num_ours: int) -> Stored:
        """One expert of a stacked tensor, with its matrix as in memory; from number ``num_ours`` on it is padding."""
        assert self.is_stacked, self
        one = replace(self, part=(expert,), is_stacked=False)
        return one if expert < num_ours else replace(one, ours=None, part=(), neighbours_of=0)


def stored_tensors(config: ModelConfig, table: Table) -> Iterator[Stored]:
    """Every tensor of a checkpoint of ``config``, in the order of the layers."""
    hidden = config.hidden_size
    yield Stored("model.embed_tokens.weight", (config.vocab_size, hidden), "embedding.weight")
    for layer in range(config.num_layers):
        theirs, ours = f"model.layers.{layer}", f"blocks.{layer}"
        yield Stored(f"{theirs}.input_layernorm.weight", (hidden,), f"{ours}.attention_norm.weight")
        attention = _latent_attention if config.latent else _attention
        yield from attention(config, table, f"{theirs}.self_attn", f"{ours}.attention")
        yield Stored(f"{theirs}.post_attention_layernorm.weight", (hidden,), f"{ours}.mlp_norm.weight")
        if layer in config.dense_layers:
            yield from _swiglu(config, table, f"{theirs}.mlp", f"{ours}.mlp", config.dense_intermediate_size)
        else:
            yield from _moe(config, table, config.moe_layers.index(layer), theirs, f"{ours}.mlp")
    yield Stored("model.norm.weight", (hidden,), "norm.weight")
    if not config.tie_embeddings:
        yield Stored("lm_head.weight", (config.vocab_size, hidden), "head.weight")
    elif not table.stored_tied(config):
        yield tied_head(config)
    if table.head_bias is not None and set(table.switches[table.head_bias][0]) <= table.biases(config):
        yield Stored("lm_head.bias", (config.vocab_size,), None)


def tied_head(config: ModelConfig) -> Stored:
    """The head of a network whose head is its embedding."""
    return Stored("lm_head.weight", (config.vocab_size, config.hidden_size), "embedding.weight", is_copy=True)


def _bias(stored: Stored, has_ours: bool) -> Stored:
    """The bias of a projection whose weight is ``stored``; a constant of zeros if our network has none."""
    bias = replace(stored, name=stored.name.removesuffix("weight") + "bias", shape=stored.shape[:1])
    if not has_ours or stored.ours is None:
        return replace(bias, ours=None, part=(), neighbours_of=0)
    return replace(bias, ours=stored.ours.removesuffix("weight") + "bias")


def _attention(config: ModelConfig, table: Table, theirs: str, ours: str) -> Iterator[Stored]:
    hidden, head, has = config.hidden_size, config.head_dim, table.biases(config)
    start = 0
    for letter, num_heads in (("q", config.num_heads), ("k", config.num_kv_heads), ("v", config.num_kv_heads)):
        rows = num_heads * head
        part = (slice(start, start + rows),)
        pairs = head if table.pairs_neighbours and letter != "v" else 0
        weight = Stored(f"{theirs}.{letter}_proj.weight", (rows, hidden), f"{ours}.qkv.weight", part, pairs)
        yield weight
        if "attention_bias" in has:
            yield _bias(weight, config.attention_bias)
        start += rows
    yield from _output(config, has, theirs, ours, config.num_heads * head)
    if config.qk_norm or config.qk_norm_wide:
        for letter, num_heads in (("q", config.num_heads), ("k", config.num_kv_heads)):
            width = head * num_heads if config.qk_norm_wide else head
            yield Stored(f"{theirs}.{letter}_norm.weight", (width,), f"{ours}.{letter}_norm")
    if "attention_sinks" in has:
        sinks = f"{ours}.sinks" if config.attention_sinks else None
        yield Stored(f"{theirs}.sinks", (config.num_heads,), sinks, filling=NEVER_CHOSEN)


def _output(config: ModelConfig, has: frozenset[str], theirs: str, ours: str, width: int) -> Iterator[Stored]:
    weight = Stored(f"{theirs}.o_proj.weight", (config.hidden_size, width), f"{ours}.out.weight")
    yield weight
    if "attention_out_bias" in has:
        yield _bias(weight, config.attention_out_bias)


def _latent_attention(config: ModelConfig, table: Table, theirs: str, ours: str) -> Iterator[Stored]:
    latent, has = config.latent, table.biases(config)
    assert latent is not None
    hidden, heads, head = config.hidden_size, config.num_heads, config.head_dim
    plain = head - latent.rope_dim
    queries = Stored("", (heads * head, hidden), f"{ours}.q.weight", (), head, plain)
    if latent.query_rank is None:
        yield replace(queries, name=f"{theirs}.q_proj.weight")
    else:
        down = Stored(f"{theirs}.q_a_proj.weight", (latent.query_rank, hidden), f"{ours}.q_down.weight")
        yield down
        if "attention_bias" in has:
            yield _bias(down, config.attention_bias)
        yield Stored(f"{theirs}.q_a_layernorm.weight", (latent.query_rank,), f"{ours}.q_down_norm")
        shape = (heads * head, latent.query_rank)
        yield replace(queries, name=f"{theirs}.q_b_proj.weight", shape=shape, ours=f"{ours}.q_up.weight")
    rows = latent.kv_rank + latent.rope_dim
    name = f"{theirs}.kv_a_proj_with_mqa.weight"
    down = Stored(name, (rows, hidden), f"{ours}.kv_down.weight", (), rows, latent.kv_rank)
    yield down
    if "attention_bias" in has:
        yield _bias(down, config.attention_bias)
    yield Stored(f"{theirs}.kv_a_layernorm.weight", (latent.kv_rank,), f"{ours}.kv_down_norm")
    shape = (heads * (plain + latent.value_dim), latent.kv_rank)
    yield Stored(f"{theirs}.kv_b_proj.weight", shape, f"{ours}.kv_up.weight")
    yield from _output(config, has, theirs, ours, heads * latent.value_dim)


def _swiglu(config: ModelConfig, table: Table, theirs: str, ours: str, width: int) -> Iterator[Stored]:
    hidden = config.hidden_size
    gate, up = (slice(0, width),), (slice(width, 2 * width),)
    for weight in (
        Stored(f"{theirs}.gate_proj.weight", (width, hidden), f"{ours}.gate_up.weight", gate),
        Stored(f"{theirs}.up_proj.weight", (width, hidden), f"{ours}.gate_up.weight", up),
        Stored(f"{theirs}.down_proj.weight", (hidden, width), f"{ours}.down.weight"),
    ):
        yield weight
        if "mlp_bias" in table.biases(config):
            yield _bias(weight, config.mlp_bias)


def _moe(config: ModelConfig, table: Table, row: int, theirs: str, ours: str) -> Iterator[Stored]:
    names, own, stored = table.moe, config.experts_by_layer[row], table.stored_experts(config)
    shape = (stored, config.hidden_size)
    aliases = tuple(Alias(f"{theirs}.{name}.weight", shape) for name in names.router_aliases)
    yield Stored(f"{theirs}.{names.router}.weight", shape, f"{ours}.gate", aliases=aliases)
    if table.always.get("router_bias"):
        place = f"{ours}.gate_bias" if config.router_bias else None
        yield Stored(f"{theirs}.{names.router}.bias", (stored,), place, filling=NEVER_CHOSEN if place else 0.0)
    if table.always.get("selection_bias"):
        bias = Stored(f"{theirs}.{names.bias}", (*names.bias_shape, stored), f"{ours}.bias_WE", (0,), always_fp32=True)
        aliases = tuple(Alias(f"{theirs}.{name}", bias.shape) for name in names.bias_aliases)
        yield replace(bias, filling=NEVER_CHOSEN, aliases=aliases)
    if names.is_fused:
        yield from _fused_experts(config, stored, f"{theirs}.{names.experts}", ours)
    else:
        for expert in range(stored):
            yield from _expert(config, table, expert, expert < own, theirs, ours)
    width = config.expert_intermediate_size * table.stored_shared_experts(config)
    for tensor in _swiglu(config, table, f"{theirs}.mlp.shared_experts", f"{ours}.shared", width) if width else ():
        yield tensor if config.num_shared_experts else replace(tensor, ours=None, part=())


def _expert(config: ModelConfig, table: Table, expert: int, is_ours: bool, theirs: str, ours: str) -> Iterator[Stored]:
    hidden, width, stored = config.hidden_size, config.expert_intermediate_size, table.stored_experts(config)
    place, in_memory = f"{theirs}.{table.moe.experts}.{expert}", f"{theirs}.mlp.experts"
    gate, up, down = table.moe.projections
    gate_up = f"{ours}.gate_up" if is_ours else None
    for name, rows in ((gate, slice(0, width)), (up, slice(width, 2 * width))):
        fused = Alias(f"{in_memory}.gate_up_proj", (stored, 2 * width, hidden), (expert, rows))
        yield Stored(f"{place}.{name}.weight", (width, hidden), gate_up, (expert, rows), aliases=(fused,))
    fused = Alias(f"{in_memory}.down_proj", (stored, hidden, width), (expert,))
    shape = (hidden, width)
    yield Stored(f"{place}.{down}.weight", shape, f"{ours}.down" if is_ours else None, (expert,), aliases=(fused,))


def _fused_experts(config: ModelConfig, stored: int, theirs: str, ours: str) -> Iterator[Stored]:
    hidden, width = config.hidden_size, config.expert_intermediate_size
    for name, shape in (("gate_up", (stored, hidden, 2 * width)), ("down", (stored, width, hidden))):
        pairs = shape[-1] if name == "gate_up" else 0
        weight = Stored(f"{theirs}.{name}_proj", shape, f"{ours}.{name}", (), pairs, is_stacked=True)
        yield weight
        bias = f"{ours}.{name}_bias" if config.expert_bias else None
        yield replace(weight, name=f"{weight.name}_bias", shape=(stored, shape[-1]), ours=bias)
