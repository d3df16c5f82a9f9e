"""Available memory of a GPU, or of the machine within its control groups."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
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


def trim() -> None:
    """Return freed memory to the operating system. glibc keeps it for later allocations; other C libraries do not, and have no such call."""
    if sys.platform == "linux":
        getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)(0)


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
