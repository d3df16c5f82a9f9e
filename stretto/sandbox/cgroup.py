"""Control groups (cgroup v2) for programs, where the machine delegates one: the kernel limits a whole process tree.

Without a cgroup, the limits of a process tree are polled, and a program can exceed them between two polls. Only its owner may divide a group:
this process divides its own group if systemd delegated it (``Delegate=yes``), if it is the top group that the container sees, or if it is the
root. A group with members cannot limit its children, so the members first move into a leaf of the group. Needs Linux 5.14 (``cgroup.kill``).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from pathlib import Path

_CONTROLLERS = {"memory", "pids"}
_LEAF = "stretto-driver"
_MARKS = ("user.delegate", "trusted.delegate")
"""Extended attributes that systemd sets on a delegated group."""
_REMOVE_S = 5.0


class GroupError(Exception):
    """No control group is available; the text is the reason."""


def delegated() -> Path:
    """The group in which groups with limits can be created. Raises GroupError: there is none."""
    group, is_top = _own()
    if group.name == _LEAF:
        group = group.parent
    try:
        if missing := _CONTROLLERS - set((group / "cgroup.controllers").read_text().split()):
            raise GroupError(f"no cgroup controller for {' and '.join(sorted(missing))}")
        if not set((group / "cgroup.subtree_control").read_text().split()) >= _CONTROLLERS:
            if not is_top and not any(_attribute(group, mark) == b"1" for mark in _MARKS):
                raise GroupError("no cgroup is delegated to this process")
            if (group / "cgroup.type").exists():  # not the root group, which may have members
                _empty(group)
            (group / "cgroup.subtree_control").write_text("".join(f"+{name} " for name in sorted(_CONTROLLERS)))
    except OSError as error:
        raise GroupError(f"{group}: {error.strerror}") from None
    return group


def _own() -> tuple[Path, bool]:
    """The group of this process, and whether it is the topmost visible group."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        if line.startswith("0::"):
            inside = line.removeprefix("0::")
            break
    else:
        raise GroupError("no cgroup v2")
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        root, point = fields.split()[3:5]
        if rest.startswith("cgroup2 ") and f"{inside}/".startswith(f"{root.rstrip('/')}/"):
            return Path(point) / os.path.relpath(inside, root), inside == root
    raise GroupError("no cgroup v2 is mounted")


def _attribute(path: Path, name: str) -> bytes:
    with contextlib.suppress(OSError):
        return os.getxattr(path, name)
    return b""


def _empty(group: Path) -> None:
    """Move all members of ``group`` into its leaf."""
    leaf = group / _LEAF
    leaf.mkdir(exist_ok=True)
    while members := (group / "cgroup.procs").read_text().split():
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                (leaf / "cgroup.procs").write_text(pid)


class Group:
    """Control group of one keeper's programs, which run one after the other."""

    def __init__(self, parent: Path) -> None:
        """Raises GroupError: the group cannot be created."""
        for other in parent.glob("stretto-sandbox-*"):
            if not Path("/proc", other.name.split("-")[2]).exists():  # left by a driver that was killed
                with contextlib.suppress(OSError):
                    other.rmdir()
        self._path = parent / f"stretto-sandbox-{os.getpid()}-{secrets.token_hex(4)}"
        self._limits = (0, 0)
        try:
            self._path.mkdir()
            self._write("memory.oom.group", 1)  # out of memory ends all processes of the program
            if (self._path / "memory.swap.max").exists():
                self._write("memory.swap.max", 0)
            self.entry, self.end = (os.open(self._path / f"cgroup.{name}", os.O_WRONLY) for name in ("procs", "kill"))
        except OSError as error:
            raise GroupError(f"{self._path}: {error.strerror}") from None

    def limit(self, memory_bytes: int, tasks: int) -> None:
        """Set the limits of all members together. ``memory_bytes`` includes files in memory."""
        if self._limits != (memory_bytes, tasks):
            self._write("memory.max", memory_bytes)
            self._write("pids.max", tasks)
            self._limits = memory_bytes, tasks

    @property
    def cpu_s(self) -> float:
        """Processor seconds of all present and former members."""
        return self._number("cpu.stat", "usage_usec") / 1e6

    @property
    def num_killed(self) -> int:
        """Number of members that the kernel has killed because memory ran out."""
        return self._number("memory.events", "oom_kill")

    def close(self) -> None:
        """Kill the remaining members and remove the group."""
        os.close(self.entry)
        os.close(self.end)
        deadline = time.monotonic() + _REMOVE_S
        with contextlib.suppress(OSError):
            self._write("cgroup.kill", 1)
        while True:
            try:
                self._path.rmdir()
                return
            except OSError:  # members are still ending
                if time.monotonic() > deadline:
                    return
                time.sleep(0.01)

    def _write(self, name: str, value: int) -> None:
        (self._path / name).write_text(str(value))

    def _number(self, name: str, key: str) -> int:
        rows = (row.split() for row in (self._path / name).read_text().splitlines())
        return next((int(value) for found, value in rows if found == key), 0)
