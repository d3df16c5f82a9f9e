"""Quantised formats that can be read, by their settings in config.json. No torch; `stretto.model.quantised` computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stretto.base.errors import UserError


@dataclass(frozen=True, slots=True)
class Quantisation:
    """How weights were quantised; each tensor of it has another one beside it that holds its scales."""

    scales: str
    """What the name of the scales adds to that of the weights; for MXFP4 to the name without ``_blocks``."""
    block: tuple[int, int] | None = None
    """Rows and columns that share a scale; None: a whole tensor, or each row, as the scales' shape says."""
    is_mxfp4: bool = False


def quantisation(tree: Mapping[str, Any], source: str) -> Quantisation | None:
    """What the config.json ``tree`` says; None for weights that are not quantised. Raises `UserError`: a method, or a form
    of it, that cannot be read.
    """
    told = tree.get("quantization_config") or tree.get("compression_config")
    if not told:
        return None
    method = told.get("quant_method") if isinstance(told, Mapping) else told
    if method == "mxfp4":
        return Quantisation("_scales", is_mxfp4=True)
    if method == "fp8":
        block = told.get("weight_block_size", (128, 128))
        return Quantisation("_scale_inv", None if block is None else _block(block, source))
    if method == "compressed-tensors" and told.get("format") == "float-quantized":
        return _compressed(told, source)
    form = f" ({told['format']})" if isinstance(told, Mapping) and "format" in told else ""
    raise UserError(
        f"{source}: quantization_config: quant_method {method!r}{form} cannot be read, only fp8, mxfp4 and compressed-tensors"
        " of FP8; use the bf16 checkpoint"
    )


def _compressed(told: Mapping[str, Any], source: str) -> Quantisation:
    blocks = set()
    for name, group in (told.get("config_groups") or {}).items():
        weights = group.get("weights") or {}
        if weights.get("type") != "float" or weights.get("num_bits") != 8:
            raise UserError(
                f"{source}: quantization_config.config_groups.{name}: weights of {weights.get('num_bits')} bits of"
                f" {weights.get('type')} cannot be read, only FP8; use the bf16 checkpoint"
            )
        blocks.add(_block(weights["block_structure"], source) if weights.get("strategy") == "block" else None)
    if len(blocks) != 1:
        raise UserError(f"{source}: quantization_config.config_groups: one kind of scales is read, these are {blocks}")
    return Quantisation("_scale", blocks.pop())


def _block(value: Any, source: str) -> tuple[int, int]:
    if not isinstance(value, list | tuple) or [type(size) for size in value] != [int, int] or min(value) < 1:
        raise UserError(f"{source}: quantization_config: a block of {value!r} is not two whole numbers above 0")
    return value[0], value[1]
