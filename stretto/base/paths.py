"""Run folders, exclusive claims on them, and atomic writes: every file is written under a temporary name, then renamed."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import secrets
import shlex
import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from stretto.base.errors import UserError, one_line

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
"""Folder of the shipped recipes."""
RUN_FILE, RECIPE_FILE, CHECKPOINT = "run.json", "recipe.json", "checkpoint"
"""Names in a run folder: the file with the run's recipe (the second is that of an RL run), and the folder of its checkpoint."""
LATENCY_FILE = "latency.json"
"""Name of the latency table in the folder of the run or checkpoint that was measured."""
_PARTIAL = ".{name}.{token}.partial"
"""Name of a file or folder that is being written; the token has 16 digits."""
FREE_AND_RESUME = "free some space, and run the same command again with --resume"
"""Remedy for a disk that is full in the middle of a run."""
_WRONG_PATH = (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.EBUSY, errno.ENAMETOOLONG, errno.ELOOP)
"""Errors that are about the path; more space would not help."""
LOCK_FILE = ".lock"
"""File in a claimed folder; contains the process and host of its owner."""


def user_cache() -> Path:
    """Folder of files that Stretto keeps for this user and can make again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stretto"


def expanded(given: str | os.PathLike[str], name: str) -> str:
    """What a caller of the Python API gave for ``name``, a path or a text that begins with one; ``~`` is the home folder. Raises
    `UserError`: it is empty, or no path."""
    if not isinstance(given, str | os.PathLike):
        raise UserError(f"{name}: needs a path, is {one_line(repr(given), 60)}")
    if not os.fspath(given):
        raise UserError(f"{name}: is empty; name a file or a folder")
    return os.path.expanduser(given)


def user_path(given: str | os.PathLike[str], name: str) -> Path:
    """`expanded` as a path."""
    return Path(expanded(given, name))


def quoted(path: Path | str) -> str:
    """``path`` as a shell reads it in a command that is printed for the user: in quotes where it needs them."""
    return shlex.quote(str(path))


def stored_path(path: Path, folder: Path) -> Path:
    """``path`` as a record in ``folder`` stores it: relative if it lies inside, so that the folder may be renamed, otherwise absolute. A
    reader joins it to the folder."""
    place, around = path.resolve(), folder.resolve()
    return place.relative_to(around) if place.is_relative_to(around) else place


def checkpoint_folder(path: Path | str) -> Path:
    """The checkpoint folder at ``path``: the folder itself, or the checkpoint of a run folder. Raises `UserError`: there is none."""
    path = Path(path)
    for folder in (path, path / CHECKPOINT):
        if (folder / "config.json").is_file():
            return folder
    if path.suffix == ".run" and (path.with_suffix("") / "config.json").is_file():
        raise UserError(f"{path}: holds the files of a healing, whose checkpoint is {path.with_suffix('')}; name that")
    if (path / RUN_FILE).is_file() or (path / RECIPE_FILE).is_file():
        raise UserError(f"{path}: {CHECKPOINT}: this run has none yet; finish it with --resume")
    raise UserError(f"{path}: config.json: no such file; name a run or a Hugging Face checkpoint folder")


def model_name(path: Path | str) -> str:
    """Name of the model at ``path``: that of its folder, or of the run if the folder is a run's checkpoint."""
    folder = Path(path).resolve()
    return folder.parent.name or folder.name if folder.name == CHECKPOINT else folder.name


def sized(text: str) -> tuple[Path, str]:
    """Path and size of an argument PATH or PATH:SIZE; the size is empty where none is given. A path that exists may contain a colon."""
    path, colon, size = ("", "", "") if Path(text).exists() else text.rpartition(":")
    return (Path(path), size) if colon else (Path(text), "")


def separated(texts: Sequence[str]) -> list[str]:
    """Parts of ``texts``, which are joined by commas. The path of a file that exists is one part."""
    return [part for text in texts for part in ([text] if os.path.isfile(text) else text.split(","))]


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Claim ``folder`` for this process: no other process can claim it meanwhile. The claim also ends when the process is killed.

    In a run folder, partial files of a killed process are removed. Elsewhere the lock file and the folders that the claim created are
    removed if no file is added beside the lock file.

    Raises:
        UserError: another process has claimed it, or the folder cannot be written.
    """
    created = [path for path in (folder, *folder.parents) if not os.path.exists(path)]
    had_lock = os.path.exists(folder / LOCK_FILE)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        before = {*os.listdir(folder), LOCK_FILE}
        lock = (folder / LOCK_FILE).open("a+", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error.strerror}; choose another folder") from error

    def is_own() -> bool:
        """Whether the lock file is still that of this claim: another process may have made one in a folder that was replaced."""
        with suppress(FileNotFoundError, NotADirectoryError):
            return os.path.samestat(os.fstat(lock.fileno()), os.stat(folder / LOCK_FILE))
        return False

    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not is_own():  # its owner removed it since
                raise BlockingIOError
        except BlockingIOError:
            lock.seek(0)
            raise UserError(
                f"{folder}: {lock.read() or 'another process'} is running in it; wait for its end, or choose another folder"
            ) from None
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}")
        lock.flush()
        if (folder / RUN_FILE).is_file():
            _remove_partial(folder)
        try:
            yield
        finally:
            is_run = not before.isdisjoint((RUN_FILE, RECIPE_FILE))
            if not had_lock and not is_run and is_own() and before.issuperset(os.listdir(folder)):
                remove(folder / LOCK_FILE)
                for parent in created:
                    with suppress(OSError):  # something else was written into it
                        parent.rmdir()


def _remove_partial(folder: Path) -> None:
    """Remove the partial files of `replacing` in ``folder``, except in folders below it that have a claim of their own."""
    claimed_below = {lock.parent for lock in folder.rglob(LOCK_FILE)} - {folder}
    for partial in list(folder.rglob(_PARTIAL.format(name="*", token="?" * 16))):
        if claimed_below.isdisjoint(partial.parents):
            remove(partial)


@contextmanager
def replacing(path: Path | str, remedy: str = "free some space or choose another folder") -> Iterator[Path]:
    """Yield a temporary path beside ``path``; on success it replaces ``path``, on any error it is removed.

    The caller creates a file or a folder at the yielded path. Readers never see a partial result, and an older result survives a
    failed attempt. The temporary name is random, because process ids repeat in containers that share a folder.

    Raises:
        UserError: the operating system refuses to write; ``remedy`` is its last part for a full disk.
    """
    path = Path(path)
    temporary = path.parent / _PARTIAL.format(name=path.name, token=secrets.token_hex(8))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        assert temporary.exists(), f"nothing was written at {temporary}"
        _put(temporary, path)
    except OSError as error:
        failed = Path(str(error.filename2 or error.filename or path))  # filename2: the target of a copy
        if not (failed in path.parents or failed.is_relative_to(path) or failed.is_relative_to(temporary)):
            raise  # the error is about a file that the caller reads
        raise UserError(f"{path}: cannot be written: {error.strerror or error}; {_remedy(error, remedy)}") from error
    finally:
        if os.path.lexists(temporary):  # a folder that cannot be written has none to remove
            remove(temporary)


def _remedy(error: OSError, otherwise: str) -> str:
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "choose a folder that you may write to"
    return "choose another folder" if error.errno in _WRONG_PATH else otherwise


def require_writable(folder: Path) -> None:
    """Raises `UserError` if the user may not write into ``folder`` or, where it does not exist, may not create it."""
    # os.path.exists, because Path.exists raises if a parent folder may not be listed.
    nearest = next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(f"{folder}: cannot be written: Permission denied; choose a folder that you may write to")


@contextmanager
def writing(path: Path | str) -> Iterator[None]:
    """Context for appending to a file: an error of the operating system becomes a `UserError`."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written: {error.strerror or error}; {_remedy(error, FREE_AND_RESUME)}"
        ) from error


def is_empty(folder: Path) -> bool:
    """Whether ``folder`` holds nothing, or only the lock file of a claim."""
    return all(path.name == LOCK_FILE for path in folder.iterdir())


def require_new(out: Path, force: bool) -> None:
    """Raises `UserError` if ``out`` is a file or a folder that is not empty, and ``force`` does not allow to replace it, or if it is or
    contains the current folder, which cannot be replaced."""
    is_around = False
    with suppress(FileNotFoundError):  # the current folder was deleted
        is_around = Path.cwd().is_relative_to(out.resolve())
    if is_around:
        raise UserError(f"{out}: contains the current folder, which cannot be replaced; name a new folder")
    if not force and out.exists() and not (out.is_dir() and is_empty(out)):
        raise UserError(f"{out}: exists already; choose another name, or replace it with --force")


def require_apart(out: Path, source: Path) -> None:
    """Raises `UserError` if the output folder ``out`` is or contains the checkpoint ``source``, which would be replaced, or lies inside it:
    no command replaces a checkpoint folder that holds other files."""
    place, read = out.resolve(), source.resolve()
    if read.is_relative_to(place):
        raise UserError(f"{out}: contains the checkpoint that is read, which would be replaced; choose another folder")
    if place.is_relative_to(read):
        raise UserError(f"{out}: lies inside the checkpoint that is read; choose another folder")


def _put(temporary: Path, path: Path) -> None:
    if not path.is_dir() or path.is_symlink():
        temporary.replace(path)
        return
    if not temporary.is_dir():
        raise IsADirectoryError(errno.EISDIR, "a folder is not replaced by a file", str(path))
    if _exchange(temporary, path):
        return  # the old folder is at ``temporary`` now, which `replacing` removes
    old = temporary.with_suffix(".old")  # rename cannot replace a folder that is not empty
    path.rename(old)
    try:
        temporary.rename(path)
    except OSError:
        old.rename(path)
        raise
    remove(old)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two paths in one step, so that a kill leaves no moment without ``second``. False: only Linux and most of its file systems
    can do it.
    """
    try:
        renameat2 = ctypes.CDLL(None).renameat2
    except AttributeError:
        return False
    at_cwd, exchange = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of linux/fs.h
    return bool(renameat2(at_cwd, os.fsencode(first), at_cwd, os.fsencode(second), exchange) == 0)


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
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, ValueError, RecursionError) as error:
        # ValueError: not UTF-8, not JSON, or a number of thousands of digits; RecursionError: nested too deeply
        raise UserError(f"{path}: not readable as JSON: {error}; repair it, or write it anew") from None
