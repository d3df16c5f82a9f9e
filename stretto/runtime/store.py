"""Stores: where the roles of a run keep the files that they share.

A name is a relative path such as ``groups/a.group``. Writing returns a *location*, with which every role of the run reads the file,
on any machine. `FolderStore` is the run folder, on a disk that all roles see. `UrlStore` is an object store such as S3, reached
through Arrow's file systems. `stretto.runtime.ray_store.RayStore` is the memory of a Ray cluster.
"""

from __future__ import annotations

import errno
import functools
import json
import logging
import os
import re
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import parse_qs, urlsplit

from stretto.base.errors import InfraError, UserError
from stretto.base.paths import FREE_AND_RESUME, replacing, writing

LOG_SUFFIX = ".log"
"""Ending of the names that can be appended to."""
RETRY_S = 60.0
"""Time for which an operation on a store that does not answer is tried again, in seconds."""
_CONNECT_S = 5.0
"""Longest wait for a server to accept a connection when a run starts, in seconds."""
CHUNK_BYTES = 64 << 20
"""Largest part of a file that `send_folder` writes at once."""
_REFUSED_ERRNOS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_REFUSALS = re.compile(
    r"ACCESS_DENIED|INVALID_ACCESS_KEY|INVALID_CLIENT_TOKEN|SIGNATURE|NO_SUCH_BUCKET|HTTP status (401|403|507)|Quota"
)
"""Words of a store that refuses an operation, in Arrow's messages: another try would not help."""
_log = logging.getLogger(__name__)
_MANIFEST = "manifest.json"
_PAUSES_S = (0.1, 5.0)
"""First and longest pause between two tries; each pause doubles."""
Buffer = bytes | memoryview
T = TypeVar("T")


class IncompleteError(UserError):
    """A folder of the store lacks its manifest, or a part of one of its files."""


class Store(Protocol):
    """Files by name. Implementations are picklable and may be used from several threads."""

    def write(self, name: str, content: bytes, *, durable: bool = False) -> str:
        """Write a file whole and return its location. Readers never see a part of it. ``durable``: it survives a power failure.
        Raises UserError: the store is full, or refuses the keys. InfraError: the store does not answer."""
        ...

    def append(self, name: str, content: bytes) -> None:
        """Append to a file whose name ends in `LOG_SUFFIX`, and return at once where writing would take long. A crash may lose the
        last appended bytes. Raises as `write`, for this or an earlier call."""
        ...

    def read(self, location: str) -> bytes:
        """Content of a file. Raises FileNotFoundError: there is none. InfraError: the store does not answer."""
        ...

    def names(self, folder: str) -> list[str]:
        """Names of the files in ``folder`` (not in folders below it), ascending. Raises InfraError."""
        ...

    def remove(self, locations: Iterable[str]) -> None:
        """Delete files; a file that does not exist is passed over. Raises InfraError."""
        ...

    def missing(self, locations: Iterable[str]) -> set[str]:
        """Those of ``locations`` at which there is no file. Raises InfraError."""
        ...

    def describe(self, location: str) -> str:
        """``location`` for messages: without passwords."""
        ...


class RemoteStore(Store, Protocol):
    """A store for roles that share no folder. It also passes on data that is larger than a file should be."""

    def write_chunks(self, name: str, chunks: Iterable[Buffer]) -> str:
        """Write a list of byte strings and return its location. Each is written before the next is taken. The list need not outlive the
        process that writes it. Raises InfraError."""
        ...

    def read_chunks(self, location: str) -> Iterator[Buffer]:
        """The byte strings of `write_chunks`, one in memory at a time. Raises as `read`."""
        ...

    def remove_folder(self, name: str) -> None:
        """Delete what `write_chunks` or `send_folder` wrote, the manifest first. Raises InfraError."""
        ...

    def folders(self, folder: str) -> list[str]:
        """Names of the folders in ``folder``, ascending. Raises InfraError."""
        ...

    def destroy(self) -> None:
        """Delete all files."""
        ...


class FolderStore:
    """Files below ``folder``. Locations are absolute paths."""

    def __init__(self, folder: Path | str) -> None:
        self._folder = Path(folder).absolute()

    def write(self, name: str, content: bytes, *, durable: bool = False) -> str:
        path = self._folder / name
        with replacing(path, FREE_AND_RESUME) as partial, partial.open("wb") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        return str(path)

    def append(self, name: str, content: bytes) -> None:
        path = self._folder / name
        with writing(path), path.open("ab", buffering=0) as file:  # unbuffered: one write, which survives a kill
            if file.write(content) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def read(self, location: str) -> bytes:
        return (self._folder / location).read_bytes()

    def names(self, folder: str) -> list[str]:
        here = self._folder / folder
        if not here.is_dir():
            return []
        return sorted(f"{folder}/{path.name}" for path in here.iterdir() if path.is_file() and path.name[0] != ".")

    def remove(self, locations: Iterable[str]) -> None:
        for location in locations:
            (self._folder / location).unlink(missing_ok=True)

    def missing(self, locations: Iterable[str]) -> set[str]:
        return {location for location in locations if not (self._folder / location).exists()}

    def describe(self, location: str) -> str:
        return str(self._folder / location)


FILES = FolderStore(Path())
"""Reads locations of any `FolderStore`, which are absolute paths."""


class UrlStore:
    """Objects below a URL, such as ``s3://bucket/run``. Locations are names.

    The URL is one of `pyarrow.fs.FileSystem.from_uri`: s3, gs, hdfs, file; its query holds options such as ``region`` and
    ``endpoint_override``. Keys come from the environment, as with AWS's own tools; no message shows them.
    An object cannot be appended to: a log is a folder of numbered parts, which a thread writes.
    """

    def __init__(self, url: str, folder: str) -> None:
        """``folder``: folder below ``url``, which only this run uses."""
        self._url, self._folder = url, folder
        self._changed = threading.Condition()
        self._unwritten: dict[str, list[bytes]] = {}
        """Appended bytes by the name of the log."""
        self._num_parts: dict[str, int] = {}
        self._error: InfraError | UserError | None = None
        self._writer: threading.Thread | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return UrlStore, (self._url, self._folder)  # another process has a thread of its own

    def check(self) -> None:
        """Write, read, list and delete an object. Raises UserError: the URL is wrong, or the store refuses or does not answer."""
        from pyarrow.fs import FileSelector

        try:
            _check_endpoint(self._url)
            files, path = _files(self._url)
            files.create_dir(f"{path}/{self._folder}", recursive=True)  # and the bucket, if the URL allows that
            probe = f"{path}/{self._folder}/probe"
            with files.open_output_stream(probe) as stream:
                stream.write(b"stretto")
            with files.open_input_stream(probe) as stream:
                assert stream.read() == b"stretto"
            files.get_file_info(FileSelector(f"{path}/{self._folder}"))
            files.delete_file(probe)
        except (OSError, ValueError, NotImplementedError) as error:
            raise UserError(
                f"store: {self._url.partition('?')[0]}: {_reason(error)}; check the address, its options and your keys"
            ) from None

    def write(self, name: str, content: bytes, *, durable: bool = False) -> str:
        if name.endswith(LOG_SUFFIX):
            with self._changed:
                self._unwritten.pop(name, None)
                self._num_parts[name] = 1
            self.remove([name])
        self._put(self._part(name, 0) if name.endswith(LOG_SUFFIX) else name, content)
        return name

    def append(self, name: str, content: bytes) -> None:
        with self._changed:
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            self._unwritten.setdefault(name, []).append(content)
            if self._writer is None:
                self._writer = threading.Thread(target=self._write_logs, name="store", daemon=True)
                self._writer.start()
            self._changed.notify_all()

    def read(self, location: str) -> bytes:
        if not location.endswith(LOG_SUFFIX):
            return self._get(location)
        self.flush()
        parts = self._list(location)
        if not parts:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.describe(location))
        return b"".join(map(self._get, parts))

    def names(self, folder: str) -> list[str]:
        return self._list(folder)

    def folders(self, folder: str) -> list[str]:
        return self._list(folder)

    def remove(self, locations: Iterable[str]) -> None:
        for location in locations:
            self._again("delete", location, _delete_folder if location.endswith(LOG_SUFFIX) else _delete_file)

    def missing(self, locations: Iterable[str]) -> set[str]:
        return not_listed(self, locations)

    def write_chunks(self, name: str, chunks: Iterable[Buffer]) -> str:
        num = 0
        for chunk in chunks:
            self._put(f"{name}/{num:06d}", chunk)
            num += 1
        self._put(f"{name}/{_MANIFEST}", json.dumps(num).encode())
        return name

    def read_chunks(self, location: str) -> Iterator[Buffer]:
        for place in range(json.loads(self._get(f"{location}/{_MANIFEST}"))):
            yield self._get(f"{location}/{place:06d}")

    def remove_folder(self, name: str) -> None:
        self._again("delete", f"{name}/{_MANIFEST}", _delete_file)
        self._again("delete", name, _delete_folder)

    def destroy(self) -> None:
        files, path = _files(self._url)
        files.delete_dir(f"{path}/{self._folder}")

    def describe(self, location: str) -> str:
        parts = urlsplit(self._url)
        return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}/{self._folder}/{location}".rstrip("/")

    def flush(self) -> None:
        """Wait until everything that was appended here is written."""
        with self._changed:
            self._changed.wait_for(lambda: not self._unwritten or self._error is not None)

    def _write_logs(self) -> None:
        """Write appended bytes, as fast as the store takes them: what was appended meanwhile becomes one part."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._unwritten))
                name, contents = next(iter(self._unwritten.items()))
                num_written, number = len(contents), self._num_parts.get(name, 1)
                content = b"".join(contents)
            error: InfraError | UserError | None = None
            try:
                self._put(self._part(name, number), content)
            except UserError as problem:
                error = problem
            except Exception as problem:  # nothing else would see it
                error = InfraError(str(problem))
            with self._changed:
                if error is None and self._unwritten.get(name) is contents:  # else the log was begun anew
                    del contents[:num_written]
                    self._num_parts[name] = number + 1
                    if not contents:
                        del self._unwritten[name]
                self._error = error or self._error
                self._changed.notify_all()
                if error is not None:
                    self._changed.wait(_PAUSES_S[1])  # the next append comes sooner

    @staticmethod
    def _part(name: str, number: int) -> str:
        return f"{name}/{number:08d}"

    def _put(self, name: str, content: Buffer) -> None:
        def put(files: Any, path: str) -> None:
            try:
                stream = files.open_output_stream(path)
            except FileNotFoundError:  # a file system with real folders
                files.create_dir(path.rpartition("/")[0], recursive=True)
                stream = files.open_output_stream(path)
            with stream:
                stream.write(content)

        self._again("write", name, put)

    def _get(self, name: str) -> bytes:
        def get(files: Any, path: str) -> bytes:
            with files.open_input_stream(path) as stream:
                return bytes(stream.read())

        return self._again("read", name, get)

    def _list(self, folder: str) -> list[str]:
        from pyarrow.fs import FileSelector

        def list_(files: Any, path: str) -> list[str]:
            found = files.get_file_info(FileSelector(path, allow_not_found=True))
            return sorted(f"{folder}/{each.base_name}" for each in found)

        return self._again("list", folder, list_)

    def _again(self, what: str, name: str, work: Callable[[Any, str], T]) -> T:
        """Result of ``work`` on the file system and path; tried again for `RETRY_S`. Raises UserError: the store refuses. InfraError: it
        does not answer."""
        files, path = _files(self._url)
        pause_s, longest_s = _PAUSES_S
        end_s, is_told = time.monotonic() + RETRY_S, False
        while True:
            try:
                return work(files, f"{path}/{self._folder}/{name}")
            except FileNotFoundError:
                raise
            except OSError as error:
                problem = f"store: cannot {what} {self.describe(name)}"
                if error.errno in _REFUSED_ERRNOS or _REFUSALS.search(str(error)):
                    remedy = "make room or correct the keys, then continue with --resume"
                    raise UserError(f"{problem}: {_reason(error)}; {remedy}") from None
                if time.monotonic() + pause_s > end_s:
                    raise InfraError(f"{problem} for {RETRY_S:g} s: {_reason(error)}") from None
                if not is_told:
                    _log.warning("%s: %s; trying again for %g s", problem, _reason(error), RETRY_S)
                    is_told = True
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)


def _delete_file(files: Any, path: str) -> None:
    with suppress(FileNotFoundError):
        files.delete_file(path)


def _delete_folder(files: Any, path: str) -> None:
    with suppress(FileNotFoundError):
        files.delete_dir(path)


def _check_endpoint(url: str) -> None:
    """Raises OSError, ValueError: the server that ``url`` names in place of the provider's own does not answer. Arrow would try again
    for half a minute."""
    options = parse_qs(urlsplit(url).query)
    if not (named := options.get("endpoint_override")) or "proxy_options" in options:
        return
    scheme = options.get("scheme", ["https"])[0]
    address = urlsplit(named[0] if "://" in named[0] else f"{scheme}://{named[0]}")
    server = address.hostname or "", address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection(server, _CONNECT_S).close()
    except OSError as error:
        raise OSError(f"no server answers at {named[0]}: {error.strerror or error}") from None


@functools.cache
def _files(url: str) -> tuple[Any, str]:
    """Arrow's file system of ``url``, and the path in it."""
    from pyarrow.fs import FileSystem

    files, path = FileSystem.from_uri(url)
    return files, path.rstrip("/")


def _reason(error: Exception) -> str:
    """The store's own words, on one line."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].partition(". Detail:")[0]


def not_listed(store: Store, locations: Iterable[str]) -> set[str]:
    """`Store.missing` by one listing of each folder, where locations are names."""
    wanted = set(locations)
    return wanted - {name for folder in {each.rpartition("/")[0] for each in wanted} for name in store.names(folder)}


# Folders of files, for roles that share no disk


def send_folder(store: Store, folder: Path, name: str) -> None:
    """Write all files of ``folder`` to the store as the folder ``name``, which is complete when its manifest is. Memory for one
    chunk is needed. Raises as `Store.write`."""
    manifest = dict[str, int]()
    for number, path in enumerate(sorted(each for each in folder.rglob("*") if each.is_file())):
        manifest[path.relative_to(folder).as_posix()] = path.stat().st_size
        with path.open("rb") as file:
            for place, chunk in enumerate(iter(lambda file=file: file.read(CHUNK_BYTES), b"")):  # type: ignore[misc]
                store.write(f"{name}/{number:06d}-{place:06d}", chunk)
    store.write(f"{name}/{_MANIFEST}", json.dumps(manifest).encode())


def has_folder(store: Store, name: str) -> bool:
    """Whether `send_folder` has completed the folder ``name``."""
    return f"{name}/{_MANIFEST}" in store.names(name)


def complete_folders(store: RemoteStore, place: str) -> list[str]:
    """Names of the folders in ``place`` for which `has_folder` is true, in the order of `RemoteStore.folders`."""
    return [name for name in store.folders(place) if has_folder(store, name)]


def fetch_folder(store: Store, name: str, folder: Path) -> None:
    """Write the files of the store's folder ``name`` into ``folder``, which appears when it is complete.
    Raises IncompleteError: the store has not the whole folder. UserError: the disk is full. InfraError: the store does not answer."""

    def read(part: str) -> bytes:
        try:
            return store.read(f"{name}/{part}")
        except FileNotFoundError:
            problem = f"store: {store.describe(name)}: incomplete: {part} is missing"
            raise IncompleteError(f"{problem}; continue with --resume") from None

    manifest = json.loads(read(_MANIFEST))
    with replacing(folder) as partial:
        for number, (relative, num_bytes) in enumerate(manifest.items()):
            path = partial / relative
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                for place in range(-(-num_bytes // CHUNK_BYTES)):
                    file.write(read(f"{number:06d}-{place:06d}"))


def local_folder(run: str) -> Path:
    """This machine's folder for the files of a run whose roles share none. ``run``: the run's id."""
    folder = _local_folder(run)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def remove_local_folder(run: str) -> None:
    """Delete `local_folder`, if there is one. Processes may do so at the same time."""
    shutil.rmtree(_local_folder(run), ignore_errors=True)


def _local_folder(run: str) -> Path:
    return Path(tempfile.gettempdir()) / f"stretto-{run}"
