"""Token shards: documents on disk as numbers, written once (tokenise.py) and memory-mapped ever after.

A data folder holds, for each split, ``{split}-00000.tokens`` (little-endian uint16, or uint32 for a large vocabulary)
and ``{split}-00000.index`` (little-endian int64 pairs a document: end offset in the shard, domain number), and one
``data.json`` over all of them, written last: a folder without it is unfinished.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from stretto.base.config import Config, validate
from stretto.base.errors import UserError
from stretto.base.paths import read_json

MANIFEST = "data.json"
TOKENS = ".tokens"
INDEX = ".index"
INDEX_DTYPE = np.dtype("<i8")
INDEX_FIELDS = 2
"""Columns of the index: end offset of the document in tokens, domain number."""


class Shard(Config):
    """One shard, recorded by the process that wrote it."""

    name: str
    text_hash: str
    """blake2b over the documents, in order: a shard whose text is unchanged is not encoded again."""
    sha256: str
    """Over the tokens file, then the index file."""
    num_tokens: int
    num_documents: int
    num_bytes: int
    """UTF-8 bytes of text."""


class Settings(Config):
    """What all shards of a folder have in common."""

    tokenizer: str
    """`Tokenizer.fingerprint`."""
    vocab_size: int
    dtype: Literal["uint16", "uint32"]
    val_fraction: float
    shard_bytes: int


class Manifest(Config):
    """``data.json``."""

    settings: Settings
    data_hash: str
    """sha256 over the settings and every shard's own hash: names the data in a checkpoint's lineage."""
    num_tokens: int
    num_documents: int
    num_bytes: int
    domains: tuple[str, ...]
    splits: dict[str, tuple[Shard, ...]]


def token_dtype(settings: Settings) -> np.dtype[np.unsignedinteger]:
    return np.dtype("<u2" if settings.dtype == "uint16" else "<u4")


def file_sizes(shard: Shard, settings: Settings) -> dict[str, int]:
    """Bytes that each of a shard's files must have, by suffix."""
    index_row = INDEX_FIELDS * INDEX_DTYPE.itemsize
    return {TOKENS: shard.num_tokens * token_dtype(settings).itemsize, INDEX: shard.num_documents * index_row}


def read_manifest(folder: Path | str) -> Manifest:
    """``data.json`` of a data folder.

    Raises:
        UserError: the folder is missing, unfinished, or its manifest damaged.
    """
    path = Path(folder) / MANIFEST
    if not path.is_file():
        raise UserError(
            f"{path}: no such file; the folder is not token data, or its writing was interrupted: tokenise again"
        )
    return validate(Manifest, read_json(path), str(path))


class TokenSet:
    """One split of a data folder, memory-mapped: documents by number, in the order of the sources."""

    def __init__(self, folder: Path | str, split: str = "train", verify: bool = False) -> None:
        """Open a split.

        Args:
            folder: a data folder.
            split: its name.
            verify: also read every byte and compare the hashes.

        Raises:
            UserError: no such split, or a shard that is missing, truncated or changed.
        """
        self.folder = Path(folder)
        self.split = split
        self.manifest = read_manifest(folder)
        if split not in self.manifest.splits:
            known = ", ".join(self.manifest.splits)
            raise UserError(
                f"{folder}: split {split!r} is not there; it has {known}: tokenise again with val_fraction or a val file"
            )
        shards = self.manifest.splits[split]
        settings = self.manifest.settings
        for shard in shards:
            _check_files(self.folder, shard, settings, verify)
        dtype = token_dtype(settings)
        self._tokens = [np.memmap(self.folder / f"{shard.name}{TOKENS}", dtype, "r") for shard in shards]
        self._index = [
            np.memmap(self.folder / f"{shard.name}{INDEX}", INDEX_DTYPE, "r").reshape(-1, INDEX_FIELDS)
            for shard in shards
        ]
        self._first = np.cumsum([0, *(shard.num_documents for shard in shards)])
        self.num_documents = int(self._first[-1])
        self.num_tokens = sum(shard.num_tokens for shard in shards)

    def lengths(self, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens of each document, its eos included."""
        start, end = self._bounds(documents)
        return end - start

    def document(self, number: int) -> NDArray[np.unsignedinteger]:
        """All tokens of one document, as a view of the file."""
        start, end = self._bounds(np.array([number]))
        return self._tokens[self._shard(number)][int(start[0]) : int(end[0])]

    def domain(self, number: int) -> str:
        """Domain of one document, empty where it has none."""
        shard = self._shard(number)
        return self.manifest.domains[int(self._index[shard][number - self._first[shard], 1])]

    def _shard(self, number: int) -> int:
        assert 0 <= number < self.num_documents, f"document {number} of {self.num_documents}"
        return int(np.searchsorted(self._first, number, side="right")) - 1

    def _bounds(self, documents: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Start and end of each document within its shard."""
        shards = np.searchsorted(self._first, documents, side="right") - 1
        start, end = np.zeros(len(documents), np.int64), np.zeros(len(documents), np.int64)
        for shard in np.unique(shards):
            here = np.flatnonzero(shards == shard)
            rows = documents[here] - self._first[shard]
            ends = self._index[shard][:, 0]
            end[here] = ends[rows]
            start[here] = np.where(rows > 0, ends[rows - 1], 0)
        return start, end


def _check_files(folder: Path, shard: Shard, settings: Settings, verify: bool) -> None:
    digest = hashlib.sha256()
    for suffix, size in file_sizes(shard, settings).items():
        path = folder / f"{shard.name}{suffix}"
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            problem = "is missing" if found is None else f"has {found} bytes instead of {size}"
            raise UserError(f"{path}: {problem}; the shard is damaged: tokenise into this folder again to mend it")
        if verify:
            with path.open("rb") as handle:
                while block := handle.read(1 << 20):
                    digest.update(block)
    if verify and digest.hexdigest() != shard.sha256:
        raise UserError(
            f"{folder / shard.name}{TOKENS}: content does not match its hash in {MANIFEST}; delete it and tokenise again"
        )
