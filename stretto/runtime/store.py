"""The local runtime's store: one file a value, mapped by whoever reads it, so that arrays are shared and never copied."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

from stretto.base.paths import remove, replacing
from stretto.runtime.runtime import Ref, RefLost
from stretto.runtime.wire import Packed, pack, unpack

_HEAD = struct.Struct("<QQ")
"""Bytes of the body, number of buffers; the buffers' lengths follow, 8 bytes each."""
_ALIGN = 64
"""Bytes; of each buffer in the file, a cache line: numpy and torch want no less."""
_PREFIX, _LOCK = "stretto-", "lock"
_YOUNG_S = 60.0
"""A folder younger than this may not have taken its lock yet."""


class Folder:
    """A fresh folder in memory, if the machine has such a place, that goes with its process.

    A process that is killed leaves its folder behind; the next to come removes it. It is known by its lock, which no
    living process holds.
    """

    def __init__(self, parent: Path | None = None):
        shared = Path("/dev/shm")
        self._parent = parent or (shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir()))
        self._sweep()
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self._parent))
        self._lock = (self.path / _LOCK).open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        remove(self.path)
        self._lock.close()

    def _sweep(self) -> None:
        for path in self._parent.glob(f"{_PREFIX}*/{_LOCK}"):
            try:
                with path.open() as lock:
                    if time.time() - os.fstat(lock.fileno()).st_mtime < _YOUNG_S:
                        continue
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove(path.parent)
            except (BlockingIOError, PermissionError, FileNotFoundError):
                continue  # alive, another user's, or swept by somebody else


class Store:
    """Values in a folder that every process of the runtime sees. All methods block, and may be called from any thread."""

    def __init__(self, folder: Path):
        self._folder = folder

    def put(self, value: Any) -> Ref:
        """Raises UserError where the folder is full."""
        packed = pack(value)
        ref = Ref(uuid.uuid4().hex, packed.num_bytes, str(self._folder))
        with replacing(self._path(ref)) as temporary:
            _write(temporary, packed)
        return ref

    def get(self, ref: Ref) -> Any:
        """Raises RefLost."""
        try:
            with self._path(ref).open("rb") as file:
                view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except FileNotFoundError:
            raise RefLost(f"the value {ref.id} is not in {ref.address} any more") from None
        return unpack(_read(view))

    def free(self, ref: Ref) -> None:
        self._path(ref).unlink(missing_ok=True)

    def _path(self, ref: Ref) -> Path:
        return Path(ref.address) / ref.id


def _write(path: Path, packed: Packed) -> None:
    lengths = [len(buffer) for buffer in packed.buffers]
    with path.open("wb") as file:
        file.write(_HEAD.pack(len(packed.body), len(lengths)) + struct.pack(f"<{len(lengths)}Q", *lengths))
        file.write(packed.body)
        for buffer in packed.buffers:
            file.write(bytes(-file.tell() % _ALIGN))
            file.write(buffer)


def _read(view: memoryview) -> Packed:
    body_bytes, num_buffers = _HEAD.unpack_from(view)
    lengths = struct.unpack_from(f"<{num_buffers}Q", view, _HEAD.size)
    position = _HEAD.size + 8 * num_buffers
    body = view[position : (position := position + body_bytes)]
    buffers = []
    for length in lengths:
        position += -position % _ALIGN
        buffers.append(view[position : (position := position + length)])
    return Packed(body, buffers)
