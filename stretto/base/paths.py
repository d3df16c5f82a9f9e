"""Run folders, who may write in one, and the one way a file is written: beside its final name, then renamed."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stretto.base.errors import UserError

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
"""The shipped recipes."""
RUN_FILE, CHECKPOINT = "run.json", "checkpoint"
"""In a run folder: what the run was told, and the folder of its result."""
LOCK_FILE = ".lock"
"""In a folder that a process has claimed: who that is."""


def checkpoint_folder(path: Path | str) -> Path:
    """The checkpoint folder that ``path`` names: itself, or a run's. Raises `UserError`: there is none."""
    path = Path(path)
    for folder in (path, path / CHECKPOINT):
        if (folder / "config.json").is_file():
            return folder
    if (path / RUN_FILE).is_file():
        raise UserError(f"{path}: {CHECKPOINT}: this run has none yet; finish it with --resume")
    raise UserError(f"{path}: config.json: no such file; name a run or a Hugging Face checkpoint folder")


def sized(named: str) -> tuple[Path, str]:
    """Of PATH or PATH:SIZE the path and the size; empty: none is named, or the colon is the path's own."""
    path, colon, size = ("", "", "") if Path(named).exists() else named.rpartition(":")
    return (Path(path), size) if colon else (Path(named), "")


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Nobody else runs in ``folder`` meanwhile. The claim ends with the process, however that ends. A new folder in which
    nothing was begun is removed.

    Raises:
        UserError: somebody does, or the folder cannot be written.
    """
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK_FILE).open("a+", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error.strerror}; choose another folder") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise UserError(
                f"{folder}: {lock.read() or 'another process'} is running in it; wait for its end, or choose another folder"
            ) from None
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}")
        lock.flush()
        try:
            yield
        finally:
            if is_new and [path.name for path in folder.iterdir()] == [LOCK_FILE]:  # refused before anything began
                remove(folder)


@contextmanager
def replacing(path: Path | str) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; on success it takes ``path``'s place, on any error it is removed.

    Its name is nobody else's: in two containers that share a folder, process ids are the same. Works for a file and for
    a folder: the caller creates whichever it wants at the yielded path. A reader never sees a half-written result, and
    an older result survives a failed attempt.
    """
    path = Path(path)
    temporary = path.parent / f".{path.name}.{secrets.token_hex(8)}.partial"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        assert temporary.exists(), f"nothing was written at {temporary}"
        _put(temporary, path)
    except OSError as error:
        named = Path(str(error.filename2 or error.filename or path))  # of a copy the second is the target
        if not (named in path.parents or named.is_relative_to(path) or named.is_relative_to(temporary)):
            raise  # about a file that the caller reads
        raise UserError(
            f"{path}: cannot be written: {error.strerror or error}; {_remedy(error, 'free some space or choose another folder')}"
        ) from error
    finally:
        if os.path.lexists(temporary):  # where nothing can be written, nothing can be removed
            remove(temporary)


def _remedy(error: OSError, otherwise: str) -> str:
    is_refused = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
    return "choose a folder that you may write to" if is_refused else otherwise


def require_writable(folder: Path) -> None:
    """Raises `UserError` where the user may not write into ``folder`` or, before it exists, may not make it."""
    # Not Path.exists, which raises where a parent may not be looked into.
    nearest = next(each for each in (folder, *folder.absolute().parents) if os.path.exists(each))
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(f"{folder}: cannot be written: Permission denied; choose a folder that you may write to")


@contextmanager
def writing(path: Path | str) -> Iterator[None]:
    """For a file that is appended to: what the system refuses becomes the user's one line."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written: {error.strerror or error}; {_remedy(error, 'free some space, then --resume')}"
        ) from error


def require_new(out: Path, force: bool) -> None:
    """Raises `UserError` where ``out`` is a file, or a folder that holds something, and may not be replaced (``force``)."""
    if not force and out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"{out}: exists already; choose another name, or replace it with --force")


def require_apart(out: Path, source: Path) -> None:
    """Raises `UserError` where the folder ``out`` is, or holds, the checkpoint ``source`` that its content is made from: that would be
    replaced.
    """
    if source.resolve().is_relative_to(out.resolve()):
        raise UserError(f"{out}: holds the network that this is made from, which stays; choose another folder")


def _put(temporary: Path, path: Path) -> None:
    if not path.is_dir() or path.is_symlink():
        temporary.replace(path)
        return
    if not temporary.is_dir():
        raise IsADirectoryError(errno.EISDIR, "a folder, with what it holds, is not replaced by a file", str(path))
    old = temporary.with_suffix(".old")  # rename cannot replace a folder that is not empty
    path.rename(old)
    try:
        temporary.rename(path)
    except OSError:
        old.rename(path)
        raise
    remove(old)


def remove(path: Path) -> None:
    """Delete a file or a folder; do nothing where there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_text(path: Path | str, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path | str, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path | str) -> Any:
    """Parse a JSON file. Raises `UserError`: the file is missing, unreadable or not JSON."""
    path = Path(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, ValueError, RecursionError) as error:
        # not UTF-8, no JSON, a number of thousands of digits; too deep
        raise UserError(f"{path}: not readable as JSON: {error}; the file is damaged or not one of ours") from None
