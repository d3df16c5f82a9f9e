"""Shape of a network (`ModelConfig`), and choice of a sub-network (`Subnet`) and its text form.

Does not import torch, which recipes, the search and the command line do not need for shapes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, ValidationInfo, field_validator, model_validator

from stretto.base.config import Config
from stretto.base.errors import UserError, nearest


class _Shape(Config):
    """Base of the records that describe a network: numeric fields accept finite numbers only."""

    model_config = ConfigDict(allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _is_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Reject ``"12"`` and ``true``, which pydantic would convert to 12 and 1."""
        kinds = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, str | bool) and kinds in (int, float, int | None, float | None):
            raise ValueError(f"{value!r} is not a number")
        return value


class RopeScaling(_Shape):
    """Scaling of rotary frequencies for positions beyond the context length of the original training, as in config.json."""

    kind: Literal["linear", "dynamic", "yarn", "llama3"]
    """``dynamic`` (NTK) has no effect within ``ModelConfig.max_positions``, the limit of every run here."""
    factor: float = Field(ge=1)
    """Ratio of the longest position to that of the original training."""
    original_positions: int | None = Field(default=None, gt=0)
    """Context length of the original training, in tokens (yarn, llama3)."""
    low_freq_factor: float = 1.0
    """llama3: frequencies that turn less often within the original context are divided by ``factor``."""
    high_freq_factor: float = 4.0
    """llama3: frequencies that turn more often are not changed."""
    beta_fast: float = 32.0
    """yarn (2309.00071): frequencies that turn more often within the original context are not changed."""
    beta_slow: float = 1.0
    """yarn: frequencies that turn less often are divided by ``factor``."""
    truncate: bool = True
    """yarn: whether the borders between changed and unchanged frequencies are rounded to whole channels."""
    attention_factor: float | None = None
    """yarn: factor of cosines and sines; None: derived from ``factor``, ``mscale`` and ``mscale_all_dim``."""
    mscale: float | None = None
    mscale_all_dim: float | None = None


class LatentAttention(_Shape):
    """Multi-head latent attention (MLA; DeepSeek-V2, 2405.04434): keys and values of all heads are projected from one latent vector.

    Queries and keys of a head have ``head_dim`` channels; the last ``rope_dim`` of them are rotated, and all heads share the
    rotated part of the key. There are as many key/value heads as query heads.
    """

    query_rank: int | None = Field(default=None, gt=0)
    """Width of the latent vector of queries; None: queries are projected directly from the hidden state."""
    kv_rank: int = Field(gt=0)
    """Width of the latent vector of keys and values."""
    rope_dim: int = Field(gt=0)
    """Number of rotated channels."""
    value_dim: int = Field(gt=0)
    """Width of a head's values."""
    norm_eps: float = Field(default=1e-6, gt=0)
    """Epsilon of the norms of the two latent vectors; transformers uses this value for all networks."""


class ClampedSwiGlu(_Shape):
    """Activation of gpt-oss: gate and up are clamped at ``limit``, then gate · sigmoid(alpha · gate) · (up + 1)."""

    alpha: float = 1.702
    limit: float = Field(default=7.0, gt=0)
    """Largest value of the gate, and largest absolute value of up."""


class ModelConfig(_Shape):
    """Shape of a decoder-only transformer, dense or Mixture-of-Experts.

    Layers that are not in ``dense_layers`` are MoE layers. Tuples with one entry per MoE layer are in the order of the MoE layers.
    ``experts_per_layer`` and ``top_k_per_layer`` describe an extracted network whose layers differ; they are None if every layer
    has ``num_experts`` and ``top_k``.
    """

    vocab_size: int = Field(gt=0)
    """Rows of the embedding and of the head."""
    hidden_size: int = Field(gt=0)
    """Channels of a token's hidden state."""
    num_layers: int = Field(gt=0)
    num_heads: int = Field(gt=0)
    """Query heads of each layer."""
    num_kv_heads: int = Field(gt=0)
    """Key and value heads of each layer; divides ``num_heads``."""
    head_dim: int = Field(gt=0)
    """Channels of a head."""
    num_experts: int = Field(gt=0)
    """Routed experts of each MoE layer."""
    top_k: int = Field(gt=0)
    """Routed experts that a token uses in each MoE layer."""
    expert_intermediate_size: int = Field(gt=0)
    """Width of an expert's SwiGLU."""
    num_shared_experts: int = Field(default=0, ge=0)
    """Shared experts are one SwiGLU of width ``num_shared_experts * expert_intermediate_size``, as in all checkpoint formats."""
    dense_layers: tuple[int, ...] = ()
    """Layers with one SwiGLU for all tokens in place of experts."""
    dense_intermediate_size: int = Field(default=0, ge=0)
    """Width of the SwiGLU of ``dense_layers``."""
    experts_per_layer: tuple[int, ...] | None = None
    top_k_per_layer: tuple[int, ...] | None = None

    qk_norm: bool = False
    """RMSNorm on each query and key head, before rotation."""
    qk_norm_wide: bool = False
    """RMSNorm on the concatenated query heads of a token, and on its concatenated key heads (OLMoE)."""
    qkv_clip: float | None = Field(default=None, gt=0)
    """Queries, keys and values are clamped to ± this value, after any norm (OLMoE)."""
    attention_bias: bool = False
    """Biases of the query, key and value projections; with ``latent``, of the projections to the latent vectors."""
    attention_out_bias: bool = False
    """Bias of attention's output projection."""
    attention_sinks: bool = False
    """Attention sinks: each head has a trained logit that takes part in every softmax and has no value (gpt-oss)."""
    attention_scale: float | None = Field(default=None, gt=0)
    """Factor of the attention scores; None: 1/√``head_dim``."""
    sliding_window: int | None = Field(default=None, gt=0)
    """Number of positions that a query of ``sliding_layers`` attends to, including its own."""
    sliding_layers: tuple[int, ...] = ()
    """Layers whose attention is limited to ``sliding_window`` positions."""
    latent: LatentAttention | None = None
    """Multi-head latent attention; None: ordinary keys and values."""
    rope_theta: float = Field(default=10_000.0, gt=0)
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """Scaling of the rotary frequencies; None: none."""
    rotary_fraction: float = Field(default=1.0, gt=0, le=1)
    """Share of ``head_dim`` that is rotated: the leading channels, paired as halves (not interleaved). Not used with ``latent``."""
    norm_eps: float = Field(default=1e-5, gt=0)
    """Epsilon of every RMSNorm."""
    max_positions: int = Field(default=4096, gt=0)
    """Longest sequence, in tokens."""
    tie_embeddings: bool = False
    """Whether the head is the embedding."""

    router: Literal["sigmoid", "softmax"] = "sigmoid"
    """Function from the router's logits to the experts' scores."""
    selection_bias: bool = True
    """Balance bias without auxiliary loss (2408.15664): affects which experts are chosen, not their weights."""
    normalize_gates: bool = True
    """Divide the weights of a token's experts by their sum."""
    routed_scaling: float = Field(default=1.0, gt=0)
    """Factor of the routed experts' output."""
    expert_groups: int = Field(default=1, gt=0)
    """Number of groups that the experts are divided into, by id; a token chooses from its ``top_groups`` best groups (DeepSeek-V3).
    The score of a group is the sum of its two highest selection scores."""
    top_groups: int = Field(default=1, gt=0)
    """Groups that a token chooses its experts from, see ``expert_groups``."""
    router_bias: bool = False
    """Bias of the router's logits, which also affects the experts' weights (gpt-oss)."""
    expert_bias: bool = False
    """Biases of the routed experts' projections (gpt-oss)."""
    mlp_bias: bool = False
    """Biases of dense and shared SwiGLUs."""
    clamped_swiglu: ClampedSwiGlu | None = None
    """Activation of gpt-oss; None: silu(gate) · up."""

    widths: tuple[int, ...] = ()
    """Expert counts with a balance state of their own, largest first; default: ``(num_experts,)``."""
    num_branches: int = Field(default=0, ge=0)
    """Rows of balance state (branches): one per width, plus, in checkpoints of a sampler that is removed, one for complements; 0: ``len(widths)``."""
    expert_order: tuple[tuple[int, ...], ...] | None = None
    """Nested order per MoE layer: expert ids from first kept to first dropped; None: `interleaved_order` in every layer."""
    layer_order: tuple[int, ...] | None = None
    """Layers from first kept to first dropped; None: `spaced_layer_order`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.widths:
            object.__setattr__(self, "widths", (self.num_experts,))
        if not self.num_branches:
            object.__setattr__(self, "num_branches", len(self.widths))
        every_layer = list(range(self.num_layers))
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.rotary_dim % 2 or self.rotary_dim <= 0:
            share = f"head_dim {self.head_dim} * rotary_fraction {self.rotary_fraction}"
            raise ValueError(f"{share if self.latent is None else 'latent.rope_dim'} must be an even number")
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k {self.top_k} is larger than num_experts {self.num_experts}")
        for name in ("dense_layers", "sliding_layers"):
            layers = getattr(self, name)
            if sorted(set(layers)) != list(layers):
                raise ValueError(f"{name} must be sorted and unique")
            if not set(layers) <= set(every_layer):
                raise ValueError(f"{name} {layers} outside 0..{self.num_layers - 1}")
        self._check_attention()
        self._check_groups()
        if self.dense_layers and not self.dense_intermediate_size:
            raise ValueError("dense_intermediate_size must be set when there are dense_layers")
        for name in ("experts_per_layer", "top_k_per_layer", "expert_order"):
            value = getattr(self, name)
            if value is not None and len(value) != self.num_moe_layers:
                raise ValueError(f"{name} needs one entry for each of the {self.num_moe_layers} MoE layers")
        for experts, k in zip(self.experts_by_layer, self.top_k_by_layer, strict=True):
            if not 1 <= k <= experts <= self.num_experts:
                raise ValueError(f"a layer has top_k {k} of {experts} experts (num_experts is {self.num_experts})")
        widths = self.widths
        if list(widths) != sorted(set(widths), reverse=True):
            raise ValueError(f"widths {widths} must fall strictly")
        if widths[0] != self.num_experts:
            raise ValueError(f"widths {widths} must start with num_experts {self.num_experts}")
        if self.num_branches < len(widths):
            raise ValueError(f"num_branches {self.num_branches} is less than the {len(widths)} widths")
        for order, experts in zip(self.expert_orders, self.experts_by_layer, strict=True):
            if sorted(order) != list(range(experts)):
                raise ValueError(f"expert_order {order} is not a permutation of {experts} experts")
        if sorted(self.layer_ranking) != every_layer:
            raise ValueError(f"layer_order {self.layer_order} is not a permutation of the layers")
        return self

    def _check_attention(self) -> None:
        if self.qk_norm and self.qk_norm_wide:
            raise ValueError("qk_norm and qk_norm_wide: a network has one or the other")
        if self.sliding_layers and self.sliding_window is None:
            raise ValueError("sliding_window must be set when there are sliding_layers")
        rope = self.rope_scaling
        if rope is not None and rope.kind in ("yarn", "llama3") and rope.original_positions is None:
            raise ValueError(f"rope_scaling.original_positions must be set for {rope.kind}")
        if rope is not None and rope.kind == "yarn" and self.rope_theta <= 1:
            raise ValueError(f"rope_theta {self.rope_theta} must exceed 1 for yarn")
        if self.latent is None:
            return
        if self.num_kv_heads != self.num_heads:
            raise ValueError(f"latent: num_kv_heads {self.num_kv_heads} must be num_heads {self.num_heads}")
        if self.latent.rope_dim > self.head_dim:
            raise ValueError(f"latent.rope_dim {self.latent.rope_dim} exceeds head_dim {self.head_dim}")
        for name in ("qk_norm", "qk_norm_wide", "qkv_clip", "attention_sinks", "sliding_layers"):
            if getattr(self, name):
                raise ValueError(f"{name}: latent attention has none")

    def _check_groups(self) -> None:
        if self.top_groups > self.expert_groups:
            raise ValueError(f"top_groups {self.top_groups} exceeds expert_groups {self.expert_groups}")
        if self.expert_groups == 1:
            return
        for order, k in zip(self.expert_orders, self.top_k_by_layer, strict=True):
            if k > self.choosable(len(order)):
                raise ValueError(_why_not_grouped(self, len(order), k))
            size = len(order) // self.expert_groups
            for start in range(0, len(order), self.expert_groups):
                turn = order[start : start + self.expert_groups]
                if len({expert // size for expert in turn}) < self.expert_groups:
                    raise ValueError(
                        f"expert_order: {turn} are not one of each of the {self.expert_groups} expert_groups, which must take turns"
                    )
        for width in self.widths[1:]:
            if not self.choosable(width):
                raise ValueError(f"widths {self.widths}: {_why_not_grouped(self, width, 1)}")

    def choosable(self, num_experts: int) -> int:
        """Number of experts that a token can choose from in a layer with ``num_experts`` experts: all, or those of its best groups.

        0 if a layer cannot have this number, because its groups would differ in size or have fewer than two experts. Without MoE layers
        groups limit nothing.
        """
        if self.expert_groups == 1 or not self.num_moe_layers:
            return num_experts
        size, rest = divmod(num_experts, self.expert_groups)
        return 0 if rest or size < 2 else size * self.top_groups

    def holding(self, num_experts: int, top_k: int) -> int:
        """The smallest valid number of experts that is at least ``num_experts`` and allows to choose ``top_k``."""
        if self.expert_groups == 1:
            return max(num_experts, top_k)
        return self.expert_groups * max(2, -(-num_experts // self.expert_groups), -(-top_k // self.top_groups))

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer in range(self.num_layers) if layer not in self.dense_layers)

    @property
    def num_moe_layers(self) -> int:
        return self.num_layers - len(self.dense_layers)

    @property
    def experts_by_layer(self) -> tuple[int, ...]:
        return self.experts_per_layer or (self.num_experts,) * self.num_moe_layers

    @property
    def top_k_by_layer(self) -> tuple[int, ...]:
        return self.top_k_per_layer or (self.top_k,) * self.num_moe_layers

    @property
    def only_ranks(self) -> bool:
        """Whether the routers only rank experts of equal weight, as in a network that was split from a dense one (`stretto.model.upcycle`).

        Gates of 2·sigmoid(logit) are 1 for its tiny logits, and no other network is known to have gates of this form. Sizes that are
        extracted from such a network keep it.
        """
        doubled = self.router == "sigmoid" and not self.normalize_gates and self.routed_scaling == 2.0
        return doubled and bool(self.num_moe_layers)

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.rotary_fraction) if self.latent is None else self.latent.rope_dim

    @property
    def rope_magnitude(self) -> float:
        """Factor of cosines and sines: yarn's correction of the temperature of attention scores (2309.00071, §3.4)."""
        rope = self.rope_scaling
        if rope is None or rope.kind != "yarn":
            return 1.0
        if rope.attention_factor is not None:
            return rope.attention_factor
        if rope.mscale and rope.mscale_all_dim:
            return yarn_mscale(rope.factor, rope.mscale) / yarn_mscale(rope.factor, rope.mscale_all_dim)
        return yarn_mscale(rope.factor)

    @property
    def expert_orders(self) -> tuple[tuple[int, ...], ...]:
        return self.expert_order or tuple(
            interleaved_order(experts, self.expert_groups) for experts in self.experts_by_layer
        )

    @property
    def layer_ranking(self) -> tuple[int, ...]:
        return self.layer_order or spaced_layer_order(self.num_layers)

    def moe_rows(self, layers: Collection[int]) -> tuple[int, ...]:
        """Indices, among the MoE layers, of the MoE layers in ``layers``."""
        return tuple(row for row, layer in enumerate(self.moe_layers) if layer in layers)

    def branch(self, num_experts: int) -> int:
        """Row of balance state of a layer with ``num_experts`` experts: that of the smallest width that is large enough."""
        return max(row for row, width in enumerate(self.widths) if width >= num_experts)

    def full(self, layers: Iterable[int] | None = None) -> Subnet:
        """The Subnet with all experts and the full top-k of ``layers`` (ascending); None: of all layers."""
        kept = tuple(range(self.num_layers) if layers is None else layers)
        rows = self.moe_rows(kept)
        experts, top_k = (tuple(each[row] for row in rows) for each in (self.experts_by_layer, self.top_k_by_layer))
        return Subnet(layers=kept, experts=experts, top_k=top_k)

    def subnet(self, depth: int | None = None, experts: int | None = None, top_k: int | None = None) -> Subnet:
        """The nested Subnet of ``depth`` layers with ``experts`` experts and ``top_k`` each; None leaves an axis full.

        Raises UserError: the choice lies outside the network.
        """
        depth = self.num_layers if depth is None else depth
        if not 1 <= depth <= self.num_layers:
            raise UserError(f"subnet: layers={depth} lies outside 1..{self.num_layers}")
        subnet = self.full(sorted(self.layer_ranking[:depth]))
        kept = len(subnet.experts)
        asked = {} if experts is None else {"experts": (experts,) * kept}
        asked |= {} if top_k is None else {"top_k": (top_k,) * kept}
        return check_subnet(self, subnet.replace(**asked))


class Subnet(Config):
    """A choice of sub-network. ``experts`` and ``top_k`` have one entry for each kept MoE layer, in the order of the layers.

    A layer keeps the first ``experts[i]`` experts of its expert order.
    """

    layers: tuple[int, ...]
    experts: tuple[int, ...]
    top_k: tuple[int, ...]

    def label(self) -> str:
        """Short text for tables: ``6 layers, 6 experts, top-2`` (ranges if layers differ); ``6 layers`` without experts."""
        if not self.experts:
            return f"{len(self.layers)} layers"
        return f"{len(self.layers)} layers, {_span(self.experts)} experts, top-{_span(self.top_k)}"


class SubnetChoice(Config):
    """Nested Subnet in the form of recipes and commands; an axis that is not given is full."""

    layers: int | None = Field(default=None, gt=0)
    """Number of layers."""
    experts: int | None = Field(default=None, gt=0)
    """Experts of each MoE layer."""
    top_k: int | None = Field(default=None, gt=0)
    """Experts that a token uses in each MoE layer."""

    def of(self, config: ModelConfig) -> Subnet:
        """The Subnet of ``config``; experts and top-k have no effect without MoE layers. Raises as `ModelConfig.subnet`."""
        return config.subnet(self.layers, self.experts, self.top_k)


LoraTarget = Literal["attention", "experts", "shared", "dense", "router"]


class LoraConfig(Config):
    """Low-rank adapters: each weight W of ``targets`` becomes W + (alpha / rank)·B·A (2106.09685)."""

    rank: int = Field(default=16, gt=0)
    """Rank of each adapter."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale: the product is multiplied by alpha / rank."""
    targets: tuple[LoraTarget, ...] = Field(default=("attention", "experts", "shared", "dense"), min_length=1)
    """Weights with adapters: projections of attention, routed experts, shared experts and dense layers; routers."""


def check_subnet(config: ModelConfig, subnet: Subnet) -> Subnet:
    """Return ``subnet`` if it lies inside ``config``. Raises `UserError`: it has a layer, an expert count or a top-k that the network
    does not have.
    """
    layers, limit = subnet.layers, config.num_layers
    if not layers or list(layers) != sorted(set(layers)) or layers[0] < 0 or layers[-1] >= limit:
        raise UserError(f"subnet: layers {list(layers)} must be rising indices in 0..{limit - 1}")
    kept = config.moe_rows(layers)
    if not len(kept) == len(subnet.experts) == len(subnet.top_k):
        raise UserError(
            f"subnet: {len(subnet.experts)} expert counts and {len(subnet.top_k)} top-k for {len(kept)} kept MoE layers; give one each"
        )
    for row, experts, k in zip(kept, subnet.experts, subnet.top_k, strict=True):
        available = config.experts_by_layer[row]
        if not 1 <= experts <= available:
            raise UserError(f"subnet: experts={experts} lies outside 1..{available}")
        if not 1 <= k <= experts:
            raise UserError(f"subnet: top_k={k} lies outside 1..{experts}, the experts kept")
        if k > config.top_k_by_layer[row]:
            raise UserError(f"subnet: top_k={k} lies outside 1..{config.top_k_by_layer[row]}, the network's own")
        if k > config.choosable(experts):
            raise UserError(f"subnet: {_why_not_grouped(config, experts, k)}")
    return subnet


def _why_not_grouped(config: ModelConfig, num_experts: int, top_k: int) -> str:
    """The reason why a layer with groups cannot have ``num_experts`` experts and choose ``top_k`` of them for a token."""
    num_groups, most = config.expert_groups, config.choosable(num_experts)
    if most:
        return f"top_k={top_k} is more than the {most} experts that a token's {config.top_groups} groups hold"
    return (
        f"experts={num_experts} does not leave its {num_groups} groups (expert_groups) equal, of two or more; keep a multiple "
        f"of {num_groups}, {2 * num_groups} or more"
    )


def _span(values: tuple[int, ...]) -> str:
    return "-".join(str(value) for value in sorted({min(values), max(values)}))


def executed(config: ModelConfig, subnet: Subnet) -> Subnet:
    """The Subnet whose work a masked pass over the maximum network executes for ``subnet``: its routers score all experts."""
    return subnet.replace(experts=config.full(subnet.layers).experts)


def extracted_config(config: ModelConfig, subnet: Subnet) -> ModelConfig:
    """The configuration of the ordinary network that is extracted as ``subnet``. Raises `UserError`: ``subnet`` lies outside
    ``config``.
    """
    check_subnet(config, subnet)
    kept = config.moe_rows(subnet.layers)
    place = {layer: index for index, layer in enumerate(subnet.layers)}
    widest = max(subnet.experts, default=1)
    even = len(set(subnet.experts)) <= 1
    narrower = tuple(width for width in config.widths if width < widest) if even else ()
    return config.replace(
        num_layers=len(subnet.layers),
        dense_layers=tuple(place[layer] for layer in config.dense_layers if layer in place),
        sliding_layers=tuple(place[layer] for layer in config.sliding_layers if layer in place),
        num_experts=widest,
        top_k=max(subnet.top_k, default=1),
        experts_per_layer=None if even else subnet.experts,
        top_k_per_layer=None if len(set(subnet.top_k)) <= 1 else subnet.top_k,
        widths=(widest, *narrower),
        num_branches=1 + len(narrower),
        expert_order=tuple(
            kept_order(config.expert_orders[row], experts) for row, experts in zip(kept, subnet.experts, strict=True)
        ),
        layer_order=tuple(place[layer] for layer in config.layer_ranking if layer in place),
    )


def kept_experts(order: tuple[int, ...], num_experts: int) -> tuple[int, ...]:
    """Ids of the first ``num_experts`` of ``order``, ascending: the order in which an extracted layer stores them."""
    return tuple(sorted(order[:num_experts]))


def kept_order(order: tuple[int, ...], num_experts: int) -> tuple[int, ...]:
    """The nested order of an extracted layer, in its own expert ids."""
    place = {expert: index for index, expert in enumerate(kept_experts(order, num_experts))}
    return tuple(place[expert] for expert in order[:num_experts])


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """yarn's temperature of attention scores for a scaling ``factor`` of positions."""
    return 0.1 * mscale * math.log(factor) + 1.0


def interleaved_order(num_experts: int, num_groups: int = 1) -> tuple[int, ...]:
    """Experts by bit-reversed index, so that every prefix is spread evenly over contiguous blocks of expert parallelism.

    The order does not depend on the number of ranks, so one rank and eight ranks train the same nested network. Groups alternate:
    a prefix whose length is a multiple of their number has equally many experts of each.
    """
    if num_groups > 1 and num_experts % num_groups == 0:
        size = num_experts // num_groups
        turns = interleaved_order(num_groups)
        return tuple(group * size + expert for expert in interleaved_order(size) for group in turns)
    bits = max(num_experts - 1, 1).bit_length()
    return tuple(sorted(range(num_experts), key=lambda expert: int(f"{expert:0{bits}b}"[::-1], 2)))


def fixed_layers(num_layers: int) -> tuple[int, ...]:
    """Layers that are never dropped: the first two and the last two."""
    return tuple(sorted({0, 1, num_layers - 2, num_layers - 1} & set(range(num_layers))))


def droppable_layers(config: ModelConfig) -> tuple[int, ...]:
    fixed = fixed_layers(config.num_layers)
    return tuple(layer for layer in range(config.num_layers) if layer not in fixed)


def spaced_layer_order(num_layers: int) -> tuple[int, ...]:
    """Default order of layers, from first kept to first dropped: the first two and last two, then the others bit-reversed.

    Layers are dropped from the end of the order, so the first dropped layers are far apart.
    """
    fixed = fixed_layers(num_layers)
    middle = [layer for layer in range(num_layers) if layer not in fixed]
    spread = [middle[index] for index in interleaved_order(len(middle))] if middle else []
    return (*fixed, *spread)


def named_subnets(config: ModelConfig, presets: Mapping[str, SubnetChoice]) -> dict[str, Subnet]:
    """``full`` and the presets, as Subnets of ``config``."""
    return {"full": config.full()} | {name: choice.of(config) for name, choice in presets.items()}


def parse_choice(text: str, presets: Mapping[str, SubnetChoice], source: str = "--subnet") -> SubnetChoice:
    """Parse a preset's name (``full``, ``corner``) or ``layers=8,experts=16,top_k=2``. Raises `UserError`: an unknown preset or
    axis; the message starts with ``source``.
    """
    if text == "full":
        return SubnetChoice()
    if "=" not in text:
        if text not in presets:
            names = ["full", *presets]
            raise UserError(
                f"{source} {text}: unknown preset{nearest(text, names)}; known: {', '.join(names)}, or layers=…,experts=…,top_k=…"
            )
        return presets[text]
    axes: dict[str, int] = {}
    for part in text.replace(" ", ",").split(","):
        if not part:
            continue
        axis, _, value = part.partition("=")
        if axis not in SubnetChoice.model_fields:
            raise UserError(
                f"{source} {text}: unknown axis {axis!r}{nearest(axis, SubnetChoice.model_fields)}; use layers, experts, top_k"
            )
        if not (value.isascii() and value.isdecimal()) or int(value) < 1:
            raise UserError(f"{source} {text}: {axis} needs a whole number above 0")
        axes[axis] = int(value)
    return SubnetChoice(**axes)


def parse_subnet(
    text: str, config: ModelConfig, presets: Mapping[str, SubnetChoice], source: str = "--subnet"
) -> Subnet:
    """`parse_choice` as a Subnet of ``config``. Raises `UserError` also for a choice outside the network."""
    choice = parse_choice(text, presets, source)
    if "=" in text and not config.moe_layers and (choice.experts or choice.top_k):
        raise UserError(f"{source} {text}: the network has no experts to choose from; name layers alone")
    try:
        return choice.of(config)
    except UserError as error:
        raise UserError(f"{source} {text}: {error}") from None
