"""Records of the sandbox: limits, how a program ended, what a tool answered, what isolation there is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Self

from stretto.base.trajectory import Outcome as Outcome


@dataclass(frozen=True, slots=True)
class Limits:
    """What one program may use. Written by the caller."""

    wall_s: float = 5.0
    """From its start to the end of its first process, less the time that it waits for a processor which others use;
    whatever else it started ends then too."""
    cpu_s: float = 5.0
    """Processor seconds of all its processes together."""
    memory_bytes: int = 512 << 20
    """Address space of one process, and resident memory of all of them. A cgroup counts files in the work folder too,
    so there the limit of all is this and ``file_bytes``."""
    output_bytes: int = 1 << 20
    """Of standard output, and of standard error."""
    processes: int = 32
    """Processes and threads at one time, the program itself included."""
    file_bytes: int = 64 << 20
    """Of the work folder as a whole; with process limits only, of one file."""
    open_files: int = 128

    def __post_init__(self) -> None:
        for name in self.__slots__:
            assert getattr(self, name) > 0, f"limit {name} is {getattr(self, name)}"

    @classmethod
    def of(cls, table: Any) -> Self:
        """From `Limits`, or a recipe's table, which has fields of some of these names."""
        return cls(**{name: getattr(table, name) for name in cls.__slots__ if hasattr(table, name)})


@dataclass(frozen=True, slots=True)
class Finished:
    """How a program ended. Written by the sandbox; no word of it comes from the program but its output."""

    outcome: Outcome
    """OK: it exited with 0. CRASH: any other exit, a signal, a broken limit. TIMEOUT: out of wall or processor seconds.
    INFRA: we failed it, or the machine is too busy to tell. Never WRONG, which is for the task to say."""
    why: str
    """One line; empty where the outcome is OK."""
    exit_code: int | None = None
    """None: it was ended by a signal, or never started."""
    signal: int | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    is_stdout_cut: bool = False
    """More was written than ``output_bytes``."""
    is_stderr_cut: bool = False
    wall_s: float = 0.0
    cpu_s: float = 0.0
    """User and system time of all its processes."""
    max_rss_bytes: int = 0
    """Largest resident memory of one of its processes; what it shares with the warm interpreter counts."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool answered. Written by the tool."""

    text: str
    """For the model."""
    outcome: Outcome
    seconds: float
    """Wall time."""
    sandbox_s: float = 0.0
    """Processor seconds in the sandbox."""


class Level(IntEnum):
    """Kinds of isolation, weakest first."""

    LIMITS = 0
    """rlimits, a process group, and whatever of seccomp and Landlock the kernel gives."""
    NAMESPACES = 1
    """User, pid, network, mount, ipc and uts namespaces, made by our own helper."""
    BUBBLEWRAP = 2
    """The same, with the outer ones made by bubblewrap."""


@dataclass(frozen=True, slots=True)
class Isolation:
    """What programs on this machine are kept in, found by running one. Written by `describe_isolation`."""

    level: Level
    has_filter: bool
    """System calls are filtered (seccomp)."""
    has_landlock: bool
    """Files are kept from the program by Landlock; not needed where there are namespaces."""
    own_uid: bool
    """Programs run under a user id that nothing else on the machine has."""
    polled: str = ""
    """Why memory and processes are only looked at every so often; empty: a cgroup limits them."""
    missing: tuple[str, ...] = ()
    """Why each better level is not to be had, one line each."""

    @property
    def is_full(self) -> bool:
        """No network, no files but the interpreter's, no process left behind, by the kernel's own walls."""
        return self.level >= Level.NAMESPACES and self.has_filter

    def __str__(self) -> str:
        if self.level == Level.LIMITS:
            walls = "process limits only, NOT full isolation"
        else:
            maker = "bubblewrap" if self.level == Level.BUBBLEWRAP else "own helper"
            walls = f"user, pid, network, mount, ipc and uts namespaces, read-only root ({maker})"
        extras = "seccomp filter" if self.has_filter else "no seccomp filter"
        extras += ", Landlock" * self.has_landlock + ", own user id" * self.own_uid
        memory = f"memory polled: {self.polled}" if self.polled else "memory limited by a cgroup"
        return "; ".join((f"sandbox: {walls}", extras, memory, *self.missing))
