"""What a process's descendants use, read from /proc: the limits that the kernel does not keep for a whole tree."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Usage:
    """Of all descendants of a process at one moment."""

    rss_bytes: int
    """Pages that several share count for each of them; see `shared_fairly`."""
    cpu_s: float
    """Of the living and of the dead they have waited for."""
    num_tasks: int
    """Processes and threads."""


def usage(pid: int) -> Usage:
    """Of the descendants of ``pid``, itself left out."""
    rss = ticks = num_tasks = 0
    for each in descendants(pid):
        try:
            with open(f"/proc/{each}/stat", encoding="utf-8", errors="replace") as file:
                fields = file.read().rpartition(")")[2].split()  # the name in parentheses may hold anything
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended meanwhile
        # proc(5) counts from 1 and the two before the parenthesis: utime 14 … cstime 17, num_threads 20, rss 24.
        ticks += sum(int(field) for field in fields[11:15])
        num_tasks += int(fields[17])
        rss += int(fields[21]) * _PAGE
    return Usage(rss, ticks / _TICKS, num_tasks)


def shared_fairly(pid: int) -> int:
    """Resident bytes of the descendants of ``pid``, each shared page divided among its sharers. Slower than `usage`.

    A process that hides its pages, which any may, counts with all that it has.
    """
    total = 0
    for each in descendants(pid):
        try:
            with open(f"/proc/{each}/smaps_rollup", encoding="ascii", errors="replace") as file:
                total += sum(int(line.split()[1]) << 10 for line in file if line.startswith("Pss:"))
        except PermissionError:
            total += _resident(each)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return total


def _resident(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * _PAGE
    except (FileNotFoundError, ProcessLookupError):
        return 0


def descendants(pid: int) -> Iterator[int]:
    waiting = children(pid)
    while waiting:
        each = waiting.pop()
        yield each
        waiting += children(each)


def children(pid: int) -> list[int]:
    """Of all its threads; none if it has ended."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                found += map(int, file.read().split())
    except (FileNotFoundError, ProcessLookupError):
        pass
    return found


def count_tasks(uid: int) -> int:
    """Processes and threads of a user on this machine, as far as /proc shows them."""
    total = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if os.stat(f"/proc/{name}").st_uid == uid:
                    total += len(os.listdir(f"/proc/{name}/task"))
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
    return total
