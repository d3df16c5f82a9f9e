"""Channels: how published weights reach the engines.

`FolderChannel` writes files into the run folder, which all engines see. `ChunkChannel` sends chunks through a store, for engines on
machines that share no folder; sender and receiver need memory for one chunk beside the weights. `GlooChannel` sends them from the
memory of the trainer's process to the engine's, without a store in between.
"""

from __future__ import annotations

import secrets
import socket
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import msgspec
import torch
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # torch names no exports

from stretto.base.errors import InfraError, UserError, one_line
from stretto.base.trajectory import WeightVersion
from stretto.engine.ranks import gloo_group
from stretto.engine.runner import state_checksum
from stretto.learning.recipe import WEIGHTS, ChannelKind
from stretto.learning.weights import check_fetched, fetch, publish, retire, unpack_state
from stretto.runtime.store import Buffer, FolderStore, RemoteStore, Store

CHUNK_BYTES = 256 << 20
"""Size of a chunk."""
BUCKET_BYTES = 64 << 20
"""Largest number of bytes that `GlooChannel` sends at once."""
WAIT_S = 60.0
"""Longest wait of one end of a `GlooChannel` for the other: less than the time in which an engine must load a version."""
_POLL_S = 0.02
"""Interval at which the trainer's process looks for requests."""
_ASKED, _LAYOUT = "asked", "layout"
"""Keys in the trainer's key-value store: the queue of requests, and the answer to one."""


class Channel(Protocol):
    """The trainer publishes and retires versions of the weights, engines fetch them. Picklable."""

    def publish(self, number: int, state: Mapping[str, Tensor]) -> WeightVersion:
        """Make ``state`` available as version ``number``. The channel may keep its tensors, so they must not change any more.
        Raises UserError: the disk is full. InfraError: the store does not answer."""
        ...

    def fetch(self, version: WeightVersion) -> dict[str, Tensor]:
        """The tensors of ``version``, verified by the checksum and dequantised.
        Raises UserError: it is missing or damaged. InfraError: the store, or the trainer's process, does not answer."""
        ...

    def retire(self, keep: int) -> None:
        """Delete all but the ``keep`` newest versions."""
        ...


class FolderChannel:
    """Versions are files in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def publish(self, number: int, state: Mapping[str, Tensor]) -> WeightVersion:
        return publish(self._folder, number, state)

    def fetch(self, version: WeightVersion) -> dict[str, Tensor]:
        return fetch(version)

    def retire(self, keep: int) -> None:
        retire(self._folder, keep)


class _Layout(msgspec.Struct, array_like=True):
    """A tensor of a version. The bytes of all tensors follow each other without gaps, in this order."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class ChunkChannel:
    """Versions are chunks in ``store``. The first chunk describes the tensors."""

    def __init__(self, store: RemoteStore, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._store, self._chunk_bytes = store, chunk_bytes
        self._published: deque[str] = deque()

    def publish(self, number: int, state: Mapping[str, Tensor]) -> WeightVersion:
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
        checksum = state_checksum(tensors)
        name = f"{WEIGHTS}/{number:07d}-{checksum[:12]}"
        location = self._store.write_chunks(name, _chunks(tensors, self._chunk_bytes))
        if location not in self._published:
            self._published.append(location)
        return WeightVersion(number, location, checksum, sum(tensor.nbytes for tensor in tensors.values()))

    def fetch(self, version: WeightVersion) -> dict[str, Tensor]:
        try:
            state = _joined(self._store.read_chunks(version.location))
        except FileNotFoundError as error:
            where = self._store.describe(version.location)
            raise UserError(
                f"{where}: no such weights: {error}; publish the version again, or keep more of them"
            ) from None
        check_fetched(state, version, self._store.describe(version.location))
        return unpack_state(state)

    def retire(self, keep: int) -> None:
        while len(self._published) > keep:
            self._store.remove_folder(self._published.popleft())


class GlooChannel:
    """Versions stay in the memory of the trainer's process, which sends them to each engine that asks.

    Engines start, end and restart at any time, so no group of processes lasts: for each request, trainer and engine join a new group
    of two. A process that ends closes its connections, and the other end's transfer fails at once.
    """

    def __init__(self, host: str = "127.0.0.1", wait_s: float = WAIT_S) -> None:
        """``host``: address of this machine, which the engines' machines reach. ``wait_s``: longest wait for the other end, for each
        bucket. The end of a process is noticed at once, that of a machine only after this time."""
        self._host, self._wait_s = host, wait_s
        self._sender: _Sender | None = None

    def publish(self, number: int, state: Mapping[str, Tensor]) -> WeightVersion:
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
        checksum, num_bytes = state_checksum(tensors), sum(tensor.nbytes for tensor in tensors.values())
        if self._sender is None:
            self._sender = _Sender(self._host, self._wait_s)
            weakref.finalize(self, self._sender.close)  # also at the end of the interpreter
        self._sender.held[number] = tensors
        return WeightVersion(number, f"gloo://{self._host}:{self._sender.port}/{number}", checksum, num_bytes)

    def fetch(self, version: WeightVersion) -> dict[str, Tensor]:
        address = urlsplit(version.location)
        assert address.hostname is not None and address.port is not None, version.location
        try:
            state = _receive(address.hostname, address.port, version.number, self._wait_s)
        except (OSError, RuntimeError) as error:  # gloo and its key-value store raise RuntimeError
            raise InfraError(f"{version.location}: cannot be fetched: {one_line(error, 200)}") from None
        check_fetched(state, version, version.location)
        return unpack_state(state)

    def retire(self, keep: int) -> None:
        """Drop all but the newest version, whatever ``keep`` is, because each takes as much memory as the network. A transfer that has
        begun still ends. A request that comes too late fails with InfraError; newer weights have been published then."""
        if self._sender is not None:
            for number in list(self._sender.held)[:-1]:
                del self._sender.held[number]


def open_channel(kind: ChannelKind, store: Store, run: Path, host: str = "127.0.0.1") -> Channel:
    """The channel of a run. With the kind ``store``: files in the folder ``run``, or chunks in a ``store`` without a shared folder.
    ``host``: address of this machine, for the trainer's end of ``gloo``."""
    if kind == "gloo":
        return GlooChannel(host)
    return FolderChannel(run / WEIGHTS) if isinstance(store, FolderStore) else ChunkChannel(store)  # type: ignore[arg-type]


class _Sender:
    """The trainer's end of a `GlooChannel`: a key-value store, and a thread that answers the requests in it."""

    def __init__(self, host: str, wait_s: float) -> None:
        self.held: dict[int, Mapping[str, Tensor]] = {}
        """Tensors by version."""
        self._host, self._wait_s = host, wait_s
        listener = socket.create_server((host, 0))  # torch's own one would listen on every address of the machine
        self.port = int(listener.getsockname()[1])
        self._store = TCPStore(
            host, self.port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="weights", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closed.set()
        if threading.current_thread() is not self._thread:  # in which the last reference may have been dropped
            self._thread.join()

    def _serve(self) -> None:
        while not self._is_closed.wait(_POLL_S):
            while self._store.queue_len(_ASKED):
                request, number = self._store.queue_pop(_ASKED).decode().split()
                threading.Thread(
                    target=self._send,
                    args=(
                        request,
                        self.held.get(int(number)),
                    ),  # no variable, which would keep an old version in memory
                    name=f"weights-{request}",
                    daemon=True,
                ).start()

    def _send(self, request: str, tensors: Mapping[str, Tensor] | None) -> None:
        """Answer ``request``. ``tensors`` None: the version is not held any more."""
        with suppress(RuntimeError):  # the engine has ended, or reports the error
            store = PrefixStore(request, _connected(self._host, self.port, self._wait_s))
            store.set(_LAYOUT, "" if tensors is None else _encoded(tensors).hex())
            if tensors is None:
                return
            pair = gloo_group(store, 0, 2, self._host, self._wait_s)
            for bucket in _buckets(tensors):
                pair.send([bucket[0] if len(bucket) == 1 else torch.cat(bucket)], 1, 0).wait()
            pair.recv([torch.empty(1)], 1, 0).wait()  # so that this end does not close the connection earlier


def _receive(host: str, port: int, number: int, wait_s: float) -> dict[str, Tensor]:
    """Version ``number`` of the trainer at the address. Raises RuntimeError, OSError: it has not the version, or does not answer."""
    with socket.create_connection((host, port), wait_s) as connection:  # fails at once where nothing listens
        own_host = connection.getsockname()[0]
    request, requests = secrets.token_hex(8), _connected(host, port, wait_s)
    requests.queue_push(_ASKED, f"{request} {number}")
    store = PrefixStore(request, requests)
    if not (layouts := store.get(_LAYOUT)):
        raise InfraError("the trainer has a newer version")
    store.delete_key(_LAYOUT)
    state = _empty(bytes.fromhex(layouts.decode()))
    pair = gloo_group(store, 1, 2, own_host, wait_s)
    for bucket in _buckets(state):
        sizes = [len(piece) for piece in bucket]
        flat = bucket[0] if len(bucket) == 1 else torch.empty(sum(sizes), dtype=torch.uint8)
        pair.recv([flat], 0, 0).wait()
        if len(bucket) > 1:
            for piece, part in zip(bucket, flat.split(sizes), strict=True):
                piece.copy_(part)
    pair.send([torch.empty(1)], 0, 0).wait()
    return state


def _connected(host: str, port: int, wait_s: float) -> TCPStore:
    """A connection to the key-value store at the address. A wait in one connection blocks its other users."""
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=wait_s))


def _buckets(tensors: Mapping[str, Tensor]) -> Iterator[list[Tensor]]:
    """Views of the bytes of ``tensors``, in order, in lists of at most `BUCKET_BYTES`. Both ends compute the same ones."""
    bucket: list[Tensor] = []
    num = 0
    for tensor in tensors.values():
        for piece in tensor.reshape(-1).view(torch.uint8).split(BUCKET_BYTES):
            if num + len(piece) > BUCKET_BYTES:
                yield bucket
                bucket, num = [], 0
            bucket.append(piece)
            num += len(piece)
    if num:
        yield bucket


def _chunks(tensors: Mapping[str, Tensor], chunk_bytes: int) -> Iterator[Buffer]:
    """A description of ``tensors``, then their bytes in chunks. All chunks use the same memory, so each must be written before the
    next is taken."""
    yield _encoded(tensors)
    num_left = sum(each.nbytes for each in tensors.values())
    chunk, num = memoryview(bytearray(min(chunk_bytes, num_left))), 0
    for tensor in tensors.values():
        content = tensor.reshape(-1).view(torch.uint8).numpy().data
        while len(content):
            part = content[: len(chunk) - num]
            chunk[num : num + len(part)] = part
            num, content, num_left = num + len(part), content[len(part) :], num_left - len(part)
            if num == len(chunk) or not num_left:
                yield chunk[:num]
                num = 0


def _joined(chunks: Iterable[Buffer]) -> dict[str, Tensor]:
    """The tensors of `_chunks`, in memory of their own."""
    chunks = iter(chunks)
    state = _empty(next(chunks))
    rest = memoryview(b"")
    for tensor in state.values():
        content = tensor.reshape(-1).view(torch.uint8).numpy().data
        while len(content):
            rest = rest if len(rest) else memoryview(next(chunks))
            num = min(len(rest), len(content))
            content[:num] = rest[:num]
            rest, content = rest[num:], content[num:]
    return state


def _encoded(tensors: Mapping[str, Tensor]) -> bytes:
    """Description of ``tensors`` for `_empty`."""
    layouts = [
        _Layout(name, str(each.dtype).removeprefix("torch."), tuple(each.shape)) for name, each in tensors.items()
    ]
    return msgspec.msgpack.encode(layouts)


def _empty(layouts: Buffer) -> dict[str, Tensor]:
    """Tensors as `_encoded` describes them, without values."""
    decoded = msgspec.msgpack.decode(layouts, type=list[_Layout])
    return {each.name: torch.empty(each.shape, dtype=getattr(torch, each.dtype)) for each in decoded}
