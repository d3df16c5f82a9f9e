"""The trainer of a run whose roles share no folder: its snapshots and its checkpoint lie on its own disk and in the store."""

from __future__ import annotations

import fcntl
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from stretto.base.paths import CHECKPOINT, remove
from stretto.base.track import say
from stretto.learning.recipe import SNAPSHOTS
from stretto.learning.trainer import TrainerRole
from stretto.runtime.store import (
    IncompleteError,
    RemoteStore,
    complete_folders,
    fetch_folder,
    has_folder,
    send_folder,
)
from stretto.train.snapshot import is_whole, read_meta

_PARTS = "snapshot-parts"
"""Folder of the store with the parts of snapshots that ranks on other machines than the first rank's wrote."""


class RemoteTrainer(TrainerRole):
    """`TrainerRole` for a store without a shared folder. The ranks may be on several machines."""

    _store: RemoteStore

    def save(self, cut: Mapping[str, Any]) -> Path:
        path, rank = super().save(cut), self._ranks.rank
        # complete on the first rank's machine; on others a folder is left with the files of their own ranks
        left = path.with_name(f".{path.name}.partial")
        if mine := list(left.glob(f"__{rank}_*")):
            own = left / f"of-{rank}"
            own.mkdir()
            for file in mine:
                file.rename(own / file.name)
            send_folder(self._store, own, f"{_PARTS}/{path.name}-{rank}")
            remove(own)
            with suppress(OSError):  # another rank of this machine has files there
                left.rmdir()
        self._ranks.barrier()  # the first rank's manifest completes the snapshot
        if self._ranks.is_first:
            send_folder(self._store, path, f"{SNAPSHOTS}/{path.name}")
            kept = {each.name for each in self._snapshots.folder.glob("step-*")}
            for name in self._stored_snapshots():
                if name not in kept:
                    self._remove_stored(name)
        return path

    def resume(self) -> dict[str, Any] | None:
        """Fetches the newest snapshot that the store has whole before; a snapshot on this disk may be of another machine's past. If
        the store has lost its snapshots, that one is used nevertheless: the ledger goes on from any of them."""
        while True:
            stored, token = self._ranks.first(lambda: (self._stored_snapshots()[-1:], secrets.token_hex(8)))
            if not stored and self._have_one_snapshot():
                break
            is_lost = not self._replace_snapshots(stored, token)
            if not self._ranks.sum(torch.tensor(int(is_lost), device=self._ranks.device)):
                break
            if self._ranks.is_first:
                say(f"{self._stage}: the store has lost a part of the snapshot {stored[0]}; an earlier one is used")
                self._remove_stored(stored[0])
        return super().resume()

    def _replace_snapshots(self, stored: list[str], token: str) -> bool:
        """Replace the snapshots on this machine's disk by ``stored``: one name in the store, or none. One rank does so for all of its
        machine, which have the same ``token``. False: the store has not the whole snapshot; those on the disk are unchanged."""
        fetched, new = self._run / "fetched", self._run / "fetching"
        with (self._run / "fetched.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if fetched.exists() and fetched.read_text() == token:
                return True
            remove(new)
            new.mkdir()
            try:
                if not all([self._fetch(name, new) for name in stored]):
                    return False
                remove(self._snapshots.folder)
                new.rename(self._snapshots.folder)
            finally:
                remove(new)
            fetched.write_text(token)
            return True

    def _have_one_snapshot(self) -> bool:
        """Whether all ranks have the same newest snapshot on their disks, each with the files of all ranks: `save` leaves on the first
        rank's machine a snapshot without those of other machines."""
        path = self._snapshots.latest()
        step = read_meta(path).step if path and is_whole(path) else -1
        steps = self._ranks.gather(torch.tensor([step], device=self._ranks.device))
        return bool((steps >= 0).all() and (steps == steps[0]).all())

    def _fetch(self, name: str, folder: Path) -> bool:
        """Fetch the snapshot ``name`` with all its parts into ``folder``. False: the store has lost something of it.

        A killed attempt at the same step, with the ranks on other machines, may have left parts: some incomplete, some with files that the
        snapshot itself has."""
        path, part_path = folder / name, folder / "part"
        try:
            fetch_folder(self._store, f"{SNAPSHOTS}/{name}", path)
            for part in self._stored_parts(name):
                if not has_folder(self._store, part):
                    continue
                fetch_folder(self._store, part, part_path)
                for file in part_path.iterdir():
                    if not (path / file.name).exists():
                        file.rename(path / file.name)
                remove(part_path)
        except IncompleteError:
            return False
        return is_whole(path)

    def _remove_stored(self, name: str) -> None:
        """Delete the snapshot ``name`` and its parts from the store."""
        self._store.remove_folder(f"{SNAPSHOTS}/{name}")
        for part in self._stored_parts(name):
            self._store.remove_folder(part)

    def _stored_parts(self, name: str) -> list[str]:
        """Names in the store of the parts of the snapshot ``name``."""
        return [each for each in self._store.folders(_PARTS) if each.startswith(f"{_PARTS}/{name}-")]

    def write(self, folder: Path | str) -> None:
        super().write(self._run / CHECKPOINT)
        if self._ranks.is_first:
            send_folder(self._store, self._run / CHECKPOINT, CHECKPOINT)

    def _stored_snapshots(self) -> list[str]:
        """Names of the complete snapshots in the store, oldest first."""
        return [name.removeprefix(f"{SNAPSHOTS}/") for name in complete_folders(self._store, SNAPSHOTS)]
