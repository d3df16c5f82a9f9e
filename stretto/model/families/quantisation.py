"""Supported quantisations and their settings in config.json. Does not import torch; `stretto.model.quantised` dequantises."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stretto.base.errors import UserError


@dataclass(frozen=True, slots=True)
class Quantisation:
    """Format of quantised weights. The scales of a tensor are another tensor."""

    scales: str
    """Suffix that is added to the name of a tensor (for MXFP4, without ``_blocks``) for that of its scales."""
    block: tuple[int, int] | None = None
    """Numbers of rows and columns that share a scale; None: the whole tensor or each row, depending on the shape of the scales."""
    is_mxfp4: bool = False
    is_packed: bool = False
    """Whether weights are integers, packed as `stretto.ops.int_weights` describes: int4 or int8 in groups along the input."""


def quantisation(tree: Mapping[str, Any], source: str) -> Quantisation | None:
    """The quantisation in the config.json ``tree``; None: weights are not quantised. Raises `UserError`: it is not supported."""
    settings = tree.get("quantization_config") or tree.get("compression_config")
    if not settings:
        return None
    method = settings.get("quant_method") if isinstance(settings, Mapping) else settings
    if method == "mxfp4":
        return Quantisation("_scales", is_mxfp4=True)
    if method == "fp8":
        block = settings.get("weight_block_size", (128, 128))
        return Quantisation("_scale_inv", None if block is None else _block(block, source))
    if method == "compressed-tensors" and settings.get("format") == "float-quantized":
        return _compressed(settings, source)
    if method == "compressed-tensors" and settings.get("format") == "pack-quantized":
        return _packed(settings, source)
    form = f" ({settings['format']})" if isinstance(settings, Mapping) and "format" in settings else ""
    raise UserError(
        f"{source}: quantization_config: quant_method {method!r}{form} cannot be read, only fp8, mxfp4 and compressed-tensors"
        " of FP8 or of packed integers; use the bf16 checkpoint"
    )


def _groups(settings: Mapping[str, Any], source: str) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    """Name of each group of ``config_groups``, the group, and its settings of weights."""
    where, groups = f"{source}: quantization_config.config_groups", settings.get("config_groups") or {}
    if not isinstance(groups, Mapping):
        raise UserError(f"{where}: not an object; the file is damaged, download it again")
    for name, group in groups.items():
        weights = group.get("weights") or {} if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            raise UserError(f"{where}.{name}: not an object with weights; the file is damaged, download it again")
        yield name, group, weights


def _compressed(settings: Mapping[str, Any], source: str) -> Quantisation:
    blocks = set()
    for name, _, weights in _groups(settings, source):
        if weights.get("type") != "float" or weights.get("num_bits") != 8:
            raise UserError(
                f"{source}: quantization_config.config_groups.{name}: weights of {weights.get('num_bits')} bits of"
                f" {weights.get('type')} cannot be read, only FP8; use the bf16 checkpoint"
            )
        blocks.add(_block(weights["block_structure"], source) if weights.get("strategy") == "block" else None)
    if len(blocks) != 1:
        raise UserError(
            f"{source}: quantization_config.config_groups: {len(blocks)} kinds of scales are not supported, only one; use the bf16 checkpoint"
        )
    return Quantisation("_scale", blocks.pop())


def _packed(settings: Mapping[str, Any], source: str) -> Quantisation:
    for name, group, weights in _groups(settings, source):
        for field, known in (
            ("type", ("int",)),
            ("num_bits", (4, 8)),
            ("strategy", ("group", "channel")),
            ("actorder", (None, "weight", "static")),
        ):
            if weights.get(field) not in known:
                raise UserError(
                    f"{source}: quantization_config.config_groups.{name}: {field} {weights.get(field)!r} of packed weights cannot be"
                    f" read, only {' and '.join(map(str, known))}; use the bf16 checkpoint"
                )
        if group.get("input_activations"):
            raise UserError(
                f"{source}: quantization_config.config_groups.{name}: quantised activations cannot be computed; use the bf16 checkpoint"
            )
    return Quantisation("_scale", is_packed=True)


def packed_config(schemes: Mapping[str, tuple[int, int, bool]], ignored: Sequence[str]) -> dict[str, Any]:
    """The ``quantization_config`` of packed integer weights.

    Args:
        schemes: bits, inputs per group, and whether groups have zeros, by a regular expression for the names of modules.
        ignored: names of modules, or regular expressions after ``re:``, whose weights are not quantised.
    """
    groups = {}
    for number, (pattern, (bits, group, zeros)) in enumerate(schemes.items()):
        weights = {"num_bits": bits, "type": "int", "symmetric": not zeros, "strategy": "group", "group_size": group}
        weights |= {"dynamic": False, "actorder": None, "observer": "minmax"}
        groups[f"group_{number}"] = {"targets": [f"re:{pattern}"], "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(ignored),
    }


def _block(value: Any, source: str) -> tuple[int, int]:
    if not isinstance(value, list | tuple) or [type(size) for size in value] != [int, int] or min(value) < 1:
        raise UserError(f"{source}: quantization_config: a block of {value!r} is not two whole numbers above 0")
    return value[0], value[1]
