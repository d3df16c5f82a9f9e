"""Within the walls: the warm interpreter that runs programs, one process, and its fork that becomes a program.

Started by `stretto.sandbox.isolate` with an open socket; imports nothing but the standard library and `walls`, because
in its room there is nothing else. The keeper is the first process of its pid namespace and runs one program at a time,
so when a program has ended, or must, everything else in the namespace is killed in one call that no fork can outrun,
and reaped. Nothing a program can write to reaches the keeper but its two output pipes.

A program that reads its own memory finds what the keeper had in it when it forked; earlier programs' text may be among
the freed blocks. So nothing that is secret from programs may be sent to a sandbox. The word by which the driver knows the
reply to a job follows the job and is read after the fork: no program ever holds the one that counts.
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
"""Imported once, ahead of all programs."""
MAIN = "main.py"
"""What tracebacks call the program."""
_CPU_GRACE_S = 1
"""Between the signal that a program may catch and the one that it may not."""
_CONTROL_FD, _MAX_FDS = 3, 256
"""The keeper's socket; its own limit on descriptors."""
_MAX_REPORT = 1000
"""Bytes of what kept a program from starting."""
PIECE = 1 << 16
"""Bytes read at once."""
HEAD = 4
"""Bytes that begin a message: the length of its header."""


def send(control: socket.socket, header: Mapping[str, Any], blobs: Sequence[bytes] = ()) -> None:
    """Write one message: header as JSON, then bytes of the ``sizes`` that it names. Raises OSError: nobody reads it."""
    text = json.dumps({**header, "sizes": [len(blob) for blob in blobs]}).encode()
    control.sendall(b"".join((len(text).to_bytes(HEAD, "big"), text, *blobs)))


def receive(control: socket.socket) -> tuple[dict[str, Any], list[bytes]] | None:
    """The driver's next message, waited for and believed; None where it is gone, in the midst of a message too."""
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
    """This process, once it is shut in, and what holds for every program of it."""

    control: socket.socket
    room: walls.Room
    has_namespaces: bool
    program_id: int | None
    """User and group of programs; None: the keeper's."""
    filter: bytes
    """Of system calls; empty without namespaces, where each program's is its own."""
    scratch: str
    """Without namespaces: folder in which work folders are made."""
    group: Sequence[int]
    """Descriptors of the control group of programs, to enter it and to end all that is in it; empty: there is none."""


def main(fd: int) -> None:
    """Obey the driver at the other end of the socket ``fd`` until it is closed."""
    if fd != _CONTROL_FD:  # it has a number of the driver's, who may hold thousands
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
    gc.freeze()  # or the collector writes to every page, and so copies it, in every fork
    while (message := receive(control)) is not None:
        if "stop" not in message[0]:  # or else it stops a program that ended meanwhile
            send(control, *run(keeper, *message))


def _settle(control: socket.socket, plan: dict[str, Any]) -> Keeper:
    """Import what programs will want, then shut the door."""
    for name in WARM.split():
        importlib.import_module(name)
    room = walls.Room(**plan["room"])
    resource.setrlimit(resource.RLIMIT_NOFILE, (_MAX_FDS, _MAX_FDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the first process of a namespace is deaf to what it does not handle
    group = socket.recv_fds(control, 1, 2)[1] if plan["has_group"] else []
    has_namespaces, program_id = plan["has_namespaces"], plan["outer_id"]
    if has_namespaces:
        program_id = walls.PROGRAM_ID if walls.enter(room, plan["is_inside"], plan["outer_id"]) else None
    else:
        walls.prctl("CHILD_SUBREAPER", 1)  # orphans among our descendants become our children
    walls.prctl("DUMPABLE", 0)  # nobody of the same user may look into our memory, or at /proc's account of it
    walls.drop_bounding_set()  # ours stay, but no execve of a program gives it any
    sys.path[:] = [path for path in sys.path if any(f"{path}/".startswith(f"{each}/") for each in room.shown)]
    has_filter = has_namespaces and walls.can_filter()
    calls = walls.build_filter(is_alone=True, own_pid=0) if has_filter else b""
    return Keeper(control, room, has_namespaces, program_id, calls, plan["scratch"], group)


def run(keeper: Keeper, job: dict[str, Any], blobs: list[bytes]) -> tuple[dict[str, Any], list[bytes]]:
    """Run one program to its end, whatever that is; the reply and its two outputs."""
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
    """Over one program: feeds and reads it. What it uses is for the driver to watch, who can see that."""

    def __init__(self, control: socket.socket, job: dict[str, Any], stdin: bytes, ends: dict[str, int]) -> None:
        """
        Args:
            ends: our ends of its pipes, and a descriptor of its ``process``.
        """
        self.control, self.unsent, self.ends = control, memoryview(stdin), ends
        self.limit: int = job["output_bytes"]
        self.outputs = {"stdout": bytearray(), "stderr": bytearray()}
        self.cut: set[str] = set()
        """Outputs that were longer than the limit."""
        self.selector = selectors.DefaultSelector()
        self.broken: str | None = None
        """Why the program must be ended: an output of this name is too long, or the driver wants it to ``stop``."""

    def until_end(self) -> None:
        """Wait for the first process to end or for a reason to end it."""
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
        """Read the outputs to their ends, once nothing lives that could write more; the program's report."""
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
            if receive(self.control) is None:  # the driver is gone, and with it who would want to know
                os._exit(0)
            self.broken = "stop"
        elif name == "stdin":
            try:
                num_written = os.write(self.ends[name], self.unsent[:PIECE])
                self.unsent = self.unsent[num_written:]
            except BlockingIOError:
                return
            except BrokenPipeError:
                self.unsent = self.unsent[:0]  # it reads no more
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
    """Kill and reap everything a program started; the program's own exit code (less than 0: a signal), what they all used.

    The dead program holds its id until it is reaped, so its group cannot be another's. A kill reaches every process of
    a namespace or group before one of them can fork again.
    """
    ending: int | None = None
    cpu_s, max_rss_bytes = 0.0, 0
    with contextlib.suppress(ProcessLookupError):  # nobody is left
        if keeper.group:
            os.write(keeper.group[1], b"1")
        if keeper.has_namespaces:
            os.kill(-1, signal.SIGKILL)  # all but us
        else:
            os.killpg(child, signal.SIGKILL)
    while True:
        try:
            dead, status, used = os.wait4(-1, 0)
        except ChildProcessError:
            assert ending is not None, f"program {child} was not ours to reap"
            return os.waitstatus_to_exitcode(ending), {"cpu_s": cpu_s, "max_rss_bytes": max_rss_bytes}
        if dead == child:
            ending = status
        cpu_s += used.ru_utime + used.ru_stime
        max_rss_bytes = max(max_rss_bytes, used.ru_maxrss << 10)
        if not keeper.has_namespaces:
            for orphan in children(os.getpid()):  # of those who left the group, where nothing kept them in it
                with contextlib.suppress(ProcessLookupError):
                    os.kill(orphan, signal.SIGKILL)


def children(pid: int) -> list[int]:
    """Of all its threads; none if it has ended."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                found += map(int, file.read().split())
    return found


def _clear(work: str, program_id: int | None) -> None:
    """Delete a work folder that the program owned, however deep or locked it left it."""
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
    """Empty a folder whose owner may have nested it deeper than a path can name or descriptors can follow: step by step,
    down and up. Nobody is left who could move a folder meanwhile."""
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
    """Empty the current folder of all but its subfolders; their names."""
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
    """In the fork: give up what we may do, then run Python text or another file. What keeps us from it is written to
    the pipe ``report``, which no program inherits."""
    report = pipes["report"][1]
    try:
        if keeper.group:
            os.write(keeper.group[0], b"0")  # whoever writes
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
        os.dup2(report, keeper.control.detach(), inheritable=False)  # what was the socket is the report
        report = _CONTROL_FD
        walls.close_from(report + 1)
        if keeper.program_id is not None:
            os.chown(work, keeper.program_id, keeper.program_id)
        _set_user(keeper.program_id)
        walls.drop_capabilities()
        walls.prctl("DUMPABLE", 1)  # by the driver's watch; the keeper, of whose memory ours is now a copy, is not
        if not keeper.has_namespaces:
            walls.prctl("PDEATHSIG", signal.SIGKILL)  # cleared by a change of user, so it comes after
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
    cpu_s = max(1, int(-(-job["cpu_s"] // 1)))  # the kernel counts whole seconds; the driver's watch counts the rest
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
    """Run Python text as ``__main__`` in this process, as ``python main.py`` in its folder would; the exit code."""
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
            print(exit.code, file=sys.stderr)  # noqa: T201  # as the interpreter does
    except BaseException as error:
        code = 1
        trace = error.__traceback__
        sys.excepthook(type(error), error.with_traceback(trace and trace.tb_next), None)  # without our own frame
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for its threads, as the interpreter's end would
        atexit._run_exitfuncs()
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
    return code
