"""The weight edge, both ends: the trainer publishes immutable versions, engines fetch and check them.

Publishing is slow and off everybody's path; activating is a short pause in an engine. A version's file carries its
checksum in its name, so that what is made anew after a crash never stands in the place of what an engine may hold. The
files need not survive the machine, snapshots do: they are written to the page cache and read from it, or lie in a
folder of /dev/shm. Between hosts that share no files, versions travel through the runtime's store.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from stretto.base.errors import UserError
from stretto.base.paths import replacing
from stretto.base.trajectory import WeightVersion
from stretto.engine.runner import state_checksum
from stretto.model.fp8_state import unpack_state
from stretto.model.parallel import Ranks
from stretto.model.tensorfile import write_file
from stretto.runtime.runtime import Caller, Ref

_AGAIN = "publish the version again"


def publish(
    folder: Path | str, number: int, state: Mapping[str, Tensor], extra: Mapping[str, Any] | None = None
) -> WeightVersion:
    """Write ``state`` as version ``number``; complete under its name when this returns. ``state`` may change afterwards.

    Raises:
        UserError: the disk is full.
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    checksum = state_checksum(tensors)
    path = Path(folder) / f"weights-{number:07d}-{checksum[:12]}.safetensors"
    with replacing(path) as partial:  # also where it exists: it may be damaged, which is why it is published again
        write_file(partial, tensors)
    return WeightVersion(number, str(path), checksum, _num_bytes(tensors), extra or {})


def fetch(version: WeightVersion) -> dict[str, Tensor]:
    """The tensors of ``version``, checked, FP8 bytes and scales put together again. They are mapped from the file, which may be retired meanwhile.

    Raises:
        UserError: the file is gone or damaged, or its checksum is another.
    """
    path = Path(version.location)
    try:
        state = load_file(path)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; {_AGAIN}, or keep more of them") from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: not readable as safetensors: {error}; {_AGAIN}") from None
    _check(state, version)
    return unpack_state(state)


def retire(folder: Path | str, keep: int) -> None:
    """Delete all but the ``keep`` newest versions of ``folder``. Engines that have mapped an older one keep it."""
    assert keep > 0, f"keep {keep}: the newest version is in use"
    for path in sorted(Path(folder).glob("weights-*.safetensors"), key=lambda path: path.stat().st_mtime_ns)[:-keep]:
        path.unlink(missing_ok=True)


async def publish_to_store(
    caller: Caller, number: int, state: Mapping[str, Tensor], extra: Mapping[str, Any] | None = None
) -> WeightVersion:
    """`publish` through the runtime's object store: for hosts that share no files. The caller frees `stored_ref`."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    # numpy has no bf16, so bytes travel
    arrays = {
        name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), _bytes(tensor).copy())
        for name, tensor in tensors.items()
    }
    ref = await caller.put(arrays)
    return WeightVersion(
        number, f"store:{ref.id}", state_checksum(tensors), _num_bytes(tensors), {**(extra or {}), "ref": ref}
    )


def stored_ref(version: WeightVersion) -> Ref:
    """Where the store keeps a version that `publish_to_store` made."""
    ref = version.extra["ref"]
    assert isinstance(ref, Ref), f"version {version.number} lies in {version.location}"
    return ref


async def fetch_from_store(caller: Caller, version: WeightVersion, deadline_s: float) -> dict[str, Tensor]:
    """`fetch` from the runtime's object store.

    Raises:
        RefLost, DeadlinePassed: of `Caller.get`.
        UserError: another checksum.
    """
    arrays = await caller.get(stored_ref(version), deadline_s)
    state = {
        name: torch.from_numpy(np.array(array)).view(getattr(torch, dtype)).view(shape)
        for name, (dtype, shape, array) in arrays.items()
    }
    _check(state, version)
    return unpack_state(state)


def broadcast(state: Mapping[str, Tensor], ranks: Ranks) -> Mapping[str, Tensor]:
    """Rank 0's ``state`` on every rank, over NCCL or gloo; what the others pass is not looked at. All must call it."""
    if ranks.world == 1:
        return state
    listed = [[(name, tensor.dtype, tensor.shape) for name, tensor in state.items()] if ranks.is_first else None]
    dist.broadcast_object_list(listed, 0, device=ranks.device)
    received: dict[str, Tensor] = {}
    for name, dtype, shape in listed[0] or ():
        tensor = state[name].to(ranks.device).contiguous() if ranks.is_first else None
        received[name] = torch.empty(shape, dtype=dtype, device=ranks.device) if tensor is None else tensor
        dist.broadcast(received[name], 0)
    return received


def _check(state: Mapping[str, Tensor], version: WeightVersion) -> None:
    found = state_checksum(state)
    if found != version.checksum:
        raise UserError(
            f"{version.location}: checksum: is {found}, version {version.number} was announced with "
            f"{version.checksum}; {_AGAIN}"
        )


def _num_bytes(state: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


def _bytes(tensor: Tensor) -> np.ndarray:
    return tensor.reshape(-1).view(torch.uint8).numpy()
