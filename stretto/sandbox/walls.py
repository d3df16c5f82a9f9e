"""Isolation of a sandboxed program: its file system (the room), its namespaces, and the filter of system calls.

The room is built by bubblewrap (`bubblewrap_arguments`) or by this file (`enter`). Both give the interpreter's files and the C library
read-only, five device files, and an empty work folder; no /proc, no /etc, no network. Driver and keeper import this file; the keeper has
only the standard library, so nothing else is imported here.

Numbers are from the kernel's user headers. System calls without a C wrapper have the same number on all supported architectures.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import signal
import struct
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Self

WORK = "/box"
"""Work folder of the program, in its own mount namespace; /tmp links to it unless the room has other files there."""
KEEPER = "/keeper"
"""Folder of the keeper's code under bubblewrap. Programs can read it; it has no secrets."""
PROGRAM_ID = 1
"""User and group id of programs inside the user namespace, if they have their own; the keeper's is 0."""
DEVICES = tuple(f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom"))
_OLD = "/tmp/old"
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
MS_RDONLY, _MNT_DETACH = 1, 2
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 1, 2, 4
_SYS_MOUNT_SETATTR, _AT_RECURSIVE = 442, 0x8000
_SYS_CLOSE_RANGE = 436
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_PRCTL = {"PDEATHSIG": 1, "DUMPABLE": 4, "SECCOMP": 22, "CHILD_SUBREAPER": 36, "NO_NEW_PRIVS": 38}
_PR_CAPBSET_DROP, _SECCOMP_MODE_FILTER, _CAPABILITY_VERSION_3 = 24, 2, 0x20080522
_SYS_LANDLOCK_CREATE, _SYS_LANDLOCK_ADD, _SYS_LANDLOCK_RESTRICT = 444, 445, 446
_LANDLOCK_READ_FILES = 0b101  # execute, read
_LANDLOCK_READ_FOLDERS = _LANDLOCK_READ_FILES | 0b1000
_LANDLOCK_DEVICE = 0b110  # read, write
_LANDLOCK_FS_BITS = {1: 13, 2: 14, 3: 15, 4: 15}
"""Number of access rights by ABI version; later versions have 16."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]
_libc.prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong]
_libc.syscall.restype = ctypes.c_long


@dataclass(frozen=True, slots=True)
class Room:
    """Paths that a program sees, the same inside and outside."""

    python: str
    """Interpreter, without a virtual environment."""
    shown: Sequence[str]
    """Read-only folders and files; none lies in another."""
    links: Sequence[tuple[str, str]]
    """Symbolic links: path and target."""

    @classmethod
    def of(cls, python: str, others: Sequence[str] = ()) -> Self:
        """The room of the interpreter ``python``, whose libraries lie beside its ``bin`` folder. ``others``: further visible paths."""
        prefix = os.path.dirname(os.path.dirname(python))
        libraries = [path for path in (*_LIBRARIES, *others) if os.path.exists(path)]
        links = [(path, os.readlink(path)) for path in libraries if os.path.islink(path)] + [("/dev/shm", WORK)]
        wanted = [path for path in libraries if not os.path.islink(path)]
        wanted += [f"{prefix}/{name}" for name in ("lib", "lib64") if os.path.isdir(f"{prefix}/{name}")]
        shown: list[str] = []
        for path in sorted({os.path.realpath(each) for each in [*wanted, python]}):
            if not any(path.startswith(each + "/") for each in shown):
                shown.append(path)
        if not any(path.startswith("/tmp/") for path in shown):
            links.append(("/tmp", WORK))
        return cls(python, shown, links)


def base_python() -> str:
    """This process's interpreter without its virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def bubblewrap_arguments(bwrap: str, room: Room, code: str) -> list[str]:
    """The command before the keeper's own. For root, bubblewrap makes all namespaces but the user namespace, which the keeper makes.

    ``--die-with-parent`` is not used: it follows the *thread* that started bubblewrap. The keeper ends with its socket.
    """
    arguments = [bwrap, "--unshare-net", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--hostname", "sandbox"]
    if os.geteuid() == 0:
        arguments += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]  # to write the keeper's user maps
    else:
        arguments += ["--unshare-user"]
    arguments += ["--new-session", "--proc", "/proc", "--dir", WORK, "--dir", "/dev"]
    for path in DEVICES:
        arguments += ["--dev-bind", path, path]
    for path in room.shown:
        for parent in reversed(PurePosixPath(path).parents[:-1]):
            arguments += [
                "--perms",
                "0755",
                "--dir",
                str(parent),
            ]  # implicit parents of a bind are readable by root only
        arguments += ["--ro-bind", path, path]
    for path, target in room.links:
        arguments += ["--symlink", target, path]
    return [*arguments, "--ro-bind", code, f"{KEEPER}/stretto/sandbox", "--remount-ro", "/", "--chdir", "/", "--"]


def enter(room: Room, is_inside: bool, outer_id: int | None) -> bool:
    """Create the namespaces; returns in the keeper, the first process of the new pid namespace.

    The calling process stays outside, waits for the keeper and exits with it.

    Args:
        is_inside: bubblewrap has built the room; only a user, a pid and a mount namespace are added.
        outer_id: unique user id of programs outside; None: the caller may not choose one.

    Returns:
        Whether programs have that id.
    """
    flags = CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS
    if not is_inside:
        flags |= CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
    _enter_user_namespace(flags, outer_id)
    child = os.fork()
    if child:
        close_from(3)  # only the keeper may hold the socket
        os.waitpid(child, 0)
        os._exit(0)
    prctl("PDEATHSIG", signal.SIGKILL)
    if is_inside:
        mount("none", "/", "", MS_REC | MS_PRIVATE)
        mount("none", "/proc", "tmpfs", MS_RDONLY | MS_NOSUID | MS_NODEV)
    else:
        _build(room)
    return outer_id is not None


def _enter_user_namespace(flags: int, outer_id: int | None) -> None:
    """Unshare, and become user 0 of the new namespace; with ``outer_id``, PROGRAM_ID is mapped to it."""
    if outer_id is None:
        uid, gid = os.geteuid(), os.getegid()
        unshare(flags)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1\n")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1\n")
        return
    # A map of two ids must be written from outside, in one call.
    ready, unshared = os.pipe()
    parent = os.getpid()
    writer = os.fork()
    if writer == 0:
        try:
            os.close(unshared)
            os.read(ready, 1)
            for kind in ("uid", "gid"):
                Path(f"/proc/{parent}/{kind}_map").write_text(f"0 0 1\n{PROGRAM_ID} {outer_id} 1\n")
            os._exit(0)
        except OSError as error:
            os._exit(error.errno or 1)
    try:
        unshare(flags)
    finally:
        os.close(unshared)
        os.close(ready)
        _, status = os.waitpid(writer, 0)
    if status:
        number = os.waitstatus_to_exitcode(status)
        raise OSError(number, f"user map: {os.strerror(number)}")
    os.setgroups([])


def _build(room: Room) -> None:
    """Move to a new root on a tmpfs with read-only binds, and unmount the old root."""
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    os.mkdir(_OLD)
    _checked("pivot_root", _libc.syscall(_SYS_PIVOT_ROOT[os.uname().machine], b"/tmp", _OLD.encode()))
    # Now the new root is /, and the old root is /old.
    os.chdir("/")
    old = _OLD.removeprefix("/tmp")
    for path in room.shown:
        _bind(old, path, MS_REC)
        _make_read_only(path, _AT_RECURSIVE)
    for path in DEVICES:
        _bind(old, path, 0)
    for path, target in room.links:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.symlink(target, path)
    os.mkdir(WORK)
    _checked(f"umount {old}", _libc.umount2(old.encode(), _MNT_DETACH))
    os.rmdir(old)
    _make_read_only("/", 0)


def _bind(old: str, path: str, flags: int) -> None:
    if os.path.isdir(old + path):
        os.makedirs(path, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
    mount(old + path, path, "", MS_BIND | flags)


def _make_read_only(target: str, flags: int) -> None:
    """Forbid writing, set-uid and device files below ``target``. Needs Linux 5.12."""
    data = struct.pack("=QQQQ", _ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NODEV, 0, 0, 0)
    result = _libc.syscall(_SYS_MOUNT_SETATTR, -100, target.encode(), flags, data, ctypes.c_size_t(len(data)))
    _checked(f"mount_setattr {target}", result)


def _checked(what: str, result: int) -> int:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return int(result)


def close_from(first: int) -> None:
    """Close all descriptors from ``first`` on, also above the limit on descriptors, which spares those opened earlier."""
    if _libc.syscall(_SYS_CLOSE_RANGE, first, ctypes.c_uint(-1), 0) == 0:
        return
    try:  # before Linux 5.9
        opened = [int(name) for name in os.listdir("/proc/self/fd")]
    except FileNotFoundError:  # in the room there is no /proc, and all descriptors are below the limit
        opened = list(range(first, resource.getrlimit(resource.RLIMIT_NOFILE)[0]))
    for fd in opened:
        if fd >= first:
            with contextlib.suppress(OSError):
                os.close(fd)


def unshare(flags: int) -> None:
    _checked("unshare", _libc.unshare(flags))


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    result = _libc.mount(source.encode(), target.encode(), kind.encode(), flags, data.encode())
    _checked(f"mount {target}", result)


def prctl(option: str, value: int, argument: int = 0) -> None:
    """Set an attribute of this process; ``option``: ``DUMPABLE`` for PR_SET_DUMPABLE, and so on."""
    _checked(f"PR_SET_{option}", _libc.prctl(_PRCTL[option], value, argument, 0, 0))


def drop_bounding_set() -> None:
    """Prevent later execve calls from gaining capabilities. Does nothing in a process without capabilities."""
    capability = 0
    while _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:
        capability += 1


def drop_capabilities() -> None:
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    _checked("capset", _libc.capset(header, bytes(24)))


def landlock_version() -> int:
    """ABI version of Landlock; 0: not available or disabled."""
    return max(0, int(_libc.syscall(_SYS_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)))


def landlock(readable: Iterable[str], writable: str) -> None:
    """Restrict this process and its children to the given paths and the devices, without TCP and without signals to other processes.

    TCP is restricted from ABI 4 on, signals from ABI 6 on. Needs NO_NEW_PRIVS.
    """
    version = landlock_version()
    all_files = (1 << _LANDLOCK_FS_BITS.get(version, 16)) - 1
    rules = struct.pack("=QQQ", all_files, 0b11, 0b11)[: 24 if version >= 6 else 16 if version >= 4 else 8]
    created = _libc.syscall(_SYS_LANDLOCK_CREATE, rules, ctypes.c_size_t(len(rules)), 0)
    ruleset = _checked("landlock_create_ruleset", created)

    def allow(path: str, rights: int) -> None:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", rights, fd)
        _checked(f"landlock_add_rule {path}", _libc.syscall(_SYS_LANDLOCK_ADD, ruleset, 1, rule, 0))
        os.close(fd)

    for path in readable:
        allow(path, _LANDLOCK_READ_FOLDERS if os.path.isdir(path) else _LANDLOCK_READ_FILES)
    for path in DEVICES:
        allow(path, _LANDLOCK_DEVICE)
    allow(writable, all_files & ~1)  # everything but execution
    _checked("landlock_restrict_self", _libc.syscall(_SYS_LANDLOCK_RESTRICT, ruleset, 0))
    os.close(ruleset)


# The filter of system calls: seccomp, a program in BPF. The namespaces isolate; the filter refuses calls that are known to circumvent them
# (new namespaces, mounts, tracing, keys, kernel interfaces with past vulnerabilities) or that hide memory from the limits (memfd, System V
# segments). A refused call fails with EPERM, and the program continues.

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Audit numbers (linux/audit.h) of the supported architectures."""

# fmt: off
REFUSED: dict[str, tuple[int | None, int | None]] = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "process_madvise": (440, 440), "pidfd_getfd": (438, 438), "kcmp": (312, 272), "mount": (165, 40),
    "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fspick": (433, 433), "mount_setattr": (442, 442), "unshare": (272, 97), "setns": (308, 268),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264), "acct": (163, 89), "quotactl": (179, 60), "quotactl_fd": (443, 443),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "clock_adjtime": (305, 266), "adjtimex": (159, 171),
    "iopl": (172, None), "ioperm": (173, None), "modify_ldt": (154, None), "syslog": (103, 116),
    "lookup_dcookie": (212, 18), "personality": (135, 92), "vhangup": (153, 58), "sethostname": (170, 161),
    "setdomainname": (171, 162), "mbind": (237, 235), "set_mempolicy": (238, 237), "migrate_pages": (256, 238),
    "move_pages": (279, 239), "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194),
    "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180), "fanotify_init": (300, 262),
    "setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setaffinity": (203, 122), "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119), "sched_setattr": (314, 274), "sync": (162, 81), "syncfs": (306, 267),
}
"""Number of each refused call on x86_64 and on aarch64; None: no such call."""
REFUSED_AMONG_OTHERS: dict[str, tuple[int | None, int | None]] = {
    "setsid": (112, 157), "setpgid": (109, 154), "tkill": (200, 130), "pidfd_send_signal": (424, 424),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
}
"""Calls that are refused without a pid namespace: they leave the process group or reach other processes."""
# fmt: on
_SIGNAL_OWNERS = (0x8901, 0x8902), (8, 10, 15)
"""Requests of ioctl and fcntl that set the receiver of a descriptor's signals, and the signal."""
_CLONE, _CLONE3, _SOCKET, _SOCKETPAIR, _IOCTL, _FCNTL = (56, 220), (435, 435), (41, 198), (53, 199), (16, 29), (72, 25)
_KILL, _TGKILL, _PRLIMIT = (62, 129), (234, 131), (302, 261)
_NEW_NAMESPACES = 0x7E020080  # user, pid, net, ipc, uts, cgroup, mount, time
_AF_UNIX = 1
_TERMINAL_INPUT = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX: insert input into a terminal
_X32_CALLS = 0x40000000

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data; an argument's low half comes first

Line = tuple[int, int, int, int]
"""An instruction: operation, jump if true, jump if false, operand."""
_REFUSE: Line = (_RETURN, 0, 0, _ERRNO | errno.EPERM)
_LET_PASS: Line = (_RETURN, 0, 0, _ALLOW)


def can_filter() -> bool:
    return os.uname().machine in ARCHITECTURES


def build_filter(is_alone: bool, own_pid: int) -> bytes:
    """The filter as a BPF program.

    Args:
        is_alone: whether the pid namespace contains only the program and its keeper; if not, the program may signal only itself and its
            process group.
        own_pid: process id of the process that installs the filter; ignored if ``is_alone``.
    """
    machine = os.uname().machine
    column = list(ARCHITECTURES).index(machine)
    lines: list[Line] = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32_CALLS),
        _REFUSE,
    ]

    def add(numbers: tuple[int | None, int | None], *body: Line) -> None:
        number = numbers[column]
        if number is not None:
            lines.extend([(_EQUAL, 0, len(body), number), *body])

    def add_test(numbers: tuple[int, int], argument: int, *values: int, other: Line = _REFUSE) -> None:
        """Allow the call if the argument is one of ``values``, else return ``other``; the reverse if ``other`` allows it."""
        tests = [(_EQUAL, len(values) - place, 0, value) for place, value in enumerate(values)]
        match = _LET_PASS if other is _REFUSE else _REFUSE
        add(numbers, (_LOAD, 0, 0, _ARGUMENTS + 8 * argument), *tests, other, match)

    for numbers in (REFUSED if is_alone else REFUSED | REFUSED_AMONG_OTHERS).values():
        add(numbers, _REFUSE)
    add(_CLONE3, (_RETURN, 0, 0, _ERRNO | errno.ENOSYS))  # its flags are in memory; the C library falls back to clone
    add(_CLONE, (_LOAD, 0, 0, _ARGUMENTS), (_ANY_BIT, 0, 1, _NEW_NAMESPACES), _REFUSE, _LET_PASS)
    ioctl_owners, fcntl_owners = ((), ()) if is_alone else _SIGNAL_OWNERS
    add_test(_IOCTL, 1, *_TERMINAL_INPUT, *ioctl_owners, other=_LET_PASS)
    add_test(_SOCKETPAIR, 0, _AF_UNIX)  # otherwise the kernel loads modules of other families before the call fails
    if is_alone:
        add_test(_SOCKET, 0, _AF_UNIX)
    else:
        add(_SOCKET, _REFUSE)
        add_test(_FCNTL, 1, *fcntl_owners, other=_LET_PASS)
        add_test(_KILL, 0, 0, own_pid)
        add_test(_TGKILL, 0, own_pid)
    add_test(_PRLIMIT, 0, 0)  # only of the process itself: the keeper may have the same user
    lines.append(_LET_PASS)
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


def install_filter(program: bytes) -> None:
    """Filter the system calls of this process from now on. Needs NO_NEW_PRIVS."""
    code = ctypes.create_string_buffer(program, len(program))
    argument = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, ctypes.addressof(code)))
    prctl("SECCOMP", _SECCOMP_MODE_FILTER, ctypes.addressof(argument))
