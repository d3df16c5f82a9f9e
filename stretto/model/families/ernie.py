"""ERNIE 4.5, dense and MoE: RoPE pairs neighbouring channels, and one field switches on the biases of all projections."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from stretto.model.families.table import MoeNames, Reader, Table, all_dense, no_windows, num_experts, plain, some_dense
from stretto.model.spec import ModelConfig


def moe_interval(config: ModelConfig) -> tuple[int, int, int] | None:
    """First MoE layer, last MoE layer and interval for which ERNIE's rule gives ``config.moe_layers``; None: there are none."""
    if not config.moe_layers:
        return None
    start, end = config.moe_layers[0], config.moe_layers[-1]
    for interval in range(1, config.num_layers + 1):
        if _moe_layers(start, end, interval, config.num_layers) == config.moe_layers:
            return start, end, interval
    return None


def _moe_layers(start: int, end: int, interval: int, num_layers: int) -> tuple[int, ...]:
    """The MoE layers by ERNIE's rule; an ``end`` of −1 is the last layer."""
    last = num_layers - 1 if end == -1 else end
    return tuple(layer for layer in range(num_layers) if start <= layer <= last and (layer + 1) % interval == 0)


def _dense_layers(reader: Reader) -> Iterable[int]:
    num_layers = reader.num_layers
    start = reader.whole("moe_layer_start_index", 1, least=0)
    end = reader.whole("moe_layer_end_index", -1, least=-1)
    moe = _moe_layers(start, end, reader.whole("moe_layer_interval", 1), num_layers)
    return (layer for layer in range(num_layers) if layer not in moe)


def _dense_fields(config: ModelConfig) -> dict[str, Any]:
    spacing = moe_interval(config)
    assert spacing is not None, f"ernie4_5_moe cannot place MoE layers {config.moe_layers}"
    return dict(zip(("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"), spacing, strict=True))


def _why_not(config: ModelConfig) -> str | None:
    if moe_interval(config) is not None:
        return None
    return f"its MoE layers {config.moe_layers} do not have a fixed interval, as {{family}}'s must"


ERNIE = Table(
    family="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    parts=(all_dense(), no_windows()),
    switches={"use_bias": (("attention_bias", "attention_out_bias", "mlp_bias"), False)},
    fixed={"compression_ratio": 1.0},
    num_kv_heads=2,
    head_dim=128,
    rope_theta=500_000.0,
    is_tied=True,
    pairs_neighbours=True,
)
ERNIE_MOE = replace(
    ERNIE,
    family="ernie4_5_moe",
    architecture="Ernie4_5_MoeForCausalLM",
    parts=(
        some_dense(_dense_layers, _dense_fields, _why_not),
        no_windows(),
        num_experts("moe_num_experts|num_experts"),
        plain("moe_k|num_experts_per_tok", "top_k"),
        plain("moe_num_shared_experts", "num_shared_experts", 2),
    ),
    always={"router": "softmax", "selection_bias": True, "normalize_gates": True},
    fixed={"moe_norm_min": 1e-12, "compression_ratio": 1.0},
    num_kv_heads=4,
    head_dim=None,
    moe=MoeNames(
        bias="mlp.moe_statics.e_score_correction_bias",
        bias_shape=(1,),
        bias_aliases=("mlp.gate.moe_statics.e_score_correction_bias",),
    ),
    head_bias="use_bias",
)
