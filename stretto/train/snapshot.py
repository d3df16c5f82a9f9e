"""Snapshots: everything a run needs to go on, bit for bit, whatever the number of ranks that read it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

from stretto.base.config import Config
from stretto.base.errors import UserError
from stretto.base.paths import read_json, remove, write_json
from stretto.base.records import Receipt
from stretto.model.parallel import Ranks
from stretto.model.transformer import Transformer

META = "meta.json"


class SnapshotMeta(Config):
    """The part of a snapshot that is not tensors."""

    step: int
    """Steps completed."""
    loader: dict[str, Any]
    """`Loader.state()` after them."""
    receipt: Receipt
    run_id: str
    layer_order: tuple[int, ...]
    tokens_by_kind: dict[str, int]
    """Target tokens each kind of micro-batch has trained on: the mixture actually drawn."""
    recipe: dict[str, Any]
    data_hash: str


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
        """Write a snapshot with all ranks, then delete the oldest beyond ``keep``.

        Raises:
            UserError: the disk is full or the folder cannot be written; older snapshots are untouched.
        """
        final = self.path(meta.step)
        partial = self.folder / f".{final.name}.partial"
        if ranks.is_first:
            self.folder.mkdir(parents=True, exist_ok=True)
            remove(partial)
        ranks.barrier()
        try:
            dcp.save(_state(model, optimizers), checkpoint_id=partial, no_dist=ranks.world == 1)
            if ranks.is_first:
                write_json(partial / META, meta.model_dump(mode="json"))
                remove(final)
                partial.rename(final)
                for old in sorted(self.folder.glob("step-*"))[: -self.keep]:
                    shutil.rmtree(old)
        except (OSError, RuntimeError, dcp.api.CheckpointException) as error:
            remove(partial)
            last = self.latest()
            have = f"the last good one is {last.name}" if last else "there is no earlier one"
            raise UserError(
                f"{final}: cannot be written: {_cause(error)}; free some space ({have}), then --resume"
            ) from error
        ranks.barrier()

    def load(self, path: Path, model: Transformer, optimizers: Sequence[Optimizer], ranks: Ranks) -> SnapshotMeta:
        """Restore ``model`` and ``optimizers`` in place, resharding if the ranks have changed.

        Raises:
            UserError: the snapshot is damaged or of another network.
        """
        meta = read_meta(path)
        state = _state(model, optimizers)
        try:
            dcp.load(state, checkpoint_id=path, no_dist=ranks.world == 1)
        except (OSError, RuntimeError, ValueError, KeyError, dcp.api.CheckpointException) as error:
            raise UserError(
                f"{path}: cannot be restored: {_cause(error)}; delete this snapshot to use the one before"
            ) from error
        set_state_dict(model, list(optimizers), model_state_dict=state["model"], optim_state_dict=state["optim"])
        return meta


def read_meta(path: Path) -> SnapshotMeta:
    try:
        return SnapshotMeta.model_validate(read_json(path / META))
    except ValueError as error:
        raise UserError(f"{path / META}: not a snapshot of this version: {str(error).splitlines()[0]}") from None


def check_same_run(meta: SnapshotMeta, recipe: Mapping[str, Any], data_hash: str, where: Path) -> None:
    """Refuse to continue a run under another recipe or on other data.

    Raises:
        UserError: naming the first field that differs.
    """
    if meta.data_hash != data_hash:
        raise UserError(f"{where}: data: changed since this run started; use the same data, or start a new run folder")
    old, new = _flat(meta.recipe), _flat(json.loads(json.dumps(recipe)))
    for field in sorted(old.keys() | new.keys()):
        if old.get(field) != new.get(field):
            raise UserError(
                f"{where}: {field}: was {old.get(field)!r} when this run started, is {new.get(field)!r} now; "
                "change it back, or start a new run folder"
            )


def _state(model: Transformer, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    model_state, optim_state = get_state_dict(model, list(optimizers))
    return {"model": model_state, "optim": optim_state}


def _cause(error: BaseException) -> str:
    """The innermost message of a chain, on one line."""
    if isinstance(error, dcp.api.CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
