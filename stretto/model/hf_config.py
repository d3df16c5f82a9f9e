"""A `ModelConfig` as the config.json of a family, and back.

Field names and defaults are those of the configuration classes in transformers. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from stretto.base.config import validate
from stretto.base.errors import UserError
from stretto.model.families import (
    FAMILIES,
    Family,
    ernie_moe_layers,
    moe_interval,
    parse_family,
    stored_experts,
    stored_shared_experts,
    stored_tied,
    why_not,
)
from stretto.model.spec import ModelConfig

_ARCHITECTURES: dict[Family, str] = {
    "glm4_moe": "Glm4MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
}


@dataclass(frozen=True, slots=True)
class TokenIds:
    """Special tokens named in config.json; read from the tokenizer by the writer of a checkpoint."""

    eos: int | None = None
    bos: int | None = None
    pad: int | None = None


def to_hf(config: ModelConfig, family: Family, dtype: str, tokens: TokenIds) -> dict[str, Any]:
    """The config.json of ``config`` in ``family``; ``dtype`` is torch's name of it (``float32``).

    Names that transformers 4 and 5 spell differently (RoPE, dtype) are written both ways.
    """
    assert why_not(config, family) is None, why_not(config, family)
    rope: dict[str, Any] = {"rope_theta": config.rope_theta, "rope_type": "default"}
    tree: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "dtype": dtype,
        "torch_dtype": dtype,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.dense_intermediate_size or config.expert_intermediate_size,
        "moe_intermediate_size": config.expert_intermediate_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": stored_tied(config, family),
        "rope_theta": config.rope_theta,
        "rope_parameters": rope,
        "use_cache": True,
        "bos_token_id": tokens.bos,
        "eos_token_id": tokens.eos,
        "pad_token_id": tokens.pad,
    }
    if family == "glm4_moe":
        rope["partial_rotary_factor"] = config.rotary_fraction
        return tree | _glm_fields(config)
    return tree | (_qwen_fields(config) if family == "qwen3_moe" else _ernie_fields(config))


def _glm_fields(config: ModelConfig) -> dict[str, Any]:
    return {
        "partial_rotary_factor": config.rotary_fraction,
        "attention_bias": config.attention_bias,
        "use_qk_norm": config.qk_norm,
        "n_routed_experts": stored_experts(config, "glm4_moe"),
        "n_shared_experts": stored_shared_experts(config, "glm4_moe"),
        "num_experts_per_tok": config.top_k,
        "first_k_dense_replace": len(config.dense_layers),
        "norm_topk_prob": config.normalize_gates,
        "routed_scaling_factor": config.routed_scaling,
        "n_group": 1,
        "topk_group": 1,
        "num_nextn_predict_layers": 0,
    }


def _qwen_fields(config: ModelConfig) -> dict[str, Any]:
    return {
        "attention_bias": config.attention_bias,
        "num_experts": stored_experts(config, "qwen3_moe"),
        "num_experts_per_tok": config.top_k,
        "mlp_only_layers": list(config.dense_layers),
        "decoder_sparse_step": 1,
        "norm_topk_prob": config.normalize_gates,
        "use_sliding_window": False,
    }


def _ernie_fields(config: ModelConfig) -> dict[str, Any]:
    spacing = moe_interval(config)
    assert spacing is not None, f"ernie4_5_moe cannot place MoE layers {config.moe_layers}"
    start, end, interval = spacing
    return {
        "use_bias": False,
        "moe_num_experts": stored_experts(config, "ernie4_5_moe"),
        "moe_num_shared_experts": config.num_shared_experts,
        "moe_k": config.top_k,
        "moe_layer_start_index": start,
        "moe_layer_end_index": end,
        "moe_layer_interval": interval,
    }


def from_hf(tree: Mapping[str, Any], source: str) -> tuple[ModelConfig, Family]:
    """The network that a config.json describes; ``source`` names the file in errors.

    Raises:
        UserError: another architecture, a missing field, or a setting this model does not have.
    """
    model_type = tree.get("model_type")
    if model_type not in FAMILIES:
        raise UserError(
            f"{source}: model_type: {model_type!r} is not a supported architecture; convert the checkpoint to one of {', '.join(FAMILIES)}"
        )
    family = parse_family(model_type, source)
    reader = _Reader(tree, source)
    _refuse_foreign(reader, family)
    fields = _common_from_hf(reader, family) | _FROM_HF[family](reader)
    return validate(ModelConfig, fields, source), family


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

    def whole(self, *names: str) -> int:
        """`need`, and a whole number: for fields that are computed with."""
        value = self.need(*names)
        if not isinstance(value, int) or isinstance(value, bool):
            raise UserError(f"{self.source}: {names[0]}: {value!r} is not a whole number; the file is damaged")
        return value

    def refuse_unless(self, name: str, value: Any, allowed: tuple[Any, ...]) -> None:
        if value not in allowed:
            raise UserError(
                f"{self.source}: {name}: {value!r} is not supported; use a checkpoint with {name} {allowed[0]!r}"
            )


_THETA: dict[Family, float] = {"glm4_moe": 10_000.0, "qwen3_moe": 10_000.0, "ernie4_5_moe": 500_000.0}
"""Where config.json does not say, transformers' own defaults; likewise for ties, rotary share and norm epsilon."""


def _refuse_foreign(reader: _Reader, family: Family) -> None:
    rope = reader.get("rope_parameters", {}) or {}
    scaling = reader.get("rope_scaling", {}) or {}
    reader.refuse_unless("hidden_act", reader.get("hidden_act", "silu"), ("silu",))
    reader.refuse_unless("rope_parameters.rope_type", rope.get("rope_type", "default"), ("default",))
    reader.refuse_unless("rope_scaling", scaling.get("rope_type", scaling.get("type", "default")), ("default",))
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise UserError(
            f"{reader.source}: rope_parameters: one set for each kind of layer is not supported; use a checkpoint with one"
        )
    if "quantization_config" in reader.tree:
        raise UserError(
            f"{reader.source}: quantization_config: quantised weights are not supported; use the bf16 checkpoint"
        )
    if family == "glm4_moe":
        reader.refuse_unless("n_group", reader.get("n_group", 1), (1,))
        reader.refuse_unless("topk_group", reader.get("topk_group", 1), (1,))
    if family == "qwen3_moe":
        reader.refuse_unless("use_sliding_window", reader.get("use_sliding_window", False), (False,))
    if family == "ernie4_5_moe":
        reader.refuse_unless("use_bias", reader.get("use_bias", False), (False,))


def _common_from_hf(reader: _Reader, family: Family) -> dict[str, Any]:
    rope = reader.get("rope_parameters", {}) or {}
    num_heads = reader.whole("num_attention_heads")
    return {
        "vocab_size": reader.need("vocab_size"),
        "hidden_size": reader.need("hidden_size"),
        "num_layers": reader.whole("num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": reader.get("num_key_value_heads", num_heads),
        "head_dim": reader.get("head_dim", reader.whole("hidden_size") // num_heads),
        "expert_intermediate_size": reader.need("moe_intermediate_size"),
        "max_positions": reader.need("max_position_embeddings"),
        "norm_eps": reader.get("rms_norm_eps", 1e-6 if family == "qwen3_moe" else 1e-5),
        "rope_theta": rope.get("rope_theta", reader.get("rope_theta", _THETA[family])),
        "tie_embeddings": reader.get("tie_word_embeddings", family == "ernie4_5_moe"),
    }


def _dense(reader: _Reader, dense_layers: tuple[int, ...]) -> dict[str, Any]:
    size = reader.need("intermediate_size") if dense_layers else 0
    return {"dense_layers": dense_layers, "dense_intermediate_size": size}


def _glm_from_hf(reader: _Reader) -> dict[str, Any]:
    rope = reader.get("rope_parameters", {}) or {}
    num_dense = min(reader.get("first_k_dense_replace", 1), reader.whole("num_hidden_layers"))
    return {
        "num_experts": reader.need("n_routed_experts", "num_local_experts"),
        "top_k": reader.need("num_experts_per_tok"),
        "num_shared_experts": reader.get("n_shared_experts", 1),
        "qk_norm": reader.get("use_qk_norm", False),
        "attention_bias": reader.get("attention_bias", False),
        "rotary_fraction": rope.get("partial_rotary_factor", reader.get("partial_rotary_factor", 0.5)),
        "router": "sigmoid",
        "selection_bias": True,
        "normalize_gates": reader.get("norm_topk_prob", True),
        "routed_scaling": reader.get("routed_scaling_factor", 1.0),
        **_dense(reader, tuple(range(num_dense))),
    }


def _qwen_from_hf(reader: _Reader) -> dict[str, Any]:
    step, only = reader.get("decoder_sparse_step", 1), reader.get("mlp_only_layers", [])
    dense = (layer for layer in range(reader.whole("num_hidden_layers")) if layer in only or (layer + 1) % step != 0)
    return {
        "num_experts": reader.need("num_experts", "num_local_experts"),
        "top_k": reader.need("num_experts_per_tok"),
        "qk_norm": True,
        "attention_bias": reader.get("attention_bias", False),
        "router": "softmax",
        "selection_bias": False,
        "normalize_gates": reader.get("norm_topk_prob", False),
        **_dense(reader, tuple(dense)),
    }


def _ernie_from_hf(reader: _Reader) -> dict[str, Any]:
    num_layers = reader.whole("num_hidden_layers")
    start, end = reader.get("moe_layer_start_index", 1), reader.get("moe_layer_end_index", -1)
    moe = ernie_moe_layers(start, end, reader.get("moe_layer_interval", 1), num_layers)
    return {
        "num_experts": reader.need("moe_num_experts", "num_experts"),
        "top_k": reader.need("moe_k", "num_experts_per_tok"),
        "num_shared_experts": reader.get("moe_num_shared_experts", 0),
        "router": "softmax",
        "selection_bias": True,
        "normalize_gates": True,
        **_dense(reader, tuple(layer for layer in range(num_layers) if layer not in moe)),
    }


_FROM_HF: dict[Family, Callable[[_Reader], dict[str, Any]]] = {
    "glm4_moe": _glm_from_hf,
    "qwen3_moe": _qwen_from_hf,
    "ernie4_5_moe": _ernie_from_hf,
}


def differing_field(written: Mapping[str, Any], expected: Mapping[str, Any]) -> str | None:
    """The first field, of those that describe the network, in which two config.json of one family differ."""
    for name, value in expected.items():
        if name.endswith(("dtype", "token_id")) or name in ("architectures", "use_cache"):
            continue
        other = written.get(name)
        same = (
            math.isclose(other, value)
            if isinstance(value, float) and isinstance(other, int | float)
            else other == value
        )
        if not same:
            return name
    return None
