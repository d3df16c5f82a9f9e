"""A run's folder from one life of the run to the next: whose it is, which recipe it follows, what a kill has left in it.

Imports no torch.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stretto.base.config import check_unchanged
from stretto.base.errors import UserError
from stretto.base.paths import read_json, remove, write_json
from stretto.rl.controller import Controller
from stretto.rl.recipe import GROUPS, LAYOUT, LOGS, SNAPSHOTS, WEIGHTS, RlRecipe
from stretto.rl.samples import SUFFIX, discard, logged_ordinals, remove_logs

JOURNAL_FILE = "groups.jsonl"
RECIPE_FILE = "recipe.json"
START_FILE = "start.json"
"""Where the checkpoint lies that the run began with."""
LOCK_FILE = ".lock"


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Nobody else runs in ``folder`` meanwhile. The claim ends with the process, however that ends.

    Raises:
        UserError: somebody does, or the folder cannot be written.
    """
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK_FILE).open("w")
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error.strerror}; choose another folder with --out") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{folder}: another process is running it; wait for its end, or choose another folder with --out"
            ) from None
        try:
            yield
        finally:
            if is_new and [path.name for path in folder.iterdir()] == [LOCK_FILE]:  # refused before anything began
                remove(folder)


def has_begun(folder: Path, resume: bool) -> bool:
    """Whether there is a run to go on with: one that was killed before its first group has nothing.

    Raises:
        UserError: there is, and nobody said ``resume``.
    """
    has_run = (folder / JOURNAL_FILE).exists() or any((folder / SNAPSHOTS).glob("step-*"))
    if has_run and not resume:
        raise UserError(
            f"{folder}: holds a run already; continue it with --resume, or choose another folder with --out"
        )
    return has_run


def take_up(recipe: RlRecipe, folder: Path, resume: bool) -> bool:
    """Write ``recipe`` down; whether there is one to go on with.

    Raises:
        UserError: ``resume`` and the run has another recipe; or not, and there is a run.
    """
    has_run, path = has_begun(folder, resume), folder / RECIPE_FILE
    if has_run and path.exists():
        check_unchanged(read_json(path), recipe.model_dump(mode="json"), folder, LAYOUT)
    write_json(path, recipe.model_dump(mode="json"))
    return has_run


def remember_start(folder: Path, start: Path) -> None:
    """Write down which checkpoint the run begins with, for `start_of`."""
    write_json(folder / START_FILE, {"checkpoint": str(start.resolve())})


def start_of(folder: Path) -> Path | None:
    """The checkpoint that the run in ``folder`` began with; None where it does not say.

    Raises:
        UserError: the checkpoint is not there any more.
    """
    path = folder / START_FILE
    if not path.exists():
        return None
    start = Path(read_json(path)["checkpoint"])
    if not (start / "config.json").is_file():
        raise UserError(
            f"{start}: config.json: no such file, and {folder} began with it; say with --model where it is now"
        )
    return start


def sweep(folder: Path, controller: Controller) -> None:
    """Delete what kills have left behind: half-written files, groups that nobody will train on, logs of those that ended.

    No role may be at work any more.
    """
    for place in (folder, folder / GROUPS, folder / WEIGHTS):
        for partial in place.glob(".*.partial"):
            remove(partial)
    needed = {Path(location).name for location in controller.needed()}
    discard(path for path in (folder / GROUPS).glob(f"group-*{SUFFIX}") if path.name not in needed)
    unfinished = controller.unfinished()
    for ordinal in logged_ordinals(folder / LOGS):
        if ordinal not in unfinished:
            remove_logs(folder / LOGS, ordinal)
