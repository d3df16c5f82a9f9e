"""A store in the memory of a Ray cluster, for runs without a shared disk and without an object store.

Its actors belong to the cluster, not to the driver: a run that was killed finds its files when it resumes on the same cluster.
Each of ``copies`` actors holds every file, on different nodes where there are several. A node that dies takes its copy along.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import ray
from ray.exceptions import ObjectStoreFullError, OutOfDiskError, RayError

from stretto.base.errors import InfraError, UserError
from stretto.runtime.store import RETRY_S, Buffer, not_listed

_NAMESPACE = "stretto"
_PAUSE_S = 0.5


class Shelf:
    """Actor with one copy of all files."""

    def __init__(self) -> None:
        self._files: dict[str, list[Any]] = {}

    def write(self, name: str, content: Any) -> None:
        self._files[name] = [content]

    def append(self, name: str, content: bytes) -> None:
        self._files.setdefault(name, []).append(content)

    def read(self, name: str) -> list[Any] | None:
        return self._files.get(name)

    def names(self, folder: str) -> list[str]:
        return sorted(name for name in self._files if name.rpartition("/")[0] == folder)

    def folders(self, folder: str) -> list[str]:
        below = f"{folder}/"
        parts = (name.removeprefix(below).split("/") for name in self._files if name.startswith(below))
        return sorted({below + first for first, *rest in parts if rest})

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            self._files.pop(name, None)


class RayStore:
    """Files in actors of a cluster. Locations are names. See `open_ray_store`."""

    def __init__(self, shelves: Sequence[Any]) -> None:
        self._shelves = tuple(shelves)

    def write(self, name: str, content: bytes, *, durable: bool = False) -> str:
        self._on_all("write", name, content)
        return name

    def append(self, name: str, content: bytes) -> None:
        with _room(f"append to {name}"):
            for shelf in self._shelves:  # calls of one process to one actor keep their order
                shelf.append.remote(name, content)

    def read(self, location: str) -> bytes:
        found = self._first("read", location)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.describe(location))
        return b"".join(found)

    def names(self, folder: str) -> list[str]:
        """Files that any copy has: one that was restarted has fewer."""
        return sorted({name for names in self._on_all("names", folder) for name in names})

    def remove(self, locations: Iterable[str]) -> None:
        self._on_all("remove", list(locations))

    def missing(self, locations: Iterable[str]) -> set[str]:
        return not_listed(self, locations)

    def describe(self, location: str) -> str:
        return f"ray:{location}"

    def write_chunks(self, name: str, chunks: Iterable[Buffer]) -> str:
        """The chunks lie in Ray's object store on the writer's node, and are lost with the writer; the shelves keep references."""
        with _room(f"write {name}"):
            refs = [
                ray.put(np.frombuffer(chunk, np.uint8)) for chunk in chunks
            ]  # an array is read in place, bytes are copied
        self._on_all("write", name, refs)
        return name

    def read_chunks(self, location: str) -> Iterator[Buffer]:
        found = self._first("read", location)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.describe(location))
        for ref in found[0]:
            try:
                yield memoryview(_result(ref, RETRY_S))
            except (RayError, TimeoutError) as error:
                raise InfraError(f"store: ray: read {location}: {_reason(error)}") from None

    def remove_folder(self, name: str) -> None:
        self.remove([name, *self.names(name)])

    def folders(self, folder: str) -> list[str]:
        return sorted({name for names in self._on_all("folders", folder) for name in names})

    def destroy(self) -> None:
        for shelf in self._shelves:
            ray.kill(shelf)

    def _first(self, method: str, name: str) -> Any:
        """The first result that is not None, over the copies."""
        return next((each for each in self._on_all(method, name) if each is not None), None)

    def _on_all(self, method: str, *args: Any) -> list[Any]:
        """Results of the copies that answer. Raises InfraError: none answers for `RETRY_S`."""
        end_s, problem = time.monotonic() + RETRY_S, ""
        while True:
            results = list[Any]()
            with _room(f"{method} {args[0]}"):
                refs = [getattr(shelf, method).remote(*args) for shelf in self._shelves]
            for ref in refs:
                try:
                    results.append(_result(ref, max(0.1, end_s - time.monotonic())))
                except (RayError, TimeoutError) as error:
                    problem = _reason(error)
            if results:
                return results
            if time.monotonic() > end_s:
                raise InfraError(f"store: ray: {method} {args[0]}: no copy has answered for {RETRY_S:g} s: {problem}")
            time.sleep(_PAUSE_S)


@contextmanager
def _room(what: str) -> Iterator[None]:
    """Context for passing data to Ray. Raises UserError: this node has no room for it, in memory or on the disk to which Ray spills."""
    try:
        yield
    except (ObjectStoreFullError, OutOfDiskError) as error:
        remedy = "start Ray with a larger --object-store-memory, or free some disk space, then continue with --resume"
        raise UserError(f"store: ray: cannot {what}: {_reason(error)}; {remedy}") from error


def _result(ref: Any, timeout_s: float) -> Any:
    """Value of ``ref``. Unlike `ray.get`, it may be called in a thread of an async actor."""
    return ref.future().result(timeout_s)


def _reason(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def check_copies(copies: int) -> None:
    """Raises UserError: the cluster has fewer nodes than ``copies``."""
    num_nodes = sum(node["Alive"] for node in ray.nodes())
    if num_nodes < copies:
        raise UserError(f"failures.copies: {copies}, and the cluster has {num_nodes} nodes; lower it, or add nodes")


def open_ray_store(run: str, copies: int) -> RayStore:
    """The store of the run with id ``run``, on the cluster to which this process is connected. It is created if it does not exist.
    Raises UserError: the cluster has fewer nodes than ``copies``."""
    check_copies(copies)
    options: Callable[..., Any] = ray.remote(Shelf).options
    return RayStore(
        [
            options(
                name=f"store-{run}-{number}",
                namespace=_NAMESPACE,
                get_if_exists=True,
                lifetime="detached",
                max_restarts=-1,
                num_cpus=0,
                scheduling_strategy="SPREAD",
            ).remote()
            for number in range(copies)
        ]
    )
