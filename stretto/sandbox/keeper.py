"""The warm interpreter that runs programs: one process inside the walls, a fork of it for each program.

Started by `stretto.sandbox.hire` with an open socket; imports nothing but the standard library and its neighbours,
because in its room there is nothing else. It is the first process of its pid namespace and runs one program at a time,
so when a program has ended, or must, everything else in the namespace is killed in one call that no fork can outrun,
and reaped. Nothing a program can write to reaches the keeper but its two output pipes.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import resource
import selectors
import signal
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

from stretto.sandbox import filter as calls
from stretto.sandbox import linux, program, tree, walls, wire

WARM = (
    "abc array atexit bisect cmath collections contextlib copy dataclasses datetime decimal enum fractions functools "
    "heapq io itertools json linecache math numbers operator random re statistics string textwrap threading time "
    "traceback types typing unittest"
)
"""Imported once, ahead of all programs."""
_PIECE = 1 << 16


@dataclass(frozen=True, slots=True)
class Keeper:
    """This process, once the door is shut."""

    control: socket.socket
    conditions: program.Conditions
    scratch: str
    """Without namespaces: folder in which work folders are made."""


@dataclass(slots=True)
class Stream:
    """One of the program's outputs, as far as it was read."""

    pieces: list[bytes]
    room: int
    is_cut: bool = False


def main(fd: int) -> None:
    """Obey the driver at the other end of the socket ``fd`` until it is closed."""
    control = socket.socket(fileno=fd)
    control.set_inheritable(False)
    message = wire.receive(control)
    if message is None:
        return
    plan = message[0]
    try:
        keeper = _settle(control, plan)
    except OSError as error:
        wire.send(control, {"problem": error.strerror or str(error)})
        return
    facts = {
        "own_uid": keeper.conditions.program_id is not None,
        "has_filter": calls.is_supported(),
        "has_landlock": not keeper.conditions.has_namespaces and linux.landlock_version() > 0,
    }
    wire.send(control, {"problem": None, **facts})
    gc.freeze()  # or the collector writes to every page, and so copies it, in every fork
    while (message := wire.receive(control)) is not None:
        if "outcome" not in message[0]:  # or else it stops a program that ended meanwhile
            wire.send(control, *run(keeper, *message))


def _settle(control: socket.socket, plan: dict[str, Any]) -> Keeper:
    """Import what programs will want, then shut the door."""
    for name in WARM.split():
        importlib.import_module(name)
    room = walls.Room.from_plain(plan["room"])
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the first process of a namespace is deaf to what it does not handle
    program_id = plan["outer_id"]
    if plan["has_namespaces"]:
        program_id = walls.PROGRAM_ID if walls.enter(room, plan["is_inside"], plan["outer_id"]) else None
    else:
        linux.become_subreaper()
    linux.set_readable(False)
    linux.drop_bounding_set()  # ours stay, but no execve of a program gives it any
    sys.path[:] = walls.search_path(room)
    has_filter = plan["has_namespaces"] and calls.is_supported()
    conditions = program.Conditions(
        room, plan["has_namespaces"], program_id, calls.build(is_alone=True, own_pid=0) if has_filter else b""
    )
    return Keeper(control, conditions, plan["scratch"])


def run(keeper: Keeper, job: dict[str, Any], blobs: list[bytes]) -> tuple[dict[str, Any], list[bytes]]:
    """Run one program to its end, whatever that is; the reply and its two outputs."""
    start = time.monotonic()
    conditions = keeper.conditions
    work = walls.WORK if conditions.has_namespaces else tempfile.mkdtemp(dir=keeper.scratch)
    pipes = {name: os.pipe() for name in ("stdin", "stdout", "stderr", "report")}
    child = os.fork()
    if child == 0:
        program.start(conditions, job, blobs, pipes, work)
    for name, (read, write) in pipes.items():
        os.close(read if name == "stdin" else write)
    ends = {name: write if name == "stdin" else read for name, (read, write) in pipes.items()}
    watch = Watch(keeper.control, child, job, blobs[0], ends, start)
    broken = watch.until_end()
    ending = _end_all(child, conditions.has_namespaces)
    outputs, error = watch.drain()
    if not conditions.has_namespaces:
        _clear(work, conditions.program_id)
    reply = {"broken": broken, "error": error, **ending, "wall_s": time.monotonic() - start}
    return reply | {f"is_{name}_cut": stream.is_cut for name, stream in watch.streams.items()}, outputs


class Watch:
    """Over one program: feeds, reads and times it."""

    def __init__(
        self, control: socket.socket, child: int, job: dict[str, Any], stdin: bytes, ends: dict[str, int], start: float
    ) -> None:
        self.control = control
        self.job = job
        self.unsent = memoryview(stdin)
        self.ends = {**ends, "process": os.pidfd_open(child)}
        self.deadline = start + job["wall_s"]
        self.streams = {name: Stream([], job["output_bytes"]) for name in ("stdout", "stderr")}
        self.selector = selectors.DefaultSelector()
        self.broken: dict[str, str] | None = None
        """Why the program must be ended: outcome and text."""

    def until_end(self) -> dict[str, str] | None:
        """Wait for the first process to end or for a reason to end it, which is returned."""
        for name in ("stdout", "stderr", "process"):
            self.selector.register(self.ends[name], selectors.EVENT_READ, name)
        self.selector.register(self.control, selectors.EVENT_READ, "control")
        os.set_blocking(self.ends["stdin"], False)
        self.selector.register(self.ends["stdin"], selectors.EVENT_WRITE, "stdin")
        has_ended = False
        while not has_ended and self.broken is None:
            wait = self.deadline - time.monotonic()
            if wait <= 0:
                self.broken = {"outcome": "timeout", "why": f"ran longer than {self.job['wall_s']:g} s"}
                break
            for key, _ in self.selector.select(wait):
                has_ended |= key.data == "process"
                self._serve(key.data)
        return self.broken

    def drain(self) -> tuple[list[bytes], str]:
        """The two outputs and the report, once nothing lives that could write more."""
        for name, stream in self.streams.items():
            while name in self.ends and not stream.is_cut:
                self._serve(name)
        error = os.read(self.ends["report"], _PIECE).decode()
        for name in list(self.ends):
            self._close(name)
        self.selector.close()
        return [b"".join(stream.pieces) for stream in self.streams.values()], error

    def _serve(self, name: str) -> None:
        if name == "control":
            message = wire.receive(self.control)
            if message is None:  # the driver is gone, and with it who would want to know
                os._exit(0)
            self.broken = message[0]
        elif name == "stdin":
            self.unsent = _feed(self.ends["stdin"], self.unsent)
            if not self.unsent:
                self._close("stdin")
        elif name in self.streams:
            piece = os.read(self.ends[name], _PIECE)
            if not piece:
                self._close(name)
            elif _keep(self.streams[name], piece):
                self.broken = {"outcome": "crash", "why": f"wrote more than {self.job['output_bytes']} bytes to {name}"}

    def _close(self, name: str) -> None:
        fd = self.ends.pop(name)
        if fd in self.selector.get_map():
            self.selector.unregister(fd)
        os.close(fd)


def _end_all(child: int, has_namespaces: bool) -> dict[str, Any]:
    """Kill and reap everything a program started; how the program itself ended, and what they all used.

    The dead program holds its id until it is reaped, so its group cannot be another's. A kill reaches every process of
    a namespace or group before one of them can fork again.
    """
    ending: dict[str, Any] = {"status": None, "cpu_s": 0.0, "max_rss_bytes": 0}
    with contextlib.suppress(ProcessLookupError):  # nobody is left
        if has_namespaces:
            os.kill(-1, signal.SIGKILL)  # all but us
        else:
            os.killpg(child, signal.SIGKILL)
    while True:
        try:
            dead, status, used = os.wait4(-1, 0)
        except ChildProcessError:
            return ending
        if dead == child:
            ending["status"] = status
        ending["cpu_s"] += used.ru_utime + used.ru_stime
        ending["max_rss_bytes"] = max(ending["max_rss_bytes"], used.ru_maxrss << 10)
        if not has_namespaces:
            for orphan in tree.children(os.getpid()):  # of those who left the group, where nothing kept them in it
                with contextlib.suppress(ProcessLookupError):
                    os.kill(orphan, signal.SIGKILL)


def _keep(stream: Stream, piece: bytes) -> bool:
    """Store what fits; whether something did not."""
    stream.pieces.append(piece[: stream.room])
    stream.is_cut |= len(piece) > stream.room
    stream.room -= len(stream.pieces[-1])
    return stream.is_cut


def _feed(fd: int, unsent: memoryview) -> memoryview:
    try:
        return unsent[os.write(fd, unsent[:_PIECE]) :] if unsent else unsent
    except BlockingIOError:
        return unsent
    except BrokenPipeError:
        return unsent[:0]  # it reads no more


def _clear(work: str, program_id: int | None) -> None:
    """Delete a work folder that the program owned, however deep or locked it left it."""
    os.chmod(work, 0o700)
    if os.listdir(work):
        child = os.fork()
        if child == 0:
            try:
                if program_id is not None:
                    os.setresgid(program_id, program_id, program_id)
                    os.setresuid(program_id, program_id, program_id)
                program.remove_tree(work)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
    os.rmdir(work)
