"""Available memory of a GPU, or of the machine within its control groups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

MEMBERSHIP = Path("/proc/self/cgroup")
ROOT = Path("/sys/fs/cgroup")


class _Files(NamedTuple):
    """Where a version of control groups keeps its numbers."""

    limit: str
    used: str
    reclaimable: str
    """Of memory.stat: file cache not used lately, which counts as used and gives way when memory is asked for."""


_V2 = _Files("memory.max", "memory.current", "inactive_file")
_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def free_bytes(device: torch.device) -> int:
    """Memory that can be had on ``device`` now."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return min(psutil.virtual_memory().available, group_free_bytes())


def group_free_bytes(membership: Path = MEMBERSHIP, root: Path = ROOT) -> int:
    """What the control groups of this process leave it; 2^62 where there are none. psutil does not look at them."""
    free = 1 << 62
    for folder, files in _groups(membership, root):
        try:
            limit, used = ((folder / name).read_text().strip() for name in (files.limit, files.used))
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except OSError:  # the root group has no limit, and some containers hide the groups above theirs
            continue
        if limit != "max":
            free = min(free, max(0, int(limit) - int(used) + int(stat.get(files.reclaimable, 0))))
    return free


def _groups(membership: Path, root: Path) -> Iterator[tuple[Path, _Files]]:
    """The groups that limit this process's memory, from its own up to the root; a container may see the root alone."""
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
