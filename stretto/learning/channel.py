"""Channels: how published weights reach the engines.

`FolderChannel` writes files into the run folder, which all engines see. `ChunkChannel` sends chunks through a store, for engines on
machines that share no folder; sender and receiver need memory for one chunk beside the weights.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from stretto.base.errors import UserError
from stretto.base.trajectory import WeightVersion
from stretto.engine.runner import state_checksum
from stretto.learning.recipe import WEIGHTS
from stretto.learning.weights import check_fetched, fetch, publish, retire, unpack_state
from stretto.runtime.store import Buffer, FolderStore, RemoteStore, Store

CHUNK_BYTES = 256 << 20
"""Size of a chunk."""


class Channel(Protocol):
    """The trainer publishes and retires versions of the weights, engines fetch them. Picklable."""

    def publish(self, number: int, state: Mapping[str, Tensor]) -> WeightVersion:
        """Send ``state`` as version ``number``. It is complete when this returns, and ``state`` may change afterwards.
        Raises UserError: the disk is full. InfraError: the store does not answer."""
        ...

    def fetch(self, version: WeightVersion) -> dict[str, Tensor]:
        """The tensors of ``version``, verified by the checksum and dequantised.
        Raises UserError: it is missing or damaged. InfraError: the store does not answer."""
        ...

    def retire(self, keep: int) -> None:
        """Delete all but the ``keep`` newest versions."""
        ...


class FolderChannel:
    """Versions are files in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def publish(self, number: int, state: Mapping[str, Tensor]) -> WeightVersion:
        return publish(self._folder, number, state)

    def fetch(self, version: WeightVersion) -> dict[str, Tensor]:
        return fetch(version)

    def retire(self, keep: int) -> None:
        retire(self._folder, keep)


class _Layout(msgspec.Struct, array_like=True):
    """A tensor of a version. The bytes of all tensors follow each other without gaps, in this order."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class ChunkChannel:
    """Versions are chunks in ``store``. The first chunk describes the tensors."""

    def __init__(self, store: RemoteStore, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._store, self._chunk_bytes = store, chunk_bytes
        self._published: deque[str] = deque()

    def publish(self, number: int, state: Mapping[str, Tensor]) -> WeightVersion:
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
        checksum = state_checksum(tensors)
        name = f"{WEIGHTS}/{number:07d}-{checksum[:12]}"
        location = self._store.write_chunks(name, _chunks(tensors, self._chunk_bytes))
        if location not in self._published:
            self._published.append(location)
        return WeightVersion(number, location, checksum, sum(tensor.nbytes for tensor in tensors.values()))

    def fetch(self, version: WeightVersion) -> dict[str, Tensor]:
        try:
            state = _joined(self._store.read_chunks(version.location))
        except FileNotFoundError as error:
            where = self._store.describe(version.location)
            raise UserError(
                f"{where}: no such weights: {error}; publish the version again, or keep more of them"
            ) from None
        check_fetched(state, version, self._store.describe(version.location))
        return unpack_state(state)

    def retire(self, keep: int) -> None:
        while len(self._published) > keep:
            self._store.remove_folder(self._published.popleft())


def open_channel(store: Store, run: Path) -> Channel:
    """The channel of a run with ``store``: files in the folder ``run``, or chunks in a store without a shared folder."""
    return FolderChannel(run / WEIGHTS) if isinstance(store, FolderStore) else ChunkChannel(store)  # type: ignore[arg-type]


def _chunks(tensors: Mapping[str, Tensor], chunk_bytes: int) -> Iterator[Buffer]:
    """A description of ``tensors``, then their bytes in chunks. All chunks use the same memory, so each must be written before the
    next is taken."""
    layouts = [
        _Layout(name, str(each.dtype).removeprefix("torch."), tuple(each.shape)) for name, each in tensors.items()
    ]
    yield msgspec.msgpack.encode(layouts)
    num_left = sum(each.nbytes for each in tensors.values())
    chunk, num = memoryview(bytearray(min(chunk_bytes, num_left))), 0
    for tensor in tensors.values():
        content = tensor.reshape(-1).view(torch.uint8).numpy().data
        while len(content):
            part = content[: len(chunk) - num]
            chunk[num : num + len(part)] = part
            num, content, num_left = num + len(part), content[len(part) :], num_left - len(part)
            if num == len(chunk) or not num_left:
                yield chunk[:num]
                num = 0


def _joined(chunks: Iterable[Buffer]) -> dict[str, Tensor]:
    """The tensors of `_chunks`, in memory of their own."""
    chunks = iter(chunks)
    layouts = msgspec.msgpack.decode(next(chunks), type=list[_Layout])
    state = {each.name: torch.empty(each.shape, dtype=getattr(torch, each.dtype)) for each in layouts}
    rest = memoryview(b"")
    for tensor in state.values():
        content = tensor.reshape(-1).view(torch.uint8).numpy().data
        while len(content):
            rest = rest if len(rest) else memoryview(next(chunks))
            num = min(len(rest), len(content))
            content[:num] = rest[:num]
            rest, content = rest[num:], content[num:]
    return state
