"""The table of a family and its parts: which networks config.json can express, and how.

Names and defaults are those of transformers' configuration classes; other facts are from its modelling files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from stretto.base.errors import UserError
from stretto.model.spec import ModelConfig

Family = Literal[
    "glm4_moe",
    "qwen3_moe",
    "ernie4_5_moe",
    "mixtral",
    "olmoe",
    "gpt_oss",
    "deepseek_v3",
    "glm4_moe_lite",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "ernie4_5",
]
"""Names of the families, as in ``model_type`` of a config.json."""
FAMILIES: tuple[Family, ...] = get_args(Family)

NEEDED: Any = object()
"""Marks a field without default."""
_MOST = 10_000
"""Upper bound of layers and experts, because lists of them are created before other checks."""


@dataclass(frozen=True, slots=True)
class Reader:
    """Reader of the fields of a config.json; ``source`` is its name in errors."""

    tree: Mapping[str, Any]
    source: str

    def get(self, names: str, default: Any = NEEDED) -> Any:
        """The value of the first of ``names`` (separated by bars) that is not missing or null. Raises `UserError`: there is none, nor a
        default.
        """
        first, *others = names.split("|")
        for name in (first, *others):
            if self.tree.get(name) is not None:
                return self.tree[name]
        if default is NEEDED:
            raise self.problem(first, "missing; the file is incomplete, fetch the checkpoint again")
        return default

    def whole(self, name: str, default: Any = NEEDED, least: int = 1, most: int | None = None) -> int:
        """An integer field from ``least`` to ``most``, for fields that are used before pydantic validates them. Raises `UserError`: the
        value is not such a number.
        """
        value = self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least or (most and value > most):
            bounds = f"from {least} " + (f"to {most}" if most else "up")
            raise self.problem(name.partition("|")[0], f"{value!r} is not a whole number {bounds}; the file is damaged")
        return value

    @property
    def num_layers(self) -> int:
        return self.whole("num_hidden_layers", most=_MOST)

    def problem(self, name: str, text: str) -> UserError:
        return UserError(f"{self.source}: {name}: {text}")

    def refuse_unless(self, name: str, value: Any, allowed: Any) -> None:
        if value != allowed:
            raise self.problem(name, f"{value!r} is not supported; use a checkpoint with {name} {allowed!r}")


@dataclass(frozen=True, slots=True)
class Part:
    """One aspect of a network and its fields in a family's config.json."""

    ours: tuple[str, ...]
    """Fields of `ModelConfig`."""
    read: Callable[[Reader], Mapping[str, Any]]
    """Function from config.json to values by field of `ModelConfig`."""
    write: Callable[[ModelConfig], Mapping[str, Any]]
    """Function from the configuration to values by field of config.json."""
    why_not: Callable[[ModelConfig], str | None] = lambda config: None
    """The reason why the family cannot express a configuration, one sentence in which {family} stands for the family's name."""


@dataclass(frozen=True, slots=True)
class MoeNames:
    """Names on disk of the tensors of an MoE layer, below ``model.layers.N.``."""

    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    router_aliases: tuple[str, ...] = ()
    """Names of the router in other software."""
    bias: str = "mlp.gate.e_score_correction_bias"
    """Selection bias."""
    bias_shape: tuple[int, ...] = ()
    """Dimensions before that of the experts."""
    bias_aliases: tuple[str, ...] = ()
    """Names of the selection bias in other software."""
    is_fused: bool = False
    """Whether all experts of a layer are one tensor, transposed, with alternating gate and up rows (gpt-oss)."""


@dataclass(frozen=True, slots=True)
class Table:
    """Description of a family. "Default" below means: the value if config.json does not have the field."""

    family: Family
    architecture: str
    """Class in transformers."""
    parts: tuple[Part, ...]
    always: Mapping[str, Any] = field(default_factory=dict)
    """Values of `ModelConfig` that all networks of the family have."""
    switches: Mapping[str, tuple[tuple[str, ...], bool]] = field(default_factory=dict)
    """Boolean fields of config.json: the biases of `ModelConfig` that the field switches on, and its default."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fields of config.json with a single supported value, which is also the default."""
    num_kv_heads: int | None = None
    """Default; None: the number of query heads."""
    head_dim: int | None = None
    """Default; None: the hidden size divided by the number of heads."""
    norm_eps: float = 1e-5
    """Default."""
    rope_theta: float = 10_000.0
    """Default."""
    rope: Mapping[str, Any] = field(default_factory=dict)
    """Default of the RoPE settings."""
    rotary_fraction: float | None = None
    """Default; None: all channels of a head are always rotated."""
    is_tied: bool = False
    """Default of ``tie_word_embeddings``."""
    engines_tie: bool = True
    """Whether vLLM and SGLang support tied heads; if not, the head is stored as a copy and declared untied."""
    pads: bool = False
    """Whether layers can be padded with experts that a bias prevents from being chosen."""
    min_experts: int = 1
    min_shared_experts: int = 0
    pairs_neighbours: bool = False
    """Whether rotated channels are paired as neighbours on disk (else as halves)."""
    moe: MoeNames = MoeNames()
    head_bias: str | None = None
    """Field of config.json that switches on a bias of the head, which is always zero here."""

    @property
    def has_experts(self) -> bool:
        return any("num_experts" in part.ours for part in self.parts)

    @property
    def is_latent(self) -> bool:
        return any("latent" in part.ours for part in self.parts)

    def biases(self, config: ModelConfig) -> frozenset[str]:
        """Optional tensors (fields of `ModelConfig`) that a checkpoint of ``config`` has on disk, including those that the network lacks."""
        on = {name for name in OPTIONAL if self.always.get(name)}
        for names, _ in self.switches.values():
            if any(getattr(config, name) for name in names):
                on |= set(names)
        return frozenset(on)

    def stored_experts(self, config: ModelConfig) -> int:
        """Experts per layer on disk: the largest number of any layer, but at least the minimum of the family."""
        return max(self.min_experts, *(config.experts_by_layer or (config.num_experts,)))

    def stored_shared_experts(self, config: ModelConfig) -> int:
        """Shared experts on disk; they are zero if the family needs some and the network has none."""
        return max(self.min_shared_experts, config.num_shared_experts)

    def stored_tied(self, config: ModelConfig) -> bool:
        """Whether the head is tied on disk too. If not, a tied head is stored as a copy of the embedding."""
        return config.tie_embeddings and self.engines_tie


OPTIONAL = (
    *("attention_bias", "attention_out_bias", "mlp_bias", "attention_sinks"),
    *("selection_bias", "router_bias", "expert_bias"),
)
"""Features that a family may require of a network that lacks them, because they have a neutral value."""


# --- parts that several families use ----------------------------------------------------------------------------------


def plain(theirs: str, ours: str, default: Any = NEEDED) -> Part:
    """A field with another name in config.json (alternatives after a bar) and its default."""
    return Part(
        (ours,),
        lambda reader: {ours: reader.get(theirs, default)},
        lambda config: {theirs.partition("|")[0]: getattr(config, ours)},
    )


def num_experts(theirs: str) -> Part:
    return replace(plain(theirs, "num_experts"), read=lambda reader: {"num_experts": reader.whole(theirs, most=_MOST)})


def all_dense() -> Part:
    """Families without experts. The experts in the resulting `ModelConfig` are never built."""

    def read(reader: Reader) -> dict[str, Any]:
        width = reader.get("intermediate_size")
        layers = tuple(range(reader.num_layers))
        return {
            "dense_layers": layers,
            "dense_intermediate_size": width,
            "num_experts": 1,
            "top_k": 1,
            "expert_intermediate_size": width,
            "selection_bias": False,
        }

    def why_not(config: ModelConfig) -> str | None:
        return "it has experts and {family} has none" if config.moe_layers else None

    return Part(
        (),
        read,
        lambda config: {"intermediate_size": config.dense_intermediate_size},
        why_not,
    )


def all_experts() -> Part:
    """Families without dense layers, whose ``intermediate_size`` is that of an expert."""

    def why_not(config: ModelConfig) -> str | None:
        return f"its layers {config.dense_layers} are dense and {{family}} has none" if config.dense_layers else None

    return Part(
        ("expert_intermediate_size",),
        lambda reader: {"expert_intermediate_size": reader.get("intermediate_size")},
        lambda config: {"intermediate_size": config.expert_intermediate_size},
        why_not,
    )


def some_dense(
    dense_layers: Callable[[Reader], Iterable[int]],
    write: Callable[[ModelConfig], Mapping[str, Any]],
    why_not: Callable[[ModelConfig], str | None] = lambda config: None,
) -> Part:
    """Families with dense and MoE layers. ``dense_layers`` reads which layers are dense, ``write`` writes it; ``intermediate_size`` is that
    of dense layers.
    """

    def read(reader: Reader) -> dict[str, Any]:
        dense = tuple(dense_layers(reader))
        return {
            "dense_layers": dense,
            "dense_intermediate_size": reader.get("intermediate_size") if dense else 0,
            "expert_intermediate_size": reader.get("moe_intermediate_size"),
        }

    def written(config: ModelConfig) -> dict[str, Any]:
        return {
            **write(config),
            "intermediate_size": config.dense_intermediate_size or config.expert_intermediate_size,
            "moe_intermediate_size": config.expert_intermediate_size,
        }

    return Part(("dense_layers", "expert_intermediate_size"), read, written, why_not)


def leading_dense(default: int) -> Part:
    """Families whose first layers are dense."""

    def why_not(config: ModelConfig) -> str | None:
        if config.dense_layers == tuple(range(len(config.dense_layers))):
            return None
        return f"its dense layers {config.dense_layers} are not the leading ones, as {{family}}'s must be"

    return some_dense(
        lambda reader: range(min(reader.whole("first_k_dense_replace", default, least=0), reader.num_layers)),
        lambda config: {
            "first_k_dense_replace": len(config.dense_layers),
            "num_nextn_predict_layers": 0,  # otherwise engines load such layers
        },
        why_not,
    )


_FULL, _SLIDING = "full_attention", "sliding_attention"


def no_windows() -> Part:
    """Families without sliding windows. A window in config.json is an error: the family's code ignores it."""

    def read(reader: Reader) -> dict[str, Any]:
        longest = reader.whole("max_position_embeddings")
        window = reader.whole("sliding_window", longest)
        if window < longest:
            raise reader.problem("sliding_window", f"{window} is not supported: layers of this family have none")
        _layer_types(reader, {_FULL})
        return {}

    return Part((), read, lambda config: {})


def one_window(default: int | None, switch: str | None = None) -> Part:
    """Families with a sliding window in all layers or in none; ``switch``: boolean field that must be true for a window."""

    def read(reader: Reader) -> dict[str, Any]:
        window = reader.tree.get("sliding_window", default)
        if switch is not None and not reader.get(switch, False):
            window = None
        _layer_types(reader, {_FULL if window is None else _SLIDING})
        if window is None:
            return {}
        return {"sliding_window": window, "sliding_layers": tuple(range(reader.num_layers))}

    def write(config: ModelConfig) -> dict[str, Any]:
        fields = {} if switch is None else {switch: bool(config.sliding_layers)}
        return fields | {"sliding_window": config.sliding_window if config.sliding_layers else None}

    def why_not(config: ModelConfig) -> str | None:
        if len(config.sliding_layers) in (0, config.num_layers):
            return None
        return "some of its layers have a sliding window, and {family} has one in all layers or in none"

    return Part(("sliding_layers",), read, write, why_not)


def _layer_types(reader: Reader, known: set[str]) -> list[str] | None:
    """The kind of attention of each layer in config.json; None: not given. Raises `UserError`: a kind that is not in ``known``."""
    kinds = reader.get("layer_types", None)
    if kinds is None:
        return None
    num_layers = reader.num_layers
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise reader.problem("layer_types", f"not one for each of the {num_layers} layers; the file is damaged")
    for kind in kinds:
        if kind not in known:
            raise reader.problem("layer_types", f"{kind!r} is not supported here, only {' and '.join(sorted(known))}")
    return kinds


def windows_by_layer(
    default: int, is_sliding: Callable[[Reader, int], bool], switch: str | None, extra: Callable[[int], dict[str, Any]]
) -> Part:
    """Families with a sliding window in some layers: those of ``layer_types``, or else those for which ``is_sliding`` is true.

    Args:
        default: default of ``sliding_window``.
        switch: boolean field that must be true for a window.
        extra: fields to write for a number of layers, for engines that do not read ``layer_types``.
    """

    def read(reader: Reader) -> dict[str, Any]:
        num_layers = reader.num_layers
        window = reader.tree.get("sliding_window", default)
        if switch is not None and not reader.get(switch, False):
            window = None
        kinds = _layer_types(reader, {_FULL, _SLIDING})
        if kinds is None:
            sliding = tuple(layer for layer in range(num_layers) if is_sliding(reader, layer))
            sliding = sliding if window is not None or switch is None else ()
        else:
            sliding = tuple(layer for layer, kind in enumerate(kinds) if kind == _SLIDING)
        if sliding and window is None:
            raise reader.problem("sliding_window", f"none, and layers {sliding} have one; the file is damaged")
        return {"sliding_window": window, "sliding_layers": sliding} if sliding else {}

    def write(config: ModelConfig) -> dict[str, Any]:
        slides = bool(config.sliding_layers)
        fields = {} if switch is None else {switch: slides}
        kinds = [_SLIDING if layer in config.sliding_layers else _FULL for layer in range(config.num_layers)]
        window = config.sliding_window if slides else default if switch is None else None
        return {**fields, **extra(config.num_layers), "sliding_window": window, "layer_types": kinds}

    return Part(("sliding_layers",), read, write)


def groups(num_groups: int, top_groups: int) -> Part:
    """Groups of experts, and their defaults."""
    return Part(
        ("expert_groups", "top_groups"),
        lambda reader: {
            "expert_groups": reader.get("n_group", num_groups),
            "top_groups": reader.get("topk_group", top_groups),
        },
        lambda config: {"n_group": config.expert_groups, "topk_group": config.top_groups},
    )
