"""Growth of this process's memory while something runs."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


def anonymous_bytes() -> int:
    """Resident memory of this process that no file and no shared memory backs."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
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
