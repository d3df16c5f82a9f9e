"""Supported architectures (families), each described by a table: limits, config.json, tensors.

The sources are the modelling files of transformers, vLLM and llama.cpp. Does not import torch, so that an invalid recipe is
rejected quickly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from stretto.base.config import validate
from stretto.base.errors import UserError, nearest
from stretto.model.families import tensors
from stretto.model.families.deepseek import DEEPSEEK, GLM_LITE
from stretto.model.families.ernie import ERNIE, ERNIE_MOE
from stretto.model.families.glm import GLM_MOE
from stretto.model.families.gpt_oss import GPT_OSS
from stretto.model.families.llama import LLAMA, MISTRAL
from stretto.model.families.mixtral import MIXTRAL, OLMOE
from stretto.model.families.quantisation import quantisation
from stretto.model.families.qwen import QWEN2, QWEN3, QWEN3_MOE
from stretto.model.families.rope import latent_scale, read_rope, write_rope
from stretto.model.families.table import FAMILIES, OPTIONAL, Family, Reader, Table
from stretto.model.families.tensors import NEVER_CHOSEN, Alias, Stored
from stretto.model.spec import ModelConfig, RopeScaling

__all__ = [
    "FAMILIES",
    "NEVER_CHOSEN",
    "Alias",
    "Family",
    "Stored",
]  # names of submodules that other modules import from here

TABLES: dict[Family, Table] = {
    table.family: table
    for table in (
        *(GLM_MOE, QWEN3_MOE, ERNIE_MOE, MIXTRAL, OLMOE, GPT_OSS, DEEPSEEK, GLM_LITE),
        *(LLAMA, MISTRAL, QWEN2, QWEN3, ERNIE),
    )
}
"""The order of preference of `default_family`."""
_OTHER_NAMES: dict[str, Family] = {"kimi_k2": "deepseek_v3"}
"""Further values of ``model_type``, and the family with the same architecture."""


def parse_family(name: str, source: str = "--family") -> Family:
    """The family called ``name``. Raises `UserError`: there is no such family."""
    if name in TABLES:
        return name
    raise UserError(
        f"{source}: {name!r} is not a supported family{nearest(name, FAMILIES)}; choose {', '.join(FAMILIES)}"
    )


_MOST_POSITIONS = 1 << 30
"""Upper bound of ``max_position_embeddings``: a hundred times the longest context of any network."""


# --- networks that a family can express ---------------------------------------------------------------------------------

_REASONS: dict[str, tuple[str, str]] = {
    "selection_bias": ("its router has a selection bias and {family} has none", ""),
    "router": ("its router is a {value} and {family}'s is a {wanted}",) * 2,
    "router_bias": ("its router has a bias on logits and {family} has none", ""),
    "num_shared_experts": ("it has shared experts and {family} has none", ""),
    "qk_norm": (
        "its queries and keys are normalised and {family}'s are not",
        "its queries and keys are not normalised and {family}'s always are",
    ),
    "qk_norm_wide": (
        "its queries and keys are normalised over all heads and {family}'s are not",
        "its queries and keys are not normalised over all heads and {family}'s always are",
    ),
    "qkv_clip": ("its queries, keys and values are clipped and {family}'s are not", ""),
    "attention_bias": ("its attention has a bias on queries, keys and values and {family} has none", ""),
    "attention_out_bias": ("its attention has an output bias and {family} has none", ""),
    "attention_sinks": ("its attention has sinks and {family} has none", ""),
    "sliding_layers": ("it has layers with a sliding window and {family} has none", ""),
    "latent": ("its attention is latent and {family}'s is not", ""),
    "rotary_fraction": ("it rotates {value} of a head and {family} rotates all of it",) * 2,
    "normalize_gates": ("", "its gates are not renormalised and {family}'s always are"),
    "routed_scaling": ("its routed scaling is {value} and {family} has none",) * 2,
    "expert_groups": ("it chooses experts by groups and {family} does not",) * 2,
    "expert_bias": ("its experts have biases and {family}'s have none", ""),
    "mlp_bias": ("its feed-forward layers have biases and {family}'s have none", ""),
    "clamped_swiglu": ("its SwiGLU is clamped and {family}'s is not", ""),
}
"""Reasons by field of `ModelConfig`: for a network that has a feature which the family lacks, and for the opposite."""
_OF_EXPERTS = (
    *("router", "selection_bias", "router_bias", "num_shared_experts", "normalize_gates", "routed_scaling"),
    *("expert_groups", "expert_bias"),
)
"""Fields without meaning for a network without experts."""


def why_not(config: ModelConfig, family: Family) -> str | None:
    """The reason, in one sentence, why ``family`` cannot express ``config`` exactly; None if it can."""
    table = TABLES[family]
    if config.top_k_per_layer is not None:
        return f"its layers choose different numbers of experts (top-k {config.top_k_per_layer}) and {family} has one top-k for all layers"
    reasons = (part.why_not(config) for part in table.parts)
    reason = next((found for found in reasons if found is not None), None)
    reason = reason or _lacking(config, table) or _unpaddable(config, table) or _scale(config, table)
    return None if reason is None else reason.replace("{family}", family)


def _lacking(config: ModelConfig, table: Table) -> str | None:
    """The reason for the first field that the family cannot express."""
    expressible = {name for part in table.parts for name in part.ours}
    expressible |= {name for names, _ in table.switches.values() for name in names}
    if table.rotary_fraction is not None:
        expressible.add("rotary_fraction")
    for name, (more, less) in _REASONS.items():
        value = getattr(config, name)
        wanted = table.always.get(name, ModelConfig.model_fields[name].default if name != "selection_bias" else False)
        fits = name in expressible or value == wanted or (name in OPTIONAL and not value)
        if not fits and (config.moe_layers or name not in _OF_EXPERTS):
            return (more if value else less).replace("{value}", str(value)).replace("{wanted}", str(wanted))
    return None


def _unpaddable(config: ModelConfig, table: Table) -> str | None:
    """The reason why layers with fewer experts than others cannot be padded."""
    if len(set(config.experts_by_layer)) <= 1:
        return None
    if not table.pads:
        return (
            "its layers have different numbers of experts, and a dummy expert would take a share of {family}'s softmax"
        )
    if config.expert_groups > 1:
        return "its layers have different numbers of experts, and dummy experts would move others between groups"
    if table.always.get("router_bias") and not config.router_bias:
        # the only value in a checkpoint of the family that keeps a token from choosing a dummy expert
        return "its layers have different numbers of experts, and without a router bias {family} would choose dummy experts"
    return None


def _scale(config: ModelConfig, table: Table) -> str | None:
    """The reason why the scale of attention scores cannot be expressed: config.json has no field for it and implies a value."""
    usual = 1 / math.sqrt(config.head_dim)
    implied = latent_scale(config.head_dim, config.rope_scaling) if table.is_latent else None
    if math.isclose(config.attention_scale or usual, implied or usual, rel_tol=1e-6):
        return None
    return f"its attention scores are scaled by {config.attention_scale} and {{family}}'s by {implied or usual}"


def default_family(config: ModelConfig) -> Family:
    """The first family that can express ``config``; for dense networks, families without experts come first.

    Raises UserError: no family can; the message has the reason for every family.
    """
    reasons = {family: why_not(config, family) for family in TABLES}
    able = [family for family, reason in reasons.items() if reason is None]
    if able:
        return able[0] if config.moe_layers else min(able, key=lambda family: TABLES[family].has_experts)
    text = "; ".join(f"{family}: {reason}" for family, reason in reasons.items())
    raise UserError(f"family: no supported family can express this network ({text}); change the recipe")


def kept_family(config: ModelConfig, family: Family) -> Family:
    """``family``, that of the original network, if it can express ``config``; else the `default_family`."""
    return family if why_not(config, family) is None else default_family(config)


def check_family(config: ModelConfig, family: Family) -> Family:
    """Return ``family`` if it can express ``config``. Raises `UserError`: it cannot; the message has the reason and names the families
    that can.
    """
    reason = why_not(config, family)
    if reason is None:
        return family
    able = [other for other in FAMILIES if why_not(config, other) is None]
    remedy = f"use {' or '.join(able)}" if able else "no other supported family can express it either"
    raise UserError(f"--family {family}: cannot express this network: {reason}; {remedy}")


# --- config.json ------------------------------------------------------------------------------------------------------

_FOREIGN: dict[str, Any] = {
    "is_causal": True,
    "attention_chunk_size": None,
    "per_layer_config": None,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
"""Settings of other architectures that some software applies to any model, and their neutral values."""


def to_hf(config: ModelConfig, family: Family, dtype: str) -> dict[str, Any]:
    """The config.json of ``config`` in ``family``, without token ids; ``dtype``: name in torch (``float32``).

    Fields with different names in transformers 4 and 5 (RoPE, dtype) are written under both.
    """
    assert why_not(config, family) is None, why_not(config, family)
    table = TABLES[family]
    padded = {
        ("num_experts",): table.stored_experts(config),
        ("num_shared_experts",): table.stored_shared_experts(config),
    }
    family_fields: dict[str, Any] = {}
    for part in table.parts:
        fields = part.write(config)
        family_fields |= dict.fromkeys(fields, padded[part.ours]) if part.ours in padded else fields
    biases = table.biases(config)
    return {
        "architectures": [table.architecture],
        "model_type": family,
        "dtype": dtype,
        "torch_dtype": dtype,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions,
        **family_fields,
        **{theirs: set(names) <= biases for theirs, (names, _) in table.switches.items()},
        **table.fixed,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": table.stored_tied(config),
        **write_rope(config, table),
        "use_cache": True,
    }


def from_hf(tree: Mapping[str, Any], source: str) -> tuple[ModelConfig, Family]:
    """Configuration and family of the network in a config.json; ``source``: name of the file, for errors.

    Raises UserError: the architecture is not supported, a field is missing, or a setting is not supported.
    """
    reader = Reader(tree, source)
    table = TABLES[_family(reader)]
    _refuse_foreign(reader, table)
    num_heads = reader.whole("num_attention_heads")
    default_head_dim = reader.whole("hidden_size") // num_heads
    fields = {
        "vocab_size": reader.get("vocab_size"),
        "hidden_size": reader.get("hidden_size"),
        "num_layers": reader.num_layers,
        "num_heads": num_heads,
        "num_kv_heads": _null_or(reader, "num_key_value_heads", table.num_kv_heads, num_heads),
        "head_dim": _null_or(reader, "head_dim", table.head_dim, default_head_dim),
        "max_positions": reader.whole("max_position_embeddings", most=_MOST_POSITIONS),
        "norm_eps": reader.get("rms_norm_eps", table.norm_eps),
        "tie_embeddings": reader.get("tie_word_embeddings", table.is_tied),
        **table.always,
        **read_rope(reader, table),
    }
    for theirs, (names, default) in table.switches.items():
        fields |= dict.fromkeys(names, reader.get(theirs, default))
    for part in table.parts:
        fields |= part.read(reader)
    head = fields["head_dim"]
    if isinstance(head, int) and not table.is_latent and (rotated := int(head * fields["rotary_fraction"])) % 2:
        name = "head_dim" if table.rotary_fraction is None else "partial_rotary_factor"
        raise reader.problem(name, f"{rotated} rotated channels of a head of {head} cannot be paired")
    if fields.get("latent"):
        scaling = fields["rope_scaling"] and validate(RopeScaling, fields["rope_scaling"], f"{source}: rope_scaling")
        fields |= {"num_kv_heads": num_heads, "attention_scale": latent_scale(fields["head_dim"], scaling)}
    return validate(ModelConfig, fields, source), table.family


def _null_or(reader: Reader, name: str, default: int | None, derived: int) -> Any:
    """The size ``name``: ``derived`` if it is null, the family's ``default`` if the field is missing."""
    value = reader.tree.get(name, default)
    return derived if value is None else value


def _family(reader: Reader) -> Family:
    name = str(reader.tree.get("model_type"))
    family = _OTHER_NAMES.get(name, name)
    if family in TABLES:
        return family
    reason, kinds = "", reader.get("layer_types", [])
    if "auto_map" in reader.tree:
        reason = " and names code of its own (auto_map), which is never run"
    elif {"text_config", "vision_config", "audio_config"} & set(reader.tree):
        reason = " (a text model wrapped with others)"
    elif isinstance(kinds, list) and "linear_attention" in kinds:
        reason = " (it has layers of linear attention)"
    raise reader.problem(
        "model_type",
        f"{name!r} is not a supported architecture{reason}; convert the checkpoint to one of {', '.join(FAMILIES)}",
    )


def _refuse_foreign(reader: Reader, table: Table) -> None:
    """Raises `UserError`: a class, an activation or a setting that is not supported for the family."""
    classes = reader.get("architectures", [table.architecture])
    classes = classes if isinstance(classes, list) else [classes]
    if [str(name).replace("_", "").lower() for name in classes] != [table.architecture.replace("_", "").lower()]:
        raise reader.problem(
            "architectures", f"{classes} is not {table.architecture}, the language model of {table.family}"
        )
    activation = reader.get("hidden_act", "silu")
    reader.refuse_unless("hidden_act", "silu" if activation == "swish" else activation, "silu")
    quantisation(reader.tree, reader.source)
    for name, value in {**_FOREIGN, **table.fixed}.items():
        reader.refuse_unless(name, reader.get(name, value), value)


def remarks(tree: Mapping[str, Any]) -> list[str]:
    """Settings of a config.json that `from_hf` ignores, one line each."""
    lines = []
    if tree.get("auto_map"):
        lines.append(f"auto_map: names code to be run, which is never run; read as model_type {tree.get('model_type')}")
    layers = tree.get("num_nextn_predict_layers") or tree.get("num_mtp_layers") or 0
    if isinstance(layers, int) and layers > 0:
        lines.append(f"num_nextn_predict_layers: {layers} layers of multi-token prediction are left out")
    return lines


def differing_field(written: Mapping[str, Any], expected: Mapping[str, Any]) -> str | None:
    """Name of the first field of the network in which two config.json of one family differ; None: they agree."""
    for name, value in expected.items():
        if name.endswith("dtype") or name in ("architectures", "use_cache"):
            continue
        other = written.get(name)
        is_close = isinstance(value, float) and isinstance(other, int | float) and math.isclose(other, value)
        if other != value and not is_close:
            return name
    return None


# --- tensors ----------------------------------------------------------------------------------------------------------


def stored_tensors(config: ModelConfig, family: Family) -> Iterator[Stored]:
    """Every tensor of a checkpoint of ``config`` in ``family``, in the order of the layers."""
    return tensors.stored_tensors(config, TABLES[family])


def readable_tensors(config: ModelConfig, family: Family) -> Iterator[Stored]:
    """`stored_tensors`, and a copy of a tied head, which other software may have stored."""
    yield from stored_tensors(config, family)
    if TABLES[family].stored_tied(config):
        yield tensors.tied_head(config)
