"""Where the roles of a run find its files: the store, the start checkpoint, and a folder on their own machine's disk.

With the store ``file`` all roles share the run folder. With another store, only the driver sees it: each machine has a folder of its
own, the start checkpoint and snapshots travel through the store, and so does the finished checkpoint. Imports no torch.
"""

from __future__ import annotations

import fcntl
import secrets
from dataclasses import dataclass
from pathlib import Path

from stretto.base.errors import UserError
from stretto.base.paths import CHECKPOINT, quoted, read_json, remove, write_json
from stretto.learning.recipe import GROUPS, LOGS, WEIGHTS, RlRecipe
from stretto.runtime.store import (
    FolderStore,
    IncompleteError,
    RemoteStore,
    Store,
    UrlStore,
    fetch_folder,
    has_folder,
    local_folder,
    remove_local_folder,
    send_folder,
)

ID_FILE = "store.json"
"""In the run folder: the id under which the run's files lie in the store, and whether the run has ended, and its files are deleted."""
_START = "start"


@dataclass(frozen=True, slots=True)
class RunFiles:
    """The files of a run. Picklable; made by `open_files`."""

    store: Store
    id: str
    run: Path
    """The driver's run folder."""
    start: Path
    """The driver's start checkpoint."""

    @property
    def is_shared(self) -> bool:
        """Whether every role sees the run folder."""
        return isinstance(self.store, FolderStore)

    @property
    def remote(self) -> RemoteStore:
        assert not isinstance(self.store, FolderStore), "the run folder is shared"
        return self.store  # type: ignore[return-value]

    def folder_here(self) -> Path:
        """The run's folder on this machine."""
        return self.run if self.is_shared else local_folder(self.id)

    def start_here(self) -> Path:
        """The start checkpoint on this machine; fetched if it is missing. Raises as `fetch_folder`."""
        if self.is_shared:
            return self.start
        here = self.folder_here() / _START
        with (self.folder_here() / f"{_START}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # several roles of a machine start at the same time
            if not here.exists():
                try:
                    fetch_folder(self.store, _START, here)
                except IncompleteError:
                    self.remote.remove_folder(_START)  # so that the driver sends it again with --resume
                    raise
        return here

    def finish(self) -> None:
        """After the run's end: move the checkpoint into the run folder, and delete what no step will read again."""
        if self.is_shared:
            for name in (GROUPS, LOGS, WEIGHTS):
                remove(self.run / name)
            return
        remove(self.run / CHECKPOINT)
        fetch_folder(self.store, CHECKPOINT, self.run / CHECKPOINT)
        # before a kill can leave a part of the files
        write_json(self.run / ID_FILE, {"id": self.id, "has_ended": True})
        self.remote.destroy()
        remove_local_folder(self.id)


def check_store(recipe: RlRecipe) -> None:
    """Check the store of ``recipe`` with a folder that is deleted again. A store ``ray`` needs a connection to the cluster.
    Raises UserError: the store refuses, or does not answer."""
    if recipe.store == "ray":
        from stretto.runtime.ray_store import check_copies

        check_copies(recipe.failures.copies)
    elif recipe.store != "file":
        store = UrlStore(recipe.store, f"check-{secrets.token_hex(6)}")
        store.check()
        store.destroy()


def open_files(recipe: RlRecipe, run: Path, start: Path) -> RunFiles:
    """The files of the run in the folder ``run``, on the store of ``recipe``. A store ``ray`` needs a connection to the cluster.
    Raises UserError: the store refuses, or does not answer, or the run has ended there. InfraError: it stopped to answer."""
    if recipe.store == "file":
        return RunFiles(FolderStore(run), "", run, start)
    path = run / ID_FILE
    known = read_json(path) if path.exists() else {"id": secrets.token_hex(6)}
    id = known["id"]
    store: RemoteStore
    if recipe.store == "ray":
        from stretto.runtime.ray_store import open_ray_store

        store = open_ray_store(id, recipe.failures.copies)
    else:
        store = UrlStore(recipe.store, id)
        store.check()
    if known.get("has_ended"):
        store.destroy()  # opening it wrote there, and a kill may have left files
        raise UserError(
            f"{run}: this run has ended, and its store was emptied; begin another run with its checkpoint: --model {quoted(run)}"
        )
    write_json(path, {"id": id})
    if not has_folder(store, _START):
        send_folder(store, start, _START)
    return RunFiles(store, id, run, start)
