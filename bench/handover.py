"""Hand-over of weights from a trainer to an engine by file, S3 and Ray: seconds, memory, and the pause of the engine.

    python -m bench.handover [--gb 1] [--channels file s3 ray]

A process publishes ``--gb`` of fp32 tensors; another one fetches them and copies them into tensors of the same shapes, as an engine does
between two steps: that copy is the pause. Memory is the growth of each process's resident memory (without pages of shared files and
of Ray's object store) at its peak, less the weights that it must hold: one copy in the sender, two in the receiver (the new version,
and the one that it replaces). The S3 server runs on this machine and keeps objects in its memory: its seconds say little about a
real one. Fails (exit code 1) if a pause exceeds 0.2 s + bytes / (5 GB/s), or Ray's extra memory 0.5 GB.
"""

from __future__ import annotations

import argparse
import gc
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.common.measure import table, wide_console
from bench.common.s3 import s3_server
from stretto.learning.channel import Channel, ChunkChannel, FolderChannel
from stretto.runtime.store import RemoteStore, UrlStore

_TENSOR_BYTES = 64 << 20


def anonymous_bytes() -> int:
    """Resident memory of this process that no file and no shared memory backs."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("this kernel does not tell")


@dataclass(slots=True)
class Peak:
    """Growth of memory in a block; read it afterwards."""

    num_bytes: int = 0


@contextmanager
def watched() -> Iterator[Peak]:
    """Context that samples memory every 5 ms."""
    gc.collect()
    peak, first, done = Peak(), anonymous_bytes(), threading.Event()

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


def state(num_bytes: int) -> dict[str, torch.Tensor]:
    shape = (_TENSOR_BYTES // 4096, 1024)
    return {f"block.{number}": torch.full(shape, float(number)) for number in range(num_bytes // _TENSOR_BYTES)}


@contextmanager
def channel(kind: str, place: str) -> Iterator[Channel]:
    """The channel ``kind`` at ``place``: a folder, an address of S3, or of a Ray cluster."""
    if kind == "file":
        yield FolderChannel(Path(place))
        return
    store: RemoteStore = UrlStore(place, "handover") if kind == "s3" else ray_store(place)
    yield ChunkChannel(store)


def ray_store(address: str) -> RemoteStore:
    import ray

    from stretto.runtime.ray_store import open_ray_store

    ray.init(address=address, logging_level="error", log_to_driver=False)
    return open_ray_store("handover", copies=1)


def send(kind: str, place: str, num_bytes: int, said: Any) -> None:
    """Publish, write a line with the version and the figures, and wait for the end of the input: a sender's chunks live in Ray."""
    with channel(kind, place) as made:
        weights = state(num_bytes)
        with watched() as peak:
            started_s = time.perf_counter()
            version = made.publish(1, weights)
            seconds = time.perf_counter() - started_s
        said.write(pickle.dumps((version, seconds, peak.num_bytes)).hex() + "\n")
        said.flush()
        sys.stdin.read()


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
        assert float(served[next(reversed(served))][0, 0]) == len(served) - 1
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
        line = sender.stdout.readline().strip()
        version, published_s, sender_bytes = pickle.loads(bytes.fromhex(line))
        given = pickle.dumps(version).hex()
        done = subprocess.run([*command, "receive", *arguments, given], stdout=subprocess.PIPE, text=True, check=True)
        sender.stdin.close()
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, nargs="+", default=[1.0])
    parser.add_argument("--channels", nargs="+", choices=("file", "s3", "ray"), default=["file", "s3", "ray"])
    options = parser.parse_args()
    made = table(
        "Hand-over of weights",
        "GB",
        "channel",
        "publish s",
        "fetch s",
        "pause s",
        "aim",
        "extra GB sender, receiver",
        "aim",
    )
    is_missed = False
    for kind in options.channels:
        with place_of(kind) as place:
            for size in options.gb:
                num_bytes = int(size * (1 << 30)) // _TENSOR_BYTES * _TENSOR_BYTES
                published_s, fetched_s, paused_s, sender, receiver = measured(kind, place, num_bytes)
                most_s = 0.2 + num_bytes / 5e9
                is_missed |= paused_s > most_s or (kind == "ray" and max(sender, receiver) > 0.5e9)
                extra = f"{sender / 1e9:.2f}, {receiver / 1e9:.2f}"
                times = (f"{published_s:.2f}", f"{fetched_s:.2f}", f"{paused_s:.2f}", f"≤ {most_s:.2f}")
                made.add_row(f"{num_bytes / 1e9:.2f}", kind, *times, extra, "≤ 0.5" if kind == "ray" else "")
    wide_console().print(made)
    sys.exit(is_missed)


if __name__ == "__main__":
    main()
