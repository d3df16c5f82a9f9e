"""Memory of a GPU, or of the machine within its control groups: what is available, the peak, and whether freed blocks are kept."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

MEMBERSHIP = Path("/proc/self/cgroup")
ROOT = Path("/sys/fs/cgroup")


class _Files(NamedTuple):
    """File names of one version of control groups."""

    limit: str
    used: str
    reclaimable: str
    """Key in memory.stat of file cache that was not used recently: counted as used, but freed when memory is needed."""


_V2 = _Files("memory.max", "memory.current", "inactive_file")
_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Names of glibc's settings in `mallopt`."""
_LARGEST_KEPT = (1 << 31) - 1
_LARGEST_USUAL = 32 << 20
"""Bytes of the largest block that glibc keeps if nothing is set."""


@contextmanager
def freed_memory_kept(device: torch.device) -> Iterator[None]:
    """Context in which freed memory of a CPU stays with the process, and is returned to the system at the end.

    Otherwise glibc returns every block of more than 32 MiB when it is freed, and the system clears the pages of the next one: a
    quarter to a half of the time of a training step of SmolLM2 (docs/log/training.md). Other C libraries have no such setting.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if set_option is None or device.type != "cpu":
        yield
        return
    for name in (_MMAP_THRESHOLD, _TRIM_THRESHOLD):
        set_option(name, _LARGEST_KEPT)
    try:
        yield
    finally:
        set_option(_MMAP_THRESHOLD, _LARGEST_USUAL)
        set_option(_TRIM_THRESHOLD, 2 * _LARGEST_USUAL)  # as glibc sets both by itself
        trim()


def trim() -> None:
    """Return freed memory to the operating system. glibc keeps it for later allocations; other C libraries do not, and have no such call."""
    if sys.platform == "linux":
        getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)(0)


def peak_bytes(device: torch.device) -> int | None:
    """Peak memory that torch allocated on a GPU, in bytes; None on a CPU, where a `Receipt` has the memory of the process."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def free_bytes(device: torch.device) -> int:
    """Bytes of memory that can be allocated on ``device`` now."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return min(psutil.virtual_memory().available, group_free_bytes())


def group_free_bytes(membership: Path = MEMBERSHIP, root: Path = ROOT) -> int:
    """Free bytes within the control groups of this process, which psutil ignores; 2^62 if no group has a limit."""
    free = 1 << 62
    for folder, files in _groups(membership, root):
        try:
            limit, used = ((folder / name).read_text().strip() for name in (files.limit, files.used))
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except OSError:  # the root group has no such files, and some containers hide their parent groups
            continue
        if limit != "max":
            free = min(free, max(0, int(limit) - int(used) + int(stat.get(files.reclaimable, 0))))
    return free


def _groups(membership: Path, root: Path) -> Iterator[tuple[Path, _Files]]:
    """Folders of the groups that limit this process's memory, from its own to the root; a container may see only the root."""
    for line in membership.read_text().splitlines() if membership.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        files = _V1 if controllers else _V2
        top = root / "memory" if controllers else root
        folder = top / path.lstrip("/")
        while folder != top:
            yield folder, files
            folder = folder.parent
        yield top, files
