"""The driver's side of a keeper: starts it, hands it programs, watches what it cannot, and judges how they ended."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stretto.base.errors import UserError
from stretto.sandbox import tree, walls, wire
from stretto.sandbox.outcome import Finished, Level, Limits, Outcome

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


class NoIsolationError(Exception):
    """A level that this machine does not give; the text is why."""


class KeeperDiedError(Exception):
    """The keeper is gone; the text is what it said last."""


@dataclass(frozen=True, slots=True)
class Program:
    """What is to be run. Written by the sandbox's caller."""

    source: bytes
    """Python text; not used where ``argv`` is there."""
    argv: tuple[str, ...] | None
    stdin: bytes
    files: Mapping[str, bytes]
    """By path in the work folder."""


class Hired:
    """One keeper process at one level of isolation; runs one program at a time."""

    def __init__(self, level: Level, room: walls.Room, bwrap: str | None, number: int) -> None:
        """Start it and wait until it has shut itself in.

        Args:
            number: of this keeper among those of this process; its programs' user id depends on it.

        Raises:
            NoIsolationError: the machine does not give this level.
        """
        self.level = level
        self._folder = tempfile.TemporaryDirectory(prefix="stretto-sandbox-") if level == Level.LIMITS else None
        if self._folder is not None:
            os.chmod(self._folder.name, 0o711)  # programs of another user pass through, and list nothing
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `close`
        self._socket, theirs = socket.socketpair()
        is_inside = level == Level.BUBBLEWRAP
        root = walls.KEEPER if is_inside else str(_CODE.parents[1])
        boot = f"import sys; sys.path.insert(0, {root!r}); from stretto.sandbox.keeper import main; main({theirs.fileno()})"
        command = [room.python, "-s", "-S", "-P", "-B", "-X", "utf8", "-c", boot]
        if is_inside:
            assert bwrap is not None, "no path to bubblewrap"
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
            "room": room.plain(),
            "has_namespaces": level > Level.LIMITS,
            "is_inside": is_inside,
            "outer_id": outer_id(number),
            "scratch": self._folder.name if self._folder else "",
        }
        try:
            facts = self._introduce(plan)
        except NoIsolationError:
            self.close()
            raise
        self.own_uid: bool = facts["own_uid"]
        self.has_filter: bool = facts["has_filter"]
        self.has_landlock: bool = facts["has_landlock"]
        self._pid = self._process.pid
        while level > Level.LIMITS and (inner := tree.children(self._pid)):
            self._pid = inner[-1]  # bubblewrap and those who wait outside have one child each
        self._spare_tasks = self._count_spare_tasks()

    def _introduce(self, plan: Mapping[str, Any]) -> dict[str, Any]:
        self._socket.settimeout(START_S)
        try:
            wire.send(self._socket, plan)
            message = wire.receive(self._socket)
        except TimeoutError:
            raise NoIsolationError(f"not ready after {START_S:g} s") from None
        except OSError:
            message = None  # it died before it read, and its own words say why
        if message is None:
            raise NoIsolationError(self._last_words())
        if message[0]["problem"] is not None:
            raise NoIsolationError(message[0]["problem"])
        self._socket.settimeout(None)
        return message[0]

    def _count_spare_tasks(self) -> int:
        """What to add to the limit on processes, which counts all of a user's."""
        if self.own_uid:
            return 0
        release = tuple(int(part) for part in os.uname().release.split(".")[:2] if part.isdigit())
        if self.level > Level.LIMITS and release >= (5, 14):
            return 2  # the keeper and the one who waits for it; counted by namespace since 5.14
        return tree.count_tasks(os.geteuid()) + 256  # others come and go; the watch counts the program's own

    def run(self, program: Program, limits: Limits) -> Finished:
        """Run a program to its end.

        Raises:
            KeeperDiedError: nothing is known of the program but that it does not run any more.
        """
        job = asdict(limits) | {
            "argv": program.argv,
            "files": list(program.files),
            "nproc": limits.processes + self._spare_tasks,
        }
        start = time.monotonic()
        try:
            wire.send(self._socket, job, [program.stdin, program.source, *program.files.values()])
            reply = self._await(start + limits.wall_s + LATE_S, limits)
        except OSError as error:
            raise KeeperDiedError(f"{error.strerror}: {self._last_words()}") from None
        return judge(*reply, limits)

    def _await(self, deadline: float, limits: Limits) -> tuple[dict[str, Any], list[bytes]]:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        was_stopped = False
        while not poll.poll(WATCH_S * 1000):
            if time.monotonic() > deadline:
                raise KeeperDiedError(f"no answer {LATE_S:g} s after the program's time was up")
            if not was_stopped and (excess := self._find_excess(limits)):
                outcome, why = excess
                wire.send(self._socket, {"outcome": outcome.value, "why": why})
                was_stopped = True
        self._socket.settimeout(LATE_S)
        reply = wire.receive(self._socket)
        self._socket.settimeout(None)
        if reply is None:
            raise KeeperDiedError(self._last_words())
        return reply

    def _find_excess(self, limits: Limits) -> tuple[Outcome, str] | None:
        usage = tree.usage(self._pid)
        if usage.cpu_s > limits.cpu_s:
            return Outcome.TIMEOUT, f"used more than {limits.cpu_s:g} processor seconds"
        if usage.num_tasks > limits.processes:
            return Outcome.CRASH, f"ran more than {limits.processes} processes and threads"
        if usage.rss_bytes > limits.memory_bytes and tree.shared_fairly(self._pid) > limits.memory_bytes:
            return Outcome.CRASH, f"used more than {limits.memory_bytes} bytes of memory"
        return None

    def _last_words(self) -> str:
        """Last line of what the process wrote to its standard error, once it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else f"it ended with {self._process.returncode} and said nothing"

    @property
    def pid(self) -> int:
        """Of the keeper, as this process sees it."""
        return self._pid

    def close(self) -> None:
        """Let it go: the keeper ends when the socket does, and with it all it runs."""
        self._socket.close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            for pid in [*tree.descendants(self._process.pid), self._process.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.wait()
        self._errors.close()
        if self._folder is not None:
            self._folder.cleanup()


def outer_id(number: int) -> int | None:
    """A user id for the programs of one keeper; None: we are not root and have no choice."""
    if os.geteuid() != 0:
        return None
    wanted = _FIRST_ID + ((os.getpid() << 8 | number & 0xFF) & 0x3FFFFFFF)
    ranges = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text("ascii").splitlines()]
    for each in (wanted, _NOBODY):  # in a container, the range may be short
        if any(first <= each < first + num for first, _, num in ranges):
            return each
    return None


def check_readable(room: walls.Room) -> None:
    """Without namespaces a program of another user finds the interpreter only where everyone may read it.

    Raises:
        UserError: it lies in a folder that is root's alone.
    """
    if os.geteuid() != 0:
        return
    for path in map(Path, room.shown):
        closed = [
            each for each in (path, *path.parents) if not each.stat().st_mode & 0o005 & (5 if each == path else 1)
        ]
        if closed:
            raise UserError(
                f"{room.python}: sandbox: only root may read {closed[-1]}, and without namespaces programs run as another user; "
                "use a Python that everyone can read, or run as a user"
            )


def judge(reply: Mapping[str, Any], outputs: Sequence[bytes], limits: Limits) -> Finished:
    """What a keeper's reply means. A break that the keeper or we ordered goes before how the program ended."""
    code = os.waitstatus_to_exitcode(reply["status"])
    outcome, why = _verdict(reply, code, limits, outputs[1])
    return Finished(
        outcome=outcome,
        why=why,
        exit_code=code if code >= 0 else None,
        signal=-code if code < 0 else None,
        stdout=outputs[0],
        stderr=outputs[1],
        is_stdout_cut=reply["is_stdout_cut"],
        is_stderr_cut=reply["is_stderr_cut"],
        wall_s=reply["wall_s"],
        cpu_s=reply["cpu_s"],
        max_rss_bytes=reply["max_rss_bytes"],
    )


def _verdict(reply: Mapping[str, Any], code: int, limits: Limits, stderr: bytes) -> tuple[Outcome, str]:
    if reply["error"]:
        return Outcome.INFRA, f"the program could not be started: {reply['error']}"
    if reply["broken"] is not None:
        return Outcome(reply["broken"]["outcome"]), reply["broken"]["why"]
    if code == 0:
        return Outcome.OK, ""
    if code == -signal.SIGXCPU or (code == -signal.SIGKILL and reply["cpu_s"] >= limits.cpu_s):
        return Outcome.TIMEOUT, f"used more than {limits.cpu_s:g} processor seconds"
    if code < 0:
        return Outcome.CRASH, f"ended by signal {-code} ({signal.strsignal(-code)})"
    last_line = stderr.decode("utf-8", "replace").strip().rpartition("\n")[2][:200]
    return Outcome.CRASH, f"exit code {code}" + (f": {last_line}" if last_line else "")
