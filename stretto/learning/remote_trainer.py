"""The trainer of a run whose roles share no folder: its snapshots and its checkpoint lie on its own disk and in the store."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stretto.base.paths import CHECKPOINT, remove
from stretto.learning.recipe import SNAPSHOTS
from stretto.learning.trainer import TrainerRole
from stretto.runtime.store import RemoteStore, fetch_folder, has_folder, send_folder


class RemoteTrainer(TrainerRole):
    """`TrainerRole` for a store without a shared folder. All ranks are on one machine."""

    _store: RemoteStore

    def save(self, cut: Mapping[str, Any]) -> Path:
        path = super().save(cut)
        if self._ranks.is_first:
            send_folder(self._store, path, f"{SNAPSHOTS}/{path.name}")
            kept = {each.name for each in self._snapshots.folder.glob("step-*")}
            for name in self._stored_snapshots():
                if name not in kept:
                    self._store.remove_folder(f"{SNAPSHOTS}/{name}")
        return path

    def resume(self) -> dict[str, Any] | None:
        """Fetches the newest complete snapshot of the store before; a snapshot on this disk may be of another machine's past."""
        if self._ranks.is_first:
            remove(self._snapshots.folder)
            if stored := self._stored_snapshots():
                fetch_folder(self._store, f"{SNAPSHOTS}/{stored[-1]}", self._snapshots.folder / stored[-1])
        self._ranks.barrier()
        return super().resume()

    def write(self, folder: Path | str) -> None:
        super().write(self._run / CHECKPOINT)
        if self._ranks.is_first:
            send_folder(self._store, self._run / CHECKPOINT, CHECKPOINT)

    def _stored_snapshots(self) -> list[str]:
        """Names of the complete snapshots in the store, oldest first."""
        names = [name.removeprefix(f"{SNAPSHOTS}/") for name in self._store.folders(SNAPSHOTS)]
        return [name for name in names if has_folder(self._store, f"{SNAPSHOTS}/{name}")]
