"""Cache of a frozen teacher's log-probabilities on disk. One pass writes it; training reads it, without the teacher in memory.

For every token the largest log-probabilities and the sum of the others are stored. Rows are in the order of the loader, so the
place in the file is the number of the row in the run.

Shape letters: B rows, T positions, N = B·T tokens, K stored log-probabilities, V vocabulary, D hidden.
"""

from __future__ import annotations

import hashlib
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stretto.base.config import Config, validate
from stretto.base.errors import UserError
from stretto.base.numbers import si
from stretto.base.paths import read_json, remove, write_json, writing
from stretto.base.track import progress, say
from stretto.data.loader import Batches
from stretto.evals.loss import EvalBatch
from stretto.model.parallel import Ranks
from stretto.model.spec import ModelConfig
from stretto.model.transformer import Transformer
from stretto.ops.logprob import TopLogProbs, top_log_probs
from stretto.ops.shards import whole
from stretto.train.step import Recorded

META = "teacher.json"
BATCHES_PER_RECORD = 16
"""Batches between two records of progress (ours). A killed process loses at most these."""


class CacheKey(Config):
    """Everything that the log-probabilities depend on. A cache with another key is deleted."""

    data_hash: str
    loader_seed: int
    seq_len: int
    top_k: int
    teacher: str
    """SHA-256 of its parameters and balance biases."""
    dtype: str
    """The teacher's compute data type."""


class CacheMeta(Config):
    """Content of teacher.json. Written after the rows that it counts."""

    key: CacheKey
    num_rows: int
    """Number of complete rows, from the first."""
    loader: dict[str, Any]
    """The loader's state after these rows."""


@dataclass(frozen=True, slots=True)
class LogitCache:
    """The files of one cache, in ``folder``."""

    folder: Path
    key: CacheKey
    vocab_size: int

    def _files(self) -> tuple[tuple[str, np.dtype[Any], tuple[int, ...]], ...]:
        """File name, data type, and shape of one row."""
        T, K = self.key.seq_len, self.key.top_k
        ids = np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")
        value = np.dtype("<f4")
        return ("ids.bin", ids, (T, K)), ("logprobs.bin", value, (T, K)), ("rest.bin", value, (T,))

    @property
    def row_bytes(self) -> int:
        return sum(dtype.itemsize * math.prod(shape) for _, dtype, shape in self._files())

    def read(self, rows: slice, device: torch.device) -> TopLogProbs:
        """Log-probabilities of all tokens of ``rows``, which must be complete."""
        tensors = []
        for name, dtype, shape in self._files():
            start, num = rows.start * math.prod(shape), (rows.stop - rows.start) * math.prod(shape)
            flat = np.fromfile(self.folder / name, dtype, num, offset=start * dtype.itemsize)
            assert len(flat) == num, f"{self.folder / name} lacks some of rows {rows.start} to {rows.stop}"
            wide = flat.astype(np.int64 if name == "ids.bin" else np.float32)
            tensors.append(torch.from_numpy(wide.reshape(-1, *shape[1:])).to(device))
        return TopLogProbs(*tensors)

    def _write(self, first_row: int, top: TopLogProbs) -> None:
        for (name, dtype, shape), tensor in zip(self._files(), (top.ids_NK, top.logprobs_NK, top.rest_N), strict=True):
            with (self.folder / name).open("r+b") as file:
                file.seek(first_row * math.prod(shape) * dtype.itemsize)
                file.write(tensor.cpu().numpy().astype(dtype).tobytes())

    def fill(self, teacher: Transformer, loader: Batches, num_rows: int, micro_rows: int, ranks: Ranks) -> None:
        """Write the first ``num_rows`` rows of ``loader``, whose position is restored. All ranks call this; complete rows are not computed
        again. Raises `UserError`: not enough disk space; nothing is lost.

        Args:
            teacher: frozen, placed on the ranks without expert parallelism.
            micro_rows: rows of a batch of ``loader``, over all ranks.
        """
        meta = ranks.first(lambda: self._begin(loader, num_rows))
        if meta.num_rows >= num_rows:
            return
        dtype = torch.bfloat16 if self.key.dtype == "bfloat16" else torch.float32
        before = loader.state()
        loader.restore(meta.loader)
        done = meta.num_rows
        try:
            with progress("teacher's logits", num_rows // micro_rows, is_shown=ranks.is_first) as advance:
                advance(done // micro_rows)
                while done < num_rows:
                    batch = EvalBatch.of(loader.next(), ranks.device)
                    own, top = ranks.rows(micro_rows), self._top(teacher, batch, dtype)
                    if own.stop > own.start:
                        with writing(self.folder):
                            self._write(done + own.start, top)
                    done += micro_rows
                    if done >= num_rows or done // micro_rows % BATCHES_PER_RECORD == 0:
                        ranks.barrier()
                        self._record(done, loader, ranks)
                    advance(1)
        finally:
            loader.restore(before)

    def _begin(self, loader: Batches, num_rows: int) -> CacheMeta:
        """The progress of the cache. A cache with another key is deleted first."""
        path = self.folder / META
        meta = validate(CacheMeta, read_json(path), str(path)) if path.is_file() else None
        if meta is None or meta.key != self.key:
            remove(self.folder)
            meta = CacheMeta(key=self.key, num_rows=0, loader=loader.state())
        missing = max(0, num_rows - meta.num_rows) * self.row_bytes
        if missing:
            self.folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.folder).free
            num_tokens = si(num_rows * self.key.seq_len)
            content = f"the teacher's {self.key.top_k} largest log-probabilities of {num_tokens} tokens"
            if missing > free:
                raise UserError(
                    f"{self.folder}: cached_logits: {content} take {missing / 1e9:.2f} GB, {free / 1e9:.2f} GB are free; "
                    "lower cached_logits, train fewer steps, or free some space"
                )
            say(f"{content} take {num_rows * self.row_bytes / 1e6:,.0f} MB in {self.folder}")
            for name, _, _ in self._files():
                (self.folder / name).touch()
        return meta

    def _record(self, num_rows: int, loader: Batches, ranks: Ranks) -> None:
        if ranks.is_first:
            meta = CacheMeta(key=self.key, num_rows=num_rows, loader=loader.state())
            write_json(self.folder / META, meta.model_dump(mode="json"))

    @torch.no_grad()
    def _top(self, teacher: Transformer, batch: EvalBatch, dtype: torch.dtype) -> TopLogProbs:
        kind = batch.ids_BT.device.type
        with torch.autocast(kind, dtype=dtype, enabled=dtype != torch.float32):
            hidden_BTD = teacher(batch.ids_BT, teacher.config.full(), batch.ctx).hidden_BTD
            # fp32 like the student's hidden states: the head then multiplies in autocast's dtype, or in fp32
            return top_log_probs(hidden_BTD.flatten(0, 1).float(), teacher.head_VD, self.key.top_k)


@dataclass(frozen=True, slots=True)
class Lookup:
    """A teacher whose log-probabilities are read from a cache."""

    cache: LogitCache
    config: ModelConfig
    """The teacher's."""
    ce_weight: float

    def at(self, first_row: int, rows: slice, device: torch.device) -> Recorded:
        """Log-probabilities for this rank's ``rows`` of the micro-batch that starts at row ``first_row`` of the run."""
        place = slice(first_row + rows.start, first_row + rows.stop)
        return Recorded(self.cache.read(place, device), self.config, self.ce_weight)


def hash_state(model: Transformer, dtype: torch.dtype = torch.float32) -> str:
    """SHA-256 of the names and bytes of a model's tensors: parameters in ``dtype``, balance biases in fp32. The same on any number of
    ranks, all of which call this. Gathers one tensor at a time.
    """
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        full = whole(tensor).to("cpu", torch.float32 if name.endswith(".bias_WE") else dtype)
        digest.update(name.encode())
        digest.update(full.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
