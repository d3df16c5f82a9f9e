"""Quantisation of a saved checkpoint to FP8 or MXFP4, with a dequantised copy as control: independent of the code that reads them.

Shape letters: R rows, C columns, r and c blocks of them, G groups of 32 values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_PROJECTION = re.compile(r"layers\.\d+\..*(_proj|_proj_with_mqa|\.w[123])(\.weight)?$")
"""Tensors that published checkpoints quantise: no embedding, head, norm, router or bias."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A format of quantised weights."""

    config: dict[str, Any]
    """quantization_config of config.json."""
    quantise: Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]]
    """From name and values of a tensor: the stored tensors by name, and the dequantised values."""
    names: re.Pattern[str] = _PROJECTION


def fp8(block: tuple[int, int] | None) -> Kind:
    """DeepSeek's FP8: one scale per block of a matrix, the last blocks smaller; None: one scale per tensor."""
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block and list(block)}
    return Kind(config, lambda name, values: _fp8(name, values, "_scale_inv", block or tuple(values.shape[-2:])))


def compressed(strategy: str) -> Kind:
    """compressed-tensors' FP8: one scale per ``tensor``, ``channel`` (row) or ``block``."""
    weights: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": strategy}
    if strategy == "block":
        weights["block_structure"] = [16, 24]
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    config = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}

    def quantise(name: str, values: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        block = {"tensor": tuple(values.shape[-2:]), "channel": (1, values.shape[-1]), "block": (16, 24)}[strategy]
        stored, meant = _fp8(name, values, "_scale", block)
        if strategy == "tensor" and values.dim() == 2:
            stored[f"{name}_scale"] = stored[f"{name}_scale"].reshape(1)
        return stored, meant

    return Kind(config, quantise)


def _fp8(name: str, values: Tensor, ending: str, block: tuple[int, ...]) -> tuple[dict[str, Tensor], Tensor]:
    *lead, num_rows, num_columns = values.shape
    scales = torch.empty(*lead, ceil(num_rows / block[0]), ceil(num_columns / block[1]))
    quantised = torch.empty(values.shape, dtype=torch.float8_e4m3fn)
    meant = torch.empty(values.shape)
    for row in range(scales.shape[-2]):
        for column in range(scales.shape[-1]):
            rows = slice(row * block[0], (row + 1) * block[0])
            columns = slice(column * block[1], (column + 1) * block[1])
            part = values[..., rows, columns]
            scale = part.abs().amax((-2, -1)) / 448
            scales[..., row, column] = scale
            quantised[..., rows, columns] = (part / scale[..., None, None]).to(torch.float8_e4m3fn)
            meant[..., rows, columns] = quantised[..., rows, columns].float() * scale[..., None, None]
    return {name: quantised, f"{name}{ending}": scales}, meant


def _mxfp4(name: str, values: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """gpt-oss's MXFP4 of a tensor whose rows are the last axis: 32 values of a row share a power of two."""
    rows = values.mT.unflatten(-1, (-1, 32))
    exponents = rows.abs().amax(-1).log2().floor() - 2
    scaled = rows / exponents.exp2()[..., None]
    codes = (scaled.abs()[..., None] - torch.tensor(FP4)).abs().argmin(-1)
    meant = torch.tensor(FP4)[codes] * scaled.sign() * exponents.exp2()[..., None]
    codes = (codes + 8 * (scaled < 0)).to(torch.uint8)
    blocks = codes[..., 0::2] + 16 * codes[..., 1::2]
    stored = {f"{name}_blocks": blocks, f"{name}_scales": (exponents + 127).to(torch.uint8)}
    return stored, meant.flatten(-2).mT.contiguous()


MXFP4 = Kind({"quant_method": "mxfp4"}, _mxfp4, re.compile(r"mlp\.experts\.\w+_proj$"))
KINDS: dict[str, Kind] = {
    "fp8": fp8((128, 128)),
    "fp8 in small blocks": fp8((16, 24)),
    "fp8 by tensor": fp8(None),
    "fp8 by tensor, as AutoFP8 names the scales": Kind(
        {"quant_method": "fp8", "activation_scheme": "static"},
        lambda name, values: _fp8(name, values, "_scale", tuple(values.shape[-2:])),
    ),
    "fp8 of compressed-tensors by tensor": compressed("tensor"),
    "fp8 of compressed-tensors by channel": compressed("channel"),
    "fp8 of compressed-tensors in blocks": compressed("block"),
    "mxfp4": MXFP4,
}


def quantise(folder: Path, kind: Kind, meant: Path) -> None:
    """Quantise the checkpoint in ``folder`` and write a dequantised copy into ``meant``."""
    meant.mkdir()
    place: dict[str, str] = {}
    for file in sorted(folder.glob("*.safetensors")):
        stored, plain = {}, {}
        for name, values in load_file(file).items():
            stored[name] = plain[name] = values
            if kind.names.search(name) and values.dim() > 1 and "bias" not in name:
                replaced, plain[name] = kind.quantise(name, values)
                del stored[name]
                stored |= replaced
        for where, tensors in ((folder, stored), (meant, plain)):
            contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
            save_file(contiguous, where / file.name, metadata={"format": "pt"})
        place |= dict.fromkeys(stored, file.name)
    for path in folder.glob("*.json"):
        (meant / path.name).write_text(path.read_text())
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        index.write_text(json.dumps({"metadata": {}, "weight_map": place}))
    tree = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(tree | {"quantization_config": kind.config}))
