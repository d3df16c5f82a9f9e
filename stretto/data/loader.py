"""The loader: packed batches from a mixture of data sets. The same rows for any number of ranks; resumes at the exact token.

Each data set is a stream of rows. Its documents are cut into pieces of at most a row. All pieces are shuffled anew every epoch, so that
those of a long document are spread over it, and read in windows; each window is packed into rows, and the rows are shuffled. A window
depends on (seed, epoch, first piece) only, so the state of a stream is three numbers. Every rank plans all rows, which reads document
lengths only, and then reads the tokens of its own rows.

Random numbers are functions of counters: no generator state is stored, and all machines agree. (numpy's generators may change
their streams between versions, and a stored permutation grows with the data.)

Shapes: B rows of this rank, T positions, D documents.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from stretto.base.config import Config
from stretto.base.errors import UserError
from stretto.data.pack import PackedRows, Piece, Row, cut, fill_rows, piece_ends, plan_rows
from stretto.data.shards import TokenSet, read_manifest

WINDOW_PIECES = 2**17
"""Pieces that are packed together: enough for a tight fit. They take 40 MB and about a second."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""2^64 divided by the golden ratio. Its multiples modulo 2^64 are spread as evenly as those of any number."""
_ROUNDS = 4
"""Feistel rounds. Four rounds give a pseudorandom permutation (Luby and Rackoff, 1988)."""


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash of each value: SplitMix64's finaliser (Steele, Lea and Flood, 2014), a bijection of 64-bit numbers."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def key_of(*numbers: int) -> int:
    """A 64-bit key from several counters (seed, epoch etc.). Their order matters."""
    key = np.zeros(1, np.uint64)
    for number in numbers:
        key = mix(key ^ np.array([number % 2**64], np.uint64))
    return int(key[0])


def permute(positions: NDArray[np.int64], size: int, key: int) -> NDArray[np.int64]:
    """Elements at ``positions`` of a shuffled ``range(size)``; ``key`` selects the permutation.

    A balanced Feistel network over the next even number of bits. Values outside ``size`` pass through it again until they are inside
    (cycle walking, Black and Rogaway 2002), less than four times on average.
    """
    assert positions.size == 0 or (positions.min() >= 0 and positions.max() < size), f"positions outside {size}"
    half = np.uint64(max((size - 1).bit_length() + 1, 2) // 2)
    mask = np.uint64((1 << int(half)) - 1)
    keys = mix(np.arange(_ROUNDS, dtype=np.uint64) ^ np.uint64(key))
    values = positions.astype(np.uint64)
    outside = np.arange(len(values))
    while len(outside):
        left, right = values[outside] >> half, values[outside] & mask
        for round_key in keys:
            left, right = right, left ^ (mix(right ^ round_key) & mask)
        values[outside] = (left << half) | right
        outside = outside[values[outside] >= size]
    return values.astype(np.int64)


class Part(Config):
    """One data set of a mixture."""

    name: str
    path: Path
    """A data folder (written by ``tokenise``)."""
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Share of the rows, relative to the weights of the other parts."""


class Mixture(Config):
    """Data sets and their shares."""

    parts: tuple[Part, ...] = Field(min_length=1)
    val: Path | None = None
    """Data folder whose held-out text replaces that of every part."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        name, num = Counter(part.name for part in self.parts).most_common(1)[0]
        if num > 1:
            raise ValueError(f"two parts have the name {name!r}; give each its own")
        return self

    @property
    def weights(self) -> tuple[float, ...]:
        return tuple(part.weight for part in self.parts)

    def open(self, split: str = "train") -> list[TokenSet]:
        """The data of the parts.

        Raises:
            UserError: data is missing or damaged, or parts were encoded with different tokenizers.
        """
        folders = [self.val] if split == "val" and self.val is not None else [part.path for part in self.parts]
        opened = [TokenSet(folder, split) for folder in folders]
        first = self.parts[0].path
        tokenizer = read_manifest(first).settings.tokenizer
        for folder, data in zip(folders, opened, strict=True):
            if data.manifest.settings.tokenizer != tokenizer:
                raise UserError(f"{folder}: encoded with another tokenizer than {first}; use the same for both")
        return opened


def pick_parts(positions: NDArray[np.int64], weights: Sequence[float], seed: int) -> NDArray[np.int64]:
    """Number of the part that supplies the row at each of ``positions``.

    A Weyl sequence whose start depends on ``seed``: after any number of rows the share of every part is within a few rows of its
    weight. Independent draws would deviate by the square root of the number.
    """
    assert len(weights) > 0 and min(weights) > 0, f"weights {weights}"
    points = np.uint64(key_of(seed, len(weights))) + positions.astype(np.uint64) * _GOLDEN
    borders = np.cumsum(np.asarray(weights, np.float64))
    return np.searchsorted(borders[:-1] / borders[-1], points / 2.0**64, side="right").astype(np.int64)


@dataclass(frozen=True, slots=True)
class Batch(PackedRows):
    """This rank's rows of a global batch."""

    parts_B: NDArray[np.int64]
    """Number of the data set of each row; -1 for a row of padding."""
    num_target_tokens: int
    """Targets in these rows."""
    global_target_tokens: int
    """Targets in the rows of all ranks, computed without communication: the divisor of a loss."""


class Documents(Protocol):
    """Interface of the data that rows are made of: a `TokenSet`, or a part of one."""

    @property
    def split(self) -> str: ...
    @property
    def num_documents(self) -> int: ...
    @property
    def identity(self) -> str:
        """Identifies the documents and their order, independent of their folder."""

    def lengths(self, documents: NDArray[np.int64]) -> NDArray[np.int64]: ...
    def document(self, number: int) -> NDArray[np.unsignedinteger]: ...
    def learnt(self, number: int) -> NDArray[np.bool_] | None: ...


class RowStream:
    """Planned rows of one data set, epoch after epoch."""

    def __init__(self, data: Documents, seq_len: int, key: int) -> None:
        self.data = data
        self.epoch = 0
        self._seq_len, self._key = seq_len, key
        self._ends_D = piece_ends(data.lengths, data.num_documents, seq_len)
        self._num_pieces = int(self._ends_D[-1]) if data.num_documents else 0
        self._first = 0  # position, in the epoch's order, of the window's first piece
        self._row = 0  # number of the window's rows that `next` has returned
        self._plan()

    def next(self) -> Row:
        """The next row. Epochs follow each other without end."""
        if self._row == len(self._rows):
            self._first, self._row = self._end, 0
            if self._first == self._num_pieces:
                self.epoch, self._first = self.epoch + 1, 0
            self._plan()
        self._row += 1
        return self._rows[self._row - 1]

    @property
    def at_epoch_end(self) -> bool:
        """Whether `next` has returned every row of the current epoch."""
        return self._row == len(self._rows) and self._end == self._num_pieces

    def state(self) -> list[int]:
        return [self.epoch, self._first, self._row]

    def restore(self, state: Sequence[int]) -> None:
        self.epoch, self._first, self._row = state
        self._plan()

    def _plan(self) -> None:
        """Pack the window that starts at ``_first``, and shuffle its rows (packing sorts them by length)."""
        order_key = key_of(self._key, self.epoch)
        self._end = min(self._first + WINDOW_PIECES, self._num_pieces)
        numbers = permute(np.arange(self._first, self._end), self._num_pieces, order_key)
        rows = plan_rows(cut(numbers, self._ends_D, self.data.lengths, self._seq_len), self._seq_len)
        row_keys = mix(np.arange(len(rows), dtype=np.uint64) ^ np.uint64(key_of(order_key, self._first)))
        self._rows = [rows[index] for index in np.argsort(row_keys, kind="stable")]


class Batches(Protocol):
    """Interface of the source of a run's micro-batches: a `Loader`, or another class of a stage."""

    def next(self) -> Batch: ...
    def state(self) -> dict[str, Any]:
        """All that `restore` needs, as plain JSON."""

    def restore(self, state: dict[str, Any]) -> None: ...


class Loader:
    """Batches of a mixture. `state` and `restore` resume at the exact token, on any number of ranks.

    A rank without rows, where there are more ranks than rows, gets a row of padding: all ranks must run the same passes, because each
    pass communicates.
    """

    def __init__(
        self,
        datasets: Sequence[Documents],
        weights: Sequence[float],
        rows: int,
        seq_len: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        """Start at the first row of the first epoch.

        Args:
            datasets: the parts of the mixture.
            weights: share of the rows of each part, relative to the others.
            rows: rows of the global batch, over all ranks.
            seq_len: positions of a row, T.
            seed: decides the order of parts, documents and rows.
            rank: this rank, of ``world``.
        """
        assert len(datasets) == len(weights) > 0, f"{len(datasets)} data sets, {len(weights)} weights"
        self._rows, self._own = rows, share_of(rows, rank, world)
        self._datasets, self._weights = list(datasets), [float(weight) for weight in weights]
        self._seq_len, self._seed = seq_len, seed
        self._position = 0
        self._streams = [RowStream(data, seq_len, key_of(seed, part)) for part, data in enumerate(datasets)]

    def next(self) -> Batch:
        """The next batch."""
        positions = np.arange(self._position, self._position + self._rows)
        parts_B = pick_parts(positions, self._weights, self._seed)
        rows = [self._streams[part].next() for part in parts_B]
        self._position += self._rows
        return _batch(rows, parts_B, self._datasets, self._seq_len, self._own)

    def state(self) -> dict[str, Any]:
        """All that `restore` needs, as plain JSON; the same on every rank."""
        return {**self._identity(), "position": self._position, "streams": [stream.state() for stream in self._streams]}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from ``state``: the same batches follow.

        Raises:
            UserError: data, weights, row length, seed or the size of a window differ from those of ``state``.
        """
        for name, value in self._identity().items():
            if state.get(name) != value:
                change = f"was {state.get(name)}, is now {value}"
                raise UserError(f"loader state: {name}: {change}; resume with the data, recipe and version of the run")
        self._position = state["position"]
        for stream, saved in zip(self._streams, state["streams"], strict=True):
            stream.restore(saved)

    def _identity(self) -> dict[str, Any]:
        return {
            "data": [data.identity for data in self._datasets],
            "weights": self._weights,
            "seq_len": self._seq_len,
            "seed": self._seed,
            "window": WINDOW_PIECES,
        }


def eval_batches(
    data: Documents,
    rows: int,
    seq_len: int,
    num_rows: int | None = None,
    seed: int = 0,
    rank: int = 0,
    world: int = 1,
) -> list[Batch]:
    """A fixed list of batches for evaluation: the first rows of one shuffled epoch, or all of it.

    Args:
        data: a held-out split.
        rows: rows of a global batch. The last batch is filled up with rows of padding.
        seq_len: positions of a row.
        num_rows: largest number of rows without padding, over all batches; None: the whole epoch.
        seed: selects the documents if not all are used.
        rank, world: as for `Loader`.

    Raises:
        UserError: ``rows`` is not a multiple of ``world``.
    """
    if rows % world:
        raise UserError(f"rows: {rows} rows cannot be shared evenly by {world} ranks; use a multiple of {world}")
    own = share_of(rows, rank, world)
    stream = RowStream(data, seq_len, key_of(seed))
    batches: list[Batch] = []
    left = sys.maxsize if num_rows is None else num_rows
    while not stream.at_epoch_end and left > 0:
        planned = [() if stream.at_epoch_end or place >= left else stream.next() for place in range(rows)]
        left -= rows
        parts_B = np.array([0 if row else -1 for row in planned])
        batches.append(_batch(planned, parts_B, [data], seq_len, own))
    return batches


def share_of(rows: int, rank: int, world: int) -> slice:
    """This rank's slice of the rows of a global batch; shares differ by at most one row, and rank 0 has one of the largest."""
    assert 0 <= rank < world and rows > 0, f"rank {rank} of {world}, {rows} rows"
    return slice(-(-rank * rows // world), -(-(rank + 1) * rows // world))


def _num_targets(data: Documents, piece: Piece) -> int:
    """Number of targets in a piece of a document."""
    learnt = data.learnt(piece.document)
    return piece.num_targets if learnt is None else int(learnt[piece.start + 1 :][: piece.num_targets].sum())


def _batch(
    rows: Sequence[Row], parts_B: NDArray[np.int64], datasets: Sequence[Documents], seq_len: int, own: slice
) -> Batch:
    """The batch with this rank's ``own`` rows of the global ``rows``, or with a row of padding if it has none."""
    own_rows, own_parts_B = (rows[own], parts_B[own]) if rows[own] else ([()], np.array([-1]))
    packed = fill_rows(
        own_rows,
        seq_len,
        lambda row, number: datasets[own_parts_B[row]].document(number),
        lambda row, number: datasets[own_parts_B[row]].learnt(number),
    )
    num_targets = [
        sum(_num_targets(datasets[part], piece) for piece in row) for part, row in zip(parts_B, rows, strict=True)
    ]
    arrays = packed.tokens_BT, packed.targets_BT, packed.documents_BT, packed.positions_BT
    return Batch(*arrays, own_parts_B, sum(num_targets[own]), sum(num_targets))
