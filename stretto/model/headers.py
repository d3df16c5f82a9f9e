"""The weight files of a checkpoint, opened to read their headers. Imports no torch, so a damaged file is refused at once."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from stretto.base.errors import UserError
from stretto.base.paths import checkpoint_folder, read_json

WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
STRETTO_FILE = "stretto.json"
ELASTIC_FILE = "elastic.tensors"
"""A safetensors file with another suffix, because vLLM loads every ``*.safetensors`` of a folder as weights of the model."""
AGAIN = "copy or fetch the checkpoint again"
_MAX_FILE_NAME = 255
"""Longest file name on common systems, in characters."""


def damaged(path: Path, name: str, problem: str) -> UserError:
    """The error for the tensor (or field) ``name`` of a file that is damaged or belongs to another checkpoint."""
    return UserError(f"{path}: {name}: {problem}; {AGAIN}")


def check_files(model: Path) -> None:
    """Open all weight files of the run or checkpoint ``model``. Raises `UserError`: there is no checkpoint, or a file is missing or
    damaged."""
    folder = checkpoint_folder(model)
    WeightFiles(folder).close()
    if (folder / ELASTIC_FILE).is_file():
        WeightFiles(folder, ELASTIC_FILE).close()


class WeightFiles(ExitStack):
    """The tensors in ``file`` of ``folder`` or in the shards of an index, by name. A context manager that closes the files."""

    framework = "np"
    """The library to whose arrays safetensors would convert a tensor."""

    def __init__(self, folder: Path, file: str = WEIGHTS_FILE) -> None:
        """Open all files and read their headers. Raises `UserError`: a file is missing or damaged, or the index does not match its
        shards.
        """
        super().__init__()
        self._folder = folder
        self._files: dict[Path, Any] = {}
        self._path_of: dict[str, Path] = {}
        index = folder / INDEX_FILE
        try:
            if not (folder / file).is_file() and file == WEIGHTS_FILE and index.is_file():
                self._open_shards(folder, index)
            else:
                self._path_of = dict.fromkeys(self._open(folder / file), folder / file)
        except BaseException:
            self.close()
            raise

    def _open_shards(self, folder: Path, index: Path) -> None:
        tree = read_json(index)
        weight_map = tree.get("weight_map") if isinstance(tree, dict) else None
        if not isinstance(weight_map, dict):
            raise damaged(index, "weight_map", "missing")
        for name, shard in weight_map.items():
            if not isinstance(shard, str) or Path(shard).name != shard or len(shard) > _MAX_FILE_NAME:
                raise damaged(index, f"weight_map.{name}", f"{shard!r} is not a file of this folder")
        names = {shard: self._open(folder / shard) for shard in sorted(set(weight_map.values()))}
        for name, shard in weight_map.items():
            if name not in names[shard]:
                raise damaged(folder / shard, name, "missing, and the index names this file for it")
            self._path_of[name] = folder / shard

    def _open(self, path: Path) -> frozenset[str]:
        if not path.is_file():
            remedy = "only checkpoints in safetensors can be read" if path.name == WEIGHTS_FILE else AGAIN
            raise UserError(f"{path}: no such file; {remedy}")
        try:
            # pread: pages of a memory-mapped file would stay in memory until it is closed
            file = self.enter_context(safe_open(path, framework=self.framework, backend="pread"))
        except (SafetensorError, OSError) as error:
            problem = f"not readable as safetensors: {error}; the file is truncated or damaged"
            raise UserError(f"{path}: {problem}, {AGAIN}") from None
        self._files[path] = file
        return frozenset(file.keys())

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._path_of)

    def path(self, name: str) -> Path:
        """The file that holds ``name``."""
        return self._path_of[name]

    @property
    def files(self) -> dict[Path, frozenset[str]]:
        """Names of the tensors in each file, also of those that are not in the index."""
        return {path: frozenset(file.keys()) for path, file in self._files.items()}

    def _slice(self, name: str) -> Any:
        return self._files[self._path_of[name]].get_slice(name)
