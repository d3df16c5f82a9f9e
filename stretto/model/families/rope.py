"""RoPE settings of a config.json, in the form of transformers 5 (``rope_parameters``) and in the older one (``rope_theta``)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from stretto.model.families.table import Reader, Table
from stretto.model.spec import ModelConfig, RopeScaling, yarn_mscale

_KEYS: dict[str, dict[str, str]] = {
    "default": {},
    "linear": {"factor": "factor"},
    "dynamic": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "original_max_position_embeddings": "original_positions",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
    },
    "yarn": {
        "factor": "factor",
        "original_max_position_embeddings": "original_positions",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "truncate": "truncate",
        "attention_factor": "attention_factor",
        "mscale": "mscale",
        "mscale_all_dim": "mscale_all_dim",
    },
}
"""Of each kind: our name by theirs."""
_ANYWHERE = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}


def read_rope(reader: Reader, table: Table) -> dict[str, Any]:
    """Fields of `ModelConfig`. Raises `UserError`: a kind that is not supported, or a key that this kind does not have."""
    tree = reader.tree
    name = "rope_scaling" if tree.get("rope_scaling") else "rope_parameters"  # the former wins in transformers, too
    rope = tree.get(name)
    if rope is None:
        rope = table.rope
    if not isinstance(rope, Mapping):
        raise reader.problem(name, f"{rope!r} is not an object; the file is damaged")
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise reader.problem(name, "one set for each kind of layer is not supported; use a checkpoint with one")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in _KEYS:
        raise reader.problem(f"{name}.rope_type", f"{kind!r} is not supported; use {', '.join(_KEYS)}")
    for key, value in rope.items():
        if key not in _ANYWHERE and key not in _KEYS[kind] and value is not None:
            raise reader.problem(f"{name}.{key}", f"{kind!r} RoPE has no such setting")
    present = {key: value for key, value in rope.items() if value is not None}
    return {
        "rope_theta": present.get("rope_theta", reader.get("rope_theta", table.rope_theta)),
        "rope_scaling": _scaling(reader, name, kind, present),
        "rotary_fraction": _rotary_fraction(reader, table, present),
    }


def _scaling(reader: Reader, name: str, kind: str, rope: Mapping[str, Any]) -> dict[str, Any] | None:
    if kind == "default":
        return None
    scaling = {ours: rope[theirs] for theirs, ours in _KEYS[kind].items() if theirs in rope}
    if "original_positions" in _KEYS[kind].values():
        longest = reader.whole("max_position_embeddings")
        inside = Reader(rope, reader.source).whole("original_max_position_embeddings", longest)
        scaling["original_positions"] = reader.whole("original_max_position_embeddings", inside)
        if kind == "yarn" and "factor" not in scaling:
            scaling["factor"] = longest / scaling["original_positions"]
    needed = {"factor"} | ({"low_freq_factor", "high_freq_factor"} if kind == "llama3" else set())
    for key in sorted(needed - scaling.keys()):
        raise reader.problem(f"{name}.{key}", f"missing, and {kind!r} RoPE needs it; the file is incomplete")
    for key in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
        if scaling.get(key) == 0:  # transformers takes it for none
            del scaling[key]
    return {"kind": kind, **scaling}


def _rotary_fraction(reader: Reader, table: Table, rope: Mapping[str, Any]) -> float:
    default = 1.0 if table.rotary_fraction is None else table.rotary_fraction
    fraction = rope.get("partial_rotary_factor", reader.get("partial_rotary_factor", default))
    if not isinstance(fraction, int | float) or not 0 <= fraction <= 1:
        raise reader.problem("partial_rotary_factor", f"{fraction!r} is not a share from 0 to 1; the file is damaged")
    if table.rotary_fraction is None:
        reader.refuse_unless("partial_rotary_factor", fraction, 1.0)
    return float(fraction)


def write_rope(config: ModelConfig, table: Table) -> dict[str, Any]:
    """What config.json says of RoPE, in both spellings."""
    scaling = config.rope_scaling
    rope: dict[str, Any] = {"rope_theta": config.rope_theta, "rope_type": scaling.kind if scaling else "default"}
    if table.rotary_fraction is not None:
        rope["partial_rotary_factor"] = config.rotary_fraction
    if scaling is not None:
        told = {theirs: getattr(scaling, ours) for theirs, ours in _KEYS[scaling.kind].items()}
        rope |= {key: value for key, value in told.items() if value is not None}
    fields = {"rope_theta": config.rope_theta, "rope_parameters": rope}
    if table.rotary_fraction is not None:
        fields["partial_rotary_factor"] = config.rotary_fraction
    return fields if scaling is None else fields | {"rope_scaling": rope}


def latent_scale(head_dim: int, scaling: RopeScaling | None) -> float | None:
    """What latent attention multiplies its scores by (None: 1/√``head_dim``): the square of yarn's ``mscale_all_dim`` factor is
    part of it, in transformers as in DeepSeek's own code.
    """
    if scaling is None or not scaling.mscale_all_dim or scaling.factor <= 1:
        return None
    return yarn_mscale(scaling.factor, scaling.mscale_all_dim) ** 2 / math.sqrt(head_dim)
