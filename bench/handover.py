"""Hand-over of weights from a trainer to an engine by file, S3, Ray and gloo: seconds, memory, and the pause of the engine.

    python -m bench.handover [--gb 1 4 7] [--channels file s3 ray gloo]

A process publishes ``--gb`` of fp32 tensors; another one fetches them and copies them into tensors of the same shapes, as an engine does
between two steps: that copy is the pause. Memory is the growth of each process's resident memory (without pages of shared files and
of Ray's object store) at its peak, from before the publication to after the fetch, less the new version in the receiver, which it must
hold (a file is mapped). To fit on a small machine, the tensors of the sender (not with ``file``), and those that the receiver replaces,
lie in 1 GB of memory, again and again. Files, objects and Ray's object store hold one more version, in memory that is not counted. A
size for which the machine has too little memory is not measured, and the table says so. The S3 server runs on this machine and keeps
objects in its memory: its seconds say little about a real one. Fails (exit code 1) if a pause exceeds 0.2 s + bytes / (5 GB/s), or the
extra memory of Ray or gloo 0.5 GB.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch

from bench.common.measure import bench_parser, table, wide_console
from bench.common.memory import watched
from bench.common.s3 import s3_server
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


def send(kind: str, place: str, num_bytes: int, said: Any) -> None:
    """Publish, write a line with version and seconds, and one with the peak of memory after the end of the input: chunks in Ray live as
    long as their sender, and gloo sends only when it is asked."""
    with channel(kind, place) as made:
        weights = state(num_bytes, num_bytes if kind == "file" else _POOL_BYTES)  # safetensors refuses shared memory
        with watched() as peak:
            started_s = time.perf_counter()
            version = made.publish(1, weights)
            seconds = time.perf_counter() - started_s
            said.write(pickle.dumps((version, seconds)).hex() + "\n")
            said.flush()
            sys.stdin.read()
        said.write(pickle.dumps(peak.num_bytes).hex() + "\n")


def receive(kind: str, place: str, num_bytes: int, version: Any) -> tuple[float, float, int]:
    """Seconds of fetching, seconds of the pause, and peak of memory above the weights."""
    with channel(kind, place) as made:
        served = state(num_bytes)
        with watched() as peak:
            started_s = time.perf_counter()
            fetched = made.fetch(version)
            fetched_s = time.perf_counter()
            for name, tensor in served.items():
                tensor.copy_(fetched[name])
            paused_s = time.perf_counter()
        name = next(reversed(served))
        assert torch.equal(served[name], fetched[name])
        own = 0 if kind == "file" else num_bytes  # a file is mapped
    return fetched_s - started_s, paused_s - fetched_s, peak.num_bytes - own


def measured(kind: str, place: str, num_bytes: int) -> tuple[float, float, float, int, int]:
    """Seconds of publishing, fetching and pause; extra memory of sender and receiver."""
    command = [sys.executable, "-m", "bench.handover", "--part"]
    arguments = [kind, place, str(num_bytes)]
    with subprocess.Popen(
        [*command, "send", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as sender:
        assert sender.stdout is not None and sender.stdin is not None
        version, published_s = pickle.loads(bytes.fromhex(sender.stdout.readline().strip()))
        given = pickle.dumps(version).hex()
        done = subprocess.run([*command, "receive", *arguments, given], stdout=subprocess.PIPE, text=True, check=True)
        sender.stdin.close()
        sender_bytes = pickle.loads(bytes.fromhex(sender.stdout.readline().strip()))
    fetched_s, paused_s, receiver_bytes = pickle.loads(bytes.fromhex(done.stdout.splitlines()[-1]))
    return published_s, fetched_s, paused_s, sender_bytes, receiver_bytes


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


def part(name: str, kind: str, place: str, num_bytes: str, *version: str) -> None:
    if name == "send":
        send(kind, place, int(num_bytes), sys.stdout)
    else:
        found = receive(kind, place, int(num_bytes), pickle.loads(bytes.fromhex(version[0])))
        print("\n" + pickle.dumps(found).hex())


def main() -> None:
    if sys.argv[1:2] == ["--part"]:
        part(*sys.argv[2:])
        return
    parser = bench_parser(__doc__)
    parser.add_argument("--gb", type=float, nargs="+", default=[1.0])
    parser.add_argument("--channels", nargs="+", choices=("file", "s3", "ray", "gloo"), default=["file", "ray", "gloo"])
    options = parser.parse_args()
    made = table(
        "Hand-over of weights",
        "GB",
        "channel",
        "publish s",
        "fetch s",
        "pause s",
        "aim",
        "extra GB: sender, receiver",
        "aim",
    )
    is_missed = False
    for kind in options.channels:
        with place_of(kind) as place:
            for size in options.gb:
                num_bytes = int(size * 1e9) // _TENSOR_BYTES * _TENSOR_BYTES
                gigabytes = f"{num_bytes / 1e9:.2f}"
                needed, free = needed_bytes(kind, num_bytes), psutil.virtual_memory().available
                if needed > free:
                    made.add_row(gigabytes, kind, f"not run: needs {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free")
                    continue
                published_s, fetched_s, paused_s, sender, receiver = measured(kind, place, num_bytes)
                most_s = 0.2 + num_bytes / 5e9
                has_aim = kind in ("ray", "gloo")
                is_missed |= paused_s > most_s or (has_aim and max(sender, receiver) > _MOST_EXTRA_BYTES)
                extra = f"{sender / 1e9:.2f}, {receiver / 1e9:.2f}"
                times = (f"{published_s:.2f}", f"{fetched_s:.2f}", f"{paused_s:.2f}", f"≤ {most_s:.2f}")
                made.add_row(gigabytes, kind, *times, extra, "≤ 0.5" if has_aim else "")
    wide_console().print(made)
    sys.exit(is_missed)


if __name__ == "__main__":
    main()
