"""The architectures that other software knows: what each cannot express, its config.json, and the names of its tensors.

On disk every expert and every projection is a tensor of its own; in memory q, k and v are one matrix, gate and up are
one matrix, and a layer's experts are stacked. ERNIE rotates neighbouring channels where we rotate halves, so its query
and key rows change places on the way. Facts were read from the modelling files of transformers, vLLM and llama.cpp.
Imports no torch, so that a recipe can be refused before anything is built.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from stretto.base.config import validate
from stretto.base.errors import UserError, nearest
from stretto.model.spec import ModelConfig

Family = Literal["glm4_moe", "qwen3_moe", "ernie4_5_moe"]
"""Names of the families, as in ``model_type`` of a config.json; the first that can express a network is its default."""
FAMILIES: tuple[Family, ...] = get_args(Family)

NEVER_CHOSEN = -1e4
"""Selection bias of a padding expert: below any score plus any trained bias, and finite in fp16."""
_GLM_MIN_EXPERTS = 2
"""transformers' and vLLM's group routing looks at the two best experts of the (one) group."""


def parse_family(name: str, source: str = "--family") -> Family:
    """``name`` as a family. Raises `UserError`: there is no such family."""
    if name in _REASONS:
        return name
    raise UserError(
        f"{source}: {name!r} is not a supported family{nearest(name, FAMILIES)}; choose {', '.join(FAMILIES)}"
    )


def why_not(config: ModelConfig, family: Family) -> str | None:
    """The reason, in one sentence, why ``family`` cannot express ``config`` exactly; None if it can."""
    if config.top_k_per_layer is not None:
        return f"its layers choose different numbers of experts (top-k {config.top_k_per_layer}) and {family} has one top-k for all layers"
    return _REASONS[family](config)


def default_family(config: ModelConfig) -> Family:
    """The first family that expresses ``config``. Raises `UserError`: none does; the message carries every family's
    reason.
    """
    reasons = {family: why_not(config, family) for family in FAMILIES}
    able = [family for family, reason in reasons.items() if reason is None]
    if able:
        return able[0]
    told = "; ".join(f"{family}: {reason}" for family, reason in reasons.items())
    raise UserError(f"family: no supported family can hold this network ({told}); change the recipe to suit one")


def check_family(config: ModelConfig, family: Family) -> Family:
    """Return ``family`` if it can express ``config``. Raises `UserError`: it cannot; the message carries `why_not` and
    names a family that can, if there is one.
    """
    reason = why_not(config, family)
    if reason is None:
        return family
    able = [other for other in FAMILIES if why_not(config, other) is None]
    remedy = f"use {' or '.join(able)}" if able else "no other supported family can hold it either"
    raise UserError(f"--family {family}: cannot hold this network: {reason}; {remedy}")


def _why_not_glm(config: ModelConfig) -> str | None:
    if config.router != "sigmoid":
        return f"its router is a {config.router} and glm4_moe's is a sigmoid"
    if config.dense_layers != tuple(range(len(config.dense_layers))):
        return f"its dense layers {config.dense_layers} are not the leading ones, as glm4_moe's must be"
    return None


def _why_not_qwen(config: ModelConfig) -> str | None:
    if config.selection_bias:
        return "its router has a selection bias and qwen3_moe has none"
    if config.num_shared_experts:
        return "it has shared experts and qwen3_moe has none"
    if not config.qk_norm:
        return "its queries and keys are not normalised and qwen3_moe's always are"
    return _why_not_softmax(config, "qwen3_moe")


def _why_not_ernie(config: ModelConfig) -> str | None:
    if not config.normalize_gates:
        return "its gates are not renormalised and ernie4_5_moe's always are"
    if config.qk_norm:
        return "its queries and keys are normalised and ernie4_5_moe's are not"
    if config.attention_bias:
        return "its attention has a bias on queries, keys and values, and ernie4_5_moe has one on every projection or on none"
    if moe_interval(config) is None:
        return f"its MoE layers {config.moe_layers} do not lie at a fixed interval from a first to a last, as ernie4_5_moe's must"
    return _why_not_softmax(config, "ernie4_5_moe")


def _why_not_softmax(config: ModelConfig, family: Family) -> str | None:
    if config.router != "softmax":
        return f"its router is a {config.router} and {family}'s is a softmax"
    if len(set(config.experts_by_layer)) > 1:
        return (
            f"its layers have different numbers of experts, and a dummy expert would take a share of {family}'s softmax"
        )
    if config.routed_scaling != 1.0:
        return f"its routed scaling is {config.routed_scaling} and {family} has none"
    if config.rotary_fraction != 1.0:
        return f"it rotates {config.rotary_fraction} of a head and {family} rotates all of it"
    return None


_REASONS: dict[Family, Callable[[ModelConfig], str | None]] = {
    "glm4_moe": _why_not_glm,
    "qwen3_moe": _why_not_qwen,
    "ernie4_5_moe": _why_not_ernie,
}


def stored_experts(config: ModelConfig, family: Family) -> int:
    """Experts a layer has on disk: the most any layer has; glm4_moe pads the others with experts never chosen."""
    widest = max(config.experts_by_layer, default=config.num_experts)
    return max(_GLM_MIN_EXPERTS, widest) if family == "glm4_moe" else widest


def stored_shared_experts(config: ModelConfig, family: Family) -> int:
    """Shared experts on disk: glm4_moe always has one (llama.cpp insists), all zeros where the network has none."""
    return max(1, config.num_shared_experts) if family == "glm4_moe" else config.num_shared_experts


def stored_tied(config: ModelConfig, family: Family) -> bool:
    """Whether the head is left out on disk. Only ernie4_5_moe may: vLLM and SGLang never tie a glm4_moe, SGLang no
    qwen3_moe, whatever config.json says, so those are stored as untied networks with a second copy.
    """
    return config.tie_embeddings and family == "ernie4_5_moe"


def moe_interval(config: ModelConfig) -> tuple[int, int, int] | None:
    """First and last MoE layer and the interval between, if ERNIE's rule gives exactly ``config.moe_layers``."""
    if not config.moe_layers:
        return None
    start, end = config.moe_layers[0], config.moe_layers[-1]
    for interval in range(1, config.num_layers + 1):
        if ernie_moe_layers(start, end, interval, config.num_layers) == config.moe_layers:
            return start, end, interval
    return None


def ernie_moe_layers(start: int, end: int, interval: int, num_layers: int) -> tuple[int, ...]:
    """ERNIE's rule for which layers are MoE layers; an ``end`` of −1 is the last layer."""
    last = num_layers - 1 if end == -1 else end
    return tuple(layer for layer in range(num_layers) if start <= layer <= last and (layer + 1) % interval == 0)


# --- config.json ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Reader:
    """A config.json and its name."""

    tree: Mapping[str, Any]
    source: str

    def need(self, *names: str) -> Any:
        """The value of the first of ``names`` that is there."""
        for name in names:
            if self.tree.get(name) is not None:
                return self.tree[name]
        raise UserError(f"{self.source}: {names[0]}: missing; the file is incomplete, fetch the checkpoint again")

    def get(self, name: str, default: Any) -> Any:
        value = self.tree.get(name)
        return default if value is None else value

    def whole(self, name: str) -> int:
        """`need`, and a whole number: for fields that are computed with."""
        value = self.need(name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise UserError(f"{self.source}: {name}: {value!r} is not a whole number; the file is damaged")
        return value

    def refuse_unless(self, name: str, value: Any, allowed: Any) -> None:
        if value != allowed:
            raise UserError(
                f"{self.source}: {name}: {value!r} is not supported; use a checkpoint with {name} {allowed!r}"
            )


_NEEDED = object()
"""Instead of a default."""


@dataclass(frozen=True, slots=True)
class _Architecture:
    """One family's config.json. Names and defaults are those of transformers' configuration classes."""

    name: str
    fields: Mapping[str, tuple[str, Any]]
    """By their name, other spellings behind a bar: our name, and the value where config.json does not say."""
    fixed: Mapping[str, Any]
    """By their name: the one value that is supported, which is transformers' default too."""
    always: Mapping[str, Any]
    """By our name: what holds for the whole family."""
    dense_fields: Callable[[ModelConfig], dict[str, Any]]
    """How it is written which layers are dense."""
    dense_layers: Callable[[_Reader], Iterable[int]]
    """How that is read."""
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    is_tied: bool = False


def _qwen_dense_layers(reader: _Reader) -> Iterable[int]:
    step, only = reader.get("decoder_sparse_step", 1), reader.get("mlp_only_layers", [])
    return (layer for layer in range(reader.whole("num_hidden_layers")) if layer in only or (layer + 1) % step != 0)


def _ernie_dense_fields(config: ModelConfig) -> dict[str, Any]:
    spacing = moe_interval(config)
    assert spacing is not None, f"ernie4_5_moe cannot place MoE layers {config.moe_layers}"
    return dict(zip(("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"), spacing, strict=True))


def _ernie_dense_layers(reader: _Reader) -> Iterable[int]:
    num_layers = reader.whole("num_hidden_layers")
    start, end = reader.get("moe_layer_start_index", 1), reader.get("moe_layer_end_index", -1)
    moe = ernie_moe_layers(start, end, reader.get("moe_layer_interval", 1), num_layers)
    return (layer for layer in range(num_layers) if layer not in moe)


_COMMON: dict[str, tuple[str, Any]] = {
    "vocab_size": ("vocab_size", _NEEDED),
    "hidden_size": ("hidden_size", _NEEDED),
    "num_hidden_layers": ("num_layers", _NEEDED),
    "num_attention_heads": ("num_heads", _NEEDED),
    "num_key_value_heads": ("num_kv_heads", _NEEDED),
    "head_dim": ("head_dim", _NEEDED),
    "moe_intermediate_size": ("expert_intermediate_size", _NEEDED),
    "max_position_embeddings": ("max_positions", _NEEDED),
}
_ARCHITECTURES: dict[Family, _Architecture] = {
    "glm4_moe": _Architecture(
        name="Glm4MoeForCausalLM",
        fields={
            "n_routed_experts|num_local_experts": ("num_experts", _NEEDED),
            "num_experts_per_tok": ("top_k", _NEEDED),
            "n_shared_experts": ("num_shared_experts", 1),
            "use_qk_norm": ("qk_norm", False),
            "attention_bias": ("attention_bias", False),
            "partial_rotary_factor": ("rotary_fraction", 0.5),
            "norm_topk_prob": ("normalize_gates", True),
            "routed_scaling_factor": ("routed_scaling", 1.0),
        },
        fixed={"n_group": 1, "topk_group": 1},
        always={"router": "sigmoid", "selection_bias": True},
        dense_fields=lambda config: {
            "first_k_dense_replace": len(config.dense_layers),
            "num_nextn_predict_layers": 0,  # engines would look for them
        },
        dense_layers=lambda reader: range(
            min(reader.get("first_k_dense_replace", 1), reader.whole("num_hidden_layers"))
        ),
    ),
    "qwen3_moe": _Architecture(
        name="Qwen3MoeForCausalLM",
        fields={
            "num_experts|num_local_experts": ("num_experts", _NEEDED),
            "num_experts_per_tok": ("top_k", _NEEDED),
            "attention_bias": ("attention_bias", False),
            "norm_topk_prob": ("normalize_gates", False),
        },
        fixed={"use_sliding_window": False},
        always={"router": "softmax", "selection_bias": False, "qk_norm": True},
        dense_fields=lambda config: {"mlp_only_layers": list(config.dense_layers), "decoder_sparse_step": 1},
        dense_layers=_qwen_dense_layers,
        norm_eps=1e-6,
    ),
    "ernie4_5_moe": _Architecture(
        name="Ernie4_5_MoeForCausalLM",
        fields={
            "moe_num_experts|num_experts": ("num_experts", _NEEDED),
            "moe_k|num_experts_per_tok": ("top_k", _NEEDED),
            "moe_num_shared_experts": ("num_shared_experts", 0),
        },
        fixed={"use_bias": False},
        always={"router": "softmax", "selection_bias": True, "normalize_gates": True},
        dense_fields=_ernie_dense_fields,
        dense_layers=_ernie_dense_layers,
        rope_theta=500_000.0,
        is_tied=True,
    ),
}


def to_hf(config: ModelConfig, family: Family, dtype: str) -> dict[str, Any]:
    """The config.json of ``config`` in ``family``, less the tokens' ids; ``dtype`` is torch's name of it (``float32``).

    Names that transformers 4 and 5 spell differently (RoPE, dtype) are written both ways.
    """
    assert why_not(config, family) is None, why_not(config, family)
    architecture = _ARCHITECTURES[family]
    values = config.model_dump() | {
        "num_experts": stored_experts(config, family),
        "num_shared_experts": stored_shared_experts(config, family),
    }
    fields = {**_COMMON, **architecture.fields}.items()
    rope: dict[str, Any] = {"rope_theta": config.rope_theta, "rope_type": "default"}
    if "partial_rotary_factor" in architecture.fields:
        rope["partial_rotary_factor"] = config.rotary_fraction
    return {
        "architectures": [architecture.name],
        "model_type": family,
        "dtype": dtype,
        "torch_dtype": dtype,
        **{names.partition("|")[0]: values[ours] for names, (ours, _) in fields},
        **architecture.dense_fields(config),
        **architecture.fixed,
        "intermediate_size": config.dense_intermediate_size or config.expert_intermediate_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": stored_tied(config, family),
        "rope_theta": config.rope_theta,
        "rope_parameters": rope,
        "use_cache": True,
    }


def from_hf(tree: Mapping[str, Any], source: str) -> tuple[ModelConfig, Family]:
    """The network that a config.json describes; ``source`` names the file in errors. Raises `UserError`: another
    architecture, a missing field, or a setting this model does not have.
    """
    model_type = tree.get("model_type")
    if model_type not in FAMILIES:
        raise UserError(
            f"{source}: model_type: {model_type!r} is not a supported architecture; convert the checkpoint to one of {', '.join(FAMILIES)}"
        )
    family = parse_family(model_type, source)
    architecture, reader = _ARCHITECTURES[family], _Reader(tree, source)
    rope = reader.get("rope_parameters", {}) or {}
    scaling = reader.get("rope_scaling", {}) or {}
    reader.refuse_unless("hidden_act", reader.get("hidden_act", "silu"), "silu")
    reader.refuse_unless("rope_parameters.rope_type", rope.get("rope_type", "default"), "default")
    reader.refuse_unless("rope_scaling", scaling.get("rope_type", scaling.get("type", "default")), "default")
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise UserError(
            f"{source}: rope_parameters: one set for each kind of layer is not supported; use a checkpoint with one"
        )
    if "quantization_config" in tree:
        raise UserError(f"{source}: quantization_config: quantised weights are not supported; use the bf16 checkpoint")
    for name, value in architecture.fixed.items():
        reader.refuse_unless(name, reader.get(name, value), value)
    num_heads = reader.whole("num_attention_heads")
    defaults = {"num_key_value_heads": num_heads, "head_dim": reader.whole("hidden_size") // num_heads}
    reader = _Reader(_present(defaults) | _present(tree) | _present(rope), source)
    fields = {
        ours: reader.need(*names.split("|")) if default is _NEEDED else reader.get(names, default)
        for names, (ours, default) in {**_COMMON, **architecture.fields}.items()
    }
    dense = tuple(architecture.dense_layers(reader))
    fields |= {
        **architecture.always,
        "rope_theta": reader.get("rope_theta", architecture.rope_theta),
        "norm_eps": reader.get("rms_norm_eps", architecture.norm_eps),
        "tie_embeddings": reader.get("tie_word_embeddings", architecture.is_tied),
        "dense_layers": dense,
        "dense_intermediate_size": reader.need("intermediate_size") if dense else 0,
    }
    return validate(ModelConfig, fields, source), family


def _present(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in tree.items() if value is not None}


def differing_field(written: Mapping[str, Any], expected: Mapping[str, Any]) -> str | None:
    """The first field, of those that describe the network, in which two config.json of one family differ."""
    for name, value in expected.items():
        if name.endswith("dtype") or name in ("architectures", "use_cache"):
            continue
        other = written.get(name)
        is_close = isinstance(value, float) and isinstance(other, int | float) and math.isclose(other, value)
        if other != value and not is_close:
            return name
    return None


# --- tensors ----------------------------------------------------------------------------------------------------------


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
