"""Control groups (cgroup v2) for programs, where the machine delegates one: there the kernel limits a whole tree at once.

Without one, the limits of a tree are looked after by polling, and a program can be over them between two looks.
A group may be divided by its owner alone: we divide the one that we are in if systemd says that it is ours
(``Delegate=yes``), if it is all that our container sees, or if it is the root. One that has members cannot limit its
children, so they move into a leaf of it first. Needs Linux 5.14 (``cgroup.kill``).
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
"""Attributes that systemd gives to a folder of a delegated group."""
_REMOVE_S = 5.0


class GroupError(Exception):
    """There is no group to be had; the text is why."""


def delegated() -> Path:
    """The group below which others can be made, with limits. Raises GroupError: there is none."""
    group, is_top = _own()
    if group.name == _LEAF:
        group = group.parent
    try:
        if missing := _CONTROLLERS - set((group / "cgroup.controllers").read_text().split()):
            raise GroupError(f"no cgroup controller for {' and '.join(sorted(missing))}")
        if not set((group / "cgroup.subtree_control").read_text().split()) >= _CONTROLLERS:
            if not is_top and not any(_attribute(group, mark) == b"1" for mark in _MARKS):
                raise GroupError("no cgroup is delegated to this process")
            if (group / "cgroup.type").exists():  # not the root of all, which may have members
                _empty(group)
            (group / "cgroup.subtree_control").write_text("".join(f"+{name} " for name in sorted(_CONTROLLERS)))
    except OSError as error:
        raise GroupError(f"{group}: {error.strerror}") from None
    return group


def _own() -> tuple[Path, bool]:
    """The group of this process, and whether it is the topmost that can be seen."""
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
    leaf = group / _LEAF
    leaf.mkdir(exist_ok=True)
    while members := (group / "cgroup.procs").read_text().split():
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                (leaf / "cgroup.procs").write_text(pid)


class Group:
    """Of the programs of one keeper, which run one after the other."""

    def __init__(self, parent: Path) -> None:
        """Raises GroupError: it cannot be made."""
        for other in parent.glob("stretto-sandbox-*"):
            if not Path("/proc", other.name.split("-")[2]).exists():  # its driver was killed
                with contextlib.suppress(OSError):
                    other.rmdir()
        self._path = parent / f"stretto-sandbox-{os.getpid()}-{secrets.token_hex(4)}"
        self._limits = (0, 0)
        try:
            self._path.mkdir()
            self._write("memory.oom.group", 1)  # a program that loses one of its processes would go on without
            if (self._path / "memory.swap.max").exists():
                self._write("memory.swap.max", 0)
            self.entry, self.end = (os.open(self._path / f"cgroup.{name}", os.O_WRONLY) for name in ("procs", "kill"))
        except OSError as error:
            raise GroupError(f"{self._path}: {error.strerror}") from None

    def limit(self, memory_bytes: int, tasks: int) -> None:
        """From now on, of all members together: ``memory_bytes`` include the files that they write to memory."""
        if self._limits != (memory_bytes, tasks):
            self._write("memory.max", memory_bytes)
            self._write("pids.max", tasks)
            self._limits = memory_bytes, tasks

    @property
    def cpu_s(self) -> float:
        """Processor seconds of all members there ever were."""
        return self._number("cpu.stat", "usage_usec") / 1e6

    @property
    def num_killed(self) -> int:
        """Members that the kernel ever ended for want of memory."""
        return self._number("memory.events", "oom_kill")

    def close(self) -> None:
        """End what is left of its members and remove it."""
        os.close(self.entry)
        os.close(self.end)
        deadline = time.monotonic() + _REMOVE_S
        with contextlib.suppress(OSError):
            self._write("cgroup.kill", 1)
        while True:
            try:
                self._path.rmdir()
                return
            except OSError:  # its members are dying
                if time.monotonic() > deadline:
                    return
                time.sleep(0.01)

    def _write(self, name: str, value: int) -> None:
        (self._path / name).write_text(str(value))

    def _number(self, name: str, key: str) -> int:
        rows = (row.split() for row in (self._path / name).read_text().splitlines())
        return next((int(value) for found, value in rows if found == key), 0)
