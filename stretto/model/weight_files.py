"""Files of weights: tensors by name, whatever the format of the files, and writers that report a full disk in one line."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from stretto.base.errors import UserError
from stretto.base.paths import read_json
from stretto.model.families.quantisation import quantisation
from stretto.model.gguf.read import GgufFile, gguf_file
from stretto.model.headers import WeightFiles, damaged
from stretto.model.quantised import Dequantised, TensorSource, require_shape

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Supported dtypes of weights, by safetensors' name."""
_STORED_DTYPES = {
    **DTYPES,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
    "I32": torch.int32,
}
"""Supported dtypes, with those of quantised weights and their scales."""
_COPY_BYTES = 1 << 24
"""Chunk size for copying a file."""


@contextmanager
def open_tensors(folder: Path) -> Iterator[TensorSource]:
    """The tensors of a checkpoint, dequantised. Raises `UserError`: as `TensorFiles` does, or an unsupported quantisation."""
    packed = gguf_file(folder)
    if packed is not None:
        with GgufFile(packed) as file:
            yield file
        return
    path = folder / "config.json"
    how = quantisation(read_json(path), str(path))
    with TensorFiles(folder) as files:
        yield files if how is None else Dequantised(files, how)


class TensorFiles(WeightFiles):
    """Reader of tensors by name, from ``file`` of ``folder`` or the shards of an index. A context manager that closes the files."""

    framework = "pt"

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of ``name`` on disk. Raises `UserError`: it is missing, or its dtype is not fp32, bf16 or fp16."""
        if name not in self._path_of:
            raise damaged(self._folder, name, "missing from the weights")
        stored = self._slice(name).get_dtype()
        if stored not in DTYPES:
            remedy = f"convert the checkpoint to one of {', '.join(DTYPES)}"
            raise UserError(f"{self.path(name)}: {name}: dtype {stored} is not supported; {remedy}")
        return DTYPES[stored]

    def stored_as(self, name: str) -> tuple[torch.dtype | None, tuple[int, ...]]:
        """Dtype and shape of ``name`` in its file; the dtype is None if it is not supported."""
        return _STORED_DTYPES.get(self._slice(name).get_dtype()), tuple(self._slice(name).get_shape())

    def is_empty(self, name: str) -> bool:
        """Whether ``name`` has no elements."""
        return 0 in self.stored_as(name)[1]

    def raw(self, name: str, part: tuple[int | slice, ...] = ()) -> Tensor:
        """``part`` of the tensor ``name`` on the CPU, of any dtype and shape."""
        tensor: Tensor = self._slice(name)[part] if part else self._files[self._path_of[name]].get_tensor(name)
        return tensor

    def read(self, name: str, shape: tuple[int, ...], part: tuple[int | slice, ...] = ()) -> Tensor:
        """``part`` of the tensor ``name`` of shape ``shape``, on the CPU. Raises `UserError` as `check` does."""
        self.check(name, shape)
        return self.raw(name, part)

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Check a tensor's header. Raises `UserError`: it is missing, of another shape, or its dtype is not fp32, bf16 or fp16."""
        self.dtype(name)
        require_shape(self.path(name), name, self.stored_as(name)[1], shape)


def tensor_names(path: Path) -> frozenset[str]:
    """Names of the tensors in one safetensors file. Raises `UserError`: it is missing or damaged."""
    with TensorFiles(path.parent, path.name) as files:
        return files.names


def copy_file(source: Path, target: Path, advance: Callable[[int], None] | None = None) -> str:
    """Copy a large file; ``advance`` is called with the number of bytes of each chunk. (``shutil.copyfile`` reports no progress.)

    Returns: the file's SHA-256, which is computed in a thread meanwhile, because to read the copy would take as long again.
    """
    digest = hashlib.sha256()
    chunks = [memoryview(bytearray(_COPY_BYTES)) for _ in range(2)]  # one is hashed while the other is filled
    hashed: list[Future[None] | None] = [None, None]
    with ThreadPoolExecutor(1) as pool, source.open("rb", buffering=0) as reading, target.open("wb") as writing:
        for place in cycle(range(2)):
            if (earlier := hashed[place]) is not None:
                earlier.result()
            chunk = chunks[place][: reading.readinto(chunks[place])]
            if not chunk:
                break
            hashed[place] = pool.submit(digest.update, chunk)
            writing.write(chunk)
            if advance is not None:
                advance(len(chunk))
    return digest.hexdigest()


def write_file(
    path: Path, tensors: dict[str, Tensor], remedy: str = "free some space or choose another folder"
) -> None:
    """Write a safetensors file with the metadata that transformers needs. Raises `UserError`, with ``remedy``: the disk is full."""
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # the library's error for a full disk
        raise UserError(f"{path}: cannot be written: {error}; {remedy}") from error
