"""Runs untrusted programs with limits and isolation, and reports whether the program or the infrastructure failed.

    with Sandbox() as sandbox:
        print(sandbox.isolation)
        finished = sandbox.run("print(6 * 7)")

The sandbox uses the best isolation of the machine: namespaces made by bubblewrap or by `stretto.sandbox.walls`, or process limits only. A
level counts as available when a program has run in it. Programs run in forks of warm interpreters, the keepers (`stretto.sandbox.inside`).
This file is the driver: it sends programs to keepers, watches resources that a keeper cannot see, and classifies how programs ended.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, ValidationError

from stretto.base.config import Config
from stretto.base.errors import UserError
from stretto.base.trajectory import Outcome
from stretto.sandbox import cgroup, walls
from stretto.sandbox.inside import HEAD, PIECE, children, send
from stretto.sandbox.outcome import Finished, Isolation, Level, Limits

START_S = 30.0
"""Time limit for a keeper to start, seconds."""
LATE_S = 10.0
"""Seconds after a program's time limit in which the keeper must kill it and answer."""
WATCH_S = 0.05
"""Seconds between polls of a program's resources; a program that ends sooner is never polled."""
PATIENCE = 4
"""Largest total time of a program, waiting for a processor included, as a multiple of the longer of its wall and processor limits."""
_MAX_HEADER = 1 << 14
"""Largest header of a keeper's message, bytes."""
_CODE = Path(__file__).resolve().parent
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    "PYTHONHASHSEED": "0",  # the order of sets is reproducible
    "MALLOC_ARENA_MAX": "1",  # otherwise every thread takes 64 MiB of the limited address space
}
_FIRST_ID = 0x40000000
"""First user id for programs: above the ids that useradd, containers and systemd assign."""
_NOBODY = 65534
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class KeeperError(Exception):
    """A keeper cannot start on this machine, or has ended; the text is the reason."""


class _Message(Config, strict=True):
    """Header of a keeper's message."""

    sizes: tuple[Annotated[int, Field(ge=0)], ...]
    """Sizes of the byte strings that follow."""


class _Greeting(_Message):
    problem: str = ""
    """Reason why the keeper cannot start; empty: it is ready."""
    own_uid: bool = False
    has_filter: bool = False
    has_landlock: bool = False


class _Used(Config, strict=True):
    wall_s: float = Field(ge=0, allow_inf_nan=False)
    cpu_s: float = Field(ge=0, allow_inf_nan=False)
    max_rss_bytes: int = Field(ge=0)
    is_stdout_cut: bool
    is_stderr_cut: bool


class _Reply(_Message):
    nonce: str
    """Nonce of the job that the message answers."""
    broken: Literal["stdout", "stderr", "stop"] | None
    """Reason why the keeper ended the program: an output over the limit, or the driver's order; None: it did not."""
    error: str
    """Reason why the program was not started; empty: it was."""
    code: int = Field(ge=-64, le=255)
    """Exit code; below 0: number of the signal, negated."""
    used: _Used


MessageT = TypeVar("MessageT", bound=_Message)


class Sandbox:
    """A pool of warm keepers. Thread-safe; at most ``workers`` programs run at a time."""

    def __init__(
        self,
        limits: Any = None,
        *,
        level: Level | None = None,
        strict: bool = False,
        workers: int = 1,
        python: str | Path | None = None,
        shown: Sequence[str] = (),
    ) -> None:
        """Find the best isolation and start the first keeper; further keepers start on demand.

        Args:
            limits: default limits of programs: `Limits`, or a recipe's table; None: the defaults of `Limits`.
            level: required level of isolation; None: the best available one.
            strict: whether to refuse anything less than full isolation.
            workers: number of keepers.
            python: interpreter for programs; None: this process's, without its virtual environment.
            shown: further folders that programs can read and execute, such as ``/usr/bin``; missing folders are ignored.

        Raises:
            UserError: ``level`` or ``strict`` is not available on this machine, or programs could not read the interpreter.
        """
        assert workers > 0, f"{workers} workers"
        self.limits = Limits() if limits is None else Limits.of(limits)
        self.workers = workers
        self._room = walls.Room.of(str(Path(python or walls.base_python()).resolve()), shown)
        self._numbers = itertools.count(1)
        self._groups: Path | None = None
        self._polled = ""
        try:
            self._groups = cgroup.delegated()
        except cgroup.GroupError as problem:
            self._polled = str(problem)
        self._idle: queue.LifoQueue[Keeper | None] = queue.LifoQueue()
        """One entry per idle worker; None: its keeper is not started yet."""
        for _ in range(workers - 1):
            self._idle.put(None)
        first, missing = self._find_level(level)
        self._idle.put(first)
        self.isolation = replace(first.isolation, polled=self._polled, missing=missing)
        """Isolation of this sandbox's programs."""
        if strict and not self.isolation.is_full:
            self.close()
            remedy = "install bubblewrap, allow user namespaces, or set sandbox.strict = false"
            raise UserError(f"sandbox: strict: {self.isolation}; {remedy}")

    def _find_level(self, wanted: Level | None) -> tuple[Keeper, tuple[str, ...]]:
        missing: list[str] = []
        for level in sorted(Level, reverse=True) if wanted is None else [wanted]:
            try:
                return self._start(level), tuple(missing)
            except KeeperError as problem:
                missing.append(f"no {level.name.lower()}: {problem}")
        if self._groups is not None:  # try without the cgroup
            self._groups, self._polled = None, missing[0]
            return self._find_level(wanted)
        raise UserError(f"sandbox: isolation: {'; '.join(missing)}; allow user namespaces or install bubblewrap")

    def _start(self, level: Level) -> Keeper:
        """Start a keeper, and check that it runs a program."""
        if level == Level.LIMITS:
            _check_readable(self._room)
        keeper = Keeper(level, self._room, next(self._numbers), self._groups)
        try:
            finished = keeper.run(b"print(6 * 7)", None, b"", {}, Limits(wall_s=30.0))
            if finished.stdout != b"42\n":
                raise KeeperError(finished.why or f"a program that prints 42 printed {finished.stdout[:80]!r}")
            return keeper
        except KeeperError:
            keeper.close()
            raise

    def run(
        self,
        program: str | bytes | Sequence[str],
        stdin: bytes | str = b"",
        files: Mapping[str, bytes | str] | None = None,
        limits: Limits | None = None,
    ) -> Finished:
        """Run one program to its end. Waits for an idle worker.

        Args:
            program: Python source, or an argument list, whose first element may be ``"python"``.
            stdin: standard input.
            files: files of the work folder by relative path; the work folder is the current folder.
            limits: limits of this program; None: the sandbox's.

        Returns:
            The program's result. Failures of the sandbox have the outcome INFRA.
        """
        for name in files or ():
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or "\0" in name or not path.parts:
                problem = f"{name!r} does not lie in the work folder"
                raise ValueError(f"sandbox: files: {problem}; use a relative path without '..'")
        contents = {name: _bytes(content) for name, content in (files or {}).items()}
        if isinstance(program, str):
            program = program.encode(errors="replace")  # a model's program may have half of a surrogate pair
        source, argv = (program, None) if isinstance(program, bytes) else (b"", program)
        keeper = self._idle.get()
        try:
            if keeper is None:
                keeper = self._start(self.isolation.level)
            return keeper.run(source, argv, _bytes(stdin), contents, limits or self.limits)
        except BaseException as error:
            if keeper is not None:  # its state is unknown
                keeper.close()
                keeper = None
            if not isinstance(error, KeeperError):
                raise
            return Finished(Outcome.INFRA, f"the sandbox's keeper is gone: {error}")
        finally:
            self._idle.put(keeper)

    @property
    def idle_pids(self) -> tuple[int, ...]:
        """Process ids of the idle keepers, which have no child processes."""
        with self._idle.mutex:
            return tuple(keeper.pid for keeper in self._idle.queue if keeper is not None)

    def close(self) -> None:
        """End the idle keepers. To be called while no program runs."""
        with contextlib.suppress(queue.Empty):
            while True:
                keeper = self._idle.get_nowait()
                if keeper is not None:
                    keeper.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _bytes(text: str | bytes) -> bytes:
    return text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text


class Keeper:
    """A keeper process at one level of isolation; runs one program at a time."""

    def __init__(self, level: Level, room: walls.Room, number: int, groups: Path | None) -> None:
        """Start the keeper and wait until it is isolated.

        Args:
            number: number of this keeper in this process, from which its programs' user id is derived.
            groups: control group in which to create a group for the keeper's programs; None: memory is polled.

        Raises:
            KeeperError: the machine does not support this level.
        """
        is_inside = level == Level.BUBBLEWRAP
        bwrap = shutil.which("bwrap") if is_inside else ""
        if bwrap is None:
            raise KeeperError("bwrap is not installed")
        self._folder = tempfile.TemporaryDirectory(prefix="stretto-sandbox-") if level == Level.LIMITS else None
        if self._folder is not None:
            os.chmod(self._folder.name, 0o711)  # programs of another user can enter subfolders, but not list them
        try:
            self._group = None if groups is None else cgroup.Group(groups)
        except cgroup.GroupError as error:
            raise KeeperError(str(error)) from None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `close`
        self._socket, theirs = socket.socketpair()
        root = walls.KEEPER if is_inside else str(_CODE.parents[1])
        boot = f"import sys; sys.path.insert(0, {root!r}); from stretto.sandbox.inside import main; main({theirs.fileno()})"
        command = [room.python, "-s", "-S", "-P", "-B", "-X", "utf8", "-c", boot]
        if is_inside:
            command = walls.bubblewrap_arguments(bwrap, room, str(_CODE)) + command
        with theirs:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                env=_ENVIRONMENT,
                cwd="/",
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # an interrupt from the terminal is the driver's to handle
            )
        plan = {
            "room": asdict(room),
            "has_namespaces": level > Level.LIMITS,
            "is_inside": is_inside,
            "outer_id": _outer_id(number),
            "scratch": self._folder.name if self._folder else "",
            "has_group": self._group is not None,
        }
        try:
            with contextlib.suppress(OSError):  # if the keeper has ended, its standard error has the reason
                self._send(plan)
                if self._group is not None:
                    socket.send_fds(self._socket, [b"0"], [self._group.entry, self._group.end])
            greeting = self._receive(_Greeting, time.monotonic() + START_S)
            if greeting.problem:
                raise KeeperError(greeting.problem)
        except KeeperError:
            self.close()
            raise
        self.isolation = Isolation(level, greeting.has_filter, greeting.has_landlock, greeting.own_uid)
        self.pid = self._process.pid
        """Process id of the keeper in this process's namespace."""
        while level > Level.LIMITS and (inner := children(self.pid)):
            self.pid = inner[-1]  # bubblewrap and the processes that wait outside have one child each
        self._spare_tasks = self._count_spare_tasks()

    def _count_spare_tasks(self) -> int:
        """Number to add to the limit on processes, because RLIMIT_NPROC counts all processes of the user."""
        if self.isolation.own_uid:
            return 0
        release = tuple(int(part) for part in os.uname().release.split(".")[:2] if part.isdigit())
        if self.isolation.level > Level.LIMITS and release >= (5, 14):
            return 2  # the keeper and the process that waits for it; counted per namespace since 5.14
        total = 256  # reserve for other processes; the watch counts the program's own
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                if folder.stat().st_uid == os.geteuid():
                    total += len(os.listdir(folder / "task"))
        return total

    def run(
        self, source: bytes, argv: Sequence[str] | None, stdin: bytes, files: Mapping[str, bytes], limits: Limits
    ) -> Finished:
        """Run a program to its end: ``argv``, or the Python text ``source`` if ``argv`` is None.

        Raises:
            KeeperError: the keeper failed; the program has ended, with an unknown result.
        """
        nproc = limits.processes + self._spare_tasks
        job = asdict(limits) | {"argv": argv, "files": list(files), "nproc": nproc}
        nonce = secrets.token_hex(16)
        if self._group is not None:
            self._group.limit(limits.memory_bytes + limits.file_bytes, limits.processes)
        watch = _Watch(self.pid, limits, self._group)

        def look() -> None:
            if watch.order is None and watch.must_end():
                self._send({"stop": True})

        try:
            self._send(job, [stdin, source, *files.values()])
            self._send({"nonce": nonce})
            reply = self._receive(_Reply, watch.start + watch.longest_s + LATE_S, look)
            if reply.nonce != nonce or len(reply.sizes) != 2 or max(reply.sizes) > limits.output_bytes:
                raise KeeperError("it answered another job")
            stdout, stderr = (self._read(size, time.monotonic() + LATE_S) for size in reply.sizes)
        except OSError as error:
            raise KeeperError(f"{error.strerror or error}: {self._last_words()}") from None
        outcome, why = _judge(reply, watch.order or watch.kernels_order(), limits, stderr)
        exit_code, number = (reply.code, None) if reply.code >= 0 else (None, -reply.code)
        return Finished(outcome, why, exit_code, number, stdout, stderr, **reply.used.model_dump())

    def _send(self, header: Mapping[str, Any], blobs: Sequence[bytes] = ()) -> None:
        self._socket.settimeout(LATE_S)
        send(self._socket, header, blobs)

    def _receive(self, kind: type[MessageT], deadline: float, look: Callable[[], None] = lambda: None) -> MessageT:
        """The header of the keeper's next message, validated as ``kind``: a program that reached the socket may have written it.

        Raises:
            KeeperError: no message before the deadline, or an invalid one.
        """
        size = int.from_bytes(self._read(HEAD, deadline, look), "big")
        if size > _MAX_HEADER:
            raise KeeperError(f"it announced a message of {size} bytes")
        try:
            return kind.model_validate_json(self._read(size, deadline, look))
        except ValidationError as error:
            problem = error.errors(include_url=False, include_input=False)[0]
            raise KeeperError(f"its message is malformed: {problem['msg']}") from None

    def _read(self, size: int, deadline: float, look: Callable[[], None] = lambda: None) -> bytes:
        """Read ``size`` bytes; calls ``look`` every `WATCH_S` seconds while waiting."""
        self._socket.settimeout(WATCH_S)
        buffer = bytearray()
        while len(buffer) < size:
            if time.monotonic() > deadline:
                raise KeeperError("it did not answer in time")
            try:
                piece = self._socket.recv(min(size - len(buffer), PIECE))
            except TimeoutError:
                look()
                self._socket.settimeout(WATCH_S)
                continue
            if not piece:
                raise KeeperError(self._last_words())
            buffer += piece
        return bytes(buffer)

    def _last_words(self) -> str:
        """The last line of the process's standard error, once it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else f"it ended with exit code {self._process.returncode} and no message"

    def close(self) -> None:
        """Close the socket, which ends the keeper and its program."""
        self._socket.close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            for pid in [*descendants(self._process.pid), self._process.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.wait()
        self._errors.close()
        if self._group is not None:
            self._group.close()
        if self._folder is not None:
            self._folder.cleanup()


class _Watch:
    """Watches the resources that all processes of one program use together."""

    def __init__(self, pid: int, limits: Limits, group: cgroup.Group | None) -> None:
        """``pid``: process id of the keeper."""
        self._pid, self._limits, self._group = pid, limits, group
        self._earlier = (group.cpu_s, group.num_killed) if group else (0.0, 0)
        self.start = time.monotonic()
        self.longest_s = PATIENCE * max(limits.wall_s, limits.cpu_s)
        self.order: tuple[Outcome, str] | None = None
        """Outcome and reason if the watch ended the program."""
        self._waits: dict[int, int] = {}
        self._waited_s = 0.0

    def must_end(self) -> bool:
        """Whether the program exceeds a limit; ``order`` is then set."""
        limits, group = self._limits, self._group
        used = Usage(0, group.cpu_s - self._earlier[0], 0) if group else usage(self._pid)
        elapsed_s = time.monotonic() - self.start
        self._look_at_waits(elapsed_s)
        if used.cpu_s > limits.cpu_s:
            self.order = Outcome.TIMEOUT, f"used more than {limits.cpu_s:g} processor seconds"
        elif used.num_tasks > limits.processes:
            self.order = Outcome.CRASH, f"ran more than {limits.processes} processes and threads"
        elif used.rss_bytes > limits.memory_bytes and _shared_fairly(self._pid) > limits.memory_bytes:
            self.order = self._too_large()
        elif elapsed_s - self._waited_s > limits.wall_s:
            self.order = Outcome.TIMEOUT, f"ran longer than {limits.wall_s:g} s"
        elif elapsed_s > self.longest_s:
            waited = f"it waited {self._waited_s:.1f} of {elapsed_s:.1f} s for a processor"
            self.order = Outcome.INFRA, f"the machine is too busy for the program: {waited}"
        return self.order is not None

    def kernels_order(self) -> tuple[Outcome, str] | None:
        """Outcome and reason if the kernel killed the program because its group ran out of memory."""
        return self._too_large() if self._group and self._group.num_killed > self._earlier[1] else None

    def _too_large(self) -> tuple[Outcome, str]:
        return Outcome.CRASH, f"used more than {self._limits.memory_bytes} bytes of memory"

    def _look_at_waits(self, elapsed_s: float) -> None:
        """Add the time that the program waited for a processor since the last poll: that of the thread that waited longest.

        The sum over threads would let a program with many threads hide that it sleeps. A program whose threads wait for each other runs out
        of processor seconds first.
        """
        waits = waiting(self._pid)
        longest_ns = max((ns - self._waits.get(thread, 0) for thread, ns in waits.items()), default=0)
        self._waits = waits
        self._waited_s = min(self._waited_s + max(0, longest_ns) / 1e9, elapsed_s)


def _judge(reply: _Reply, order: tuple[Outcome, str] | None, limits: Limits, stderr: bytes) -> tuple[Outcome, str]:
    """Outcome and reason of a keeper's reply. An end that the keeper or the watch ordered takes precedence over the exit code."""
    if reply.error:
        return Outcome.INFRA, f"the program could not be started: {one_line(reply.error)}"
    if order is not None and (reply.broken == "stop" or reply.code == -signal.SIGKILL):
        return order
    if reply.broken:
        return Outcome.CRASH, f"wrote more than {limits.output_bytes} bytes to {reply.broken}"
    if reply.code == 0:
        return Outcome.OK, ""
    if reply.code == -signal.SIGXCPU or (reply.code == -signal.SIGKILL and reply.used.cpu_s >= limits.cpu_s):
        return Outcome.TIMEOUT, f"used more than {limits.cpu_s:g} processor seconds"
    if reply.code < 0:
        return Outcome.CRASH, f"ended by signal {-reply.code} ({signal.strsignal(-reply.code)})"
    last_line = one_line(stderr.decode("utf-8", "replace").strip().rpartition("\n")[2][:200])
    return Outcome.CRASH, f"exit code {reply.code}" + (f": {last_line}" if last_line else "")


def one_line(text: str) -> str:
    """``text`` of an untrusted program with blanks in place of unprintable characters."""
    return "".join(each if each.isprintable() else " " for each in text)


def _outer_id(number: int) -> int | None:
    """A user id for the programs of one keeper; None: only root may choose one."""
    if os.geteuid() != 0:
        return None
    wanted = _FIRST_ID + ((os.getpid() << 8 | number & 0xFF) & 0x3FFFFFFF)
    ranges = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text("ascii").splitlines()]
    for each in (wanted, _NOBODY):  # a container may have a short range of ids
        if any(first <= each < first + num for first, _, num in ranges):
            return each
    return None


def _check_readable(room: walls.Room) -> None:
    """Raises `UserError`: without namespaces, programs run as another user, who may not read the interpreter's folder."""
    for path in map(Path, room.shown if os.geteuid() == 0 else ()):
        for each in (path, *path.parents):
            if not each.stat().st_mode & (0o005 if each == path else 0o001):
                problem = f"only root may read {each}, and without namespaces programs run as another user"
                remedy = "use a Python that everyone can read, or run as a user"
                raise UserError(f"{room.python}: sandbox: {problem}; {remedy}")


# Resources of all descendants of a process, read from /proc: the kernel has no limits for a whole process tree without a cgroup.


@dataclass(frozen=True, slots=True)
class Usage:
    """Resources of all descendants of a process at one moment."""

    rss_bytes: int
    """Resident memory; a shared page counts once per process, see `_shared_fairly`."""
    cpu_s: float
    """Processor seconds, also of ended processes that their parents have reaped."""
    num_tasks: int
    """Number of processes and threads."""


def usage(pid: int) -> Usage:
    """Resources of the descendants of ``pid``, without ``pid`` itself."""
    rss = ticks = num_tasks = 0
    for each in descendants(pid):
        if stat := _read(f"/proc/{each}/stat"):
            fields = stat.rpartition(")")[2].split()  # the name in parentheses may contain blanks
            # proc(5) numbers fields from 1, with two before the parenthesis: utime 14 … cstime 17, num_threads 20, rss 24.
            ticks += sum(int(field) for field in fields[11:15])
            num_tasks += int(fields[17])
            rss += int(fields[21]) * _PAGE
    return Usage(rss, ticks / _TICKS, num_tasks)


def waiting(pid: int) -> dict[int, int]:
    """Nanoseconds that each thread of ``pid`` and its descendants was ready to run but had no processor."""
    waits: dict[int, int] = {}
    for each in (pid, *descendants(pid)):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for thread in os.listdir(f"/proc/{each}/task"):
                if fields := _read(f"/proc/{each}/task/{thread}/schedstat").split():
                    waits[int(thread)] = int(fields[1])  # ran, waited, number of slices
    return waits


def _shared_fairly(pid: int) -> int:
    """Resident bytes of the descendants of ``pid``, each shared page divided among the processes that share it. Slower than `usage`.

    A process that hides its pages counts with all of them.
    """
    total = 0
    for each in descendants(pid):
        try:
            rows = _read(f"/proc/{each}/smaps_rollup").splitlines()
            total += sum(int(row.split()[1]) << 10 for row in rows if row.startswith("Pss:"))
        except PermissionError:
            total += int((_read(f"/proc/{each}/statm") or "0 0").split()[1]) * _PAGE
    return total


def _read(path: str) -> str:
    """Contents of a file in /proc; empty if the process has ended."""
    try:
        return Path(path).read_text("utf-8", "replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def descendants(pid: int) -> Iterator[int]:
    """Process ids of all descendants of ``pid``."""
    waiting = children(pid)
    while waiting:
        each = waiting.pop()
        yield each
        waiting += children(each)
