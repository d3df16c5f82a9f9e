"""Hand-over of weights from a trainer to an engine by file, S3, Ray and gloo: seconds, memory, and the pause of the engine.

    python -m bench.handover [--gb 1 4 7] [--channels file s3 ray gloo]

A process publishes ``--gb`` of fp32 tensors; another one fetches them and copies them into tensors of the same shapes, as an engine does
between two steps: that copy is the pause. On a machine that other jobs use, the time for which a processor computes in the pause says
more. Memory is the growth of each process's resident memory (without pages of shared files and of Ray's object store) at its peak, from
before the publication to after the fetch, less the new version in the receiver, which it must hold (a file is mapped). To fit on a small
machine, the tensors of the sender (not with ``file``), and those that the receiver replaces, lie in 1 GB of memory, again and again.
Files, objects and Ray's object store hold one more version, in memory that is not counted. A size for which the machine has too little
memory is not measured, and the table says so. The S3 server runs on this machine and keeps objects in its memory: its seconds say little
about a real one. Fails (exit code 1) if a pause exceeds 0.2 s + bytes / (5 GB/s), or the extra memory of Ray or gloo 0.5 GB.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import torch

from bench.common.measure import bench_parser, finish, table
from bench.common.s3 import s3_server
from stretto.base.track import wide_console
from stretto.learning.channel import Channel, ChunkChannel, FolderChannel, GlooChannel
from stretto.runtime.store import RemoteStore, UrlStore

_TENSOR_BYTES = 24 << 20
_POOL_BYTES = 1 << 30
_OWN_BYTES = int(2e9)
"""Memory of interpreters, torch and Ray's processes, roughly."""
_MOST_EXTRA_BYTES = 0.5e9


def state(num_bytes: int, pool_bytes: int = _POOL_BYTES) -> dict[str, torch.Tensor]:
    """Tensors of ``num_bytes`` in all, in ``pool_bytes`` of memory."""
    num, shape = num_bytes // _TENSOR_BYTES, (_TENSOR_BYTES // 4096, 1024)
    pool = [torch.full(shape, float(number)) for number in range(min(num, pool_bytes // _TENSOR_BYTES))]
    return {f"block.{number}": pool[number % len(pool)] for number in range(num)}


def needed_bytes(kind: str, num_bytes: int) -> int:
    """Memory that the hand-over takes: that of both processes, and of the place between them."""
    between = 0 if kind == "gloo" else num_bytes
    return num_bytes + between + 2 * min(num_bytes, _POOL_BYTES) + _OWN_BYTES


@dataclass(slots=True)
class Peak:
    """Growth of this process's memory in a block; read it afterwards."""

    num_bytes: int = 0


@contextmanager
def watched() -> Iterator[Peak]:
    """Context that samples every 5 ms the resident memory that no file and no shared memory backs."""
    gc.collect()
    process, done = psutil.Process(), threading.Event()

    def anonymous_bytes() -> int:
        memory = process.memory_info()
        return memory.rss - memory.shared

    peak, first = Peak(), anonymous_bytes()

    def watch() -> None:
        while not done.wait(0.005):
            peak.num_bytes = max(peak.num_bytes, anonymous_bytes() - first)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


@contextmanager
def channel(kind: str, place: str) -> Iterator[Channel]:
    """The channel ``kind`` at ``place``: a folder, an address of S3, of a Ray cluster, or of this machine."""
    if kind in ("file", "gloo"):
        yield FolderChannel(Path(place)) if kind == "file" else GlooChannel(place)
        return
    store: RemoteStore = UrlStore(place, "handover") if kind == "s3" else ray_store(place)
    yield ChunkChannel(store)


def ray_store(address: str) -> RemoteStore:
    import ray

    from stretto.runtime.ray_store import open_ray_store

    ray.init(address=address, logging_level="error", log_to_driver=False)
    return open_ray_store("handover", copies=1)


def send(kind: str, place: str, num_bytes: int, said: Connection) -> None:
    """Publish, say the version and the seconds, and after an answer the peak of memory: chunks in Ray live as long as their sender, and
    gloo sends only when it is asked."""
    with channel(kind, place) as made:
        weights = state(num_bytes, num_bytes if kind == "file" else _POOL_BYTES)  # safetensors refuses shared memory
        with watched() as peak:
            started_s = time.perf_counter()
            version = made.publish(1, weights)
            said.send((version, time.perf_counter() - started_s))
            said.recv()
        said.send(peak.num_bytes)


def receive(kind: str, place: str, num_bytes: int, said: Connection) -> None:
    """Say the seconds of fetching, of the pause, and of a processor in the pause, and the peak of memory above the weights."""
    with channel(kind, place) as made:
        served = state(num_bytes)
        version = said.recv()
        with watched() as peak:
            started_s = time.perf_counter()
            fetched = made.fetch(version)
            fetched_s, before_s = time.perf_counter(), time.thread_time()
            for name, tensor in served.items():
                tensor.copy_(fetched[name])
            paused_s, computed_s = time.perf_counter(), time.thread_time() - before_s
        name = next(reversed(served))
        assert torch.equal(served[name], fetched[name])
        own = 0 if kind == "file" else num_bytes  # a file is mapped
        said.send((fetched_s - started_s, paused_s - fetched_s, computed_s, peak.num_bytes - own))


def measured(kind: str, place: str, num_bytes: int) -> tuple[float, float, float, float, int, int]:
    """Seconds of publishing, fetching, pause, and of a processor in the pause; extra memory of sender and receiver."""
    processes, ends = [], []
    context = multiprocessing.get_context("forkserver")  # whose processes need not import torch again
    context.set_forkserver_preload(["stretto.learning.channel", "bench.common.measure"])
    for work in (send, receive):
        end, other = context.Pipe()
        processes.append(context.Process(target=work, args=(kind, place, num_bytes, other)))
        processes[-1].start()
        other.close()  # so that the death of the process is an EOFError here
        ends.append(end)
    sender, receiver = ends
    version, published_s = sender.recv()
    receiver.send(version)
    fetched_s, paused_s, computed_s, receiver_bytes = receiver.recv()
    sender.send(None)
    sender_bytes = sender.recv()
    for process in processes:
        process.join()
    return published_s, fetched_s, paused_s, computed_s, sender_bytes, receiver_bytes


@contextmanager
def place_of(kind: str) -> Iterator[str]:
    """Where weights of ``kind`` pass."""
    if kind == "file":
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            yield folder
    elif kind == "s3":
        with s3_server() as url:
            yield url
    elif kind == "gloo":
        yield "127.0.0.1"
    else:
        import ray

        os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
        made = ray.init(address="local", include_dashboard=False, logging_level="error", object_store_memory=9 << 30)
        yield made.address_info["gcs_address"]
        ray.shutdown()


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--gb", type=float, nargs="+", default=[1.0])
    parser.add_argument("--channels", nargs="+", choices=("file", "s3", "ray", "gloo"), default=["file", "ray", "gloo"])
    options = parser.parse_args()
    seconds_of = ("publish s", "fetch s", "pause s", "computing")
    made = table("Hand-over of weights", "GB", "channel", *seconds_of, "aim", "extra GB: sender, receiver", "aim")
    failures = list[str]()
    for kind in options.channels:
        with place_of(kind) as place:
            for size in options.gb:
                num_bytes = int(size * 1e9) // _TENSOR_BYTES * _TENSOR_BYTES
                gigabytes = f"{num_bytes / 1e9:.2f}"
                needed, free = needed_bytes(kind, num_bytes), psutil.virtual_memory().available
                if needed > free:
                    made.add_row(gigabytes, kind, f"not run: needs {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free")
                    continue
                *seconds, sender, receiver = measured(kind, place, num_bytes)
                most_s = 0.2 + num_bytes / 5e9
                has_aim = kind in ("ray", "gloo")
                if seconds[2] > most_s or (has_aim and max(sender, receiver) > _MOST_EXTRA_BYTES):
                    failures.append(
                        f"{kind}, {gigabytes} GB: a pause of {seconds[2]:.2f} s, or extra memory, over its aim"
                    )
                extra = f"{sender / 1e9:.2f}, {receiver / 1e9:.2f}"
                times = [f"{each:.2f}" for each in seconds] + [f"≤ {most_s:.2f}"]
                row = (gigabytes, kind, *times, extra, "≤ 0.5" if has_aim else "")
                print(*row, sep="  ", file=sys.stderr, flush=True)  # a run that is stopped has these
                made.add_row(*row)
    wide_console().print(made)
    finish(failures)


if __name__ == "__main__":
    main()
