"""Snapshots: the complete state of a run. A resumed run gives bit-identical results, with any number of ranks.

`Snapshots` writes and reads them. `SnapshotWriter` writes them while training goes on. Functions import torch's distributed checkpoints
where they use them: that takes half a second, which commands that do not train need not spend.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from stretto.base.config import Config, differences
from stretto.base.errors import UserError
from stretto.base.paths import read_json, remove
from stretto.base.records import Receipt
from stretto.model.parallel import Ranks
from stretto.model.transformer import Transformer
from stretto.ops.master import low_parts
from stretto.train.pace import Pace

META = "meta.json"
LAYOUT = ("train.ep", "train.snapshot_writes", "train.hang_minutes")
"""Fields of a recipe that decide where and when things are done, not what is computed. A resumed run may change them."""
STEERING = (
    "optim.lr",
    "train.steps",
    "train.skip_steps",
    "train.eval_every",
    "train.log_every",
    "train.snapshot_every",
    "train.snapshot_minutes",
    "train.keep_snapshots",
)
"""Other fields that a resumed run may change, since they affect later steps only. `SnapshotMeta.changes` records the changes."""


class Change(Config):
    """A field of the recipe that a resumed run changed."""

    step: int
    """Steps completed before the change."""
    field: str
    before: Any
    after: Any


def changes_between(
    before: Mapping[str, Any], after: Mapping[str, Any], fields: Collection[str], step: int
) -> tuple[Change, ...]:
    """Those of ``fields`` that differ between two recipes (as plain data), as changes after ``step``."""
    return tuple(
        Change(step=step, field=field, before=old, after=new)
        for field, (old, new) in differences(before, after).items()
        if field in fields
    )


class SnapshotMeta(Config):
    """The part of a snapshot that is not tensors."""

    step: int
    """Completed steps."""
    loader: dict[str, Any]
    """Position in the data after these steps: `Loader.state()`, or the state of the batches of another stage."""
    receipt: Receipt
    run_id: str
    layer_order: tuple[int, ...]
    expert_order: tuple[tuple[int, ...], ...] | None = None
    """None: `stretto.model.spec.interleaved_order` in every layer, and in snapshots of older versions."""
    tokens_by_kind: dict[str, int]
    """Target tokens trained on, by kind of micro-batch: the mixture that was actually drawn."""
    recipe: dict[str, Any]
    data_hash: str
    pace: Pace | None = None
    """Data type and threads of the run; None in snapshots of older versions."""
    changes: tuple[Change, ...] = ()
    """Fields of the recipe that resumed runs changed, in order."""


@dataclass(frozen=True, slots=True)
class Snapshots:
    """The snapshots of one run, in ``folder``; the newest ``keep`` remain."""

    folder: Path
    keep: int

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:07d}"

    def latest(self) -> Path | None:
        """The newest complete snapshot. A folder is renamed to its name when it is complete, so every match is complete."""
        return max(self.folder.glob("step-*"), default=None)

    def save(self, model: Transformer, optimizers: Sequence[Optimizer], meta: SnapshotMeta, ranks: Ranks) -> None:
        """Write a snapshot with all ranks, then delete the oldest ones beyond ``keep``. Raises `UserError` on all ranks: the disk is full
        or the folder is not writable; older snapshots are unaffected.
        """
        self.write(_state(model, optimizers), meta, ranks)

    def write(self, state: dict[str, Any], meta: SnapshotMeta, ranks: Ranks) -> None:
        """`save` for ``state``, the tensors of network and optimisers. Uses the process group ``ranks.patient`` only, so that a thread can
        call it during training."""
        from torch.distributed.checkpoint.state_dict_saver import save

        final = self.path(meta.step)
        partial = self.folder / f".{final.name}.partial"
        with self._attempt(final, ranks):
            if ranks.is_first:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._sweep()
        with self._attempt(final, ranks), _without_single_process_warning():
            save(state, checkpoint_id=partial, process_group=ranks.patient, no_dist=ranks.world == 1)
        with self._attempt(final, ranks):
            if ranks.is_first:
                (partial / META).write_text(meta.model_dump_json(indent=2), encoding="utf-8")
                remove(final)
                partial.rename(final)
                for old in sorted(self.folder.glob("step-*"))[: -self.keep]:
                    shutil.rmtree(old)

    def load(self, path: Path, model: Transformer, optimizers: Sequence[Optimizer], ranks: Ranks) -> None:
        """Restore ``model`` and ``optimizers`` in place, and reshard if the number of ranks changed. Raises `UserError`: the snapshot is
        damaged or belongs to another network.
        """
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import load

        for optimizer in optimizers:
            _create_state(optimizer)
        try:
            stored = FileSystemReader(path).read_metadata().state_dict_metadata
            for optimizer, parameter, name in _owned(model, optimizers):
                if not any(key.startswith(f"optim.{name}.") for key in stored):
                    del optimizer.state[parameter]  # the parameter had no gradient before the snapshot
            state = _state(model, optimizers)
            with _without_single_process_warning():
                load(state, checkpoint_id=path, no_dist=ranks.world == 1)
        except (OSError, RuntimeError, ValueError, KeyError, CheckpointException) as error:
            raise UserError(
                f"{path}: cannot be restored: {_cause(error)}; delete this snapshot to use the previous one"
            ) from error

    @contextmanager
    def _attempt(self, final: Path, ranks: Ranks) -> Iterator[None]:
        """A phase of saving ``final``. If it fails on one rank, every rank raises at the end of the block."""
        from torch.distributed.checkpoint.api import CheckpointException

        error: BaseException | None = None
        try:
            yield
        except (OSError, RuntimeError, CheckpointException) as caught:
            error = caught
        if not ranks.sum(torch.tensor(int(error is not None)), ranks.patient):
            return
        if ranks.is_first:
            self._sweep()
        last = self.latest()
        have = f"the last good snapshot is {last.name}" if last else "there is no earlier snapshot"
        cause = "another rank failed" if error is None else _cause(error)
        raise UserError(f"{final}: cannot be written: {cause}; free some space ({have}), then --resume") from error

    def _sweep(self) -> None:
        """Remove partial snapshots of killed processes."""
        for partial in self.folder.glob(".step-*.partial"):
            remove(partial)


class SnapshotWriter:
    """Writes the snapshots of a run while it trains: a step waits for a copy of the state in memory, and a thread writes the copy.

    At most one snapshot is in flight: the next one waits for it. All ranks must call all methods at the same step.
    """

    def __init__(self, snapshots: Snapshots, ranks: Ranks, writes: Literal["background", "blocking"]):
        """``writes``: ``blocking`` makes no copy, and `save` returns when the snapshot is on disk."""
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self._snapshots, self._ranks = snapshots, ranks
        self._thread = ThreadPoolExecutor(1, "snapshots") if writes == "background" else None
        # keeps the memory of the copy for the next snapshot: to copy into new memory takes about twenty times as long
        on_gpu = ranks.device.type == "cuda"
        self._stager = DefaultStager(StagingOptions(on_gpu, False, False, False))
        self._writing: Future[None] | None = None
        self.is_waited_for = False
        """Whether training waits for the disk, which the watchdog must not take for a hang."""

    def reserve(self, model: Transformer, optimizers: Sequence[Optimizer]) -> None:
        """Allocate the memory of the copy, so that no later step waits for that. Called after the first step, because optimisers
        create their state in it."""
        if self._thread is not None:
            self._stager.stage(_state(model, optimizers))

    def save(self, model: Transformer, optimizers: Sequence[Optimizer], meta: SnapshotMeta) -> None:
        """Begin to write a snapshot. Raises `UserError`: this one, or the one before, cannot be written."""
        self.wait()
        state = _state(model, optimizers)
        if self._thread is None:
            with self._waited_for():
                self._snapshots.write(state, meta, self._ranks)
        else:
            copy = self._stager.stage(state)
            assert isinstance(copy, dict), "the stager was configured to copy at once"
            self._writing = self._thread.submit(self._snapshots.write, copy, meta, self._ranks)

    @property
    def has_failed(self) -> bool:
        """Whether the snapshot in flight failed on this rank. The other ranks notice that later; `wait` then raises on all of them."""
        return self._writing is not None and self._writing.done() and self._writing.exception() is not None

    def wait(self) -> None:
        """Wait until no snapshot is in flight. Raises `UserError`: it cannot be written."""
        writing, self._writing = self._writing, None
        if writing is not None:
            with self._waited_for():
                writing.result()

    @contextmanager
    def _waited_for(self) -> Iterator[None]:
        self.is_waited_for = True
        try:
            yield
        finally:
            self.is_waited_for = False

    def close(self) -> None:
        """Wait for the snapshot in flight, whose error is not raised, and end the thread."""
        if self._thread is not None:
            self._thread.shutdown()
        self._stager.close()


def read_meta(path: Path) -> SnapshotMeta:
    """Metadata of the snapshot in ``path``. Raises `UserError`: missing, or of another version."""
    try:
        return SnapshotMeta.model_validate(read_json(path / META))
    except ValueError as error:
        raise UserError(f"{path / META}: not a snapshot of this version: {str(error).splitlines()[0]}") from None


def is_whole(path: Path) -> bool:
    """Whether the snapshot in ``path`` has the files of all ranks that wrote it."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    parts = FileSystemReader(path).read_metadata().storage_data.values()
    return all((path / name).exists() for name in {part.relative_path for part in parts})


def _owned(model: Transformer, optimizers: Sequence[Optimizer]) -> list[tuple[Optimizer, Tensor, str]]:
    """Every parameter for which an optimiser has state, with optimiser and name."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return [(optimizer, parameter, names[parameter]) for optimizer in optimizers for parameter in optimizer.state]


def _state(model: Transformer, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """All tensors of a snapshot, not copied. A split weight is stored as its two parts (`stretto.ops.master`)."""
    state: dict[str, Any] = {"model": model.state_dict(), "optim": _optimizer_state(model, optimizers)}
    low = low_parts(model)
    return state | {"low": low} if low else state


def _optimizer_state(model: Transformer, optimizers: Sequence[Optimizer]) -> dict[str, dict[str, Tensor]]:
    """The optimisers' tensors by parameter name. Optimiser settings come from the recipe, kernels from the ranks."""
    return {name: optimizer.state[parameter] for optimizer, parameter, name in _owned(model, optimizers)}


def _create_state(optimizer: Optimizer) -> None:
    """Create the state of every parameter, as targets to load into: a step with learning rate 0 and zero gradients."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


@contextmanager
def _without_single_process_warning() -> Iterator[None]:
    """Suppress the warning of torch that a single process saves or loads, which is intended here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def _cause(error: BaseException) -> str:
    """The innermost message of a chain of exceptions, on one line."""
    from torch.distributed.checkpoint.api import CheckpointException

    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    chain: BaseException | None = error
    while chain is not None:  # torch reports a full disk as a wrong file position, with the reason as its context
        if isinstance(chain, OSError) and chain.strerror:
            return chain.strerror
        chain = chain.__cause__ or chain.__context__
    return (str(error).strip() or type(error).__name__).splitlines()[0]
