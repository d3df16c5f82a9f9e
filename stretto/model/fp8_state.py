"""A network's weights as FP8 bytes and scales, for the way from trainer to engine: a quarter of what fp32 takes.

Only what an FP8 engine multiplies in FP8 is quantised, by the quantiser it uses itself; values that were quantised once
quantise to the same bytes again, so nothing is lost on the way that such an engine would have kept.

Shape letters: E experts, F outputs, D inner dim, I and J blocks of them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from stretto.base.errors import UserError
from stretto.ops.fp8 import FP8, Fp8Weight, quantise_weight

_BYTES, _SCALE = ":fp8", ":scale"


def is_quantised(name: str) -> bool:
    """Whether products with the tensor of that name, of a `Transformer`'s state dict, are in FP8."""
    return name.startswith("blocks.") and name.endswith(
        ("qkv.weight", "out.weight", "gate_up", "gate_up.weight", "down", "down.weight")
    )


def pack_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``state`` with each weight that `is_quantised` as two tensors: its bytes (uint8, its shape) and its scales (fp32)."""
    packed: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if not is_quantised(name):
            packed[name] = tensor
            continue
        stack = [quantise_weight(one) for one in (tensor if tensor.ndim == 3 else tensor[None])]
        bytes_EFD = torch.stack([weight.bytes_FD.view(torch.uint8) for weight in stack])
        scale_EIJ = torch.stack([weight.scale_IJ for weight in stack])
        packed[name + _BYTES], packed[name + _SCALE] = (
            (bytes_EFD, scale_EIJ) if tensor.ndim == 3 else (bytes_EFD[0], scale_EIJ[0])
        )
    return packed


def unpack_state(packed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict of the values that `pack_state` kept, fp32 where they were quantised.

    Raises:
        UserError: bytes without their scales.
    """
    state: dict[str, Tensor] = {}
    for name, tensor in packed.items():
        if name.endswith(_SCALE):
            continue
        if not name.endswith(_BYTES):
            state[name] = tensor
            continue
        own = name.removesuffix(_BYTES)
        if own + _SCALE not in packed:
            raise UserError(f"weights: {own}: FP8 bytes without scales; send {own + _SCALE} too")
        scale = packed[own + _SCALE]
        stack = zip(*((tensor, scale) if tensor.ndim == 3 else (tensor[None], scale[None])), strict=True)
        values = torch.stack([Fp8Weight(one.view(FP8), scale_IJ).dequantise() for one, scale_IJ in stack])
        state[own] = values if tensor.ndim == 3 else values[0]
    return state
