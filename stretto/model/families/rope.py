"""RoPE settings of a config.json, in the forms of transformers 5 (``rope_parameters``) and 4 (``rope_theta``, ``rope_scaling``)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from stretto.model.families.table import Reader, Table
from stretto.model.spec import ModelConfig, RopeScaling, yarn_mscale

_ORIGINAL = "original_max_position_embeddings"
_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", _ORIGINAL, "low_freq_factor", "high_freq_factor"),
    "yarn": (
        *("factor", _ORIGINAL, "beta_fast", "beta_slow", "truncate"),
        *("attention_factor", "mscale", "mscale_all_dim"),
    ),
}
"""Settings of each kind. All but `_ORIGINAL` have the same names in `RopeScaling`."""
_ALLOWED = {"rope_type", "type", "rope_theta", "partial_rotary_factor", _ORIGINAL}
"""Settings that every kind may have."""


def _ours(key: str) -> str:
    return "original_positions" if key == _ORIGINAL else key


def read_rope(reader: Reader, table: Table) -> dict[str, Any]:
    """RoPE fields of `ModelConfig`. Raises `UserError`: an unsupported kind, or a key that this kind does not have."""
    tree = reader.tree
    name = "rope_scaling" if tree.get("rope_scaling") else "rope_parameters"  # the precedence of transformers
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
        if key not in _ALLOWED and key not in _KEYS[kind] and value is not None:
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
    scaling = {_ours(key): rope[key] for key in _KEYS[kind] if key in rope}
    if _ORIGINAL in _KEYS[kind]:
        longest = reader.whole("max_position_embeddings")
        inner = Reader(rope, reader.source).whole(_ORIGINAL, longest)
        scaling["original_positions"] = reader.whole(_ORIGINAL, inner)
        if kind == "yarn" and "factor" not in scaling:
            scaling["factor"] = longest / scaling["original_positions"]
    needed = {"factor"} | ({"low_freq_factor", "high_freq_factor"} if kind == "llama3" else set())
    for key in sorted(needed - scaling.keys()):
        raise reader.problem(f"{name}.{key}", f"missing, and {kind!r} RoPE needs it; the file is incomplete")
    for key in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
        if scaling.get(key) == 0:  # None in transformers
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
    """RoPE fields of config.json, in both forms."""
    scaling = config.rope_scaling
    rope: dict[str, Any] = {"rope_theta": config.rope_theta, "rope_type": scaling.kind if scaling else "default"}
    if table.rotary_fraction is not None:
        rope["partial_rotary_factor"] = config.rotary_fraction
    if scaling is not None:
        settings = {key: getattr(scaling, _ours(key)) for key in _KEYS[scaling.kind]}
        rope |= {key: value for key, value in settings.items() if value is not None}
    fields = {"rope_theta": config.rope_theta, "rope_parameters": rope}
    if table.rotary_fraction is not None:
        fields["partial_rotary_factor"] = config.rotary_fraction
    return fields if scaling is None else fields | {"rope_scaling": rope}


def latent_scale(head_dim: int, scaling: RopeScaling | None) -> float | None:
    """Scale of the attention scores of MLA; None: 1/√``head_dim``. It includes the square of yarn's ``mscale_all_dim`` factor, in
    transformers and in DeepSeek's code.
    """
    if scaling is None or not scaling.mscale_all_dim or scaling.factor <= 1:
        return None
    return yarn_mscale(scaling.factor, scaling.mscale_all_dim) ** 2 / math.sqrt(head_dim)
