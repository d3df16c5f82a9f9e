"""The keeper's fork that becomes a program: gives up what it may do, then runs Python text or another file.

A program that reads its own memory finds what the keeper had in it when it forked; earlier programs' text may be among
the freed blocks. So nothing that is secret from programs may be sent to a sandbox.
"""

from __future__ import annotations

import atexit
import linecache
import os
import resource
import signal
import sys
import threading
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from stretto.sandbox import filter as calls
from stretto.sandbox import linux, walls

MAIN = "main.py"
"""What tracebacks call the program."""
_CPU_GRACE_S = 1
"""Between the signal that a program may catch and the one that it may not."""
_FIRST_FD, _END_FD = 3, 256
"""The keeper's own limit on descriptors is the second."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """What holds for every program of a keeper."""

    room: walls.Room
    has_namespaces: bool
    program_id: int | None
    """User and group of programs; None: the keeper's."""
    filter: bytes
    """Of system calls; empty without namespaces, where each program's is its own."""


Pipes = Mapping[str, tuple[int, int]]
"""``stdin``, ``stdout``, ``stderr`` and ``report``: read and write ends."""


def start(conditions: Conditions, job: Mapping[str, Any], blobs: Sequence[bytes], pipes: Pipes, work: str) -> NoReturn:
    """Become the program. What keeps us from it is written to ``report``, which no program inherits."""
    _, report = pipes["report"]
    try:
        if conditions.has_namespaces:
            os.setsid()
            linux.unshare(linux.CLONE_NEWNS)
            flags = linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC
            size = f"size={job['file_bytes']},nr_inodes={max(64, job['file_bytes'] >> 12)},mode=1777"
            linux.mount("tmpfs", work, "tmpfs", flags, size)
        else:
            os.setpgid(0, 0)
        for target, fd in enumerate((pipes["stdin"][0], pipes["stdout"][1], pipes["stderr"][1])):
            os.dup2(fd, target)
        _close_all_but(report)
        _become_nobody(conditions, work)
        os.chdir(work)
        _, source, *contents = blobs
        _write_files(job["files"], contents)
        _limit(job)
        _shut_in(conditions, work)
        os.environ |= {"HOME": work, "TMPDIR": work}
        if job["argv"] is not None:
            argv = job["argv"]
            os.execve(conditions.room.python if argv[0] == "python" else argv[0], argv, os.environ)
        os.close(report)
    except BaseException as error:
        os.write(report, f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    code = 1
    try:
        code = run_source(source, work)
    finally:
        os._exit(code)


def _close_all_but(kept: int) -> None:
    os.closerange(_FIRST_FD, kept)
    os.closerange(kept + 1, _END_FD)


def _become_nobody(conditions: Conditions, work: str) -> None:
    program_id = conditions.program_id
    if program_id is not None:
        os.chown(work, program_id, program_id)
        os.setresgid(program_id, program_id, program_id)
        os.setresuid(program_id, program_id, program_id)
    linux.drop_capabilities()
    linux.set_readable(True)  # by the driver's watch; the keeper, of whose memory ours is now a copy, is not
    if not conditions.has_namespaces:
        linux.set_death_signal(signal.SIGKILL)


def _write_files(names: Sequence[str], contents: Sequence[bytes]) -> None:
    assert len(names) == len(contents), f"{len(names)} names for {len(contents)} files"
    for name, content in zip(names, contents, strict=True):
        folder = os.path.dirname(name)
        if folder:
            os.makedirs(folder, exist_ok=True)
        with open(name, "wb") as file:
            file.write(content)


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


def _shut_in(conditions: Conditions, work: str) -> None:
    linux.forbid_new_privileges()
    if not conditions.has_namespaces and linux.landlock_version():
        linux.landlock(conditions.room.shown, walls.device_paths(), work)
    if calls.is_supported():
        linux.install_filter(conditions.filter or calls.build(is_alone=False, own_pid=os.getpid()))


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
        code = _exit_code(exit)
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


def _exit_code(exit: SystemExit) -> int:
    if exit.code is None:
        return 0
    if isinstance(exit.code, int):
        return exit.code & 0xFF
    print(exit.code, file=sys.stderr)  # noqa: T201  # as the interpreter does
    return 1


def remove_tree(folder: str) -> None:
    """Empty a folder whose owner may have nested it deeper than a path can name: every subfolder is first moved up."""
    os.chdir(folder)
    num_moved = 0
    while names := os.listdir("."):
        for name in names:
            if not os.path.isdir(name) or os.path.islink(name):
                os.unlink(name)
                continue
            os.chmod(name, 0o700)
            for inner in os.listdir(name):
                path = f"{name}/{inner}"
                if os.path.isdir(path) and not os.path.islink(path):
                    os.chmod(path, 0o700)  # a folder is moved only by who may write to it
                    while os.path.lexists(f".moved{num_moved}"):
                        num_moved += 1
                    os.rename(path, f".moved{num_moved}")
                else:
                    os.unlink(path)
            os.rmdir(name)
