"""Records of the sandbox: limits, results of programs and tools, and the isolation that the machine provides."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Self

from stretto.base.trajectory import Outcome


@dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits of one program. Written by the caller."""

    wall_s: float = 5.0
    """Seconds from the program's start to the end of its first process, without the time it waits for a busy processor. All other
    processes of the program are killed then."""
    cpu_s: float = 5.0
    """Processor seconds of all processes together."""
    memory_bytes: int = 512 << 20
    """Address space of each process, and resident memory of all processes. A cgroup also counts files in the work folder, so there the
    limit of all processes is the sum of this and ``file_bytes``."""
    output_bytes: int = 1 << 20
    """Largest standard output, and largest standard error."""
    processes: int = 32
    """Processes and threads at a time, with the program itself."""
    file_bytes: int = 64 << 20
    """Size of the work folder; with process limits only, size of each file."""
    open_files: int = 128

    def __post_init__(self) -> None:
        for name in self.__slots__:
            assert getattr(self, name) > 0, f"limit {name} is {getattr(self, name)}"

    @classmethod
    def of(cls, table: Any) -> Self:
        """From `Limits`, or from a recipe's table with some fields of the same names."""
        return cls(**{name: getattr(table, name) for name in cls.__slots__ if hasattr(table, name)})


@dataclass(frozen=True, slots=True)
class Finished:
    """Result of a program. Written by the sandbox; only the outputs come from the program."""

    outcome: Outcome
    """OK: exit code 0. CRASH: another exit code, a signal, or a limit other than time. TIMEOUT: out of wall or processor seconds. INFRA: the
    sandbox failed, or the machine is too busy. Never WRONG, which is the task's verdict."""
    why: str
    """Reason, one line; empty if the outcome is OK."""
    exit_code: int | None = None
    """Exit code; None: a signal ended the program, or it never started."""
    signal: int | None = None
    """Signal that ended the program."""
    stdout: bytes = b""
    stderr: bytes = b""
    is_stdout_cut: bool = False
    """Whether standard output was longer than ``output_bytes``."""
    is_stderr_cut: bool = False
    wall_s: float = 0.0
    cpu_s: float = 0.0
    """User and system time of all processes."""
    max_rss_bytes: int = 0
    """Largest resident memory of one process, with the pages that it shares with the warm interpreter."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """Result of a tool call. Written by the tool."""

    text: str
    """Text for the model."""
    outcome: Outcome = Outcome.OK
    sandbox_s: float = 0.0
    """Processor seconds in the sandbox."""


class Level(IntEnum):
    """Levels of isolation, weakest first."""

    LIMITS = 0
    """rlimits, a process group, and seccomp and Landlock as far as the kernel supports them."""
    NAMESPACES = 1
    """User, pid, network, mount, ipc and uts namespaces, created by `stretto.sandbox.walls`."""
    BUBBLEWRAP = 2
    """The same, with the outer namespaces created by bubblewrap."""


@dataclass(frozen=True, slots=True)
class Isolation:
    """Isolation of programs on this machine, found by running one. Written by `Sandbox`."""

    level: Level
    has_filter: bool
    """Whether seccomp filters system calls."""
    has_landlock: bool
    """Whether Landlock restricts access to files; not needed with namespaces."""
    own_uid: bool
    """Whether programs run under a user id that nothing else on the machine has."""
    polled: str = ""
    """Reason why memory and processes are polled; empty: a cgroup limits them."""
    missing: tuple[str, ...] = ()
    """Reason why each better level is missing, one line each."""

    @property
    def is_full(self) -> bool:
        """Whether the kernel ensures that a program has no network, sees no files but the interpreter's, and leaves no process behind."""
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
        return "; ".join((walls, extras, memory, *self.missing))
