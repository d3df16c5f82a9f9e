"""Runs programs that nobody trusts: limits, walls, and an outcome that says whose fault it was.

    with Sandbox() as sandbox:
        print(sandbox.isolation)
        finished = sandbox.run("print(6 * 7)")

Best isolation that the machine gives: namespaces made by bubblewrap, or by our own helper, or process limits only. Each
is tried by running a program in it, never guessed. Programs run in forks of warm interpreters (`stretto.sandbox.inside`),
the keepers; this is the driver's side, which hands programs over, watches what a keeper cannot, and judges how they ended.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import queue
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, Self

from stretto.base.errors import UserError
from stretto.sandbox import walls
from stretto.sandbox.inside import children, receive, send
from stretto.sandbox.outcome import Finished, Isolation, Level, Limits, Outcome

START_S = 30.0
"""For a keeper to say that it is ready."""
LATE_S = 10.0
"""After the program's wall time, for the keeper to answer; to kill and reap."""
WATCH_S = 0.05
"""Between looks at what a program's processes use; one that ends sooner is never looked at."""
_CODE = Path(__file__).resolve().parent
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    "PYTHONHASHSEED": "0",  # a program that depends on the order of a set does the same every time
    "MALLOC_ARENA_MAX": "1",  # or every thread takes 64 MiB of the address space that it is limited to
}
_FIRST_ID = 0x40000000
"""User ids from here on are nobody's: above what useradd, containers and systemd hand out."""
_NOBODY = 65534
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class KeeperError(Exception):
    """A keeper that this machine does not give, or that is gone; the text is why."""


class Sandbox:
    """A pool of warm keepers. Safe to use from several threads; as many programs run at once as there are workers."""

    def __init__(
        self,
        limits: Any = None,
        *,
        level: Level | None = None,
        strict: bool = False,
        workers: int = 1,
        python: str | Path | None = None,
    ) -> None:
        """Find the isolation and start the first keeper; the others start when they are needed.

        Args:
            limits: of every program: `Limits`, or a recipe's table; None: their defaults.
            level: this one and no other; None: the best there is.
            strict: refuse anything less than full isolation.
            python: the interpreter for programs; None: this process's, without its virtual environment.

        Raises:
            UserError: ``level`` or ``strict`` asks for more than the machine gives, or programs could not read
                the interpreter.
        """
        assert workers > 0, f"{workers} workers"
        self.limits = Limits() if limits is None else Limits.of(limits)
        self.workers = workers
        self._room = walls.Room.of(str(Path(python or walls.base_python()).resolve()))
        self._numbers = itertools.count(1)
        self._idle: queue.LifoQueue[Keeper | None] = queue.LifoQueue()
        """One entry a worker that is not busy; None: its keeper is yet to be started."""
        for _ in range(workers - 1):
            self._idle.put(None)
        first, missing = self._find_level(level)
        self._idle.put(first)
        self.isolation = replace(first.isolation, missing=missing)
        """What programs of this sandbox are kept in."""
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
        raise UserError(f"sandbox: isolation: {'; '.join(missing)}; allow user namespaces or install bubblewrap")

    def _start(self, level: Level) -> Keeper:
        """Start a keeper and see it run a program right."""
        if level == Level.LIMITS:
            _check_readable(self._room)
        keeper = Keeper(level, self._room, next(self._numbers))
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
        """Run one program to its end; waits for a free worker first.

        Args:
            program: Python text, or an argument list whose first may be ``"python"``.
            files: put into its work folder, which is its current one, by relative path.
            limits: instead of the sandbox's own.

        Returns:
            How it ended. What goes wrong on our side is an outcome too: INFRA.
        """
        for name in files or ():
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or "\0" in name or not path.parts:
                problem = f"{name!r} does not lie in the work folder"
                raise ValueError(f"sandbox: files: {problem}; use a relative path without '..'")
        contents = {name: _bytes(content) for name, content in (files or {}).items()}
        source, argv = (_bytes(program), None) if isinstance(program, str | bytes) else (b"", program)
        keeper = self._idle.get()
        try:
            if keeper is None:
                keeper = self._start(self.isolation.level)
            return keeper.run(source, argv, _bytes(stdin), contents, limits or self.limits)
        except KeeperError as error:
            if keeper is not None:
                keeper.close()
                keeper = None
            return Finished(Outcome.INFRA, f"the sandbox's keeper is gone: {error}")
        finally:
            self._idle.put(keeper)

    @property
    def idle_pids(self) -> tuple[int, ...]:
        """Of the keepers that run nothing now; each has no process below it."""
        with self._idle.mutex:
            return tuple(keeper.pid for keeper in self._idle.queue if keeper is not None)

    def close(self) -> None:
        """End the idle keepers; call it when no program runs."""
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
    """One keeper process at one level of isolation; runs one program at a time."""

    def __init__(self, level: Level, room: walls.Room, number: int) -> None:
        """Start it and wait until it has shut itself in.

        Args:
            number: of this keeper among those of this process; its programs' user id depends on it.

        Raises:
            KeeperError: the machine does not give this level.
        """
        is_inside = level == Level.BUBBLEWRAP
        bwrap = shutil.which("bwrap") if is_inside else ""
        if bwrap is None:
            raise KeeperError("bwrap is not installed")
        self._folder = tempfile.TemporaryDirectory(prefix="stretto-sandbox-") if level == Level.LIMITS else None
        if self._folder is not None:
            os.chmod(self._folder.name, 0o711)  # programs of another user pass through, and list nothing
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `close`
        self._connection, theirs = multiprocessing.Pipe()
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
        }
        try:
            self.isolation = Isolation(level, **self._introduce(plan))
        except KeeperError:
            self.close()
            raise
        self.pid = self._process.pid
        """Of the keeper, as this process sees it."""
        while level > Level.LIMITS and (inner := children(self.pid)):
            self.pid = inner[-1]  # bubblewrap and those who wait outside have one child each
        self._spare_tasks = self._count_spare_tasks()

    def _introduce(self, plan: Mapping[str, Any]) -> dict[str, Any]:
        message = None
        with contextlib.suppress(OSError):  # it died before it read, and its own words say why
            send(self._connection, plan)
            if not self._connection.poll(START_S):
                raise KeeperError(f"not ready after {START_S:g} s")
            message = receive(self._connection)
        if message is None or "problem" in message[0]:
            raise KeeperError(message[0]["problem"] if message else self._last_words())
        return message[0]

    def _count_spare_tasks(self) -> int:
        """What to add to the limit on processes, which counts all of a user's."""
        if self.isolation.own_uid:
            return 0
        release = tuple(int(part) for part in os.uname().release.split(".")[:2] if part.isdigit())
        if self.isolation.level > Level.LIMITS and release >= (5, 14):
            return 2  # the keeper and the one who waits for it; counted by namespace since 5.14
        total = 256  # others come and go; the watch counts the program's own
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                if folder.stat().st_uid == os.geteuid():
                    total += len(os.listdir(folder / "task"))
        return total

    def run(
        self, source: bytes, argv: Sequence[str] | None, stdin: bytes, files: Mapping[str, bytes], limits: Limits
    ) -> Finished:
        """Run a program, Python text or else ``argv``, to its end.

        Raises:
            KeeperError: nothing is known of the program but that it does not run any more.
        """
        nproc = limits.processes + self._spare_tasks
        job = asdict(limits) | {"argv": argv, "files": list(files), "nproc": nproc}
        start = time.monotonic()
        try:
            send(self._connection, job, [stdin, source, *files.values()])
            reply, (stdout, stderr) = self._await(start + limits.wall_s + LATE_S, limits)
        except OSError as error:
            raise KeeperError(f"{error.strerror}: {self._last_words()}") from None
        code = os.waitstatus_to_exitcode(reply["status"])
        outcome, why = _judge(reply, code, limits, stderr)
        exit_code, number = (code, None) if code >= 0 else (None, -code)
        return Finished(outcome, why, exit_code, number, stdout, stderr, **reply["used"])

    def _await(self, deadline: float, limits: Limits) -> tuple[dict[str, Any], list[bytes]]:
        was_stopped = False
        while not self._connection.poll(WATCH_S):
            if time.monotonic() > deadline:
                raise KeeperError(f"no answer {LATE_S:g} s after the program's time was up")
            if not was_stopped and (excess := self._find_excess(limits)):
                outcome, why = excess
                send(self._connection, {"outcome": outcome.value, "why": why})
                was_stopped = True
        reply = receive(self._connection)
        if reply is None:
            raise KeeperError(self._last_words())
        return reply

    def _find_excess(self, limits: Limits) -> tuple[Outcome, str] | None:
        used = usage(self.pid)
        if used.cpu_s > limits.cpu_s:
            return Outcome.TIMEOUT, f"used more than {limits.cpu_s:g} processor seconds"
        if used.num_tasks > limits.processes:
            return Outcome.CRASH, f"ran more than {limits.processes} processes and threads"
        if used.rss_bytes > limits.memory_bytes and _shared_fairly(self.pid) > limits.memory_bytes:
            return Outcome.CRASH, f"used more than {limits.memory_bytes} bytes of memory"
        return None

    def _last_words(self) -> str:
        """Last line of what the process wrote to its standard error, once it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else f"it ended with {self._process.returncode} and said nothing"

    def close(self) -> None:
        """Let it go: the keeper ends when the socket does, and with it all it runs."""
        self._connection.close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            for pid in [*descendants(self._process.pid), self._process.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.wait()
        self._errors.close()
        if self._folder is not None:
            self._folder.cleanup()


def _judge(reply: Mapping[str, Any], code: int, limits: Limits, stderr: bytes) -> tuple[Outcome, str]:
    """What a keeper's reply means. A break that the keeper or we ordered goes before how the program ended."""
    if reply["error"]:
        return Outcome.INFRA, f"the program could not be started: {reply['error']}"
    if reply["broken"] is not None:
        return Outcome(reply["broken"]["outcome"]), reply["broken"]["why"]
    if code == 0:
        return Outcome.OK, ""
    if code == -signal.SIGXCPU or (code == -signal.SIGKILL and reply["used"]["cpu_s"] >= limits.cpu_s):
        return Outcome.TIMEOUT, f"used more than {limits.cpu_s:g} processor seconds"
    if code < 0:
        return Outcome.CRASH, f"ended by signal {-code} ({signal.strsignal(-code)})"
    last_line = stderr.decode("utf-8", "replace").strip().rpartition("\n")[2][:200]
    return Outcome.CRASH, f"exit code {code}" + (f": {last_line}" if last_line else "")


def _outer_id(number: int) -> int | None:
    """A user id for the programs of one keeper; None: we are not root and have no choice."""
    if os.geteuid() != 0:
        return None
    wanted = _FIRST_ID + ((os.getpid() << 8 | number & 0xFF) & 0x3FFFFFFF)
    ranges = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text("ascii").splitlines()]
    for each in (wanted, _NOBODY):  # in a container, the range may be short
        if any(first <= each < first + num for first, _, num in ranges):
            return each
    return None


def _check_readable(room: walls.Room) -> None:
    """Without namespaces a program of another user finds the interpreter only where everyone may read it.

    Raises:
        UserError: it lies in a folder that is root's alone.
    """
    for path in map(Path, room.shown if os.geteuid() == 0 else ()):
        for each in (path, *path.parents):
            if not each.stat().st_mode & (0o005 if each == path else 0o001):
                problem = f"only root may read {each}, and without namespaces programs run as another user"
                remedy = "use a Python that everyone can read, or run as a user"
                raise UserError(f"{room.python}: sandbox: {problem}; {remedy}")


# What a process's descendants use, read from /proc: the limits that the kernel does not keep for a whole tree.


@dataclass(frozen=True, slots=True)
class Usage:
    """Of all descendants of a process at one moment."""

    rss_bytes: int
    """Pages that several share count for each of them; see `_shared_fairly`."""
    cpu_s: float
    """Of the living and of the dead they have waited for."""
    num_tasks: int
    """Processes and threads."""


def usage(pid: int) -> Usage:
    """Of the descendants of ``pid``, itself left out."""
    rss = ticks = num_tasks = 0
    for each in descendants(pid):
        if stat := _read(f"/proc/{each}/stat"):
            fields = stat.rpartition(")")[2].split()  # the name in parentheses may hold anything
            # proc(5) counts from 1 and the two before the parenthesis: utime 14 … cstime 17, num_threads 20, rss 24.
            ticks += sum(int(field) for field in fields[11:15])
            num_tasks += int(fields[17])
            rss += int(fields[21]) * _PAGE
    return Usage(rss, ticks / _TICKS, num_tasks)


def _shared_fairly(pid: int) -> int:
    """Resident bytes of the descendants of ``pid``, each shared page divided among its sharers. Slower than `usage`.

    A process that hides its pages, which any may, counts with all that it has.
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
    """A file of a process; empty where it has ended meanwhile."""
    try:
        return Path(path).read_text("utf-8", "replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def descendants(pid: int) -> Iterator[int]:
    waiting = children(pid)
    while waiting:
        each = waiting.pop()
        yield each
        waiting += children(each)
