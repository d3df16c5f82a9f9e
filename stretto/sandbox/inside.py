"""The keeper: a warm, isolated interpreter whose forks become programs.

`stretto.sandbox.isolate` starts a keeper with an open socket. The keeper imports only the standard library and `walls`: nothing else exists
in its file system. It is the first process of its pid namespace and runs one program at a time. So after a program, one call kills all other
processes of the namespace before any of them can fork again. The only data from a program to the keeper are its two output pipes.

A program can read the memory that the keeper had when it forked, which may contain the text of earlier programs. So nothing secret may be
sent to a sandbox. The nonce that identifies the reply to a job is read after the fork: no program knows the nonce of its own job.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import linecache
import os
import resource
import selectors
import signal
import socket
import sys
import tempfile
import threading
import time
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from stretto.sandbox import walls

WARM = (
    "abc array atexit bisect cmath collections contextlib copy dataclasses datetime decimal enum fractions functools "
    "heapq io itertools json linecache math numbers operator random re statistics string textwrap threading time "
    "traceback types typing unittest"
)
"""Modules that the keeper imports once, before all programs."""
MAIN = "main.py"
"""File name of the program in tracebacks."""
_CPU_GRACE_S = 1
"""Seconds between SIGXCPU, which a program may catch, and SIGKILL."""
_CONTROL_FD, _MAX_FDS = 3, 256
"""Descriptor of the keeper's socket; limit on the keeper's own descriptors."""
_MAX_REPORT = 1000
"""Largest error message of a program that could not start, bytes."""
PIECE = 1 << 16
"""Largest number of bytes per read."""
HEAD = 4
"""Number of bytes at the start of a message that hold the length of its header."""


def send(control: socket.socket, header: Mapping[str, Any], blobs: Sequence[bytes] = ()) -> None:
    """Write one message: the header as JSON with the ``sizes`` of the byte strings, then these. Raises OSError: the other end is closed."""
    text = json.dumps({**header, "sizes": [len(blob) for blob in blobs]}).encode()
    control.sendall(b"".join((len(text).to_bytes(HEAD, "big"), text, *blobs)))


def receive(control: socket.socket) -> tuple[dict[str, Any], list[bytes]] | None:
    """Wait for the driver's next message, which is trusted; None: the driver has closed the socket."""
    try:
        header = json.loads(_read(control, int.from_bytes(_read(control, HEAD), "big")))
        return header, [_read(control, size) for size in header.pop("sizes")]
    except (EOFError, OSError):
        return None


def _read(control: socket.socket, size: int) -> bytes:
    buffer = bytearray()
    while len(buffer) < size:
        piece = control.recv(size - len(buffer))
        if not piece:
            raise EOFError
        buffer += piece
    return bytes(buffer)


@dataclass(frozen=True, slots=True)
class Keeper:
    """Settings of this process after isolation, which hold for all of its programs."""

    control: socket.socket
    room: walls.Room
    has_namespaces: bool
    program_id: int | None
    """User and group id of programs; None: the keeper's."""
    filter: bytes
    """Filter of system calls; empty without namespaces, where each program has its own."""
    scratch: str
    """Folder for work folders; only without namespaces."""
    group: Sequence[int]
    """Descriptors of the programs' control group: to enter it, and to kill its members; empty: there is no group."""


def main(fd: int) -> None:
    """Run the driver's jobs from the socket ``fd`` until it is closed."""
    if fd != _CONTROL_FD:  # the number comes from the driver, which may have thousands of descriptors
        os.dup2(fd, _CONTROL_FD)
    os.set_inheritable(_CONTROL_FD, False)
    walls.close_from(_CONTROL_FD + 1)
    control = socket.socket(fileno=_CONTROL_FD)
    message = receive(control)
    if message is None:
        return
    try:
        keeper = _settle(control, message[0])
    except OSError as error:
        send(control, {"problem": error.strerror or str(error)})
        return
    has_landlock = not keeper.has_namespaces and walls.landlock_version() > 0
    facts = {"own_uid": keeper.program_id is not None, "has_filter": walls.can_filter(), "has_landlock": has_landlock}
    send(control, facts)
    gc.freeze()  # otherwise garbage collection writes to all pages, and so copies them, in every fork
    while (message := receive(control)) is not None:
        if "stop" not in message[0]:  # an order to stop a program that has ended in the meantime
            send(control, *run(keeper, *message))


def _settle(control: socket.socket, plan: dict[str, Any]) -> Keeper:
    """Import the modules for programs, then isolate this process."""
    for name in WARM.split():
        importlib.import_module(name)
    room = walls.Room(**plan["room"])
    resource.setrlimit(resource.RLIMIT_NOFILE, (_MAX_FDS, _MAX_FDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the first process of a namespace ignores signals without a handler
    group = socket.recv_fds(control, 1, 2)[1] if plan["has_group"] else []
    has_namespaces, program_id = plan["has_namespaces"], plan["outer_id"]
    if has_namespaces:
        program_id = walls.PROGRAM_ID if walls.enter(room, plan["is_inside"], plan["outer_id"]) else None
    else:
        walls.prctl("CHILD_SUBREAPER", 1)  # orphaned descendants become children of this process
    walls.prctl("DUMPABLE", 0)  # other processes of the same user may not read this process's memory
    walls.drop_bounding_set()  # a program gets no capability by execve; this process keeps its own
    sys.path[:] = [path for path in sys.path if any(f"{path}/".startswith(f"{each}/") for each in room.shown)]
    has_filter = has_namespaces and walls.can_filter()
    calls = walls.build_filter(is_alone=True, own_pid=0) if has_filter else b""
    return Keeper(control, room, has_namespaces, program_id, calls, plan["scratch"], group)


def run(keeper: Keeper, job: dict[str, Any], blobs: list[bytes]) -> tuple[dict[str, Any], list[bytes]]:
    """Run one program to its end; returns the header of the reply and the two outputs."""
    start = time.monotonic()
    work = walls.WORK if keeper.has_namespaces else tempfile.mkdtemp(dir=keeper.scratch)
    pipes = {name: os.pipe() for name in ("stdin", "stdout", "stderr", "report")}
    child = os.fork()
    if child == 0:
        _become_program(keeper, job, blobs, pipes, work)
    for name, (read, write) in pipes.items():
        os.close(read if name == "stdin" else write)
    message = receive(keeper.control)
    if message is None:
        os._exit(0)
    nonce = message[0]["nonce"]
    ends = {name: write if name == "stdin" else read for name, (read, write) in pipes.items()}
    watch = Watch(keeper.control, job, blobs[0], ends | {"process": os.pidfd_open(child)})
    watch.until_end()
    code, used = _end_all(keeper, child)
    error = watch.drain()
    if not keeper.has_namespaces:
        _clear(work, keeper.program_id)
    used |= {f"is_{name}_cut": name in watch.cut for name in watch.outputs} | {"wall_s": time.monotonic() - start}
    reply = {"nonce": nonce, "broken": watch.broken, "error": error, "code": code, "used": used}
    return reply, [bytes(output) for output in watch.outputs.values()]


class Watch:
    """Writes the input of one program and reads its outputs. The driver watches its resources."""

    def __init__(self, control: socket.socket, job: dict[str, Any], stdin: bytes, ends: dict[str, int]) -> None:
        """``ends``: the keeper's ends of the program's pipes by name, and a descriptor of its ``process``."""
        self.control, self.unsent, self.ends = control, memoryview(stdin), ends
        self.limit: int = job["output_bytes"]
        self.outputs = {"stdout": bytearray(), "stderr": bytearray()}
        self.cut: set[str] = set()
        """Names of outputs over the limit."""
        self.selector = selectors.DefaultSelector()
        self.broken: str | None = None
        """Reason to end the program: the name of an output over the limit, or ``stop``, the driver's order."""

    def until_end(self) -> None:
        """Wait until the first process ends, or there is a reason to end it."""
        os.set_blocking(self.ends["stdin"], False)
        self.selector.register(self.ends["stdin"], selectors.EVENT_WRITE, "stdin")
        self.selector.register(self.control, selectors.EVENT_READ, "control")
        for name in ("stdout", "stderr", "process"):
            self.selector.register(self.ends[name], selectors.EVENT_READ, name)
        has_ended = False
        while not has_ended and self.broken is None:
            for key, _ in self.selector.select():
                has_ended |= key.data == "process"
                self._serve(key.data)

    def drain(self) -> str:
        """Read the outputs to their ends, after all processes have ended; returns the program's report."""
        for name in self.outputs:
            while name in self.ends and name not in self.cut:
                self._serve(name)
        report = os.read(self.ends["report"], PIECE).decode("utf-8", "replace")
        for name in list(self.ends):
            self._close(name)
        self.selector.close()
        return report

    def _serve(self, name: str) -> None:
        if name == "control":
            if receive(self.control) is None:  # the driver has ended
                os._exit(0)
            self.broken = "stop"
        elif name == "stdin":
            try:
                num_written = os.write(self.ends[name], self.unsent[:PIECE])
                self.unsent = self.unsent[num_written:]
            except BlockingIOError:
                return
            except BrokenPipeError:
                self.unsent = self.unsent[:0]  # the program has closed its input
            if not self.unsent:
                self._close(name)
        elif name in self.outputs:
            output, piece = self.outputs[name], os.read(self.ends[name], PIECE)
            output += piece
            if len(output) > self.limit:
                del output[self.limit :]
                self.cut.add(name)
                self.broken = name
            if not piece:
                self._close(name)

    def _close(self, name: str) -> None:
        fd = self.ends.pop(name)
        if fd in self.selector.get_map():
            self.selector.unregister(fd)
        os.close(fd)


def _end_all(keeper: Keeper, child: int) -> tuple[int, dict[str, Any]]:
    """Kill and reap all processes of a program; returns its exit code (below 0: a signal), and the resources of all processes.

    The process id of the program stays its own until it is reaped, so its process group cannot be another's. A kill reaches all processes of
    a namespace or group before one of them can fork again.
    """
    ending: int | None = None
    cpu_s, max_rss_bytes = 0.0, 0
    with contextlib.suppress(ProcessLookupError):  # no process is left
        if keeper.group:
            os.write(keeper.group[1], b"1")
        if keeper.has_namespaces:
            os.kill(-1, signal.SIGKILL)  # all but this process
        else:
            os.killpg(child, signal.SIGKILL)
    while True:
        try:
            dead, status, used = os.wait4(-1, 0)
        except ChildProcessError:
            assert ending is not None, f"program {child} is not a child of this process"
            return os.waitstatus_to_exitcode(ending), {"cpu_s": cpu_s, "max_rss_bytes": max_rss_bytes}
        if dead == child:
            ending = status
        cpu_s += used.ru_utime + used.ru_stime
        max_rss_bytes = max(max_rss_bytes, used.ru_maxrss << 10)
        if not keeper.has_namespaces:
            for orphan in children(os.getpid()):  # processes that left the process group
                with contextlib.suppress(ProcessLookupError):
                    os.kill(orphan, signal.SIGKILL)


def children(pid: int) -> list[int]:
    """Process ids of the children of all threads of ``pid``; empty if it has ended."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                found += map(int, file.read().split())
    return found


def _clear(work: str, program_id: int | None) -> None:
    """Delete a program's work folder, whatever its depth and permissions."""
    os.chmod(work, 0o700)
    if os.listdir(work):
        child = os.fork()
        if child == 0:
            try:
                _set_user(program_id)
                _remove_tree(work)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
    os.rmdir(work)


def _remove_tree(folder: str) -> None:
    """Empty a folder that may be nested deeper than paths or descriptors allow, by stepping into and out of subfolders. No process is left
    that could move a folder."""
    os.chdir(folder)
    waiting = [_remove_files()]
    while True:
        if waiting[-1]:
            name = waiting[-1][-1]
            os.chmod(name, 0o700)
            os.chdir(name)
            waiting.append(_remove_files())
        elif len(waiting) > 1:
            waiting.pop()
            os.chdir("..")
            os.rmdir(waiting[-1].pop())
        else:
            return


def _remove_files() -> list[str]:
    """Delete all files of the current folder; returns the names of its subfolders."""
    folders = []
    with os.scandir(".") as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.name)
            else:
                os.unlink(entry.name)
    return folders


def _become_program(
    keeper: Keeper, job: Mapping[str, Any], blobs: Sequence[bytes], pipes: Mapping[str, tuple[int, int]], work: str
) -> NoReturn:
    """In the fork: give up privileges, then run Python text or execute a file. An error before that is written to the pipe ``report``, which
    the program does not inherit."""
    report = pipes["report"][1]
    try:
        if keeper.group:
            os.write(keeper.group[0], b"0")  # 0: the writing process
        if keeper.has_namespaces:
            os.setsid()
            walls.unshare(walls.CLONE_NEWNS)
            flags = walls.MS_NOSUID | walls.MS_NODEV | walls.MS_NOEXEC
            size = f"size={job['file_bytes']},nr_inodes={max(64, job['file_bytes'] >> 12)},mode=1777"
            walls.mount("tmpfs", work, "tmpfs", flags, size)
        else:
            os.setpgid(0, 0)
        for target, fd in enumerate((pipes["stdin"][0], pipes["stdout"][1], pipes["stderr"][1])):
            os.dup2(fd, target)
        os.dup2(report, keeper.control.detach(), inheritable=False)  # replaces the socket
        report = _CONTROL_FD
        walls.close_from(report + 1)
        if keeper.program_id is not None:
            os.chown(work, keeper.program_id, keeper.program_id)
        _set_user(keeper.program_id)
        walls.drop_capabilities()
        walls.prctl("DUMPABLE", 1)  # lets the driver's watch read /proc of the program; the keeper stays closed
        if not keeper.has_namespaces:
            walls.prctl("PDEATHSIG", signal.SIGKILL)  # after the change of user, which clears it
        os.chdir(work)
        for name, content in zip(job["files"], blobs[2:], strict=True):
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_bytes(content)
        _limit(job)
        walls.prctl("NO_NEW_PRIVS", 1)
        if not keeper.has_namespaces and walls.landlock_version():
            walls.landlock(keeper.room.shown, work)
        if walls.can_filter():
            walls.install_filter(keeper.filter or walls.build_filter(is_alone=False, own_pid=os.getpid()))
        os.environ |= {"HOME": work, "TMPDIR": work}
        if (argv := job["argv"]) is not None:
            os.execve(keeper.room.python if argv[0] == "python" else argv[0], argv, os.environ)
        os.close(report)
    except BaseException as error:
        os.write(report, f"{type(error).__name__}: {error}".encode(errors="replace")[:_MAX_REPORT])
        os._exit(1)
    code = 1
    try:
        code = run_source(blobs[1], work)
    finally:
        os._exit(code)


def _set_user(program_id: int | None) -> None:
    if program_id is not None:
        os.setresgid(program_id, program_id, program_id)
        os.setresuid(program_id, program_id, program_id)


def _limit(job: Mapping[str, Any]) -> None:
    cpu_s = max(1, int(-(-job["cpu_s"] // 1)))  # whole seconds; the driver's watch enforces fractions
    for kind, soft, hard in (
        (resource.RLIMIT_AS, job["memory_bytes"], job["memory_bytes"]),
        (resource.RLIMIT_CPU, cpu_s, cpu_s + _CPU_GRACE_S),
        (resource.RLIMIT_FSIZE, job["file_bytes"], job["file_bytes"]),
        (resource.RLIMIT_NOFILE, job["open_files"], job["open_files"]),
        (resource.RLIMIT_NPROC, job["nproc"], job["nproc"]),
        (resource.RLIMIT_MEMLOCK, 0, 0),
        (resource.RLIMIT_MSGQUEUE, 0, 0),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        _, most = resource.getrlimit(kind)
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)
        resource.setrlimit(kind, (soft, hard))


def run_source(source: bytes, work: str) -> int:
    """Run Python text as ``__main__`` in this process, like ``python main.py`` in the work folder; returns the exit code."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "stretto"]:
        del sys.modules[name]
    path = os.path.join(work, MAIN)
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=path, __builtins__=__builtins__)
    sys.modules["__main__"] = main
    sys.argv = [path]
    sys.path.insert(0, work)
    text = source.decode("utf-8", "replace")
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    code = 0
    try:
        exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)
    except SystemExit as exit:
        code = exit.code & 0xFF if isinstance(exit.code, int) else int(exit.code is not None)
        if not isinstance(exit.code, int | None):
            print(exit.code, file=sys.stderr)  # noqa: T201  # like the interpreter
    except BaseException as error:
        code = 1
        trace = error.__traceback__
        sys.excepthook(
            type(error), error.with_traceback(trace and trace.tb_next), None
        )  # without this function's frame
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, like the interpreter
        atexit._run_exitfuncs()
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
    return code
