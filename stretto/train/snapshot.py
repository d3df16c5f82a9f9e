"""Snapshots: everything a run needs to go on, bit for bit, whatever the number of ranks that read it."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from stretto.base.config import Config, differences
from stretto.base.errors import UserError
from stretto.base.paths import read_json, remove
from stretto.base.records import Receipt
from stretto.model.parallel import Ranks
from stretto.model.transformer import Transformer
from stretto.train.pace import Pace

META = "meta.json"
LAYOUT = ("train.ep",)
"""Fields of a recipe that say where things are computed, not what: a resumed run may change them."""
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
"""Fields that a resumed run may change beside: they steer what is still to come, and `SnapshotMeta.changes` tells of it."""


class Change(Config):
    """A field of the recipe that a resume changed."""

    step: int
    """Steps completed by then."""
    field: str
    before: Any
    after: Any


def changes_between(
    before: Mapping[str, Any], after: Mapping[str, Any], fields: Collection[str], step: int
) -> tuple[Change, ...]:
    """What a resume after ``step`` changed of a recipe (as plain data): those of ``fields`` that differ."""
    return tuple(
        Change(step=step, field=field, before=old, after=new)
        for field, (old, new) in differences(before, after).items()
        if field in fields
    )


class SnapshotMeta(Config):
    """The part of a snapshot that is not tensors."""

    step: int
    """Steps completed."""
    loader: dict[str, Any]
    """Where the data goes on after them: `Loader.state()`, or what another stage draws its batches from."""
    receipt: Receipt
    run_id: str
    layer_order: tuple[int, ...]
    expert_order: tuple[tuple[int, ...], ...] | None = None
    """None: `stretto.model.spec.interleaved_order` everywhere, and in snapshots of a version that did not say."""
    tokens_by_kind: dict[str, int]
    """Target tokens each kind of micro-batch has trained on: the mixture actually drawn."""
    recipe: dict[str, Any]
    data_hash: str
    pace: Pace | None = None
    """How the run computes; None in snapshots of a version that did not say."""
    changes: tuple[Change, ...] = ()
    """What resumes told the run otherwise than it began, in order."""


@dataclass(frozen=True, slots=True)
class Snapshots:
    """The snapshots of one run, in ``folder``."""

    folder: Path
    keep: int

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:07d}"

    def latest(self) -> Path | None:
        """The newest complete snapshot. A folder gets its name when it is complete, so every match is."""
        found = sorted(self.folder.glob("step-*")) if self.folder.is_dir() else []
        return found[-1] if found else None

    def save(self, model: Transformer, optimizers: Sequence[Optimizer], meta: SnapshotMeta, ranks: Ranks) -> None:
        """Write a snapshot with all ranks, then delete the oldest beyond ``keep``. Raises `UserError`: on all ranks:
        the disk is full or the folder cannot be written; older snapshots are untouched.
        """
        final = self.path(meta.step)
        partial = self.folder / f".{final.name}.partial"
        state = {"model": model.state_dict(), "optim": _optimizer_state(model, optimizers)}
        with self._attempt(final, ranks):
            if ranks.is_first:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._sweep()
        with self._attempt(final, ranks), _quietly():
            save(state, checkpoint_id=partial, no_dist=ranks.world == 1)
        with self._attempt(final, ranks):
            if ranks.is_first:
                (partial / META).write_text(meta.model_dump_json(indent=2), encoding="utf-8")
                remove(final)
                partial.rename(final)
                for old in sorted(self.folder.glob("step-*"))[: -self.keep]:
                    shutil.rmtree(old)

    def load(self, path: Path, model: Transformer, optimizers: Sequence[Optimizer], ranks: Ranks) -> None:
        """Restore ``model`` and ``optimizers`` in place, resharding if the ranks have changed. Raises `UserError`: the
        snapshot is damaged or of another network.
        """
        for optimizer in optimizers:
            _start(optimizer)
        try:
            stored = FileSystemReader(path).read_metadata().state_dict_metadata
            for optimizer, parameter, name in _owned(model, optimizers):
                if not any(key.startswith(f"optim.{name}.") for key in stored):
                    del optimizer.state[parameter]  # had no gradient yet
            state = {"model": model.state_dict(), "optim": _optimizer_state(model, optimizers)}
            with _quietly():
                load(state, checkpoint_id=path, no_dist=ranks.world == 1)
        except (OSError, RuntimeError, ValueError, KeyError, CheckpointException) as error:
            raise UserError(
                f"{path}: cannot be restored: {_cause(error)}; delete this snapshot to use the one before"
            ) from error

    @contextmanager
    def _attempt(self, final: Path, ranks: Ranks) -> Iterator[None]:
        """A part of saving ``final``. All ranks leave it together: if it failed on one, every rank raises."""
        error: BaseException | None = None
        try:
            yield
        except (OSError, RuntimeError, CheckpointException) as caught:
            error = caught
        if not ranks.sum(torch.tensor(int(error is not None), device=ranks.device)):
            return
        if ranks.is_first:
            self._sweep()
        last = self.latest()
        have = f"the last good one is {last.name}" if last else "there is no earlier one"
        cause = "another rank failed" if error is None else _cause(error)
        raise UserError(f"{final}: cannot be written: {cause}; free some space ({have}), then --resume") from error

    def _sweep(self) -> None:
        """Remove what saving left behind where it was killed."""
        for partial in self.folder.glob(".step-*.partial"):
            remove(partial)


def read_meta(path: Path) -> SnapshotMeta:
    try:
        return SnapshotMeta.model_validate(read_json(path / META))
    except ValueError as error:
        raise UserError(f"{path / META}: not a snapshot of this version: {str(error).splitlines()[0]}") from None


def _owned(model: Transformer, optimizers: Sequence[Optimizer]) -> Iterator[tuple[Optimizer, Tensor, str]]:
    """Every parameter that an optimiser has state for, with its name."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    for optimizer in optimizers:
        for parameter in list(optimizer.state):
            yield optimizer, parameter, names[parameter]


def _optimizer_state(model: Transformer, optimizers: Sequence[Optimizer]) -> dict[str, dict[str, Tensor]]:
    """The optimisers' tensors by parameter. Their settings follow from the recipe, their kernels from the ranks."""
    return {name: optimizer.state[parameter] for optimizer, parameter, name in _owned(model, optimizers)}


def _start(optimizer: Optimizer) -> None:
    """Give every parameter a state to load into, by a step of rate zero along a gradient of zero."""
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
def _quietly() -> Iterator[None]:
    """Without the warning that one process alone is saved or loaded: here that is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def _cause(error: BaseException) -> str:
    """The innermost message of a chain, on one line."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    chain: BaseException | None = error
    while chain is not None:  # torch reports a full disk as a wrong file position, with the reason as its context
        if isinstance(chain, OSError) and chain.strerror:
            return chain.strerror
        chain = chain.__cause__ or chain.__context__
    return (str(error).strip() or type(error).__name__).splitlines()[0]
