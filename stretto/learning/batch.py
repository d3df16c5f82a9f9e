"""Groups packed into training batches, with shared prefixes computed once.

The samples of a group share a prefix: a prompt on which none of them is trained. A shared prefix is stored in a row once, and
each sample continues it. No key or value depends on later tokens, so every loss and every gradient is the same as with one copy
of the prefix per sample. (Prefix sharing, as in the tree training of agentic trajectories.)

Shape letters: B rows, T positions, S inputs of one sample (its tokens but one), L MoE layers of the maximum network,
K route slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from stretto.base.errors import UserError
from stretto.data.pack import IGNORED, PADDING, Piece, plan_rows
from stretto.learning.algorithms import Streams
from stretto.learning.samples import signed_routes

_ROUND = 8
"""Row lengths are rounded up to a multiple of this, which keeps the number of distinct shapes small."""
_LENGTHS = 8
"""Number of row lengths that are tried."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Rows of one forward and backward pass, written by `pack`. All arrays but tokens and routes describe the targets."""

    tokens_BT: NDArray[np.int64]
    targets_BT: NDArray[np.int64]
    """The next token where the model sampled it, `IGNORED` elsewhere."""
    positions_BT: NDArray[np.int64]
    """Position in the sample."""
    documents_BT: NDArray[np.int64]
    """Number of the sample or shared prefix within its row; `PADDING` at padding. Attention stays within equal numbers and the
    shared prefix."""
    shared_BT2: NDArray[np.int64]
    """First column of the sample's shared prefix, and the column after its last; 0 and 0 without one."""
    samples_BT: NDArray[np.int64]
    """Number of the sample within the update, over all its batches; −1 at padding and shared prefixes."""
    behaviour_BT: NDArray[np.float32]
    """Processed log-probability recorded at sampling; 0 without a target."""
    versions_BT: NDArray[np.int32]
    """Version of the weights with which the target was sampled; −1 without a target."""
    routes_BTLK: NDArray[np.int16] | None
    """Experts that the engine used for the *input*; −1 for no expert and at padding."""

    @property
    def num_targets(self) -> int:
        return int((self.targets_BT != IGNORED).sum())

    @property
    def num_inputs(self) -> int:
        """Number of positions with a token."""
        return int((self.documents_BT != PADDING).sum())

    def rows(self, part: slice) -> Batch:
        """The rows ``part``, such as a rank's share."""
        arrays = {each.name: getattr(self, each.name) for each in fields(self)}
        return replace(self, **{name: value[part] for name, value in arrays.items() if value is not None})


def at_targets(batch: Batch, values: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    """``values``, one array [S] per sample by number, at the targets of ``batch`` [B, T], 0 elsewhere. Inverse of `by_sample`."""
    kept_BT = batch.targets_BT != IGNORED
    value_BT = np.zeros(kept_BT.shape, np.float32)
    value_BT[kept_BT] = np.concatenate(values)[_flat_places(batch, kept_BT, [*map(len, values)])]
    return value_BT


def by_sample(
    batches: Sequence[Batch], values: Sequence[NDArray[np.float32]], lengths: Sequence[int]
) -> list[NDArray[np.float32]]:
    """``values`` [B, T] of each batch, as one array [S] per sample, 0 without a target. ``lengths``: S by the samples' numbers."""
    flat = np.zeros(sum(lengths), np.float32)
    for batch, value_BT in zip(batches, values, strict=True):
        kept_BT = batch.targets_BT != IGNORED
        flat[_flat_places(batch, kept_BT, lengths)] = value_BT[kept_BT]
    return np.split(flat, np.cumsum(lengths)[:-1])


def target_places(batch: Batch, samples: Sequence[Streams]) -> NDArray[np.int64]:
    """Index [B, T] of each position's target in the concatenated targets of ``samples``; −1 without a target. ``samples`` are
    all arguments of `pack`, by number."""
    kept_BT = batch.targets_BT != IGNORED
    numbers = np.cumsum(np.concatenate([sample.mask_S for sample in samples])) - 1
    places_BT = np.full(kept_BT.shape, -1, np.int64)
    places_BT[kept_BT] = numbers[_flat_places(batch, kept_BT, [sample.num_inputs for sample in samples])]
    return places_BT


def _flat_places(batch: Batch, kept_BT: NDArray[np.bool_], lengths: Sequence[int]) -> NDArray[np.int64]:
    """Index of the input of each target in the concatenated inputs of all samples."""
    starts = np.cumsum([0, *lengths])
    return starts[batch.samples_BT[kept_BT]] + batch.positions_BT[kept_BT]


@dataclass(slots=True)
class _Bundle:
    """Samples in one row that share a prefix with the first sample; made by `_bundles`."""

    samples: list[Streams]
    shared: list[int]
    """By sample: number of its inputs in the shared prefix. The first sample's is the maximum of the others'."""

    @property
    def length(self) -> int:
        """Number of positions in the row."""
        return sum(sample.num_inputs for sample in self.samples) - sum(self.shared[1:])


def pack(
    groups: Sequence[Sequence[Streams]], seq_len: int, rows: int, *, share: int = 1, with_routes: bool = True
) -> list[Batch]:
    """Batches with rows of at most ``seq_len`` inputs, packed best-fit decreasing. Samples are never cut. Deterministic.

    Args:
        groups: the samples of one update.
        rows: rows per batch; the last batch may have fewer.
        share: number of ranks. The number of rows of each batch is a multiple of it; empty rows are added.
        with_routes: include the recorded routes.

    Raises:
        UserError: a sample is longer than ``seq_len``, or has no routes although ``with_routes`` is set.
    """
    assert rows % share == 0, f"{rows} rows among {share} ranks"
    for each in (sample for group in groups for sample in group):
        if each.num_inputs > seq_len:
            raise UserError(
                f"train.seq_len: {seq_len} is less than the {len(each.tokens)} tokens of {each.where}; raise it"
            )
        if with_routes and each.routes_SLK is None:
            raise UserError(f'{each.where}: routes: it has none; let the engine record them, or set replay = "off"')
    if not with_routes:
        groups = [[replace(sample, routes_SLK=None) for sample in group] for group in groups]
    bundles = [bundle for group in groups for bundle in _bundles(group, seq_len)]
    shortest = min(_rounded(max(bundle.length for bundle in bundles)), seq_len)
    # long rows may be half empty, so the length with the fewest positions is chosen
    lengths = sorted({_rounded(int(each)) for each in np.linspace(shortest, seq_len, _LENGTHS)})
    plans = [_plan(bundles, min(length, seq_len), rows, share) for length in lengths]
    shortest_plan = min(plans, key=lambda plan: sum(len(part) * length for part, length in plan))
    return [_fill(part, length) for part, length in shortest_plan]


def _agreement(one: Streams, other: Streams) -> int:
    """Number of leading inputs without targets that are equal in both samples, routes included."""
    most = int(min(one.mask_S.argmax(), other.mask_S.argmax()))
    same = one.tokens[:most] == other.tokens[:most]
    if one.routes_SLK is not None and other.routes_SLK is not None:
        same &= (one.routes_SLK[:most] == other.routes_SLK[:most]).all((1, 2))
    return most if same.all() else int(same.argmin())


def _bundles(samples: Sequence[Streams], seq_len: int) -> list[_Bundle]:
    """Bundles of ``samples``. Each sample joins the bundle with which it shares the longest prefix, if the row has room."""
    bundles: list[_Bundle] = []
    for sample in samples:
        pairs = [(each, _agreement(sample, each.samples[0])) for each in bundles]
        fitting = [pair for pair in pairs if pair[1] and pair[0].length + sample.num_inputs - pair[1] <= seq_len]
        if fitting:
            bundle, shared = max(fitting, key=lambda pair: pair[1])
            bundle.samples.append(sample)
            bundle.shared = [max(bundle.shared[0], shared), *bundle.shared[1:], shared]
        else:
            bundles.append(_Bundle([sample], [0]))
    return bundles


def _plan(bundles: Sequence[_Bundle], seq_len: int, rows: int, share: int) -> list[tuple[list[list[_Bundle]], int]]:
    """Best-fit rows of at most ``seq_len``, by batch, and the row length of each batch."""
    pieces = [Piece(index, 0, bundle.length, False) for index, bundle in enumerate(bundles)]
    planned = [[bundles[piece.document] for piece in row] for row in plan_rows(pieces, seq_len)]
    # longest rows first, so that batches of short rows have short padding
    planned.sort(key=lambda row: -sum(bundle.length for bundle in row))
    plan = []
    for start in range(0, len(planned), rows):
        batch = planned[start : start + rows]
        batch += [[]] * (-len(batch) % share)
        plan.append((batch, min(seq_len, _rounded(sum(bundle.length for bundle in batch[0])))))
    return plan


def _rounded(length: int) -> int:
    return -(-length // _ROUND) * _ROUND


def _fill(rows: Sequence[Sequence[_Bundle]], length: int) -> Batch:
    shape = (len(rows), length)
    routes_SLK = next(row for row in rows if row)[0].samples[0].routes_SLK
    batch = Batch(
        tokens_BT=np.zeros(shape, np.int64),
        targets_BT=np.full(shape, IGNORED, np.int64),
        positions_BT=np.zeros(shape, np.int64),
        documents_BT=np.full(shape, PADDING, np.int64),
        shared_BT2=np.zeros((*shape, 2), np.int64),
        samples_BT=np.full(shape, -1, np.int64),
        behaviour_BT=np.zeros(shape, np.float32),
        versions_BT=np.full(shape, -1, np.int32),
        routes_BTLK=None if routes_SLK is None else np.full((*shape, *routes_SLK.shape[1:]), -1, np.int16),
    )
    for row, bundles in enumerate(rows):
        at = number = 0
        for bundle in bundles:
            begin, first, shared = at, bundle.samples[0], bundle.shared[0]
            if shared:
                _lay(batch, first, 0, shared, (row, slice(at, at + shared)), number)
                at, number = at + shared, number + 1
            for sample, own in zip(bundle.samples, bundle.shared, strict=True):
                end = at + sample.num_inputs - own
                here = (row, slice(at, end))
                _lay(batch, sample, own, sample.num_inputs, here, number)
                batch.samples_BT[here], batch.shared_BT2[here] = sample.number, (begin, begin + own)
                at, number = end, number + 1
    return batch


def _lay(batch: Batch, sample: Streams, start: int, stop: int, here: tuple[int, slice], number: int) -> None:
    """Write inputs ``start`` to ``stop`` of a sample, and the data of their targets, to ``here``."""
    part = slice(start, stop)
    mask = sample.mask_S[part]
    batch.tokens_BT[here] = sample.tokens[:-1][part]
    batch.targets_BT[here] = np.where(mask, sample.tokens[1:][part], IGNORED)
    batch.positions_BT[here], batch.documents_BT[here] = np.arange(start, stop), number
    batch.behaviour_BT[here] = np.where(mask, sample.logprobs_S[part], 0.0)
    batch.versions_BT[here] = np.where(mask, sample.versions_S[part], -1)
    if batch.routes_BTLK is not None:
        assert sample.routes_SLK is not None, "checked by the caller"
        batch.routes_BTLK[here] = signed_routes(sample.routes_SLK[part])
