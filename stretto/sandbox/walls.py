"""What a sandboxed program can see, and the outer namespaces that the keeper shuts itself into.

Two ways lead to the same room: bubblewrap's arguments, or `enter` with our own calls. In both, the room holds the
interpreter's files and the C library read-only, five device files, and an empty work folder; no /proc, no /etc, no
network. `enter` is called by the keeper, whose imports are limited to the standard library.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Any, Self

from stretto.sandbox import linux

WORK = "/box"
"""The program's folder, in its own mount namespace; also called /tmp, unless something else is shown there."""
KEEPER = "/keeper"
"""Where bubblewrap shows the keeper its own code. Programs can read it; it holds no secret."""
PROGRAM_ID = 1
"""User and group id of programs inside, where we may give them one of their own; the keeper is 0."""
_OLD = "/tmp/old"
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
_DEVICES = ("null", "zero", "full", "random", "urandom")


@dataclass(frozen=True, slots=True)
class Room:
    """Paths that a program sees, the same inside and outside."""

    python: str
    """The interpreter, without a virtual environment around it."""
    shown: tuple[str, ...]
    """Folders and files, read-only; none lies in another."""
    links: tuple[tuple[str, str], ...]
    """Symbolic links: where, and what to."""
    import_paths: tuple[str, ...]
    """Put on ``sys.path``; part of ``shown``, or in one of them."""

    @classmethod
    def of(cls, python: str, import_paths: Iterable[str] = ()) -> Self:
        """The room for the interpreter file ``python``, whose libraries lie beside its ``bin`` folder."""
        prefix = os.path.dirname(os.path.dirname(python))
        libraries = [path for path in _LIBRARIES if os.path.exists(path)]
        links = [(path, os.readlink(path)) for path in libraries if os.path.islink(path)] + [("/dev/shm", WORK)]
        wanted = [path for path in libraries if not os.path.islink(path)]
        wanted += [f"{prefix}/{name}" for name in ("lib", "lib64") if os.path.isdir(f"{prefix}/{name}")]
        paths = tuple(os.path.realpath(path) for path in import_paths)
        shown: list[str] = []
        for path in sorted({os.path.realpath(each) for each in [*wanted, python, *paths]}):
            if not any(path.startswith(each + "/") for each in shown):
                shown.append(path)
        if not any(path.startswith("/tmp/") for path in shown):
            links.append(("/tmp", WORK))
        return cls(python=python, shown=tuple(shown), links=tuple(links), import_paths=paths)

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_plain(cls, tree: dict[str, Any]) -> Self:
        links = tuple((path, target) for path, target in tree["links"])
        return cls(tree["python"], tuple(tree["shown"]), links, tuple(tree["import_paths"]))


def base_python() -> str:
    """This process's interpreter without its virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def device_paths() -> tuple[str, ...]:
    return tuple(f"/dev/{name}" for name in _DEVICES)


def bubblewrap_arguments(bwrap: str, room: Room, code: str) -> list[str]:
    """The command up to the program: all namespaces but the user's for root (the keeper makes one), all for others.

    Not ``--die-with-parent``: that follows the *thread* that started it. The keeper ends when its socket does.
    """
    arguments = [bwrap, "--unshare-net", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--hostname", "sandbox"]
    if os.geteuid() == 0:
        arguments += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]  # to write the keeper's maps
    else:
        arguments += ["--unshare-user"]
    arguments += ["--new-session", "--proc", "/proc", "--dir", WORK, "--dir", "/dev"]
    for path in device_paths():
        arguments += ["--dev-bind", path, path]
    for path in room.shown:
        for parent in reversed(PurePosixPath(path).parents[:-1]):
            arguments += ["--perms", "0755", "--dir", str(parent)]  # as a bind's parents, they would be root's alone
        arguments += ["--ro-bind", path, path]
    for path, target in room.links:
        arguments += ["--symlink", target, path]
    return [*arguments, "--ro-bind", code, f"{KEEPER}/stretto/sandbox", "--remount-ro", "/", "--chdir", "/", "--"]


def enter(room: Room, is_inside: bool, outer_id: int | None) -> bool:
    """Make the namespaces; returns in the keeper, which is the first process of the new pid namespace.

    The process that called stays outside, waits for the keeper and exits with it.

    Args:
        is_inside: bubblewrap has built the room already; a user, a pid and a mount namespace of our own are all we add.
        outer_id: user id outside for programs, which nothing else has; None: the caller may not choose one.

    Returns:
        Whether programs have that id.
    """
    flags = linux.CLONE_NEWUSER | linux.CLONE_NEWPID | linux.CLONE_NEWNS
    if not is_inside:
        flags |= linux.CLONE_NEWNET | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS
    own_uid = _enter_user_namespace(flags, outer_id)
    child = os.fork()
    if child:
        os.closerange(3, 256)  # the socket must be the keeper's alone
        os.waitpid(child, 0)
        os._exit(0)
    linux.set_death_signal(signal.SIGKILL)
    if is_inside:
        linux.mount("none", "/", "", linux.MS_REC | linux.MS_PRIVATE)
        linux.mount("none", "/proc", "tmpfs", linux.MS_RDONLY | linux.MS_NOSUID | linux.MS_NODEV)
    else:
        _build(room)
    return own_uid


def _enter_user_namespace(flags: int, outer_id: int | None) -> bool:
    """Unshare and become user 0 of the new namespace, with PROGRAM_ID beside it where ``outer_id`` may be mapped."""
    if outer_id is None:
        uid, gid = os.geteuid(), os.getegid()
        linux.unshare(flags)
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"0 {uid} 1\n")
        _write("/proc/self/gid_map", f"0 {gid} 1\n")
        return False
    # The maps of two ids must be written by one who stays outside.
    ready, told = os.pipe()
    parent = os.getpid()
    writer = os.fork()
    if writer == 0:
        try:
            os.close(told)
            os.read(ready, 1)
            for kind in ("uid", "gid"):
                _write(f"/proc/{parent}/{kind}_map", f"0 0 1\n{PROGRAM_ID} {outer_id} 1\n")
            os._exit(0)
        except OSError as error:
            os._exit(error.errno or 1)
    try:
        linux.unshare(flags)
    finally:
        os.close(told)
        os.close(ready)
        _, status = os.waitpid(writer, 0)
    if status:
        number = os.waitstatus_to_exitcode(status)
        raise OSError(number, f"user map: {os.strerror(number)}")
    os.setgroups([])
    return True


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())  # in one call: the kernel takes no second
    finally:
        os.close(fd)


def _build(room: Room) -> None:
    """A new root on a tmpfs, filled by read-only binds; the old root is gone afterwards."""
    linux.mount("none", "/", "", linux.MS_REC | linux.MS_PRIVATE)
    linux.mount("tmpfs", "/tmp", "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "size=1m,mode=755")
    os.mkdir(_OLD)
    linux.pivot_root("/tmp", _OLD)
    # From here the new root is /, and the old one /old, its own /tmp uncovered again.
    os.chdir("/")
    old = _OLD.removeprefix("/tmp")
    for path in room.shown:
        _bind(old, path, linux.MS_REC)
        linux.make_read_only(path, recursive=True)
    for path in device_paths():
        _bind(old, path, 0)
    for path, target in room.links:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.symlink(target, path)
    os.mkdir(WORK)
    linux.detach(old)
    os.rmdir(old)
    linux.make_read_only("/", recursive=False)


def _bind(old: str, path: str, flags: int) -> None:
    if os.path.isdir(old + path):
        os.makedirs(path, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
    linux.mount(old + path, path, "", linux.MS_BIND | flags)


def search_path(room: Room) -> Iterator[str]:
    """``sys.path`` of a program: its folder's place is taken by the keeper's child, which knows it."""
    for path in sys.path:
        if any(path == each or path.startswith(each + "/") for each in room.shown) and path not in room.import_paths:
            yield path
    yield from room.import_paths
