"""Tensors of a checkpoint folder, in one safetensors file or in many with an index."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from stretto.base.errors import UserError
from stretto.base.paths import read_json, write_json

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_AGAIN = "copy or fetch the checkpoint again"
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class TensorFiles:
    """Reads tensors by name from ``file`` of ``folder``, or from the shards that an index names; a context manager."""

    def __init__(self, folder: Path, file: str = WEIGHTS_FILE) -> None:
        """Open all files and read their headers.

        Raises:
            UserError: no weights, a shard that is missing or damaged, or an index that does not match its shards.
        """
        self._folder = folder
        self._stack = ExitStack()
        self._files: dict[Path, Any] = {}
        self._path_of: dict[str, Path] = {}
        index = folder / INDEX_FILE
        try:
            if not (folder / file).is_file() and file == WEIGHTS_FILE and index.is_file():
                self._open_shards(folder, index)
            else:
                self._path_of = dict.fromkeys(self._open(folder / file), folder / file)
        except BaseException:
            self._stack.close()
            raise

    def _open_shards(self, folder: Path, index: Path) -> None:
        tree = read_json(index)
        weight_map = tree.get("weight_map") if isinstance(tree, dict) else None
        if not isinstance(weight_map, dict):
            raise UserError(f"{index}: weight_map: missing; {_AGAIN}")
        held = {shard: self._open(folder / shard) for shard in sorted(set(weight_map.values()))}
        for name, shard in weight_map.items():
            if name not in held[shard]:
                raise UserError(
                    f"{folder / shard}: {name}: the index says that this file holds it, and it does not; {_AGAIN}"
                )
            self._path_of[name] = folder / shard

    def _open(self, path: Path) -> frozenset[str]:
        if not path.is_file():
            remedy = "only checkpoints in safetensors can be read" if path.name == WEIGHTS_FILE else _AGAIN
            raise UserError(f"{path}: no such file; {remedy}")
        try:
            file = self._stack.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{path}: not readable as safetensors: {error}; the file is truncated or damaged, {_AGAIN}"
            ) from None
        self._files[path] = file
        return frozenset(file.keys())

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._path_of)

    def path(self, name: str) -> Path:
        """The file that holds ``name``."""
        return self._path_of[name]

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of ``name`` as stored.

        Raises:
            UserError: it is missing, or of a dtype that is none of fp32, bf16 and fp16.
        """
        if name not in self._path_of:
            raise UserError(f"{self._folder}: {name}: missing from the weights; {_AGAIN}")
        path = self._path_of[name]
        stored = self._files[path].get_slice(name).get_dtype()
        if stored not in _DTYPES:
            raise UserError(
                f"{path}: {name}: dtype {stored} is not supported; convert the checkpoint to one of {', '.join(_DTYPES)}"
            )
        return _DTYPES[stored]

    def read(self, name: str, shape: tuple[int, ...], part: tuple[int | slice, ...] = ()) -> Tensor:
        """``part`` of the tensor ``name`` of ``shape``, on the CPU.

        Raises:
            UserError: it is missing, of another shape, or of a dtype that is none of fp32, bf16 and fp16.
        """
        self.dtype(name)
        path = self._path_of[name]
        view = self._files[path].get_slice(name)
        stored = tuple(view.get_shape())
        if stored != shape:
            raise UserError(
                f"{path}: {name}: shape {list(stored)} where config.json gives {list(shape)}; the files do not belong together, {_AGAIN}"
            )
        tensor: Tensor = view[part] if part else self._files[path].get_tensor(name)
        return tensor

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def write_tensors(
    folder: Path,
    num_bytes: Mapping[str, int],
    make: Callable[[str], Tensor],
    *,
    max_shard_bytes: int,
    advance: Callable[[int], None] | None,
) -> None:
    """Write the tensors that ``make`` gives for the names of ``num_bytes``, in that order; one shard exists at a time.

    ``advance`` is called with the bytes of each file written.

    Raises:
        UserError: the disk is full.
    """
    shards: list[list[str]] = [[]]
    sizes = [0]
    for name, size in num_bytes.items():
        if shards[-1] and sizes[-1] + size > max_shard_bytes:
            shards.append([])
            sizes.append(0)
        shards[-1].append(name)
        sizes[-1] += size
    weight_map: dict[str, str] = {}
    for number, (names, size) in enumerate(zip(shards, sizes, strict=True), start=1):
        file = WEIGHTS_FILE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_file(folder / file, {name: make(name) for name in names})
        weight_map |= dict.fromkeys(names, file)
        if advance is not None:
            advance(size)
    if len(shards) > 1:
        write_json(folder / INDEX_FILE, {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map})


def write_file(path: Path, tensors: dict[str, Tensor]) -> None:
    """One safetensors file, marked as PyTorch's, as transformers demands.

    Raises:
        UserError: the disk is full.
    """
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # how the library reports it
        raise UserError(f"{path}: cannot be written: {error}; free some space or choose another folder") from error
