"""Weight transfer: the trainer publishes immutable versions; engines fetch and verify them.

Publishing is slow and runs beside the next step; activating is a short pause in an engine. A file's name contains its checksum,
so that a version that is published again after a crash does not replace a file that an engine may have mapped. The files need
not survive a power failure, unlike snapshots: they are written to the page cache and read from it, or are in /dev/shm.

For an FP8 engine, weights are stored as bytes and scales, a quarter of the size of fp32. Only the weights that the engine
multiplies in FP8 are quantised, by the engine's own quantiser. Quantising a value again gives the same bytes, so the engine
loses no further precision.

Shape letters: E experts, F outputs, D inner dim, I and J blocks of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from stretto.base.errors import UserError
from stretto.base.paths import FREE_AND_RESUME, replacing
from stretto.base.trajectory import WeightVersion
from stretto.engine.runner import state_checksum
from stretto.model.weight_files import write_file
from stretto.ops.fp8 import FP8, Fp8Weight, quantise_weight

_BYTES, _SCALE = ":fp8", ":scale"
_AGAIN = "publish the version again"


def publish(folder: Path | str, number: int, state: Mapping[str, Tensor]) -> WeightVersion:
    """Write ``state`` as version ``number``. The file is complete when this returns, and ``state`` may change afterwards.
    Raises UserError: the disk is full."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    checksum = state_checksum(tensors)
    path = Path(folder) / f"weights-{number:07d}-{checksum[:12]}.safetensors"
    with replacing(path, FREE_AND_RESUME) as partial:  # even if it exists, because it may be damaged
        write_file(partial, tensors, FREE_AND_RESUME)
    return WeightVersion(number, str(path), checksum, sum(tensor.nbytes for tensor in tensors.values()))


def fetch(version: WeightVersion) -> dict[str, Tensor]:
    """The tensors of ``version``, verified by the checksum and dequantised. They are mapped from the file, which may be deleted
    meanwhile. Raises UserError: the file is missing or damaged, or its checksum differs."""
    path = Path(version.location)
    try:
        state = load_file(path)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; {_AGAIN}, or keep more of them") from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: not readable as safetensors: {error}; {_AGAIN}") from None
    check_fetched(state, version, str(path))
    return unpack_state(state)


def check_fetched(state: Mapping[str, Tensor], version: WeightVersion, where: str) -> None:
    """Raises UserError, with ``where``: ``state`` has not the checksum of ``version``."""
    checksum = state_checksum(state)
    if checksum != version.checksum:
        raise UserError(
            f"{where}: checksum: is {checksum}, version {version.number} was announced with {version.checksum}; {_AGAIN}"
        )


def retire(folder: Path | str, keep: int) -> None:
    """Delete all but the ``keep`` newest versions in ``folder``. Engines that have mapped an older file keep it."""
    assert keep > 0, f"keep {keep}: the newest version is in use"
    for path in sorted(Path(folder).glob("weights-*.safetensors"), key=lambda path: path.stat().st_mtime_ns)[:-keep]:
        path.unlink(missing_ok=True)


def is_quantised(name: str) -> bool:
    """Whether an FP8 engine multiplies the tensor ``name`` of a `Transformer`'s state dict in FP8."""
    multiplied = ("qkv.weight", "out.weight", "gate_up", "gate_up.weight", "down", "down.weight")
    return name.startswith("blocks.") and name.endswith(multiplied)


def pack_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``state`` with each weight that `is_quantised` as two tensors: its bytes (uint8, same shape) and its scales (fp32)."""
    packed: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if not is_quantised(name):
            packed[name] = tensor
            continue
        stack = [quantise_weight(one) for one in (tensor if tensor.ndim == 3 else tensor[None])]
        bytes_EFD = torch.stack([weight.bytes_FD.view(torch.uint8) for weight in stack])
        scale_EIJ = torch.stack([weight.scale_IJ for weight in stack])
        packed[name + _BYTES] = bytes_EFD.view(tensor.shape)
        packed[name + _SCALE] = scale_EIJ if tensor.ndim == 3 else scale_EIJ[0]
    return packed


def unpack_state(packed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """State dict from the result of `pack_state`, with quantised weights in fp32.
    Raises UserError: bytes without their scales."""
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
        values = [Fp8Weight(one.view(FP8), scale_IJ).dequantise() for one, scale_IJ in stack]
        state[own] = torch.stack(values).view(tensor.shape)
    return state
